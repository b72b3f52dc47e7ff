"""A config.json has as many parameters as its model's publishers count; what is wrong with one is one line."""

import io
import json

import pytest

from labkit.scale.huggingface import config_text, is_config, row_of_config
from labkit.scale.model_row import row_of, shape_of

# The sizes in the config.json of each model on huggingface.co, and the parameters that its page counts
# (safetensors; DeepSeek-V3: without the module for multi-token prediction, table 1 of its report: 671 billion).
LLAMA = {"model_type": "llama", "hidden_act": "silu", "rope_theta": 500000.0, "tie_word_embeddings": False}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "intermediate_size": 18432, "moe_intermediate_size": 2048, "vocab_size": 129280,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "moe_layer_freq": 1, "num_nextn_predict_layers": 1, "quantization_config": {"quant_method": "fp8"},
}  # fmt: skip
DEEPSEEK_V2_LITE = DEEPSEEK_V3 | {
    "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "intermediate_size": 10944, "moe_intermediate_size": 1408, "vocab_size": 102400,
    "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "first_k_dense_replace": 1,
    "q_lora_rank": None,
}  # fmt: skip


def sizes(family, layers, hidden, heads, kv_heads, ffn, vocab, **more):
    names = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
    given = dict(zip((*names, "vocab_size"), (layers, hidden, heads, kv_heads, ffn, vocab), strict=True))
    return {"model_type": family} | given | more


GEMMA2_9B = {"head_dim": 256, "sliding_window": 4096, "query_pre_attn_scalar": 256}
QWEN3_30B = {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
PUBLISHED = {
    "Llama-3-8B": (LLAMA | sizes("llama", 32, 4096, 32, 8, 14336, 128256), 8_030_261_248),
    "Llama-3-70B": (LLAMA | sizes("llama", 80, 8192, 64, 8, 28672, 128256), 70_553_706_496),
    "Llama-3.2-1B": (
        LLAMA | sizes("llama", 16, 2048, 32, 8, 8192, 128256, tie_word_embeddings=True, head_dim=64),
        1_235_814_400,
    ),
    "Mistral-7B": (sizes("mistral", 32, 4096, 32, 8, 14336, 32000, sliding_window=4096), 7_241_732_096),
    "Mixtral-8x7B": (
        sizes("mixtral", 32, 4096, 32, 8, 14336, 32000, num_local_experts=8, num_experts_per_tok=2),
        46_702_792_704,
    ),
    "Gemma-7B": (sizes("gemma", 28, 3072, 16, 16, 24576, 256000, head_dim=256), 8_537_680_896),
    "Gemma-2-9B": (sizes("gemma2", 42, 3584, 16, 8, 14336, 256000, **GEMMA2_9B), 9_241_705_984),
    "Gemma-3-1B": (
        sizes("gemma3_text", 26, 1152, 4, 1, 6912, 262144, head_dim=256, sliding_window=512),
        999_885_952,
    ),
    "Qwen2.5-7B": (sizes("qwen2", 28, 3584, 28, 4, 18944, 152064), 7_615_616_512),
    "Qwen2.5-0.5B": (sizes("qwen2", 24, 896, 14, 2, 4864, 151936, tie_word_embeddings=True), 494_032_768),
    "Qwen3-8B": (sizes("qwen3", 36, 4096, 32, 8, 12288, 151936, head_dim=128), 8_190_735_360),
    "Qwen3-30B-A3B": (sizes("qwen3_moe", 48, 2048, 32, 4, 6144, 151936, **QWEN3_30B), 30_532_122_624),
    "DeepSeek-V2-Lite": (DEEPSEEK_V2_LITE, 15_706_484_224),
    "DeepSeek-V3": (DEEPSEEK_V3, 671_026_404_352),
    "GPT-2": (
        {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257},
        124_439_808,
    ),
    "ViT-B/16": (
        {"model_type": "vit", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
         "intermediate_size": 3072, "image_size": 224, "patch_size": 16, "num_channels": 3},
        86_567_656,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_parameters_are_those_that_are_published(name):
    config, published = PUBLISHED[name]
    row = row_of_config(json.dumps(config))
    assert shape_of(row, row.get("seq_len")).parameters == published


def test_bert_has_its_published_size_and_the_head_that_training_needs():
    config = sizes("bert", 12, 768, 12, 12, 3072, 30522) | {"max_position_embeddings": 512, "type_vocab_size": 2}
    found = shape_of(row_of_config(json.dumps(config)), 512)
    assert found.parameters - (768 * 769 + 2 * 768 + 30522) == 109_482_240


def test_tokens_meet_the_published_share_of_the_experts():
    for name, billions in (("DeepSeek-V3", 37), ("Mixtral-8x7B", 13), ("Qwen3-30B-A3B", 3.3)):
        found = shape_of(row_of_config(json.dumps(PUBLISHED[name][0])), 4096)
        assert found.active_parameters / 1e9 == pytest.approx(billions, rel=0.02)


def test_a_window_hides_keys_in_its_layers_only():
    config = PUBLISHED["Gemma-2-9B"][0]
    windowed = shape_of(row_of_config(json.dumps(config)), 8192)
    full = shape_of(row_of_config(json.dumps(config | {"sliding_window": None})), 8192)
    seen = sum(min(i, 4096) for i in range(1, 8193)) / 8192  # keys that a token meets, one by one
    assert windowed.windowed_layers == 21
    assert windowed.keys_met(8192) == pytest.approx((seen + 4096) / 2, rel=1e-3)
    assert windowed.parameters == full.parameters and full.keys_met(8192) == 4096


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "mamba"}, "unknown model_type 'mamba'; known families are llama, mistral"),
        ({"model_type": "qwen33"}, "unknown model_type 'qwen33'; did you mean qwen3"),
        ({"num_hiden_layers": 3}, "unknown key 'num_hiden_layers' of a llama; did you mean num_hidden_layers"),
        ({"zzz": 3}, "unknown key 'zzz' of a llama; remove it if it changes no size"),
        ({"hidden_size": None}, "hidden_size is missing: is the file complete?"),
    ],
)
def test_a_config_that_is_none_is_one_line(change, said):
    with pytest.raises(ValueError) as error:
        row_of_config(json.dumps(PUBLISHED["Llama-3-8B"][0] | change))
    assert str(error.value).startswith("config.json: ") and said in str(error.value)


