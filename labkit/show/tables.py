"""Tables as DataFrames: numbers for machines in one, words for people in the other."""

import pandas as pd

from labkit.measure.interleaved_timing import columns
from labkit.measure.stats import interval_name, paired_ratio, summary
from labkit.show import style


def predicted_measured(rows):
    """Return a DataFrame with quantity, unit, predicted, measured, ratio, and other keys of rows.

    rows: [{"quantity": "sent per step", "unit": "bytes", "predicted": 4096, "measured": 4096}, ...]
    or [("sent per step", "bytes", 4096, 4096), ...]. ratio = measured / predicted, NaN if the
    prediction is 0. Raises ValueError if one of the four is missing.
    """
    names = ["quantity", "unit", "predicted", "measured"]
    frame = pd.DataFrame(
        [row if isinstance(row, dict) else dict(zip(names, row, strict=True)) for row in rows]
    )
    missing = [name for name in names if name not in frame]
    if missing:
        raise ValueError(
            f"a row of predicted_measured() needs {', '.join(names)}; missing: {', '.join(missing)}"
        )
    frame["ratio"] = frame["measured"] / frame["predicted"].where(frame["predicted"] != 0)
    return frame[[*names, "ratio", *(name for name in frame if name not in (*names, "ratio"))]]


def readable(frame):
    """Return a predicted_measured() frame as texts: values with their unit, ratios to 3 digits."""
    words = pd.DataFrame({"quantity": frame["quantity"]})
    for which in ("predicted", "measured"):
        values = zip(frame[which], frame["unit"], strict=True)
        words[which] = [style.quantity(value, unit) for value, unit in values]
    words["ratio"] = ["" if pd.isna(ratio) else style.ratio_text(ratio) for ratio in frame["ratio"]]
    return words.set_index("quantity")


def comparison(frame, metrics, by="strategy"):
    """Return one row per `by`, one column per metric: "median (lower–upper quartile)" in its unit.

    frame: rows of compare(); metrics that have no value for a strategy are left blank there.
    """
    table = {}
    for metric in metrics:
        unit = style.unit_of(metric)
        cells = []
        for one in dict.fromkeys(frame[by]):
            values = frame.loc[frame[by] == one, metric].dropna()
            cells.append(cell(summary(values), unit) if len(values) else "")
        table[style.name(metric)] = cells
    return pd.DataFrame(
        table,
        index=pd.Index([style.name(one) for one in dict.fromkeys(frame[by])], name=style.name(by)),
    )


def ratios(times, pairs):
    """Return a DataFrame of texts: the ratio of times of each pair (one, other), and a verdict.

    times: {name: times, one for each round}. The last pair is the noise, the same code twice: the
    first of a pair is faster or slower only outside its band (stats.Ratio.verdict), which the last
    row shows.
    """
    found = [paired_ratio(times[one], times[other]) for one, other in pairs]
    same = found[-1]
    interval = interval_name(*(ratio.n for ratio in found))
    rows = []
    for (one, other), ratio in zip(pairs, found, strict=True):
        says = ratio.verdict_in_words(same.noise_band())
        says = f"noise: {same.band_in_words()}" if ratio is same else says
        row = {"times compared": f"{style.name(one)} / {style.name(other)}"}
        row |= {"ratio": f"{ratio.median:.2f}", interval: ratio.interval(), "pairs": ratio.n}
        rows.append(row | {"the first is": says})
    return pd.DataFrame(rows)


def ratios_and_messages(records, pairs):
    """Return ratios() of time_and_count()'s rows, with the messages per step of both variants."""
    messages = records.groupby("variant")["messages"].first()
    table = ratios(columns(records), pairs)
    table["messages"] = [f"{messages[one]:.0f} / {messages[other]:.0f}" for one, other in pairs]
    return table


def cell(spread, unit):
    """Return "11.7 ms (11.6–11.9)"; quartiles in another unit keep it (900 KiB, 1.1 MiB)."""
    median, *edges = (
        style.quantity(value, unit) for value in (spread.median, spread.low, spread.high)
    )
    if edges == [median, median]:
        return median
    end = f" {median.split()[1]}" if " " in median else ""
    if all(edge.endswith(end) for edge in edges):
        edges = [edge.removesuffix(end) for edge in edges]
    return f"{median} ({'–'.join(edges)})"
