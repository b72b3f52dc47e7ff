"""The process of the warm agent: `python -m labkit.run`, which client.py starts.

Its imports take seconds. If the notebook ends in the meantime, it must end, too: it asks
for a signal at the end of its pipe. Nothing is written into the pipe before the agent is ready.
"""

import fcntl
import os
import select
import sys


def end_with_pipe():
    """On Linux, let the end of the pipe on stdin end this process by SIGIO."""
    if sys.platform == "linux":
        fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(0, fcntl.F_SETFL, os.O_ASYNC)
    if select.select([0], [], [], 0)[0]:
        sys.exit("the pipe was closed before the agent had started")


if __name__ == "__main__":
    end_with_pipe()
    from labkit.run.warm_agent import serve

    serve()
    os._exit(0)  # torch's own shutdown is slow
