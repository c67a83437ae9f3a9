"""Generated code is inserted and removed again, byte for byte."""

from __future__ import annotations

import ast
import re
from dataclasses import astuple
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmc_lsp.core.errors import RequestError, TargetUnsupported
from mtmc_lsp.core.run import GeneratedCode, Placement
from mtmc_lsp.core.workload import TargetKind
from mtmc_lsp.source.compose import compose, strip_generated
from mtmc_lsp.source.sibling.pair import separated, without_block
from mtmc_lsp.source.targets import find_target
from mtmc_lsp.source.workload.directive import parse_directive

IMPORTS = ("import torch", "import triton", "import triton.language as tl")


def code_for(name: str, place: Placement = Placement.ABOVE) -> GeneratedCode:
    """Generated code for a target, with names that contain the target's name."""
    block = f"@triton.jit\ndef {name}_kernel(x):\n    tl.store(x, 1)\n\n\ndef {name}_fits(x):\n    return x.is_cuda\n"
    dispatch = f"if {name}_fits(x):\n    return {name}_triton(x) if torch.compiler.is_compiling() else {name}_op(x)\n"
    return GeneratedCode(IMPORTS, block, dispatch, place)


CODE = code_for("k")
BLOCK = """# mtmc: begin f
@triton.jit
def k_kernel(x):
    tl.store(x, 1)


def k_fits(x):
    return x.is_cuda
# mtmc: end f
"""
CALL = "    if k_fits(x):  # mtmc: dispatch\n        return k_triton(x) if torch.compiler.is_compiling() else k_op(x)\n"


def composed(text: str, name: str = "f", code: GeneratedCode = CODE) -> str:
    """Compose code for a target; check that the result is valid Python and that stripping it is exact."""
    raw = text.encode()
    target = find_target(raw, "m.py", name)
    result = compose(raw, target, code)
    ast.parse(result)
    assert strip_generated(result, target.qualname) == raw
    return result.decode()


def test_kernels_are_inserted_above_a_function_and_the_dispatch_first_in_its_body() -> None:
    text = '"""doc"""\n\nimport torch\nfrom torch import nn\n\n\n# mtmc: x=f32[4]\n@deco\ndef f(x):\n    """Doc."""\n    return x\n'
    assert composed(text) == (
        '"""doc"""\n\nimport torch\nimport triton  # mtmc: import\nimport triton.language as tl  # mtmc: import\n'
        f"from torch import nn\n\n\n{BLOCK}\n\n# mtmc: x=f32[4]\n@deco\ndef f(x):\n"
        f'    """Doc."""\n{CALL}    return x\n'
    )


def test_the_body_of_a_one_line_function_moves_to_a_new_line() -> None:
    result = composed("import torch\ndef f(x): return x  # twice\n")
    assert result.endswith("op(x)\n    return x  # twice\n")


def test_a_one_line_method_with_two_statements_keeps_both() -> None:
    result = composed("class M(nn.Module):\n\tdef forward(self, x): y = x; return y", "M")
    assert result.endswith("\n\t\ty = x; return y")


def test_the_dispatch_is_inserted_above_a_comment_on_the_first_statement() -> None:
    result = composed("def f(x):  # noqa\n    # explains\n    return x\n")
    assert result.endswith(f"def f(x):  # noqa\n{CALL}    # explains\n    return x\n")


def test_code_indented_by_two_spaces_gets_two_spaces() -> None:
    result = composed("def f(x):\n  return x\n")
    assert "\n  if k_fits(x):  # mtmc: dispatch\n    return k_triton(x)" in result


def test_a_file_with_crlf_gets_crlf_on_every_line() -> None:
    result = composed("import torch\r\n\r\n\r\ndef f(x):\r\n    return x\r\n")
    assert result.count("\n") == result.count("\r\n")


def test_the_directive_still_belongs_to_the_target_under_a_byte_order_mark() -> None:
    raw = b"\xef\xbb\xbf# mtmc: x=f32[4]\ndef f(x):\n    return x\n"
    result = compose(raw, find_target(raw, "m.py", "f"), CODE)
    assert result.startswith(b"\xef\xbb\xbfimport torch")
    assert parse_directive(result, find_target(result, "m.py", "f"), "m.py") is not None
    assert strip_generated(result, "f") == raw


