"""A table of GPUs and of the links between them, with the source of each figure.

    GPU  -- memory: bandwidth --  [ arithmetic: peak by dtype ]
     |
     +-- NVLink or PCIe: to the GPUs of its node, `node_gbs` in each direction
     +-- PCIe: to the memory of its host, `host_gbs`
     +-- network: the node's adapters together, `network_gbps`, shared by its GPUs

gpus.csv has a row for each GPU, with the source of its figures. Peaks are without sparsity.
`achievable` is the rate of the fastest matrix product in the sources, as a share of the peak, and
so an upper limit for a job. pytorch/torchtitan's benchmarks ran on H100 with 96 GB of HBM2e,
limited to 500 W. A GPU that is not in the table is a YAML file with the table's columns:

    name: H100-64GB
    like: H100-80GB     # the GPU of the table that has the figures which are not given
    memory_gib: 63.3
    memory_gbs: 2000
"""

import csv
import re
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import isfinite
from pathlib import Path

from labkit.once_only import of_yaml

TABLE = Path(__file__).with_name("gpus.csv")
DATASHEET = "NVIDIA datasheet"
DTYPES = {"16bit": "bf16", "fp8": "fp8", "fp32": "fp32"}  # column of the table, key of GPU.tflops
PRECISIONS = ("bf16", "fp8", "fp16", "tf32", "fp32")
PLAIN = ("memory_gib", "memory_gbs", "node_gbs", "host_gbs", "network_gbps", "watts")


@dataclass(frozen=True)
class GPU:
    """One kind of GPU.

    tflops: dense peak by dtype, 10^12 FLOP/s; "bf16" is that of both formats of 16 bits, and "fp32"
    that of TF32 if the GPU has it. achievable: by dtype, a share of the peak.
    memory_gib: GiB that a process can allocate. memory_gbs, node_gbs: 10^9 byte/s, the latter in
    one direction. network_gbps: 10^9 bit/s of 8 GPUs, all adapters together.
    host_gbs: 10^9 byte/s to its host's memory, one direction (see BUSES).
    edge, hop: only of a measured GPU (calibrate.py); others use the constants of cost.py. edge: by
    dtype, the side of a product, in elements, at which half its time is lost. hop: seconds of a
    message. precisions: those in which it can train; (): not known. gpus_per_node: of a usual node,
    whose GPUs are connected with node_gbs.
    """

    name: str
    generation: str
    tflops: dict
    achievable: dict
    memory_gib: float
    memory_gbs: float
    node_gbs: float
    host_gbs: float
    network_gbps: float
    watts: float
    source: str
    edge: dict = field(default_factory=dict)
    hop: float | None = None
    precisions: tuple = ()
    gpus_per_node: int = 8

    def has(self, precision):
        """Return whether the GPU has a precision, such as "bf16" or "amp_fp8"."""
        return not self.precisions or precision_of(precision) in self.precisions

    def peak(self, dtype):
        """Return the FLOP/s that a product in `dtype` can reach; bf16's if the GPU lacks it."""
        known = dtype if dtype in self.tflops else "bf16"
        return 1e12 * self.tflops[known] * self.achievable[known]


def precision_of(text):
    """Return the one of PRECISIONS that a text such as "amp_bf16" names, or None."""
    return next((name for name in PRECISIONS if name in text.lower()), None)


def gpu_of(row):
    """Return the GPU of a row: {column of gpus.csv: text or number}.

    Raises ValueError for an unknown column, a missing one, and a figure that is not positive.
    """
    columns = [field for field in HEADER if field != "like"]
    for name in row:
        if name not in HEADER:
            near = get_close_matches(str(name), columns, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(columns)}"
            raise ValueError(f"unknown column {name!r} of a GPU; {hint}")
    told = {name: row.get(name) for name in columns if row.get(name) not in (None, "")}
    missing = [
        name for name in columns if name not in told and not name.endswith(("_fp8", "_fp32"))
    ]
    if missing:
        raise ValueError(
            f"{missing[0]} of the GPU is missing; like: H100-80GB fills what is missing"
        )
    precisions = tuple(str(told["precisions"]).split())
    if unknown := [name for name in precisions if name not in PRECISIONS]:
        raise ValueError(f"precisions must be of {' '.join(PRECISIONS)}, got {unknown[0]!r}")
    kinds = {key: column for column, key in DTYPES.items() if f"tflops_{column}" in told}
    return GPU(
        name=str(told["name"]),
        generation=str(told["generation"]),
        tflops={key: positive(told, f"tflops_{column}") for key, column in kinds.items()},
        achievable={key: positive(told, f"achieved_{column}") for key, column in kinds.items()},
        **{name: positive(told, name) for name in PLAIN},
        source=str(told["source"]),
        precisions=precisions,
        gpus_per_node=int(positive(told, "gpus_per_node")),
    )


def positive(row, name):
    try:
        value = float(row[name])
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"{name} of the GPU must be a number, got {row.get(name)!r}") from None
    if not (isfinite(value) and value > 0):
        raise ValueError(f"{name} of the GPU must be a positive number, got {row[name]}")
    return value


