"""Cast: send gradients in 16 bits.

    float32    s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm  8 bits of exponent, 23 of mantissa
    bfloat16   s eeeeeeee mmmmmmm                  the same range, 2 to 3 decimal digits
    float16    s eeeee    mmmmmmmmmm               3 to 4 digits, nothing above 65504 or below 6e-8

Sent per rank and step: half of plain averaging, 2 (n-1)/n x 2 bytes an element.
Held: the messages, half of the gradients' bytes, from step to step; with feedback one residual,
which holds the rounding errors.
Micikevicius et al., Mixed Precision Training, ICLR 2018;
Kalamkar et al., A Study of BFLOAT16, 2019.
"""

import torch
import torch.distributed as dist

from labkit import comm
from labkit.amp.unscale import unscale_and_check
from labkit.compression.feedback import Compressor, is_finite


class Cast(Compressor):
    """Average gradients in 16 bits.

    dtype: torch.float16 or torch.bfloat16, otherwise raises ValueError.
    feedback: keep the rounding errors. Values beyond the range of float16 arrive as inf; with
        feedback they are clamped, and the rest is kept.
    """

    collective = "mean"

    def __init__(self, dtype=torch.float16, feedback=False):
        if dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(f"dtype must be torch.float16 or torch.bfloat16, not {dtype}")
        super().__init__(feedback, dtype=str(dtype))
        self.dtype = dtype
        # bucket index -> message, reused: new CPU memory costs a page fault every 4 KiB
        self._messages = {}

    def correct(self, gradient, bucket):
        # Without a residual, checking the message is enough and half the work.
        return super().correct(gradient, bucket) if self.feedback else gradient

    def compress(self, corrected, bucket):
        message = self._messages.get(bucket.index())
        if (
            message is None
            or message.shape != corrected.shape
            or message.device != corrected.device
        ):
            message = self._messages[bucket.index()] = torch.empty_like(corrected, dtype=self.dtype)
        message.copy_(corrected)
        if self.feedback:
            if not is_finite(message):
                largest = torch.finfo(self.dtype).max
                message.clamp_(-largest, largest)  # NaN stays
            corrected.sub_(message)
        return message, None

    def send(self, message, group, bucket):
        # One pass divides, so that a 16-bit sum cannot overflow, and detects inf and NaN.
        with self.clock():
            found = torch.zeros(1, device=message.device)
            share = torch.full_like(found, 1 / dist.get_world_size(group))
            unscale_and_check([message], share, found)
            if found and not self.feedback:  # with feedback, correct() has checked the gradient
                self.report(bucket)
        return comm.all_reduce(message, group=group, async_op=True)

    def decompress(self, arrived, average, _):
        average.copy_(arrived)
