"""How a candidate is loaded and called: a version of the user's file, or a separate candidate. Runs in workers."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mtmc_lsp.capture.accesses import dotted
from mtmc_lsp.capture.worker.arguments.containers import made
from mtmc_lsp.capture.worker.arguments.values import argument_values, resolve, resolve_class
from mtmc_lsp.capture.worker.autocast.regions import under_autocast
from mtmc_lsp.capture.worker.calls import Call, constructed, init_arguments, set_mode
from mtmc_lsp.capture.worker.user_module import load_user_module
from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.core.graph import InputKind
from mtmc_lsp.core.workload import Capture, ContainerKind, Target, TargetKind, is_torch_name
from mtmc_lsp.verify.messages import CandidateSource, CaseRequest
from mtmc_lsp.verify.worker.inputs import prepared_call, replace_tensor, reusing, slots_of
from mtmc_lsp.verify.worker.instances import SharedInstance, instance_of
from mtmc_lsp.verify.worker.interpreter.source import on_cpu
from mtmc_lsp.verify.worker.observation.kept_state import kept_state
from mtmc_lsp.verify.worker.observation.process_changes import ProcessChanges
from mtmc_lsp.verify.worker.run_target import is_interpreted, module_of, target_source
from mtmc_lsp.verify.worker.surroundings import current

FURTHER = "further argument "
"""Start of the names of positional arguments that have no parameter."""
Prepare = Callable[..., tuple[Call, list[Any]]]

_loaded: dict[str, Any] = {}
"""Modules of separate candidates, by their text."""
state_after_loading: dict[Any, dict[str, Any]] = {}
"""By module of a separate candidate: what :func:`kept_state` gave when it was loaded."""
changed_by_loading: set[str] = set()
"""What loading or constructing a separate candidate changed in the process."""


def load_candidate(source: CandidateSource, data: CaseRequest, *, constructs: bool = False) -> tuple[Any, Prepare]:
    """The candidate's module, and the function that prepares its calls. All these calls use one module instance.

    Args:
        constructs: whether the constructor of a separate candidate runs again; otherwise an earlier instance is copied.
    """
    capture = data.call
    if source.separate is None:
        module = module_of(capture, target_source(data.user_source, capture), source.text)
        return module, functools.partial(prepared_call, shared=SharedInstance(reusing(capture)))
    target, init = source.separate.target, source.separate.init
    module = module_of_candidate(target, source.text)
    # Parameters and buffers are replaced by shape, so an instance shares none of them with others.
    shared = SharedInstance(constructed if constructs else functools.partial(instance_of, replaced=()))
    return module, functools.partial(prepared_candidate, target=target, init=init, shared=shared)


def module_of_candidate(target: Target, source: str) -> Any:
    """The module of a separate candidate, loaded once."""
    text = on_cpu(source, "") if is_interpreted() and not current.has_gpu_names() else source
    if text not in _loaded:
        # The name that an import of the file would give.
        name = Path(target.path).stem
        name = f"{name}_{len(_loaded)}" if name in sys.modules else name
        # Some of torch's functions import this at their first call, and the import replaces `torch.manual_seed`.
        importlib.import_module("torch._dynamo")
        changes = ProcessChanges()
        _loaded[text] = load_user_module(target.path, text, name, in_place=not _loaded, execute=current.run)
        changed_by_loading.update(changes.by_import(_loaded[text]))
        state_after_loading[_loaded[text]] = kept_state(_loaded[text], None)
    return _loaded[text]


def prepared_candidate(
    module: Any,
    capture: Capture,
    inputs: Mapping[str, torch.Tensor],
    device: str,
    *,
    target: Target,
    init: str,
    shared: SharedInstance,
) -> tuple[Call, list[Any]]:
    """A separate candidate with the case's parameters, and the arguments of its call."""
    function = resolve(module, target.qualname)
    instance = None
    if target.kind in (TargetKind.MODULE, TargetKind.METHOD):
        instance = candidate_instance(module, target, capture, device, init, shared)
        method = "forward" if target.kind is TargetKind.MODULE else target.qualname.rpartition(".")[2]
        function = getattr(instance, method)
        if shared.needs_parameters():
            _place_parameters(instance, capture, inputs, target)
    call = _bound(module, function, instance, capture, inputs, target)
    function = under_autocast(call.function, capture.workload.autocast, device)
    return replace(call, function=function), list(call.values)


def candidate_instance(
    module: Any, target: Target, capture: Capture, device: str, init: str, shared: Callable[..., torch.nn.Module]
) -> torch.nn.Module:
    """The candidate, constructed as the reference, or by its ``get_init_inputs`` if it has other parameters."""
    kind = resolve(module, target.class_name)
    workload = capture.workload
    positional, named = ast.literal_eval(init)
    named |= argument_values(module, workload.init_arguments, workload.sizes, device, 1000)
    try:
        inspect.signature(kind).bind(*positional, **named)
    except TypeError:
        arguments = init_arguments(module)
        if arguments is None:
            raise
        positional, named = arguments
    torch.manual_seed(0)
    is_constructed = isinstance(shared, SharedInstance) and shared.is_constructed
    changes = None if is_constructed else ProcessChanges()
    constructor = functools.partial(current.run, kind) if current.is_program() else kind
    instance = shared(constructor, positional, named, device, workload.module.dtype)
    if changes is not None:
        changed_by_loading.update(changes.by_import(module))
    set_mode(instance, workload)
    return instance


