"""Attention over a sequence that no rank holds whole, against one process that holds it."""

from functools import partial
from itertools import combinations

import pytest
import torch
from attention_oracle import allowed, masked_attention
from tensors import gap
from torch.nn import functional as F

from labkit import comm, models
from labkit.attention import flash_attention
from labkit.attention.context_parallel import all_gather_attention, places, ring_attention, ulysses_attention
from labkit.attention.tiles import Tiles
from labkit.ddp import DDP
from labkit.ideas.attention_and_context import ring_attention_forward
from labkit.memory.memory_tracker import MemoryTracker
from labkit.recompute import checkpoint

F64 = torch.float64
FORMS = {
    "ring": partial(ring_attention, tile=3),
    "all-gather": partial(all_gather_attention, tile=3),
    "all-to-all": ulysses_attention,
    "all-to-all, tiles": partial(ulysses_attention, attend=flash_attention, tile=3),
}


def whole(length, heads, width=4, key_heads=None):
    """Query, key, value, the output's gradient."""
    generator = torch.Generator().manual_seed(length)
    made = torch.randn((4, 2, heads, length, width), generator=generator, dtype=F64)
    return [one[:, : key_heads if place in (1, 2) else None] for place, one in enumerate(made)]


def share(tensors, held):
    return [one[..., held, :].clone().requires_grad_() for one in tensors]


def trained(rank, world_size, form, length, heads, key_heads=None, **options):
    """How far this rank's part of output and gradients is from the oracle's."""
    *tensors, weights = whole(length, heads, key_heads=key_heads)
    held = places(length)
    mine = share(tensors, held)
    torch.manual_seed(5 + rank)
    state = torch.get_rng_state()
    output = FORMS[form](*mine, **options)
    ours = [output.detach(), *torch.autograd.grad(output, mine, weights[..., held, :])]
    assert "dropout_p" in options or torch.equal(torch.get_rng_state(), state)
    everything = [one.clone().requires_grad_() for one in tensors]
    torch.manual_seed(5)
    oracle = flash_attention if "dropout_p" in options else F.scaled_dot_product_attention
    output = oracle(*everything, **options, **({"enable_gqa": True} if key_heads else {}))
    theirs = [output.detach(), *torch.autograd.grad(output, everything, weights)]
    return gap(ours, [one[..., held, :] for one in theirs])


PADDING = {"none": [16, 16], "right": [16, 9], "left": [-16, -3], "one has no token": [0, 5]}


