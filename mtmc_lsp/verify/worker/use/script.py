"""Chooses the steps of a script: those that work for the reference and whose results rounding and chance do not decide.

Runs in workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mtmc_lsp.core.dtypes import EPSILON, TOLERANCE
from mtmc_lsp.verify.error_limits import FACTORS, NOISE
from mtmc_lsp.verify.use.uses import WORDS, Use
from mtmc_lsp.verify.worker.comparison.batched_reads import computable
from mtmc_lsp.verify.worker.comparison.distances import finite, oracle_distance
from mtmc_lsp.verify.worker.use.calls import OF_CALLS
from mtmc_lsp.verify.worker.use.construction import OF_CONSTRUCTION
from mtmc_lsp.verify.worker.use.many_calls import OF_MANY_CALLS, number_of_calls, values_of_calls
from mtmc_lsp.verify.worker.use.modules import OF_MODULES
from mtmc_lsp.verify.worker.use.steps import Entry
from mtmc_lsp.verify.worker.use.subject import Constructor, Subject, changed_number, is_number, repeated_to

STEPS = {**OF_CALLS, **OF_MODULES, **OF_CONSTRUCTION, **OF_MANY_CALLS}
DRAWS, RANDOM_DRAWS = 2, 8
"""Calls of the reference on slightly changed inputs; more if it draws random numbers, which may leave a small result as it is."""
PLAIN = ("keywords", "positional", "inference_mode")
"""Steps with one call as in the step of many calls."""
ROUNDINGS = 1.0
"""The largest relative change of these inputs, in units of their precision."""
MOST_SUBMODULES = 4
"""Submodules that get a hook: the first ones that are called."""
OF_PARAMETERS = frozenset(
    "load_state_dict replaced in_place interior special_values toggled trained instances deepcopy pickle dtype frozen".split()
)
"""Steps about modules that have parameters."""
OF_SEPARATE_PARAMETERS = ("load_state_dict", "replaced")
"""Steps that would separate parameters which are one under two names."""
OF_ALL_MODULES = ("call", "pre_hook", "hook", "train", "eval", "names", "initial", "many_instances")
OF_EACH_NUMBER = tuple(
    "constructor size attribute constructor_default default number submodule_hook buffers many_calls".split()
)
"""Steps that are listed by what the reference has."""
LEAST_SIZE = 8
"""Smaller whole numbers of constructors are often no sizes, but options, as a kernel size is."""
LARGEST_OPTION, MOST_OPTIONS = 64, 4
"""Limits for whole numbers of constructors that are no sizes: their values, and how many of them are changed."""
MOST_SIZED = 1 << 18
"""Limit for the elements of a module that is constructed for other sizes."""
MOST_ATTRIBUTES = 4
CALLED = ("call", "pre_hook", "hook", "submodule_hook")
"""Steps about ``instance(...)``, which calls ``forward`` and no other method."""


@dataclass(frozen=True)
class Expectation:
    """What the reference gives in one step."""

    use: Use
    entries: list[Entry]
    sensitivity: list[float]
    """Of each entry: how far rounding moves it, but at least what gives the dtype's tolerance."""


def expectations(subject: Subject, *, least: float = 0.0) -> tuple[list[Expectation], Subject]:
    """The steps of the script with the reference's results, and the subject with the tensors of other constructor arguments.

    Args:
        least: the sensitivity of a result if float32 products run in TF32.
    """
    uses = list(possible_uses(subject))
    built = {use.key: _state(subject, use) for use in uses if use.kind in ("constructor", "size")}
    # A module without tensors has an empty state.
    states = {key: state for key, state in built.items() if state is not None}
    calls = int(next((use.value for use in uses if use.kind == "many_calls"), 0))
    rows = values_of_calls(subject.inputs, calls, subject.seed) if calls else {}
    subject = replace(subject, states=states, rows=rows)
    is_random = subject.capture.uses_random
    rounded = [_rounded(subject, draw) for draw in range(RANDOM_DRAWS if is_random else DRAWS)]
    expected, varies = [], False
    for use in uses:
        entries = _entries(subject, use)
        others = rounded[:DRAWS] if use.kind == "many_calls" else rounded
        draws = [_entries(other, use) for other in others] if entries is not None else []
        if entries is not None and all(draw is not None and len(draw) == len(entries) for draw in draws):
            sensitivity = [
                _sensitivity(entry, [draw[i] for draw in draws if draw is not None], least)
                for i, entry in enumerate(entries)
            ]
            proves = [
                limit <= NOISE or limit == _least(entry.value, least)
                for entry, limit in zip(entries, sensitivity, strict=True)
            ]
            varies |= is_random and use.kind in PLAIN and not all(proves)
            if use.kind == "many_calls" and varies:
                # Other random numbers leave the results of some calls as they are, by chance.
                proves = [not isinstance(entry.value, torch.Tensor) for entry in entries]
            told = [
                entry if is_told else replace(entry, value=None) for entry, is_told in zip(entries, proves, strict=True)
            ]
            if any(entry.value is not None for entry in told):
                expected.append(Expectation(use, told, sensitivity))
    return expected, subject


