"""Work of each rank in each round of a ring: a round lasts as long as its busiest rank.

in order                      in zig-zag
         rank 0   1             rank 0   1
round 1      10  10           round 1  9   9         the darker, the more tiles;
round 2       0  16           round 2  8   8         framed: the rank that others wait for
busiest: 26 tiles             busiest: 17 tiles
"""

from labkit.show import style


def ring_load(frame, title=None):
    """Return a Figure: a grid per `order`, a cell per `rank` and `round` with its `tiles`.

    Below a grid: the sum over rounds of the busiest rank's tiles.
    """
    orders = list(dict.fromkeys(frame["order"]))
    most = max(frame["tiles"].max(), 1)
    with style.look():
        ranks = frame["rank"].nunique()
        count = frame["round"].nunique()
        height = 1.7 + 0.45 * count
        figure, grids = style.new_figure(8.0, height, columns=len(orders), squeeze=False)
        for order, axes in zip(orders, grids[0], strict=True):
            tiles = frame[frame["order"] == order].pivot(
                index="round", columns="rank", values="tiles"
            )
            for row, (_, of_round) in enumerate(tiles.iterrows()):
                for column, number in enumerate(of_round):
                    held_up = number == of_round.max() > of_round.min()
                    draw_cell(axes, column, row, number, most, held_up)
            axes.set_xlim(-0.55, ranks - 0.45)
            axes.set_ylim(count - 0.45, -0.55)
            axes.set_xticks(range(ranks), [f"rank {rank}" for rank in tiles.columns])
            axes.set_yticks(range(count), [f"round {number + 1}" for number in tiles.index])
            axes.tick_params(length=0)
            for side in axes.spines.values():
                side.set_visible(False)
            axes.set_title(order, loc="left", size=10.5, weight="bold")
            axes.set_xlabel(f"busiest, over all rounds: {tiles.max(axis=1).sum():,} tiles")
        style.entitle(figure, title)
    return figure


def draw_cell(axes, column, row, number, most, framed):
    colour = style.lighter(style.BLUE, 1 - number / most)
    box = {"color": colour, "linewidth": 0}
    axes.barh(row, 0.92, 0.9, left=column - 0.46, **box)
    if framed:
        edge = {"fill": False, "edgecolor": style.RED, "linewidth": 1.6}
        axes.barh(row, 0.92, 0.9, left=column - 0.46, **edge)
    words = {"ha": "center", "va": "center", "size": 9.5, "color": style.text_on(colour)}
    axes.text(column, row, f"{number:,}", **words)
