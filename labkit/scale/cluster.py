"""Describe a cluster in Python or in a YAML file: GPUs of one kind in equal nodes.

    gpu: A100-80GB        # of hardware.py; gpu and gpus are required
    gpus: 64
    gpus_per_node: 4      # from here on, defaults are the usual figures of that GPU
    network: 50           # 10^9 bit/s of each GPU; or network_gbps: 200, of a node, all adapters
    node_gbs: 300         # 10^9 byte/s of a GPU to its node, in one direction
    memory_gib: 39.4      # GiB of a GPU
    host_gib: 512         # GiB of a node's host, for optimizer states
    leaf: 16              # nodes below a leaf switch; without it, all of them
    oversubscription: 2   # bandwidth of a leaf's nodes over that of its uplinks; needs leaf
    collectives: auto     # the algorithm of collectives: see collectives.py
    confirmed: true       # unusual figures are correct: these A100 have half of their 80 GB

    40,000 GiB given, 40 usual:  1,000 times  ->  MiB for GiB?  ValueError before any planning

A figure that is 8, 125, 1,000 or 8,000 times the usual one, or that fraction of it, most often has
a wrong unit: bits for bytes, mega for giga, or both. Networks differ more than that: any from 1
Gbit/s a node to 1,600 a GPU is accepted. gpu may also be a YAML file of a GPU, or a mapping of its
figures (hardware.py).
"""

from dataclasses import MISSING, dataclass, fields, replace
from difflib import get_close_matches
from math import isfinite, log

from labkit.scale.collectives import check_algorithm
from labkit.scale.hardware import GPU, find_gpu, mapping_of_file
from labkit.scale.quantities import network as gbps_of

