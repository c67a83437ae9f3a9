"""Errors of ``torch.export`` are reported in one sentence, with the user's line and without torch's advice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.export import Dim

from mtmc_lsp.capture.worker.export import LONGEST_REASON, export_error, first_sentence
from mtmc_lsp.core.workload import Target, TargetKind

TARGET = Target(__file__, "f", TargetKind.FUNCTION, 1, 1)


class Module(torch.nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> object:
        return self.function(x)


def to_sparse(x: torch.Tensor) -> torch.Tensor:
    return x.to_sparse()


def write_data(x: torch.Tensor) -> torch.Tensor:
    return x.data.add_(1)


def to_numpy(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy())


def branch(x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def compare(x: torch.Tensor) -> torch.Tensor:
    return x if torch.equal(x, x + 1) else -x


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (to_sparse, "f calls aten._to_sparse.default, which torch.export cannot trace"),
        (
            write_data,
            "f cannot be traced by torch.export: We found a fake tensor in the exported program constant's list",
        ),
        (to_numpy, "f cannot be traced by torch.export: .numpy() is not supported for tensor subclasses"),
        (branch, "f depends on the values of a tensor, so no single graph describes it"),
        (compare, "f depends on the values of a tensor, so no single graph describes it"),
    ],
)
def test_a_real_export_error_is_one_sentence_and_a_remedy(function, message: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        torch.export.export(Module(function), (torch.ones(4, 4),), dynamic_shapes=({0: Dim.AUTO},), strict=False)
    error = export_error(caught.value, TARGET)
    assert error.message == message
    assert error.remedy
    assert error.where is not None and error.where.path == __file__ and error.where.line


def test_a_long_reason_is_cut() -> None:
    reason = first_sentence("the operator fails " * 40)
    assert len(reason) <= LONGEST_REASON + 4 and reason.endswith(" ...")
    assert (
        first_sentence("the input has a\nwrong size. See https://example.com\n\nMore") == "the input has a wrong size"
    )
    assert first_sentence("") == ""


def checked_distribution(x: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Normal(x, 1.0).log_prob(x)


def asserted(x: torch.Tensor) -> torch.Tensor:
    assert (x >= 0).all(), "negative"
    return x.sqrt()


@pytest.mark.parametrize(
    ("function", "remedy"),
    [
        (checked_distribution, "Construct distributions with validate_args=False"),
        (asserted, "Move the assertion"),
        (branch, "Use torch.where"),
    ],
)
def test_the_remedy_names_the_checks_of_distributions_and_assertions(function: Callable, remedy: str) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011
        torch.export.export(Module(function), (torch.ones(3, 3),), dynamic_shapes=({0: Dim.STATIC},), strict=False)
    error = export_error(raised.value, TARGET)
    assert error.message == "f depends on the values of a tensor, so no single graph describes it"
    assert error.remedy.startswith(remedy)
