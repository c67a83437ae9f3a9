"""What a call does beside returning tensors: a Triton version would not do it, so such targets are refused."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from mtmc_lsp.core.errors import Location, TargetUnsupported
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.workload import Target

RANDOM_OPS = ("dropout", "rand", "bernoulli", "normal", "multinomial", "exponential", "uniform", "poisson", "geometric")
CONTAINERS = (list, dict, set)
PLAIN = (bool, int, float, str, type(None))
"""Values that a guard can compare."""


def is_random(op: str) -> bool:
    """Whether an ATen operator draws random numbers; ``native_dropout`` and ``randn_like`` do."""
    name = op.split(".")[1]
    return any(word in name for word in RANDOM_OPS)


def refuse_random(graph: Graph, target: Target) -> None:
    """Refuse random numbers that a Triton version cannot draw alike.

    Those of dropout kernels draw; those of ``rand`` and ``randn`` torch does, unless dropout's seeds would come in between.

    Raises:
        TargetUnsupported: says which operator in which line.
    """
    has_dropout = any("dropout" in node.op for node in graph.nodes)
    for node in graph.nodes:
        is_left = node.draws and not has_dropout
        if is_random(node.op) and "dropout" not in node.op and not is_left:
            name = node.op.split(".")[1]
            raise TargetUnsupported(
                f"{target.qualname} draws random numbers ({name}), so its results cannot be compared",
                where=Location(target.path, node.line or target.start_line),
                remedy="Pass them in as an argument; dropout by torch.nn.functional.dropout is supported.",
            )


def refuse_unseen_changes(graph: Graph, target: Target) -> None:
    """Refuse operations that change what they are given although the trace does not say so.

    Raises:
        TargetUnsupported: says in which line.
    """
    for node in graph.nodes:
        if node.op.startswith("aten.instance_norm.") and node.args[3] is not None and node.args[5] is True:
            raise TargetUnsupported(
                f"{target.qualname} changes the running statistics of an instance norm, which its trace does not show",
                where=Location(target.path, node.line or target.start_line),
                remedy="Make it with track_running_stats=False, or call its module in evaluation mode.",
            )


@dataclass
class Watched:
    """What the modules of a target do with their attributes while it is traced."""

    reads: dict[str, object] = field(default_factory=dict)
    """Plain Python values that they read from themselves: the graph holds only for these."""
    called: set[str] = field(default_factory=set)
    """The modules whose ``forward`` ran."""
    writes: dict[str, int] = field(default_factory=dict)
    """What they assign, with the line of the user's file; in-place changes of tensors are none."""
    tensors: set[str] = field(default_factory=set)
    """The parameters and buffers that they look at."""

    def note(self, access: str, value: object) -> None:
        """Note a value that was read, where it is a plain one."""
        plain = list(value) if isinstance(value, tuple) else value
        items = plain if isinstance(plain, list) else [plain]
        if isinstance(value, (*PLAIN, tuple)) and all(isinstance(item, PLAIN) for item in items):
            self.reads[access] = plain

    def refuse_writes(self, target: Target, kept: Collection[str] = ()) -> None:
        """Refuse assignments, but for those to what the target is known to keep.

        Raises:
            TargetUnsupported: there is one; says which in which line.
        """
        for access, line in self.writes.items():
            if access in kept:
                continue
            raise TargetUnsupported(
                f"{target.qualname} assigns {access}, which its Triton version would leave as it is",
                where=Location(target.path, line or target.start_line),
                remedy=f"Write {access}.copy_(...) where it is a buffer, or return the value instead.",
            )


@contextlib.contextmanager
def watching_attributes(instance: torch.nn.Module | None, path: str) -> Iterator[Watched]:
    """Note what all modules of ``instance`` read from and assign to themselves."""
    watched = Watched()
    if instance is None:
        yield watched
        return
    originals = {name: (module, type(module)) for name, module in instance.named_modules()}
    settings: list[tuple[Any, type]] = []
    for name, (module, kind) in originals.items():
        access = access_of(name)
        settings += _watch_settings(module, access, watched, {id(item) for item, _ in settings})
        module.__class__ = _watching_class(kind, access, watched, path)
    try:
        yield watched
    finally:
        for module, kind in originals.values():
            module.__class__ = kind
        for item, kind in settings:
            object.__setattr__(item, "__class__", kind)


def access_of(name: str) -> str:
    """Python for a module's, parameter's or buffer's name: ``layers.0.weight`` is ``self.layers[0].weight``."""
    parts = ["self", *(name.split(".") if name else [])]
    return ".".join(part if not part.isdigit() else f"[{part}]" for part in parts).replace(".[", "[")


