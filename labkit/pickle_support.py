"""Which objects can be pickled or deep-copied, and what to save instead of the others.

supported  DDP, LocalSGD, DiLoCo, GradScaler   on the default group, which the loader has, too
refused    FSDP, ZeRO, Horovod's optimizer     tied to this process's hooks, or to a rank's shards
           MasterWeights, Offloaded            tied to the model's parameters, or to host memory
"""

import torch.distributed as dist


class NotPickled:
    """Base of objects that cannot be pickled. `instead`: what to save; `more`: about copies."""

    instead = "state_dict()"
    more = ""

    def __reduce_ex__(self, protocol):
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled, as it uses parameters of this "
            f"process: save {self.instead}, and load that into a new one{self.more}"
        )


def check_default_group(owner, group):
    """Raise RuntimeError, like DDP, for a group that a loading process does not have."""
    if group is not None and group is not dist.group.WORLD:
        raise RuntimeError(
            f"{type(owner).__name__} can be pickled on the default process group only: "
            "save state_dict() instead"
        )
