"""Python state that a candidate keeps between calls: module globals, closures, defaults, attributes. Runs in workers.

A candidate may count its calls and be wrong in a later one than any verification waits for. So the counts that calls change are
moved forward, as many calls would, and the results must stay the same.
"""

from __future__ import annotations

import io
import itertools
import random
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from time import process_time
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch

MOST_ELEMENTS, MOST_DEPTH = 64, 3
"""Limits for what is read of a container, and of containers inside containers."""
SIMPLE = (bool, int, float, complex, str, bytes, type(None))
MANY_CALLS, MANY_ENTRIES = 1_000_000, 10_000
"""How far counts, iterators, and the lengths of lists, are moved forward."""
ITERATOR_SECONDS = 0.3
"""Processor time after which an iterator is far enough."""
_observations = itertools.count()


class _Place(NamedTuple):
    """Where a candidate can keep a value."""

    name: str
    value: Any
    set: Callable[[Any], None]


def kept_state(module: ModuleType, instance: torch.nn.Module | None) -> dict[str, Any]:
    """The values of the names that a candidate can keep, as plain data that can be compared."""
    return {place.name: _plain(place.value, MOST_DEPTH) for place in _places(module, instance)}


def move_forward(module: ModuleType, instance: torch.nn.Module | None, names: Collection[str]) -> None:
    """Change the counts of these names as many further calls would."""
    for place in [*_places(module, instance)]:
        if place.name in names:
            moved = _moved(place.value)
            if moved is not place.value:
                place.set(moved)


def lengthen(module: ModuleType, names: Collection[str]) -> None:
    """Add entries to the containers of these names, as calls with many other shapes would."""
    for place in [*_places(module, None)]:
        if place.name in names and isinstance(place.value, (dict, set)):
            _lengthen(place.value)
        elif place.name in names and isinstance(place.value, (list, deque)):
            place.value.extend(list(place.value)[-1:] * MANY_ENTRIES)


def _moved(value: Any) -> Any:
    """A count after many calls; lists and dictionaries are changed in place."""
    if type(value) in (int, float) or _is_count(value):
        return value + MANY_CALLS
    if isinstance(value, itertools.count):
        return itertools.count(next(value) + MANY_CALLS)
    if _is_iterator(value):
        _advance(value)
    elif _is_seeded(value):
        _make_extreme(value)
    elif isinstance(value, (list, deque)):
        for i, held in enumerate(value):
            value[i] = _moved(held)
        value.extend(list(value)[-1:] * MANY_ENTRIES)
    elif isinstance(value, (dict, set)):
        if isinstance(value, dict):
            value.update({key: _moved(held) for key, held in value.items()})
        _lengthen(value)
    elif isinstance(value, tuple):
        for held in value:
            _moved(held)
    return value


def _lengthen(value: dict[Any, Any] | set[Any]) -> None:
    """Add entries with other keys, if its keys are whole numbers or tuples of them, as addresses and shapes are."""
    last = next(iter(reversed([*value])), None)
    more = range(MANY_CALLS, MANY_CALLS + MANY_ENTRIES)
    keys: list[Any]
    if type(last) is int:
        keys = [last + number for number in more]
    elif isinstance(last, tuple) and last and type(last[-1]) is int:
        keys = [(*last[:-1], last[-1] + number) for number in more]
    else:
        return
    if isinstance(value, dict):
        value.update(dict.fromkeys(keys, value[last]))
    else:
        value.update(keys)


def _is_iterator(value: Any) -> bool:
    """Whether a value is an iterator, as a generator, that reads no file."""
    return isinstance(value, Iterator) and not isinstance(value, io.IOBase)


def _is_seeded(value: Any) -> bool:
    """Whether a value is a generator of random numbers that has a state: the system's has none."""
    return isinstance(value, random.Random) and not isinstance(value, random.SystemRandom)


