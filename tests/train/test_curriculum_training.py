"""A curriculum in training: the lengths of its batches, one process as the oracle, and a resumed run."""

import io
from functools import cache, partial
from itertools import accumulate

import pytest
import torch
from losses_of import losses_of
from torch.utils.data import default_collate
from train_command import lines, run

from labkit import models
from labkit.measure.flops import step_flops
from labkit.models.curriculum import length_of
from labkit.run import frameworks
from labkit.run import training as train
from labkit.run.compare import compare
from labkit.run.context import Context, EventFile
from labkit.run.experiment import Experiment
from labkit.run.experiment_mesh import unfinished_curriculum
from labkit.run.experiment_runner import Participant, estimate
from labkit.run.options import read
from labkit.run.sweep import Cell

STEPS = 14
LINEAR = Experiment(model="gpt", batch_size=8, curriculum="fixed_linear", curriculum_from=8, curriculum_steps=10)
ROOT = LINEAR.replace(curriculum="fixed_root", curriculum_from=7, curriculum_steps=10)
OPTIONS = ("--curriculum", "fixed_linear", "--curriculum-from", "8", "--curriculum-steps", "9")


def deepspeeds(e):
    """The same curriculum in DeepSpeed's fields."""
    inner = {"total_curriculum_step": e.curriculum_steps, "difficulty_step": 8}
    inner |= {"root_degree": 2} if e.curriculum == "fixed_root" else {}
    ends = {"min_difficulty": e.curriculum_from, "max_difficulty": 64}
    return ends | {"schedule_type": e.curriculum, "schedule_config": inner}


def shapes(rank, world_size, fields):
    """[(shape of the input, whether its rows begin the complete ones, FLOPs)] of each step."""
    context = Context(rank, world_size, rank, 0, torch.device("cpu"), EventFile(io.StringIO()))
    trained = Participant(context, Experiment.from_dict(fields))
    complete = Participant(context, Experiment.from_dict(fields | {"curriculum": "none", **UNUSED}))
    found = []
    for _ in range(STEPS):
        input, target = trained.next_batch()
        whole = complete.next_batch()
        begins = all(torch.equal(part, of[:, : part.shape[1]]) for part, of in zip((input, target), whole, strict=True))
        assert input.shape == target.shape and begins
        found.append((tuple(input.shape), trained.flops))
        trained.done += 1
    return found


UNUSED = {"curriculum_from": 0, "curriculum_steps": 0}


@cache
def of_length(samples, length):
    """The FLOPs of a step of the tiny GPT."""
    input, target = default_collate([models.data.load("auto", "gpt")[0]] * samples)
    with torch.device("meta"):
        module = models.build("gpt")
    return step_flops(module, input[:, :length].to("meta"), target[:, :length].to("meta"), models.loss("gpt"))


@pytest.mark.parametrize("experiment", [LINEAR, ROOT], ids=lambda e: e.curriculum)
def test_batches_have_the_lengths_of_the_schedule_and_their_flops(ranks, experiment):
    wanted = [length_of(step, deepspeeds(experiment)) for step in range(1, STEPS + 1)]
    assert wanted[0] < wanted[-1] == 64 and len(set(wanted)) > 3
    for found in ranks(2, shapes, fields=experiment.to_dict()):
        assert [shape for shape, _ in found] == [(4, length) for length in wanted]
        assert [flops for _, flops in found] == [2 * of_length(4, length) for length in wanted]


def test_two_ranks_train_what_one_process_trains(ranks):
    mean = partial(losses_of, ranks=ranks, world_size=2, steps=7)
    base = LINEAR.replace(precision="fp64", steps=7, curriculum_steps=5)
    wanted = mean(base.replace(strategy="single"))
    others = [{"strategy": "fsdp"}, {"accumulation": 2}, {"tensor": 2}, {"attention": "flash"}, {"strategy": "zero2"}]
    others.append({"strategy": "auto"})
    assert len(wanted) == 7
    for changes in others:
        assert mean(base.replace(**changes)) == pytest.approx(wanted, abs=1e-12), changes
    mixed = base.replace(experts=4)
    wanted_of_experts = mean(mixed.replace(strategy="single"))
    assert mean(mixed.replace(expert=2)) == pytest.approx(wanted_of_experts, abs=1e-12)
    complete = base.replace(curriculum="none", **UNUSED)
    assert abs(mean(complete)[0] - wanted[0]) > 1e-4


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_lengths_of_the_unbroken_one(tmp_path):
    """And the metrics of the unbroken one count the tokens that are trained."""
    whole, broken, places = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl", tmp_path / "places"
    code, _, error = run(2, *OPTIONS, "--log", whole, "--model", "gpt", "--metrics", f"jsonl:{tmp_path}")
    assert code == 0, error
    options = (*OPTIONS, "--model", "gpt", "--log", broken, "--checkpoint-dir", places, "--checkpoint-every", 1)
    code, _, error = run(2, *options, "--stop-after", "0")
    assert code == 0, error
    code, out, error = run(2, *options)
    assert code == 0 and "resumes after step 1\n" in out, error
    same = ("step", "loss", "gradient_norm", "weights_sha256")
    kept = [[{name: line.get(name) for name in same} for line in lines(log)] for log in (broken, whole)]
    assert kept[0] == kept[1] and kept[0][-1]["weights_sha256"]
    rows = lines(tmp_path / "metrics-rank0.jsonl")
    assert len(rows) == 12
    for row in rows:
        length = length_of(row["step"], deepspeeds(LINEAR.replace(curriculum_steps=9)))
        assert row["tokens_per_s"] == pytest.approx(row["samples_per_s"] * length)


