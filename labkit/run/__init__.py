"""From a notebook cell to real ranks.

launch.py      the one door: target + parameters -> Run
job.py         what to run, checked, as it travels to the ranks
agent.py       the warm process that forks ranks through torchelastic
nodes.py       nodes as network namespaces, on links as slow as you like
cluster.py     one torchrun a node
worker.py      what a rank does: join the group, run the target, report
context.py     what a rank gets to know, and how it reports
report.py      which rank failed first, where, and what the others were waiting for
console.py     whole, rank-prefixed lines and a progress bar
magic.py       %%torchrun
experiment.py  what to train, as a frozen dataclass
compare.py     many experiments in one process group
participant.py one experiment on one rank, and what is measured of its steps; or asked before
settle.py      strategy="auto": of what fits, the fastest by the planner, also on a mesh
forecast.py    how long the planner thinks that a step takes under each strategy
"""

from labkit.run.launch import LaunchError, Run, launch

__all__ = ["LaunchError", "Run", "launch"]
