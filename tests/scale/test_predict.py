"""The predictor: its command, its refusals, its error on rows kept out, and the physics it must not lose."""

import csv
import json
import subprocess
import sys
from statistics import median

import pytest
import torch

from labkit import models
from labkit.memory import estimate
from labkit.scale import collectives, constants, fit
from labkit.scale.cost import head_seconds, predict_step
from labkit.scale.job_config import job_of
from labkit.scale.memory_model import GIB, predict_memory, state_bytes
from labkit.scale.messages import gather_seconds
from labkit.scale.model_row import row_of
from labkit.scale.predict import PREDICTED, REFUSED, predict_file

LLAMA = {"model": "7B", "layers": "32", "hidden": "4096", "heads": "32", "ffn": "11008", "vocab": "32000"}
ROW = LLAMA | {"gpu": "H100-80GB", "n_gpus": "64", "tp": "2", "pp": "2", "zero": "1", "global_batch": "512"}
C = constants.values()


def written(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(column for row in rows for column in row)))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_three_thousand_rows_in_one_command(tmp_path):
    rows = [ROW | {"note": f"row, {n}"} for n in range(3000)]
    source = written(tmp_path / "rows.csv", rows)
    command = [sys.executable, "-m", "labkit.scale.predict", str(source), "-o", str(tmp_path / "out.csv")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    out = list(csv.DictReader((tmp_path / "out.csv").open(encoding="utf-8")))
    assert [{k: v for k, v in row.items() if k not in (*PREDICTED, REFUSED)} for row in out] == rows
    assert {row["pred_fits"] for row in out} <= {"True", "False"}
    assert all(float(row["pred_tok_s_gpu"]) > 0 and float(row["pred_mem_gib"]) > 0 for row in out)


def test_results_are_not_read_and_predictions_are_replaced(tmp_path):
    told = ROW | {"tok_s_gpu": "1", "mem_gib": "-5", "status": "crashed_or_oom", "pred_fits": "maybe"}
    for name, row in (("told", told), ("bare", ROW)):
        predict_file(written(tmp_path / name, [row]), tmp_path / f"{name}.out")
    rows = [next(csv.DictReader((tmp_path / f"{name}.out").open())) for name in ("told", "bare")]
    assert all(rows[0][column] == rows[1][column] for column in PREDICTED)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"gpu": "H1000"}, "unknown GPU 'H1000'; did you mean H100"),
        ({"gpu": ""}, "gpu is missing"),
        ({"n_gpus": "0"}, "n_gpus must be a number of at least 1, got 0"),
        ({"dp": "8", "zero": "0"}, "dp x tp x pp x cp = 8 x 2 x 2 x 1 = 32 ranks, but n_gpus is 64"),
        ({"dp": "32"}, "= 128 ranks, but n_gpus is 64"),
        ({"tp": "3", "n_gpus": "48"}, "tp=3 does not divide heads=32"),
        ({"hidden": "nan"}, "hidden must be a number of at least 1, got nan"),
        ({"hidden": "-4096"}, "hidden must be a number of at least 1, got -4096"),
        ({"layers": "3.5"}, "layers must be a whole number"),
        ({"seq_len": "long"}, "seq_len must be a number, got 'long'"),
        ({"layers": "", "hidden": ""}, "no model: give layers and hidden, or params"),
        ({"inter_gbps": "400000"}, "is it in Mbit/s or Gbyte/s"),
        ({"zero": "4"}, "zero must be 0, 1, 2 or 3"),
        ({"recompute": "sometimes"}, "recompute must be none"),
    ],
)
def test_a_bad_cell_refuses_its_row_by_name_and_no_other(tmp_path, wrong, said):
    source = written(tmp_path / "rows.csv", [ROW, ROW | wrong, ROW])
    ((line, why),) = predict_file(source, tmp_path / "out.csv")
    assert line == 3 and said in why and "\n" not in why
    first, bad, last = csv.DictReader((tmp_path / "out.csv").open(encoding="utf-8"))
    assert bad[REFUSED] == why and not any(bad[column] for column in PREDICTED)
    assert first == last and first[REFUSED] == "" and float(first["pred_tok_s_gpu"]) > 0


