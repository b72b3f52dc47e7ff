"""Random states of a sharded module: ranks must draw the same numbers for replicated tensors.

    same seed      5 ~~~ dropout ~~~|                         | n ~~~ dropout ~~~    replicated
    rank 0's own                    | own 0 n ~~~ dropout ~~~ |                      sharded: a
    rank 1's own                    | own 1 n ~~~ dropout ~~~ |                      mask per rank
                                    n: a hash of the common state

The seed of a generator encodes which numbers are drawn, and how all ranks continue. There is no
other state: restoring the generator (in recomputation or from a checkpoint) restores everything,
and forwards and backwards may come in any order. After a sharded part all ranks draw the numbers of
n, not those that one process would draw there.
"""

from contextlib import contextmanager
from hashlib import sha256

import torch

OWN, RANK = 2**63, 2**52  # a seed: bit 63: per rank | bits 52 to 62: the rank | below: a number


class RngTracker:
    """The random state of this rank, one of `size` ranks that shard a module."""

    def __init__(self, rank, size):
        self.rank = rank
        self.size = size

    def per_rank(self, device):
        """Draw different numbers on each rank from now on, for shards. device: of the tensors."""
        for generator in generators_of(device) if self.size > 1 else ():
            if generator.initial_seed() < OWN:
                state = generator.get_state().numpy().tobytes()
                number = int.from_bytes(sha256(state).digest()[:8], "big")
                # the CPU's generator uses only the lowest 32 bits, so they must differ, too
                number = (number + 1 + self.rank) % RANK
                generator.manual_seed(OWN + self.rank * RANK + number)

    def same_on_all(self):
        """Draw the same numbers on all ranks from now on, for replicated tensors."""
        for generator in all_generators() if self.size > 1 else ():
            if generator.initial_seed() >= OWN:
                rank, number = divmod(generator.initial_seed() - OWN, RANK)
                generator.manual_seed((number - 1 - rank) % RANK)


@contextmanager
def per_rank_draws(rank, device):
    """Draw different numbers on each rank inside; then continue as before, one number further.

    For code that begins and ends in one call. The rank may be that of another axis.
    """
    seed = torch.randint(2**62, ()).item() + rank
    generators = generators_of(device)
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def generators_of(device):
    """Return the generators that operations on a device use; the host's is the first."""
    if device.type != "cuda":
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[device.index]]


def all_generators():
    return [torch.default_generator, *torch.cuda.default_generators]
