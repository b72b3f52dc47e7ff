"""The machine card: what a number was measured on. It names the class, never the machine."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import psutil
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("numpy", "matplotlib", "pandas")


def processor():
    """The processor's model as its maker calls it, else its architecture."""
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.split(":", 1)[1].split())
    return platform.processor() or platform.machine()


def usable_cores():
    """Cores this process may run on: the affinity mask, which containers and Slurm narrow."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def backends():
    """The process-group backends this build of torch can use here."""
    checks = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
    }
    return [
        name
        for name, available in checks.items()
        if available() and (name != "nccl" or torch.cuda.is_available())
    ]


def free_bytes(device, ranks):
    """Bytes one of `ranks` ranks may still take: of its CUDA device, or its share of the host's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available // ranks


def card():
    """dict of JSON values: cpu, cores, memory_gib, gpus, software, backends. No host name."""
    gpus = []
    if torch.cuda.is_available():
        for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count())):
            gpus.append(
                {"name": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
            )
    return {
        "cpu": processor(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus,
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "backends": backends(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
    }


def describe(held=None):
    """The card as short lines of text."""
    held = held or card()
    names = [gpu["name"] for gpu in held["gpus"]]
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"
    return "\n".join(
        [
            f"processor  {held['cpu']}, {held['cores']} cores usable",
            f"memory     {held['memory_gib']} GiB",
            f"GPUs       {gpus}",
            f"software   Python {held['python']}, torch {held['torch']}, {held['os']}",
            f"backends   {', '.join(held['backends'])}",
        ]
    )


def host_class(held=None):
    """One phrase for a caption: "2 cores, no GPU, torch 2.13.0"."""
    held = held or card()
    gpus = f"{len(held['gpus'])} x {held['gpus'][0]['name']}" if held["gpus"] else "no GPU"
    return f"{held['cores']} cores, {gpus}, torch {held['torch']}"


def commit():
    """The commit checked out in labkit's repository, "+" where files differ; None outside git."""
    try:
        head = subprocess.run(
            ["git", "-C", ROOT, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True
        )
        changes = subprocess.run(
            ["git", "-C", ROOT, "status", "--porcelain", "-uno"], capture_output=True, text=True
        )
    except FileNotFoundError:
        return None
    return (
        head.stdout.strip() + ("+" if changes.stdout.strip() else "")
        if head.returncode == 0
        else None
    )
