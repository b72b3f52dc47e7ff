"""A model whose matrices are split over ranks, against one process that has them whole, and against DTensor."""

import copy
from contextlib import nullcontext
from functools import partial
from itertools import chain, product

import pytest
import torch
from tensor_parallel_models import (
    BATCH,
    CONTEXT,
    F64,
    LAYERS,
    VOCAB,
    WIDTH,
    Recorded,
    alone,
    batches,
    by_pytorch,
    furthest,
    gpt,
    split,
    train,
    whole_loss,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from labkit import comm, models
from labkit.ddp import DDP
from labkit.ideas.tensor_and_sequence import tensor_parallel_mlp
from labkit.mesh import Mesh
from labkit.models.plans import gpt as gpt_plan
from labkit.models.plans import of_blocks
from labkit.recompute import checkpoint, checkpoint_every
from labkit.tensor_parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    Shard,
    VocabularyParallelCrossEntropy,
    full_state_dict,
    load_full_state_dict,
    parallelize_module,
    tensor_parallel,
    vocabulary_parallel_cross_entropy,
    whole_parameters,
)
from labkit.tensor_parallel.tp_state_dict import cuts_of
from labkit.trainer import Trainer


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_it_trains_as_one_process(ranks, world_size, tied):
    losses, weights = alone(tied=tied)
    for rank, (found, state) in enumerate(ranks(world_size, split, tied=tied)):
        assert furthest(found, losses) < 1e-12 and furthest(state, weights) < 1e-12, f"rank {rank}"


def in_padded_words(rank, world_size, vocab, tied, sequence, whole_logits):
    """Losses, state, which words are -inf, and whether padding stays zero and is not saved."""
    plan = gpt_plan(tensor_parallel, sequence, whole_logits)
    model = parallelize_module(gpt(rank, vocab=vocab, tied=tied), None, plan)
    masked = model(batches(1, vocab)[0][0]).isneginf()
    losses = train(model, whole_loss if whole_logits else VocabularyParallelCrossEntropy(), vocab=vocab)
    size = len(model.head.weight)
    padding = slice(max(0, min(size, vocab - rank * size)), None)
    state = full_state_dict(model)
    words = model.head.weight, model.token_embedding.weight
    exact = all(not part[padding].any() for p in words for part in (p, p.grad))
    exact &= all(
        state[f"{name}.weight"].untyped_storage().nbytes() == vocab * WIDTH * 8 for name in ("head", "token_embedding")
    )
    load_full_state_dict(model, state)
    return losses, state, masked.all((0, 1)).tolist(), exact and furthest(full_state_dict(model), state) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "vocab", "own"), [(2, 13, [7, 6]), (4, 5, [2, 2, 1, 0])])
def test_words_that_the_ranks_cannot_share_are_padded(ranks, world_size, vocab, own):
    for tied, sequence, whole_logits in ((True, False, False), (False, True, False), (True, False, True)):
        model = gpt(0, vocab=vocab, tied=tied)
        losses = train(model, whole_loss, vocab=vocab)
        how = {"tied": tied, "sequence": sequence, "whole_logits": whole_logits}
        told = ranks(world_size, in_padded_words, vocab=vocab, **how)
        for (found, state, masked, exact), many in zip(told, own, strict=True):
            assert furthest(found, losses) < 1e-12 and furthest(state, model.state_dict()) < 1e-12
            assert masked == ([False] * vocab if whole_logits else [False] * many + [True] * (own[0] - many)) and exact


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_it_trains_as_dtensor(ranks, world_size):
    for rank, (losses, weights) in enumerate(ranks(world_size, by_pytorch)):
        assert losses < 1e-12 and weights < 1e-12, f"rank {rank}"


class Grouped(nn.Module):
    """Attention with query, key and value of their own: of these two fewer heads. Dropout before and after the sum."""

    def __init__(self, inner=0.0, outer=0.0, key_heads=6):
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key, self.value = (nn.Linear(WIDTH, 2 * key_heads) for _ in range(2))
        self.inner, self.outer = Recorded(inner), Recorded(outer)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.key_heads = key_heads

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (-1, 2)).transpose(1, 2) for part in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.outer(self.output(self.inner(mixed.transpose(1, 2).flatten(2))))


def grouped(seed, layers=2, **options):
    torch.manual_seed(seed)
    return nn.Sequential(*(Grouped(**options) for _ in range(layers))).to(F64)


