"""Sums the gradients of a block's replicated parameters over the ranks, in one message.

    block     norm1 | attention | norm2 | mlp     each rank has a part of the tokens
    backward  <----------------------------- --   parts of the gradients of norms and biases
              one all-reduce of all of them, at the end of the block's backward

Each rank computes a part of these gradients: those of its tokens. A message for each parameter is
small, but all ranks wait in it for the slowest one. So a forward pre-hook of the block gives its
layers the parameters as outputs of one autograd node. Its backward runs when the last of their
gradients has arrived. A parameter that was replaced in the meantime, as FSDP does around smaller
units, and those of a layer that no block contains are summed at once.
Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023,
section 4.2.2 (norms on shards of the sequence).
"""

import torch

from labkit import comm
from labkit.tensor_parallel.placements import Move, Partial, Replicate
from labkit.tensor_parallel.tp_plan import runs


class SumGradients(torch.autograd.Function):
    """Parameters, unchanged. Backward sums their gradients over the ranks of an Axis."""

    @staticmethod
    def forward(ctx, axis, *parameters):
        ctx.axis = axis
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    def backward(ctx, *gradients):
        if torch.is_grad_enabled():  # for gradients of gradients
            return None, *(Move.apply(g, Partial(), Replicate(), ctx.axis) for g in gradients)
        flat = torch.cat([g.reshape(-1) for g in gradients])
        comm.all_reduce(flat, group=ctx.axis.group)
        parts = flat.split([g.numel() for g in gradients])
        return None, *(
            part.view_as(g).to(g.dtype) for part, g in zip(parts, gradients, strict=True)
        )


class Block:
    """Forward hooks of the module around `layers`, which have parameters_with_parts()."""

    def __init__(self, axis, layers):
        self.axis = axis
        self.layers = layers

    def before(self, module, inputs):
        found = {layer: trained(layer) for layer in self.layers}
        parameters = [p for of_layer in found.values() for p in of_layer]
        if not (torch.is_grad_enabled() and parameters):
            return
        summed = iter(SumGradients.apply(self.axis, *parameters))
        for layer, of_layer in found.items():
            self.axis.grouped[layer] = [(p, next(summed)) for p in of_layer]

    def after(self, module, inputs, output):
        for layer in self.layers:
            self.axis.grouped.pop(layer, None)


def trained(layer):
    """Return those parameters with parts of gradients that need a gradient, as a list."""
    return [p for p in layer.parameters_with_parts().values() if p.requires_grad]


def with_sums(layer):
    """Return {name: parameter} of a layer, for which backward sums the ranks' gradients."""
    named = layer.parameters_with_parts()
    parameters = trained(layer)
    if layer.axis.size == 1 or not parameters:
        return named
    pairs = layer.axis.grouped.pop(layer, [])
    if [id(p) for p, _ in pairs] != [*map(id, parameters)]:
        pairs = zip(parameters, SumGradients.apply(layer.axis, *parameters), strict=True)
    summed = {id(p): output for p, output in pairs}
    return {name: summed.get(id(p), p) for name, p in named.items()}


def group_sums(module, parts, axis):
    """Register the hooks of Block on modules that contain several layers. parts: {name: layer}."""
    layers = {name: part for name, part in parts.items() if hasattr(part, "parameters_with_parts")}
    layers = {name: layer for name, layer in layers.items() if layer.parameters_with_parts()}
    blocks = {}
    for name in layers:
        blocks.setdefault(block_around(module, name, layers), []).append(layers[name])
    for name, inside in blocks.items():
        if len(inside) > 1:
            hooks = Block(axis, inside)
            block = module.get_submodule(name)
            block.register_forward_pre_hook(hooks.before)
            block.register_forward_hook(hooks.after, always_call=True)


def block_around(module, name, layers):
    """Return the name of the nearest module with a forward and several of the layers, or ""."""
    while name:
        name = name.rpartition(".")[0]
        inside = [other for other in layers if other.startswith(f"{name}." if name else "")]
        if len(inside) > 1 and runs(module.get_submodule(name)):
            return name
    return ""
