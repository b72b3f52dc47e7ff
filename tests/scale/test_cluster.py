"""A cluster in a file is the cluster in Python; what is wrong with it is one line that names the file."""

import dataclasses
import sys

import pytest

from labkit.scale import cluster
from labkit.scale.cluster import Cluster
from labkit.scale.plan import main

MEANT = "gpu: A100-80GB\ngpus: 64\n"


def written(tmp_path, text):
    path = tmp_path / "ours.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_file_is_the_cluster_in_python(tmp_path):
    figures = {"gpu": "H100-80GB", "gpus": 32, "gpus_per_node": 4, "network_gbps": 1600.0}
    figures |= {"node_gbs": 400.0, "memory_gib": 78.0, "host_gib": 900.0, "confirmed": False, "collectives": "tree"}
    figures |= {"leaf": 16, "oversubscription": 2.0}
    assert figures.keys() == {field.name for field in dataclasses.fields(Cluster)}
    path = written(tmp_path, "".join(f"{name}: {figure}\n" for name, figure in figures.items()))
    assert Cluster.from_yaml(path) == Cluster.from_dict(figures) == Cluster(**figures)
    usual = Cluster.from_yaml(written(tmp_path, MEANT + "network_gbps: 1.6e3\nmemory_gib: null  # as usual\n"))
    assert usual == Cluster("A100-80GB", 64, network_gbps=1600.0)
    assert type(usual.gpus) is int and usual.device.network_gbps == 1600


def test_the_file_of_the_docstring_is_one(tmp_path):
    shown = cluster.__doc__.partition("\n\n")[2].partition("\n\n")[0]
    found = Cluster.from_yaml(written(tmp_path, shown))
    assert found == Cluster("A100-80GB", 64, 4, 200, 300, 39.4, 512, True, "auto", 16, 2)


