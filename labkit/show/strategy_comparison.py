"""A comparison in the hand: controls re-plot what was measured, and only a button measures.

    [ figure ] one-line takeaway, table      ordinary outputs: GitHub, batch runs, offline too
    model v  network v  measure v  bucket o  controls: they re-plot the frame and measure nothing
    [x] single [x] naive [x] bucketed
    (Measure this choice)                    only with launch=: calls it, adds its rows to the frame

What is drawn is a pure function of (frame, state), so that it can be tested without a browser.
"""

import html
from dataclasses import dataclass, replace
from math import inf

import ipywidgets
import pandas as pd

from labkit.show import controls, style, tables
from labkit.show.bars import grouped_bars
from labkit.show.notebook import table
from labkit.show.publish import as_html, present

METRICS = ("step_ms", "exposed_comm_ms", "sent_bytes", "peak_bytes", "samples_per_s", "mfu")
MORE_IS_BETTER = ("samples_per_s", "mfu")
KEYS = ["model", "strategy", "bucket_cap_mb", "link_mbit"]


@dataclass(frozen=True)
class State:
    """What the controls say. bucket_cap_mb filters only strategies measured with several sizes.

    link_mbit: speed of the links between nodes; inf: one machine.
    """

    model: str
    strategies: tuple
    bucket_cap_mb: float | None
    metric: str
    link_mbit: float = inf


def initial(frame):
    """The first state: first model, all its strategies, its largest bucket size, first metric."""
    metrics = [metric for metric in METRICS if metric in frame]
    missing = [key for key in KEYS if key not in frame]
    if missing or not metrics or frame.empty:
        wanted = f"rows with {', '.join(KEYS)} and one of {', '.join(METRICS)}"
        raise ValueError(
            f"a comparison needs {wanted}; "
            f"it got {len(frame)} rows with {', '.join(frame) or 'no columns'}"
        )
    model, link_mbit = frame["model"].iloc[0], frame["link_mbit"].iloc[0]
    mine = frame[(frame["model"] == model) & (frame["link_mbit"] == link_mbit)]
    sizes = bucket_sizes(mine)
    return State(model, strategies_of(mine), sizes[-1] if sizes else None, metrics[0], link_mbit)


def strategies_of(frame):
    """The frame's strategies in the order that every picture shows; rounds are shuffled."""
    return tuple(dict.fromkeys(style.in_order(frame, "strategy")["strategy"]))


def bucket_sizes(frame):
    """The bucket sizes (MB) to choose from: of strategies measured with more than one."""
    several = frame.groupby("strategy")["bucket_cap_mb"].transform("nunique") > 1
    return sorted(frame.loc[several, "bucket_cap_mb"].dropna().unique().tolist())


def chosen(frame, state):
    """The rows that `state` asks for."""
    mine = frame[(frame["model"] == state.model) & (frame["link_mbit"] == state.link_mbit)]
    mine = mine[mine["strategy"].isin(state.strategies)]
    mine = style.in_order(mine, "strategy")
    several = mine.groupby("strategy")["bucket_cap_mb"].transform("nunique") > 1
    return mine[~several | (mine["bucket_cap_mb"] == state.bucket_cap_mb)].dropna(
        subset=[state.metric]
    )


def headline(state):
    size = f", buckets of {state.bucket_cap_mb:g} MB" if state.bucket_cap_mb is not None else ""
    link = f", {network(state.link_mbit)}" if state.link_mbit < inf else ""
    return f"{style.name(state.model)}{size}{link}: {style.name(state.metric)}"


def network(link_mbit):
    return f"nodes on links of {link_mbit:g} Mbit/s" if link_mbit < inf else "this machine"


def draw(frame, state):
    """Figure of the chosen rows; ValueError where the frame holds none."""
    rows = chosen(frame, state)
    if rows.empty:
        raise ValueError(f"nothing measured yet for {headline(state)}")
    return grouped_bars(rows, state.metric, title=headline(state))


def takeaway(frame, state):
    """One sentence: who is best, who is last, and by how much."""
    rows, unit = chosen(frame, state), style.unit_of(state.metric)
    medians = rows.groupby("strategy", sort=False)[state.metric].median()
    ranked = medians.sort_values(ascending=state.metric not in MORE_IS_BETTER, kind="stable")
    words = f"{headline(state)} is {style.quantity(ranked.iloc[0], unit)}"
    if len(ranked) > 1 and ranked.iloc[0] == ranked.iloc[-1]:
        return f"{words} for all of them."
    words += f" for {style.name(ranked.index[0])}"
    if len(ranked) == 1:
        return words + "."
    words += f" and {style.quantity(ranked.iloc[-1], unit)} for {style.name(ranked.index[-1])}"
    small, large = sorted((ranked.iloc[0], ranked.iloc[-1]))
    return words + (f", a factor of {large / small:.2f}." if small > 0 else ".")


def picture(frame, state):
    """The widget's image as HTML with alt text; a sentence where there is nothing to draw."""
    if not state.strategies:
        return "<p>Tick at least one strategy.</p>"
    measured = set(chosen(frame, state)["strategy"])
    absent = "; ".join(style.name(one) for one in state.strategies if one not in measured)
    if not measured:
        return f"<p>Nothing measured yet for {html.escape(f'{headline(state)}: {absent}')}.</p>"
    note = f"<p>Not measured for this choice: {html.escape(absent)}.</p>" if absent else ""
    return as_html(takeaway(frame, state), draw(frame, state)) + note


