"""What is neither a module nor an optimizer of plain tensors is taken as it is.

    RandomState    text                     each rank's own, if ranks differ
    compressor     text and residuals       likewise
    MasterWeights  text, states, masters    all ranks' alike: written once
    ZeRO           text and whole states    of channels_last parameters only, whose shards are no
                                            ranges; whole on every rank while they are written

Only what ranks have alike can other ranks have, unless the thing has load_of_other_ranks().
"""

from dataclasses import dataclass

from labkit.checkpoint import state_json
from labkit.checkpoint.dtensor_ranges import Piece


def kind(thing):
    """Its type's name; of an optimizer around another, both."""
    inside = [getattr(thing, name, None) for name in ("inner", "optimizer")]
    if not hasattr(thing, "param_groups"):
        inside = []
    return " of ".join(type(one).__name__ for one in (thing, *inside) if one is not None)


@dataclass
class TreeHolder:
    """Anything else with state_dict() and load_state_dict(): its tensors by where they stand."""

    thing: object

    def take(self):
        text, tensors = state_json.split(self.thing.state_dict())
        pieces = {
            path: Piece(tensor.reshape(-1), 0, tuple(tensor.shape))
            for path, tensor in tensors.items()
        }
        return pieces, {"dict": [["type", kind(self.thing)], ["state", text]]}

    def problems(self, saved):
        """What ranks have had for themselves, others cannot have."""
        if saved.text["type"] != kind(self.thing) or "state" not in saved.text:
            return [f"it is of {saved.text['type']}, this is {kind(self.thing)}"]
        if saved.foreign and not hasattr(self.thing, "load_of_other_ranks"):
            return [f"{saved.foreign[0]} differs from rank to rank, and the ranks were others"]
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
