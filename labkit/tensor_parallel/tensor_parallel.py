"""Tensor parallelism: every rank has all tokens and a part of every matrix.

    x --- f --- [ A: some columns ] --- GeLU --- [ B: the same rows ] --- g --- y      rank 0
      --- f --- [ A: the others   ] --- GeLU --- [ B: the others    ] --- g ---        rank 1

        f   forward: nothing       backward: all-reduce   sums the ranks' gradients of x
        g   forward: all-reduce    backward: nothing      y is the sum of the ranks' products

Nothing is sent between the two layers: GeLU works on each number, attention on each head.
A block has two such pairs: 4 all-reduces a step of (tokens x width) numbers. Each rank sends
4 x 2 (n-1)/n x those bytes. Backward computes weight gradients while f's messages travel; nothing
hides those of g, so this axis needs the fastest links.
Held: 1/n of the matrices, their gradients and the activations between the layers.
Shoeybi et al., Megatron-LM, 2019, section 3; Narayanan et al., SC 2021 (why inside a node).
"""

from torch import nn

from labkit.replicas import check_ranks
from labkit.tensor_parallel.grouped_sums import group_sums
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
    """Shard a module over the ranks of a group, in place. Collective; returns the module.

    parallelize_plan: a style for the module, or {pattern of names: style}, as in PyTorch's function
    of this name. group: also a DeviceMesh of one dimension. Values and random state become those of
    the group's rank 0. Shard a column-parallel layer and the row-parallel layer after it in one
    call: between them each rank draws its own random numbers, at most until the forward of the
    module ends, or of each module in a list.
    A module may be on the meta device: call to_empty(device=...), then reset_parameters() of its
    layers or module.apply(initialiser). These draw what one process draws. Other initialisers
    (init_weights() of a model) belong inside whole_parameters. The first forward raises
    RuntimeError if ranks drew the same slices.
    Clip with this package's clip_grad_norm_: torch.nn.utils.clip_grad_norm_ would take the norm of
    this rank's slices for the model's, and each rank would clip differently.
    Raises, before anything is changed, ValueError for a pattern that matches no module and for
    sizes that the ranks do not divide, and TypeError for another object than a style.
    """
    if hasattr(group, "get_group"):  # a DeviceMesh
        group = group.get_group()
    check_ranks("parallelize_module", group)
    axis = Axis(group)
    plan = parallelize_plan if isinstance(parallelize_plan, dict) else {"": parallelize_plan}
    chosen = matches(module, plan)
    for name, part, style in chosen:
        if not isinstance(style, Style):
            raise TypeError(
                f"{name}: {type(style).__name__} is not a style of labkit.tensor_parallel"
            )
        style.check(name or type(part).__name__, part, axis)
    run = check_run(module, chosen)
    check_heads(module, chosen, axis)
    check_ties(module, chosen)
    same_on_all(module, axis)
    unborn = any(p.is_meta for p in module.parameters())
    for _, part, style in chosen:
        style.apply(part, axis)
    group_sums(module, {name: part for name, part, _ in chosen}, axis)
    for part in run:
        if unborn:
            part.register_forward_pre_hook(InitialValues(axis))
        part.register_forward_hook(lambda *_: axis.rng.same_on_all(), always_call=True)
    return module


def clip_grad_norm_(module, max_norm, norm_type=2.0):
    """Clip the norm of a sharded module's gradients to max_norm; return the norm before, float64.

    Collective. Equal to torch.nn.utils.clip_grad_norm_ on the full module in one process: slices of
    all ranks count, and replicated gradients count once.
    """
    cuts = cuts_of(module)
    axis = next(cut.axis for cut in cuts.values())
    copies = {p: 1 if p in cuts else axis.size for p in module.parameters()}
    device = next(iter(copies)).device
    return clip.clip_grad_norm_(copies, max_norm, norm_type, axis.group, device)