def grouped_plan(once=True):
    columns = {f"*.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    prepare = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())
    return {**({"*": prepare} if once else {}), **columns, "*.output": RowwiseParallel()}


def inputs():
    generator = torch.Generator().manual_seed(2)
    return torch.randn(BATCH, CONTEXT, WIDTH, generator=generator, dtype=F64).requires_grad_()


def input_gradients(model, steps=3):
    """Of SGD with momentum: [step, B, T, C]."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    gradients = []
    for _ in range(steps):
        optimizer.zero_grad()
        x = inputs()
        model(x).square().mean().backward()
        gradients.append(x.grad)
        optimizer.step()
    return torch.stack(gradients)


def split_layers(rank, world_size, once=True, recomputed=False, **options):
    model = parallelize_module(grouped(rank, **options), None, grouped_plan(once))
    if recomputed:
        checkpoint_every(model, Grouped)
    with comm.record() as log:
        gradients = input_gradients(model)
    sent = [(event.op, event.sent_bytes) for event in log]
    inner, outer = ([layer.get_submodule(name).masks for layer in model] for name in ("inner", "outer"))
    return gradients, full_state_dict(model), sent, inner, outer


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_grouped_heads_with_dropout_where_all_is_whole(ranks, world_size):
    for once in (True, False):
        told = ranks(world_size, split_layers, once=once, outer=0.3)
        model = grouped(0, outer=0.3)
        for layer, masks in zip(model, told[0][-1], strict=True):
            layer.outer.given = masks  # behind a split part no rank draws what one process would
        gradients = input_gradients(model)
        for found, state, sent, _, outer in told:
            assert (found - gradients).abs().max() < 1e-12 and furthest(state, model.state_dict()) < 1e-12
            assert all(map(torch.equal, chain(*outer), chain(*(layer.outer.masks for layer in model))))
            # query, key and value: one all-reduce of the input's gradient, or one each
            n, size = world_size, BATCH * CONTEXT * WIDTH * 8
            many = 3 * 2 * (2 if once else 4) if n > 1 else 0
            assert sent == [("all_reduce", 2 * (n - 1) * size // n)] * many


def test_what_is_split_draws_other_numbers(ranks):
    told = ranks(2, split_layers, inner=0.5, outer=0.5)
    assert all(map(torch.equal, *(chain(*outer) for *_, outer in told)))
    (*_, inner, _), (*_, other_inner, _) = ranks(2, split_layers, inner=0.5)  # nothing else is drawn
    masks = list(chain(*inner, *other_inner))  # of 2 ranks, 2 layers, 3 steps
    assert len(masks) == 12
    assert not any(torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])
    again = ranks(2, split_layers, inner=0.5, outer=0.5, recomputed=True)
    for (plain, *_), (found, *_) in zip(told, again, strict=True):
        assert torch.equal(plain, found)


def in_segments(rank, world_size, form):
    """Gradients where what runs again begins inside of a split pair, and forwards come before the backward."""
    torch.manual_seed(rank)
    layers = [nn.Linear(8, 16), Recorded(0.5), nn.Linear(16, 8), Recorded(0.5), nn.LayerNorm(8)]
    model = nn.Sequential(*copy.deepcopy(layers), *layers).to(F64)
    columns, rows = (
        (dict.fromkeys(names, style())) for names, style in (("05", ColwiseParallel), ("27", RowwiseParallel))
    )
    parallelize_module(model, None, columns | rows)
    forms = {"torch": partial(torch_checkpoint, use_reentrant=False), "labkit": checkpoint}
    found = []
    torch.manual_seed(5)
    state = torch.get_rng_state()
    for run in (lambda part, x: part(x), forms[form]):
        torch.set_rng_state(state)
        losses = []
        for _ in range(3):
            y = torch.linspace(-1, 1, 32, dtype=F64).view(4, 8).requires_grad_()
            for part in (model[:1], model[1:4], model[4:6], model[6:]):
                y = run(part, y)
            losses.append(y.pow(3).sum())
        for loss in (losses[1], losses[2], losses[0]):
            loss.backward()
        model[3].masks, masks = [], model[3].masks
        found.append([*losses, *(p.grad for p in model.parameters())])
        model.zero_grad()
        drawn = torch.rand(1)
    return all(map(torch.equal, *found)), masks[:3], drawn


@pytest.mark.parametrize("form", ["torch", "labkit"])
def test_what_runs_again_draws_the_same_wherever_it_begins(ranks, form):
    (one, masks, drawn), (other, same, also) = ranks(2, in_segments, form=form)
    assert one and other and drawn == also
    assert all(map(torch.equal, masks, same)) and not torch.equal(*masks[:2])


class Open(nn.Sequential):
    """Its output is shards, which nobody makes whole."""

    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))


def draw_behind(rank, world_size, case):
    """A number of each rank, where the module that was split never runs."""
    torch.manual_seed(rank)
    if case == "by hand":
        model = parallelize_module(gpt(rank, dropout=0.5), None, gpt_plan(tensor_parallel))
        model.read_out(model.blocks(model.embed(batches(1, VOCAB)[0][0])))
    else:
        layers = {"list": nn.ModuleList([Open()]), "nested": nn.ModuleDict({"a": nn.ModuleList([Open()])})}[case]
        plan = {"*.0" if case == "list" else "a.*.0": ColwiseParallel()}
        parallelize_module(layers, None, plan)
        next(part for part in layers.modules() if isinstance(part, Open))(torch.ones(1, WIDTH))
    return torch.rand(1)


@pytest.mark.parametrize("case", ["by hand", "list", "nested"])
def test_behind_the_last_layer_all_draw_alike(ranks, case):
    assert torch.equal(*ranks(2, draw_behind, case=case))


def messages(rank, world_size):
    model = parallelize_module(gpt(0).blocks, None, of_blocks(gpt_plan(tensor_parallel)))
    with comm.record() as log:
        model(inputs()).square().mean().backward()
    return [(event.op, event.sent_bytes) for event in log]


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_block_is_four_all_reduces(ranks, world_size):
    size = BATCH * CONTEXT * WIDTH * 8
    expected = [("all_reduce", 2 * (world_size - 1) * size // world_size)] * (4 * LAYERS)
    assert ranks(world_size, messages) == [expected] * world_size


def losses_of_words(rank, world_size, reduction):
    generator = torch.Generator().manual_seed(3)
    whole = 100 * torch.randn(3, 5, VOCAB, generator=generator, dtype=F64)
    target = torch.randint(VOCAB, (3, 5), generator=generator)
    target[1, 2:] = -100
    mine, whole = whole.chunk(world_size, -1)[rank].clone().requires_grad_(), whole.requires_grad_()
    with comm.record() as log:
        ours = vocabulary_parallel_cross_entropy(mine, target, reduction=reduction)
        ours.square().sum().backward()
    theirs = F.cross_entropy(whole.flatten(0, 1), target.flatten(), reduction=reduction)
    theirs.square().sum().backward()
    gap = (mine.grad - whole.grad.chunk(world_size, -1)[rank]).abs().max().item()
    return max(gap, (ours.flatten() - theirs).abs().max().item()), [event.payload_bytes for event in log]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_of_logits_that_nobody_has_whole(ranks, reduction):
    for world_size in (1, 2, 3):
        for rank, (gap, payloads) in enumerate(ranks(world_size, losses_of_words, reduction=reduction)):
            assert gap < 1e-11 and payloads == [15 * 8, 2 * 15 * 8], f"rank {rank}, {world_size}"  # gradients reach 1e3


def losses_with_settings(rank, world_size):
    """As F.cross_entropy, with class weights and smoothed labels, also where the last words are padding."""
    generator = torch.Generator().manual_seed(3)
    worst = 0.0
    for padding in (0, 1):
        words = VOCAB - padding
        logits = 10 * torch.randn(3, 5, words, generator=generator, dtype=F64)
        target = torch.randint(words, (3, 5), generator=generator)
        target[1, 2:] = 1
        weight = torch.rand(words, generator=generator, dtype=F64)
        weight[4] = 0.0
        for given, smoothing, reduction in product((None, weight), (0.0, 0.3, 1.0), ("mean", "sum", "none")):
            settings = {"weight": given, "label_smoothing": smoothing, "reduction": reduction, "ignore_index": 1}
            whole = logits.clone().requires_grad_()
            mine = F.pad(logits, (0, padding), value=-torch.inf).chunk(world_size, -1)[rank].clone().requires_grad_()
            ours = VocabularyParallelCrossEntropy(**settings)(mine, target)
            theirs = F.cross_entropy(whole.flatten(0, 1), target.flatten(), **settings)
            for loss in (ours, theirs):
                loss.square().sum().backward()
            expected = F.pad(whole.grad, (0, padding)).chunk(world_size, -1)[rank]
            gap = max((mine.grad - expected).abs().max().item(), (ours.flatten() - theirs).abs().max().item())
            worst = max(worst, gap / max(1.0, theirs.detach().max().item()))
    return worst


def test_class_weights_and_label_smoothing_as_pytorchs(ranks):
    for world_size in (1, 2, 3):
        assert max(ranks(world_size, losses_with_settings)) < 1e-12


def no_targets(rank, world_size):
    logits = torch.zeros(2, 3, requires_grad=True)
    loss = vocabulary_parallel_cross_entropy(logits, torch.full((2,), -100))
    loss.backward()
    for settings, words in (
        ({"label_smoothing": 1.5}, "label_smoothing=1.5 must be between 0 and 1"),
        ({"weight": torch.ones(7)}, r"weight has shape \[7\]; it must be \[V\] with at most 6 entries"),
    ):
        with pytest.raises(ValueError, match=words):
            vocabulary_parallel_cross_entropy(logits, torch.zeros(2, dtype=torch.int64), **settings)
    return loss.isnan().item(), logits.grad.abs().max().item()


def test_the_mean_of_no_targets_has_no_gradient(ranks):
    assert ranks(2, no_targets) == [(True, 0.0)] * 2


def by_the_idea(rank, world_size):
    torch.manual_seed(0)
    up, down = nn.Linear(WIDTH, 4 * WIDTH).to(F64), nn.Linear(4 * WIDTH, WIDTH).to(F64)
    x, whole = inputs(), inputs()
    mine = [up.weight, up.bias, down.weight.t()]
    mine = [one.detach().chunk(world_size)[rank].requires_grad_() for one in mine]
    output = tensor_parallel_mlp(x, mine[0], mine[1], mine[2].t(), down.bias.detach())
    expected = down(F.gelu(up(whole)))
    output.square().mean().backward()
    expected.square().mean().backward()
    theirs = [one.chunk(world_size)[rank] for one in (up.weight.grad, up.bias.grad, down.weight.grad.t())]
    pairs = zip([output, x.grad, *(one.grad for one in mine)], [expected, whole.grad, *theirs], strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_idea_is_two_layers(ranks, world_size):
    assert max(ranks(world_size, by_the_idea)) < 1e-13


def beside_data_parallel(rank, world_size):
    mesh = Mesh({"dp": 2, "tp": 2})
    model = parallelize_module(gpt(rank), mesh.group("tp"), gpt_plan(tensor_parallel))
    model = DDP(model, process_group=mesh.group("dp"))
    loss = VocabularyParallelCrossEntropy(mesh.group("tp"))
    mine = mesh.rank("dp")
    losses = train(model, loss, share=slice(mine, mine + 1))
    return losses, full_state_dict(model)


def test_beside_data_parallel(ranks):
    losses, weights = alone()
    told = ranks(4, beside_data_parallel)
    for rank, (_, state) in enumerate(told):
        assert furthest(state, weights) < 1e-12, f"rank {rank}"
    means = [(a + b) / 2 for a, b in zip(told[0][0], told[2][0], strict=True)]
    assert furthest(means, losses) < 1e-12


def moved_states(rank, world_size):
    """A full state dict loads and saves; a copy trains like the original; a wrong shape is reported."""
    state = gpt(5).state_dict()
    model = parallelize_module(gpt(rank), None, gpt_plan(tensor_parallel))
    load_full_state_dict(model, state)
    back = furthest(full_state_dict(model), state)
    twin = copy.deepcopy(model)
    tied = model.head.weight is model.token_embedding.weight and twin.head.weight is twin.token_embedding.weight
    loss = VocabularyParallelCrossEntropy()
    same = train(model, loss) == train(twin, loss)
    try:
        load_full_state_dict(model, state | {"head.weight": torch.zeros(VOCAB + 1, WIDTH)})
    except RuntimeError as error:
        return back, tied, same, len(model.head.weight), str(error)


def test_whole_states(ranks):
    told = f"'head.weight' has shape [{VOCAB + 1}, {WIDTH}], expected [{VOCAB}, {WIDTH}]"
    for n in (2, 3):
        assert ranks(n, moved_states) == [(0.0, True, True, VOCAB // n, told)] * n


LAYOUTS = [(ColwiseParallel, "output_layouts"), (RowwiseParallel, "input_layouts")]


def by_layout(rank, world_size, style, given):
    """Output and gradients of a layer whose other side is sharded along some dim: those of the full layer."""
    torch.manual_seed(0)
    whole, x = nn.Linear(4, 6, dtype=F64), torch.randn(2, 6, 4, dtype=F64)
    apart = []

    def part(t, dim):
        return t.chunk(world_size, dim)[rank]

    for dim in (0, 1, 2, -1):
        split = parallelize_module(copy.deepcopy(whole), None, style(**{given: tensor_parallel.Shard(dim)}))
        seen, source = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected = whole(source)
        if given == "input_layouts":
            y = split(part(seen, dim))
            y.sum().backward()
            expected.sum().backward()
            apart += [y - expected, part(seen.grad, dim) - part(source.grad, dim)]
        else:
            y = split(seen)
            y.square().sum().backward()
            expected.square().sum().backward()
            apart += [y - part(expected, dim), seen.grad - source.grad]
        whole.zero_grad()
    return max(one.abs().max().item() for one in apart)


@pytest.mark.parametrize(("style", "given"), LAYOUTS)
def test_shards_of_any_dim(ranks, style, given):
    assert max(ranks(2, by_layout, style=style, given=given)) < 1e-12


def gathered_outputs(rank, world_size):
    """Single styles for single layers, and outputs and inputs that are whole."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 12), nn.Linear(12, 3)).to(F64)
    model = copy.deepcopy(whole)
    parallelize_module(model[0], None, ColwiseParallel(output_layouts=Replicate()))
    parallelize_module(model, None, {"1": ColwiseParallel(output_layouts=Replicate())})
    parallelize_module(model, None, {"2": RowwiseParallel(input_layouts=Replicate())})
    tokens = torch.tensor([0, 4, 2])
    for one in (whole, model):
        one(tokens).sum().backward()  # not of squares: that of the word for padding is zero anyway
    gap = furthest(full_state_dict(model), whole.state_dict())
    gradients = zip(model.parameters(), whole.parameters(), strict=True)
    cuts = cuts_of(model)
    return gap + max(
        (a.grad - (b.grad.chunk(world_size, cuts[a].dim)[rank] if a in cuts else b.grad)).abs().max().item()
        for a, b in gradients
    )


def test_outputs_that_are_gathered(ranks):
    assert max(ranks(3, gathered_outputs)) < 1e-12


def wrong(rank, world_size, case):
    column, row = ColwiseParallel(), RowwiseParallel()
    plans = {
        "pattern": {"blocks.*.attention.quary": column},
        "no star": {"blocks.0.attention.outputs": row},
        "heads": {"blocks.*.attention.query_key_value": column},
        "features": {"blocks.*.network.0": column},
        "logits": {"token_embedding": row, "head": column},
        "tied": {"token_embedding": row},
        "two ways": {"token_embedding": column, "head": column},
        "kind": {"norm": column},
        "list": {"0": column, "1": row},
        "twice": {"blocks.*.network.0": column, "blocks.1.network.0": row},
        "counts words": {"token_embedding": column},
        "foreign": {"blocks.*.network.0": torch.distributed.tensor.parallel.ColwiseParallel()},
    }
    model = gpt(0, heads=3 if case == "heads" else 12, vocab=25 if case == "logits" else VOCAB)
    model.token_embedding.scale_grad_by_freq = case == "counts words"
    if case == "features":
        model.blocks[0].network[0] = nn.Linear(WIDTH, 7)
    if case == "list":
        model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    before = [p.shape for p in model.parameters()]
    try:
        parallelize_module(model, None, plans[case])
    except (TypeError, ValueError) as error:
        assert before == [p.shape for p in model.parameters()]
        return str(error)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "pattern",
            "pattern 'blocks.*.attention.quary' of the plan matches no module of this GPT; similar names are 'blocks",
        ),
        (
            "no star",
            "pattern 'blocks.0.attention.outputs' of the plan matches no module of this GPT; similar names are 'blocks",
        ),
        ("heads", "blocks.0.attention: heads=3 must be divisible by 2 ranks"),
        ("features", "blocks.0.network.0: out_features=7 must be divisible by 2 ranks"),
        ("logits", "head: out_features=25 must be divisible by 2 ranks; for logits pass output_layouts"),
        (
            "tied",
            "a tied parameter cannot be sharded in two ways: 'token_embedding.weight' (along dim 0), 'head",
        ),
        (
            "two ways",
            "a tied parameter cannot be sharded in two ways: 'token_embedding.weight' (along dim 1), 'head",
        ),
        ("kind", "norm is a LayerNorm: ColwiseParallel supports nn.Linear and nn.Embedding"),
        ("list", "0 leaves shards that no forward ends, because this ModuleList has no forward"),
        ("twice", "two patterns of the plan match 'blocks.1.network.0'"),
        ("counts words", "token_embedding has scale_grad_by_freq, which sharding does not support"),
        ("foreign", "blocks.0.network.0: ColwiseParallel is not a style of labkit.tensor_parallel"),
    ],
)
def test_what_cannot_be(ranks, case, words):
    for rank, told in enumerate(ranks(2, wrong, case=case)):
        assert told.startswith(words), f"rank {rank}"


