"""The training loop of labkit.train on one rank: step, log and save until done or stopped.

    step 1 ... 50 [save] 51 ... 100 [save] ... 123 SIGTERM [save] leave
    the same again:  124 ... 150 [save] ... 300 [save] weights_sha256

With --tensor, --context, --expert and --pipeline the ranks form a mesh; the remaining ranks are
along dp. A run may resume with another number of ranks, strategy, mesh or number of micro-batches,
because a checkpoint stores complete tensors by name. The fields of SAME must be equal, unless
--override changes them.

If a rank is stuck for --timeout seconds, the watchdog names and kills it, and the others exit.
--max-restarts 3 then restarts all ranks from the latest checkpoint. A signal may reach one rank or
all: all of them save and exit. --log-file has a JSON line per step: "step"; "loss", the mean over
ranks; "gradient_norm" before clipping; "samples_per_s" or "tokens_per_s" and "eta_s", which vary
from run to run. The last line also has "weights_sha256" of the complete model. --metrics reports
what each rank does meanwhile: labkit/measure/monitor.py.
"""

import hashlib
import os
import signal
import sys
import time
from bisect import bisect_right
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
from labkit.preempt import Agreement, Preemption
from labkit.run.compare import peak_for
from labkit.run.context import Context, EventFile, Log
from labkit.run.experiment import Experiment
from labkit.run.experiment_mesh import length_of, model_of, unfinished_curriculum
from labkit.run.experiment_runner import Participant, largest_batch
from labkit.run.options import STOPPED, WRONG, check_ranks, overrides, read
from labkit.run.worker import die_with_parent, join_group, position
from labkit.watchdog import Watchdog

# The fields that identify a run. The number of ranks, the mesh and the micro-batches may change.
SAME = (
    "model", "size", "depth", "width", "data", "batch_size", "optimizer", "lr", "momentum",
    "weight_decay", "reference_batch", "lr_rule", "linear_until", "warmup_steps", "schedule",
    "precision", "seed", "clip", "curriculum", "curriculum_from", "curriculum_steps",
)  # fmt: skip
# Older checkpoints lack these, whose values were the defaults.
NEWER = ("depth", "width", "curriculum", "curriculum_from", "curriculum_steps")
OUTCOME = "LABKIT_OUTCOME"  # environment variable: the file that says how the run ended
RECENT = 20  # number of recent steps that determine the pace
LONGEST = 3600  # seconds that a collective waits for a rank that saves or evaluates


def train(context, experiment, options, log, sinks, preemption, watchdog):
    """Train until the last step or until stopped; return (is it done, a sentence about the end)."""
    with watchdog.patience("setting up"):
        checkpoints = open_checkpoints(options)
        if options.auto_batch_size:
            experiment = with_batch(experiment, checkpoints, options.resume, context)
        peak = peak_for(context, experiment) if options.metrics else nan  # before the seed is set
        participant = Participant(context, experiment)
        trainer = participant.trainer
        agreement = Agreement(lambda: preemption.told)
        trainer.on_loss = agreement.send
        run = Run(experiment, overrides(options.override))
        state = saved_state(run, participant)
        came_from = resume_with_overrides(run, participant, checkpoints, state, options.resume)
        held_out = models.data.load(experiment.data, experiment.model, split="test")
    if context.rank == 0:
        print(first_line(participant, came_from), flush=True)
    bar = tqdm(initial=run.step, total=experiment.steps, unit="step", disable=context.rank != 0)
    pace = Pace(participant, run.step)
    with participant.monitor(sinks, peak) as monitor:
        stop = False
        while run.step < experiment.steps and not stop:
            participant.done = run.step
            run.loss, run.norm, stop = step(monitor, run.step + 1, participant, agreement)
            run.step += 1
            last = run.step == experiment.steps
            fields = run.log_fields() | pace.after(run.step)
            bar.set_postfix_str(pace.words(fields), refresh=False)
            bar.update()
            if not last:
                log.write(**fields)
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
    if context.local_rank == 0 and OUTCOME in os.environ:
        Path(os.environ[OUTCOME]).write_text("done" if run.step == experiment.steps else "stopped")
    if run.step < experiment.steps:
        return False, stopped(run, preemption, checkpoints)
    digest = weights_sha256(trainer.model)
    log.write(**run.log_fields(), **pace.now(), weights_sha256=digest)
    return True, f"done: {run.step} steps, loss {run.loss:.4f}, weights {digest[:16]}"


