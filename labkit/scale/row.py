"""A row's columns read: numbers that must make sense, and the shape of the model that they tell.

    row["layers"], row["hidden"], row["ffn"] ...   -> Shape    gated? tied? what fits row["params"]

What is missing: heads of width 128, kv_heads = heads, ffn = 4 hidden, a vocabulary of 51,200, an
output layer of its own if the network is gated. Neither layers nor hidden: a network 128 times as
wide as it is deep. Far more parameters than a dense network has: experts, as many as explain them,
two for each token. architecture: an encoder is BERT's kind with the head for masked words, through
which all words go. What is impossible is a ValueError, one line that names it.
"""

import csv
from dataclasses import replace
from difflib import get_close_matches
from math import isfinite, log
from pathlib import Path

from labkit.scale.bert_shapes import Encoder
from labkit.scale.shapes import Shape

MODELS = Path(__file__).with_name("models.csv")
VOCAB, HEAD_WIDTH, ASPECT = 51200, 128, 128
POSITIONS = 512  # of an encoder that is trained on shorter sequences: BERT's
NOT_PLANNED = (
    "{} cannot be planned, a decoder or an encoder can: cost.py has no term for other layers, such "
    "as convolutions (of a ResNet images.py has parameters, FLOPs and activations)"
)
RECOMPUTED = {
    "half": ("half", "layer"),
    "selective": ("selective", "attention", "op"),
    "full": ("full", "true", "uniform", "block"),
    "none": ("", "none", "false"),
}


def row_of(name):
    """The row of models.csv, or what is written out as layers=32,hidden=4096,..."""
    if "=" in name:
        told = [part.partition("=") for part in name.split(",")]
        return {column.strip(): value for column, _, value in told}
    if name.lower().startswith("resnet"):
        raise ValueError(NOT_PLANNED.format(name))
    with MODELS.open(newline="", encoding="utf-8") as file:
        rows = {row["model"]: row for row in csv.DictReader(file)}
    if name.lower() not in rows:
        near = ", ".join(get_close_matches(name.lower(), rows, n=3, cutoff=0.0))
        raise ValueError(f"unknown model {name!r}: the nearest known are {near}")
    return rows[name.lower()]


def text(row, name):
    """What the row says in that column, "" where it says nothing."""
    return str(row.get(name) if row.get(name) is not None else "").strip()


def number(row, name, default=None, least=1):
    """A number of the row, or the default where it has none."""
    said = text(row, name)
    if not said:
        return default
    try:
        value = float(said)
    except ValueError:
        raise ValueError(f"{name} must be a number, got {said!r}") from None
    if not isfinite(value) or value < least:
        raise ValueError(f"{name} must be a number of at least {least}, got {said}")
    return value


def whole(row, name, default=None, least=1):
    value = number(row, name, default, least)
    if value is not None and value != int(value):
        raise ValueError(f"{name} must be a whole number, got {value:g}")
    return None if value is None else int(value)


def recomputed(said):
    """What is computed again in the backward: "none", "half", "selective" or "full"."""
    for kind, words in RECOMPUTED.items():
        if said.lower() in words or any(word and word in said.lower() for word in words):
            return kind
    raise ValueError(f"recompute must be none, selective-op, selective-layer or full, got {said!r}")


def shape_of(row, context):
    """The Shape of a row: what its parameter count fits best, where the row leaves it open."""
    parameters = number(row, "params")
    layers, hidden = whole(row, "layers"), whole(row, "hidden")
    if not (parameters or (layers and hidden)):
        raise ValueError("no model: give layers and hidden, or params")
    if not layers:
        layers = round(parameters / 12 / hidden**2) if hidden else 0
        layers = max(1, layers or round((parameters / 12 / ASPECT**2) ** (1 / 3)))
    if not hidden:
        hidden = max(1, round((parameters / 12 / layers) ** 0.5 / HEAD_WIDTH)) * HEAD_WIDTH
    heads = whole(row, "heads") or next(
        h for h in range(max(1, hidden // HEAD_WIDTH), 0, -1) if hidden % h == 0
    )
    ffn, encoder = whole(row, "ffn"), is_encoder(row)
    given = {"layers": layers, "hidden": hidden, "heads": heads}
    given |= {"kv_heads": whole(row, "kv_heads") or heads, "vocab": whole(row, "vocab", VOCAB)}
    if encoder:
        ends = {"positions": max(context, POSITIONS), "masked_words": True}
        return Encoder(**given, ffn=ffn or 4 * hidden, **ends)
    tied = {"true": (True,), "false": (False,)}.get(text(row, "tied").lower(), (True, False))
    gated = (False, True) if ffn and parameters else (bool(ffn) and ffn != 4 * hidden,)
    kinds = [
        Shape(**given, ffn=ffn or 4 * hidden, gated=g, tied=t, positions=0 if g else context)
        for g in gated
        for t in tied
    ]
    experts = whole(row, "experts")
    if parameters:
        if not experts and parameters > 1.7 * max(kind.parameters for kind in kinds):
            dense, one = kinds[-1].parameters, layers * kinds[-1].network_weights
            experts = 1 + round((parameters - dense) / one)
        many = [with_experts(kind, row, experts or 1) for kind in kinds]
        return min(many, key=lambda shape: abs(log(shape.parameters / parameters)))
    usual = [kind for kind in kinds if kind.tied != kind.gated] or kinds
    return with_experts(usual[0], row, experts or 1)


def is_encoder(row):
    """ValueError for an encoder that has experts."""
    said = text(row, "architecture").lower()
    if said == "encoder" and (whole(row, "experts") or 1) > 1:
        raise ValueError("experts must be left out of an encoder: its layers have one network each")
    return said == "encoder"


def with_experts(shape, row, experts):
    top_k = whole(row, "top_k", min(2, experts))
    return replace(shape, experts=experts, top_k=top_k)