def test_a_shebang_and_a_coding_line_stay_first() -> None:
    head = "#!/usr/bin/env python\n# -*- coding: utf-8 -*-\n"
    assert composed(f"{head}def f(x):\n    return x\n").startswith(f"{head}import torch  # mtmc: import\n")


@pytest.mark.parametrize(
    ("present", "added"),
    [
        ("import torch\nimport triton\nimport triton.language as tl\n", []),
        ("import torch.nn\nimport triton.language\nfrom triton import language as tl\n", []),
        ("import torch, triton\nimport triton.language as tl\n", []),
        (
            "try:\n    import triton\n    import triton.language as tl\nexcept ImportError:\n    triton = None\nimport torch\n",
            [],
        ),
        ("import torch\nfrom triton import jit\n", ["triton", "triton.language as tl"]),
        ("import torch.nn as nn\n", ["torch", "triton", "triton.language as tl"]),
        ("if TYPE_CHECKING:\n    import torch\nimport triton\n", ["torch", "triton.language as tl"]),
        ("if sys.platform:\n    import torch\nimport triton\n", ["torch", "triton.language as tl"]),
        ("from __future__ import annotations\n", ["torch", "triton", "triton.language as tl"]),
    ],
)
def test_only_missing_imports_are_added(present: str, added: list[str]) -> None:
    result = composed(f"{present}\n\ndef f(x):\n    return x\n")
    marked = [line.removesuffix("  # mtmc: import") for line in result.splitlines() if line.endswith("# mtmc: import")]
    assert marked == [f"import {name}" for name in added]


def test_unused_imports_are_not_added() -> None:
    for place in Placement:
        code = GeneratedCode(IMPORTS, "def k_fits(x):\n    return x\n", "if k_fits(x):\n    return k(x)\n", place)
        assert "import" not in composed("def f(x):\n    return x\n", code=code)


def test_imports_are_added_after_the_first_imports_and_never_inside_a_condition() -> None:
    text = "import os\nif TYPE_CHECKING:\n    import numpy\n__all__ = ['f']\nfrom a import b\n\n\ndef f(x):\n    return x\n"
    assert "from a import b\nimport torch  # mtmc: import\nimport triton" in composed(text)


def test_imports_below_the_target_do_not_count() -> None:
    text = "import os\n\n\ndef f(x):\n    return x\n\n\nimport torch\nimport triton\n"
    assert "import os\nimport torch  # mtmc: import\nimport triton  # mtmc: import\n" in composed(text)


@pytest.mark.parametrize(
    ("binding", "line"),
    [
        ("def tl(x):\n    return x\n", 2),
        ("import thinlayer as tl\n", 2),
        ("tl = 3\n", 2),
        ("a, (tl, b) = c\n", 2),
        ("for tl in range(3):\n    pass\n", 2),
        ("with a as tl:\n    pass\n", 2),
        ("if a:\n    tl = 3\n", 3),
    ],
)
def test_a_name_conflict_is_refused_with_its_line(binding: str, line: int) -> None:
    text = f"import torch\n{binding}\ndef f(x):\n    return x\n".encode()
    with pytest.raises(RequestError, match="'tl' is used for something else") as caught:
        compose(text, find_target(text, "m.py", "f"), CODE)
    assert caught.value.where is not None
    assert (caught.value.where.path, caught.value.where.line) == ("m.py", line)
    assert "Rename it" in caught.value.remedy


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("def f(x):\n    '''doc'''\n", 2, "contains only a docstring"),
        ("def f(x):\n    '''doc'''; return x\n", 2, "last line of its docstring"),
        ("def f(x): 'doc'; return x\n", 1, "docstring on the line of its def"),
        ("a = 1\ndef f(x):  return x\n", 2, "body on the line of its def"),
        ("a = 1\ndef f(x): \\\n  return x\n", 2, "body on the line of its def"),
        ("class f(Base, nn.Module):\n    pass\n", 1, "does not define forward"),
    ],
)
def test_a_target_that_cannot_hold_the_dispatch_is_refused_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(TargetUnsupported, match=words) as caught:
        compose(text.encode(), find_target(text.encode(), "m.py", "f"), CODE)
    assert caught.value.where is not None
    assert (caught.value.where.path, caught.value.where.line) == ("m.py", line)
    assert caught.value.remedy


