"""Runs the target in eager mode as a function of all its input tensors, and records its behaviour before the export."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import torch

from mtmc_lsp.capture.result_structure import PLAIN, can_be_rebuilt, classes, leaves, parts, tensors_of
from mtmc_lsp.capture.worker.arguments.containers import same_objects
from mtmc_lsp.capture.worker.arguments.strided_tensors import is_other_view, laid_out
from mtmc_lsp.capture.worker.calls import Call, user_error
from mtmc_lsp.capture.worker.export import export_error
from mtmc_lsp.capture.worker.graph_reader import InputTensor
from mtmc_lsp.capture.worker.loops.keeping import restart_loops
from mtmc_lsp.capture.worker.module_state import non_parameter_tensors, refuse_new_state
from mtmc_lsp.capture.worker.module_structure import class_name
from mtmc_lsp.capture.worker.modules.attribute_tensors import TensorSlot, assigned, attribute_tensors, slot_at
from mtmc_lsp.capture.worker.modules.members import access_of
from mtmc_lsp.capture.worker.passes.graph_cleanup import Layout
from mtmc_lsp.capture.worker.regions.region_errors import refuse_shared_memory
from mtmc_lsp.capture.worker.side_effects import Snapshot
from mtmc_lsp.capture.worker.tracing.local_modes import CallCounter, under_local_modes
from mtmc_lsp.capture.worker.tracing.size_forms import GradientForms
from mtmc_lsp.core.errors import Location, TargetUnsupported
from mtmc_lsp.core.graph import InputKind
from mtmc_lsp.core.workload import Target

MOST_REPEATED_CALLS = 20_000
"""A target that calls more functions of torch runs once if it changes no state: it is a loop of launches, which takes 0.2 s or
more on a GPU. Networks call some thousands at most."""


def buffers(call: Call) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers of the call's module, without state tensors, which are arguments of the call."""
    named = call.instance.named_buffers() if call.instance is not None else iter(())
    return ((name, buffer) for name, buffer in named if access_of(call.instance, name) not in call.accesses)


def call_slots(call: Call) -> list[TensorSlot]:
    """The attribute tensors of the call's module, without state tensors. A tensor with several accesses has the first one."""
    slots = [slot for slot in attribute_tensors(call.instance) if slot.access not in call.accesses]
    return list({id(slot.value): slot for slot in reversed(slots)}.values())[::-1]


def _values(call: Call, inputs: list[InputTensor], tensors: tuple[torch.Tensor, ...]) -> list[Any]:
    by_path = {
        item.path: tensor for item, tensor in zip(inputs, tensors, strict=True) if item.kind is InputKind.ARGUMENT
    }
    return [by_path.get(path, value) for path, value in zip(call.names, call.values, strict=True)]


