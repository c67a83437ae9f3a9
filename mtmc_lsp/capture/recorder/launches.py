"""Records how Triton kernels of the user's project are launched. Runs inside the user's program.

It needs only the standard library, like the recorder that calls it. Noted are the arguments (of tensors the description), the
grid as numbers, and the options of a launch. Of an autotuner, the launch with the chosen configuration is noted, and not
those that are only timed.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from typing import Any

AUTOTUNER_FILE, TIMED = os.path.join("triton", "runtime", "autotuner.py"), "kernel_call"
"""Triton's autotuner, and its function that launches a configuration to time it."""
RUN, KINDS = "run", ("JITFunction", "InterpretedFunction")
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")
MOST_LAUNCHES = 32
"""Different launches that are recorded per kernel. Further ones are only counted."""
RANGED_LAUNCHES = 4
"""Equal launches whose value ranges are recorded."""


class LaunchNotes:
    """The launches of one process."""

    FILES = (os.path.join("triton", "runtime", "jit.py"), os.path.join("triton", "runtime", "interpreter.py"))
    """Triton's files with the functions that launch kernels."""

    def __init__(
        self,
        describe: Callable[[str, Any, Any], dict[str, Any]],
        update_range: Callable[[dict[str, Any], Any, Any], None],
    ) -> None:
        """Prepare.

        Args:
            describe: the record of one argument.
            update_range: adds the value of another launch to the record of an argument.
        """
        self._describe, self._update_range = describe, update_range
        self._records: dict[tuple[str, str], dict[Any, dict[str, Any]]] = {}
        self._others: dict[tuple[str, str], int] = {}

    def clear(self) -> None:
        """Forget all launches."""
        self._records, self._others = {}, {}

    def launched_kernel(self, frame: types.FrameType) -> Any:
        """The Python function of the kernel that a frame launches; None for other frames and for timed configurations."""
        if frame.f_code.co_name != RUN:
            return None
        values = frame.f_locals
        kernel: Any = values.get("self")
        if type(kernel).__name__ not in KINDS or values.get("warmup") or "grid" not in values:
            return None
        outer = frame.f_back
        while outer is not None and outer.f_code.co_filename.endswith(AUTOTUNER_FILE):
            if outer.f_code.co_name == TIMED:
                return None
            outer = outer.f_back
        return kernel.fn

    def note(self, frame: types.FrameType, path: str, torch: types.ModuleType) -> None:
        """Note the launch of a frame for which :meth:`launched_kernel` returns a kernel of the file ``path``."""
        values = frame.f_locals
        function, grid, keywords = values["self"].fn, values["grid"], values["kwargs"]
        code = function.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        defaults = function.__defaults__ or ()
        bound = dict(zip(names[code.co_argcount - len(defaults) : code.co_argcount], defaults, strict=True))
        bound.update(zip(names, values["args"], strict=False))
        bound.update({name: value for name, value in keywords.items() if name in names})
        arguments = {name: _plain(bound[name]) for name in names if name in bound}
        counts = grid(dict(bound)) if callable(grid) else grid
        grid = [int(count) for count in (counts if isinstance(counts, (tuple, list)) else [counts])]
        options = {name: keywords[name] for name in OPTIONS if type(keywords.get(name)) is int}
        key = (tuple(grid), tuple(options.items()), *(_key(value, torch) for value in arguments.values()))
        kernel = (path, function.__qualname__)
        records = self._records.setdefault(kernel, {})
        record = records.get(key)
        if record is None:
            if len(records) >= MOST_LAUNCHES:
                self._others[kernel] = self._others.get(kernel, 0) + 1
                return
            record = records[key] = {
                "count": 0,
                "arguments": [self._describe(name, value, torch) for name, value in arguments.items()],
                "grid": grid,
                "options": options,
                "is_tuned": _is_tuned(frame),
                "shared": _shared(arguments, torch),
            }
        record["count"] += 1
        if record["count"] <= RANGED_LAUNCHES:
            for recorded, value in zip(record["arguments"], arguments.values(), strict=True):
                self._update_range(recorded, value, torch)

    def to_json(self) -> list[dict[str, Any]]:
        """All launches as JSON data."""
        return [
            {
                "path": path,
                "qualname": name,
                "others": self._others.get((path, name), 0),
                "launches": list(records.values()),
            }
            for (path, name), records in self._records.items()
        ]


def _plain(value: Any) -> Any:
    """The value of a ``tl.constexpr``; other values as they are."""
    return value.value if type(value).__name__ == "constexpr" else value


def _is_tuned(frame: types.FrameType) -> bool:
    """Whether an autotuner chose the configuration."""
    outer = frame.f_back
    while outer is not None and outer.f_code.co_filename.endswith(AUTOTUNER_FILE):
        if type(outer.f_locals.get("self")).__name__ == "Autotuner":
            return True
        outer = outer.f_back
    return False


def _shared(arguments: dict[str, Any], torch: types.ModuleType) -> dict[str, str]:
    """Tensors that are an earlier argument, too: the kernel works in place."""
    first: dict[Any, str] = {}
    shared = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and value.numel():
            key = (value.data_ptr(), value.shape, value.stride(), value.dtype)
            if key in first:
                shared[name] = first[key]
            first.setdefault(key, name)
    return shared


def _key(value: Any, torch: types.ModuleType) -> object:
    """A key that distinguishes launches, without tensor elements. It leaves out floating-point numbers: learning rates vary."""
    if isinstance(value, torch.Tensor):
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, (tuple, list)):
        return (type(value), *(_key(item, torch) for item in value))
    if hasattr(type(value), "__dataclass_fields__"):
        # The text of a tensor descriptor would contain the elements of its tensor.
        return (type(value), *(_key(getattr(value, name, None), torch) for name in type(value).__dataclass_fields__))
    return float if type(value) is float else repr(value)
