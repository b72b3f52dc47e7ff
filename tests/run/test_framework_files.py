"""Files of Accelerate, torchtitan and Megatron-LM: what their fields mean, their defaults, and what is refused."""

import random
from math import cos, pi

import pytest

from labkit.learning_rate import schedule_factor
from labkit.run import framework_files, frameworks
from labkit.run.experiment import Experiment
from labkit.run.framework_values import reasons_of

FSDP1 = "distributed_type: FSDP\nfsdp_config: {%s}\n"
FSDP2 = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, %s}\n"
ZERO = "distributed_type: DEEPSPEED\ndeepspeed_config: {%s}\n"
MESH = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nparallelism_config: {%s}\n"
PLAIN = "--micro-batch-size 4 --lr-decay-style constant "
RATE = "lr_scheduler=LRSchedulersContainer.Config(decay_ratio=0.0)"
ADAM = "betas=(0.9, 0.999)"


def python(*sections, rate=RATE):
    return f"def config():\n    return Trainer.Config({', '.join((*sections, rate))})\n"


def read(text, ranks=4):
    framework, config = framework_files.parse(text)
    return frameworks.read(config, framework, ranks)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("distributed_type: 'NO'", {"strategy": "single", "precision": "fp32"}),
        ("distributed_type: MULTI_GPU\nmixed_precision: bf16", {"strategy": "ddp_bucketed", "precision": "bf16"}),
        ("distributed_type: MULTI_CPU\nnum_processes: 4", {"strategy": "ddp_bucketed"}),
        (FSDP1 % "", {"strategy": "fsdp", "recompute": "none"}),
        (FSDP1 % "fsdp_sharding_strategy: SHARD_GRAD_OP", {"strategy": "fsdp_grad_op"}),
        (FSDP1 % "fsdp_sharding_strategy: 3", {"strategy": "ddp_bucketed"}),
        (FSDP2 % "", {"strategy": "fsdp"}),
        (FSDP2 % "fsdp_reshard_after_forward: false", {"strategy": "fsdp_grad_op"}),
        (FSDP2 % "fsdp_offload_params: true", {"strategy": "fsdp_offload"}),
        (FSDP2 % "fsdp_activation_checkpointing: true", {"recompute": "every"}),
        (
            MESH % "parallelism_config_tp_size: 2, parallelism_config_dp_shard_size: 2",
            {"strategy": "fsdp", "tensor": 2, "model": "gpt"},
        ),
        (ZERO % "", {"strategy": "zero2", "clip": 1.0, "accumulation": 1}),
        (
            ZERO % "zero_stage: 1, gradient_accumulation_steps: 4, gradient_clipping: 0.5",
            {"accumulation": 4, "clip": 0.5},
        ),
        (
            ZERO % "zero_stage: 3, offload_param_device: cpu, offload_optimizer_device: cpu",
            {"strategy": "fsdp_offload"},
        ),
        (
            ZERO % "zero_stage: 3, offload_param_device: nvme, offload_optimizer_device: nvme, "
            "offload_param_nvme_path: /nvme, offload_optimizer_nvme_path: /nvme",
            {"strategy": "fsdp_nvme", "nvme_path": "/nvme"},
        ),
    ],
    ids=str,
)
def test_what_a_field_of_accelerate_means_here(text, fields):
    experiment = read(text, 1 if "'NO'" in text else 4).experiment
    assert {name: getattr(experiment, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (PLAIN, {"batch_size": 16, "accumulation": 1, "clip": 1.0, "weight_decay": 0.01, "optimizer": "adamw"}),
        (PLAIN + "--global-batch-size 32", {"batch_size": 32, "accumulation": 2, "strategy": "ddp_bucketed"}),
        (PLAIN + "--optimizer sgd --lr 1e-2", {"optimizer": "sgd", "momentum": 0.9, "lr": 0.01}),
        (PLAIN + "--tensor-model-parallel-size 2 --sequence-parallel", {"tensor": 2, "sequence_parallel": "on"}),
        (PLAIN + "--tensor-model-parallel-size=2", {"sequence_parallel": "off", "batch_size": 8}),
        (PLAIN + "--pipeline-model-parallel-size 2", {"pipeline": 2, "strategy": "ddp_naive"}),
        (PLAIN + "--use-distributed-optimizer --bf16", {"strategy": "zero1", "precision": "bf16"}),
        (PLAIN + "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", {"strategy": "zero2"}),
        (PLAIN + "--use-megatron-fsdp", {"strategy": "ddp_bucketed"}),
        (PLAIN + "--use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward", {"strategy": "fsdp_grad_op"}),
        (
            PLAIN + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            {"recompute": "every"},
        ),
        (PLAIN + "--num-experts 4 --moe-aux-loss-coeff 1e-2", {"experts": 4, "expert": 1}),
        (PLAIN + "--ddp-bucket-size 262144", {"bucket_cap_mb": 1.0, "seed": 1234}),
        (
            f"torchrun --nproc-per-node 4 \\\n  pretrain_gpt.py {PLAIN} \\\n  --data-path 0.5 a 0.5 b  # two\n",
            {"batch_size": 16},
        ),
    ],
    ids=str,
)
def test_what_an_argument_of_megatron_means_here(text, fields):
    experiment = read(text).experiment
    assert experiment.model == "gpt"
    assert {name: getattr(experiment, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        (python(), {"strategy": "fsdp", "precision": "bf16", "batch_size": 32, "clip": 1.0, "steps": 10000}),
        (python(), {"recompute": "matmul", "warmup_steps": 199, "schedule": "constant", "optimizer": "sgd"}),
        (python("training=TrainingConfig(global_batch_size=64)"), {"batch_size": 64, "accumulation": 2}),
        (
            python("training=TrainingConfig(mixed_precision_param='float32', enable_cpu_offload=True)"),
            {"precision": "fp32", "strategy": "fsdp_offload"},
        ),
        (python("parallelism=ParallelismConfig(data_parallel_replicate_degree=4)"), {"strategy": "ddp_bucketed"}),
        (python("parallelism=ParallelismConfig(fsdp_reshard_after_forward='never')"), {"strategy": "fsdp_grad_op"}),
        (
            python("parallelism=ParallelismConfig(tensor_parallel_degree=2)"),
            {"tensor": 2, "sequence_parallel": "on", "recompute": "none"},
        ),
        (python("activation_checkpoint=FullAC.Config()"), {"recompute": "every"}),
        (python("activation_checkpoint=None", 'model_spec=registry("8B")'), {"recompute": "none", "model": "gpt"}),
        (python(f"optimizer=default_adamw({ADAM})"), {"optimizer": "adamw", "lr": 8e-4, "weight_decay": 0.1}),
        (
            python(
                "optimizer=OptimizersContainer.Config(param_groups=[ParamGroupConfig(pattern='.*', "
                "optimizer_name='AdamW', optimizer_kwargs={'lr': 0.1})])"
            ),
            {"lr": 0.1, "weight_decay": 0.01},
        ),
        (
            python(
                "parallelism=ParallelismConfig(pipeline_parallel_degree=2, data_parallel_replicate_degree=2, "
                "pipeline_parallel_microbatch_size=2)",
                "training=TrainingConfig(mixed_precision_param='float32', disable_cuda_graphs=True)",
            ),
            {"pipeline": 2, "strategy": "ddp_naive", "accumulation": 4, "batch_size": 16},
        ),
    ],
    ids=str,
)
def test_what_a_field_of_torchtitan_means_here(text, fields):
    experiment = read(text).experiment
    assert {name: getattr(experiment, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "distributed_typ: FSDP\nmixed_precision: bf16",
            "no field distributed_typ; did you mean distributed_type?",
        ),
        (
            "mixed_precision: bf16",
            "distributed_type must be there: this lab has 'NO', 'MULTI_GPU', 'MULTI_CPU', 'FSDP'",
        ),
        ("distributed_type: NO", "YAML reads an unquoted NO as false; write 'NO'"),
        ("distributed_type: MULTI_GPU\nmixed_precision: no", "YAML reads an unquoted no as false"),
        (
            "distributed_type: MULTI_GPU\nmixed_precision: fp8",
            "mixed_precision='fp8': this lab has 'no', 'fp16', 'bf16'",
        ),
        ("distributed_type: MEGATRON_LM", "read Megatron's own arguments"),
        ("distributed_type: 'NO'", "is for one process, not 4"),
        ("distributed_type: MULTI_GPU\nnum_processes: 8", "num_processes=8: must be the number of ranks of the run, 4"),
        ("distributed_type: MULTI_GPU\nnum_processes: 0", "num_processes=0: must be a whole number of at least 1"),
        ("compute_environment: AMAZON_SAGEMAKER\ndistributed_type: MULTI_GPU", "SageMaker has other fields"),
        ("distributed_type: FSDP\nfsdp_confg: {}", "Accelerate has no field fsdp_confg; did you mean fsdp_config?"),
        (FSDP1 % "fsdp_sharding_strateg: FULL_SHARD", "did you mean fsdp_config.fsdp_sharding_strategy?"),
        (FSDP1 % "fsdp_sharding_strategy: HYBRID_SHARD", "this lab has 'FULL_SHARD', 'SHARD_GRAD_OP', 'NO_SHARD'"),
        (FSDP1 % "fsdp_reshard_after_forward: SHARD_GRAD_OP", "FSDP of version 1 does not read it"),
        (FSDP1 % "fsdp_version: 3", "fsdp_version=3: this lab has 1, 2"),
        (FSDP2 % "fsdp_reshard_after_forward: FULL_SHARD", "must be true or false"),
        ("distributed_type: FSDP\nfsdp_config: true", "must be a section, with fsdp_version in it"),
        (MESH % "parallelism_config_tp_size: 2", "dp_shard_size=1: must be 2, 4 ranks / tp_size 2"),
        (MESH % "parallelism_config_tp_size: 3", "4 ranks must be a multiple of 3"),
        (MESH % "parallelism_config_dp_replicate_size: 2", "here it is 1 (HSDP)"),
        (ZERO % "zero_stage: 4", "deepspeed_config.zero_stage=4: must be 0, 1, 2 or 3"),
        (ZERO % 'zero_stage: "3"', 'zero_stage="3": must be a whole number'),
        (ZERO % "gradient_clipping: 0", "Accelerate leaves a 0 out, and DeepSpeed then clips to 1.0"),
        (ZERO % "gradient_accumulation_steps: auto", "Accelerate replaces it by a value of the program; write"),
        (
            PLAIN + "--tensor-model-paralel-size 2",
            "Megatron-LM has no field tensor-model-paralel-size; did",
        ),
        (PLAIN + "--micro-batch-size 4", "--micro-batch-size is there twice"),
        ("--lr-decay-style constant", "micro-batch-size must be there: Megatron-LM has no default"),
        ("--micro-batch-size 4", "lr-decay-style is linear, also where it is not written"),
        ("--micro-batch-size 0 --lr-decay-style constant", "micro-batch-size=0: must be a whole number of at least 1"),
        (
            "--micro-batch-size $MICRO --lr-decay-style constant",
            "--micro-batch-size $MICRO: write the value",
        ),
        ("torchrun --nproc-per-node 4 pretrain_gpt.py ${ARGS[@]}", "write out the arguments that a shell variable has"),
        (PLAIN + "--global-batch-size 24", "global-batch-size=24 must be a multiple of 16: micro-batch-size=4 x 4"),
        (PLAIN + "--tensor-model-parallel-size 3", "4 ranks must be a multiple of 3: tensor-model-parallel-size=3"),
        (PLAIN + "--num-experts 4", "moe-aux-loss-coeff=0.0: with num-experts it is 0.01 here"),
        (PLAIN + "--fp16 --bf16", "bf16 and fp16 are both there"),
        (PLAIN + "--bf16 true", 'bf16="true": must be true or false'),
        (PLAIN + "--recompute-activations", "runs the core of attention again"),
        (PLAIN + "--adam-beta2 0.95", "adam-beta2=0.95: here it is 0.999"),
        (PLAIN + "--optimizer muon", "optimizer='muon': this lab has 'adam', 'sgd'"),
        (PLAIN + "--fp8-format hybrid", "not in this lab (fp8)"),
        (PLAIN + "--grpo-group-size 8", "not in this lab (reinforcement learning)"),
        (
            PLAIN + "--training.steps 8",
            "no field training.steps; torchtitan has it: remove it, or write the file for torchtitan",
        ),
        (
            PLAIN + "--use-distributed-optimizer --tensor-model-parallel-size 2",
            "use-distributed-optimizer with tensor-model-parallel-size: this lab's zero1 has no other axes",
        ),
        (
            python("trainin=TrainingConfig(steps=3)"),
            "no field trainin; did you mean training?",
        ),
        (python("training=TrainingConfig(step=3)"), "did you mean training.steps?"),
        (python("training=TrainingConfig(steps=STEPS)"), "training.steps=STEPS: must be a literal value"),
        (python("training=TrainingConfig(steps='3')"), "must be a whole number"),
        (python("training=TrainingConfig(global_batch_size=20)"), "global_batch_size=20 must be a multiple of 32"),
        (python("training=TrainingConfig(dtype='bfloat16')"), 'here it is "float32"'),
        (
            python("optimizer=default_adamw()"),
            "[0.9, 0.95], also where it is not written: write betas=(0.9, 0.999)",
        ),
        (python(f"optimizer=default_adamw({ADAM}, **more)"), "must have names and values only"),
        (
            python(rate="metrics=MetricsProcessor.Config()"),
            "lr_scheduler.decay_type is linear, also where it is not written",
        ),
        (python("parallelism=ParallelismConfig(data_parallel_replicate_degree=2)"), "HSDP is not in this lab"),
        (python("parallelism=ParallelismConfig(data_parallel_shard_degree=2)"), "must be the 4 data-parallel ranks"),
        (python("parallelism=ParallelismConfig(expert_parallel_degree=2)"), "Experiment(expert=, experts=)"),
        (python("activation_checkpoint=MemoryBudgetAC.Config()"), "this lab has 'None', 'FullAC', 'SelectiveAC'"),
        ("config = llama3()\nconfig.training.steps = 3\nTrainer.Config()", "write it into Trainer.Config(...)"),
        ("c = Trainer.Config()\nc.training.steps += 3", "has c.training.steps += 3: write it into"),
        ("c = Trainer.Config()\nc.training.steps: int = 3", "has c.training.steps: int = 3: write it into"),
        ("c = Trainer.Config()\na, c.training.steps = 1, 3", "write it into Trainer.Config(...)"),
        ("c = Trainer.Config()\nsetattr(c.training, 'steps', 3)", "write it into Trainer.Config(...)"),
        ("c = replace(Trainer.Config(), seed=3)", "write it into Trainer.Config(...)"),
        ("def config(): return Trainer.Config(", "is not Python: '(' was never closed, line 1"),
        ("x: Trainer.Config = llama3()", "has 0 calls of Trainer.Config: keep one in the file"),
        ("zero_optimization:\n  stage: 2\n", "is YAML with DeepSpeed's fields: DeepSpeed reads JSON"),
        ("- 1\n- 2", "must have the fields of one experiment"),
    ],
    ids=str,
)
def test_what_they_refuse_and_why(text, words):
    with pytest.raises(ValueError) as said:
        read(text)
    assert words in str(said.value) and "\n" not in str(said.value)


