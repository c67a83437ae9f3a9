"""Targets, directives and exact edits."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmc_lsp.core.errors import FileChanged, RequestError, SourceSyntaxError, TargetNotFound
from mtmc_lsp.core.run import GeneratedCode
from mtmc_lsp.core.workload import TargetKind
from mtmc_lsp.source.assigned_names import assigned_names
from mtmc_lsp.source.compose import compose, strip_generated, write_if_unchanged
from mtmc_lsp.source.targets import find_target, find_targets, target_at
from mtmc_lsp.source.workload.directive import parse_directive, suggest_directive, workload_from_annotations

FILE = b"""import torch
from torch import nn
import triton
if torch.cuda.is_available():
    def hidden(x):
        return x


@triton.jit
def kernel(x_ptr):
    pass


class Outer(nn.Module):
    class Inner(nn.Module):
        def forward(self, x):
            return x

    def forward(self, x):
        return x

    def helper(self, x):
        return x


class Plain:
    def method(self, x):
        return x


def broken(x):
    return (x +
"""
IMPORTS = ("import torch", "import triton", "import triton.language as tl")
CODE = GeneratedCode(IMPORTS, "@triton.jit\ndef k(x):\n    return tl.abs(x)\n", "if torch.fits(x):\n    return k(x)\n")


def test_functions_methods_modules_and_kernels_are_found_in_a_broken_file() -> None:
    found = {(t.qualname, t.kind) for t in find_targets(FILE, "m.py")}
    assert {
        ("hidden", TargetKind.FUNCTION),
        ("kernel", TargetKind.KERNEL),
        ("Outer", TargetKind.MODULE),
        ("Outer.Inner", TargetKind.MODULE),
        ("Outer.Inner.forward", TargetKind.METHOD),
        ("Outer.forward", TargetKind.METHOD),
        ("Outer.helper", TargetKind.METHOD),
    } <= found
    assert not any(name.startswith("Plain") for name, _ in found)


def test_the_innermost_target_around_a_line_is_found() -> None:
    target = target_at(FILE, "m.py", 17)
    assert target is not None
    assert target.qualname == "Outer.Inner.forward"


def test_an_unknown_name_lists_similar_targets() -> None:
    with pytest.raises(TargetNotFound) as caught:
        find_target(FILE, "m.py", "Outer.forwrd")
    assert "m.py" in str(caught.value)
    assert "Outer.forward" in caught.value.remedy


def test_an_ambiguous_name_lists_the_matching_targets() -> None:
    with pytest.raises(TargetNotFound, match=r"Outer.Inner.forward, Outer.forward"):
        find_target(FILE, "m.py", "forward")


def test_a_target_with_a_syntax_error_is_reported_with_its_line() -> None:
    with pytest.raises(SourceSyntaxError) as caught:
        find_target(b"import torch\n\ndef f(x):\n    return (x +\n\n", "m.py", "f")
    assert caught.value.where is not None
    assert caught.value.where.line >= 3


@pytest.mark.parametrize(
    ("directive", "words"),
    [
        ("x=f33[4]", "unknown dtype 'f33'"),
        ("x=f32[B]", "size 'B' has no value"),
        ("x", "cannot read 'x'"),
        ("x=f32[4] z=f32[4]", "no parameter 'z'"),
        ("x=f32[4,%]", "cannot read the sizes"),
        ("y=f32[4]", "no parameter 'y'"),
        ("x=f32[4] device=tpu", "device must be cuda or cpu"),
        ("x=f32[4] mode=sum", "cannot read the value 'sum'"),
    ],
)
def test_an_invalid_directive_is_reported_with_file_line_and_remedy(directive: str, words: str) -> None:
    text = f"import torch\n# mtmc: {directive}\ndef f(x, mode=None):\n    return x\n".encode()
    with pytest.raises(RequestError) as caught:
        parse_directive(text, find_target(text, "m.py", "f"), "m.py")
    assert words in caught.value.message
    assert caught.value.where is not None
    assert (caught.value.where.path, caught.value.where.line) == ("m.py", 2)
    assert caught.value.remedy


def test_a_directive_gives_shapes_strides_ranges_constants_and_constructor_arguments() -> None:
    text = b"""import torch
# mtmc: x=bf16[B,2*D]{1,B} index=i64[B]@0..V-1 eps=1e-5 B=8 D=4 V=10 grad=x
# more words
# mtmc: init: dim=4 mode='fast'
@decorated
class M(torch.nn.Module):
    def __init__(self, dim, mode):
        pass
    def forward(self, x, index, eps=1e-6):
        return x
"""
    workload = parse_directive(text, find_target(text, "m.py", "M.forward"), "m.py")
    assert workload is not None
    x, index, eps = workload.arguments
    assert x.tensor is not None
    assert [s.value(workload.sizes) for s in x.tensor.shape] == [8, 8]
    assert x.tensor.stride is not None
    assert x.tensor.requires_grad
    assert index.tensor is not None
    assert (index.tensor.low, index.tensor.high) == (0.0, 9.0)
    assert eps.constant == 1e-5
    assert [(a.name, a.constant) for a in workload.init_arguments] == [("dim", 4), ("mode", "fast")]


def test_jaxtyping_annotations_are_a_workload_and_assumed_sizes_are_reported() -> None:
    text = b"""from jaxtyping import Float
# mtmc: batch=32
def f(x: Float[Tensor, "batch dim"], w: Float32[Tensor, "dim 4"], k: int = 3):
    return x @ w
"""
    workload = workload_from_annotations(text, find_target(text, "m.py", "f"), "m.py")
    assert workload is not None
    assert workload.sizes["batch"] == 32
    assert any("dim is assumed" in note for note in workload.assumed)
    assert any("x is assumed to be float32" in note for note in workload.assumed)


def test_the_suggested_directive_can_be_pasted() -> None:
    text = b"class M(torch.nn.Module):\n    def __init__(self, dim):\n        pass\n    def forward(self, x, k: int):\n        return x\n"
    target = find_target(text, "m.py", "M")
    suggestion = suggest_directive(text, target)
    pasted = suggestion.encode() + b"\n" + text
    assert parse_directive(pasted, find_target(pasted, "m.py", "M"), "m.py") is not None


def test_assignments_name_the_lines_they_span() -> None:
    assert assigned_names(b"def f(x):\n    y = (\n        x + 1\n    )\n    x.a = 2\n    return y\n", 1, 6) == {
        2: "y",
        3: "y",
        4: "y",
    }


HEADS = [
    b"",
    b"\xef\xbb\xbf",
    b"#!/usr/bin/env python\n# -*- coding: utf-8 -*-\n",
    b'"""doc"""\nfrom __future__ import annotations\n',
]
TARGETS = [
    b"def f(x):\n    return x\n",
    b'def f(x):\n    """doc"""\n    # note\n    return x',
    b"# mtmc: x=f32[4]\n@deco\n@deco(1)\ndef f(x):\n\n    return x\n",
    b"class f(nn.Module):\n\tdef forward(self, x):\n\t\t'''doc'''\n\t\treturn x  # \xc3\xa9\n",
    b"if TYPE_CHECKING:\n    import os\n\nasync def g():\n    pass\n\ndef f(\n    x,\n):\n    y = x; return y\n",
    b"class Outer:\n    class f(nn.Module):\n        def other(self):\n            pass\n\n        def forward(self, x):\n            return x\n",
]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(HEADS),
    st.sampled_from(TARGETS),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.text("xyz \n", max_size=12),
)
def test_composing_then_stripping_is_the_identity_on_bytes(
    head: bytes, body: bytes, crlf: bool, imported: bool, before: bool, tail: str
) -> None:
    text = head + (b"import torch\n" if imported else b"") + (b"def a():\n    pass\n\n\n" if before else b"") + body
    text += b"\n# " + tail.encode().replace(b"\n", b"\n# ") + b"\n"
    if crlf:
        text = text.replace(b"\n", b"\r\n")
    target = find_target(text, "m.py", "f")
    composed = compose(text, target, CODE)
    assert composed != text
    assert b"return k(x)" in composed
    assert strip_generated(composed, target.qualname) == text


def test_a_body_on_the_header_line_is_moved_and_moved_back() -> None:
    text = b"import torch\ndef f(x): return x\n"
    composed = compose(text, find_target(text, "m.py", "f"), CODE)
    assert b"\n    return x\n" in composed
    assert strip_generated(composed, "f") == text


def test_a_name_conflict_is_refused() -> None:
    text = b"def tl(x):\n    return x\n\ndef f(x):\n    return x\n"
    with pytest.raises(RequestError, match="'tl' is used for something else"):
        compose(text, find_target(text, "m.py", "f"), CODE)


def test_a_file_that_changed_since_it_was_read_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text("old")
    read = hashlib.sha256(b"old").hexdigest()
    path.write_text("changed by the user")
    with pytest.raises(FileChanged, match="changed on disk"):
        write_if_unchanged(path, read, b"new", tmp_path / "backups")
    assert path.read_text() == "changed by the user"


def test_a_replaced_file_is_backed_up(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text("old")
    path.chmod(0o755)
    backup = write_if_unchanged(path, hashlib.sha256(b"old").hexdigest(), b"new", tmp_path / "backups")
    assert (path.read_text(), backup.read_text()) == ("new", "old")
    assert path.stat().st_mode & 0o777 == 0o755
