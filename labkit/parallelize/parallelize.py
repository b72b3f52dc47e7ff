"""Composition: ranks as a mesh, each axis of which cuts something else of one training step.

    Mesh({"pp": 2, "dp": 2, "tp": 2})        axis   cuts       its groups send, a rank and step

    pp 0   dp 0   [ tp 0 | tp 1 ]            pp     layers     activations, at a boundary of stages
           dp 1   [ tp 0 | tp 1 ]            dp     samples    gradients, while backward goes on
    pp 1   dp 0   [ tp 0 | tp 1 ]            cp     tokens     keys and values, in every block
           dp 1   [ tp 0 | tp 1 ]            ep     experts    tokens, to and from, 4 a block
                                             tp     matrices   activations, 4 a block, waited for

Ranks of the last axis are neighbours: there belongs what sends most and can hide least. Held: of
parameters 1/(pp tp), with FSDP 1/(pp dp cp tp), of experts 1/ep; of activations 1/(dp cp ep), those
inside of split layers 1/tp of that. Along ep ranks have samples of their own, as along dp. No
algorithm knows of the others: each is given the group of its axis. What must be seen over all axes
is the norm of the gradients, an overflow, the load of experts, and the state of the whole.
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
from labkit.checkpoint.mesh_state import MeshModel
from labkit.ddp import DDP
from labkit.fsdp.sharding_strategy import compute_device
from labkit.fsdp.wrap_policy import materialise_alike
from labkit.ideas.data_parallel import average_gradients
from labkit.moe import mixtures, names_of_experts
from labkit.parallelize.parallel_axes import AXES, attending, refuse
from labkit.parallelize.score import score
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
    """The idea: from the inside out, each algorithm gets the group of its axis. Three of the five.

    plan: of tensor parallelism. wrap: DDP or FSDP. Inputs are this rank's samples and, of them, the
    tokens that `places` gives it; the module's forward takes positions=.
    """
    parallelize_module(module, mesh.group("tp"), plan)
    for part in module.modules():
        if hasattr(part, "attend"):
            part.attend = partial(ring_attention, group=mesh.group("cp"))
    return wrap(module, process_group=mesh.group("dp", "cp"))


class Composed(MeshModel):
    """A whole module spread over a mesh; its values become those of rank 0. Collective.

    module: of one on the meta device each rank makes its own stages alone, with values of their
        reset_parameters(), drawn by name: the same on every mesh.
    mesh: axes of dp, cp, pp, ep, tp; one that it does not have has size 1.
    plan: {pattern of names: style}, see labkit.tensor_parallel; needed where tp is larger than 1.
    wrap: a function (module, process_group=...), along dp, cp and ep together: DDP if None. With pp
        it is None: gradients are averaged after the last backward. With ep it is called once more,
        for the experts, along dp and cp.
    attend: where cp is larger than 1, a function (query, key, value, group=..., **options) for each
        module that has `attend`; the module's forward then takes positions=.
    stage: where pp is larger than 1, a function (module, range of its `blocks`) -> that stage, with
        the same names. stages: how many, one a rank if None. schedule, micro_batches, loss: see
        labkit.pipeline.
    Experts (labkit.moe, made with group=None) are spread along ep; balance is counted over all.
    forward(input) is the module's, of this rank's samples and tokens (own_tokens). With pp there is
    only step(). Raises ValueError for what cannot be combined, before anything is sent.
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
        first = {}  # of each tensor the first of its names
        tensors = module.state_dict(keep_vars=True)
        names = {name: first.setdefault(tensor, name) for name, tensor in tensors.items()}
        device = compute_device(module, mesh.group(next(iter(mesh.axes))))
        values = [*module.parameters(), *module.buffers()]
        unborn = device.type != "meta" and any(tensor.is_meta for tensor in values)
        broadcast_tensors([] if unborn else values)
        averaging = [axis for axis in ("dp", "cp", "ep") if axis in mesh.axes]
        replicas = mesh.group(*averaging) if averaging else None
        for _, one in mixtures(module):
            one.spread(mesh.group("ep") if size["ep"] > 1 else None, replicas)
        apart = set(names_of_experts(module)) if size["ep"] > 1 else set()
        elsewhere = names.keys() - module.state_dict().keys()
        if size["cp"] > 1:
            for part in attending(module):
                part.attend = partial(attend, group=mesh.group("cp"))
        own = {0: module}
        if size["pp"] > 1:
            program = schedule(stages or size["pp"], micro_batches, size["pp"])
            owner = check(program, size["pp"], micro_batches)
            length = len(routes(program)[0])
            blocks = len(module.blocks) // length
            mine = sorted(number for number in owner if owner[number] == mesh.rank("pp"))
            alone = device.type == "meta"  # nobody will tell of the other stages
            begin = {number: number % length * blocks for number in (owner if alone else mine)}
            built = {n: stage(module, range(at, at + blocks)) for n, at in begin.items()}
            own = {number: built[number] for number in mine}
        if unborn:
            materialise_alike(own.values(), device)
        if size["tp"] > 1:
            for part in [module] if device.type == "meta" else own.values():
                here = {pattern: style for pattern, style in plan.items() if met(part, pattern)}
                parallelize_module(part, mesh.group("tp"), here)
        cuts = {names[name]: cut for part in own.values() for name, cut in named_cuts(part)}
        pipeline, senders = None, []
        if size["pp"] > 1:
            by_name, ring = (lambda number, name: names[name]), mesh.group("pp")
            pipeline = Pipeline(built, ring, program, micro_batches, loss, by_name)
            module = nn.ModuleList(own.values())
        elif averaging:
            if apart:
                module._ddp_params_and_buffers_to_ignore = apart
            senders = [(wrap or DDP)(module, process_group=replicas)]
            if apart and size["dp"] * size["cp"] > 1:  # around it, one for the experts alone
                senders[0]._ddp_params_and_buffers_to_ignore = names.keys() - apart
                same = mesh.group(*(axis for axis in averaging if axis != "ep"))
                senders.append((wrap or DDP)(senders[0], process_group=same))
            module = senders[-1]
        super().__init__(module)
        self.size, self.mesh, self.replicas, self.pipeline = size, mesh, replicas, pipeline
        self.names, self.cuts = names, cuts  # cuts: {first name: Cut}
        self.senders, self.apart, self.elsewhere = senders, apart, elsewhere

    def named_parameters(self, *args, **kwargs):
        if self.pipeline:
            return self.pipeline.named_parameters()
        return self.module.named_parameters(*args, **kwargs)

    # ---- one step

    def own_tokens(self, batch):
        """[B, T, ...] -> of these samples the tokens of this rank, [B, T / cp, ...]."""
        if self.size["cp"] == 1:
            return batch
        return batch[:, places(batch.shape[1], self.mesh.group("cp")).to(batch.device)]

    def forward(self, input):
        if self.pipeline:
            raise RuntimeError("a pipeline does forward and backward in turn: call step()")
        if self.size["cp"] == 1:
            return self.module(input)
        positions = places(input.shape[1] * self.size["cp"], self.mesh.group("cp"))
        return self.module(input, positions=positions.to(input.device))

    def step(self, input, target, scale=1.0, weights=None):
        """Forward and backward of a batch through the pipeline; its mean loss, on all ranks.

        scale, weights: see Pipeline.step. Every rank of the pipeline is given both tensors.
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
        """Clip the norm of all gradients to max_norm, each counted once; returns it, as before.

        Collective, over all ranks of the mesh.
        """
        copies = {p: self.copies(name, p) for name, p in self.named_parameters()}
        device = next(iter(copies)).device
        return clip_grad_norm_(copies, max_norm, norm_type, None, device)

    def copies(self, name, parameter):
        """How many ranks hold what this rank holds of a parameter."""
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

    def full_state_dict(self):
        """state_dict() of the whole module in one process, on every rank. Collective."""
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
        """Take this rank's part of the whole, whichever mesh it comes from."""
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
