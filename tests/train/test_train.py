"""labkit.train, warm and under a real torchrun: stopped or killed, it ends where the unbroken run ends."""

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from train_command import EMULATED, FIELDS, STEPS, Forked, cold, command, lines, run, start, steady

from labkit import models
from labkit.amp import GradScaler, MasterWeights
from labkit.compression import COMPRESSORS
from labkit.ddp import DDP
from labkit.fsdp import FSDP
from labkit.hierarchical import FORMS
from labkit.horovod import Compression
from labkit.learning_rate import LR_RULES
from labkit.mesh import Mesh
from labkit.models.curriculum import SCHEDULES
from labkit.parallelize import Composed
from labkit.preempt import Agreement, Preemption
from labkit.run import choices
from labkit.run import training as train
from labkit.run.context import Context
from labkit.run.experiment import Experiment
from labkit.run.experiment_runner import OPTIMIZERS, Participant
from labkit.run.options import HELP, STOPPED, WRONG, parser, read
from labkit.sampler import Batches
from labkit.trainer import RECOMPUTE, STRATEGIES, Trainer, make_optimizer, mixed_precision, parallelize

MICRO_BATCHES = ("--accumulation", "2", *EMULATED)
PATIENCE = 15  # seconds to wait for a rank: also on a busy machine those that torchrun starts come within them


def wait_for(path, steps, process):
    """Until the log has so many steps."""
    limit = time.monotonic() + 120
    while not (path.exists() and len(path.read_text().splitlines()) >= steps):
        assert process.poll() is None and time.monotonic() < limit, process.communicate()
        time.sleep(0.01)


def gone(pids):
    for pid in pids:
        limit = time.monotonic() + 60
        while os.path.exists(f"/proc/{pid}") and "State:\tZ" not in open(f"/proc/{pid}/status").read():
            assert time.monotonic() < limit, f"{pid} is still there"
            time.sleep(0.02)


def children(process):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True)
    return [int(pid) for pid in found.stdout.split()]


def own_ranks(nproc, *options):
    """labkit.train that starts its ranks itself."""
    return Forked("--nproc", nproc, *FIELDS, *options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("begin", "leaves_with", "fields"),
    [
        (start, 0, ("--strategy", "fsdp", "--precision", "bf16", *EMULATED)),
        (own_ranks, STOPPED, ("--strategy", "ddp_naive", "--pipeline", "2", "--model", "gpt", *MICRO_BATCHES)),
    ],
    ids=["fsdp under torchrun", "ddp_naive on a pipeline"],
)
def test_stopped_and_killed_it_ends_where_the_unbroken_run_ends(tmp_path, begin, leaves_with, fields):
    whole = tmp_path / "whole.jsonl"
    code, out, error = run(2, *fields, "--block-ms", "1", "--log", whole)
    assert code == 0, error
    expected = lines(whole)
    assert [line["step"] for line in expected] == list(range(1, STEPS + 1))
    assert "done: 12 steps" in out and expected[-1]["weights_sha256"][:16] in out
    broken, places = tmp_path / "broken.jsonl", tmp_path / "checkpoints"
    slow = ("--block-ms", "150")  # so slow that whoever looks late still finds it at work
    options = (*fields, *slow, "--log", broken, "--checkpoint-dir", places, "--checkpoint-every", "2")
    # Asked to stop: one rank gets the signal, both exit after the same step.
    process = begin(2, *options)
    wait_for(broken, 3, process)
    os.kill(children(process)[1], signal.SIGTERM)
    out, error = process.communicate(timeout=120)
    assert process.returncode == leaves_with, error
    stopped = lines(broken)
    assert f"stopped after step {stopped[-1]['step']} (" in out and "run the same command to resume" in out
    assert len(stopped) < STEPS and "weights_sha256" not in stopped[-1]
    # Killed: nobody can say anything, and the ranks go with the process that started them.
    process = begin(2, *options)
    wait_for(broken, len(stopped) + 3, process)
    ranks = children(process)
    process.kill()
    process.communicate()
    gone(ranks)
    code, out, error = run(2, *options, "--resume", "must")
    assert code == 0 and "resumes after step" in out, error
    found = {line["step"]: line["loss"] for line in lines(broken)}
    assert found == {line["step"]: line["loss"] for line in expected}
    assert lines(broken)[-1]["weights_sha256"] == expected[-1]["weights_sha256"]
    # It is done: the same line again takes no step, and says the same.
    code, out, error = run(2, *options)
    assert code == 0 and steady(broken)[-1] == steady(broken)[-2], error


