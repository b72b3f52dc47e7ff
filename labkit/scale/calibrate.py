"""Measure this machine as one more row of hardware.py: matrix products, memory and links.

    rate |             o----o- - p         a product of sides n takes  2 n^3 / p  x  (1 + 3 e/n):
         |        o                        it reaches 1 / (1 + e/n + e/n + e/n) of the rate of a
         |    o                            large one, as in cost.py; e, in elements, is fitted
         | o                               a copy of S bytes reads and writes them: 2 S
         +------------------ n             a message and a reply of one byte: 2 alpha + S beta

    ranks      measure()  ->  rows of seconds      all ranks at once: they share cores and memory
    notebook   rows  ->  products, link  ->  machine, a GPU for cost.py and plan.py

The fit uses the medians of all ranks and rounds, so a slow round has little influence.
Williams et al., Roofline, CACM 2009; Hockney, The communication challenge for MPP, 1994 (alpha and
beta). The same in production: mamf-finder.py of stas00/ml-engineering, NVIDIA's nccl-tests.
"""

from math import nan
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist

from labkit.measure.clock import clock_of
from labkit.measure.link_probe import link_times
from labkit.measure.machine import free_bytes, host_class
from labkit.measure.scaling import nonnegative
from labkit.measure.stats import summary
from labkit.scale.collectives import NETWORK_SHARE, NODE_SHARE
from labkit.scale.hardware import GPU

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
USUAL = {"cpu": ("fp32",), "cuda": ("fp32", "bf16")}  # few CPUs compute in 16 bits
SIDES = {
    "cpu": (64, 96, 128, 192, 256, 384, 512, 768, 1024),
    "cuda": (256, 512, 1024, 2048, 4096, 8192),
}
COPIED = {"cpu": 1 << 26, "cuda": 1 << 30}  # bytes: far more than a cache holds
LONG = 0.1  # seconds: longer products are not measured
# Bytes. Short messages determine alpha, long ones beta. Sizes between may fit the buffer of a slow
# link (cluster/network_namespaces.py: a token bucket of two frames), which accepts them at once.
MESSAGES = (1 << 8, 1 << 10, 1 << 18, 1 << 19)


def fit_products(sides, seconds):
    """Fit (FLOP/s of a large product, e) to square products: a FLOP takes 1/p + 3 e/(n p).

    If the rate still grows linearly with the side, p is the fastest measured rate.
    """
    sides, seconds = np.asarray(sides, float), np.asarray(seconds, float)
    rates = 2 * sides**3 / seconds
    whole, edges = nonnegative(np.stack([rates, 6 * sides**2 / seconds], axis=1), "products")
    if whole == 0:
        return rates.max(), np.mean((rates.max() / rates - 1) * sides / 3)
    return 1 / whole, edges / whole


def fit_link(sizes, seconds):
    """Fit (alpha, beta), seconds of a message and of a byte, to round trips with a 1-byte reply."""
    sizes, seconds = np.asarray(sizes, float), np.asarray(seconds, float)
    return nonnegative(np.stack([2 / seconds, sizes / seconds], axis=1), "messages")


def seconds_of(work, device, least=0.02):
    """Return the seconds of one call, from enough calls in a row to take `least` seconds.

    On a CUDA device, events measure the time.
    """
    clock, moments, calls = clock_of(device), SimpleNamespace(), 1
    work()  # the first call selects an algorithm and allocates memory
    while True:
        clock.stamp(moments, "start")
        for _ in range(calls):
            work()
        clock.stamp(moments, "end")
        clock.resolve()
        took = moments.end - moments.start
        if took >= least:
            return took / calls
        calls *= 2


