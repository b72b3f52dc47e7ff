"""Lines that refuse a file of DeepSpeed or Accelerate: each names the field, and what to write instead."""

import pytest

from labkit.run import framework_files, frameworks
from labkit.run.experiment import Experiment
from labkit.run.framework_values import reasons_of

CPU = {"device": "cpu"}
GROWING = {"enabled": True, "curriculum_type": "seqlen", "min_difficulty": 8, "max_difficulty": 64}
GROWING |= {"schedule_type": "fixed_root"}
SCHEDULE = {"total_curriculum_step": 10, "difficulty_step": 8, "root_degree": 2}


def refused(config, framework="deepspeed"):
    config = {"train_batch_size": 64} | config if framework == "deepspeed" else config
    with pytest.raises(ValueError) as said:
        frameworks.read(config, framework, 4)
    assert not [reason for reason in reasons_of(said.value) if "\n" in reason]
    return reasons_of(said.value)


def written(experiment, framework):
    with pytest.raises(ValueError) as said:
        frameworks.write(experiment, framework, 4)
    return reasons_of(said.value)


def grown(schedule=(), **changes):
    return {"curriculum_learning": GROWING | changes | {"schedule_config": SCHEDULE | dict(schedule)}}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_optimizer_alone_cannot_be_offloaded(stage):
    needed = "" if stage == 3 else "stage 3 and "
    way = "this lab offloads parameters and optimizer together, in stage 3; "
    way += f'write {needed}"cpu" for both devices, or "none"'
    (line,) = refused({"zero_optimization": {"stage": stage, "offload_optimizer": CPU}})
    start = f'zero_optimization.stage={stage} with zero_optimization.offload_param.device="none" and '
    assert line == f'{start}zero_optimization.offload_optimizer.device="cpu": {way} for both'
    section = {"zero_stage": stage, "offload_optimizer_device": "cpu"}
    (line,) = refused({"distributed_type": "DEEPSPEED", "deepspeed_config": section}, "accelerate")
    assert line.startswith(f"deepspeed_config.zero_stage={stage} with deepspeed_config.offload_param_device=")
    assert way in line


def test_the_way_out_is_read():
    for device, strategy in (("cpu", "fsdp_offload"), ("none", "fsdp")):
        zero = {"stage": 3, "offload_param": {"device": device}, "offload_optimizer": {"device": device}}
        config = {"train_batch_size": 64, "zero_optimization": zero}
        assert frameworks.read(config, "deepspeed", 4).experiment.strategy == strategy
    curriculum = frameworks.read({"train_batch_size": 64} | grown(), "deepspeed", 4).experiment
    assert (curriculum.curriculum, curriculum.curriculum_from) == ("fixed_root", 8)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            grown(max_difficulty=1024),
            "max_difficulty=1024: here it is 64, as the lab's sequences have 64 tokens; write 64",
        ),
        (
            grown(max_difficulty=None),
            "max_difficulty must be there: here it is 64, as the lab's sequences have 64 tokens",
        ),
        (
            grown({"difficulty_step": 16}),
            "difficulty_step=16: here it is 8, as the lab's lengths are multiples of 8; write 8",
        ),
        (
            grown({"root_degree": 3}),
            "root_degree=3: here it is 2, as the lab's root is the square root; "
            'for degree 1, schedule_type "fixed_linear"; write 2',
        ),
        (grown(schedule_type=None), "schedule_type must be there: this lab has 'fixed_linear', 'fixed_root'"),
        (grown({"total_curriculum_step": None}), "total_curriculum_step must be there: a whole number of at least 1"),
    ],
    ids=str,
)
def test_a_curriculum_that_the_lab_lacks_says_why(config, line):
    (found,) = refused(config)
    assert line in found


def test_the_curriculum_of_todays_deepspeed_is_named_with_the_one_that_is_read():
    metric = {"seqlen": {"index_to_sample_path": "a", "min_difficulty": 8, "max_difficulty": 64}}
    sampling = {"enabled": True, "curriculum_learning": {"enabled": True, "curriculum_metrics": metric}}
    config = {"data_efficiency": {"enabled": True, "seed": 3, "data_sampling": sampling}}
    section, pointer = refused(config)
    assert section.startswith("this lab has no data_efficiency (")
    assert pointer.startswith(
        "this lab has no data_efficiency.data_sampling.curriculum_learning (it chooses samples by"
    )
    for word in (
        "the section curriculum_learning of releases before 0.19.8",
        '"seqlen"',
        "max_difficulty 64",
        "remove it",
    ):
        assert word in pointer
    config["data_efficiency"]["enabled"] = False
    assert frameworks.read({"train_batch_size": 64} | config, "deepspeed", 4).experiment.curriculum == "none"


def test_a_curriculum_that_deepspeed_no_longer_has_is_refused_by_its_section():
    found = frameworks.read({"train_batch_size": 64} | grown(), "deepspeed", 4)
    (line,) = written(found.experiment, "deepspeed")
    assert line == (
        "Experiment(curriculum='fixed_root'): DeepSpeed cannot express it, as 0.19.8 has removed the section "
        "curriculum_learning; it needs 'none'"
    )


def test_betas_have_a_way_out():
    (line,) = refused({"optimizer": {"type": "AdamW", "params": {"betas": [0.9, 0.95]}}})
    assert line == (
        "optimizer.params.betas=[0.9, 0.95]: here it is [0.9, 0.999] (of Adam; an Experiment has no field for betas, "
        "but in Python labkit's DDP and FSDP take any optimizer); write [0.9, 0.999]"
    )