def _watch_settings(module: torch.nn.Module, access: str, watched: Watched, known: set[int]) -> list[tuple[Any, type]]:
    """Note what is read from objects that hold a module's settings, as ``self.config``.

    Returns:
        These, without those ``known`` because an outer module has them too, and their classes, to put back.
    """
    changed = []
    for name, value in list(module.__dict__.items()):
        kind = type(value)
        plain_object = hasattr(value, "__dict__") and not callable(value) and not isinstance(value, ModuleType)
        if name.startswith("_") or not plain_object or isinstance(value, torch.Tensor) or id(value) in known:
            continue
        try:
            object.__setattr__(value, "__class__", _watching_settings(kind, f"{access}.{name}", watched))
        except TypeError:
            # Built-in classes and those with slots keep their class; what they hold is not known.
            continue
        changed.append((value, kind))
    return changed


def _watching_settings(kind: type, access: str, watched: Watched) -> type:
    def __getattribute__(self: Any, name: str) -> Any:
        value = super(type(self), self).__getattribute__(name)
        if not name.startswith("_"):
            watched.note(f"{access}.{name}", value)
        return value

    return type(kind.__name__, (kind,), {"__getattribute__": __getattribute__, "__module__": kind.__module__})


def _watching_class(kind: type, access: str, watched: Watched, path: str) -> type:
    def __getattribute__(self: Any, name: str) -> Any:
        value = super(type(self), self).__getattribute__(name)
        if name == "forward":
            watched.called.add(access)
        own = object.__getattribute__(self, "__dict__")
        if not name.startswith("_") and (name in own or _is_class_value(kind, name)):
            watched.note(f"{access}.{name}", value)
        return value

    def __getattr__(self: Any, name: str) -> Any:
        # Parameters, buffers and modules come this way; one that is None (`bias=False`) decides what is computed.
        value = super(type(self), self).__getattr__(name)
        if value is None:
            watched.note(f"{access}.{name}", value)
        elif isinstance(value, torch.Tensor):
            watched.tensors.add(f"{access}.{name}")
        return value

    def __setattr__(self: Any, name: str, value: Any) -> None:
        # `self.mean += x` assigns the tensor that it changed in place, which tracing follows; `__class__` is put back by us.
        same = isinstance(value, torch.Tensor) and value is getattr(self, name, None)
        if not same and not name.startswith("__") and not _is_of_torch(kind, name):
            watched.writes.setdefault(f"{access}.{name}", _line_in(path))
        super(type(self), self).__setattr__(name, value)

    own = {
        "__getattribute__": __getattribute__,
        "__getattr__": __getattr__,
        "__setattr__": __setattr__,
        "__module__": kind.__module__,
    }
    recorder: type = type(kind.__name__, (kind,), own)
    return recorder


def _is_class_value(kind: type, name: str) -> bool:
    """Whether an attribute is one of a user's class, not of torch's."""
    holder = next((item for item in kind.__mro__ if name in vars(item)), None)
    return (
        holder is not None
        and holder.__module__.split(".")[0] != "torch"
        and isinstance(vars(holder)[name], (*PLAIN, tuple))
    )


def _is_of_torch(kind: type, name: str) -> bool:
    """Whether an attribute is PyTorch's own note, as the list of a recurrent net's weights, which follows its parameters."""
    return name.startswith("_") and kind.__module__.startswith("torch.nn.modules.")


def _line_in(path: str) -> int:
    """The line of the user's file that is running."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != path:
        frame = frame.f_back
    return int(frame.f_lineno) if frame is not None else 0


class Snapshot:
    """What a call must leave as it is: the file's globals, the modules' attributes, and random generators of Python's."""

    def __init__(self, module: ModuleType, instance: torch.nn.Module | None) -> None:
        self._holders = {"": module.__dict__}
        self._kinds: dict[str, type] = {"": ModuleType}
        for name, item in instance.named_modules() if instance is not None else ():
            holder = f"self.{name}." if name else "self."
            self._holders[holder], self._kinds[holder] = item.__dict__, type(item)
        self._before = {name: _marks(values) for name, values in self._holders.items()}
        self._random = _random_states()

    def refuse_changes(self, target: Target) -> None:
        """Refuse what has changed since.

        Raises:
            TargetUnsupported: something did; says what.
        """
        changed = self._changed()
        if changed:
            raise TargetUnsupported(
                f"{target.qualname} {changed}, which its Triton version would not do",
                where=Location(target.path, target.start_line),
                remedy="Move that out of it, to where it is called.",
            )

    def _changed(self) -> str:
        for name, state in _random_states().items():
            if self._random.get(name) != state:
                return f"draws random numbers from {name}"
        for holder, values in self._holders.items():
            before, now = self._before[holder], _marks(values)
            for name in now.keys() | before.keys():
                if now.get(name) != before.get(name) and not _is_of_torch(self._kinds[holder], name):
                    return f"changes {holder}{name}"
        return ""


def _marks(values: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Which object each name stands for, and how many elements a container has."""
    return {
        name: (id(value), len(value) if isinstance(value, CONTAINERS) else 0)
        for name, value in values.items()
        if not name.startswith("__")
    }


def _random_states() -> dict[str, object]:
    states: dict[str, object] = {"Python's random module": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy, "random"):
        state = numpy.random.get_state()
        states["numpy's global generator"] = (state[1].tobytes(), state[2])
    return states