def test_half_a_file_and_a_list_are_named(tmp_path):
    whole = json.dumps(PUBLISHED["Llama-3-8B"][0])
    with pytest.raises(ValueError, match="half: not JSON: it ends too early: is it complete"):
        row_of_config(whole[: len(whole) // 2], "half")
    with pytest.raises(ValueError, match="an object with a model_type"):
        row_of_config("[1]")
    with pytest.raises(ValueError, match=r"none\.json: No such file"):
        config_text(str(tmp_path / "none.json"))
    assert config_text("-", io.StringIO(whole))[0] == whole == config_text(whole)[0]
    assert is_config("a/config.json") and is_config(whole) and not is_config("llama3-8b")


def test_names_of_the_hub_are_those_of_the_table():
    for said, name in (("meta-llama/Llama-3.1-8B", "llama3-8b"), ("meta-llama/Llama-2-7b-hf", "llama2-7b"),
                       ("Qwen/Qwen2.5-7B", "qwen2.5-7b"), ("mistralai/Mistral-7B-v0.1", "mistral-7b")):  # fmt: skip
        assert row_of(said)["model"] == name


@pytest.mark.parametrize(
    ("name", "published"),
    [("llama2-7b", 6_738_415_616), ("qwen3-235b-a22b", 235_093_634_560), ("deepseek-v3", 671_026_404_352),
     ("gemma2-9b", 9_241_705_984), ("qwen2.5-7b", 7_615_616_512), ("vit-l16", 304_326_632)],
)  # fmt: skip
def test_named_models_have_their_published_sizes(name, published):
    row = row_of(name)
    assert shape_of(row, 2048).parameters == published


def test_columns_are_known_and_given_once():
    for said, line in (
        ("layers=2,head=4", "unknown column 'head' of a model; did you mean heads"),
        ("layers=2,layers=4", "layers is given twice"),
        ("layers=2,hidden", "'hidden' in 'layers=2,hidden' must be column=number"),
        ("layers=2,zzzz=4", "unknown column 'zzzz' of a model; known are model, architecture"),
    ):
        with pytest.raises(ValueError, match=line):
            row_of(said)
    with pytest.raises(ValueError, match="unknown model 'zzz'; Give a name"):
        row_of("zzz")