def open_checkpoints(options):
    """Return the Checkpoints in --checkpoint-dir, or None without it."""
    if not options.checkpoint_dir:
        return None
    best = options.best and (min, options.best)
    return Checkpoints(options.checkpoint_dir, options.keep, best)


def saved_state(run, participant):
    """Return {name: object} of everything that a checkpoint saves and loads."""
    trainer = participant.trainer
    random = RandomState(participant.device, participant.mesh)
    state = {"run": run, "batches": participant.batches, "random": random}
    for name in ("model", "optimizer", "schedule", "scaler", "compressor"):
        if getattr(trainer, name) is not None:
            state[name] = getattr(trainer, name)
    return state


def resume_with_overrides(run, participant, checkpoints, state, mode):
    """Resume as `resume` does, and set the values of --override again; return the same."""
    trainer = participant.trainer
    chosen = run.chosen(trainer)
    came_from = resume(checkpoints, state, mode)
    if came_from is not None:
        run.override(trainer, chosen)
        for name, value in run.changed.items() if participant.context.rank == 0 else ():
            print(f"--override: {name} was {run.was[name]}, is now {value}", flush=True)
    return came_from


def stopped(run, preemption, checkpoints):
    """Return a sentence about a run that stopped before its last step."""
    why = preemption.reason or "another rank received a signal"
    if not checkpoints:
        return f"stopped after step {run.step} ({why}); nothing was saved: use --checkpoint-dir"
    return f"stopped after step {run.step} ({why}); run the same command to resume"


def with_batch(experiment, checkpoints, mode, context):
    """Return the experiment with its checkpoint's batch size, else with the ranks' smallest."""
    begun = Run(experiment, dict.fromkeys((*SAME, "steps")))  # accepts any checkpoint
    if checkpoints and mode != "never":
        checkpoints.load({"run": begun}, mode if isinstance(mode, int) else None)
    smallest = torch.tensor(experiment.batch_size, device=context.device)
    comm.all_reduce(smallest, dist.ReduceOp.MIN)  # ranks may have different amounts of free memory
    size = begun.was.get("batch_size", int(smallest))
    try:
        experiment = experiment.replace(batch_size=size)
        experiment.check_ranks(context.world_size)
    except ValueError as error:
        raise CheckpointError(f"cannot resume with the checkpoint's batch size: {error}") from None
    return experiment


def step(monitor, number, participant, agreement):
    """Take one step; return (mean loss of the ranks, gradient norm, whether any rank must stop)."""
    trainer = participant.trainer
    norm = None
    with monitor.step(number) as row:
        row["lr"] = trainer.optimizer.param_groups[0]["lr"]  # before the schedule changes it
        if trainer.scaler.is_enabled():
            row["loss_scale"] = trainer.scaler.get_scale()
        with participant.timeline.span("data"):
            batch = participant.next_batch()
        if participant.length is not None:
            monitor.tokens = participant.experiment.batch_size * participant.length
            monitor.flops = participant.flops
        trainer.train_step(*batch)
        loss, stop = agreement.read()
        row["loss"] = loss.item()
        if trainer.gradient_norm is not None:
            row["gradient_norm"] = norm = trainer.gradient_norm.item()
    return row["loss"], norm, stop


def due(step, every):
    return every and step % every == 0


