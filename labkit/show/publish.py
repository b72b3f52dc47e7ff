"""Show a figure in a notebook with its alt text, or save it into figures/.

    present(figure, caption, provenance, alt)       image + alt text, caption, provenance beneath it
    save_table(frame, "overlap")                    a table next to it: overlap.csv
    save(figure, "overlap", data, parameters, ...)  figures/overlap.svg   (`lab figures` only), the
                                                                          same bytes for same data
                                                    figures/overlap.json  what it was drawn from

JupyterLab ignores an image's alt text, so the sentence is also plain text below it.
"""

import base64
import hashlib
import html
import io
import json
import os
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
from IPython.display import display
from PIL import Image

from labkit.measure import machine
from labkit.show import style

FOLDER = "LABKIT_FIGURES"  # the variable by which `lab run` and `lab figures` say where pictures go
PROVENANCE = (
    "measured",
    "counted",
    "derived",
    "throttled",
    "emulated",
    "simulated",
    "predicted",
    "published",
)


def check(alt, provenance):
    """Raise ValueError if alt is empty or provenance does not begin with a word of PROVENANCE."""
    if not alt.strip():
        raise ValueError("a figure needs alt text: give one sentence that describes it")
    if provenance.split(" ")[0].strip(",;:") not in PROVENANCE:
        raise ValueError(
            f"provenance must begin with one of {', '.join(PROVENANCE)}; got {provenance!r}"
        )


@contextmanager
def laid_out(figure):
    """Keep the layout as it is inside the block, legends too.

    Legends are anchored to the canvas. The saved canvas is cut to the drawing and holds the
    provenance beneath, which a legend at the lower left would cover.
    """
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
    figure.set_layout_engine("none")  # it knows only legends that are anchored to the canvas
    for legend in figure.legends:
        legend.set_bbox_to_anchor((0, 0, 1, 1), figure.transFigure)
    try:
        yield
    finally:
        for legend in figure.legends:
            legend.set_bbox_to_anchor(None)
        figure.set_layout_engine(engine)


def png(figure, dpi=200, compress_level=6):
    """Return the figure as PNG bytes."""
    held = io.BytesIO()
    with style.look(), laid_out(figure):
        packed = {"pil_kwargs": {"compress_level": compress_level}}
        figure.savefig(held, format="png", dpi=dpi, bbox_inches="tight", pad_inches=0.15, **packed)
    return held.getvalue()


def in_fewer_colours(figure):
    """Return the figure as PNG bytes of 256 colours: a third of the size, no visible difference."""
    held = io.BytesIO()
    picture = Image.open(io.BytesIO(png(figure, compress_level=0))).convert("RGB")
    picture.quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(held, "png")
    return held.getvalue()


def present(figure, caption, provenance, alt):
    """Display a figure in a notebook: the picture, then a caption that ends in the provenance.

    provenance: "measured on 2 cores, no GPU, torch 2.13.0"; its first word is one of PROVENANCE.
    alt: one sentence that describes the picture. Raises ValueError as check() does.
    """
    check(alt, provenance)
    image = in_fewer_colours(figure)
    # a PNG's header holds its size; two pixels to a point are crisp
    width = int.from_bytes(image[16:20], "big") // 2
    about = {"alt": alt, "width": width, "needs_background": "light"}
    display(
        {"image/png": image, "text/plain": alt}, metadata={"image/png": about, "alt": alt}, raw=True
    )
    text = f"{caption} ({provenance})"
    body = (
        f"<b>{html.escape(caption)}</b> "
        f"<span style='opacity:.75'>({html.escape(provenance)})</span>"
    )
    seen = (
        f"<br><span style='opacity:.75'>In words: {html.escape(alt)}</span>"
        if alt.strip() != caption.strip()
        else ""
    )
    about_width = f"max-width:{width}px"
    display(
        {"text/html": f"<p style='{about_width}'>{body}{seen}</p>", "text/plain": text}, raw=True
    )


def as_html(words, *figures):
    """Return figures and their sentence as HTML, for a widget."""
    words = html.escape(words, quote=True)
    look = f'style="max-width:100%;width:760px" alt="{words}"'
    pngs = [png(figure, dpi=130, compress_level=1) for figure in figures]  # fast, as it is not kept
    images = [base64.b64encode(one).decode() for one in pngs]
    shown = "".join(f'<img {look} src="data:image/png;base64,{image}">' for image in images)
    return f"{shown}<p>{words}</p>"


def save_table(frame, name):
    """Write NAME.csv into the folder that LABKIT_FIGURES names; without it, do nothing."""
    if folder := os.environ.get(FOLDER):
        Path(folder).mkdir(parents=True, exist_ok=True)
        frame.to_csv(Path(folder, f"{name}.csv"), index=False, float_format="%.6g")


def save(figure, name, data, parameters, provenance, alt, folder=None):
    """Write folder/NAME.svg and folder/NAME.json; return the path of the SVG.

    folder: by default the one that the environment variable LABKIT_FIGURES names. Without one
        nothing is written and None is returned, so that running a notebook does not change the
        committed figures.

    data: DataFrame, or anything JSON supports: what the picture shows. parameters: of the run.
    The JSON adds provenance, alt text, the class of machine (never its name), versions, commit and
    the SHA-256 of the SVG that was drawn from it.
    """
    check(alt, provenance)
    folder = folder or os.environ.get(FOLDER)
    if not folder:
        return None
    if isinstance(data, pd.DataFrame):
        data = json.loads(data.to_json(orient="records", double_precision=6))
    about = {
        "alt": alt,
        "provenance": provenance,
        "parameters": parameters,
        "commit": machine.commit(),
        "machine": machine.card(),
    }
    facts = {"figure": f"{name}.svg", **about, "data": data}
    json.dumps(facts, allow_nan=False)  # raises before anything is written
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with style.look(), laid_out(figure):
        note = figure.text(
            0.012, -0.005, provenance, ha="left", va="top", size=9, color=style.FAINT
        )
        about = {"Date": None, "Creator": None, "Title": alt}
        figure.savefig(folder / f"{name}.svg", bbox_inches="tight", pad_inches=0.12, metadata=about)
        note.remove()
    drawn = folder / f"{name}.svg"
    facts["sha256"] = hashlib.sha256(drawn.read_bytes()).hexdigest()
    text = json.dumps(facts, indent=1, sort_keys=True)
    (folder / f"{name}.json").write_text(text + "\n")
    return drawn
