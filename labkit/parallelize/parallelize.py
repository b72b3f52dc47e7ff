"""Several kinds of parallelism at once: each axis of a mesh splits one dimension of a step.

    Mesh({"pp": 2, "dp": 2, "tp": 2})        axis   cuts       its groups send, a rank and step

    pp 0   dp 0   [ tp 0 | tp 1 ]            pp     layers     activations, at a boundary of stages
           dp 1   [ tp 0 | tp 1 ]            dp     samples    gradients, during backward
    pp 1   dp 0   [ tp 0 | tp 1 ]            cp     tokens     keys and values, in every block
           dp 1   [ tp 0 | tp 1 ]            ep     experts    tokens, to and from, 4 a block
                                             tp     matrices   activations, 4 a block, exposed

Ranks of the last axis are neighbours: use it for the traffic that is largest and hardest to hide.
Held: 1/(pp tp) of the parameters, with FSDP 1/(pp dp cp tp), of experts 1/ep; of activations
1/(dp cp ep), inside split layers 1/tp of that. Ranks along ep have their own samples, as along dp.
Each algorithm gets the group of its axis and is unaware of the others. Four things span all axes:
the gradient norm, an overflow, the load of experts, and the full state.
Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM,
SC 2021, section 3; Liang et al., TorchTitan, ICLR 2025, section 2.
"""

from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from labkit import comm
from labkit.attention.context_parallel import places, ring_attention
from labkit.checkpoint.dtensor_ranges import span
from labkit.checkpoint.shard_ranges import in_whole
from labkit.ddp import DDP
from labkit.ddp.wrapper import Wrapper
from labkit.fsdp import FSDP
from labkit.fsdp.sharding_strategy import compute_device
from labkit.fsdp.wrap_policy import materialise_alike
from labkit.ideas.data_parallel import average_gradients
from labkit.moe import mixtures, names_of_experts
from labkit.parallelize.mesh_metric import score
from labkit.parallelize.parallel_axes import AXES, attending, refuse
from labkit.pipeline import Pipeline, one_f_one_b
from labkit.pipeline.pipeline_schedules import routes
from labkit.pipeline.pipeline_stages import union
from labkit.pipeline.schedule_validation import check
from labkit.replicas import broadcast_tensors
from labkit.sampler import correct, evaluate
from labkit.tensor_parallel import parallelize_module
from labkit.tensor_parallel.tp_plan import met
from labkit.tensor_parallel.tp_state_dict import named_cuts
from labkit.zero.clip import clip_grad_norm_


def compose(module, mesh, plan, wrap=DDP):
    """Compose three of the five axes: each algorithm gets the group of its axis.

    plan: of tensor parallelism. wrap: DDP or FSDP. Inputs are this rank's samples and, of them, the
    tokens that `places` gives it; the module's forward takes positions=.
    """
    parallelize_module(module, mesh.group("tp"), plan)
    for part in module.modules():
        if hasattr(part, "attend"):
            part.attend = partial(ring_attention, group=mesh.group("cp"))
    return wrap(module, process_group=mesh.group("dp", "cp"))


# ---- the recipe, in order of application: one function an axis


def averaging_group(mesh):
    """Return the group of ranks with other samples or tokens for the same layers, or None."""
    axes = [axis for axis in ("dp", "cp", "ep") if axis in mesh.axes]
    return mesh.group(*axes) if axes else None


def first_names(module):
    """Return {name: the first name of the same tensor} for all names of the state dict."""
    first = {}
    tensors = module.state_dict(keep_vars=True)
    return {name: first.setdefault(tensor, name) for name, tensor in tensors.items()}


def share_values(module, device):
    """Broadcast the values of rank 0. Return True if they are on meta and must be made instead."""
    values = [*module.parameters(), *module.buffers()]
    if device.type != "meta" and any(tensor.is_meta for tensor in values):
        return True
    broadcast_tensors(values)
    return False


