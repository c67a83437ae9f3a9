"""PyTorch's formulas for operations fail on some calls, as 2.11's on attention with grouped heads: that refuses no target."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import BaseTorchDispatchMode
from torch.utils.flop_counter import flop_registry

from mtmc_lsp.capture.worker import eager_run
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.workload import Target, TargetKind
from mtmc_lsp.verify.worker.observation.library_work import LibraryWork

TARGET = Target("model.py", "f", TargetKind.FUNCTION, 1, 2)


def refuse(*args: object, **kwargs: object) -> int:
    raise AssertionError("sdpa_flop_count: query/key/value shapes are incompatible")


def run(monkeypatch: pytest.MonkeyPatch, function) -> tuple[float, list[str]]:
    monkeypatch.setattr(eager_run, "flat_function", lambda call, inputs, target: function)
    inputs = [SimpleNamespace(name=name, value=torch.zeros(8, 8)) for name in ("x", "y")]
    call = SimpleNamespace(instance=None, target_result=lambda value: value)
    return eager_run.run_without_data(call, inputs, TARGET, lambda kind: kind.__name__, trains=False)


def test_a_call_whose_operations_cannot_be_counted_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, torch.mm) == (2.0 * 8**3, [""])
    monkeypatch.setitem(flop_registry, torch.ops.aten.mm, refuse)
    operations, names = run(monkeypatch, lambda x, y: (x @ y, x))
    assert operations == 0.0
    assert names == ["", "x"]


def test_a_call_that_fails_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MtmcError):
        run(monkeypatch, lambda x, y: x @ y[:3])


def test_the_work_of_attention_with_grouped_heads_is_counted_by_its_products(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    monkeypatch.setitem(flop_registry, operator, refuse)
    query, key = torch.rand(2, 4, 16, 32), torch.rand(2, 4, 24, 32)
    with LibraryWork() as work, BaseTorchDispatchMode():
        operator(query, key, key)
    assert work.operations == 2.0 * 2 * 4 * 16 * 24 * (32 + 32)
