"""All-reduce between two nodes on a shaped link: bytes on the interface, use of the link, hierarchical against flat."""

from benchmarks.protocol import Comparison
from labkit.measure.interleaved_timing import columns, time_variants
from labkit.run import launch

LINK_MBIT = 200
CASES = (  # ranks of a node, bytes of a frame, MiB of the tensor: 25 is a bucket of DDP
    (2, 9000, 8),
    (4, 9000, 8),
    (2, 1500, 8),
    (2, 9000, 25),
)
HEADERS = {9000: 1.03, 1500: 1.08}  # largest ratio of bytes on the link to those of the formula
LINK_USE = 0.9  # smallest use of the link, counting only the bytes of the formula
CLAIMED = ("flat", "hierarchical")  # with leaders, one step waits for the other: no claim


def times(context, mib, repetitions):
    """Measure on every rank."""
    import torch

    from labkit import comm
    from labkit.cluster.network_namespaces import counters
    from labkit.hierarchical import by_leaders, hierarchical
    from labkit.mesh import Mesh

    mesh = Mesh({"node": 2, "local": context.world_size // 2})
    inside = mesh.group("local")
    across = mesh.group("node")
    tensor = torch.zeros(mib * 2**20 // 4)

    def counted(all_reduce):
        before, _ = counters()
        all_reduce()
        comm.barrier()  # so that messages of the node's other ranks have left, too
        return {"wire": counters()[0] - before}

    variants = {
        "flat": lambda: counted(lambda: comm.all_reduce(tensor)),
        "flat again": lambda: counted(lambda: comm.all_reduce(tensor)),
        "hierarchical": lambda: counted(lambda: hierarchical(tensor, inside, across)),
        "leaders": lambda: counted(lambda: by_leaders(tensor, inside, across)),
    }
    time_variants(context, variants, repetitions=repetitions, steps=1)


def rows(nproc, mtu, mib, milliseconds, wire):
    """Return comparisons of measured columns with the formula and the speed of the link."""
    ranks = 2 * nproc
    payload = mib * 2**20
    egress = {"flat": 2 * (ranks - 1) / ranks * payload, "hierarchical": payload, "leaders": payload}
    group = f"2 x {nproc} ranks, {LINK_MBIT} Mbit/s, MTU {mtu}, {mib} MiB"
    for name, least in egress.items():
        most = 1 / LINK_USE if name in CLAIMED else None
        compared = Comparison(f"bytes on the wire / formula, {name}", "wire", "formula", HEADERS[mtu])
        yield compared.row(group, ranks, {"wire": wire[name], "formula": [least] * len(wire[name])})
        if mtu == 9000:
            ideal = 1000 * least * 8 / (LINK_MBIT * 1e6)
            compared = Comparison(f"time / time of these bytes, {name}", "time", "least", most)
            yield compared.row(group, ranks, {"time": milliseconds[name], "least": [ideal] * len(milliseconds[name])})
    fewer = egress["hierarchical"] / egress["flat"]  # the time must be within 15 % of this
    for name, most in (("hierarchical", 1.15 * fewer), ("leaders", None)):
        yield Comparison(f"{name} / flat, bytes {fewer:.3f}", name, "flat", most).row(group, ranks, milliseconds)
    yield Comparison("A/A: flat / flat", "flat again", "flat").row(group, ranks, milliseconds)


def run(repetitions):
    """Yield the rows and the raw values; without namespaces, print a line and yield nothing."""
    if launch("pass", nodes=2, nproc=1).network["how"] == "loopback":
        return
    for nproc, mtu, mib in CASES:
        link = {"nodes": 2, "nproc": nproc, "link_mbit": LINK_MBIT, "link_mtu": mtu}
        records = launch("benchmarks.network:times", **link, mib=mib, repetitions=repetitions, timeout=1800).records
        milliseconds = columns(records)
        wire = columns(records, "wire")
        yield list(rows(nproc, mtu, mib, milliseconds, wire)), {"ms": milliseconds, "wire": wire}
