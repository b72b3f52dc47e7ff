"""Read a model from the config.json of Hugging Face's transformers: the row of model_row.py.

    {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, ...}
         -> {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, ...}

NAMES gives the column of each key that changes parameters, FLOPs or memory, and DEFAULTS the values
of transformers' configuration classes for keys that a file may leave out. A model of text and
images has a text_config, which may leave out sizes, too (INSIDE), and a vision_config.
WITHOUT_EFFECT has the keys that change none of them. Any other key is refused, so that no key is
ignored by mistake. A model's modules for multi-token prediction (DeepSeek-V3) are not counted, as
in its 671 billion.
transformers 4.57, models/*/configuration_*.py and modeling_*.py.
"""

import json
import re
from pathlib import Path

from labkit.scale.model_row import nearest

COMMON = {
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "intermediate_size": "ffn",
    "vocab_size": "vocab",
    "head_dim": "head_dim",
    "tie_word_embeddings": "tied",
}
EXPERTS = {
    "num_experts": "experts",
    "num_local_experts": "experts",
    "n_routed_experts": "experts",
    "num_experts_per_tok": "top_k",
    "moe_intermediate_size": "expert_ffn",
    "shared_expert_intermediate_size": "shared_ffn",
    "n_shared_experts": "shared_experts",
    "first_k_dense_replace": "dense_layers",
    "decoder_sparse_step": "sparse_step",
    "moe_layer_freq": "sparse_step",
    "mlp_only_layers": "dense_at",
}
LATENT = {
    "q_lora_rank": "latent_queries",
    "kv_lora_rank": "latent_keys",
    "qk_nope_head_dim": "latent_plain",
    "qk_rope_head_dim": "latent_rotated",
    "v_head_dim": "latent_value",
}
WINDOW = {
    "sliding_window": "window",
    "use_sliding_window": "windows_used",
    "max_window_layers": "windows_from",
    "sliding_window_pattern": "window_pattern",
    "layer_types": "layer_types",
}
BIASES = {"attention_bias": "attention_bias", "mlp_bias": "mlp_bias"}
GPT2 = {
    "n_embd": "hidden", "n_layer": "layers", "n_head": "heads", "n_inner": "ffn",
    "vocab_size": "vocab", "n_positions": "context", "n_ctx": "context",
    "tie_word_embeddings": "tied",
}  # fmt: skip
VIT = {"image_size": "image", "patch_size": "patch", "num_channels": "channels"}
VISION = {  # of a vision_config
    "hidden_size": "hidden", "num_hidden_layers": "layers", "num_attention_heads": "heads",
    "intermediate_size": "ffn", "image_size": "image", "patch_size": "patch",
}  # fmt: skip
VISION_MORE = {"num_channels": "channels", "vision_use_head": "pooled", "vocab_size": "vocab"}
OUTSIDE = {  # beside text_config and vision_config; the last two are repeated in text_config
    "text_config": "text", "vision_config": "vision", "image_seq_length": "tokens",
    "mm_tokens_per_image": "tokens", "vision_feature_layer": "taken",
    "vision_feature_select_strategy": "select", "multimodal_projector_bias": "biased",
    "vocab_size": "vocab", "tie_word_embeddings": "tied",
}  # fmt: skip
NAMES = COMMON | EXPERTS | LATENT | WINDOW | BIASES | {"max_position_embeddings": "context"}

