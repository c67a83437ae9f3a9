"""Notes how functions of the user's project are called with tensors. Runs inside the user's own program.

``mtmc record`` starts it through ``hook/sitecustomize.py``, in any Python from 3.10 on. It needs the standard library
alone, looks for torch only once the program has imported it, and keeps shapes, strides, dtypes, ranges of values and
constants: never a tensor, and never a tensor's elements. A fault of its own must not disturb the program.
"""

from __future__ import annotations

import ast
import atexit
import json
import os
import sys
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

SETTINGS = "MTMC_RECORD"
"""The variable that holds ``{"root": folder, "out": folder, "targets": {file: [qualname]}}`` as JSON."""
MOST_SIGNATURES = 64
"""Of one function; calls with further ones are counted only."""
RANGED_CALLS = 8
"""Calls of each signature whose tensors' ranges are looked at: on a GPU that waits for the device."""
LARGEST_RANGED = 1 << 27
"""Elements of the largest tensor whose range is looked at."""
LONGEST = 64
"""Elements of a list, or characters of a string, that is still a constant and not data."""
WRITE_SECONDS = 5.0
SKIPPED = frozenset({"staticmethod", "classmethod", "property", "cached_property", "jit", "overload", "setter"})
"""Decorators of what is no target: not called on an instance, or never run as Python."""
PLAIN = (bool, int, float, str, type(None))
NOT_SIMPLE = 0x20 | 0x80 | 0x200
"""Code flags of generators, coroutines and asynchronous generators."""

Functions = dict[int, tuple[str, bool]]
"""First line (decorators included) to qualified name, and whether it is a method."""
UNSEEN: Functions = {}
"""Stands for a file that is met for the first time."""


def functions_of(text: str) -> Functions:
    """The functions and methods of a file that may be targets; those inside functions are none."""
    found: Functions = {}
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return found
    _collect(tree, (), found, in_class=False)
    return found


def _collect(node: ast.AST, scope: tuple[str, ...], found: Functions, *, in_class: bool) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            names = {_last_name(item) for item in child.decorator_list}
            if not names & SKIPPED:
                line = min([child.lineno, *(item.lineno for item in child.decorator_list)])
                found[line] = (".".join((*scope, child.name)), in_class)
        elif isinstance(child, ast.ClassDef):
            _collect(child, (*scope, child.name), found, in_class=True)
        elif not isinstance(child, (ast.AsyncFunctionDef, ast.Lambda, ast.expr)):
            _collect(child, scope, found, in_class=in_class)


def _last_name(decorator: ast.expr) -> str:
    node = decorator.func if isinstance(decorator, ast.Call) else decorator
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


