"""Fast kernels: forked from a process that has already imported what every notebook imports.

    pytest or papermill          stand-in                         nursery (one for all)         kernel
    +----------------+  starts   +-----------------+  a socket    +-------------------+  fork   +--------+
    |    a notebook  | --------> | kernels.py cell | -----------> | torch, pandas ... | ------> | warm   |
    +----------------+  signals  +-----------------+  SIGINT, end | are imported      |         +--------+
                                                                  +-------------------+

Jupyter starts a kernel as a separate program. Here that program is a stand-in that imports nothing. It gives its
environment and its files to the nursery, forwards the stop button, and lives exactly as long as the fork. A kernel's
launching agent comes from the same nursery. Only `lab test` uses it; users' kernels are ordinary ones.
"""

import array
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time

NAME = "warm"
PLACE = "LABKIT_NURSERY"  # environment variable: the nursery's socket
STANDARD = (0, 1, 2)
POLL = 0.02  # seconds between checks for ended forks
START_LIMIT = 120.0  # seconds the nursery may take to import


@contextlib.contextmanager
def nursery():
    """Provide a Jupyter kernel called "warm" inside; a nested call uses the outer nursery."""
    if PLACE in os.environ:
        yield NAME
        return
    with tempfile.TemporaryDirectory(prefix="labkit-nursery-") as folder:
        spec = os.path.join(folder, "kernels", NAME)
        os.makedirs(spec)
        kernel = {"argv": stand_in("kernel", "{connection_file}"), "display_name": "warm", "language": "python"}
        with open(os.path.join(spec, "kernel.json"), "w") as file:
            json.dump(kernel, file)
        place = os.path.join(folder, "socket")
        kept = {name: os.environ.get(name) for name in (PLACE, "JUPYTER_PATH")}
        os.environ[PLACE] = place
        os.environ["JUPYTER_PATH"] = os.pathsep.join(filter(None, [folder, kept["JUPYTER_PATH"]]))
        server = subprocess.Popen([sys.executable, __file__, "serve", place], stdin=subprocess.PIPE)
        try:
            wait_for(place, server)
            yield NAME
        finally:
            server.stdin.close()  # ends it and all its forks
            server.wait()
            for name, value in kept.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})


def wait_for(place, server):
    deadline = time.monotonic() + START_LIMIT
    while not os.path.exists(place):
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the kernel nursery did not start (exit code {server.poll()})")
        time.sleep(POLL)


def stand_in(*what):
    """Return the command of a stand-in for a fork. -S -E: it imports nothing."""
    return [sys.executable, "-S", "-E", os.path.abspath(__file__), *what]


# The stand-in


def stand_for(*what):
    """Request a fork that runs `what` with this process's environment and files; return its exit code."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ[PLACE])
    request = json.dumps({"what": what, "cwd": os.getcwd(), "env": dict(os.environ)}).encode() + b"\n"
    connection.sendmsg([request[:1]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", STANDARD))])
    connection.sendall(request[1:])
    signal.signal(signal.SIGINT, lambda *_: connection.send(b"i"))
    for number in STANDARD:
        os.close(number)  # the fork has them, and a pipe must end with the fork
    status = connection.recv(1)
    return status[0] if status else 1


# The nursery


def serve(place):
    """Import everything, then fork on request until standard input ends."""
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"
    import_all()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(place)
    listener.listen()
    events = selectors.DefaultSelector()
    forks = {}
    events.register(listener, selectors.EVENT_READ)
    events.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for key, _ in events.select(timeout=POLL if forks else None):
            if key.fileobj is sys.stdin:
                return
            if key.fileobj is listener:
                connection, _ = listener.accept()
                forks[start(connection, [listener, *forks.values()])] = connection
                events.register(connection, selectors.EVENT_READ)
            elif (pid := pid_of(key.fileobj, forks)) is not None:
                # A byte is the stop button. None means that the stand-in was killed, so the fork is killed, too.
                os.kill(pid, signal.SIGINT if key.fileobj.recv(1) else signal.SIGKILL)
        for pid, status in ended(forks):
            connection = forks.pop(pid)
            events.unregister(connection)
            with contextlib.suppress(OSError):  # the stand-in may be gone
                connection.send(bytes([os.waitstatus_to_exitcode(status) & 255]))
            connection.close()


def pid_of(connection, forks):
    return next((pid for pid, theirs in forks.items() if theirs is connection), None)


def ended(forks):
    statuses = [(pid, os.waitpid(pid, os.WNOHANG)) for pid in forks]
    return [(pid, status) for pid, (found, status) in statuses if found]


def import_all():
    """Import what notebooks, kernels and agents import. A fork must find no thread and no CUDA."""
    import gc
    import importlib
    import pkgutil

    for name in ("ipykernel.kernelapp", "ipykernel.ipkernel", "ipywidgets", "matplotlib.pyplot", "pandas", "psutil"):
        importlib.import_module(name)
    for name in ("matplotlib_inline.backend_inline", "torch._dynamo", "labkit.run.warm_agent"):
        importlib.import_module(name)
    import labkit

    for module in pkgutil.walk_packages(labkit.__path__, "labkit."):
        importlib.import_module(module.name)
    gc.collect()
    gc.freeze()  # so that the garbage collectors of forks keep these pages shared


def start(connection, others):
    """Fork; the child runs what the stand-in requested. Returns the child's pid."""
    message, rights, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(len(STANDARD) * array.array("i").itemsize))
    files = array.array("i", rights[0][2])
    with connection.makefile("rb") as rest:
        request = json.loads(message + rest.readline())
    pid = os.fork()
    if pid:
        for file in files:
            os.close(file)
        return pid
    for held in (connection, *others):
        held.close()
    status = 1
    try:
        become(request, files)
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def become(request, files):
    from labkit.run import client, warm_agent, worker

    os.setsid()
    worker.die_with_parent()
    for number, file in zip(STANDARD, files, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(request["env"])
    tempfile.tempdir = None  # this environment may set another folder than the nursery's
    os.chdir(request["cwd"])
    kind, *arguments = request["what"]
    if kind == "agent":
        warm_agent.serve()
        return
    client.COMMAND = stand_in("agent")
    from ipykernel.kernelapp import IPKernelApp

    # 1: it has a parent, so it prints nothing, but need not watch it: the nursery does.
    options = ["--IPKernelApp.parent_handle=1", "--HistoryManager.enabled=False"]
    IPKernelApp.launch_instance(["-f", *arguments, *options])


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(stand_for(*sys.argv[1:]))
