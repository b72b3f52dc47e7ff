"""Sharded checkpoints: every rank writes its shard; the checkpoint is valid when all have finished.

    rank 0   train | copy |  train ...                        | agree |      step-000000030/
                          \\ hash, write, fsync, rename --------|       |        rank-0.safetensors
    rank 1   train | copy |  train ...                        |       |        rank-1.safetensors
                          \\ hash, write, fsync, rename --------|       |        manifest.json  last

Training waits only while a rank copies what it will write to host memory; a thread with its own
process group writes the files. Replicated tensors are copied and written once: each replica takes a
part, if their hashes agree. The manifest maps element ranges of every full tensor to files, and
holds each file's hash. So any number of ranks, strategy or mesh reads the ranges it needs, and a
flipped bit is found before loading. Column shards are not contiguous: a mesh gathers such matrices
first, one at a time.

Written: model and optimizer once, 1/n of it per rank. Extra memory: the same bytes. Sent: names and
hashes. Rajbhandari et al., ZeRO, SC 2020, section 5.1 (each rank writes its part); Mohan et
al., CheckFreq: Frequent, Fine-Grained DNN Checkpointing, FAST 2021, section 4 (copy, then write
during training); Pillai et al., All File Systems Are Not Created Equal, OSDI 2014 (write, fsync,
rename, fsync).
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import torch

from labkit.checkpoint import dedup, metadata, tensor_file
from labkit.checkpoint.dtensor_ranges import Piece
from labkit.checkpoint.reader import Reader
from labkit.checkpoint.retention import (
    folder_of,
    latest_first,
    lineage_of,
    manifests_in,
    next_place,
    prune,
)
from labkit.checkpoint.sharded_state import holders
from labkit.checkpoint.storage import Store, without_password
from labkit.collective_errors import Together


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or loaded. Raised on all ranks, with the reason."""


