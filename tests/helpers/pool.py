"""Warm ranks for the tests: processes that stay up, so that a two-rank test costs milliseconds.

A pool of n processes holds one gloo process group of n ranks on loopback. `pool.run(body, **arguments)` calls the
module-level function `body(rank, world_size, **arguments)` on every rank and returns the results by rank. A failure
ends the pool (its group may be in any state); the next test gets a new one, forked from a server with torch loaded.

Between two bodies the ranks are stopped: in each of them a thread of gloo's would wake up 100 times a second. The guard
lets them continue when the test process is gone, so that they see the end of the pipe.
"""

import contextlib
import datetime
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from multiprocessing.connection import wait

TIMEOUT = 150.0  # seconds a body may take, also on a machine with fifty others at work
# Imported once for all ranks. torch.optim puts torch._dynamo off, which takes two seconds.
PRELOAD = ["torch._dynamo", "torch.distributed.optim", "torch.distributed.pipelining", "labkit.trainer", "pytest"]
GRACE = 1.0  # seconds the other ranks get to report once one has failed
# Its arguments are the ranks; standard input ends with the test process, however that ends.
GUARD = """
import os, signal, sys
sys.stdin.read()
for pid in sys.argv[1:]:
    try:
        os.kill(int(pid), signal.SIGCONT)
    except ProcessLookupError:
        pass
"""


def server():
    """multiprocessing's context whose processes are forked from one that has loaded torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


def forked(body, *arguments):
    """A process that has begun body(*arguments), a function of a module: forked from the server with torch loaded."""
    process = server().Process(target=body, args=arguments)
    process.start()
    return process


def serve(connection, rank, world_size, store_path, paths):
    """Join the group, then run one body after the other until the test session closes the pipe."""
    sys.path[:0] = [path for path in paths if path not in sys.path]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(store_path, world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=TIMEOUT / 2)
    )
    gc.freeze()  # what is imported stays: a collection after a test is to look at that test's objects only
    while True:
        try:
            body, arguments = connection.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            reply = (True, body(rank, world_size, **arguments))
        except BaseException:
            reply = (False, traceback.format_exc())
        connection.send_bytes(pickle.dumps(reply))  # send() would open a connection for each tensor
        del reply
        leave_groups()


def leave_groups():
    """End the groups that a body has made: each is three threads, of which one wakes up 100 times a second."""
    import torch.distributed as dist

    made = [group for group in list(dist.distributed_c10d._world.pg_map) if group is not dist.group.WORLD]
    if not made:
        return
    gc.collect()  # PyTorch's DDP that ends after its group can wait forever (PyTorch issue 56297)
    for group in made:
        dist.destroy_process_group(group)
    gc.collect()
    gc.freeze()  # and so does what this test has imported


class Pool:
    def __init__(self, world_size, paths):
        context = server()
        self.folder = tempfile.TemporaryDirectory(prefix="labkit-pool-")
        store_path = os.path.join(self.folder.name, "store")
        self.connections, self.processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, world_size, store_path, paths)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
        guard = [sys.executable, "-S", "-E", "-c", GUARD, *(str(process.pid) for process in self.processes)]
        self.guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)

    def run(self, body, /, **arguments):
        self.send(signal.SIGCONT)
        for connection in self.connections:
            connection.send((body, arguments))
        replies, failed = {}, []
        deadline = time.monotonic() + TIMEOUT
        while len(replies) < len(self.connections):
            waiting = [c for rank, c in enumerate(self.connections) if rank not in replies]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = self.connections.index(connection)
                try:
                    replies[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):
                    replies[rank] = (False, f"rank {rank} died without an exception")
                if not replies[rank][0]:
                    failed.append(rank)
                    deadline = min(deadline, time.monotonic() + GRACE)
        if failed or len(replies) < len(self.connections):
            self.close()
            missing = sorted(set(range(len(self.connections))) - set(replies))
            told = "\n".join(f"--- rank {rank}\n{replies[rank][1]}" for rank in failed)
            raise AssertionError(f"ranks failed, in this order: {failed}; no answer from {missing}\n{told}")
        self.send(signal.SIGSTOP)
        return [replies[rank][1] for rank in range(len(self.connections))]

    def send(self, number):
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    @property
    def alive(self):
        return all(process.is_alive() for process in self.processes)

    def close(self):
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.guard.kill()  # not waited for: a child of a test may hold the other end of its standard input
        self.guard.stdin.close()
        self.guard.wait()
        for connection in self.connections:
            connection.close()
        self.folder.cleanup()
