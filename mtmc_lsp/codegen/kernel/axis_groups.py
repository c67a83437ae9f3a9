"""Loop variables of a tile: fused atomic axes, and the masks that bound them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mtmc_lsp.codegen.module.naming import Names
from mtmc_lsp.core.sizes import Size, product
from mtmc_lsp.ir.axes import Axis
from mtmc_lsp.ir.primitives import ONE


@dataclass(frozen=True)
class Group:
    """Atomic axes that share one loop variable, and the vector or scalar that holds it."""

    axes: tuple[Axis, ...]
    """Outermost first."""
    name: str
    rows: bool = False
    cols: bool = False
    derived_from: str = ""
    """The flat variable from which this one is computed by division and modulo; empty if it is not derived."""
    below: Size = ONE
    """Product of the sizes of the groups inside (faster than) this one."""
    outermost: bool = True


@dataclass(frozen=True)
class Mask:
    """A condition under which a load may happen."""

    text: str
    rows: bool
    cols: bool


def split_variable(flat: Group, groups: Sequence[Sequence[Axis]], names: Names, first: int) -> list[Group]:
    """Split a flat variable into one variable per group of axes. With a single group, the flat variable is used directly."""
    if len(groups) == 1:
        return [flat]
    result: list[Group] = []
    below = ONE
    for number, axes in reversed(list(enumerate(groups))):
        size = product([axis.size for axis in axes])
        name = names.unique(f"{str(size).lower()}_index" if size.is_symbol else f"i{first + number}")
        result.append(Group(tuple(axes), name, flat.rows, flat.cols, flat.name, below, number == 0))
        below = below * size
    return list(reversed(result))


def walks_as_one(group: Group, coefficients: Mapping[Axis, Size]) -> bool:
    """Whether an access walks the group's axes like a single dense axis."""
    expected = coefficients.get(group.axes[-1])
    if expected is None:
        return False
    for axis in reversed(group.axes):
        if coefficients.get(axis) != expected:
            return False
        expected = expected * axis.size
    return True