@pytest.mark.slow
def test_a_run_goes_on_with_other_ranks_and_another_strategy(tmp_path):
    whole, broken, places = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl", tmp_path / "places"
    precise = ("--precision", "fp64", "--evaluate-every", 6)
    code, _, error = run(2, *precise, "--log", whole)
    assert code == 0, error
    options = (*precise, "--log", broken, "--checkpoint-dir", places, "--checkpoint-every", 3)
    code, _, error = run(3, *options, "--strategy", "fsdp", "--stop-after", "0")
    assert code == 0 and len(lines(broken)) == 1, error
    code, _, error = run(1, *options, "--strategy", "zero2")
    assert code == 0, error
    for ours, theirs in zip(lines(broken), lines(whole), strict=True):
        assert ours["step"] == theirs["step"]
        for name in {"loss", "evaluation"} & set(ours):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-9)
    code, _, error = run(2, *options, "--model", "resnet", "--seed", "3", "--clip", "0.7")
    assert code == 1 and "run: model was 'mlp', is now 'resnet'; run: seed was 0, is now 3" in error
    assert "run: clip was 0.5, is now 0.7" in error
    code, _, error = run(2, *options, "--resume", "never")
    assert code == 1 and "has a checkpoint of step 12: use another directory" in error
    code, _, error = run(2, *precise, "--checkpoint-dir", tmp_path / "new", "--resume", "must")
    assert code == 1 and "has no checkpoint to resume from" in error


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(tmp_path):
    """dp 1 x pp 2 x tp 2, then cp 2, then one process: the losses and the weights are those of one process."""
    whole, broken, places = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl", tmp_path / "places"
    same = ("--model", "gpt", "--precision", "fp64", "--accumulation", "2", "--steps", "4")
    code, _, error = run(1, *same, "--log", whole)
    assert code == 0, error
    options = (*same, "--log", broken, "--checkpoint-dir", places, "--checkpoint-every", 1)
    meshes = (
        (4, "--strategy", "ddp_naive", "--pipeline", "2", "--tensor", "2", "--stop-after", "0"),
        (2, "--strategy", "fsdp", "--context", "2", "--stop-after", "0"),
        (2, "--strategy", "fsdp", "--tensor", "2", "--stop-after", "0"),
        (1, "--strategy", "single"),
    )
    for nproc, *mesh in meshes:
        code, out, error = run(nproc, *options, *mesh)
        assert code == 0, error
        assert ("resumes after step" in out) == (nproc != 4)
    found = [line["loss"] for line in lines(broken)]
    assert found == pytest.approx([line["loss"] for line in lines(whole)], abs=1e-9) and len(found) == 4


def test_restarts_that_would_hang_are_refused(monkeypatch):
    position = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "GROUP_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    agent = {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_MAX_RESTARTS": 2}
    for name, value in (position | agent).items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit) as ended:
        train.main([])
    assert "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in str(ended.value)


