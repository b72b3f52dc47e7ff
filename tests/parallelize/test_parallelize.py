"""A GPT on a mesh of several axes, against one process: losses, gradients' norm, weights, states of the whole."""

import copy
from functools import partial
from math import prod

import pytest
import torch
import torch.distributed as dist
from mesh_jobs import (
    F64,
    FSDP_BLOCKS,
    JOBS,
    LENGTH,
    LOSS,
    MIXED,
    PIPELINED,
    STEPS,
    experts,
    gpt,
    part_of_batch,
    plan,
    text,
)

from labkit.amp import GradScaler
from labkit.attention import flash_attention
from labkit.fsdp import FSDP
from labkit.memory.memory_tracker import MemoryTracker
from labkit.mesh import Mesh
from labkit.models.gpt import GPT
from labkit.moe import balanced, mixtures
from labkit.parallelize import Composed, parallelize
from labkit.pipeline import dual_pipe, interleaved
from labkit.tensor_parallel import ColwiseParallel
from labkit.tensor_parallel.tp_state_dict import cuts_of
from labkit.trainer import Trainer


def composed(seed, axes, options):
    """options: of Composed, and "mixture"."""
    mixture = options.get("mixture")
    given = {name: value for name, value in options.items() if name not in ("mixture", "accumulation")}
    return Composed(gpt(seed, mixture), Mesh(axes), plan(mixture), **given)


def trained(trainer, batch_of, steps=STEPS):
    """[(loss, norm of all gradients before they were clipped)]."""
    found = []
    for step in range(steps):
        loss = trainer.train_step(*batch_of(step))
        found.append((loss.item(), trainer.gradient_norm.item()))
    return found


def rebalance(trainer, loss):
    for _, one in mixtures(trainer.model):
        if one.balance == "bias":
            one.rebalance()


def trainer_of(model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return Trainer(model, optimizer, balanced(LOSS, model), clip=0.5, hooks=[rebalance], **options)


def one_process(mixture, steps=STEPS):
    model = gpt(0, mixture)
    return trained(trainer_of(model), text, steps), model.state_dict()


def beside_one_process(rank, world_size, axes, options):
    model = composed(rank, axes, options)
    expected, whole = one_process(options.get("mixture"))
    trainer = trainer_of(model, accumulation=options.get("accumulation", 1))
    found = trained(trainer, part_of_batch(model, model.mesh))
    losses = torch.tensor([loss for loss, _ in found], dtype=F64)
    dist.all_reduce(losses)
    apart = (losses / world_size - torch.tensor([loss for loss, _ in expected], dtype=F64)).abs().tolist()
    apart += [abs(norm - other) for (_, norm), (_, other) in zip(found, expected, strict=True)]
    state = model.full_state_dict()
    assert list(state) == list(whole)
    return max(apart + [(state[name] - value).abs().max().item() for name, value in whole.items()])


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS)
def test_it_trains_as_one_process_does(ranks, job):
    axes, options = JOBS[job]
    for rank, apart in enumerate(ranks(prod(axes.values()), beside_one_process, axes=axes, options=options)):
        assert apart < 1e-12, f"rank {rank}"


UNBORN = {
    "one rank": ({"dp": 1}, {}),
    "tp 2": ({"tp": 2}, {}),
    "fsdp 2": ({"dp": 2}, {"wrap": FSDP_BLOCKS}),
    "ep 2": ({"ep": 2}, MIXED),
    "experts, whole": ({"dp": 1}, MIXED),
    "pp 4": ({"pp": 4}, PIPELINED),
    "pp 2 x tp 2, two stages a rank": ({"pp": 2, "tp": 2}, PIPELINED | {"schedule": interleaved, "stages": 4}),
    "pp 2 x dp 2, from both ends": ({"pp": 2, "dp": 2}, PIPELINED | {"schedule": dual_pipe, "stages": 4}),
}


def from_meta(rank, world_size, jobs):
    """The state of each, and what one rank held at most while it was made, of the whole model's bytes."""
    found = {}
    for name in jobs:
        axes, options = UNBORN[name]
        with torch.device("meta"):
            module = gpt(0, options.get("mixture"))
        given = {name: value for name, value in options.items() if name != "mixture"}
        torch.manual_seed(7 + rank)
        with MemoryTracker() as memory:
            model = Composed(module, Mesh(axes), plan(options.get("mixture")), **given)
        drawn = torch.rand(3)
        torch.manual_seed(7 + rank)
        assert "tp" in axes or torch.equal(drawn, torch.rand(3))  # ranks along tp go on with alike numbers
        state = model.full_state_dict()
        found[name] = state, memory.peak_total / sum(value.nbytes for value in gpt(0).state_dict().values())
    return found