def origin(frame):
    """The provenance of the rows: emulated where any of them says so."""
    emulated = "compute" in frame and (frame["compute"] == "emulated").any()
    return "emulated compute, real messages" if emulated else "measured"


def merged(frame, rows):
    """The frame with `rows` added; what was measured before of the same KEYS gives way."""

    def keys(of):
        # NaN equals no NaN
        return list(of[KEYS].fillna({"bucket_cap_mb": -1}).itertuples(index=False, name=None))

    fresh = set(keys(rows))
    return pd.concat([frame[[key not in fresh for key in keys(frame)]], rows], ignore_index=True)


class Comparison:
    """The controls, their state and frame. `.panel` is the widget, `.frame` grows by launches."""

    def __init__(self, frame, launch=None, sizes=None, models=None):
        self.frame, self.launch, self.state = frame, launch, initial(frame)
        models = [
            (style.name(model), model)
            for model in dict.fromkeys([*frame["model"], *(models or [])])
        ]
        metrics = [(style.name(metric), metric) for metric in METRICS if metric in frame]
        networks = [(network(speed), speed) for speed in dict.fromkeys(frame["link_mbit"])]
        sizes = sorted({*bucket_sizes(frame), *(sizes or [])}) or [None]
        steps = [("any" if size is None else f"{size:g} MB", size) for size in sizes]
        first = sizes[-1] if self.state.bucket_cap_mb is None else self.state.bucket_cap_mb
        self.model = controls.menu("model", models, self.state.model)
        self.network = controls.menu("network", networks, self.state.link_mbit)
        self.metric = controls.menu("measure", metrics, self.state.metric)
        self.size = controls.menu("bucket size", steps, first)
        self.boxes = controls.boxes(strategies_of(frame))
        self.image, self.message = ipywidgets.HTML(), ipywidgets.HTML()
        self.output = ipywidgets.Output()
        self.button = ipywidgets.Button(
            description="Measure this choice",
            icon="play",
            button_style="primary",
            layout={"width": "auto"},
        )
        self.button.on_click(self.measure)
        above = (self.model, self.network, self.metric, self.size)
        controls.observe(self.changed, (*above, *self.boxes.values()))
        parts = [controls.row(above), controls.row(self.boxes.values())]
        parts += [ipywidgets.HBox([self.button, self.message]), self.output] if launch else []
        # The first state's figure stands above already, as an ordinary output.
        self.image.value = (
            "<p>Change a control: the picture for your choice is drawn here, "
            "from the saved rows.</p>"
        )
        self.panel = ipywidgets.VBox([*parts, self.image])

    def changed(self, change=None):
        """Read the controls and draw anew."""
        self.state = replace(
            self.state,
            model=self.model.value,
            strategies=controls.ticked(self.boxes),
            bucket_cap_mb=self.size.value,
            metric=self.metric.value,
            link_mbit=self.network.value,
        )
        self.image.value = picture(self.frame, self.state)

    def measure(self, button=None):
        """Call launch for the controls, show its rows; a failure is a line beside the button."""
        self.button.disabled, self.message.value = True, "measuring …"
        # inside: where a kernel runs, an Output widget keeps exceptions to itself
        with self.output:
            self.message.value = self.added()
        self.button.disabled = False
        self.output.outputs = ()
        self.changed()

    def added(self):
        """Launch, merge the new rows into the frame, and say in one line what came of it."""
        try:
            state = self.state
            result = self.launch(
                state.model, list(state.strategies), state.bucket_cap_mb, state.link_mbit
            )
            rows = getattr(result, "records", result)
            self.frame = merged(self.frame, rows)
        # the reader's answer, and it belongs where they look
        except (Exception, KeyboardInterrupt) as error:
            first_line = (str(error).strip() or "no message").splitlines()[0]
            return f"<b>{type(error).__name__}</b>: {html.escape(first_line)}"
        return f"measured: {len(rows)} rows added"


def comparison(frame, launch=None, provenance=None, sizes=None, models=None):
    """Show a comparison: figure, takeaway, table, then the controls. Returns the Comparison.

    frame: rows of compare() with model, strategy, bucket_cap_mb, link_mbit (inf: one machine) and
        metrics among METRICS, one per round and rank.
    launch: function (model, strategies, bucket_cap_mb, link_mbit) -> DataFrame of such rows, called
        by the button.
    provenance: as in present(), by default origin()'s. sizes: more bucket sizes (MB) for a launch.
    """
    state = initial(frame)
    words = takeaway(frame, state)
    provenance = provenance or origin(frame)
    present(draw(frame, state), words, provenance, words)
    metrics = [metric for metric in METRICS if metric in frame]
    small = tables.comparison(chosen(frame, state), metrics).reset_index()
    table(small, f"{headline(state).split(':')[0]}, median (quartiles); {provenance}")
    shown = Comparison(frame, launch, sizes, models)
    controls.show(shown.panel)
    return shown