@pytest.mark.slow
def test_told_to_stop_again_and_again_it_leaves_with_0(tmp_path):
    log = tmp_path / "log.jsonl"
    process = start(2, "--compute", "emulated", "--block-ms", "150", "--log", log, "--checkpoint-dir", tmp_path / "c")
    wait_for(log, 3, process)
    while pids := children(process):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        time.sleep(0.002)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0 and "run the same command to resume" in out, error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "none"], "Experiment(model='none'): choose from mlp, resnet, gpt"),
        (["--batch-size", "7"], "batch_size=7 must be a multiple of 2: 2 ranks"),
        (["--config", "absent.yaml"], "No such file or directory: 'absent.yaml'"),
        (["--strategy", "single"], "strategy single needs --nproc 1, not 2 ranks"),
        (
            ["--model", "gpt", "--tensor", "2", "--strategy", "zero1"],
            "Experiment(tp 2): needs one of the strategies ddp_naive, ",
        ),
        (["--model", "gpt", "--tensor", "4"], "the 2 heads of this GPT must be divisible by tensor"),
        (
            ["--model", "gpt", "--context", "2", "--pipeline", "2", "--strategy", "ddp_naive"],
            "supports no context axis",
        ),
        (["--log", f"{__file__}/log.jsonl"], "File exists"),
    ],
)
def test_bad_input_is_one_line(monkeypatch, capsys, arguments, words):
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "GROUP_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SystemExit) as ended:
        train.main(arguments)
    told = capsys.readouterr().err
    assert words in told and told.count("\n") == 1 and ended.value.code == WRONG


def test_options_come_before_the_file(tmp_path):
    (tmp_path / "run.yaml").write_text("model: gpt\nsteps: 5\n")
    experiment, options = read(["--config", str(tmp_path / "run.yaml"), "--steps", "9", "--keep", "2"])
    assert (experiment.model, experiment.steps, options.keep) == ("gpt", 9, 2)
    (tmp_path / "run.yaml").write_text("modle: gpt\n")
    with pytest.raises(ValueError, match="unknown key 'modle': did you mean 'model'"):
        read(["--config", str(tmp_path / "run.yaml")])


# ---- without torchrun: it starts the ranks itself


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--modle", "gpt"], "labkit.train: unrecognized arguments: --modle gpt; did you mean --model?"),
        (["--strategy", "fsdb"], "argument --strategy: invalid choice: 'fsdb' (choose from "),
        (["--model", "gtp"], "Experiment(model='gtp'): choose from mlp, resnet, gpt"),
        (["--model", "mine:task", "--size", "small"], "a custom model has its own data, size, depth"),
        (["--best", "accuracy"], "argument --best: invalid choice: 'accuracy' (choose from "),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--nproc", "0"], "argument --nproc: '0' must be a whole number of at least 1"),
        (["--nproc", "3"], "batch_size=64 must be a multiple of 3: 3 ranks"),
        (["--resume", "latest"], "argument --resume: 'latest' must be auto, never, must or a step"),
        (["--override", "model=gpt"], "--override model=gpt: must be lr=, momentum=, weight_decay= or clip="),
        (["--config", "absent.yaml"], "No such file or directory: 'absent.yaml'"),
        (["--lr", "-1"], "Experiment(lr=-1.0): must be at least 0 and finite"),
        (["--auto-batch-size", "--batch-size", "8"], "--auto-batch-size cannot be combined with a batch size"),
        (["--auto-batch-size", "--strategy", "auto"], "--auto-batch-size does not support strategy auto"),
        (["--auto-batch-size", "--tensor", "2", "--nproc", "3"], "nproc=3 must be a multiple of 2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_is_one_line_and_starts_nothing(words, told):
    begin = time.monotonic()
    done = cold(*words)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (WRONG, "", 1)
    assert told in done.stderr and time.monotonic() - begin < 60


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--tensor", "4"], "the 2 heads of this GPT must be divisible by tensor"),
        (["--tensor", "2", "--nproc", "1"], "nproc=1 must be a multiple of 2"),
        (["--log-file", f"{__file__}/log.jsonl"], "File exists"),
        (["--checkpoint-dir", f"{__file__}/places"], "Not a directory"),
        (["--metrics", "prometheus:127.0.0.1:99999"], "--metrics prometheus:127.0.0.1:99999: "),
        (["--resume", "7"], "--resume 7 needs --checkpoint-dir"),
        (["--auto-batch-size", "--memory-mb", "0.1"], "a batch of 2 does not fit: a rank's step needs "),
        (["--auto-batch-size", "--experts", "4"], "can predict it; set batch_size"),
    ],
    ids=lambda value: " ".join(value[:1]) if isinstance(value, list) else "",
)
def test_what_only_torch_or_the_ranks_can_know_is_one_line_too(words, told):
    done = command("--max-restarts", 2, *words)
    said = done.stderr.splitlines()
    assert done.returncode == WRONG and len(said) == 1 and told in said[0], (done.stdout, done.stderr)