class Checkpoints:
    """The checkpoints of one run, in a directory at any fsspec URL. All methods are collective.

        checkpoints = Checkpoints("runs/1", keep=3)
        step = checkpoints.load({"model": model, "optimizer": optimizer})   None: no checkpoint yet
        checkpoints.save(step, {"model": model, "optimizer": optimizer})    copied, not yet written
        checkpoints.wait()                                                  written

    A state maps names to objects with state_dict() and load_state_dict(): modules, optimizers,
    their wrappers, schedules, scalers, compressors, samplers, RandomState.
    keep: number of checkpoints to keep: the last ones of the current run first, then those of
    other runs in the directory. A run that loads an earlier step and saves starts a new branch,
    and the next load() takes that branch. best: (min or max, "metric"): the best checkpoint by a
    metric passed to save() is kept, too.
    Without a process group, the object belongs to one process.
    Raises CheckpointError if the directory cannot be written or another run writes into it.
    """

    def __init__(self, url, keep=3, best=None):
        self.together = Together(CheckpointError)
        self.rank = self.together.rank
        self.n = self.together.n
        self.url = without_password(url)
        self.keep = keep
        self.best = best
        self._thread = ThreadPoolExecutor(1)
        self._under_way = None
        self._host = {}  # {key: host buffer}
        self._written = {}  # {step: (SHA-256, manifest)} of this run, on rank 0
        self._damaged = set()  # steps that load() has skipped
        self._lineage = []  # [step, serial] of the checkpoints that this run has loaded and saved
        error = ""
        self.store = None
        try:
            self.store = Store(url)
            self.store.make()
            if self.rank == 0:
                self.store.lock()
        except BlockingIOError:
            error = f"another run writes checkpoints into {self.url}: choose another directory"
        except Exception as reason:  # fsspec file systems raise any type
            reason = str(reason).replace(str(url), self.url)
            error = f"cannot write to {self.url}: {reason}"
        try:
            self.together.agree(error)
        except CheckpointError:
            if self.store:
                self.store.close()  # this rank may hold the lock when another rank has failed
            raise

    # ---- save

    def save(self, step, state, **metrics):
        """Save the state under a step number. Returns when the state has been copied.

        Raises CheckpointError if the previous save has failed.
        """
        self.wait()
        plain = {}
        held = {}
        own = {}
        with self._one_for_all(step):
            metrics = {name: float(value) for name, value in metrics.items()}
            parts = holders(state)
        for name, holder in parts.items():
            with self._one_for_all(step) as exchange:  # first: the next take() may be collective
                self._copy(own, held)
                pieces, plain[name] = holder.take()
                pieces = {f"{name}:{key}": piece for key, piece in pieces.items()}
                exchange["own"] = dedup.facts(pieces, alone=self.n == 1)
            facts = exchange["all"]
            if several := dedup.replicated_parts(facts):
                with self._one_for_all(step) as exchange:
                    exchange["own"] = dedup.facts(pieces, several)
                facts = exchange["all"]
            own = dedup.share_out(pieces, self.rank, facts)
            del pieces  # freed as soon as they are copied
        with self._one_for_all(step):
            self._copy(own, held)
        self._under_way = self._thread.submit(self._write, step, held, plain, metrics)

    @contextmanager
    def _one_for_all(self, step):
        """Raise an exception unchanged on this rank, and as CheckpointError on the other ranks.

        Yields a dict: the block sets "own", and afterwards "all" has those of all ranks.
        """
        exchange = {"own": None}
        try:
            yield exchange
        except Exception as error:
            self.together.tell([f"step {step} was not saved: rank {self.rank}: {error}", None])
            raise
        told = self.together.tell(["", exchange["own"]])
        if messages := [message for message, _ in told if message]:
            raise CheckpointError(messages[0])
        exchange["all"] = [own for _, own in told]

    def wait(self):
        """Wait until the last save is written. Raises CheckpointError if it has failed."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def _copy(self, own, held):
        """Move `own` to `held`, with the values in host buffers that the next save uses again."""
        for key in list(own):
            (values, start, shape), ranks = own.pop(key)
            kept = self._host.get(key)
            if kept is None or kept.shape != values.shape or kept.dtype != values.dtype:
                kept = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
                self._host[key] = kept
            held[key] = Piece(kept.copy_(values), start, shape), ranks

    def _write(self, step, held, plain, metrics):
        """Write this rank's file; when all ranks have finished, the manifest.

        Runs in the thread. held: {key: (Piece, ranks that hold this version, or None)}.
        """
        folder = folder_of(step)
        name = f"rank-{self.rank}.safetensors"
        facts = None
        failed = f"step {step} was not saved"
        tensors = {f"{key}@{piece.start}": piece.values for key, (piece, _) in held.items()}
        with self.together.agreed(failed):
            # Saved before: the old file stays valid until the new manifest is written.
            if name in metadata.files(self.store, folder):
                name = f"again-{name}"
            write = partial(tensor_file.write, tensors=tensors)
            size, digest = self.store.write(f"{folder}/{name}", write, durable=False)
            file = {"name": name, "bytes": size, tensor_file.HASH: digest}
            facts = metadata.facts(file, held, plain)
        facts_of_ranks = self.together.tell(facts)
        with self.together.agreed(failed):
            if self.rank == 0:
                others = manifests_in(self.store, self._written)
                self._written = {at: one for at, one in self._written.items() if at in others}
                about = next_place(others, step, self._lineage)
                manifest = metadata.merge(
                    facts_of_ranks, world_size=self.n, metrics=metrics, **about
                )
                self._written[step] = metadata.write(self.store, folder, manifest), manifest
                self._lineage = lineage_of(manifest)
        self._damaged.discard(step)
        with self.together.agreed(
            f"step {step} was saved, but an older checkpoint was not removed"
        ):
            if self.rank == 0:
                present = others | {step: manifest}
                prune(self.store, present, step, self.keep, self.best, self._damaged)

    # ---- load

    def steps(self):
        """Return the step numbers of all checkpoints with a manifest."""
        self.wait()
        with self.together.agreed(f"cannot read {self.url}"):
            manifests = manifests_in(self.store)
            complete = [step for step, manifest in manifests.items() if manifest]
        return self.together.tell(complete)[0]

    def load(self, state, step=None):
        """Load the latest valid checkpoint, or that of a step. Returns its step, or None.

        The latest is the one that was saved last. The next save continues from the loaded one. Rank
        0 prints each skipped checkpoint with the reason. Raises CheckpointError, before anything is
        changed, if the checkpoint belongs to another model, optimizer or data set.
        """
        self.wait()
        with self.together.agreed(f"cannot read {self.url}"):
            steps = latest_first(manifests_in(self.store)) if step is None else [step]
        for candidate in self.together.tell(steps)[0]:
            manifest, why = self._check(folder_of(candidate))
            if manifest:
                self._give(state, candidate, manifest)
                self._lineage = lineage_of(manifest)
                return candidate
            self._damaged.add(candidate)
            if self.rank == 0:
                print(f"skipped the checkpoint of step {candidate}: {why}", flush=True)
        return None

    def _check(self, folder):
        """Return (manifest, "") or (None, reason) on all ranks. Each checks some of the files."""
        manifest, why = metadata.checked(self.store, folder, self.rank, self.n)
        reasons = [reason for reason in self.together.tell(why) if reason]
        return (None, reasons[0]) if reasons else (manifest, "")

    def _give(self, state, step, manifest):
        """Check the full state against the checkpoint, then load it."""
        with Reader(self.store, folder_of(step), manifest, self.rank, self.n) as reader:
            with self.together.agreed(f"the checkpoint of step {step} was not loaded"):
                parts = [(name, holder, reader.of(name)) for name, holder in holders(state).items()]
                missing = [name for name, _, saved in parts if not saved.there]
                problems = [f"it does not contain {name!r}" for name in missing]
                for name, holder, saved in parts:
                    if saved.there:
                        problems += [f"{name}: {problem}" for problem in holder.problems(saved)]
            error = f"the checkpoint of step {step} does not fit this run: {'; '.join(problems)}"
            self.together.agree(error if problems else "")
            with self.together.agreed(f"the checkpoint of step {step} was not loaded"):
                for _, holder, saved in parts:
                    holder.give(saved)

    def close(self):
        """Wait for the last save and release the directory."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self.store.close()
            self.together.close()
