"""Sharding strategies: the ranks that shard a model together, and those that replicate the shards.

    "full", "grad_op"        "hybrid" on Mesh({"node": 2, "gpu": 3})
    group  0 1 2 3 4 5                 gpu 0   gpu 1   gpu 2
    each has one sixth       node 0      0       1       2      group:  a row, each has one third
                             node 1      3       4       5      across: a column, same shard twice

Hybrid sharding needs more memory, but its large and frequent gathers stay on fast links. Only
shards of gradients are sent across: 2 (r-1)/r x bytes / s per rank, for r replicas of s shards.
Zhao et al., PyTorch FSDP, VLDB 2023, section 3.2.2.
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from labkit.replicas import check_ranks

MODES = ("full", "grad_op", "hybrid")


def check_arguments(module, root, prefetch, persistence_threshold):
    """Raise ValueError for arguments of FSDP that are wrong or contradict."""
    if getattr(module, "_ddp_params_and_buffers_to_ignore", None):
        raise ValueError("FSDP does not support _ddp_params_and_buffers_to_ignore: use DDP")
    if root not in ("shard", "replicate"):
        raise ValueError(f'root must be "shard" or "replicate", not {root!r}')
    if type(prefetch) is not int or prefetch < 0:
        raise ValueError(f"prefetch must be a number of units, 0 or more, not {prefetch!r}")
    if type(persistence_threshold) is not int or persistence_threshold < 0:
        raise ValueError(
            f"persistence_threshold must be a number of elements, 0 or more, "
            f"not {persistence_threshold!r}"
        )
    if persistence_threshold and root == "replicate":
        raise ValueError(
            f'persistence_threshold={persistence_threshold} needs root="shard": '
            "the root gathers the small parameters"
        )


@dataclass(frozen=True)
class Sharding:
    """The settings that all flat parameters of a model share.

    everyone: the group of all ranks that train. group: ranks whose shards form the full parameters.
    across: ranks with the same shard, or None. device: of full parameters, and of shards unless
    offload: True: these are in host memory; a folder: in files there. param_dtype: of full
    parameters; None: that of the shards.
    reduce_dtype: of gradients that are sent; None: param_dtype.
    """

    everyone: object
    group: object
    across: object
    device: torch.device
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    offload: bool | str | os.PathLike

    @property
    def folder(self):
        """The folder for files of shards and gradients, or None."""
        return None if isinstance(self.offload, bool) else self.offload

    @classmethod
    def choose(cls, module, mode, mesh, process_group, param_dtype, reduce_dtype, offload):
        """Return the Sharding for FSDP's arguments. Raises ValueError if they contradict."""
        if any(hasattr(p, "is_piece") for p in module.parameters()):
            raise ValueError(
                "this module is sharded already: wrap the whole model once, and "
                "name its parts by unit="
            )
        for name, dtype in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)):
            if dtype is not None and not (
                isinstance(dtype, torch.dtype) and dtype.is_floating_point
            ):
                raise ValueError(
                    f"{name} is a floating-point dtype such as torch.bfloat16, or None, "
                    f"not {dtype!r}"
                )
        groups = choose_groups(mode, mesh, process_group)
        check_ranks("FSDP", groups[1])
        return cls(*groups, compute_device(module, groups[0]), param_dtype, reduce_dtype, offload)


def choose_groups(mode, mesh, process_group):
    """Return (everyone, group, across): see Sharding."""
    if mode not in MODES:
        raise ValueError(f"shard is {', '.join(map(repr, MODES))}, not {mode!r}")
    if mesh is not None and process_group is not None:
        raise ValueError("give a mesh or a process_group, not both: a mesh has groups of its own")
    axes = list(mesh.axes) if mesh is not None else []
    if mode == "hybrid":
        if len(axes) != 2:
            raise ValueError(
                'shard="hybrid" needs a mesh of two axes, as Mesh({"replicate": 2, "shard": 4})'
            )
        return None, mesh.group(axes[1]), mesh.group(axes[0])
    if len(axes) > 1:
        raise ValueError(
            f'shard={mode!r} shards over all ranks: give a mesh of one axis, or shard="hybrid"'
        )
    group = mesh.group(axes[0]) if axes else process_group
    return group, group, None


def in_dtype(value, dtype):
    """Return the value with its floating-point tensors converted to dtype."""
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)


def compute_device(module, group):
    """Return the device of gathered parameters: theirs, or with NCCL this rank's GPU.

    In a dry run (backend "fake", see labkit.memory.dry_run) it may be the meta device.
    """
    backend = str(dist.get_backend(group))
    if "nccl" in backend:
        return torch.device("cuda", torch.cuda.current_device())
    first = next(module.parameters(), torch.empty(0)).device
    return torch.device("cpu") if first.type == "meta" and "fake" not in backend else first