LLAMA = {"gated": True, "tied": False}
QWEN2 = LLAMA | {"qkv_biases": True, "windows_used": False}
QWEN3 = LLAMA | {"qk_norms": True, "windows_used": False}
GEMMA = LLAMA | {"tied": True, "head_dim": 256}
DEEPSEEK = LLAMA | {"shared_experts": 0, "dense_layers": 0}
DEFAULTS = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": LLAMA,
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3,
    "gemma": GEMMA,
    "gemma2": GEMMA | {"norms": 4, "window_pattern": 2},
    "gemma3_text": GEMMA | {"norms": 4, "qk_norms": True, "window_pattern": 6},
    "deepseek_v2": DEEPSEEK,
    "deepseek_v3": DEEPSEEK,
    "gpt2": {"gated": False, "tied": True, "biases": True},
    "bert": {"architecture": "encoder"},
    "vit": {"architecture": "vit", "classes": 1000},
}
NEEDED = ("layers", "hidden", "heads")
IMAGES = {  # models of text and images: the usual model_type of their text and of their images
    "llava": ("llama", "clip_vision_model"),
    "gemma3": ("gemma3_text", "siglip_vision_model"),
}
ENCODERS = {"clip_vision_model": "clip", "siglip_vision_model": "siglip"}
SIZES = {"hidden": 4096, "layers": 32, "heads": 32, "kv_heads": 32}
INSIDE = {  # sizes that a text_config leaves out if they are those of its configuration class
    "llama": SIZES | {"kv_heads": None, "ffn": 11008, "vocab": 32000},
    "mistral": SIZES | {"kv_heads": 8, "ffn": 14336, "vocab": 32000},
    "qwen2": SIZES | {"ffn": 22016, "vocab": 151936},
    "gemma3_text": {
        "hidden": 2304, "layers": 26, "heads": 8, "kv_heads": 4, "ffn": 9216, "vocab": 262208,
        "window": 4096,
    },
}  # fmt: skip
SHOWN = 8192  # tokens of a sequence where the model accepts more
WITHOUT_EFFECT = {
    "_name_or_path", "activation_function", "add_cross_attention", "architectures",
    "attention_dropout", "attention_probs_dropout_prob", "attn_implementation",
    "attn_logit_softcapping", "attn_pdrop", "auto_map", "aux_loss_alpha", "boi_token_index",
    "bos_token_id", "cache_implementation", "classifier_dropout", "decoder_start_token_id",
    "dropout",
    "directionality", "dtype", "embd_pdrop", "encoder_stride", "eoi_token_index", "eos_token_id",
    "ep_size", "final_logit_softcapping", "gradient_checkpointing", "head_dropout", "hidden_act",
    "hidden_activation", "hidden_dropout_prob", "id2label", "ignore_index", "image_token_id",
    "image_token_index", "initializer_factor",
    "initializer_range", "is_decoder", "is_encoder_decoder", "label2id", "layer_norm_eps",
    "layer_norm_eps_vit", "layer_norm_epsilon", "layernorm_epsilon", "max_length", "min_length",
    "model_type", "n_group", "norm_topk_prob", "num_labels",
    "num_nextn_predict_layers", "output_attentions", "output_hidden_states", "output_router_logits",
    "pad_token_id", "pooler_act", "pooler_fc_size", "pooler_num_attention_heads",
    "pooler_num_fc_layers", "pooler_output_size", "pooler_size_per_head", "pooler_type",
    "position_embedding_type", "pretraining_tp", "problem_type", "projection_dim",
    "projector_hidden_act", "pruned_heads", "qkv_bias",
    "quantization_config", "query_pre_attn_scalar", "reorder_and_upcast_attn", "resid_pdrop",
    "return_dict", "rms_norm_eps", "rope_interleave", "rope_local_base_freq", "rope_parameters",
    "rope_scaling", "rope_theta", "routed_scaling_factor", "router_aux_loss_coef",
    "router_jitter_noise", "scale_attn_by_inverse_layer_idx", "scale_attn_weights", "scoring_func",
    "seq_aux", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "summary_type", "summary_use_proj", "task_specific_params", "temperature", "tokenizer_class",
    "topk_group", "topk_method", "torch_dtype", "torchscript", "transformers_version",
    "type_vocab_size", "unk_token_id", "use_bfloat16", "use_cache", "use_return_dict",
}  # fmt: skip


def row_of_config(text, name="config.json"):
    """Return the row of the text of a config.json. Raises ValueError, one line, if it is none."""
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        where = "it ends too early: is it complete?" if error.pos >= len(text.rstrip()) else error
        raise ValueError(f"{name}: not JSON: {where}") from None
    if not isinstance(config, dict):
        raise ValueError(
            f"{name}: a config.json is an object with a model_type, not a list or text"
        )
    try:
        if isinstance(config.get("text_config"), dict):
            return with_images(config)
        return of_text(config, config.get("model_type"))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def of_text(config, family, sizes=()):
    """Return the row of a configuration without images. sizes: those that it may leave out."""
    check_known(family, DEFAULTS)
    names = GPT2 if family == "gpt2" else NAMES | (VIT if family == "vit" else {})
    found = dict(sizes) | read(config, family, names)
    if labels := config.get("id2label"):
        found |= {"classes": len(labels)} if family == "vit" else {}
    check_complete(found, names, NEEDED)
    return finished(DEFAULTS[family] | found, family)


def with_images(config):
    """Return the row of a model of text and images."""
    outer, text, images = (
        config.get(key) for key in ("model_type", "text_config", "vision_config")
    )
    check_known(outer, IMAGES, " of a model of text and images")
    usual_text, usual_images = IMAGES[outer]
    family = text.get("model_type", usual_text)
    row = of_text(text, family, INSIDE.get(family, ()))
    if not isinstance(images, dict):
        raise ValueError("vision_config is missing: is the file complete?")
    kind = images.get("model_type", usual_images)
    check_known(kind, ENCODERS, " of vision_config")
    sizes = read(images, kind, VISION | VISION_MORE)
    check_complete(sizes, VISION, VISION.values())
    if ENCODERS[kind] == "siglip" and sizes.get("pooled", True):
        raise ValueError("vision_use_head=true is not modelled: set it to false, if it is not used")
    if sizes.get("channels", 3) != 3:
        raise ValueError(f"num_channels={sizes['channels']} of images is not modelled: 3 is")
    columns = {f"vision_{name}": sizes[name] for name in VISION.values()}
    columns["vision"] = ENCODERS[kind]
    return row | columns | between(outer, read(config, outer, OUTSIDE), columns, row["hidden"])


