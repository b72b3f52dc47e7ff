"""What a file of Megatron-LM or torchtitan has and an Experiment has not: each replaced value has its line."""

import pytest

from labkit.run import framework_files, frameworks, megatron_fields
from labkit.run.experiment import Experiment
from labkit.run.framework_lines import REPLACED
from labkit.run.framework_values import NO_RECOMPUTE

PLAIN = "--micro-batch-size 4 --lr-decay-style constant "
SIZES = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 64 --max-position-embeddings 64 "
SIZES += "--vocab-size 256 "
LARGE = ("medium", 24, 1024)


def read(text):
    framework, config = framework_files.parse(text)
    return frameworks.read(config, framework, 4)


def replaced(found):
    """{field: (value as JSON, what the lab has)} of the lines of replaced fields."""
    return {line[0]: (line[1], line[3]) for line in found.lines if line[2] == REPLACED}


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (("--seq-length 64", "--seq-length 256"), {"seq-length": ("256", "the lab's GPT has 64")}),
        (("--vocab-size 256", "--vocab-size 50304"), {"vocab-size": ("50304", "the lab's GPT has 256")}),
        (("--vocab-size 256", ""), {}),  # of the tokenizer
        (
            ("--num-layers", "--ffn-hidden-size 2816 --num-layers"),
            {"ffn-hidden-size": ("2816", "the lab's GPT has 4096")},
        ),
        (("--num-layers", "--kv-channels 128 --num-layers"), {"kv-channels": ("128", "the lab's GPT has 64")}),
        (("--num-layers", "--swiglu --num-layers"), {"swiglu": ("true", "not in the lab's GPT")}),
        (
            ("--num-layers", "--normalization RMSNorm --num-layers"),
            {"normalization": ('"RMSNorm"', "the lab's GPT has LayerNorm")},
        ),
        (("--num-layers", "--window-size 128 0 --num-layers"), {"window-size": ("[128, 0]", "not in the lab's GPT")}),
    ],
    ids=str,
)
def test_a_model_that_the_lab_does_not_have_is_replaced_line_by_line(change, lines):
    assert change[0] in SIZES
    found = read(PLAIN + SIZES.replace(*change))
    assert (found.experiment.size, found.experiment.depth, found.experiment.width) == LARGE
    assert replaced(found) == lines
    assert {line[0] for line in frameworks.short(found, "megatron")} >= set(lines)


def test_layers_with_heads_that_the_lab_does_not_have_are_replaced():
    found = read(PLAIN + SIZES.replace("--num-attention-heads 16", "--num-attention-heads 8"))
    assert (found.experiment.size, found.experiment.depth, found.experiment.width) == ("tiny", 0, 0)
    assert replaced(found) == {
        "num-layers": ("24", "the lab's GPT has 2"),
        "hidden-size": ("1024", "the lab's GPT has 32"),
        "num-attention-heads": ("8", "the lab's GPT has 2"),
    }
    written = frameworks.write(found.experiment, "megatron", 4, given=found.given).lines
    marks = {line[0]: line[2] for line in written}
    assert marks["num-layers"] == marks["seq-length"] == "the lab's default for gpt"


def test_a_layout_of_the_files_own_layers_and_heads_holds():
    """The tiny GPT has 2 layers and 2 heads: too few for these axes."""
    text = PLAIN + SIZES.replace("--seq-length 64", "--seq-length 1024")
    found = read(text + "--tensor-model-parallel-size 4").experiment
    assert (found.tensor, found.depth) == (4, 24)
    assert read(text + "--pipeline-model-parallel-size 4").experiment.pipeline == 4


@pytest.mark.parametrize(
    "more",
    [
        "",
        "--ffn-hidden-size 4096 --kv-channels 64 ",
        "--normalization LayerNorm --position-embedding-type learned_absolute ",
    ],
)
def test_a_model_of_the_lab_is_not_replaced(more):
    """Also where the file writes out a default of Megatron-LM that is the lab's."""
    found = read(PLAIN + SIZES + more)
    assert (found.experiment.size, found.experiment.depth, found.experiment.width) == LARGE
    assert replaced(found) == {}
    config = frameworks.write(found.experiment, "megatron", 4).config
    assert [config[name] for name in ("num-layers", "hidden-size", "num-attention-heads")] == [24, 1024, 16]


