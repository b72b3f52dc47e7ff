"""The options that run a planned layout on its stack.

megatron      Megatron-LM, megatron/training/arguments.py
torchtitan    torchtitan/config/job_config.py
torch-fsdp    torch.distributed.fsdp.fully_shard, torch 2.6 and later
deepspeed     https://www.deepspeed.ai/docs/config-json
nanotron      nanotron/config/parallelism_config.py
"""

import json

from labkit.scale.bert_shapes import Encoder
from labkit.scale.vit_shapes import ViT


def launch_options(job):
    """Return the lines that run the job on its stack: a list of text."""
    lines = BY_STACK.get(job.stack.name, plain)(job)
    lines += [PARTS[job.part](job)] if job.part else []
    return [*lines, PACKING.get(job.stack.name, PADDING_FREE)(job)] if job.documents else lines


def last_layers(job):
    """Return the line that freezes all but the last layers of a model."""
    parts = [f"model.layers[-{job.last}:]"] * (job.last > 0)
    parts += ["model.output"] * (job.shape.own_head > 0)
    return f"# before wrapping: requires_grad_(False) on all of the model but {', '.join(parts)}"


def adapters(job):
    """Return the line that adds a job's LoRA adapters to the model."""
    if job.stack.name == "megatron":
        return f"# Megatron Bridge, of the recipe: peft = LoRA(dim={job.lora})"
    but = ', exclude_modules=".*vision_tower.*"' if job.shape.vision else ""
    config = f'LoraConfig(r={job.lora}, target_modules="all-linear"{but})'
    return f"# Hugging Face's PEFT: model = get_peft_model(model, {config})"


def decoder(job):
    """Return the line that freezes an image encoder."""
    return "# before wrapping: model.vision_tower.requires_grad_(False)"


PARTS = {"lora": adapters, "train": last_layers, "decoder": decoder}


def packs(line):
    """Return the function of a job that returns its line about packed documents."""
    return lambda job: f"# packed documents: {line.format(job.context)}"


PADDING_FREE = packs('DataCollatorWithFlattening() and attn_implementation="flash_attention_2"')
PACKING = {  # PADDING_FREE is of Hugging Face's transformers
    "megatron": packs("Megatron Bridge's PackedSequenceSpecs(packed_sequence_size={})"),
    "torchtitan": packs('FlexAttention and attn_mask_type="block_causal" of the model'),
    "nanotron": packs("_use_doc_masking: true of the model"),
}


def torchrun(job, script):
    """Return the torchrun command of a job."""
    local = min(job.n_gpus, job.gpus_per_node)
    return f"torchrun --nnodes {-(-job.n_gpus // local)} --nproc-per-node {local} {script}"


def plain(job):
    return [torchrun(job, "train.py")]


def global_batch(job):
    return job.micro_batch * job.grad_accum * job.dp * job.replicas


def expert_tp(job):
    """Return over how many ranks an expert is divided; None without tp or experts."""
    if job.tp == 1 or job.shape.experts == 1:
        return None
    return 1 if job.whole_experts else job.tp


def options(pairs):
    """Return "--name value" of each pair; a value of True is a flag, of None left out."""
    kept = [(name, value) for name, value in pairs.items() if value not in (None, False)]
    return [f"--{name}" if value is True else f"--{name} {value}" for name, value in kept]


def torch_fsdp(job):
    """Return torchrun and the Python lines that wrap the model."""
    batch = f"# micro-batch {job.micro_batch}, {job.grad_accum} accumulated"
    lines = [torchrun(job, "train.py"), f"{batch}; recomputation: {job.recompute}"]
    if job.zero == 0:
        return [*lines, "model = DistributedDataParallel(model, gradient_as_bucket_view=True)"]
    if job.zero == 1:
        wrapped = "model = DistributedDataParallel(model, gradient_as_bucket_view=True)"
        return [*lines, wrapped, "optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW)"]
    if job.replicas > 1:
        mesh = f'({job.replicas}, {job.dp}), mesh_dim_names=("replicate", "shard")'
    else:
        mesh = f'({job.dp},), mesh_dim_names=("shard",)'
    return [
        *lines,
        f'mesh = init_device_mesh("cuda", {mesh})',
        "policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)",
        "for unit in [*model.layers, model]:",
        "    fully_shard(unit, mesh=mesh, mp_policy=policy, "
        f"reshard_after_forward={job.zero == 3})",
    ]


def torchtitan(job):
    """Return torchrun with torchtitan's options."""
    ranks = job.dp * job.replicas
    schedule = "Interleaved1F1B" if job.vpp > 1 else "1F1B"
    pairs = {
        "parallelism.data_parallel_shard_degree": 1 if job.zero == 0 else job.dp,
        "parallelism.data_parallel_replicate_degree": ranks if job.zero == 0 else job.replicas,
        "parallelism.fsdp_reshard_after_forward": "default" if job.zero == 3 else "never",
        "parallelism.tensor_parallel_degree": job.tp,
        "parallelism.context_parallel_degree": job.cp,
        "parallelism.expert_parallel_degree": job.ep,
        "parallelism.expert_tensor_parallel_degree": expert_tp(job),
        "parallelism.pipeline_parallel_degree": job.pp,
        "training.local_batch_size": job.micro_batch,
        "training.global_batch_size": global_batch(job),
        "training.seq_len": job.context,
        "activation_checkpoint.mode": job.recompute,
    }
    if job.pp > 1:
        pairs["training.local_batch_size"] = job.micro_batch * job.grad_accum
        pairs["parallelism.pipeline_parallel_microbatch_size"] = job.micro_batch
        pairs["parallelism.pipeline_parallel_schedule"] = schedule
    return [torchrun(job, "-m torchtitan.train"), *options(pairs)]


