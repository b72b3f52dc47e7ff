"""Instruments: time, interleaved timing, memory, FLOPs, traffic, gradient noise, faults.

A number is only worth printing with what it was measured on and how far it moves: `machine.card()`
is the first, `stats.summary` the second. What never moves (bytes, counts) is measured exactly, and
tests hold it.
"""
