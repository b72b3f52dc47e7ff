"""The answer of `lab plan`: its figures are those of the model of cost, and bad input is one line."""

import json
import subprocess
import sys
from dataclasses import replace
from datetime import date
from types import SimpleNamespace

import pytest

from labkit.scale import answer_text, constants
from labkit.scale.answer import answer, model_flops, useful_share
from labkit.scale.cluster import Cluster
from labkit.scale.cost import predict_step
from labkit.scale.intervals import interval
from labkit.scale.job_config import job_of
from labkit.scale.launch_options import launch_options
from labkit.scale.memory_model import predict_memory
from labkit.scale.model_row import row_of
from labkit.scale.quantities import amount, days_until, network
from labkit.scale.question import Question, solve, usual_batch, with_batch
from labkit.scale.search import search
from labkit.scale.stacks import STACKS

C = constants.values()
SMALL = {"layers": 8, "hidden": 1024, "heads": 8, "kv_heads": 4, "ffn": 4096, "vocab": 8192, "seq_len": 2048}


@pytest.fixture(scope="module")
def found():
    return answer("llama3-8b", 16, "a100", 200, tokens="2T", stack="megatron", price=2.0, deadline="400d")


def test_the_figures_are_those_of_the_cost_model(found):
    rows = found.rows()
    assert [row["rank"] for row in rows] == [1, 2, 3]
    for row, one in zip(rows, found.ranked, strict=True):
        speed = predict_step(one.job, C).tokens_per_second
        assert row["tokens_per_second_per_gpu"] == speed
        assert (row["low"], row["high"]) == interval(one.job)[:2]
        assert row["memory_gib"] == predict_memory(one.job, C).total <= 0.9 * row["gpu_memory_gib"]
        days = 2e12 / (16 * speed) / 86400 / useful_share(16)
        assert row["days"] == pytest.approx(days) and row["gpu_hours"] == pytest.approx(16 * 24 * days)
        assert row["cost"] == pytest.approx(2 * row["gpu_hours"])
        assert row["mfu"] == pytest.approx(row["tflops_per_gpu"] / 312)
    speeds = [row["tokens_per_second_per_gpu"] for row in rows]
    assert speeds == sorted(speeds, reverse=True)
    assert len({(one.job.dp, one.job.tp, one.job.pp, one.job.cp, one.job.zero) for one in found.ranked}) == 3


def test_the_fastest_is_the_fastest_of_all(found):
    fit, _ = search(found.question.space, 16, C)
    assert found.best.seconds == min(one.seconds for one in fit)
    large = found.too_large
    assert large.seconds < found.best.seconds and large.peak.total > 0.9 * 79.1


def test_missing_memory_is_the_difference_of_the_sizes_beside_it(found):
    job = found.best.job
    peak = SimpleNamespace(total=90.94, memory=79.06, **dict.fromkeys(answer_text.KINDS, 1.0))
    far = SimpleNamespace(job=job, seconds=1.0, peak=peak)
    words = answer_text.large(SimpleNamespace(question=found.question, best=found.best, too_large=far))
    assert "needs 90.9 GiB, 19.7 more than the 71.2 to be used" in words  # 90.94 - 71.154 = 19.786


def test_a_change_is_planned_as_if_it_were_asked(found):
    changes = {one.what: one.found for one in found.changes}
    slow = answer("llama3-8b", 16, "a100", 100, stack="megatron", changes=False)
    assert changes["a network of 100 Gbit/s a GPU"].seconds == slow.best.seconds
    double = answer("llama3-8b", 16, "a100", 200, batch=2 * found.question.batch, stack="megatron", changes=False)
    assert changes[f"a batch of {2 * found.question.batch:,}"].seconds == double.best.seconds


def test_oversubscribed_leaves_are_said_and_compared_with_full_bandwidth():
    where = Cluster("a100", 64, leaf=4, oversubscription=4)
    found = answer(SMALL, cluster=where, stack="torch-fsdp")
    full = answer(SMALL, cluster=replace(where, oversubscription=1), stack="torch-fsdp", changes=False)
    assert "4 nodes a leaf switch, oversubscribed 4:1" in found.sentences()[0]
    assert "oversubscribed" not in full.sentences()[0]
    changes = {one.what: one.found for one in found.changes}
    assert changes["a network without oversubscription"].seconds == full.best.seconds <= found.best.seconds
    one_leaf = answer(SMALL, cluster=replace(where, gpus=32), stack="torch-fsdp", changes=False)
    assert "oversubscribed" not in one_leaf.sentences()[0]


