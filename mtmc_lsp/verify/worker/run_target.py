"""Runs a target on a case's inputs and notes all that can be seen of it. Runs in workers."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mtmc_lsp.capture.result_structure import is_nested, leaves, parts, structure_of
from mtmc_lsp.capture.worker.calls import Call
from mtmc_lsp.capture.worker.user_module import load_user_module
from mtmc_lsp.core.graph import InputKind
from mtmc_lsp.core.json_codec import from_json
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.verify.cases import AUTOGRAD, ON_CPU
from mtmc_lsp.verify.worker.comparison.batched_reads import unlike
from mtmc_lsp.verify.worker.inputs import laid_out, prepared_call
from mtmc_lsp.verify.worker.interpreter.source import on_cpu, without_bfloat16

_modules: dict[tuple[str, str], Any] = {}
_captures: dict[str, Capture] = {}
"""What was decoded last, by its text."""


def capture_of(request: Mapping[str, Any]) -> Capture:
    """The capture that a request is about: one of hundreds of nodes takes longer to decode than most cases take to run."""
    text = json.dumps(request["capture"])
    if text not in _captures:
        # A worker serves one run.
        _captures.clear()
        _captures[text] = from_json(Capture, request["capture"])
    return _captures[text]


def is_interpreted() -> bool:
    """Whether this worker runs kernels by Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def device_for(capture: Capture, kind: str) -> str:
    """Where a case's tensors live."""
    gpu = torch.cuda.is_available() and not is_interpreted() and capture.workload.device == "cuda"
    return "cuda" if gpu and kind != ON_CPU else "cpu"


def target_source(request: Mapping[str, Any], capture: Capture) -> str:
    """The user's file as the run began with it."""
    given = request.get("own")
    return str(given) if given is not None else read_own_text(capture)


def read_own_text(capture: Capture) -> str:
    """The user's file as it is on disk."""
    return Path(capture.workload.target.path).read_bytes().decode("utf-8")


def module_of(capture: Capture, own: str, candidate: str | None, widened: bool) -> Any:
    """The user's module, or a candidate in its place; for the interpreter, the GPU's names become the CPU's."""
    text = own if candidate is None else candidate
    if candidate is not None and is_interpreted():
        text = on_cpu(text, own)
    if widened:
        text = without_bfloat16(text)
    path = capture.workload.target.path
    if (path, text) not in _modules:
        name = capture.module_name if candidate is None else f"{capture.module_name}__candidate{len(_modules)}"
        # The user's own text stands in its own place, so that what it raises names their file.
        _modules[path, text] = load_user_module(path, text, name, in_place=candidate is None)
    return _modules[path, text]


