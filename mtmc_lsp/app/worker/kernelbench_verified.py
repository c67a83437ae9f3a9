"""Runs KernelBench-Verified's evaluator on one exported file: ``python kernelbench_verified.py REQUEST ANSWER``.

REQUEST and ANSWER are JSON files. The evaluator's functions are called unchanged: its checks, its hidden inputs, its timer and
its figures of memory. The same functions time the reference and its ``torch.compile`` version in this process.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CLIENTS = {
    "together": "Together", "openai": "OpenAI", "google.genai": "", "anthropic": "", "dotenv": "load_dotenv", "tqdm": "tqdm",
    "transformers": "AutoTokenizer",
}  # fmt: skip
"""Packages that the evaluator's helpers import to call language models, and the name that each provides. Evaluation uses none."""
LOADER = """import importlib.util
import sys

spec = importlib.util.spec_from_file_location({name!r}, {path!r})
module = importlib.util.module_from_spec(spec)
sys.modules[{name!r}] = module
spec.loader.exec_module(module)
ModelNew = module.ModelNew
"""
"""The text that the evaluator executes: Triton reads the source of kernels from their file, so that file is imported."""
SEED = 42
CORRECT_TRIALS, TIMED_TRIALS = 5, 100
"""As in the commands of the suite's README."""


def main() -> int:
    """Evaluate one file; returns the exit code."""
    request, answer = (Path(name) for name in sys.argv[1:3])
    answer.write_text(json.dumps(evaluated(json.loads(request.read_text(encoding="utf-8")))), encoding="utf-8")
    return 0


def evaluated(request: dict[str, Any]) -> dict[str, Any]:
    """The evaluator's result for an exported file.

    Args:
        request: ``checkout``, ``reference`` and ``exported`` (paths), ``level``, ``number`` and ``device``.
    """
    torch.set_float32_matmul_precision("high")
    evaluator, device = _evaluator(request["checkout"]), torch.device(request["device"])
    reference = Path(request["reference"]).read_text(encoding="utf-8")
    hidden = evaluator.get_hidden_test_path(request["level"], request["number"])
    if hidden is None:
        raise FileNotFoundError(f"level {request['level']}, problem {request['number']} has no hidden test")
    answer: dict[str, Any] = {"baselines": _baselines(evaluator, reference, device)}
    result = evaluator.eval_kernel_against_ref(
        reference,
        LOADER.format(name="exported_model", path=request["exported"]),
        seed_num=SEED,
        num_correct_trials=CORRECT_TRIALS,
        num_perf_trials=TIMED_TRIALS,
        measure_performance=True,
        device=device,
        precision=torch.float32,
        hidden_test_path=hidden,
    )
    if result is None:
        return {**answer, "correct": False, "why": "the evaluator gave no result"}
    return {
        **answer,
        "correct": bool(result.correctness),
        "ms": result.runtime if result.runtime > 0 else None,
        "bytes": result.peak_memory if result.peak_memory > 0 else None,
        "why": "" if result.correctness else str(result.metadata),
    }


def _baselines(evaluator: Any, reference: str, device: torch.device) -> dict[str, dict[str, Any]]:
    """Time and peak memory of the reference in eager mode and compiled, by the evaluator's functions."""
    context: dict[str, Any] = {}
    model_class, init_inputs, inputs = evaluator.load_original_model_and_inputs(reference, context)
    evaluator.set_seed(SEED)
    arguments = [evaluator._process_input_tensor(x, device, torch.float32) for x in init_inputs()]
    evaluator.set_seed(SEED)
    model = model_class(*arguments).to(device=device, dtype=torch.float32)
    evaluator.set_seed(SEED)
    tensors = [evaluator._process_input_tensor(x, device, torch.float32) for x in inputs()]
    measured: dict[str, dict[str, Any]] = {}
    for name, call in (("eager", model), ("compile", torch.compile(model))):
        try:
            measured[name] = _measured(evaluator, call, tensors, device)
        except Exception as error:
            # The reference of some problems cannot be compiled; that is no fault of the exported file.
            if name == "eager":
                raise
            measured[name] = {"ms": None, "bytes": None, "why": str(error).splitlines()[:1]}
    # Memory of the baselines must not count as memory of the exported file.
    torch.compiler.reset()
    del model, call, tensors
    gc.collect()
    return measured


def _measured(evaluator: Any, call: Callable[..., object], tensors: list[Any], device: torch.device) -> dict[str, Any]:
    with torch.no_grad():
        times = evaluator.time_execution_with_cuda_event(
            call, *tensors, num_trials=TIMED_TRIALS, verbose=False, device=device
        )
        memory = evaluator.get_memory_stats(call, *tensors, device=device)
    return {"ms": evaluator.get_timing_stats(times, device=device)["mean"], "bytes": memory["peak_bytes"]}


def _evaluator(checkout: str) -> Any:
    """The suite's module of evaluation functions."""
    # The folder of this file is first on the path, and may hide modules of the same names.
    sys.path[0] = checkout
    for name, attribute in CLIENTS.items():
        _replace_missing(name, attribute)
    return importlib.import_module("src.eval")


def _replace_missing(name: str, attribute: str) -> None:
    """Replace a package that is not installed by an empty one."""
    package, _, inner = name.partition(".")
    try:
        if importlib.util.find_spec(name) is not None:
            return
    except ModuleNotFoundError:
        pass
    module = types.ModuleType(name)
    if attribute:
        module.__dict__[attribute] = lambda *arguments, **options: None
    sys.modules[name] = module
    if inner:
        sys.modules.setdefault(package, types.ModuleType(package)).__dict__[inner] = module


if __name__ == "__main__":
    sys.exit(main())
