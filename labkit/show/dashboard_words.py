"""The dashboard in words: names of cells, the tables to read, and captions.

DDP                          a base has the name of its strategy
DDP + top 1 %                a strategy and how it compresses
FSDP, 2 micro-batches        a strategy and what else is changed
tensor parallel, 2 ranks     ranks along other axes than dp
"""

from math import inf

import pandas as pd

from labkit.measure.machine import ROOT
from labkit.measure.stats import FEWEST, interval_name
from labkit.memory.memory_tracker import KINDS
from labkit.run.summary import ratio_of, slowed, speed
from labkit.run.sweep import USUAL, results
from labkit.show import style

STRATEGIES = {"ddp_bucketed": "DDP", "fsdp": "FSDP"}  # others: style.name
HOOKS = {
    "fp16": "fp16 gradients",
    "bf16": "bf16 gradients",
    "hierarchical": "hierarchical all-reduce",
    "leaders": "all-reduce by leaders",
}
RECOMPUTED = {
    "every": "recomputed",
    "alternate": "half recomputed",
    "matmul": "all but products recomputed",
}
AXES = {"tensor": "tensor parallel", "context": "ring attention", "pipeline": "pipeline"}
CHANGES = {
    "precision": " in {}",
    "comm_hook": " + {}",
    "accumulation": ", {} micro-batches",
    "recompute": ", {}",
    "every": ", every {} steps",
    "experts": ", {} experts",
    "expert": " on {} ranks",
    "attention": ", {} attention",
    "bucket_cap_mb": ", buckets of {:g} MiB",
    "batch_size": ", batch {}",
    "seed": ", again with seed {} (noise)",
}
VERDICTS = {"cannot tell": "unclear"}
SPLIT = ("experts", "expert", "sequence_parallel", "attention")
TOPICS = ("strategies", "send less", "save memory and time", "split the model", "combinations")
KNOWN = ("accumulation", "recompute", "precision", "comm_hook", "every", *AXES, *SPLIT)


def rows_of(own, stored):
    """Return (rows, their origin as text) of the sweep in folder own, else of the stored one."""
    try:
        return results(own), f"your own sweep, in {shown(own)}"
    except ValueError as error:
        why = str(error).replace(f"{ROOT}/", "")
        rows = results(stored)
        about = rows.iloc[0]
        when = f"measured on {about['measured_at'][:10]} at commit {about['commit'][:12]}"
        return rows, f"the sweep that ships with the course, {when} ({why})"


def shown(folder):
    return folder.relative_to(ROOT) if folder.is_relative_to(ROOT) else folder


def origin(rows):
    """Return the provenance of the rows, for a caption."""
    about = rows.iloc[0]
    gpus = "no GPU" if about["gpus"] == "none" else about["gpus"]
    words = f"measured on {about['cores']} cores, {gpus}, torch {about['torch']}"
    words += "; sent bytes derived, memory counted"
    ranks = rows["nproc"] * rows["nodes"]
    if about["device"] == "cpu" and ranks.max() > about["cores"]:
        words += f"; {ranks.max()} ranks share {about['cores']} cores"
    if (slowed(rows) < inf).any():
        words += "; over links throttled to their speed"
    if (rows["compute"] == "emulated").any():
        words += "; emulated compute in some cells"
    return words


def caption(state):
    """Return "Ratio to the base: strategies, GPT, 2 ranks, this machine", for a caption.

    state: a dashboard.State; filters that let all rows through are not named.
    """
    ranks = "any" if state.picture == "scaling" else f"{state.ranks} ranks"
    filters = [style.name(one) for one in (state.topic, state.model, ranks, state.link)]
    words = ", ".join(one for one in filters if not one.startswith("any"))
    return style.capital(state.picture) + (f": {words}" if words else "")


def label(row):
    """Return a cell's name: its strategy, and what else its changes to the base are."""
    return name_of(row, dict(row["changes"]))


def what(row):
    """Return a cell's name without its model and bucket size: "DDP + top 1 %"."""
    return name_of(row, {name: row[name] for name in KNOWN if row[name] != USUAL[name]})


def name_of(row, changes):
    """Return the name of a row with these {field: value} besides its strategy."""
    words = STRATEGIES.get(row["strategy"], style.name(row["strategy"]))
    if axes := [name for name in AXES if row[name] > 1]:
        words = axes_in_words(row, axes)
    for name, value in sorted(changes.items(), key=place_of):
        if name not in ("strategy", "sequence_parallel", *AXES):
            words += change(name, value)
    return words


def axes_in_words(row, axes):
    """Return "tensor parallel, 2 ranks", or "tensor x context, 2 x 2 ranks" for several axes."""
    words = AXES[axes[0]] if len(axes) == 1 else " x ".join(axes)
    if row["sequence_parallel"] == "on":
        words = words.replace("tensor", "tensor + sequence", 1)
    return f"{words}, {' x '.join(str(row[name]) for name in axes)} ranks"


