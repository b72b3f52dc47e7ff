"""Error feedback: what was not sent is remembered, and added to what there is to send next time.

    corrected = gradient + residual              what should be sent
    message   = compress(corrected)              what is sent: few bytes
    residual  = corrected - what it carries      what waits
    result    = mean over the ranks of what their messages carry

sent + residual == gradient + previous residual: nothing is dropped, it is only late. The sum of all
that was ever sent differs from the sum of all gradients by one residual (and, where messages of 16
bits are added up, by the rounding of those sums, which nobody keeps). Without it the same small
gradients would be dropped in each step, and some compressors then never converge. With single
elements and with signs, momentum in the optimizer multiplies what comes late and all at once: use
little of it, or see dgc.py. PowerSGD's paper trains with momentum.

Karimireddy and Stich add up lr x gradient, we gradients: the same while lr is constant. When it
changes, what waits is applied here with the new lr, there with the one of its own step, which is
scale_residuals(old lr / new lr) (Zheng et al., Communication-Efficient Distributed Blockwise
Momentum SGD with Error-Feedback, NeurIPS 2019, algorithm 1).

Held: one residual, as large as the gradients; gradient + residual is formed in its place, and the
average in the bucket's. One message per bucket, in the order of the buckets, so ranks cannot meet
in different collectives.
Seide et al., 1-Bit Stochastic Gradient Descent and its Application to Data-Parallel Distributed
Training of Speech DNNs, Interspeech 2014; Karimireddy et al., Error Feedback Fixes SignSGD and
other Gradient Compression Schemes, ICML 2019, algorithm 2; Stich et al., Sparsified SGD with
Memory, NeurIPS 2018, algorithm 1.
"""

import threading
import warnings
from contextlib import contextmanager
from functools import partial
from time import perf_counter

import torch
import torch.distributed as dist

from labkit import comm
from labkit.compression.residual import Residuals, wide
from labkit.replicas import check_agreement

ADDING = threading.Lock()  # not a compressor's own: that could not be pickled


class Compressor:
    """Base of compressors that send one collective. `hook`: a comm hook of DDP, ours or PyTorch's.

        model.register_comm_hook(None, TopK(0.01).hook)          in place of None: a process group

    One compressor serves one model. `seconds`: spent on compressing and decompressing so far, by
    the host's clock.
    A gradient with an inf or NaN is reported by a warning and puts NaN into the averages of all
    ranks, so that a loss scaler sees it; this rank's residual stays as it was before. What other
    ranks or buckets have sent in that step is lost, as all gradients of a skipped step are.
    """

    collective = "gather"  # every rank gets all messages; or "mean": it gets their mean

    def __init__(self, feedback, **settings):
        self.feedback, self.settings = feedback, {**settings, "feedback": feedback}
        self.residuals, self.step, self.seconds = Residuals(), 0, 0.0
        self._agreed = False

    def compress(self, corrected, bucket):
        """(message, note): what travels, and what decompress needs.

        message: one contiguous tensor of one size on all ranks. corrected: [elements], to become
        what it does not carry where there is feedback, else to be spoiled.
        """
        raise NotImplementedError

    def decompress(self, arrived, average, note):
        """Fill average, [elements], from all messages, [world_size, ...], or from their mean."""
        raise NotImplementedError

    def hook(self, group, bucket):
        """Future of the average over the group (None: all ranks) of what is sent of the bucket."""
        gradient = bucket.buffer()
        if gradient.numel() == 0:
            self.step += bucket.is_last()
            return done(gradient)
        self.agree(group, gradient.device)
        with self.clock():
            message, note = self.compress(self.correct(gradient, bucket), bucket)
        self.step += bucket.is_last()
        if self.collective == "mean":
            arrived, work = message, self.send(message, group, bucket)
        else:
            arrived = message.new_empty(dist.get_world_size(group), message.numel())
            message = arrived[dist.get_rank(group)].copy_(message)  # held once
            work = comm.all_gather(arrived.view(-1), message, group=group, async_op=True)
        return work.get_future().then(partial(self._finish, arrived, gradient, note))

    def send(self, message, group, bucket):
        """The Work that makes the message its mean over the ranks."""
        return start_mean(message, group)

    def _finish(self, arrived, gradient, note, travelled):
        travelled.value()  # raises what kept the message from arriving
        use_here(arrived, note)
        with self.clock():
            self.decompress(arrived, gradient, note)
        return gradient

    @contextmanager
    def clock(self):
        started = perf_counter()
        yield
        spent = perf_counter() - started
        with ADDING:  # messages are decompressed by the threads that receive them
            self.seconds += spent

    def correct(self, gradient, bucket):
        """What to send of a bucket, [elements]: its gradient and, with feedback, what it owes."""
        if not is_finite(gradient):
            self.report(bucket)
            gradient.fill_(torch.nan)
            # As wide as what the other ranks send: messages have one size.
            return gradient.to(wide(gradient.dtype)) if self.feedback else gradient
        return (
            self.accumulate(self.residuals.of(bucket), gradient, bucket)
            if self.feedback
            else gradient
        )

    def accumulate(self, residual, gradient, bucket):
        return residual.add_(gradient)

    def report(self, bucket):
        warnings.warn(
            f"{self}: inf or NaN in the gradients of bucket {bucket.index()}", stacklevel=3
        )

    def agree(self, group, device):
        """Once, and collective: raises ValueError on all ranks where their compressors differ."""
        if not self._agreed:
            check_agreement([f"compressor {self} at step {self.step}"], group, device)
            self._agreed = True

    def scale_residuals(self, factor):
        """Residuals are scaled (fp16) as gradients are: when the scale changes, give new / old."""
        self.residuals.scale(factor)

    def __getstate__(self):
        """torch.save keeps what state_dict() does: to go on with a model of the same names."""
        return self.__dict__ | {"_agreed": False}

    def state_dict(self):
        """This rank's own state: each rank saves and loads its own."""
        return {
            "settings": self.settings,
            "step": self.step,
            "residuals": self.residuals.state_dict(),
        }

    def load_state_dict(self, state):
        """Raises ValueError for the state of a compressor with other settings."""
        if state["settings"] != self.settings:
            raise ValueError(f"{self} cannot load the state of one with {state['settings']}")
        self.step, self._agreed = state["step"], False
        self.residuals.load_state_dict(state["residuals"])

    def __repr__(self):
        return (
            f"{type(self).__name__}("
            f"{', '.join(f'{name}={value}' for name, value in self.settings.items())})"
        )


def is_finite(tensor):
    """inf and NaN survive in a sum, one pass without a mask; but a sum can itself overflow."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def start_mean(message, group):
    """The Work of an all_reduce to the mean. Divided first: 16-bit sums could overflow."""
    return comm.all_reduce(message.mul_(1 / dist.get_world_size(group)), group=group, async_op=True)


def done(value):
    """A Future that has its value."""
    future = torch.futures.Future()
    future.set_result(value)
    return future


def use_here(*values):
    """Keep the tensors' memory for the current stream: a callback on CUDA has its own."""
    for tensor in values:
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
