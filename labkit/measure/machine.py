"""The machine card: the class of the machine that a number was measured on, without its name."""

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
    """Return the processor's model name, or its architecture."""
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.split(":", 1)[1].split())
    return platform.processor() or platform.machine()


def usable_cores():
    """Return the cores this process may use: the affinity mask, which containers and Slurm set."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def backends():
    """Return the process-group backends that this build of torch supports on this machine."""
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
    """Return the free bytes of one of `ranks` ranks: of its GPU, or its share of host memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available // ranks


def card():
    """Return a dict of JSON values: cpu, cores, memory_gib, gpus, os, versions, backends, packages.

    The keys of the versions are python, torch and cuda.
    """
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


def describe(values=None):
    """Return a card as short lines of text. values: a card(); None: this machine's."""
    values = values or card()
    names = [gpu["name"] for gpu in values["gpus"]]
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "none"
    return "\n".join(
        [
            f"processor  {values['cpu']}, {values['cores']} cores usable",
            f"memory     {values['memory_gib']} GiB",
            f"GPUs       {gpus}",
            f"software   Python {values['python']}, torch {values['torch']}, {values['os']}",
            f"backends   {', '.join(values['backends'])}",
        ]
    )


def host_class(values=None):
    """Return a card as one phrase for a caption: "2 cores, no GPU, torch 2.13.0"."""
    values = values or card()
    gpus = f"{len(values['gpus'])} x {values['gpus'][0]['name']}" if values["gpus"] else "no GPU"
    return f"{values['cores']} cores, {gpus}, torch {values['torch']}"


def commit():
    """Return the commit of labkit's repository; "+" if tracked files differ; None outside git."""
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
