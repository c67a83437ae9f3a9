"""``MTMC_GUARD=warn``: guards warn of the calls that they refuse. Runs in the user's program, which imports it only then."""

from __future__ import annotations

import functools
import inspect
import linecache
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mtmc_lsp.guard.conditions import SUFFIX
from mtmc_lsp.guard.worker.observed_calls import accepts, explain

BEGIN = "# mtmc: begin "
OWNER = re.compile(r"# mtmc: Triton kernels of (\S+\.py)\.")
"""The first line of a file of kernels names the user's file."""


class KernelsDoNotRun(UserWarning):
    """A call runs the original code because a guard refuses it."""


def reported(guard: Callable[..., Any]) -> Callable[..., Any]:
    """A guard that decides as ``guard``, and warns of the first refused call for each reason."""
    target = _target(guard)
    warned: set[str] = set()

    @functools.wraps(guard)
    def report(*arguments: Any, **named: Any) -> Any:
        result = guard(*arguments, **named)
        if not torch.compiler.is_compiling() and not accepts(result):
            decision = explain(guard, arguments, named)
            if decision.condition not in warned:
                warned.add(decision.condition)
                message = f"{target} runs its original code: {decision.reason}"
                warnings.warn(message, KernelsDoNotRun, stacklevel=2)
        return result

    return report


def _target(guard: Callable[..., Any]) -> str:
    """``model.py::Block``: the target is named at the start of the block that contains the guard."""
    code = inspect.unwrap(guard).__code__
    lines = linecache.getlines(code.co_filename)[: code.co_firstlineno]
    file = OWNER.match(lines[0]) if lines else None
    starts = (line[len(BEGIN) :].strip() for line in reversed(lines) if line.startswith(BEGIN))
    return f"{file[1] if file is not None else Path(code.co_filename).name}::{next(starts, code.co_name.removesuffix(SUFFIX))}"
