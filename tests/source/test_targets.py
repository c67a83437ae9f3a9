"""Targets in a file, and errors for missing ones."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.errors import SourceSyntaxError, TargetNotFound
from mtmc_lsp.core.workload import TargetKind
from mtmc_lsp.source.targets import find_target, find_targets, target_at

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

    def __init__(self):
        super().__init__()

    def forward(self, x):
        return x

    @property
    def width(self):
        return 1

    @staticmethod
    def helper(x):
        return x


class Plain:
    def method(self, x):
        return x


async def later(x):
    return x


def broken(x):
    return (x +
"""


def names(text: bytes) -> dict[str, TargetKind]:
    return {target.qualname: target.kind for target in find_targets(text, "m.py")}


def test_functions_methods_modules_and_kernels_are_found_and_nothing_else() -> None:
    assert names(FILE) == {
        "hidden": TargetKind.FUNCTION,
        "kernel": TargetKind.KERNEL,
        "Outer": TargetKind.MODULE,
        "Outer.Inner": TargetKind.MODULE,
        "Outer.Inner.forward": TargetKind.METHOD,
        "Outer.forward": TargetKind.METHOD,
        "Outer.helper": TargetKind.FUNCTION,
        "broken": TargetKind.FUNCTION,
    }


@pytest.mark.parametrize(
    "wrong",
    [
        "def bad(x:\n    return x\n",
        "def bad(x):\n    return (x\n",
        "def bad(x):\n    return [x\n\n\n",
        "if x\n    y\n",
        "class bad(:\n    def forward(self, x):\n        return x\n",
        "x = = 3\n",
        "def\n",
        "@\n",
        "import\n",
        "def bad(x):\nreturn x\n",
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_an_error_elsewhere_hides_no_target(wrong: str, is_first: bool) -> None:
    """Each error is above or below two valid targets, which keep their line numbers."""
    good = "import torch\n\n@torch.no_grad()\ndef f(x):\n    return x\n\nclass M(torch.nn.Module):\n    def forward(self, x):\n        return x\n"
    text = (f"{wrong}{good}" if is_first else f"{good}{wrong}").encode()
    assert {"f", "M", "M.forward"} <= set(names(text))
    target = find_target(text, "m.py", "f")
    assert text.split(b"\n")[target.start_line - 1] == b"def f(x):"
    assert find_target(text, "m.py", "M.forward").kind is TargetKind.METHOD


def test_methods_beside_a_broken_one_are_still_found() -> None:
    text = b"class M(nn.Module):\n    def forward(self, x):\n        return x\n\n    def other(self, x):\n        return x +\n"
    assert find_target(text, "m.py", "M.forward").start_line == 2
    with pytest.raises(SourceSyntaxError) as caught:
        find_target(text, "m.py", "M.other")
    assert caught.value.where is not None
    assert caught.value.where.line in (5, 6)


@pytest.mark.parametrize(
    ("bases", "is_module"),
    [
        ("nn.Module", True),
        ("torch.nn.Module", True),
        ("LightningModule", True),
        ("Base", True),
        ("Base[int], metaclass=Meta", True),
        ("object", False),
    ],
)
def test_a_class_is_a_module_by_its_bases(bases: str, is_module: bool) -> None:
    text = (
        f"class Late({bases}):\n    pass\n\nclass Base(Root):\n    pass\n\nclass Root(nn.Module):\n    pass\n".encode()
    )
    assert ("Late" in names(text)) is is_module


def test_a_class_is_a_module_by_its_own_forward_alone() -> None:
    text = b"class A(Mixin):\n    def forward(self, x): return x\n\nclass B:\n    class C(nn.Module):\n        def forward(self, x): return x\n"
    assert names(text) == {
        "A": TargetKind.MODULE,
        "A.forward": TargetKind.METHOD,
        "B.C": TargetKind.MODULE,
        "B.C.forward": TargetKind.METHOD,
    }


def test_an_autograd_function_is_no_module() -> None:
    text = b"class F(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, x):\n        return x\n"
    assert names(text) == {}


@pytest.mark.parametrize(
    ("imports", "decorator", "is_kernel"),
    [
        ("import triton", "@triton.jit", True),
        ("import triton", "@triton.jit(do_not_specialize=['n'])", True),
        ("import triton", "@triton.autotune(configs=[], key=[])\n@triton.jit", True),
        ("import triton as tr", "@tr.jit", True),
        ("from triton import jit", "@jit", True),
        ("from triton import jit as compiled", "@compiled", True),
        ("from numba import jit", "@jit", False),
        ("import numba", "@numba.jit", False),
        ("import torch", "@torch.jit.script", False),
    ],
)
def test_a_kernel_is_known_by_tritons_jit_under_any_name(imports: str, decorator: str, is_kernel: bool) -> None:
    found = names(f"{imports}\n\n{decorator}\ndef k(x):\n    pass\n".encode())
    assert found["k"] is (TargetKind.KERNEL if is_kernel else TargetKind.FUNCTION)


def test_targets_inside_if_try_with_and_match_are_found() -> None:
    text = b"""if TYPE_CHECKING:
    def a(x): return x
elif y:
    def b(x): return x
else:
    def c(x): return x
try:
    def d(x): return x
except E:
    def e(x): return x
finally:
    with z:
        def f(x): return x
match q:
    case 1:
        def g(x): return x
"""
    assert sorted(names(text)) == list("abcdefg")


def test_functions_inside_functions_are_targets_if_they_can_be_called_without_the_outer_one() -> None:
    text = b"""SCALE = 2
def outer(x, k):
    def inner(x, y=(1, None), *, z=-1.5):
        def innermost(x):
            return x * SCALE
        return innermost(x) + y
    def closure(x):
        return x * k
    def recursive(x):
        return recursive(x)
    @decorated
    def wrapped(x):
        return x
    class Local(nn.Module):
        def forward(self, x):
            return x
    return inner(x)
class Net(nn.Module):
    def forward(self, x):
        def gate(x): return x
        def parent(x): return super().forward(x)
        return gate(x)
"""
    assert list(names(text)) == [
        "outer",
        "outer.inner",
        "outer.inner.innermost",
        "Net",
        "Net.forward",
        "Net.forward.gate",
    ]
    assert find_target(text, "m.py", "gate").qualname == "Net.forward.gate"


def test_lambda_expressions_that_the_file_assigns_are_targets() -> None:
    text = b"""act = lambda x: x + 1
if a:
    other: Any = lambda x, *y, k=1: x
called = f(lambda x: x)
table = {"a": lambda x: x}
class A:
    member = lambda self, x: x
def g():
    local = lambda x: x
"""
    assert names(text) == dict.fromkeys(["act", "other", "g"], TargetKind.FUNCTION)


def test_the_innermost_target_around_a_line_is_found() -> None:
    found = {line: target_at(FILE, "m.py", line) for line in (9, 10, 14, 17, 19, 23, 36)}
    assert {line: target.qualname if target else None for line, target in found.items()} == {
        9: "kernel",
        10: "kernel",
        14: "Outer",
        17: "Outer.Inner.forward",
        19: "Outer",
        23: "Outer.forward",
        36: None,
    }


def test_an_unknown_name_lists_what_is_like_it() -> None:
    with pytest.raises(TargetNotFound) as caught:
        find_target(FILE, "m.py", "Outer.forwrd")
    assert "m.py" in str(caught.value)
    assert "Outer.forward" in caught.value.remedy


def test_an_empty_file_says_that_it_defines_nothing() -> None:
    with pytest.raises(TargetNotFound, match="no function, method, module or kernel called 'f'") as caught:
        find_target(b"", "m.py", "f")
    assert "defines no function" in caught.value.remedy


def test_the_end_of_a_name_is_enough_where_only_one_target_has_it() -> None:
    assert find_target(FILE, "m.py", "Inner.forward").qualname == "Outer.Inner.forward"
    with pytest.raises(TargetNotFound, match=r"Outer.Inner.forward, Outer.forward"):
        find_target(FILE, "m.py", "forward")


def test_a_name_defined_twice_means_the_last_definition() -> None:
    text = b"def f(x):\n    return x\n\n\ndef f(x):\n    return x + 1\n"
    assert find_target(text, "m.py", "f").start_line == 5


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("def f(x):\n    return (x +\n", 2),
        ("a = 1\n\ndef f(x:\n    return x\n", 3),
        ("def f(x)\n    return x\n", 1),
    ],
)
def test_a_target_that_does_not_parse_is_told_with_its_file_and_line(text: str, line: int) -> None:
    with pytest.raises(SourceSyntaxError) as caught:
        find_target(text.encode(), "m.py", "f")
    assert caught.value.where is not None
    assert caught.value.where.path == "m.py"
    assert line <= caught.value.where.line <= line + 1
    assert caught.value.remedy


