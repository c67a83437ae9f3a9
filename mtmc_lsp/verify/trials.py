"""The parameter sizes at which a foreign candidate can run.

On a GPU these are the candidate's. Triton's interpreter cannot run large parameters, so the constructor's arguments are
reduced if every parameter size comes from one of them. If that fails, a few cases run at the full size.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mtmc_lsp.core.graph import InputKind
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.cases import least_size_that_runs
from mtmc_lsp.verify.sizes.case_sizes import is_interpretable, reduced_sizes

LEAST = 16
"""Lower limit for reduced parameter sizes."""


@dataclass(frozen=True)
class Trial:
    """One way to run a reference and a candidate."""

    capture: Capture
    init: str = ""
    """Text of the constructor's arguments, as in :class:`~mtmc_lsp.verify.messages.ConstructorAnswer`; empty for those of the
    user's file."""
    is_full: bool = True
    """Whether parameters have their full sizes. A failure at reduced sizes proves nothing."""
    few: bool = False
    """Whether only a few cases run."""
    note: str = ""
    """What was reduced, for the user."""


def trials(capture: Capture, init: str, *, interpreted: bool) -> list[Trial]:
    """The ways to run a foreign candidate, to be tried in order; empty if the interpreter can run none.

    Args:
        init: text of the result of ``get_init_inputs``.
        interpreted: whether Triton's interpreter runs the kernels.
    """
    fixed = _with_fixed_parameters(capture)
    if not interpreted or is_interpretable(fixed):
        return [full_trial(capture, init)]
    possible = []
    smaller = _smaller(capture, init)
    if smaller is not None and is_interpretable(smaller.capture):
        possible.append(smaller)
    if least_size_that_runs(fixed):
        note = "the parameters are large for Triton's interpreter, so only a few small cases were run"
        possible.append(Trial(fixed, init, few=True, note=note))
    return possible


def full_trial(capture: Capture, init: str) -> Trial:
    """The reference and a candidate with the user's parameters; see :func:`trials`."""
    return Trial(_with_fixed_parameters(capture), init)


def _parameter_sizes(capture: Capture) -> set[str]:
    """Names of the sizes of parameters and buffers."""
    inputs = [item for item in capture.graph.inputs if item.kind is not InputKind.ARGUMENT]
    return {name for item in inputs for size in item.type.shape for name in size.symbols()}


def _with_fixed_parameters(capture: Capture) -> Capture:
    fixed = _parameter_sizes(capture)
    return replace(capture, variable_sizes=tuple(name for name in capture.variable_sizes if name not in fixed))


def _smaller(capture: Capture, init: str) -> Trial | None:
    """A trial with smaller constructor arguments; ``None`` if no parameter size comes from one."""
    positional, named = ast.literal_eval(init)
    constants = [spec.constant for spec in capture.workload.init_arguments]
    numbers = set(_numbers([positional, named, constants]))
    sizes = dict(capture.graph.sizes)
    # A number that is also a literal in a shape cannot change: the argument may determine that dimension too.
    literal = {size.constant for item in capture.graph.inputs for size in item.type.shape if size.is_constant}
    chosen = {
        name for name in _parameter_sizes(capture) & set(capture.variable_sizes) if sizes[name] in numbers - literal
    }
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
    """Parameter sizes that the interpreter can run. Sizes with the same number stay equal."""
    sizes = dict(capture.graph.sizes)
    # Sizes of arguments are reduced first, since the parameters need not change for them.
    wanted = reduced_sizes(capture)
    groups: dict[int, set[str]] = {}
    for name in chosen:
        groups.setdefault(sizes[name], set()).add(name)
    for full, names in groups.items():
        goal = min(wanted[name] for name in names)
        # Only even numbers are halved: a candidate may rely on sizes that its tiles divide.
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
    """The value with some numbers replaced."""
    if isinstance(value, Mapping):
        return {name: _with(item, values) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with(item, values) for item in value)
    return values.get(value, value) if isinstance(value, int) and not isinstance(value, bool) else value
