"""labkit.ideas on real ranks, compared with one process and with the class of the same algorithm."""

import ast
import math
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from oracle_models import TOLERANCE, seeded
from repository import ROOT
from tensors import gap, noise
from test_quantize_and_onebit import hooked
from torch import nn

from labkit import comm, ideas, models
from labkit.amp import GradScaler
from labkit.amp.autocast_mode import autocast
from labkit.compression import DGC, Cast, OneBit, OneBitAdam, PowerSGD, Quantize, RandomK, TopK
from labkit.ddp.bucket import Bucket
from labkit.ideas import all_reduce, checkpoint
from labkit.ideas.compression import (
    dgc_mean,
    half_precision_mean,
    one_bit_adam_step,
    one_bit_mean,
    powersgd_mean,
    quantized_mean,
    random_k_mean,
    top_k_mean,
)
from labkit.ideas.data_parallel import average_during_backward, average_gradients, average_in_buckets
from labkit.ideas.fsdp import shard_units
from labkit.ideas.mixed_precision import CastInputs, scaled_steps
from labkit.ideas.recompute_and_offload import offload_activations, step_with_offloaded_states
from labkit.ideas.two_levels_and_local_sgd import average_weights, diloco_outer_step, hierarchical_all_reduce
from labkit.ideas.zero import shard_gradients, shard_optimizer_states
from labkit.local_sgd import DiLoCo, LocalSGD
from labkit.mesh import Mesh

IDEAS_FOLDER = Path(ideas.__file__).parent
ELSEWHERE = {  # compared with its oracle in the tests of the class: "file.name" -> test
    "attention_and_context.tiled_attention": "test_attention.test_the_idea_is_attention_too",
    "attention_and_context.attention_and_log_sum": "test_context_parallel.test_the_idea_is_attention_too",
    "attention_and_context.merge": "test_context_parallel.test_the_idea_is_attention_too",
    "attention_and_context.ring_attention_forward": "test_context_parallel.test_the_idea_is_attention_too",
    "tensor_and_sequence.CopyToTensorParallel": "test_tensor_parallel.test_the_idea_is_two_layers",
    "tensor_and_sequence.ReduceFromTensorParallel": "test_tensor_parallel.test_the_idea_is_two_layers",
    "tensor_and_sequence.tensor_parallel_mlp": "test_tensor_parallel.test_the_idea_is_two_layers",
    "tensor_and_sequence.GatherTokens": "test_sequence_parallel.test_the_idea_is_two_layers",
    "tensor_and_sequence.ScatterTokens": "test_sequence_parallel.test_the_idea_is_two_layers",
    "tensor_and_sequence.sequence_parallel_mlp": "test_sequence_parallel.test_the_idea_is_two_layers",
    "pipeline.gpipe": "test_pipeline.test_the_idea_is_the_training_too",
    "pipeline.one_f_one_b": "test_pipeline.test_the_idea_is_the_training_too",
    "pipeline.run_actions": "test_pipeline.test_the_idea_is_the_training_too",
    "experts.mixture_of_experts": "test_moe.test_the_idea_is_the_class",
    "checkpoint.write_whole": "test_checkpoint.test_the_idea_takes_the_latest_that_is_whole",
    "checkpoint.save_shards": "test_checkpoint.test_the_idea_takes_the_latest_that_is_whole",
    "checkpoint.load_shards": "test_checkpoint.test_the_idea_takes_the_latest_that_is_whole",
    "recompute_and_offload.Recompute": "test_recompute.test_an_autograd_function_is_enough_for_one_process"
    "_but_its_gradients_come_in_pieces",
}
PATIENT = {"zero.padded", "data_parallel.buckets_of"}  # called by ideas that are tested, and by nothing else

STEPS, SHARE = 3, 4
F64 = torch.float64
ADAMW = {"lr": 0.01, "eps": 1e-4}