def test_an_expression_of_thousands_of_terms_does_not_exhaust_the_stack() -> None:
    text = b"x = " + b" + ".join([b"1"] * 5000) + b"\n\ndef f(x):\n    return x\n"
    assert set(names(text)) == {"f"}
    assert find_target(text, "m.py", "f").start_line == 3


def test_a_file_that_python_reads_and_the_parser_does_not_is_told_apart_from_a_broken_one() -> None:
    text = b"if a:\n    def f(x): return (x +\n 1)\n"
    with pytest.raises(SourceSyntaxError, match="although Python can read it") as caught:
        find_target(text, "m.py", "f")
    assert "Indent lines inside brackets" in caught.value.remedy


def test_a_file_of_a_byte_order_mark_and_an_error_has_no_targets() -> None:
    assert names(b"\xef\xbb\xbf  )") == {}


@pytest.mark.parametrize(
    ("text", "name", "problem", "remedy"),
    [
        (
            "class A:\n    @property\n    def f(self):\n        return 1\n",
            "A.f",
            "is a property",
            "Move its tensor code",
        ),
        (
            "class A:\n    def f(self, x):\n        return x\n",
            "A.f",
            "is a method of A, which is not an nn.Module",
            "Make A",
        ),
        (
            "class A:\n    def __call__(self, x):\n        return x\n",
            "A",
            "is a class, but not an nn.Module",
            "Optimise",
        ),
        (
            "def make(k):\n    def f(x):\n        return x * k\n    return f\n",
            "f",
            "reads k of make, and there is no value for this before make runs",
            "Pass k as an argument, move f to the top level, or optimise make.",
        ),
        (
            "def make():\n    a = b = 1\n    def f(x):\n        return x * a + b\n    return f\n",
            "f",
            "reads a and b of make",
            "Pass a and b as arguments",
        ),
        (
            "def make(k):\n    def f(x, y=k):\n        return x * y\n    return f\n",
            "make.f",
            "has the default value k, which only make computes",
            "Write a constant",
        ),
        (
            "def make():\n    @wraps(g)\n    def f(x):\n        return x\n    return f\n",
            "f",
            "is defined inside make and has a decorator",
            "Remove the decorator",
        ),
        ("async def f(x):\n    return x\n", "f", "is a coroutine", "Move its tensor code"),
        ("f = (lambda x: x)\n", "f", "is a lambda expression in brackets", "f = lambda ..."),
        (
            "f = partial(F.gelu, 2, eps=1e-6)\n",
            "f",
            "is a functools.partial object of F.gelu",
            "def f(x): return F.gelu(2, x, eps=1e-6)",
        ),
        ("f = torch.compile(g)\n", "f", "is the result of compile(...)", "Optimise g."),
        ("f = make(2.0)\n", "f", "is the result of make(...)", "Move its tensor code"),
    ],
)
def test_what_is_defined_but_cannot_be_a_target_is_told_apart_from_what_is_not_there(
    text: str, name: str, problem: str, remedy: str
) -> None:
    """'No function called f' is no answer to somebody who is looking at it."""
    with pytest.raises(TargetNotFound) as caught:
        find_target(f"def g(x):\n    return x\n\n\n{text}".encode(), "m.py", name)
    assert f"{name!r} {problem}" in caught.value.message
    assert remedy in caught.value.remedy
    assert caught.value.where is not None and caught.value.where.line >= 5


WITH_A_BLOCK = b"""\
import torch


def gelu(x):
    return x


# mtmc: begin gelu
import triton


@triton.jit
def gelu_kernel(x_ptr):
    pass


def _is_plain_gpu_call(tensors) -> bool:
    return True
# mtmc: end gelu
"""


def test_kernels_and_helpers_of_generated_code_are_no_suggestions() -> None:
    with pytest.raises(TargetNotFound) as caught:
        find_target(WITH_A_BLOCK, "m.py", "gelu_kernal")
    assert caught.value.remedy == "Available targets: gelu."
