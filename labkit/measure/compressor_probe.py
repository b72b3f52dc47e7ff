"""Observe a compressor step by step: gradient, average, residual, and the bytes that it sends.

    gradient   .3 -.9  .2  .0  .7 -.1      mean over the ranks
    arrived     0 -.9   0   0  .7   0      what every rank gets instead
    residual   .3   0  .2  .0   0 -.1      not sent yet, mean over the ranks
    each step: arrived + residual = gradient + residual of the step before. With feedback, the sum
    of arrived + last residual = sum of gradients, except for rounding: nothing is lost

    watched = Watched(TopK(0.01))
    model.register_comm_hook(None, watched.hook)     # not TopK(0.01).hook; then train as usual
    for row in watched.rows:                         # on rank 0; identical on all ranks
        record(compressor="topk", knob="1 %", **row)

This adds two all_reduces a step, during which backward waits. So it measures bytes and errors, not
times.
Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient Compression Schemes, ICML 2019,
section 4.
"""

import torch
import torch.distributed as dist

from labkit import comm


class Watched:
    """A comm hook of labkit.ddp around a compressor, for a model whose gradients fill one bucket.

    Not for PyTorch's DDP: it rebuilds its bucket after step 1, so sums over steps mix elements.

    rows: one dict a step, ready for record():
        step                            0, 1, 2, ...
        feedback                        whether the compressor keeps a residual
        momentum                        that is applied to gradients before (DGC); 0 for others
        elements                        number of elements of the gradient
        sent_bytes, plain_bytes         derived, per rank: compressed, and by a plain all_reduce
        error                           |arrived - gradient| / |gradient|, of this step alone
        sum_error                       the same for the sums over all steps so far
        waiting                         |residual| / |gradient|
        first                           index of the window's first element, constant over steps
        gradient, arrived, residual     lists of at most `window` neighboring elements, where the
                                        first gradient was largest
    With momentum, "gradient" is the accumulated momentum, which is what should arrive.
    """

    def __init__(self, compressor, window=48):
        self.compressor = compressor
        self.window = window
        self.momentum = getattr(compressor, "momentum", 0)
        self.rows = []
        self._gradient = self._sums = self._first = None

    def hook(self, group, bucket):
        """Return a Future of the compressor's average. Raises ValueError for several buckets."""
        if bucket.index() or not bucket.is_last():
            raise ValueError(
                "the probe supports a model with one bucket: give DDP a larger bucket_cap_mb"
            )
        gradient, plain_bytes = self.uncompressed(group, bucket)
        self.compressor.agree(group, bucket.buffer().device)  # happens once, not in every step
        with comm.record() as log:
            average = self.compressor.hook(group, bucket).wait()
        residual = torch.zeros_like(gradient)
        if self.compressor.feedback:
            residual = mean(self.compressor.residuals.of(bucket), group)
        about = {"sent_bytes": sum(event.sent_bytes for event in log), "plain_bytes": plain_bytes}
        self.note(gradient, average.double(), residual, about)
        future = torch.futures.Future()
        future.set_result(average)
        return future

    def uncompressed(self, group, bucket):
        """Return (the uncompressed average, float64 [elements]; bytes that a rank sends for it).

        With momentum: the accumulated average.
        """
        with comm.record() as log:
            gradient = mean(bucket.buffer(), group)
        self._gradient = (
            gradient if self._gradient is None else self.momentum * self._gradient + gradient
        )
        return self._gradient, log[0].sent_bytes * bucket.buffer().itemsize // gradient.itemsize

    def note(self, gradient, arrived, residual, about):
        """Append the row of this step. Arguments: float64 [elements], means over the ranks."""
        if self._sums is None:
            self._sums = [torch.zeros_like(gradient), torch.zeros_like(gradient)]
            self._first = largest_window(gradient, self.window)
        for total, part in zip(self._sums, (gradient, arrived), strict=True):
            total += part
        shown = slice(self._first, self._first + self.window)
        vectors = {"gradient": gradient, "arrived": arrived, "residual": residual}
        self.rows.append(
            {
                "step": len(self.rows),
                "feedback": self.compressor.feedback,
                "momentum": self.momentum,
                "elements": gradient.numel(),
                **about,
                "error": relative(arrived - gradient, gradient),
                "sum_error": relative(self._sums[1] - self._sums[0], self._sums[0]),
                "waiting": relative(residual, gradient),
                "first": self._first,
                **{
                    name: [float(f"{x:.5g}") for x in vector[shown].tolist()]
                    for name, vector in vectors.items()
                },
            }
        )


def mean(tensor, group):
    """Return the mean over the ranks as a new float64 tensor."""
    total = tensor.detach().to(torch.float64, copy=True)
    comm.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def relative(difference, whole):
    """Return |difference| / |whole|, Euclidean norms; 0 if both are 0, inf if only whole is."""
    return float(difference.norm() / whole.norm()) if difference.any() else 0.0


def largest_window(vector, width):
    """Return the start of the window of `width` elements with the largest sum of squares.

    Windows begin at multiples of width. 0 for a shorter vector.
    """
    whole = vector[: vector.numel() // width * width].view(-1, width)
    return int(whole.square().sum(1).argmax()) * width if len(whole) else 0
