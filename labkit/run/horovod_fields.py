"""Horovod's calls: the lines of a program that an Experiment becomes. They are written, not read.

    strategy    horovod, or ddp_bucketed, which trains the same weights
    precision   fp32; comm_hook fp16 is Compression.fp16

The program has the rest. Source: Horovod 0.28, horovod/torch/optimizer.py, and
https://horovod.readthedocs.io/en/stable/pytorch.html; labkit.horovod has the same interface.
"""

NAME = "Horovod"
FORM = "Python"
AUTO = ""
WRITES = dict.fromkeys(("model", "size", "data", "seed", "steps", "recompute", "attention"), any)
WRITES |= dict.fromkeys(("depth", "width", "curriculum"), any)
WRITES |= dict.fromkeys(("curriculum_from", "curriculum_steps"), any)
WRITES |= dict.fromkeys(("batch_size", "accumulation", "optimizer", "lr", "momentum"), any)
WRITES |= dict.fromkeys(("weight_decay", "clip", "warmup_steps", "schedule"), any)
WRITES |= dict.fromkeys(("reference_batch", "lr_rule", "linear_until", "bucket_cap_mb"), any)
WRITES |= {"strategy": ("ddp_bucketed", "horovod"), "comm_hook": ("none", "fp16")}
MIB = 2**20
LINES = """\
# horovodrun -np {ranks} python train.py, with HOROVOD_FUSION_THRESHOLD={threshold}
import horovod.torch as hvd

hvd.init()  # in place of init_process_group
# each rank: {micro} samples a micro-batch; sampler: num_replicas=hvd.size(), rank=hvd.rank()
optimizer = hvd.DistributedOptimizer(  # in place of DistributedDataParallel(model)
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.{compression},
    backward_passes_per_step={passes},
    op=hvd.Average,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
"""
CLIPPED = """\
# in each step, after the last backward
optimizer.synchronize()
torch.nn.utils.clip_grad_norm_(model.parameters(), {clip})
with optimizer.skip_synchronize():
    optimizer.step()
"""


def from_experiment(e, ranks):
    """Return {call or variable: value} of the lines that change."""
    return {
        "np": ranks,
        "HOROVOD_FUSION_THRESHOLD": round(e.bucket_cap_mb * MIB),
        "micro_batch": e.batch_size // e.accumulation // ranks,
        "DistributedOptimizer.compression": e.comm_hook,
        "DistributedOptimizer.backward_passes_per_step": e.accumulation,
        "clip_grad_norm_": e.clip,
    }


def text(config):
    """Return the lines."""
    found = LINES.format(
        ranks=config["np"],
        threshold=config["HOROVOD_FUSION_THRESHOLD"],
        micro=config["micro_batch"],
        compression=config["DistributedOptimizer.compression"],
        passes=config["DistributedOptimizer.backward_passes_per_step"],
    )
    clip = config["clip_grad_norm_"]
    return found + (CLIPPED.format(clip=clip) if clip else "")