ODD = (None, True, False, -1, 0, 3, 1.5, "x", "", [], [1], {}, {"a": 1}, float("nan"), 10**30)
STARTS = [
    ("deepspeed", '{"train_batch_size": 64, "optimizer": {"type": "SGD"}}'),
    ("accelerate", FSDP2 % ""),
    ("accelerate", ZERO % ""),
    ("megatron", PLAIN),
    ("torchtitan", python(f"optimizer=default_adamw({ADAM})")),
]


@pytest.mark.parametrize(("framework", "text"), STARTS, ids=str)
def test_any_value_of_any_field_is_taken_or_refused_in_one_line(framework, text):
    pick = random.Random(0)
    for name in frameworks.fields(framework):
        for value in pick.sample(ODD, 3):
            config = framework_files.parse(text)[1]
            *above, last = name.split(".")
            section = config
            for part in above:
                section[part] = section.get(part) or {}
                section = section[part]
            section[last] = value
            try:
                frameworks.read(config, framework, 4)
            except ValueError as error:
                assert not [reason for reason in reasons_of(error) if "\n" in reason]


def test_a_file_of_another_framework_is_refused_by_its_name():
    for config, framework, words in (
        ({"distributed_type": "FSDP"}, "deepspeed", "DeepSpeed has no field distributed_type; Accelerate has it"),
        ({"zero_optimization": {"stage": 2}}, "accelerate", "zero_optimization.stage; DeepSpeed has it"),
        ({"micro-batch-size": 2}, "torchtitan", "torchtitan has no field micro-batch-size; Megatron-LM has it"),
        ({}, "horovod", "Horovod has no file of its own to read"),
    ):
        with pytest.raises(ValueError, match=words):
            frameworks.read(config, framework, 4)


