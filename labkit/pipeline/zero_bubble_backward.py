"""Backward in two parts: B, the gradient of a stage's input, and later W, those of its weights.

    x ---- multiply ---- gelu ---- multiply ---- y          a joint: a node of the graph on the way
            w1 ^ joint              w2 ^ joint              from y to x, which a weight meets

B goes from y to x, past all weights, and keeps the gradient that arrives at each joint. W goes from
each joint to its weights. Together they are one backward: nothing is computed twice, except that
  - a weight met at several joints has W go through the whole stage again, and so has a stage whose
    input wants no gradient (the first): there B does nothing and W everything;
  - an autograd.Function in Python computes all its gradients both times;
  - what was checkpointed is computed again in B and once more in W.
Held from F to W: all activations, and in between also the gradients at the joints.
Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2.
"""

from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


class Later(NamedTuple):
    """What W needs. joints: [(node, the gradients that came to it, its weights)]; rest: weights."""

    output: torch.Tensor
    gradient: torch.Tensor | None
    joints: list
    rest: list


def backward_of_input(output, x, gradient):
    """(the gradient of x, or None, and a Later). x: a leaf; gradient: of output, None for 1."""
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
        (found,) = torch.autograd.grad(output, x, gradient, retain_graph=True, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    met = [(node, arrived[node], weights) for node, weights in joints.items() if node in arrived]
    return found, Later(output, gradient, met, rest)


def backward_of_weights(later):
    """Add the weights' gradients to their .grad."""
    if later.rest:
        more = bool(later.joints)
        torch.autograd.backward(later.output, later.gradient, more, inputs=later.rest)
    for node, gradients, weights in later.joints:
        came = [(GradientEdge(node, i), g) for i, g in enumerate(gradients) if g is not None]
        edges, arrived = zip(*came, strict=True)
        torch.autograd.backward(edges, arrived, inputs=weights)


def find_joints(root, end):
    """({node: the weights that meet there}, the weights that meet at several nodes)."""
    on_way, order = {end: True}, topological(root)
    for node in order:  # what is below a node comes before it
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
    """All nodes from the root down, each after everything below it."""
    order, seen, stack = [], set(), [(root, False)]
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
    """The leaves below a node."""
    return {node.variable for node in topological(root) if hasattr(node, "variable")}
