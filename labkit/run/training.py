"""The loop of labkit.train, on one rank: step, tell, save, until it is done or told to stop.

    step 1 ... 50 [save] 51 ... 100 [save] ... 123 SIGTERM [save] leave
    the same again:  124 ... 150 [save] ... 300 [save] weights_sha256

With --tensor, --context, --expert, --pipeline ranks are a mesh; what these leave is along dp. A run
may go on with other ranks, another strategy, another mesh, and other micro-batches: a checkpoint
has the whole by its names. What SAME lists has to be equal, or changed by --override.

A rank that stands still for --timeout seconds is named and ended, and the others leave: whoever
started them, with --max-restarts 3, starts them again, from the latest checkpoint. A signal
reaches one rank or all: they save and leave. --log-file has a JSON line for each step: "step",
"loss", the mean over the ranks, "gradient_norm" before it is clipped; "samples_per_s" or
"tokens_per_s" and "eta_s", which move from run to run; the last one has "weights_sha256" too, of
the whole model. --metrics tells what each rank does meanwhile: labkit/measure/monitor.py.
"""

import hashlib
import os
import signal
import sys
import time
from collections import deque
from math import nan
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from labkit import comm, models
from labkit.checkpoint import CheckpointError, Checkpoints
from labkit.checkpoint.rng_state import RandomState
from labkit.checkpoint.tensor_file import as_bytes
from labkit.collective_errors import Together
from labkit.measure.machine import free_bytes
from labkit.measure.sinks import open_sinks
from labkit.preempt import Preemption, mean_and_wish
from labkit.run.compare import peak_for
from labkit.run.context import Context, EventFile, Log
from labkit.run.experiment import Experiment
from labkit.run.experiment_mesh import model_of
from labkit.run.experiment_runner import Participant, largest_batch
from labkit.run.options import WRONG, check_ranks, overrides, read
from labkit.run.worker import die_with_parent, join_group, position
from labkit.watchdog import Watchdog

# What a run is: with another value of these it would be another run. How it is spread may change,
# over ranks, over a mesh, over micro-batches.
SAME = (
    "model", "size", "data", "batch_size", "optimizer", "lr", "momentum", "weight_decay",
    "reference_batch", "lr_rule", "linear_until", "warmup_steps", "schedule", "precision", "seed",
    "clip",
)  # fmt: skip
OUTCOME = "LABKIT_OUTCOME"  # the file in which rank 0 says how it ended
RECENT = 20  # steps over which the pace is taken
LONGEST = 3600  # seconds that a collective waits for a rank that saves or evaluates


def train(context, experiment, options, log, sinks, preemption, watchdog):
    """Train until the last step, or until told to stop; returns how it ended, in words."""
    with watchdog.patience("setting up"):
        url = options.checkpoint_dir
        best = options.best and (min, options.best)
        checkpoints = Checkpoints(url, options.keep, best) if url else None
        if options.auto_batch_size:
            experiment = with_batch(experiment, checkpoints, options.resume, context)
        peak = peak_for(context, experiment) if options.metrics else nan  # before the seed
        participant = Participant(context, experiment)
        trainer = participant.trainer
        trainer.clip = options.clip
        run = Run(experiment, options.clip, overrides(options.override))
        random = RandomState(context.device, participant.mesh)
        state = {"run": run, "batches": participant.batches, "random": random}
        for name in ("model", "optimizer", "schedule", "scaler", "compressor"):
            if getattr(trainer, name) is not None:
                state[name] = getattr(trainer, name)
        chosen = run.chosen(trainer)
        came_from = resume(checkpoints, state, options.resume)
        if came_from is not None:
            run.override(trainer, chosen)
            for name, value in run.changed.items() if context.rank == 0 else ():
                print(f"--override: {name} was {run.was[name]}, and is {value} now", flush=True)
        held_out = models.data.load(experiment.data, experiment.model, split="test")
    if context.rank == 0:
        print(first_line(participant, options, came_from), flush=True)
    bar = tqdm(initial=run.step, total=experiment.steps, unit="step", disable=context.rank != 0)
    pace = Pace(participant)
    with participant.monitor(sinks, peak) as monitor:
        stop = False
        while run.step < experiment.steps and not stop:
            run.loss, run.norm, stop = step(monitor, run.step + 1, participant, preemption)
            run.step += 1
            last = run.step == experiment.steps
            told = run.told() | pace.after(run.step)
            bar.set_postfix_str(pace.words(told), refresh=False)
            bar.update()
            if not last:
                log.write(**told)
            saves = checkpoints and (last or stop or run.step % options.checkpoint_every == 0)
            metrics = {"loss": run.loss}
            if due(run.step, options.evaluate_every) or (saves and options.best == "evaluation"):
                with watchdog.patience("evaluation"):
                    metrics["evaluation"] = trainer.evaluate(held_out, participant.dtype)
                log.write(step=run.step, evaluation=metrics["evaluation"])
            if saves:
                with watchdog.patience("saving"):
                    save(checkpoints, run.step, state, context.rank, metrics)
    bar.close()
    if checkpoints:
        with watchdog.patience("saving"):
            checkpoints.close()
    if context.rank == 0 and OUTCOME in os.environ:
        Path(os.environ[OUTCOME]).write_text("done" if run.step == experiment.steps else "stopped")
    if run.step < experiment.steps:
        why = preemption.reason or "another rank was told"
        if not checkpoints:
            return f"stopped after step {run.step} ({why}); nothing was saved: --checkpoint-dir"
        return f"stopped after step {run.step} ({why}); the same command goes on from there"
    digest = weights_sha256(trainer.model)
    log.write(**run.told(), **pace.now(run.step), weights_sha256=digest)
    return f"done: {run.step} steps, loss {run.loss:.4f}, weights {digest[:16]}"


