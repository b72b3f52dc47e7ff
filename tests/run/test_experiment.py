"""The experiment: every field checked, the round trip exact; and the comparison: one table, equal losses."""

import dataclasses
import json
from contextlib import nullcontext
from functools import partial, wraps
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from labkit import comm, models
from labkit.amp import GradScaler
from labkit.compression import TopK
from labkit.learning_rate import scaled_lr, warmup
from labkit.run import LaunchError, launch
from labkit.run.compare import compare
from labkit.run.experiment import Experiment
from labkit.run.experiment_runner import Participant
from labkit.sampler import Batches
from labkit.trainer import STRATEGIES, Trainer, make_optimizer, parallelize

OURS = ("ddp_naive", "ddp_overlapped", "ddp_bucketed")


def test_yaml_and_json_give_the_same_experiment_back(tmp_path):
    experiment = Experiment(model="gpt", strategy="torch_fsdp", lr=0.1, steps=7, compute="emulated", block_ms=2)
    experiment.to_yaml(tmp_path / "e.yaml")
    experiment.to_json(tmp_path / "e.json")
    assert Experiment.from_yaml(tmp_path / "e.yaml") == experiment
    assert Experiment.from_json(tmp_path / "e.json") == experiment


def test_it_is_frozen_and_replace_checks_again():
    experiment = Experiment()
    with pytest.raises(dataclasses.FrozenInstanceError):
        experiment.lr = 1.0
    assert experiment.replace(lr=1).lr == 1.0
    with pytest.raises(ValueError, match="choose from"):
        experiment.replace(model="transformer")


@pytest.mark.parametrize("field", dataclasses.fields(Experiment), ids=lambda field: field.name)
def test_every_field_refuses_another_type(field):
    with pytest.raises(TypeError, match=field.name):
        Experiment(**{field.name: [1]})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "bert"),
        ("size", "huge"),
        ("data", "imagenet"),
        ("strategy", "zero9"),
        ("optimizer", "lion"),
        ("lr_rule", "cubic"),
        ("precision", "fp8"),
        ("compute", "guessed"),
        ("batch_size", 0),
        ("accumulation", 0),
        ("steps", -1),
        ("lr", -0.1),
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("bucket_cap_mb", -1.0),
        ("seed", -1),
    ],
)
def test_every_value_that_cannot_be_is_named(field, value):
    with pytest.raises(ValueError, match=f"Experiment\\({field}="):
        Experiment(**{field: value})


def test_data_that_does_not_fit_the_model_is_named():
    with pytest.raises(ValueError, match="the model gpt takes data=stdlib_text"):
        Experiment(model="gpt", data="digits")


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_an_unknown_key_is_told_with_the_file_and_the_nearest_key(tmp_path, suffix):
    path = tmp_path / f"e.{suffix}"
    path.write_text(json.dumps({"batchsize": 8}))  # JSON is YAML
    with pytest.raises(ValueError, match=rf"e\.{suffix}: unknown key 'batchsize': did you mean 'batch_size'\?"):
        getattr(Experiment, f"from_{suffix}")(path)


def test_broken_files_are_one_clear_error(tmp_path):
    (tmp_path / "e.yaml").write_text("model: [mlp")
    (tmp_path / "e.json").write_text("{")
    (tmp_path / "twice.yaml").write_text("lr: 0.1\nsteps: 3\nlr: 0.2\n")
    (tmp_path / "twice.json").write_text('{"lr": 0.1, "lr": 0.2}')
    for name, load in (("twice.yaml", Experiment.from_yaml), ("twice.json", Experiment.from_json)):
        with pytest.raises(ValueError, match=f"{name}: has the key lr twice"):
            load(tmp_path / name)
    (tmp_path / "list.yaml").write_text("- mlp")
    for name, load in (("e.yaml", Experiment.from_yaml), ("e.json", Experiment.from_json)):
        with pytest.raises(ValueError, match=f"{name}: is not "):
            load(tmp_path / name)
    with pytest.raises(ValueError, match="mapping"):
        Experiment.from_yaml(tmp_path / "list.yaml")


def test_a_batch_that_does_not_split_is_told_with_what_would():
    with pytest.raises(ValueError, match=r"batch_size=10 must be a multiple of 4"):
        compare([Experiment(batch_size=10, accumulation=2)], nproc=2)


def test_two_experiments_with_one_label_are_refused():
    with pytest.raises(ValueError, match="label"):
        compare([Experiment(lr=0.1), Experiment(lr=0.2)])


