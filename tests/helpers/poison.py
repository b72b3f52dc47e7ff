"""Slow, poisoned communication: whoever reads a result before it was waited for reads NaN, always.

    call                                                       wait() and the future are done
    | output: NaN | true operation, on copies | some ms of delay | output: the result |
    |------------- input and output must stay as the call has left them -------------|

On a quiet machine gloo is so fast that a missing wait need not show. Here it does: the output is
NaN at once (integers: their largest), and a thread writes the result late, after another delay on
each rank and for each call. On CUDA the thread only enqueues, on a stream of its own that sleeps.

At the end an AssertionError names the operations that nobody waited for, and those whose tensors
were written to, or whose memory was freed, while they were under way. What torch does in C++, such
as its own DDP, is as fast as ever.
"""

import functools
import random
import sys
import threading
from contextlib import ExitStack, contextmanager, nullcontext
from time import sleep
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp, distributed_c10d

from labkit import comm

DELAYS = 0.001, 0.004  # seconds, from and to
CYCLES_A_SECOND = 1.5e9  # about, of a GPU
BETWEEN = (
    "/poison.py",
    "/labkit/comm.py",
    "/labkit/comm_log.py",
    "/labkit/gloo_workarounds.py",
    "/torch/",
)  # callers are above
_thread = threading.local()  # .in_true: a true operation has been called, and may call others


class Late:
    """The Work of one operation. launch(*copies of reads and writes): the true one, to its Works.

    reads, writes: tensors. unchanged: of reads, what lies within writes and stays readable.
    """

    def __init__(self, op, delay, reads, writes, launch, unchanged=()):
        self.name, self.delay, self.writes = f"{op} of {_caller()}", delay, writes
        self.tensors = [t.detach() for t in (*reads, *writes)]
        self.copies = [t.clone() for t in self.tensors]  # held: freed, a GPU would use them again at once
        self.results = self.copies[len(reads) :]
        for t in writes:
            _poison(t)
        for t in unchanged:
            t.data.copy_(self.copies[0])
        self.before = [t.clone() for t in self.tensors]
        self.changed, self.freed, self.waited = [], False, False
        device = self.tensors[0].device
        self.future = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(device))
        _thread.in_true = True
        try:
            with self._beside():
                works = launch(*self.copies)
        finally:
            _thread.in_true = False
        works = works if isinstance(works, list) else [works]
        self.thread = threading.Thread(target=self._arrive, args=(works,), daemon=True)
        self.thread.start()

    def _beside(self):
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _arrive(self, works):
        try:
            with self._beside():
                for work in works:
                    work.wait()
                if self.stream is None:
                    sleep(self.delay)
                else:
                    torch.cuda._sleep(int(self.delay * CYCLES_A_SECOND))
                self._write()
                self.future.set_result(list(self.writes))
        except BaseException as error:
            self.future.set_exception(error)

    @torch.inference_mode()  # some of the tensors may have been made in it
    def _write(self):
        self.freed = any(t.untyped_storage().nbytes() < t.nbytes for t in self.tensors)
        if self.freed:
            return
        pairs = zip(self.tensors, self.before, strict=True)
        self.changed = [(_bytes(t) != _bytes(before)).any() for t, before in pairs]
        for t, result in zip(self.writes, self.results, strict=True):
            t.data.copy_(result)

    def wait(self, timeout=None):
        self.waited = True
        self.future.wait()
        return True

    def is_completed(self):
        return self.future.done()

    def get_future(self):
        self.waited = True
        return self.future

    def problems(self):
        if not self.waited:
            yield f"nobody waited for the {self.name}"
        if self.freed:
            yield f"memory of the {self.name} was freed while it was under way"
        if any(map(bool, self.changed)):
            yield f"a tensor of the {self.name} was written to while it was under way"


def _caller():
    frame = sys._getframe(1)
    while any(part in frame.f_code.co_filename for part in BETWEEN):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def _bytes(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)  # as numbers NaN is not NaN


def _poison(tensor):
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.data.fill_(torch.nan)
    else:
        tensor.data.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)