@pytest.mark.parametrize("framework", frameworks.FRAMEWORKS)
def test_a_run_has_at_least_one_rank(framework):
    with pytest.raises(ValueError, match="ranks=0: must be at least 1"):
        frameworks.write(Experiment(model="gpt"), framework, 0)


def test_defaults_that_are_not_written_stand_in_the_table():
    found = {line[0]: line[1:4] for line in read(PLAIN + "--lr 0.1").lines}
    assert found["clip-grad"] == ("1.0", "default", "clip")
    assert found["seed"] == ("1234", "default", "seed")
    assert found["lr"] == ("0.1", "written", "lr")
    found = {line[0]: line[1:4] for line in read(python("training=TrainingConfig(steps=9)")).lines}
    assert found["training.mixed_precision_param"] == ('"bfloat16"', "default", "precision")


def test_the_table_says_what_changes_time_only():
    found = {line[0]: line[3] for line in read(PLAIN + "--overlap-grad-reduce --save checkpoints").lines}
    assert found["overlap-grad-reduce"] == "time or memory only"
    assert found["save"] == "part of the program"


def test_warm_up_of_torchtitan_has_the_labs_rates():
    """Its factor in a step of the warm-up is (step + 1) / warmup_steps, and 1 after it."""
    config = frameworks.write(Experiment(model="gpt", optimizer="adamw", warmup_steps=7), "torchtitan", 2).config
    warm = config["lr_scheduler"]["warmup_steps"]
    for step in range(12):
        assert min(1.0, (step + 1) / warm) == pytest.approx(schedule_factor(7, None, step), rel=1e-12)


def test_a_cosine_of_torchtitan_without_warm_up_has_the_labs_rates():
    """After a virtual first step, it is half a cosine over all steps."""
    experiment = Experiment(model="gpt", optimizer="adamw", schedule="cosine", steps=20)
    section = frameworks.write(experiment, "torchtitan", 2).config["lr_scheduler"]
    assert section == {"warmup_steps": 0, "decay_type": "cosine", "min_lr_factor": 0.0}
    for step in range(20):
        theirs = 1.0 if step == 0 else (1 + cos(pi * step / 20)) / 2
        assert theirs == pytest.approx(schedule_factor(0, 20, step), rel=1e-12)


def test_horovods_lines_are_python_with_the_calls_of_labkit():
    experiment = Experiment(accumulation=4, clip=0.5, comm_hook="fp16")
    text = framework_files.as_text(frameworks.write(experiment, "horovod", 2).config, "horovod")
    compile(text, "lines", "exec")
    for words in ("Compression.fp16", "backward_passes_per_step=4", "clip_grad_norm_(model.parameters(), 0.5)"):
        assert words in text
    assert "skip_synchronize" not in framework_files.as_text(
        frameworks.write(Experiment(), "horovod", 2).config, "horovod"
    )
