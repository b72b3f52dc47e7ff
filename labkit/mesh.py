"""A mesh: ranks as a grid with named axes, and one process group for every line along an axis.

    Mesh({"data": 2, "model": 3})              model 0  model 1  model 2
                                       data 0     0        1       [2]
                                       data 1     3        4        5

    rank 2: group("model") is 0 1 2, group("data") is 2 5

The last axis varies fastest (row-major). Ranks of one machine are consecutive, so they lie along
the last axis: choose the axis with most traffic for it. A rank is a member of one group per axis; n
ranks with axes a x b x ... make n/a + n/b + ... groups.

A mesh is passed explicitly as an argument; there is no current mesh.
Shoeybi et al., Megatron-LM, 2019; Narayanan et al., Efficient Large-Scale Language Model Training
on GPU Clusters Using Megatron-LM, SC 2021, section 3.
"""

from dataclasses import dataclass, field
from itertools import product
from math import prod
from types import MappingProxyType

import torch
import torch.distributed as dist


@dataclass(frozen=True, eq=False)
class Mesh:
    """Ranks as a grid. axes: name -> size, in order; the sizes' product must be the world size.

    backend: of its groups; None: that of all ranks.
    Collective: every rank must build the same meshes in the same order, for their process groups.
    Raises ValueError for sizes that are not positive integers or do not multiply to the world size.
    """

    axes: dict[str, int]
    backend: str | None = None
    _lines: dict = field(
        init=False, repr=False
    )  # axes -> (my process group, ranks in it, in order)

    def __post_init__(self):
        world_size = dist.get_world_size()
        axes = dict(self.axes)
        if not axes or any(type(size) is not int or size < 1 for size in axes.values()):
            raise ValueError(f"a mesh needs named axes with sizes of 1 or more, not {axes}")
        if prod(axes.values()) != world_size:
            shape = " x ".join(f"{name} {size}" for name, size in axes.items())
            raise ValueError(
                f"mesh {shape} needs {prod(axes.values())} ranks, "
                f"but the world size is {world_size}"
            )
        object.__setattr__(self, "axes", MappingProxyType(axes))
        object.__setattr__(self, "_lines", {})
        for axis in axes:
            self._line((axis,))

    def _line(self, names):
        """(group, global ranks in it) along these axes; made by all ranks together."""
        for name in names:
            if name not in self.axes:
                raise ValueError(f"this mesh has no axis {name!r}, only {', '.join(self.axes)}")
        if names not in self._lines:
            grid = torch.arange(dist.get_world_size()).reshape(*self.axes.values())
            dims = [list(self.axes).index(name) for name in names]
            size = prod(self.axes[name] for name in names)
            for line in grid.movedim(dims, tuple(range(-len(dims), 0))).reshape(-1, size).tolist():
                # Every rank takes part in making every group; the whole world has one already.
                shared = size == grid.numel() and self.backend is None
                group = dist.group.WORLD if shared else dist.new_group(line, backend=self.backend)
                if dist.get_rank() in line:
                    self._lines[names] = group, tuple(line)
                    # else a rank that exits early closes connections that others are still opening
                    if dist.get_backend(group) == "gloo" and not shared:
                        dist.barrier(group)
        return self._lines[names]

    def group(self, *axes):
        """The process group of the ranks that differ from this one only along these axes.

        Collective where there are several axes, the first time.
        """
        return self._line(axes)[0]

    def ranks(self, *axes):
        """The global ranks of that group, in order along the axes."""
        return self._line(axes)[1]

    def rank(self, *axes):
        """This rank's position along the axes, from 0; equal to its rank within the group."""
        return self._line(axes)[1].index(dist.get_rank())

    def size(self, *axes):
        """The number of ranks along the axes."""
        return len(self._line(axes)[1])

    def axis_of(self, group_name):
        """Return the axis of the group with this name: "tp", or "dp x cp" for several axes.

        None if the group does not belong to this mesh.
        """
        for axes, (group, _) in self._lines.items():
            if group.group_name == group_name:
                return " x ".join(axes)
        return None

    def __str__(self):
        """The grid, this rank in brackets; a sheet per position along all but the last two axes."""
        *outer, rows, columns = [("", 1)] * (2 - len(self.axes)) + list(self.axes.items())
        grid = torch.arange(prod(self.axes.values())).reshape(-1, rows[1], columns[1]).tolist()
        sheets = product(*([f"{name} {i}" for i in range(size)] for name, size in outer))
        left = len(f"{rows[0]} {rows[1] - 1}") if rows[0] else 0
        width = len(f"{columns[0]} {columns[1] - 1}") + 2
        lines = []
        for title, sheet in zip(sheets, grid, strict=True):
            lines += [", ".join(title) + ":"] if title else []
            lines.append(
                " " * left + "".join(f"{columns[0]} {i}".center(width) for i in range(columns[1]))
            )
            for i, row in enumerate(sheet):
                label = f"{rows[0]} {i}" if rows[0] else ""
                cells = (f"[{rank}]" if rank == dist.get_rank() else str(rank) for rank in row)
                lines.append(label.ljust(left) + "".join(cell.center(width) for cell in cells))
        return "\n".join(line.rstrip() for line in lines)