BASE = """class Base(nn.Module):
    def forward(self, x: Tensor, /, h=None, *more, scale=-1.0, **kw):
        return x


"""
METHOD = """    def forward(self, x, /, h=None, *more, scale=-1.0, **kw):  # mtmc: dispatch
        if k_fits(x):
            return k_triton(x) if torch.compiler.is_compiling() else k_op(x)
        return super().forward(x, h, *more, scale=scale, **kw)
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("class f(Base):\n", "\n    pass\n"),
        ("class f(Base):\n", "\n    # A comment.\n    a = 1"),
        ('class f(\n    Base,\n):\n    """Doc."""\n\n', "\n    def g(self):\n        pass\n"),
        ('class f(Base):\n    """Doc."""\n\n', "\n\ng = f(2)\n"),
    ],
)
def test_a_class_that_inherits_forward_gets_one_that_calls_the_inherited_one(before: str, after: str) -> None:
    """``composed`` checks that stripping removes it with its empty line."""
    original = before + (after.removeprefix("\n") if not before.endswith("\n\n") else after)
    original = original.replace('"""\n\n\n', '"""\n\n')
    assert BASE in composed(BASE + original)
    assert before + METHOD + after in composed(BASE + original)


@pytest.mark.parametrize(
    "text",
    [
        "class f(Base, nn.Module): pass\n",
        'class f(Base):\n    """Doc."""\n',
        'class f(Base):\n    """Doc."""; a = 1\n\nb = 2\n',
    ],
)
def test_a_class_without_a_line_for_an_inherited_forward_is_refused(text: str) -> None:
    raw = (BASE + text).encode()
    with pytest.raises(TargetUnsupported, match="f does not define forward, and no forward can be written") as caught:
        compose(raw, find_target(raw, "m.py", "f"), CODE)
    assert "define forward in this class" in caught.value.remedy


@pytest.mark.parametrize("forward", ["@compiled\n    def forward(self, x):", "def forward(self, x, limit=LIMIT):"])
def test_parameters_that_cannot_be_repeated_are_refused(forward: str) -> None:
    raw = f"class Base(nn.Module):\n    {forward}\n        return x\n\n\nclass f(Base):\n    pass\n".encode()
    with pytest.raises(TargetUnsupported, match="no forward can be written"):
        compose(raw, find_target(raw, "m.py", "f"), CODE)


def test_composing_twice_raises_an_error() -> None:
    text = composed("def f(x):\n    return x\n").encode()
    with pytest.raises(ValueError, match="already has generated code"):
        compose(text, find_target(text, "m.py", "f"), CODE)


def test_a_comment_inside_a_string_above_the_target_is_unchanged() -> None:
    assert '"""\n# no comment"""\n' in composed('a = """\n# no comment"""\ndef f(x):\n    return x\n')


def test_code_of_a_class_is_stripped_by_the_name_of_its_forward_and_vice_versa() -> None:
    raw = b"class M(nn.Module):\n    def forward(self, x):\n        return x\n"
    for put, taken in (("M", "M.forward"), ("M.forward", "M")):
        assert strip_generated(compose(raw, find_target(raw, "m.py", put), CODE), taken) == raw


def test_text_without_generated_code_is_unchanged() -> None:
    raw = b"import torch  # mtmc: import\n\n\ndef f(x):\n    if a:  # mtmc: dispatch\n        return x\n"
    assert strip_generated(raw, "f") == raw


def test_the_dispatch_is_stripped_from_a_renamed_target() -> None:
    text = composed("def f(x):\n    return x\n").replace("def f(", "def renamed(").encode()
    assert strip_generated(text, "f") == b"def renamed(x):\n    return x\n"