def megatron(job):
    """Return torchrun with Megatron-LM's options: parallelism, batch and model."""
    half = "fp16" if "fp16" in job.precision else "bf16"
    pairs = {
        "tensor-model-parallel-size": job.tp,
        "sequence-parallel": job.tp > 1,
        "pipeline-model-parallel-size": job.pp,
        "context-parallel-size": job.cp,
        "expert-model-parallel-size": job.ep if job.shape.experts > 1 else None,
        "expert-tensor-parallel-size": expert_tp(job),
        **pipeline_options(job),
        "use-distributed-optimizer": job.zero == 1,
        "overlap-grad-reduce": job.dp > 1,
        "overlap-param-gather": job.zero == 1 and job.dp > 1,
        "micro-batch-size": job.micro_batch,
        "global-batch-size": global_batch(job),
        "seq-length": job.context,
        half: True,
        "fp8-format": "hybrid" if "fp8" in job.precision else None,
        "recompute-activations": job.recompute == "selective",
        **recompute_options(job),
        **megatron_model(job.shape),
    }
    script = "pretrain_bert.py" if isinstance(job.shape, Encoder) else "pretrain_gpt.py"
    script = "pretrain_vision_classify.py" if isinstance(job.shape, ViT) else script
    return [torchrun(job, script), *options(pairs)]


def recompute_options(job):
    if job.recompute != "full":
        return {}
    named = {"recompute-granularity": "full", "recompute-method": "uniform"}
    return named | {"recompute-num-layers": 1}


def pipeline_options(job):
    """Return Megatron's options of an interleaved or an uneven pipeline."""
    layers, pp = job.shape.layers, job.pp
    if job.vpp > 1:
        return {"num-layers-per-virtual-pipeline-stage": layers // pp // job.vpp}
    if layers % pp == 0:
        return {}
    return {"pipeline-model-parallel-layout": f"'{stages_text(job)}'"}


def stages_text(job):
    """Return the stages in Megatron's notation: E,t*2|(t*2|)*13,t*1|t*1,L has 16 stages."""
    counts = [count for count, _, _ in job.stages]
    first, *middle, last = counts
    parts = [f"E,t*{first}|"]
    for count in dict.fromkeys(middle):
        parts.append(f"(t*{count}|)*{middle.count(count)},")
    return "".join([*parts, f"t*{last},L"])


def megatron_model(shape):
    """Return Megatron's options of a model's sizes."""
    return {
        "num-layers": shape.layers,
        "hidden-size": shape.hidden,
        "num-attention-heads": shape.heads,
        "group-query-attention": shape.kv_heads < shape.heads,
        "num-query-groups": shape.kv_heads if shape.kv_heads < shape.heads else None,
        "kv-channels": shape.head_dim or None,
        "ffn-hidden-size": shape.dense_ffn or shape.ffn,
        "swiglu": shape.gated,
        "num-experts": shape.experts if shape.experts > 1 else None,
        "moe-router-topk": shape.top_k if shape.experts > 1 else None,
        "moe-ffn-hidden-size": shape.ffn if shape.experts > 1 else None,
        "moe-shared-expert-intermediate-size": shape.shared_ffn or None,
        "multi-latent-attention": shape.latent is not None,
        "untie-embeddings-and-output-weights": not shape.tied,
    }


def deepspeed(job):
    """Return the launcher, and the configuration as JSON."""
    local = min(job.n_gpus, job.gpus_per_node)
    config = {
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_accumulation_steps": job.grad_accum,
        "fp16" if "fp16" in job.precision else "bf16": {"enabled": True},
        "zero_optimization": {"stage": job.zero, "overlap_comm": True},
    }
    if job.offload:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    nodes = -(-job.n_gpus // local)
    launcher = f"deepspeed --num_nodes {nodes} --num_gpus {local} train.py --deepspeed_config F"
    axes = f"# F, with tensor parallelism {job.tp} and pipeline {job.pp} of the model's own code:"
    return [launcher, *([axes] if job.tp * job.pp > 1 else ["# F:"]), json.dumps(config)]


def nanotron(job):
    """Return torchrun, and the part of nanotron's YAML that sets the layout."""
    return [
        torchrun(job, "run_train.py --config-file F.yaml"),
        f"parallelism: {{dp: {job.dp}, tp: {job.tp}, pp: {job.pp}, pp_engine: 1f1b, "
        "tp_mode: REDUCE_SCATTER}",
        f"optimizer: {{zero_stage: {job.zero}}}",
        f"tokens: {{micro_batch_size: {job.micro_batch}, batch_accumulation_per_replica: "
        f"{job.grad_accum}, sequence_length: {job.context}}}",
    ]


BY_STACK = {
    "megatron": megatron,
    "torchtitan": torchtitan,
    "torch-fsdp": torch_fsdp,
    "deepspeed": deepspeed,
    "nanotron": nanotron,
}
