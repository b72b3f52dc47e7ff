"""Sends chunks in segments: add one while the next is being received.

    arriving   | 0 | 1 | 2 | 3 | 4 |          into PLACES buffers in rotation
    added          | 0 | 1 | 2 | 3 | 4 |

SEGMENT_BYTES is large enough to hide the cost per message. It is small enough that the buffers need
little memory and that a segment is still in the cache when it is added.
"""

from contextlib import contextmanager

import torch

from labkit import comm

SEGMENT_BYTES = 4 << 20
PLACES = 3


@contextmanager
def in_line(tensor):
    """Yield the elements of tensor as a contiguous line: a view, or a copy that is written back."""
    flat = tensor.detach().contiguous().view(-1)
    yield flat
    if flat.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(flat.view(tensor.shape))


def cut(flat, parts):
    """Split flat into `parts` chunks, and each into equally many segments, the longest first."""
    chunks = flat.tensor_split(parts)
    segments = 1 if _cuts_by_itself(flat) else max(1, -(-chunks[0].nbytes // SEGMENT_BYTES))
    return [chunk.tensor_split(segments) for chunk in chunks]


def _cuts_by_itself(tensor):
    """Return whether the backend pipelines each message: NCCL does, gloo does not."""
    return tensor.is_cuda


def exchange(outgoing, dst, incoming, src, group, add):
    """Send the outgoing segments to dst; fill the incoming ones from src (add: add to them)."""
    landing = incoming
    if add:
        places = [torch.empty_like(incoming[0]) for _ in range(min(PLACES, len(incoming)))]
        landing = [places[i % len(places)][: segment.numel()] for i, segment in enumerate(incoming)]
    if _cuts_by_itself(incoming[0]):
        # NCCL needs both in one group call: two ranks that both send first would wait forever.
        comm.exchange(outgoing[0], dst, landing[0], src, group)
        if add:
            incoming[0].add_(landing[0])
        return
    # Queue all sends first: each is sent when the other side has a buffer for it. With receives
    # first, gloo would write from this thread while its own thread spins on the connection's lock.
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
