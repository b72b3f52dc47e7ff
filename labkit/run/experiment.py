"""What to train, as a validated, frozen dataclass: the same in Python, YAML and JSON.

    Experiment(model="gpt", strategy="ddp_bucketed", batch_size=64)       from Python
    experiment.to_yaml(path)   Experiment.from_yaml(path)                 to a file and back

A wrong value or unknown key raises here, with the allowed values, before any rank starts.
"""

import dataclasses
import difflib
import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

import yaml

from labkit.once_only import of_yaml, without_doubles
from labkit.run.choices import CHOICES, FITTING, HOOKED, HOROVOD

# Defaults of a GPT, which labkit.run.options sets; they hold with AdamW only.
GPT = {"optimizer": "adamw", "lr": 3e-3, "weight_decay": 0.1, "warmup_steps": 10}
SMALLEST = {
    "depth": 0,
    "width": 0,
    "batch_size": 1,
    "reference_batch": 1,
    "accumulation": 1,
    "steps": 1,
    "linear_until": 1,
    "warmup_steps": 0,
    "curriculum_from": 0,
    "curriculum_steps": 0,
    "bucket_cap_mb": 0,
    "block_ms": 0,
    "every": 1,
    "pipeline": 1,
    "context": 1,
    "tensor": 1,
    "expert": 1,
    "experts": 0,
    "memory_mb": 0,
    "lr": 0,
    "momentum": 0,
    "weight_decay": 0,
    "clip": 0,
    "seed": 0,
}