class Recorder:
    """The notes of one process."""

    def __init__(self, root: str, out: str, targets: dict[str, list[str]]) -> None:
        self._root = os.path.join(root, "")
        self._out = out
        self._targets = targets
        self._files: dict[str, Functions | None] = {}
        """Code's file name to its functions; None for files that are not looked at."""
        self._real: dict[str, str] = {}
        self._parameters: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
        self._seen: dict[tuple[str, str], dict[Any, dict[str, Any]]] = {}
        self._others: dict[tuple[str, str], int] = {}
        self._made: dict[int, tuple[Any, dict[str, list[dict[str, Any]]]]] = {}
        """``id`` of a module to the module (weakly) and each of its classes' constructor arguments."""
        self._inits: dict[str, list[dict[str, Any]]] = {"[]": []}
        self._last_made: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._calls = self._calls_written = 0
        self._written = 0.0
        self._is_hidden = False

    def start(self) -> None:
        """Watch every call of this process from now on."""
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self._end)
        self.write()
        threading.setprofile(self.watch)
        sys.setprofile(self.watch)

    def _end(self) -> None:
        if self._calls > self._calls_written:
            self.write()

    def _forked(self) -> None:
        # The parent writes what it saw itself.
        self._lock = threading.Lock()
        self._seen, self._others, self._calls, self._calls_written = {}, {}, 0, 0

    def watch(self, frame: types.FrameType, event: str, argument: object) -> None:
        """The profile function: called at every call and return, so it looks at the file name first."""
        if event != "call":
            return
        code = frame.f_code
        functions = self._files.get(code.co_filename, UNSEEN)
        if functions is None:
            return
        try:
            if functions is UNSEEN:
                functions = self._look_at(code.co_filename)
            known = functions.get(code.co_firstlineno) if functions else None
            if known is not None and not code.co_flags & NOT_SIMPLE and known[0].endswith(code.co_name):
                self._note(frame, *known)
        except Exception as error:
            # The user's program goes on whatever happens here; what was not understood is not recorded.
            print(f"mtmc record: a call of {code.co_name} was not understood: {error!r}", file=sys.stderr)

    def _look_at(self, name: str) -> Functions | None:
        """The functions of a file that is met for the first time; None where it is none of the project's."""
        self._hide_from_compiler()
        path = os.path.realpath(name)
        own = path.startswith(self._root) and "site-packages" not in path and not _in_environment(path, self._root)
        if self._targets:
            own = path in self._targets
        functions: Functions | None = None
        if own and os.path.isfile(path):
            with open(path, encoding="utf-8", errors="replace") as stream:
                functions = functions_of(stream.read())
        self._files[name], self._real[name] = functions, path
        return functions

    def _hide_from_compiler(self) -> None:
        """Keep ``torch.compile`` from compiling the watching itself, where it is compiled code that is watched."""
        # Its own files are met before it compiles anything, so it is never too late here.
        skip = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
        if skip is not None and not self._is_hidden:
            self._is_hidden = True
            for function in (Recorder.watch, Recorder._look_at, Recorder._note, Recorder._hide_from_compiler):
                skip(function.__code__)

    def _note(self, frame: types.FrameType, qualname: str, is_method: bool) -> None:
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "Tensor") or not hasattr(torch, "nn"):
            return
        path = self._real[frame.f_code.co_filename]
        wanted = self._targets.get(path)
        is_init = is_method and qualname.endswith(".__init__")
        if wanted is not None and qualname not in wanted and not is_init:
            return
        names, extra = self._parameters.get((path, qualname)) or _parameters(frame.f_code)
        self._parameters[path, qualname] = names, extra
        held = frame.f_locals
        instance = held.get(names[0]) if is_method and names else None
        if is_method and not isinstance(instance, torch.nn.Module):
            return
        values = [(name, held.get(name)) for name in (names[1:] if is_method else names)]
        values += [(name, held[name]) for name in extra if held.get(name)]
        note = self._note_init if is_init else self._note_call
        compiler = torch._C._dynamo.eval_frame.set_eval_frame(None)
        try:
            with torch._C.DisableTorchFunction():
                note(path, qualname, instance, values, torch)
        finally:
            torch._C._dynamo.eval_frame.set_eval_frame(compiler)

    def _note_init(
        self, path: str, qualname: str, instance: Any, values: list[tuple[str, Any]], torch: types.ModuleType
    ) -> None:
        import weakref

        arguments = [_argument(name, value, torch) for name, value in values]
        name = qualname.rpartition(".")[0]
        reference, classes = self._made.get(id(instance), (None, {}))
        if reference is None or reference() is not instance:
            classes = {}
        # Equal ones are one list, so that layers made alike are told to be alike by its identity.
        arguments = self._inits.setdefault(json.dumps(arguments), arguments)
        classes[name] = arguments
        self._made[id(instance)] = (weakref.ref(instance), classes)
        self._last_made[path, name] = arguments

    def _constructor(self, path: str, qualname: str, instance: Any) -> list[dict[str, Any]]:
        """What the instance's constructor was called with; a copied instance has that of the last one made."""
        name = qualname.rpartition(".")[0]
        reference, classes = self._made.get(id(instance), (None, {}))
        if reference is not None and reference() is instance and classes:
            # The outermost constructor was called first.
            return classes.get(name) or next(iter(classes.values()))
        return self._last_made.get((path, name), self._inits["[]"])

    def _note_call(
        self, path: str, qualname: str, instance: Any, values: list[tuple[str, Any]], torch: types.ModuleType
    ) -> None:
        tensors = [value for _, value in values if isinstance(value, torch.Tensor)]
        plain = (torch.Tensor, torch.nn.Parameter)
        # Subclasses are fakes of a tracer or wrappers, whose calls are no calls of the user's.
        if not tensors or any(type(value) not in plain for value in tensors):
            return
        init = self._constructor(path, qualname, instance) if instance is not None else self._inits["[]"]
        key = (id(init), *(_key(value, torch) for _, value in values))
        with self._lock:
            found = self._seen.setdefault((path, qualname), {})
            record = found.get(key)
            if record is None:
                if len(found) >= MOST_SIGNATURES:
                    self._others[path, qualname] = self._others.get((path, qualname), 0) + 1
                    return
                arguments = [_argument(name, value, torch) for name, value in values]
                record = {"count": 0, "training": 0, "grad": 0, "arguments": arguments, "init": init}
                # Looking through all parameters at every call would take longer than small calls do.
                record["learns"] = instance is not None and any(p.requires_grad for p in instance.parameters())
                found[key] = record
            record["count"] += 1
            record["training"] += bool(instance is not None and instance.training)
            needs = torch.is_grad_enabled() and (record["learns"] or any(value.requires_grad for value in tensors))
            record["grad"] += bool(needs)
            if record["count"] <= RANGED_CALLS:
                for kept, (_, value) in zip(record["arguments"], values, strict=True):
                    _widen(kept, value, torch)
            self._calls += 1
            due = self._calls & (self._calls - 1) == 0 or time.monotonic() - self._written > WRITE_SECONDS
        if due:
            self.write()

    def write(self) -> None:
        """Write all notes so far into a file of this process."""
        with self._lock:
            self._written, self._calls_written = time.monotonic(), self._calls
            functions = [
                {
                    "path": path,
                    "qualname": qualname,
                    "others": self._others.get((path, qualname), 0),
                    "calls": list(found.values()),
                }
                for (path, qualname), found in self._seen.items()
            ]
            text = json.dumps(functions)
        file = os.path.join(self._out, f"{os.getpid()}.json")
        try:
            with open(f"{file}.new", "w", encoding="utf-8") as stream:
                stream.write(text)
            os.replace(f"{file}.new", file)
        except OSError as error:
            if not os.path.isdir(self._out):
                # A process that outlives the recorded command, which has been answered.
                return
            print(f"mtmc record: the notes cannot be written: {error}", file=sys.stderr)


