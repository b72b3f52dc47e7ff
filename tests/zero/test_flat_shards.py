"""Layouts: every element of every tensor has exactly one place, and belongs to exactly one rank."""

import pytest
import torch

from labkit.zero.flat_shards import Layout

SHAPES = [
    [(4, 6), (4,), (3, 4), (3,)],
    [(7,)],
    [(), (1,), (2, 0, 3), (5,)],  # a scalar, an empty tensor
    [(1,)],  # fewer elements than ranks
]


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_the_pieces_of_all_ranks_put_together_are_the_tensors(shapes, n):
    tensors = [torch.randn(shape) for shape in shapes]
    layout = Layout(shapes, n)
    flat = layout.flatten(tensors, torch.full((layout.padded,), 9.0))
    assert layout.padded - layout.numel < n and flat[layout.numel :].eq(0).all()
    assert all(torch.equal(view, t) for view, t in zip(layout.views(flat), tensors, strict=True))
    shards = [layout.shard(flat, rank).clone() for rank in range(n)]
    pieces = [layout.pieces(shard, rank) for rank, shard in enumerate(shards)]
    for slot, tensor in enumerate(tensors):
        assert torch.equal(torch.cat([pieces[rank][slot] for rank in range(n)]), tensor.flatten()), f"tensor {slot}"
        for rank in range(n):
            begin, end = layout.ranges(rank)[slot]
            assert torch.equal(pieces[rank][slot], tensor.flatten()[begin:end]), f"rank {rank}, tensor {slot}"


def test_views_and_pieces_share_the_memory_of_their_buffer():
    layout = Layout([(2, 3), (4,)], 2)
    flat = torch.zeros(layout.padded)
    layout.views(flat)[1].fill_(1.0)
    layout.pieces(layout.shard(flat, 0), 0)[0].fill_(2.0)
    assert flat.tolist() == [2.0] * 5 + [0.0] + [1.0] * 4
