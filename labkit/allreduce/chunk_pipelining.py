"""Chunks travel in segments: one is added while the next is on its way.

    arriving   | 0 | 1 | 2 | 3 | 4 |          into PLACES in turn, while the one before is added
    added          | 0 | 1 | 2 | 3 | 4 |

SEGMENT_BYTES is large enough that the cost per message does not show, and small enough that the
PLACES take little memory, and that what arrives is still in the cache when it is added.
"""

from contextlib import contextmanager

import torch

from labkit import comm

SEGMENT_BYTES = 4 << 20
PLACES = 3


@contextmanager
def in_line(tensor):
    """The elements of tensor in one contiguous line: a view, else a copy that is written back."""
    flat = tensor.detach().contiguous().view(-1)
    yield flat
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def cut(flat, parts):
    """flat in as many chunks as parts, and each in equally many segments, the longest first."""
    chunks = flat.tensor_split(parts)
    segments = 1 if _cuts_by_itself(flat) else max(1, -(-chunks[0].nbytes // SEGMENT_BYTES))
    return [chunk.tensor_split(segments) for chunk in chunks]


def _cuts_by_itself(tensor):
    """Whether the backend pipelines each message: NCCL does, gloo does not."""
    return tensor.is_cuda


def exchange(outgoing, dst, incoming, src, group, add):
    """Send the segments outgoing to dst; fill (add: increase) those incoming by what src sends."""
    landing = incoming
    if add:
        places = [torch.empty_like(incoming[0]) for _ in range(min(PLACES, len(incoming)))]
        landing = [places[i % len(places)][: segment.numel()] for i, segment in enumerate(incoming)]
    if _cuts_by_itself(incoming[0]):
        # To NCCL they must be given as one, or two ranks that both send first wait forever.
        comm.exchange(outgoing[0], dst, landing[0], src, group)
        if add:
            incoming[0].add_(landing[0])
        return
    # All sends are queued first: each leaves when the other side has a place for it. With the
    # receives first, gloo would write from this thread, and its own would meanwhile spin on the
    # lock of the connection.
    sends = [comm.send(segment, dst, group, async_op=True) for segment in outgoing]
    receives = [comm.recv(place, src, group, async_op=True) for place in landing[:PLACES]]
    for i, segment in enumerate(incoming):
        receives[i].wait()
        if add:
            segment.add_(landing[i])
        if i + PLACES < len(incoming):
            receives.append(comm.recv(landing[i + PLACES], src, group, async_op=True))
    for work in sends:
        work.wait()


def send(flat, dst, group):
    for segment in cut(flat, 1)[0]:
        comm.send(segment, dst, group)


def receive(flat, src, group, add):
    (segments,) = cut(flat, 1)
    place = torch.empty_like(segments[0])
    for segment in segments:
        arrived = place[: segment.numel()] if add else segment
        comm.recv(arrived, src, group)
        if add:
            segment.add_(arrived)
