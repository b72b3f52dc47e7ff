"""The state of a model on a mesh: which elements of each full tensor a rank holds.

    axis   a rank holds                     in a checkpoint
    pp     some layers                      those names
    ep     some experts                     those names
    tp     rows or columns of a matrix      a flat range; columns are gathered (shard_ranges.py)
    dp     everything; with FSDP a shard    written once, a part by each; the shard

Names and elements are those of the full model. So any other mesh, or one process, can load them.
"""

from labkit.checkpoint.dtensor_ranges import span
from labkit.checkpoint.shard_ranges import in_whole
from labkit.ddp.wrapper import Wrapper
from labkit.fsdp.fsdp_state_dict import ShardedModel


class MeshModel(Wrapper):
    """Base of Composed. Subclasses define:

    mesh. pipeline: or None. replicas: the group along which gradients are averaged, or None.
    names: {name in the full model: the first of its tied names}. cuts: {first name: Cut}.
    """

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
        shards = self.module.places() if isinstance(self.module, ShardedModel) else {}
        places = dict.fromkeys(self.names)
        for name, tensor in self.state_dict().items():
            start, stop, shape = shards.get(name) or span(tensor)
            places[name] = start, stop, shape
            if self.names[name] in self.cuts:
                among = self.replicas if name in shards else None
                cut = self.cuts[self.names[name]]
                places[name] = in_whole(cut, start, stop, shape, among)
        return places
