"""A cluster: so many GPUs of one kind in equal nodes, told in Python or by a file.

    gpu: A100-80GB        # of hardware.py; the two that are needed
    gpus: 64
    gpus_per_node: 4      # the rest is usual for that GPU, where it is not told
    network_gbps: 200     # 10^9 bit/s of a node, all adapters together
    node_gbs: 300         # 10^9 byte/s of a GPU to its node, in one direction
    memory_gib: 39.4      # GiB of a GPU
    host_gib: 512         # GiB of a node's host, for states of the optimizer
    collectives: flat     # how messages are added up: see collectives.py
    confirmed: true       # figures that look wrong are meant: a node of this one has 200 Gbit/s

    200 Gbit/s told, 1,600 usual:  1/8  ->  bits for bytes?  asked about, before anything is planned

A figure that is 8, 125, 1,000 or 8,000 times what is usual, or that part of it, most often has
another unit: bits for bytes, mega for giga, or both.
"""

from dataclasses import MISSING, dataclass, fields, replace
from difflib import get_close_matches
from math import isfinite, log
from pathlib import Path

import yaml

from labkit.scale.collectives import check_algorithm
from labkit.scale.hardware import GPU, find_gpu

WRONG_UNITS = (8, 1000, 125, 8000)  # bits for bytes, mega for giga, and both
UNITS = {"network_gbps": "Gbit/s", "node_gbs": "GB/s", "memory_gib": "GiB"}


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind in equal nodes; what is not told is usual for that GPU.

    gpu: a name, or a GPU. network_gbps: 10^9 bit/s of a node, all adapters together. node_gbs: 10^9
    byte/s of a GPU to its node, one direction. memory_gib: GiB of a GPU. host_gib: GiB of a node's
    host, for states of the optimizer; None: they stay on the GPUs. confirmed: figures that look
    wrong are meant. collectives: an algorithm of collectives.py.
    Raises ValueError, one line, for an unknown GPU, an impossible figure, and one that is off by a
    factor that a wrong unit makes, unless it is confirmed.
    """

    gpu: str | GPU
    gpus: int
    gpus_per_node: int = 8
    network_gbps: float | None = None
    node_gbs: float | None = None
    memory_gib: float | None = None
    host_gib: float | None = None
    confirmed: bool = False
    collectives: str = "flat"

    def __post_init__(self):
        if type(self.confirmed) is not bool:
            raise ValueError(f"confirmed must be true or false, got {self.confirmed!r}")
        for name in ("gpus", "gpus_per_node"):
            count = number(name, said := getattr(self, name))
            if not isfinite(count) or count < 1 or count != int(count):
                raise ValueError(f"{name} must be a whole number of at least 1, got {said}")
            object.__setattr__(self, name, int(count))
        usual = find_gpu(self.gpu)
        check_algorithm(self.collectives, usual)
        for name in (*UNITS, "host_gib"):
            if (said := getattr(self, name)) is None:
                continue
            told = number(name, said)
            if not (isfinite(told) and told > 0):
                raise ValueError(f"{name} must be a positive number, got {said}")
            object.__setattr__(self, name, told)
            if name in UNITS and not self.confirmed:
                ask_for_the_unit(name, told, usual)

    @classmethod
    def from_dict(cls, told):
        """The cluster of {field: figure}; None is not told. ValueError for an unknown field."""
        names = [field.name for field in fields(cls)]
        for name in told:
            if name not in names:
                near = get_close_matches(str(name), names, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
                raise ValueError(f"unknown key {name!r}: {hint}")
        told = {name: figure for name, figure in told.items() if figure is not None}
        for field in fields(cls):
            if field.default is MISSING and told.get(field.name, "") == "":
                such = {"gpu": "name one, such as H100-80GB", "gpus": "how many are there?"}
                raise ValueError(f"{field.name} is missing: {such[field.name]}")
        return cls(**told)

    @classmethod
    def from_yaml(cls, path, **instead):
        """The cluster of a file, a mapping of fields to figures. instead: figures that replace its.

        Its GPU cannot be replaced: the file's other figures are of that one. Raises ValueError, one
        line that begins with the file.
        """
        try:
            told = yaml.safe_load(Path(path).read_bytes())
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from None
        except yaml.YAMLError as error:
            raise ValueError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
        if not isinstance(told, dict):
            raise ValueError(f"{path}: a cluster is a mapping of fields to figures, as gpus: 64")
        if told.get("gpu") and "gpu" in instead:
            raise ValueError(
                f"{path}: its figures are of its gpu, {told['gpu']}, not of {instead['gpu']}: "
                "tell the GPU in the file alone"
            )
        try:
            return cls.from_dict(told | instead)
        except ValueError as error:
            replaced = "".join(f" with {name}={figure}" for name, figure in instead.items())
            raise ValueError(f"{path}{replaced}: {error}") from None

    @property
    def device(self):
        """The GPU, with this cluster's figures."""
        usual = find_gpu(self.gpu)
        return replace(usual, **{n: getattr(self, n) or getattr(usual, n) for n in UNITS})


def number(name, said):
    """The float of a figure. YAML reads 1e3 as text, and yes as true."""
    try:
        if isinstance(said, bool):
            raise TypeError
        return float(said)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number, got {said!r}") from None


def ask_for_the_unit(name, told, gpu):
    """Raise ValueError where a figure is off by a factor that a wrong unit makes."""
    usual = getattr(gpu, name)
    off = told / usual
    wrong = [factor for factor in WRONG_UNITS if abs(abs(log(off)) - log(factor)) < 0.15]
    if wrong:
        times = f"{wrong[0]} times" if off > 1 else f"1/{wrong[0]} of"
        raise ValueError(
            f"{name}={told:g} is about {times} what {gpu.name} usually has, {usual:g} "
            f"{UNITS[name]}: is it in another unit? If it is meant, say confirmed=True (--confirm)"
        )