def _place_parameters(
    instance: torch.nn.Module, capture: Capture, inputs: Mapping[str, torch.Tensor], target: Target
) -> None:
    """Put the case's parameters and buffers into the candidate."""
    held, slots = held_tensors(instance), slots_of(instance)
    shapes = {name: value.shape for name, value in inputs.items()}
    for item, name in corresponding_names(instance, capture, shapes, target).items():
        replace_tensor(slots[id(held[name])], inputs[item])


def held_tensors(instance: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The parameters and buffers by name."""
    return {**dict(instance.named_parameters()), **dict(instance.named_buffers())}


def corresponding_names(
    instance: torch.nn.Module, capture: Capture, shapes: Mapping[str, torch.Size], target: Target
) -> dict[str, str]:
    """For each graph input that is a parameter or buffer, the candidate's: of the same name, or else the next of its shape."""
    held = held_tensors(instance)
    free, names = list(held), dict[str, str]()
    for item in capture.graph.inputs:
        if item.kind is InputKind.ARGUMENT:
            continue
        shape = shapes[item.name]
        preferred = dotted(item.access)
        fitting = [name for name in free if held[name].shape == shape]
        name = preferred if preferred in fitting else next(iter(fitting), "")
        if not name:
            raise RequestError(
                f"{target.qualname} has no parameter that corresponds to {item.access}, shape {tuple(shape)}",
                where=Location(target.path, target.start_line),
                remedy="Give the candidate the reference's parameters, best under the same names.",
            )
        free.remove(name)
        names[item.name] = name
    return names


def _bound(
    module: Any, function: Any, instance: Any, capture: Capture, inputs: Mapping[str, torch.Tensor], target: Target
) -> Call:
    """The call, with arguments by name if the candidate has the reference's names, else in the reference's order."""
    where = Location(target.path, target.start_line)
    parameters = inspect.signature(function).parameters
    values, further = passed_arguments(module, parameters, capture, inputs, where)
    by_name = not further and all(name in parameters for name in values)
    try:
        bound = inspect.signature(function).bind(**values) if by_name else None
        bound = bound or inspect.signature(function).bind(*values.values(), *further)
    except TypeError as error:
        raise RequestError(
            f"{target.qualname} cannot be called with the reference's arguments: {error}",
            where=where,
            remedy="Give it the reference's parameters.",
        ) from None
    names = (*values, *(f"{FURTHER}{i}" for i in range(len(further))))
    passed = (*values.values(), *further)
    return Call(function, instance, names, passed, frozenset(names) if by_name else frozenset())


def passed_arguments(
    module: Any, parameters: Container[str], capture: Capture, inputs: Mapping[str, torch.Tensor], where: Location
) -> tuple[dict[str, Any], list[Any]]:
    """The arguments of a call by the reference's names, and further ones without a name.

    Args:
        module: the candidate's, which must name the classes of the arguments.
        parameters: names of the candidate's parameters.
        where: the candidate.
    """
    specified = {spec.name for spec in capture.workload.arguments}
    values: dict[str, Any] = {}
    further: list[Any] = []
    for argument in capture.arguments:
        unread = [leaf.name for leaf in argument.leaves if leaf.input and leaf.input not in inputs]
        if unread:
            raise RequestError(
                f"the reference does not use its argument {unread[0]}, so no values of it can be tried",
                where=Location(capture.workload.target.path, capture.workload.target.start_line),
                remedy="Remove the argument from both.",
            )
        value = made(
            argument,
            lambda leaf: inputs[leaf.input] if leaf.input else value_of(leaf.constant),
            _classes_of(module, where),
        )
        kind = argument.container.kind if argument.container is not None else None
        if kind is ContainerKind.POSITIONAL:
            further += value
        elif kind is ContainerKind.KEYWORDS:
            values.update(value)
        # Defaults of the reference are passed only to a candidate that has a parameter of that name.
        elif any(leaf.input for leaf in argument.leaves) or argument.name in specified or argument.name in parameters:
            values[argument.name] = value
    return values, further


def value_of(constant: object) -> object:
    """The value that the constant of an argument stands for."""
    return getattr(torch, str(constant).removeprefix("torch.")) if is_torch_name(constant) else constant


def _classes_of(module: Any, where: Location) -> Callable[[str], Any]:
    """Finds the classes of arguments in the candidate's file."""

    def find(name: str) -> Any:
        try:
            return resolve_class(module, name)
        except TypeError:
            raise RequestError(
                f"an argument of the reference is a {name}, which the candidate's file does not name",
                where=where,
                remedy=f"Import {name} at the top of the file.",
            ) from None

    return find
