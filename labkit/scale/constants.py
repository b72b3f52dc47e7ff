"""What the model of cost and memory cannot know: a few fitted constants, for all rows alike.

Each has a meaning, a unit and a spread: the least and the largest value it takes when the fit
leaves out one of the published sources, or one size of job or model, after another. None belongs
to a row or to a model. Written by `python -m labkit.scale.fit --write`; where the rows are
from: published/README.md.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """A fitted number. low, high: its spread, where the fit has been repeated without some rows."""

    value: float
    unit: str
    meaning: str
    low: float
    high: float


TIME = {
    "matmul_volta": Constant(0.6567, "of achievable", "products of V100 in a job", 0, 0),
    "matmul_ampere": Constant(0.8569, "of achievable", "products of A100 in a job", 0, 0),
    "matmul_hopper": Constant(0.713, "of achievable", "products of H100 and later", 0, 0),
    "edge": Constant(10.68, "elements", "a side of a product at which half its time is lost", 0, 0),
    "attention": Constant(0.305, "of peak", "fused attention, as on A100", 0, 0),
    "traffic": Constant(2.114, "of counted", "bytes that norms, sums and gates really move", 0, 0),
    "logits": Constant(55.61, "byte/element", "what the loss moves for each logit", 0, 0),
    "host": Constant(4.33, "ms", "launching a layer of a split model, forward and backward", 0, 0),
    "contention": Constant(2.201, "ms", "more of it per rank of tp, pp crossing nodes", 0, 0),
    "straggle": Constant(0.3618, "ms", "a split layer waits for ranks on each other node", 0, 0),
    "crowding": Constant(0.1218, "per doubling", "what a ring loses as its nodes double", 0, 0),
    "exposed": Constant(0.4928, "of the shorter", "what overlap of messages does not hide", 0, 0),
    "data_exposed": Constant(0.8156, "of the messages", "gradients' messages that are waited for", 0, 0),
    "tensor_exposed": Constant(0.8329, "of the messages", "tp's messages that are waited for", 0, 0),
}
MEMORY = {
    "saved": Constant(1.391, "of counted", "activations kept, copies that nobody needs included", 0, 0),
    "logits_held": Constant(8.1, "byte/element", "logits, their softmax and gradients", 0, 0),
    "runtime": Constant(0.418, "GiB", "workspaces, buffers of messages, the rest", 0, 0),
    "whole": Constant(7.54, "byte/parameter", "what ZeRO-1 leaves whole", 0, 0),
    "limit": Constant(1.06, "of memory", "what a job can fill before it runs out", 0, 0),
}
