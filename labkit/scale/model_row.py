"""Read a model from a row of a table: its Shape, with defaults for missing columns.

    llama3-8b                      -> a row of models.csv     \\
    layers=32,hidden=4096,...      -> the same columns         >  row  ->  Shape, Encoder or ViT
    config.json of Hugging Face    -> huggingface.py          /

Defaults: heads of width 128, kv_heads = heads, ffn = 4 hidden, a vocabulary of 51,200, an untied
output layer if the network is gated. Without layers and hidden, the network is 128 times as wide as
it is deep. If params is far more than a dense network has, the number of experts is the one that
explains it, with top_k 2. architecture="encoder" means BERT with the head for masked words, which
processes all words; "vit" a vision transformer. latent_...: the widths of latent attention
(shapes.py); lora: the rank of adapters, the only trained parameters; train: head or last:N, the
layers that are trained (job_config.py); documents: tokens of the documents that are packed into a
sequence (documents.py); vision: clip or siglip, an image encoder before the decoder, with its sizes
in vision_...; projector: parameters between the two; images: of each sequence. Other columns are
fields of Shape. An impossible value raises ValueError, which names the column.
"""

import csv
import re
from dataclasses import replace
from difflib import get_close_matches
from math import isfinite, log
from pathlib import Path

from labkit.scale.bert_shapes import Encoder
from labkit.scale.shapes import Latent, Shape
from labkit.scale.vit_shapes import ImageEncoder, ViT, tokens_of_image

MODELS = Path(__file__).with_name("models.csv")
VOCAB, HEAD_WIDTH, ASPECT = 51200, 128, 128
POSITIONS = 512  # of an encoder that is trained on shorter sequences: BERT's
NOT_PLANNED = (
    "{} cannot be planned, a decoder, an encoder or a ViT can: cost.py has no term for other "
    "layers, such as convolutions (resnet_shapes.py has parameters, FLOPs and activations of "
    "ResNets)"
)
PARTS = ("head_dim", "window", "windowed_layers", "shared_ffn", "dense_layers", "dense_ffn")
MODEL = (
    "architecture", "params", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tied",
    "gated", "experts", "top_k", *PARTS, "positions", "norms", "biases", "qkv_biases", "qk_norms",
    "latent_queries", "latent_keys", "latent_plain", "latent_rotated", "latent_value",
    "image", "patch", "channels", "classes",
    "vision", "vision_layers", "vision_hidden", "vision_heads", "vision_ffn", "vision_image",
    "vision_patch", "vision_tokens", "projector", "images",
)  # fmt: skip
ASKED = ("lora", "train", "documents")  # of the training, not of the model
KNOWN = ("model", *MODEL, *ASKED, "seq_len", "global_batch", "source")
ARCHITECTURES = ("", "decoder", "encoder", "vit")
FLAGS = {"true": (True,), "false": (False,), "": ()}
HUB_NAMES = {  # how names on huggingface.co differ from those of models.csv
    r"^(meta-)?llama-3(\.1)?-": "llama3-",
    r"^llama-3\.2-": "llama3.2-",
    r"^llama-2-": "llama2-",
    r"^gemma-2-": "gemma2-",
    r"^gpt2-xl$": "gpt2-1.5b",
    r"-(hf|v0\.\d)$": "",
}
WAYS = "Give a name of --list-models, a config.json, or layers=32,hidden=4096,..."


def row_of(name):
    """Return the row of models.csv, or the columns of a text like layers=32,hidden=4096,...

    Raises ValueError for an unknown model and an unknown column.
    """
    if "=" in name:
        return row_of_text(name)
    if name.lower().startswith("resnet"):
        raise ValueError(NOT_PLANNED.format(name))
    rows = models()
    wanted = name.lower().rpartition("/")[2]
    for pattern, ours in HUB_NAMES.items():
        wanted = re.sub(pattern, ours, wanted)
    if wanted not in rows:
        near = nearest(wanted, rows) or ";"
        raise ValueError(f"unknown model {name!r}{near} {WAYS}")
    return rows[wanted]


def row_of_text(said):
    """Return {column: text} of "layers=32,hidden=4096,..."."""
    row = {}
    for part in said.split(","):
        column, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value:
            raise ValueError(f"{part.strip()!r} in {said!r} must be column=number, as in layers=32")
        if column in row:
            raise ValueError(f"{column} is given twice in {said!r}")
        row[column] = value
    check_columns(row)
    return row


def check_columns(row):
    """Raise ValueError for a column that does not describe a model."""
    for column in row:
        if column not in KNOWN:
            hint = nearest(column, KNOWN) or f"; known are {', '.join(KNOWN)}"
            raise ValueError(f"unknown column {column!r} of a model{hint}")