def test_a_resumed_run_has_the_same_curriculum():
    state = train.Run(LINEAR, {}).state_dict()
    assert train.Run(LINEAR.replace(curriculum_steps=8), {}).problems(state) == ["curriculum_steps was 10, is now 8"]


def begun(rank, world_size):
    """What a run says first."""
    context = Context(rank, world_size, rank, 0, torch.device("cpu"), EventFile(io.StringIO()))
    participant = Participant(context, LINEAR.replace(curriculum_steps=99))
    return train.first_line(participant, None)


def test_a_run_says_first_that_its_curriculum_does_not_end(ranks):
    assert "from the beginning; the curriculum ends at step 99, the run at step 20: " in ranks(1, begun)[0]


def test_an_older_checkpoint_is_of_a_run_without_a_curriculum():
    state = train.Run(Experiment(model="gpt", batch_size=8), {}).state_dict()
    state["fields"] = {name: was for name, was in state["fields"].items() if name not in train.NEWER}
    problems = train.Run(LINEAR, {}).problems(state)
    assert problems == [
        "curriculum was 'none', is now 'fixed_linear'",
        "curriculum_from was 0, is now 8",
        "curriculum_steps was 0, is now 10",
    ]


def paced(rank, world_size, seconds, start=0):
    """[what labkit.train's pace says after each step]. seconds: of each step, on a clock of the test."""
    context = Context(rank, world_size, rank, 0, torch.device("cpu"), EventFile(io.StringIO()))
    trained = Participant(context, LINEAR.replace(steps=STEPS))
    now, clock = iter(accumulate(seconds, initial=0.0)), train.time.monotonic
    train.time.monotonic = lambda: next(now)
    try:
        pace = train.Pace(trained, start)
        return [pace.after(step) for step in range(start + 1, STEPS + 1)]
    finally:
        train.time.monotonic = clock


def test_the_pace_counts_the_tokens_that_are_trained(ranks):
    """The mean over the steps so far, of 8 sequences each."""
    each = [8 * length_of(step, deepspeeds(LINEAR)) for step in range(1, STEPS + 1)]
    wanted = [round(sum(each[:step]) / step, 1) for step in range(1, STEPS + 1)]
    (found,) = ranks(1, paced, seconds=[1.0] * STEPS)
    assert [fields["tokens_per_s"] for fields in found] == wanted


@pytest.mark.parametrize("start", [0, 4])
def test_the_time_left_is_that_of_the_tokens_left(ranks, start):
    """Each token takes 0.5 s here, so the estimate is exact from the first step, also of a resumed run."""
    seconds = [0.5 * length_of(step, deepspeeds(LINEAR)) for step in range(start + 1, STEPS + 1)]
    (found,) = ranks(1, paced, seconds=seconds, start=start)
    assert [fields["eta_s"] for fields in found] == [sum(seconds[done:]) for done in range(1, len(seconds) + 1)]
    assert found[0]["eta_s"] > 4 * (STEPS - start - 1)  # more than the shortest steps would take


def test_a_curriculum_that_does_not_end_is_said():
    assert unfinished_curriculum(LINEAR.replace(steps=10)) == ""
    assert unfinished_curriculum(Experiment(model="gpt")) == ""
    for experiment in (LINEAR, ROOT):
        long = experiment.replace(curriculum_steps=1000)
        last = length_of(long.steps, deepspeeds(long))
        assert unfinished_curriculum(long) == (
            f"the curriculum ends at step 1000, the run at step 20: its last sequences have {last} of 64 tokens"
        )
    assert unfinished_curriculum(LINEAR.replace(steps=9)).endswith("have 56 of 64 tokens")


