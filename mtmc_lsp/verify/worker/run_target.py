"""Calls a target on the inputs of a case and records everything observable. Runs in workers."""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mtmc_lsp.capture.module_paths import module_name
from mtmc_lsp.capture.result_structure import is_nested, leaves, parts, structure_of
from mtmc_lsp.capture.worker.arguments.strided_tensors import laid_out
from mtmc_lsp.capture.worker.arguments.values import seed_torch
from mtmc_lsp.capture.worker.autocast.regions import gpu_autocast_on_cpu
from mtmc_lsp.capture.worker.calls import Call
from mtmc_lsp.capture.worker.user_module import load_user_module
from mtmc_lsp.core.graph import InputKind
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.process.gpu_lock import let_timings_pass
from mtmc_lsp.process.worker.gpu_memory import IDLE_PART
from mtmc_lsp.process.worker.kernel_compilation import share_kernels
from mtmc_lsp.verify.cases import AUTOGRAD, ON_CPU, VALUES, Case
from mtmc_lsp.verify.messages import KernelsFile
from mtmc_lsp.verify.worker.comparison.batched_reads import unequal
from mtmc_lsp.verify.worker.inputs import prepared_call, read_tensor
from mtmc_lsp.verify.worker.interpreter.source import on_cpu
from mtmc_lsp.verify.worker.interpreter.stand_in import stand_in
from mtmc_lsp.verify.worker.observation.global_state import RANDOM_STATE, changed_state, global_state

_modules: dict[tuple[str, str, str], Any] = {}
_is_interpreted: bool | None = None
MUCH_IDLE = 1 << 30
"""Bytes of unused GPU memory that a process may keep for its next case, also if they are more than ``IDLE_PART``."""


def is_interpreted() -> bool:
    """Whether this worker runs kernels by Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1" if _is_interpreted is None else _is_interpreted


def keep_mode() -> None:
    """Remember whether this worker interprets, since its environment will change."""
    global _is_interpreted
    _is_interpreted = is_interpreted()


def device_for(capture: Capture, kind: str) -> str:
    """Where a case's tensors live."""
    gpu = torch.cuda.is_available() and not is_interpreted() and capture.workload.device == "cuda"
    return "cuda" if gpu and kind != ON_CPU else "cpu"


def target_source(text: str | None, capture: Capture) -> str:
    """The user's file at the start of the run; for ``None`` as it is on disk."""
    return text if text is not None else Path(capture.workload.target.path).read_bytes().decode("utf-8")


def module_of(capture: Capture, user_source: str, candidate: str | None) -> Any:
    """The user's module, or a version that stands in for it. For the interpreter, GPU names are replaced by CPU names."""
    text = user_source if candidate is None else candidate
    if candidate is not None and is_interpreted():
        text = on_cpu(text, user_source)
    path = capture.workload.target.path
    return loaded_once(path, text, capture.module_name, is_candidate=candidate is not None)


def loaded_once(path: str, text: str, name: str, *, is_candidate: bool, kernels: KernelsFile | None = None) -> Any:
    """A text of the user's file as a module, loaded once.

    Args:
        kernels: the file of kernels that the text imports, instead of the one on the disk.
    """
    key = (path, text, kernels.text if kernels is not None else "")
    if key not in _modules:
        name = f"{name}__candidate{len(_modules)}" if is_candidate else name
        # The user's text is loaded under its own path, so that errors name the user's file.
        with _importable(kernels):
            _modules[key] = load_user_module(path, text, name, in_place=not is_candidate)
        if is_candidate and not is_interpreted():
            share_kernels(_modules[key])
    return _modules[key]


@contextlib.contextmanager
def _importable(kernels: KernelsFile | None) -> Iterator[None]:
    """Let imports of the file of kernels run this text of it."""
    if kernels is None:
        yield
        return
    name = module_name(Path(kernels.path))
    before = sys.modules.pop(name, None)
    try:
        load_user_module(kernels.path, kernels.text, name)
        yield
    finally:
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before