def save(checkpoints, step, state, rank, metrics):
    """Save a checkpoint; if that fails, report it and continue training."""
    try:
        checkpoints.save(step, state, **metrics)
    except CheckpointError as error:
        if rank == 0:
            print(f"labkit.train: {error}; training continues", file=sys.stderr, flush=True)
        checkpoints.save(step, state, **metrics)


def resume(checkpoints, state, mode):
    """Load the latest checkpoint: "auto", if there is one; "must"; that of a step; or "never".

    Returns its step, or None if the run begins. Raises CheckpointError if the wanted checkpoint
    does not exist, and with "never" if there is one.
    """
    if checkpoints is None:
        if mode in ("auto", "never"):
            return None
        raise CheckpointError(
            f"--resume {mode} needs --checkpoint-dir, the folder of the checkpoints"
        )
    if mode == "never":
        if steps := checkpoints.steps():
            raise CheckpointError(
                f"{checkpoints.url} has a checkpoint of step {steps[-1]}: use another directory, "
                "or resume with --resume auto"
            )
        return None
    step = checkpoints.load(state, mode if isinstance(mode, int) else None)
    if step is None and isinstance(mode, int):
        have = ", ".join(map(str, checkpoints.steps())) or "none"
        raise CheckpointError(
            f"{checkpoints.url} has no complete checkpoint of step {mode}; it has: {have}"
        )
    if step is None and mode == "must":
        raise CheckpointError(f"{checkpoints.url} has no checkpoint to resume from")
    return step


def first_line(participant, came_from):
    """Return a line about the model, the ranks and the start of the run. Call on rank 0."""
    e = participant.experiment
    with torch.random.fork_rng([]):
        count = sum(parameter.numel() for parameter in model_of(e).parameters())
    name = f"{e.model} {e.size}" if e.model in models.SIZES else e.model
    name += "".join(
        f", {field} {getattr(e, field)}" for field in ("depth", "width") if getattr(e, field)
    )
    mesh = participant.mesh.axes if participant.mesh else {"dp": participant.world_size}
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.items())
    backend = dist.get_backend()
    start = "from the beginning" if came_from is None else f"resumes after step {came_from}"
    early = unfinished_curriculum(e)
    return (
        f"{name}: {count:,} parameters; {e.strategy}, {axes}, {backend}; "
        f"batch {e.batch_size} = {participant.replicas} x {participant.share}; "
        f"{e.steps} steps; {start}{'; ' * bool(early)}{early}"
    )


class Pace:
    """The speed of training, from the last few steps. step: the last one that is done."""

    def __init__(self, participant, step):
        self.experiment = participant.experiment
        target = participant.batches.dataset[0][1]
        self.tokens = target.numel() if isinstance(target, torch.Tensor) else 1
        self.unit = "tokens" if self.tokens > 1 else "samples"
        self.left = self.total(range(step + 1, self.experiment.steps + 1))
        self.times = deque([time.monotonic()], RECENT)
        self.counts = deque(maxlen=RECENT - 1)  # tokens or samples between two times

    def count(self, step):
        """Return the tokens or samples of a step of all ranks."""
        e = self.experiment
        return e.batch_size * (self.tokens if e.curriculum == "none" else length_of(e, step))

    def total(self, steps):
        """Return the tokens or samples of a range of steps, one length of sequences at a time."""
        found = 0
        while steps:
            count = self.count(steps[0])
            alike = bisect_right(steps, count, key=self.count)  # a curriculum only grows
            found += count * alike
            steps = steps[alike:]
        return found

    def after(self, step):
        """Record the end of a step; return its speed and the time left."""
        self.times.append(time.monotonic())
        self.counts.append(self.count(step))
        self.left -= self.counts[-1]
        return self.now()

    def now(self):
        """Return the speed, and the time that the steps left take with it; {} before a step."""
        seconds = self.times[-1] - self.times[0]
        if not seconds:
            return {}
        pace = sum(self.counts) / seconds
        return {f"{self.unit}_per_s": round(pace, 1), "eta_s": round(self.left / pace, 1)}

    def words(self, fields):
        names = {"loss": "loss {:.4f}", "gradient_norm": "norm {:.3g}"}
        names |= {f"{self.unit}_per_s": "{:,.0f} " + f"{self.unit}/s"}
        return ", ".join(
            words.format(fields[name]) for name, words in names.items() if name in fields
        )


