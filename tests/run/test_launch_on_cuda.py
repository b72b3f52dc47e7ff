"""What a CUDA build of torch would see of a launch. A stand-in for its driver calls shows it on any machine."""

import os
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from torch.distributed import distributed_c10d

from labkit.run import launch, worker
from labkit.run.client import AgentClient

# Loaded by every Python that starts. As in a CUDA build: whoever asks the driver spoils CUDA for all later forks.
CUDA_BUILD = """
import importlib.abc, importlib.machinery, os, sys

class Loader(importlib.abc.Loader):
    def __init__(self, real):
        self.real = real

    def create_module(self, spec):
        return self.real.create_module(spec)

    def exec_module(self, module):
        self.real.exec_module(module)
        names = "getDeviceCount init getDevice setDevice getCurrentRawStream".split()
        for name in names:
            setattr(module, f"_cuda_{name}", ask_the_driver)
        module._cuda_isInBadFork = lambda: bool(spoilt)

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch._C":
            spec = importlib.machinery.PathFinder.find_spec(name, path)
            spec.loader = Loader(spec.loader)
            return spec

spoilt = []

def ask_the_driver(*arguments):
    os.register_at_fork(after_in_child=lambda: spoilt.append(True))
    return 1

sys.meta_path.insert(0, Finder())
"""

IN_A_RANK = """
import os
model = torch.nn.Linear(1, 1)
torch.optim.SGD(model.parameters(), lr=0.1)  # the agent then imports what this has needed
record(
    build=torch.cuda._is_compiled(),
    spoilt=torch.cuda._is_in_bad_fork(),
    gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
)
"""


@pytest.fixture
def on_a_cuda_build(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(CUDA_BUILD)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    client = AgentClient()
    assert client.receive(60)
    monkeypatch.setattr(sys.modules["labkit.run.launch_monitor"], "agent", lambda: client)
    yield
    client.process.stdin.close()
    client.process.wait(10)


@pytest.mark.slow
def test_no_process_asks_the_cuda_driver_before_the_ranks_are_forked(on_a_cuda_build, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    for _ in range(2):  # the second time with what the agent has imported since
        records = launch(IN_A_RANK, quiet=True).records
        assert records["build"].all() and not records["spoilt"].any()
        assert records["gpus"].tolist() == ["3,5", "3,5"]


def test_beside_a_gpu_the_host_has_the_threads_it_was_given(monkeypatch):
    """What is offloaded is computed there."""
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")  # what join_group sets stays in this process
    context = SimpleNamespace(local_rank=0, rank=0, world_size=1)
    limits = mock.patch.multiple(distributed_c10d, default_pg_timeout=None, default_pg_nccl_timeout=None)
    limit = mock.patch.object(distributed_c10d, "_set_pg_timeout")
    group = mock.patch.multiple("torch.distributed", init_process_group=mock.DEFAULT, barrier=mock.DEFAULT)
    threads = mock.patch("torch.set_num_threads")
    with mock.patch("torch.cuda.set_device"), limits, limit, group, threads as set_num_threads:
        worker.join_group({"device": "cuda", "threads": 3, "collective_timeout": 60}, "file://", context)
    set_num_threads.assert_called_once_with(3)
