"""Residuals: the values that a compressor has not sent yet, one flat tensor per bucket.

    buckets of step 1   [ w3 | b3 ]  [ w2 | w1 ]   residuals have the layout of the gradients
    buckets of step 2   [ b3 | w3 | w2 ]  [ w1 ]   PyTorch's DDP rebuilds its buckets after its
                                                   first step: each residual follows its parameter

Held per rank: the elements of the gradients, in float32 (float64 for float64 gradients): 16 bits
would lose values that are small next to the residual.
"""

import torch


class Residuals:
    """The flat residual of each bucket, initially zero.

    Saved by parameter, for any bucket layout.
    """

    def __init__(self):
        self._flats = {}  # (dtype, device, ids of a bucket's parameters) -> flat tensor
        self._parts = {}  # parameter -> its part of a flat tensor
        self._names = {}  # parameter -> the key under which it is saved
        self._loaded = None  # or name -> a loaded residual whose parameter was in no bucket yet

    def of(self, bucket):
        """Return the residual, [elements], of a bucket of either DDP. Change it in place.

        Raises KeyError or ValueError if a loaded state does not match the bucket's parameters.
        """
        gradient, parameters = bucket.buffer(), bucket.parameters()
        dtype = wide(gradient.dtype)
        key = (dtype, gradient.device, *map(id, parameters))
        if key not in self._flats:
            self._lay_out(
                key, bucket, torch.zeros(gradient.numel(), dtype=dtype, device=gradient.device)
            )
        return self._flats[key]

    def _lay_out(self, key, bucket, flat):
        parameters = bucket.parameters()
        parts = flat.split([p.numel() for p in parameters])
        for p, part, name in zip(parameters, parts, names(bucket), strict=True):
            if p in self._parts:
                part.copy_(self._parts[p])
            elif self._loaded is not None:
                part.copy_(self._take(name, part))
            self._parts[p] = part
            self._names.setdefault(p, name)
        moved = set(key[2:])
        self._flats = {old: kept for old, kept in self._flats.items() if moved.isdisjoint(old[2:])}
        self._flats[key] = flat

    def _take(self, name, part):
        if name not in self._loaded:
            raise KeyError(
                f"no residual was saved for {name!r}: "
                "load a state of the same model in the same wrapper"
            )
        saved = self._loaded.pop(name)
        if saved.numel() != part.numel():
            raise ValueError(
                f"the residual of {name!r} has {saved.numel()} elements, "
                f"but the parameter has {part.numel()}"
            )
        return saved

    def scale(self, factor):
        """Multiply all residuals by factor."""
        for part in self._parts.values():
            part.mul_(factor)

    def __getstate__(self):
        """Pickle and copy by name, like state_dict(): the parameters will be other objects."""
        return vars(Residuals()) | {"_loaded": self.state_dict() or None}

    def state_dict(self):
        """Return {name: flat residual of that parameter}."""
        return {self._names[p]: part.clone() for p, part in self._parts.items()} | (
            self._loaded or {}
        )

    def load_state_dict(self, state):
        """Load a state_dict(), at any time.

        A mismatch raises KeyError or ValueError here or in the next step.
        """
        self._loaded = dict(state) or None
        for p, part in self._parts.items():
            part.copy_(self._take(self._names[p], part) if state else torch.zeros_like(part))


def wide(dtype):
    """Return the dtype of residuals for gradients of this dtype: at least float32."""
    return torch.promote_types(dtype, torch.float32)


def names(bucket):
    """Return a name for each parameter; for PyTorch's DDP its position in the first buckets."""
    return getattr(bucket, "names", None) or [
        f"bucket {bucket.index()}, {i}" for i in range(len(bucket.parameters()))
    ]