def apply_ep(module, mesh, replicas):
    """Spread the experts of each MoE along ep; return the names of this rank's experts.

    This is the first step, because the module is smaller afterwards. replicas: the group over which
    the load is counted.
    """
    spread = mesh.axes.get("ep", 1) > 1
    for _, part in mixtures(module):
        part.spread(mesh.group("ep") if spread else None, replicas)
    return set(names_of_experts(module)) if spread else set()


def apply_cp(module, mesh, attend):
    """Let each part with `attend` pass keys and values around the ranks of cp."""
    if mesh.axes.get("cp", 1) > 1:
        for part in attending(module):
            part.attend = partial(attend, group=mesh.group("cp"))


def cut_stages(module, mesh, stage, program, micro_batches, device):
    """Cut the blocks into stages; return ({number: stage} for the Pipeline, those of this rank).

    This is done before tensor parallelism, so that a rank shards and initialises only its own
    layers. Both results are this rank's stages, except on the meta device: there no other rank
    describes its outputs, so the Pipeline needs the stages of all ranks.
    """
    owner = check(program, mesh.axes["pp"], micro_batches)
    stages_a_pipeline = len(routes(program)[0])
    blocks = len(module.blocks) // stages_a_pipeline
    mine = sorted(number for number in owner if owner[number] == mesh.rank("pp"))
    built = {}
    for number in owner if device.type == "meta" else mine:
        begin = number % stages_a_pipeline * blocks
        built[number] = stage(module, range(begin, begin + blocks))
    return built, {number: built[number] for number in mine}


def apply_tp(parts, mesh, plan):
    """Shard the layers of the plan along tp. A stage uses the patterns that match its layers."""
    if mesh.axes.get("tp", 1) > 1:
        for part in parts:
            here = {pattern: style for pattern, style in plan.items() if met(part, pattern)}
            parallelize_module(part, mesh.group("tp"), here)


def apply_pp(built, mesh, program, micro_batches, loss, names):
    """Return the Pipeline of the stages of all ranks of pp. names: see first_names."""
    return Pipeline(
        built, mesh.group("pp"), program, micro_batches, loss, lambda number, name: names[name]
    )


def apply_dp(module, mesh, apart, names, wrap):
    """Average gradients along dp, cp and ep; return the wrappers, the outermost last, or [].

    This is the last step: the wrappers see the parameters that remain on this rank. apart: names of
    the experts. They differ along ep, so a second wrapper averages them along dp and cp only.
    """
    replicas = averaging_group(mesh)
    if replicas is None:
        return []
    if not apart:
        return [wrap(module, process_group=replicas)]
    module._ddp_params_and_buffers_to_ignore = apart
    inner = wrap(module, process_group=replicas)
    same_experts = [axis for axis in ("dp", "cp") if axis in mesh.axes]
    if all(mesh.axes[axis] == 1 for axis in same_experts):
        return [inner]
    inner._ddp_params_and_buffers_to_ignore = names.keys() - apart
    return [inner, wrap(inner, process_group=mesh.group(*same_experts))]