def test_the_layers_of_the_lab_are_those_of_megatrons_defaults():
    rows = frameworks.fields("megatron")
    assert {name: rows[name].default for name in megatron_fields.LAYERS} == megatron_fields.LAYERS
    assert megatron_fields.replaced({name: row.default for name, row in rows.items()}, Experiment(model="gpt")) == {}


def test_a_model_of_torchtitan_is_replaced():
    text = "Trainer.Config(model_spec=registry('8B'), training=TrainingConfig(seq_len=%d), lr_scheduler="
    text += "LRSchedulersContainer.Config(decay_ratio=0.0))"
    assert replaced(read(text % 2048)) == {
        "model_spec": ("\"registry('8B')\"", "the lab's GPT"),
        "training.seq_len": ("2048", "the lab's GPT has 64"),
    }
    assert "training.seq_len" not in replaced(read(text % 64))


FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
TENSOR = "--tensor-model-parallel-size 2 "
SHARDED = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_activation_checkpointing: %s}\n"
MESH = "parallelism_config: {parallelism_config_tp_size: 2, parallelism_config_dp_shard_size: 2}\n"
TITAN = "Trainer.Config(%s parallelism=ParallelismConfig(tensor_parallel_degree=%d), lr_scheduler="
TITAN += "LRSchedulersContainer.Config(decay_ratio=0.0))"
POLICY = "activation_checkpoint=%s,"


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        (PLAIN + TENSOR + FULL, ["recompute-granularity", "recompute-method", "recompute-num-layers"]),
        (PLAIN + TENSOR + "--recompute-activations", ["recompute-activations"]),
        (PLAIN + "--num-experts 4 --moe-aux-loss-coeff 0.01 --recompute-granularity full", ["recompute-granularity"]),
        (PLAIN + TENSOR + "--recompute-method uniform", []),
        (PLAIN + FULL, []),
        (TITAN % (POLICY % "FullAC.Config()", 2), ["activation_checkpoint.mode"]),
        (TITAN % ("", 2), ["activation_checkpoint.mode"]),  # selective
        (TITAN % (POLICY % "None", 2), []),
        (TITAN % ("", 1), []),
        (SHARDED % "true" + MESH, ["fsdp_config.fsdp_activation_checkpointing"]),
        (SHARDED % "false" + MESH, []),
        (SHARDED % "true", []),
    ],
    ids=str,
)
def test_recomputation_that_the_lab_drops_has_its_row(text, rows):
    """A mesh of the lab recomputes nothing: also in the short table, and where it is a default."""
    found = read(text)
    framework, _ = framework_files.parse(text)
    assert {name: here for name, (_, here) in replaced(found).items()} == dict.fromkeys(rows, NO_RECOMPUTE)
    assert {line[0] for line in frameworks.short(found, framework)} >= set(rows)
    assert not rows or found.experiment.recompute == "none"


def test_megatron_needs_a_seed_of_at_least_1():
    """Its initialize.py: "Seed should be a positive integer"; the lab's default is 0."""
    for seed, theirs in ((0, 1), (1, 1), (7, 7)):
        found = frameworks.write(Experiment(model="gpt", seed=seed), "megatron", 4)
        assert found.config["seed"] == theirs
        (note,) = (line[4] for line in found.lines if line[0] == "seed")
        assert "it is written as 1" in note
    with pytest.raises(ValueError, match="seed=0: must be a whole number of at least 1"):
        read(PLAIN + "--seed 0")