def _in_environment(path: str, root: str) -> bool:
    """Whether a virtual environment inside the project holds the file."""
    folder = os.path.dirname(path)
    while len(folder) >= len(root):
        if os.path.exists(os.path.join(folder, "pyvenv.cfg")):
            return True
        folder = os.path.dirname(folder)
    return False


def _parameters(code: types.CodeType) -> tuple[list[str], list[str]]:
    """Names of the parameters, and those of ``*args`` and ``**kwargs``."""
    count = code.co_argcount + code.co_kwonlyargcount
    extra = bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)
    return list(code.co_varnames[:count]), list(code.co_varnames[count : count + extra])


def _argument(name: str, value: Any, torch: types.ModuleType) -> dict[str, Any]:
    """What is kept of one argument."""
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        if value.layout is not torch.strided:
            return {"name": name, "other": "tensor that is not strided"}
        tensor: dict[str, Any] = {"shape": list(value.shape), "stride": list(value.stride())}
        tensor["dtype"] = str(value.dtype).replace("torch.", "")
        return {"name": name, "tensor": tensor}
    if _is_constant(value):
        return {"name": name, "constant": list(value) if isinstance(value, (list, tuple)) else value}
    return {"name": name, "other": type(value).__name__}


def _is_constant(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return len(value) <= LONGEST and all(type(item) in PLAIN and _is_constant(item) for item in value)
    if type(value) is float:
        return value - value == 0
    return type(value) in PLAIN and (not isinstance(value, str) or len(value) <= LONGEST)


def _key(value: Any, torch: types.ModuleType) -> object:
    """What tells one signature from another: not a number, as a step count or a learning rate is."""
    kind = type(value)
    if kind is torch.Tensor or kind is torch.nn.Parameter:
        return (value.shape, value.stride(), value.dtype) if value.layout is torch.strided else kind
    if kind is bool or kind is str or value is None:
        return value
    return (kind, repr(value)) if kind in (list, tuple) and _is_constant(value) else kind


def _widen(kept: dict[str, Any], value: Any, torch: types.ModuleType) -> None:
    """Take one more call's value into what is kept: the range of a tensor, or that a number varies."""
    if "constant" in kept:
        kept["varies"] = kept.get("varies", False) or value != kept["constant"]
    if "tensor" not in kept or not 0 < value.numel() <= LARGEST_RANGED or value.device.type == "meta":
        return
    if value.dtype is torch.bool or value.is_complex():
        return
    if value.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    low, high = (float(item) for item in _extremes(value, torch))
    if low - low == 0 and high - high == 0:
        tensor = kept["tensor"]
        tensor["low"], tensor["high"] = min(low, tensor.get("low", low)), max(high, tensor.get("high", high))


def _extremes(value: Any, torch: types.ModuleType) -> Iterator[Any]:
    try:
        pair = torch.aminmax(value.detach())
    except (RuntimeError, NotImplementedError):
        # float8 has no minimum, and a tensor inside vmap has no single one.
        return iter((float("nan"), float("nan")))
    return iter([item.item() for item in pair])


def _begin() -> None:
    settings = json.loads(os.environ[SETTINGS])
    Recorder(settings["root"], settings["out"], settings["targets"]).start()


if SETTINGS in os.environ and __name__ == "_mtmc_recorder":
    _begin()
