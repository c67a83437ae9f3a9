"""If the model predicts no gain for any kernel, one is measured on the GPU; without a GPU nothing is planned."""

from __future__ import annotations

from dataclasses import replace

from mtmc_lsp.actions.catalogue import proposals
from mtmc_lsp.core.run import Step, StepStatus
from tests.planning.situations import H200, situation, start

TEXT = """import torch
import torch.nn.functional as F
# mtmc: x=f32[B,4,H,H] B=2 H=44
def f(x):
    return F.avg_pool2d(x, 11)
"""


def test_one_kernel_is_tried_once(captured) -> None:
    capture = captured(TEXT, "f")
    capture = replace(
        capture, graph=replace(capture.graph, sizes={**capture.graph.sizes, "B": 64, "H": 2046, "H_div_11": 186})
    )
    begin = start(capture, TEXT)
    state = situation(capture, begin, has_gpu=True, strict=False, device=H200)
    (action,) = proposals(state)
    assert action.expected.saved_us < 0
    assert action.region == ("avg_pool2d",) and action.rationale.startswith("No gain is predicted")
    tried = Step(1, action, StepStatus.REJECTED, "not faster")
    assert not proposals(replace(state, history=(tried,)))
    assert not proposals(situation(capture, begin, has_gpu=False, strict=False, device=H200))


def test_a_product_without_predicted_gain_is_tried_in_the_mode_that_loses_least(captured) -> None:
    """Splitting its few rows in advance would take longer than the product."""
    text = "import torch\n# mtmc: a=f32[M,K] b=f32[K,N] M=40 K=40 N=24\ndef f(a, b):\n    return a @ b\n"
    capture = captured(text, "f")
    (action,) = proposals(situation(capture, start(capture, text), has_gpu=True, strict=False, device=H200))
    assert action.rationale.startswith("No gain is predicted")
    assert action.params["config"]["precision"] == "ieee"
