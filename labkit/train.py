"""Training from the command line, on one node or many, until it is done or told to stop.

    torchrun --standalone --nproc-per-node 2 -m -- labkit.train --model gpt --strategy fsdp \\
        --steps 300 --checkpoint-dir runs/gpt --checkpoint-every 50 --log runs/gpt/log.jsonl

    step 1 ... 50 [save] 51 ... 100 [save] ... 123 SIGTERM [save] leave with 0
    the same line again: step 124 ... 150 [save] ... 300 [save] weights_sha256

With --tensor, --context, --expert, --pipeline ranks are a mesh; what these leave is along dp. A run
may go on with other ranks, another strategy, another mesh: a checkpoint has the whole by its names.

A rank that stands still for --timeout seconds is named and ended, and the others leave: torchrun
--max-restarts 3 then starts them again, from the latest checkpoint.
A signal to torchrun itself reaches the ranks, too: they save and leave with 0, torchrun with 1.
What stands behind -- torchrun leaves alone: else it takes --log for one of its own. Every field of
an Experiment is an option, or a line of the YAML file that --config names. --log has a JSON line
for each step: "step", and "loss", the mean over the ranks; the last one has "weights_sha256" too,
of the whole model. --metrics tells what each rank does meanwhile: labkit/measure/monitor.py.
"""

import hashlib
import os
import signal
import sys
from math import nan

import torch
import torch.distributed as dist
from tqdm import tqdm

from labkit import comm, models
from labkit.checkpoint import CheckpointError, Checkpoints
from labkit.measure.sinks import open_sinks
from labkit.parts.random_state import RandomState
from labkit.parts.tensor_file import as_bytes
from labkit.preempt import Preemption, mean_and_wish
from labkit.run.compare import peak_for
from labkit.run.context import Context, EventFile, Log
from labkit.run.options import read
from labkit.run.participant import Participant
from labkit.run.worker import die_with_parent, join_group, position
from labkit.watchdog import Watchdog

# What a run is: with another value of these it would be another run. How it is spread may change.
SAME = (
    "model", "size", "data", "batch_size", "accumulation", "optimizer", "lr", "momentum",
    "weight_decay", "reference_batch", "lr_rule", "linear_until", "warmup_steps", "schedule",
    "precision", "seed", "clip",
)  # fmt: skip
LONGEST = 3600  # seconds that a collective waits for a rank that saves or evaluates


def train(context, experiment, options, log, sinks, preemption, watchdog):
    """Train until the last step, or until told to stop; returns how it ended, in words."""
    with watchdog.patience("setting up"):
        peak = peak_for(context, experiment) if options.metrics else nan  # before the seed
        participant = Participant(context, experiment)
        trainer = participant.trainer
        trainer.clip = options.clip
        run = Run(experiment, options.clip)
        random = RandomState(context.device, participant.mesh)
        state = {"run": run, "batches": participant.batches, "random": random}
        for name in ("model", "optimizer", "schedule", "scaler", "compressor"):
            if getattr(trainer, name) is not None:
                state[name] = getattr(trainer, name)
        url = options.checkpoint_dir
        checkpoints = Checkpoints(url, options.keep) if url else None
        resume(checkpoints, state, options.resume, context.rank)
        held_out = models.data.load(experiment.data, experiment.model, split="test")
    bar = tqdm(initial=run.step, total=experiment.steps, unit="step", disable=context.rank != 0)
    with participant.monitor(sinks, peak) as monitor:
        stop = False
        while run.step < experiment.steps and not stop:
            run.loss, stop = step(monitor, run.step + 1, participant, preemption)
            run.step += 1
            bar.update()
            last = run.step == experiment.steps
            if not last:
                log.write(step=run.step, loss=run.loss)
            if options.evaluate_every and run.step % options.evaluate_every == 0:
                with watchdog.patience("evaluation"):
                    log.write(
                        step=run.step, evaluation=trainer.evaluate(held_out, participant.dtype)
                    )
            if checkpoints and (last or stop or run.step % options.checkpoint_every == 0):
                with watchdog.patience("saving"):
                    save(checkpoints, run.step, state, context.rank)
    bar.close()
    if checkpoints:
        with watchdog.patience("saving"):
            checkpoints.close()
    if run.step < experiment.steps:
        why = preemption.reason or "another rank was told"
        if not checkpoints:
            return f"stopped after step {run.step} ({why}); nothing was saved: --checkpoint-dir"
        return f"stopped after step {run.step} ({why}); the same command goes on from there"
    digest = weights_sha256(trainer.model)
    log.write(step=run.step, loss=run.loss, weights_sha256=digest)
    return f"done: {run.step} steps, loss {run.loss:.4f}, weights {digest[:16]}"


