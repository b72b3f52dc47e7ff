"""The memory widget: pure functions of what is predicted, and controls that only ask them."""

import pytest
import torch

from labkit import models
from labkit.memory import estimate
from labkit.memory.memory_tracker import KINDS
from labkit.show import memory_explorer

MIB = 2**20


def predict(stage, world_size, precision, batch):
    """A made-up model: 8 MiB of parameters; each stage divides one kind more."""
    depth = memory_explorer.STAGES.index(stage)
    sizes = {"optimizer_states": 16, "gradients": 8, "parameters": 8}
    kinds = {k: size * MIB // (world_size if depth > place else 1) for place, (k, size) in enumerate(sizes.items())}
    return dict.fromkeys(KINDS, 0) | kinds | {"activations": batch * MIB // (2 if precision == "bf16" else 1)}


def state(**changes):
    return memory_explorer.State(
        **{"stages": memory_explorer.STAGES, "world_size": 4, "precision": "fp32", "batch": 8} | changes
    )


def words(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def test_rows_say_what_is_predicted():
    frame = memory_explorer.rows(predict, state())
    assert frame["total"].tolist() == [40 * MIB, 28 * MIB, 22 * MIB, 16 * MIB]
    assert memory_explorer.rows(predict, state(world_size=1))["total"].nunique() == 1


def test_the_line_stands_where_memory_ends():
    figure = memory_explorer.draw(predict, state(capacity=64 * MIB))
    assert "a rank has 64 MiB" in words(figure) and {"40 MiB", "16 MiB"} <= set(words(figure))
    assert figure.axes[0].lines[0].get_xdata()[0] == 64 < figure.axes[0].get_xlim()[1]
    assert not any("a rank has" in text for text in words(memory_explorer.draw(predict, state())))
    with pytest.raises(ValueError, match="Tick at least one stage"):
        memory_explorer.draw(predict, state(stages=()))


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({}, "16 MiB for FSDP (ZeRO-3), 2.5 times less."),
        ({"capacity": 23 * MIB}, "The first to fit into 23 MiB is ZeRO-2."),
        ({"capacity": 3 * MIB}, "None of them fits into 3 MiB."),
        ({"world_size": 1, "batch": 1}, "1 rank, fp32, 1 sample each: 33 MiB a rank for DDP, bucketed."),
    ],
)
def test_the_takeaway(changes, end):
    assert memory_explorer.takeaway(predict, state(**changes)).endswith(end)


def test_controls_redraw():
    shown = memory_explorer.explorer(predict)
    seen = {shown.image.value}
    for control, value in (
        (shown.controls["world_size"], 16),
        (shown.controls["precision"], "bf16"),
        (shown.controls["batch"], 1),
        (shown.controls["stages"]["fsdp"], False),
    ):
        control.value = value
        assert shown.image.value not in seen and 'alt="' in shown.image.value
        seen.add(shown.image.value)
    assert shown.state == state(stages=("ddp_bucketed", "zero1", "zero2"), world_size=16, precision="bf16", batch=1)
    for box in shown.controls["stages"].values():
        box.value = False
    assert shown.image.value == "<p>Tick at least one stage.</p>"


def test_a_predictor_is_the_estimate():
    model, loss = models.build("gpt"), models.loss("gpt")
    x = torch.randint(256, (1, 16))
    asked = memory_explorer.predictor(model, lambda size: (x.expand(size, -1),) * 2, loss, models.unit("gpt"))
    batch = x.expand(4, -1)
    for stage in memory_explorer.STAGES:
        told = estimate(model, batch, loss, stage, 2, target=batch, unit=models.unit("gpt"))
        assert asked(stage, 2, "fp32", 4) == told.peak


def test_the_first_choice_is_among_the_offers():
    shown = memory_explorer.explorer(predict, world_size=3, batch=5, world_sizes=(1, 2), batches=(8,))
    assert list(shown.controls["world_size"].options) == [1, 2, 3] and list(shown.controls["batch"].options) == [5, 8]


def test_menus_of_models_and_of_capacities():
    doubled = {"small": predict, "large": lambda *choice: {kind: 2 * size for kind, size in predict(*choice).items()}}
    sizes = {"24 MiB": 24 * MIB, "80 MiB": 80 * MIB}
    shown = memory_explorer.explorer(doubled, model="small", capacity=24 * MIB, capacities=sizes)
    assert memory_explorer.takeaway(doubled, shown.state).startswith("small, 4 ranks")
    shown.controls["model"].value = "large"
    assert shown.state == state(capacity=24 * MIB, model="large")
    assert memory_explorer.rows(doubled, shown.state)["total"].tolist() == [80 * MIB, 56 * MIB, 44 * MIB, 32 * MIB]
    assert "None of them fits into 24 MiB." in shown.image.value
    shown.controls["capacity"].value = 80 * MIB
    assert "The first to fit into 80 MiB is DDP, bucketed." in shown.image.value
