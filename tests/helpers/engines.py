"""Engines that train one model on the same batches: one process, PyTorch, the lab, DeepSpeed and Accelerate.

An engine is a function of a Job. It returns the parameters after the job's steps, {name in the model: complete tensor}.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from labkit import models
from labkit.offload import Offloaded
from labkit.pipeline import Pipeline, one_f_one_b
from labkit.run import frameworks
from labkit.run.experiment import Experiment
from labkit.run.experiment_mesh import model_of
from labkit.sampler import Batches
from labkit.trainer import Trainer, make_optimizer, parallelize
from labkit.zero import ZeRO2

STEPS = 13
STRATEGIES = ("ddp_bucketed", "zero1", "zero2", "fsdp")


class Job:
    """A model, its batches and its optimizer, AdamW, for one of some ranks. All ranks start from the same weights.

    changes: fields of the Experiment other than those below.
    """

    def __init__(self, rank, ranks, **changes):
        fields = {"optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.01, "batch_size": 32}
        self.experiment = Experiment(**fields | changes)
        self.rank = rank
        self.ranks = ranks

    def model(self):
        torch.manual_seed(self.experiment.seed)
        return model_of(self.experiment)

    def optimizer(self, parameters):
        return torch.optim.AdamW(parameters, **self.options)

    @property
    def options(self):
        return {"lr": self.experiment.lr, "weight_decay": self.experiment.weight_decay}

    def shares(self, rank):
        """Yield a rank's (inputs, targets) of each step."""
        e = self.experiment
        dataset = models.data.load(e.data, e.model)
        batches = Batches(dataset, e.batch_size // self.ranks, self.ranks, rank, e.seed)
        for _ in range(STEPS):
            yield next(batches)

    def steps(self):
        """Yield this rank's micro-batches of each step, a list of (inputs, targets)."""
        for share in self.shares(self.rank):
            yield chunks(share, self.experiment.accumulation)

    def whole_batches(self, parts):
        """Yield the batch of all ranks of each step, in parts: a list of (inputs, targets)."""
        for shares in zip(*map(self.shares, range(self.ranks)), strict=True):
            yield chunks(joined(shares), parts)

    def config(self):
        """Return DeepSpeed's configuration, as the lab writes it."""
        return frameworks.write(self.experiment, "deepspeed", self.ranks).config


def chunks(batch, parts):
    return list(zip(*(column.chunk(parts) for column in batch), strict=True))


def joined(parts):
    return [torch.cat(column) for column in zip(*parts, strict=True)]


def fit(model, optimizer, steps, backward=torch.Tensor.backward):
    """Train a model on one micro-batch a step."""
    for ((inputs, targets),) in steps:
        optimizer.zero_grad()
        backward(F.cross_entropy(model(inputs), targets))
        optimizer.step()


def weights_of(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def one_process(job, parts=1):
    """One process on the batches of all ranks. parts: of a batch, whose gradients it adds up."""
    model = job.model()
    optimizer = job.optimizer(model.parameters())
    for batch in job.whole_batches(parts):
        optimizer.zero_grad()
        for inputs, targets in batch:
            (F.cross_entropy(model(inputs), targets) / parts).backward()
        optimizer.step()
    return weights_of(model)


def torch_ddp(job):
    model = DistributedDataParallel(job.model())
    fit(model, job.optimizer(model.parameters()), job.steps())
    return weights_of(model.module)


def torch_zero(job):
    model = DistributedDataParallel(job.model())
    fit(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **job.options), job.steps())
    return weights_of(model.module)


def torch_fsdp(job):
    from torch.distributed.fsdp import fully_shard

    model = job.model()
    for layer in model.layers[::2]:
        fully_shard(layer)
    fully_shard(model)
    fit(model, job.optimizer(model.parameters()), job.steps())
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def accelerates_ddp(job):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = job.model()
    model, optimizer = accelerator.prepare(model, job.optimizer(model.parameters()))
    assert isinstance(model, DistributedDataParallel)
    fit(model, optimizer, job.steps(), accelerator.backward)
    return weights_of(model.module)


def labs(job):
    """The lab's strategy of the experiment."""
    e = job.experiment
    model = parallelize(job.model(), e.strategy, models.unit(e.model), e.bucket_cap_mb)
    optimizer = make_optimizer(model, e.strategy, torch.optim.AdamW, e.bucket_cap_mb, **job.options)
    return trained(model, optimizer, job)


def trained(model, optimizer, job):
    """The parameters after the steps of a Trainer."""
    e = job.experiment
    trainer = Trainer(model, optimizer, F.cross_entropy, e.accumulation, clip=e.clip or None)
    for parts in job.steps():
        trainer.train_step(*joined(parts))
    state = getattr(model, "full_state_dict", model.state_dict)()
    return {name.removeprefix("module."): value.clone() for name, value in state.items()}


def start_deepspeed(folder):
    """Import DeepSpeed from a folder, on each rank. It sends with gloo."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    sys.path.insert(0, folder)
    import deepspeed

    # else it compiles an all-reduce for inference in shared memory, which takes a minute and needs a compiler
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)


def deepspeeds(job, **zero):
    """DeepSpeed, from the configuration that the lab writes. zero: more fields of zero_optimization."""
    import deepspeed

    config = job.config()
    config["zero_optimization"] |= zero
    model = job.model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for parts in job.steps():
        for inputs, targets in parts:
            engine.backward(F.cross_entropy(engine(inputs), targets))
            engine.step()
    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=config["zero_optimization"]["stage"] == 3):
        return weights_of(engine.module)


def labs_offload(job):
    """The lab's ZeRO-2, with Adam's states in a file."""
    with tempfile.TemporaryDirectory() as folder:

        class InFile(Offloaded):
            def __init__(self, params, **defaults):
                super().__init__(torch.optim.AdamW(params, **defaults), to=folder)

        model = job.model()
        return trained(model, ZeRO2(model.parameters(), InFile, **job.options), job)


FIRST = 3  # layers of the first of two stages


def in_model(stage, name):
    """The name in the model of a parameter: a slice of layers keeps their numbers."""
    return f"layers.{name}"


def labs_pipeline(job):
    layers = job.model().layers
    stage = dist.get_rank()
    stages = {stage: layers[FIRST:] if stage else layers[:FIRST]}
    parts = job.experiment.accumulation
    pipeline = Pipeline(stages, schedule=one_f_one_b, micro_batches=parts, loss=F.cross_entropy, names=in_model)
    optimizer = job.optimizer(pipeline.parameters())
    for ((inputs, targets),) in job.whole_batches(1):
        optimizer.zero_grad()
        pipeline.step(inputs.flatten(1), targets)
        optimizer.step()
    return pipeline.full_state_dict()


def deepspeeds_pipeline(job):
    """DeepSpeed's PipelineModule of two stages; the parameters of this rank's stage."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    layers = list(job.model().layers)
    model = PipelineModule(layers, num_stages=2, loss_fn=F.cross_entropy, partition_method="uniform")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=job.config())
    steps = job.whole_batches(job.experiment.accumulation)
    samples = ((inputs.flatten(1), targets) for parts in steps for inputs, targets in parts)
    for _ in range(STEPS):
        engine.train_batch(samples)
    return {f"layers.{name}": value for name, value in weights_of(model).items()}