class Composed(Wrapper):
    """A module spread over a mesh, with the values of rank 0. Collective.

    module: on the meta device, each rank makes only its own stages, initialised by
        reset_parameters() with a seed for each name: the same on every mesh.
    mesh: axes among dp, cp, pp, ep, tp; a missing axis has size 1.
    plan: {pattern of names: style}, see labkit.tensor_parallel; required if tp > 1.
    wrap: a function (module, process_group=...), along dp, cp and ep together; default: DDP. Must
        be None with pp, where gradients are averaged after the last backward. With ep it is called
        once more, for the experts, along dp and cp.
    attend: if cp > 1, a function (query, key, value, group=..., **options) for each module with an
        attribute `attend`; the module's forward then takes positions=.
    stage: if pp > 1, a function (module, range of its `blocks`) -> stage, with the same names.
        stages: their number; default: one per rank. schedule, micro_batches, loss: see
        labkit.pipeline.
    Experts (labkit.moe, made with group=None) are spread along ep; their load is counted over all
    ranks. forward(input) takes this rank's samples and tokens (own_tokens). With pp there is only
    step(). Raises ValueError for combinations that are not supported, before anything is sent.
    """

    def __init__(
        self,
        module,
        mesh,
        plan=None,
        wrap=None,
        attend=ring_attention,
        stage=None,
        stages=None,
        schedule=one_f_one_b,
        micro_batches=1,
        loss=None,
    ):
        size = dict.fromkeys(AXES, 1) | dict(mesh.axes)
        refuse(module, size, plan, wrap, stage, stages)
        super().__init__(module)
        self.mesh = mesh
        self.size = size
        self.replicas = averaging_group(mesh)  # along which gradients are averaged, or None
        self.names = first_names(module)
        device = compute_device(module, mesh.group(next(iter(mesh.axes))))
        values_follow = share_values(module, device)

        self.apart = apply_ep(module, mesh, self.replicas)
        self.elsewhere = self.names.keys() - module.state_dict().keys()
        apply_cp(module, mesh, attend)
        if size["pp"] > 1:
            program = schedule(stages or size["pp"], micro_batches, size["pp"])
            built, own = cut_stages(module, mesh, stage, program, micro_batches, device)
        else:
            built = own = {0: module}
        if values_follow:
            materialise_alike(own.values(), device)
        # On the meta device the stages of all ranks are views of this one module.
        apply_tp([module] if device.type == "meta" else own.values(), mesh, plan)
        self.cuts = {  # {first name: Cut}
            self.names[name]: cut for part in own.values() for name, cut in named_cuts(part)
        }
        if size["pp"] > 1:
            self.pipeline = apply_pp(built, mesh, program, micro_batches, loss, self.names)
            self.senders = []
            self.module = nn.ModuleList(own.values())
        else:
            self.pipeline = None
            self.senders = apply_dp(module, mesh, self.apart, self.names, wrap or DDP)
            self.module = self.senders[-1] if self.senders else module

    def named_parameters(self, *args, **kwargs):
        if self.pipeline:
            return self.pipeline.named_parameters()
        return self.module.named_parameters(*args, **kwargs)

    # ---- one step

    def own_tokens(self, batch):
        """Return this rank's tokens of a batch: [B, T, ...] -> [B, T / cp, ...]."""
        if self.size["cp"] == 1:
            return batch
        return batch[:, places(batch.shape[1], self.mesh.group("cp")).to(batch.device)]

    def forward(self, input):
        if self.pipeline:
            raise RuntimeError("a pipeline interleaves forward and backward: call step()")
        if self.size["cp"] == 1:
            return self.module(input)
        positions = places(input.shape[1] * self.size["cp"], self.mesh.group("cp"))
        return self.module(input, positions=positions.to(input.device))

    def step(self, input, target, scale=1.0, weights=None):
        """Run forward and backward of a batch in the pipeline; return its mean loss on all ranks.

        scale, weights: see Pipeline.step. Every rank of the pipeline must pass both tensors.
        """
        loss = self.pipeline.step(input, target, scale=scale, weights=weights)
        if self.replicas is not None:
            average_gradients(self.parameters(), self.replicas)
        nothing = total = torch.zeros((), dtype=torch.float64, device=input.device)
        for rank in sorted({self.pipeline.owner[end] for end in self.pipeline.last}):
            part = nothing + (0.0 if loss is None else loss)
            comm.broadcast(part, rank, self.mesh.group("pp"))
            total = total + part
        return total

    def evaluate(self, dataset, metric=correct, batch_size=64, **options):
        """labkit.sampler.evaluate over the mesh, the same on all ranks. Collective."""
        shares = self.mesh.group(*(axis for axis in ("dp", "ep") if axis in self.mesh.axes))
        scored = partial(score, self, metric)
        return evaluate(self, dataset, metric, batch_size, shares, scored, **options)

    @contextmanager
    def no_sync(self):
        with ExitStack() as quiet:
            for sender in self.senders:
                quiet.enter_context(sender.no_sync())
            yield

    def clip_grad_norm_(self, max_norm, norm_type=2.0):
        """Clip the norm of all gradients to max_norm; return the norm before clipping, float64.

        Each gradient counts once. Collective, over all ranks of the mesh.
        """
        copies = {p: self.copies(name, p) for name, p in self.named_parameters()}
        device = next(iter(copies)).device
        return clip_grad_norm_(copies, max_norm, norm_type, None, device)

    def copies(self, name, parameter):
        """Return how many ranks hold the same part of a parameter as this rank."""
        ranks = dist.get_world_size()
        if name in self.cuts:
            ranks //= self.size["tp"]
        if name in self.apart:
            ranks //= self.size["ep"]
        if hasattr(parameter, "is_piece"):
            ranks //= self.size["dp"] * self.size["cp"]
        if self.pipeline:
            ranks = ranks // self.size["pp"] * self.pipeline.stages.copies(name)
        return ranks

    # ---- state dicts
    #
    #   axis   a rank holds                     in a checkpoint
    #   pp     some layers                      those names
    #   ep     some experts                     those names
    #   tp     rows, or columns, of a matrix    ranges of elements: checkpoint/shard_ranges.py
    #   dp     all, with FSDP a shard           written once, a part by each; the shard

    def state_dict(self, *args, **kwargs):
        """Return this rank's part under the names of the full model. See full_state_dict()."""
        if not self.pipeline:
            return super().state_dict(*args, **kwargs)
        state = self.pipeline.state_dict()
        return {name: state[first] for name, first in self.names.items() if first in state}

    def load_state_dict(self, state_dict, strict=True, assign=False):
        """Load this rank's part from a mesh with the same axes. See load_full_state_dict()."""
        if not self.pipeline:
            return super().load_state_dict(state_dict, strict, assign)
        return self.pipeline.load_state_dict(state_dict, strict)

    def places(self):
        """Return {name: the elements of the full tensor on this rank, as in Place after its name}.

        The value is None for tensors that only other ranks hold.
        """
        shards = self.module.places() if isinstance(self.module, FSDP) else {}
        found = dict.fromkeys(self.names)
        for name, tensor in self.state_dict().items():
            start, stop, shape = shards.get(name) or span(tensor)
            found[name] = start, stop, shape
            if self.names[name] in self.cuts:
                among = self.replicas if name in shards else None
                found[name] = in_whole(self.cuts[self.names[name]], start, stop, shape, among)
        return found

    def full_state_dict(self):
        """Return the state_dict() of the unsharded module, on every rank. Collective."""
        if self.pipeline:
            state = self.pipeline.state_dict()
        else:
            state = getattr(self.module, "full_state_dict", self.module.state_dict)()
        if self.apart:
            own = {name: state[name] for name in sorted(self.apart)}
            state |= union(own, self.mesh.group("ep"), next(self.parameters()).device)
        for name, cut in self.cuts.items():
            state[name] = cut.whole(state[name].detach())
        if self.pipeline:
            state = union(state, self.mesh.group("pp"), next(self.parameters()).device)
        return {name: state[first] for name, first in self.names.items()}

    def load_full_state_dict(self, state_dict):
        """Load this rank's part of a full state dict, of any mesh.

        Raises RuntimeError for a missing or unexpected name.
        """
        for what, wrong in (
            ("missing", [name for name in self.names if name not in state_dict]),
            ("unexpected", [name for name in state_dict if name not in self.names]),
        ):
            if wrong:
                raise RuntimeError(f"the state dict is not of this model: {what} {wrong[0]!r}")
        own = {name: state_dict[name] for name in self.names if name not in self.elsewhere}
        for name, first in self.names.items():
            if first in self.cuts:
                own[name] = self.cuts[first].part(own[name], name)
        holder = self.pipeline or self.module
        getattr(holder, "load_full_state_dict", holder.load_state_dict)(own)