build = partial(seeded, "gpt", dtype=F64, vocab=32, context=16, layers=2)


def batch(step, world_size):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(32, (SHARE * world_size, 9), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, step, world_size, rank=None):
    inputs, targets = batch(step, world_size)
    mine = slice(None) if rank is None else slice(rank * SHARE, (rank + 1) * SHARE)
    return models.loss("gpt")(model(inputs[mine]), targets[mine])


def one_process(world_size):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, step, world_size).backward()
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def prepare(idea, model):
    """What is to be called in place of optimizer.step()."""
    if idea in ("zero1", "zero2"):
        shard = {"zero1": shard_optimizer_states, "zero2": shard_gradients}[idea]
        return shard(model.parameters(), torch.optim.AdamW, **ADAMW)
    optimizer, parameters = torch.optim.AdamW(model.parameters(), **ADAMW), list(model.parameters())
    average = {
        "naive": lambda: lambda: average_gradients(parameters),
        "overlapped": lambda: average_during_backward(parameters),
        "bucketed": lambda: average_in_buckets(parameters, 20_000),
    }[idea]()
    return lambda: (average(), optimizer.step())


def train(rank, world_size, idea):
    model, held = build(), []
    step_all = prepare(idea, model)
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, step, world_size, rank).backward()
        held.append(sum(p.grad is not None for p in model.parameters()))
        step_all()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, held


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("idea", ["naive", "overlapped", "bucketed", "zero1", "zero2"])
def test_ranks_train_what_one_process_trains(ranks, idea, world_size):
    oracle = one_process(world_size)
    for rank, (parameters, held) in enumerate(ranks(world_size, train, idea=idea)):
        assert gap(parameters, oracle) < TOLERANCE[F64], f"rank {rank}"
        if idea == "zero2":
            assert held == [0] * STEPS, f"rank {rank}"  # whole gradients are gone when backward returns


def train_in_shards(rank, world_size):
    """FSDP's idea for the blocks, plain averaging for the rest: embedding and output layer have a weight in common."""
    model = build()
    names, inside = {p: name for name, p in model.named_parameters()}, list(model.blocks.parameters())
    whole = {p: p.shape for p in inside}
    own = dict(zip(inside, shard_units(model.blocks), strict=True))
    rest = [p for p in names if p not in own]
    optimizer = torch.optim.AdamW([*own.values(), *rest], **ADAMW)
    for step in range(STEPS):
        model.zero_grad()
        loss_of(model, step, world_size, rank).backward()
        assert {p.untyped_storage().size() for p in inside} == {0}  # at rest nothing is whole
        assert all(p.grad is None for p in inside)
        average_gradients(rest)
        optimizer.step()
    for p, shard in own.items():
        gathered = shard.new_empty(world_size * shard.numel())
        comm.all_gather(gathered, shard.detach())
        whole[p] = gathered[: whole[p].numel()].view(whole[p])
    return {name: whole.get(p, p).detach().clone() for p, name in names.items()}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_units_that_are_whole_only_while_they_run_train_the_same(ranks, world_size):
    oracle = one_process(world_size)
    for rank, parameters in enumerate(ranks(world_size, train_in_shards)):
        assert gap(parameters, oracle) < TOLERANCE[F64], f"rank {rank}"


# ---- precision


def overflowing(step):
    return 1e30 if step == 2 else 1.0


def scales_and_weights(rank, world_size, ours):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def losses():
        for step in range(6):
            x = noise(3, 4, seed=10 * step + rank)
            yield model(x * (overflowing(step) if rank == world_size - 1 else 1.0)).square().sum()

    if ours:
        return list(scaled_steps(losses(), optimizer, 64.0, growth_interval=2)), model.weight.detach()
    scaler, scales = GradScaler("cpu", init_scale=64.0, growth_interval=2), []
    for loss in losses():
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, model.weight.detach()


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_scale_of_the_idea_is_that_of_the_class(ranks, world_size):
    ours, theirs = (ranks(world_size, scales_and_weights, ours=ours) for ours in (True, False))
    for (scales, weight), (wanted, theirs_weight) in zip(ours, theirs, strict=True):
        assert scales == wanted == [64.0, 128.0, 64.0, 64.0, 128.0, 128.0]
        torch.testing.assert_close(weight, theirs_weight)
        assert torch.equal(weight, ours[0][1]) or world_size > 1