def models():
    """Return {name: row} of models.csv."""
    with MODELS.open(newline="", encoding="utf-8") as file:
        return {row["model"]: row for row in csv.DictReader(file)}


def nearest(name, known):
    """Return "; did you mean ...?" with the nearest known names, or "" if none is near."""
    near = get_close_matches(name, known, n=3, cutoff=0.7)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def text(row, name):
    """Return the row's text in that column, "" if it is missing."""
    return str(row.get(name) if row.get(name) is not None else "").strip()


def number(row, name, default=None, least=1):
    """Return a number of the row, or the default if it is missing."""
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


def shape_of(row, context):
    """Return the Shape of a row; missing columns are chosen to fit its parameter count best."""
    if text(row, "architecture").lower() == "vit":
        return vit_of(row)
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
    given |= parts_of(row) | images_of(row, context)
    tied = flags(row, "tied") or (True, False)
    gated = (False, True) if ffn and parameters else (bool(ffn) and ffn != 4 * hidden,)
    gated = flags(row, "gated") or gated
    positions = whole(row, "positions")
    kinds = [
        Shape(
            **given,
            ffn=ffn or 4 * hidden,
            gated=g,
            tied=t,
            positions=positions or (0 if g else context),
        )
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


def flags(row, name):
    """Return (True,), (False,), or () if the row lacks it. Raises ValueError for other text."""
    said = text(row, name).lower()
    if said not in FLAGS:
        raise ValueError(f"{name} must be true or false, got {said!r}")
    return FLAGS[said]


def parts_of(row):
    """Return {field of Shape: value} of the columns that few models have."""
    found = {name: whole(row, name, 0, least=0) for name in PARTS}
    found["norms"] = whole(row, "norms", 2)
    found |= {name: flags(row, name) == (True,) for name in ("biases", "qkv_biases", "qk_norms")}
    keys = whole(row, "latent_keys")
    if keys:
        found["latent"] = Latent(
            queries=whole(row, "latent_queries", 0, least=0),
            keys=keys,
            plain=whole(row, "latent_plain", HEAD_WIDTH),
            rotated=whole(row, "latent_rotated", HEAD_WIDTH // 2),
            value=whole(row, "latent_value", HEAD_WIDTH),
        )
    return found


def images_of(row, context):
    """Return {field of Shape: value} of a row with an image encoder, and {} without one.

    Raises ValueError if the images are longer than the sequence.
    """
    kind = text(row, "vision").lower()
    if not kind:
        return {}
    if kind not in ("clip", "siglip"):
        raise ValueError(f"vision must be clip or siglip, got {kind!r}")
    names = ("layers", "hidden", "heads", "ffn", "image", "patch")
    sizes = {name: whole(row, f"vision_{name}") for name in names}
    if missing := [name for name, size in sizes.items() if size is None]:
        raise ValueError(f"vision_{missing[0]} is missing: a model with images needs it")
    patches = tokens_of_image(sizes["image"], sizes["patch"]) - 1
    tokens, images = whole(row, "vision_tokens", patches), whole(row, "images", 1)
    if images * tokens > context:
        raise ValueError(
            f"images={images} of {tokens} tokens are longer than a sequence of {context}: use "
            f"a length of at least {images * tokens}, or fewer images"
        )
    encoder = ImageEncoder(
        **sizes,
        kv_heads=sizes["heads"],
        class_token=kind == "clip",
        positions=patches + (kind == "clip"),
        tokens=tokens,
        projector=whole(row, "projector", 0, least=0),
    )
    return {"vision": encoder, "images": images}


def vit_of(row):
    """Return the ViT of a row."""
    sizes = {name: whole(row, name) for name in ("layers", "hidden", "heads", "ffn")}
    sizes |= {name: whole(row, name) for name in ("image", "patch", "channels", "classes")}
    sizes["kv_heads"] = sizes["heads"]
    found = ViT(**{name: size for name, size in sizes.items() if size is not None})
    return replace(found, positions=tokens_of_image(found.image, found.patch))


def is_encoder(row):
    """Return whether the row is an encoder. Raises ValueError for an encoder with experts."""
    said = text(row, "architecture").lower()
    if said == "encoder" and (whole(row, "experts") or 1) > 1:
        raise ValueError("experts must not be given for an encoder: its layers have one network")
    return said == "encoder"


def with_experts(shape, row, experts):
    top_k = whole(row, "top_k", min(2, experts))
    return replace(shape, experts=experts, top_k=top_k)
