"""What ranks are told to run, checked, and as JSON can carry it: job.json in the run's folder.

    launch(train, steps=20)             kind "source"    the function's source travels, and its name
    launch("package.module:train")      kind "function"  imported by each rank
    launch("train.py", steps=20)        kind "script"    with arguments: --steps=20
    launch("record(x=rank)")            kind "cell"      run as it stands

Whatever cannot be is told here, in one line, before a process is started.
"""

import inspect
import json
import re
import textwrap
from dataclasses import asdict
from pathlib import Path

from labkit.run import network_namespaces as network


def describe_nodes(nodes, mbit, ms, mtu):
    """The job's nodes and links, checked."""
    if not isinstance(nodes, int) or not 1 <= nodes <= network.MOST_NODES:
        raise ValueError(
            f"nodes={nodes!r}: the number of nodes is a whole number from 1 to {network.MOST_NODES}"
        )
    link = network.Link(mbit, ms, mtu)
    if nodes == 1 and link != network.Link():
        raise ValueError("one node has no link to slow down: nodes=2 or more")
    return {"nodes": nodes, "link": asdict(link)}


def describe_target(target, parameters):
    """The job's kind, target and parameters, as JSON can carry them."""
    job = {"parameters": check_parameters(parameters)}
    if not isinstance(target, str):
        source = source_of(target)
        if "<lambda>" in target.__qualname__ or target.__closure__:
            raise ValueError(
                "a lambda or closure cannot travel to other processes: pass a plain function"
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
    """The text of a plain function. ValueError for anything else."""
    if not inspect.isfunction(function):
        raise ValueError(
            f"cannot run an object of type {type(function).__name__} on ranks: pass a plain "
            "function, whose source travels, a cell's source, or a script's path as text"
        )
    try:
        return textwrap.dedent(inspect.getsource(function))
    except OSError:
        raise ValueError(
            f"the source of {function.__name__}() is not known: define it in a file or a cell"
        ) from None


def check_parameters(parameters):
    """The same; ValueError names one that JSON cannot carry."""
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
    """ "cpu" or "cuda". Counts GPUs without touching CUDA, so that later forks stay clean."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f'device={device!r}: it is "auto", "cpu" or "cuda"')
    if device == "cpu":  # and torch need not be imported here: seconds
        return device
    import torch

    gpus = torch.cuda.device_count()
    if device == "cuda" and gpus < nproc:
        raise ValueError(
            f"{nproc} ranks on cuda need {nproc} GPUs, and here are {gpus}: "
            "lower nproc, or device='cpu'"
        )
    if 0 < gpus < nproc:
        print(f"[launch] {nproc} ranks and {gpus} GPUs: running on the CPU")
    return "cuda" if gpus >= nproc else "cpu"