def possible_uses(subject: Subject) -> Iterator[Use]:
    """All steps that may work, in the order of :data:`WORDS`."""
    listed = {kind: list(_listed(subject, kind)) for kind in OF_EACH_NUMBER}
    for kind in WORDS:
        if kind in listed:
            yield from listed[kind]
        elif kind in OF_PARAMETERS:
            if subject.tensors.parameters and not (subject.tensors.is_tied and kind in OF_SEPARATE_PARAMETERS):
                yield Use(kind)
        elif kind in OF_ALL_MODULES:
            if subject.constructor is not None and (subject.is_forward or kind not in CALLED):
                yield Use(kind)
        else:
            yield Use(kind)


def _listed(subject: Subject, kind: str) -> Iterator[Use]:
    constructor = subject.constructor
    if kind == "buffers" and subject.tensors.buffers:
        yield Use(kind)
    if kind == "many_calls":
        with contextlib.suppress(Exception):  # it cannot be called on this case
            yield Use(kind, value=number_of_calls(subject))
    if kind == "submodule_hook" and subject.is_forward:
        for name in _called_submodules(subject):
            yield Use(kind, name)
    if kind in ("number", "default"):
        specified = {spec.name for spec in subject.capture.workload.arguments}
        parameters = subject.signature(subject.new()).parameters
        for argument in subject.capture.arguments:
            is_default = argument.name not in specified and argument.name in parameters
            if argument.container is None and argument.input is None and is_number(argument.constant):
                if kind == "number":
                    yield Use(kind, argument.name, changed_number(argument.constant))
                elif is_default and is_number(parameters[argument.name].default):
                    yield Use(kind, argument.name)
    if constructor is not None and kind in ("constructor", "size", "constructor_default", "attribute"):
        yield from _of_constructor(subject, constructor, kind)


