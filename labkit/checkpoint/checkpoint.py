"""Checkpoints: each rank writes what it holds; it is one when all have, and before that it is none.

    rank 0   train | copy |  train ...                        | agree |      step-000000030/
                          \\ hash, write, fsync, rename --------|       |        rank-0.safetensors
    rank 1   train | copy |  train ...                        |       |        rank-1.safetensors
                          \\ hash, write, fsync, rename --------|       |        manifest.json  last

Training stands still while a rank copies to host memory what it holds; a thread with a process
group of its own does the rest. What several ranks hold alike is written once, a part by each. The
manifest says which elements of which whole are where, and what each file's SHA-256 is: other ranks,
or another strategy or mesh, read the ranges they need, and a flipped bit is found before it is
loaded. Columns of a matrix are no range: a mesh puts such a matrix together first, one at a time.

Written: model and optimizer once, 1/n of it per rank. Held besides: this rank's copy. Sent: names
and hashes. Rajbhandari et al., ZeRO, SC 2020, section 5.1 (each rank its part); Mohan et al.,
CheckFreq: Frequent, Fine-Grained DNN Checkpointing, FAST 2021, section 4 (copy, then write while
training goes on); Pillai et al., All File Systems Are Not Created Equal, OSDI 2014 (write, fsync,
rename, fsync).
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

import torch

from labkit.checkpoint import metadata, tensor_file
from labkit.checkpoint.dedup import share_out
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
    """A checkpoint was not written, or cannot be loaded: on all ranks, and says why."""


class Checkpoints:
    """The checkpoints of one run, in a directory at any fsspec URL. Collective, as are its methods.

        checkpoints = Checkpoints("runs/1", keep=3)
        step = checkpoints.load({"model": model, "optimizer": optimizer})   None: there is none
        checkpoints.save(step, {"model": model, "optimizer": optimizer})    copied, not yet written
        checkpoints.wait()                                                  written

    A state maps names to what has state_dict() and load_state_dict(): modules, optimizers, whatever
    they are wrapped in, schedules, scalers, compressors, samplers, RandomState.
    keep: how many stay: the last ones of the run that is going on, then those of others in the
    directory. A run that loads an earlier step and saves is a new branch, and the next load() takes
    it. best: (min or max, "metric"): the best by a metric that save() is given stays, too.
    Without a process group: of one process alone.
    Raises CheckpointError where the directory cannot be written, or another run writes into it.
    """

    def __init__(self, url, keep=3, best=None):
        self.together = Together(CheckpointError)
        self.rank, self.n = self.together.rank, self.together.n
        self.url, self.keep, self.best = without_password(url), keep, best
        self._thread, self._under_way, self._host = ThreadPoolExecutor(1), None, {}
        self._damaged = set()  # steps that load() has passed over
        self._lineage = []  # [step, serial] of what this run has loaded and saved
        error, self.store = "", None
        try:
            self.store = Store(url)
            self.store.make()
            if self.rank == 0:
                self.store.lock()
        except BlockingIOError:
            error = f"another run writes checkpoints into {self.url}: name another directory"
        except Exception as reason:  # a URL's file system raises what it likes
            reason = str(reason).replace(str(url), self.url)
            error = f"{self.url} cannot be written: {reason}"
        try:
            self.together.agree(error)
        except CheckpointError:
            if self.store:
                self.store.close()  # where another rank has failed, this one holds it
            raise

    # ---- save

    def save(self, step, state, **metrics):
        """Save the state under a step number; returns when it has been copied.

        Raises CheckpointError where the save before this one has failed.
        """
        self.wait()
        plain, held = {}, {}
        with self._one_for_all(step):
            metrics = {name: float(value) for name, value in metrics.items()}
            parts = holders(state)
        for name, holder in parts.items():
            with self._one_for_all(step):  # each: the next one may need all ranks
                pieces, plain[name] = holder.take()
                for key, piece in pieces.items():
                    copy = self._copy(f"{name}:{key}", piece.values)
                    held[f"{name}:{key}"] = piece._replace(values=copy)
        self._under_way = self._thread.submit(self._write, step, held, plain, metrics)

    @contextmanager
    def _one_for_all(self, step):
        """What goes wrong inside is raised here as it is, and on other ranks as CheckpointError."""
        try:
            yield
        except Exception as error:
            with suppress(CheckpointError):
                self.together.agree(f"step {step} was not saved: rank {self.rank}: {error}")
            raise
        self.together.agree("")

    def wait(self):
        """Until what save() began has ended. Raises CheckpointError where it has failed."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def _copy(self, key, values):
        """In host memory that is kept for the next time."""
        kept = self._host.get(key)
        if kept is None or kept.shape != values.shape or kept.dtype != values.dtype:
            kept = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
            self._host[key] = kept
        return kept.copy_(values)

    def _write(self, step, held, plain, metrics):
        """In the thread: this rank's file, and when all ranks have theirs, the manifest."""
        folder, name, facts = folder_of(step), f"rank-{self.rank}.safetensors", None
        failed = f"step {step} was not saved"
        with self.together.agreed(failed):
            listed = metadata.files(self.store, folder)
        if name in listed:  # saved before: until there is a new manifest, the old one holds
            name = f"again-{name}"
        own = share_out(held, self.rank, self.n, self.together.tell)
        tensors = {f"{key}@{piece.start}": piece.values for key, (piece, _) in own.items()}
        with self.together.agreed(failed):
            write = partial(tensor_file.write, tensors=tensors)
            size, digest = self.store.write(f"{folder}/{name}", write)
            file = {"name": name, "bytes": size, "sha256": digest}
            facts = metadata.facts(file, own, plain)
        told = self.together.tell(facts)
        with self.together.agreed(failed):
            if self.rank == 0:
                others = manifests_in(self.store)
                about = next_place(others, step, self._lineage)
                whole = metadata.merge(told, world_size=self.n, metrics=metrics, **about)
                metadata.write(self.store, folder, whole)
                self._lineage = lineage_of(whole)
        self._damaged.discard(step)
        with self.together.agreed(f"step {step} was saved, but an older one not removed"):
            if self.rank == 0:
                prune(self.store, others | {step: whole}, step, self.keep, self.best, self._damaged)

    # ---- load

    def steps(self):
        """The step numbers of all that have a manifest."""
        self.wait()
        with self.together.agreed(f"{self.url} cannot be read"):
            complete = [step for step, one in manifests_in(self.store).items() if one]
        return self.together.tell(complete)[0]

    def load(self, state, step=None):
        """Load the latest that is whole, or that of a step; returns its step, or None.

        The latest is the one that was saved last; what is saved next goes on from the one that was
        loaded. What is passed over is printed by rank 0, with the reason. Raises CheckpointError,
        before anything is changed, where it is not of this model, this optimizer, these data.
        """
        self.wait()
        with self.together.agreed(f"{self.url} cannot be read"):
            steps = latest_first(manifests_in(self.store)) if step is None else [step]
        for candidate in self.together.tell(steps)[0]:
            found, why = self._check(folder_of(candidate))
            if found:
                self._give(state, candidate, found)
                self._lineage = lineage_of(found)
                return candidate
            self._damaged.add(candidate)
            if self.rank == 0:
                print(f"passed over the checkpoint of step {candidate}: {why}", flush=True)
        return None

    def _check(self, folder):
        """(manifest, "") or (None, why), the same on all ranks: each looks at some of the files."""
        found, why = metadata.checked(self.store, folder, self.rank, self.n)
        reasons = [reason for reason in self.together.tell(why) if reason]
        return (None, reasons[0]) if reasons else (found, "")

    def _give(self, state, step, found):
        with Reader(self.store, folder_of(step), found, self.rank, self.n) as reader:
            with self.together.agreed(f"the checkpoint of step {step} was not loaded"):
                parts = [(name, holder, reader.of(name)) for name, holder in holders(state).items()]
                problems = [f"{name!r} is not in it" for name, _, saved in parts if not saved.there]
                for name, holder, saved in parts:
                    if saved.there:
                        problems += [f"{name}: {problem}" for problem in holder.problems(saved)]
            words = f"the checkpoint of step {step} is of another run: {'; '.join(problems)}"
            self.together.agree(words if problems else "")
            with self.together.agreed(f"the checkpoint of step {step} was not loaded"):
                for _, holder, saved in parts:
                    holder.give(saved)

    def close(self):
        """Waits, and gives the directory free. A process that ends without it may lose a save."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self.store.close()
            self.together.close()