class Weighed(nn.Module):
    """Of two inputs by position and two by keyword."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1, 5, dtype=F64))

    def forward(self, x, y, z=None, flag=None):
        found = (x * self.weight + 2 * y.square() + 3 * z).cumsum(0)
        return (found, y * self.weight, 7) if flag else found


LAYOUTS = {
    "inputs": {"input_layouts": (0, None), "desired_input_layouts": (None, None)},
    "second input": {"input_layouts": (None, 0), "desired_input_layouts": (None, "whole")},
    "both": {"input_layouts": ("whole", 0), "desired_input_layouts": ("whole", "whole")},
    "keyword": {"input_kwarg_layouts": {"z": 0}, "desired_input_kwarg_layouts": {"z": "whole"}},
}
OUTPUTS = {"output_layouts": ("whole", "whole", None), "desired_output_layouts": (0, 1, None)}


def placed(layouts, replicate, shard):
    """Layouts of either library."""
    if isinstance(layouts, dict):
        return {name: placed(one, replicate, shard) for name, one in layouts.items()}
    if isinstance(layouts, tuple):
        return tuple(placed(one, replicate, shard) for one in layouts)
    return {"whole": replicate(), None: None}.get(layouts) or (None if layouts is None else shard(layouts))


def in_other_layouts(rank, world_size, case, outputs):
    from torch.distributed.tensor import DTensor, parallel
    from torch.distributed.tensor import Replicate as TheirReplicate
    from torch.distributed.tensor import Shard as TheirShard

    def run(library, split, group, replicate, shard, **local):
        torch.manual_seed(0)
        values = {word: torch.randn(4, 4, dtype=F64) for word in "xyz"}
        word = {"inputs": "x", "second input": "y", "both": "y", "keyword": "z"}[case]
        given = placed(LAYOUTS[case], replicate, shard)
        style = library.PrepareModuleInput(**given, use_local_output=True)
        if outputs:
            given |= placed(OUTPUTS, replicate, shard) | {"use_local_input": True}
            style = library.PrepareModuleInputOutput(**given)
        module = split(Weighed(), group, style)
        if case != "inputs":
            values[word] = values[word].chunk(world_size)[rank].clone()
        leaves = [value.requires_grad_() for value in values.values()]
        found = module(values["x"], values["y"], z=values["z"], flag=outputs)
        found, rest = (found[0], found[1:]) if outputs else (found, ())
        (found.square().sum() + sum(one.sum() for one in rest[:1])).backward()
        return [found.detach(), *(one.detach() if torch.is_tensor(one) else one for one in rest)], [
            leaf.grad for leaf in leaves
        ]

    mesh = torch.distributed.init_device_mesh("cpu", (world_size,))
    mine = run(tensor_parallel, parallelize_module, None, Replicate, Shard)
    theirs = run(parallel, parallel.parallelize_module, mesh, TheirReplicate, TheirShard)
    assert not any(isinstance(one, DTensor) for one in mine[0])
    return mine, theirs


@pytest.mark.parametrize("outputs", [False, True])
@pytest.mark.parametrize("case", LAYOUTS)
def test_inputs_and_outputs_in_other_layouts_as_pytorchs(ranks, case, outputs):
    for rank, ((mine, gradients), (theirs, their_gradients)) in enumerate(
        ranks(2, in_other_layouts, case=case, outputs=outputs)
    ):
        for found, wanted in zip(mine + gradients, theirs + their_gradients, strict=True):
            assert torch.equal(found, wanted) if torch.is_tensor(wanted) else found == wanted, f"rank {rank}"


def not_as_many(rank, world_size):
    x, told = torch.ones(2, 4, dtype=F64), []
    one = {"input_layouts": Replicate(), "desired_input_layouts": Replicate()}
    named = {"input_kwarg_layouts": {"z": Replicate()}, "desired_input_kwarg_layouts": {"z": Replicate()}}
    for attempt in (
        lambda: PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=Replicate()),
        lambda: PrepareModuleInput(**named | {"desired_input_kwarg_layouts": {"y": Replicate()}}),
        lambda: parallelize_module(Weighed(), None, PrepareModuleInput(**one))(x, x, z=x),
        lambda: parallelize_module(Weighed(), None, PrepareModuleInput(**one))(x=x, y=x, z=x),
        lambda: parallelize_module(Weighed(), None, PrepareModuleInput(**named))(x, x, x),
    ):
        try:
            attempt()
        except ValueError as error:
            told.append(str(error))
    return told


def test_layouts_and_inputs_are_as_many(ranks):
    hint = "1 input_layouts: use None for a tensor that stays unchanged"
    assert ranks(2, not_as_many)[1] == [
        "input_layouts has 2 layouts but desired_input_layouts has 1: use as many",
        "input_kwarg_layouts has ['z'] but desired_input_kwarg_layouts has ['y']: use the same names",
        f"Weighed: 2 positional inputs but {hint}",
        f"Weighed: 0 positional inputs but {hint}",
        "Weighed: missing keyword input ['z']",
    ]


class Fused(nn.Module):
    """Attention of 4 heads of 2, with 2 heads of keys and values, from one matrix, or from three."""

    def __init__(self, fused):
        super().__init__()
        self.head_dim, self.fused = 2, fused
        sizes = {"qkv": 16} if fused else {"q": 8, "k": 4, "v": 4}
        for name, size in sizes.items():
            setattr(self, name, nn.Linear(WIDTH, size))
        self.output = nn.Linear(8, WIDTH)
        self.num_heads = 4

    def forward(self, x):
        q, k, v = self.qkv(x).split([8, 4, 4], -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q, k, v = (one.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for one in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


def fused_and_gathered(rank, world_size):
    torch.manual_seed(0)
    model = nn.Sequential(Fused(fused=True)).to(F64)
    gathered = {"0.qkv": ColwiseParallel(output_layouts=Replicate())}
    plan = gathered | {"0.output": RowwiseParallel(input_layouts=Replicate())}
    return input_gradients(parallelize_module(model, None, plan))


def test_heads_that_are_gathered_need_not_be_shared(ranks):
    torch.manual_seed(0)
    wanted = input_gradients(nn.Sequential(Fused(fused=True)).to(F64))
    for rank, found in enumerate(ranks(4, fused_and_gathered)):
        assert (found - wanted).abs().max() < 1e-12, f"rank {rank}"


def too_few_key_heads(rank, world_size):
    plan = {f"0.{name}": ColwiseParallel() for name in "qkv"} | {"0.output": RowwiseParallel()}
    try:
        parallelize_module(nn.Sequential(Fused(fused=False)), None, plan)
    except ValueError as error:
        return str(error)


def test_a_key_head_is_not_cut_in_two(ranks):
    assert ranks(4, too_few_key_heads) == ["0.k: 2 heads of 2 must be divisible by 4 ranks"] * 4
    assert ranks(2, too_few_key_heads) == [None] * 2


def clipped(rank, world_size, norm_type):
    model = gpt(0) if rank is None else parallelize_module(gpt(0), None, gpt_plan(tensor_parallel))
    optimizer, norms = torch.optim.SGD(model.parameters(), lr=0.5), []
    for tokens, targets in batches(3, VOCAB):
        optimizer.zero_grad()
        loss = F.cross_entropy if rank is None else vocabulary_parallel_cross_entropy
        loss(model(tokens).flatten(0, 1), targets.flatten()).backward()
        if rank is None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.01, norm_type))
        else:
            norms.append(tensor_parallel.clip_grad_norm_(model, 0.01, norm_type))
        optimizer.step()
    return torch.stack(norms).double(), model.state_dict() if rank is None else full_state_dict(model)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clipped_by_the_norm_of_the_whole(ranks, norm_type):
    norms, state = clipped(None, 1, norm_type)
    assert (norms > 0.01).all()
    for rank, (found, whole) in enumerate(ranks(3, clipped, norm_type=norm_type)):
        assert (found - norms).abs().max() < 1e-12 and furthest(whole, state) < 1e-12, f"rank {rank}"


def trained_with_clip(rank, world_size):
    model = gpt(0)
    if rank is not None:
        parallelize_module(model, None, gpt_plan(tensor_parallel, whole_logits=True))
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.5), models.loss("gpt"))
    trainer.clip = 0.01
    for batch in batches(2, VOCAB):
        trainer.train_step(*batch)
    return model.state_dict() if rank is None else full_state_dict(model)


def test_trainer_clips_by_the_norm_of_the_whole(ranks):
    wanted = trained_with_clip(None, 1)
    for rank, found in enumerate(ranks(2, trained_with_clip)):
        assert furthest(found, wanted) < 1e-12, f"rank {rank}"


def strange_words(rank, world_size, vocab):
    model = parallelize_module(gpt(0, vocab=vocab), None, gpt_plan(tensor_parallel))
    told = []
    for tokens, target in (([vocab], [0]), ([0], [vocab]), ([0], [-1]), ([-1], [0])):
        try:
            VocabularyParallelCrossEntropy()(model(torch.tensor([tokens])), torch.tensor([target]))
        except RuntimeError as error:
            told.append(str(error))
    return told


def test_words_that_are_not_there(ranks):
    beyond = f"target out of range: the vocabulary has {VOCAB} entries"
    for vocab, target in ((VOCAB, beyond), (VOCAB - 1, "target is a padding entry")):
        token = f"token out of range: the vocabulary has {vocab} entries"
        told = [token, target, beyond, token]
        assert ranks(2, strange_words, vocab=vocab) == [told] * 2


def overflown(rank, world_size):
    """The loss of two tokens, where one's logit has become -inf."""
    logits = torch.zeros(2, VOCAB // world_size)
    if rank == 1:
        logits[0, -1] = -torch.inf
    return vocabulary_parallel_cross_entropy(logits, torch.tensor([VOCAB - 1, 0])).item()


def test_an_overflow_is_no_padding(ranks):
    assert ranks(2, overflown) == [float("inf")] * 2


def padding_word(rank, world_size, style):
    """The gradient of an embedding that has a word for padding, and how far it is from that of one process."""
    tokens = torch.tensor([[1, 3, 3, 0], [5, 3, 1, 2]])
    torch.manual_seed(0)
    whole = nn.Embedding(7, 4, padding_idx=3, dtype=F64)
    split = parallelize_module(copy.deepcopy(whole), None, style)
    for one in (whole, split):
        one(tokens).sum().backward()  # not of squares: that of the word for padding is zero anyway
    cut = cuts_of(split)[split.weight]
    return (split.weight.grad - cut.part(whole.weight.grad, "weight")).abs().max().item()


@pytest.mark.parametrize("style", [RowwiseParallel(), ColwiseParallel()], ids=["words", "channels"])
def test_a_word_for_padding_gets_no_gradient(ranks, style):
    assert max(ranks(2, padding_word, style=style)) < 1e-12


def in_16_bits(rank, world_size):
    """(the loss of 16-bit logits, that of one process in fp32, the dtype of a row-parallel layer under autocast)."""
    whole = (8 * torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))).bfloat16()
    target = torch.arange(6)
    loss = vocabulary_parallel_cross_entropy(whole.chunk(world_size, -1)[rank], target)
    layer = parallelize_module(nn.Linear(4, 4), None, RowwiseParallel(input_layouts=Replicate()))
    with torch.autocast("cpu", torch.bfloat16):
        return loss.item(), F.cross_entropy(whole.float(), target).item(), layer(torch.ones(2, 4)).dtype


