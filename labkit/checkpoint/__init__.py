"""Checkpoints: each rank writes its own file; a checkpoint is valid when all have finished.

checkpoint.py                   Checkpoints: save, load, and the latest valid step
sharded_parts.py                finds the sharded parts of a model inside wrappers
sharded_state.py                the shards of a rank: names, and which elements each holds
shard_ranges.py                 those elements as ranges of the flat full tensor
dtensor_ranges.py               the same for PyTorch's DTensor
generic_state.py, rng_state.py  the state of other objects; random state
dedup.py                        replicated tensors are written once
metadata.py                     the manifest
reader.py                       reads a range from all files that hold a part of it: n ranks -> m
state_json.py, tensor_file.py   a nested state as JSON and tensors; safetensors files
storage.py, storage_lock.py     atomic files in a folder or at a URL; a lock for S3
retention.py                    the latest, and which are kept
convert_sources.py, dcp_folder.py  weights from other formats
"""

from labkit.checkpoint.checkpoint import (
    CheckpointError,
    Checkpoints,
)

__all__ = [
    "CheckpointError",
    "Checkpoints",
]
