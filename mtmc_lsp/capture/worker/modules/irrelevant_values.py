"""Attributes that modules of torch read although their results do not depend on them. Runs in workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.rnn import RNNBase

from mtmc_lsp.capture.worker.modules.members import access_of


def without_irrelevant_values(instance: torch.nn.Module | None, reads: dict[str, object]) -> dict[str, object]:
    """The values that were read, without those that have no effect beside the others.

    Args:
        instance: the target's module, ``None`` for a function.
        reads: values by access expression, for example ``self.layers[0].training``.
    """
    modules = instance.named_modules() if instance is not None else ()
    irrelevant = {
        f"{access_of(instance, name)}.{attribute}" for name, module in modules for attribute in _irrelevant(module)
    }
    return {access: value for access, value in reads.items() if access not in irrelevant}


def _irrelevant(module: Any) -> Iterator[str]:
    if not type(module).__module__.startswith("torch."):
        # The forward of a subclass may read the values for something else.
        return
    if isinstance(module, RNNBase) and module.dropout == 0.0:
        yield "training"
    if isinstance(module, _DropoutNd):
        # ATen returns the input itself if p is 0, and outside training.
        if module.p == 0:
            yield from ("training", "inplace")
        elif not module.training:
            yield from ("p", "inplace")
    if isinstance(module, _BatchNorm) and not module.training:
        yield "momentum"
