"""A model on a mesh of axes, from outside: which elements of which whole a rank holds.

    axis   a rank holds                     in a checkpoint
    pp     some layers                      those names
    ep     some experts                     those names
    tp     rows, or columns, of a matrix    elements in a row, or what places.py makes of them
    dp     all, with FSDP a shard           written once, a part by each; the shard

So what one mesh has saved, any other loads, and one process: names and elements are the whole's.
"""

from labkit.checkpoint.dtensor_ranges import span
from labkit.checkpoint.shard_ranges import in_whole
from labkit.ddp.wrapper import Wrapper
from labkit.fsdp.fsdp_state_dict import ShardedModel


class MeshModel(Wrapper):
    """Base of Composed. Subclasses have mesh; pipeline, or None; replicas, the group along which
    gradients are averaged, or None; names, {name in the whole: the first of those that are tied};
    cuts, {first name: Cut}.
    """

    def state_dict(self, *args, **kwargs):
        """What this rank holds, by the names of the whole. Whole: full_state_dict()."""
        if not self.pipeline:
            return super().state_dict(*args, **kwargs)
        state = self.pipeline.state_dict()
        return {name: state[first] for name, first in self.names.items() if first in state}

    def load_state_dict(self, state_dict, strict=True, assign=False):
        """Of this rank, from a mesh with the same axes; of others: load_full_state_dict."""
        if not self.pipeline:
            return super().load_state_dict(state_dict, strict, assign)
        return self.pipeline.load_state_dict(state_dict, strict)

    def places(self):
        """{name: which elements of the whole this rank holds, as Place has it after its name}.

        None of what only other ranks have.
        """
        shards = self.module.places() if isinstance(self.module, ShardedModel) else {}
        found = dict.fromkeys(self.names)
        for name, tensor in self.state_dict().items():
            start, stop, shape = shards.get(name) or span(tensor)
            found[name] = start, stop, shape
            if self.names[name] in self.cuts:
                among = self.replicas if name in shards else None
                found[name] = in_whole(self.cuts[self.names[name]], start, stop, shape, among)
        return found