def copies(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """New tensors with the same values and strides; inputs that are one tensor stay one."""
    copied: dict[int, torch.Tensor] = {}
    for tensor in inputs.values():
        if id(tensor) not in copied:
            copied[id(tensor)] = laid_out(tensor, tensor.stride())
    return {name: copied[id(tensor)] for name, tensor in inputs.items()}


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
    observes_state: bool = True,
) -> dict[str, Any]:
    """Call the target once.

    Args:
        inputs: graph inputs by name; the call may change them.
        mode: a context for the call.
        seed: for torch's random numbers.
        kind: of the case; gradients are computed for ``AUTOGRAD``.
        prepare: finds the target in the module; returns the call and its arguments.
        before: the values of the inputs in other tensors; without it they are copied.
        observes_state: whether to record the global state that the call changes.

    Returns:
        ``results`` (followed by gradients), ``gradients`` (the inputs whose gradients they are), ``after`` (the inputs that the
        call changed, by name), ``facts`` (properties of each result besides its values) and ``changed_state`` (the global state
        that the call changed).
    """
    is_stand_in = device == "cpu" and capture.workload.device == "cuda"
    with gpu_autocast_on_cpu() if is_stand_in else contextlib.nullcontext():
        return _run(module, capture, inputs, device, mode, seed, kind, prepare, before, observes_state)


def _run(
    module: Any,
    capture: Capture,
    inputs: dict[str, torch.Tensor],
    device: str,
    mode: contextlib.AbstractContextManager[Any],
    seed: int,
    kind: str,
    prepare: Callable[..., tuple[Call, list[Any]]],
    before: Mapping[str, torch.Tensor] | None,
    observes_state: bool,
) -> dict[str, Any]:
    let_timings_pass()
    before = copies(inputs) if before is None else before
    call, values = prepare(module, capture, inputs, device)
    let_timings_pass()
    backward = capture.graph.backward if kind == VALUES else None
    names, leaves = list[str](), list[torch.Tensor]()
    if backward is not None:
        names = list(backward.gradients)
        leaves = [trained_tensor(capture, name, inputs, call.instance) for name in names]
    elif kind == AUTOGRAD:
        names = _float_arguments(capture, inputs)
        leaves = [inputs[name].requires_grad_() for name in names]
    seed_torch(seed)
    # Functions that the user compiles run as they are written: the sandbox has no compiler.
    with torch.set_grad_enabled(bool(leaves)), torch.compiler.set_stance("force_eager"), mode:
        state = global_state() if observes_state else {}
        returned = call.run(values)
        differing = changed_state(state) if observes_state else []
        changed = [name for name in differing if not (name == RANDOM_STATE and capture.uses_random)]
    results = flatten(returned)
    facts = [_facts(result, inputs) for result in results]
    if (region := capture.workload.target.region) is not None and region.writes_follow:
        for i, result in enumerate(results):
            facts[i]["shares memory with results"] = _sharing(result, results)
    if leaves:
        form = seed % len(UPSTREAM) if backward is not None else 0
        found = gradients(results, leaves, UPSTREAM[form])
        results = [r.detach() if isinstance(r, torch.Tensor) else r for r in results] + found
    written = unequal({name: (inputs[name].detach(), held) for name, held in before.items()})
    after = {name: inputs[name].detach() for name in before if name in written}
    return {"results": results, "after": after, "facts": facts, "changed_state": changed, "gradients": names}


def run_again(
    module: Any, capture: Capture, inputs: Mapping[str, torch.Tensor], device: str, case: Case
) -> dict[str, Any]:
    """One more call on copies of the inputs, as :func:`run_case`."""
    tensors, mode = copies(inputs), contextlib.nullcontext()
    return run_case(module, capture, tensors, device, mode, case.seed, case.kind, before=inputs)


def outcome(run: Mapping[str, Any]) -> list[Any]:
    """The results of a call by :func:`run_case`, followed by the inputs that it changed."""
    return [*run["results"], *(tensor for _, tensor in sorted(run["after"].items()))]


