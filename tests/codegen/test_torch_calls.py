"""Torch calls in launchers."""

from __future__ import annotations

import torch

from mtmc_lsp.codegen.module.torch_calls import torch_call
from mtmc_lsp.core.graph import Node, Ref


def called(op: str, *args: object) -> str:
    return torch_call(Node("y", op, (Ref("x"), *args), {}, ()), {Ref("x"): "x"}, {}, "x")  # type: ignore[arg-type]


def test_a_view_accepts_the_strides_that_a_library_call_returns() -> None:
    x = torch.arange(24.0).reshape(2, 3, 4).transpose(0, 1)
    text = called("aten.view.default", (6, 4))
    assert torch.equal(eval(text, {"x": x}), x.reshape(6, 4))


def test_a_view_as_another_dtype_stays_a_view() -> None:
    x = torch.arange(24.0)
    assert torch.equal(eval(called("aten.view.dtype", "int32"), {"x": x, "torch": torch}), x.view(torch.int32))
