"""Summarise a sweep: a row per cell, compared with its base.

    base               step 40 ms
    bf16               ratio 1.5      measured, interleaved with the base
    recomputed         ratio 1.25     measured, interleaved with the base

The base of a cell is the first cell of its launch: the first cell of its world and model in the
grid.
"""

from dataclasses import fields
from math import inf, nan

import pandas as pd

from labkit.measure.stats import Ratio, paired_ratio
from labkit.run.experiment import Experiment
from labkit.run.sweep import WORLD

FIELDS = [field.name for field in fields(Experiment)]
TIMES = ["step_ms", "forward_ms", "backward_ms", "optimizer_ms", "exposed_comm_ms"]
RATES = ["samples_per_s", "mfu"]
COUNTED = ["sent_bytes", "node_sent_bytes", "messages"]


def summary(rows):
    """Return a DataFrame with a row per cell of sweep.results().

    Columns: its fields and world; world (text); ranks; base, the cell to compare with; changes:
    ((field, value), ...) that differ from the base. Medians over rounds of the means over ranks and
    steps: step_ms (quartiles step_low, step_high) and the other TIMES. RATES: of that median step,
    not medians of single steps' rates. ratio of step times, paired by round, with its interval
    ratio_low, ratio_high; pairs (ratio_of makes a stats.Ratio of these). Bytes and messages of the
    rank with the most; node_sent_bytes of the node. peak_bytes: the largest, and of it
    peak_KIND_bytes, of the same rank. loss: of the last step, mean over ranks.
    """
    rows = rows.assign(link_mbit=slowed(rows))
    by_cell = rows.groupby("cell", sort=False)
    counted = [name for name in COUNTED if name in rows]  # without links, no bytes of a node
    kinds = [name for name in rows if name.startswith("peak_") and name.endswith("_bytes")]
    turns = seconds_of(rows).groupby(["launch", "cell", "round"], sort=False)[TIMES + RATES].mean()
    of_cells = turns.groupby("cell", sort=False)
    table = by_cell[[*FIELDS, *WORLD]].first().join(of_cells.median())
    table[RATES] = 1 / table[RATES]
    steps = of_cells["step_ms"]
    table["step_low"] = steps.quantile(0.25)
    table["step_high"] = steps.quantile(0.75)
    fullest = rows.sort_values("peak_bytes").drop_duplicates("cell", keep="last")
    table = table.join(by_cell[counted].max()).join(fullest.set_index("cell")[kinds])
    losses = rows.groupby(["cell", "step"], sort=True)["loss"].mean()
    table["loss"] = losses.groupby("cell").last()
    table["ranks"] = table["nproc"] * table["nodes"]
    table["world"] = [world_of(row) for row in table.to_dict("records")]
    first = rows.groupby("launch", sort=False)["cell"].first()
    table["base"] = by_cell["launch"].first().map(first)
    given = table[FIELDS].to_dict("index")
    table["changes"] = [differing(given[cell], given[base]) for cell, base in table["base"].items()]
    return table.join(ratios(turns["step_ms"], first)).reset_index()


def seconds_of(rows):
    """Return the rows with RATES inverted: times have a mean, and rates of unequal steps do not."""
    return rows.assign(**{rate: 1 / rows[rate] for rate in RATES})


def differing(own, base):
    return tuple((name, value) for name, value in own.items() if value != base[name])


def slowed(rows):
    """Return link_mbit of the rows; inf on one node, or where nodes are not allowed."""
    network = rows.get("network", pd.Series("none", rows.index))
    return rows["link_mbit"].where(network != "loopback").fillna(inf)


def world_of(row):
    """Return where a cell ran, as text: "2 ranks", "2 nodes of 1, 100 Mbit/s"."""
    if row["nodes"] == 1:
        return f"{row['nproc']} rank{'s' * (row['nproc'] > 1)}"
    link = "loopback" if row["link_mbit"] == inf else speed(row["link_mbit"])
    delay = f" and {row['link_ms']:g} ms" if row["link_ms"] else ""
    return f"{row['nodes']} nodes of {row['nproc']}, {link}{delay}"


def speed(mbit):
    """Return a link's speed as text: "100 Mbit/s", "10 Gbit/s"."""
    return f"{mbit / 1e3:g} Gbit/s" if mbit >= 1e3 else f"{mbit:g} Mbit/s"


def ratios(steps, first):
    """Return a DataFrame by cell: ratio, ratio_low, ratio_high, pairs.

    steps: by launch, cell and round.
    """
    pairs = {}
    for launch, block in steps.groupby("launch", sort=False):
        wide = block.droplevel("launch").unstack("cell")
        base = wide[first[launch]]
        for cell in wide:
            both = pd.DataFrame({"cell": wide[cell], "base": base}).dropna()
            pairs.setdefault(cell, []).append(both)
    result = {}
    for cell, parts in pairs.items():
        both = pd.concat(parts)
        ratio = paired_ratio(both["cell"], both["base"]) if len(both) else None
        result[cell] = (
            (ratio.median, ratio.low, ratio.high, ratio.n) if ratio else (nan,) * 3 + (0,)
        )
    columns = ["ratio", "ratio_low", "ratio_high", "pairs"]
    return pd.DataFrame.from_dict(result, orient="index", columns=columns).rename_axis("cell")


def ratio_of(row):
    """Return the stats.Ratio of a row of summary(), a dict."""
    return Ratio(*(row[name] for name in ("ratio", "ratio_low", "ratio_high", "pairs")))


def curves(rows):
    """Return a row per cell and step: loss (mean over ranks), seconds and sent_bytes so far.

    Both begin at the first timed step; warm-up steps are left out.
    """
    names = ["loss", "step_ms", "sent_bytes"]
    steps = rows.groupby(["cell", "step"])[names].mean().reset_index()
    so_far = steps.groupby("cell")
    seconds = so_far["step_ms"].cumsum() / 1e3
    sent = so_far["sent_bytes"].cumsum()
    return steps[["cell", "step", "loss"]].assign(seconds=seconds, sent_bytes=sent)


def base_in(table, model, world):
    """Return the base of a model in a world, a dict. Raises ValueError if none was measured."""
    rows = table[(table["model"] == model) & (table["world"] == world)]
    rows = rows[rows["cell"] == rows["base"]]
    if rows.empty:
        raise ValueError(f"no base of {model} was measured on {world}")
    return rows.iloc[0].to_dict()
