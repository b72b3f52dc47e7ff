"""Error feedback: keep the values that were not sent, and add them to the next gradient.

    corrected = gradient + residual              what should be sent
    message   = compress(corrected)              what is sent: few bytes
    residual  = corrected - decompress(message)  what is sent later
    result    = mean over the ranks of decompress(message)

sent + residual == gradient + previous residual: nothing is lost, only delayed. The sum of all
messages differs from the sum of all gradients by one residual (and by the rounding of sums in 16
bits, which is not kept). Without feedback the same small gradients would be dropped in each step,
and some compressors never converge. With top-k, random-k and signs, delayed values arrive all at
once, and the optimizer's momentum multiplies them: use little momentum, or see dgc.py. PowerSGD's
paper trains with momentum.

Karimireddy et al. and Stich et al. accumulate lr x gradient, this class accumulates gradients,
which is the same while lr is constant. After a change of lr, this class applies the residual with
the new lr, the papers with the old one. scale_residuals(old lr / new lr) reproduces the papers
(Zheng et al., Communication-Efficient Distributed Blockwise Momentum SGD with Error-Feedback,
NeurIPS 2019, algorithm 1).

Held: one residual, as large as the gradients. The residual's memory also holds gradient + residual,
and the bucket's memory the average. Each bucket sends one message, in the order of the buckets, so
all ranks call the same collectives.
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

ADDING = threading.Lock()  # global, as a compressor with a lock could not be pickled


class Compressor:
    """Base of compressors that send one collective. `hook`: a comm hook of either DDP.

        model.register_comm_hook(None, TopK(0.01).hook)          instead of None: a process group

    One compressor serves one model. feedback: whether to keep unsent values. settings: shown by
    repr() and compared between ranks. `seconds`: host time of compressing and decompressing.
    A gradient with an inf or NaN causes a warning and NaN in the averages of all ranks, so that a
    loss scaler detects it; this rank keeps its residual. Values sent by other ranks or buckets in
    that step are lost, like all gradients of a skipped step.
    """

    collective = "gather"  # every rank receives all messages; "mean": their mean

    def __init__(self, feedback, **settings):
        self.feedback = feedback
        self.settings = {**settings, "feedback": feedback}
        self.residuals = Residuals()
        self.step = 0
        self.seconds = 0.0
        self._agreed = False

    def compress(self, corrected, bucket):
        """Return (message, note): the tensor to send, and what decompress() needs.

        message: one contiguous tensor, of one size on all ranks. corrected: [elements]; with
        feedback, subtract what the message transmits; otherwise it may be overwritten.
        """
        raise NotImplementedError

    def decompress(self, arrived, average, note):
        """Fill average, [elements], from all messages, [world_size, ...], or from their mean."""
        raise NotImplementedError

    def hook(self, group, bucket):
        """Return a Future of the bucket's compressed average over the group (None: all ranks)."""
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
            message = arrived[dist.get_rank(group)].copy_(message)  # frees the original
            work = comm.all_gather(arrived.view(-1), message, group=group, async_op=True)
        return work.get_future().then(partial(self._finish, arrived, gradient, note))

    def send(self, message, group, bucket):
        """Start averaging the message over the ranks. Returns the Work."""
        return start_mean(message, group)

    def _finish(self, arrived, gradient, note, travelled):
        travelled.value()  # raises an error of the collective
        use_here(arrived, note)
        with self.clock():
            self.decompress(arrived, gradient, note)
        return gradient

    @contextmanager
    def clock(self):
        """Add the host time of the block to `seconds`."""
        started = perf_counter()
        yield
        spent = perf_counter() - started
        with ADDING:  # receiving threads decompress messages concurrently
            self.seconds += spent

    def correct(self, gradient, bucket):
        """Return what to send of a bucket, [elements]: its gradient, plus the residual if any."""
        if not is_finite(gradient):
            self.report(bucket)
            gradient.fill_(torch.nan)
            # The same dtype as on the other ranks: messages have one size.
            return gradient.to(wide(gradient.dtype)) if self.feedback else gradient
        if not self.feedback:
            return gradient
        return self.accumulate(self.residuals.of(bucket), gradient, bucket)

    def accumulate(self, residual, gradient, bucket):
        """Add the gradient to the residual in place, and return it: the values to send."""
        return residual.add_(gradient)

    def report(self, bucket):
        """Warn about inf or NaN in a bucket."""
        warnings.warn(
            f"{self}: inf or NaN in the gradients of bucket {bucket.index()}", stacklevel=3
        )

    def agree(self, group, device):
        """Raise ValueError on all ranks if their compressors differ. Checked once. Collective."""
        if not self._agreed:
            check_agreement([f"compressor {self} at step {self.step}"], group, device)
            self._agreed = True

    def scale_residuals(self, factor):
        """Multiply the residuals by a factor: after a change of the loss scale, new / old."""
        self.residuals.scale(factor)

    def __getstate__(self):
        """Pickle what state_dict() saves, to continue with a model that has the same names."""
        return self.__dict__ | {"_agreed": False}

    def state_dict(self):
        """Return this rank's state: each rank saves and loads its own."""
        return {
            "settings": self.settings,
            "step": self.step,
            "residuals": self.residuals.state_dict(),
        }

    def load_state_dict(self, state):
        """Load a state_dict(). Raises ValueError if it was saved with other settings."""
        if state["settings"] != self.settings:
            raise ValueError(f"{self} cannot load a state with other settings: {state['settings']}")
        self.step, self._agreed = state["step"], False
        self.residuals.load_state_dict(state["residuals"])

    def __repr__(self):
        return (
            f"{type(self).__name__}("
            f"{', '.join(f'{name}={value}' for name, value in self.settings.items())})"
        )


def is_finite(tensor):
    """Return whether no element is inf or NaN.

    An inf or NaN survives a sum, so one sum checks all elements, unless it overflows.
    """
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def start_mean(message, group):
    """Start averaging the message over the ranks, in place. Returns the Work.

    Divides before the all_reduce, because a 16-bit sum could overflow.
    """
    return comm.all_reduce(message.mul_(1 / dist.get_world_size(group)), group=group, async_op=True)


def done(value):
    """Return a completed Future."""
    future = torch.futures.Future()
    future.set_result(value)
    return future


def use_here(*values):
    """Keep the tensors' memory for the current stream: a callback on CUDA has its own stream."""
    for tensor in values:
        if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
