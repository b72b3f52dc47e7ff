"""The import rule of labkit/__init__.py, read from the sources: imports go downward only.

show -> run -> {trainer, measure, models}     {show, run} -> cluster -> scale -> measure -> comm
trainer -> FAMILIES, each -> those before it -> {ideas, mesh, comm, ...} -> torch     ideas -> comm
"""

import ast
import sys
from pathlib import Path

import pytest

import labkit

ROOT = Path(labkit.__file__).parent

FLOOR = ("comm", "comm_log", "gloo_workarounds", "progress", "mesh", "replicas", "collective_errors")
FLOOR += ("pickle_support", "open_without_links", "ring_cost", "torch_private")
# Each may import those before it.
FAMILIES = (
    *(
        "allreduce",
        "hierarchical",
        "ddp",
        "amp",
        "zero",
        "offload",
        "fsdp",
        "local_sgd",
        "horovod",
        "lamb",
        "compression",
    ),
    *("recompute", "memory", "tensor_parallel", "attention", "moe", "pipeline"),
    *("sampler", "learning_rate", "preempt", "watchdog", "checkpoint", "parallelize"),
)
ALL = {"floor", "ideas", *FAMILIES, "fully_shard_messages", "trainer"}
BELOW = {
    "floor": {"floor"},
    "ideas": {"floor", "ideas"},
    **{family: {"floor", "ideas", *FAMILIES[: at + 1]} for at, family in enumerate(FAMILIES)},
    "fully_shard_messages": {"floor"},
    "trainer": ALL,
    "models": {"models"},
    "once_only": {"once_only"},
    "measure": {"floor", "measure"},
    "scale": {"floor", "measure", "scale", "once_only"},
    "cluster": {"floor", "measure", "scale", "cluster"},
    "run": {*ALL, "measure", "models", "scale", "cluster", "run", "once_only"},
    "show": {*ALL, "measure", "models", "run", "scale", "cluster", "show"},
}
FROM_SCRATCH = {"floor", "ideas", *FAMILIES}
# What a checkpoint must reach, and nobody learns from rebuilding: storage behind a URL, numpy's random state.
LIBRARIES = {"checkpoint": ("fsspec", "numpy", "xxhash")}
# torch's own answers to what the algorithms build: they are oracles, for the trainer and the tests to compare with.
ORACLES = (
    "torch.nn.parallel",
    "torch.nn.DataParallel",
    "torch.utils.data.distributed",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.algorithms",
    "torch.distributed.tensor",
    "torch.distributed._tensor",
    "torch.distributed._composable",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "torch.distributed.device_mesh",
)


def layer(module):
    """The layer of "labkit.x.y": the floor, or the folder or file below labkit."""
    _, *rest = module.split(".")
    if not rest:
        return "top"
    if rest[0] in ("train", "convert"):  # commands
        return "run"
    return "floor" if rest[0] in FLOOR else rest[0]