def test_a_folder_that_is_not_there_is_asked_for():
    disk = {"device": "nvme"}
    (line,) = refused({"zero_optimization": {"stage": 3, "offload_param": disk, "offload_optimizer": disk}})
    folder = 'a folder, such as "/local_nvme"'
    assert line == f"zero_optimization.offload_param.nvme_path must be there with device nvme: write {folder}"
    (line,) = written(Experiment(strategy="fsdp_nvme"), "deepspeed")
    assert line == f"Experiment(nvme_path=''): DeepSpeed cannot express it; it needs {folder}"
    for target, title in (("accelerate", "Accelerate"), ("horovod", "Horovod")):
        *_, line = written(Experiment(strategy="fsdp_nvme", nvme_path="/nvme"), target)
        assert line.endswith(f"{title} cannot express it; it needs an experiment without nvme_path")


@pytest.mark.parametrize("framework", frameworks.FRAMEWORKS)
def test_a_choice_is_named_once(framework):
    for allowed in frameworks.FRAMEWORKS[framework].WRITES.values():
        assert allowed is any or len(set(allowed)) == len(allowed)


def test_offload_of_another_sharding_has_a_way_out():
    section = {"fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_offload_params": True}
    (line,) = refused({"distributed_type": "FSDP", "fsdp_config": section}, "accelerate")
    assert (
        "offload_params with fsdp_grad_op: " in line and "; remove it, or write FULL_SHARD, in version 2 fsdp_" in line
    )


def test_shards_within_a_group_were_removed_from_deepspeed():
    (line,) = refused({"zero_optimization": {"stage": 3, "mics_shard_size": 4}})
    assert "MiCS, shards within a smaller group, which DeepSpeed 0.19.8 has removed" in line


@pytest.mark.parametrize("framework", [None, "fairscale"])
def test_a_name_of_no_framework_is_one_line(framework):
    calls = (
        lambda: frameworks.read({"a": 1}, framework, 4),
        lambda: frameworks.write(Experiment(), framework, 4),
        lambda: frameworks.ranks_of({}, framework),
        lambda: frameworks.nodes_of({}, framework),
        lambda: framework_files.as_text({}, framework),
    )
    for call in calls:
        with pytest.raises(ValueError) as said:
            call()
        assert str(said.value).startswith(f"framework={framework!r}: must be one of deepspeed, accelerate, ")
        assert "\n" not in str(said.value)


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("OneCycle", {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 10, "decay_lr_rate": 0.1}),
        ("LRRangeTest", {"lr_range_test_min_lr": 1e-4, "lr_range_test_staircase": True}),
        ("WarmupDecayLR", {"total_num_steps": 9, "warmup_type": "log"}),
    ],
)
def test_another_scheduler_is_refused_by_its_name(kind, params):
    line = f"scheduler.type={kind!r}: this lab has WarmupLR, WarmupCosineLR"
    assert refused({"scheduler": {"type": kind, "params": params}}) == [line]
    (line,) = refused({"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear", "cycle_min_lr": 1e-4}}})
    assert line.startswith("DeepSpeed has no field scheduler.params.cycle_min_lr; ")


TOML = """[activation_checkpoint]
mode = "none"
[optimizer]
beta2 = 0.999
[lr_scheduler]
decay_ratio = 0.0
"""


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ("[training]\nseed = -1", "training.seed=-1: must be a whole number of at least 0"),
        ("[training]\ncompile = 3", "training.compile=3: must be true or false"),
        ("[compile]\nenabled = true", "torchtitan has no field compile.enabled; did you mean compile.enable?"),
        (
            "[parallelism]\nenable_async_tensor_paralel = true",
            "torchtitan has no field parallelism.enable_async_tensor_paralel; "
            "did you mean parallelism.enable_async_tensor_parallel?",
        ),
        ("[validators]\nx = 3", "torchtitan has no field validators.x; did you mean validation?"),
        ("[profile]\nx = 3", "torchtitan has no field profile.x; did you mean profiling?"),
    ],
    ids=str,
)
def test_a_toml_file_of_torchtitan_is_refused_in_its_own_names(section, line):
    framework, config = framework_files.parse(f"{TOML}{section}\n")
    assert refused(config, framework) == [line]


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("beta2 = 0.999", "beta1 = 0.9", "optimizer.[beta1, beta2]=[0.9, 0.95]: here it is [0.9, 0.999] "),
        ("decay_ratio = 0.0", "decay_ratio = 0.0\nlr_min = 0.1", "lr_scheduler.lr_min=0.1: here it is 0 "),
        (
            "decay_ratio = 0.0",
            "decay_ratio = 0.5",
            "lr_scheduler.decay_ratio=0.5: this lab has 0, and with cosine none",
        ),
        (
            "beta2 = 0.999",
            "",
            "optimizer.[beta1, beta2] is [0.9, 0.95], also where it is not written: write beta2 = 0.999",
        ),
    ],
    ids=str,
)
def test_a_moved_field_of_toml_has_the_name_of_the_file(old, new, line):
    framework, config = framework_files.parse(TOML.replace(old, new))
    (found,) = refused(config, framework)
    assert found.startswith(line)
