"""The reducer: collects gradients during backward and sends each bucket as soon as it is full.

    hooks     b3   w3   b2   w2   b1   w1    end of backward
    bucket 0  [===|===] -------- all_reduce ------>|
    bucket 1            [===|===] -- all_reduce -->|
    bucket 2                      [===|===] - all_reduce ->|   wait for all of them: exposed

Two rules keep the ranks in step. Buckets are sent strictly in order, whatever the order of the
gradients, because collectives match by order only. Every bucket is sent once a step, whatever
happens on this rank: a missing gradient counts as zeros. Cost in Python: one hook, a few
microseconds, per parameter and step. No hook waits.

    arrive ---> put in the bucket ---> bucket full, all before it sent: launch ---> finish: wait
    keep        no_sync: put, but do not count it as arrived
    skip        no gradient will come: zeros, or what no_sync left
    abandon     an exception interrupted backward: send zeros for the rest, keep no gradient
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
from labkit.torch_private import gradient_hooks


class Reducer:
    """Average the gradients of named_parameters, [(name, parameter)], over the group.

    owner: its on_gradient(index, slot) is called when the gradient of parameter number `slot` of
        bucket number `index` is complete, and usually calls `arrive`. The reference is weak:
        parameters may outlive their wrapper.
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
        self.factor = None  # gradients are multiplied by it when they are put into the bucket
        self.started = False  # a gradient has arrived since the last average
        self._pending = []  # one Work or Future for each bucket that was sent
        self._absent = []  # names of the parameters without a gradient
        self._asked = None  # the message of used()
        self._failures = HookFailures(group)
        self.divide_by(dist.get_world_size(group))
        owner, handles = weakref.ref(owner), []
        for bucket in self.buckets:
            for slot, p in enumerate(bucket.members):
                arrived = partial(_notify, owner, bucket.index(), slot)
                handles.append(p.register_post_accumulate_grad_hook(arrived))
        self.detach = weakref.finalize(self, _remove, handles)  # also when collected
        self.detach.atexit = False

    def _make_bucket(self, members, index, is_last, names):
        return Bucket(members, index, is_last, names)

    def divide_by(self, count):
        """Divide the sum by count to average. A comm hook divides by itself."""
        if self.hook is None:
            # A float64 scalar tensor changes no gradient's dtype, and is faster than a float.
            self.factor = torch.tensor(1.0 / count, dtype=torch.float64)

    def use_hook(self, state, hook):
        """Set hook(state, bucket) -> Future of the flat mean; None: all_reduce."""
        self.hook, self.state = hook, state
        if hook is not None:
            self.factor = None

    def arrive(self, index, slot):
        """Take a complete gradient. With overlap, raises RuntimeError if it had arrived before."""
        bucket = self.buckets[index]
        defined = bucket.members[slot].grad is not None
        if bucket.arrived[slot]:
            if not self.overlap:
                bucket.used[slot] |= defined
                return
            raise RuntimeError(
                f"{bucket.names[slot]!r} got a second gradient in one backward, after its bucket "
                "was complete: reentrant checkpointing of shared modules does this; pass "
                "use_reentrant=False"
            )
        self.started = True
        bucket.arrived[slot], bucket.used[slot] = 1, defined
        bucket.missing -= 1
        if self.overlap:
            bucket.put(slot, self.factor)
            if not bucket.missing:
                self.launch_full()

    def keep(self, index, slot):
        """Keep the undivided sum in the bucket: a later backward will add to this gradient."""
        bucket = self.buckets[index]
        if bucket.members[slot].grad is not None:
            bucket.used[slot] = 1
            bucket.put(slot)

    def skip(self, index, slot):
        """Note that no gradient will come for this parameter."""
        bucket = self.buckets[index]
        self._absent.append(repr(bucket.names[slot]))
        self.started = True
        bucket.arrived[slot] = 1
        bucket.missing -= 1
        bucket.skip(slot, self.factor)

    def launch_full(self):
        """Send the full buckets, up to the first that is not full."""
        while (
            len(self._pending) < len(self.buckets) and self.buckets[len(self._pending)].missing == 0
        ):
            self._launch(self.buckets[len(self._pending)])

    def launch_rest(self):
        """Send all remaining buckets; missing gradients count as zeros."""
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
                raise  # the buckets are still being sent: abandon() waits for them
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
        """Return which parameters had a gradient on any rank, [[bool]] by bucket. Collective.

        Counted since the last average. everything: report all parameters of this rank as used.
        """
        if self._asked is None:  # else an interrupted step has already sent the message
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
        """End an interrupted backward: send zeros for the rest, as others may wait."""
        try:
            for bucket in self.buckets[len(self._pending) :]:
                bucket.set_buffer(None)
                bucket.buffer().zero_()
                self._launch(bucket)
            self._failures.step += 1  # the rank that failed is in step again
            for bucket, pending in zip(self.buckets, self._pending, strict=True):
                self._wait(bucket, pending)
        finally:
            for bucket in self.buckets:
                bucket.buffer().zero_()
            self._reset([[False] * len(bucket.members) for bucket in self.buckets])

    def send_zeros(self):
        """Take part in a step of the other ranks with zeros; own gradients do not change."""
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
    """Return the owners of all reducers that wait for the gradient of a parameter."""
    hooks = gradient_hooks(parameter)
    owners = [
        hook.args[0]() for hook in hooks if isinstance(hook, partial) and hook.func is _notify
    ]
    return [owner for owner in owners if owner is not None]