def test_what_is_told_beside_a_file_replaces_its_figures_but_not_its_gpu(tmp_path):
    path = written(tmp_path, MEANT + "network_gbps: 800\n")
    assert Cluster.from_yaml(path, gpus=8, host_gib=100) == Cluster("A100-80GB", 8, network_gbps=800, host_gib=100)
    with pytest.raises(ValueError, match="its figures are of its gpu, A100-80GB, not of H100: name the GPU"):
        Cluster.from_yaml(path, gpu="H100")
    assert Cluster.from_yaml(written(tmp_path, "gpus: 8"), gpu="H100") == Cluster("H100", 8)
    with pytest.raises(ValueError, match=r"ours.yaml with gpus=8: unknown key 'node': did you mean 'node_gbs'\?"):
        Cluster.from_yaml(written(tmp_path, MEANT + "node: 8"), gpus=8)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MEANT + "gpu-per-node: 8", "unknown key 'gpu-per-node': did you mean 'gpus_per_node'?"),
        (MEANT + "12: 8", "unknown key 12: known are gpu, gpus, gpus_per_node"),
        ("gpus: 8", "gpu is missing: name one, such as H100-80GB"),
        ("gpu: ''\ngpus: 8", "gpu is missing"),
        ("gpu: A100-80GB", "gpus is missing: how many are there?"),
        ("gpu: A1000\ngpus: 8", "unknown GPU 'A1000'; did you mean A10"),
        ("gpu: [A100]\ngpus: 8", "unknown GPU ['A100']"),
        ("gpu: A100\ngpus: 0", "gpus must be a whole number of at least 1, got 0"),
        ("gpu: A100\ngpus: 2.5", "gpus must be a whole number of at least 1, got 2.5"),
        ("gpu: A100\ngpus: .nan", "gpus must be a whole number of at least 1, got nan"),
        ("gpu: A100\ngpus: 1" + 400 * "0", "gpus must be a number, got 1000"),
        ("gpu: A100\ngpus: yes", "gpus must be a number, got True"),
        ("gpu: A100\ngpus: [8, 8]", "gpus must be a number, got [8, 8]"),
        (MEANT + "gpus_per_node: -8", "gpus_per_node must be a whole number of at least 1, got -8"),
        (MEANT + "network_gbps: 200 Gbit/s", "network_gbps must be a number, got '200 Gbit/s'"),
        (MEANT + "network_gbps: -100", "network_gbps must be a positive number, got -100"),
        (MEANT + "oversubscription: 0.5\nleaf: 4", "oversubscription must be a number from 1 (full bandwidth) to 60"),
        (MEANT + "oversubscription: 2:1\nleaf: 4", "oversubscription must be a number from 1 (full bandwidth) to 60"),
        (MEANT + "oversubscription: 4", "oversubscription=4 needs leaf, the nodes below a leaf switch, such as 16"),
        (MEANT + "leaf: 0", "leaf must be a whole number of at least 1, got 0"),
        (MEANT + "host_gib: .inf", "host_gib must be a positive number, got inf"),
        (MEANT + "network_gbps: 0.2", "network_gbps=0.2 is about 1/8000 of what A100-80GB usually has, 1600 Gbit/s"),
        (MEANT + "memory_gib: 80000", "memory_gib=80000 is about 1000 times what A100-80GB usually has, 79.1 GiB"),
        (MEANT + "confirmed: 'no'", "confirmed must be true or false, got 'no'"),
        (MEANT + "when: 2024-01-01", "unknown key 'when'"),
        ("gpu: [", "is not YAML (line 1): expected the node content"),
        (b"gpu: \xff\xfe\x00", "is not YAML"),
        ("gpu: !!python/object/apply:os.getcwd []", "is not YAML (line 1): could not determine a constructor"),
        ("gpu: A100\ngpu: H100", "has the key gpu twice"),
        ("- gpu: A100", "a cluster is a mapping of fields to figures, as gpus: 64"),
        ("", "a cluster is a mapping"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_that_names_the_file(tmp_path, text, said):
    path = written(tmp_path, text)
    with pytest.raises(ValueError) as error:
        Cluster.from_yaml(path)
    assert str(error.value).startswith(f"{path}: {said}") and "\n" not in str(error.value)


def test_any_usual_network_is_taken_and_grows_with_the_node():
    for gpu in ("A100", "H100"):
        for gbps in (10, 25, 100, 200, 400, 3200):
            assert Cluster(gpu, 16, network_gbps=gbps).device.network_gbps == gbps
    assert Cluster("A100", 16, gpus_per_node=4).device.network_gbps == 800
    assert Cluster.from_dict({"gpu": "A100", "gpus": 16, "network": "50 Gbit/s"}).network_gbps == 400
    with pytest.raises(ValueError, match="got bytes: 50GB/s; write --network 400"):
        Cluster.from_dict({"gpu": "A100", "gpus": 16, "network": "50GB/s"})
    with pytest.raises(ValueError, match="are both given"):
        Cluster.from_dict({"gpu": "A100", "gpus": 16, "network": 50, "network_gbps": 400})
    assert (Cluster("GB200", 144).gpus_per_node, Cluster("GB200", 144).device.network_gbps) == (72, 72 * 400)


def test_a_gpu_is_described_in_a_file_or_in_the_cluster(tmp_path):
    path = tmp_path / "gpu.yaml"
    path.write_text("name: L4\nlike: L40S\ntflops_16bit: 121\nmemory_gib: 22\nmemory_gbs: 300\nwatts: 72\n")
    gpu = Cluster(str(path), 8).device
    assert (gpu.name, gpu.tflops["bf16"], gpu.memory_gib, gpu.generation) == ("L4", 121, 22, "ada")
    both = Cluster.from_yaml(written(tmp_path, "gpus: 8\ngpu: {like: A100, memory_gib: 20}")).device
    assert (both.memory_gib, both.memory_gbs, both.has("fp8")) == (20, 2039, False)
    for text, said in (
        ("like: L40S\nmemory: 22", "unknown column 'memory' of a GPU; did you mean memory_gib"),
        ("like: L40S\nmemory_gib: -1", "memory_gib of the GPU must be a positive number, got -1"),
        ("name: L4\nmemory_gib: 2", "generation of the GPU is missing; like: H100-80GB fills"),
        ("like: L40S\nprecisions: bf16 fp4", "precisions must be of bf16 fp8 fp16 tf32 fp32, got 'fp4'"),
        ("- 1", "a GPU is a mapping"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError) as error:
            Cluster(str(path), 8)
        assert str(error.value).startswith(f"{path}: {said}") and "\n" not in str(error.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path, said in ((tmp_path / "none.yaml", "No such file or directory"), (tmp_path, "Is a directory")):
        with pytest.raises(ValueError) as error:
            Cluster.from_yaml(path)
        assert str(error.value) == f"{path}: {said}"


def test_the_command_plans_for_the_cluster_of_a_file(tmp_path, monkeypatch, capsys):
    path = written(tmp_path, "gpu: A100-80GB\ngpus: 8\ngpus_per_node: 4\nnetwork_gbps: 200\n")
    model = "layers=8,hidden=1024,heads=8,vocab=8192"
    command = f"plan --model {model} --tokens 1e9 --global-batch 16 --tp 1 --pp 1 --cp 1 --confirm"

    def said(*more):
        monkeypatch.setattr(sys, "argv", [*command.split(), *more])
        main()
        return capsys.readouterr().out

    told = said("--cluster", str(path))
    assert "8 x A100-80GB, 4 a node with 200 Gbit/s" in told
    assert told == said("--gpu", "A100-80GB", "--gpus", "8", "--gpus-per-node", "4", "--network-gbps", "200")
    assert "4 x A100-80GB, 4 a node with 200 Gbit/s" in said("--cluster", str(path), "--gpus", "4")
    for more, line in (
        ((), "gpu is missing: name one"),
        (("--cluster", "none.yaml"), "none.yaml: No such file or directory"),
        (("--cluster", str(path), "--gpu", "H100"), f"{path}: its figures are of its gpu, A100-80GB, not of H100"),
    ):
        with pytest.raises(SystemExit, match=rf"labkit\.scale\.plan: {line}"):
            said(*more)
