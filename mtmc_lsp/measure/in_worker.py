"""Verification commands, run in workers: the reference and its oracle in one process, the candidate in another."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from mtmc_lsp.capture.calls import build_call, user_error
from mtmc_lsp.capture.loading import load_user_module
from mtmc_lsp.core.dtypes import EPSILON, TOLERANCE
from mtmc_lsp.core.jsonable import from_json
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.measure.inputs import make_inputs, prepared_call
from mtmc_lsp.measure.oracle import Float64Mode, SharedRandomMode, draw_seeds

BUDGET = 8.0
"""A candidate's error may be this many times the user's own code's error on the same inputs."""

_modules: dict[str, Any] = {}


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _device(capture: Capture) -> str:
    return "cuda" if torch.cuda.is_available() and not _interpreted() and capture.workload.device == "cuda" else "cpu"


def _module(capture: Capture, source: str | None, widened: bool) -> Any:
    """The user's module, or a candidate in its place; for the interpreter, the GPU's names become the CPU's."""
    path = capture.workload.target.path
    text = source if source is not None else Path(path).read_bytes().decode("utf-8")
    if source is not None and _interpreted():
        text = text.replace(".is_cuda", ".is_cpu")
    if widened:
        text = text.replace("torch.bfloat16", "torch.float32").replace("tl.bfloat16", "tl.float32")
    key = f"{path}:{hash(text)}"
    if key not in _modules:
        name = f"{capture.module_name}" if source is None else f"{capture.module_name}__candidate{len(_modules)}"
        _modules[key] = load_user_module(path, text if source is not None or widened else None, name)
    return _modules[key]


def _flatten(value: Any) -> list[Any]:
    return [value] if isinstance(value, torch.Tensor) or value is None else list(value)


def _random_count(capture: Capture) -> int:
    return sum("dropout" in node.op for node in capture.graph.nodes)


def reference(request: dict[str, Any]) -> dict[str, Any]:
    """Make a case's inputs, run the user's code and its float64 oracle on them; tensors go to files of the two folders."""
    capture = from_json(Capture, request["capture"])
    widened, case = bool(request["widened"]), request["case"]
    device = _device(capture)
    module = _module(capture, None, widened)
    start = build_call(module, capture.workload, device, _case_sizes(capture, case))
    inputs = make_inputs(capture, start, case["sizes"], case["distribution"], case["seed"], device, widened)
    torch.save({name: tensor.cpu() for name, tensor in inputs.items()}, request["inputs"])
    seeds = draw_seeds(case["seed"], _random_count(capture), device) if capture.uses_random else []
    try:
        results, after = _run(module, capture, _copies(inputs), device, SharedRandomMode(seeds), case["seed"])
        wide = {n: t.double() if t.is_floating_point() else t for n, t in _copies(inputs).items()}
        torch.set_default_dtype(torch.float64)
        try:
            with Float64Mode():
                oracle, oracle_after = _run(module, capture, wide, device, SharedRandomMode(seeds), case["seed"])
                near = None
                if case["distribution"] == "constant":
                    moved = _moved(inputs, case["seed"])
                    near, _ = _run(module, capture, moved, device, SharedRandomMode(seeds), case["seed"])
        finally:
            torch.set_default_dtype(torch.float32)
    except Exception as error:
        raise user_error(error, capture.workload.target, f"on {case['label']}") from error
    expected = {"results": results, "after": after, "oracle": oracle, "oracle_after": oracle_after, "near": near}
    torch.save(expected, request["expected"])
    return {"device": device}


def _moved(inputs: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """The inputs in float64, each element moved by up to half a unit in the last place of its own dtype."""
    generator = torch.Generator().manual_seed(seed + 1)
    result = {}
    for name, tensor in inputs.items():
        if not tensor.is_floating_point():
            result[name] = tensor.clone()
            continue
        epsilon = EPSILON[str(tensor.dtype).removeprefix("torch.")]
        noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device) - 0.5
        result[name] = tensor.double() * (1.0 + epsilon * noise)
    return result


