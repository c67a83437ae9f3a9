"""Verification of a pair of callables, run in workers: the candidate in one process, all that judges it in another."""

from __future__ import annotations

import _thread
import ast
import contextlib
import functools
import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mtmc_lsp.capture.worker.calls import Call, init_arguments, make_tensor, resolve
from mtmc_lsp.capture.worker.user_module import load_user_module
from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.core.graph import InputKind
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.workload import Capture, Target, TargetKind
from mtmc_lsp.process.worker.tensor_ipc import give, take
from mtmc_lsp.process.worker_process import RESULTS, SCRATCH
from mtmc_lsp.verify.worker.commands import candidate_failure, compared, unexplained
from mtmc_lsp.verify.worker.comparison.compare import Comparison, compare_case
from mtmc_lsp.verify.worker.determinism import differing
from mtmc_lsp.verify.worker.inputs import EXACT, dotted, place, slots_of
from mtmc_lsp.verify.worker.instances import instance_of
from mtmc_lsp.verify.worker.interpreter.patches import mend_interpreter
from mtmc_lsp.verify.worker.interpreter.source import on_cpu, without_bfloat16
from mtmc_lsp.verify.worker.interpreter.speedups import hasten_interpreter
from mtmc_lsp.verify.worker.reference_cache import is_there, kept, own_device
from mtmc_lsp.verify.worker.run_target import (
    LaunchCount,
    capture_of,
    copies,
    device_for,
    is_interpreted,
    module_of,
    outcome,
    poison_new_memory,
    run_case,
    settled,
    snapshot,
    target_source,
    use_one_thread,
)

DRIFT_CALLS = 24
"""How often the smallest case is called again at the end: a candidate may be right the first times only."""

_pool: dict[tuple[object, ...], torch.Tensor] = {}
"""Tensors that candidates are called with, kept so that new contents come at old addresses."""
_loaded: dict[str, Any] = {}


def constructor(request: dict[str, Any]) -> dict[str, Any]:
    """The reference's constructor arguments as ``get_init_inputs`` makes them, as text of Python literals."""
    capture = capture_of(request)
    module = module_of(capture, target_source(request, capture), None, bool(request["widened"]))
    text = repr(list(init_arguments(module) or ([], {})))
    try:
        ast.literal_eval(text)
    except (ValueError, SyntaxError):
        raise RequestError(
            "get_init_inputs() gives what cannot be handed to the candidate's process",
            where=Location(capture.workload.target.path),
            remedy="Let it return numbers, strings, and lists of these.",
        ) from None
    return {"init": text}


