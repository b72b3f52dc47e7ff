"""The look of all pictures: one style file, a colour and a name for each thing, readable units.

Petroff, Accessible Color Sequences for Data Visualization, arXiv:2107.02270 (the ten colours).
"""

import re
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from matplotlib import colors
from matplotlib import style as matplotlib_style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

STYLE_FILE = Path(__file__).with_name("labkit.mplstyle")
BLUE, ORANGE, RED, GREY, PURPLE, BROWN, DEEP_ORANGE, OLIVE, SLATE, PALE_BLUE = [
    "#3f90da",
    "#ffa90e",
    "#bd1f01",  # red: only for what needs attention
    "#94a4a2",
    "#832db6",
    "#a96b59",
    "#e76300",
    "#b9ac70",
    "#717581",
    "#92dadd",
]
CYCLE = (BLUE, ORANGE, PURPLE, GREY, BROWN, PALE_BLUE, OLIVE, SLATE, DEEP_ORANGE)
INK, FAINT, GROUND = "#24292f", "#57606a", "#fafaf7"

# These keys have the same colour in every picture; others get the unused colours, in order.
COLOURS = {
    "single": GREY,
    "reference": GREY,
    "ddp_naive": ORANGE,
    "ddp_overlapped": BROWN,
    "ddp_bucketed": BLUE,
    "ddp_accumulation": "#1b4f8a",
    "horovod": "#dd33bb",
    "zero1": PALE_BLUE,
    "zero2": OLIVE,
    "fsdp": DEEP_ORANGE,
    "fsdp_grad_op": "#f4a582",
    "fsdp_recompute": "#8c510a",
    "fsdp_offload": "#c79a6b",
    "fsdp_nvme": "#5f4b32",
    "torch_ddp": PURPLE,
    "torch_fsdp": SLATE,
    "forward": BLUE,
    "backward": ORANGE,
    "weights": PURPLE,
    "optimizer": GREY,
    "network": PURPLE,
    "parameters": BLUE,
    "gradients": ORANGE,
    "optimizer_states": PURPLE,
    "activations": PALE_BLUE,
    "buffers": GREY,
    "communication": BROWN,
    "ring": BLUE,
    "halving_doubling": ORANGE,
    "tree": PURPLE,
    "naive": GREY,
    "none": GREY,
    "flat": GREY,
    "hierarchical": "#1b4f8a",
    "leaders": ORANGE,
    "fp16": PALE_BLUE,
    "bf16": BLUE,
    "quantize8": OLIVE,
    "quantize4": "#7a8b3a",
    "onebit": PURPLE,
    "topk": ORANGE,
    "randomk": BROWN,
    "dgc": DEEP_ORANGE,
    "powersgd": SLATE,
    "local_sgd": BLUE,
    "diloco": ORANGE,
    "every_step": GREY,
    "accumulation": PURPLE,
    "compressed": OLIVE,
    "alone": BROWN,
    "apart": SLATE,
}
NAMES = {
    "single": "single process",
    "ddp_naive": "DDP, naive",
    "ddp_overlapped": "DDP, overlapped",
    "ddp_bucketed": "DDP, bucketed",
    "ddp_bucketed (again)": "DDP, bucketed (again)",
    "ddp_accumulation": "DDP, 4 micro-batches",
    "horovod": "Horovod",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "fsdp": "FSDP (ZeRO-3)",
    "fsdp_grad_op": "FSDP, parameters kept",
    "fsdp_recompute": "FSDP, blocks recomputed",
    "fsdp_offload": "FSDP, offloaded",
    "fsdp_nvme": "FSDP, in files",
    "torch_ddp": "PyTorch DDP",
    "torch_fsdp": "PyTorch FSDP",
    "mlp": "MLP",
    "resnet": "ResNet",
    "gpt": "GPT",
    "optimizer_states": "optimizer states",
    "halving_doubling": "halving-doubling",
    "leaders": "by leaders",
    "none": "no compression",
    "none (again)": "no compression (again)",
    "quantize8": "QSGD, 8 bits",
    "quantize4": "QSGD, 4 bits",
    "onebit": "1 bit",
    "topk": "top 1 %",
    "randomk": "random 1 %",
    "dgc": "DGC, 1 %",
    "powersgd": "PowerSGD, rank 4",
    "local_sgd": "local SGD",
    "diloco": "DiLoCo",
    "gpipe": "GPipe",
    "one_f_one_b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "zero_bubble": "zero bubble (ZB-H1)",
    "v_shaped": "V-shaped (ZB-V)",
    "dual_pipe": "DualPipe",
    "step_ms": "step time",
    "forward_ms": "forward",
    "backward_ms": "backward",
    "optimizer_ms": "optimizer",
    "exposed_comm_ms": "exposed communication",
    "sent_bytes": "sent per rank and step",
    "peak_bytes": "peak memory per rank",
    "samples_per_s": "throughput",
    "mfu": "MFU",
    "bucket_cap_mb": "bucket size",
    "compress_ms": "compressing",
    "node_sent_bytes": "left a node per step",
}
BINARY = ("B", "KiB", "MiB", "GiB", "TiB")


def use():
    """Make the lab's look the default of matplotlib for this process."""
    matplotlib_style.use(STYLE_FILE)


@contextmanager
def look():
    """Use the lab's look inside the block only, whatever the notebook has set."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib_style.use(STYLE_FILE)
        yield


def new_figure(width=8.0, height=4.2, rows=1, columns=1, **layout):
    """Return (figure, axes), not listed by pyplot; the canvas measures text. Sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, **layout)


