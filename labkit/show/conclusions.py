"""Conclusions of a sweep in sentences, and a title for each picture that says its message.

Over a link of 100 Mbit/s, DDP + top 1 % is 8.2 times as fast as DDP; ... is neither faster
nor slower beyond noise (...).

A row is faster or slower if its interval lies outside the noise band of its base: the interval of
the row that repeats the base, from 1 / m to m.
"""

from labkit.measure.stats import FEWEST
from labkit.run.summary import ratio_of
from labkit.show import style

HERE = "this machine"
NAMED = 3  # winners in a sentence


def conclusions(table, model, ranks):
    """Return at most four texts on one model and number of ranks.

    They are on the slowest link, on the other links, on this machine and on memory. table: of
    dashboard.opened().
    """
    rows = table[(table["model"] == model) & (table["ranks"] == ranks)]
    here = rows[rows["link"] == HERE]
    links = rows[rows["link"] != HERE].sort_values("link_mbit")
    says = [of_link(link, here) for _, link in links.groupby("link", sort=False)]
    if len(says) > 2:
        says = [says[0], " ".join(says[1:])]
    if len(here) > 1:
        says += [f"{of_machine(here)} {of_noise(here)}", of_memory(here)]
    return says


def verdicts(table):
    """Return the verdict of each row: "faster", "slower", "cannot tell", "base" or "noise"."""
    bands = {base: noise_band(rows) for base, rows in table.groupby("base")}
    return [verdict(row, bands[row["base"]]) for row in table.to_dict("records")]


def is_noise(row):
    return bool(row["changes"]) and all(name == "seed" for name, _ in row["changes"])


def noise_band(rows):
    """Return the widest band of the rows that repeat their base; (1, 1) without one."""
    again = [row for row in rows.to_dict("records") if is_noise(row) and row["pairs"]]
    bands = [ratio_of(row).noise_band() for row in again]
    return max(bands, key=lambda band: band[1], default=(1.0, 1.0))


def verdict(row, band):
    if row["cell"] == row["base"]:
        return "base"
    return "noise" if is_noise(row) else ratio_of(row).verdict(band)


def of_link(rows, here):
    """Return a sentence on the rows of one link; here: those of one machine, to compare with."""
    where = f"Over a link of {rows['link'].iloc[0]}"
    base = base_name(rows)
    faster = fastest(rows)
    if faster.empty:
        words = f"{where}, nothing is faster than {base} beyond noise"
    else:
        words = f"{where}, {times_of(faster, base)}"
        first = faster.iloc[0]
        if len(near := here[here["label"] == first["label"]]):
            words += f"; on this machine {first['label']} is {as_measured(near.iloc[0])}"
    slower = rows[rows["verdict"] == "slower"].sort_values("ratio")
    if len(slower):
        last = slower.iloc[-1]
        words += f". {style.capital(last['label'])} takes {last['ratio']:.2g} times as long"
    return f"{words}."


def fastest(rows):
    return rows[rows["verdict"] == "faster"].sort_values("ratio")


def times_of(faster, base):
    """Return "A is 8.3 times as fast as DDP, then B (7.1 times)" for the first rows."""
    first, *others = faster.head(NAMED).to_dict("records")
    words = f"{first['label']} is {times(first)} as fast as {base}"
    then = " and ".join(f"{row['label']} ({times(row)})" for row in others)
    return f"{words}, then {then}" if then else words


def times(row):
    return f"{1 / row['ratio']:.{1 if row['ratio'] < 0.5 else 2}f} times"


def as_measured(row):
    """Return how a row compares with its base, as the end of a sentence."""
    if row["verdict"] == "faster":
        return f"{times(row)} as fast"
    if row["verdict"] == "slower":
        return f"slower (step x {row['ratio']:.2f})"
    ratio = ratio_of(row)
    if ratio.n < FEWEST:
        return f"without a verdict, from {ratio.n} rounds"
    return f"neither faster nor slower beyond noise (step x {row['ratio']:.2f}, {ratio.interval()})"


def base_name(rows):
    """Return the label of the rows' base."""
    own = rows[rows["cell"] == rows["base"]]
    return own["label"].iloc[0] if len(own) else "the base"


def of_machine(rows):
    """Return who is faster than the base on this machine, and what costs most."""
    base = base_name(rows)
    faster = fastest(rows)
    nothing = f"nothing is faster than {base} beyond noise"
    words = f"On this machine, {nothing if faster.empty else times_of(faster, base)}"
    slower = rows[rows["verdict"] == "slower"].sort_values("ratio", ascending=False)
    if slower.empty:
        return f"{words}."
    worst = slower.head(NAMED).to_dict("records")
    costs = "; ".join(f"{row['label']} ({row['ratio']:.2g} times)" for row in worst)
    return f"{words}. The largest ratios: {costs}."


