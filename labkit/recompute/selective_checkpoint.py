"""Selective recomputation: hold what some operators gave, so that it is not computed again.

    first run      x -> norm -> [matmul] -> gelu -> [matmul] -> dropout   held: what is in brackets
    second run     x -> norm ->  held    -> gelu ->  held    -> dropout   computed: the cheap rest

The operators are seen below autograd, where a linear layer is one addmm: both runs build the same
graph above them.
Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023,
section 5.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from labkit.recompute.rng_and_autocast import set_random_state

aten = torch.ops.aten
PRODUCTS = {
    *(aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.convolution),
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
}


def choose_policy(keep):
    """The function operator -> bool that `keep` means, or None. Raises ValueError for others."""
    if keep == "matmul":
        return lambda operator: operator.overloadpacket in PRODUCTS
    if keep is None or callable(keep):
        return keep
    raise ValueError(
        f'keep={keep!r}: it is None, "matmul", '
        "or a function of an operator that says whether to hold"
    )


class Keep(TorchDispatchMode):
    """Around the first run. finish() gives [(operator, result, random state afterwards)]."""

    def __init__(self, policy, surroundings):
        super().__init__()
        self.policy, self.surroundings, self.kept = policy, surroundings, []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if self.policy(operator):
            # What is not run again does not draw again; what follows must see the draws as made.
            draws = torch.Tag.nondeterministic_seeded in operator.tags
            self.kept.append(
                (operator, result, self.surroundings.random_state() if draws else None)
            )
        return result

    def finish(self):
        """Raises RuntimeError where a held result is no longer what the operator gave."""
        kept, self.kept = self.kept, []
        return [
            (operator, tree_map_only(torch.Tensor, unchanged(operator), r), state)
            for operator, r, state in kept
        ]


def unchanged(operator):
    """A function tensor -> the tensor off its graph; an error where it was written to later."""

    def check(tensor):
        if tensor._version:
            raise RuntimeError(
                f"the result of {operator} was changed in place afterwards, so it cannot be kept: "
                "use the form that is not in place, or leave this operator out of keep"
            )
        return tensor.detach()

    return check


class Reuse(TorchDispatchMode):
    """Around the second run: what is held takes the place of what the operators would compute."""

    def __init__(self, policy, kept):
        super().__init__()
        self.policy, self.kept = policy, iter(kept)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if not self.policy(operator):
            return operator(*args, **(kwargs or {}))
        held, result, random_state = next(self.kept, (None, None, None))
        if held is not operator:
            raise RuntimeError(
                f"the checkpointed function came to {operator} where it had come to {held} in "
                "forward: it must do the same both times"
            )
        if random_state is not None:
            set_random_state(random_state)
        return tree_map_only(torch.Tensor, torch.Tensor.detach, result)
