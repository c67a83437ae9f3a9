"""A table of steps, and the results of a step. Runs in workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mtmc_lsp.verify.use.uses import Use
from mtmc_lsp.verify.worker.run_target import flatten, snapshot
from mtmc_lsp.verify.worker.use.subject import Subject


@dataclass
class Entry:
    """One result of a step."""

    name: str
    """In messages: ``result 0``, ``gradient of weight``."""
    value: Any
    """A tensor or a plain value; ``None`` where there is nothing to compare: in the reference, or for an optional entry."""
    changed: str = ""
    """The tensors of the module that the step changed before it, in words; empty if it changed none."""
    is_optional: bool = False
    """Whether a candidate may have ``None``."""


Step = Callable[[Subject, Use], list[Entry]]


class Steps(dict[str, Step]):
    """The step of each kind. Steps run without gradients unless they are about them."""

    def step(self, kind: str, *, records_gradients: bool = False) -> Callable[[Step], Step]:
        """A decorator for the step of a kind."""

        def add(function: Step) -> Step:
            def run(subject: Subject, use: Use) -> list[Entry]:
                # Functions that the user compiles run as they are written: the sandbox has no compiler.
                with torch.set_grad_enabled(records_gradients), torch.compiler.set_stance("force_eager"):
                    return function(subject, use)

            self[kind] = run
            return function

        return add


def results(returned: Any, prefix: str = "", changed: str = "") -> list[Entry]:
    """The results of a call, in tensors of their own."""
    return [Entry(f"{prefix}result {i}", snapshot(value), changed) for i, value in enumerate(flatten(returned))]


def values(tensors: Mapping[str, torch.Tensor], words: str) -> list[Entry]:
    """Tensors of a module, or arguments, in tensors of their own; ``words`` contains ``{}`` for the name."""
    return [Entry(words.format(name), snapshot(tensor)) for name, tensor in tensors.items()]


def halved(value: Any) -> Any:
    """A result or argument of a hook with its floating-point tensors halved."""
    if isinstance(value, torch.Tensor):
        return value * 0.5 if value.is_floating_point() else value
    if type(value) in (tuple, list):
        return type(value)(map(halved, value))
    return {key: halved(held) for key, held in value.items()} if type(value) is dict else value


@contextlib.contextmanager
def removed(handle: Any) -> Any:
    """Remove a hook afterwards."""
    try:
        yield
    finally:
        handle.remove()
