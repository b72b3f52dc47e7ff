"""The lab's models, small, and their batches: what an oracle of one process and its ranks train."""

import torch

from labkit import models

STEPS = 3
SHARD = 4  # samples of a rank
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}
SIZES = {"gpt": {"vocab": 32, "context": 16}, "mlp": {"sizes": (8, 32, 32, 10)}, "resnet": {}}


def seeded(name, seed=0, dtype=torch.float32, **sizes):
    """One of the lab's models, its weights drawn from the seed."""
    torch.manual_seed(seed)
    return models.build(name, **sizes).to(dtype)


def build(name, dtype, seed, frozen=2, **overrides):
    """A model with its own random weights, one parameter frozen; gpt has its embedding tied to the output layer."""
    model = seeded(name, seed, dtype, **SIZES[name] | overrides)
    list(model.parameters())[frozen].requires_grad_(False)
    return model


def batch(name, dtype, step, world_size, vocab=32):
    """The whole batch of a step: (input, target), the same in every process, SHARD samples for each rank.

    gpt: (samples, 8) token ids, twice. mlp: (samples, 8); resnet: (samples, 3, 8, 8); their targets (samples,).
    """
    generator = torch.Generator().manual_seed(step)
    size = SHARD * world_size
    if name == "gpt":
        tokens = torch.randint(vocab, (size, 9), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    shape = (size, 8) if name == "mlp" else (size, 3, 8, 8)
    return torch.randn(shape, dtype=dtype, generator=generator), torch.randint(10, (size,), generator=generator)


def fit(model, optimizer, name, dtype, world_size, rank=None, vocab=32):
    """Train for STEPS steps on a rank's samples; rank None: on the whole batches."""
    mine = slice(None) if rank is None else slice(rank * SHARD, (rank + 1) * SHARD)
    for step in range(STEPS):
        inputs, targets = batch(name, dtype, step, world_size, vocab)
        optimizer.zero_grad()
        models.loss(name)(model(inputs[mine]), targets[mine]).backward()
        optimizer.step()


def trained(model):
    """The parameters that are not frozen."""
    return [p for p in model.parameters() if p.requires_grad]
