"""Tensor-parallel plans of a GPT, in the terms of PyTorch's parallelize_module.

    token_embedding   rows: tokens          position_embedding   replicated; with shards: rows
    query_key_value   columns: heads        output               rows
    network.0         columns               network.2            rows
    head              columns: logits       norms                replicated; with shards: on tokens

A plan is a dict, pattern of module names -> style. styles: labkit.tensor_parallel, or any object
with classes of PyTorch's names.
"""


def gpt(styles, sequence=False, whole_logits=False, experts=False):
    """Return the plan of a GPT.

    sequence: between the sharded layers each rank has a part of the tokens. whole_logits: gather
    the head's logits; otherwise a rank has its own part of the vocabulary. experts: the networks
    are mixtures of experts, which stay unsharded and need all tokens.
    """
    logits = styles.Replicate() if whole_logits else styles.Shard(-1)
    plan = (by_sequence if sequence and not experts else by_tensor)(styles, logits)
    return {name: plan[name] for name in plan if not experts or ".network." not in name}


def by_tensor(styles, logits):
    column = styles.ColwiseParallel
    row = styles.RowwiseParallel
    whole = styles.Replicate()
    return {
        "token_embedding": row(input_layouts=whole),
        "blocks.*.attention.query_key_value": column(),
        "blocks.*.attention.output": row(),
        "blocks.*.network.0": column(),
        "blocks.*.network.2": row(),
        "head": column(output_layouts=logits),
    }


def by_sequence(styles, logits):
    column = styles.ColwiseParallel
    row = styles.RowwiseParallel
    whole = styles.Replicate()
    tokens = styles.Shard(1)
    norm = styles.SequenceParallel(use_local_output=True)
    both = {"input_layouts": tokens, "desired_input_layouts": whole}
    return {
        "token_embedding": row(input_layouts=whole, output_layouts=tokens),
        "position_embedding": row(input_layouts=whole, output_layouts=styles.Shard(0)),
        "blocks.*.attention_norm": norm,
        "blocks.*.attention": styles.PrepareModuleInput(**both),  # which reads the input's shape
        "blocks.*.attention.query_key_value": column(),
        "blocks.*.attention.output": row(output_layouts=tokens),
        "blocks.*.network_norm": norm,
        "blocks.*.network.0": column(input_layouts=tokens),
        "blocks.*.network.2": row(output_layouts=tokens),
        "norm": norm,
        "head": column(input_layouts=tokens, output_layouts=logits),
    }


def of_blocks(plan):
    """Return the part of a plan for model.blocks."""
    return {
        name.removeprefix("blocks."): style
        for name, style in plan.items()
        if name.startswith("blocks.")
    }