def _of_constructor(subject: Subject, constructor: Constructor, kind: str) -> Iterator[Use]:
    """Steps that change one number: an argument of the constructor, or an attribute of the module."""
    if kind == "attribute":
        kept = [(name, value) for name, value in vars(subject.new()).items() if isinstance(value, (bool, float))]
        public = [(name, value) for name, value in kept if not name.startswith("_") and name != "training"]
        for name, value in public[:MOST_ATTRIBUTES]:
            yield Use(kind, name, changed_number(value), before=value)
        return
    parameters = constructor.signature().parameters
    passed = dict([*zip(parameters, constructor.positional, strict=False), *constructor.named.items()])
    defaults = {name: p.default for name, p in parameters.items() if name not in passed}
    values = {**passed, **defaults}
    options = [name for name, value in values.items() if _is_option(subject, value)][:MOST_OPTIONS]
    for position, (name, value) in enumerate(values.items()):
        at = position if position < len(constructor.positional) else -1
        if kind == "size" and _is_size(subject, value):
            for other in (value + value // 2, value // 2):
                yield Use(kind, name, other, at, value)
        if isinstance(value, (bool, float)) and kind == "constructor":
            yield Use(kind, name, changed_number(value), at, value)
        if kind == "constructor" and name in options:
            # One more, or twice as many where a length must be a multiple: the reference may raise an exception for either.
            yield from (Use(kind, name, other, at, value) for other in sorted({value + 1, 2 * value}))
        if is_number(value) and kind == "constructor_default" and name in defaults:
            yield Use(kind, name)


def _is_size(subject: Subject, value: Any) -> bool:
    """Whether a number of the constructor is the length of a dimension of the module's tensors, and these are small."""
    tensors = subject.tensors.state.values()
    if not isinstance(value, int) or isinstance(value, bool) or value < LEAST_SIZE:
        return False
    return sum(tensor.numel() for tensor in tensors) <= MOST_SIZED and any(value in tensor.shape for tensor in tensors)


def _is_option(subject: Subject, value: Any) -> bool:
    """Whether a number of the constructor is a whole number that is no size, as of heads, groups or a kernel."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return is_whole and 0 < value <= LARGEST_OPTION and not _is_size(subject, value)


def _called_submodules(subject: Subject) -> list[str]:
    if subject.constructor is None:
        return []
    instance, called = subject.new(), dict[str, None]()

    def note(name: str) -> Any:
        return lambda *_: called.update({name: None})

    for name, part in instance.named_modules():
        if name:
            part.register_forward_hook(note(name))
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            subject.call(instance)
    except Exception:  # the steps that call it are left out, too
        return []
    return list(called)[:MOST_SUBMODULES]


def _state(subject: Subject, use: Use) -> dict[str, torch.Tensor] | None:
    """The tensors of the module with another constructor argument: those of the case, or their values in the other shapes."""
    assert subject.constructor is not None
    try:
        torch.manual_seed(0)
        held = subject.held(subject.constructor.with_argument(use)())
    except Exception:  # the constructor rejects the value
        return None
    usual = subject.tensors.state
    return {
        name: _in_shape(usual[name], value.shape) if name in usual else value.detach().clone()
        for name, value in held.items()
    }


def _in_shape(value: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    for dim, length in enumerate(shape if value.dim() == len(shape) else ()):
        if value.shape[dim] not in (0, length):
            value = repeated_to(value, dim, length)
    return value


def _entries(subject: Subject, use: Use) -> list[Entry] | None:
    """The results of a step; ``None`` if it does not work."""
    try:
        return STEPS[use.kind](subject, use)
    except Exception:  # whatever the user's code raises
        return None


def _rounded(subject: Subject, draw: int) -> Subject:
    """The same with other random numbers, and with values that differ by a few roundings."""
    tensors = replace(subject.tensors, state=_perturbed(subject.tensors.state, draw))
    states = {key: _perturbed(state, draw) for key, state in subject.states.items()}
    inputs, rows = _perturbed(subject.inputs, draw), _perturbed(subject.rows, draw)
    return replace(subject, seed=subject.seed + 1 + draw, inputs=inputs, tensors=tensors, states=states, rows=rows)


def _perturbed(tensors: Mapping[str, torch.Tensor], draw: int) -> dict[str, torch.Tensor]:
    changed = {}
    for number, (name, value) in enumerate(tensors.items()):
        dtype = str(value.dtype).removeprefix("torch.")
        if dtype not in EPSILON:
            changed[name] = value
            continue
        generator = torch.Generator(value.device).manual_seed(1000 * draw + number)
        noise = torch.rand(value.shape, generator=generator, device=value.device, dtype=torch.float64).sub_(0.5)
        factor = noise.mul_(2 * ROUNDINGS * EPSILON[dtype]).add_(1.0)
        perturbed = (computable(value).double() * factor).to(value.dtype)
        changed[name] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(
            perturbed
        )
    return changed


def _sensitivity(entry: Entry, draws: list[Entry], least: float) -> float:
    """How far rounding and chance move a result: infinite if it proves nothing."""
    value = entry.value
    if not isinstance(value, torch.Tensor):
        return 0.0 if all(draw.value == value for draw in draws) else float("inf")
    if not all(isinstance(d.value, torch.Tensor) and d.value.shape == value.shape for d in draws):
        return float("inf")
    if not value.is_floating_point():
        return 0.0 if all(torch.equal(draw.value, value) for draw in draws) else float("inf")
    if not bool(finite(value).all()):
        return float("inf")
    if not bool((computable(value) != 0).any()) and any(bool((computable(draw.value) != 0).any()) for draw in draws):
        return float("inf")
    measured = max((float(oracle_distance(draw.value, value, value)) for draw in draws), default=0.0)
    return max(measured, _least(value, least))


def _least(value: Any, least: float) -> float:
    """The sensitivity that permits errors up to the dtype's tolerance."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return 0.0
    return max(TOLERANCE[str(value.dtype).removeprefix("torch.")] / FACTORS["budget"], least)
