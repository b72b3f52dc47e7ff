"""Fallback for any other object with a state_dict(): its state is saved unchanged.

    RandomState    text                     per rank, if ranks differ
    compressor     text and residuals       likewise
    MasterWeights  text, states, masters    replicated: written once
    ZeRO           text and full states     only with channels_last parameters, whose shards are
                                            not ranges; complete on every rank while written

A different set of ranks can load only replicated state, unless the object has
load_of_other_ranks().
"""

from dataclasses import dataclass

from labkit.checkpoint import state_json
from labkit.checkpoint.dtensor_ranges import Piece


def kind(thing):
    """Return the type's name; for an optimizer that wraps another, both names."""
    inside = [getattr(thing, name, None) for name in ("inner", "optimizer")]
    if not hasattr(thing, "param_groups"):
        inside = []
    return " of ".join(type(one).__name__ for one in (thing, *inside) if one is not None)


@dataclass
class TreeHolder:
    """Saves any object with state_dict() and load_state_dict(): its tensors by their path."""

    thing: object

    def take(self):
        text, tensors = state_json.split(self.thing.state_dict())
        pieces = {
            path: Piece(tensor.reshape(-1), 0, tuple(tensor.shape))
            for path, tensor in tensors.items()
        }
        return pieces, {"dict": [["type", kind(self.thing)], ["state", text]]}

    def problems(self, saved):
        """Return why the state cannot be loaded. Other ranks cannot load per-rank state."""
        if saved.text["type"] != kind(self.thing) or "state" not in saved.text:
            return [f"it was saved from {saved.text['type']}, not from {kind(self.thing)}"]
        if saved.foreign and not hasattr(self.thing, "load_of_other_ranks"):
            return [f"{saved.foreign[0]} is per-rank state: load it with the same number of ranks"]
        if hasattr(self.thing, "problems"):
            return self.thing.problems(self.state(saved))
        return []

    def give(self, saved):
        if hasattr(self.thing, "load_of_other_ranks") and not saved.reader.alike:
            self.thing.load_of_other_ranks(self.state(saved), saved.reader.rank)
        else:
            self.thing.load_state_dict(self.state(saved))

    def state(self, saved):
        def read(path):
            return saved.read(path).view(saved.shapes[path])

        return state_json.join(saved.plain, read)["state"]