def of_noise(rows):
    """Return how large noise is, and how many rows cannot be distinguished from the base."""
    low, high = noise_band(rows)
    tested = rows[~rows["verdict"].isin(["base", "noise"])]
    enough = tested["pairs"] >= FEWEST
    within = int((enough & (tested["verdict"] == "cannot tell")).sum())
    words = f"{within} of {len(tested)} techniques are neither faster nor slower beyond noise"
    if high > 1:
        words += f" ({low:.2f} to {high:.2f}, from {base_name(rows)} timed twice)"
    if not enough.all():
        words += f"; {int((~enough).sum())} have too few rounds for a verdict"
    return f"{words}."


def of_memory(rows):
    """Return which row needs least memory, and what it pays in time."""
    least = rows.loc[rows["peak_bytes"].idxmin()]
    own = rows[rows["cell"] == rows["base"]].iloc[0]
    size = style.quantity(least["peak_bytes"], "bytes")
    words = f"{style.capital(least['label'])} needs least memory: {size} a rank"
    if least["cell"] == own["cell"]:
        return f"{words}."
    part = 100 * least["peak_bytes"] / own["peak_bytes"]
    return f"{words}, {part:.0f} % of {own['label']}; its step is {as_measured(least)}."


# Titles

TITLES = {
    "step time by phase": ("step_ms", "{best} takes {low} a step{base}; {worst} {high}"),
    "step time and its spread": ("step_ms", "{best} takes {low} a step{base}; {worst} {high}"),
    "exposed communication": ("exposed_comm_ms", "{worst} waits {high} a step{base}; {best} {low}"),
    "sent bytes": ("sent_bytes", "{best} sends {low} a step{base}; {worst} {high}"),
    "memory by kind": ("peak_bytes", "{best} needs {low} a rank{base}; {worst} {high}"),
}


def title_of(picture, rows, curves, scaled=()):
    """Return the message of a picture in one sentence. rows: those drawn; scaled: its lines.

    A row that repeats its base is noise, and no message beside other rows.
    """
    real = rows["verdict"] != "noise"
    rows = rows[real] if real.any() else rows
    if picture == "ratio to the base":
        words = of_ratios(rows)
    elif picture == "scaling":
        words = of_scaling(scaled)
    elif picture in TITLES:
        words = of_column(rows, *TITLES[picture])
    else:
        spent = "seconds" if picture == "loss against time" else "sent_bytes"
        words = of_losses(rows, curves, spent)
    return style.capital(words)


def of_ratios(rows):
    """Return who is faster and who is slower than the base."""
    base = base_name(rows)
    faster = fastest(rows)
    slower = rows[rows["verdict"] == "slower"].sort_values("ratio")
    words = [times_of(faster.head(1), base)] if len(faster) else []
    if len(slower):
        last = slower.iloc[-1]
        words.append(f"{last['label']} takes {last['ratio']:.2g} times as long as {base}")
    said = "; ".join(words) or f"nothing differs from {base} beyond noise"
    links = set(rows["link"])
    return f"Over {links.pop()}, {said}" if len(links) == 1 and links != {HERE} else said


def of_column(rows, column, words):
    """Return a sentence with the smallest value that is not 0, the base's and the largest."""
    unit = style.unit_of(column)
    some = rows[rows[column] > 0]
    some = rows if some.empty else some
    best = some.loc[some[column].idxmin()]
    worst = some.loc[some[column].idxmax()]
    own = rows[rows["cell"] == rows["base"]]
    said = {"base": ""}
    if len(own) and own["cell"].iloc[0] not in (best["cell"], worst["cell"]):
        size = style.quantity(own[column].iloc[0], unit)
        said["base"] = f"; {own['label'].iloc[0]} {size}"
    said |= {"best": best["label"], "low": style.quantity(best[column], unit)}
    said |= {"worst": worst["label"], "high": style.quantity(worst[column], unit)}
    return words.format(**said)


def of_losses(rows, curves, column):
    """Return what the cheapest row and the base have spent on their steps, and their losses."""
    ends = curves[curves["cell"].isin(rows["cell"])].groupby("cell").last()
    cheapest = ends[ends[column] > 0][column].idxmin()
    base = rows["base"].iloc[0]
    names = rows.set_index("cell")["label"]
    parts = []
    for cell in dict.fromkeys([cheapest, *([base] if base in names else [])]):
        unit = "bytes" if column == "sent_bytes" else "s"
        spent = style.quantity(ends.loc[cell, column], unit)
        spent += " sent" if unit == "bytes" else ""
        parts.append(f"{names[cell]} reaches {ends.loc[cell, 'loss']:.2f} after {spent}")
    return f"The loss after the same steps: {'; '.join(parts)}"


def of_scaling(lines):
    """Return the throughput of a base on each number of ranks."""
    if not lines:
        return "Measured on one number of ranks only"
    first = min(lines, key=lambda rows: len(rows["changes"].iloc[0]))
    sizes = zip(first["ranks"], first["samples_per_s"], strict=True)
    words = ", ".join(f"{rate:.0f} on {ranks}" for ranks, rate in sizes)
    return f"{first['short'].iloc[0]}, samples/s by the number of ranks: {words}"
