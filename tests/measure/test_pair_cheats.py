"""Known ways to fool a verification (numbered as in docs/verify.md), each with the check that catches it.

Those that live on a GPU's clock, streams, caches or graphs need a GPU and are tested there.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from pairs import HONEST, REFERENCE, changed

from mtmc_lsp.core.results import CheckStatus, Verdict, VerdictStatus

END = "    return out\n"
START = "    out = torch.empty_like(inp)\n"
OWN = "inp * torch.rsqrt(inp.pow(2).mean(-1, keepdim=True) + eps) * weight"
LAUNCH = "        kernel[("
NO_KERNEL = "no Triton kernel was launched"
CACHE = "CACHE = {}\n\n\ndef fast("

CHEATS: dict[str, tuple[tuple[tuple[str, str], ...], str]] = {
    "2 a thread does the work later": (
        (("import torch\n", "import threading\nimport torch\n", ),), "imports threading"),
    "2 a thread that the text does not show": (
        ((END, "    import _thread, time\n    _thread.start_new_thread(time.sleep, (60,))\n" + END),), "threads"),
    "3 a tensor of its own kind": (
        (("def fast(", "class Lazy(torch.Tensor):\n    pass\n\n\ndef fast("), (END, "    return out.as_subclass(Lazy)\n")),
        "kind of tensor of its own"),
    "3 a tensor of another kind": (((END, "    return torch.nn.Parameter(out, requires_grad=False)\n"),), "type"),
    "4 another clock": (((END, "    torch.cuda.Event.elapsed_time = lambda *_: 1e-3\n" + END),), "sets torch.cuda.Event"),
    "4 another clock by setattr": (((END, "    setattr(torch.cuda, 'synchronize', print)\n" + END),), "changes torch.cuda"),
    "5 frames of the harness": (((END, "    import sys\n    sys._getframe(1)\n" + END),), "sys._getframe"),
    "5 modules of the harness": (((END, "    import sys\n    sys.modules.clear()\n" + END),), "sys.modules"),
    "5 code of the harness": (((END, "    print.__code__ = None\n" + END),), "sets __code__"),
    "6 native patching": (((END, "    import ctypes\n" + END),), "imports ctypes"),
    "7 another result pipe": (((END, "    import os\n    os.dup2(1, 5)\n" + END),), "os.dup2"),
    "12 a printed verdict": (
        ((END, '    print(\'{"result": {"status": "ran"}}\')\n    return inp\n'),), "result 0"),
    "16 answers by address": (
        (("def fast(", CACHE), (END, "    return CACHE.setdefault(inp.data_ptr(), out).clone()\n")), "result 0"),
    "16 answers by identity": (
        (("def fast(", CACHE), (END, "    return CACHE.setdefault(id(inp), out).clone()\n")), "result 0"),
    "18 memory of earlier results": (((LAUNCH, "        kernel[(0 and "),), "result 0"),
    "19 results of others": (((END, "    import gc\n    gc.get_objects()\n" + END),), "imports gc"),
    "20 NaN everywhere": (((END, "    return out.fill_(float('nan'))\n"),), "NaN"),
    "21 inputs overwritten": (((END, "    inp.zero_()\n    return out\n"), ("inp, weight = inp.contiguous(), weight.contiguous()", "pass")), "input x"),
    "22 the first answer for ever": (
        (("def fast(", CACHE), (END, "    return CACHE.setdefault(inp.shape, out).clone()\n")), "result 0"),
    "23 right the first times only": (
        (("def fast(", "CALLS = []\n\n\ndef fast("), (END, "    CALLS.append(0)\n    return out if len(CALLS) < 44 else out * 1.01\n")), "many calls"),
    "24 falls back when it fails": (
        ((END, f"    try:\n        return out\n    except Exception:\n        return {OWN}\n"),), "goes on when something fails"),
    "26 torch does the work": (((LAUNCH, f"        return {OWN}\n{LAUNCH}"),), NO_KERNEL),
    "27 a kernel for show": (((END, f"    return {OWN}\n"),), "come from elsewhere"),
    "27 nothing": (((END, "    return None\n"),), "result 0"),
    "28 zeros": (((END, "    return out.zero_()\n"),), "result 0"),
    "30 its input": (((END, "    return inp.clone()\n"),), "result 0"),
    "30 the mean of its input": (((END, "    return inp.mean(-1, keepdim=True).expand(inp.shape).contiguous()\n"),), "result 0"),
    "31 one shape": ((("BLOCK=triton.next_power_of_2(inp.shape[1])", "BLOCK=16"),), "result 0"),
    "31 one layout": ((("inp, weight = inp.contiguous(), weight.contiguous()", "pass"),), "strided"),
    "31 one range of values": (((END, "    return out.clamp(-20, 20)\n"),), "result 0"),
    "32 half precision inside": ((("x * scale * w, mask", "(x * scale * w).to(tl.float16).to(tl.float32), mask"),), "relative L2"),
    "33 a tail left out": ((("mask = cols < columns", "mask = cols < columns // 16 * 16"),), "never written"),
    "35 now and then another result": (
        ((END, "    import random\n    return out * (1 + random.random())\n"),), "result 0"),
    "36 another dtype": (((END, "    return out.double()\n"),), "dtype"),
    "36 another stride": (((END, "    return out.t().contiguous().t()\n"),), "stride"),
    "36 its input's memory": (((END, "    return inp.copy_(out)\n"),), "input x"),
}  # fmt: skip


def test_the_honest_candidate_is_certified(judge: Callable[..., Verdict]) -> None:
    verdict = judge(REFERENCE, "rms", HONEST, "fast")
    assert verdict.status is VerdictStatus.CORRECT, verdict.reason
    assert {"result 0 values", "kernel's result used", "many calls"} <= {check.name for check in verdict.checks}


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_is_not_certified(cheat: str, judge: Callable[..., Verdict]) -> None:
    changes, caught_by = CHEATS[cheat]
    verdict = judge(REFERENCE, "rms", changed(HONEST, *changes), "fast")
    assert verdict.status in (VerdictStatus.INCORRECT, VerdictStatus.RUNTIME_ERROR), verdict.status
    # The reason speaks of the smallest case, which may fail in yet another way.
    failed = [
        f"{check.name} {check.detail} {check.case}" for check in verdict.checks if check.status is CheckStatus.FAILED
    ]
    assert caught_by in " ".join([verdict.reason, *failed])