@dataclass(frozen=True)
class Experiment:
    """One training run. Raises ValueError for an invalid value, TypeError for a wrong type.

    model: a name of labkit.models, or "package.module:function" that returns a labkit.models.Task.
    depth, width: of the model, as in labkit.models.sizes; 0: those of its size.
    batch_size: of all ranks together. lr is the rate for reference_batch; lr_rule scales it to
    batch_size.
    clip: largest norm of all gradients together; 0: no clipping.
    schedule: of the learning rate after warmup_steps; cosine falls to 0 at the last step.
    curriculum: the schedule of the length of sequences (labkit.models.curriculum): in multiples of
        8 from curriculum_from tokens to complete sequences, in curriculum_steps steps; fixed_root
        grows with the square root. GPT only. Held-out sequences are complete.
    bucket_cap_mb: MiB, for DDP and ZeRO. precision: of weights and arithmetic; bf16 and fp16:
        autocast with fp32 weights; fp16 also uses a loss scale.
    nvme_path: folder of the strategy fsdp_nvme; "": the system's folder for temporary files.
    recompute: which units of the model (labkit.models.unit) run again in backward.
    comm_hook: how DDP sends its gradients: a hierarchical all-reduce or a compressor. Horovod has
        fp16 only, its Compression.fp16.
    every: number of steps between two averages of local SGD and DiLoCo.
    pipeline, context, tensor, expert: number of ranks along these axes of a mesh (GPT only). The
        remaining ranks are along dp and use the strategy. accumulation is the number of a
        pipeline's micro-batches.
    sequence_parallel: "on": between the layers that tensor shards, each rank has a part of the
        tokens.
    attention: PyTorch's scaled_dot_product_attention, or labkit.attention.flash_attention (GPT
        only; with context > 1 it is ring attention instead).
    experts: number of expert networks in each block of the GPT; each token goes to two of them.
        0: one plain network. The loss includes 0.01 x the load-balancing loss of each micro-batch,
        counted over all ranks.
    strategy="auto": the fastest by labkit.run.auto_strategy among those of labkit.memory that fit
        memory_mb MiB a rank (0: the free memory); with axes, on the rank with the largest peak. Not
        with experts. See also labkit.run.experiment_runner.estimate.
    compute="emulated": each unit sleeps instead of computing: block_ms milliseconds forward and
        twice that backward for the whole batch. A rank sleeps for its share of the batch. With axes
        or experts, a unit sleeps and then computes.
    """

    model: str = "mlp"
    size: str = "tiny"
    depth: int = 0
    width: int = 0
    data: str = "auto"
    strategy: str = "ddp_bucketed"
    batch_size: int = 64
    accumulation: int = 1
    optimizer: str = "sgd"
    lr: float = 0.05
    momentum: float = 0.9
    weight_decay: float = 0.0
    clip: float = 0.0
    reference_batch: int = 64
    lr_rule: str = "none"
    linear_until: int = 8192
    warmup_steps: int = 0
    schedule: str = "constant"
    curriculum: str = "none"
    curriculum_from: int = 0
    curriculum_steps: int = 0
    steps: int = 20
    precision: str = "fp32"
    recompute: str = "none"
    comm_hook: str = "none"
    every: int = 1
    pipeline: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    experts: int = 0
    sequence_parallel: str = "off"
    attention: str = "torch"
    memory_mb: float = 0.0
    bucket_cap_mb: float = 25.0
    nvme_path: str = ""
    compute: str = "real"
    block_ms: float = 0.0
    seed: int = 0

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is float and type(value) is int:
                object.__setattr__(self, field.name, float(value))
            elif type(value) is not field.type:
                raise TypeError(
                    f"Experiment({field.name}={value!r}): must be of type {field.type.__name__}"
                )
        custom = ":" in self.model
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices and not (custom and name == "model"):
                raise ValueError(
                    f"Experiment({name}={getattr(self, name)!r}): choose from {', '.join(choices)}"
                )
        for name, smallest in SMALLEST.items():
            if not smallest <= getattr(self, name) < float("inf"):
                raise ValueError(
                    f"Experiment({name}={getattr(self, name)!r}): "
                    f"must be at least {smallest} and finite"
                )
        own = self.data, self.size, self.depth, self.width
        if custom and own != ("auto", "tiny", 0, 0):
            raise ValueError(
                f"Experiment(model={self.model!r}): a custom model has its own data, size, depth "
                "and width; leave them at their defaults"
            )
        if self.data not in ("auto", *FITTING.get(self.model, ())):
            fitting = ", ".join(FITTING[self.model])
            raise ValueError(
                f"Experiment(data={self.data!r}): the model {self.model} takes data={fitting}"
            )
        if self.nvme_path and self.strategy != "fsdp_nvme":
            raise ValueError(
                f"Experiment(nvme_path={self.nvme_path!r}): needs strategy='fsdp_nvme', "
                f"not {self.strategy!r}"
            )
        if self.schedule == "cosine" and self.warmup_steps >= self.steps:
            raise ValueError(
                f"Experiment(warmup_steps={self.warmup_steps}): "
                f"must be less than steps={self.steps} with schedule='cosine'"
            )
        if self.strategy == "horovod" and self.comm_hook not in HOROVOD:
            raise ValueError(
                f"Experiment(comm_hook={self.comm_hook!r}): horovod takes {' or '.join(HOROVOD)}"
            )
        if self.comm_hook != "none" and self.strategy not in (*HOOKED, "horovod"):
            known = ", ".join(HOOKED)
            raise ValueError(
                f"Experiment(comm_hook={self.comm_hook!r}): needs one of the strategies {known}, "
                f"not {self.strategy}"
            )
        changed = (self.attention, self.sequence_parallel) != ("torch", "off")
        sized = self.depth or self.width
        short = self.curriculum != "none" or self.curriculum_from or self.curriculum_steps
        if self.experts or self.expert > 1 or self.axes or changed or sized or short:
            # imports torch, which a wrong name must not wait for
            from labkit.run import experiment_mesh

            experiment_mesh.check(self)

    @property
    def axes(self):
        """Return {axis of labkit.parallelize: ranks along it} of the axes with more than one rank.

        With experts on several ranks, ep is included even with size 1: all ranks count the load.
        """
        sizes = {"pp": self.pipeline, "cp": self.context, "ep": self.expert, "tp": self.tensor}
        kept = "ep" if self.experts and self.strategy != "single" else None
        return {axis: size for axis, size in sizes.items() if size > 1 or axis == kept}

    def smallest_batch(self, nproc):
        """Return the smallest batch: one sample per micro-batch and rank along dp and ep.

        Raises ValueError if nproc ranks do not form the mesh.
        """
        inner = prod(self.axes.values())
        if nproc % inner:
            raise ValueError(
                f"nproc={nproc} must be a multiple of {inner}, the number of ranks of {self.axes}"
            )
        ranks = 1 if self.strategy == "single" else nproc // inner * self.expert
        return ranks * self.accumulation

    def check_ranks(self, nproc):
        """Raise ValueError if the batch does not split evenly over ranks and accumulation."""
        smallest = self.smallest_batch(nproc)
        if self.batch_size % smallest:
            raise ValueError(
                f"batch_size={self.batch_size} must be a multiple of {smallest}: "
                f"{smallest // self.accumulation} ranks x {self.accumulation} micro-batches"
            )

    def replace(self, **changes):
        return dataclasses.replace(self, **changes)

    def to_dict(self):
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, fields, source="these fields"):
        """Make an experiment from a dict.

        Raises ValueError for an unknown key, with the nearest valid one.
        """
        if not isinstance(fields, dict):
            raise ValueError(f"{source}: an experiment must be a mapping of fields to values")
        names = [field.name for field in dataclasses.fields(cls)]
        for key in fields:
            if key not in names:
                near = difflib.get_close_matches(str(key), names, n=1)
                hint = (
                    f"did you mean {near[0]!r}?" if near else f"valid keys are {', '.join(names)}"
                )
                raise ValueError(f"{source}: unknown key {key!r}: {hint}")
        return cls(**fields)

    def arguments(self):
        """Return the options of labkit.train for this experiment, as a list of strings.

        model, strategy and optimizer are always among them, because they change other defaults. So
        are the rates of AdamW for a GPT, whose defaults are changed.
        """
        always = {"model", "strategy", "optimizer"}
        if (self.model, self.optimizer) == ("gpt", GPT["optimizer"]):
            always |= set(GPT)
        words = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default or field.name in always:
                words += [f"--{field.name.replace('_', '-')}", str(value)]
        return words

    def to_yaml(self, path):
        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False))

    @classmethod
    def from_yaml(cls, path):
        try:
            fields = of_yaml(Path(path).read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return cls.from_dict(fields, source=str(path))

    def to_json(self, path):
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    @classmethod
    def from_json(cls, path):
        try:
            fields = json.loads(Path(path).read_text(), object_pairs_hook=without_doubles)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: is not JSON: {error}") from None
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return cls.from_dict(fields, source=str(path))