@pytest.mark.parametrize(("batch", "rule", "factor"), [(256, "linear", 4), (256, "sqrt", 2), (256, "none", 1)])
def test_learning_rate_rules(batch, rule, factor):
    assert scaled_lr(0.1, batch, 64, rule) == pytest.approx(0.1 * factor)


@pytest.mark.parametrize("rule", ["linear", "sqrt", "linear_sqrt"])
def test_a_larger_batch_never_has_a_smaller_rate_nor_a_jump(rule):
    rates = [scaled_lr(0.1, batch, 64, rule) for batch in range(64, 20000, 64)]
    steps = [after - before for before, after in pairwise(rates)]
    assert min(steps) > 0 and max(steps) <= 0.1 + 1e-9


def test_linear_goes_over_into_the_square_root_where_it_is_told_to():
    assert scaled_lr(0.1, 8192, 256, "linear_sqrt") == pytest.approx(3.2)
    assert scaled_lr(0.1, 4 * 8192, 256, "linear_sqrt") == pytest.approx(6.4)
    assert scaled_lr(0.1, 4096, 256, "linear_sqrt", linear_until=1024) == pytest.approx(0.8)
    assert scaled_lr(0.1, 256, 256, "linear_sqrt", linear_until=64) == pytest.approx(0.1)


def rates_of(steps, warmup_steps, cosine_steps=None):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule, seen = warmup(optimizer, warmup_steps, cosine_steps), []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_warm_up_rises_in_equal_steps_to_the_rate_and_stays():
    assert rates_of(7, 4) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5])


def test_a_cosine_begins_where_warm_up_ends_and_falls_to_zero():
    assert rates_of(8, 2, 4) == pytest.approx([0.5 / 3, 1 / 3, *rates_of(6, 0, 4)])
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    theirs, expected = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6), []
    for _ in range(7):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        theirs.step()
    assert rates_of(7, 0, 6) == pytest.approx(expected)
    assert rates_of(9, 0, 6)[-2:] == [0.0, 0.0]


def test_a_cosine_without_a_step_is_refused():
    with pytest.raises(ValueError, match="must be less than steps=20 with schedule='cosine'"):
        Experiment(schedule="cosine", warmup_steps=20)