def padded(length, padding):
    """Bool [2, length]: of two sequences the first tokens are real, of a negative number the last."""
    if padding == "none":
        return None
    at = torch.arange(length)
    reals = [real * length // 16 for real in PADDING[padding]]
    return torch.stack([at < real if real >= 0 else at >= length + real for real in reals])


def masked(rank, world_size, form, length, window, padding, is_causal=True):
    """How far this rank's part of output and gradients is; whether rows that see no key are zeros."""
    *tensors, weights = whole(length, 4, key_heads=4 if "all-to-all" in form else 2)
    held, mask = places(length), padded(length, padding)
    options = {"is_causal": is_causal, "window": window}
    mine = share(tensors, held)
    output = FORMS[form](*mine, **options, key_mask=None if mask is None else mask[:, held])
    ours = [output.detach(), *torch.autograd.grad(output, mine, weights[..., held, :])]
    everything = [one.clone().requires_grad_() for one in tensors]
    output = masked_attention(*everything, **options, key_mask=mask)
    theirs = [output.detach(), *torch.autograd.grad(output, everything, weights)]
    sees_none = ~allowed(length, length, **options, key_mask=mask).any(-1, keepdim=True)
    empty = [one * sees_none[..., held, :] for one in ours[:2]]  # output, and the query's gradient
    return gap(ours, [one[..., held, :] for one in theirs]), any(one.any() for one in empty)


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("form", ["ring", "all-gather", "all-to-all, tiles"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_windows_and_padding_are_masks_of_one_process(ranks, world_size, form, padding):
    given = {"form": form, "length": 8 * world_size, "padding": padding}
    for window in (None, 1, 3, 4, 9):
        found = ranks(world_size, masked, window=window, **given)
        assert all(apart < 1e-13 and not other_than_zero for apart, other_than_zero in found)
    found = ranks(world_size, masked, window=None, is_causal=False, **given)
    for rank, (apart, other_than_zero) in enumerate(found):
        assert apart < 1e-13 and not other_than_zero, f"rank {rank}"


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_it_is_the_attention_of_one_process(ranks, world_size, form, is_causal):
    told = ranks(world_size, trained, form=form, length=8 * world_size, heads=12, is_causal=is_causal)
    assert max(told) < 1e-13


@pytest.mark.parametrize("form", ["ring", "all-gather"])
def test_there_is_a_scale_and_key_heads_are_shared(ranks, form):
    options = {"heads": 6, "key_heads": 2, "is_causal": True, "scale": 0.3}
    assert max(ranks(2, trained, form=form, length=16, **options)) < 1e-13


def in_low_precision(rank, world_size):
    """Which share of bf16 numbers is one process's to the bit; whether autocast makes the same of fp32."""
    *tensors, _ = whole(16 * world_size, 2, width=16)
    tensors, held = [(4 * one).bfloat16() for one in tensors], places(16 * world_size)
    mine = share(tensors, held)
    output = ring_attention(*mine, is_causal=True, tile=4)
    with torch.autocast("cpu", torch.bfloat16):
        cast = ring_attention(*(one.float() for one in mine), is_causal=True, tile=4)
    alone = flash_attention(*tensors, is_causal=True)[..., held, :]
    return (output == alone).double().mean().item(), torch.equal(cast, output)


def test_low_precision_is_rounded_once_at_the_end(ranks):
    for rank, (equal, same) in enumerate(ranks(2, in_low_precision)):
        assert equal > 0.99 and same, f"rank {rank}"


@pytest.mark.parametrize("form", ["ring", "all-gather"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_it_drops_what_one_process_drops(ranks, world_size, is_causal, form):
    options = {"heads": 2, "is_causal": is_causal, "dropout_p": 0.3, "tile": 2}
    assert max(ranks(world_size, trained, form=form, length=8 * world_size, **options)) < 1e-13


def masks(rank, world_size, attend, seed):
    """What this rank's heads drop, twice, and again in backward; the generator's state behind all."""
    torch.manual_seed(seed)
    length, dropped = 8, []

    def seen(query, key, value, **options):
        output = attend(query, key, torch.eye(length).expand(*query.shape[:2], -1, -1), **options)
        dropped.append(output.detach() == 0)
        return output[..., :4] + 0 * value

    query, key, value = share([one.float() for one in whole(length, 2 * world_size)[:3]], places(length))
    for _ in range(2):
        output = checkpoint(lambda x: ulysses_attention(x, key, value, attend=seen, dropout_p=0.5), query)
        torch.rand(seed)
        output.sum().backward()
    return [one for tensor in dropped for one in tensor.flatten(0, 1)], torch.get_rng_state()


@pytest.mark.parametrize("attend", [F.scaled_dot_product_attention, flash_attention])
def test_all_to_all_drops_otherwise_for_every_head(ranks, attend):
    (mine, state), (theirs, same) = ranks(2, masks, attend=attend, seed=3)
    first, again, second, last = (mine[at : at + 4] + theirs[at : at + 4] for at in range(0, 16, 4))
    assert all(map(torch.equal, first + second, again + last)) and torch.equal(state, same)
    assert not any(torch.equal(a, b) for a, b in combinations(first + second, 2))


def by_the_idea(rank, world_size):
    query, key, value, _ = whole(6 * world_size, 2)
    mine = slice(6 * rank, 6 * rank + 6)
    found = ring_attention_forward(query[..., mine, :], key[..., mine, :], value[..., mine, :])
    return (found - F.scaled_dot_product_attention(query, key, value)[..., mine, :]).abs().max().item()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_idea_is_attention_too(ranks, world_size):
    assert max(ranks(world_size, by_the_idea)) < 1e-13


def sent(rank, world_size, form):
    *tensors, _ = whole(4 * world_size, world_size)
    mine = share(tensors, places(4 * world_size))
    with comm.record() as events:
        FORMS[form](*mine).sum().backward()
    return sum(event.sent_bytes for event in events), mine[0].nbytes


def test_bytes_are_the_formulas(ranks):
    for n in (2, 3):
        formulas = {"ring": 2 * ((n - 1) + (2 * n - 1)), "all-gather": 2 * 2 * (n - 1)}
        formulas["all-to-all"] = 2 * 4 * (n - 1) / n
        for form, times in formulas.items():
            for rank, (found, size) in enumerate(ranks(n, sent, form=form)):
                assert found == times * size, f"rank {rank}, {n}"


def sent_with(rank, world_size, form, options, masked):
    *tensors, _ = whole(8 * world_size, world_size)
    held = places(8 * world_size)
    mask = {"key_mask": torch.ones(2, len(held), dtype=torch.bool)} if masked else {}
    with comm.record() as events:
        FORMS[form](*share(tensors, held), **options, **mask).sum().backward()
    return sum(event.sent_bytes for event in events)


@pytest.mark.parametrize("form", ["ring", "all-gather", "all-to-all, tiles"])
def test_a_window_sends_as_much_and_a_mask_a_byte_a_token(ranks, form):
    plain = ranks(2, sent_with, form=form, options={"is_causal": True}, masked=False)
    options = {"is_causal": True, "window": 2}
    assert ranks(2, sent_with, form=form, options=options, masked=False) == plain
    masked = ranks(2, sent_with, form=form, options=options, masked=True)
    assert masked == [of + 2 * 8 for of in plain]  # 2 sequences of 8 tokens, to one other rank


def work(rank, world_size, window=None):
    """How many tiles each rank makes."""
    made = []
    real = Tiles.scores
    Tiles.scores = lambda *these: made.append(1) or real(*these)
    try:
        *tensors, _ = whole(8 * world_size, 1)
        ring_attention(*share(tensors, places(8 * world_size)), is_causal=True, tile=1, window=window)
    finally:
        Tiles.scores = real
    return len(made)


def test_zig_zag_gives_all_ranks_the_same_work(ranks):
    made = ranks(3, work)
    assert made == [24 * 25 // 2 // 3] * 3


def test_keys_outside_the_window_are_not_computed(ranks):
    made = ranks(3, work, window=5)
    assert sum(made) == 24 * 5 - 4 * 5 // 2  # the first four tokens see fewer than five
    assert made[1:] == [8 * 5] * 2


def kept(rank, world_size, form, own=8):
    """Bytes kept for backward, without the inputs; bytes of this rank's keys and values, and of one output."""
    mine = share(whole(own * world_size, 2)[:3], places(own * world_size))
    with MemoryTracker() as tracker:
        output = FORMS[form](*mine, is_causal=True)
        held = sum(tracker.current.values())
    return held, mine[1].nbytes + mine[2].nbytes, output.nbytes + output[..., :1].nbytes


def test_the_all_gather_keeps_all_keys_and_the_ring_its_own(ranks):
    for n in (2, 3):
        for rank, (held, pair, output) in enumerate(ranks(n, kept, form="all-gather")):
            assert held >= n * pair + output, f"rank {rank}, {n}"
        for rank, (held, _, output) in enumerate(ranks(n, kept, form="ring")):
            assert held == output, f"rank {rank}, {n}"


def memory(rank, world_size, own):
    """Bytes held after forward, and at the peak, of `own` tokens on each rank."""
    query, key, value, _ = whole(own * world_size, 2, width=16)
    mine = share((query, key, value), places(own * world_size))
    del query, key, value
    with MemoryTracker() as tracker:
        output = ring_attention(*mine, is_causal=True, tile=4)
        held = sum(tracker.current.values())
        output.sum().backward()
    return held, tracker.peak_total


@pytest.mark.slow
def test_a_rank_holds_its_part(ranks):
    held = {n: ranks(n, memory, own=24 // n)[0][0] for n in (1, 2, 3)}
    assert held[1] == 2 * held[2] == 3 * held[3]
    peaks = {(n, own): ranks(n, memory, own=own)[0][1] for n, own in ((2, 16), (2, 24), (2, 32), (3, 16), (4, 16))}
    assert peaks[2, 16] == peaks[3, 16] == peaks[4, 16]  # the whole may be as long as it likes
    assert peaks[2, 32] - peaks[2, 24] == peaks[2, 24] - peaks[2, 16]


def train_gpt(rank, world_size, form, steps=3, length=24):
    """How far the weights of a GPT whose sequences the ranks share are from one's that has them whole."""
    generator = torch.Generator().manual_seed(0)
    batches = torch.randint(32, (steps, 2, length + 1), generator=generator)
    torch.manual_seed(0)
    oracle = models.build("gpt", vocab=32, context=length, layers=2, heads=6, width=24).to(F64)
    torch.manual_seed(rank)
    mine = models.build("gpt", vocab=32, context=length, layers=2, heads=6, width=24).to(F64)
    if rank == 0:
        mine.load_state_dict(oracle.state_dict())
    for block in mine.blocks:
        block.attention.attend = FORMS[form]
    held, mine = places(length), DDP(mine)
    for model, of in ((oracle, torch.arange(length)), (mine, held)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for tokens in batches:
            optimizer.zero_grad()
            loss = models.loss("gpt")(model(tokens[:, of], of), tokens[:, of + 1])
            loss.backward()
            optimizer.step()
    return gap([p.detach() for p in mine.parameters()], [p.detach() for p in oracle.parameters()])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_gpt_on_shared_sequences_trains_as_one_process_does(ranks, world_size, form):
    assert max(ranks(world_size, train_gpt, form=form)) < 1e-12


def wrong(rank, world_size, case):
    zeros = torch.zeros(1, 3, 4, 2)
    try:
        if case == "length":
            places(2 * world_size + 1)
        elif case == "heads":
            ulysses_attention(zeros, zeros, zeros)
        elif case == "window":
            even = zeros[:, :2]
            ulysses_attention(even, even, even, window=2, is_causal=True)
        elif case == "mask":
            ring_attention(zeros, zeros, zeros, key_mask=torch.ones(1, 8, dtype=torch.bool))
        elif case == "odd":
            ring_attention(*[zeros[..., :3, :]] * 3)
        elif case == "odd, all-gather":
            all_gather_attention(*[zeros[..., :3, :]] * 3)
        else:
            FORMS[case](zeros, zeros[..., :2, :], zeros)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("length", "length=5 must be divisible by 4: two chunks for each of 2 ranks"),
        ("heads", "3 heads must be divisible by 2 ranks"),
        ("odd", "length=3 of a rank must be even, as it has two chunks"),
        ("odd, all-gather", "length=6 must be divisible by 4: two chunks for each of 2 ranks"),
        ("window", "SDPA supports no window and no key_mask: pass attend=flash_attention"),
        ("mask", "key_mask has shape [1, 8], expected [1, 4]"),
        (
            "ring",
            "query, key and value must have the same length and width: [1, 3, 4, 2], [1, 3, 2, 2], [1, 3, 4, 2]",
        ),
        (
            "all-gather",
            "query, key and value must have the same length and width: [1, 3, 4, 2], [1, 3, 2, 2], [1, 3, 4, 2]",
        ),
    ],
)
def test_what_cannot_be(ranks, case, words):
    assert ranks(2, wrong, case=case) == [words] * 2
