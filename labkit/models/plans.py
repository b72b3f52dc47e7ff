"""Which layer of a GPT is cut how: plans in the words of PyTorch's parallelize_module.

    token_embedding   rows: words           position_embedding   whole; with shards: rows
    query_key_value   columns: heads        output               rows
    network.0         columns               network.2            rows
    head              columns: words        norms                whole; with shards: on tokens

A plan is a dict, pattern of module names -> style. styles: labkit.tensor_parallel, or anything that
has PyTorch's classes of the same names.
"""


def gpt(styles, sequence=False, whole_logits=False, experts=False):
    """sequence: between the cut layers each rank has a part of the tokens. The head's logits are
    of a rank's own words, or gathered. experts: networks are mixtures of them, and stay whole,
    which takes all tokens."""
    logits = styles.Replicate() if whole_logits else styles.Shard(-1)
    plan = (by_sequence if sequence and not experts else by_tensor)(styles, logits)
    return {name: plan[name] for name in plan if not experts or ".network." not in name}


def by_tensor(styles, logits):
    column, row, whole = styles.ColwiseParallel, styles.RowwiseParallel, styles.Replicate()
    return {
        "token_embedding": row(input_layouts=whole),
        "blocks.*.attention.query_key_value": column(),
        "blocks.*.attention.output": row(),
        "blocks.*.network.0": column(),
        "blocks.*.network.2": row(),
        "head": column(output_layouts=logits),
    }


def by_sequence(styles, logits):
    column, row, whole = styles.ColwiseParallel, styles.RowwiseParallel, styles.Replicate()
    tokens, norm = styles.Shard(1), styles.SequenceParallel(use_local_output=True)
    both = {"input_layouts": tokens, "desired_input_layouts": whole}
    return {
        "token_embedding": row(input_layouts=whole, output_layouts=tokens),
        "position_embedding": row(input_layouts=whole, output_layouts=styles.Shard(0)),
        "blocks.*.attention_norm": norm,
        "blocks.*.attention": styles.PrepareModuleInput(**both),  # it asks for the input's shape
        "blocks.*.attention.query_key_value": column(),
        "blocks.*.attention.output": row(output_layouts=tokens),
        "blocks.*.network_norm": norm,
        "blocks.*.network.0": column(input_layouts=tokens),
        "blocks.*.network.2": row(output_layouts=tokens),
        "norm": norm,
        "head": column(input_layouts=tokens, output_layouts=logits),
    }


def of_blocks(plan):
    """The part of a plan that is for model.blocks."""
    return {
        name.removeprefix("blocks."): style
        for name, style in plan.items()
        if name.startswith("blocks.")
    }
