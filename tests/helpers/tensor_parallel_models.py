"""A GPT whole, split by labkit and split by PyTorch, trained on the same batches."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from labkit.models.gpt import GPT
from labkit.models.plans import gpt as gpt_plan
from labkit.tensor_parallel import (
    VocabularyParallelCrossEntropy,
    full_state_dict,
    parallelize_module,
    tensor_parallel,
)

F64 = torch.float64
VOCAB, CONTEXT, BATCH, WIDTH, LAYERS = 24, 12, 2, 24, 2


def gpt(seed, **options):
    """A float64 GPT with weights drawn from the seed."""
    torch.manual_seed(seed)
    settings = {"vocab": VOCAB, "context": CONTEXT, "layers": LAYERS, "heads": 12, "width": WIDTH}
    return GPT(**(settings | options)).to(F64)


def batches(steps, vocab):
    """[(tokens, targets)] of each step, (BATCH, CONTEXT) each."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocab, (steps, BATCH, CONTEXT + 1), generator=generator)
    return [(one[:, :-1], one[:, 1:]) for one in tokens]


def train(model, loss, steps=4, share=slice(None), vocab=VOCAB):
    """The losses of some steps of SGD with momentum. share: the part of each batch that this rank has."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for tokens, targets in batches(steps, vocab):
        optimizer.zero_grad()
        found = loss(model(tokens[share]), targets[share])
        found.backward()
        optimizer.step()
        losses.append(found.item())
    return losses


def whole_loss(logits, targets):
    """Cross-entropy of logits that are not split."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def furthest(ours, theirs):
    """The largest difference of two state dicts, or lists."""
    if isinstance(ours, dict):
        assert list(ours) == list(theirs)
        return max((ours[name] - theirs[name]).abs().max().item() for name in theirs)
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def alone(**options):
    """(losses, state dict) of the training on one process."""
    model = gpt(0, **options)
    losses = train(model, whole_loss)
    return losses, model.state_dict()


def split(rank, world_size, sequence=False, **options):
    """(losses, whole state dict) of the split model. Other weights on every rank at first; rank 0's count."""
    model = parallelize_module(gpt(rank, **options), None, gpt_plan(tensor_parallel, sequence))
    losses = train(model, VocabularyParallelCrossEntropy())
    return losses, full_state_dict(model)


def by_pytorch(rank, world_size, sequence=False):
    """The same plan, run by DTensor: differences of losses and weights."""
    from torch.distributed import tensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    theirs, ours = gpt(0, tied=False), gpt(0, tied=False)
    styles = SimpleNamespace(**{**vars(tensor), **vars(parallel)})
    parallel.parallelize_module(
        theirs, init_device_mesh("cpu", (world_size,)), gpt_plan(styles, sequence, whole_logits=True)
    )
    losses = train(theirs, whole_loss)
    whole = {name: getattr(p, "full_tensor", lambda p=p: p)().detach() for name, p in theirs.named_parameters()}
    parallelize_module(ours, None, gpt_plan(tensor_parallel, sequence, whole_logits=True))
    return furthest(train(ours, whole_loss), losses), furthest(full_state_dict(ours), whole)


class Recorded(nn.Dropout):
    """Dropout that keeps what it has dropped: [of each forward, bool]; it drops what is in given, if there is any."""

    given = ()

    def forward(self, x):
        y = super().forward(torch.ones_like(x))
        if len(self.given):
            drop, *self.given = self.given
            y = (~drop).to(x.dtype) / (1 - self.p)
        self.masks = [*getattr(self, "masks", ()), y.detach() == 0]
        return x * y