def imported(tree, package):
    """Every dotted name a file imports, relative ones made absolute; `from a import b` gives a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parent = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parent, *([node.module] if node.module else [])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def used(tree):
    """Every dotted name a file writes out, as in `torch.nn.parallel.DistributedDataParallel(...)`."""
    yield from (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))


def violations(module, source, package=None):
    """What in the source of a module breaks the rule, one line each. package: the module itself for an __init__.py."""
    tree, mine = ast.parse(source), layer(module)
    package = package or module.rpartition(".")[0]
    if mine == "top":  # it only loads the cell magic, and only when asked to
        tree = ast.Module([node for node in tree.body if not isinstance(node, ast.FunctionDef)], [])
    found = []
    names = list(imported(tree, package))
    for name in names:
        root = name.partition(".")[0]
        if root == "labkit":
            theirs = layer(name)
            beside_comm = mine == "ideas" and theirs == "floor" and name != "labkit.comm"
            if beside_comm or theirs not in BELOW.get(mine, set()):
                found.append(f"{module} ({mine}) imports {name} ({theirs})")
        elif (
            mine in FROM_SCRATCH
            and root not in ("torch", *LIBRARIES.get(mine, ()))
            and root not in sys.stdlib_module_names
        ):
            found.append(f"{module} ({mine}) imports {name}, which is neither torch nor Python")
        elif mine == "models" and name.startswith("torch.distributed"):
            found.append(f"{module}: a model is unaware of ranks, but imports {name}")
    if mine in FROM_SCRATCH:
        for name in sorted({*names, *used(tree)}):
            if any(f"{name}.".startswith(f"{oracle}.") for oracle in ORACLES):
                found.append(f"{module} ({mine}) builds on {name}, its own oracle")
    return found


def modules():
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        yield path, ".".join(part for part in parts if part != "__init__")


@pytest.mark.parametrize(("path", "module"), [pytest.param(p, m, id=m) for p, m in modules()])
def test_imports_go_downward(path, module):
    package = module if path.name == "__init__.py" else None
    assert violations(module, path.read_text(encoding="utf-8"), package) == []


def circle(files):
    """files: module -> names it imports. The modules that import each other in a circle, or lean on one that does."""
    needs = {
        module: {name if name in files else name.rpartition(".")[0] for name in names} & (files.keys() - {module})
        for module, names in files.items()
    }
    finished = set()
    while ready := {module for module in needs.keys() - finished if needs[module] <= finished}:
        finished |= ready
    return needs.keys() - finished


def test_nothing_imports_itself_in_a_circle():
    files = {}
    for path, module in modules():
        if module != "labkit":
            package = module if path.name == "__init__.py" else module.rpartition(".")[0]
            files[module] = list(imported(ast.parse(path.read_text(encoding="utf-8")), package))
    assert circle(files) == set()


def test_a_circle_is_found():
    files = {"labkit.a": ["labkit.b.name"], "labkit.b": ["torch", "labkit.c"], "labkit.c": []}
    assert circle(files) == set()
    files["labkit.c"].append("labkit.a")
    assert circle(files) == {"labkit.a", "labkit.b", "labkit.c"}


BAD = {
    "an algorithm imports a room": ("labkit.ddp", "from labkit.measure import timeline"),
    "an algorithm imports the models": ("labkit.zero", "import labkit.models.gpt"),
    "inside a function": ("labkit.ddp", "def f():\n    from labkit import run"),
    "an algorithm imports one above it": ("labkit.ddp.ddp", "from labkit.zero import ZeRO1"),
    "by its other spelling": ("labkit.ddp.ddp", "from labkit import zero"),
    "relatively": ("labkit.local_sgd", "from . import horovod"),
    "relatively from a folder": ("labkit.ddp.reducer", "from ..compression import TopK"),
    "an algorithm imports the trainer": ("labkit.ddp", "import labkit.trainer"),
    "the floor imports an algorithm": ("labkit.comm", "from labkit.allreduce import ring"),
    "an idea imports a class": ("labkit.ideas.zero", "from labkit.ddp import DDP"),
    "an idea imports more of the floor than comm": ("labkit.ideas.zero", "from labkit.mesh import Mesh"),
    "measure imports run": ("labkit.measure.stats", "from labkit.run import launch"),
    "measure imports an algorithm": ("labkit.measure.timeline", "from labkit.ddp import DDP"),
    "run imports show": ("labkit.run.magic", "from labkit.show import plots"),
    "a cluster imports run": ("labkit.cluster.slurm", "from labkit.run.experiment import Experiment"),
    "a cluster imports the trainer": ("labkit.cluster.queue", "import labkit.trainer"),
    "a prediction knows of clusters": ("labkit.scale.search", "from labkit.cluster import placement"),
    "the trainer imports a model": ("labkit.trainer", "from labkit.models import build"),
    "a model knows of ranks": ("labkit.models.gpt", "import torch.distributed as dist"),
    "an algorithm knows of larger machines": ("labkit.memory", "from labkit.scale import memory_model"),
    "a prediction knows the models of this course": ("labkit.scale.cost", "from labkit.models import gpt"),
    "a model imports comm": ("labkit.models.gpt", "from labkit import comm"),
    "an algorithm needs numpy": ("labkit.ddp", "import numpy"),
    "an algorithm is its oracle": ("labkit.ddp", "from torch.nn.parallel import DistributedDataParallel"),
    "an algorithm is its oracle, written out": ("labkit.fsdp", "torch.distributed.fsdp.fully_shard(m)"),
    "the package loads a room at once": ("labkit", "from labkit import run"),
}
GOOD = {
    "downward": (
        "labkit.ddp",
        "import torch\nimport weakref\nfrom labkit import comm\nfrom labkit.ddp.bucket import Bucket",
    ),
    "files of one algorithm": ("labkit.compression.topk", "from .residual import Residual"),
    "skipping a layer": ("labkit.run.compare", "from labkit import comm"),
    "run starts jobs on a cluster": ("labkit.run.launch", "from labkit.cluster import network_namespaces"),
    "placement asks the planner": ("labkit.cluster.placement", "from labkit.scale.collectives import ring"),
    "the trainer holds the oracles": ("labkit.trainer", "from torch.nn.parallel import DistributedDataParallel"),
    "the magic, when asked": ("labkit", "def load(shell):\n    from labkit.run import magic"),
    "a name that only begins alike": ("labkit.ddp", "from torch.distributed import tensorial"),
}


@pytest.mark.parametrize("case", BAD)
def test_the_rule_can_fail(case):
    assert len(violations(*BAD[case])) >= 1


@pytest.mark.parametrize("case", GOOD)
def test_the_rule_lets_pass(case):
    assert violations(*GOOD[case]) == []
