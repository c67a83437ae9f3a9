"""Known ways to fool a verification, numbered as in docs/verify.md, each with the check that catches it.

Where a way needs native code or a GPU, this is the form of it that Python can write.
"""

from __future__ import annotations

END = "    return out\n"
START = "    out = torch.empty_like(inp)\n"
OWN = "inp * torch.rsqrt(inp.pow(2).mean(-1, keepdim=True) + eps) * weight"
LAUNCH = "        kernel[("
NO_KERNEL = "no Triton kernel was launched"
CACHE = "CACHE = {}\n\n\ndef fast("

HIDDEN_THREADS = 'import importlib\n\nTHREADS = importlib.import_module("_thr" + "ead")\n'
WAITS = "THREADS.start_new_thread(importlib.import_module('ti' + 'me').sleep, ({seconds},))\n"
WHOLE_LAUNCH = (
    "        kernel[(inp.shape[0],)](inp, weight, out, inp.shape[1], eps, BLOCK=triton.next_power_of_2(inp.shape[1]))\n"
)
ELSEWHERE = f"""\
        def launch():
    {WHOLE_LAUNCH}\
            done.release()

        done = THREADS.allocate_lock()
        done.acquire()
        THREADS.start_new_thread(launch, ())
        done.acquire()
        importlib.import_module('ti' + 'me').sleep(0.05)
"""

