"""Tensor parallelism: every rank has all tokens and a part of every matrix.

    x --- f --- [ A: some columns ] --- GeLU --- [ B: the same rows ] --- g --- y      rank 0
      --- f --- [ A: the others   ] --- GeLU --- [ B: the others    ] --- g ---        rank 1

        f   forward: nothing       backward: all-reduce   each rank's part adds to the gradient of x
        g   forward: all-reduce    backward: nothing      y is the sum of the ranks' products

Between the two layers nothing is sent: GeLU works on each number, attention on each head.
A block is two such pairs: 4 all-reduces a step of (tokens x width) numbers, so each rank sends
4 x 2 (n-1)/n x those bytes, and waits for them: nothing can be computed meanwhile. So the axis
wants the fastest links. Held: 1/n of the matrices, their gradients and what is between the layers.
Shoeybi et al., Megatron-LM, 2019, section 3; Narayanan et al., SC 2021 (why inside a node).
"""

from torch import nn

from labkit.replicas import check_ranks
from labkit.tensor_parallel.parallel_linear import (
    ColumnEmbedding,
    ColumnLinear,
    PaddedColumnLinear,
    RowEmbedding,
    RowLinear,
)
from labkit.tensor_parallel.placements import Axis, Replicate, Shard
from labkit.tensor_parallel.sequence_parallel_layers import SequenceParallel
from labkit.tensor_parallel.tp_plan import (
    InitialValues,
    Style,
    check_heads,
    check_run,
    check_ties,
    matches,
    same_on_all,
)
from labkit.tensor_parallel.tp_state_dict import (
    Cut,
    cuts_of,
    full_state_dict,
    load_full_state_dict,
    take_part,
    whole_parameters,
)
from labkit.tensor_parallel.vocab_parallel_loss import (
    VocabularyParallelCrossEntropy,
    vocabulary_parallel_cross_entropy,
)
from labkit.zero import clip

__all__ = [
    "ColwiseParallel",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "Replicate",
    "RowwiseParallel",
    "SequenceParallel",
    "Shard",
    "VocabularyParallelCrossEntropy",
    "clip_grad_norm_",
    "full_state_dict",
    "load_full_state_dict",
    "parallelize_module",
    "vocabulary_parallel_cross_entropy",
    "whole_parameters",
]


def parallelize_module(module, group, parallelize_plan):
    """Split a module over the ranks of a group, in place. Collective; returns the module.

    parallelize_plan: a style for the module, or {pattern of names: style}, as PyTorch's function of
    this name takes it. group: also a DeviceMesh of one dimension. Values and random state become
    those of the group's rank 0 before. What belongs together (a column-parallel layer and the
    row-parallel one behind it) belongs in one call: between them each rank draws its own random
    numbers, at most until the module's forward ends, or that of each module in a list of them.
    A module may be on the meta device: call to_empty(device=...), then reset_parameters() of its
    layers or module.apply(initialiser), which draw what one process draws, whatever is drawn behind
    the split. Other initialisers (init_weights() of a model) belong inside of whole_parameters. The
    first forward raises RuntimeError where ranks drew the same slices.
    Clip with clip_grad_norm_ of this file: torch.nn.utils.clip_grad_norm_ would take the norm of
    this rank's slices for that of the model, and each rank would clip by another.
    Raises ValueError, before anything is changed, for a pattern that meets nothing and for what the
    ranks cannot share.
    """
    if hasattr(group, "get_group"):  # a DeviceMesh
        group = group.get_group()
    check_ranks("parallelize_module", group)
    axis = Axis(group)
    plan = parallelize_plan if isinstance(parallelize_plan, dict) else {"": parallelize_plan}
    chosen = matches(module, plan)
    for name, part, style in chosen:
        if not isinstance(style, Style):
            raise TypeError(f"{name}: {type(style).__name__} is no style of labkit.tensor_parallel")
        style.check(name or type(part).__name__, part, axis)
    run = check_run(module, chosen)
    check_heads(module, chosen, axis)
    check_ties(module, chosen)
    same_on_all(module, axis)
    unborn = any(p.is_meta for p in module.parameters())
    for _, part, style in chosen:
        style.apply(part, axis)
    for part in run:
        if unborn:
            part.register_forward_pre_hook(InitialValues(axis))
        part.register_forward_hook(lambda *_: axis.draws.alike(), always_call=True)
    return module