def settled(run: dict[str, Any], device: str) -> dict[str, Any]:
    """The results of :func:`run_case` as the current stream sees them when the call returns.

    Work on another stream that the current stream does not wait for is missing from them.
    """
    if device != "cuda":
        return run
    settled_run = snapshots(run)
    torch.cuda.synchronize()
    return settled_run


def snapshots(run: dict[str, Any]) -> dict[str, Any]:
    """The results of :func:`run_case` in tensors of their own."""
    results = [snapshot(result) for result in run["results"]]
    after = {name: snapshot(tensor) for name, tensor in run["after"].items()}
    return {**run, "results": results, "after": after}


def snapshot(result: Any) -> Any:
    """A copy of a tensor with the same layout, without subclass and autograd history; other values as by :func:`plain`."""
    bare = plain(result)
    if not isinstance(bare, torch.Tensor):
        return bare
    return laid_out(bare.detach(), bare.stride())


def plain(result: Any) -> Any:
    """A result that another process can load: a tensor without its subclass, a constant, or else the name of its type."""
    if isinstance(result, torch.Tensor):
        return result.as_subclass(torch.Tensor) if type(result) is not torch.Tensor else result
    return result if result is None or isinstance(result, (bool, int, float, str)) else type(result).__name__


def flatten(value: Any) -> list[Any]:
    """The results of a target as a list; nested results are followed by a text that describes their structure."""
    structure = structure_of(value, leaf_text=lambda leaf: type(leaf).__name__)
    return [*leaves(value), structure] if parts(value) is not None and is_nested(structure) else leaves(value)


def _float_arguments(capture: Capture, inputs: Mapping[str, torch.Tensor]) -> list[str]:
    names = [item.name for item in capture.graph.inputs if item.kind is InputKind.ARGUMENT]
    return [name for name in names if inputs[name].is_floating_point()]


def trained_tensor(
    capture: Capture, name: str, inputs: Mapping[str, torch.Tensor], instance: torch.nn.Module | None
) -> torch.Tensor:
    """The tensor of a call whose gradient the target computes: an argument, or a parameter of its module."""
    item = next(each for each in capture.graph.inputs if each.name == name)
    if item.kind is InputKind.ARGUMENT:
        return inputs[name].requires_grad_()
    return read_tensor(instance, item.access)


def _pattern(result: torch.Tensor) -> torch.Tensor:
    """Eighths that look random: the sums of a regular pattern cancel, and then rounding alone decides the gradients."""
    number = torch.arange(result.numel(), device=result.device)
    return (((number * 2654435761 >> 7) % 15 - 6) / 8).to(result.dtype).view(result.shape)


def _expanded(result: torch.Tensor) -> torch.Tensor:
    """The same row for all rows, or the same number, with a stride of 0, as of a sum.

    The same number for all elements would often give gradients that are exactly 0, for example of a softmax.
    """
    if result.dim() < 2:
        return torch.ones((), dtype=result.dtype, device=result.device).expand(result.shape)
    return _pattern(result[:1]).expand(result.shape)


def _one_element(result: torch.Tensor) -> torch.Tensor:
    weights = torch.zeros_like(result, memory_format=torch.contiguous_format)
    if weights.numel():
        weights.view(-1)[weights.numel() // 2] = 1.0
    return weights


def _column_major(result: torch.Tensor) -> torch.Tensor:
    weights = _pattern(result)
    return (
        weights.t().contiguous().t()
        if weights.dim() == 2
        else weights.mT.contiguous().mT
        if weights.dim() > 2
        else weights
    )


UPSTREAM = (_pattern, _expanded, _column_major, _one_element)
"""Gradients of the results that the backward pass gets, in turn: their values are exact in every dtype."""


def gradients(
    results: list[Any], leaves: list[torch.Tensor], upstream: Callable[[torch.Tensor], torch.Tensor] = _pattern
) -> list[torch.Tensor | None]:
    """Gradients of the leaves for given gradients of the results."""
    outputs = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    if not outputs:
        return [None] * len(leaves)
    weights = [upstream(output.detach()) for output in outputs]
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


def _sharing(result: Any, results: list[Any]) -> list[int]:
    """The numbers of the results in the memory of a result: a write into one of them would change the others."""
    if not isinstance(result, torch.Tensor) or result.numel() == 0:
        return []
    return [
        i for i, other in enumerate(results) if isinstance(other, torch.Tensor) and _storage(other) == _storage(result)
    ]


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().data_ptr())