class Run:
    """Progress and identity of a run. Refuses to load a checkpoint of another run.

    changed: {name: value} that may differ from the checkpoint, by --override.
    """

    def __init__(self, experiment, changed):
        self.now = experiment.to_dict()
        self.usual = Experiment().to_dict()
        self.changed = changed
        self.was = {}
        self.step = 0
        self.loss = nan
        self.norm = None

    def state_dict(self):
        # a cosine ends at the last step, so `steps` must be equal
        cosine = self.now["schedule"] == "cosine"
        fields = {name: self.now[name] for name in (*SAME, *["steps"] * cosine)}
        return {"step": self.step, "loss": self.loss, "norm": self.norm, "fields": fields}

    def log_fields(self):
        """Return the log's fields of the last step that are equal in every run."""
        norm = {} if self.norm is None else {"gradient_norm": self.norm}
        return {"step": self.step, "loss": self.loss} | norm

    def problems(self, state):
        saved = {name: self.usual[name] for name in NEWER} | state["fields"]
        saved["clip"] = saved.get("clip") or 0.0  # older checkpoints had None or no clip
        return [
            f"{name} was {was!r}, is now {self.now[name]!r}"
            for name, was in saved.items()
            if was != self.now[name] and name in (*SAME, "steps") and name not in self.changed
        ]

    def chosen(self, trainer):
        """Return the optimizer's options before a checkpoint replaces them."""
        plain = getattr(trainer.optimizer, "inner", trainer.optimizer)
        names = [name for name in self.changed if name != "clip"]
        start = [group.get("initial_lr", group["lr"]) for group in plain.param_groups]
        groups = [{name: group[name] for name in names} for group in plain.param_groups]
        return [group | {"initial_lr": lr} for group, lr in zip(groups, start, strict=True)]

    def override(self, trainer, chosen):
        """Set the overridden values again; the learning rate follows the schedule."""
        plain = getattr(trainer.optimizer, "inner", trainer.optimizer)
        schedule = trainer.schedule
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
        self.step = state["step"]
        self.loss = state["loss"]
        self.was = state["fields"]
        self.norm = state.get("norm")


def weights_sha256(model):
    """Return a hash of all parameters and buffers by name; shards are gathered first.

    Collective.
    """
    whole = getattr(model, "full_state_dict", model.state_dict)()
    digest = hashlib.sha256()
    for name, value in sorted(whole.items()):
        if isinstance(value, torch.Tensor):
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            digest.update(name.removeprefix("module.").encode())
            digest.update(as_bytes(value.cpu()))
    return digest.hexdigest()


def restarts_will_hang():
    """Return whether torchrun restarts ranks with one store for all attempts, where gloo hangs."""
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return shared and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def prepare(context, arguments):
    """Parse and validate the arguments and open the logs; return the arguments of `work`."""
    experiment, options = read(arguments)
    check(experiment, options, context.world_size)
    models.unit(experiment.model)  # imports a custom model, or raises
    log = Log(options.log_file if context.rank == 0 else None)
    return experiment, options, log, open_sinks(options.metrics, context.rank)


def check(experiment, options, nproc):
    """Raise ValueError or OSError for options that nproc ranks do not support."""
    check_ranks(experiment, options, nproc)
    if experiment.strategy == "single" and nproc > 1:
        raise ValueError(f"strategy single needs --nproc 1, not {nproc} ranks")
    if options.checkpoint_dir and "://" not in options.checkpoint_dir:
        Path(options.checkpoint_dir).mkdir(parents=True, exist_ok=True)


