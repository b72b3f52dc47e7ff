"""The widget of checkpoints: pure functions of what is predicted, and controls that only ask them."""

import pytest

from labkit.show import checkpoint_cost_explorer

MIB = 2**20
STRATEGIES = ("ddp_bucketed", "fsdp")


def predict(strategy, world_size, parameters):
    """Twelve bytes for each parameter; FSDP copies what it writes."""
    part = 12 * parameters / world_size
    return (12 * parameters if strategy == "ddp_bucketed" else part), part


def state(**changes):
    return checkpoint_cost_explorer.State(**{"strategies": STRATEGIES, "world_size": 4, "parameters": MIB} | changes)


def test_rows_say_what_is_predicted():
    frame = checkpoint_cost_explorer.rows(predict, state())
    assert frame["what"].tolist() == ["copied", "written"] * 2
    assert frame["per_rank_bytes"].tolist() == [12 * MIB, 3 * MIB, 3 * MIB, 3 * MIB]


def test_every_bar_says_its_size():
    words = [text.get_text() for text in checkpoint_cost_explorer.draw(predict, state()).axes[0].texts]
    assert {"12 MiB", "3 MiB", "copied"} <= set(words)
    with pytest.raises(ValueError, match="Tick at least one strategy"):
        checkpoint_cost_explorer.draw(predict, state(strategies=()))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "4 ranks, 1.05 million parameters: a rank copies 12 MiB under DDP, bucketed; 3 MiB under FSDP"),
        ({"world_size": 1024}, "1,024 ranks, 1.05 million parameters: a rank copies 12 MiB under DDP"),
        ({"world_size": 1, "parameters": 7 * 10**9}, "1 rank, 7 billion parameters: a rank copies 78.2 GiB under DDP"),
        ({"strategies": ("fsdp",)}, "a rank copies 3 MiB under FSDP (ZeRO-3). It writes 3 MiB."),
    ],
)
def test_the_takeaway(changes, words):
    assert words in checkpoint_cost_explorer.takeaway(predict, state(**changes))


def test_controls_redraw():
    shown = checkpoint_cost_explorer.explorer(predict, STRATEGIES, state().world_size, state().parameters)
    seen = {shown.image.value}
    menus = ((shown.controls["world_size"], 64), (shown.controls["parameters"], 10**9))
    for control, value in (*menus, (shown.controls["strategies"]["fsdp"], False)):
        control.value = value
        assert shown.image.value not in seen and 'alt="' in shown.image.value
        seen.add(shown.image.value)
    assert shown.state == state(strategies=("ddp_bucketed",), world_size=64, parameters=10**9)
    shown.controls["strategies"]["ddp_bucketed"].value = False
    assert shown.image.value == "<p>Tick at least one strategy.</p>"


def test_the_first_choice_is_among_the_offers():
    shown = checkpoint_cost_explorer.explorer(predict, STRATEGIES, 3, MIB)
    assert 3 in shown.controls["world_size"].options and ("1.05 million", MIB) in shown.controls["parameters"].options