class LayerStyle(Style):
    """A style that shards a linear layer or an embedding."""

    def layer(self, module):
        return {nn.Linear: self.linear, nn.Embedding: self.embedding}.get(type(module))

    def leaves_shards(self, module):
        logits = self.layer(module) is PaddedColumnLinear  # nothing draws random numbers after them
        return isinstance(self.target, Shard) and not logits

    def check(self, name, module, axis):
        layer = self.layer(module)
        if layer is None:
            raise ValueError(
                f"{name} is a {type(module).__name__}: {type(self).__name__} supports nn.Linear "
                "and nn.Embedding, not subclasses, whose forward it would replace"
            )
        for word in ("max_norm", "sparse", "scale_grad_by_freq"):
            if getattr(module, word, None):
                raise ValueError(f"{name} has {word}, which sharding does not support: unset it")
        if getattr(module, layer.shared) % axis.size and not layer.padded:
            hint = "; for logits pass output_layouts" if layer is ColumnLinear else ""
            raise ValueError(
                f"{name}: {layer.shared}={getattr(module, layer.shared)} must be divisible by "
                f"{axis.size} ranks{hint}"
            )

    def apply(self, module, axis):
        layer = self.layer(module)
        module.__class__ = layer  # in place, as in fully_shard
        module.axis = axis
        module.source = self.source
        module.target = self.target
        length = getattr(module, layer.shared)
        for word, dim in layer.cuts.items():
            parameter = getattr(module, word)
            # a tied parameter has been sharded already
            if parameter is not None and parameter.shape[dim] == length:
                take_part(parameter, Cut(dim, axis, length))


class ColwiseParallel(LayerStyle):
    """Shard rows of PyTorch's weight: a rank computes a part of the outputs.

    input_layouts: Replicate(), or Shard(dim), which is gathered first. output_layouts: Shard(-1),
    or Replicate(), which gathers the outputs. If it is given, a linear layer's outputs are logits.
    Their number need not be divisible by the ranks: shards are padded with -inf; gathered logits
    have no padding.
    """

    embedding = ColumnEmbedding

    def cuts_heads(self):
        return isinstance(self.target, Shard)

    def __init__(self, *, input_layouts=None, output_layouts=None, use_local_output=True):
        self.source = input_layouts or Replicate()
        self.target = output_layouts or Shard(-1)
        self.linear = PaddedColumnLinear if output_layouts else ColumnLinear


class RowwiseParallel(LayerStyle):
    """Shard columns of PyTorch's weight, or the vocabulary of an embedding; outputs are summed.

    The vocabulary need not be divisible by the ranks: the last ranks are padded with zeros.
    input_layouts: Shard(-1), or Replicate(), of which each rank uses its part; tokens are
    replicated.
    output_layouts: Replicate(), or Shard(dim): each rank gets its part of the sum.
    """

    linear = RowLinear
    embedding = RowEmbedding

    def cuts_heads(self):
        return isinstance(self.source, Shard)

    def __init__(self, *, input_layouts=None, output_layouts=None, use_local_output=True):
        self.source = input_layouts or Shard(-1)
        self.target = output_layouts or Replicate()


class PrepareModuleInput(Style):
    """Convert a module's inputs to other layouts; layers inside that use such a tensor share it.

    Attention with separate query, key and value has three layers with one input. Their gradients
    are summed first, and sent once; with Shard(dim) the input is gathered once, too.
    input_layouts, desired_input_layouts: of all positional inputs, a layout or a tuple of layouts;
    None leaves an input unchanged. input_kwarg_layouts, desired_input_kwarg_layouts: {name: layout}
    of keyword inputs. As PyTorch's class of this name.
    Raises ValueError if the two have different lengths or names, and, at the call, if the number of
    inputs is not that of the layouts.
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
        named = input_kwarg_layouts or {}
        desired = desired_input_kwarg_layouts or {}
        if named.keys() != desired.keys():
            raise ValueError(
                f"input_kwarg_layouts has {sorted(named)} but desired_input_kwarg_layouts has "
                f"{sorted(desired)}: use the same names"
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
                raise ValueError(f"{type(module).__name__}: missing keyword input {sorted(absent)}")
            return inputs, named | {
                name: moved(named[name], self.named[name]) for name in self.named
            }

        def after(module, inputs, output):
            axis.prepared.pop(module, None)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)


class PrepareModuleOutput(Style):
    """Convert a module's outputs to other layouts: one layout or a tuple; None changes nothing.

    As PyTorch's class of this name. Raises ValueError as PrepareModuleInput does.
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
    """PrepareModuleInput and PrepareModuleOutput for one module, with the arguments of both."""

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
    """Return [(layout, desired layout)] of single layouts or of tuples of them."""
    layouts, desired = map(several, (layouts, desired))
    if len(layouts) != len(desired):
        raise ValueError(
            f"{word} has {len(layouts)} layouts but desired_{word} has {len(desired)}: use as many"
        )
    return list(zip(layouts, desired, strict=True))


def several(layouts):
    if layouts is None:
        return ()
    return layouts if isinstance(layouts, tuple) else (layouts,)


def as_many(module, word, values, moves):
    if len(values) != len(moves):
        raise ValueError(
            f"{type(module).__name__}: {len(values)} positional {word}s but {len(moves)} "
            f"{word}_layouts: use None for a tensor that stays unchanged"
        )
    return values