def _advance(iterator: Iterator[Any]) -> None:
    """Take many values; an iterator that has few is used up, as by many calls."""
    end = process_time() + ITERATOR_SECONDS
    for taken, _ in enumerate(iterator):
        if taken == MANY_CALLS or process_time() > end:
            return


def _make_extreme(generator: random.Random) -> None:
    """Let a generator give its smallest and its largest number in turn: a rare number comes in one of many calls."""
    highs = itertools.cycle((False, True))
    extremes: dict[str, Callable[..., Any]] = {
        "random": lambda: 1.0 - 2.0**-53 if next(highs) else 0.0,
        "getrandbits": lambda count: (1 << count) - 1 if next(highs) else 0,
        "_randbelow": lambda limit: limit - 1 if next(highs) else 0,
    }
    for name, draw in extremes.items():
        setattr(generator, name, draw)


def _is_count(value: Any) -> bool:
    """Whether a tensor may count calls: it holds one number."""
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.dtype not in (torch.bool, torch.complex64)


def _places(module: ModuleType, instance: torch.nn.Module | None) -> Iterator[_Place]:
    for name, value in [*vars(module).items()]:
        if name.startswith("__"):
            continue
        yield _Place(name, value, partial(setattr, module, name))
        yield from _inside(name, value, module, MOST_DEPTH)
        if isinstance(value, FunctionType) and value.__module__ == module.__name__:
            yield from _of_function(name, value)
        elif isinstance(value, type) and value.__module__ == module.__name__:
            for key, held in [*vars(value).items()]:
                yield _Place(f"{name}.{key}", held, partial(setattr, value, key))
                if isinstance(held, FunctionType):
                    yield from _of_function(f"{name}.{key}", held)
    for path, part in instance.named_modules() if instance is not None else ():
        for key, held in [*vars(part).items()]:
            place = f"self.{path}.{key}" if path else f"self.{key}"
            yield _Place(place, held, partial(setattr, part, key))
            if not isinstance(held, torch.nn.Module):
                yield from _inside(place, held, module, MOST_DEPTH)


def _inside(name: str, value: Any, module: ModuleType, depth: int) -> Iterator[_Place]:
    """The attributes of an object of the candidate's classes, and of such objects that it or a container holds."""
    if not depth:
        return
    if isinstance(value, (Mapping, list, tuple, deque)):
        held = list(value.values() if isinstance(value, Mapping) else value)[:MOST_ELEMENTS]
        for i, inner in enumerate(held):
            yield from _inside(f"{name}[{i}]", inner, module, depth - 1)
    elif type(value).__module__ == module.__name__ and hasattr(value, "__dict__"):
        for key, inner in [*vars(value).items()]:
            yield _Place(f"{name}.{key}", inner, partial(setattr, value, key))
            yield from _inside(f"{name}.{key}", inner, module, depth - 1)


def _of_function(name: str, function: FunctionType) -> Iterator[_Place]:
    for key, held in [*vars(function).items()]:
        yield _Place(f"{name}.{key}", held, partial(setattr, function, key))
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield _Place(f"{variable} in {name}", cell.cell_contents, partial(setattr, cell, "cell_contents"))
        except ValueError:
            continue
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    yield _Place(f"defaults of {name}", defaults, lambda _: None)


def _plain(value: Any, depth: int) -> Any:
    if isinstance(value, (*SIMPLE, itertools.count)) or _is_count(value):
        # NaN differs from itself.
        return repr(value)
    if _is_seeded(value):
        return hash(value.getstate())
    if _is_iterator(value):
        # Nobody sees how far it is.
        return next(_observations)
    if depth and isinstance(value, Mapping):
        items = list(value.items())[:MOST_ELEMENTS]
        return len(value), [(_plain(key, depth - 1), _plain(held, depth - 1)) for key, held in items]
    if depth and isinstance(value, (list, tuple, deque, set, frozenset)):
        return len(value), [_plain(held, depth - 1) for held in list(value)[:MOST_ELEMENTS]]
    return type(value).__name__