def test_every_epoch_has_an_order_of_its_own():
    dataset = TensorDataset(torch.arange(12), torch.arange(12))
    ranks = [Batches(dataset, 3, 2, rank) for rank in range(2)]
    first, second = ([i for rank in ranks for _ in range(2) for i in next(rank)[0].tolist()] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


@pytest.mark.slow
@pytest.mark.parametrize(("model", "nproc"), [("mlp", 2), ("gpt", 2), ("mlp", 4)])
def test_all_strategies_follow_the_single_process(model, nproc):
    followers = [name for name in STRATEGIES if name != "diloco"]  # whose outer step is another training
    experiments = [Experiment(model=model, strategy=name, batch_size=16, precision="fp64") for name in followers]
    records = compare(experiments, nproc=nproc, rounds=2, steps_per_round=2, quiet=True).records
    losses = records.groupby(["label", "step"])["loss"].mean().unstack("label")
    # Equal shares: the mean of the ranks' means is the mean over the batch; fp64 leaves only the order of sums.
    assert losses.sub(losses["single"], axis=0).abs().max().max() < 1e-12
    first = records[records["rank"] == 0].groupby("label").first()
    gradient_bytes = first.loc["ddp_bucketed", "peak_parameters_bytes"]
    # Every gradient is sent once, by the ring formula 2 (n-1)/n, in all three forms and by PyTorch.
    for label in (*OURS, "torch_ddp"):
        assert abs(first.loc[label, "sent_bytes"] - 2 * (nproc - 1) / nproc * gradient_bytes) < nproc * 40
    assert first.loc["single", "sent_bytes"] == 0
    assert (records["step_ms"] >= records["forward_ms"] + records["backward_ms"]).all()
    assert (records["exposed_comm_ms"] >= 0).all() and (records["exposed_comm_ms"] <= records["step_ms"]).all()


@pytest.mark.slow
def test_axes_train_what_one_process_trains():
    base = Experiment(model="gpt", batch_size=16, precision="fp64")
    axes = {
        "dp 2 x tp 2": {"tensor": 2},
        "dp 2 x tp 2, sequence parallel": {"tensor": 2, "sequence_parallel": "on"},
        "flash attention": {"attention": "flash"},
        "fsdp 2 x tp 2": {"tensor": 2, "strategy": "fsdp"},
        "fsdp in files 2 x tp 2": {"tensor": 2, "strategy": "fsdp_nvme"},
        "cp 2 x tp 2": {"tensor": 2, "context": 2},
        "dp 2 x pp 2": {"pipeline": 2, "strategy": "ddp_naive", "accumulation": 4},
        "one process": {"strategy": "single"},
    }
    mixed = {
        "dp 2 x ep 2": {"experts": 4, "expert": 2},
        "ep 2 x tp 2": {"experts": 4, "expert": 2, "tensor": 2},
        "fsdp 4 with experts": {"experts": 4, "strategy": "fsdp"},
        "one process with experts": {"experts": 4, "strategy": "single"},
    }
    runs = {name: base.replace(**changes) for name, changes in (axes | mixed).items()}
    records = compare(runs, nproc=4, rounds=2, steps_per_round=2, quiet=True).records
    losses = records.groupby(["label", "step"])["loss"].mean().unstack("label")
    for alike, oracle in ((axes, "one process"), (mixed, "one process with experts")):
        assert losses[list(alike)].sub(losses[oracle], axis=0).abs().max().max() < 1e-12
    assert (losses["one process with experts"] > losses["one process"] + 0.01).all()  # what balances is in it
    assert (records[~records["label"].str.startswith("one process")]["sent_bytes"] > 0).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"nvme_path": "/tmp"}, "needs strategy='fsdp_nvme', not 'ddp_bucketed'"),
        ({"attention": "flash", "context": 2}, "needs the model gpt and context=1"),
        ({"sequence_parallel": "on"}, "needs tensor of at least 2"),
        ({"model": "mlp", "tensor": 2}, "only the model gpt can be sharded, not mlp"),
        ({"tensor": 2, "strategy": "zero1"}, "needs one of the strategies ddp_naive, ddp_overlapped"),
        ({"pipeline": 2, "strategy": "fsdp"}, "needs one of the strategies ddp_naive, not fsdp"),
        ({"tensor": 2, "comm_hook": "topk"}, "cannot be combined with comm_hook='topk'"),
        ({"pipeline": 2, "strategy": "ddp_naive", "context": 2}, "a pipeline supports no context axis; use context=1"),
        (
            {"pipeline": 2, "strategy": "ddp_naive", "precision": "bf16"},
            r"\(pp 2\): a pipeline does not support precision='bf16'; use fp32 or fp64",
        ),
        ({"model": "mlp", "experts": 4}, "only the model gpt can have experts, not mlp"),
        ({"experts": 4, "expert": 3}, "experts must be at least 2 and divisible by expert"),
        ({"expert": 2}, "experts must be at least 2"),
        ({"experts": 4, "expert": 2, "strategy": "fsdp"}, "FSDP does not support experts on different ranks"),
        ({"experts": 4, "strategy": "zero1"}, "needs one of the strategies ddp_naive, ddp_overlapped"),
        ({"experts": 4, "pipeline": 2}, "experts cannot be combined with recompute or a pipeline"),
    ],
)
def test_axes_that_cannot_be_combined_are_named(changes, words):
    with pytest.raises(ValueError, match=words):
        Experiment(**{"model": "gpt"} | changes)
    with pytest.raises(ValueError, match=r"nproc=6 must be a multiple of 4"):
        Experiment(model="gpt", tensor=2, context=2, batch_size=12).check_ranks(6)
    with pytest.raises(ValueError, match="batch_size=6 must be a multiple of 4: 4 ranks"):
        Experiment(model="gpt", experts=4, expert=2, batch_size=6).check_ranks(4)


def groups_made(context):
    made, new_group = [], torch.distributed.new_group

    def noted(ranks, **options):
        made.append((ranks, options))
        return new_group(ranks, **options)

    torch.distributed.new_group = noted
    Participant(context, Experiment(strategy="single", precision="fp16"))
    context.record(made=json.dumps(made))


@pytest.mark.slow
def test_all_ranks_make_the_group_of_the_one_that_trains_alone():
    """Where NCCL makes it by a split of the group of all, each of them has to take part."""
    assert launch("test_experiment:groups_made", quiet=True).records["made"].tolist() == ["[[[0], {}]]"] * 2