def test_in_16_bits_as_pytorchs(ranks):
    for rank, (ours, theirs, dtype) in enumerate(ranks(2, in_16_bits)):
        assert ours == pytest.approx(theirs, rel=1e-6) and dtype == torch.bfloat16, f"rank {rank}"


def second_derivative(rank, world_size):
    logits = torch.zeros(2, 3, requires_grad=True)
    loss = vocabulary_parallel_cross_entropy(logits, torch.tensor([0, 5]))
    try:
        torch.autograd.grad(loss, logits, create_graph=True)
    except RuntimeError as error:
        return str(error)


def test_there_is_no_second_derivative(ranks):
    assert ranks(2, second_derivative) == ["vocabulary-parallel cross entropy has no second derivative"] * 2


def on_a_device_mesh(rank, world_size):
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world_size,))
    return parallelize_module(nn.Linear(4, 6), mesh, ColwiseParallel()).weight.shape[0]


def test_the_group_may_be_a_device_mesh(ranks):
    assert ranks(2, on_a_device_mesh) == [3, 3]


class Words(nn.Sequential):
    """Layers of every kind, two of which share a matrix; 7 words are padded on 2 ranks."""

    def __init__(self):
        super().__init__(
            nn.Embedding(7, 8, padding_idx=3), nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 7)
        )
        self[4].weight = self[0].weight
        self.tables = nn.Embedding(5, 6)

    def forward(self, x):
        for number in range(5):
            x = self[number](x)
        return x


