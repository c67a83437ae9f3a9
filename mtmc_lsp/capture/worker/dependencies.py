"""What a call of the target reads beside its arguments: globals, closures, helper functions, class attributes, the environment.

Two sources are combined. A trace function notes every user function that runs, however it was reached (method, callback,
decorator). The bytecode of these functions names the globals that they read; functions among these are walked in turn.
"""

from __future__ import annotations

import dis
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
from mtmc_lsp.capture.worker.side_effects import PLAIN
from mtmc_lsp.core.dependencies import Dependency, DependencyKind
from mtmc_lsp.core.source_digest import source_digest

MOST_ITEMS = 64
"""Elements of a container that is compared by value."""
BEGIN, END = "# mtmc: begin", "# mtmc: end"
LIBRARIES = tuple(
    {str(Path(path).resolve()) for name, path in sysconfig.get_paths().items() if "lib" in name}
    | {str(Path(module.__file__ or "").resolve().parent) for module in (mtmc_lsp, torch)}
)


_Index = dict[int, tuple[str, str, bool]]


@cache
def is_user_file(path: str) -> bool:
    """Whether a file belongs to the user: no installed package, no part of Python, torch or this program."""
    if not path.endswith(".py") or {"site-packages", "dist-packages"} & set(Path(path).parts):
        return False
    whole = str(Path(path).resolve())
    return not any(whole.startswith(f"{folder}{os.sep}") for folder in LIBRARIES)


@dataclass
class _Seen:
    """A function that ran."""

    code: CodeType
    namespace: dict[str, Any]
    closures: list[dict[str, Any]] = field(default_factory=list)
    """Values of its free variables, one entry for each different set."""


