"""Optimised modules inside ``DistributedDataParallel``, on two processes with gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.codegen.checker import Checker
from tests.training.programs import ON_TWO_RANKS, run
from tests.training.targets import HEAD, MODULES, planned, text_of

PROGRAM = """
import torch.distributed as dist

from torch.nn.parallel import DistributedDataParallel


def trained(each, rank, batches):
    # Two micro-batches; gradients are exchanged after the second one.
    wrapped = DistributedDataParallel(each)
    for number in range(2):
        x = batches[2 * rank + number]
        with wrapped.no_sync() if number == 0 else torch.enable_grad():
            wrapped(x).square().mean().backward()
    return [parameter.grad for parameter in each.parameters()]


def work(rank):
    torch.manual_seed(0)
    module, optimised = user.f(), fast.f()
    optimised.load_state_dict(module.state_dict())
    batches = torch.randn(4, 32, 32)
    runs()
    mine = trained(optimised, rank, batches)
    assert runs() == ["forward", "backward"] * 2
    for gradient, expected in zip(mine, trained(module, rank, batches), strict=True):
        close(gradient, expected)
    # Both ranks have the same gradients.
    total = mine[0].clone()
    dist.all_reduce(total)
    close(total, 2 * mine[0])
"""


@pytest.mark.slow
def test_gradients_are_exchanged_as_those_of_the_users_module(checker: Checker, tmp_path: Path) -> None:
    capture = checker.capture(HEAD + MODULES["perceptron"])
    run(tmp_path, text_of(capture), planned(capture), PROGRAM + ON_TWO_RANKS)
