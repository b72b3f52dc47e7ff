"""What a sweep says: a row a cell, held against its base, and what those ratios predict of others.

    base               step 40 ms
    bf16               ratio 1.5      measured, in turns with the base
    recomputed         ratio 1.25     measured, in turns with the base
    bf16 + recomputed  40 ms x 1.5 x 1.25 = 75 ms: predicted, as if one change knew nothing of the
                                      other. Where they do know of each other, the error shows it

The base of a cell is the first cell of its launch: the first of its world and model in the grid.
"""

from dataclasses import fields
from math import inf, nan, prod

import pandas as pd

from labkit.measure.stats import Ratio, paired_ratio
from labkit.run.experiment import Experiment
from labkit.run.sweep import WORLD

FIELDS = [field.name for field in fields(Experiment)]
TIMES = ["step_ms", "forward_ms", "backward_ms", "optimizer_ms", "exposed_comm_ms"]
RATES = ["samples_per_s", "mfu"]
QUANTITIES = ("step_ms", "sent_bytes", "peak_bytes")  # what is predicted
COUNTED = ["sent_bytes", "peak_bytes"]


def summary(rows):
    """DataFrame, a row per cell of sweep.results(): its fields and world, and

    world (text), ranks, base (the cell it is held against), changes: ((field, value), ...) in which
    it differs from that; medians over rounds of the means over ranks and steps: step_ms (quartiles
    step_low, step_high) and the other TIMES and RATES; ratio of step times, paired by round, with
    its interval ratio_low, ratio_high; pairs (ratio_of makes a stats.Ratio of these); bytes of the
    rank that has most; loss: of the last step, the mean over ranks.
    """
    rows = rows.assign(link_mbit=slowed(rows))
    by_cell = rows.groupby("cell", sort=False)
    kinds = [name for name in rows if name.startswith("peak_") and name.endswith("_bytes")]
    turns = rows.groupby(["launch", "cell", "round"], sort=False)[TIMES + RATES].mean()
    of_cells = turns.groupby("cell", sort=False)
    table = by_cell[[*FIELDS, *WORLD]].first().join(of_cells.median())
    steps = of_cells["step_ms"]
    table["step_low"], table["step_high"] = steps.quantile(0.25), steps.quantile(0.75)
    table = table.join(by_cell[list(dict.fromkeys([*COUNTED, *kinds]))].max())
    losses = rows.groupby(["cell", "step"], sort=True)["loss"].mean()
    table["loss"] = losses.groupby("cell").last()
    table["ranks"] = table["nproc"] * table["nodes"]
    table["world"] = [world_of(row) for row in table.to_dict("records")]
    first = rows.groupby("launch", sort=False)["cell"].first()
    table["base"] = by_cell["launch"].first().map(first)
    given = table[FIELDS].to_dict("index")
    table["changes"] = [differing(given[cell], given[base]) for cell, base in table["base"].items()]
    return table.join(ratios(turns["step_ms"], first)).reset_index()


def differing(own, base):
    return tuple((name, value) for name, value in own.items() if value != base[name])


def slowed(rows):
    """link_mbit of the rows; inf where nothing was slowed: on one node, or with nodes refused."""
    network = rows.get("network", pd.Series("none", rows.index))
    return rows["link_mbit"].where(network != "loopback").fillna(inf)


def world_of(row):
    """ "2 ranks", "2 nodes of 1, 100 Mbit/s": where a cell ran, in words."""
    if row["nodes"] == 1:
        return f"{row['nproc']} rank{'s' * (row['nproc'] > 1)}"
    link = "loopback" if row["link_mbit"] == inf else f"{row['link_mbit']:g} Mbit/s"
    delay = f" and {row['link_ms']:g} ms" if row["link_ms"] else ""
    return f"{row['nodes']} nodes of {row['nproc']}, {link}{delay}"


