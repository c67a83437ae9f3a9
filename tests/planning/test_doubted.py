"""Where the model sees no gain in any kernel, a GPU is asked about one; without a GPU nothing is planned."""

from __future__ import annotations

from dataclasses import replace

from mtmc_lsp.actions.catalogue import proposals
from mtmc_lsp.core.run import Step, StepStatus
from tests.planning.situations import SHEET, situation, start

TEXT = """import torch
import torch.nn.functional as F
# mtmc: x=f32[B,4,H,H] B=2 H=44
def f(x):
    return F.avg_pool2d(x, 11)
"""


def test_one_kernel_is_tried_once(captured) -> None:
    capture = captured(TEXT, "f")
    capture = replace(capture, graph=replace(capture.graph, sizes={"B": 64, "H": 2046}))
    begin = start(capture, TEXT)
    asked = situation(capture, begin, has_gpu=True, strict=False, device=SHEET)
    (action,) = proposals(asked)
    assert action.expected.saved_us < 0
    assert action.region == ("avg_pool2d",) and action.rationale.startswith("No gain is predicted")
    tried = Step(1, action, StepStatus.REJECTED, "not faster")
    assert not proposals(replace(asked, history=(tried,)))
    assert not proposals(situation(capture, begin, has_gpu=False, strict=False, device=SHEET))


def test_a_doubted_product_is_asked_about_in_the_mode_that_loses_least(captured) -> None:
    """Passes that split its few rows before would take longer than all of it."""
    text = "import torch\n# mtmc: a=f32[M,K] b=f32[K,N] M=40 K=40 N=24\ndef f(a, b):\n    return a @ b\n"
    capture = captured(text, "f")
    (action,) = proposals(situation(capture, start(capture, text), has_gpu=True, strict=False, device=SHEET))
    assert action.rationale.startswith("No gain is predicted")
    assert action.params["config"]["precision"] == "ieee"