RATE = "lr_scheduler=LRSchedulersContainer.Config(%s)"
TRAINING = "training=TrainingConfig(%s)"
PARALLEL = "parallelism=ParallelismConfig(%s)"
GROUP = "optimizer=OptimizersContainer.Config(param_groups=[%s])"
BAD = [
    (TRAINING % "max_norm=-1.0", "training.max_norm=-1.0: must be at least 0 and finite"),
    (TRAINING % "max_norm=1e999", "training.max_norm=inf: must be at least 0 and finite"),
    ("optimizer=default_adamw(lr=-1.0, betas=(0.9, 0.999))", "optimizer.lr=-1.0: must be at least 0 and finite"),
    ("training=TrainingConfig", "training=TrainingConfig: must be TrainingConfig(...) with names and values"),
    ("training={'steps': 3}", "training={'steps': 3}: must be TrainingConfig(...) with names and values"),
    ("comm=3", "comm=3: must be CommConfig(...) with names and values"),
    ("optimizer=make()", "optimizer=make(): must be default_adamw(...) with names and values"),
    (
        "optimizer=OptimizersContainer.Config(lr=3e-4)",
        "optimizer=OptimizersContainer.Config(lr=0.0003): has no param_groups; write default_adamw(lr=...)",
    ),
    (GROUP % "3", "optimizer.param_groups=[3]: must be a ParamGroupConfig(...) with optimizer_name"),
    (GROUP % "ParamGroupConfig(pattern='.*')", "must be a ParamGroupConfig(...) with optimizer_name"),
    (
        GROUP % "ParamGroupConfig(optimizer_name='AdamW', optimizer_kwargs=3)",
        "optimizer.optimizer_kwargs=3: must be a dict, such as {'lr': 1e-3}",
    ),
    (RATE % "decay_ratio=0.0, warmup_steps=-1", "lr_scheduler.warmup_steps=-1: must be a whole number of at least 0"),
    (RATE % "decay_ratio='0.0'", "lr_scheduler.decay_ratio='0.0': this lab has 0"),
    (RATE % "decay_type='sqrt'", "lr_scheduler.decay_type is sqrt: this lab has cosine, and decay_ratio=0.0"),
    (
        PARALLEL % "pipeline_parallel_degree=2",
        "parallelism.data_parallel_shard_degree=-1 with parallelism.pipeline_parallel_degree=2: this lab's pipeline "
        "has no FSDP; write parallelism.data_parallel_replicate_degree=2 and parallelism.data_parallel_shard_degree=1\n"
        "training.mixed_precision_param is bfloat16, also where it is not written: with a pipeline, this lab "
        "has float32",
    ),
]


@pytest.mark.parametrize(("section", "line"), BAD)
def test_a_bad_section_of_torchtitan_is_named_with_the_way_out(section, line):
    rate = "" if section.startswith("lr_scheduler") else RATE % "decay_ratio=0.0"
    with pytest.raises(ValueError) as said:
        read(f"Trainer.Config({section}, {rate})")
    assert line in str(said.value)


def test_sections_of_torchtitan_behind_a_modules_name_and_groups_without_options():
    found = read(f"Trainer.Config(training=config.TrainingConfig(steps=3), {RATE % 'decay_ratio=0.0'})")
    assert found.experiment.steps == 3
    group = "optim.ParamGroupConfig(pattern='.*', optimizer_name='AdamW')"
    found = read(f"Trainer.Config({GROUP % group}, {RATE % 'decay_ratio=0.0'})").experiment
    assert (found.optimizer, found.lr, found.weight_decay) == ("adamw", 1e-3, 0.01)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--num-layers 0", "num-layers=0: must be a whole number of at least 1"),
        ("--num-layers", "num-layers=True: must be a whole number of at least 1"),
        ("--seq-length long", "seq-length='long': must be a whole number of at least 1"),
        ("--vocab-size 2.5", "vocab-size=2.5: must be a whole number of at least 1"),
        ("--clip-grad -1.0", "clip-grad=-1.0: must be at least 0 and finite"),
        ("--lr -1e-3", "lr=-0.001: must be at least 0 and finite"),
        ("--weight-decay -0.1", "weight-decay=-0.1: must be at least 0 and finite"),
        ("--lr-warmup-iters -1", "lr-warmup-iters=-1: must be a whole number of at least 0"),
        ("--adam-beta2 0.95", "adam-beta2=0.95: here it is 0.999; write 0.999"),
        ("--min-lr 1e-5", "min-lr=1e-05: here it is 0.0 (here the rate falls to 0); write 0.0"),
    ],
)
def test_a_bad_value_of_megatron_is_named_with_the_way_out(arguments, line):
    with pytest.raises(ValueError) as said:
        read(PLAIN + arguments)
    assert str(said.value) == line


@pytest.mark.parametrize("text", ["np: 2\n", '{"np": 2, "HOROVOD_FUSION_THRESHOLD": 3}'])
def test_fields_of_horovod_are_not_a_file(text):
    with pytest.raises(ValueError, match="its calls are Python; give an experiment with strategy: horovod"):
        read(text)
