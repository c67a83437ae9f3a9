"""Runs the target as it is, as a function of all tensors that it reads: what it does and gives, before its graph is looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import torch

from mtmc_lsp.capture.result_structure import PLAIN, can_be_rebuilt, classes, leaves, parts, tensors_of
from mtmc_lsp.capture.worker.calls import Call, user_error
from mtmc_lsp.capture.worker.export import export_error
from mtmc_lsp.capture.worker.graph_reader import InputTensor
from mtmc_lsp.capture.worker.module_state import held_tensors, refuse_unknown
from mtmc_lsp.capture.worker.module_structure import class_name
from mtmc_lsp.capture.worker.passes.graph_cleanup import Layout
from mtmc_lsp.capture.worker.side_effects import Snapshot, access_of
from mtmc_lsp.core.errors import Location, TargetUnsupported
from mtmc_lsp.core.graph import InputKind
from mtmc_lsp.core.workload import Target


def buffers(call: Call) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of the call's module that are no arguments of it."""
    named = call.instance.named_buffers() if call.instance is not None else iter(())
    return ((name, buffer) for name, buffer in named if access_of(name) not in call.accesses)


def _values(call: Call, inputs: list[InputTensor], tensors: tuple[torch.Tensor, ...]) -> list[Any]:
    by_name = {
        item.name: tensor for item, tensor in zip(inputs, tensors, strict=True) if item.kind is InputKind.ARGUMENT
    }
    return [by_name.get(name, value) for name, value in zip(call.names, call.values, strict=True)]


class _Bound(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """Gives functional_call a ``forward`` that is the target's method."""

    def __init__(self, instance: torch.nn.Module, call: Call) -> None:
        super().__init__()
        self.instance = instance
        self.__dict__["call"] = call

    def forward(self, values: list[Any]) -> Any:
        return self.__dict__["call"].run(values)


def flat_function(call: Call, inputs: list[InputTensor]) -> Any:
    """The target as a function of the input tensors alone, parameters included."""
    parameters = [item for item in inputs if item.kind is not InputKind.ARGUMENT]
    names = []
    if call.instance is not None:
        names = [n for n, _ in call.instance.named_parameters()] + [n for n, _ in buffers(call)]

    def flat(*tensors: torch.Tensor) -> Any:
        values = _values(call, inputs, tensors)
        if call.instance is None or not parameters:
            return call.run(values)
        given = tensors[len(inputs) - len(parameters) :]
        replaced = {f"instance.{name}": tensor for name, tensor in zip(names, given, strict=True)}
        return torch.func.functional_call(_Bound(call.instance, call), replaced, (values,))

    return flat


def run_eagerly(module: ModuleType, call: Call, inputs: list[InputTensor], target: Target) -> list[Layout]:
    """Run the target twice: it must not raise, and must do the same again.

    Returns:
        The shape and strides of each tensor that it returns.
    """
    runs: list[list[Any]] = []
    before, held = None, dict[str, torch.Tensor]()
    try:
        for _ in range(2):
            # What the first call alone changes is a cache, as a table of positions is.
            before, held = Snapshot(module, call.instance) if runs else None, held_tensors(call.instance)
            torch.manual_seed(0)
            tensors = tuple(item.value.clone(memory_format=torch.preserve_format) for item in inputs)
            with torch.no_grad():
                value = flat_function(call, inputs)(*tensors)
            _check_returned(call.own(value), target, partial(class_name, file=module))
            changed = [not torch.equal(t, item.value) for t, item in zip(tensors, inputs, strict=True)]
            written = [t if is_other else None for t, is_other in zip(tensors, changed, strict=True)]
            runs.append([*leaves(value), *written])
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:
        raise user_error(error, target, "on the workload's inputs") from error
    now = held_tensors(call.instance)
    anew = {access for access in held if now.get(access) is not held[access]}
    refuse_unknown(held, anew, inputs[0].value.device.type)
    first, second = runs
    for a, b in zip(first, second, strict=True):
        if not _nearly_same(a, b):
            raise TargetUnsupported(
                f"{target.qualname} gives different results for the same inputs and seed, so nothing can be verified",
                where=Location(target.path, target.start_line),
                remedy="Draw random numbers from torch's generator, and keep no state between calls.",
            )
    assert before is not None
    before.refuse_changes(target)
    return [(tuple(t.shape), t.stride()) for t in tensors_of(value)]


def _nearly_same(a: Any, b: Any) -> bool:
    """Equal but for the reordering of atomic sums."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return repr(a) == repr(b)
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    difference = torch.linalg.vector_norm(torch.nan_to_num(a.double() - b.double()))
    return bool(difference <= 1e-3 * torch.linalg.vector_norm(torch.nan_to_num(a.double())) + 1e-30)


def _check_returned(value: Any, target: Target, named: Callable[[type], str]) -> None:
    """Refuse results that cannot be put together again.

    Raises:
        TargetUnsupported: there is one; says which.
    """
    items = leaves(value)
    other = [type(item).__name__ for item in items if not isinstance(item, (torch.Tensor, *PLAIN))]
    unnamed = [kind.__name__ for kind in classes(value) if not named(kind).replace(".", "").isidentifier()]
    remedy = "Return tensors and plain values, or tuples, lists, dictionaries, named tuples and dataclasses of these."
    if other:
        kind = f"a {type(value).__name__}{f' with a {other[0]} in it' if parts(value) is not None else ''}"
    elif not all(type(key) in (str, int, bool) for key in _keys(value)):
        kind = "a dict with keys that are no strings or integers"
    elif unnamed:
        kind, remedy = f"a {unnamed[0]}, which has no name in its file", f"Import {unnamed[0]} at the top of the file."
    elif not can_be_rebuilt(value):
        kind, remedy = "a dataclass that is more than its fields", "Return a plain dataclass, or a dictionary."
    else:
        return
    raise TargetUnsupported(
        f"{target.qualname} returns {kind}, which cannot be verified",
        where=Location(target.path, target.start_line),
        remedy=remedy,
    )


def traced(
    call: Call, inputs: list[InputTensor], target: Target, named: Callable[[type], str]
) -> tuple[float, list[str]]:
    """What a call shows on tensors without data, for targets that were not run.

    Returns:
        The work of the call, and for each tensor that it returns the input that it is, if it is one.
    """
    if call.instance is not None and any(item.value.numel() == 0 for item in inputs):
        return 0.0, []
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.utils.flop_counter import FlopCounterMode

    # What a mask picks has no size that is known.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    counter = FlopCounterMode(display=False)
    with mode, torch.no_grad():
        given = tuple(mode.from_tensor(item.value, static_shapes=True) for item in inputs)
        try:
            with counter:
                value = flat_function(call, inputs)(*given)
        except Exception as error:
            raise export_error(error, target) from error
    _check_returned(call.own(value), target, named)
    own = {id(tensor): item.name for tensor, item in zip(given, inputs, strict=True)}
    return float(counter.get_total_flops()), [own.get(id(result), "") for result in tensors_of(value)]


def _keys(value: Any) -> Iterator[Any]:
    """Those of all dictionaries among the results."""
    for key, item in (parts(value) or {}).items():
        if isinstance(value, dict):
            yield key
        yield from _keys(item)
