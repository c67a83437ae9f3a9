"""Side effects of a call beyond its return value. A Triton version would not have them, so such targets are refused."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum, Flag
from types import ModuleType
from typing import Any

import torch

from mtmc_lsp.capture.worker.modules.members import access_of, member_of
from mtmc_lsp.core.errors import Location, TargetUnsupported
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.workload import Target

RANDOM_OPS = ("dropout", "rand", "bernoulli", "normal", "multinomial", "exponential", "uniform", "poisson", "geometric")
SUPPORTED_DRAWS = (
    "Pass them as an argument, or draw them by dropout, or by rand, randn, randint, bernoulli, exponential_, normal_ or uniform_ "
    "of contiguous tensors."
)
BESIDE_DROPOUT = "Pass them as an argument: the seeds of its dropout would change the order of draws."
CONTAINERS = (list, dict, set)
PLAIN = (bool, int, float, str, type(None))
"""Values that a guard can compare."""


def is_random(op: str) -> bool:
    """Whether an ATen operator draws random numbers, for example ``native_dropout`` and ``randn_like``."""
    name = op.split(".")[1]
    return any(word in name for word in RANDOM_OPS)


def refuse_random(graph: Graph, target: Target) -> None:
    """Refuse random numbers that a Triton version cannot reproduce.

    Kernels draw the numbers of dropout. ``rand``, ``randn`` and the like stay torch calls, but only without dropout: its seeds
    would change the order of draws.

    Raises:
        TargetUnsupported: names operator and line.
    """
    has_dropout = any("dropout" in node.op for node in graph.nodes)
    for node in graph.nodes:
        stays_torch_call = node.draws and not has_dropout
        if is_random(node.op) and "dropout" not in node.op and not stays_torch_call:
            name = node.op.split(".")[1]
            raise TargetUnsupported(
                f"{target.qualname} draws random numbers ({name}), so its results cannot be compared",
                where=Location(target.path, node.line or target.start_line),
                remedy=BESIDE_DROPOUT if node.draws else SUPPORTED_DRAWS,
            )


def refuse_hidden_mutations(graph: Graph, target: Target) -> None:
    """Refuse operations that modify their inputs although the trace does not contain the modification.

    Raises:
        TargetUnsupported: names the line.
    """
    for node in graph.nodes:
        if node.op.startswith("aten.instance_norm.") and node.args[3] is not None and node.args[5] is True:
            raise TargetUnsupported(
                f"{target.qualname} updates the running statistics of an instance norm, which torch.export does not trace",
                where=Location(target.path, node.line or target.start_line),
                remedy="Construct it with track_running_stats=False, or use its module in evaluation mode.",
            )


@dataclass
class AttributeUses:
    """Uses of module attributes while the target is traced."""

    reads: dict[str, object] = field(default_factory=dict)
    """Plain Python values that modules read from themselves. The graph is valid only for these values."""
    called: set[str] = field(default_factory=set)
    """Accesses of the modules whose ``forward`` ran."""
    writes: dict[str, int] = field(default_factory=dict)
    """Accesses of assigned attributes, and the line in the user's file. In-place changes of tensors do not count."""
    overwritten: set[str] = field(default_factory=set)
    """Accesses of the attributes that were assigned before anything read their tensors."""
    tensors: set[str] = field(default_factory=set)
    """Accesses of the parameters and buffers that are read."""

    def record_read(self, access: str, value: object) -> None:
        """Record a value that was read, if it is plain. A member of an enumeration is recorded by its name or its bits."""
        if isinstance(value, Flag):
            access, value = f"{access}.value", value.value
        elif isinstance(value, Enum):
            access, value = f"{access}.name", value.name
        plain = list(value) if isinstance(value, tuple) else value
        items = plain if isinstance(plain, list) else [plain]
        if isinstance(value, (*PLAIN, tuple)) and all(isinstance(item, PLAIN) for item in items):
            self.reads[access] = plain

    def refuse_writes(self, target: Target, state: Collection[str] = ()) -> None:
        """Refuse assignments, except to state tensors.

        Raises:
            TargetUnsupported: names the first assignment and its line.
        """
        for access, line in self.writes.items():
            if access in state:
                continue
            raise TargetUnsupported(
                f"{target.qualname} assigns {access}, and its Triton version would not",
                where=Location(target.path, line or target.start_line),
                remedy=f"Use {access}.copy_(...) if it is a buffer, or return the value instead.",
            )


@contextlib.contextmanager
def recording_attribute_uses(instance: torch.nn.Module | None, path: str) -> Iterator[AttributeUses]:
    """Record the attributes that the modules of ``instance`` read from and assign to themselves."""
    uses = AttributeUses()
    if instance is None:
        yield uses
        return
    originals = {name: (module, type(module)) for name, module in instance.named_modules()}
    settings: list[tuple[Any, type]] = []
    for name, (module, kind) in originals.items():
        access = access_of(instance, name)
        settings += _record_settings(module, access, uses, {id(item) for item, _ in settings})
        module.__class__ = _recording_class(kind, access, uses, path)
    try:
        yield uses
    finally:
        for module, kind in originals.values():
            module.__class__ = kind
        for item, kind in settings:
            object.__setattr__(item, "__class__", kind)