@pytest.mark.slow
def test_from_the_meta_device_every_mesh_begins_with_the_same_values(ranks):
    found = {}
    for size in (1, 2, 4):
        jobs = [name for name, (axes, _) in UNBORN.items() if prod(axes.values()) == size]
        told = ranks(size, from_meta, jobs=jobs)
        found |= {(name, rank): one[name] for rank, one in enumerate(told) for name in jobs}
    first, second = (f"blocks.{number}.attention.output.weight" for number in range(2))
    for (name, _), (state, _) in found.items():
        assert not torch.equal(state[first], state[second]), name
        other, _ = found["experts, whole" if name.startswith("e") else "one rank", 0]
        assert list(state) == list(other)
        assert all(torch.equal(value, other[key]) for key, value in state.items()), name
    assert max(found["pp 4", rank][1] for rank in range(4)) < 0.6  # both ends have the embedding


def clipped_from_meta(rank, world_size):
    """The norm of all gradients, of a model whose copies of a tied parameter are on several ranks, several on each."""
    axes, options = UNBORN["pp 2 x dp 2, from both ends"]
    with torch.device("meta"):
        module = gpt(0)
    model = Composed(module, Mesh({"pp": axes["pp"]}), plan(), **options)
    alone = gpt(1)
    alone.load_state_dict(model.full_state_dict())
    (_, wanted), (_, norm) = (trained(trainer_of(one), lambda _: text(0), 1)[0] for one in (alone, model))
    return abs(norm - wanted)


def test_a_tied_parameter_counts_once_in_the_norm_however_many_copies_a_rank_has(ranks):
    assert max(ranks(2, clipped_from_meta)) < 1e-12


def the_idea(rank, world_size):
    mesh = Mesh({"dp": 2, "cp": 2, "tp": 2})
    model = gpt(0)
    whole = copy.deepcopy(model)
    inner = parallelize.compose(model, mesh, plan())
    tokens, targets = (one.chunk(2)[mesh.rank("dp")] for one in text(0))
    at = parallelize.places(LENGTH, mesh.group("cp"))
    LOSS(inner(tokens[:, at], positions=at), targets[:, at]).backward()
    LOSS(whole(text(0)[0]), text(0)[1]).backward()
    pairs = zip(model.parameters(), whole.parameters(), strict=True)
    cuts = cuts_of(model)
    off = 0.0
    for own, theirs in pairs:
        wanted = theirs.grad
        if own in cuts:
            wanted = cuts[own].part(wanted)
        off = max(off, (own.grad - wanted).abs().max().item())
    return off


def test_the_idea_makes_the_gradients_of_one_process(ranks):
    assert max(ranks(8, the_idea)) < 1e-12


def from_mesh_to_mesh(rank, world_size, one, other):
    """Two steps on a mesh, the whole state, and a third on another mesh and in one process."""
    before = composed(rank, *JOBS[one])
    trained(trainer_of(before), part_of_batch(before, before.mesh), 2)
    whole = before.full_state_dict()
    after = composed(rank + 7, *JOBS[other])
    after.load_full_state_dict(whole)
    again = after.full_state_dict()
    same = list(again) == list(whole) and all(torch.equal(again[name], whole[name]) for name in whole)
    alone = gpt(9, JOBS[other][1].get("mixture"))
    alone.load_state_dict(whole)
    (wanted, _) = trained(trainer_of(alone), lambda _: text(2), 1)[0]
    loss = torch.tensor(trained(trainer_of(after), lambda _: part_of_batch(after, after.mesh)(2), 1)[0][0], dtype=F64)
    dist.all_reduce(loss)
    return same, abs(loss.item() / world_size - wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("fsdp 2 x tp 2", "pp 2 x tp 2"),
        ("pp 2 x tp 2, two stages a rank", "fsdp 2 x tp 2, one unit"),
        ("dp 2 x cp 2", "cp 2 x tp 2"),
        ("pp 2 x dp 2", "dp 2 x tp 2"),
        ("dp 2 x ep 2", "ep 4, by bias"),
        ("ep 4, by bias", "cp 2 x ep 2"),
    ],
)
def test_the_whole_of_one_mesh_loads_into_another(ranks, one, other):
    for rank, (same, apart) in enumerate(ranks(4, from_mesh_to_mesh, one=one, other=other)):
        assert same and apart < 1e-12, f"rank {rank}"


