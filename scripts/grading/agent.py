"""Runs in the sandbox: labkit's warm agent, with a module imported first.

    python -m grading.agent torch._dynamo

torch imports torch._dynamo when a process makes its first optimizer. In the agent, all ranks share that import.
"""

import importlib
import os
import sys

from labkit.run.__main__ import end_with_pipe

if __name__ == "__main__":
    end_with_pipe()
    from labkit.run.warm_agent import serve

    importlib.import_module(sys.argv[1])
    serve()
    os._exit(0)  # torch's own shutdown is slow