def _record_settings(
    module: torch.nn.Module, access: str, uses: AttributeUses, seen_by_outer_modules: set[int]
) -> list[tuple[Any, type]]:
    """Record reads from objects that hold a module's settings, such as ``self.config``.

    Returns:
        The objects and their classes, to restore them. ``seen_by_outer_modules`` has the ``id`` of objects to skip.
    """
    changed = []
    for name, value in list(module.__dict__.items()):
        kind = type(value)
        plain_object = hasattr(value, "__dict__") and not callable(value) and not isinstance(value, ModuleType)
        if (
            name.startswith("_")
            or not plain_object
            or isinstance(value, (torch.Tensor, Enum))
            or id(value) in seen_by_outer_modules
        ):
            continue
        try:
            object.__setattr__(value, "__class__", _recording_settings(kind, member_of(access, module, name), uses))
        except Exception:
            # Objects of built-in classes or with slots keep their class, and a user's metaclass can refuse any subclass with
            # any exception. Their reads are not recorded.
            continue
        changed.append((value, kind))
    return changed


def _recording_settings(kind: type, access: str, uses: AttributeUses) -> type:
    def __getattribute__(self: Any, name: str) -> Any:
        value = super(type(self), self).__getattribute__(name)
        if not name.startswith("_"):
            uses.record_read(member_of(access, self, name), value)
        return value

    return type(kind.__name__, (kind,), {"__getattribute__": __getattribute__, "__module__": kind.__module__})


def _recording_class(kind: type, access: str, uses: AttributeUses, path: str) -> type:
    def __getattribute__(self: Any, name: str) -> Any:
        value = super(type(self), self).__getattribute__(name)
        if name == "forward":
            uses.called.add(access)
        members = object.__getattribute__(self, "__dict__")
        if not name.startswith("_") and (name in members or _is_class_value(kind, name)):
            uses.record_read(member_of(access, self, name), value)
        if isinstance(value, torch.Tensor):
            uses.tensors.add(member_of(access, self, name))
        return value

    def __getattr__(self: Any, name: str) -> Any:
        # Reads of parameters, buffers and modules. One that is None (`bias=False`) decides what is computed.
        value = super(type(self), self).__getattr__(name)
        if value is None:
            uses.record_read(member_of(access, self, name), value)
        elif isinstance(value, torch.Tensor):
            uses.tensors.add(member_of(access, self, name))
        return value

    def __setattr__(self: Any, name: str, value: Any) -> None:
        # `self.mean += x` assigns the tensor that it changed in place, which the trace contains. `__class__` is ours.
        full, read = member_of(access, self, name), set(uses.tensors)
        is_same = isinstance(value, torch.Tensor) and value is getattr(self, name, None)
        uses.tensors &= read
        if not is_same and not name.startswith("__") and not _is_of_torch(kind, name):
            if full not in {*uses.tensors, *uses.writes}:
                uses.overwritten.add(full)
            uses.writes.setdefault(full, _line_in(path))
        super(type(self), self).__setattr__(name, value)

    members = {
        "__getattribute__": __getattribute__,
        "__getattr__": __getattr__,
        "__setattr__": __setattr__,
        "__module__": kind.__module__,
    }
    recorder: type = type(kind.__name__, (kind,), members)
    return recorder


def _is_class_value(kind: type, name: str) -> bool:
    """Whether the attribute belongs to a user's class, not to one of torch."""
    holder = next((item for item in kind.__mro__ if name in vars(item)), None)
    return (
        holder is not None
        and holder.__module__.split(".")[0] != "torch"
        and isinstance(vars(holder)[name], (*PLAIN, tuple))
    )


def _is_of_torch(kind: type, name: str) -> bool:
    """Whether PyTorch maintains the attribute, for example the weight list of recurrent layers."""
    return name.startswith("_") and kind.__module__.startswith("torch.nn.modules.")


def _line_in(path: str) -> int:
    """The line of the user's file that is running; 0 if none is."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != path:
        frame = frame.f_back
    return int(frame.f_lineno) if frame is not None else 0


class Snapshot:
    """State that a call must not change: globals of the file, attributes of modules, random generators of Python and numpy."""

    def __init__(self, module: ModuleType, instance: torch.nn.Module | None) -> None:
        self._holders = {"": module.__dict__}
        self._kinds: dict[str, type] = {"": ModuleType}
        for name, item in instance.named_modules() if instance is not None else ():
            holder = f"self.{name}." if name else "self."
            self._holders[holder], self._kinds[holder] = item.__dict__, type(item)
        self._before = {name: _marks(values) for name, values in self._holders.items()}
        self._random = _random_states()

    def refuse_changes(self, target: Target) -> None:
        """Refuse changes since the snapshot.

        Raises:
            TargetUnsupported: names the first change.
        """
        changed = self.changes()
        if changed:
            raise TargetUnsupported(
                f"{target.qualname} {changed}, and its Triton version would not",
                where=Location(target.path, target.start_line),
                remedy="Move this side effect to the caller.",
            )

    def changes(self) -> str:
        """The first change since the snapshot in words; empty if there is none."""
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
    """The ``id`` of each value, and the length of containers."""
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