@dataclass
class Recorder:
    """Notes which user functions run and which environment variables they read, while it is entered."""

    seen: dict[int, _Seen] = field(default_factory=dict)
    environment: dict[str, str | None] = field(default_factory=dict)
    _libraries: dict[int, CodeType] = field(default_factory=dict)
    _undo: list[Callable[[], None]] = field(default_factory=list)

    def __enter__(self) -> Recorder:
        before = sys.gettrace()
        sys.settrace(self._called)
        self._undo.append(lambda: sys.settrace(before))
        kind = type(os.environ)
        for name in ("__getitem__", "__contains__"):
            original = getattr(kind, name)
            setattr(kind, name, self._noting(original))
            self._undo.append(lambda name=name, original=original: setattr(kind, name, original))  # type: ignore[misc]
        return self

    def __exit__(self, *error: object) -> None:
        while self._undo:
            self._undo.pop()()

    def _called(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if id(code) in self._libraries or event != "call":
            return
        known = self.seen.get(id(code))
        if known is None:
            if not is_user_file(code.co_filename):
                self._libraries[id(code)] = code
                return
            known = self.seen[id(code)] = _Seen(code, frame.f_globals)
        if code.co_freevars:
            values = {name: frame.f_locals[name] for name in code.co_freevars if name in frame.f_locals}
            if not any(_same(values, other) for other in known.closures):
                known.closures.append(values)

    def _noting(self, original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def read(environment: Any, key: Any) -> Any:
            frame: Any = sys._getframe(1)
            while frame is not None and frame.f_globals.get("__name__") in (
                "os",
                "collections.abc",
                "_collections_abc",
            ):
                frame = frame.f_back
            # Torch reads many variables of its own.
            if isinstance(key, str) and frame is not None and is_user_file(frame.f_code.co_filename):
                raw = environment._data.get(environment.encodekey(key))
                self.environment[key] = None if raw is None else environment.decodevalue(raw)
            return original(environment, key)

        return read


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)


def dependencies(
    file: ModuleType, called: Recorder, constructed: Recorder, instance: torch.nn.Module | None
) -> tuple[Dependency, ...]:
    """Everything that the recorded functions read, the target's own code included.

    Args:
        file: the module of the target.
        called: what ran in the target's call. The guard checks it.
        constructed: what ran in the constructors. The guard checks what they built, so this is for the editor alone.
        instance: the target's module, None for a function.
    """
    walk = _Walk(file)
    for name, value in called.environment.items():
        walk.add(Dependency(f"${name}", DependencyKind.ENVIRONMENT, name, value or "", "" if value is None else "str"))
    for item in called.seen.values():
        walk.function(item.code, item.namespace, item.closures)
    walk.finish()
    walk.class_attributes(instance)
    walk.is_guarded = False
    for item in constructed.seen.values():
        walk.function(item.code, item.namespace, item.closures)
    walk.finish()
    return tuple(walk.found.values())


class _Walk:
    """Collects dependencies from code objects."""

    def __init__(self, file: ModuleType) -> None:
        self.file = file
        self.found: dict[tuple[str, str, str], Dependency] = {}
        self.is_guarded = True
        self._places: dict[int, _Index] = {}
        self._pending: list[tuple[CodeType, dict[str, Any], list[dict[str, Any]]]] = []
        self._walked: set[int] = set()
        self._attributes: set[str] = set()

    def add(self, item: Dependency) -> None:
        """Note a dependency; the first one of a name stays."""
        self.found.setdefault((item.path, item.name, item.access), item)

    def function(self, code: CodeType, namespace: dict[str, Any], closures: list[dict[str, Any]]) -> None:
        """Note a function, and walk it later."""
        if id(code) not in self._walked and is_user_file(code.co_filename) and not _is_generated(code):
            self._walked.add(id(code))
            self._pending.append((code, namespace, closures))

    def finish(self) -> None:
        """Walk what was noted, and what that refers to."""
        while self._pending:
            code, namespace, closures = self._pending.pop()
            self._code(code, namespace)
            self._attributes |= set(code.co_names)
            owner = self._place(code, namespace)
            for values in closures:
                for name, value in values.items():
                    self._closure(code, owner, name, value, has_one=len(closures) == 1)
            for name, steps in _reads(code):
                if name in namespace:
                    self._global(namespace, name, steps)
            for module, steps in _imported(code, namespace):
                self._chain(module, steps)

    def class_attributes(self, instance: torch.nn.Module | None) -> None:
        """Plain attributes of the classes of modules, where a function that ran reads an attribute of that name.

        The guard checks these where the module reads them, ``self.scale``.
        """
        kinds = dict.fromkeys(k for m in (instance.modules() if instance is not None else ()) for k in type(m).__mro__)
        for kind in kinds:
            for name, value in vars(kind).items():
                if name in self._attributes and isinstance(value, (*PLAIN, tuple, list, dict)) and _is_of_user(kind):
                    self._value(f"{kind.__qualname__}.{name}", "", value, _file_of(kind), f"{kind.__qualname__}.{name}")

    # Functions -------------------------------------------------------------------------------------------------------

    def _code(self, code: CodeType, namespace: dict[str, Any]) -> None:
        access, qualname, is_itself = self._place(code, namespace)
        name = qualname or code.co_name
        if any(dependency.name == name and dependency.path == code.co_filename for dependency in self.found.values()):
            return
        path = _file_in(namespace, code.co_filename)
        try:
            digest = source_digest(inspect.getsource(code))
        except (OSError, SyntaxError, TypeError, ValueError):
            digest = ""
        # A nested function is part of the source of the function around it.
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
        for what in ("__defaults__", "__kwdefaults__"):
            value = getattr(function, what, None)
            if value and access and _is_plain(value):
                self._value(f"{name}.{what}", f"{access}.{what}", value, "", "")

    def _place(self, code: CodeType, namespace: dict[str, Any]) -> tuple[str, str, bool]:
        """How the target's module reaches a function, its qualified name, and whether that is the function itself.

        For a nested function the access and the name are those of the function around it.
        """
        return self._index(namespace).get(id(code), ("", "", False))

    def _function(self, code: CodeType, namespace: dict[str, Any]) -> Any:
        for value in vars_of(namespace):
            if isinstance(value, FunctionType) and value.__code__ is code:
                return value
        return None

    def _index(self, namespace: dict[str, Any]) -> _Index:
        """What :meth:`_place` gives, by the code object's identity."""
        if id(namespace) not in self._places:
            index: _Index = {}
            for name, value in list(namespace.items()):
                if name.isidentifier():
                    _index_object(value, self._access(namespace, name), name, namespace.get("__name__"), index)
            self._places[id(namespace)] = index
        return self._places[id(namespace)]

    # Values ----------------------------------------------------------------------------------------------------------

    def _access(self, namespace: dict[str, Any], name: str) -> str:
        """Python for a module's global in the target's module."""
        if namespace is vars(self.file):
            return name
        module = namespace.get("__name__")
        for own, value in vars(self.file).items():
            if isinstance(value, ModuleType) and vars(value) is namespace:
                return f"{own}.{name}"
        return f"sys.modules[{module!r}].{name}"

    def _global(self, namespace: dict[str, Any], name: str, steps: tuple[str, ...]) -> None:
        value = namespace[name]
        if isinstance(value, ModuleType):
            own = name if namespace is vars(self.file) else ""
            self._chain(value, steps, own)
            return
        path, qualname, access = _file_in(namespace, ""), name, self._access(namespace, name)
        if name.startswith("__") or not path:
            return
        self._object(value, steps, name, access, path, qualname)

    def _chain(self, module: ModuleType, steps: tuple[str, ...], access: str = "") -> None:
        """What ``module.a.b`` reads."""
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
            holder = next((kind for kind in value.__mro__ if steps and steps[0] in vars(kind)), None)
            if holder is not None and _is_plain(vars(holder)[steps[0]]):
                inner = f"{holder.__qualname__}.{steps[0]}"
                own = vars(holder)[steps[0]]
                self._value(f"{name}.{steps[0]}", f"{access}.{steps[0]}", own, _file_of(holder), inner)
            else:
                self.add(Dependency(name, DependencyKind.DEFINITION, path=path, qualname=qualname))
            return
        if isinstance(value, ModuleType) or (callable(value) and not _is_of_user(type(value))):
            # A function of a library, imported by its name: another one under that name is another computation.
            self.add(Dependency(name, DependencyKind.DEFINITION, path=path, qualname=qualname))
            return
        held = getattr(value, "__dict__", {}).get(steps[0]) if steps else None
        if steps and steps[0] in getattr(value, "__dict__", {}) and _is_plain(held):
            self._value(f"{name}.{steps[0]}", f"{access}.{steps[0]}", held, path, qualname)
            return
        self.add(Dependency(name, DependencyKind.DEFINITION, path=path, qualname=qualname))

    def _definition_unless_known(self, name: str, path: str, qualname: str) -> None:
        """The name by which a function is called: it may be bound to another function."""
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
    """The values of a module, and those of its classes."""
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
            for own, held in list(vars(value).items()):
                _index_object(held, f"{access}.{own}", f"{name}.{own}", module, index, depth + 1)
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
    """Whether a function stands in a block that an earlier run put into the file."""
    depth = 0
    for line in linecache.getlines(code.co_filename)[: code.co_firstlineno]:
        depth += line.startswith(BEGIN) - line.startswith(END)
    return depth > 0


def _is_plain(value: Any) -> bool:
    if type(value) in (tuple, list):
        return len(value) <= MOST_ITEMS and all(_is_plain(item) for item in value)
    if type(value) is dict:
        return len(value) <= MOST_ITEMS and all(_is_plain(item) for pair in value.items() for item in pair)
    return type(value) in PLAIN or isinstance(value, (torch.dtype, torch.device, torch.memory_format))


def _is_of_user(kind: type) -> bool:
    return is_user_file(_file_of(kind))


def _file_of(kind: type) -> str:
    return str(getattr(sys.modules.get(kind.__module__), "__file__", None) or "")


def _file_in(namespace: Mapping[str, Any], otherwise: str) -> str:
    path = str(namespace.get("__file__") or otherwise)
    return path if is_user_file(path) else ""


# Bytecode ------------------------------------------------------------------------------------------------------------


def _reads(code: CodeType) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each global name that a function reads, with the attributes that are read from it: ``cfg.a.b`` gives ``(a, b)``."""
    instructions = list(dis.get_instructions(code))
    for i, item in enumerate(instructions):
        if item.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(item.argval), _attributes(instructions, i + 1)


def _attributes(instructions: list[dis.Instruction], start: int) -> tuple[str, ...]:
    steps = []
    for item in instructions[start:]:
        if item.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            steps.append(str(item.argval))
        elif item.opname not in ("CACHE", "PUSH_NULL"):
            break
    return tuple(steps)


def _imported(code: CodeType, namespace: Mapping[str, Any]) -> Iterator[tuple[ModuleType, tuple[str, ...]]]:
    """What a function reads from modules that it imports itself."""
    instructions = list(dis.get_instructions(code))
    module: ModuleType | None = None
    aliases: dict[str, ModuleType] = {}
    for i, item in enumerate(instructions):
        if item.opname == "IMPORT_NAME":
            module = _module(str(item.argval), namespace)
            if module is not None and instructions[i + 1].opname == "STORE_FAST":
                # `import a.b` binds `a`.
                top = _module(str(item.argval).split(".")[0], namespace)
                aliases[str(instructions[i + 1].argval)] = top or module
        elif item.opname == "IMPORT_FROM" and module is not None:
            yield module, (str(item.argval),)
        elif item.opname.startswith("LOAD_FAST"):
            name = item.argval[-1] if isinstance(item.argval, tuple) else item.argval
            if name in aliases:
                yield aliases[name], _attributes(instructions, i + 1)


def _module(name: str, namespace: Mapping[str, Any]) -> ModuleType | None:
    package = namespace.get("__package__") or ""
    found = sys.modules.get(name) or sys.modules.get(f"{package}.{name}")
    return found if isinstance(found, ModuleType) else None