def test_memory_is_predicted_for_complete_sequences():
    complete = LINEAR.replace(curriculum="none", **UNUSED)
    assert [one.peak for one in estimate(LINEAR, 2)] == [one.peak for one in estimate(complete, 2)]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": "mlp"}, "needs model='gpt', not 'mlp'"),
        ({"compute": "emulated"}, "needs compute='real', not 'emulated'"),
        ({"context": 2}, "needs context=1, not 2"),
        ({"pipeline": 2, "strategy": "ddp_naive"}, "needs pipeline=1, not 2"),
        ({"tensor": 2, "sequence_parallel": "on"}, "needs sequence_parallel='off', not 'on'"),
        ({"curriculum_from": 0}, "curriculum_from=0 must be from 1 to 64 tokens"),
        ({"curriculum_from": 65}, "curriculum_from=65 must be from 1 to 64 tokens"),
        ({"curriculum_steps": 0}, "curriculum_steps=0 must be at least 1"),
        ({"curriculum": "none"}, r"Experiment\(curriculum_from=8\): needs curriculum, which is 'none'"),
        (
            {"curriculum": "fixed_discrete"},
            r"curriculum='fixed_discrete'\): choose from none, fixed_linear, fixed_root",
        ),
    ],
    ids=str,
)
def test_a_curriculum_that_cannot_be_is_one_line(fields, words):
    with pytest.raises(ValueError, match=words) as said:
        LINEAR.replace(**fields)
    assert "\n" not in str(said.value)


def test_comparisons_need_steps_of_one_length():
    with pytest.raises(ValueError, match="compare and sweep need steps of equal length"):
        compare([LINEAR])
    with pytest.raises(ValueError, match="curriculum='fixed_linear'"):
        Cell(LINEAR)


def test_the_option_alone_chooses_the_model():
    assert read([*OPTIONS])[0].model == "gpt"


def deepspeeds_file(e=LINEAR, **changes):
    section = {"enabled": True, "curriculum_type": "seqlen"} | deepspeeds(e) | changes
    return {"train_batch_size": 8, "curriculum_learning": section}


@pytest.mark.parametrize("experiment", [LINEAR, ROOT], ids=lambda e: e.curriculum)
def test_deepspeeds_section_is_read(experiment):
    found = frameworks.read(deepspeeds_file(experiment), "deepspeed", 2).experiment
    names = ("model", "curriculum", "curriculum_from", "curriculum_steps")
    assert [getattr(found, name) for name in names] == [getattr(experiment, name) for name in names]


def test_a_section_that_is_off_changes_nothing():
    plain = frameworks.read({"train_batch_size": 8}, "deepspeed", 2).experiment
    off = deepspeeds_file(enabled=False, schedule_type="fixed_discrete", max_difficulty=1024)
    assert frameworks.read(off, "deepspeed", 2).experiment == plain


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_difficulty": 1024}, "curriculum_learning.max_difficulty=1024: here it is 64"),
        ({"curriculum_type": "vocab"}, 'curriculum_learning.curriculum_type="vocab": here it is "seqlen"'),
        ({"schedule_type": "custom"}, "schedule_type='custom': this lab has 'fixed_linear', 'fixed_root'"),
        ({"min_difficulty": None}, "curriculum_learning.min_difficulty must be there: a whole number"),
        ({"schedule_config": {"difficulty_step": 8}}, "schedule_config.total_curriculum_step must be there: a whole"),
        (
            {"schedule_config": {"difficulty_step": 16, "total_curriculum_step": 10}},
            "curriculum_learning.schedule_config.difficulty_step=16: here it is 8",
        ),
        (
            {"schedule_type": "fixed_discrete", "schedule_config": {"difficulty": [8, 64], "max_step": [5]}},
            "schedule_type='fixed_discrete': this lab has",
        ),
        ({"enable": True}, "did you mean curriculum_learning.enabled?"),
    ],
    ids=str,
)
def test_what_of_the_section_is_refused(changes, words):
    with pytest.raises(ValueError) as said:
        frameworks.read(deepspeeds_file(**changes), "deepspeed", 2)
    assert words in str(said.value) and "\n" not in str(said.value)


@pytest.mark.parametrize("framework", ["deepspeed", "torchtitan", "megatron"])
def test_frameworks_without_such_a_section_refuse_to_write_it(framework):
    with pytest.raises(ValueError, match=r"Experiment\(curriculum='fixed_linear'\): .* cannot express it"):
        frameworks.write(LINEAR.replace(optimizer="adamw"), framework, 2)