def poison_new_memory() -> None:
    """Fill new tensors of this process with NaN, or the largest integer, until they are written."""
    if not torch.are_deterministic_algorithms_enabled():
        # torch.use_deterministic_algorithms would also import the compiler, which takes seconds.
        torch._C._set_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True


def release_gpu_memory() -> None:
    """Return unused GPU memory to the device for other processes, unless it is little.

    The next case allocates about as much again, in hundreds of blocks for a network in float64.
    """
    if not torch.cuda.is_initialized():
        return
    idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    if idle > max(MUCH_IDLE, IDLE_PART * torch.cuda.mem_get_info()[1]):
        torch.cuda.empty_cache()


def use_one_thread() -> None:
    """Limit torch to one thread for the interpreter's small cases: more threads would only wait for each other."""
    if is_interpreted():
        torch.set_num_threads(1)


class LaunchCount:
    """Counts launches: of kernels, of compiled kernels that are launched directly, and of interpreted ones."""

    def __init__(self, on_launch: Callable[[], None] = lambda: None) -> None:
        """Count from zero; ``on_launch`` is called before each launch."""
        self._on_launch = on_launch
        self.count = 0
        self.kernels: set[str] = set()
        """The names of the launched kernels."""
        self.threads: set[int] = set()
        """The threads that launched them."""
        self._executes, self._disabled = True, ""
        self._local = _thread._local()

    @contextlib.contextmanager
    def counting(self, *, executes: bool = True, disabled: str = "") -> Iterator[None]:
        """Count the launches in this context; if ``executes`` is false, kernels do nothing, nor does the ``disabled`` one."""
        self._executes, self._disabled = executes, disabled
        import triton.runtime.interpreter as interpreter
        from triton.compiler import CompiledKernel
        from triton.runtime.jit import JITFunction

        run, launcher, interpreted = JITFunction.run, CompiledKernel.run, interpreter.GridExecutor.__call__
        JITFunction.run = stand_in(self._counted(run), run)
        getter = stand_in(lambda compiled: self._launcher_of(compiled, launcher), launcher.fget)
        CompiledKernel.run = property(getter)
        interpreter.GridExecutor.__call__ = stand_in(self._counted(interpreted), interpreted)
        try:
            yield
        finally:
            JITFunction.run, CompiledKernel.run = run, launcher
            interpreter.GridExecutor.__call__ = interpreted

    def _launcher_of(self, compiled: Any, launcher: Any) -> Any:
        """What launches a compiled kernel; Triton's search for it was counted as the launch."""
        launch = launcher.__get__(compiled)
        if getattr(self._local, "searches", False):
            return launch
        return self._counted(lambda _, *args, **kwargs: launch(*args, **kwargs), compiled)

    def _counted(self, original: Any, compiled: Any = None) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if compiled is not None:
                args = (compiled, *args)
            if not kwargs.get("warmup"):
                self.count += 1
                self.threads.add(_thread.get_ident())
                self._on_launch()
                name = str(getattr(getattr(args[0], "fn", None), "__name__", getattr(args[0], "name", "")))
                self.kernels |= {name} - {""}
                if not self._executes or (name and name == self._disabled):
                    return None
            searches, self._local.searches = getattr(self._local, "searches", False), True
            try:
                # The interpreter computes with torch, too: that is the kernel's arithmetic.
                with _disable_current_modes(), torch._C.DisableTorchFunction():
                    return original(*args, **kwargs)
            finally:
                self._local.searches = searches

        return run
