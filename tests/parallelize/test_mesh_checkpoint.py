"""A mesh resumes from a checkpoint of any mesh or of one process; its evaluation equals one process's."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mesh_jobs import BATCH, F64, FSDP_BLOCKS, JOBS, LENGTH, LOSS, PIPELINED, gpt, part_of_batch, plan, text

from labkit.checkpoint import CheckpointError, Checkpoints
from labkit.checkpoint.convert_sources import opened
from labkit.checkpoint.rng_state import RandomState
from labkit.mesh import Mesh
from labkit.models import data
from labkit.parallelize import Composed
from labkit.sampler import correct
from labkit.trainer import Trainer

MORE = 2  # steps after the save


def trainer_of(model):
    return Trainer(model, torch.optim.AdamW(model.parameters(), lr=0.01), LOSS, clip=0.5)


def on_mesh(job, seed, dropout=0.0):
    axes, options = JOBS[job]
    torch.manual_seed(seed)
    mixture = options.get("mixture")
    whole = gpt(seed, mixture)
    for module in whole.modules():
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = dropout
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    given = {name: value for name, value in options.items() if name != "mixture"}
    return trainer_of(Composed(whole, Mesh(axes), plan(mixture), **given))


def state_of(trainer):
    random = RandomState("cpu", trainer.model.mesh)
    return {"model": trainer.model, "optimizer": trainer.optimizer, "random": random}


def steps(trainer, first, count):
    """[(this rank's loss, norm of all gradients)] of some steps."""
    batch_of, found = part_of_batch(trainer.model, trainer.model.mesh), []
    for step in range(first, first + count):
        found.append((trainer.train_step(*batch_of(step)).item(), trainer.gradient_norm.item()))
    return found


def mean(found, world_size):
    losses = torch.tensor([loss for loss, _ in found], dtype=F64)
    dist.all_reduce(losses)
    return (losses / world_size).tolist()


def goes_on(rank, world_size, folder, one, others):
    """Saved after two steps; two more, there, there again, and on other meshes, which save first what they have."""
    unbroken = on_mesh(one, rank)
    steps(unbroken, 0, 2)
    checkpoints = Checkpoints(f"{folder}/saved")
    checkpoints.save(2, state_of(unbroken))
    expected = steps(unbroken, 2, MORE)
    wanted = unbroken.model.full_state_dict()
    again = on_mesh(one, rank + 7)
    assert checkpoints.load(state_of(again)) == 2
    assert steps(again, 2, MORE) == expected
    found = again.model.full_state_dict()
    assert list(found) == list(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)
    losses = {one: mean(expected, world_size)}
    for job in others:
        other = on_mesh(job, rank + 9)
        assert checkpoints.load(state_of(other)) == 2
        there = Checkpoints(f"{folder}/{job}")
        there.save(2, state_of(other))
        there.close()
        losses[job] = mean(steps(other, 2, MORE), world_size)
    checkpoints.close()
    return losses


def wholes(url):
    """{name: tensor} of the model and of the optimizer, as they are in a checkpoint."""
    with opened(str(url), None) as source:
        parts = {"model": source.model, "optimizer": source.optimizer}
        return {f"{k} {name}": part.read(name) for k, part in parts.items() for name in part.shapes}


MESHES = [
    ("fsdp 2 x tp 2", ("pp 2 x tp 2, two stages a rank", "dp 2 x cp 2")),
    ("pp 2 x tp 2", ("fsdp 2 x tp 2", "fsdp 2 x tp 2, one unit")),
    ("dp 2 x tp 2", ("pp 2 x dp 2, from both ends",)),
    ("dp 2 x ep 2", ("cp 2 x ep 2",)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("one", "others"), MESHES, ids=[one for one, _ in MESHES])
def test_the_same_mesh_goes_on_bit_for_bit_and_another_from_the_same_bits(ranks, tmp_path, one, others):
    losses, *rest = ranks(4, goes_on, folder=str(tmp_path), one=one, others=others)
    assert all(other == losses for other in rest)
    alone = gpt(5, JOBS[one][1].get("mixture"))
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1.0)
    checkpoints = Checkpoints(tmp_path / "saved")
    assert checkpoints.load({"model": alone, "optimizer": optimizer}) == 2
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path / "alone")
    checkpoints.save(2, {"model": alone, "optimizer": optimizer})
    checkpoints.close()
    trainer = Trainer(alone, optimizer, LOSS, clip=0.5)
    losses["alone"] = [trainer.train_step(*text(step)).item() for step in range(2, 2 + MORE)]
    saved = wholes(tmp_path / "saved")
    for job in (*others, "alone"):
        found = wholes(tmp_path / job)
        assert found.keys() == saved.keys() and len(saved) > 100
        assert all(torch.equal(found[name], saved[name]) for name in saved)
        assert losses[job] == pytest.approx(losses[one], abs=1e-12)


@pytest.mark.slow
def test_what_is_written_is_the_whole_once(ranks, tmp_path):
    ranks(4, goes_on, folder=str(tmp_path), one="fsdp 2 x tp 2", others=())
    size = sum(path.stat().st_size for path in Path(tmp_path, "saved").glob("*/*.safetensors"))
    model = gpt(0)
    named = sum(tensor.nbytes for tensor in model.state_dict().values())  # a tied one under both names
    states = 2 * sum(p.nbytes for p in model.parameters())
    assert named + states < size < named + states + 4 * 40_000  # headers


def with_dropout(rank, world_size, folder):
    unbroken = on_mesh("dp 2 x tp 2", rank, dropout=0.2)
    torch.manual_seed(100 + rank // 2)
    steps(unbroken, 0, 1)
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, state_of(unbroken))
    expected = steps(unbroken, 1, 2)
    again = on_mesh("dp 2 x tp 2", rank + 7, dropout=0.2)
    assert checkpoints.load(state_of(again)) == 1
    assert steps(again, 1, 2) == expected
    checkpoints.close()
    four = Mesh({"dp": 4})
    torch.manual_seed(rank)
    saved = RandomState("cpu", four).state_dict()
    RandomState("cpu", again.model.mesh).load_state_dict(saved)
    drawn = torch.rand(1).item()
    RandomState("cpu", four).load_state_dict(saved)
    own = torch.rand(1).item()
    torch.manual_seed(rank)
    assert own == torch.rand(1).item()
    return drawn


def test_dropout_goes_on_and_ranks_that_draw_alike_do_so_on_another_mesh(ranks, tmp_path):
    a, b, c, d = ranks(4, with_dropout, folder=str(tmp_path))
    assert a == b and c == d and a != c


def frozen(rank, world_size, folder):
    """An optimizer of other parameters is refused, though each stage has some of the names."""
    saved = on_mesh("pp 2 x tp 2", 0)
    checkpoints = Checkpoints(folder)
    steps(saved, 0, 1)
    checkpoints.save(1, state_of(saved))
    fewer = on_mesh("pp 2 x dp 2", 0)
    rest = [p for name, p in fewer.model.named_parameters() if name != "norm.weight"]
    fewer.optimizer = torch.optim.AdamW(rest, lr=0.01)
    try:
        checkpoints.load(state_of(fewer))
    except CheckpointError as error:
        return str(error)
    finally:
        checkpoints.close()


def test_another_optimizer_is_refused_on_all_stages(ranks, tmp_path):
    for rank, said in enumerate(ranks(4, frozen, folder=str(tmp_path))):
        assert "its parameters differ: model.norm.weight" in said, f"rank {rank}"


# ---- evaluation


def samples(count):
    whole = data.load("stdlib_text", "gpt")
    return [tuple(part[:LENGTH] for part in whole[number]) for number in range(count)]


def loss_sum(output, target):
    return LOSS(output, target) * target.numel()


def evaluated(rank, world_size, jobs):
    """How far from one process, for numbers of samples that fill no batch, no share, no micro-batch."""
    off = []
    for job in jobs:
        alone = gpt(0, JOBS[job][1].get("mixture"))
        trainer = on_mesh(job, 0)
        trainer.train_step(*part_of_batch(trainer.model, trainer.model.mesh)(0))
        trainer.model.load_full_state_dict(alone.state_dict())
        for count in (13, 1):
            dataset = samples(count)
            inputs, targets = (torch.stack(part) for part in zip(*dataset, strict=True))
            with torch.no_grad():
                output = alone(inputs)
            found = trainer.model.evaluate(dataset, correct, batch_size=6)
            assert found == (correct(output, targets).item(), count * LENGTH)
            off.append(abs(trainer.evaluate(dataset) - LOSS(output, targets).item()))
            found = trainer.model.evaluate(dataset, loss_sum, batch_size=6)
            off.append(abs(found.mean - LOSS(output, targets).item()))
        assert all(module.training for module in trainer.model.modules())
        trainer.train_step(*part_of_batch(trainer.model, trainer.model.mesh)(1))
    return max(off)


@pytest.mark.slow
def test_each_sample_counts_once(ranks):
    jobs = ("fsdp 2 x tp 2", "cp 2 x tp 2", "pp 2 x tp 2, two stages a rank", "pp 2 x dp 2, from both ends")
    jobs += ("dp 2 x ep 2",)
    assert max(ranks(4, evaluated, jobs=jobs)) < 1e-12


def two_accumulations(rank, world_size):
    model = Composed(gpt(0), Mesh({"pp": 2}), **PIPELINED)
    Trainer(model, None, LOSS, accumulation=4)
    try:
        Trainer(model, None, LOSS, accumulation=2)
    except ValueError as error:
        return str(error)


def test_a_pipeline_accumulates_over_its_own_micro_batches(ranks):
    for rank, said in enumerate(ranks(2, two_accumulations)):
        assert "accumulation=2: a pipeline accumulates over its micro-batches, and has 4" in said, f"rank {rank}"


def padded_loss(output, target):
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def padded():
    """A batch of which some targets are ignored, in each part another number: of the first samples all."""
    input, target = text(0)
    target = target.masked_fill(target > 110, -100)
    target[: BATCH // 4] = -100
    return input, target


def with_padding(rank, world_size, jobs):
    """How far a step with ignored targets is from that of one process, and the evaluation."""
    alone = gpt(0)
    whole = padded()
    dataset = list(zip(*whole, strict=True))
    with torch.no_grad():
        before = padded_loss(alone(whole[0]), whole[1]).item()
    padded_loss(alone(whole[0]), whole[1]).backward()
    torch.optim.SGD(alone.parameters(), lr=0.5).step()
    off = []
    for job in jobs:
        axes, options = JOBS[job]
        options = options | {"loss": padded_loss} if "pp" in axes else options
        model = Composed(gpt(0), Mesh(axes), plan(), **options)
        accumulation = 1 if "pp" in axes else 2
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.5), padded_loss, accumulation)
        off.append(abs(trainer.evaluate(dataset) - before))
        parts, place = (model.mesh.size("dp"), model.mesh.rank("dp")) if "dp" in axes else (1, 0)
        loss = trainer.train_step(*(model.own_tokens(part.chunk(parts)[place]) for part in whole))
        assert loss.isfinite() and loss > 0
        found = model.full_state_dict()
        off += [(found[name] - value).abs().max().item() for name, value in alone.state_dict().items()]
    return max(off)


@pytest.mark.slow
def test_each_target_that_is_not_ignored_weighs_the_same_on_a_mesh(ranks):
    jobs = ("fsdp 2 x tp 2", "cp 2 x tp 2", "pp 2 x tp 2, two stages a rank", "pp 2 x dp 2, from both ends")
    assert max(ranks(4, with_padding, jobs=jobs)) < 1e-12


def in_parts(rank, world_size):
    """Gradients that add up over micro-batches, on a mesh with FSDP, against one batch."""
    mesh = Mesh({"dp": 2, "tp": 2})
    found = []
    for accumulation in (1, 2):
        model = Composed(gpt(rank), mesh, plan(), wrap=FSDP_BLOCKS)
        trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.5), LOSS, accumulation, clip=0.5)
        found.append(torch.tensor(steps(trainer, 0, 2)))
    return (found[0] - found[1]).abs().max().item()


@pytest.mark.slow
def test_accumulation_on_a_mesh_changes_nothing(ranks):
    assert BATCH % 4 == 0 and max(ranks(4, in_parts)) < 1e-12