def clip_grad_norm_(module, max_norm, norm_type=2.0):
    """Clip the norm of all gradients of a split module to max_norm; returns it, float64.

    Collective. As torch.nn.utils.clip_grad_norm_ of the whole module in one process: slices of all
    ranks count, and whatever the ranks hold alike counts once.
    """
    cuts = cuts_of(module)
    axis = next(cut.axis for cut in cuts.values())
    copies = {p: 1 if p in cuts else axis.size for p in module.parameters()}
    device = next(iter(copies)).device
    return clip.clip_grad_norm_(copies, max_norm, norm_type, axis.group, device)


class LayerStyle(Style):
    """A linear layer or an embedding becomes a part of one."""

    def layer(self, module):
        return {nn.Linear: self.linear, nn.Embedding: self.embedding}.get(type(module))

    def leaves_shards(self, module):
        logits = self.layer(module) is PaddedColumnLinear  # nobody draws behind them
        return isinstance(self.target, Shard) and not logits

    def check(self, name, module, axis):
        layer = self.layer(module)
        if layer is None:
            what = f"{name} is a {type(module).__name__}"
            raise ValueError(
                f"{what}: {type(self).__name__} splits nn.Linear and nn.Embedding, and nothing "
                "that is derived from them, whose forward it would replace"
            )
        for word in ("max_norm", "sparse", "scale_grad_by_freq"):
            if getattr(module, word, None):
                raise ValueError(f"{name} has {word}: it cannot be split")
        if getattr(module, layer.shared) % axis.size and not layer.padded:
            many = f"{layer.shared}={getattr(module, layer.shared)}"
            hint = "; logits they can: say output_layouts" if layer is ColumnLinear else ""
            raise ValueError(f"{name}: {axis.size} ranks cannot share {many}{hint}")

    def apply(self, module, axis):
        module.__class__ = layer = self.layer(module)  # in place, as fully_shard does it
        module.axis, module.source, module.target = axis, self.source, self.target
        length = getattr(module, layer.shared)
        for word, dim in layer.cuts.items():
            parameter = getattr(module, word)
            # a tied one has been cut already
            if parameter is not None and parameter.shape[dim] == length:
                take_part(parameter, Cut(dim, axis, length))


class ColwiseParallel(LayerStyle):
    """Rows of PyTorch's weight: a rank has some outputs; those of all, if output_layouts says so.

    input_layouts: Replicate(), or Shard(dim): gathered first. output_layouts: Shard(-1), or
    Replicate(). Where it is given, a linear layer's outputs are taken for logits, which need not be
    a multiple of the ranks: shards are padded with -inf, the whole has no padding.
    """

    embedding = ColumnEmbedding

    def cuts_heads(self):
        return isinstance(self.target, Shard)

    def __init__(self, *, input_layouts=None, output_layouts=None, use_local_output=True):
        self.source, self.target = input_layouts or Replicate(), output_layouts or Shard(-1)
        self.linear = PaddedColumnLinear if output_layouts else ColumnLinear


class RowwiseParallel(LayerStyle):
    """Columns of PyTorch's weight, or words of an embedding: the ranks' outputs are summed.

    Words need not be a multiple of the ranks: the last ranks are padded with zeros.
    input_layouts: Shard(-1), or Replicate(): the own part is taken; tokens are always whole.
    output_layouts: Replicate(), or Shard(dim): each rank gets the sum of its part.
    """

    linear, embedding = RowLinear, RowEmbedding

    def cuts_heads(self):
        return isinstance(self.source, Shard)

    def __init__(self, *, input_layouts=None, output_layouts=None, use_local_output=True):
        self.source, self.target = input_layouts or Shard(-1), output_layouts or Replicate()


