"""The sizes that an export leaves free, and the units in which they are free. Runs in workers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
from torch.export import Dim

from mtmc_lsp.capture.worker.passes.non_polynomial_sizes import CONSTANT, Cause, Dimension

LEAST_UNITS = 2
"""torch makes sizes of 0 and 1 constant, so a size gets only units that it has at least this many of."""


class FreeSizes:
    """The sizes of the inputs of an export: free, free in units, or constant."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], names: Sequence[Sequence[str]], *, windows_vary: bool = True
    ) -> None:
        """All sizes are free at first.

        Args:
            tensors: the inputs.
            names: the workload's names of their dimensions; empty for a dimension that is a number.
            windows_vary: whether sizes in divisions get units, and lengths of windows that do not pad their input are free.
        """
        self._shapes = [tuple(tensor.shape) for tensor in tensors]
        self._names = names
        self.windows_vary = windows_vary
        self.fixed: set[Dimension] = set()
        self.units: dict[Dimension, int] = {}
        """Sizes that are free only as multiples of a number plus a constant, and these numbers."""
        self.causes: dict[Dimension, int] = {}
        """The line that restricts a size; 0 if unknown."""

    @property
    def count(self) -> int:
        """The number of inputs."""
        return len(self._shapes)

    def divide(self, causes: Iterable[tuple[Dimension, Cause]]) -> None:
        """Multiply the units of sizes. A size becomes constant if it may have no unit, or if too few units are left."""
        joint: dict[frozenset[Dimension], Cause] = {}
        for dimension, cause in causes:
            # A size that several tensors have is divided once.
            same = frozenset(self.with_same_name([dimension]))
            known = joint.setdefault(same, cause)
            joint[same] = known._replace(factor=math.lcm(known.factor, cause.factor))
        for same, cause in joint.items():
            self._divide(same, cause)

    def _divide(self, same: Set[Dimension], cause: Cause) -> None:
        dimension = min(same)
        unit = self.units.get(dimension, 1) * cause.factor
        self.causes |= dict.fromkeys(same, cause.line)
        if cause.factor != CONSTANT and all(self._may_divide(item, unit, cause) for item in same):
            self.units |= dict.fromkeys(same, unit)
        else:
            self.fix(same)

    def _may_divide(self, dimension: Dimension, unit: int, cause: Cause) -> bool:
        rank = len(self._shapes[dimension[0]])
        # The only dimension of a tensor is a batch, unless another tensor has it as its innermost one.
        is_outer = dimension[1] < rank - 1 or rank == 1
        has_units = self.length(dimension) // unit >= LEAST_UNITS
        return self.windows_vary and has_units and (is_outer or cause.may_divide_innermost(rank))

    def fix(self, dimensions: Iterable[Dimension]) -> None:
        """Make sizes constant."""
        self.fixed |= set(dimensions)
        self.units = {dimension: unit for dimension, unit in self.units.items() if dimension not in self.fixed}

    def fix_all(self) -> None:
        """Make all sizes constant."""
        self.fix((i, d) for i, shape in enumerate(self._shapes) for d in range(len(shape)))

    def dim(self, dimension: Dimension) -> Any:
        """The size of a dimension for ``torch.export``."""
        unit = self.units.get(dimension)
        if dimension in self.fixed or unit is None:
            return Dim.STATIC if dimension in self.fixed else Dim.AUTO
        name = self.name(dimension)
        count = Dim(f"units_{name if name.isidentifier() else '_'.join(map(str, dimension))}")
        rest = self.length(dimension) % unit
        return unit * count + rest if rest else unit * count

    def length(self, dimension: Dimension) -> int:
        """The size in the workload."""
        return int(self._shapes[dimension[0]][dimension[1]])

    def name(self, dimension: Dimension) -> str:
        """The workload's name of a dimension; empty if there is none."""
        names = self._names[dimension[0]]
        return names[dimension[1]] if dimension[1] < len(names) else ""

    def with_same_name(self, dimensions: Iterable[Dimension]) -> set[Dimension]:
        """These dimensions and all with the same name in the workload. They are equal, so they change together."""
        result = set(dimensions)
        used = {self.name(dimension) for dimension in result} - {""}
        return result | {(i, d) for i, names in enumerate(self._names) for d, name in enumerate(names) if name in used}

    def same_names(self) -> list[list[Dimension]]:
        """The dimensions of each name that several have in the workload, except constants."""
        found: dict[str, list[Dimension]] = {}
        for i, names in enumerate(self._names):
            for d, name in enumerate(names):
                if name and (i, d) not in self.fixed:
                    found.setdefault(name, []).append((i, d))
        return [dimensions for dimensions in found.values() if len(dimensions) > 1]
