"""Without a GPU: honest kernels that ask torch and Triton about the GPU, as kernels of other projects do, are certified."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pairs import HONEST, REFERENCE, changed

from mtmc_lsp.core.results import Verdict

LAUNCH = "        kernel[(inp.shape[0],)]"
OUT = "    out = torch.empty_like(inp)\n"
ASKING = {
    "contexts of the device": (
        (LAUNCH, "        with torch.cuda.device(inp.device), torch.cuda.device_of(inp), torch.cuda.device(inp.device.index):\n    " + LAUNCH),
    ),
    "a range of the profiler": (
        (LAUNCH, f"        torch.cuda.nvtx.range_push('rms')\n        torch.cuda.nvtx.range_pop()\n        with torch.cuda.nvtx.range('launch'):\n    {LAUNCH}"),
    ),
    "the driver of Triton": (
        ("@triton.jit", "TARGET = triton.runtime.driver.active.get_current_target()\n\n\n@triton.jit"),
        (OUT, OUT + "    driver = triton.runtime.driver.active\n    about = driver.utils.get_device_properties(driver.get_current_device())\n"
         "    assert TARGET.backend == 'cuda' and TARGET.arch >= 80 and about['multiprocessor_count'] > 1 and about['max_shared_mem'] > 1\n"
         "    assert driver.get_device_interface().get_device_capability() == driver.get_device_capability(0)\n"),
    ),
    "a device with a number": (
        (OUT, "    out = torch.empty(inp.shape, dtype=inp.dtype, device='cuda:0')\n"),
    ),
    "the current device": (
        (OUT, "    out = torch.empty(inp.shape, dtype=inp.dtype, device=torch.device('cuda', torch.cuda.current_device()))\n"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ASKING)
def test_an_honest_kernel_that_asks_about_the_gpu_is_certified(what: str, judge: Callable[..., Verdict]) -> None:
    verdict = judge(REFERENCE, "rms", changed(HONEST, *ASKING[what]), "fast")
    assert verdict.is_correct, verdict.reason
    assert any(check.name == "order of streams" for check in verdict.checks), "the unchanged text did not run"
