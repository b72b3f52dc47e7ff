"""Stages and offload of ZeRO, in DeepSpeed's JSON and in Accelerate's section of it.

    stage 0, 1, 2, 3           ddp_bucketed, zero1, zero2, fsdp
    both offloads in stage 3   to cpu: fsdp_offload; to nvme: fsdp_nvme, in the folder nvme_path

Rajbhandari et al., ZeRO, SC 2020, has the stages; Ren et al., ZeRO-Offload, USENIX ATC 2021, has
the optimizer on the CPU in stage 2, which this lab does not have.
"""

import json

from labkit.run.framework_values import refuse

STRATEGIES = {0: "ddp_bucketed", 1: "zero1", 2: "zero2", 3: "fsdp"}
OFFLOADED = {"cpu": "fsdp_offload", "nvme": "fsdp_nvme"}  # device of both, in stage 3
FOLDER = 'a folder, such as "/local_nvme"'


def zero_strategy(name, stage, devices):
    """Return the strategy of a stage. name: its field. devices: {field: device} of both offloads.

    Raises ValueError if this lab does not have the stage with these devices.
    """
    if stage not in STRATEGIES:
        raise ValueError(f"{name}={stage!r}: must be 0, 1, 2 or 3")
    for field, device in devices.items():
        if device not in ("none", *OFFLOADED):
            raise ValueError(f"{field}={json.dumps(device)}: must be none, cpu or nvme")
    used = [device for device in devices.values() if device != "none"]
    if not used:
        return STRATEGIES[stage]
    if stage == 3 and set(devices.values()) == {used[0]}:
        return OFFLOADED[used[0]]
    words = " and ".join(f"{field}={json.dumps(device)}" for field, device in devices.items())
    needed = "" if stage == 3 else "stage 3 and "
    raise ValueError(
        f"{name}={stage} with {words}: this lab offloads parameters and optimizer together, in "
        f'stage 3; write {needed}"{used[0]}" for both devices, or "none" for both'
    )


def nvme_path_of(strategy, paths):
    """Return {"nvme_path": value} of fsdp_nvme, else {}. paths: {field: value} of both parts."""
    if strategy != "fsdp_nvme":
        return {}
    for name, path in paths.items():
        if path is None:
            raise ValueError(f"{name} must be there with device nvme: write {FOLDER}")
        if not isinstance(path, str) or not path:
            raise ValueError(f"{name}={json.dumps(path)}: must be {FOLDER}")
    if len(set(paths.values())) > 1:
        words = " and ".join(f"{name}={json.dumps(path)}" for name, path in paths.items())
        raise ValueError(f"{words}: must be equal, as this lab has one folder for both")
    return {"nvme_path": path}


def offload_sections(e, title):
    """Return the sections of both offloads, which need a folder with device nvme."""
    device = {strategy: device for device, strategy in OFFLOADED.items()}.get(e.strategy)
    if device is None:
        return {}
    section = {"device": device}
    if device == "nvme":
        if not e.nvme_path:
            refuse("nvme_path", e.nvme_path, title, FOLDER)
        section["nvme_path"] = e.nvme_path
    return {part: dict(section) for part in ("offload_param", "offload_optimizer")}