def overflow(rank, world_size, job):
    model = composed(rank, *JOBS[job])
    trainer = trainer_of(model, scaler=GradScaler("cpu", init_scale=4.0, growth_interval=100))
    if rank == world_size - 1:
        [*model.parameters()][-1].register_hook(lambda gradient: gradient * float("inf"))
    before = model.full_state_dict()
    trainer.train_step(*part_of_batch(model, model.mesh)(0))
    after = model.full_state_dict()
    return trainer.scaler.get_scale(), all(torch.equal(after[name], before[name]) for name in after)


@pytest.mark.parametrize("job", ["pp 2 x tp 2", "dp 2 x tp 2", "cp 2 x tp 2", "dp 2 x ep 2"])
def test_a_step_that_overflows_on_one_rank_is_left_out_by_all(ranks, job):
    assert ranks(4, overflow, job=job) == [(2.0, True)] * 4


def spread_already(width, dropout):
    return experts(width, dropout, group=dist.group.WORLD)


def hidden_fsdp(module, process_group):
    return FSDP(module, process_group=process_group)


WITH_EXPERTS = {"model": {"network": experts}}
REFUSED = {
    "no such axis": ({"dp": 2, "sp": 2}, {}, "the axes of a composed job are dp, cp, pp, ep, tp, not 'sp'"),
    "no experts": ({"dp": 2, "ep": 2}, {}, "ep=2: no part of this module has experts"),
    "six experts": (
        {"ep": 4},
        {"model": {"network": partial(experts, number=6)}},
        "experts=6 must be divisible by ep=4",
    ),
    "spread": ({"ep": 4}, {"model": {"network": spread_already}}, "the experts are spread already"),
    "ep and FSDP": ({"ep": 4}, WITH_EXPERTS | {"wrap": FSDP_BLOCKS}, "ep=4 with FSDP: experts are not sharded"),
    "ep and a function": ({"ep": 4}, WITH_EXPERTS | {"wrap": hidden_fsdp}, "FSDP does not support"),
    "pp and experts": ({"pp": 4}, WITH_EXPERTS | PIPELINED, "pp and experts cannot be combined"),
    "no plan": ({"dp": 2, "tp": 2}, {"plan": None}, "tp=2 needs a plan"),
    "heads": ({"tp": 4}, {"model": {"heads": 2}}, "heads=2 must be divisible by 4 ranks"),
    "blocks": ({"pp": 4}, PIPELINED | {"model": {"layers": 3}}, "blocks=3 must be divisible by stages=4"),
    "pp and cp": ({"pp": 2, "cp": 2}, PIPELINED, "pp and cp cannot be combined"),
    "pp and FSDP": ({"pp": 2, "dp": 2}, PIPELINED | {"wrap": FSDP_BLOCKS}, "wrap must be None with pp"),
    "no stage": ({"pp": 2, "dp": 2}, {}, "pp=2 needs `stage`"),
    "a pattern": (
        {"tp": 4},
        {"plan": {"block.*": ColwiseParallel()}},
        "pattern 'block.*' of the plan matches no module",
    ),
    "micro-batches": ({"pp": 4}, PIPELINED | {"micro_batches": 2}, "must be at least 4, the number of stages"),
}


def refused(rank, world_size, case):
    axes, options, _ = REFUSED[case]
    settings = {"context": LENGTH, "layers": 4, "heads": 4, "width": 16} | options.get("model", {})
    options = {"plan": plan()} | {name: value for name, value in options.items() if name != "model"}
    try:
        Composed(GPT(**settings), Mesh(axes), **options)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_combined_is_said(ranks, case):
    for rank, said in enumerate(ranks(4, refused, case=case)):
        assert REFUSED[case][2] in said, f"rank {rank}"
        assert "\n" not in said, f"rank {rank}"


def with_a_window(rank, world_size):
    model = gpt(0)
    model.blocks[1].attention.attend = partial(flash_attention, window=4)
    try:
        Composed(model, Mesh({"cp": 2}))
    except ValueError as error:
        return str(error)


def test_what_an_attention_was_given_is_not_dropped(ranks):
    for rank, said in enumerate(ranks(2, with_a_window)):
        assert said.startswith("cp=2 replaces blocks.1.attention.attend, and with it window=4: leave it out there"), (
            f"rank {rank}"
        )


def not_as_it_is(rank, world_size):
    model = Composed(gpt(0), Mesh({"pp": 2}), **PIPELINED)
    said = []
    for call in (lambda: model(text(0)[0]), lambda: model.load_full_state_dict({})):
        try:
            call()
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_a_pipeline_has_no_forward_alone(ranks):
    for rank, (forward, load) in enumerate(ranks(2, not_as_it_is)):
        assert "call step()" in forward and "missing 'token_embedding.weight'" in load, f"rank {rank}"