def ratios(steps, first):
    """DataFrame by cell: ratio, ratio_low, ratio_high, pairs. steps: by launch, cell and round."""
    held = {}
    for launch, block in steps.groupby("launch", sort=False):
        wide = block.droplevel("launch").unstack("cell")
        base = wide[first[launch]]
        for cell in wide:
            both = pd.DataFrame({"own": wide[cell], "base": base}).dropna()
            held.setdefault(cell, []).append(both)
    found = {}
    for cell, parts in held.items():
        both = pd.concat(parts)
        ratio = paired_ratio(both["own"], both["base"]) if len(both) else None
        found[cell] = (ratio.median, ratio.low, ratio.high, ratio.n) if ratio else (nan,) * 3 + (0,)
    columns = ["ratio", "ratio_low", "ratio_high", "pairs"]
    return pd.DataFrame.from_dict(found, orient="index", columns=columns).rename_axis("cell")


def ratio_of(row):
    """The stats.Ratio of a row of summary(), a dict."""
    return Ratio(*(row[name] for name in ("ratio", "ratio_low", "ratio_high", "pairs")))


def curves(rows):
    """DataFrame, a row per cell and step: loss (mean over ranks), seconds and sent_bytes so far.

    Both begin at the first step that was timed: those that warm up are left out.
    """
    names = ["loss", "step_ms", "sent_bytes"]
    steps = rows.groupby(["cell", "step"])[names].mean().reset_index()
    so_far = steps.groupby("cell")
    seconds = so_far["step_ms"].cumsum() / 1e3
    sent = so_far["sent_bytes"].cumsum()
    return steps[["cell", "step", "loss"]].assign(seconds=seconds, sent_bytes=sent)


def singles(table, model):
    """{(field, value): row} of what was measured alone, in the world where this model has most."""
    mine = table[table["model"] == model]
    if mine.empty:
        return {}
    where = mine["world"].value_counts().index[0]
    alone = mine[(mine["world"] == where) & (mine["changes"].map(len) == 1)]
    return {row["changes"][0]: row for row in alone.to_dict("records")}


def base_in(table, model, world):
    """The base of a model in a world, a dict; ValueError where none was measured."""
    mine = table[(table["model"] == model) & (table["world"] == world)]
    mine = mine[mine["cell"] == mine["base"]]
    if mine.empty:
        raise ValueError(f"no base of {model} was measured on {world}")
    return mine.iloc[0].to_dict()


def predict(table, model, world, changes):
    """{quantity: value} of QUANTITIES, and ratio: this world's base times each change's ratio.

    The ratios are those of singles(). Raises ValueError naming a change that was not measured
    alone, and where the world has no base.
    """
    base, known = base_in(table, model, world), singles(table, model)
    for field, value in changes:
        if (field, value) not in known:
            raise ValueError(f"{field}={value} was not measured alone for {model}")
    alone = [known[change] for change in changes]
    predicted = {"ratio": prod(row["ratio"] for row in alone)}
    predicted["step_ms"] = base["step_ms"] * predicted["ratio"]
    own = table.set_index("cell")
    for name in COUNTED:
        factors = [over(row[name], own.loc[row["base"], name]) for row in alone]
        predicted[name] = base[name] * prod(factors)
    return predicted


def over(measured, base):
    """A change's factor; where the base has none of it (one rank sends nothing), it stays so."""
    return measured / base if base else 1.0


def held_against(table):
    """DataFrame: what predict() says of each measured cell of which it did not know, and the error.

    Those are cells of two changes or more, and those of one change in another world. error:
    predicted / measured - 1, of the ratio to the base.
    """
    found = []
    for row in table.to_dict("records"):
        own = singles(table, row["model"]).get(row["changes"][0]) if row["changes"] else None
        known = len(row["changes"]) == 1 and own is not None and own["cell"] == row["cell"]
        if not row["changes"] or known:
            continue
        try:
            said = predict(table, row["model"], row["world"], row["changes"])
        except ValueError:
            continue
        about = {name: row[name] for name in ("cell", "model", "world", "changes")}
        about |= {f"predicted_{name}": value for name, value in said.items()}
        about |= {name: row[name] for name in ("ratio", "ratio_low", "ratio_high", "pairs")}
        about |= {f"measured_{name}": row[name] for name in said}
        found.append(about | {"error": said["ratio"] / row["ratio"] - 1})
    return pd.DataFrame(found)