def test_code_rewrapped_by_a_formatter_is_stripped_completely() -> None:
    text = composed("import torch\n\n\ndef f(x):\n    y = x\n    return y\n")
    wrapped = text.replace("if k_fits(x):  # mtmc: dispatch", "if k_fits(\n        x\n    ):  # mtmc: dispatch")
    assert strip_generated(wrapped.encode(), "f") == b"import torch\n\n\ndef f(x):\n    y = x\n    return y\n"


def test_a_one_line_body_with_added_lines_is_not_moved_back_to_the_def() -> None:
    text = composed("def f(x): return x\n").replace("    return x\n", "    y = x\n    return y\n")
    assert strip_generated(text.encode(), "f") == b"def f(x):\n    y = x\n    return y\n"


HEADS = [
    "",
    "\ufeff",
    "#!/usr/bin/env python\n# -*- coding: utf-8 -*-\n",
    "# licence\n\n",
    '"""doc\n\né"""\nfrom __future__ import annotations\n',
    '"""doc"""\n',
    '"""doc"""; import os\n',
    "import torch\nfrom typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    import torch\n\n",
    "import os  # é\nimport triton.language as tl; import triton\n",
    "x = 1\n",
    "\x0c\n",
]
TARGETS = [
    "def f(x):\n    return x\n",
    'def f(x):\n    """doc"""\n    # note\n    return x',
    "# mtmc: x=f32[4]\n# more\n@deco\n@deco(\n    1\n)\ndef f(x):\n\n    return x\n",
    "class f(nn.Module):\n\tdef forward(self, x):\n\t\t'''doc'''\n\n\t\treturn x  # é\n",
    "async def g():\n    pass\n\ndef f(\n    x,\n) -> int:  # why\n    y = x; return y\n",
    "class Outer:\n    class f(nn.Module):\n        def other(self):\n            pass\n\n        # mtmc: x=f32[4]\n"
    "        def forward(self, x):\n            return x\n",
    "if a:\n  try:\n    def f(x): return (x +\n      1)\n  except E:\n    pass\n",
    "class f(nn.Module):\n  @deco\n  def forward(self, x): return x  # é",
    "def f(x):\n    # only\n\n    # comments\n    global y\n    return x\n    # behind\n",
    "\x0cdef f(x):\n    return x\n",
]
BEFORE = ["", "def a():\n    pass\n\n\n", "a = '''\n# text'''\n", "def a():\n    pass\n# about a\n\n"]
AFTER = [
    "",
    "\n# é",
    "\n\ndef z():\n    pass\n",
    "\n\nimport torch\n",
    "\n   ",
    "\n\n\n\n",
    '\n\n# runs it\nif __name__ == "__main__":\n    print(f)',
    "\nz = [\n    1,\n]; print(f)\n",
]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(HEADS),
    st.sampled_from(BEFORE),
    st.sampled_from(TARGETS),
    st.sampled_from(AFTER),
    st.sampled_from([(), IMPORTS[:1], IMPORTS]),
    st.sampled_from(Placement),
    st.booleans(),
)
def test_composing_then_stripping_is_the_identity_on_bytes(
    head: str, before: str, body: str, after: str, imports: tuple[str, ...], place: Placement, crlf: bool
) -> None:
    text = (head + before + body + (f"\n{after}" if after else "")).encode()
    if crlf:
        text = text.replace(b"\n", b"\r\n")
    target = find_target(text, "m.py", "f")
    if place is Placement.SIBLING:
        # A file of its own needs all imports.
        imports = IMPORTS
    result = compose(text, target, GeneratedCode(imports, CODE.block, CODE.dispatch, place))
    if place is Placement.SIBLING:
        pair = separated(result, target.qualname, Path("m.py"), "", None)
        assert pair.kernels is not None
        assert without_block(pair.kernels, target.qualname) is None
        result = pair.user
    ast.parse(result.removeprefix(b"\xef\xbb\xbf"))
    assert b"# mtmc: dispatch" in result
    assert strip_generated(result, target.qualname) == text
    # All lines of the user's code are still present, in order.
    lines = iter(result.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").split(b"\n"))
    own = text.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").split(b"\n")
    rest = [line for line in own if b"): return" not in line]
    assert all(line in lines for line in rest)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(HEADS),
    st.permutations(["one", "M.forward", "M.other", "N"]),
    st.permutations(["one", "M.forward", "M.other", "N"]),
    st.lists(st.sampled_from(Placement), min_size=4, max_size=4),
    st.sampled_from(AFTER),
    st.booleans(),
)
def test_targets_of_one_file_are_stripped_in_any_order(
    head: str, into: list[str], out_of: list[str], places: list[Placement], after: str, crlf: bool
) -> None:
    """After each removal, the remaining code still imports everything it uses."""
    text = (
        head + "def one(x):\n    return x\n\n\nclass M(nn.Module):\n    def forward(self, x):\n        return x\n\n"
        "    def other(self, x):\n        return x\n\n\nclass N(nn.Module):\n    def forward(self, x): return x\n"
        + after.replace("print(f)", "one(1)")
    ).encode()
    if crlf:
        text = text.replace(b"\n", b"\r\n")
    current, kernels = text, None
    for name, place in zip(into, places, strict=True):
        code = code_for(name.lower().replace(".", "_"), place)
        current = compose(current, find_target(current, "m.py", name), code)
        if place is Placement.SIBLING:
            current, kernels = astuple(separated(current, name, Path("m.py"), "", kernels))
    for count, name in enumerate(out_of, start=1):
        current = strip_generated(current, name)
        kernels = without_block(kernels, name) if kernels is not None else None
        begun = current.count(b"# mtmc: begin") + (kernels or b"").count(b"# mtmc: begin")
        assert begun == current.count(b"# mtmc: dispatch") == len(out_of) - count
        assert (kernels is None) == (b"# mtmc: kernels" not in current)
        assert kernels is None or b"import triton" in kernels
        for block in re.findall(rb"# mtmc: begin (?:.*\n)*?# mtmc: end", current):
            assert b"import triton" in current[: current.index(block) + len(block)]
    assert current == text