WRONG_UNITS = (8, 1000, 125, 8000)  # bits for bytes, mega for giga, and both
FASTEST = 1600  # Gbit/s of a GPU: twice the fastest adapter of hardware.py
UNITS = {"network_gbps": "Gbit/s", "node_gbs": "GB/s", "memory_gib": "GiB"}


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind in equal nodes; figures that are not given are the usual ones of that GPU.

    gpu: a name, or a GPU. gpus_per_node: by default that of the GPU. network_gbps: 10^9 bit/s of a
    node, all adapters together; by default it grows with gpus_per_node. node_gbs: 10^9 byte/s of a
    GPU to its node, one direction. memory_gib: GiB of a GPU. host_gib: GiB of a node's host, for
    optimizer states; None: they stay on the GPUs. leaf: nodes below a leaf switch; None: all.
    oversubscription: of the leaf switches' uplinks, at least 1. confirmed: unusual figures are
    correct. collectives: an algorithm of collectives.py.
    Raises ValueError, one line, for an unknown GPU, an impossible figure, and one that looks like a
    wrong unit, unless it is confirmed.
    """

    gpu: str | GPU
    gpus: int
    gpus_per_node: int | None = None
    network_gbps: float | None = None
    node_gbs: float | None = None
    memory_gib: float | None = None
    host_gib: float | None = None
    confirmed: bool = False
    collectives: str = "auto"
    leaf: int | None = None
    oversubscription: float = 1.0

    def __post_init__(self):
        if type(self.confirmed) is not bool:
            raise ValueError(f"confirmed must be true or false, got {self.confirmed!r}")
        usual = find_gpu(self.gpu)
        if self.gpus_per_node is None:
            object.__setattr__(self, "gpus_per_node", usual.gpus_per_node)
        self.check_leaves()
        for name in ("gpus", "gpus_per_node", *(["leaf"] if self.leaf is not None else [])):
            count = number(name, said := getattr(self, name))
            if not isfinite(count) or count < 1 or count != int(count):
                raise ValueError(f"{name} must be a whole number of at least 1, got {said}")
            object.__setattr__(self, name, int(count))
        check_algorithm(self.collectives, usual)
        for name in (*UNITS, "host_gib"):
            if (said := getattr(self, name)) is None:
                continue
            told = number(name, said)
            if not (isfinite(told) and told > 0):
                raise ValueError(f"{name} must be a positive number, got {said}")
            object.__setattr__(self, name, told)
            if self.confirmed or name not in UNITS:
                continue
            if name != "network_gbps" or not 1 <= told <= FASTEST * self.gpus_per_node:
                ask_for_the_unit(name, told, self.usual)

    def check_leaves(self):
        """Raise ValueError for an impossible oversubscription, and for one without leaf."""
        factor = number("oversubscription", said := self.oversubscription)
        if not 1 <= factor <= 60:  # YAML reads 2:1 as 121
            raise ValueError(
                "oversubscription must be a number from 1 (full bandwidth) to 60, such as 2 for "
                f"2:1, got {said}"
            )
        if factor > 1 and self.leaf is None:
            raise ValueError(
                f"oversubscription={factor:g} needs leaf, the nodes below a leaf switch, such as 16"
            )
        object.__setattr__(self, "oversubscription", factor)

    @classmethod
    def from_dict(cls, told):
        """Return the cluster of {field: figure}; None means not given.

        `network`, the Gbit/s of each GPU, may replace network_gbps. Raises ValueError for an
        unknown field.
        """
        names = [field.name for field in fields(cls)]
        for name in told:
            if name not in (*names, "network"):
                near = get_close_matches(str(name), names, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(names)}"
                raise ValueError(f"unknown key {name!r}: {hint}")
        told = {name: figure for name, figure in told.items() if figure is not None}
        for field in fields(cls):
            if field.default is MISSING and told.get(field.name, "") == "":
                such = {"gpu": "name one, such as H100-80GB", "gpus": "how many are there?"}
                raise ValueError(f"{field.name} is missing: {such[field.name]}")
        network = told.pop("network", None)
        found = cls(**told)
        if network is None:
            return found
        if "network_gbps" in told:
            raise ValueError("network, of a GPU, and network_gbps, of a node, are both given")
        return replace(found, network_gbps=gbps_of(network) * found.gpus_per_node)

    @classmethod
    def from_yaml(cls, path, **instead):
        """Read a cluster from a YAML file, a mapping of fields to figures.

        instead: figures that replace those of the file. The GPU cannot be replaced, because the
        file's other figures belong to it. Raises ValueError, one line that begins with the path.
        """
        told = mapping_of_file(path, "a cluster is a mapping of fields to figures, as gpus: 64")
        if told.get("gpu") and "gpu" in instead:
            raise ValueError(
                f"{path}: its figures are of its gpu, {told['gpu']}, not of {instead['gpu']}: "
                "name the GPU only in the file"
            )
        try:
            return cls.from_dict(told | instead)
        except ValueError as error:
            replaced = "".join(f" with {name}={figure}" for name, figure in instead.items())
            raise ValueError(f"{path}{replaced}: {error}") from None

    @property
    def usual(self):
        """The GPU with the usual figures of such nodes."""
        gpu = find_gpu(self.gpu)
        if gpu.generation == "measured":  # its network is that of the node
            return gpu
        return replace(gpu, network_gbps=gpu.network_gbps * self.gpus_per_node / 8)

    @property
    def device(self):
        """The GPU with this cluster's figures."""
        usual = self.usual
        return replace(usual, **{n: getattr(self, n) or getattr(usual, n) for n in UNITS})


def number(name, said):
    """Return a figure as a float. YAML reads 1e3 as text, and yes as true."""
    try:
        if isinstance(said, bool):
            raise TypeError
        return float(said)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number, got {said!r}") from None


def ask_for_the_unit(name, told, gpu):
    """Raise ValueError if a figure is off by a factor that a wrong unit explains."""
    usual = getattr(gpu, name)
    off = told / usual
    wrong = [factor for factor in WRONG_UNITS if abs(abs(log(off)) - log(factor)) < 0.15]
    if wrong:
        times = f"{wrong[0]} times" if off > 1 else f"1/{wrong[0]} of"
        raise ValueError(
            f"{name}={told:g} is about {times} what {gpu.name} usually has, {usual:g} "
            f"{UNITS[name]}: is it in another unit? If it is right, pass confirmed=True (--confirm)"
        )