def name(key):
    """Return the words for a key.

    "ddp_bucketed" -> "DDP, bucketed", "all_reduce_ms" -> "all reduce".
    """
    return NAMES.get(key) or re.sub("(_ms|_bytes|_seconds|_per_s)$", "", str(key)).replace("_", " ")


def axis_label(column, unit=None):
    """Return the words and the unit of a column, for an axis: "step time (ms)".

    Every loss of the lab is a mean cross-entropy with natural logarithms, so its unit is the nat.
    """
    if column.endswith("loss"):
        unit = "cross-entropy, nats"
    unit = unit_of(column) if unit is None else unit
    return f"{name(column)} ({unit})" if unit else name(column)


def palette(keys):
    """Return {key: colour}: from COLOURS, else the next colour of CYCLE that no other key uses."""
    keys = list(dict.fromkeys(keys))
    taken = {COLOURS[key] for key in keys if key in COLOURS}
    free = [colour for colour in CYCLE if colour not in taken] or list(CYCLE)
    others = [key for key in keys if key not in COLOURS]
    given = {key: free[place % len(free)] for place, key in enumerate(others)}
    return {key: COLOURS.get(key) or given[key] for key in keys}


def in_order(frame, column):
    """Return the frame's rows sorted by `column` in COLOURS' order; other values come last."""
    places = {key: place for place, key in enumerate(COLOURS)}
    return frame.sort_values(
        column, key=lambda keys: keys.map(places).fillna(len(places)), kind="stable"
    )


def text_on(colour):
    """Return dark or white ink, whichever contrasts better on colour (WCAG relative luminance)."""
    rgb = colors.to_rgb(colour)
    red, green, blue = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb)
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return "white" if (1.05 / (luminance + 0.05)) > ((luminance + 0.05) / 0.07) else INK


def lighter(colour, amount=0.55):
    """Return `colour` mixed with the ground, (r, g, b). amount: 0: the colour, 1: the ground."""
    pairs = zip(colors.to_rgb(colour), colors.to_rgb(GROUND), strict=True)
    return tuple(c + (ground - c) * amount for c, ground in pairs)


def capital(words):
    """Return the words with a capital first letter, as the beginning of a sentence."""
    return words[0].upper() + words[1:]


def unit_of(column):
    """Return the unit that a column's name ends in: "ms", "s", "bytes", "samples/s", else ""."""
    ends = {"_per_s": f"{column.split('_')[0]}/s", "_ms": "ms", "_bytes": "bytes", "_seconds": "s"}
    return next((unit for end, unit in ends.items() if column.endswith(end)), "")


def byte_scale(largest):
    """Return (divisor, unit) in which `largest` bytes are between 1 and 1024."""
    power = 0
    while largest >= 1024 ** (power + 1) and power < len(BINARY) - 1:
        power += 1
    return 1024**power, BINARY[power]


def quantity(value, unit=""):
    """Return a value as text with 3 digits.

    (26214400, "bytes") -> "25 MiB", (12.345, "ms") -> "12.3 ms".
    """
    if unit == "bytes":
        divisor, unit = byte_scale(abs(value))
        value = value / divisor
    digits = f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:#.3g}"
    return f"{digits} {unit}".rstrip()


def name_rows(axes, places, names, **look):
    """Write names at the left of rows, without ticks and without a line of the axis."""
    axes.set_yticks(places, names, **look)
    hide_axis_of_rows(axes)


def hide_axis_of_rows(axes):
    """Hide the vertical axis and its ticks, so that only the names of the rows remain."""
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def legend_below(figure, handles, names, **look):
    """Draw a legend in one line below the axes; each name once."""
    shown = dict(zip(names, handles, strict=True))
    look = {"handlelength": 0.9, "columnspacing": 1.3, "handletextpad": 0.5} | look
    look = {"loc": "outside lower left", "ncols": len(shown)} | look
    figure.legend(list(shown.values()), list(shown), **look)


def note_above(axes, words):
    """Write a remark at the upper left, above the axes."""
    look = {"xycoords": "axes fraction", "va": "bottom", "size": 9, "color": FAINT}
    axes.annotate(words, (0, 1), **look)


def plain_digits(axis):
    """Label the major ticks of a logarithmic axis without powers of ten."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def entitle(figure, title):
    if title:
        figure.suptitle(title, x=0.01, ha="left", weight="bold", size=12)


def beside(axes, words, point, offset=(6, 0), **look):
    """Write words at an offset (typographic points) from a point of the data; return the text."""
    look = {"va": "center_baseline", "size": 9.5} | look
    return axes.annotate(words, point, xytext=offset, textcoords="offset points", **look)


def ratio_text(ratio):
    """Return measured / predicted as text with three decimals; exactly 1 is "= 1"."""
    return "= 1" if ratio == 1 else f"{ratio:.3f}"


def spread_apart(positions, gap):
    """Return positions for labels, moved as little as needed to be at least `gap` apart."""
    order = sorted(range(len(positions)), key=positions.__getitem__)
    blocks = []  # [sum of wanted starts, members]: neighbours that touch move as one
    for index in order:
        blocks.append([positions[index], [index]])
        while len(blocks) > 1 and top(blocks[-2], gap) > bottom(blocks[-1], gap):
            wanted, members = blocks.pop()
            before, earlier = blocks.pop()
            total = before * len(earlier) + wanted * len(members)
            blocks.append([total / (len(earlier) + len(members)), earlier + members])
    moved = list(positions)
    for block in blocks:
        for place, index in enumerate(block[1]):
            moved[index] = bottom(block, gap) + (place + 0.5) * gap
    return moved


def bottom(block, gap):
    return block[0] - gap * len(block[1]) / 2


def top(block, gap):
    return block[0] + gap * len(block[1]) / 2
