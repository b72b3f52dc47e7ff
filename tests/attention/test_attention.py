"""Attention tile by tile against PyTorch's own: outputs, gradients, dropout's masks, and memory that grows with T."""

from functools import partial

import pytest
import torch
from attention_oracle import allowed, masked_attention
from tensors import gap, noise
from torch.nn import functional as F

from labkit import amp
from labkit.attention import flash_attention
from labkit.attention.tiles import Tiles
from labkit.ideas.attention_and_context import tiled_attention
from labkit.memory.memory_tracker import MemoryTracker

F64 = torch.float64
TILE = 4
SHAPES = [  # queries, keys, query heads, key heads
    (8, 8, 2, 2),
    (7, 7, 4, 2),
    (5, 9, 6, 1),
    (9, 5, 2, 2),
    (1, 6, 2, 1),
    (3, 3, 1, 1),
]


def inputs(T, S, H, G, width=4, batch=(2,), dtype=F64):
    generator = torch.Generator().manual_seed(T * S)
    shapes = [(*batch, H, T, width), (*batch, G, S, width), (*batch, G, S, width)]
    made = [torch.randn(shape, generator=generator, dtype=F64).to(dtype) for shape in shapes]
    return [one.requires_grad_() for one in made]


def with_gradients(function, tensors):
    output = function(*tensors)
    weights = noise(*output.shape, seed=1, dtype=F64).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, tensors, weights)]


def torch_attention(is_causal=False, scale=None):
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True)


@pytest.mark.parametrize("tile", [1, 3, TILE, 100])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_torchs_with_its_gradients(shape, is_causal, tile):
    tensors = inputs(*shape)
    ours = with_gradients(lambda *these: flash_attention(*these, is_causal=is_causal, tile=tile), tensors)
    assert gap(ours, with_gradients(torch_attention(is_causal), tensors)) < 1e-13


@pytest.mark.parametrize("tile", [1, 3, TILE, 100])
@pytest.mark.parametrize("window", [1, 2, 5, 100])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_window_is_a_mask(shape, window, tile):
    tensors, options = inputs(*shape), {"is_causal": True, "window": window}
    ours = with_gradients(lambda *these: flash_attention(*these, tile=tile, **options), tensors)
    assert gap(ours, with_gradients(partial(masked_attention, **options), tensors)) < 1e-13


KEY_MASKS = {
    "right": [[1, 1, 1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1]],
    "left": [[0, 0, 0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1, 1]],
    "nothing is real": [[0] * 9, [0, 1, 0, 1, 1, 0, 0, 1, 0]],
}


@pytest.mark.parametrize("tile", [1, 3, TILE, 100])
@pytest.mark.parametrize("seen", [{}, {"is_causal": True}, {"is_causal": True, "window": 3}], ids=str)
@pytest.mark.parametrize("padding", KEY_MASKS)
def test_padding_is_a_mask_and_who_sees_no_key_gets_zeros(padding, seen, tile):
    tensors = inputs(9, 9, 4, 2)
    options = seen | {"key_mask": torch.tensor(KEY_MASKS[padding], dtype=torch.bool)}
    ours = with_gradients(lambda *these: flash_attention(*these, tile=tile, **options), tensors)
    theirs = with_gradients(partial(masked_attention, **options), tensors)
    sees_none = ~allowed(9, 9, **options).any(-1, keepdim=True)
    for row in (ours[0], ours[1]):  # output, and the query's gradient
        assert not (row * sees_none).any() and row.isfinite().all()
    assert gap(ours, theirs) < 1e-13


def test_padding_of_low_precision_and_without_a_batch():
    tensors = inputs(6, 6, 2, 2, batch=(), dtype=torch.float16)
    mask = torch.tensor([0, 0, 1, 1, 0, 1], dtype=torch.bool)
    options = {"is_causal": True, "key_mask": mask}
    ours = with_gradients(lambda *these: flash_attention(*these, tile=2, **options), tensors)
    seen = allowed(6, 6, **options)[0]
    exact = [one.detach().double().requires_grad_() for one in tensors]
    oracle = with_gradients(lambda *these: F.scaled_dot_product_attention(*these, attn_mask=seen), exact)
    assert gap(ours, oracle) < 32 * torch.finfo(torch.float16).eps


def test_a_mask_that_changes_after_forward():
    tensors, mask = inputs(6, 6, 2, 2), torch.tensor([[1, 1, 0, 1, 1, 0]] * 2, dtype=torch.bool)
    expected = torch.autograd.grad(flash_attention(*tensors, key_mask=mask).sum(), tensors)
    output = flash_attention(*tensors, key_mask=mask)
    mask.fill_(True)
    assert gap(torch.autograd.grad(output.sum(), tensors), expected) == 0


