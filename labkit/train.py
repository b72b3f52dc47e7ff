"""Train from the command line, on one node or many, until it is done or told to stop.

    python -m labkit.train --nproc 2 --model gpt --strategy fsdp --steps 300 \\
        --checkpoint-dir runs/gpt --checkpoint-every 50 --log-file runs/gpt/log.jsonl

    step 1 ... 50 [save] 51 ... 100 [save] ... 123 SIGTERM [save] leaves with 85
    the same line again: step 124 ... 150 [save] ... 300 [save] weights_sha256, leaves with 0

On one node it checks what it is told and starts the ranks itself. On several nodes, or where a
cluster starts the ranks, torchrun does:

    torchrun --nnodes 2 --nproc-per-node 8 ... -m -- labkit.train --model gpt ...

Exit codes: 0 done; 85 stopped and saved, the same line goes on; 2 it was told what cannot be, and
no rank has trained; 1 a rank failed, after --max-restarts new attempts. Under torchrun ranks leave
with 0 also where they were stopped, for torchrun calls everything else a failure.

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
        from labkit.run import starter  # and torch, 3 s: whatever is wrong has been said before

        return starter.start(experiment, options, arguments)
    except (ValueError, TypeError, OSError) as error:
        print(f"labkit.train: {error}", file=sys.stderr)
        return WRONG


if __name__ == "__main__":
    sys.exit(main())
