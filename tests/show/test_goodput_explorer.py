"""What a run loses by the number of GPUs: in words, in a picture, under the controls."""

from pytest import approx

from labkit.scale import goodput
from labkit.show import goodput_explorer, publish

JOB = goodput_explorer.Job((8, 16384), {"ours": 2e-5, "theirs": 4e-5}, days=54, detection=60)
STATE = goodput_explorer.State("ours")


def test_rows_are_the_simulators():
    fleet = goodput.Fleet(16384, 2e-5, save=30, restart=600, detection=60)
    run = goodput.survive(fleet, goodput.young(30, fleet.between), 54 * goodput.DAY)
    found = goodput_explorer.rows(JOB, STATE)
    mine = found[found["gpus"] == "16,384 GPUs"].set_index("kind")["lost"]
    assert mine.sum() == approx(100 * (1 - run.goodput))
    assert mine["restart"] == approx(100 * run.seconds["restart"] / (54 * goodput.DAY))


def test_a_save_in_the_background_loses_less_and_never_begins_before_the_last_is_written():
    lost = [
        goodput_explorer.rows(JOB, goodput_explorer.State("ours", save=120, background=how, share=0.25))["lost"].sum()
        for how in (False, True)
    ]
    assert lost[1] < lost[0]


def test_words_and_picture():
    words = goodput_explorer.takeaway(JOB, STATE)
    assert words.startswith("Rate of ours, a save of 30 s, restarts of 600 s, one run each: with 8 GPUs 0.")
    run = goodput_explorer.runs(JOB, STATE)[16384]
    part = 100 * run.seconds["restart"] / (54 * goodput.DAY)
    assert f"with 16,384 GPUs {1 - run.goodput:.1%} is lost (largest part: restart, {part:.1f}%)." in words
    figure = goodput_explorer.draw(JOB, STATE)
    assert figure.get_suptitle().endswith(f"on 8 GPUs, {1 - run.goodput:.1%} on 16,384 GPUs")
    assert publish.png(figure, dpi=50)


def test_the_controls_draw_anew():
    shown = goodput_explorer.explorer(JOB, goodput_explorer.State("ours"), "simulated")
    for name, value in {"rate": "theirs", "background": True, "share": 2, "restart": 30}.items():
        shown.controls[name].value = value
    assert shown.state == goodput_explorer.State("theirs", background=True, share=2, restart=30)
    assert "Rate of theirs, a save of 30 s in the background, restarts of 30 s, at 2 x Young" in shown.image.value