def work(context, experiment, options, log, sinks, then=None):
    """Train on ranks that have joined their group; return the exit code.

    then: what signals do afterwards (Preemption). Raises CheckpointError on all ranks.
    """
    for sink in sinks if context.rank == 0 else ():
        print(f"metrics: {sink}", flush=True)
    preemption = Preemption(options.stop_file, options.stop_after, then)
    with preemption, Watchdog(options.timeout) as watchdog:
        done, words = train(context, experiment, options, log, sinks, preemption, watchdog)
        if context.rank == 0:
            print(words, flush=True)
        comm.barrier()
        # With 0, the torchrun of a node that may go on would take the training for done.
        elsewhere = not done and not preemption.told and is_one_of_several_nodes()
        return STOPPED if elsewhere else 0


def is_one_of_several_nodes():
    return os.environ["LOCAL_WORLD_SIZE"] != os.environ["WORLD_SIZE"]


def launched(context, arguments):
    """Train on warm ranks: launch("labkit.run.training:launched", arguments=["--steps", "9"])."""
    experiment, options, log, sinks = prepare(context, arguments)
    if options.auto_batch_size:
        raise ValueError("--auto-batch-size is not supported on warm ranks: set a batch size")
    work(context, experiment, options, log, sinks)


def main(arguments, meeting="env://", attempt=None):
    """Train on a rank that torchrun or labkit.train has started. meeting: the rendezvous URL."""
    for number in (signal.SIGTERM, signal.SIGINT):  # a fork inherits torchelastic's handler
        signal.signal(number, signal.SIG_DFL)
    if attempt is None:
        attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    context = Context(*position(), torch.device("cpu"), EventFile(sys.stdout), attempt)
    try:
        asked = prepare(context, arguments)
    except (ValueError, TypeError, OSError) as error:
        tell(error, context.rank, meeting)
        sys.exit(WRONG)
    device = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    if meeting == "env://" and device == "cpu" and restarts_will_hang():
        sys.exit(
            "labkit.train: with gloo, restarted ranks wait forever for the ranks of the first "
            "attempt: "
            "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 with torchrun --max-restarts"
        )
    die_with_parent()  # without torchrun, nothing could stop the ranks
    fitting = predicted(context, *asked[:2], device)
    job = {"device": device, "threads": 1, "collective_timeout": LONGEST}
    join_group(job, meeting, context)
    try:
        if asked[1].auto_batch_size:
            why = "" if isinstance(fitting, Experiment) else str(fitting)
            Together(CheckpointError).agree(why)
        # after the training, a second signal must not end a rank that has done what it was told
        code = work(context, fitting, *asked[1:], then=signal.SIG_IGN)
        dist.destroy_process_group()
    except CheckpointError as error:  # on all ranks
        if context.rank == 0:
            print(f"labkit.train: {error}", file=sys.stderr, flush=True)
        comm.barrier()  # the first rank to exit ends the others
        sys.exit(WRONG)
    return code


def predicted(context, experiment, options, device):
    """Return the experiment with --auto-batch-size's batch, or the error that prevents one."""
    if not options.auto_batch_size:
        return experiment
    device = torch.device(device, context.local_rank if device == "cuda" else None)
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    room = int(experiment.memory_mb * 2**20) or free_bytes(device, local)
    try:
        size = largest_batch(experiment, context.world_size, context.rank, room)
    except (ValueError, MemoryError) as error:
        return error  # raised after the ranks have joined: the first to exit would end the others
    return experiment.replace(batch_size=size)


def tell(error, rank, meeting):
    """Report invalid arguments before any rank exits: the first to exit ends the others.

    Under torchrun each rank prints. For labkit.train each writes a file beside the rendezvous, of
    which labkit.train prints one.
    """
    if meeting == "env://":
        print(f"labkit.train: {error}", file=sys.stderr, flush=True)
    else:
        Path(f"{meeting.removeprefix('file://')}.error-{rank}").write_text(str(error))
