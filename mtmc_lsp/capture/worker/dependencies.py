"""Finds what a call of the target reads beyond its arguments: globals, closures, helper functions, class attributes, environment.

Two sources are combined. A trace function records every user function that runs, including methods, callbacks and decorators.
The bytecode of these functions names the globals that they read. Functions among these globals are analysed in turn.
"""

from __future__ import annotations

import inspect
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

import mtmc_lsp
from mtmc_lsp.capture.worker.global_reads import global_reads, imported_reads
from mtmc_lsp.capture.worker.side_effects import PLAIN
from mtmc_lsp.core.dependencies import Dependency, DependencyKind
from mtmc_lsp.core.source_digest import source_digest

MAX_ITEMS = 64
"""Maximum number of elements of a container that is compared by value."""
BEGIN, END = "# mtmc: begin", "# mtmc: end"
LIBRARIES = tuple(
    {str(Path(path).resolve()) for name, path in sysconfig.get_paths().items() if "lib" in name}
    | {str(Path(module.__file__ or "").resolve().parent) for module in (mtmc_lsp, torch)}
)


_Index = dict[int, tuple[str, str, bool]]


@cache
def is_user_file(path: str) -> bool:
    """Whether a file is user code: not an installed package, the standard library, torch or this program."""
    if not path.endswith(".py") or {"site-packages", "dist-packages"} & set(Path(path).parts):
        return False
    resolved = str(Path(path).resolve())
    return not any(resolved.startswith(f"{folder}{os.sep}") for folder in LIBRARIES)


@dataclass
class _RunFunction:
    """A function that ran during the call."""

    code: CodeType
    namespace: dict[str, Any]
    closures: list[dict[str, Any]] = field(default_factory=list)
    """Values of its free variables; one entry per distinct set of values."""


