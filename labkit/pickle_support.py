"""Say what can be pickled or deep-copied, and which state to save in place of the rest.

goes     DDP, LocalSGD, DiLoCo, GradScaler   on the default group: the loading process has one
refused  FSDP, ZeRO, Horovod's optimizer     tied to this process's hooks, or to a rank's shards
         MasterWeights, Offloaded            tied to the model's parameters, or to host memory
"""

import torch.distributed as dist


class NotPickled:
    """Base of what is refused. `instead`: what to save; `more`: a sentence about copies."""

    instead = "state_dict()"
    more = ""

    def __reduce_ex__(self, protocol):
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: it belongs to the parameters of "
            f"this process. Save {self.instead}, and load that into a new one{self.more}"
        )


def check_default_group(owner, group):
    """Raises RuntimeError, as DDP does, for a group that a loading process cannot know."""
    if group is not None and group is not dist.group.WORLD:
        raise RuntimeError(
            f"{type(owner).__name__} can be pickled on the default process group only, "
            "not with one of its own: save state_dict()"
        )