MINE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from labkit.models import Task

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
    def forward(self, x):
        return x + self.inner(x).relu()

def net():
    return nn.Sequential(Block(), Block(), nn.Linear(8, 1))

def task():
    x = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    return Task(net, data, data, nn.functional.mse_loss, unit=Block)

def nothing():
    return net()
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp_bucketed", "fsdp"])
def test_a_model_of_ones_own_trains_as_in_one_process(tmp_path, strategy):
    (tmp_path / "mine.py").write_text(MINE)
    options = ("--model", "mine:task", *FIELDS[:2], "--steps", 6, "--checkpoint-every", 2, "--keep", 1)
    options += ("--best", "evaluation", "--checkpoint-dir", tmp_path / "c", "--recompute", "every")
    log = tmp_path / "log.jsonl"
    done = command(*options, "--strategy", strategy, "--log-file", log, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"mine:task: 153 parameters; {strategy}, dp 2, gloo; batch 12 = 2 x 6; 6 steps")
    space = {}
    exec(MINE, space)
    torch.manual_seed(0)
    task = space["task"]()
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    batches = Batches(task.train, 12, 1, 0, 0)
    losses = []
    for _ in range(6):
        input, target = next(batches)
        loss = task.loss(model(input), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    told = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row["loss"] for row in told if "loss" in row] == pytest.approx(losses, rel=1e-4)
    evaluated = {row["step"]: row["evaluation"] for row in told if "evaluation" in row}
    assert sorted(evaluated) == [2, 4, 6]
    best = min(evaluated, key=evaluated.get)
    assert {int(one.name.removeprefix("step-")) for one in (tmp_path / "c").glob("step-*")} == {best, 6}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("absent:task", "model absent:task: ModuleNotFoundError: No module named 'absent'"),
        ("mine:absent", "model mine:absent: AttributeError: module 'mine' has no attribute 'absent'"),
        ("mine:nothing", "model mine:nothing: must return a labkit.models.Task, not Sequential"),
        ("mine:", "model mine:: AttributeError"),
    ],
)
def test_a_model_that_is_not_there_is_one_line(tmp_path, monkeypatch, name, told):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    models.custom.task.cache_clear()
    with pytest.raises(ValueError) as caught:
        models.unit(name)
    assert str(caught.value).startswith(told)