def test_inputs_are_cast_as_autocast_does():
    torch.manual_seed(0)
    model = models.build("mlp", sizes=(8, 32, 10))
    x, y = torch.randn(4, 8), torch.randint(10, (4,))
    rules = {nn.functional.linear: torch.bfloat16, nn.functional.cross_entropy: torch.float32}
    found = []
    for mode in (CastInputs(rules), autocast("cpu")):
        model.zero_grad()
        with mode:
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
    assert all(t.dtype is torch.float32 for t in found[0])


# ---- memory


def test_visiting_states_update_as_states_at_home_do():
    models_, optimizers = [build() for _ in range(2)], []
    for model in models_:
        optimizers.append(torch.optim.AdamW(model.parameters(), **ADAMW))
    for step in range(STEPS):
        for model, optimizer, visit in zip(models_, optimizers, (True, False), strict=True):
            optimizer.zero_grad()
            with offload_activations("cpu") if visit else torch.enable_grad():
                loss = loss_of(model, step, 1)
            loss.backward()
            step_with_offloaded_states(optimizer) if visit else optimizer.step()
    ours, theirs = ({name: p.detach() for name, p in model.named_parameters()} for model in models_)
    assert gap(ours, theirs) == 0.0
    assert len(optimizers[0].param_groups[0]["params"]) == len(list(models_[0].parameters()))


# ---- networks