def candidate(request: dict[str, Any]) -> dict[str, Any]:
    """Run the candidate on a case's inputs; its results go to a file, what else was seen comes back."""
    capture = capture_of(request)
    target = from_json(Target, request["target"])
    case = request["case"]
    device = device_for(capture, case["kind"])
    left = os.path.join(os.environ[SCRATCH], RESULTS)
    if not request.get("sanitized"):
        # What is filled is initialised, and a read of it no error.
        poison_new_memory()
    if is_interpreted():
        use_one_thread()
        mend_interpreter()
        hasten_interpreter()
    try:
        module = module_of_candidate(target, request["source"], bool(request["widened"]))
    except Exception as error:
        return candidate_failure("compile_error", error)
    prepare = functools.partial(prepared_candidate, target=target, init=request["init"])
    inputs = take(request["inputs"], device)
    # Counts those too that the threading module does not know of.
    threads = _thread._count()
    launches, disabled = LaunchCount(), LaunchCount()

    def run(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
        found = run_case(
            module, capture, tensors, device, contextlib.nullcontext(), case["seed"], case["kind"], prepare
        )
        return settled(found, device)

    try:
        with launches.counting():
            first = run(_pooled(inputs))
            # Memory of a later call must not stand in for it.
            kept = {**first, "results": [snapshot(result) for result in first["results"]]}
            again = [run(copies(inputs)) for _ in range(DRIFT_CALLS if request["drift"] else int(request["repeats"]))]
        used = True
        if request["decoy"] and launches.count:
            with disabled.counting(executes=False):
                used = not _same_without_kernels(run, kept, inputs)
    except RequestError:
        raise
    except Exception as error:
        return candidate_failure("runtime_error", error)
    give(kept, left, in_memory=False)
    return {
        "status": "ran",
        "launches": launches.count // (1 + len(again)),
        "differing": sorted(set().union(*(differing(outcome(kept), outcome(run)) for run in again))) if again else None,
        "used": used,
        "threads": _thread._count() - threads,
    }


def module_of_candidate(target: Target, source: str, widened: bool) -> Any:
    """The candidate's module, loaded once."""
    text = on_cpu(source, "") if is_interpreted() else source
    text = without_bfloat16(text) if widened else text
    if text not in _loaded:
        _loaded[text] = load_user_module(target.path, text, f"candidate{len(_loaded)}")
    return _loaded[text]


def _pooled(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The inputs in tensors that earlier cases were called with, where there are such."""
    found: dict[int, torch.Tensor] = {}
    for name, value in inputs.items():
        place = value.data_ptr() if value.numel() else -len(found) - 1
        if place not in found:
            key = (name, value.shape, value.stride(), value.dtype)
            if key not in _pool or _pool[key].requires_grad or 0 in value.stride():
                _pool[key] = copies({name: value})[name]
            found[place] = _pool[key] if 0 in value.stride() else _pool[key].copy_(value)
        inputs = {**inputs, name: found[place]}
    return dict(inputs)


def _same_without_kernels(run: Any, kept: Mapping[str, Any], inputs: Mapping[str, torch.Tensor]) -> bool:
    """Whether the results are the same although no kernel does anything: then they come from elsewhere."""
    try:
        found = run(copies(inputs))
    except Exception:  # whatever a candidate makes of results that are not there
        return False
    return not differing(outcome(kept), outcome(found))


def prepared_candidate(
    module: Any, capture: Capture, inputs: Mapping[str, torch.Tensor], device: str, *, target: Target, init: str
) -> tuple[Call, list[Any]]:
    """The candidate with the case's parameters, and the arguments to call it with."""
    function = resolve(module, target.qualname)
    instance = None
    if target.kind in (TargetKind.MODULE, TargetKind.METHOD):
        instance = _instance(module, target, capture, device, init)
        method = "forward" if target.kind is TargetKind.MODULE else target.qualname.rpartition(".")[2]
        function = getattr(instance, method)
        _place(instance, capture, inputs, target)
    call = _bound(function, instance, capture, inputs, target)
    return call, list(call.values)


def _instance(module: Any, target: Target, capture: Capture, device: str, init: str) -> torch.nn.Module:
    """An unused candidate, constructed as the reference is, or as its own file says where it takes no such arguments."""
    kind = resolve(module, target.class_name)
    workload = capture.workload
    positional, named = ast.literal_eval(init)
    for i, spec in enumerate(workload.init_arguments):
        tensor = spec.tensor
        named[spec.name] = spec.constant if tensor is None else make_tensor(tensor, workload.sizes, device, 1000 + i)
    try:
        inspect.signature(kind).bind(*positional, **named)
    except TypeError:
        own = init_arguments(module)
        if own is None:
            raise
        positional, named = own
    torch.manual_seed(0)
    # What of it is replaced is known only by its shapes, so that nothing in it is shared.
    instance = instance_of(kind, positional, named, device, replaced=())
    return instance if workload.as_constructed else instance.eval()


def _place(instance: torch.nn.Module, capture: Capture, inputs: Mapping[str, torch.Tensor], target: Target) -> None:
    """Give the candidate the case's parameters and buffers: those of the same name, else the next of the same shape."""
    held = {**dict(instance.named_parameters()), **dict(instance.named_buffers())}
    free, slots = list(held), slots_of(instance)
    for item in capture.graph.inputs:
        if item.kind is InputKind.ARGUMENT:
            continue
        value = inputs[item.name]
        wanted = dotted(item.access)
        fitting = [name for name in free if held[name].shape == value.shape]
        name = wanted if wanted in fitting else next(iter(fitting), "")
        if not name:
            raise RequestError(
                f"{target.qualname} has no parameter that corresponds to {item.access}, shape {tuple(value.shape)}",
                where=Location(target.path, target.start_line),
                remedy="Give the candidate the reference's parameters, best under the same names.",
            )
        free.remove(name)
        place(slots[id(held[name])], value)


def _bound(function: Any, instance: Any, capture: Capture, inputs: Mapping[str, torch.Tensor], target: Target) -> Call:
    """The arguments by name where the candidate has the reference's names, else in the reference's order."""
    where = Location(target.path, target.start_line)
    parameters = inspect.signature(function).parameters
    given = {spec.name for spec in capture.workload.arguments}
    values: dict[str, Any] = {}
    for argument in capture.arguments:
        if argument.input and argument.input not in inputs:
            raise RequestError(
                f"the reference does not use its argument {argument.name}, so no values of it can be tried",
                where=Location(capture.workload.target.path, capture.workload.target.start_line),
                remedy="Take the argument out of both.",
            )
        if argument.constant == {}:
            # Its ``*args`` or ``**kwargs``, which take nothing.
            continue
        # What the reference fills in by itself is passed on only to a candidate that knows the name.
        if argument.input or argument.name in given or argument.name in parameters:
            values[argument.name] = inputs[argument.input] if argument.input else argument.constant
    by_name = all(name in parameters for name in values)
    try:
        bound = inspect.signature(function).bind(**values) if by_name else None
        bound = bound or inspect.signature(function).bind(*values.values())
    except TypeError as error:
        raise RequestError(
            f"{target.qualname} cannot be called as the reference is: {error}",
            where=where,
            remedy="Give it the reference's arguments.",
        ) from None
    names = tuple(values)
    return Call(function, instance, names, tuple(values.values()), frozenset(names) if by_name else frozenset())


def compare(request: dict[str, Any]) -> dict[str, Any]:
    """The checks of one case, and which answers without any work would have passed them; in the reference's process."""
    case = request["case"]
    exact = case["distribution"] in EXACT and bool(request["exact"])
    inputs, want, seen = compared(request)
    found = compare_case(inputs, want, seen, request["precision"], exact=exact)
    for check in found["checks"]:
        if case["layout"] and check["name"].endswith(" stride") and check["status"] == "failed":
            # The workload has another layout; only there is the layout of results part of the contract.
            check["status"] = "skipped"
    known = request["other"] and is_there(request["other"])
    other = kept(request["other"], own_device())["results"] if known else []
    trivial = trivial_answers(inputs, want, request["precision"], other)
    return {**found, "trivial": trivial, "differing": unexplained(request, inputs, want)}


def trivial_answers(
    inputs: Mapping[str, torch.Tensor], want: Mapping[str, Any], precision: str, other: Sequence[Any] = ()
) -> list[str]:
    """Which of zeros, the mean, copies of the inputs and another case's answer agree with the reference.

    Empty results say nothing, and neither does the mean of a single number.
    """
    results = [r for r in want["results"] if isinstance(r, torch.Tensor)]
    answers: dict[str, list[torch.Tensor]] = {"zeros": [torch.zeros_like(r) for r in results]}
    if any(r.numel() > 1 for r in results):
        answers["the mean"] = [_mean(r) for r in results]
    for name, value in inputs.items():
        fitting = [value.shape == r.shape and value.dtype == r.dtype for r in results]
        if fitting and all(fitting):
            answers[f"a copy of {name}"] = [value] * len(results)
    then = [r for r in other if isinstance(r, torch.Tensor)]
    if then and [r.shape for r in then] == [r.shape for r in results]:
        answers["the answer for other inputs"] = then
    if want["after"]:
        # A reference that changes its inputs asks for more than any returned tensor.
        return []
    return [name for name, given in answers.items() if _passes(given, want, precision)]


def _mean(result: torch.Tensor) -> torch.Tensor:
    return torch.full_like(result, result.double().mean().item()) if result.numel() else result


def _passes(answer: list[torch.Tensor], want: Mapping[str, Any], precision: str) -> bool:
    comparison = Comparison(precision)
    for i, own in enumerate(r for r in want["results"] if isinstance(r, torch.Tensor)):
        mine = torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device=own.device).copy_(answer[i])
        near, ties, doubt = want["near"].get(i, 0.0), want["ties"].get(i), want["doubts"].get(i)
        comparison.tensor("", mine, own, want["oracle"][i], near, ties, doubt)
    return all(check["status"] != "failed" for check in comparison.found()[0])
