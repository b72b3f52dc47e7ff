"""The allowed values of an Experiment's fields. Needs no torch, so it imports within 0.1 s.

labkit.models and labkit.trainer define what these names mean. A test checks that the keys of those
tables are the names here.
"""

DDP = ("ddp_naive", "ddp_overlapped", "ddp_bucketed")
FSDP = ("fsdp", "fsdp_grad_op", "fsdp_offload", "fsdp_nvme")
TORCH = ("torch_ddp", "torch_fsdp")
SELDOM = ("local_sgd", "diloco")
HOOKED = (*DDP, "torch_ddp")  # strategies that accept any comm hook
HOROVOD = ("none", "fp16")  # comm hooks of the strategy horovod: its Compression
MESHED = (*DDP, *FSDP)  # strategies that can be combined with other axes of a mesh
BY_NODES = ("hierarchical", "leaders")
COMPRESSORS = ("fp16", "bf16", "quantize8", "quantize4", "onebit")
COMPRESSORS += ("topk", "randomk", "dgc", "powersgd")
FITTING = {"mlp": ("digits",), "resnet": ("digits", "cifar10"), "gpt": ("stdlib_text",)}
CHOICES = {
    "model": tuple(FITTING),
    "size": ("tiny", "small", "medium"),
    "data": ("auto", "digits", "stdlib_text", "cifar10"),
    "strategy": ("single", *DDP, "horovod", "zero1", "zero2", *FSDP, *SELDOM, *TORCH, "auto"),
    "optimizer": ("sgd", "adamw"),
    "lr_rule": ("none", "linear", "sqrt", "linear_sqrt"),
    "schedule": ("constant", "cosine"),
    "curriculum": ("none", "fixed_linear", "fixed_root"),
    "precision": ("fp32", "fp64", "bf16", "fp16"),
    "recompute": ("none", "every", "alternate", "matmul"),
    "comm_hook": ("none", *BY_NODES, *COMPRESSORS),
    "attention": ("torch", "flash"),
    "sequence_parallel": ("off", "on"),
    "compute": ("real", "emulated"),
}