def test_the_command_names_refused_rows_and_exits_with_1(tmp_path):
    source = written(tmp_path / "rows.csv", [ROW | {"gpu": ""}, ROW])
    command = [sys.executable, "-m", "labkit.scale.predict", str(source), "-o", str(tmp_path / "out.csv")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.splitlines() == [
        f"labkit.scale.predict: {source}, line 2: gpu is missing: name one, such as H100-80GB"
    ]
    assert len(list(csv.DictReader((tmp_path / "out.csv").open()))) == 2


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2,3\n", b"\xff\xfe\x00"])
def test_a_file_that_is_no_table_is_refused(tmp_path, content):
    (tmp_path / "rows.csv").write_bytes(content)
    with pytest.raises(ValueError, match=r"rows\.csv"):
        predict_file(tmp_path / "rows.csv", tmp_path / "out.csv")
    with pytest.raises(ValueError, match="no such file"):
        predict_file(tmp_path / "none.csv", tmp_path / "out.csv")


def test_what_a_row_leaves_open_is_read_off_its_parameters():
    plain = {"layers": "24", "hidden": "2048", "heads": "16", "ffn": "8192", "vocab": "50368", "seq_len": "2048"}
    gpt = job_of(plain | {"params": "1315950592", "gpu": "A100"}).shape
    assert (gpt.gated, gpt.tied) == (False, True)
    playbook = {"layers": "16", "hidden": "2048", "heads": "32", "ffn": "8192", "vocab": "131072"}
    llama = job_of(playbook | {"params": "1342177280", "gpu": "H100"}).shape
    assert (llama.gated, llama.tied) == (True, True)
    mixtral = {"layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8", "ffn": "14336", "vocab": "32000"}
    experts = job_of(mixtral | {"params": "46702792704", "gpu": "H100"}).shape
    assert (experts.experts, experts.top_k) == (8, 2)
    assert job_of({"params": "7e9", "gpu": "A100"}).shape.parameters == pytest.approx(7e9, rel=0.25)


def test_the_axes_leave_dp_and_the_batch_leaves_grad_accum():
    job = job_of(ROW | {"micro_batch": "4"})
    assert (job.dp, job.replicas, job.grad_accum, job.step_tokens) == (16, 1, 8, 512 * 2048)
    assert job_of(ROW | {"dp": "4", "zero": "3"}).replicas == 4  # hybrid sharding


def test_a_ring_costs_what_its_formula_says():
    job = job_of(ROW)
    bandwidth = 1e9 * job.gpu.node_gbs * 0.79
    large = gather_seconds(job, 8, 1, 8e9, C)
    assert large == pytest.approx(7 / 8 * 8e9 / bandwidth, rel=2e-3)
    ring = collectives.Group(8, 1, 8, inside=1e12, between=1e9, node_hop=0.0, network_hop=0.0)
    assert collectives.flat("all_gather", ring, 8e9) == pytest.approx(7.0, rel=1e-9)
    assert gather_seconds(job, 1, 1, 8e9, C) == 0
    assert gather_seconds(job, 64, 1, 8e9, C) > large
    # every node's adapters carry the rings of its 8 GPUs, when a ring has one of them
    assert gather_seconds(job, 8, 8, 1e9, C) > 5 * gather_seconds(job, 64, 1, 1e9, C)


def test_stages_share_the_layers_and_nanotron_weighs_the_head():
    assert job_of(ROW | {"pp": "4"}).stages == [(8, 0, 8), (8, 0, 8), (8, 0, 8), (8, 1, 8)]
    heavy = {"layers": "16", "hidden": "2048", "heads": "32", "ffn": "8192", "vocab": "131072", "params": "1342177280"}
    row = ROW | heavy | {"framework": "nanotron", "tp": "1", "pp": "4"}
    assert job_of(row).stages == [(5, 0, 5), (5, 0, 5), (5, 0, 5), (1, 1, 4)]
    row |= {"pp": "16", "micro_batch": "1"}
    assert job_of(row).stages[-1] == (0, 0, 0) and not predict_memory(job_of(row), C).fits


def test_zero_divides_what_its_paper_says():
    paper = ROW | {"dp": "16", "stack": "megatron-2020"}  # gradients in fp16
    per = {z: state_bytes(job_of(paper | {"zero": str(z)}), C, 16) for z in range(4)}
    assert per == {0: 16, 1: 4 + 12 / 16, 2: 2 + 14 / 16, 3: 16 / 16}


def test_more_of_anything_costs_more():
    def of(**changes):
        job = job_of(ROW | {"micro_batch": "2"} | changes)
        return predict_step(job, C).tokens_per_second, predict_memory(job, C).total

    speed, gib = of()
    assert of(gpu="A100-80GB")[0] < speed < of(gpu="B200")[0]
    assert of(recompute="full")[0] < speed and of(recompute="full")[1] < gib
    assert of(micro_batch="4")[1] > gib and of(zero="0")[1] > gib
    assert of(inter_gbps="100")[0] < speed
    assert of(seq_len="8192")[0] < speed and of(seq_len="8192")[1] > gib


def test_the_peak_names_what_is_largest():
    assert predict_memory(job_of(ROW | {"zero": "0", "micro_batch": "1"}), C).largest == "states"
    assert predict_memory(job_of(ROW | {"micro_batch": "16"}), C).largest == "activations"
    whole = predict_memory(job_of(LLAMA | {"gpu": "H100", "n_gpus": "1"}), C)
    assert not whole.fits and whole.states == pytest.approx(18 * 6.738e9 / GIB, rel=0.01)


@pytest.fixture(scope="module")
def rows():
    return fit.published()


def test_the_committed_scores_are_those_of_the_committed_constants(rows):
    committed = json.loads(fit.SCORES.read_text())
    found = fit.scores(rows, C)
    left_out = committed.pop("left out of a fit")  # fits that take minutes
    assert found == committed
    assert max(errors["tok_s_gpu"] for errors in left_out.values()) <= 0.2
    speed, memory = found["tok_s_gpu"], found["mem_gib"]
    assert speed["kept out by size: all"]["error"] <= 0.10
    assert speed["kept out by source: all"]["error"] <= 0.20
    assert memory["kept out by size: all"]["error"] <= 0.10
    assert found["fits"]["kept out by size"]["found"] >= 0.84
    for lines in (speed, memory):
        assert all(line["error"] < line["null"] for name, line in lines.items() if name.endswith("all"))


def test_a_third_of_the_rows_is_in_no_fit(rows):
    for column in ("tok_s_gpu", "mem_gib"):
        told = fit.with_figure(rows, column)
        assert sum(bool(fit.kept_out(row, column)) for row in told) >= len(told) / 3


def test_constants_are_few_and_inside_their_spread():
    table = constants.read()
    assert len(table) <= 27 and len({k.name for k in table}) == len(table)
    assert all(k.low <= k.value <= k.high and k.guess > 0 and k.unit and k.meaning for k in table)


def test_the_fit_finds_constants_again(rows):
    some = [row for row in rows if row["tok_s_gpu"] and row["source"] == "llm-foundry"][::4]
    names = ["matmul_ampere", "matmul_hopper"]
    moved = C | {name: 1.4 * C[name] for name in names}
    found = fit.search(some, "tok_s_gpu", fit.speed, moved, names)
    assert fit.loss(some, "tok_s_gpu", fit.speed, found) < 0.6 * fit.loss(some, "tok_s_gpu", fit.speed, moved)
    assert median(fit.errors(some, "tok_s_gpu", fit.speed, found)) < 0.05


def test_lora_has_states_of_its_adapters_alone():
    """Hu et al., LoRA, ICLR 2022, section 4.2: GPT-3's frozen weights take 350 GB; training is 1.33 times as fast."""
    shape = {"layers": 96, "hidden": 12288, "heads": 96, "vocab": 50257, "gated": "false"}
    row = shape | {"gpu": "A100-80GB", "n_gpus": 64, "tp": 8, "pp": 8, "global_batch": 64, "seq_len": 2048}
    whole, frozen = job_of(row), job_of(row | {"lora": 8})
    ranks = whole.tp * whole.pp
    states = [predict_memory(job, C).states * GIB * ranks / whole.shape.parameters for job in (whole, frozen)]
    assert states[0] == pytest.approx(18, rel=0.1)  # of the fullest stage
    assert states[1] == pytest.approx(2, rel=0.1)
    faster = predict_step(whole, C).seconds / predict_step(frozen, C).seconds
    assert 1.2 < faster < 1.45
    assert head_seconds(frozen, C) < 0.9 * head_seconds(whole, C)  # of a frozen output layer


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_lora_sends_gradients_of_its_adapters_alone(zero):
    row = LLAMA | {"gpu": "A100-80GB", "n_gpus": 64, "zero": zero, "stack": "torch-fsdp", "inter_gbps": 100}
    whole, frozen = (predict_step(job_of(row | {"lora": rank}), C).parts for rank in (0, 8))
    if zero < 3:
        assert frozen["gradients"] < whole["gradients"] / 50
    else:  # two gathers of 2 bytes stay, a reduce-scatter of 4 bytes goes
        assert 0.45 < frozen["gathering parameters"] / whole["gathering parameters"] < 0.55


def test_frozen_parameters_are_sharded_by_fsdp_alone():
    row = LLAMA | {"gpu": "A100-80GB", "n_gpus": 8, "stack": "torch-fsdp", "lora": 8}
    states = [predict_memory(job_of(row | {"zero": zero}), C).states * GIB for zero in (0, 2, 3)]
    frozen = 2 * job_of(row).shape.parameters
    assert states[0] > states[1] > frozen > 7 * states[2] > 7 * frozen / 8


def test_states_are_those_that_a_dry_run_counts():
    """Of the same 16 bytes a parameter: activations differ, as eager autocast keeps copies in fp32."""
    with torch.device("meta"):
        model = models.build("gpt", vocab=50257, context=1024, layers=48, heads=25, width=1600)
        tokens = torch.empty(1, 1024, dtype=torch.int64)
    counted = estimate(model, tokens, models.loss("gpt"), target=tokens).peak
    row = row_of("gpt2-1.5b") | {"gpu": "A100-80GB", "n_gpus": 1, "stack": "torch-fsdp", "zero": 0}
    states = sum(counted[kind] for kind in ("parameters", "gradients", "optimizer_states"))
    assert predict_memory(job_of(row), C).states * GIB == pytest.approx(states, rel=0.001)
