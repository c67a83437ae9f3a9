"""Records how functions of the user's project are called with tensors. Runs inside the user's program.

``mtmc record`` starts it through ``hook/sitecustomize.py`` in any Python from 3.10 on. It needs only the standard library,
and uses torch only after the program has imported it. It records shapes, strides, dtypes, value ranges and constants, but no
tensors and no tensor elements. An error in the recorder must not disturb the program.
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
from typing import Any

SETTINGS = "MTMC_RECORD"
"""Environment variable with ``{"root": folder, "out": folder, "targets": {file: [qualname]}}`` as JSON."""
MOST_SIGNATURES = 64
"""Signatures recorded per function. Calls with further signatures are only counted."""
RANGED_CALLS = 8
"""Calls per signature whose value ranges are recorded. Reading a range on a GPU waits for the device."""
WRITE_SECONDS = 5.0
SKIPPED = frozenset({"staticmethod", "classmethod", "property", "cached_property", "jit", "overload", "setter"})
"""Decorators of functions that cannot be targets: not called on an instance, or not executed as Python."""
LAMBDA = "<lambda>"
NOT_SIMPLE = 0x20 | 0x80 | 0x200
"""Code flags of generators, coroutines and asynchronous generators."""

Functions = dict[int, tuple[str, bool]]
"""First line (including decorators) to qualified name, and whether it is a method."""
UNREAD: Functions = {}
"""Marks a file that the recorder has not read yet."""
TRACER: Functions = {}
"""Marks the file of ``torch.compile`` that traces Python functions."""
LAUNCHER: Functions = {}
"""Marks the files of Triton that launch kernels."""
TRACER_FILE, TRACE_CALL = os.path.join("torch", "_dynamo", "symbolic_convert.py"), "inline_call"
"""That file, and its function that traces a call of a function by compiled code. Such a call has no frame of its own."""


def functions_of(text: str) -> Functions:
    """The functions and methods of a file that can be targets, also functions inside functions."""
    functions: Functions = {}
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return functions
    _collect(tree, (), functions, in_class=False)
    return functions


def _collect(node: ast.AST, scope: tuple[str, ...], functions: Functions, *, in_class: bool) -> None:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            names = {_last_name(item) for item in child.decorator_list}
            if not names & SKIPPED:
                line = min([child.lineno, *(item.lineno for item in child.decorator_list)])
                functions[line] = (".".join((*scope, child.name)), in_class)
            _collect(child, (*scope, child.name), functions, in_class=False)
        elif isinstance(child, ast.ClassDef):
            _collect(child, (*scope, child.name), functions, in_class=True)
        elif not scope and isinstance(child, (ast.Assign, ast.AnnAssign)) and isinstance(child.value, ast.Lambda):
            # Another lambda expression in it may start in the same line.
            is_alone = sum(isinstance(item, ast.Lambda) for item in ast.walk(child)) == 1
            target = child.targets[-1] if isinstance(child, ast.Assign) else child.target
            if is_alone and isinstance(target, ast.Name):
                functions[child.value.lineno] = (target.id, False)
        elif not isinstance(child, (ast.AsyncFunctionDef, ast.Lambda, ast.expr)):
            _collect(child, scope, functions, in_class=in_class)


def _last_name(decorator: ast.expr) -> str:
    node = decorator.func if isinstance(decorator, ast.Call) else decorator
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


class Recorder:
    """Records the calls of one process."""

    def __init__(self, root: str, out: str, targets: dict[str, list[str]], arguments: Any, launches: Any) -> None:
        """Prepare.

        Args:
            arguments: the module ``arguments.py``, which is loaded by its path.
            launches: a ``LaunchNotes`` of ``launches.py``, which is loaded by its path.
        """
        self._arguments, self._launches = arguments, launches
        self._root = os.path.join(root, "")
        self._out = out
        self._targets = targets
        self._files: dict[str, Functions | None] = {}
        """File name of a code object to the functions of the file; ``None`` for files outside the project."""
        self._real: dict[str, str] = {}
        self._parameters: dict[tuple[str, str], tuple[list[str], list[str]]] = {}
        self._records: dict[tuple[str, str], dict[Any, dict[str, Any]]] = {}
        self._others: dict[tuple[str, str], int] = {}
        self._traced: dict[tuple[str, str], int] = {}
        self._constructed: dict[int, tuple[Any, dict[str, list[dict[str, Any]]]]] = {}
        """``id`` of a module to a weak reference to it, and the constructor arguments of each of its classes."""
        self._inits: dict[str, list[dict[str, Any]]] = {"[]": []}
        self._last_arguments: dict[tuple[str, str], list[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._calls = self._calls_written = 0
        self._written = 0.0
        self._is_hidden = False

    def start(self) -> None:
        """Record all calls of this process from now on."""
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self._end)
        self.write()
        threading.setprofile(self.profile)
        sys.setprofile(self.profile)

    def _end(self) -> None:
        if self._calls > self._calls_written:
            self.write()

    def _forked(self) -> None:
        # The parent process writes its records itself.
        self._lock = threading.Lock()
        self._records, self._others, self._traced, self._calls, self._calls_written = {}, {}, {}, 0, 0
        self._launches.clear()

    def profile(self, frame: types.FrameType, event: str, argument: object) -> None:
        """The profile function. Python runs it at every call and return, so it checks the file name first."""
        if event != "call":
            return
        code = frame.f_code
        functions = self._files.get(code.co_filename, UNREAD)
        if functions is None:
            return
        try:
            if functions is UNREAD:
                functions = self._read_functions(code.co_filename)
            if functions is TRACER:
                if code.co_name == TRACE_CALL:
                    self._note_traced(frame)
                return
            if functions is LAUNCHER:
                self._note_launch(frame)
                return
            function = functions.get(code.co_firstlineno) if functions else None
            if function is None or code.co_flags & NOT_SIMPLE:
                return
            qualname, is_method = function
            if not qualname.endswith(code.co_name) and code.co_name != LAMBDA:
                return
            # A function that reads variables of an outer function cannot be a target. Methods that call super() read their class.
            if is_method or not code.co_freevars:
                self._record(frame, qualname, is_method)
        except Exception as error:
            # The user's program must continue. Calls that the recorder cannot handle are not recorded.
            print(f"mtmc record: cannot record a call of {code.co_name}: {error!r}", file=sys.stderr)

    def _read_functions(self, name: str) -> Functions | None:
        """Read the functions of a file; ``None`` if the file is not part of the project."""
        self._hide_from_compiler()
        if name.endswith(TRACER_FILE):
            self._files[name] = TRACER
            return TRACER
        if name.endswith(self._launches.FILES):
            self._files[name] = LAUNCHER
            return LAUNCHER
        path = os.path.realpath(name)
        is_wanted = (
            path.startswith(self._root) and "site-packages" not in path and not _in_environment(path, self._root)
        )
        if self._targets:
            is_wanted = path in self._targets
        functions: Functions | None = None
        if is_wanted and os.path.isfile(path):
            with open(path, encoding="utf-8", errors="replace") as stream:
                functions = functions_of(stream.read())
        self._files[name], self._real[name] = functions, path
        return functions

    def _hide_from_compiler(self) -> None:
        """Prevent ``torch.compile`` from compiling the recorder along with the user's code."""
        # The recorder sees torch's own files before torch compiles anything, so this runs early enough.
        skip = getattr(sys.modules.get("torch._dynamo.eval_frame"), "skip_code", None)
        if skip is not None and not self._is_hidden:
            self._is_hidden = True
            for function in (
                Recorder.profile,
                Recorder._read_functions,
                Recorder._record,
                Recorder._note_traced,
                Recorder._note_launch,
                Recorder._hide_from_compiler,
            ):
                skip(function.__code__)

    def _note_traced(self, frame: types.FrameType) -> None:
        """Note that ``torch.compile`` traces a call of a function, which becomes a part of the compiled caller."""
        values = frame.f_locals
        code = values["func"].get_code()
        functions = self._files.get(code.co_filename, UNREAD)
        if functions is UNREAD:
            functions = self._read_functions(code.co_filename)
        function = functions.get(code.co_firstlineno) if functions else None
        arguments = (*values["args"], *values["kwargs"].values())
        if function is None or all(type(item).__name__ == "ConstantVariable" for item in arguments):
            return
        path = self._real[code.co_filename]
        if self._targets and function[0] not in self._targets[path]:
            return
        with self._lock:
            self._traced[path, function[0]] = self._traced.get((path, function[0]), 0) + 1
            self._calls += 1

    def _note_launch(self, frame: types.FrameType) -> None:
        """Note the launch of a kernel of the project."""
        torch, kernel = sys.modules.get("torch"), self._launches.launched_kernel(frame)
        if torch is None or kernel is None or "<locals>" in kernel.__qualname__:
            return
        name = kernel.__code__.co_filename
        if self._files.get(name, UNREAD) is UNREAD:
            self._read_functions(name)
        path = self._real.get(name, "")
        if self._files[name] is None or (self._targets and kernel.__qualname__ not in self._targets[path]):
            return
        compiler = torch._C._dynamo.eval_frame.set_eval_frame(None)
        try:
            with self._lock, torch._C.DisableTorchFunction():
                self._launches.note(frame, path, torch)
        finally:
            torch._C._dynamo.eval_frame.set_eval_frame(compiler)
        self._count()

    def _record(self, frame: types.FrameType, qualname: str, is_method: bool) -> None:
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(torch, "Tensor") or not hasattr(torch, "nn"):
            return
        path = self._real[frame.f_code.co_filename]
        names_in_file = self._targets.get(path)
        is_init = is_method and qualname.endswith(".__init__")
        if names_in_file is not None and qualname not in names_in_file and not is_init:
            return
        names, variadic = self._parameters.get((path, qualname)) or _parameters(frame.f_code)
        self._parameters[path, qualname] = names, variadic
        local_values = frame.f_locals
        instance = local_values.get(names[0]) if is_method and names else None
        if is_method and not isinstance(instance, torch.nn.Module):
            return
        values = [(name, local_values.get(name)) for name in (names[1:] if is_method else names)]
        values += [(name, value) for name in variadic if (value := local_values.get(name.lstrip("*")))]
        compiler = torch._C._dynamo.eval_frame.set_eval_frame(None)
        try:
            is_compiled = _is_compiled(frame.f_code)
            with torch._C.DisableTorchFunction():
                if is_init:
                    self._record_constructor(path, qualname, instance, values, torch)
                else:
                    self._record_call(path, qualname, instance, values, torch, is_compiled=is_compiled)
        finally:
            torch._C._dynamo.eval_frame.set_eval_frame(compiler)

    def _record_constructor(
        self, path: str, qualname: str, instance: Any, values: list[tuple[str, Any]], torch: types.ModuleType
    ) -> None:
        import weakref

        arguments = [self._arguments.argument_record(name, value, torch) for name, value in values]
        name = qualname.rpartition(".")[0]
        reference, classes = self._constructed.get(id(instance), (None, {}))
        if reference is None or reference() is not instance:
            classes = {}
        # Equal argument lists are one object, so that equal layers can be recognised by identity.
        arguments = self._inits.setdefault(json.dumps(arguments), arguments)
        classes[name] = arguments
        self._constructed[id(instance)] = (weakref.ref(instance), classes)
        self._last_arguments[path, name] = arguments

    def _constructor(self, path: str, qualname: str, instance: Any) -> list[dict[str, Any]]:
        """The constructor arguments of an instance. For a copied instance, those of the most recently constructed one."""
        name = qualname.rpartition(".")[0]
        reference, classes = self._constructed.get(id(instance), (None, {}))
        if reference is not None and reference() is instance and classes:
            # The outermost constructor was called first.
            return classes.get(name) or next(iter(classes.values()))
        return self._last_arguments.get((path, name), self._inits["[]"])

    def _record_call(
        self,
        path: str,
        qualname: str,
        instance: Any,
        values: list[tuple[str, Any]],
        torch: types.ModuleType,
        *,
        is_compiled: bool,
    ) -> None:
        tensors = [tensor for _, value in values for tensor in self._arguments.tensors_of(value, torch)]
        plain = (torch.Tensor, torch.nn.Parameter)
        # Tensor subclasses are fake tensors of a tracer or wrappers. Their calls are not calls of the user.
        if not tensors or any(type(value) not in plain for value in tensors):
            return
        init = self._constructor(path, qualname, instance) if instance is not None else self._inits["[]"]
        dtype = _first_dtype(instance) if instance is not None else None
        autocast = _autocast_dtype(torch)
        key = (id(init), dtype, autocast, *(self._arguments.key_of(value, torch) for _, value in values))
        with self._lock:
            records = self._records.setdefault((path, qualname), {})
            record = records.get(key)
            if record is None:
                if len(records) >= MOST_SIGNATURES:
                    self._others[path, qualname] = self._others.get((path, qualname), 0) + 1
                    return
                arguments = [self._arguments.argument_record(name, value, torch) for name, value in values]
                record = {"count": 0, "training": 0, "grad": 0, "compiled": 0, "arguments": arguments, "init": init}
                # Checked once, because checking all parameters takes longer than a small call.
                record["has_gradients"] = instance is not None and any(p.requires_grad for p in instance.parameters())
                record["module_dtype"] = _module_dtype(instance) if instance is not None else ""
                record["autocast"] = autocast
                records[key] = record
            record["count"] += 1
            record["training"] += bool(instance is not None and instance.training)
            has_gradients = record["has_gradients"]
            needs = torch.is_grad_enabled() and (has_gradients or any(value.requires_grad for value in tensors))
            record["grad"] += bool(needs)
            record["compiled"] += is_compiled
            if record["count"] <= RANGED_CALLS:
                for recorded, (_, value) in zip(record["arguments"], values, strict=True):
                    self._arguments.update_range(recorded, value, torch)
        self._count()

    def _count(self) -> None:
        """Count a recorded call, and write the records from time to time."""
        with self._lock:
            self._calls += 1
            due = self._calls & (self._calls - 1) == 0 or time.monotonic() - self._written > WRITE_SECONDS
        if due:
            self.write()

    def write(self) -> None:
        """Write all records so far to the file of this process."""
        with self._lock:
            self._written, self._calls_written = time.monotonic(), self._calls
            functions = [
                {
                    "path": path,
                    "qualname": qualname,
                    "others": self._others.get((path, qualname), 0),
                    "traced": self._traced.get((path, qualname), 0),
                    "calls": list(self._records.get((path, qualname), {}).values()),
                }
                for path, qualname in {**self._records, **self._traced}
            ]
            texts = {".json": json.dumps(functions), ".launches": json.dumps(self._launches.to_json())}
        file = os.path.join(self._out, f"{os.getpid()}")
        try:
            for ending, text in texts.items():
                with open(f"{file}{ending}.new", "w", encoding="utf-8") as stream:
                    stream.write(text)
                os.replace(f"{file}{ending}.new", f"{file}{ending}")
        except OSError as error:
            if not os.path.isdir(self._out):
                # This process outlived the recorded command, which already returned.
                return
            print(f"mtmc record: cannot write the records: {error}", file=sys.stderr)


