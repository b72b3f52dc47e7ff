"""A model with an image encoder has its published size; a frozen encoder has a forward and no states."""

import json
from dataclasses import replace

import pytest

from labkit.scale import constants
from labkit.scale.answer import answer, image_flops, model_flops
from labkit.scale.cost import image_job, image_seconds, layer_seconds, predict_step
from labkit.scale.huggingface import row_of_config
from labkit.scale.job_config import job_of
from labkit.scale.launch_options import launch_options
from labkit.scale.memory_model import GIB, kept, predict_memory
from labkit.scale.model_row import row_of, shape_of

C = constants.values()
CLIP = {
    "model_type": "clip_vision_model", "hidden_size": 1024, "image_size": 336, "intermediate_size": 4096,
    "num_attention_heads": 16, "num_hidden_layers": 24, "patch_size": 14, "projection_dim": 768, "vocab_size": 32000,
}  # fmt: skip
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304,
    "num_attention_heads": 16, "num_hidden_layers": 27, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
# config.json of llava-hf/llava-1.5-7b-hf, llava-1.5-13b-hf and google/gemma-3-4b-it on huggingface.co: a text_config
# leaves out what its configuration class has by default
LLAVA = {
    "model_type": "llava", "ignore_index": -100, "image_token_index": 32000, "projector_hidden_act": "gelu",
    "text_config": {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "vocab_size": 32064},
    "tie_word_embeddings": False, "vision_config": CLIP, "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default", "vocab_size": 32064,
}  # fmt: skip
LARGE = {"hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40, "num_hidden_layers": 40}
LLAVA_13B = LLAVA | {"text_config": LLAVA["text_config"] | LARGE}
GEMMA3_4B = {
    "model_type": "gemma3", "boi_token_index": 255999, "eoi_token_index": 256000, "image_token_index": 262144,
    "mm_tokens_per_image": 256, "vision_config": SIGLIP,
    "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240,
                    "num_hidden_layers": 34, "sliding_window": 1024},
}  # fmt: skip
# (all parameters as the model's page counts them, the encoder's, tokens of an image)
PUBLISHED = {
    "llava-1.5-7b": (LLAVA, 7_063_427_072, 303_507_456, 576),
    "llava-1.5-13b": (LLAVA_13B, 13_351_494_656, 303_507_456, 576),
    "gemma3-4b": (GEMMA3_4B, 4_300_079_472, 416_866_032, 256),
}


def row(config, **changes):
    return row_of_config(json.dumps(config)) | {"gpu": "A100-80GB", "n_gpus": 8, "stack": "deepspeed"} | changes


def job(config=LLAVA, **changes):
    return job_of(row(config, **({"zero": 3, "seq_len": 2048} | changes)))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_parameters_are_those_that_are_published(name):
    config, parameters, encoder, tokens = PUBLISHED[name]
    for found in (shape_of(row(config), 4096), shape_of(row_of(name), 4096)):
        assert (found.parameters, found.vision.parameters, found.vision.tokens) == (parameters, encoder, tokens)
    assert row_of(name)["model"] == name


def test_flops_of_an_image_are_published():
    """timm counts 191.1 GMACs for vit_large_patch14_clip_336; a multiply-add is 2 FLOPs."""
    one = job(train="decoder")
    assert one.shape.vision.image_flops() == pytest.approx(2 * 191.1e9, rel=2e-3)
    decoder = 3 * (one.shape.vision.image_flops() + 6 * 576 * 20_979_712 / 3) / 2048
    assert image_flops(job()) == pytest.approx(decoder)
    assert model_flops(job()) - model_flops(one) == pytest.approx(2 * one.shape.vision.image_flops() / 2048)


def test_frozen_encoders_have_two_bytes_a_parameter_and_no_gradients():
    whole, frozen = job(), job(train="decoder")
    encoder = frozen.shape.vision.parameters
    states = [predict_memory(one, C).states * GIB for one in (whole, frozen)]
    assert states[0] - states[1] == pytest.approx((18 - 2) / 8 * encoder)  # DeepSpeed's ZeRO-3 on 8 GPUs
    sent = [predict_step(job(zero=1, n_gpus=64, inter_gbps=50, train=what), C).parts["gradients"]
            for what in ("all", "decoder")]  # fmt: skip
    assert sent[1] < sent[0]


def test_a_frozen_encoder_takes_its_forward_and_a_trained_one_all():
    ddp = {"zero": 0, "micro_batch": 4}
    whole, frozen = job(**ddp), job(**ddp, train="decoder")
    assert 0.28 < image_seconds(frozen, C) / image_seconds(whole, C) < 0.4  # the projector is trained in both
    alone = image_job(whole)
    assert (alone.tokens, alone.context) == (4 * 577, 577)
    assert image_seconds(whole, C) == pytest.approx(24 * layer_seconds(alone, C), rel=0.08)
    parts = predict_step(whole, C).parts
    assert parts["image encoder"] == image_seconds(whole, C)
    text = predict_step(replace(whole, shape=replace(whole.shape, vision=None)), C).parts
    same = ("layers", "messages of layers", "recomputation", "output layer")
    assert {name: parts[name] for name in same} == {name: text[name] for name in same}


