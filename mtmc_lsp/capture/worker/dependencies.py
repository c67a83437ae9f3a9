"""Finds what a call of the target reads beyond its arguments: globals, closures, helper functions, class attributes, environment.

Two sources are combined. A trace function records every user function that runs, including methods, callbacks and decorators.
The bytecode of these functions names the globals that they read. Functions among these globals are analysed in turn.
"""

from __future__ import annotations

import dis
import inspect
import linecache
import sys
from collections.abc import Iterator, Mapping
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from mtmc_lsp.capture.worker.dependency_recorder import DependencyRecorder, is_user_file
from mtmc_lsp.capture.worker.side_effects import PLAIN
from mtmc_lsp.core.dependencies import Dependency, DependencyKind
from mtmc_lsp.core.source_digest import source_digest

MAX_ITEMS = 64
"""Maximum number of elements of a container that is compared by value."""
BEGIN, END = "# mtmc: begin", "# mtmc: end"


_Index = dict[int, tuple[str, str, bool]]


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
            for name, steps in _global_reads(code):
                if name in namespace:
                    self._global(namespace, name, steps)
            for module, steps in _imported_reads(code, namespace):
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
        for value in list(namespace.values()):
            is_defined_here = isinstance(value, type) and value.__module__ == namespace.get("__name__")
            for function in (value, *(vars(value).values() if is_defined_here else ())):
                if isinstance(function, FunctionType) and function.__code__ is code:
                    return function
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
        path = vars(module).get("__file__") or ""
        if steps and is_user_file(path) and steps[0] in vars(module):
            first, *rest = steps
            self._object(vars(module)[first], tuple(rest), f"{name}.{first}", f"{access}.{first}", path, first)

    def _object(self, value: Any, steps: tuple[str, ...], name: str, access: str, path: str, qualname: str) -> None:
        function = inspect.unwrap(value) if callable(value) and not isinstance(value, type) else value
        definition = Dependency(name, DependencyKind.DEFINITION, path=path, qualname=qualname)
        if isinstance(function, FunctionType):
            # The name can be rebound to another function.
            self.add(definition)
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
                self.add(definition)
            return
        if isinstance(value, ModuleType) or (callable(value) and not _is_of_user(type(value))):
            # A library function imported by name: the name can be rebound to another function.
            self.add(definition)
            return
        attribute_value = getattr(value, "__dict__", {}).get(steps[0]) if steps else None
        if steps and steps[0] in getattr(value, "__dict__", {}) and _is_plain(attribute_value):
            self._value(f"{name}.{steps[0]}", f"{access}.{steps[0]}", attribute_value, path, qualname)
            return
        self.add(definition)

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
    elif isinstance(wrapped := _static_attribute(value, "__wrapped__"), FunctionType):
        _index_object(wrapped, f"{access}.__wrapped__", name, module, index, depth + 1)


def _static_attribute(value: Any, name: str) -> Any:
    """The attribute without calls of ``__getattr__``, which would for example import what a lazy module stands for."""
    return inspect.getattr_static(value, name, None)


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


# Bytecode ------------------------------------------------------------------------------------------------------------


def _global_reads(code: CodeType) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The global names that a function reads, with the attributes read from them: ``cfg.a.b`` gives ``(a, b)``."""
    instructions = list(dis.get_instructions(code))
    for i, item in enumerate(instructions):
        if item.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(item.argval), _attributes_read(instructions, i + 1)


def _attributes_read(instructions: list[dis.Instruction], start: int) -> tuple[str, ...]:
    steps = []
    for item in instructions[start:]:
        if item.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            steps.append(str(item.argval))
        elif item.opname not in ("CACHE", "PUSH_NULL"):
            break
    return tuple(steps)


def _imported_reads(code: CodeType, namespace: Mapping[str, Any]) -> Iterator[tuple[ModuleType, tuple[str, ...]]]:
    """The attributes that a function reads from modules that it imports itself."""
    instructions = list(dis.get_instructions(code))
    module: ModuleType | None = None
    aliases: dict[str, ModuleType] = {}
    for i, item in enumerate(instructions):
        if item.opname == "IMPORT_NAME":
            module = _imported_module(str(item.argval), namespace)
            if module is not None and instructions[i + 1].opname == "STORE_FAST":
                # `import a.b` binds `a`.
                top = _imported_module(str(item.argval).split(".")[0], namespace)
                aliases[str(instructions[i + 1].argval)] = top or module
        elif item.opname == "IMPORT_FROM" and module is not None:
            yield module, (str(item.argval),)
        elif item.opname.startswith("LOAD_FAST"):
            name = item.argval[-1] if isinstance(item.argval, tuple) else item.argval
            if name in aliases:
                yield aliases[name], _attributes_read(instructions, i + 1)


def _imported_module(name: str, namespace: Mapping[str, Any]) -> ModuleType | None:
    package = namespace.get("__package__") or ""
    module = sys.modules.get(name) or sys.modules.get(f"{package}.{name}")
    return module if isinstance(module, ModuleType) else None
