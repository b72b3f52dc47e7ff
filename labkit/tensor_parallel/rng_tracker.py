"""Random numbers of a split module: where a tensor is whole on all ranks, all must draw the same.

    seed of all    5 ~~~ dropout ~~~|                         | n ~~~ dropout ~~~    whole: alike
    own, rank 0                     | own 0 n ~~~ dropout ~~~ |                      split: another
    own, rank 1                     | own 1 n ~~~ dropout ~~~ |                      mask on each
                                    n: a hash of the state that all are in

A generator knows its seed, and the seed says whose numbers are drawn and how all go on. Nothing is
kept beside it: whoever restores the generator (recomputation, a checkpoint) has all of it, and any
order of forwards and backwards will do. Behind a split part all draw numbers of n, and not those
that one process would draw there.
"""

from contextlib import contextmanager
from hashlib import sha256

import torch

OWN, RANK = 2**63, 2**52  # a seed: bit 63 own | bits 52 to 62 the rank | below a number


class Draws:
    """Whose random numbers are drawn next on this rank, of `size` that split a module."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size

    def own(self, device):
        """From now on each rank draws its own: tensors are shards. device: where they are."""
        for generator in generators_of(device) if self.size > 1 else ():
            if generator.initial_seed() < OWN:
                state = generator.get_state().numpy().tobytes()
                number = int.from_bytes(sha256(state).digest()[:8], "big")
                # the CPU's generator heeds the lowest 32 bits alone: they too are each rank's own
                number = (number + 1 + self.rank) % RANK
                generator.manual_seed(OWN + self.rank * RANK + number)

    def alike(self):
        """From now on all draw the same: tensors are whole."""
        for generator in all_generators() if self.size > 1 else ():
            if generator.initial_seed() >= OWN:
                rank, number = divmod(generator.initial_seed() - OWN, RANK)
                generator.manual_seed((number - 1 - rank) % RANK)


@contextmanager
def apart(rank, device):
    """Inside, each rank draws its own; behind, it goes on as before, one number on.

    For what begins and ends in one call; in there this may be another axis' rank.
    """
    seed = torch.randint(2**62, ()).item() + rank
    generators = generators_of(device)
    states = [one.get_state() for one in generators]
    for one in generators:
        one.manual_seed(seed)
    try:
        yield
    finally:
        for one, state in zip(generators, states, strict=True):
            one.set_state(state)


def generators_of(device):
    """The generators whose numbers operations on a device draw; the host's is the first."""
    if device.type != "cuda":
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[device.index]]


def all_generators():
    return [torch.default_generator, *torch.cuda.default_generators]
