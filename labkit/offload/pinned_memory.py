"""Memory off the device: pinned host memory or an unnamed mapped file; and copies to and from it.

    compute stream   |-- forward of layer 3 --|-- forward of layer 4 --|   CUDA: copies overlap
    side stream      | layer 2 to the host |  | layer 3 to the host |      with compute

Pinned memory is never paged out, so the device copies by DMA; PyTorch rounds its size up to a power
of two. A file is preallocated, so that a full disk is reported at allocation instead of crashing a
later write. Its name is removed at once, so that nothing remains however the process ends. The
system caches recently used pages of a file in free memory.
Cost: each byte once each way. PCIe transfers about 25 GB/s, a disk 1 to 5 GB/s.
"""

import os
import tempfile
from contextlib import nullcontext

import torch


def room(nbytes, to, device):
    """Allocate a flat uint8 tensor of nbytes off `device`: in host memory or a file.

    to: "cpu" for host memory, pinned if device is CUDA; or a folder for the file. Raises OSError if
    the folder cannot be written to or the disk is full; no file remains.
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
        reason = os.strerror(error.errno)
        message = f"cannot offload {nbytes:,} bytes to {to}: {reason}; choose another folder"
        raise OSError(error.errno, message) from None
    finally:
        os.unlink(path)
        os.close(descriptor)


def part(flat, start, like):
    """Return a view of a flat uint8 tensor at byte `start`, with the shape and dtype of `like`."""
    return flat[start : start + like.nbytes].view(like.dtype).view(like.shape)


def is_outside(device, to):
    """Return whether tensors on `device` can be offloaded: not from the host to the host."""
    return to != "cpu" or device.type != "cpu"


class Lane:
    """Copies between a device and host memory: on CUDA in a separate stream, otherwise at once."""

    def __init__(self, device):
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, tensor, host):
        """Start copying tensor to host. The tensor may be freed at once, but not written to."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
            tensor.record_stream(self.stream)
        with self._beside():
            host.copy_(tensor, non_blocking=True)

    def bring(self, host):
        """Start a copy to the device, after all sends. Returns (tensor, event) for receive()."""
        with self._beside():
            near = torch.empty_like(host, device=self.device, pin_memory=False)
            near.copy_(host, non_blocking=True)
            return near, self.stream.record_event() if self.stream is not None else None

    def receive(self, brought):
        """Return the tensor of bring() for use in the current stream."""
        near, event = brought
        if event is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(event)
            near.record_stream(current)
        return near

    def finish(self):
        """Wait until all sends are complete."""
        if self.stream is not None:
            self.stream.synchronize()

    def _beside(self):
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