def test_a_layout_that_is_known_hides_no_faster_one(found):
    other = found.question.with_network(100)
    full = solve(other)
    second = next(one for one in full.fit if one.seconds > full.best.seconds)
    assert solve(other, like=[second.job]).best.seconds == full.best.seconds


def test_flops_of_a_token_are_six_a_weight_and_all_of_attention():
    job = job_of(row_of("llama3-8b") | {"gpu": "H100", "seq_len": 8192})
    shape = job.shape
    weights = shape.parameters - shape.embedding_parameters  # the input embedding is no product
    frozen = model_flops(replace(job, lora=16))
    assert frozen == pytest.approx(4 * weights + 12 * 32 * 8192 * 4096, rel=1e-4)
    assert model_flops(job) == pytest.approx(6 * weights + 12 * 32 * 8192 * 4096, rel=1e-4)


def test_sentences_and_json_say_the_same(found):
    told = json.loads(found.to_json())
    assert (told["kind"], told["gpus"], told["network_gbps_per_gpu"]) == ("predicted", 16, 200)
    assert told["layouts"] == found.rows() and told["sentences"] == found.sentences()
    text = "\n".join(found.sentences())
    speed = f"{found.best.step.tokens_per_second:,.0f} tokens/s a GPU"
    for words in (
        speed,
        "8.03 billion parameters",
        "All figures are predicted",
        "Too large: ",
        "MFU",
        "for 2T tokens",
        "with failures and saves",
        "2. ",
        "loses ",
        "With a network of 400",
        "The deadline is in 400 days",
        "Such ranges contain about 80 % of the published rows",
    ):
        assert words in text  # fmt: skip


@pytest.mark.parametrize("gpus", [1, 3, 5, 6, 7, 12, 24])
def test_any_number_of_gpus_is_used(gpus):
    where = Cluster("A100-80GB", gpus)
    found = answer(SMALL, cluster=where, stack="torch-fsdp", changes=False)
    assert found.best.job.n_gpus == gpus and found.question.batch % gpus == 0
    assert usual_batch(gpus, 2048) == found.question.batch


def test_a_batch_that_nothing_divides_is_refused_with_the_nearest():
    with pytest.raises(ValueError) as error:
        answer(SMALL, 7, "a100", batch=128, stack="torch-fsdp")
    assert str(error.value) == (
        "batch=128: no layout of 7 GPUs with torch-fsdp divides it; use a batch of 126 or 133, or 4 GPUs"
    )
    for batch in (126, 133):
        assert answer(SMALL, 7, "a100", batch=batch, stack="torch-fsdp", changes=False).best.job.n_gpus == 7
    offered = [one.what for one in answer(SMALL, 7, "a100", batch=128, stack="megatron").changes]
    assert "a batch of 126" in offered and "a batch of 133" in offered  # a pipeline of 7 divides it, more slowly


def test_a_published_batch_is_rounded_only_if_that_changes_little():
    asked = Question(dict(row_of("llama-7b")), Cluster("a100", 12), 2048, 2048, "bf16", "megatron")
    assert with_batch(asked, given=False).batch == 2052
    large = Question(dict(row_of("deepseek-v3")), Cluster("h800", 2048), 15360, 4096, "bf16", "megatron")
    assert with_batch(large, given=False).batch == 15360


def test_layers_that_do_not_divide_get_uneven_stages():
    found = solve(Question(SMALL | {"layers": 6}, Cluster("a100", 4), 16, 2048, "bf16", "megatron", given={"pp": 4}))
    assert [layers for layers, *_ in found.best.job.stages] == [2, 2, 1, 1]