WORDS_PLAN = {
    "0": RowwiseParallel(),
    "1": ColwiseParallel(),
    "2": RowwiseParallel(),
    "4": ColwiseParallel(output_layouts=Replicate()),
    "tables": ColwiseParallel(output_layouts=Replicate()),
}


def initialiser(module):
    """What initialisers ask for: fans, whole matrices, tensors drawn through .data, new parameters."""
    if isinstance(module, nn.Linear):
        nn.init.orthogonal_(module.weight)
        nn.init.constant_(module.bias, 0.5)
        module.bias.data.normal_(std=0.01)
    elif isinstance(module, nn.Embedding):
        nn.init.trunc_normal_(module.weight, std=module.weight.shape[1] ** -0.5)
        if module.embedding_dim == 6:
            module.weight = nn.Parameter(torch.randn(module.weight.shape))
    elif isinstance(module, nn.LayerNorm):
        nn.init.uniform_(module.weight)
        nn.init.zeros_(module.bias)


def in_every_layer(model):
    for part in model.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()


def init_weights(model):
    for p in model.parameters():
        nn.init.xavier_normal_(p) if p.dim() > 1 else nn.init.uniform_(p)


INITIALISERS = {
    "reset": in_every_layer,
    "apply": lambda model: model.apply(initialiser),
    "both": lambda model: (in_every_layer(model), model.apply(initialiser)),
    "by hand": init_weights,
    "apply by hand": lambda model: (init_weights(model), model.apply(initialiser)),
}