def read_table():
    """Return the rows of gpus.csv: {name in small letters: row}."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return {row["name"].lower(): row for row in csv.DictReader(file)}


def held_at(gpu, watts, **others):
    """Return the GPU under a power limit: dynamic power grows with the cube of the clock."""
    share = (watts / gpu.watts) ** (1 / 3)
    tflops = {dtype: share * peak for dtype, peak in gpu.tflops.items()}
    return replace(gpu, tflops=tflops, watts=watts, **others)


ROWS = read_table()
HEADER = (*next(iter(ROWS.values())), "like")
GPUS = {name: gpu_of(row) for name, row in ROWS.items()}
H100 = GPUS["h100-80gb"]
for limited in ("H100-96GB-500W", "H100-95GB-lowTDP"):
    GPUS[limited.lower()] = held_at(H100, 500, name=limited, memory_gib=94.5, memory_gbs=2400)
# 10^9 bit/s of one adapter, and the source.
ADAPTERS = {
    "InfiniBand EDR": (100, "IBTA roadmap"),
    "InfiniBand HDR": (200, "IBTA roadmap"),
    "InfiniBand NDR": (400, "IBTA roadmap"),
    "InfiniBand XDR": (800, "IBTA roadmap"),
    "RoCE 100": (100, "IEEE 802.3"),
    "RoCE 400": (400, "IEEE 802.3"),
    "Ethernet 10": (10, "IEEE 802.3"),
    "Ethernet 25": (25, "IEEE 802.3"),
    "EFA v2, a node of 8 H100": (3200, "stas00/ml-engineering network/README.md"),
    "EFA v4, one GPU": (400, "stas00/ml-engineering network/README.md"),
}
# 10^9 byte/s in one direction, and the source.
BUSES = {
    "PCIe 3 x16": (15.8, "PCI-SIG"),
    "PCIe 4 x16": (31.5, "stas00/ml-engineering network/README.md"),
    "PCIe 5 x16": (63.0, "stas00/ml-engineering network/README.md"),
    "NVLink 2": (150, DATASHEET),
    "NVLink 3": (300, DATASHEET),
    "NVLink 4": (450, DATASHEET),
    "NVLink 5": (900, DATASHEET),
}

OTHER_WORDS = re.compile(
    r"sxm\d?|hbm\d?e?|nvidia|tensor|core|gpu|geforce|rtx|amd|instinct|nvl72|hgx|dgx|"
)


def find_gpu(name):
    """Return the GPU of a name, of a YAML file, or of a mapping of the columns of gpus.csv.

    A GPU object is returned as it is. "H100" alone is the most usual kind of H100; "A100-64GB" is
    an A100 with that memory. Raises ValueError for an unknown name, with those that are near.
    """
    if isinstance(name, GPU):
        return name
    if isinstance(name, dict):
        return described(name)
    if str(name).lower().endswith((".yaml", ".yml")):
        return gpu_of_file(name)
    wanted = key_of(name)
    keys = {key_of(known): gpu for known, gpu in GPUS.items()}
    memory = re.search(r"-(\d+)(gi?b)?$", wanted)
    base = wanted[: memory.start()] if memory else wanted
    for exact in (wanted, f"{base}-{memory[1]}gb" if memory else wanted):
        if exact in keys:
            return keys[exact]
    for known, gpu in keys.items():
        if base in (known, known.split("-")[0]):
            return replace(gpu, memory_gib=0.989 * int(memory[1])) if memory else gpu
    near = [keys[key].name for key in get_close_matches(base, keys, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(names())}."
    raise ValueError(f"unknown GPU {name!r}; {hint} A YAML file can describe another GPU")


def key_of(name):
    """Return a name in small letters, without words that do not distinguish GPUs."""
    written = "-".join(str(name).strip().lower().replace("_", " ").split())
    written = re.sub(r"^(geforce|rtx)(?=\d)", "", written)
    return "-".join(word for word in written.split("-") if not OTHER_WORDS.fullmatch(word))


def names():
    return [gpu.name for gpu in GPUS.values()]


def described(told):
    """Return the GPU of a mapping of columns; `like` names the GPU that has the other figures."""
    base = {}
    if like := told.get("like"):
        known = find_gpu(like).name.lower()
        base = dict(ROWS.get(known, ROWS["h100-80gb"]))
    filled = base | {"name": "a GPU of yours", "source": "given by the user"} | told
    return gpu_of({name: figure for name, figure in filled.items() if name != "like"})


def mapping_of_file(path, what):
    """Return the mapping of a YAML file. Raises ValueError, one line that begins with the path.

    what: what it must be, such as "a GPU is a mapping of columns to figures".
    """
    try:
        told = of_yaml(Path(path).read_bytes())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(told, dict):
        raise ValueError(f"{path}: {what}")
    return told


def gpu_of_file(path):
    """Return the GPU of a YAML file. Raises ValueError, one line that begins with the path."""
    told = mapping_of_file(path, "a GPU is a mapping of columns to figures, as memory_gib: 80")
    try:
        return described(told)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def with_precision(precision):
    """Return the names of the GPUs that have a precision."""
    return [gpu.name for gpu in GPUS.values() if gpu.has(precision)]