def links_of(table, model, ranks):
    """Return the links over which the model was measured on this number of ranks, slowest first."""
    rows = table[(table["model"] == model) & (table["ranks"] == ranks) & (table["nodes"] > 1)]
    return list(dict.fromkeys(rows.sort_values("link_mbit")["link"]))


def topic(row):
    """Return the topic of a row: pictures compare the rows of one, at most twelve."""
    fields = {name for name in KNOWN if row[name] != USUAL[name]}
    if fields & {*AXES, "experts", "expert", "sequence_parallel"}:
        return "split the model"
    sends = row["strategy"] in ("local_sgd", "diloco") or "comm_hook" in fields
    spends = fields & {"accumulation", "recompute", "precision", "attention"}
    other = row["strategy"] != USUAL["strategy"]
    if len(spends) + (sends or other) > 1:
        return "combinations"
    if sends or row["bucket_cap_mb"] != USUAL["bucket_cap_mb"]:
        return "send less"
    return "save memory and time" if spends else "strategies"


def place_of(change):
    """Return the place of a change in a name: that of CHANGES, others at the end."""
    return [*CHANGES, change[0]].index(change[0])


def change(name, value):
    """Return a change in words, to be written behind the name of a strategy."""
    if name == "comm_hook":
        value = HOOKS.get(value, style.name(value))
    if name == "recompute":
        value = RECOMPUTED[value]
    if name in CHANGES:
        return CHANGES[name].format(value)
    return f", {style.name(name)} {style.name(value) if isinstance(value, str) else f'{value:g}'}"


def place(row):
    """Return where a cell ran in few letters: "2 ranks", "100 Mbit/s", "100 Mbit/s, 4 ranks"."""
    if row["nodes"] == 1:
        return row["world"]
    return row["link"] + (f", {row['ranks']} ranks" if row["nproc"] > 1 else "")


def link_of(row):
    """Return the link between nodes as text: "100 Mbit/s", "10 Gbit/s"; "this machine" without."""
    if row["nodes"] == 1:
        return "this machine"
    return "loopback" if row["link_mbit"] == inf else speed(row["link_mbit"])


def in_words(table):
    """Return a DataFrame of texts, a row per cell. The kinds of memory are in MiB."""
    many = table["model"].nunique() > 1
    kinds = [kind for kind in KINDS if f"peak_{kind}_bytes" in table]
    ratio = f"ratio ({interval_name(*table['pairs'])})"
    rows = []
    for row in table.to_dict("records"):
        low = row["step_low"]
        high = row["step_high"]
        words = {"what": row["label"]} | ({"model": style.name(row["model"])} if many else {})
        words |= {"on": row["world"], "step, ms": f"{row['step_ms']:.1f} ({low:.1f}–{high:.1f})"}
        own = row["cell"] == row["base"]
        words[ratio] = "base" if own else ratio_of(row).in_words()
        words["exposed, ms"] = f"{row['exposed_comm_ms']:.1f}"
        words["sent"] = style.quantity(row["sent_bytes"], "bytes")
        words["peak"] = style.quantity(row["peak_bytes"], "bytes")
        held = (row[f"peak_{kind}_bytes"] / 2**20 for kind in kinds)
        words["of it, MiB"] = " · ".join(f"{size:.1f}" for size in held)
        words["samples/s"] = f"{row['samples_per_s']:.0f}"
        words["MFU"] = f"{row['mfu']:.2f}"
        rows.append(words | {"loss": f"{row['loss']:.3f}"})
    return pd.DataFrame(rows, index=table.index)


def short_table(table):
    """Return a DataFrame of texts that fits 100 columns: a row per cell, by world and step time."""
    rows = []
    for row in table.sort_values(["nodes", "ranks", "link_mbit", "step_ms"]).to_dict("records"):
        words = {"what": row["label"], "on": place(row)}
        words |= {"step, ms": f"{row['step_ms']:.1f}", "x base": f"{row['ratio']:.2f}"}
        words["is"] = VERDICTS.get(row["verdict"], row["verdict"])
        words["sent"] = style.quantity(row["sent_bytes"], "bytes")
        rows.append(words | {"peak": style.quantity(row["peak_bytes"], "bytes")})
    return pd.DataFrame(rows)


def legend(table):
    """Return an explanation of in_words()'s columns, for a caption."""
    kinds = " · ".join(style.name(kind) for kind in KINDS if f"peak_{kind}_bytes" in table)
    ratio = "ratio: step time / that of the base, in paired rounds; interval of 95 % from "
    ratio += f"{FEWEST} rounds on, else the smallest and the largest"
    peak = f"peak: of the rank with the most; of it: {kinds}"
    return f"step: median and quartiles of the rounds; {ratio}; {peak}"
