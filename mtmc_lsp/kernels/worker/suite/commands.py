"""The tests of a suite of functions: the calls that they make, and their results with delivered files. Runs in workers."""

from __future__ import annotations

import importlib.util
import inspect
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from mtmc_lsp.kernels.messages import (
    SuiteCall,
    SuiteRecordAnswer,
    SuiteRecordRequest,
    SuiteTestAnswer,
    SuiteTestRequest,
)
from mtmc_lsp.kernels.worker.record_test import loaded, note, own_functions
from mtmc_lsp.kernels.worker.suite.input_ranges import classify, has_finite_values, literal
from mtmc_lsp.process.worker.threads import one_thread

RELATIVE, ABSOLUTE = 1e-3, 1e-3
"""Largest difference of floats: results of 32 bits with another order of sums."""
COARSE = 2e-2
"""The same for floats of 16 bits and less."""
FURTHER = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
LONGEST_VALUES = 1 << 16
"""Characters of the values of a call, as text in a file."""


def record_suite(request: SuiteRecordRequest) -> SuiteRecordAnswer:
    """Run a test, and describe the calls that return."""
    file = Path(request.path)
    try:
        module = loaded(file, file.stem)
    except Exception as error:  # the user's code raises anything
        return SuiteRecordAnswer((), _text(error))
    originals = own_functions(module, request.test)
    noted: dict[int, tuple[str, dict[str, Any], bool, tuple[str, ...]]] = {}
    calls: dict[str, dict[str, dict[str, Any]]] = {}
    for name, function in originals.items():
        setattr(module, name, _observed(name, function, calls, noted))
    problem = ""
    torch.manual_seed(0)
    try:
        with one_thread():
            getattr(module, request.test)()
    except Exception as error:  # the user's code raises anything
        problem = _text(error)
    # Functions call each other: trials must not be noted.
    for name, function in originals.items():
        setattr(module, name, function)
    found = []
    for name, record, is_finite, values in noted.values():
        inputs = classify(originals[name], record, is_finite)
        found.append(SuiteCall(name, inputs, json.dumps(record, default=str), values))
    return SuiteRecordAnswer(tuple(found), problem)


def _observed(
    name: str,
    function: Any,
    calls: dict[str, dict[str, dict[str, Any]]],
    noted: dict[int, tuple[str, dict[str, Any], bool, tuple[str, ...]]],
) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values = _values(signature, bound.arguments)
        record = note(calls.setdefault(name, {}), bound.arguments)
        result = function(*args, **kwargs)
        if record is not None:
            _, _, is_finite, first = noted.get(id(record), (name, record, True, values))
            noted[id(record)] = (name, record, is_finite and has_finite_values(result), first)
        return result

    return call


def _values(signature: inspect.Signature, arguments: dict[str, Any]) -> tuple[str, ...]:
    """The positional arguments with their values; empty if others are needed, or one has no expression."""
    texts: list[str] = []
    parameters = signature.parameters
    given = [name for name, value in arguments.items() if value is not parameters[name].default]
    for name, value in arguments.items():
        parameter = parameters[name]
        if not given or (parameter.kind not in FURTHER and [*arguments].index(name) > [*arguments].index(given[-1])):
            # Defaults at the end: no directive and no capture needs kinds such as a layout.
            break
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            parts: list[Any] = list(value)
        elif parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD):
            parts = [value]
        elif (isinstance(value, dict) and not value) or value is parameter.default:
            continue
        else:
            return ()
        literals = [literal(part) for part in parts]
        if any(text is None for text in literals):
            return ()
        texts += [text for text in literals if text is not None]
    return tuple(texts) if sum(map(len, texts)) <= LONGEST_VALUES else ()


def test_suite(request: SuiteTestRequest) -> SuiteTestAnswer:
    """Run a test with the functions of both files from the same seed, and compare what it returns."""
    try:
        expected = _results(request.original, request.test, 0)
    except Exception as error:  # the user's code raises anything
        return SuiteTestAnswer(False, None, f"the original fails: {_text(error)}")
    try:
        got = _results(request.delivered, request.test, 0)
    except Exception as error:  # generated code may raise anything
        return SuiteTestAnswer(False, False, _text(error))
    difference = _difference(got, expected)
    if difference and _difference(_results(request.original, request.test, 1), expected):
        return SuiteTestAnswer(True, None, f"the original's results vary with the seed; {difference}")
    return SuiteTestAnswer(True, not difference, difference)


def _results(path: str, test: str, seed: int) -> Any:
    # Some tests import the file that they are in.
    module = _module(Path(path), Path(path).stem)
    torch.manual_seed(seed)
    with one_thread():
        results = getattr(module, test)()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return results


def _module(file: Path, name: str) -> ModuleType:
    if not torch.cuda.is_available():
        import linecache

        from mtmc_lsp.kernels.worker.cuda_on_cpu import source_on_cpu
        from mtmc_lsp.verify.worker.interpreter import prepare_interpreter

        prepare_interpreter()
        text = source_on_cpu(file.read_text(encoding="utf-8"))
        # Triton reads the source of kernels.
        linecache.cache[str(file)] = (len(text), None, text.splitlines(keepends=True), str(file))
        return loaded(file, name)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _difference(got: Any, expected: Any) -> str:
    """How the results of a test differ, as a clause; empty if they agree."""
    ours, shape = tree_flatten(got)
    theirs, other = tree_flatten(expected)
    if shape != other:
        return "the results have another structure"
    for place, (one, two) in enumerate(zip(map(_as_tensor, ours), map(_as_tensor, theirs), strict=True), 1):
        if not isinstance(two, torch.Tensor):
            if type(one) is float and type(two) is float and math.isclose(one, two, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
                continue
            if isinstance(two, torch.nn.Module) or callable(two) or one == two or (one != one and two != two):
                continue
            return f"result {place} is {one!r:.60} instead of {two!r:.60}"
        if not isinstance(one, torch.Tensor) or (one.shape, one.dtype) != (two.shape, two.dtype):
            return f"result {place} has another shape or dtype"
        coarse = two.dtype.itemsize < 4
        relative, absolute = (COARSE, COARSE) if coarse else (RELATIVE, ABSOLUTE)
        one, two = (item.detach().to("cpu") for item in (one, two))
        if two.is_quantized:
            one, two = one.dequantize(), two.dequantize()
        if two.is_floating_point():
            one, two = one.double(), two.double()
        if not torch.allclose(one, two, rtol=relative, atol=absolute, equal_nan=True):
            return f"result {place} has other values"
    return ""


def _as_tensor(value: Any) -> Any:
    """An array of NumPy as a tensor; other values as they are."""
    return torch.as_tensor(value) if type(value).__module__ == "numpy" else value


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]