@pytest.mark.slow
def test_accumulation_changes_the_messages_and_not_the_loss():
    steps = {"whole": Experiment(batch_size=32), "parts": Experiment(batch_size=32, accumulation=4)}
    records = compare(steps, rounds=1, steps_per_round=3, quiet=True).records
    losses = records.groupby(["label", "step"])["loss"].mean().unstack("label")
    assert (losses["whole"] - losses["parts"]).abs().max() < 1e-6
    assert records.groupby("label")["sent_bytes"].first().nunique() == 1


def test_train_records_a_row_per_step_and_learns():
    records = launch("labkit.run.compare:train", quiet=True, steps=30, model="mlp").records
    mean = records.groupby("step")["loss"].mean()
    assert len(mean) == 30 and mean.iloc[-5:].mean() < 0.5 * mean.iloc[:5].mean()


@pytest.mark.slow
def test_precision_and_recomputation_join_every_strategy():
    # With a larger lr a gradient soon passes 1, and in fp16, scaled by 65536, 65504: a step is skipped, on some texts.
    base = Experiment(model="gpt", batch_size=16, lr=0.001)
    runs = {
        f"{strategy} {precision} {again}": base.replace(strategy=strategy, precision=precision, recompute=again)
        for strategy, precision, again in [
            ("single", "fp16", "none"),
            ("ddp_bucketed", "fp16", "every"),
            ("ddp_bucketed", "bf16", "none"),
            ("zero2", "fp16", "alternate"),
            ("fsdp", "fp16", "matmul"),
        ]
    }
    records = compare({"fp32": base, **runs}, rounds=2, quiet=True).records
    losses = records.groupby(["label", "step"])["loss"].mean().unstack("label")
    # 11 and 8 significant bits of a loss near 5: none of them diverges, none is fp32 in disguise.
    distance = losses.sub(losses["fp32"], axis=0).abs().max()
    assert (distance[list(runs)] < 0.01).all() and (distance[list(runs)] > 0).all()
    kept = records.groupby("label")["peak_activations_bytes"].max()
    assert kept["ddp_bucketed fp16 every"] < kept["zero2 fp16 alternate"] < kept["ddp_bucketed bf16 none"]


@pytest.mark.slow
def test_auto_takes_the_first_strategy_that_fits():
    base = Experiment(model="gpt", strategy="auto", batch_size=8, optimizer="adamw", lr=1e-3)
    plenty = compare({"auto": base}, rounds=1, steps_per_round=1, quiet=True).records
    assert set(plenty["strategy"]) == {"ddp_bucketed"}
    scarce = base.replace(memory_mb=0.999 * int(plenty["peak_bytes"].max()) / 2**20)
    records = compare({"auto": scarce}, rounds=1, steps_per_round=1, quiet=True).records
    assert set(records["strategy"]) == {"zero1"} and records["peak_bytes"].max() <= scarce.memory_mb * 2**20
    with pytest.raises(LaunchError, match=r"nothing fits into .* it would fit with"):
        compare({"auto": base.replace(memory_mb=0.1)}, quiet=True)


@pytest.mark.slow
def test_hooks_carry_what_plain_averaging_would():
    base = Experiment(model="gpt", batch_size=16, precision="fp64")
    runs = {name: base.replace(comm_hook=name) for name in ("none", "hierarchical", "leaders", "topk", "powersgd")}
    runs["on PyTorch's"] = base.replace(comm_hook="topk", strategy="torch_ddp")
    records = compare(runs, nproc=4, rounds=2, steps_per_round=2, quiet=True).records
    losses = records.groupby(["label", "step"])["loss"].mean().unstack("label")
    distance = losses.sub(losses["none"], axis=0).abs().max()
    # One node here: the sum's order is all that may differ. A compressor leaves something out.
    assert distance["hierarchical"] < 1e-12 and distance["leaders"] < 1e-12
    assert distance["topk"] > 1e-6 and distance["powersgd"] > 1e-6
    assert (losses["topk"] - losses["on PyTorch's"]).abs().max() < 1e-12
    first = records[records["rank"] == 0].groupby("label").first()
    assert (first.loc["hierarchical", "sent_bytes"] - first.loc["none", "sent_bytes"]) == 0
    assert first.loc["topk", "sent_bytes"] == first.loc["on PyTorch's", "sent_bytes"]
    assert 10 * first.loc["topk", "sent_bytes"] < first.loc["none", "sent_bytes"]
    taken = records.groupby("label")["compress_ms"].min()
    assert taken["topk"] > 0 and taken["none"] == taken["hierarchical"] == 0