def with_batch(experiment, checkpoints, mode, context):
    """With the batch size of the checkpoint that it goes on from, else with the ranks' smallest."""
    begun = Run(experiment, None, dict.fromkeys((*SAME, "steps")))  # whatever it was
    if checkpoints and mode != "never":
        checkpoints.load({"run": begun}, mode if isinstance(mode, int) else None)
    smallest = torch.tensor(experiment.batch_size, device=context.device)
    comm.all_reduce(smallest, dist.ReduceOp.MIN)  # they had not the same memory free
    size = begun.was.get("batch_size", int(smallest))
    try:
        experiment = experiment.replace(batch_size=size)
        experiment.check_ranks(context.world_size)
    except ValueError as error:
        raise CheckpointError(f"goes on with the checkpoint's batch: {error}") from None
    return experiment


def step(monitor, number, participant, preemption):
    """One step: (the ranks' mean loss, the gradients' norm, was any of them told to stop)."""
    trainer, norm = participant.trainer, None
    with monitor.step(number) as row:
        row["lr"] = trainer.optimizer.param_groups[0]["lr"]  # a schedule changes it afterwards
        if trainer.scaler.is_enabled():
            row["loss_scale"] = trainer.scaler.get_scale()
        with participant.timeline.span("data"):
            batch = participant.next_batch()
        loss, stop = mean_and_wish(trainer.train_step(*batch), preemption.told)
        row["loss"] = loss.item()
        if trainer.gradient_norm is not None:
            row["gradient_norm"] = norm = trainer.gradient_norm.item()
    return row["loss"], norm, stop


def due(step, every):
    return every and step % every == 0


def save(checkpoints, step, state, rank, metrics):
    """A checkpoint that cannot be written costs no training, but it is said."""
    try:
        checkpoints.save(step, state, **metrics)
    except CheckpointError as error:
        if rank == 0:
            print(f"labkit.train: {error}; training goes on", file=sys.stderr, flush=True)
        checkpoints.save(step, state, **metrics)


def resume(checkpoints, state, mode):
    """Go on from the latest checkpoint: "auto", if there is one; "must"; or of a step; "never".

    Returns its step, or None where the run begins.
    """
    if checkpoints is None:
        if mode in ("auto", "never"):
            return None
        raise CheckpointError(f"--resume {mode} needs --checkpoint-dir: where checkpoints are")
    if mode == "never":
        if steps := checkpoints.steps():
            raise CheckpointError(
                f"{checkpoints.url} has a checkpoint of step {steps[-1]}: name another "
                "directory, or go on from it with --resume auto"
            )
        return None
    step = checkpoints.load(state, mode if isinstance(mode, int) else None)
    if step is None and isinstance(mode, int):
        have = ", ".join(map(str, checkpoints.steps())) or "none"
        raise CheckpointError(f"{checkpoints.url} has no whole checkpoint of step {mode}: {have}")
    if step is None and mode == "must":
        raise CheckpointError(f"{checkpoints.url} has no checkpoint to go on from")
    return step


