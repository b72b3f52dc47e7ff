"""The description of a launch, validated, as JSON: job.json in the run's folder.

    launch(train, steps=20)             kind "source"    the function's source and name are sent
    launch("package.module:train")      kind "function"  imported by each rank
    launch("train.py", steps=20)        kind "script"    with arguments: --steps=20
    launch("record(x=rank)")            kind "cell"      run unchanged

Invalid arguments raise here, with a one-line message, before a process is started.
"""

import inspect
import json
import re
import textwrap
from dataclasses import asdict
from pathlib import Path

from labkit.cluster import network_namespaces as network


def describe_nodes(nodes, mbit, ms, mtu):
    """Return the job's nodes and links, validated."""
    if not isinstance(nodes, int) or not 1 <= nodes <= network.MOST_NODES:
        raise ValueError(f"nodes={nodes!r}: must be a whole number from 1 to {network.MOST_NODES}")
    link = network.Link(mbit, ms, mtu)
    if nodes == 1 and link != network.Link():
        raise ValueError(
            "link_mbit, link_ms and link_mtu need a link between nodes: use nodes=2 or more"
        )
    return {"nodes": nodes, "link": asdict(link)}


def describe_target(target, parameters):
    """Return the job's kind, target and parameters in a form that JSON supports."""
    job = {"parameters": check_parameters(parameters)}
    if not isinstance(target, str):
        source = source_of(target)
        if "<lambda>" in target.__qualname__ or target.__closure__:
            raise ValueError(
                "cannot send a lambda or closure to other processes: pass a plain function"
            )
        return job | {"kind": "source", "target": source, "name": target.__name__}
    if "\n" not in target and target.endswith(".py"):
        path = Path(target).resolve()
        if not path.is_file():
            raise ValueError(f"no such script: {target}")
        options = [f"--{name.replace('_', '-')}={value}" for name, value in parameters.items()]
        return job | {"kind": "script", "target": str(path), "arguments": options}
    kind = "function" if re.fullmatch(r"[\w.]+:\w+", target) else "cell"
    if kind == "cell":
        compile(target, "<cell>", "exec")
    return job | {"kind": kind, "target": target}


def source_of(function):
    """Return the source of a plain function. Raises ValueError for any other object."""
    if not inspect.isfunction(function):
        raise ValueError(
            f"cannot run an object of type {type(function).__name__} on ranks: "
            "pass a plain function, "
            "the source of a cell, or the path of a script"
        )
    try:
        return textwrap.dedent(inspect.getsource(function))
    except OSError:
        raise ValueError(
            f"cannot find the source of {function.__name__}(): define it in a file or a cell"
        ) from None


def check_parameters(parameters):
    """Return the parameters. Raises ValueError for one that JSON does not support."""
    for name, value in parameters.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            raise ValueError(
                f"parameter {name} is of type {type(value).__name__}: pass numbers, strings, lists "
                f"and dicts of these, such as {name}.tolist(), or the path of a file"
            ) from None
    return parameters


def choose_device(device, nproc):
    """Return "cpu" or "cuda".

    Counts GPUs without initialising CUDA, so that later forks can use it.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f'device={device!r}: must be "auto", "cpu" or "cuda"')
    if device == "cpu":  # returns before importing torch, which takes seconds
        return device
    import torch

    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus < nproc:
        raise ValueError(
            f"{nproc} ranks on cuda need {nproc} GPUs, and this machine has {gpus}: lower nproc, "
            "or use device='cpu'"
        )
    if 0 < gpus < nproc:
        print(f"[launch] {nproc} ranks but only {gpus} GPUs: running on the CPU")
    return "cuda" if gpus >= nproc else "cpu"
