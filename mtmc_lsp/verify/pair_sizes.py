"""At which sizes a pair can be run: a candidate was made for the parameters that its constructor's arguments give it.

On a GPU that is no question. Triton's interpreter cannot run large ones, so the arguments are made smaller where all of them
that a size of a parameter comes from can be; where that fails, few cases run at the full size.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mtmc_lsp.core.graph import InputKind
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.cases import is_interpretable, reduced_sizes
from mtmc_lsp.verify.pair_cases import least_that_runs

LEAST = 16
"""Down to which size parameters are made smaller."""


@dataclass(frozen=True)
class Trial:
    """One way to run a pair."""

    capture: Capture
    init: str
    """The constructor's arguments, as text: a list of those by position, and those by name."""
    is_full: bool = True
    """Whether parameters have their own sizes: what fails only otherwise proves nothing."""
    few: bool = False
    """Whether only a few cases are run."""
    note: str = ""
    """What was done, for people."""


def trials(capture: Capture, init: str, *, interpreted: bool) -> list[Trial]:
    """The ways to run a pair, to be tried until one settles it; none where nothing can be run.

    Args:
        capture: of the reference.
        init: what ``get_init_inputs`` gives, as text.
        interpreted: whether Triton's interpreter runs the kernels.
    """
    fixed = _with_fixed_parameters(capture)
    if not interpreted or is_interpretable(fixed):
        return [Trial(fixed, init)]
    found = []
    smaller = _smaller(capture, init)
    if smaller is not None and is_interpretable(smaller.capture):
        found.append(smaller)
    if least_that_runs(fixed):
        note = "the parameters are large for Triton's interpreter, so only a few small cases were run"
        found.append(Trial(fixed, init, few=True, note=note))
    return found


def _held(capture: Capture) -> set[str]:
    """Sizes of parameters and buffers."""
    inputs = [item for item in capture.graph.inputs if item.kind is not InputKind.ARGUMENT]
    return {name for item in inputs for size in item.type.shape for name in size.symbols()}


def _with_fixed_parameters(capture: Capture) -> Capture:
    held = _held(capture)
    return replace(capture, variable_sizes=tuple(name for name in capture.variable_sizes if name not in held))


def _smaller(capture: Capture, init: str) -> Trial | None:
    """The same pair with smaller constructor arguments; ``None`` where no size of a parameter comes from one."""
    positional, named = ast.literal_eval(init)
    given = {spec.name: spec.constant for spec in capture.workload.init_arguments}
    numbers = set(_numbers([positional, named, list(given.values())]))
    sizes = dict(capture.graph.sizes)
    # A number that is also written as such in a shape cannot be changed: the argument may mean that one too.
    written = {size.constant for item in capture.graph.inputs for size in item.type.shape if size.is_constant}
    chosen = {name for name in _held(capture) & set(capture.variable_sizes) if sizes[name] in numbers - written}
    if not chosen:
        return None
    reduced = _reduced(capture, chosen)
    values = {sizes[name]: reduced[name] for name in chosen}
    graph = replace(capture.graph, sizes={**sizes, **{name: reduced[name] for name in chosen}})
    arguments = tuple(replace(spec, constant=_with(spec.constant, values)) for spec in capture.workload.init_arguments)
    workload = replace(capture.workload, init_arguments=arguments)
    shown = ", ".join(f"{old} became {new}" for old, new in sorted(values.items()))
    return Trial(
        _with_fixed_parameters(replace(capture, graph=graph, workload=workload)),
        repr([_with(positional, values), _with(named, values)]),
        is_full=False,
        note=f"arguments of the constructor were made smaller for Triton's interpreter: {shown}",
    )


def _reduced(capture: Capture, chosen: set[str]) -> dict[str, int]:
    """Parameter sizes that the interpreter can run; those that come from one number stay equal."""
    sizes = dict(capture.graph.sizes)
    # Arguments may vary too, and are then made smaller first: they cost nothing of what is held.
    wanted = reduced_sizes(capture)
    groups: dict[int, set[str]] = {}
    for name in chosen:
        groups.setdefault(sizes[name], set()).add(name)
    for full, names in groups.items():
        goal = min(wanted[name] for name in names)
        # SplitOperand of an even number keep what tiles divide; a candidate may rely on that.
        value = full
        while value > goal and value % 2 == 0 and value // 2 >= LEAST:
            value //= 2
        sizes.update(dict.fromkeys(names, value))
    return sizes


def _numbers(value: object) -> list[int]:
    if isinstance(value, Mapping):
        return _numbers(list(value.values()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [number for item in value for number in _numbers(item)]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []


def _with(value: object, values: Mapping[int, int]) -> object:
    """The value with other numbers in place of some."""
    if isinstance(value, Mapping):
        return {name: _with(item, values) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with(item, values) for item in value)
    return values.get(value, value) if isinstance(value, int) and not isinstance(value, bool) else value