def copies(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fresh tensors with the same values and strides."""
    return {name: laid_out(tensor, tensor.stride()) for name, tensor in inputs.items()}


def run_case(
    module: Any,
    capture: Capture,
    inputs: dict[str, torch.Tensor],
    device: str,
    mode: contextlib.AbstractContextManager[Any],
    seed: int,
    kind: str,
    prepare: Callable[..., tuple[Call, list[Any]]] = prepared_call,
    *,
    before: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, Any]:
    """Call the target once; ``prepare`` finds it in the module and gives what to call it with.

    ``before`` are the inputs' values in other tensors, where the caller has them; else they are copied.

    Returns:
        ``results`` (where gradients are asked for, these follow), ``after`` (the inputs that hold something else then)
        and ``facts`` (for each result what is seen of it beside its values).
    """
    before = copies(inputs) if before is None else before
    call, values = prepare(module, capture, inputs, device)
    leaves = _leaves(capture, inputs) if kind == AUTOGRAD else []
    torch.manual_seed(seed)
    with torch.set_grad_enabled(bool(leaves)), mode:
        returned = call.run(values)
    results = flatten(returned)
    facts = [_facts(result, inputs) for result in results]
    if leaves:
        results = [r.detach() if isinstance(r, torch.Tensor) else r for r in results] + _gradients(results, leaves)
    changed = unlike({name: (inputs[name].detach(), held) for name, held in before.items()})
    after = {name: inputs[name].detach() for name in before if name in changed}
    return {"results": results, "after": after, "facts": facts}


def run_again(
    module: Any, capture: Capture, inputs: Mapping[str, torch.Tensor], device: str, case: Mapping[str, Any]
) -> dict[str, Any]:
    """One more call of a case, on copies of its inputs; as :func:`run_case`."""
    own, mode = copies(inputs), contextlib.nullcontext()
    return run_case(module, capture, own, device, mode, case["seed"], case["kind"], before=inputs)


def outcome(run: Mapping[str, Any]) -> list[Any]:
    """What a call gave, of what :func:`run_case` says: its results, and behind them what it wrote into its inputs."""
    return [*run["results"], *(tensor for _, tensor in sorted(run["after"].items()))]


def settled(run: dict[str, Any], device: str) -> dict[str, Any]:
    """What :func:`run_case` gave, as the caller's stream sees it when the call returns.

    Work that a candidate left to another stream, without making the caller's wait for it, is missing in it.
    """
    if device != "cuda":
        return run
    seen = [snapshot(result) for result in run["results"]]
    after = {name: snapshot(tensor) for name, tensor in run["after"].items()}
    torch.cuda.synchronize()
    return {**run, "results": seen, "after": after}


def snapshot(result: Any) -> Any:
    """A copy of a tensor in its own layout, without its subclass and its history; all else as :func:`plain` has it."""
    bare = plain(result)
    if not isinstance(bare, torch.Tensor):
        return bare
    extent = 1 + sum((size - 1) * stride for size, stride in zip(bare.shape, bare.stride(), strict=True))
    expanded = any(size > 1 and not stride for size, stride in zip(bare.shape, bare.stride(), strict=True))
    if bare.numel() > 0 and (expanded or extent < bare.numel()):
        # Elements share memory, as those of an expanded gradient do, and cannot be written one by one.
        return bare.detach().as_strided((extent,), (1,)).clone().as_strided(bare.shape, bare.stride())
    fresh = torch.empty_strided(bare.shape, bare.stride(), dtype=bare.dtype, device=bare.device)
    return fresh.copy_(bare.detach())


def plain(result: Any) -> Any:
    """A result as the comparing process can load it: a tensor without its subclass, or a constant; else its name."""
    if isinstance(result, torch.Tensor):
        return result.as_subclass(torch.Tensor) if type(result) is not torch.Tensor else result
    return result if result is None or isinstance(result, (bool, int, float, str)) else type(result).__name__


def flatten(value: Any) -> list[Any]:
    """What a target returned, as a list; of nested results the form comes behind them, for it counts too."""
    own = structure_of(value, leaf_text=lambda leaf: type(leaf).__name__)
    return [*leaves(value), own] if parts(value) is not None and is_nested(own) else leaves(value)


def _leaves(capture: Capture, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    names = [item.name for item in capture.graph.inputs if item.kind is InputKind.ARGUMENT]
    return [inputs[name].requires_grad_() for name in names if inputs[name].is_floating_point()]


def _gradients(results: list[Any], leaves: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Gradients of a weighted sum of the results; its weights are exact in every dtype."""
    outputs = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    if not outputs:
        return [None] * len(leaves)
    weights = [((torch.arange(o.numel(), device=o.device) % 7 - 3) / 4).to(o.dtype).view(o.shape) for o in outputs]
    return list(torch.autograd.grad(outputs, leaves, weights, allow_unused=True))


def _facts(result: Any, inputs: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    if not isinstance(result, torch.Tensor):
        return {"type": type(result).__name__}
    shared = [] if result.numel() == 0 else [n for n, t in inputs.items() if _storage(t) == _storage(result)]
    return {
        "type": type(result).__name__,
        "device": result.device.type,
        "requires_grad": result.requires_grad,
        "shares memory with": ", ".join(sorted(shared)) or "no input",
    }


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def poison_new_memory() -> None:
    """From now on this process's new tensors hold NaN (or the largest integer) until they are written."""
    if not torch.are_deterministic_algorithms_enabled():
        # What torch.use_deterministic_algorithms does for eager code; it also imports the whole compiler, which takes seconds.
        torch._C._set_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True


def use_one_thread() -> None:
    """The interpreter's cases are small: more threads of torch only wait for each other, and for the candidate's process."""
    if is_interpreted():
        torch.set_num_threads(1)


class LaunchCount:
    """Counts kernel launches, compiled and interpreted ones."""

    def __init__(self) -> None:
        self.count = 0
        self._executes = True

    @contextlib.contextmanager
    def counting(self, *, executes: bool = True) -> Iterator[None]:
        """Count what is launched inside; kernels do nothing where ``executes`` is false."""
        self._executes = executes
        import triton.runtime.interpreter as interpreter
        from triton.runtime.jit import JITFunction

        patched = [(JITFunction, "run"), (interpreter.GridExecutor, "__call__")]
        originals = [getattr(kind, name) for kind, name in patched]
        for (kind, name), original in zip(patched, originals, strict=True):
            setattr(kind, name, self._counted(original))
        try:
            yield
        finally:
            for (kind, name), original in zip(patched, originals, strict=True):
                setattr(kind, name, original)

    def _counted(self, original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("warmup"):
                self.count += 1
                if not self._executes:
                    return None
            return original(*args, **kwargs)

        return run