def between(outer, told, encoder, hidden):
    """Return the columns of what is between an image encoder and a decoder of width `hidden`."""
    width, sides = encoder["vision_hidden"], encoder["vision_image"] // encoder["vision_patch"]
    if outer == "gemma3":  # patches are pooled; a norm and a matrix
        return {"vision_tokens": told.get("tokens", 256), "projector": width * (1 + hidden)}
    taken = told.get("taken", -2)
    width *= len(taken) if isinstance(taken, list) else 1
    biases = 2 * hidden * told.get("biased", True)
    first = told.get("select", "default") == "default"  # the first token is left out
    tokens = told.get("tokens") or sides**2 + (encoder["vision"] == "clip") - first
    return {"vision_tokens": tokens, "projector": hidden * (width + hidden) + biases}


def check_known(family, known, where=""):
    """Raise ValueError if a model_type is not one of the known ones."""
    if family not in known:
        raise ValueError(
            f"unknown model_type {family!r}{where}{nearest(str(family), known)}; "
            f"known families are {', '.join(known)}"
        )


def check_complete(found, names, needed):
    """Raise ValueError if a name that is needed is not among those found. names: {key: name}."""
    for name in needed:
        if name not in found:
            key = next(key for key, column in names.items() if column == name)
            raise ValueError(f"{key} is missing: is the file complete?")


def read(config, family, names):
    """Return {name: value} of the keys of a configuration that have an effect."""
    found = {}
    for key, value in config.items():
        if key in names:
            found |= {} if value is None else {names[key]: value}
        elif key not in WITHOUT_EFFECT and not key.startswith("_"):
            hint = nearest(key, [*names, *WITHOUT_EFFECT]) or "; remove it if it changes no size"
            raise ValueError(f"unknown key {key!r} of a {family}{hint}")
    return found


def finished(found, family):
    """Return the row: names that are no columns become columns."""
    pop = found.pop
    context = pop("context", None)
    if family in ("bert", "vit"):
        return found
    found["seq_len"] = min(context or SHOWN, SHOWN)
    if family == "gpt2":
        found.setdefault("ffn", 4 * found["hidden"])
        found["positions"] = context or 1024
    found |= experts_of(found) | windows_of(found)
    biased = pop("attention_bias", False)
    if biased and not found.get("latent_keys"):
        found["qkv_biases"] = True
    if pop("mlp_bias", False):
        raise ValueError(
            "mlp_bias=true is not modelled: set it to false (less than 0.1 % of the size)"
        )
    return found


def experts_of(found):
    """Return the columns of experts, and remove the names that are no columns."""
    width, shared = found.pop("expert_ffn", None), found.pop("shared_experts", 0)
    step, dense = found.pop("sparse_step", 1), found.pop("dense_at", [])
    if found.get("experts", 1) < 2:
        return {}
    columns = {"dense_ffn": found["ffn"], "ffn": width or found["ffn"]}
    columns["shared_ffn"] = shared * columns["ffn"] or found.get("shared_ffn", 0)
    if step > 1 or dense:
        sparse = [i for i in range(found["layers"]) if i not in dense and (i + 1) % step == 0]
        columns["dense_layers"] = found["layers"] - len(sparse)
    return columns


def windows_of(found):
    """Return the columns of sliding windows, and remove the names that are no columns."""
    used, begin = found.pop("windows_used", True), found.pop("windows_from", 0)
    pattern, types = found.pop("window_pattern", None), found.pop("layer_types", None)
    layers = found["layers"]
    if types:
        count = sum(kind == "sliding_attention" for kind in types)
    elif pattern:
        count = layers - layers // pattern
    else:
        count = max(0, layers - begin)
    if not used or not found.get("window"):
        return {"window": 0}
    return {"windowed_layers": count}


def is_config(said):
    """Return whether a model's text is a config.json: a path, "-" for stdin, or JSON itself."""
    return said == "-" or said.lstrip()[:1] in "{[" or bool(re.search(r"\.json$", said.strip()))


def config_text(said, stdin=None):
    """Return (text, name) of a config.json. stdin: a file to read for "-"."""
    if said == "-":
        return stdin.read(), "the text on stdin"
    if said.lstrip()[:1] in "{[":
        return said, "the pasted config.json"
    try:
        return Path(said).read_text(encoding="utf-8"), said
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise ValueError(f"{said}: {reason}") from None
