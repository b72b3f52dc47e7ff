"""Selective recomputation: hold the results of some operators, and recompute the others.

    first run      x -> norm -> [matmul] -> gelu -> [matmul] -> dropout   held: results in brackets
    second run     x -> norm ->  held    -> gelu ->  held    -> dropout   computed: the cheap rest

Operators are intercepted below autograd, where a linear layer is one addmm. Both runs build the
same graph above them.
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
    """Return the function operator -> bool for keep="matmul" or a function; None for None.

    Raises ValueError for other values.
    """
    if keep == "matmul":
        return lambda operator: operator.overloadpacket in PRODUCTS
    if keep is None or callable(keep):
        return keep
    raise ValueError(f'keep={keep!r} must be None, "matmul", or a function operator -> bool')


class Keep(TorchDispatchMode):
    """The mode of the first run: holds the results of the operators that the policy selects."""

    def __init__(self, policy, surroundings):
        super().__init__()
        self.policy, self.surroundings, self.kept = policy, surroundings, []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        if self.policy(operator):
            # A held operator does not draw again, so the state after its draws is restored.
            draws = torch.Tag.nondeterministic_seeded in operator.tags
            self.kept.append(
                (operator, result, self.surroundings.random_state() if draws else None)
            )
        return result

    def finish(self):
        """Return [(operator, result, random state afterwards, or None if it draws no numbers)].

        Raises RuntimeError if a result was changed in place.
        """
        kept, self.kept = self.kept, []
        return [
            (operator, tree_map_only(torch.Tensor, unchanged(operator), r), state)
            for operator, r, state in kept
        ]


def unchanged(operator):
    """Return a function that detaches a tensor, or raises RuntimeError if it was written to."""

    def check(tensor):
        if tensor._version:
            raise RuntimeError(
                f"the result of {operator} was changed in place, so it cannot be kept: "
                "use an out-of-place operation, or exclude this operator from keep"
            )
        return tensor.detach()

    return check


class Reuse(TorchDispatchMode):
    """The mode of the second run: returns held results instead of running their operators.

    kept: from Keep.finish(). Raises RuntimeError if the operators differ from the first run's.
    """

    def __init__(self, policy, kept):
        super().__init__()
        self.policy, self.kept = policy, iter(kept)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if not self.policy(operator):
            return operator(*args, **(kwargs or {}))
        held, result, random_state = next(self.kept, (None, None, None))
        if held is not operator:
            raise RuntimeError(
                f"the checkpointed function called {operator} where it had called {held} in "
                "forward: it must do the same both times"
            )
        if random_state is not None:
            set_random_state(random_state)
        return tree_map_only(torch.Tensor, torch.Tensor.detach, result)