@pytest.mark.parametrize("strategy", ["single", "zero1", "fsdp", "local_sgd", "auto"])
def test_a_hook_that_nothing_would_call_is_refused(strategy):
    with pytest.raises(
        ValueError, match=rf"comm_hook='topk'\): needs one of the strategies ddp_naive, .* not {strategy}"
    ):
        Experiment(strategy=strategy, comm_hook="topk")


@pytest.mark.slow
def test_local_sgd_and_diloco_talk_every_so_many_steps():
    base = Experiment(model="mlp", optimizer="adamw", lr=1e-3)
    runs = {name: base.replace(strategy=name, every=4) for name in ("local_sgd", "diloco")} | {"ddp_bucketed": base}
    records = compare(runs, rounds=2, steps_per_round=4, quiet=True).records
    first = records.groupby("strategy").first()
    for name in ("local_sgd", "diloco"):
        assert first.loc[name, "messages"] == 1 / 4
        assert abs(first.loc[name, "sent_bytes"] - first.loc["ddp_bucketed", "sent_bytes"] / 4) < 1
    # DiLoCo keeps the weights of the last average besides, and their momentum, which its first average makes.
    held = first["peak_parameters_bytes"]
    assert held["local_sgd"] == held["ddp_bucketed"] and held["diloco"] == 2 * held["local_sgd"]
    assert first.loc["diloco", "peak_optimizer_states_bytes"] > first.loc["local_sgd", "peak_optimizer_states_bytes"]


def trained_with_a_moving_scale(rank, world_size, growth_interval):
    """All weights after ten steps with a compressor; the loss scale doubles every growth_interval of them."""
    torch.manual_seed(0)
    module, compressor = torch.nn.Linear(40, 5), TopK(0.1)
    model = parallelize(module, "ddp_bucketed", hook=compressor)
    scaler = GradScaler("cpu", init_scale=1.0, growth_interval=growth_interval)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    trainer = Trainer(model, optimizer, torch.nn.functional.mse_loss, scaler=scaler, compressor=compressor)
    shuffle = torch.Generator().manual_seed(rank)
    for _ in range(10):
        trainer.train_step(torch.randn(8, 40, generator=shuffle), torch.randn(8, 5, generator=shuffle))
    return torch.cat([p.detach().flatten() for p in module.parameters()]), scaler.get_scale()


def test_residuals_follow_the_loss_scale(ranks):
    (moving, scale), _ = ranks(2, trained_with_a_moving_scale, growth_interval=2)
    (fixed, one), _ = ranks(2, trained_with_a_moving_scale, growth_interval=100)
    assert (scale, one) == (2.0**5, 1.0)
    assert torch.equal(moving, fixed)  # powers of two round nothing


def some_ignored(ignore_index):
    """(input, target) of 8 texts; rank 0 of two has more targets, and one micro-batch has none."""
    generator = torch.Generator().manual_seed(1)
    input, target = torch.randint(7, (2, 8, 5), generator=generator)
    for row in range(8):
        target[row, 5 - 5 * row // 8 :] = ignore_index
    target[4:6] = ignore_index
    return input, target


def tagger():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7), Transposed()).double()


class Transposed(torch.nn.Module):
    def forward(self, x):
        return x.transpose(1, 2)


