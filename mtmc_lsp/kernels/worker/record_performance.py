"""Prints the largest call of a file's functions by TritonBench's performance script: ``... FILE SCRIPT``, on the CPU.

The function is not run: its arguments alone are noted.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from mtmc_lsp.kernels.worker.cuda_on_cpu import source_on_cpu
from mtmc_lsp.kernels.worker.record_test import loaded, record_functions, records_of

MEMORY = 16 << 30
"""A script creates the inputs of all its sizes at once."""
MOST_BYTES = 1 << 28
"""Larger inputs are not chosen if there are others: several versions of several files are timed on one GPU."""
PACKAGE = "TritonBench_v1"
"""Scripts import the file as a module of this package."""


RANDOM = ("randn", "rand")
MOST_RANDOM = 1 << 20
"""Larger random tensors get values in this many elements only: shapes and ranges are noted, and all values would take seconds."""


class _CallNoted(BaseException):
    """The call of a function was noted; scripts catch exceptions, but not this one."""


def record_largest(file: Path, script: Path) -> list[dict[str, Any]]:
    """Describe the call with the largest tensors of a performance script."""
    calls: dict[str, dict[str, dict[str, Any]]] = {}
    sys.modules[PACKAGE] = ModuleType(PACKAGE)
    module = loaded(file, f"{PACKAGE}.{file.stem}")
    record_functions(module, calls, ends=_CallNoted)
    # The base class of the scripts.
    sys.path.append(str(script.resolve().parents[1]))
    text = source_on_cpu(script.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": script.stem, "__file__": str(script)}
    exec(compile(text, str(script), "exec"), names)
    measured = names["performance_metrics"]()
    torch.manual_seed(0)
    with _few_values():
        measured.get_input_tensors()
    with contextlib.suppress(_CallNoted):
        measured.call_op(measured.to_cuda(_largest(measured.input_tensors)))
    return records_of(file, calls)


@contextlib.contextmanager
def _few_values() -> Iterator[None]:
    """Let large random tensors be zero except for their first elements: the system provides such memory at once."""
    originals = {name: getattr(torch, name) for name in RANDOM}

    def sparse(original: Any) -> Any:
        def create(*shape: Any, **options: Any) -> Any:
            sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
            is_plain = all(isinstance(size, int) for size in sizes)
            if (
                not is_plain
                or math.prod(sizes) <= MOST_RANDOM
                or not {*options} <= {"dtype", "device", "requires_grad"}
            ):
                return original(*shape, **options)
            tensor = torch.zeros(*sizes, **options)
            kept = {name: value for name, value in options.items() if name != "requires_grad"}
            with torch.no_grad():
                tensor.view(-1)[:MOST_RANDOM] = original(MOST_RANDOM, **kept)
            return tensor

        return create

    for name, original in originals.items():
        setattr(torch, name, sparse(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


def _largest(choices: list[Any]) -> Any:
    small = [inputs for inputs in choices if _bytes(inputs) <= MOST_BYTES]
    return max(small, key=_bytes) if small else min(choices, key=_bytes)


def _bytes(inputs: Any) -> int:
    tensors = [item for item in tree_leaves(inputs) if isinstance(item, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    with contextlib.redirect_stdout(sys.stderr):
        found = record_largest(Path(sys.argv[1]), Path(sys.argv[2]))
    print(json.dumps(found))