def summed(rank, world_size, nodes):
    mesh = Mesh({"node": nodes, "local": world_size // nodes})
    tensor = torch.arange(24).view(2, 12) * (rank + 1)
    hierarchical_all_reduce(tensor, mesh.group("local"), mesh.group("node"))
    return tensor


def test_two_levels_sum_what_one_does(ranks):
    wanted = torch.arange(24).view(2, 12) * (1 + 2 + 3 + 4)
    for rank, tensor in enumerate(ranks(4, summed, nodes=2)):
        assert torch.equal(tensor, wanted), f"rank {rank}"


def talk_seldom(rank, world_size, idea, diloco):
    model, every = build(), 2
    parameters = list(model.parameters())
    inner = torch.optim.SGD(parameters, lr=0.1)
    if idea:
        anchors = [nn.Parameter(p.detach().clone()) for p in parameters]
        outer = torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)
    else:
        inner = DiLoCo(inner, every=every) if diloco else LocalSGD(inner, every=every)
    for step in range(2 * every):
        inner.zero_grad()
        loss_of(model, step, world_size, rank).backward()
        inner.step()
        if idea and (step + 1) % every == 0:
            diloco_outer_step(parameters, anchors, outer) if diloco else average_weights(parameters)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("diloco", [False, True])
def test_who_talks_seldom_ends_where_the_class_does(ranks, diloco):
    ours, theirs = (ranks(2, talk_seldom, idea=idea, diloco=diloco) for idea in (True, False))
    for own, wanted in zip(ours, theirs, strict=True):
        assert gap(own, wanted) < TOLERANCE[F64]


# ---- compression: two steps of the idea, two of the class, on the same gradients

SIZE = 64  # elements: one chunk, one piece


def gradient(rank, step):
    return noise(SIZE, seed=10 * step + rank)


def with_residual(idea, make, rank):
    """The averages of two steps, and the largest difference of what waits."""
    compressor, p, residual = make(), nn.Parameter(torch.zeros(SIZE)), torch.zeros(SIZE)
    found = []
    for step in range(2):
        average = idea(gradient(rank, step), residual, compressor)
        wanted, owed = hooked(compressor, gradient(rank, step), p)
        found.append((average, wanted.clone(), residual.clone(), owed.clone()))
    return found


IDEAS = {
    "cast": (lambda g, r, c: half_precision_mean(g), lambda: Cast(torch.float16)),
    "quantize": (lambda g, r, c: quantized_mean(g, torch.tensor(0.5)), lambda: Quantize(8, SIZE, stochastic=False)),
    "onebit": (lambda g, r, c: one_bit_mean(g, r), lambda: OneBit(SIZE)),
    "topk": (lambda g, r, c: top_k_mean(g, r, 6), lambda: TopK(6 / SIZE)),
    "randomk": (lambda g, r, c: random_k_mean(g, r, c.draw(SIZE, 0, g.device)), lambda: RandomK(0.1)),
}


def side_by_side(rank, world_size, name):
    return with_residual(*IDEAS[name], rank)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", IDEAS)
def test_an_idea_sends_what_its_compressor_sends(ranks, name, world_size):
    for steps in ranks(world_size, side_by_side, name=name):
        for average, wanted, residual, owed in steps:
            torch.testing.assert_close(average, wanted, rtol=1e-3 if name == "cast" else 1e-6, atol=1e-6)
            if name not in ("cast", "quantize"):
                torch.testing.assert_close(residual, owed, rtol=1e-6, atol=1e-6)


def accelerated(rank, world_size):
    compressor, p = DGC(6 / SIZE), nn.Parameter(torch.zeros(SIZE))
    velocity, residual = torch.zeros(SIZE), torch.zeros(SIZE)
    worst = 0.0
    for step in range(4):
        average = dgc_mean(gradient(rank, step), velocity, residual, 6)
        wanted, owed = hooked(compressor, gradient(rank, step), p)
        worst = max(worst, float((average - wanted).abs().max()), float((residual - owed).abs().max()))
    return worst


def test_the_idea_of_dgc(ranks):
    assert max(ranks(2, accelerated)) < 1e-6


def as_low_rank(rank, world_size):
    p, rows, cols = nn.Parameter(torch.zeros(16, 12)), 16, 12
    compressor, residual, worst, q = PowerSGD(2, min_saving=0), torch.zeros(rows, cols), 0.0, None
    for step in range(3):
        own = noise(rows, cols, seed=10 * step + rank)
        bucket = Bucket([p])
        if q is None:
            q = compressor._start(p, "", own.dtype)
        bucket.buffer().copy_(own.view(-1))
        average, q = powersgd_mean(own, residual, q)
        wanted = compressor.hook(None, bucket).wait().view(rows, cols)
        owed = compressor.residuals.of(bucket).view(rows, cols)
        worst = max(worst, float((average - wanted).abs().max()), float((residual - owed).abs().max()))
    return worst


def test_the_idea_of_powersgd(ranks):
    assert max(ranks(2, as_low_rank)) < 1e-5


def by_signs(rank, world_size):
    ours, theirs = (nn.Parameter(torch.zeros(SIZE)) for _ in range(2))
    b1, b2, warmup, lr = 0.9, 0.99, 2, 0.1
    optimizer = OneBitAdam([theirs], lr=lr, betas=(b1, b2), warmup=warmup, compressor=OneBit(SIZE))
    residual = torch.zeros(SIZE)
    for step in range(5):
        bucket = Bucket([theirs])
        theirs.grad = bucket.gradients()[0]
        theirs.grad.copy_(gradient(rank, step))
        if step == warmup:
            state = optimizer.state[theirs]
            m, v = state["m"].clone(), state["v"] / (1 - b2**warmup)
            ours.data.copy_(theirs)
        optimizer.hook(None, bucket).wait()
        optimizer.step()
        if step >= warmup:
            ours.grad = gradient(rank, step)
            one_bit_adam_step(ours, m, v, residual, lr / (1 - b1 ** (step + 1)), b1)
    return float((ours - theirs).abs().max())


def test_the_idea_of_one_bit_adam(ranks):
    assert max(ranks(2, by_signs)) < 1e-5


# ---- all-reduce

SUMS = {"naive": all_reduce.naive, "ring": all_reduce.ring, "tree": all_reduce.tree}
SUMS |= {"halving_doubling": all_reduce.halving_doubling, "the ring's halves": None}


def reduced(rank, world_size, name, shape):
    tensor = torch.arange(math.prod(shape), dtype=F64).view(shape) * (rank + 1)
    if SUMS[name]:
        SUMS[name](tensor)
        return tensor
    all_reduce.ring_reduce_scatter(tensor)
    own = tensor.view(-1).tensor_split(world_size)[rank].clone()
    all_reduce.ring_all_gather(tensor)
    assert torch.equal(own, tensor.view(-1).tensor_split(world_size)[rank])
    return tensor


@pytest.mark.parametrize("shape", [(24,), (3, 5), (2,)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", SUMS)
def test_every_rank_has_the_sum(ranks, name, world_size, shape):
    if name == "halving_doubling" and world_size == 3:
        return  # it says that it needs a power of two
    wanted = torch.arange(math.prod(shape), dtype=F64).view(shape) * sum(range(1, world_size + 1))
    for rank, tensor in enumerate(ranks(world_size, reduced, name=name, shape=shape)):
        assert torch.equal(tensor, wanted), f"rank {rank}"


# ---- checkpoints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_come_back_from_their_bytes(dtype):
    tensors = {"a": torch.arange(6).view(2, 3).t().to(dtype), "none": torch.empty(0, 3), "one": torch.tensor(7.0)}
    found = checkpoint.from_bytes(checkpoint.to_bytes(tensors))
    assert found.keys() == tensors.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )


# ---- all of them


def all_ideas():
    """["file.name"] of every function and class of labkit.ideas."""
    return [
        f"{path.stem}.{node.name}"
        for path in IDEAS_FOLDER.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ]


def names_in(tree):
    """Every name and attribute that the code uses."""
    nodes = list(ast.walk(tree))
    return {n.id for n in nodes if isinstance(n, ast.Name)} | {n.attr for n in nodes if isinstance(n, ast.Attribute)}


@pytest.mark.slow
def test_every_idea_has_its_oracle():
    found = all_ideas()
    assert len(found) > 40 and set(ELSEWHERE) | PATIENT <= set(found)
    for idea in set(found) - PATIENT:
        file, _, test = ELSEWHERE.get(idea, "test_ideas").partition(".")
        (path,) = (ROOT / "tests").rglob(f"{file}.py")
        tree = ast.parse(path.read_text())
        helpers = {"attention_and_log_sum", "merge", "CopyToTensorParallel", "ReduceFromTensorParallel", "write_whole"}
        helpers |= {"GatherTokens", "ScatterTokens"}
        assert idea.split(".")[1] in names_in(tree) | helpers, (
            f"no test of {idea} in {file}: write one, or say in ELSEWHERE where it is"
        )
        assert not test or test in [getattr(node, "name", None) for node in tree.body], f"{file} has no {test}"


def test_the_syllabus_lists_every_file():
    listed = re.findall(r"^    (\w+)  ", ideas.__doc__, flags=re.M)
    assert sorted(listed) == sorted(path.stem for path in IDEAS_FOLDER.glob("[a-z]*.py"))


def test_ideas_are_one_evening():
    """In all under 1,000 lines; no function longer than a screen; no options beyond those of the paper."""
    assert sum(len(path.read_text().splitlines()) for path in IDEAS_FOLDER.glob("*.py")) < 1000
    for path in IDEAS_FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 45, f"{path.stem}.{node.name}"
