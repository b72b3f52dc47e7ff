"""Backward in two parts: B, the gradient of a stage's input, and W, those of its weights, later.

    x ---- multiply ---- gelu ---- multiply ---- y          a joint: a node of the graph between
            w1 ^ joint              w2 ^ joint              y and x, where a weight enters

B goes from y to x, past all weights, and keeps the gradient that arrives at each joint. W goes from
each joint to its weights. Together they are one backward. Nothing is computed twice, except:
  - If a weight enters at several joints, or the input needs no gradient (the first stage), W goes
    through the full stage again. In the first stage B does nothing and W everything.
  - A Python autograd.Function computes all its gradients both times.
  - A checkpointed part is recomputed in B and once more in W.
Held from F to W: all activations, and between B and W also the gradients at the joints.
Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2.
"""

from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Later(NamedTuple):
    """The inputs of W. joints: [(node, gradients that arrived, its weights)]; rest: weights."""

    output: torch.Tensor
    gradient: torch.Tensor | None
    joints: list
    rest: list


def backward_of_input(output, x, gradient):
    """Run B. Return (gradient of x or None, Later). x: a leaf. gradient: of output; None: 1."""
    if output.grad_fn is None:
        return gradient if output is x else None, Later(output, gradient, [], [])
    if x is None or not x.requires_grad:
        return None, Later(output, gradient, [], list(reach(output.grad_fn)))
    joints, rest = find_joints(output.grad_fn, get_gradient_edge(x).node)
    arrived = {}
    hooks = [
        node.register_prehook(lambda gradients, node=node: arrived.update({node: gradients}))
        for node in joints
    ]
    try:
        (x_gradient,) = torch.autograd.grad(
            output, x, gradient, retain_graph=True, allow_unused=True
        )
    finally:
        for hook in hooks:
            hook.remove()
    met = [(node, arrived[node], weights) for node, weights in joints.items() if node in arrived]
    return x_gradient, Later(output, gradient, met, rest)


def backward_of_weights(later):
    """Run W: add the gradients of the weights to their .grad. later: from backward_of_input()."""
    if later.rest:
        more = bool(later.joints)
        torch.autograd.backward(later.output, later.gradient, more, inputs=later.rest)
    for node, gradients, weights in later.joints:
        received = [(GradientEdge(node, i), g) for i, g in enumerate(gradients) if g is not None]
        edges, arrived = zip(*received, strict=True)
        torch.autograd.backward(edges, arrived, inputs=weights)


def find_joints(root, end):
    """Return ({node: weights that enter there}, weights that enter at several nodes)."""
    on_way = {end: True}
    order = topological(root)
    for node in order:  # children come before their parents
        on_way[node] = node is end or any(on_way[below] for below in children(node))
    if not on_way[root]:
        return {}, list(reach(root))
    met = {}
    for node in order:
        if on_way[node] and node is not end:
            off = set().union(*(reach(below) for below in children(node) if not on_way[below]))
            if off:
                met[node] = off
    times = {}
    for weights in met.values():
        for weight in weights:
            times[weight] = times.get(weight, 0) + 1
    several = {weight for weight, count in times.items() if count > 1}
    joints = {node: list(weights - several) for node, weights in met.items()}
    return {node: weights for node, weights in joints.items() if weights}, list(several)


def children(node):
    return [below for below, _ in node.next_functions if below is not None]


def topological(root):
    """Return all nodes below root, each after its children."""
    order = []
    seen = set()
    stack = [(root, False)]
    while stack:
        node, finished = stack.pop()
        if finished:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(below, False) for below in children(node)]
    return order


def reach(root):
    """Return the leaves below a node."""
    return {node.variable for node in topological(root) if hasattr(node, "variable")}