@pytest.mark.slow
def test_a_model_that_does_not_import_starts_no_training(tmp_path):
    done = command("--model", "absent:task", "--max-restarts", 2, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (WRONG, "")
    assert done.stderr == "labkit.train: model absent:task: ModuleNotFoundError: No module named 'absent'\n"


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
def test_whichever_rank_refuses_first_the_line_is_printed_once(tmp_path, late):
    slow = f"import os, time\nif os.environ['RANK'] == '{late}':\n    time.sleep(2)\nraise ImportError('planted')\n"
    (tmp_path / "mine.py").write_text(slow)
    done = command("--model", "mine:task", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (WRONG, "")
    assert done.stderr == "labkit.train: model mine:task: ImportError: planted\n"


@pytest.mark.slow
def test_an_error_in_a_model_of_ones_own_is_shown_with_its_line(tmp_path):
    (tmp_path / "mine.py").write_text(
        MINE.replace("return x + self", "raise TypeError('planted')\n        return x + self")
    )
    done = command("--model", "mine:task", *FIELDS[:2], "--steps", 2, cwd=tmp_path)
    assert done.returncode == 1
    assert "] TypeError: planted" in done.stderr and "mine.py" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("failed; 0 restarts left")


def test_help_waits_for_no_torch():
    program = "import sys, runpy; sys.argv = ['labkit.train', '--help']\n"
    program += "try: runpy.run_module('labkit.train', run_name='__main__')\n"
    program += "except SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"
    for name in (field.name for field in dataclasses.fields(Experiment)):
        assert f"--{name.replace('_', '-')} " in done.stdout and HELP[name].split()[0] in done.stdout


def test_no_option_is_an_abbreviation_of_one_of_torchruns():
    """torchrun reads the options of the script too, unless -- stands before them."""
    from torch.distributed.run import get_args_parser

    theirs = {name for action in get_args_parser()._actions for name in action.option_strings}
    ours = {name for action in parser()._actions for name in action.option_strings}
    only_without = {"--nproc", "--max-restarts", "--help", "-h"}
    old = {"--log"}  # --log-file has its place
    for name in ours - only_without - old:
        assert not [one for one in theirs if one.startswith(name)], name


def test_choices_are_the_keys_of_the_tables_that_know_them():
    assert set(choices.CHOICES["strategy"]) == {*STRATEGIES, "auto"}
    assert choices.CHOICES["recompute"] == tuple(RECOMPUTE)
    assert choices.CHOICES["comm_hook"] == ("none", *FORMS, *COMPRESSORS)
    assert choices.CHOICES["lr_rule"] == tuple(LR_RULES)
    assert choices.CHOICES["optimizer"] == tuple(OPTIMIZERS)
    assert {*choices.CHOICES["curriculum"], "fixed_discrete"} == {"none", *SCHEDULES}
    assert set(choices.HOROVOD) == {name for name in vars(Compression) if not name.startswith("_")}
    assert set(choices.CHOICES["data"]) == {"auto", *models.data.DATASETS}
    assert {model: tuple(data) for model, data in models.data.FITTING.items()} == choices.FITTING
    assert choices.CHOICES["model"] == tuple(models.SIZES)
    assert all(choices.CHOICES["size"] == tuple(sizes) for sizes in models.SIZES.values())


def test_values_that_go_with_those_that_were_given():
    pipeline, _ = read(["--pipeline", "2"])
    assert (pipeline.model, pipeline.strategy, pipeline.optimizer) == ("gpt", "ddp_naive", "adamw")
    usual, _ = read(["--model", "gpt"])
    assert (usual.optimizer, usual.warmup_steps) == ("adamw", 10)
    for other in (["--lr", "0.1"], ["--override", "lr=0.1"]):
        assert read(["--model", "gpt", *other])[0] == usual.replace(lr=0.1)
    plain, _ = read(["--model", "gpt", "--optimizer", "sgd", "--override", "clip=2"])
    assert (plain.lr, plain.weight_decay, plain.clip) == (Experiment().lr, 0.0, 2.0)
    assert read([])[0] == Experiment()


@pytest.mark.slow
def test_stopped_it_leaves_with_85_and_the_same_line_goes_on(tmp_path):
    whole, broken = tmp_path / "whole.jsonl", tmp_path / "broken.jsonl"
    options = ("--nproc", 2, *FIELDS, *EMULATED, "--checkpoint-every", 2)
    done = command(*options, "--block-ms", 1, "--checkpoint-dir", tmp_path / "w", "--log-file", whole)
    assert done.returncode == 0, done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith("mlp tiny: 85,002 parameters; ddp_bucketed, dp 2, gloo; batch 12 = 2 x 6; 12 steps; from")
    line = [sys.executable, "-m", "labkit.train", *map(str, options), "--block-ms", "150", "--log-file", str(broken)]
    line += ["--checkpoint-dir", str(tmp_path / "b")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(line, **pipes, env=os.environ | {"TMPDIR": str(tmp_path)}, start_new_session=True)
    wait_for(broken, 3, process)
    ranks = children(process)
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=120)
    assert process.returncode == STOPPED and "run the same command to resume" in out, (out, error)
    gone(ranks)
    assert not [*tmp_path.glob("labkit-train-*")]
    process = Forked(*line[3:])
    out, error = process.communicate()
    assert process.returncode == 0 and "resumes after step" in out, error
    assert sorted(os.listdir(process.folder.name)) == ["error", "out"]
    assert steady(broken) == steady(whole)
    assert steady(whole)[0].keys() == {"step", "loss", "gradient_norm"}
    timed = lines(whole)[5]
    assert timed["samples_per_s"] > 0 and timed["eta_s"] > 0


@pytest.mark.slow
def test_the_largest_batch_that_fits_is_kept_where_the_run_goes_on_with_more_memory(tmp_path):
    options = ("--auto-batch-size", "--steps", 3, "--checkpoint-dir", tmp_path)
    begun = command(*options, "--memory-mb", 3, "--stop-after", 0)
    assert begun.returncode == STOPPED and "from the beginning" in begun.stdout, begun.stderr
    ended = command(*options, "--memory-mb", 4)
    assert ended.returncode == 0 and "resumes after step 1" in ended.stdout, ended.stderr
    batch = re.search(r"batch (\d+) = ", begun.stdout)[0]
    assert int(batch.split()[1]) > 64 and batch in ended.stdout
    refused = command(*options, "--nproc", 3)
    assert (
        refused.returncode == WRONG and "cannot resume with the checkpoint's batch size: batch_size=" in refused.stderr
    )


@pytest.mark.slow
def test_a_killed_rank_is_started_again_and_what_cannot_be_is_not(tmp_path):
    log, places = tmp_path / "log.jsonl", tmp_path / "places"
    saved = ("--nproc", 2, *FIELDS, *EMULATED, "--block-ms", 100, "--checkpoint-dir", places, "--checkpoint-every", 1)
    process = Forked(*saved, "--log-file", log, "--max-restarts", 3)
    wait_for(log, 3, process)
    os.kill(children(process)[-1], signal.SIGKILL)
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0 and out.count("resumes after step") == 1, (out, error)
    assert "died of signal 9; 3 restarts left" in error
    done = command(*saved, "--model", "resnet", "--max-restarts", 3)
    assert done.returncode == WRONG and done.stderr.count("model was 'mlp', is now 'resnet'") == 1, done.stderr
    assert "restarts left" not in done.stderr


@pytest.mark.slow
def test_a_run_goes_on_from_a_step_with_another_rate_on_purpose(tmp_path):
    places = tmp_path / "places"
    saved = ("--checkpoint-dir", places, "--checkpoint-every", 1, "--keep", 9, "--schedule", "cosine")
    code, _, error = run(2, *saved, "--steps", 4)
    assert code == 0, error
    code, out, error = run(2, *saved, "--steps", 4, "--resume", 2, "--override", "lr=0.5", "clip=2")
    assert code == 0 and "resumes after step 2" in out, error
    assert "--override: lr was 0.01, is now 0.5" in out and "--override: clip was 0.5, is now 2.0" in out
    code, out, error = run(2, *saved, "--steps", 4, "--resume", 77)
    assert code == 1 and "has no complete checkpoint of step 77" in error


@pytest.mark.parametrize("old", [{}, {"clip": None}])
def test_a_checkpoint_from_before_clipping_was_a_field_loads(old):
    experiment = Experiment()
    now = train.Run(experiment, {})
    state = now.state_dict()
    state["fields"] = {name: was for name, was in state["fields"].items() if name != "clip"} | old
    assert now.problems(state) == []
    clips = train.Run(Experiment(clip=0.5), {})
    assert clips.problems(state) == ["clip was 0.0, is now 0.5"]


def first_batch(rank, world_size, strategy):
    experiment = Experiment(strategy=strategy, batch_size=4 * world_size)
    participant = Participant(Context(rank, world_size, rank, 0, torch.device("cpu"), None), experiment)
    return next(participant.batches)[0]


def test_choosing_a_strategy_costs_no_samples(ranks):
    for chosen, given in zip(*(ranks(2, first_batch, strategy=s) for s in ("auto", "ddp_bucketed")), strict=True):
        assert torch.equal(chosen, given)


# ---- preemption


def wish(rank, world_size):
    loss = torch.tensor(0.1 + rank)
    before = [torch.tensor(0.1 + r).double().item() for r in range(world_size)]
    wishes = []
    agreement = Agreement(lambda: rank in wishes)
    agreement.send(loss)
    wishes.append(1)  # heard one step later
    mean, stop = agreement.read()
    assert mean.item() == sum(before) / world_size and stop is False
    agreement.send(loss)
    assert agreement.read()[1] is True
    dist.barrier()


def test_one_wish_is_heard_by_all(ranks):
    ranks(2, wish)
    ranks(3, wish)


def test_signals_are_noted_and_handlers_come_back():
    before = signal.getsignal(signal.SIGTERM)
    with Preemption() as preemption:
        assert not preemption.told
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.told and preemption.reason == "SIGTERM"
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_has_ended_well_can_be_deaf_to_signals_and_what_raises_cannot():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with contextlib.suppress(ValueError), Preemption(then=signal.SIG_IGN):
        raise ValueError
    assert {number: signal.getsignal(number) for number in before} == before
    with Preemption(then=signal.SIG_IGN):
        pass
    after = {signal.signal(number, handler) for number, handler in before.items()}
    assert after == {signal.SIG_IGN}


def test_a_file_and_a_time_count_as_told(tmp_path, monkeypatch):
    preemption = Preemption(file=tmp_path / "stop")
    assert not preemption.told
    (tmp_path / "stop").touch()
    assert preemption.told and "stop" in preemption.reason
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    preemption = Preemption(seconds=0.05)
    monkeypatch.setattr(time, "time", lambda: 0.0)  # somebody sets the clock back
    now[0] += 0.04
    assert not preemption.told
    now[0] += 0.02
    assert preemption.told and preemption.reason == "the time is up"


# ---- clipping


def clipped(rank, world_size, strategy, precision):
    """Weights after two steps of SGD, whose gradients are clipped to a norm of 0.1."""
    model = parallelize(small_net(), strategy, torch.nn.Linear)
    optimizer = make_optimizer(model, strategy, torch.optim.SGD, lr=1.0)
    low = mixed_precision(precision, torch.device("cpu"))
    trainer = Trainer(model, optimizer, torch.nn.functional.mse_loss, clip=0.1, **low)
    for x, y in small_batches():
        mine = slice(rank, None, world_size)
        trainer.train_step(x[mine], y[mine])
    return [value.tolist() for value in getattr(model, "full_state_dict", model.state_dict)().values()]


def small_net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def small_batches():
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(6, size, generator=generator) for size in (5, 3)] for _ in range(2)]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("strategy", ["ddp_bucketed", "horovod", "zero1", "zero2", "fsdp"])
def test_clipping_is_of_the_unscaled_norm_of_all_ranks(ranks, strategy, precision):
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    for x, y in small_batches():
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(x), y).backward()
        assert torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1) > 0.2
        optimizer.step()
    for rank, found in enumerate(ranks(2, clipped, strategy=strategy, precision=precision)):
        for ours, theirs in zip(found, net.state_dict().values(), strict=True):
            assert torch.allclose(torch.tensor(ours), theirs, atol=1e-6 if precision == "fp32" else 1e-3), (
                f"rank {rank}"
            )


