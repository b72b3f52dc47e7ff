"""`lab equal [STRATEGY...]`: train one model under six launchers, and compare the SHA-256 of its weights.

    ./scripts/lab equal                  with DDP and with FSDP
    ./scripts/lab equal zero1 diloco     with other strategies

Each run trains the same model on two CPU ranks, with the same arguments of labkit.train. A launcher that this machine
lacks is named with the reason. Logs, scripts and pods stay in runs/TIME-equal. Exit code 1 if any weights differ.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pods
from batch import ROOT, new_folder
from terminal import Line, main, say, table

from labkit.cluster import kubernetes, network_namespaces, slurm, slurm_namespaces
from labkit.cluster.network_namespaces import Refused
from labkit.run import launch
from labkit.run.choices import CHOICES
from labkit.run.experiment import Experiment

MODEL = Experiment(model="gpt", optimizer="adamw", lr=0.003, batch_size=12, steps=12)
USUAL = ("ddp_bucketed", "fsdp")
STRATEGIES = [strategy for strategy in CHOICES["strategy"] if strategy not in ("single", "auto")]
TARGET = "labkit.run.training:launched"  # labkit.train, on warm ranks
MEETING = ["--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--rdzv-endpoint"]
FAILED = "failed"


# The launchers: each trains an experiment, which writes folder/log.jsonl


def warm(experiment, folder, nproc=2, nodes=1):
    words = [*experiment.arguments(), *log_in(folder)]
    launch(TARGET, nproc=nproc, nodes=nodes, device="cpu", quiet=True, arguments=words)


def command(experiment, folder):
    python("labkit.train", "--nproc", "2", *experiment.arguments(), *log_in(folder))


def torchrun(experiment, folder):
    start = [*MEETING, str(folder / "meeting"), "--nproc-per-node", "2", "-m", "--", "labkit.train"]
    python("torch.distributed.run", *start, *experiment.arguments(), *log_in(folder))


def two_nodes(experiment, folder):
    """On two nodes of this machine, each with a torchrun and a network of its own."""
    if reason := network_namespaces.refusal(network_namespaces.Link()):
        raise Refused(reason)
    warm(experiment, folder, nproc=1, nodes=2)


def sbatch(experiment, folder):
    """The file of `lab config --to slurm`, on a Slurm of this machine."""
    checkpoints = str(folder / "checkpoints")
    text = slurm.script(experiment, nodes=2, checkpoints=checkpoints, options=log_in(folder))
    (folder / "job.sbatch").write_text(text)
    with slurm_namespaces.cluster(nodes=2) as cluster:
        cluster.run(["sbatch", "--wait", "job.sbatch"], cwd=folder, timeout=300)


def statefulset(experiment, folder):
    """The objects of `lab config --to statefulset`; podman runs their pods."""
    if reason := pods.missing():
        raise Refused(reason)
    size = {"nodes": 2, "gpus": 1, "cpus": 1, "memory": "2Gi", "shm": "64Mi"}
    pods.run(kubernetes.statefulset(experiment, name="gpt", **size), folder)
    (folder / "checkpoints" / "gpt" / "log.jsonl").rename(folder / "log.jsonl")


LAUNCHERS = {
    "launch, 2 warm ranks": warm,
    "labkit.train --nproc 2": command,
    "torchrun --nproc-per-node 2": torchrun,
    "torchrun on 2 nodes of 1": two_nodes,
    "sbatch, 2 nodes of 1": sbatch,
    "StatefulSet, 2 pods of 1": statefulset,
}


def log_in(folder):
    return ["--log-file", str(folder / "log.jsonl")]


def python(*words):
    subprocess.run([sys.executable, "-m", *words], check=True, capture_output=True, text=True)


# The comparison


def weights(start, experiment, folder):
    """Train, and return the SHA-256 of the weights. FAILED: folder/error.txt says why. Raises Refused."""
    folder.mkdir(parents=True)
    try:
        start(experiment, folder)
    except Refused:
        raise
    except (subprocess.SubprocessError, RuntimeError) as error:
        (folder / "error.txt").write_text(f"{error}\n{getattr(error, 'stderr', '')}")
        return FAILED
    return json.loads((folder / "log.jsonl").read_text().splitlines()[-1])["weights_sha256"]


def train_all(strategies, folder):
    """Return ({launcher: SHA-256 of each strategy}, {launcher: why it did not run})."""
    found, missing = {}, {}
    line = Line("equal")
    for words, start in LAUNCHERS.items():
        digests = []
        try:
            for strategy in strategies:
                line.show(f"{words}, {strategy}")
                place = folder / start.__name__ / strategy
                digests.append(weights(start, MODEL.replace(strategy=strategy), place))
            found[words] = digests
        except Refused as reason:
            missing[words] = reason
    line.clear()
    return found, missing


def surroundings():
    """Return the variables that give all launchers the same Python and labkit, the CPU, and one thread a rank."""
    paths = {"PATH": Path(sys.executable).parent, "PYTHONPATH": ROOT}
    first = {name: os.pathsep.join(filter(None, [str(path), os.environ.get(name)])) for name, path in paths.items()}
    return first | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def verdict(found, strategies):
    """Print what is equal and what is not; return the exit code."""
    every = [digest for digests in found.values() for digest in digests]
    say(f"{len(every)} runs, {len({*every} - {FAILED})} SHA-256")
    columns = zip(*found.values(), strict=True)
    wrong = [strategy for strategy, column in zip(strategies, columns, strict=True) if len(set(column)) > 1]
    if FAILED in every:
        say(f"FAILED: {every.count(FAILED)} runs, each with an error.txt among its logs")
    elif wrong:
        say(f"DIFFERENT: {', '.join(wrong)}")
    else:
        say(f"each strategy ends with the same weights under all {len(found)} launchers")
    return 1 if FAILED in every or wrong else 0


def equal(words):
    parser = argparse.ArgumentParser(
        prog="lab equal", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = f"of {', '.join(STRATEGIES)} ({' '.join(USUAL)})"
    parser.add_argument("strategies", nargs="*", metavar="STRATEGY", help=known)
    strategies = list(dict.fromkeys(parser.parse_args(words).strategies or USUAL))
    unknown = [strategy for strategy in strategies if strategy not in STRATEGIES]
    if unknown:
        parser.error(f"unknown strategy {unknown[0]!r}; choose from {', '.join(STRATEGIES)}")
    folder = new_folder("equal")
    say(f"logs: {folder.relative_to(ROOT)}")
    os.environ |= surroundings()
    found, missing = train_all(strategies, folder)
    rows = [(words, *(digest[:16] for digest in digests)) for words, digests in found.items()]
    say(f"\n{table(rows, header=('SHA-256 of the weights', *strategies))}\n")
    for words, reason in missing.items():
        say(f"NOT RUN: {words}: {reason}")
    return verdict(found, strategies)


if __name__ == "__main__":
    sys.exit(main(equal, sys.argv[1:]))