def initialised_behind(rank, world_size, how, meta):
    """The whole state, whether slices stay in one buffer, the next draw, whether padding is zero."""
    torch.manual_seed(rank)
    with torch.device("meta" if meta else "cpu"):
        model = Words()
    parallelize_module(model, None, WORDS_PLAN)
    if meta:
        model.to_empty(device="cpu")
        model[4].weight = model[0].weight
    before = model[1].weight.data_ptr()
    with whole_parameters(model) if "hand" in how else nullcontext():
        INITIALISERS[how](model)
    stayed = before == model[1].weight.data_ptr()
    words = -(-7 // world_size)
    padding = model[0].weight[max(0, 7 - rank * words) :]
    state = full_state_dict(model)
    drawn = torch.rand(1)
    model(torch.tensor([[0, 6]])).sum().backward()
    return state, stayed and not padding.any() and model[1].weight.shape[0] == 12 // world_size, drawn


@pytest.mark.parametrize("how", INITIALISERS)
@pytest.mark.parametrize("meta", [True, False])
def test_initialised_behind_the_split_as_one_process(ranks, how, meta):
    for world_size in (1, 2, 3):
        torch.manual_seed(0)
        with torch.device("meta" if meta else "cpu"):
            model = Words()
        if meta:
            model.to_empty(device="cpu")
            model[4].weight = model[0].weight
        INITIALISERS[how](model)
        drawn = torch.rand(1)
        for rank, (state, exact, next_drawn) in enumerate(ranks(world_size, initialised_behind, how=how, meta=meta)):
            assert exact and torch.equal(next_drawn, drawn), f"rank {rank}, {world_size}"
            assert all(torch.equal(state[name], value) for name, value in model.state_dict().items()), (
                f"rank {rank}, {world_size}"
            )


def initialised_in_slices(rank, world_size, seed):
    """The first forward, where slices were drawn one by one, or with a seed of each rank."""
    with torch.device("meta"):
        model = Words()
    parallelize_module(model, None, WORDS_PLAN)
    model.to_empty(device="cpu")
    torch.manual_seed(seed * rank)
    init_weights(model)
    try:
        model(torch.zeros(1, 1, dtype=torch.int64))
    except RuntimeError as error:
        return str(error)


def test_ranks_that_drew_the_same_slices_are_refused(ranks):
    for rank, told in enumerate(ranks(2, initialised_in_slices, seed=0)):
        assert told.startswith("'0.weight' was initialised with the same values on every rank: call module.apply("), (
            f"rank {rank}"
        )
    for rank, told in enumerate(ranks(2, initialised_in_slices, seed=1)):
        assert told.startswith("'2.bias' was initialised with different values on each rank"), f"rank {rank}"
