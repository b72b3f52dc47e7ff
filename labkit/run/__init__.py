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
experiment_runner.py   one experiment on one rank: measured step by step, or predicted
auto_strategy.py       strategy="auto": of what fits, the one predicted to be fastest
"""

from labkit.run.launch import LaunchError, Run, launch

__all__ = ["LaunchError", "Run", "launch"]