def _is_compiled(code: types.CodeType) -> bool:
    """Whether a frame runs code that ``torch.compile`` generated in place of the function's own."""
    return code in getattr(sys.modules.get("torch._dynamo.convert_frame"), "output_codes", ())


def _in_environment(path: str, root: str) -> bool:
    """Whether the file is in a virtual environment inside the project."""
    folder = os.path.dirname(path)
    while len(folder) >= len(root):
        if os.path.exists(os.path.join(folder, "pyvenv.cfg")):
            return True
        folder = os.path.dirname(folder)
    return False


def _parameters(code: types.CodeType) -> tuple[list[str], list[str]]:
    """Names of the parameters, and names of ``*args`` and ``**kwargs`` with their stars."""
    count = code.co_argcount + code.co_kwonlyargcount
    stars = [star for flag, star in ((0x04, "*"), (0x08, "**")) if code.co_flags & flag]
    further = code.co_varnames[count : count + len(stars)]
    return list(code.co_varnames[:count]), [star + name for star, name in zip(stars, further, strict=True)]


def _first_dtype(instance: Any) -> Any:
    """The dtype of the module's first parameter, which is quick to read in every call."""
    parameter = next(instance.parameters(), None)
    return None if parameter is None else parameter.dtype


def _autocast_dtype(torch: types.ModuleType) -> str:
    """The dtype of autocast on the GPU; empty if it is off."""
    if not torch.is_autocast_enabled():
        return ""
    read = getattr(torch, "get_autocast_dtype", lambda _: torch.get_autocast_gpu_dtype())
    return str(read("cuda")).replace("torch.", "")


def _module_dtype(instance: Any) -> str:
    """The dtype of all floating-point parameters and buffers; empty if there are none, or several dtypes."""
    tensors = (*instance.parameters(), *instance.buffers())
    dtypes = {str(tensor.dtype).replace("torch.", "") for tensor in tensors if tensor.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else ""


def _begin() -> None:
    settings = json.loads(os.environ[SETTINGS])
    arguments = sys.modules["_mtmc_arguments"]
    launches = sys.modules["_mtmc_launches"].LaunchNotes(arguments.argument_record, arguments.update_range)
    Recorder(settings["root"], settings["out"], settings["targets"], arguments, launches).start()


if SETTINGS in os.environ and __name__ == "_mtmc_recorder":
    _begin()
