"""Start the ranks of labkit.train on one node, restart them after a failure, and stop them.

    attempt 0   ranks 0, 1   step 1 ... 41   rank 1 died of SIGKILL
    attempt 1   ranks 0, 1   from the latest checkpoint ...   done

torchelastic forks the ranks from this process, which has imported torch but has not used any GPU.
They meet through a file in a folder of this user's: a store that listens on a port, as in torchrun
--standalone, would run whatever any user of the machine sends it.
"""

import logging
import os
import sys
import tempfile
import traceback
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch

from labkit.run import node_agents, training, warm_agent
from labkit.run.context import Log
from labkit.run.options import FAILED, STOPPED, WRONG


def start(experiment, options, arguments):
    """Train on options.nproc ranks; return the exit code.

    arguments: the command line of labkit.train.
    """
    training.check(experiment, options, options.nproc)
    Log(options.log_file)
    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        # the line printed below replaces their messages
        logging.getLogger(name).setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="labkit-train-") as folder:
        for number in range(options.max_restarts + 1):
            place = Path(folder, str(number))
            place.mkdir()
            code, why = attempt(arguments, options.nproc, place, number)
            if code != FAILED:
                for told in sorted(place.glob("store.error-*"))[:1]:
                    print(f"labkit.train: {told.read_text()}", file=sys.stderr, flush=True)
                return code
            left = options.max_restarts - number
            print(f"labkit.train: {why}; {left} restarts left", file=sys.stderr, flush=True)
    return FAILED


def attempt(arguments, nproc, folder, number):
    """Start the ranks once; return (exit code, a description of the failure)."""
    place = node_agents.Place(0, 1, "127.0.0.1", str(folder / "rendezvous"), "file")
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    os.environ[training.OUTCOME] = str(folder / "outcome")
    try:
        with warm_agent.gpus_hidden():
            config = warm_agent.elastic_config(place, nproc, "labkit-train", folder / "elastic")
        elastic_launch(config, rank_main)(arguments, f"file://{folder}/store", number)
    except ChildFailedError as error:
        codes = {failure.exitcode for failure in error.failures.values()}
        rank, first = error.get_first_failure()
        died = f"died of signal {-first.exitcode}" if first.exitcode < 0 else "failed"
        return (WRONG if WRONG in codes else FAILED), f"rank {rank} {died}"
    except SignalException as error:
        if not (folder / "outcome").exists():
            return 128 + error.sigval, ""
    return (STOPPED if (folder / "outcome").read_text() == "stopped" else 0), ""


def rank_main(arguments, meeting, number):
    """Train on a rank. Print the traceback of an error, which torchelastic would only log."""
    try:
        return training.main(arguments, meeting, number)
    except Exception:
        lines = traceback.format_exc().splitlines()
        rank = os.environ["RANK"]
        print(*(f"[rank {rank}] {line}" for line in lines), sep="\n", file=sys.stderr, flush=True)
        raise