class Poison:
    """Stands in for functions of torch.distributed, under their names and with their arguments."""

    def __init__(self, rank):
        self.delays, self.works, self.true = random.Random(rank), [], {}

    def stand_in(self, stack, name, *places):
        """places: (module, attribute). Until the stack unwinds, the method of this name is there."""
        true, late = getattr(*places[0]), getattr(self, name)
        self.true[name] = true

        @functools.wraps(true)
        def stands_in(*args, **kwargs):
            return (true if getattr(_thread, "in_true", False) else late)(*args, **kwargs)

        for module, attribute in places:
            stack.enter_context(mock.patch.object(module, attribute, stands_in))

    def start(self, op, group, async_op, reads, writes, launch, unchanged=()):
        if dist.get_rank(group) < 0:  # torch warns and does nothing
            return launch(*reads, *writes)
        work = Late(op, self.delays.uniform(*DELAYS), reads, writes, launch, unchanged)
        self.works.append(work)
        return work if async_op else work.wait() and None

    def all_reduce(self, tensor, op=ReduceOp.SUM, group=None, async_op=False):
        def launch(t):
            return self.true["all_reduce"](t, op, group, True)

        return self.start("all_reduce", group, async_op, [], [tensor], launch)

    def broadcast(self, tensor, src=None, group=None, async_op=False, group_src=None):
        def launch(t):
            return self.true["broadcast"](t, src, group, True, group_src)

        root = src == dist.get_rank() if group_src is None else group_src == dist.get_rank(group)
        reads, writes = ([tensor], []) if root else ([], [tensor])
        return self.start("broadcast", group, async_op, reads, writes, launch)

    def all_gather(self, output, input, group=None, async_op=False):
        def launch(i, o):
            return self.true["all_gather"](o, i, group, True)

        in_place = input.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
        unchanged = [input] if in_place else []
        return self.start("all_gather", group, async_op, [input], [output], launch, unchanged)

    def reduce_scatter(self, output, input, op=ReduceOp.SUM, group=None, async_op=False):
        def launch(i, o):
            return self.true["reduce_scatter"](o, i, op, group, True)

        return self.start("reduce_scatter", group, async_op, [input], [output], launch)

    def all_to_all_single(self, output, input, output_splits=None, input_splits=None, group=None, async_op=False):
        def launch(i, o):
            return self.true["all_to_all_single"](o, i, output_splits, input_splits, group, True)

        return self.start("all_to_all", group, async_op, [input], [output], launch)

    def isend(self, tensor, dst=None, group=None, tag=0, group_dst=None, async_op=True):
        def launch(t):
            return self.true["isend"](t, dst, group, tag, group_dst)

        return self.start("send", group, async_op, [tensor], [], launch)

    def irecv(self, tensor, src=None, group=None, tag=0, group_src=None, async_op=True):
        def launch(t):
            return self.true["irecv"](t, src, group, tag, group_src)

        return self.start("recv", group, async_op, [], [tensor], launch)

    def send(self, *args, **kwargs):
        return self.isend(*args, **kwargs, async_op=False)

    def recv(self, *args, **kwargs):
        return self.irecv(*args, **kwargs, async_op=False)

    def batch_isend_irecv(self, ops):
        if ops[0].tensor.device.type != "cuda":
            return self.true["batch_isend_irecv"](ops)  # calls isend and irecv, and so us
        sends, receives = ([o for o in ops if o.op.__name__ == name] for name in ("isend", "irecv"))
        ops, reads, writes = sends + receives, [o.tensor for o in sends], [o.tensor for o in receives]

        def launch(*copies):
            pairs = zip(ops, copies, strict=True)
            twins = [dist.P2POp(o.op, t, group=o.group, tag=o.tag, group_peer=o.group_peer) for o, t in pairs]
            return self.true["batch_isend_irecv"](twins)

        return [self.start("batch_isend_irecv", ops[0].group, True, reads, writes, launch)]

    def problems(self):
        return "; ".join(problem for work in self.works for problem in work.problems())


@contextmanager
def poisoned(rank):
    """Around the whole of what ranks do together. rank: chooses the delays."""
    poison = Poison(rank)
    with ExitStack() as stack:
        for name in (
            "all_reduce",
            "broadcast",
            "all_to_all_single",
            "send",
            "recv",
            "batch_isend_irecv",
        ):
            poison.stand_in(stack, name, (dist, name))
        for name in ("isend", "irecv"):  # a P2POp asks whether its function is this one
            poison.stand_in(stack, name, (dist, name), (distributed_c10d, name))
        for name in ("reduce_scatter", "all_gather"):
            poison.stand_in(stack, name, (comm, f"_{name}"))
        try:
            yield
        except BaseException as error:
            if told := poison.problems():
                raise AssertionError(told) from error
            raise
        for work in poison.works:
            work.thread.join()
        if told := poison.problems():
            raise AssertionError(told)


def under_poison(body, rank, world_size, **arguments):
    """For ranks of pool.py: partial(under_poison, body) in place of body."""
    with poisoned(rank):
        return body(rank, world_size, **arguments)