def first_line(participant, options, came_from):
    """What is about to be trained, on what, and from where. By rank 0."""
    e = participant.experiment
    with torch.random.fork_rng([]):
        count = sum(parameter.numel() for parameter in model_of(e).parameters())
    name = f"{e.model} {e.size}" if e.model in models.SIZES else e.model
    mesh = participant.mesh.axes if participant.mesh else {"dp": participant.world_size}
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
    backend = dist.get_backend()
    start = "from the beginning" if came_from is None else f"goes on after step {came_from}"
    return (
        f"{name}: {count:,} parameters; {e.strategy}, {axes}, {backend}; "
        f"batch {e.batch_size} = {participant.replicas} x {participant.share}; "
        f"{e.steps} steps; {start}"
    )


class Pace:
    """How fast steps come, from the last few of them."""

    def __init__(self, participant):
        e, target = participant.experiment, participant.batches.dataset[0][1]
        tokens = target.numel() if isinstance(target, torch.Tensor) else 1
        self.unit = "tokens" if tokens > 1 else "samples"
        self.of_a_step, self.steps = e.batch_size * tokens, e.steps
        self.times = deque([time.monotonic()], RECENT)

    def after(self, step):
        """What is told of a step that has just ended."""
        self.times.append(time.monotonic())
        return self.now(step)

    def now(self, step):
        """{} where no step has been taken yet."""
        seconds = (self.times[-1] - self.times[0]) / max(len(self.times) - 1, 1)
        if not seconds:
            return {}
        pace, left = self.of_a_step / seconds, (self.steps - step) * seconds
        return {f"{self.unit}_per_s": round(pace, 1), "eta_s": round(left, 1)}

    def words(self, told):
        names = {"loss": "loss {:.4f}", "gradient_norm": "norm {:.3g}"}
        names |= {f"{self.unit}_per_s": "{:,.0f} " + f"{self.unit}/s"}
        return ", ".join(words.format(told[name]) for name, words in names.items() if name in told)


class Run:
    """How far it is, and what it is: a checkpoint of another run is refused.

    changed: {name: value} of what may differ from the checkpoint's, on purpose.
    """

    def __init__(self, experiment, clip, changed):
        self.now, self.changed, self.was = experiment.to_dict() | {"clip": clip}, changed, {}
        self.step, self.loss, self.norm = 0, nan, None

    def state_dict(self):
        cosine = self.now["schedule"] == "cosine"  # which ends at the last step
        fields = {name: self.now[name] for name in (*SAME, *["steps"] * cosine)}
        return {"step": self.step, "loss": self.loss, "norm": self.norm, "fields": fields}

    def told(self):
        """What the log says of the last step, the same in every run."""
        norm = {} if self.norm is None else {"gradient_norm": self.norm}
        return {"step": self.step, "loss": self.loss} | norm

    def problems(self, state):
        return [
            f"{name} was {was!r}, and is {self.now[name]!r} now"
            for name, was in state["fields"].items()
            if was != self.now[name] and name in (*SAME, "steps") and name not in self.changed
        ]

    def chosen(self, trainer):
        """What the optimizer was made with, before a checkpoint replaces it."""
        plain = getattr(trainer.optimizer, "inner", trainer.optimizer)
        names = [name for name in self.changed if name != "clip"]
        start = [group.get("initial_lr", group["lr"]) for group in plain.param_groups]
        groups = [{name: group[name] for name in names} for group in plain.param_groups]
        return [group | {"initial_lr": lr} for group, lr in zip(groups, start, strict=True)]

    def override(self, trainer, chosen):
        """Set what was changed on purpose again; the rate at its place in the schedule."""
        plain, schedule = getattr(trainer.optimizer, "inner", trainer.optimizer), trainer.schedule
        for group, values in zip(plain.param_groups, chosen, strict=True):
            group |= {name: values[name] for name in values if name in self.changed}
        if "lr" not in self.changed:
            return
        base = [values["initial_lr"] for values in chosen]
        factors = [1.0] * len(base)
        if schedule is not None:
            schedule.base_lrs = base
            factors = [factor(schedule.last_epoch) for factor in schedule.lr_lambdas]
        for group, lr, factor in zip(plain.param_groups, base, factors, strict=True):
            group |= {"initial_lr": lr, "lr": lr * factor}

    def load_state_dict(self, state):
        self.step, self.loss, self.was = state["step"], state["loss"], state["fields"]
        self.norm = state.get("norm")


