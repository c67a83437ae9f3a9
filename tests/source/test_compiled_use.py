"""Whether the user's file runs a target under ``torch.compile``."""

from __future__ import annotations

import pytest

from mtmc_lsp.source.compiled_use import is_compiled_in_file

FILE = """import torch


def f(x):
    return x + 1


class Net(torch.nn.Module):
    def forward(self, x):
        return f(x)


{use}
"""


@pytest.mark.parametrize(
    ("use", "target"),
    [
        ("fast = torch.compile(f)", "f"),
        ("fast = torch.compile(f, mode='max-autotune')", "f"),
        ("net = torch.compile(Net().cuda())", "Net"),
        ("net = Net().to('cuda').eval()\nfast = torch.compile(net)", "Net"),
        ("net = Net()\nnet.compile()", "Net.forward"),
        ("Net().compile()", "Net"),
        ("from torch import compile\nfast = compile(f)", "f"),
    ],
)
def test_a_file_that_compiles_the_target_runs_compiled_code(use: str, target: str) -> None:
    assert is_compiled_in_file(FILE.format(use=use), target)


@pytest.mark.parametrize(
    ("use", "target"),
    [
        ("", "f"),
        ("fast = torch.compile(f)", "Net"),
        ("other = torch.compile(g)", "f"),
        ("import re\npattern = re.compile('f')", "f"),
        ("net = Net()\nother.compile()", "Net"),
        ("this is no Python", "f"),
    ],
)
def test_other_files_run_eager_code(use: str, target: str) -> None:
    assert not is_compiled_in_file(FILE.format(use=use), target)
