"""The planner in the dashboard: a control plans nothing, the button gives the sentences of answer()."""

import html

import pytest

from labkit.scale.answer import answer
from labkit.show import plan_explorer


def test_the_button_answers_as_the_planner_and_a_control_at_once():
    shown = plan_explorer.explorer()
    shown.controls["gpus"].value = 8
    shown.controls["gpu"].value = "rtx-4090"
    assert shown.image.value == "<p>llama3-8b on 8 x rtx-4090, 400 Gbit/s a GPU: press Answer.</p>"
    shown.button.click()
    said = answer("llama3-8b", gpus=8, gpu="rtx-4090", network=400).sentences()
    assert shown.message.value == "predicted"
    assert shown.image.value == "".join(f"<p>{html.escape(words)}</p>" for words in said)


def test_an_image_encoder_is_frozen_as_the_command_says():
    shown = plan_explorer.explorer()
    shown.controls["model"].value, shown.controls["gpus"].value = "llava-1.5-7b", 8
    shown.controls["trained"].value = "all but the image encoder"
    shown.button.click()
    said = answer("llava-1.5-7b", gpus=8, gpu="h100-80gb", network=400, train="decoder").sentences()
    assert shown.image.value == "".join(f"<p>{html.escape(words)}</p>" for words in said)
    shown.controls["model"].value = "llama3-8b"
    shown.button.click()
    assert "the model has none: use all" in shown.message.value


@pytest.mark.parametrize(
    ("trained", "option"), [("LoRA adapters of rank 16", {"lora": 16}), ("the last 2 layers", {"train": "last:2"})]
)
def test_a_part_of_the_model_is_trained_as_the_command_says(trained, option):
    shown = plan_explorer.explorer()
    shown.controls["model"].value, shown.controls["gpus"].value = "llama3.2-1b", 1
    shown.controls["trained"].value = trained
    assert shown.image.value == f"<p>llama3.2-1b, {trained} on 1 x h100-80gb, 400 Gbit/s a GPU: press Answer.</p>"
    shown.button.click()
    said = answer("llama3.2-1b", gpus=1, gpu="h100-80gb", network=400, **option).sentences()
    assert shown.image.value == "".join(f"<p>{html.escape(words)}</p>" for words in said)
    assert "frozen, with" in said[0]


def test_documents_are_packed_as_the_command_says():
    shown = plan_explorer.explorer()
    shown.controls["model"].value, shown.controls["gpus"].value = "llama3.2-1b", 1
    shown.controls["documents"].value = 512
    assert shown.image.value.startswith("<p>llama3.2-1b, documents of 512 tokens on 1 x h100-80gb")
    shown.button.click()
    said = answer("llama3.2-1b", gpus=1, gpu="h100-80gb", network=400, documents=512).sentences()
    assert shown.image.value == "".join(f"<p>{html.escape(words)}</p>" for words in said)
    assert any(words.startswith("Packed: 16 documents of 512 tokens a sequence") for words in said)


def test_what_fits_nowhere_is_a_line_beside_the_button():
    shown = plan_explorer.explorer()
    shown.controls["model"].value, shown.controls["gpus"].value = "llama3-405b", 1
    shown.button.click()
    assert "nothing fits on 1 x H100" in shown.message.value
