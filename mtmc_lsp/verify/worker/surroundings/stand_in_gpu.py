"""Names of a GPU for a program on the CPU, so that the interpreter runs a candidate's text unchanged. Runs in workers.

Elsewhere, GPU names in the text are replaced by CPU names. A candidate could look for the replacements.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mtmc_lsp.verify.worker.surroundings.stand_in_driver import describe_driver
from mtmc_lsp.verify.worker.surroundings.stand_in_streams import Streams, stand_ins

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
PROPERTIES = {
    "name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "multi_processor_count": 132, "total_memory": 80 << 30,
    "warp_size": 32, "max_threads_per_multi_processor": 2048, "regs_per_multiprocessor": 65536, "L2_cache_size": 50 << 20,
    "shared_memory_per_block": 48 << 10, "shared_memory_per_block_optin": 227 << 10,
    "shared_memory_per_multiprocessor": 228 << 10,
}  # fmt: skip
CAPABILITY = (9, 0)
VARIABLE = "TRITON_INTERPRET"


class StandInGpu(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed here
    """Inside, all tensors seem to be on a GPU, and requests for its memory get memory of the CPU."""

    def __init__(self, streams: Streams) -> None:
        """Replace what torch and Triton tell of the machine for the rest of the process."""
        super().__init__()
        kind = torch.Tensor
        self._answers: list[tuple[Any, Callable[[Any], Any]]] = [
            (kind.is_cuda.__get__, lambda _: True),
            (kind.is_cpu.__get__, lambda _: False),
            (kind.device.__get__, lambda _: GPU),
            (kind.get_device, lambda _: 0),
            (kind.cuda, lambda tensor: tensor),
        ]
        _replace_cuda(streams)
        _replace_triton()

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for known, answer in self._answers:
            if function == known:
                return answer(args[0])
        named = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        return function(*map(_on_cpu, args), **named)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) and value.type == GPU.type:
        return CPU
    return "cpu" if isinstance(value, str) and value.partition(":")[0] == GPU.type else value


def describe_gpu(replace: Callable[[Any, str, Any], None], streams: Streams, *, backend: str) -> None:
    """Let torch and Triton describe a GPU, on which no tensor is: kernels choose grids by the number of multiprocessors.

    Args:
        replace: sets an attribute of a module to another function.
        streams: the streams of this GPU.
        backend: what the candidate's text has as the name of Triton's backend.
    """
    for name, answer in {**_descriptions(), **stand_ins(streams)}.items():
        replace(torch.cuda, name, answer)
    describe_driver(replace, backend, PROPERTIES)
    replace(torch.Tensor, "record_stream", lambda tensor, stream: None)


def _descriptions() -> dict[str, Callable[..., Any]]:
    properties = SimpleNamespace(**PROPERTIES)
    return {
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_name": lambda device=None: PROPERTIES["name"],
        "get_device_properties": lambda device=None: properties,
    }


def _replace_cuda(streams: Streams) -> None:
    answers: Mapping[str, Callable[..., Any]] = {
        **_descriptions(),
        **stand_ins(streams),
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
    }
    for name, answer in answers.items():
        if hasattr(torch.cuda, name):
            answer.__name__ = answer.__qualname__ = name
            answer.__module__ = "torch.cuda"
            for holder in (torch.cuda, torch.cuda.streams):
                if hasattr(holder, name):
                    setattr(holder, name, answer)


def _replace_triton() -> None:
    """Let Triton say that it compiles, while it interprets."""
    import triton
    from triton.runtime import interpreter, jit

    kind = interpreter.InterpretedFunction

    def decorated(fn: Any = None, **options: Any) -> Any:
        options = {name: value for name, value in options.items() if name != "debug" or value is not None}
        return kind(fn, **options) if fn is not None else lambda function: kind(function, **options)

    decorated.__name__ = decorated.__qualname__ = "jit"
    decorated.__module__ = jit.__name__
    jit.knobs = _Knobs(jit.knobs)
    triton.jit = jit.jit = decorated
    kind.__name__ = kind.__qualname__ = "JITFunction"
    kind.__module__ = jit.__name__
    triton.JITFunction = triton.runtime.JITFunction = kind
    os.environ.pop(VARIABLE, None)


class _Knobs:
    """Triton's settings for one module, which goes on to interpret."""

    def __init__(self, original: Any) -> None:
        self._original, self.runtime = original, _Interpreting(original.runtime)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


class _Interpreting:
    interpret = True

    def __init__(self, original: Any) -> None:
        self._original = original

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
