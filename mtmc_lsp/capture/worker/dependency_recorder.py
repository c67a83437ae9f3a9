"""Records which user functions run, and which environment variables they read."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import mtmc_lsp

LIBRARIES = tuple(
    {str(Path(path).resolve()) for name, path in sysconfig.get_paths().items() if "lib" in name}
    | {str(Path(module.__file__ or "").resolve().parent) for module in (mtmc_lsp, torch)}
)


@cache
def is_user_file(path: str) -> bool:
    """Whether a file is user code: not an installed package, the standard library, torch or this program."""
    if not path.endswith(".py") or {"site-packages", "dist-packages"} & set(Path(path).parts):
        return False
    resolved = str(Path(path).resolve())
    return not any(resolved.startswith(f"{folder}{os.sep}") for folder in LIBRARIES)


@dataclass
class RunFunction:
    """A function that ran during the call."""

    code: CodeType
    namespace: dict[str, Any]
    closures: list[dict[str, Any]] = field(default_factory=list)
    """Values of its free variables; one entry per distinct set of values."""


@dataclass
class DependencyRecorder:
    """Records, while entered, which user functions run and which environment variables they read."""

    functions: dict[int, RunFunction] = field(default_factory=dict)
    environment: dict[str, str | None] = field(default_factory=dict)
    _libraries: dict[int, CodeType] = field(default_factory=dict)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def __enter__(self) -> DependencyRecorder:
        before = sys.gettrace()
        sys.settrace(self._trace)
        self._undo.append(lambda: sys.settrace(before))
        kind = type(os.environ)
        for name in ("__getitem__", "__contains__"):
            original = getattr(kind, name)
            setattr(kind, name, self._recording(original))
            self._undo.append(lambda name=name, original=original: setattr(kind, name, original))  # type: ignore[misc]
        return self

    def __exit__(self, *error: object) -> None:
        while self._undo:
            self._undo.pop()()

    @property
    def libraries(self) -> list[CodeType]:
        """The functions of libraries that ran."""
        return list(self._libraries.values())

    def replace_codes(self, codes: Iterable[tuple[CodeType, CodeType]]) -> None:
        """Record functions that ran with rewritten code under the user's code, which comes first in each pair."""
        for original, rewritten in codes:
            function = self.functions.pop(id(rewritten), None)
            if function is not None:
                self.functions.setdefault(id(original), replace(function, code=original))

    def _trace(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if id(code) in self._libraries or event != "call":
            return
        function = self.functions.get(id(code))
        if function is None:
            if not is_user_file(code.co_filename):
                self._libraries[id(code)] = code
                return
            function = self.functions[id(code)] = RunFunction(code, frame.f_globals)
        if code.co_freevars:
            values = {name: frame.f_locals[name] for name in code.co_freevars if name in frame.f_locals}
            if not any(_same(values, other) for other in function.closures):
                function.closures.append(values)

    def _recording(self, original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def read(environment: Any, key: Any) -> Any:
            frame: Any = sys._getframe(1)
            while frame is not None and frame.f_globals.get("__name__") in (
                "os",
                "collections.abc",
                "_collections_abc",
            ):
                frame = frame.f_back
            # Ignore the variables that torch reads.
            if isinstance(key, str) and frame is not None and is_user_file(frame.f_code.co_filename):
                raw = environment._data.get(environment.encodekey(key))
                self.environment[key] = None if raw is None else environment.decodevalue(raw)
            return original(environment, key)

        return read


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)
