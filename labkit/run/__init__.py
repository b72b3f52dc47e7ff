"""Start real ranks from a notebook cell.

launch.py              the entry point: target + parameters -> Run
job.py                 validates the target and its parameters, and writes them as JSON
warm_agent.py          the process that forks ranks through torchelastic
client.py              starts it, and sends it jobs
__main__.py            starts the agent, and ends with the notebook while torch is imported
node_agents.py         one torchrun agent per node
slurm_client.py        one job of a Slurm cluster: launch(..., on="slurm")
worker.py              one rank: join the group, run the target, report
context.py             what a target receives, and how it reports
launch_monitor.py      watches one launch until it ends
report.py              which rank failed first, where, and what the others were waiting for
console.py             rank-prefixed output lines and a progress bar
magic.py               %%torchrun
experiment.py          what to train, as a frozen dataclass
experiment_mesh.py     the model of an Experiment, and the mesh that shards it
experiment_runner.py   one experiment on one rank, with its measurements; memory estimates
compare.py             many experiments in one process group
sweep.py, summary.py   a grid of experiments, and the table of its results
training.py            the loop of labkit.train on one rank
torchrun_starter.py    starts its ranks, and restarts them after a failure
options.py, choices.py its command line, and the values that an Experiment allows
exercise.py            checks a reader's function on real ranks
auto_strategy.py       strategy="auto": of those that fit, the one predicted to be the fastest
"""

from labkit.run.launch import LaunchError, Run, launch

__all__ = ["LaunchError", "Run", "launch"]