def counted(rank, world_size, accumulation):
    """How far a step is from one over the whole batch, by strategy and loss; and messages of 8 bytes."""
    weight = torch.rand(7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    losses = {
        "function": lambda output, target: F.cross_entropy(output, target),
        "partial": partial(F.cross_entropy, ignore_index=-1, weight=weight),
        "module": torch.nn.CrossEntropyLoss(weight, ignore_index=-1, label_smoothing=0.1),
    }
    jobs = [(strategy, "function") for strategy in ("zero1", "fsdp", "torch_ddp", "torch_fsdp")]
    jobs += [("ddp_bucketed", name) for name in losses]
    off, small = {}, {}
    for strategy, name in jobs:
        whole = some_ignored(-100 if name == "function" else -1)
        alone = tagger()
        losses[name](alone(whole[0]), whole[1]).backward()
        torch.optim.SGD(alone.parameters(), lr=0.5).step()
        model = parallelize(tagger(), strategy)
        trainer = Trainer(model, make_optimizer(model, strategy, torch.optim.SGD, lr=0.5), losses[name], accumulation)
        with comm.record() as log:
            loss = trainer.train_step(*(part.chunk(world_size)[rank] for part in whole))
        state = getattr(model, "full_state_dict", model.state_dict)()
        found = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in state.values()]
        off[strategy, name] = max(
            (a - b).abs().max().item() for a, b in zip(found, alone.state_dict().values(), strict=True)
        )
        small[strategy, name] = sum(event.op == "all_reduce" and event.payload_bytes == 8 for event in log)
        own = (part.chunk(world_size)[rank] for part in whole)
        with torch.no_grad():
            mean = losses[name](tagger()(next(own)), next(own))
        assert loss.item() == pytest.approx(mean.item())
    return off, small


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_each_target_that_is_not_ignored_weighs_the_same(ranks, world_size, accumulation):
    for rank, (off, small) in enumerate(ranks(world_size, counted, accumulation=accumulation)):
        assert max(off.values()) < 1e-12, f"rank {rank}, {off}"
        assert set(small.values()) == {world_size - 1}, f"rank {rank}, {small}"


def equally(rank, world_size):
    """Who sends no count: a loss that ignores nothing, or of floats; ranks in a join; local SGD."""
    input = torch.zeros(2, 5, dtype=torch.int64)
    sent = {}
    for name, strategy, loss in (
        ("labkit's", "ddp_bucketed", lambda o, t: models.cross_entropy(o.transpose(1, 2), t)),
        ("floats", "ddp_bucketed", lambda o, t: F.mse_loss(o, torch.zeros_like(o))),
        ("joined", "ddp_bucketed", lambda o, t: F.cross_entropy(o, t)),
        ("local", "local_sgd", lambda o, t: F.cross_entropy(o, t)),
    ):
        model = parallelize(tagger(), strategy)
        target = input.double() if name == "floats" else input
        if name == "labkit's":
            loss = wraps(models.cross_entropy)(loss)
        trainer = Trainer(model, make_optimizer(model, strategy, torch.optim.SGD, every=9, lr=0.5), loss)
        with model.join() if name == "joined" else nullcontext():
            with comm.record() as log:
                trainer.train_step(input, target)
            sent[name] = sum(event.payload_bytes == 8 for event in log)
    with pytest.raises(IndexError, match="-100 is out of bounds"):
        models.cross_entropy(torch.zeros(2, 3), torch.tensor([0, -100]))
    return sent


def test_where_all_targets_count_nothing_is_sent(ranks):
    for rank, sent in enumerate(ranks(2, equally)):
        assert set(sent.values()) == {0}, f"rank {rank}, {sent}"


@pytest.mark.parametrize(
    "scaler",
    [
        lambda: GradScaler("cpu", 2.0**126, hysteresis=2),
        lambda: torch.amp.GradScaler("cpu", 2.0**126),
        lambda: GradScaler(enabled=False),
        lambda: torch.amp.GradScaler("cpu", enabled=False),
    ],
    ids=["hysteresis", "torch", "disabled", "torch-disabled"],
)
@pytest.mark.filterwarnings("error:.*lr_scheduler.step:UserWarning")
def test_the_schedule_stands_still_while_the_scaler_skips(scaler):
    model, scaler = torch.nn.Linear(2, 1), scaler()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = Trainer(model, optimizer, torch.nn.functional.mse_loss, schedule=warmup(optimizer, 9), scaler=scaler)
    steps = 0
    for _ in range(8):
        before = model.weight.clone()
        assert optimizer.param_groups[0]["lr"] == pytest.approx((steps + 1) / 10)
        trainer.train_step(torch.full((4, 2), 10.0), torch.zeros(4, 1))
        steps += not torch.equal(before, model.weight)
    assert (0 < steps < 8) == scaler.is_enabled()


def test_hooks_are_called_after_each_step_with_its_loss():
    model, seen = torch.nn.Linear(2, 1), []

    def note(trainer, loss):
        seen.append((loss.item(), trainer.model.weight.detach().clone()))

    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), torch.nn.functional.mse_loss, hooks=[note, note])
    losses = [trainer.train_step(torch.ones(4, 2), torch.zeros(4, 1)).item() for _ in range(2)]
    assert [loss for loss, _ in seen] == [losses[0]] * 2 + [losses[1]] * 2
    assert torch.equal(seen[3][1], model.weight) and not torch.equal(seen[0][1], model.weight)
