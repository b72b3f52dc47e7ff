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
HEADERS = {9000: 1.03, 1500: 1.08}  # what the wire may carry, of what the formula says
LINK_USE = 0.9  # the least, with no byte counted but the formula's
CLAIMED = ("flat", "hierarchical")  # by leaders, one step waits for the other: told, not claimed


def times(context, mib, repetitions):
    """Runs on every rank."""
    import torch

    from labkit import comm
    from labkit.hierarchical import by_leaders, hierarchical
    from labkit.mesh import Mesh
    from labkit.run.network_namespaces import counters

    mesh = Mesh({"node": 2, "local": context.world_size // 2})
    inside, across = mesh.group("local"), mesh.group("node")
    tensor = torch.zeros(mib * 2**20 // 4)

    def counted(all_reduce):
        before, _ = counters()
        all_reduce()
        comm.barrier()  # all that the node's other ranks sent has left as well
        return {"wire": counters()[0] - before}

    variants = {
        "flat": lambda: counted(lambda: comm.all_reduce(tensor)),
        "flat again": lambda: counted(lambda: comm.all_reduce(tensor)),
        "hierarchical": lambda: counted(lambda: hierarchical(tensor, inside, across)),
        "leaders": lambda: counted(lambda: by_leaders(tensor, inside, across)),
    }
    time_variants(context, variants, repetitions=repetitions, steps=1)


def rows(nproc, mtu, mib, milliseconds, wire):
    """Comparisons of measured columns and of what the formula and the link allow."""
    ranks, payload = 2 * nproc, mib * 2**20
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
    fewer = egress["hierarchical"] / egress["flat"]  # and the time within 15 % of that
    for name, most in (("hierarchical", 1.15 * fewer), ("leaders", None)):
        yield Comparison(f"{name} / flat, bytes {fewer:.3f}", name, "flat", most).row(group, ranks, milliseconds)
    yield Comparison("A/A: flat / flat", "flat again", "flat").row(group, ranks, milliseconds)


def run(repetitions):
    """Yield the rows and the raw values; nothing, after the line that says why, where there are no namespaces."""
    if launch("pass", nodes=2, nproc=1).network["how"] == "loopback":
        return
    for nproc, mtu, mib in CASES:
        link = {"nodes": 2, "nproc": nproc, "link_mbit": LINK_MBIT, "link_mtu": mtu}
        records = launch("benchmarks.network:times", **link, mib=mib, repetitions=repetitions, timeout=1800).records
        milliseconds, wire = columns(records), columns(records, "wire")
        yield list(rows(nproc, mtu, mib, milliseconds, wire)), {"ms": milliseconds, "wire": wire}