def weights_sha256(model):
    """Of all parameters and buffers by name; a model of shards is put together. Collective."""
    whole = getattr(model, "full_state_dict", model.state_dict)()
    digest = hashlib.sha256()
    for name, value in sorted(whole.items()):
        if isinstance(value, torch.Tensor):
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            digest.update(name.removeprefix("module.").encode())
            digest.update(as_bytes(value.cpu()))
    return digest.hexdigest()


def restarts_will_hang():
    """torchrun gives its ranks one store for all attempts, and is to start them again."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return shared and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def prepare(context, arguments):
    """What is asked for, checked, and where it is told: arguments for `work`."""
    experiment, options = read(arguments)
    check(experiment, options, context.world_size)
    models.unit(experiment.model)  # a model of one's own is imported here, or refused
    log = Log(options.log_file if context.rank == 0 else None)
    return experiment, options, log, open_sinks(options.metrics, context.rank)


def check(experiment, options, nproc):
    """Raise ValueError or OSError for what cannot be on so many ranks."""
    check_ranks(experiment, options, nproc)
    if experiment.strategy == "single" and nproc > 1:
        raise ValueError(f"the strategy is single, and there are {nproc} ranks: --nproc 1")
    if options.checkpoint_dir and "://" not in options.checkpoint_dir:
        Path(options.checkpoint_dir).mkdir(parents=True, exist_ok=True)


def work(context, experiment, options, log, sinks):
    """Train on ranks that have met. Raises CheckpointError, on all of them."""
    for sink in sinks if context.rank == 0 else ():
        print(f"metrics: {sink}", flush=True)
    preemption = Preemption(options.stop_file, options.stop_after)
    with preemption, Watchdog(options.timeout) as watchdog:
        words = train(context, experiment, options, log, sinks, preemption, watchdog)
        if context.rank == 0:
            print(words, flush=True)
        comm.barrier()


def launched(context, arguments):
    """On warm ranks: launch("labkit.run.training:launched", arguments=["--steps", "9"])."""
    experiment, options, log, sinks = prepare(context, arguments)
    if options.auto_batch_size:
        raise ValueError("--auto-batch-size is found before ranks meet: name a batch size")
    work(context, experiment, options, log, sinks)


def main(arguments, meeting="env://", attempt=None):
    """On a rank that torchrun has started, or labkit.train itself, which says where they meet."""
    for number in (signal.SIGTERM, signal.SIGINT):  # a fork inherits torchelastic's handler
        signal.signal(number, signal.SIG_DFL)
    if attempt is None:
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    context = Context(*position(), torch.device("cpu"), EventFile(sys.stdout), attempt)
    try:
        asked = prepare(context, arguments)
    except (ValueError, TypeError, OSError) as error:
        leave(error, context.rank == 0 or meeting == "env://")
    device = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    if meeting == "env://" and device == "cpu" and restarts_will_hang():
        sys.exit(
            "labkit.train: with gloo, restarted ranks look for those before them and wait for "
            "ever: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun has --max-restarts"
        )
    die_with_parent()  # ranks without torchrun would go on, and nobody could tell them anything
    fitting = predicted(context, *asked[:2], device)
    job = {"device": device, "threads": 1, "collective_timeout": LONGEST}
    join_group(job, meeting, context)
    try:
        if asked[1].auto_batch_size:
            why = "" if isinstance(fitting, Experiment) else str(fitting)
            Together(CheckpointError).agree(why)
        work(context, fitting, *asked[1:])
        dist.destroy_process_group()
    except CheckpointError as error:
        leave(error, context.rank == 0)
    for number in (signal.SIGTERM, signal.SIGINT):  # it leaves with 0, also when told once more
        signal.signal(number, signal.SIG_IGN)
    return 0


def predicted(context, experiment, options, device):
    """The experiment, with --auto-batch-size's batch, or the error that says why there is none."""
    if not options.auto_batch_size:
        return experiment
    device = torch.device(device, context.local_rank if device == "cuda" else None)
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    room = int(experiment.memory_mb * 2**20) or free_bytes(device, local)
    try:
        size = largest_batch(experiment, context.world_size, context.rank, room)
    except (ValueError, MemoryError) as error:
        return error  # told when the ranks have met: the first to leave would end the others
    return experiment.replace(batch_size=size)


def leave(error, tell):
    """It was told what cannot be, and no new attempt will change that."""
    if tell:
        print(f"labkit.train: {error}", file=sys.stderr, flush=True)
    sys.exit(WRONG)