CHEATS: dict[str, tuple[tuple[tuple[str, str], ...], str]] = {
    "2 a thread does the work later": (
        (("import torch\n", "import threading\nimport torch\n", ),), "imports threading"),
    "2 a thread that the text does not show": (
        (("import torch\n", HIDDEN_THREADS + "import torch\n"), (END, "    " + WAITS.format(seconds=60) + END)), "threads"),
    "2 a thread that ends after the call": (
        (("import torch\n", HIDDEN_THREADS + "import torch\n"), (END, "    " + WAITS.format(seconds=0.02) + END)), "threads"),
    "2 a thread from the import": (
        (("import torch\n", HIDDEN_THREADS + WAITS.format(seconds=60) + "import torch\n"),), "threads"),
    "2 a thread launches the kernel": (
        (("import torch\n", HIDDEN_THREADS + "import torch\n"), (WHOLE_LAUNCH, ELSEWHERE)), "another thread"),
    "2 a thread by another name": (
        (("import torch\n", "import importlib\nimport torch\n"), (END, "    importlib.import_module('_thread')\n" + END)),
        "imports _thread"),
    "3 a tensor of its own kind": (
        (("def fast(", "class Lazy(torch.Tensor):\n    pass\n\n\ndef fast("), (END, "    return out.as_subclass(Lazy)\n")),
        "is a subclass of torch.Tensor"),
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
        # A number is given to another tensor in the same case or in a later one: seen by a call that differs, or by the result.
        (("def fast(", CACHE), (END, "    return CACHE.setdefault(id(inp), out).clone()\n")), "result"),
    "18 memory of earlier results": (((LAUNCH, "        kernel[(0 and "),), "result 0"),
    "19 results of others": (((END, "    import gc\n    gc.get_objects()\n" + END),), "imports gc"),
    "20 NaN everywhere": (((END, "    return out.fill_(float('nan'))\n"),), "NaN"),
    "21 inputs overwritten": (((END, "    inp.zero_()\n    return out\n"), ("inp, weight = inp.contiguous(), weight.contiguous()", "pass")), "input x"),
    "22 the first answer for ever": (
        (("def fast(", CACHE), (END, "    return CACHE.setdefault(inp.shape, out).clone()\n")), "result 0"),
    "23 right the first times only": (
        (("def fast(", "CALLS = []\n\n\ndef fast("), (END, "    CALLS.append(0)\n    return out if len(CALLS) < 60 else out * 1.01\n")), "result"),
    "24 falls back when it fails": (
        ((END, f"    try:\n        return out\n    except Exception:\n        return {OWN}\n"),), "continues after an exception"),
    "26 torch does the work": (((LAUNCH, f"        return {OWN}\n{LAUNCH}"),), NO_KERNEL),
    "27 a kernel for show": (((END, f"    return {OWN}\n"),), "no kernel computes them"),
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
    "1 a stream by another name": (
        (("import torch\n", "import torch\nfrom torch import cuda\n\nS = cuda.Stream\n"),
         (END, "    with torch.cuda.stream(S()):\n        return out + 0\n")), "calls torch.cuda.Stream"),
    "1 another stream": (((END, "    with torch.cuda.stream(torch.cuda.Stream()):\n        return out + 0\n"),), "calls torch.cuda.Stream"),
    "8 works in the warm-up alone": (
        (("def fast(", "CALLS, KEPT = [], {}\n\n\ndef fast("), (START, "    CALLS.append(0)\n    if len(CALLS) > 3 and inp.shape in KEPT:\n        return KEPT[inp.shape].clone()\n" + START), (END, "    return KEPT.setdefault(inp.shape, out).clone()\n")), "result 0"),
    "9 cached lines of the L2 that persist": (((END, "    torch.cuda.cudart().cudaCtxResetPersistingL2Cache()\n" + END),), "calls torch.cuda.cudart"),
    "10 inputs kept hot": (
        (("def fast(", "HOT = {}\n\n\ndef fast("), ("    inp, weight = inp.contiguous()", "    inp = HOT.setdefault((inp.data_ptr(), inp.shape), inp.clone())\n    inp, weight = inp.contiguous()")), "result 0"),
    "11 all calls in the first": (
        (("def fast(", "DONE = {}\n\n\ndef fast("), (START, "    if inp.shape in DONE:\n        return DONE[inp.shape]\n" + START), (END, "    DONE[inp.shape] = out\n    return out\n")), NO_KERNEL),
    "13 no time at all": (((START, "    return torch.empty_like(inp)\n" + START),), NO_KERNEL),
    "14 a graph that replays old inputs": (((END, "    torch.cuda.graph(torch.cuda.CUDAGraph())\n" + END),), "calls torch.cuda.graph"),
    "15 a slower baseline": (((END, "    torch.set_num_threads(1)\n    torch.backends.cuda.matmul.allow_tf32 = False\n" + END),), "sets torch.backends"),
    "15 a slower baseline by a call": (((END, "    torch.set_float32_matmul_precision('highest')\n" + END),), "calls torch.set_float32_matmul_precision"),
    "17 a native cache of pointers": (((END, "    from torch.utils.cpp_extension import load_inline\n" + END),), "imports torch.utils.cpp_extension"),
    "25 inherits the reference and passes": (
        (("import torch\n", "import torch\n\n\ndef own(inp, weight, eps=1e-5):\n    return inp * torch.rsqrt(inp.pow(2).mean(-1, keepdim=True) + eps) * weight\n\n\n"), ("    inp, weight = inp.contiguous(), weight.contiguous()\n", "    return own(inp, weight, eps)\n")), NO_KERNEL),
    "34 adds to memory that nobody cleared": (
        (("tl.store(out_ptr + row * columns + cols, x * scale * w, mask=mask)", "tl.store(out_ptr + row * columns + cols, tl.load(out_ptr + row * columns + cols, mask=mask, other=0.0) + x * scale * w, mask=mask)"),), "NaN"),
}  # fmt: skip

CONSTANT = """import torch


# mtmc: x=f32[N,D] N=9 D=24
def constant(x):
    return (x != x).float() * 0 + 1
"""
"""29: a task whose answer never changes, so that any constant passes."""

CONSTANT_ANSWER = """import torch
import triton
import triton.language as tl


@triton.jit
def ones(out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, 1.0, mask=at < count)


def fast(x):
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel():
        ones[(triton.cdiv(x.numel(), 64),)](out, x.numel(), BLOCK=64)
    return out
"""