@pytest.mark.parametrize(
    ("stack", "words"),
    [
        ("megatron", ["pretrain_gpt.py", "--tensor-model-parallel-size 1", "--use-distributed-optimizer", "--bf16"]),
        ("torchtitan", ["-m torchtitan.train", "--parallelism.tensor_parallel_degree 1", "--training.seq_len 2048"]),
        ("torch-fsdp", ["torchrun --nnodes 1 --nproc-per-node 8 train.py"]),
        ("deepspeed", ["deepspeed --num_nodes 1 --num_gpus 8", '"zero_optimization"']),
        ("nanotron", ["zero_stage", "micro_batch_size"]),
    ],
)
def test_each_stack_gets_its_options(stack, words):
    given = {"dp": 8, "zero": 1} if stack != "torchtitan" else {"dp": 8}
    job = answer(SMALL, 8, "h100", stack=stack, changes=False, **given).best.job
    text = "\n".join(launch_options(job))
    for word in words:
        assert word in text
    assert job.stack is STACKS[stack]


def test_an_uneven_pipeline_is_written_in_megatrons_notation():
    found = solve(Question(SMALL | {"layers": 6}, Cluster("a100", 4), 16, 2048, "bf16", "megatron", given={"pp": 4}))
    text = " ".join(launch_options(found.best.job))
    assert "--pipeline-model-parallel-layout 'E,t*2|(t*2|)*1,(t*1|)*1,t*1,L'" in text


def test_quantities_are_read_as_people_write_them():
    assert [amount(said) for said in ("1T", "15.6e12", "300B", "1,000", 5)] == [1e12, 15.6e12, 300e9, 1000, 5]
    assert [network(said) for said in ("400", "25 Gbit/s", "1.6Tbps", "200G")] == [400, 25, 1600, 200]
    assert days_until("30d") == 30 and days_until("2027-03-01", today=date(2027, 2, 1)) == 28


@pytest.mark.parametrize(
    ("read", "said", "line"),
    [
        (amount, "many", "tokens must be a positive number such as 1T, 300B or 15.6e12, got 'many'"),
        (amount, "-1T", "tokens must be a positive number"),
        (network, "50GB/s", "network must be in Gbit/s per GPU, got bytes: 50GB/s; write --network 400"),
        (network, "fast", "network must be the Gbit/s of each GPU, such as 400, got 'fast'"),
        (days_until, "2027-13-01", "deadline must be a date such as 2027-03-01 or days such as 30d, got '2027-13-01'"),
        (days_until, "2020-01-01", "deadline must be in the future, got 2020-01-01"),
    ],
)
def test_a_quantity_that_is_none_is_one_line(read, said, line):
    with pytest.raises(ValueError) as error:
        read(said)
    assert str(error.value).startswith(line)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"gpus": 0}, "gpus must be a whole number of at least 1, got 0"),
        ({"gpu": "v100", "precision": "bf16"}, "V100-32GB does not have bf16: use fp16 or fp32, or a GPU"),
        ({"tp": 3}, "tp=3 does not divide the 8 GPUs"),
        ({"stack": "megatorn"}, "stack must be one of torch-fsdp"),
        ({"model": SMALL | {"head": 3}}, "unknown column 'head' of a model; did you mean heads"),
        ({"model": "llama3-405b"}, "nothing fits on 8 x H100-80GB: the least is"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(changes, line):
    told = {"model": SMALL, "gpus": 8, "gpu": "h100", "changes": False} | changes
    with pytest.raises(ValueError) as error:
        answer(told.pop("model"), told.pop("gpus"), told.pop("gpu"), **told)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


def test_fp16_is_the_default_where_bf16_is_missing():
    assert answer(SMALL, 8, "v100", changes=False).best.job.precision == "fp16"


def test_planning_needs_no_torch():
    code = "import sys, labkit.scale.answer, labkit.scale.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_lora_is_asked_of_stacks_that_run_it():
    found = answer("llama3-70b", 8, "h100", lora=16, changes=False)
    assert "frozen, with 207.1 million in LoRA adapters of rank 16" in found.sentences()[0]
    assert json.loads(found.to_json())["trained_parameters"] == 207_093_760
    assert "LoRA(dim=16)" in found.options()[-1]
    with pytest.raises(ValueError, match="nothing fits"):
        answer("llama3-70b", 8, "h100", changes=False)
    with pytest.raises(ValueError, match="torchtitan does not run lora: use torch-fsdp, megatron, deepspeed"):
        answer("llama3-8b", 8, "h100", lora=16, stack="torchtitan")
