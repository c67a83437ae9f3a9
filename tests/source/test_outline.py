"""The outline of an edited file agrees with the whole file."""

from __future__ import annotations

from pathlib import Path

import pytest

from mtmc_lsp.source.blocks import block_code, find_block
from mtmc_lsp.source.outline import Outline, Outliner
from mtmc_lsp.source.syntax import parse
from mtmc_lsp.source.target_text import target_source
from mtmc_lsp.source.targets import find_targets

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "mtmc_lsp").rglob("*.py")])


def folder_of(path: Path) -> str:
    """The folder of the first or second level that holds a file."""
    return "/".join(path.relative_to(ROOT).parts[:-1][:2])


FOLDERS = sorted({folder_of(path) for path in FILES})


def outline(text: str) -> Outline:
    return Outliner("/m.py").outline(text.encode(), parse(text.encode()))


@pytest.mark.parametrize("folder", FOLDERS)
def test_it_contains_the_same_targets_as_the_command_line(folder: str) -> None:
    for path in (path for path in FILES if folder_of(path) == folder):
        text = path.read_bytes()
        last = {target.qualname: target for target in find_targets(text, "/m.py")}
        targets = Outliner("/m.py").outline(text, parse(text)).targets
        assert {item.target.qualname: item.target for item in targets} == last, path


def test_an_import_can_change_the_kind_of_a_function() -> None:
    body = "\n\n@compiled\ndef k(x):\n    pass\n"
    outliner = Outliner("/m.py")
    kinds = []
    for head in ("from mine import compiled", "from triton import jit as compiled"):
        text = (head + body).encode()
        kinds.append(outliner.outline(text, parse(text)).by_name["k"].target.kind.value)
    assert kinds == ["function", "kernel"]


def test_a_directive_is_detected_above_a_function_a_method_and_its_class() -> None:
    text = """\
from torch import nn

# mtmc: x=f32[8]
@decorated
def f(x):
    return x

# mtmc: ignore[mask]
def g(x):
    return x

# mtmc: x=f32[8]
class A(nn.Module):
    def forward(self, x):
        return x

class B(nn.Module):
    # mtmc: x=f32[8]
    def forward(self, x):
        return x

    def other(self, x):
        return x
"""
    found = {name: item.has_directive for name, item in outline(text).by_name.items()}
    expected = {"f": True, "g": False, "A": True, "A.forward": True, "B": False, "B.forward": True, "B.other": False}
    assert found == expected


def test_a_broken_statement_does_not_affect_the_others() -> None:
    text = "def f(x):\n    return x\n\n# note\ndef g(x):\n    return x +\n\n# mtmc: x=f32[8]\ndef h(x):\n    return x\n"
    found = outline(text).by_name
    assert list(found) == ["f", "g", "h"]
    assert [item.is_broken for item in found.values()] == [False, True, False]
    assert found["h"].has_directive
    assert found["h"].first_line == 9


COMPOSED = """\
import torch
import triton  # mtmc: import


# mtmc: begin A.forward
@triton.jit
def kernel():
    pass
# mtmc: end A.forward


class A:
    # mtmc: x=f32[8]
    @decorated
    def forward(self, x):
        if ok(x):  # mtmc: dispatch
            return kernel(x)
        return x
"""


def test_the_source_of_a_target_does_not_depend_on_generated_code() -> None:
    own = b"# mtmc: x=f32[8]\n    @decorated\n    def forward(self, x):\n        return x\n"
    assert target_source(COMPOSED.encode(), "A.forward") == own
    part = COMPOSED[COMPOSED.index("# mtmc: begin A.forward") :]
    assert target_source(part.encode().replace(b"\n", b"\r\n"), "A.forward") == own
    assert target_source(b"x = 1\n", "A.forward") is None


def test_the_generated_block_is_returned_without_its_markers() -> None:
    block = "@triton.jit\ndef kernel():\n    pass\n"
    assert block_code(COMPOSED.encode(), "A.forward") == block
    assert block_code(COMPOSED.replace("\n", "\r\n").encode(), "A.forward") == block
    assert block_code(COMPOSED.encode(), "A") is None
    assert find_block(COMPOSED.encode(), "A") is None
