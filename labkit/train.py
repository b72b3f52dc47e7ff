"""Train from the command line, on one node or many, until done or stopped.

    python -m labkit.train --nproc 2 --model gpt --strategy fsdp --steps 300 \\
        --checkpoint-dir runs/gpt --checkpoint-every 50 --log-file runs/gpt/log.jsonl

    step 1 ... 50 [save] 51 ... 100 [save] ... 123 SIGTERM [save] exits with 85
    the same command again: step 124 ... 150 [save] ... 300 [save] weights_sha256, exits with 0

On one node it validates its arguments and starts the ranks itself. On several nodes, or where a
cluster starts the ranks, use torchrun:

    torchrun --nnodes 2 --nproc-per-node 8 ... -m -- labkit.train --model gpt ...

Exit codes: 0 done; 85 stopped and saved, the same command resumes; 2 invalid arguments, before any
rank has trained; 1 a rank failed, after --max-restarts attempts. torchrun has no such codes:
stopped ranks exit with 0, and torchrun itself with 1. Ranks that another node has stopped exit with
85, so torchrun --max-restarts starts them again, without that node if --nnodes allows it. With
torchrun, the environment variable LABKIT_OUTCOME names a file, where the first rank of each node
writes "done" or "stopped". The files of labkit.cluster use it.

The loop is in labkit/run/training.py.
"""

import os
import sys

from labkit.run.options import WRONG, check_ranks, read


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    if "RANK" in os.environ:
        from labkit.run import training

        return training.main(arguments)
    try:
        experiment, options = read(arguments)
        check_ranks(experiment, options, options.nproc)
        from labkit.run import (
            torchrun_starter,  # imports torch, 3 s: invalid arguments are reported before
        )

        return torchrun_starter.start(experiment, options, arguments)
    except (ValueError, TypeError, OSError) as error:
        print(f"labkit.train: {error}", file=sys.stderr)
        return WRONG


if __name__ == "__main__":
    sys.exit(main())
