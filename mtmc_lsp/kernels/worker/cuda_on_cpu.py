"""Stand-ins for functions of ``torch.cuda`` that launchers call, where there is no GPU. Runs in workers."""

from __future__ import annotations

import contextlib
import re
from types import SimpleNamespace
from typing import Any

import torch

from mtmc_lsp.verify.worker.interpreter.source import on_cpu

CAPABILITY = (9, 0)
"""Launchers choose options by it; the interpreter runs any of them."""
PROPERTIES = SimpleNamespace(
    name="CPU", major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=132, total_memory=1 << 36, warp_size=32,
    max_threads_per_multi_processor=2048, regs_per_multiprocessor=65536, shared_memory_per_multiprocessor=233472,
    shared_memory_per_block_optin=232448, L2_cache_size=50 << 20,
)  # fmt: skip
"""Those of an H100."""
DRIVER_PROPERTIES = {
    "multiprocessor_count": PROPERTIES.multi_processor_count,
    "max_shared_mem": PROPERTIES.shared_memory_per_block_optin,
    "max_num_regs": PROPERTIES.regs_per_multiprocessor,
    "warpSize": PROPERTIES.warp_size,
}


CUDA_CALL = re.compile(r"\.cuda\([^()]*\)")
CUDA_TEXT = re.compile(r"""f?(["'])cuda(:[^"']*)?\1""")


def source_on_cpu(text: str) -> str:
    """The text of a file with CPU devices in place of GPU devices."""
    return CUDA_TEXT.sub(r"\1cpu\1", CUDA_CALL.sub(".cpu()", on_cpu(text, "")))


def stand_in_for_cuda() -> None:
    """Let launchers run that name the GPU: the device context, its capability, its properties, synchronisation."""
    _accept_devices_without_index()
    if torch.cuda.is_available():
        return
    answers: dict[str, Any] = {
        "device": lambda *_: contextlib.nullcontext(),
        "device_of": lambda *_: contextlib.nullcontext(),
        "stream": lambda *_: contextlib.nullcontext(),
        "get_device_capability": lambda *_: CAPABILITY,
        "get_device_properties": lambda *_: PROPERTIES,
        "get_device_name": lambda *_: PROPERTIES.name,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda *_: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "manual_seed": lambda *_: None,
        "manual_seed_all": lambda *_: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    # Generated code imports it.
    for name in ("_cuda_getCurrentRawStream", "_cuda_getDevice"):
        if not hasattr(torch._C, name):
            setattr(torch._C, name, lambda *_: 0)
    with contextlib.suppress(AttributeError):
        # Generated code allocates its results by it.
        guards = torch._C._dynamo.guards
        setattr(guards, "_empty_strided_cuda", guards._empty_strided_cpu)  # noqa: B010 - the module has no types
    _stand_in_for_driver()


def _accept_devices_without_index() -> None:
    """Let launchers enter a guard with the index of a CPU tensor's device, which is None, also where there is a GPU."""
    original, has_gpu = torch.cuda._DeviceGuard, torch.cuda.is_available()

    def guard(index: int | None) -> Any:
        return original(index) if has_gpu and index is not None else contextlib.nullcontext()

    setattr(torch.cuda, "_DeviceGuard", guard)  # noqa: B010 - mypy takes it for a class


def _stand_in_for_driver() -> None:
    """Let launchers ask Triton's driver for the target and its properties."""
    with contextlib.suppress(ImportError, AttributeError):
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver

        utils = SimpleNamespace(get_device_properties=lambda *_: DRIVER_PROPERTIES)
        driver.set_active(
            SimpleNamespace(
                get_current_target=lambda: GPUTarget("cuda", 10 * CAPABILITY[0] + CAPABILITY[1], PROPERTIES.warp_size),
                get_current_device=lambda: 0,
                get_current_stream=lambda *_: 0,
                get_active_torch_device=lambda: torch.device("cpu"),
                get_device_interface=lambda: torch.cuda,
                utils=utils,
            )
        )