def step(monitor, number, participant, preemption):
    """One step; returns the ranks' mean loss, and whether any of them was told to stop."""
    trainer = participant.trainer
    with monitor.step(number) as row:
        row["lr"] = trainer.optimizer.param_groups[0]["lr"]  # a schedule changes it afterwards
        if trainer.scaler.is_enabled():
            row["loss_scale"] = trainer.scaler.get_scale()
        with participant.timeline.span("data"):
            batch = participant.next_batch()
        loss, stop = mean_and_wish(trainer.train_step(*batch), preemption.told)
        row["loss"] = loss.item()
        if trainer.gradient_norm is not None:
            row["gradient_norm"] = trainer.gradient_norm.item()
    return row["loss"], stop


def save(checkpoints, step, state, rank):
    """A checkpoint that cannot be written costs no training, but it is said."""
    try:
        checkpoints.save(step, state)
    except CheckpointError as error:
        if rank == 0:
            print(f"labkit.train: {error}; training goes on", file=sys.stderr, flush=True)
        checkpoints.save(step, state)


def resume(checkpoints, state, mode, rank):
    """Go on from the latest checkpoint: "auto", if there is one; "must"; "never"."""
    if checkpoints is None:
        return
    if mode == "never":
        if steps := checkpoints.steps():
            raise CheckpointError(
                f"{checkpoints.url} has a checkpoint of step {steps[-1]}: name another "
                "directory, or go on from it with --resume auto"
            )
        return
    step = checkpoints.load(state)
    if step is None and mode == "must":
        raise CheckpointError(f"{checkpoints.url} has no checkpoint to go on from")
    if step is not None and rank == 0:
        print(f"goes on after step {step}", flush=True)


class Run:
    """How far it is, and what it is: a checkpoint of another run is refused."""

    def __init__(self, experiment, clip):
        self.now = experiment.to_dict() | {"clip": clip}
        self.step, self.loss = 0, float("nan")

    def state_dict(self):
        cosine = self.now["schedule"] == "cosine"  # which ends at the last step
        fields = {name: self.now[name] for name in (*SAME, *["steps"] * cosine)}
        return {"step": self.step, "loss": self.loss, "fields": fields}

    def problems(self, state):
        return [
            f"{name} was {was!r}, and is {self.now[name]!r} now"
            for name, was in state["fields"].items()
            if was != self.now[name]
        ]

    def load_state_dict(self, state):
        self.step, self.loss = state["step"], state["loss"]


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
    experiment.check_ranks(context.world_size)
    if experiment.strategy == "single" and context.world_size > 1:
        raise ValueError(f"the strategy is single, and there are {context.world_size} ranks")
    log = Log(options.log if context.rank == 0 else None)
    return experiment, options, log, open_sinks(options.metrics, context.rank)


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
    """The same on warm ranks: launch("labkit.train:launched", arguments=["--steps", "9"])."""
    work(context, *prepare(context, arguments))


def main(arguments=None):
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    context = Context(*position(), torch.device("cpu"), EventFile(sys.stdout), attempt)
    try:
        asked = prepare(context, arguments)
    except (ValueError, TypeError, OSError) as error:
        sys.exit(f"labkit.train: {error}")
    device = "cuda" if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]) else "cpu"
    if device == "cpu" and restarts_will_hang():
        sys.exit(
            "labkit.train: with gloo, restarted ranks look for those before them and wait for "
            "ever: set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun has --max-restarts"
        )
    die_with_parent()  # ranks without torchrun would go on, and nobody could tell them anything
    job = {"device": device, "threads": 1, "collective_timeout": LONGEST}
    join_group(job, "env://", context)
    try:
        work(context, *asked)
        dist.destroy_process_group()
    except CheckpointError as error:
        if context.rank == 0:
            print(f"labkit.train: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
    for number in (signal.SIGTERM, signal.SIGINT):  # it leaves with 0, also when told once more
        signal.signal(number, signal.SIG_IGN)
