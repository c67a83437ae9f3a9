"""A target with regions is also called as a whole, in the user's file and in the version."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtmc_lsp.capture.client import find_workload
from mtmc_lsp.core.graph import Graph
from mtmc_lsp.core.results import CheckStatus, Verdict, VerdictStatus
from mtmc_lsp.core.workload import Capture, Environment
from mtmc_lsp.source.targets import find_target
from mtmc_lsp.verify.messages import WholeTargetAnswer, WholeTargetRequest
from mtmc_lsp.verify.outcomes import with_whole_target
from mtmc_lsp.verify.worker.whole_target import compare_whole_target

USER = """\
import torch


class Counts(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros(()))

    # mtmc: x=f32[N,8] N=6 init: width=8
    def forward(self, x):
        h = self.linear(x)
        if h.sum() > 1e9:
            raise ValueError("overflow")
        self.calls += 1
        x.mul_(2.0)
        return torch.relu(h), int(h.shape[0])
"""


def compared(folder: Path, text: str, user: str = USER) -> WholeTargetAnswer:
    path = folder / "model.py"
    path.write_text(user)
    target = find_target(user.encode(), str(path), "Counts")
    workload = find_workload(str(path), user.encode(), target)
    capture = Capture(workload, Graph((), (), (), "tensor", {}), (), Environment("", "", ""), 0.0, 0.0, "model")
    return compare_whole_target(WholeTargetRequest(capture, workload, user, text))


def test_a_version_that_computes_the_same_passes(tmp_path: Path) -> None:
    assert compared(tmp_path, USER.replace("torch.relu(h)", "h.clamp(min=0.0)")) == WholeTargetAnswer(calls=2)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("torch.relu(h)", "h", "value 1 has relative error"),
        ("torch.relu(h)", "torch.relu(h) / 0.0", "value 1 is not finite"),
        ("torch.relu(h)", "torch.relu(h).double()", "value 1 has shape [6, 8] and dtype torch.float64"),
        ("int(h.shape[0])", "7", "value 2 is 7 instead of 6"),
        ("x.mul_(2.0)", "pass", "value"),
        ("self.calls += 1", "pass", "value"),
        ("h = self.linear(x)", "h = undefined", "the version raises NameError"),
        ("import torch\n", "import torch, no_such_module\n", "the file raises ModuleNotFoundError when it is imported"),
    ],
)
def test_a_version_that_differs_anywhere_in_the_target_fails(old: str, new: str, words: str, tmp_path: Path) -> None:
    answer = compared(tmp_path, USER.replace(old, new))
    assert words in answer.difference
    verdict = Verdict(VerdictStatus.CORRECT, (), "interpreter")
    judged = with_whole_target(verdict, answer)
    assert judged.status is VerdictStatus.INCORRECT
    assert judged.checks[-1].status is CheckStatus.FAILED
    assert words in judged.reason


def test_a_target_that_raises_with_another_seed_is_not_compared(tmp_path: Path) -> None:
    user = USER.replace("h.sum() > 1e9", "True")
    answer = compared(tmp_path, user, user)
    assert "your code raises ValueError" in answer.skipped
    judged = with_whole_target(Verdict(VerdictStatus.CORRECT, (), "interpreter"), answer)
    assert judged.is_correct
    assert judged.checks[-1].status is CheckStatus.SKIPPED
    assert "the whole target was not compared" in judged.notes[0]


def test_a_target_that_draws_random_numbers_is_not_compared(tmp_path: Path) -> None:
    user = USER.replace("torch.relu(h)", "torch.dropout(h, 0.5, True)")
    assert compared(tmp_path, user, user).skipped == "it draws random numbers"


def test_a_few_elements_may_differ_because_rounding_chose_another_way(tmp_path: Path) -> None:
    user = USER.replace("N=6", "N=400").replace("torch.relu(h)", "torch.relu(h) * 1.0")
    one = user.replace("torch.relu(h) * 1.0", "torch.relu(h).index_fill(0, torch.tensor([0]), 1.0)")
    assert not compared(
        tmp_path, user.replace("* 1.0", "+ (torch.arange(h.numel()).view(h.shape) == 5)"), user
    ).difference
    assert "relative error" in compared(tmp_path, one, user).difference
