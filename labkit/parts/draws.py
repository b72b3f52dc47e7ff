"""Random numbers of a split module: where a tensor is whole on all ranks, all must draw the same.

    stream of all    ~~~ dropout ~~~|                    |~~~ dropout ~~~      replicated: alike
    own, rank 0                     |~~~ dropout ~~~|                          split: another mask
    own, rank 1                     |~~~ dropout ~~~|                          on every rank

The ranks' generators are in the same state. Where tensors become shards, each seeds its own by a
number that all draw and its rank; where they are whole again, the old state comes back. Nothing is
kept between the two: whoever restores the generators (recomputation, a checkpoint) has all of it.
"""

import torch


class Draws:
    """Whose random numbers are drawn next on this rank, of `size` that split a module."""

    def __init__(self, rank, size):
        self.rank, self.size, self.seed = rank, size, None

    def own(self, device):
        """From now on each rank draws its own: tensors are shards. device: where they are."""
        if self.size == 1 or torch.initial_seed() == self.seed:
            return
        self.generators = generators_of(device)
        self.before = [one.get_state() for one in self.generators]
        self.seed = torch.randint(2**62, ()).item() + self.rank
        self.advanced = torch.default_generator.get_state()
        for one in self.generators:
            one.manual_seed(self.seed)
        self.started = [one.get_state() for one in self.generators]

    def alike(self):
        """From now on all draw the same: tensors are whole."""
        if self.size == 1 or torch.initial_seed() != self.seed:
            return
        now = [one.get_state() for one in self.generators]
        if not all(map(torch.equal, now, self.started)):
            self.before[0] = self.advanced  # the next shards are to see other numbers
        for one, state in zip(self.generators, self.before, strict=True):
            one.set_state(state)


def generators_of(device):
    """The generators whose numbers operations on a device draw; the host's is the first."""
    if device.type != "cuda":
        return [torch.default_generator]
    return [torch.default_generator, torch.cuda.default_generators[device.index]]
