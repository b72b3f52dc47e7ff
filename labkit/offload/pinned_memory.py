"""Memory beside the device: pinned host memory or a nameless mapped file; and the way there.

    compute stream   |-- forward of layer 3 --|-- forward of layer 4 --|   CUDA: copies beside the
    side stream      | layer 2 to the host |  | layer 3 to the host |      arithmetic

Pinned memory is never paged out, so the device copies by itself; PyTorch rounds its size up to a
power of two. A file is preallocated, so that a full disk is told when room is asked for, not by a
crash when a page is written; it loses its name at once, so that nothing is left behind, however the
process ends. The system keeps recently used pages of a file in memory it has to spare.
Cost: the bytes once each way. PCIe carries about 25 GB/s, a disk 1 to 5 GB/s.
"""

import os
import tempfile
from contextlib import nullcontext

import torch


def room(nbytes, to, device):
    """nbytes outside `device`, flat uint8: in host memory (to="cpu") or a file in the folder `to`.

    Raises OSError, in one line, where the folder cannot be written to or the disk has no room;
    nothing is left there.
    """
    if to == "cpu" or nbytes == 0:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    try:
        descriptor, path = tempfile.mkstemp(prefix="labkit-offload-", dir=to)
    except OSError as error:
        raise OSError(
            error.errno, f"cannot offload to the folder {to}: {os.strerror(error.errno)}"
        ) from None
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
    except OSError as error:
        told = (
            f"cannot offload {nbytes:,} bytes to {to}: {os.strerror(error.errno)}; "
            "make room or name another folder"
        )
        raise OSError(error.errno, told) from None
    finally:
        os.unlink(path)
        os.close(descriptor)


def part(flat, start, like):
    """A view of a flat uint8 tensor from byte `start`, with the shape and dtype of `like`."""
    return flat[start : start + like.nbytes].view(like.dtype).view(like.shape)


def is_outside(device, to):
    """Whether what lives on `device` has somewhere else to go: not from the host to the host."""
    return to != "cpu" or device.type != "cpu"


class Lane:
    """Copies between a device and its host memory: on CUDA on a stream of its own, else at once."""

    def __init__(self, device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, tensor, host):
        """host <- tensor, as it is now. The tensor may be freed at once, but not written to."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            tensor.record_stream(self.stream)
        with self._beside():
            host.copy_(tensor, non_blocking=True)

    def bring(self, host):
        """Begin to copy to the device, after all that was sent: (tensor, event), for receive."""
        with self._beside():
            near = torch.empty_like(host, device=self.device, pin_memory=False)
            near.copy_(host, non_blocking=True)
            return near, self.stream.record_event() if self.stream is not None else None

    def receive(self, brought):
        """The tensor that bring() gave, for use from here on."""
        near, event = brought
        if event is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(event)
            near.record_stream(current)
        return near

    def finish(self):
        """Wait until the host memory holds all that was sent."""
        if self.stream is not None:
            self.stream.synchronize()

    def _beside(self):
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