class _Bound(torch.nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A module for ``functional_call`` whose ``forward`` is the target's method."""

    def __init__(self, instance: torch.nn.Module, call: Call, target: Target) -> None:
        super().__init__()
        self.instance = instance
        self.__dict__["call"], self.__dict__["target"] = call, target

    def forward(self, values: list[Any]) -> Any:
        return _run(self.__dict__["call"], values, self.__dict__["target"])


def _run(call: Call, values: list[Any], target: Target) -> Any:
    """Call the target, which must not change containers among its arguments.

    Raises:
        TargetUnsupported: the call put another object into a container.
    """
    positional, named = call.passed(values)
    with call.in_mode():
        returned = call.with_state(*positional, **named)
    if call.containers:
        before, named_before = call.passed(values)
        if not (all(map(same_objects, before, positional)) and same_objects(named_before, named)):
            raise TargetUnsupported(
                f"{target.qualname} changes a container that it gets as an argument, and its Triton version would not",
                where=Location(target.path, target.start_line),
                remedy="Return the new value, or write into the tensors with copy_(...).",
            )
    return returned


def flat_function(
    call: Call,
    inputs: list[InputTensor],
    target: Target,
    *,
    is_traced: bool = True,
    counter: CallCounter | None = None,
) -> Any:
    """The target as a function of the input tensors only, parameters included.

    Args:
        is_traced: whether its tensors have no values.
        counter: counts the functions of torch that it calls, if its tensors have values.
    """
    parameters = [item for item in inputs if item.kind is not InputKind.ARGUMENT]
    slots = [slot_at(call.instance, item.access) for item in inputs if item.kind is InputKind.ATTRIBUTE]
    names = []
    if call.instance is not None:
        names = [n for n, _ in call.instance.named_parameters()] + [n for n, _ in buffers(call)]

    def flat(*tensors: torch.Tensor) -> Any:
        restart_loops()
        values = _values(call, inputs, tensors)
        if call.instance is None or not parameters:
            return _run(call, values, target)
        tensors_of_module = tensors[len(inputs) - len(parameters) :]
        registered, further = tensors_of_module[: len(names)], tensors_of_module[len(names) :]
        by_name = {f"instance.{name}": tensor for name, tensor in zip(names, registered, strict=True)}
        with assigned(slots, further):
            return torch.func.functional_call(_Bound(call.instance, call, target), by_name, (values,))

    return under_local_modes(flat, target, is_traced=is_traced, counter=counter)


def run_eagerly(module: ModuleType, call: Call, inputs: list[InputTensor], target: Target) -> list[Layout]:
    """Run the target twice. It must not raise an error, and both runs must give the same results.

    A long loop of operations is not repeated if it changes no state; verification runs it again, in float64 too.

    Returns:
        The shape and strides of each returned tensor.
    """
    runs: list[list[Any]] = []
    counter = CallCounter()
    before, state = None, dict[str, torch.Tensor]()
    try:
        for _ in range(2):
            # A change that only the first call makes is a cache, such as a table of positions.
            before, state = Snapshot(module, call.instance), non_parameter_tensors(call.instance)
            torch.manual_seed(0)
            tensors = tuple(laid_out(item.value, item.value.stride()) for item in inputs)
            with torch.no_grad():
                value = flat_function(call, inputs, target, is_traced=False, counter=counter)(*tensors)
            _check_returned(call.target_result(value), target, partial(class_name, file=module))
            changed = [not torch.equal(t, item.value) for t, item in zip(tensors, inputs, strict=True)]
            written = [t if is_changed else None for t, is_changed in zip(tensors, changed, strict=True)]
            runs.append([*leaves(value), *written])
            if counter.calls > MOST_REPEATED_CALLS and not before.changes() and not _replaced(state, call):
                break
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:
        raise user_error(error, target, "on the workload's inputs") from error
    refuse_new_state(state, _replaced(state, call), inputs[0].value.device.type)
    for a, b in zip(runs[0], runs[-1], strict=True):
        if not _nearly_same(a, b):
            raise TargetUnsupported(
                f"{target.qualname} gives different results for the same inputs and seed, so nothing can be verified",
                where=Location(target.path, target.start_line),
                remedy="Draw random numbers from torch's generator, and keep no state between calls.",
            )
    assert before is not None
    before.refuse_changes(target)
    return [(tuple(t.shape), t.stride()) for t in tensors_of(value)]


def _replaced(state: Mapping[str, torch.Tensor], call: Call) -> set[str]:
    """The accesses of state tensors that a call replaced by other tensors."""
    now = non_parameter_tensors(call.instance)
    return {access for access in state if now.get(access) is not state[access]}


def _nearly_same(a: Any, b: Any) -> bool:
    """Whether two results are equal up to the summation order of atomic additions."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return repr(a) == repr(b)
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return bool(torch.equal(a, b))
    difference = torch.linalg.vector_norm(torch.nan_to_num(a.double() - b.double()))
    return bool(difference <= 1e-3 * torch.linalg.vector_norm(torch.nan_to_num(a.double())) + 1e-30)


def _check_returned(value: Any, target: Target, named_class: Callable[[type], str]) -> None:
    """Refuse results that cannot be rebuilt from tensors and plain values.

    Raises:
        TargetUnsupported: names the first such result.
    """
    items = leaves(value)
    unsupported = [type(item).__name__ for item in items if not isinstance(item, (torch.Tensor, *PLAIN))]
    unnamed_classes = [
        kind.__name__ for kind in classes(value) if not named_class(kind).replace(".", "").isidentifier()
    ]
    remedy = "Return tensors and plain values, or tuples, lists, dictionaries, named tuples and dataclasses of these."
    if unsupported:
        kind = f"a {type(value).__name__}{f' with a {unsupported[0]} in it' if parts(value) is not None else ''}"
    elif not all(type(key) in (str, int, bool) for key in _keys(value)):
        kind = "a dict with keys that are neither strings nor integers"
    elif unnamed_classes:
        kind = f"a {unnamed_classes[0]}, which its file does not name"
        remedy = f"Import {unnamed_classes[0]} at the top of the file."
    elif not can_be_rebuilt(value):
        kind, remedy = "a dataclass with more state than its fields", "Return a plain dataclass, or a dictionary."
    else:
        return
    raise TargetUnsupported(
        f"{target.qualname} returns {kind}, which cannot be verified",
        where=Location(target.path, target.start_line),
        remedy=remedy,
    )


def run_without_data(
    call: Call,
    inputs: list[InputTensor],
    target: Target,
    named_class: Callable[[type], str],
    *,
    trains: bool,
    observer: contextlib.AbstractContextManager[object] | None = None,
) -> tuple[float, list[str]]:
    """Run the call on tensors without data.

    Args:
        trains: whether gradients are traced, so that the code may turn them on.
        observer: a mode that sees the operations.

    Returns:
        The number of floating-point operations, and for each returned tensor the name of the input that it is or views, or "".
    """
    if call.instance is not None and any(item.value.numel() == 0 for item in inputs):
        return 0.0, []
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.utils.flop_counter import FlopCounterMode

    # The number of elements that a mask selects is unknown, hence the shape environment.
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    counter = FlopCounterMode(display=False)
    with mode, torch.set_grad_enabled(trains):
        fake_inputs = tuple(mode.from_tensor(item.value, static_shapes=True) for item in inputs)
        function = flat_function(call, inputs, target)
        # The counter itself fails on some calls, as on attention with grouped heads in PyTorch 2.11. That version also asks how
        # many elements a mask selects where a loss broadcasts them; the forms compute with all elements, as the trace does.
        attempts = [(counter,), (), *([(counter, GradientForms())] if trains else [])]
        value = _first_that_runs(attempts, observer, lambda: function(*fake_inputs), target)
    _check_returned(call.target_result(value), target, named_class)
    refuse_shared_memory(tensors_of(value), fake_inputs, target)
    names = [
        next(
            (
                item.name
                for tensor, item in zip(fake_inputs, inputs, strict=True)
                if result is tensor or is_other_view(result, tensor)
            ),
            "",
        )
        for result in tensors_of(value)
    ]
    return float(counter.get_total_flops()), names


def _first_that_runs(
    attempts: Sequence[tuple[contextlib.AbstractContextManager[object], ...]],
    observer: contextlib.AbstractContextManager[object] | None,
    run: Callable[[], Any],
    target: Target,
) -> Any:
    """The result of the first attempt that raises nothing; each has its contexts.

    Raises:
        MtmcError: for the exception without contexts, which is about the user's code alone.
    """
    failure = Exception("there was no attempt")
    for contexts in attempts:
        try:
            with contextlib.ExitStack() as stack:
                for context in (*contexts, observer or contextlib.nullcontext()):
                    stack.enter_context(context)
                return run()
        except Exception as error:
            if not contexts:
                failure = error
    raise export_error(failure, target) from failure


def _keys(value: Any) -> Iterator[Any]:
    """The keys of all dictionaries among the results."""
    for key, item in (parts(value) or {}).items():
        if isinstance(value, dict):
            yield key
        yield from _keys(item)
