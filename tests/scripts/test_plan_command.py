"""./scripts/lab plan as a person types it: sentences, JSON, and one line with exit code 2."""

import json
import os
import subprocess
import sys

import pytest
from repository import ROOT

SMALL = "layers=8,hidden=1024,heads=8,kv_heads=4,ffn=4096,vocab=8192,seq_len=2048"


def plan(*arguments, stdin=""):
    command = [sys.executable, str(ROOT / "scripts" / "plan.py"), *arguments]
    where = {"cwd": ROOT, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    return subprocess.run(command, capture_output=True, text=True, input=stdin, timeout=240, **where)


def test_the_first_command_that_a_person_types_answers():
    said = plan("llama3-8b", "--gpus", "8", "--gpu", "h100")
    assert said.returncode == 0, said.stderr
    for words in ("8.03 billion parameters", "1. ", "2. ", "3. ", "MFU", "To run layout 1 (", "torchrun"):
        assert words in said.stdout
    assert max(map(len, said.stdout.splitlines())) <= 100


def test_json_is_the_same_answer_from_a_config_on_stdin():
    config = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8,
              "intermediate_size": 4096, "vocab_size": 8192, "max_position_embeddings": 2048}  # fmt: skip
    said = plan("-", "--gpus", "2", "--network", "100", "--tokens", "300B", "--json", stdin=json.dumps(config))
    told = json.loads(said.stdout)
    assert (told["gpus"], told["tokens"], told["length"]) == (2, 3e11, 2048) and told["layouts"][0]["days"] > 0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "which model? Give a name of --list-models"),
        (("{",), "the pasted config.json: not JSON: it ends too early: is it complete?"),
        (("llama3-8b", "--network", "50GB/s"), "got bytes: 50GB/s; write --network 400"),
        (("llama3-8b", "--gpus", "0"), "gpus must be a whole number of at least 1, got 0"),
        (("llama3-8b", "--price", "cheap"), "price must be the cost of a GPU-hour, such as 2.50, got 'cheap'"),
        (("llama3-8b", "--gpu", "v100", "--precision", "bf16"), "V100-32GB does not have bf16"),
        (("llama3-8b", "--train", "tail"), "train must be all, head or last:N with N from 1 to 32, got 'tail'"),
        (("llama3-8b", "--documents", "none.txt"), "or a file of such numbers, got 'none.txt': No such file"),
        (("llama3-8b", "--frobnicate"), "unrecognized arguments: --frobnicate"),
        ((SMALL, "--cluster", "a.yaml", "--gpus", "8"), "--cluster has the GPUs and the network"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, line):
    said = plan(*arguments)
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr.startswith("lab: plan: ") and line in said.stderr and said.stderr.count("\n") == 1


def test_help_and_lists():
    said = plan("--help").stdout
    assert said.count("(default:") >= 20 and said.count("./scripts/lab plan ") >= 3 and "Gbit/s" in said
    assert "mixtral-8x7b" in plan("--list-models").stdout and "MI355X" in plan("--list-gpus").stdout


def test_a_reader_that_leaves_is_no_error():
    """As `lab plan --list-models | head -1`."""
    command = [sys.executable, str(ROOT / "scripts" / "plan.py"), "--list-models"]
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as job:
        job.stdout.close()
        told = job.stderr.read()
    assert (job.returncode, told) == (141, "")