def test_a_trained_encoder_keeps_its_activations_and_a_frozen_one_none():
    whole, frozen = job(GEMMA3_4B, images=4), job(GEMMA3_4B, images=4, train="decoder")
    alone = image_job(whole)
    more = (predict_memory(whole, C).activations - predict_memory(frozen, C).activations) * GIB
    assert alone.tokens == 4 * 4096
    assert more == pytest.approx(27 * 4 * 4096 * kept(alone, C))


@pytest.mark.parametrize("part", [{"train": "decoder"}, {"train": "last:2"}, {"lora": 8}])
def test_an_encoder_is_frozen_wherever_a_part_is_trained(part):
    one = job(**part)
    seconds = predict_step(replace(one, shape=replace(one.shape, vision=None), only_decoder=False), C).seconds
    assert predict_step(one, C).seconds > seconds
    assert one.shape.vision.parameters < one.shape.parameters - one.trained(one.shape.parameters, 0, 32)[0] + 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "qwen2_5_vl"}, "unknown model_type 'qwen2_5_vl' of a model of text and images; known families"),
        ({"vision_config": CLIP | {"model_type": "pixtral"}}, "unknown model_type 'pixtral' of vision_config; known"),
        ({"vision_config": None}, "vision_config is missing: is the file complete?"),
        ({"vision_config": CLIP | {"patch_size": None}}, "patch_size is missing: is the file complete?"),
        ({"vision_config": CLIP | {"window_size": 7}}, "unknown key 'window_size' of a clip_vision_model"),
        ({"vision_config": SIGLIP | {"vision_use_head": True}}, "vision_use_head=true is not modelled"),
        ({"text_config": {"model_type": "mamba"}}, "unknown model_type 'mamba'; known families are llama"),
        ({"image_grid_pinpoints": [[336, 672]]}, "unknown key 'image_grid_pinpoints' of a llava"),
    ],
)
def test_a_config_that_is_not_known_is_one_line(change, said):
    with pytest.raises(ValueError) as error:
        row_of_config(json.dumps(LLAVA | change))
    assert str(error.value).startswith(f"config.json: {said}") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"images": 4}, "images=4 of 576 tokens are longer than a sequence of 2048: use a length of at least 2304"),
        ({"vision": "resnet"}, "vision must be clip or siglip, got 'resnet'"),
        ({"vision_heads": None}, "vision_heads is missing: a model with images needs it"),
        ({"vision": "", "train": "decoder"}, "train=decoder freezes an image encoder, but the model has none"),
        ({"lora": 8, "train": "decoder"}, "lora and train cannot be combined: use one of them"),
    ],
)
def test_what_cannot_be_is_one_line(changes, line):
    with pytest.raises(ValueError) as error:
        job(**changes)
    assert str(error.value).startswith(line)


def test_the_answer_says_what_the_encoder_is_and_how_it_is_frozen():
    found = answer("llava-1.5-7b", 8, "a100", train="decoder", changes=False)
    head = found.sentences()[0]
    assert "7.063 billion parameters (303.5 million of them in the image encoder)" in head
    assert "of which 6.76 billion, all but the encoder, are trained" in head
    assert "128 sequences of 2,048 tokens a step, each with an image of 576 tokens" in head
    assert json.loads(found.to_json())["trained_parameters"] == 7_063_427_072 - 303_507_456
    assert "model.vision_tower.requires_grad_(False)" in launch_options(found.best.job)[-1]
    assert "no published row has an image encoder" in found.sentences()[-1]
    assert found.best.job.stack.name == "torch-fsdp" and found.best.job.pp == found.best.job.cp == 1
    assert (
        'exclude_modules=".*vision_tower.*"' in answer("llava-1.5-7b", 8, "a100", lora=8, changes=False).options()[-1]
    )


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"stack": "megatron"}, "megatron is not planned with an image encoder: use torch-fsdp, deepspeed"),
        ({"stack": "deepspeed", "pp": 2}, "pp=2 and cp=1 are not planned with an image encoder: use 1"),
    ],
)
def test_a_stack_without_encoders_refuses(given, line):
    with pytest.raises(ValueError, match=line):
        answer("llava-1.5-7b", 8, "a100", **given)


def test_llava_trains_in_about_the_published_time():
    """LLaVA's README: 665,000 samples in around 10 hours (7B) and 20 hours (13B) on 8 A100, ZeRO-3, recomputation.

    Samples are not of one length: most have an image of 576 tokens and a conversation.
    """
    for name, hours in (("llava-1.5-7b", 10), ("llava-1.5-13b", 20)):
        one = dict(row_of(name)) | {"gpu": "A100-80GB", "n_gpus": 8, "stack": "deepspeed", "zero": 3}
        one |= {"micro_batch": 16, "grad_accum": 1, "recompute": "full", "train": "decoder"}
        short, long = (665e3 / 128 * predict_step(job_of(one | {"seq_len": n}), C).seconds / 3600 for n in (800, 2048))
        assert short < hours < long