@pytest.mark.parametrize("options", [{"window": 3}, {"key_mask": torch.eye(8).bool()[:2]}], ids=["window", "mask"])
def test_dropout_under_a_mask_has_the_same_mask_in_backward(options):
    tensors = inputs(8, 8, 2, 1)

    def dropped(*these):
        torch.manual_seed(3)
        return flash_attention(*these, dropout_p=0.4, is_causal=True, tile=TILE, **options)

    assert torch.autograd.gradcheck(dropped, tensors, fast_mode=True)


def test_with_a_scale_and_without_a_batch():
    tensors = inputs(6, 6, 2, 2, batch=())
    ours = with_gradients(lambda *these: flash_attention(*these, scale=0.3, tile=TILE), tensors)
    assert gap(ours, with_gradients(torch_attention(scale=0.3), tensors)) < 1e-13


@pytest.mark.parametrize("tile", [1, 3, 8, 100])
def test_the_idea_is_attention_too(tile):
    tensors = inputs(8, 8, 2, 2)
    ours = with_gradients(lambda *these: tiled_attention(*these, tile), tensors)
    assert gap(ours, with_gradients(torch_attention(), tensors)) < 1e-13


def test_scores_that_exp_cannot_hold():
    tensors = [1e3 * one.detach() for one in inputs(8, 8, 2, 2)]
    tensors = [one.requires_grad_() for one in tensors]
    ours = with_gradients(lambda *these: flash_attention(*these, is_causal=True, tile=TILE), tensors)
    theirs = with_gradients(torch_attention(True), tensors)
    assert all(one.isfinite().all() for one in ours)
    assert all(torch.allclose(one, other, rtol=1e-9, atol=1e-6) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_low_precision_is_summed_up_in_fp32(dtype):
    tensors = inputs(64, 64, 2, 1, width=16, dtype=dtype)
    ours = with_gradients(lambda *these: flash_attention(*these, is_causal=True, tile=16), tensors)
    exact = [one.detach().double().requires_grad_() for one in tensors]
    oracle = with_gradients(torch_attention(True), exact)
    assert [one.dtype for one in ours] == [dtype] * 4
    assert gap(ours, oracle) < 32 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_large_scores_of_low_precision_are_not_rounded(dtype):
    tensors = [(4 * one.detach().double()).to(dtype).requires_grad_() for one in inputs(96, 96, 2, 1, 32)]
    ours = with_gradients(lambda *these: flash_attention(*these, tile=32), tensors)
    oracle = with_gradients(torch_attention(), [one.detach().double().requires_grad_() for one in tensors])
    for one, exact in zip(ours, oracle, strict=True):
        assert gap([one], [exact]) < 2 * torch.finfo(dtype).eps * exact.abs().max()


def test_scores_beyond_fp16():
    query, key, value = (one.detach() for one in inputs(8, 8, 2, 2, width=64, dtype=torch.float16))
    tensors = query + 40, key + 40, value
    exact = [one.double() for one in tensors]
    largest = (exact[0] @ exact[1].mT).max() / 8
    assert largest > 12_000  # and 8 times as much before it is scaled: fp16 ends at 65,504
    bound = torch.finfo(torch.float32).eps * largest * value.abs().max()  # a score is off by its last bit
    assert gap([flash_attention(*tensors)], [torch_attention()(*exact)]) < bound


@pytest.mark.parametrize("autocast", [torch.autocast, amp.autocast])
def test_autocast_decides_as_for_torchs(autocast):
    query, key, value = inputs(8, 8, 2, 1, dtype=torch.float32)
    mixed = [(query, key, value), (query, key.bfloat16(), value.bfloat16()), inputs(8, 8, 2, 1)]
    for tensors in mixed:
        with autocast("cpu", torch.bfloat16):
            ours, theirs = flash_attention(*tensors, tile=TILE), torch_attention()(*tensors)
            assert ours.dtype == theirs.dtype and gap([ours], [theirs]) < 0.02
            ours.sum().backward()
    exact = torch_attention()(*(one.bfloat16().double() for one in (query, key, value)))
    with autocast("cpu", torch.bfloat16):
        assert gap([flash_attention(query, key, value)], [exact.bfloat16()]) == 0


def test_a_first_tile_that_no_query_sees():
    tensors = [one.detach().abs() for one in inputs(4, 6, 2, 2)]
    tensors[1][..., :3, :] = -torch.inf
    for tile in (1, 2, 3, 100):
        assert gap([flash_attention(*tensors, tile=tile)], [torch_attention()(*tensors)]) < 1e-13


def test_without_keys_or_with_all_dropped_nothing_is_added():
    tensors = inputs(3, 0, 2, 1)
    assert not any(one.any() for one in with_gradients(flash_attention, tensors))
    ours = with_gradients(lambda *these: flash_attention(*these, dropout_p=1.0, tile=2), inputs(3, 5, 2, 1))
    assert not any(one.any() for one in ours)


@pytest.mark.parametrize("is_causal", [False, True])
def test_dropout_has_the_same_mask_in_backward(is_causal):
    tensors = inputs(5, 6, 2, 1)

    def dropped(*these):
        torch.manual_seed(3)
        return flash_attention(*these, dropout_p=0.4, is_causal=is_causal, tile=TILE)

    assert torch.autograd.gradcheck(dropped, tensors, fast_mode=True)


def test_dropout_keeps_the_mean_and_draws_anew():
    query, key, value = (one.detach() for one in inputs(64, 64, 2, 2))
    torch.manual_seed(0)
    drawn = [flash_attention(query, key, torch.ones_like(value), dropout_p=0.25, tile=16) for _ in range(2)]
    assert not torch.equal(*drawn)
    assert abs(torch.stack(drawn).mean().item() - 1.0) < 0.05


def peak(T, function):
    query, key, value = inputs(T, T, 2, 2, batch=(), dtype=torch.float32)
    with MemoryTracker() as memory:
        function(query, key, value).sum().backward()
    return sum(memory.peak.values())


def test_memory_is_linear_in_the_length():
    at = [peak(T, lambda *these: flash_attention(*these, is_causal=True, tile=16)) for T in (64, 128, 192)]
    assert at[2] - at[1] == at[1] - at[0]
    plain = [peak(T, in_one_piece) for T in (64, 128, 192)]
    assert plain[2] - plain[1] > 1.5 * (plain[1] - plain[0])


def in_one_piece(query, key, value):
    return torch.softmax(query @ key.mT, -1) @ value


def test_causal_makes_half_of_the_tiles():
    made = []

    class Counting(Tiles):
        def scores(self, *these):
            made.append(these)
            return super().scores(*these)

    query = torch.ones(1, 16, 4)
    for causal, window, count in ((False, None, 16), (True, None, 10), (True, 1, 4), (True, 5, 7), (True, 6, 9)):
        made.clear()
        Counting(causal, 1.0, 4, window=window).forward(query, query, query)
        assert len(made) == count


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((2, 4, 8), (2, 4, 6), (2, 4, 6)), r"query \[2, 4, 8\] and key \[2, 4, 6\] do not fit"),
        (((2, 4, 8), (2, 4, 8), (2, 5, 8)), r"key \[2, 4, 8\] and value \[2, 5, 8\] must have equal heads and lengths"),
        (((4, 8), (4, 8), (4, 8)), r"query \[4, 8\] and key \[4, 8\] are not \[..., heads, tokens, d\]"),
        (((4, 4, 8), (3, 4, 8), (3, 4, 8)), "4 query heads must be divisible by 3 key heads"),
    ],
)
def test_shapes_that_do_not_fit(shapes, words):
    with pytest.raises(ValueError, match=words):
        flash_attention(*map(torch.zeros, shapes))


def test_what_cannot_be():
    query, key, value = inputs(3, 3, 1, 1)
    for tile in (0, -1):
        with pytest.raises(ValueError, match=f"tile={tile} must be at least 1"):
            flash_attention(query, key, value, tile=tile)
    for p in (-1.0, 1.5, float("nan")):
        with pytest.raises(ValueError, match=rf"dropout_p={p} must be between 0 and 1"):
            flash_attention(query, key, value, dropout_p=p)
    for window in (0, -2):
        with pytest.raises(ValueError, match=f"window={window} must be at least 1 key; None sees all"):
            flash_attention(query, key, value, is_causal=True, window=window)
    with pytest.raises(ValueError, match="window=2 needs is_causal=True: it ends at the query"):
        flash_attention(query, key, value, window=2)
    with pytest.raises(ValueError, match=r"key_mask is torch.int64: pass torch.bool, True for a real token"):
        flash_attention(query, key, value, key_mask=torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"key_mask has shape \[3, 3\], expected \[2, 3\]"):
        flash_attention(query, key, value, key_mask=torch.ones(3, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"query, key and value must have one dtype, not"):
        flash_attention(query, key.float(), value)