@dataclass
class DependencyRecorder:
    """Records, while entered, which user functions run and which environment variables they read."""

    functions: dict[int, _RunFunction] = field(default_factory=dict)
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

    def _trace(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if id(code) in self._libraries or event != "call":
            return
        function = self.functions.get(id(code))
        if function is None:
            if not is_user_file(code.co_filename):
                self._libraries[id(code)] = code
                return
            function = self.functions[id(code)] = _RunFunction(code, frame.f_globals)
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


def dependencies(
    file: ModuleType, called: DependencyRecorder, constructed: DependencyRecorder, instance: torch.nn.Module | None
) -> tuple[Dependency, ...]:
    """All dependencies of the recorded functions, including the target's code.

    Args:
        called: functions that ran in the target's call. The guard checks their dependencies.
        constructed: functions that ran in constructors. Only the editor checks these; the guard checks the constructed modules.
        instance: the target's module, ``None`` for a function.
    """
    collector = _Collector(file)
    for name, value in called.environment.items():
        collector.add(
            Dependency(f"${name}", DependencyKind.ENVIRONMENT, name, value or "", "" if value is None else "str")
        )
    for item in called.functions.values():
        collector.function(item.code, item.namespace, item.closures)
    collector.analyse()
    collector.class_attributes(instance)
    collector.is_guarded = False
    for item in constructed.functions.values():
        collector.function(item.code, item.namespace, item.closures)
    collector.analyse()
    return tuple(collector.dependencies.values())


class _Collector:
    """Collects dependencies from code objects."""

    def __init__(self, file: ModuleType) -> None:
        self.file = file
        self.dependencies: dict[tuple[str, str, str], Dependency] = {}
        self.is_guarded = True
        self._indexes: dict[int, _Index] = {}
        self._pending: list[tuple[CodeType, dict[str, Any], list[dict[str, Any]]]] = []
        self._analysed: set[int] = set()
        self._attributes: set[str] = set()

    def add(self, item: Dependency) -> None:
        """Add a dependency; the first one of a name is used."""
        self.dependencies.setdefault((item.path, item.name, item.access), item)

    def function(self, code: CodeType, namespace: dict[str, Any], closures: list[dict[str, Any]]) -> None:
        """Add a function, to be analysed later."""
        if id(code) not in self._analysed and is_user_file(code.co_filename) and not _is_generated(code):
            self._analysed.add(id(code))
            self._pending.append((code, namespace, closures))

    def analyse(self) -> None:
        """Analyse the added functions, and all functions that they use."""
        while self._pending:
            code, namespace, closures = self._pending.pop()
            self._code(code, namespace)
            self._attributes |= set(code.co_names)
            owner = self._location(code, namespace)
            for values in closures:
                for name, value in values.items():
                    self._closure(code, owner, name, value, has_one=len(closures) == 1)
            for name, steps in global_reads(code):
                if name in namespace:
                    self._global(namespace, name, steps)
            for module, steps in imported_reads(code, namespace):
                self._chain(module, steps)

    def class_attributes(self, instance: torch.nn.Module | None) -> None:
        """Add plain class attributes of the modules, if a function that ran reads an attribute of that name.

        The guard checks them as attributes of the module: ``self.scale``.
        """
        kinds = dict.fromkeys(k for m in (instance.modules() if instance is not None else ()) for k in type(m).__mro__)
        for kind in kinds:
            for name, value in vars(kind).items():
                if name in self._attributes and isinstance(value, (*PLAIN, tuple, list, dict)) and _is_of_user(kind):
                    self._value(f"{kind.__qualname__}.{name}", "", value, _file_of(kind), f"{kind.__qualname__}.{name}")

    # Functions -------------------------------------------------------------------------------------------------------

    def _code(self, code: CodeType, namespace: dict[str, Any]) -> None:
        access, qualname, is_itself = self._location(code, namespace)
        name = qualname or code.co_name
        if any(
            dependency.name == name and dependency.path == code.co_filename for dependency in self.dependencies.values()
        ):
            return
        path = _file_in(namespace, code.co_filename)
        try:
            digest = source_digest(inspect.getsource(code))
        except (OSError, SyntaxError, TypeError, ValueError):
            digest = ""
        # The source of the outer function contains a nested function.
        access = access if digest and self.is_guarded and is_itself else ""
        self.add(
            Dependency(
                name,
                DependencyKind.CODE,
                access,
                "",
                "",
                digest,
                path,
                qualname,
                code.co_firstlineno if qualname else 0,
            )
        )
        function = self._function(code, namespace)
        for attribute in ("__defaults__", "__kwdefaults__"):
            value = getattr(function, attribute, None)
            if value and access and _is_plain(value):
                self._value(f"{name}.{attribute}", f"{access}.{attribute}", value, "", "")

    def _location(self, code: CodeType, namespace: dict[str, Any]) -> tuple[str, str, bool]:
        """Access expression, qualified name, and whether these belong to the function itself.

        For a nested function, they belong to the outer function.
        """
        return self._index(namespace).get(id(code), ("", "", False))

    def _function(self, code: CodeType, namespace: dict[str, Any]) -> Any:
        for value in vars_of(namespace):
            if isinstance(value, FunctionType) and value.__code__ is code:
                return value
        return None

    def _index(self, namespace: dict[str, Any]) -> _Index:
        """The result of :meth:`_location` for each ``id`` of a code object."""
        if id(namespace) not in self._indexes:
            index: _Index = {}
            for name, value in list(namespace.items()):
                if name.isidentifier():
                    _index_object(value, self._access(namespace, name), name, namespace.get("__name__"), index)
            self._indexes[id(namespace)] = index
        return self._indexes[id(namespace)]

    # Values ----------------------------------------------------------------------------------------------------------

    def _access(self, namespace: dict[str, Any], name: str) -> str:
        """Python expression, in the target's module, for a global of a module."""
        if namespace is vars(self.file):
            return name
        module = namespace.get("__name__")
        for alias, value in vars(self.file).items():
            if isinstance(value, ModuleType) and vars(value) is namespace:
                return f"{alias}.{name}"
        return f"sys.modules[{module!r}].{name}"

    def _global(self, namespace: dict[str, Any], name: str, steps: tuple[str, ...]) -> None:
        value = namespace[name]
        if isinstance(value, ModuleType):
            access = name if namespace is vars(self.file) else ""
            self._chain(value, steps, access)
            return
        path, qualname, access = _file_in(namespace, ""), name, self._access(namespace, name)
        if name.startswith("__") or not path:
            return
        self._object(value, steps, name, access, path, qualname)

    def _chain(self, module: ModuleType, steps: tuple[str, ...], access: str = "") -> None:
        """Add the dependency for reading ``module.a.b``."""
        name = access or module.__name__
        access = access or f"sys.modules[{module.__name__!r}]"
        while steps and isinstance(vars(module).get(steps[0]), ModuleType):
            module, name, access, steps = (
                vars(module)[steps[0]],
                f"{name}.{steps[0]}",
                f"{access}.{steps[0]}",
                steps[1:],
            )
        path = getattr(module, "__file__", None) or ""
        if steps and is_user_file(path) and steps[0] in vars(module):
            first, *rest = steps
            self._object(vars(module)[first], tuple(rest), f"{name}.{first}", f"{access}.{first}", path, first)

    def _object(self, value: Any, steps: tuple[str, ...], name: str, access: str, path: str, qualname: str) -> None:
        function = inspect.unwrap(value) if callable(value) and not isinstance(value, type) else value
        if isinstance(function, FunctionType):
            self._definition_unless_known(name, path, qualname)
            self.function(function.__code__, function.__globals__, [])
            return
        if _is_plain(value):
            self._value(name, access, value, path, qualname)
            return
        if isinstance(value, type):
            if not _is_of_user(value):
                return
            owner = next((kind for kind in value.__mro__ if steps and steps[0] in vars(kind)), None)
            if owner is not None and _is_plain(vars(owner)[steps[0]]):
                inner = f"{owner.__qualname__}.{steps[0]}"
                attribute = vars(owner)[steps[0]]
                self._value(f"{name}.{steps[0]}", f"{access}.{steps[0]}", attribute, _file_of(owner), inner)
            else:
                self.add(Dependency(name, DependencyKind.DEFINITION, path=path, qualname=qualname))
            return
        if isinstance(value, ModuleType) or (callable(value) and not _is_of_user(type(value))):
            # A library function imported by name: the name can be rebound to another function.
            self.add(Dependency(name, DependencyKind.DEFINITION, path=path, qualname=qualname))
            return
        attribute_value = getattr(value, "__dict__", {}).get(steps[0]) if steps else None
        if steps and steps[0] in getattr(value, "__dict__", {}) and _is_plain(attribute_value):
            self._value(f"{name}.{steps[0]}", f"{access}.{steps[0]}", attribute_value, path, qualname)
            return
        self.add(Dependency(name, DependencyKind.DEFINITION, path=path, qualname=qualname))

    def _definition_unless_known(self, name: str, path: str, qualname: str) -> None:
        """Add the name of a called function, because it can be rebound to another function."""
        self.add(Dependency(name, DependencyKind.DEFINITION, path=path, qualname=qualname))

    def _value(self, name: str, access: str, value: Any, path: str, qualname: str) -> None:
        access = access if self.is_guarded else ""
        text = repr(value)
        self.add(Dependency(name, DependencyKind.VALUE, access, text, type(value).__name__, "", path, qualname))

    def _closure(self, code: CodeType, owner: tuple[str, str, bool], name: str, value: Any, *, has_one: bool) -> None:
        access, qualname, is_itself = owner
        if isinstance(value, FunctionType):
            self.function(value.__code__, value.__globals__, [_free(value)])
        elif _is_plain(value):
            index = code.co_freevars.index(name)
            inner = f"{access}.__closure__[{index}].cell_contents" if is_itself and has_one else ""
            path = code.co_filename if qualname else ""
            self._value(f"{name} of {code.co_name}", inner, value, path, qualname)


def vars_of(namespace: Mapping[str, Any]) -> Iterator[Any]:
    """The values of a module and of its classes."""
    for value in list(namespace.values()):
        yield value
        if isinstance(value, type) and value.__module__ == namespace.get("__name__"):
            yield from list(vars(value).values())


def _free(function: FunctionType) -> dict[str, Any]:
    cells: tuple[CellType, ...] = function.__closure__ or ()
    return {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True)
        if _is_set(cell)
    }


