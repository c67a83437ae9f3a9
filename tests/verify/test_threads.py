"""Modules are constructed with a share of the threads, because the processes of a run construct them at the same time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mtmc_lsp.capture.worker.calls import constructed
from mtmc_lsp.process.worker.threads import PROCESSES, few_threads


@pytest.fixture(autouse=True)
def many() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2 * PROCESSES)
    yield
    torch.set_num_threads(before)


class Noting(torch.nn.Module):
    def __init__(self, sets: int = 0) -> None:
        super().__init__()
        self.threads = torch.get_num_threads()
        if sets:
            torch.set_num_threads(sets)


def test_a_module_on_a_gpu_is_constructed_with_a_share_of_the_threads() -> None:
    # The meta device stands in for a GPU: what counts is that the processes of a GPU's run construct side by side.
    assert constructed(Noting, (), {}, "meta", "").threads == 2
    assert torch.get_num_threads() == 2 * PROCESSES
    assert constructed(Noting, (), {}, "cpu", "").threads == 2 * PROCESSES


def test_a_program_s_constructor_sees_the_usual_number() -> None:
    assert constructed(Noting, (), {}, "meta", "", as_program=True).threads == 2 * PROCESSES


def test_a_number_that_the_constructor_sets_stays() -> None:
    constructed(Noting, (), {"sets": 3}, "meta", "")
    assert torch.get_num_threads() == 3


def test_the_number_is_restored_after_an_error_and_never_0() -> None:
    torch.set_num_threads(2)
    seen = []

    def fail() -> None:
        with few_threads():
            seen.append(torch.get_num_threads())
            raise ValueError("no module")

    with pytest.raises(ValueError, match="no module"):
        fail()
    assert seen == [1] and torch.get_num_threads() == 2
