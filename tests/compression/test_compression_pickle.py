"""torch.save of what compresses: the object, its hook and its state_dict each go on to the bit."""

import copy
import io
import itertools
import threading
from collections import defaultdict
from functools import partial
from unittest import mock

import hook_training
import pytest
import torch
import torch.distributed as dist
from tensors import mlp
from torch import nn

from labkit.compression import COMPRESSORS, Cast, OneBit, OneBitAdam, OneBitLamb, RandomK, TopK, feedback
from labkit.compression.onebit_optimizer import OneBitOptimizer
from labkit.ddp import DDP
from labkit.ddp.bucket import Bucket
from labkit.local_sgd import DiLoCo, LocalSGD

MAKE = {
    **COMPRESSORS,
    "bf16_feedback": partial(Cast, torch.bfloat16, feedback=True),
    "randomk_forgetful": partial(RandomK, 0.1, feedback=False),
}


def saved(value, **settings):
    """What torch.load makes of what torch.save has written."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **settings)


def train(module, hook, optimizer, rank, steps):
    """hook=None: without DDP."""
    wrap = (lambda module: module) if hook is None else DDP
    return hook_training.train(module, hook, optimizer, rank, steps, wrap)


def sgd(module):
    return torch.optim.SGD(module.parameters(), lr=0.1)


def compressor_goes_on(rank, world_size, name):
    module, compressor = mlp(24, 40, 4), MAKE[name]()
    train(module, compressor.hook, sgd(module), rank, range(3))
    again = MAKE[name]()
    again.load_state_dict(saved(compressor.state_dict()))  # with weights_only, torch.load's default
    whole = saved(compressor, weights_only=False)
    hook = saved({"comm_hook": compressor.hook}, weights_only=False)["comm_hook"]
    twin = copy.deepcopy(compressor)
    ends = []
    for following in (again.hook, whole.hook, hook, twin.hook, MAKE[name]().hook):
        one = copy.deepcopy(module)
        ends.append(train(one, following, sgd(one), rank, range(3, 6)))
    ends.append(train(module, compressor.hook, sgd(module), rank, range(3, 6)))
    return ends


@pytest.mark.parametrize("name", MAKE)
def test_a_saved_compressor_goes_on_to_the_bit(ranks, name):
    for rank, (*ends, fresh, straight) in enumerate(ranks(2, compressor_goes_on, name=name)):
        assert all(torch.equal(end, straight) for end in ends), f"rank {rank}"
        assert torch.equal(fresh, straight) == (name in ("fp16", "bf16")), f"rank {rank}"  # they keep nothing


def loaded_at_other_steps(rank, world_size):
    compressor, bucket = RandomK(0.5), Bucket([nn.Parameter(torch.zeros(8))])
    compressor.hook(None, bucket).wait()
    compressor.step += rank
    with pytest.raises(ValueError, match=r"at step 1, rank 1 has .*at step 2"):
        saved(compressor, weights_only=False).hook(None, bucket)


def test_ranks_that_have_loaded_compressors_that_differ_are_told(ranks):
    ranks(2, loaded_at_other_steps)


def a_size(rank, world_size):
    """Parameters are not saved with what waits for them."""
    module, compressor = nn.Linear(100, 100), TopK(0.1)
    train(module, None, sgd(module), rank, range(0))
    wrapped = DDP(module)
    wrapped.register_comm_hook(None, compressor.hook)
    wrapped(torch.ones(1, 100)).sum().backward()
    file = io.BytesIO()
    torch.save(compressor, file)
    return file.tell()


def test_a_saved_compressor_holds_residuals_and_no_parameters(ranks):
    assert ranks(1, a_size)[0] < 1.2 * 4 * 10_100


def hook_of(optimizer):
    """The 1-bit optimizers are used with DDP, the others without."""
    return optimizer.hook if isinstance(optimizer, OneBitOptimizer) else None


MAKE_OPTIMIZER = {
    "onebit_adam warming up": partial(OneBitAdam, lr=0.01, warmup=5),
    "onebit_adam": partial(OneBitAdam, lr=0.01, warmup=2),
    "onebit_lamb warming up": partial(OneBitLamb, lr=0.01, warmup=5),
    "onebit_lamb": partial(OneBitLamb, lr=0.01, warmup=2),
    "local_sgd": lambda p: LocalSGD(torch.optim.SGD(p, lr=0.1, momentum=0.9), every=3),
    "local_sgd compressed": lambda p: LocalSGD(torch.optim.AdamW(p), every=3, hook=TopK(0.1).hook),
    "diloco": lambda p: DiLoCo(torch.optim.AdamW(p, lr=0.01), every=3),
}


def optimizer_goes_on(rank, world_size, name):
    module = mlp(24, 40, 4)
    optimizer = MAKE_OPTIMIZER[name](module.parameters())
    train(module, hook_of(optimizer), optimizer, rank, range(4))
    ends = []
    for one, following in (
        saved((module, optimizer), weights_only=False),
        copy.deepcopy((module, optimizer)),
        (module, optimizer),
    ):
        ends.append(train(one, hook_of(following), following, rank, range(4, 8)))
    return ends


@pytest.mark.parametrize("name", MAKE_OPTIMIZER)
def test_a_saved_optimizer_goes_on_to_the_bit_beside_its_model(ranks, name):
    for rank, (*ends, straight) in enumerate(ranks(2, optimizer_goes_on, name=name)):
        assert all(torch.equal(end, straight) for end in ends), f"rank {rank}"


def state_goes_on(rank, world_size, name):
    module = mlp(24, 40, 4)
    optimizer = MAKE_OPTIMIZER[name](module.parameters())
    train(module, hook_of(optimizer), optimizer, rank, range(4))
    twin = copy.deepcopy(module)
    again = MAKE_OPTIMIZER[name](twin.parameters())
    with torch.no_grad():
        for p, q in zip(twin.parameters(), module.parameters(), strict=True):
            p.copy_(q)  # constructing LocalSGD made them rank 0's
    again.load_state_dict(saved(optimizer.state_dict()))
    if name == "local_sgd compressed":  # a compressor saves itself
        again.hook.__self__.load_state_dict(saved(optimizer.hook.__self__.state_dict()))
    pairs = (module, optimizer), (twin, again)
    return [train(one, hook_of(its), its, rank, range(4, 8)) for one, its in pairs]


@pytest.mark.parametrize("name", MAKE_OPTIMIZER)
def test_a_saved_state_of_an_optimizer_goes_on_to_the_bit(ranks, name):
    for rank, (straight, again) in enumerate(ranks(2, state_goes_on, name=name)):
        assert torch.equal(again, straight), f"rank {rank}"


def other_settings(rank, world_size):
    """What load_state_dict brings holds, not what the optimizer was constructed with."""
    module = mlp(24, 40, 4)
    one = OneBitAdam(module.parameters(), lr=0.01, betas=(0.8, 0.99), warmup=2)
    train(module, one.hook, one, rank, range(4))
    twin = copy.deepcopy(module)
    two = OneBitAdam(twin.parameters(), lr=1.0, betas=(0.5, 0.5), warmup=2)
    two.load_state_dict(saved(one.state_dict()))
    return [train(m, o.hook, o, rank, range(4, 8)) for m, o in ((module, one), (twin, two))]


def test_one_bit_adam_takes_the_betas_it_has_loaded(ranks):
    for rank, (one, two) in enumerate(ranks(2, other_settings)):
        assert torch.equal(one, two), f"rank {rank}"


def of_a_group(rank, world_size):
    module = mlp(24, 40, 4)
    optimizer = LocalSGD(sgd(module), process_group=dist.new_group())
    with pytest.raises(RuntimeError, match=r"process group.*state_dict"):
        saved(optimizer)


def test_a_group_cannot_be_saved(ranks):
    ranks(1, of_a_group)


class Preempted(OneBit):
    """Another thread has its turn between reading `seconds` and writing it."""

    other, kept = None, 0.0

    @property
    def seconds(self):
        value, other = self.kept, self.other
        if other is not None:
            self.other = None
            other.start()
            other.join(0.3)  # it ends only if nothing makes it wait for us
        return value

    @seconds.setter
    def seconds(self, value):
        self.kept = value


def test_two_threads_lose_no_time():
    compressor, ticks = Preempted(), defaultdict(itertools.count)

    def compress():
        with compressor.clock():
            pass

    compressor.other = other = threading.Thread(target=compress)
    with mock.patch.object(feedback, "perf_counter", lambda: next(ticks[threading.get_ident()])):
        compress()
        other.join()
    assert compressor.seconds == 2  # a tick each