def test_a_module_target_is_called_from_its_forward() -> None:
    raw = b"class M(nn.Module):\n    def helper(self, x):\n        return x\n\n    def forward(self, x):\n        return x\n"
    target = find_target(raw, "m.py", "M")
    assert target.kind is TargetKind.MODULE
    assert b"def forward(self, x):\n        if k_fits(x):  # mtmc: dispatch\n" in compose(raw, target, CODE)


def test_stripping_a_broken_file_keeps_all_user_code() -> None:
    head = '("""\xe9 an open string and an open bracket\n'
    body = "def f(x):\n    if ok(x):  # mtmc: dispatch\n        return kernel(x)\n    return x + 1\n"
    block = "# mtmc: begin f\ndef kernel(x):\n    pass\n# mtmc: end f\n\n\n"
    for text in (block + body + head, head + block + body, block + body.replace("kernel(x)", "kernel(x") + head):
        left = strip_generated(text.encode(), "f").decode()
        assert head in left
        assert "def f(x):\n" in left
        assert "    return x + 1\n" in left


def test_a_long_dispatch_is_wrapped_at_the_indentation_of_the_target() -> None:
    arguments = ", ".join(f"argument_number_{i}" for i in range(12))
    code = GeneratedCode(
        IMPORTS,
        "def k_fits(*args):\n    return args\n",
        f"if (tensors := k_fits(self, {arguments})) is not None:\n    return k_launch({arguments})\n",
    )
    raw = f"class M(nn.Module):\n    def forward(self, {arguments.replace(' ', chr(10) + ' ' * 8)}):\n        return 1\n".encode()
    result = compose(raw, find_target(raw, "m.py", "M"), code)
    assert max(len(line) for line in result.decode().splitlines()) <= 120
    assert b"        if (  # mtmc: dispatch\n" in result
    assert strip_generated(result, "M") == raw
