"""Families of programs: rules that write one program each time, with other parts, sizes and style."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Union

from mtmc_lsp.programs.draft import Draft, Tensor

Outputs = Union[Tensor, tuple[Tensor, ...]]
Rule = Callable[[Draft], Outputs]


@dataclass(frozen=True)
class Family:
    """A rule, and the form of its programs."""

    name: str
    rule: Rule
    form: str
    """``function``, ``module``, or empty for both."""


FAMILIES: dict[str, Family] = {}
"""By name, filled when the modules of ``families`` are imported."""


def family(form: str = "") -> Callable[[Rule], Rule]:
    """Register a function as the rule of the family that has its name."""

    def register(rule: Rule) -> Rule:
        name = rule.__name__
        FAMILIES[name] = Family(name, rule, form)
        return rule

    return register
