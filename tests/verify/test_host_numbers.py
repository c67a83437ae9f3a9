"""The GPU is released while a test draws random numbers on the host."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch

from mtmc_lsp.process.worker import host_numbers
from mtmc_lsp.process.worker.host_numbers import LEAST, DrawingUnshared
from mtmc_lsp.process.worker.threads import one_thread

MANY = torch.zeros(LEAST)


@pytest.mark.parametrize(
    ("draw", "is_released"),
    [
        (lambda: torch.randn(512, 512), True),
        (lambda: torch.randn((2, LEAST // 2), dtype=torch.float64), True),
        (lambda: torch.rand(size=(LEAST,)), True),
        (lambda: torch.randint(0, 10, (LEAST,)), True),
        (lambda: torch.normal(0.0, 1.0, size=(LEAST,)), True),
        (lambda: torch.randn_like(MANY), True),
        (lambda: torch.randperm(LEAST), True),
        (lambda: torch.randn(512, 256), False),
        (lambda: torch.randint(0, LEAST, (4,)), False),
        (lambda: torch.randn(512, 512, device="meta"), False),
        (lambda: torch.randn_like(MANY, device="meta"), False),
        (lambda: torch.zeros(LEAST), False),
    ],
)
def test_the_gpu_is_released_while_many_numbers_are_drawn_on_the_host(
    draw: Callable[[], torch.Tensor], is_released: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[str] = []

    @contextlib.contextmanager
    def unshared() -> Iterator[None]:
        released.append("begins")
        yield
        released.append("ends")

    monkeypatch.setattr(host_numbers, "unshared", unshared)
    torch.manual_seed(0)
    expected = draw()
    torch.manual_seed(0)
    with DrawingUnshared():
        drawn = draw()
    assert released == (["begins", "ends"] if is_released else [])
    assert drawn.device.type == "meta" or torch.equal(drawn, expected)


def test_a_default_device_other_than_the_host_keeps_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_numbers, "unshared", lambda: pytest.fail("the numbers are drawn on another device"))
    with torch.device("meta"), DrawingUnshared():
        assert torch.randn(512, 512).device.type == "meta"


def test_threads_are_as_many_as_before_afterwards() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []

    def fail() -> None:
        with one_thread():
            seen.append(torch.get_num_threads())
            raise ValueError("user code")

    with pytest.raises(ValueError, match="user code"):
        fail()
    assert (seen, torch.get_num_threads()) == ([1], before)
