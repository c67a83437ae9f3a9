"""What only a CUDA GPU can show: its memory, its errors, its streams and graphs, and that locked-in processes can use it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from cheats import CHEATS
from honest import BY_HAND
from pairs import HONEST, REFERENCE, changed

from mtmc_lsp.core.results import Verdict, VerdictStatus

pytestmark = pytest.mark.gpu

END = "    return out\n"
FAILED = (VerdictStatus.RUNTIME_ERROR, VerdictStatus.CRASHED)
FAR = ("tl.store(out_ptr + row * columns + cols", "tl.store(out_ptr + (row + 1) * (1 << 40) + cols")
TAKES_ALL = ("    held = [torch.empty(1 << 32, dtype=torch.uint8, device=inp.device) for _ in range(100)]\n" + END,)
AT_RUN_TIME = {
    "1 another stream": (
        ("    out = torch.empty_like(inp)\n", "    torch.cuda.synchronize()\n    out = torch.empty_like(inp)\n"),
        ("        kernel[(", "      with torch.cuda.stream(torch.cuda.Stream()):\n        torch.cuda._sleep(100_000_000)\n        kernel[("),
    ),
    "11 all calls in the first": CHEATS["11 all calls in the first"][0],
    "14 a graph that replays old inputs": (
        ("def fast(", "GRAPHS = {}\n\n\ndef replayed("),
        (END, END + """

def fast(inp, weight, eps=1e-5):
    if inp.shape not in GRAPHS:
        replayed(inp, weight, eps)
        held, graph = inp.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            GRAPHS[inp.shape] = graph, replayed(held, weight, eps)
        graph.replay()
    graph, out = GRAPHS[inp.shape]
    graph.replay()
    return out.clone()
"""),
    ),
    "18 memory of earlier results": CHEATS["18 memory of earlier results"][0],
    "34 adds to memory that nobody cleared": CHEATS["34 adds to memory that nobody cleared"][0],
}  # fmt: skip
"""Ways that run on a GPU, tried with the scan of the text left out."""


@pytest.mark.parametrize("kind", BY_HAND)
def test_an_honest_kernel_is_certified(kind: str, gpu_judge: Callable[..., Verdict]) -> None:
    verdict = gpu_judge(*BY_HAND[kind])
    assert verdict.is_correct, verdict.reason
    assert verdict.mode == "gpu"


def test_a_process_that_is_locked_in_can_use_the_gpu(gpu_judge: Callable[..., Verdict]) -> None:
    notes = " ".join(gpu_judge(REFERENCE, "rms", HONEST, "fast").notes)
    assert "isolation of the candidate: full" in notes, notes


@pytest.mark.parametrize("cheat", AT_RUN_TIME)
def test_a_cheat_on_the_gpu_is_not_certified(
    cheat: str, gpu_judge: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtmc_lsp.verify.adapters.scan", lambda *_: ())
    verdict = gpu_judge(REFERENCE, "rms", changed(HONEST, *AT_RUN_TIME[cheat]), "fast")
    assert verdict.status in (VerdictStatus.INCORRECT, VerdictStatus.RUNTIME_ERROR), verdict.status


@pytest.mark.parametrize(
    ("change", "said"), [((END, *TAKES_ALL), "memory"), (FAR, "illegal memory access")], ids=["memory", "access"]
)
def test_a_fault_of_the_gpu_is_a_failed_verification_and_the_next_candidate_runs(
    change: tuple[str, str], said: str, gpu_judge: Callable[..., Verdict]
) -> None:
    verdict = gpu_judge(REFERENCE, "rms", changed(HONEST, change), "fast")
    assert verdict.status in FAILED
    assert said in verdict.reason
    assert gpu_judge(REFERENCE, "rms", HONEST, "fast").is_correct
