"""Instruments: time, interleaved timing, memory, FLOPs, traffic, gradient noise, faults.

A number needs the machine it was measured on and its spread: `machine.card()` gives the first,
`stats.summary` the second. Constant quantities (bytes, counts) are measured exactly, and tests
check them.
"""
