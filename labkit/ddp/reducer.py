"""The reducer: watches gradients arrive in backward and sends each bucket once it may leave.

    hooks     b3   w3   b2   w2   b1   w1    end of backward
    bucket 0  [===|===] -------- all_reduce ------>|
    bucket 1            [===|===] -- all_reduce -->|
    bucket 2                      [===|===] - all_reduce ->|   wait for all of them: exposed

Two rules keep the ranks together. Buckets leave strictly in order, however the gradients arrive:
collectives match by order alone. Every bucket leaves once a step, whatever happens on this rank: a
gradient that does not come is zeros. Cost in Python: one hook, a few microseconds, per parameter
and step. Nothing in a hook waits.
Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training, VLDB 2020,
sections 3.2.2 and 4.2.
"""

import weakref
from functools import partial

import torch
import torch.distributed as dist

from labkit import comm
from labkit.ddp.bucket import Bucket, assign_buckets
from labkit.ddp.comm_hook_errors import HookFailures, RankFailed


class Reducer:
    """Averages the gradients of named_parameters, [(name, parameter)], over the group.

    owner: its on_gradient(index, slot) is called when the gradient of parameter number `slot` of
        bucket number `index` is complete; it decides what to do, as a rule `arrive`. Held weakly:
        parameters outlive what watches them.
    cap_bytes: see assign_buckets. overlap: launch full buckets in backward, not in launch_rest().
    """

    def __init__(self, named_parameters, owner, group=None, cap_bytes=25 * 2**20, overlap=True):
        named_parameters = list(named_parameters)
        self.group, self.overlap = group, overlap
        names = {p: name for name, p in named_parameters}
        lists = assign_buckets([p for _, p in named_parameters], cap_bytes)
        self.buckets = [
            self._make_bucket(members, i, i == len(lists) - 1, [names[p] for p in members])
            for i, members in enumerate(lists)
        ]
        self.hook = self.state = None
        self.factor = None  # what gradients are multiplied by on their way into the bucket
        self.started = False  # something has arrived since the last average
        self._pending = []  # one Work or Future per bucket that has left
        self._absent = []  # names of the parameters whose gradient did not come
        self._asked = None  # what used() has sent
        self._failures = HookFailures(group)
        self.divide_by(dist.get_world_size(group))
        owner, handles = weakref.ref(owner), []
        for bucket in self.buckets:
            for slot, p in enumerate(bucket.members):
                arrived = partial(_notify, owner, bucket.index(), slot)
                handles.append(p.register_post_accumulate_grad_hook(arrived))
        self.detach = weakref.finalize(self, _remove, handles)  # called, or the reducer is gone
        self.detach.atexit = False

    def _make_bucket(self, members, index, is_last, names):
        return Bucket(members, index, is_last, names)

    def divide_by(self, count):
        """The average is the sum divided by count. Left to the hook if there is one."""
        if self.hook is None:
            # A float64 scalar tensor changes no gradient's dtype, and is faster than a float.
            self.factor = torch.tensor(1.0 / count, dtype=torch.float64)

    def use_hook(self, state, hook):
        """hook(state, bucket): undivided gradients -> Future of a flat mean. None: all_reduce."""
        self.hook, self.state = hook, state
        if hook is not None:
            self.factor = None

    def arrive(self, index, slot):
        """This gradient is complete. With overlap, raises RuntimeError if it had arrived before."""
        bucket = self.buckets[index]
        defined = bucket.members[slot].grad is not None
        if bucket.arrived[slot]:
            if not self.overlap:
                bucket.used[slot] |= defined
                return
            raise RuntimeError(
                f"{bucket.names[slot]!r} got a gradient again in one backward, after its bucket "
                "had taken it for complete: reentrant checkpointing of a shared or conditional "
                "part does so; use_reentrant=False not"
            )
        self.started = True
        bucket.arrived[slot], bucket.used[slot] = 1, defined
        bucket.missing -= 1
        if self.overlap:
            bucket.put(slot, self.factor)
            if not bucket.missing:
                self.launch_full()

    def keep(self, index, slot):
        """A later backward will add to this gradient: keep the sum in the bucket, undivided."""
        bucket = self.buckets[index]
        if bucket.members[slot].grad is not None:
            bucket.used[slot] = 1
            bucket.put(slot)

    def skip(self, index, slot):
        """No gradient will come for this parameter."""
        bucket = self.buckets[index]
        self._absent.append(repr(bucket.names[slot]))
        self.started = True
        bucket.arrived[slot] = 1
        bucket.missing -= 1
        bucket.skip(slot, self.factor)

    def launch_full(self):
        """Send the buckets whose turn it is and that are full."""
        while (
            len(self._pending) < len(self.buckets) and self.buckets[len(self._pending)].missing == 0
        ):
            self._launch(self.buckets[len(self._pending)])

    def launch_rest(self):
        """Send every bucket that has not left, without the gradients that have not come."""
        for bucket in self.buckets[len(self._pending) :]:
            for slot, arrived in enumerate(bucket.arrived):
                if not arrived:
                    self.skip(bucket.index(), slot)
                elif not self.overlap and slot not in bucket.skipped:
                    bucket.put(slot, self.factor)
            self._launch(bucket)
            if not self.overlap and self.hook is None:  # a hook may need the next ones (PowerSGD)
                self._wait(bucket, self._pending[-1])
                self._pending[-1] = None

    @torch.no_grad()
    def finish(self, used=None):
        """End the step: send the remaining buckets, wait for all of them.

        used: called before the wait; returns which parameters without a gradient take the average
            as .grad, [[bool]] by bucket. None: all of them.
        Returns the names of the parameters whose gradient did not come.
        """
        self.launch_rest()
        adopt = used() if used else [[True] * len(bucket.members) for bucket in self.buckets]
        errors = []
        for bucket, pending in zip(self.buckets, self._pending, strict=True):
            try:
                self._wait(bucket, pending)
            except RankFailed:
                raise  # the buckets are still under way: abandon() waits for them
            except Exception as error:
                errors.append(error)  # go on: the next step uses the memory of the other buckets
        absent = self._absent
        self._failures.step += 1
        self._reset(adopt)
        if errors:
            raise errors[0]
        return absent

    def _launch(self, bucket):
        if self.hook is not None:  # empty or not: it may wait for the last one (PowerSGD)
            self._pending.append(self._failures.call(self.hook, self.state, bucket))
        elif bucket.numel == 0:
            self._pending.append(None)
        else:
            self._pending.append(comm.all_reduce(bucket.buffer(), group=self.group, async_op=True))

    def _wait(self, bucket, pending):
        if pending is None:
            return
        averaged = pending.wait() if self.hook is None else self._failures.wait(pending)
        if self.hook is not None:
            bucket.set_buffer(None)
            bucket.receive(averaged[0] if isinstance(averaged, list | tuple) else averaged)

    def _reset(self, adopt):
        """Expect the next step. adopt: see finish()."""
        self._pending = []
        self._absent = []
        self.started = False
        for bucket, choice in zip(self.buckets, adopt, strict=True):
            bucket.settle(choice)

    def used(self, everything=False):
        """Which parameters had a gradient on any rank since the last average: [[bool]] by bucket.

        everything: tell the others that all had one.
        """
        if self._asked is None:  # else this step has asked, and was left before the answer came
            flags = [everything or flag for bucket in self.buckets for flag in bucket.used]
            counts = torch.tensor(flags, dtype=torch.int32, device=self.buckets[0].device)
            self._asked = counts, comm.all_reduce(counts, group=self.group, async_op=True)
        counts, work = self._asked
        if self.hook is None:
            work.wait()
        else:
            self._failures.wait(work)  # another rank's hook may have raised
        self._asked = None
        flags = iter(counts.tolist())
        return [[next(flags) > 0 for _ in bucket.used] for bucket in self.buckets]

    def abandon(self):
        """An exception left a backward; others may wait: send zeros for the rest, keep nothing."""
        try:
            for bucket in self.buckets[len(self._pending) :]:
                bucket.set_buffer(None)
                bucket.buffer().zero_()
                self._launch(bucket)
            self._failures.step += 1  # whoever has failed is with us again
            for bucket, pending in zip(self.buckets, self._pending, strict=True):
                self._wait(bucket, pending)
        finally:
            for bucket in self.buckets:
                bucket.buffer().zero_()
            self._reset([[False] * len(bucket.members) for bucket in self.buckets])

    def send_zeros(self):
        """Take part in one step of the other ranks without gradients, leaving ours alone."""
        twins = [bucket.zeros() for bucket in self.buckets]
        for twin in twins:
            self._launch(twin)
        pending, self._pending = self._pending, []
        for twin, p in zip(twins, pending, strict=True):
            self._wait(twin, p)


def _notify(owner, index, slot, parameter):
    alive = owner()
    if alive is not None:
        alive.on_gradient(index, slot)


def _remove(handles):
    for handle in handles:
        handle.remove()


def watchers(parameter):
    """The owners of the reducers, of any wrapper, that wait for the gradient of a parameter."""
    hooks = (parameter._post_accumulate_grad_hooks or {}).values()
    owners = [
        hook.args[0]() for hook in hooks if isinstance(hook, partial) and hook.func is _notify
    ]
    return [owner for owner in owners if owner is not None]
