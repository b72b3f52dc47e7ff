"""The import paths that people write stay, wherever the files are."""

import importlib

import pytest

PATHS = {
    "labkit.ddp": ("DDP",),
    "labkit.zero": ("ZeRO1", "ZeRO2"),
    "labkit.fsdp": ("FSDP",),
    "labkit.amp": ("autocast", "GradScaler", "MasterWeights"),
    "labkit.recompute": ("checkpoint", "checkpoint_every"),
    "labkit.offload": ("Offloaded", "offload_activations"),
    "labkit.mesh": ("Mesh",),
    "labkit.compression": ("TopK", "RandomK", "PowerSGD", "OneBit", "OneBitAdam", "Quantize", "Cast", "DGC"),
    "labkit.tensor_parallel": ("parallelize_module", "ColwiseParallel", "RowwiseParallel", "SequenceParallel"),
    "labkit.pipeline": ("Pipeline", "gpipe", "one_f_one_b", "interleaved", "zero_bubble"),
    "labkit.moe": ("MoE",),
    "labkit.parallelize": ("Composed",),
    "labkit.checkpoint": ("Checkpoints", "CheckpointError"),
    "labkit.convert": ("convert", "load_weights"),
    "labkit.local_sgd": ("LocalSGD", "DiLoCo"),
    "labkit.sampler": ("DistributedSampler", "Batches", "evaluate"),
    "labkit.horovod": ("DistributedOptimizer",),
    "labkit.lamb": ("LAMB",),
    "labkit.attention": ("flash_attention",),
    "labkit.attention.context_parallel": ("ring_attention", "ulysses_attention"),
    "labkit.memory": ("estimate", "choose", "find_batch_size"),
    "labkit.trainer": ("Trainer",),
    "labkit.run": ("launch", "LaunchError"),
    "labkit.train": ("main",),
    "labkit.scale.plan": ("main",),
    "labkit.scale.predict": ("main",),
}


@pytest.mark.parametrize("module", PATHS)
def test_the_path_is_there(module):
    there = importlib.import_module(module)
    assert [name for name in PATHS[module] if not hasattr(there, name)] == []
    listed = getattr(there, "__all__", [])
    assert [name for name in listed if not hasattr(there, name)] == []
