"""Prints the calls of a file's functions by its test, on the CPU: ``python -m mtmc_lsp.kernels.worker.record_test FILE TEST``."""

from __future__ import annotations

import contextlib
import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from mtmc_lsp.capture.recorder.arguments import argument_record, update_range
from mtmc_lsp.capture.recorder.recorder import functions_of
from mtmc_lsp.kernels.worker.cuda_on_cpu import source_on_cpu, stand_in_for_cuda


def record(file: Path, test: str) -> list[dict[str, Any]]:
    """Run a test, and describe the arguments of each call of a function of its file. Importing the file must not run the test."""
    module = loaded(file, file.stem)
    calls: dict[str, dict[str, dict[str, Any]]] = {}
    record_functions(module, calls, but=test)
    torch.manual_seed(0)
    getattr(module, test)()
    return records_of(file, calls)


def loaded(file: Path, name: str) -> ModuleType:
    """A file as a module that runs on the CPU."""
    stand_in_for_cuda()
    module = ModuleType(name)
    module.__file__ = str(file)
    sys.modules[name] = module
    exec(compile(source_on_cpu(file.read_text(encoding="utf-8")), str(file), "exec"), module.__dict__)
    return module


def record_functions(
    module: ModuleType,
    calls: dict[str, dict[str, dict[str, Any]]],
    *,
    but: str = "",
    ends: type[BaseException] | None = None,
) -> None:
    """Replace the functions of a module by ones that note their arguments.

    Args:
        but: the function that stays.
        ends: an exception that replaces the call.
    """

    def wrapped(name: str, function: Any) -> Any:
        signature = inspect.signature(function)

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            note(calls.setdefault(name, {}), bound.arguments)
            if ends is not None:
                raise ends
            return function(*args, **kwargs)

        return call

    for name, function in own_functions(module, but).items():
        setattr(module, name, wrapped(name, function))


def own_functions(module: ModuleType, but: str) -> dict[str, Any]:
    """The functions that a module's file defines, except for one."""
    text = Path(str(module.__file__)).read_text(encoding="utf-8")
    names = {name for name, _ in functions_of(text).values() if "." not in name and name != but}
    return {name: getattr(module, name) for name in names if callable(getattr(module, name, None))}


def records_of(file: Path, calls: Mapping[str, Mapping[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The noted calls in the form that ``mtmc record`` stores."""
    return [
        {"path": str(file), "qualname": name, "others": 0, "traced": 0, "calls": list(records.values())}
        for name, records in calls.items()
    ]


def note(records: dict[str, dict[str, Any]], arguments: dict[str, Any]) -> dict[str, Any] | None:
    """Add a call to the records of its function; returns its record, or None for a call without tensors."""
    items = [argument_record(name, value, torch) for name, value in arguments.items()]
    if not any(_has_tensors(item) for item in items):
        return None
    key = json.dumps(items, default=str)
    needs = any(item.get("tensor", {}).get("requires_grad") for item in items)
    record = records.setdefault(
        key, {"count": 0, "training": 0, "grad": 0, "compiled": 0, "arguments": items, "init": [], "module_dtype": ""}
    )
    record["count"] += 1
    record["grad"] += needs
    for recorded, value in zip(record["arguments"], arguments.values(), strict=True):
        update_range(recorded, value, torch)
    return record


def _has_tensors(item: Mapping[str, Any]) -> bool:
    return "tensor" in item or any(map(_has_tensors, item.get("items", ())))


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = record(Path(sys.argv[1]), sys.argv[2])
    print(json.dumps(found))
