"""Calls a file's target as the user calls it, and reports what its guards decide. Runs in workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import torch

from mtmc_lsp.capture.worker.arguments.values import uninitialised
from mtmc_lsp.capture.worker.calls import Call, build_call, user_error
from mtmc_lsp.capture.worker.module_state import restore_values, values_in
from mtmc_lsp.core.workload import TargetKind
from mtmc_lsp.guard.worker.observed_calls import Decision, guards_of, observe
from mtmc_lsp.verify.messages import GuardAnswer, GuardRequest
from mtmc_lsp.verify.worker.instances import original_of
from mtmc_lsp.verify.worker.interpreter.source import on_cpu
from mtmc_lsp.verify.worker.run_target import LaunchCount, is_interpreted, loaded_once

NOT_REACHED = "the call does not reach the dispatch statement"


def check_guard(request: GuardRequest) -> GuardAnswer:
    """The decision of the target's guards.

    Raises:
        TargetRaises: the file, or the call up to its dispatch statement, raises.
    """
    workload, target = request.workload, request.workload.target
    names = guards_of(request.source, target.qualname)
    if not names:
        return GuardAnswer(has_guard=False)
    is_on_gpu = torch.cuda.is_available() and not is_interpreted() and workload.device == "cuda"
    stands_in = workload.device == "cuda" and not is_on_gpu
    text = on_cpu(request.source, request.user_source) if stands_in else request.source
    kernels = request.kernels
    if kernels is not None and stands_in:
        kernels = replace(kernels, text=on_cpu(kernels.text, kernels.others))
    try:
        module = loaded_once(target.path, text, request.module_name, is_candidate=True, kernels=kernels)
        device = "cuda" if is_on_gpu else "cpu"
        # The guard reads no values, and gigabytes of them would take seconds.
        call = build_call(
            module, workload, device, workload.sizes, values=False, blank=uninitialised, construct=original_of
        )
        needed = {path for path, tensor in workload.tensors.items() if tensor.requires_grad}
        trained = needed if request.records_gradients else None
        decisions = observe(module, names, lambda: _call(call, target.kind, trained))
    except Exception as error:
        raise user_error(error, target, "on the workload's inputs") from error
    refused = next((item for item in decisions if item.reason), None)
    if not decisions:
        refused = Decision("", NOT_REACHED)
    if refused is None:
        return GuardAnswer(stands_in=stands_in)
    return GuardAnswer(True, refused.reason, refused.condition, refused.guard, stands_in)


def _call(call: Call, kind: TargetKind, trained: Collection[str] | None) -> None:
    """Call the target through its decorators, and a module as a module.

    Args:
        trained: the arguments that require gradients; None for a call that records none.
    """
    function: Callable[..., Any] = call.decorated or call.function
    if kind is TargetKind.MODULE and call.instance is not None:
        function = call.instance
    positional, named = call.passed(call.values)
    named = {name: value for name, value in named.items() if name not in call.state_homes}
    if trained is not None:
        _require_gradients(call, trained)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(trained is not None))
        # Functions that the user compiles run as they are written: the sandbox has no compiler.
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(call.in_mode())
        stack.enter_context(LaunchCount().counting(executes=False))
        stack.enter_context(_state(call))
        function(*positional, **named)


@contextlib.contextmanager
def _state(call: Call) -> Iterator[None]:
    """The module with the state of the workload."""
    values = dict(zip(call.names, call.values, strict=True))
    before = values_in(call.state_homes)
    try:
        for name, (attributes, attribute) in call.state_homes.items():
            attributes[attribute] = values[name]
        yield
    finally:
        restore_values(call.state_homes, before)


def _require_gradients(call: Call, trained: Collection[str]) -> None:
    """Let the arguments require gradients that do in the workload; all if neither these nor a parameter are known to."""
    parameters = call.instance.parameters() if call.instance is not None else ()
    all_need = not trained and not any(parameter.requires_grad for parameter in parameters)
    for name, value in zip(call.names, call.values, strict=True):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and (all_need or name in trained):
            value.requires_grad_()