def measure(device="cpu", dtypes=None, sides=None, messages=MESSAGES, rounds=5):
    """Yield this rank's rows (dicts): what, dtype, size, round, seconds. Collective if distributed.

    what: "product" of square matrices of `size`, "copy" of `size` bytes on the device, "transfer"
    of as many bytes from the host to a CUDA device, "message" of `size` bytes to the rank with the
    fastest link, and "memory", the `size` bytes that the rank may allocate.
    """
    device = torch.device(device)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    yield {"what": "memory", "size": free_bytes(device, ranks)}
    copied = torch.ones(COPIED[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(copied)
    host = (
        torch.ones(copied.numel(), dtype=torch.uint8, pin_memory=True) if copied.is_cuda else None
    )
    for turn in range(rounds):
        row = {"round": turn}
        for dtype in dtypes or USUAL[device.type]:
            for side in sides or SIDES[device.type]:
                a, b = (torch.randn(side, side, device=device).to(DTYPES[dtype]) for _ in range(2))
                seconds = seconds_of(lambda a=a, b=b: a @ b, device)
                yield row | {"what": "product", "dtype": dtype, "size": side, "seconds": seconds}
                if 8 * seconds > LONG:  # the time for twice the side
                    break
        seconds = seconds_of(lambda: target.copy_(copied), device)
        yield row | {"what": "copy", "size": copied.numel(), "seconds": seconds}
        if host is not None:
            seconds = seconds_of(lambda: target.copy_(host, non_blocking=True), device)
            yield row | {"what": "transfer", "size": copied.numel(), "seconds": seconds}
        for size in messages if ranks > 1 else ():
            seconds = min(link_times(size, device).values()) / 1e3
            yield row | {"what": "message", "size": size, "seconds": seconds}


def products(rows, dtype):
    """Return (FLOP/s of a large product, e) of one dtype; rows: a DataFrame of all ranks' rows."""
    mine = rows[(rows["what"] == "product") & (rows["dtype"] == dtype)]
    return fit_products(*medians(mine))


def link(rows):
    """Return (alpha, beta), seconds of a message and of a byte; rows: as for products()."""
    return fit_link(*medians(rows[rows["what"] == "message"]))


def medians(rows):
    """Return (sizes, median seconds) over all ranks and rounds."""
    times = rows.groupby("size")["seconds"].median()
    return times.index, times


def moved(rows, what):
    """Return the byte/s of a "copy" or a "transfer": a Summary over all ranks and rounds."""
    mine = rows[rows["what"] == what]
    return summary(mine["size"] / mine["seconds"])


def machine(rows, name="this machine"):
    """Return a GPU with the measured figures, one GPU per rank.

    Peaks are the rates that large products reach here, so `achievable` is 1. If bf16 was not
    measured, it gets the fastest measured rate. Link bandwidths are scaled up so that cost.py's
    shares of them give the measured byte/s; with one rank they are the memory's. watts is NaN.
    Raises ValueError, one line, if the rows contain no products.
    """
    dtypes = rows.loc[rows["what"] == "product", "dtype"].unique()
    fits = {dtype: products(rows, dtype) for dtype in dtypes}
    if not fits:
        raise ValueError("no products were measured: pass measure() at least one dtype and side")
    fits.setdefault("bf16", max(fits.values()))
    on_cuda = (rows["what"] == "transfer").any()
    memory = 2 * moved(rows, "copy").median
    alpha, beta = 0.0, 1 / memory
    if (rows["what"] == "message").any():
        alpha, beta = link(rows)
        beta = max(beta, 1 / memory)  # noise can make a message look faster than a copy
    return GPU(
        name=name,
        generation="measured",
        tflops={dtype: 1e-12 * peak for dtype, (peak, _) in fits.items()},
        achievable=dict.fromkeys(fits, 1.0),
        memory_gib=float(rows.loc[rows["what"] == "memory", "size"].min() / 2**30),
        memory_gbs=1e-9 * memory,
        node_gbs=1e-9 / beta / NODE_SHARE,
        host_gbs=1e-9 * (moved(rows, "transfer").median if on_cuda else memory),
        network_gbps=8e-9 / beta / NETWORK_SHARE,
        watts=nan,
        source=f"measured here: {host_class()}",
        edge={dtype: edge for dtype, (_, edge) in fits.items()},
        hop=alpha,
    )