def clipped_masters(rank, world_size):
    """Per model and loss scale: the norm before clipping, and the length of the step."""
    found = {}
    for name, scale in (("ddp", None), ("ddp", 64.0), ("fsdp", None), ("fsdp", 64.0), ("mesh", 64.0)):
        module = small_net().half()
        wrap = {"ddp": DDP, "fsdp": FSDP, "mesh": lambda m: Composed(m, Mesh({"dp": 2}), wrap=FSDP)}[name]
        model = wrap(module)
        optimizer = MasterWeights(model.parameters(), torch.optim.SGD, lr=1.0)
        scaler = GradScaler("cpu", scale or 1.0, enabled=scale is not None)
        loss = lambda output, target: torch.nn.functional.mse_loss(output.float(), target)  # noqa: E731
        trainer = Trainer(model, optimizer, loss, clip=0.1, scaler=scaler)
        x, y = (part[rank::world_size] for part in small_batches()[0])
        before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
        trainer.train_step(x.half(), y)
        pairs = zip(before, optimizer.param_groups[0]["params"], strict=True)
        moved = sum((b - a).square().sum().double() for b, a in pairs)
        if name != "ddp":
            torch.distributed.all_reduce(moved)
            with pytest.raises(RuntimeError, match="MasterWeights has shards of FSDP"):
                optimizer.clip_grad_norm_(1.0)
        found[name, scale] = trainer.gradient_norm.item(), moved.sqrt().item()
    return found


