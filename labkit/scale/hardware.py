"""A table of GPUs and of the links between them, with the source of each figure.

    GPU  -- memory: bandwidth --  [ arithmetic: peak by dtype ]
     |
     +-- NVLink or PCIe: to the GPUs of its node, `node_gbs` in each direction
     +-- PCIe: to the memory of its host, `host_gbs`
     +-- network: the node's adapters together, `network_gbps`, shared by its GPUs

Peaks are without sparsity. `achievable` is the rate of the fastest matrix product in the sources,
as a share of the peak, and so an upper limit for a job. Sources: NVIDIA's datasheets of V100, A100,
H100, H200, B200 (peaks, bandwidth, memory, NVLink, watts); stas00/ml-engineering,
compute/accelerator/README.md, "Maximum Achievable Matmul FLOPS" (A100 SXM 271.2 of 312, H100 SXM
794.5 of 989 in bf16, 1402.6 of 1979 in fp8); pytorch/torchtitan, benchmarks (H100 with 96 GB,
HBM2e, limited to 500 W). A Grace CPU, of one GH200 or two GB200, has 900 GB/s to its GPUs, both
directions together.
"""

import re
from dataclasses import dataclass, field, replace
from difflib import get_close_matches

DATASHEET = "NVIDIA datasheet"
MATMUL = "stas00/ml-engineering compute/accelerator/README.md"


@dataclass(frozen=True)
class GPU:
    """One kind of GPU.

    tflops: dense peak by dtype, 10^12 FLOP/s. achievable: by dtype, a share of the peak.
    memory_gib: GiB that a process can allocate. memory_gbs, node_gbs: 10^9 byte/s, the latter in
    one direction. network_gbps: 10^9 bit/s of a usual node of 8, all adapters together.
    host_gbs: 10^9 byte/s to its host's memory, one direction (see BUSES).
    edge, hop: only of a measured GPU (calibrate.py); others use the constants of cost.py. edge: by
    dtype, the side of a product, in elements, at which half its time is lost. hop: seconds of a
    message.
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

    def peak(self, dtype):
        """Return the FLOP/s that a product in `dtype` can reach; bf16's if the GPU lacks it."""
        known = dtype if dtype in self.tflops else "bf16"
        return 1e12 * self.tflops[known] * self.achievable[known]


# The table has no measured maximum of V100: we use A100's share.
V100 = GPU(
    name="V100-32GB",
    generation="volta",
    tflops={"bf16": 125.0, "fp32": 15.7},
    achievable={"bf16": 0.869, "fp32": 0.9},
    memory_gib=31.7,
    memory_gbs=900,
    node_gbs=150,
    host_gbs=15.8,
    network_gbps=100,
    watts=300,
    source=f"{DATASHEET} V100 SXM2; DGX-1 has 4 x 100 Gbit/s, its clones often one",
)
A100 = GPU(
    name="A100-80GB",
    generation="ampere",
    tflops={"bf16": 312.0, "fp32": 156.0},
    achievable={"bf16": 0.869, "fp32": 0.8},
    memory_gib=79.1,
    memory_gbs=2039,
    node_gbs=300,
    host_gbs=31.5,
    network_gbps=1600,
    watts=400,
    source=f"{DATASHEET} A100 SXM, fp32 as TF32; {MATMUL}",
)
H100 = GPU(
    name="H100-80GB",
    generation="hopper",
    tflops={"bf16": 989.4, "fp8": 1978.9, "fp32": 494.7},
    achievable={"bf16": 0.803, "fp8": 0.709, "fp32": 0.8},
    memory_gib=79.1,
    memory_gbs=3350,
    node_gbs=450,
    host_gbs=63,
    network_gbps=3200,
    watts=700,
    source=f"{DATASHEET} H100 SXM; {MATMUL}",
)
B200 = GPU(
    name="B200-180GB",
    generation="blackwell",
    tflops={"bf16": 2250.0, "fp8": 4500.0, "fp32": 1125.0},
    achievable={"bf16": 0.776, "fp8": 0.7, "fp32": 0.8},
    memory_gib=178.4,
    memory_gbs=7700,
    node_gbs=900,
    host_gbs=63,
    network_gbps=3200,
    watts=1000,
    source=f"{DATASHEET} HGX B200; {MATMUL}",
)


def held_at(gpu, watts, **others):
    """Return the GPU under a power limit: dynamic power grows with the cube of the clock."""
    share = (watts / gpu.watts) ** (1 / 3)
    tflops = {dtype: share * peak for dtype, peak in gpu.tflops.items()}
    return replace(gpu, tflops=tflops, watts=watts, **others)


GPUS = {
    gpu.name.lower(): gpu
    for gpu in (
        V100,
        replace(V100, name="V100-16GB", memory_gib=15.8),
        A100,
        replace(A100, name="A100-40GB", memory_gib=39.4, memory_gbs=1555),
        replace(A100, name="A100-PCIe", memory_gbs=1935, node_gbs=32, watts=300),
        replace(A100, name="A800", node_gbs=200),
        H100,
        held_at(H100, 500, name="H100-96GB-500W", memory_gib=94.5, memory_gbs=2400),
        held_at(H100, 500, name="H100-95GB-lowTDP", memory_gib=94.5, memory_gbs=2400),
        held_at(H100, 350, name="H100-PCIe", memory_gbs=2000, node_gbs=64),
        replace(H100, name="H800", node_gbs=200),
        replace(H100, name="H20", tflops={"bf16": 148.0, "fp8": 296.0}, memory_gib=94.5),
        replace(H100, name="H200", memory_gib=139.8, memory_gbs=4800),
        replace(H100, name="GH200", memory_gib=94.5, memory_gbs=4000, host_gbs=450, watts=900),
        B200,
        replace(B200, name="GB200", memory_gib=184.0, memory_gbs=8000, host_gbs=225, watts=1200),
    )
}
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

OTHER_WORDS = re.compile(r"sxm\d?|hbm\d?e?|nvidia|tensor|core|gpu|")


def find_gpu(name):
    """Return the GPU of that name; a GPU object is returned as it is.

    "H100" alone is the most usual kind of H100; "A100-64GB" is an A100 with that memory. For an
    unknown name, raises ValueError with the nearest known names.
    """
    if isinstance(name, GPU):
        return name
    written = "-".join(str(name).strip().lower().replace("_", " ").split())
    words = [word for word in written.split("-") if not OTHER_WORDS.fullmatch(word)]
    wanted = "-".join(words)
    if wanted in GPUS:
        return GPUS[wanted]
    memory = re.search(r"-(\d+)gi?b$", wanted)
    base = wanted[: memory.start()] if memory else wanted
    for known, gpu in GPUS.items():
        if base in (known, known.split("-")[0]):
            return replace(gpu, memory_gib=0.989 * int(memory[1])) if memory else gpu
    near = get_close_matches(base, GPUS, n=3, cutoff=0.0)
    raise ValueError(
        f"unknown GPU {name!r}: the nearest known are {', '.join(GPUS[n].name for n in near)}"
    )