def _case_sizes(capture: Capture, case: dict[str, Any]) -> dict[str, int]:
    sizes = dict(capture.workload.sizes)
    if case["distribution"] != "given":
        sizes = {name: min(value, 4) for name, value in sizes.items()}
    return sizes


def _copies(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: _same_layout(tensor) for name, tensor in inputs.items()}


def _same_layout(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor)


def _run(
    module: Any, capture: Capture, inputs: dict[str, torch.Tensor], device: str, mode: Any, seed: int
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """Call the target; gives its results and what its inputs hold afterwards."""
    call, values = prepared_call(module, capture, inputs, device)
    torch.manual_seed(seed)
    with torch.no_grad(), mode:
        results = _flatten(call.run(values))
    return results, inputs


@contextlib.contextmanager
def _poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN (or a large number) until they are written."""
    originals = {name: getattr(torch, name) for name in ("empty", "empty_like", "empty_strided")}

    def poisoned(make: Any) -> Any:
        def allocate(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor: torch.Tensor = make(*args, **kwargs)
            if tensor.is_floating_point():
                return tensor.fill_(float("nan"))
            return tensor.fill_(True) if tensor.dtype is torch.bool else tensor.fill_(101)

        return allocate

    for name, original in originals.items():
        setattr(torch, name, poisoned(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


class _LaunchCount:
    """Counts kernel launches."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> _LaunchCount:
        import triton.runtime.interpreter as interpreter
        from triton.runtime.jit import JITFunction

        self._patched = [(JITFunction, "run"), (interpreter.GridExecutor, "__call__")]
        self._originals = [getattr(kind, name) for kind, name in self._patched]
        for (kind, name), original in zip(self._patched, self._originals, strict=True):
            setattr(kind, name, self._counting(original))
        return self

    def _counting(self, original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return original(*args, **kwargs)

        return run

    def __exit__(self, *_: object) -> None:
        for (kind, name), original in zip(self._patched, self._originals, strict=True):
            setattr(kind, name, original)


def candidate(request: dict[str, Any]) -> dict[str, Any]:
    """Run a candidate on a case's inputs twice; its results go to a file, what else was seen comes back."""
    capture = from_json(Capture, request["capture"])
    widened, case = bool(request["widened"]), request["case"]
    device = _device(capture)
    try:
        module = _module(capture, request["source"], widened)
    except Exception as error:
        return {"status": "compile_error", "reason": f"{type(error).__name__}: {error}"}
    loaded = {n: t.to(device) for n, t in torch.load(request["inputs"], weights_only=True).items()}
    inputs = {n: _with_layout_of(t, capture, n, case["sizes"]) for n, t in loaded.items()}
    runs = []
    with _LaunchCount() as launches, _poisoned_memory():
        for _ in range(2):
            fresh = _copies(inputs)
            try:
                runs.append(_run(module, capture, fresh, device, contextlib.nullcontext(), case["seed"]))
                if device == "cuda":
                    torch.cuda.synchronize()
            except Exception as error:
                return {"status": "runtime_error", "reason": f"{type(error).__name__}: {str(error)[:600]}"}
    results, after = runs[0]
    plain = all(value is None or type(value) is torch.Tensor for value in results)
    repeats = all(a is None or torch.equal(_bits(a), _bits(b)) for a, b in zip(results, runs[1][0], strict=True))
    torch.save({"results": results, "after": after}, request["results"])
    return {"status": "ran", "launches": launches.count // 2, "plain": plain, "repeats": repeats}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(tensor) if tensor.is_floating_point() else tensor


def _with_layout_of(tensor: torch.Tensor, capture: Capture, name: str, sizes: dict[str, int]) -> torch.Tensor:
    kind = next(item.type for item in capture.graph.inputs if item.name == name)
    strides = [size.value(sizes) for size in kind.stride]
    if list(tensor.stride()) == strides or not tensor.numel():
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def compare(request: dict[str, Any]) -> dict[str, Any]:
    """Compare a candidate's results with the reference's and the oracle's; in the reference's process."""
    expected = torch.load(request["expected"], weights_only=True)
    seen = torch.load(request["results"], weights_only=True)
    checks: list[dict[str, str]] = []
    worst = (0.0, 0.0)

    def check(name: str, passed: bool, detail: str = "") -> None:
        checks.append({"name": name, "status": "passed" if passed else "failed", "detail": "" if passed else detail})

    check("count", len(seen["results"]) == len(expected["results"]), "another number of results")
    triples = list(zip(seen["results"], expected["results"], expected["oracle"], strict=False))
    names = [f"result {i}" for i in range(len(triples))]
    near = list(expected["near"] or [])
    for name in expected["after"]:
        triples.append((seen["after"][name], expected["after"][name], expected["oracle_after"][name]))
        names.append(f"input {name} afterwards")
    for i, (name, (mine, own, oracle)) in enumerate(zip(names, triples, strict=True)):
        if mine is None or own is None:
            check(f"{name} none", mine is None and own is None, "None instead of a tensor, or the reverse")
            continue
        for attribute in ("dtype", "shape"):
            a, b = getattr(mine, attribute), getattr(own, attribute)
            check(f"{name} {attribute}", a == b, f"{a} instead of {b}")
        check(f"{name} stride", mine.stride() == own.stride(), f"{mine.stride()} instead of {own.stride()}")
        if mine.shape != own.shape:
            continue
        passed, error, own_error, detail = _values_agree(mine, own, oracle, near[i] if i < len(near) else None)
        check(f"{name} values", passed, detail)
        if error > worst[0]:
            worst = (error, own_error)
    return {"checks": checks, "error": worst[0], "reference_error": worst[1]}


def _values_agree(
    mine: torch.Tensor, own: torch.Tensor, oracle: torch.Tensor, near: torch.Tensor | None
) -> tuple[bool, float, float, str]:
    """Whether a result is within its budget; gives both relative L2 errors and what is wrong.

    ``near`` is the oracle on inputs that differ by rounding alone: where the problem itself magnifies rounding (a constant
    row, normalised), the user's own error is partly luck, and this is the least error that can be asked for.
    """
    if not own.is_floating_point():
        wrong = int((mine != own).sum())
        return wrong == 0, 0.0, 0.0, f"{wrong} of {own.numel()} elements differ"
    finite = torch.isfinite(own) & torch.isfinite(oracle)
    broken = finite & ~torch.isfinite(mine)
    if bool(broken.any()):
        return False, float("inf"), 0.0, f"{int(broken.sum())} elements are NaN or infinite, or were never written"
    lost = torch.isnan(own) & torch.isnan(oracle) & ~torch.isnan(mine)
    if bool(lost.any()):
        return False, float("inf"), 0.0, f"{int(lost.sum())} elements should be NaN"
    scale = float(torch.linalg.vector_norm(oracle.double()[finite])) + 1e-300
    error = float(torch.linalg.vector_norm(mine.double()[finite] - oracle.double()[finite])) / scale
    own_error = float(torch.linalg.vector_norm(own.double()[finite] - oracle.double()[finite])) / scale
    if near is not None:
        own_error = max(own_error, float(torch.linalg.vector_norm((near - oracle).double()[finite])) / scale)
    dtype = str(own.dtype).removeprefix("torch.")
    budget = min(max(BUDGET * own_error, 4 * EPSILON[dtype]), max(TOLERANCE[dtype], 2 * own_error))
    detail = f"relative L2 error {error:.2e}, the user's own code has {own_error:.2e}, allowed is {budget:.2e}"
    return error <= budget, error, own_error, detail