class PrepareModuleInput(Style):
    """A module's inputs in other layouts; layers below that take such a tensor share it.

    Attention with query, key and value of their own has three layers with one input: their
    gradients are summed first, and sent once (with Shard(dim): gathered once, too).
    input_layouts, desired_input_layouts: of all positional inputs, a layout or a tuple of them,
    with None for what stays as it is. input_kwarg_layouts, desired_input_kwarg_layouts: {name:
    layout} of those given by keyword. As PyTorch's of this name.
    Raises ValueError where the two have not the same length or names, and, at the call, where there
    are not as many inputs as layouts.
    """

    def __init__(
        self,
        *,
        input_layouts=None,
        desired_input_layouts=None,
        input_kwarg_layouts=None,
        desired_input_kwarg_layouts=None,
        use_local_output=False,
    ):
        self.moves = pairs("input_layouts", input_layouts, desired_input_layouts)
        named, desired = input_kwarg_layouts or {}, desired_input_kwarg_layouts or {}
        if named.keys() != desired.keys():
            raise ValueError(
                f"input_kwarg_layouts name {sorted(named)}, and desired_input_kwarg_layouts "
                f"{sorted(desired)}: name the same"
            )
        self.named = {name: (layout, desired[name]) for name, layout in named.items()}

    def apply(self, module, axis):
        def before(module, inputs, named):
            axis.prepared[module] = shared = []

            def moved(x, way):
                source, target = way
                if source is None or target is None:
                    return x
                if target != Replicate():
                    return axis.move(x, source, target)
                shared.append(axis.prepare(x, source))
                return shared[-1][0]

            if self.moves:
                inputs = tuple(map(moved, as_many(module, "input", inputs, self.moves), self.moves))
            if absent := self.named.keys() - named.keys():
                raise ValueError(f"{type(module).__name__}: no input {sorted(absent)} by keyword")
            return inputs, named | {
                name: moved(named[name], self.named[name]) for name in self.named
            }

        def after(module, inputs, output):
            axis.prepared.pop(module, None)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)


class PrepareModuleOutput(Style):
    """A module's outputs in other layouts, of all of them: a layout or a tuple, None: as it is.

    As PyTorch's of this name. Raises ValueError as PrepareModuleInput does.
    """

    def __init__(self, *, output_layouts, desired_output_layouts, use_local_output=True):
        self.moves = pairs("output_layouts", output_layouts, desired_output_layouts)

    def apply(self, module, axis):
        def after(module, inputs, outputs):
            several = outputs if isinstance(outputs, tuple) else (outputs,)
            several = as_many(module, "output", several, self.moves)
            moved = tuple(
                x if None in way else axis.move(x, *way)
                for x, way in zip(several, self.moves, strict=True)
            )
            return moved if len(moved) > 1 else moved[0]

        module.register_forward_hook(after)


class PrepareModuleInputOutput(Style):
    """Both PrepareModuleInput and PrepareModuleOutput of one module, with the arguments of both."""

    def __init__(
        self,
        *,
        output_layouts,
        desired_output_layouts,
        use_local_input=False,
        use_local_output=True,
        **inputs,
    ):
        self.input = PrepareModuleInput(**inputs)
        self.output = PrepareModuleOutput(
            output_layouts=output_layouts, desired_output_layouts=desired_output_layouts
        )

    def apply(self, module, axis):
        self.input.apply(module, axis)
        self.output.apply(module, axis)


def pairs(word, layouts, desired):
    """[(layout, desired layout)] of a single one or of tuples of them."""
    layouts, desired = map(several, (layouts, desired))
    if len(layouts) != len(desired):
        raise ValueError(
            f"{word} are {len(layouts)}, and desired_{word} {len(desired)}: one each is needed"
        )
    return list(zip(layouts, desired, strict=True))


def several(layouts):
    if layouts is None:
        return ()
    return layouts if isinstance(layouts, tuple) else (layouts,)


def as_many(module, word, values, moves):
    if len(values) != len(moves):
        raise ValueError(
            f"{type(module).__name__}: {len(values)} {word}s by position, and {len(moves)} "
            f"{word}_layouts: say None for what stays as it is"
        )
    return values
