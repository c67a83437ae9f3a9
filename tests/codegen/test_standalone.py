"""Generated code for a file of its own reads the names of the user's file from its module, and computes the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from mtmc_lsp.codegen.standalone import placed, standalone
from mtmc_lsp.core.errors import TargetUnsupported
from mtmc_lsp.core.run import GeneratedCode, Placement

TEXT = b"K = 2\nabs = round\n\n\nclass Block:\n    pass\n"
BLOCK = '''\
def f_up_to_date() -> bool:
    """Whether K is what it was."""
    try:
        return type(K) is int and K == 2
    except NameError:
        return False


def f_sum(values, extra):
    K = 0
    for value in values:
        K += value
    return K + extra + sum([item for item in values if item > abs(0.4)])


def f_scaled(x, y):
    return (lambda K: K * x)(3) + K * y


@decorated
def f_fits(x) -> bool:
    """Whether the kernels run."""
    if not (
        f_up_to_date()
        and isinstance(x, (int, Block))
        and f_scaled(
            x,
            (x + 1),
        ) > 0
    ):
        return False
    return f_sum([1, x], (x)) > 0
'''
CODE = GeneratedCode(
    ("import functools",), BLOCK.replace("@decorated", "@functools.cache"), "if f_fits((x)):\n    return 1\n"
)


@pytest.fixture
def user() -> Iterator[ModuleType]:
    """The module of the user's file."""
    module = ModuleType("the_users")
    exec(TEXT, vars(module))
    sys.modules["the_users"] = module
    yield module
    del sys.modules["the_users"]


def beside() -> dict[str, Any]:
    scope: dict[str, Any] = {}
    code = placed(CODE, Placement.SIBLING, TEXT)
    assert code.dispatch == "if f_fits((x), __name__):\n    return 1\n"
    exec("import functools\n" + code.block, scope)
    return scope


def test_the_guard_decides_as_in_the_users_file_and_follows_its_globals(user: ModuleType) -> None:
    scope = beside()
    inside = {**vars(user), "functools": __import__("functools")}
    exec(CODE.block, inside)
    for x in (3, -5, "text"):
        assert scope["f_fits"](x, "the_users") == inside["f_fits"](x), x
    assert scope["f_sum"]([1, 2], 3, user) == inside["f_sum"]([1, 2], 3)
    user.K = 3
    scope["f_fits"].cache_clear()
    assert scope["f_fits"](3, "the_users") is False


def test_a_name_that_the_program_lacks_means_the_original_code(user: ModuleType) -> None:
    scope = beside()
    assert scope["f_fits"](3, "no_such_module") is False
    del user.Block
    assert scope["f_fits"](4, "the_users") is False


def test_code_that_names_nothing_of_the_file_stays_as_it_is() -> None:
    code = GeneratedCode(
        (), "def f_fits(x):\n    return len(x) > 0\n", "if f_fits(x):\n    return 1\n", Placement.SIBLING
    )
    assert standalone(code, b"import torch\n") == code


@pytest.mark.parametrize(
    ("block", "dispatch", "problem"),
    [
        ("LIMIT = K\n", "", "uses 'K'"),
        ("def f_fits(x, limit=K):\n    return x\n", "if f_fits(x):\n    return 1\n", "uses 'K'"),
        ("def f_fits(user_module):\n    return K\n", "if f_fits(x):\n    return 1\n", "uses the name 'user_module'"),
        ("def f_fits(module_name):\n    return K\n", "if f_fits(x):\n    return 1\n", "has the name 'module_name'"),
        ("def f_launch(x):\n    return K\n", "if True:\n    return (f_launch or 1)(x)\n", "reads names of the file"),
        (
            "def a():\n    return K\n\n\ndef f_fits(x):\n    return map(a, x)\n",
            "if f_fits(x):\n    return 1\n",
            "passes a func",
        ),
        ("def f_fits(x):\n    return K\n", "if f_fits(x=x):\n    return 1\n", "passes arguments by name"),
    ],
)
def test_other_uses_of_the_users_names_are_refused_with_the_remedy(block: str, dispatch: str, problem: str) -> None:
    with pytest.raises(TargetUnsupported, match=problem) as caught:
        placed(GeneratedCode((), block, dispatch), Placement.SIBLING, TEXT)
    assert 'Leave out place = "sibling"' in str(caught.value)