def test_gradients_that_have_moved_to_master_weights_are_clipped(ranks):
    net = small_net()
    x, y = small_batches()[0]
    torch.nn.functional.mse_loss(net(x), y).backward()
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1).item()
    for rank, found in enumerate(ranks(2, clipped_masters)):
        for one in found.values():
            assert one == pytest.approx((norm, 0.1), rel=2e-3), f"rank {rank}"


# ---- torchrun's own restarts


@pytest.mark.slow
def test_torchrun_starts_killed_and_stopped_ranks_again_and_nothing_is_lost(tmp_path):
    emulated = ("--strategy", "zero2", "--compute", "emulated", "--block-ms", "40", "--steps", "40")
    code, _, error = run(2, *emulated, "--log", tmp_path / "whole.jsonl")
    assert code == 0, error
    log = tmp_path / "broken.jsonl"
    saved = ("--checkpoint-dir", tmp_path / "checkpoints", "--checkpoint-every", 1, "--timeout", PATIENCE)
    process = start(2, *emulated, "--log", log, *saved, restarts=4)  # two, and torchrun can lose a port to others
    steps = 0
    for victim, number in ((1, signal.SIGKILL), (0, signal.SIGSTOP)):
        wait_for(log, steps + 4, process)
        pid = children(process)[victim]
        os.kill(pid, number)
        steps, begin = len(lines(log)), time.monotonic()
        gone([pid])
        assert time.monotonic() - begin < PATIENCE + 25  # torchrun alone waits 35 s for a stopped rank, once it knows
        wait_for(log, steps + 3, process)  # one may have been under way
    out, error = process.communicate(timeout=120)
    assert process.returncode == 0 and out.count("resumes after step") >= 2, (out, error)
    assert f"noticed: rank 0 on node 0 has sent no beat for {PATIENCE} s: it holds the store" in error
    whole, broken = ({line["step"]: line for line in steady(path)} for path in (tmp_path / "whole.jsonl", log))
    assert broken == whole


@pytest.mark.slow
def test_ranks_do_not_wait_for_what_only_notebooks_need():
    program = "import sys, labkit.train; print(*{'pandas', 'matplotlib', 'IPython'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