def _is_set(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _index_object(value: Any, access: str, name: str, module: object, index: _Index, depth: int = 0) -> None:
    if depth > 3:
        return
    if isinstance(value, (staticmethod, classmethod)):
        value, access = value.__func__, f"{access}.__func__" if isinstance(value, classmethod) else access
    elif isinstance(value, property):
        value, access = value.fget, f"{access}.fget"
    if isinstance(value, type):
        if value.__module__ == module or depth == 0:
            for attribute, attribute_value in list(vars(value).items()):
                _index_object(attribute_value, f"{access}.{attribute}", f"{name}.{attribute}", module, index, depth + 1)
    elif isinstance(value, FunctionType):
        _index_nested(value.__code__, access, name, index)
        if not index.get(id(value.__code__), ("", "", False))[2]:
            index[id(value.__code__)] = (access, name, True)
        for number, cell in enumerate(value.__closure__ or ()):
            if _is_set(cell) and isinstance(cell.cell_contents, FunctionType):
                inner = f"{access}.__closure__[{number}].cell_contents"
                _index_object(cell.cell_contents, inner, name, module, index, depth + 1)
    elif isinstance(getattr(value, "__wrapped__", None), FunctionType):
        _index_object(value.__wrapped__, f"{access}.__wrapped__", name, module, index, depth + 1)


def _index_nested(code: CodeType, access: str, name: str, index: _Index) -> None:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            index.setdefault(id(constant), (access, name, False))
            _index_nested(constant, access, name, index)


def _is_generated(code: CodeType) -> bool:
    """Whether the function is in generated code of an earlier run."""
    depth = 0
    for line in linecache.getlines(code.co_filename)[: code.co_firstlineno]:
        depth += line.startswith(BEGIN) - line.startswith(END)
    return depth > 0


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return len(value) <= MAX_ITEMS and all(_is_plain(item) for item in value)
    if type(value) is dict:
        return len(value) <= MAX_ITEMS and all(_is_plain(item) for pair in value.items() for item in pair)
    return type(value) in PLAIN or isinstance(value, (torch.dtype, torch.device, torch.memory_format))


def _is_of_user(kind: type) -> bool:
    return is_user_file(_file_of(kind))


def _file_of(kind: type) -> str:
    return str(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


def _file_in(namespace: Mapping[str, Any], default: str) -> str:
    path = str(namespace.get("__file__") or default)
    return path if is_user_file(path) else ""
