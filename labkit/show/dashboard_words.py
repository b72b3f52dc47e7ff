"""The dashboard in words: names of cells, the table to read, captions, and results beyond noise.

DDP, bucketed                 a base has the name of its strategy
bf16 + 2 micro-batches        another cell is named after its changes to the base
"""

from math import inf

import pandas as pd

from labkit.measure.machine import ROOT
from labkit.measure.stats import FEWEST, by_chance, interval_name
from labkit.memory.memory_tracker import KINDS
from labkit.run.summary import ratio_of, slowed
from labkit.run.sweep import USUAL, results
from labkit.show import style

CHANGES = {
    "accumulation": "{} micro-batches",
    "recompute": "recompute {}",
    "precision": "precision {}",
    "bucket_cap_mb": "buckets of {:g} MB",
    "every": "every {} steps",
    "seed": "again, seed {}",
    "batch_size": "batch {}",
}


def rows_of(own, stored):
    """Return (rows, their origin as text) of the sweep in folder own, else of the stored one."""
    try:
        return results(own), f"your own sweep, in {shown(own)}"
    except ValueError as error:
        why = str(error).replace(f"{ROOT}/", "")
        return results(stored), f"the sweep that ships with the course ({why})"


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


def label(row):
    """Return a cell's changes to its base, in words; for a base, the name of its strategy."""
    words = [change(name, value) for name, value in row["changes"]]
    return " + ".join(words) or style.name(row["strategy"])


def what(row):
    """Return a cell in words, without its model and bucket size: "DDP, bucketed + hook fp16"."""
    words = [style.name(row["strategy"])]
    for name in ("accumulation", "recompute", "precision", "comm_hook", "every"):
        if row[name] != USUAL[name]:
            words.append(change(name, row[name]))
    return " + ".join(words)


def change(name, value):
    if name == "comm_hook":
        return f"hook {style.name(value)}"
    if name in CHANGES:
        return CHANGES[name].format(value)
    return style.name(value) if isinstance(value, str) else f"{style.name(name)} {value:g}"


def link_of(row):
    if row["nodes"] == 1:
        return "this machine"
    return "loopback" if row["link_mbit"] == inf else f"{row['link_mbit']:g} Mbit/s"


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


def legend(table):
    """Return an explanation of in_words()'s columns, for a caption."""
    kinds = " · ".join(style.name(kind) for kind in KINDS if f"peak_{kind}_bytes" in table)
    ratio = "ratio: step time / that of the base, in paired rounds; interval of 95 % from "
    ratio += f"{FEWEST} rounds on, else the smallest and the largest"
    return f"step: median and quartiles of the rounds; {ratio}; of it: {kinds}"


def beyond_noise(rows):
    """Return a text that names the cells faster or slower than their base, beyond noise.

    Noise is measured by the base with another seed; the widest band of several counts.
    """
    noise = rows[[bool(c) and all(name == "seed" for name, _ in c) for c in rows["changes"]]]
    bands = [ratio_of(row).noise_band() for row in noise.to_dict("records") if row["pairs"]]
    band = max(bands, key=lambda band: band[1], default=(1.0, 1.0))
    rows = rows[(rows["cell"] != rows["base"]) & ~rows.index.isin(noise.index)]
    says = [ratio_of(row).verdict(band) for row in rows.to_dict("records")]
    lists = {word: rows["label"][[said == word for said in says]] for word in ("faster", "slower")}
    parts = [f"{word}: {', '.join(names) or 'none'}" for word, names in lists.items()]
    left = says.count("cannot tell")
    words = f"Compared with the base. {'; '.join(parts)}; within noise: {left} more."
    pairs = rows["pairs"][rows["pairs"] >= FEWEST]
    missed = f"{by_chance(pairs):.1f} of these {len(pairs)} intervals miss the truth by chance"
    return f"{words} On average {missed}." if len(pairs) > 1 else words
