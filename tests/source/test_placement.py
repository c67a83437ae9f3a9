"""Where generated code goes: at the end of the file, or above its target."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.run import GeneratedCode, Placement
from mtmc_lsp.source.compose import compose, strip_generated
from mtmc_lsp.source.targets import find_target

IMPORTS = ("import math", "import decimal as dec")


def code_for(name: str, place: Placement = Placement.END) -> GeneratedCode:
    """Code that replaces the result of a target by ``"kernel"``."""
    block = f"def {name}_fits(*args):\n    return math.pi > dec.Decimal(3)\n\n\ndef {name}_launch(*args):\n    return 'kernel'\n"
    return GeneratedCode(IMPORTS, block, f"if {name}_fits():\n    return {name}_launch()\n", place)


def put(text: str, *names: str, place: Placement = Placement.END) -> str:
    """The file with code for each target; removing it again gives the file."""
    current = text.encode()
    for name in names:
        current = compose(current, find_target(current, "m.py", name), code_for(name.replace(".", "_").lower(), place))
    ast.parse(current)
    stripped = current
    for name in names:
        stripped = strip_generated(stripped, name)
    assert stripped.decode() == text
    return current.decode()


BLOCK = """# mtmc: begin f
import math  # noqa: E402
import decimal as dec  # noqa: E402


def f_fits(*args):
    return math.pi > dec.Decimal(3)


def f_launch(*args):
    return 'kernel'
# mtmc: end f
"""
TARGET = "def f():\n    return 'user'\n"
CHANGED = "def f():\n    if f_fits():  # mtmc: dispatch\n        return f_launch()\n    return 'user'\n"


def test_the_block_with_its_imports_is_the_end_of_the_file() -> None:
    head = '"""doc"""\nimport os\n\n\n'
    assert put(f"{head}{TARGET}\n\nx = 1  # last\n", "f") == f"{head}{CHANGED}\n\nx = 1  # last\n\n\n{BLOCK}"


def test_an_import_of_the_user_is_not_repeated_in_the_block() -> None:
    assert "math  # noqa" not in put(f"import math\n\n\n{TARGET}", "f")
    assert "math  # noqa" in put(f"if x:\n    import math\n\n\n{TARGET}", "f")


def test_blocks_of_several_targets_each_have_their_imports() -> None:
    result = put(f"{TARGET}\n\ndef g():\n    return 1\n", "f", "g")
    assert result.index("# mtmc: end f") < result.index("# mtmc: begin g")
    assert result.count("import math  # noqa") == 2


@pytest.mark.parametrize("end", ["", "\n", "\n\n\n", "\n# last words", "\n    # indented\n", "\r\n", "\n\t", "\n\x0c"])
def test_a_file_keeps_its_last_bytes(end: str) -> None:
    result = put(f"{TARGET.rstrip()}{end}", "f")
    assert result.endswith("\n") == end.endswith("\n")


CALLERS = {
    "main guard": "if __name__ == '__main__':\n    pass\n",
    "call": "f()\n",
    "result": "RESULT = f()\n",
    "through a function": "def main():\n    return f()\n\n\nRESULT = main()\n",
    "through a table": "TABLE = {'f': f}\nfor item in TABLE.values():\n    item()\n",
    "table that is filled later": "TABLE = {}\nTABLE['f'] = f\nRESULT = [item() for item in TABLE.values()]\n",
    "lambda": "RESULT = list(map(lambda i: f(), range(2)))\n",
    "default of a parameter": "def g(x=f()):\n    pass\n",
    "class body": "class C:\n    x = f()\n",
    "with": "import contextlib\n\nwith contextlib.nullcontext():\n    f()\n",
    "try": "try:\n    f()\nexcept ValueError:\n    pass\n",
    "by name": "RESULT = globals()['f']()\n",
    "on the last line of another statement": "x = [\n    1\n]; f()\n",
    "format string": "RESULT = f'{f()}'\n",
}


@pytest.mark.parametrize("caller", CALLERS.values(), ids=CALLERS)
def test_the_block_is_above_the_first_statement_that_may_call_the_target(caller: str, tmp_path: Path) -> None:
    text = f"{TARGET}\n\ndef z():\n    return f()\n\n\n{caller}"
    result = put(text, "f")
    assert not result.endswith("# mtmc: end f\n")
    path = tmp_path / "m.py"
    path.write_text(result)
    runpy.run_path(str(path))


OTHERS = {
    "type variable": "T = TypeVar('T')\n",
    "logger": "log = logging.getLogger(__name__)\n",
    "function": "def g():\n    return f()\n",
    "class": "class C(Base):\n    a = thing(1)\n\n    def forward(self):\n        return f()\n",
    "reference": "__all__ = ['f']\nalias = f\n",
    "decorated function": "@torch.no_grad()\ndef g():\n    return f()\n\n\nx = torch.zeros(3)\n",
    "condition": "if torch.cuda.is_available():\n    def g():\n        return f()\n",
    "type checking": "if TYPE_CHECKING:\n    import numpy\n",
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_statement_that_cannot_call_the_target_stays_above_the_block(other: str) -> None:
    text = f"import torch\nimport logging\n\n\n{TARGET}\n\n{other}"
    assert put(text, "f").endswith("# mtmc: end f\n")


def test_after_a_foreign_decorator_any_call_counts() -> None:
    text = f"from registry import register, run_all\n\n\n@register\n{TARGET}\n\nx = 1\nrun_all()\n"
    assert put(text, "f").endswith("# mtmc: end f\n\n\nrun_all()\n")


@pytest.mark.parametrize(
    "text",
    [
        f"def warm(function):\n    function()\n    return function\n\n\n@warm\n{TARGET}",
        "if True:\n    def f():\n        return 'user'\n    RESULT = f()\n",
    ],
)
def test_a_target_that_its_own_statement_calls_gets_the_block_above(text: str, tmp_path: Path) -> None:
    result = put(text, "f")
    assert result.index("# mtmc: begin f") < result.index("dispatch")
    path = tmp_path / "m.py"
    path.write_text(result)
    runpy.run_path(str(path))


def test_lines_of_the_user_keep_their_numbers_except_for_the_dispatch() -> None:
    text = f'"""doc"""\n\nimport os\n\n\nclass A:\n    pass\n\n\n{TARGET}\n\ndef z():\n    pass\n# end\n'
    lines = put(text, "f").splitlines()
    without_dispatch = [*lines[:10], *lines[12:]]
    assert without_dispatch[: len(text.splitlines())] == text.splitlines()


def test_a_file_optimised_with_another_placement_is_moved() -> None:
    text = f"import os\n\n\n{TARGET}\n\nx = 1\n"
    for first, second in ((Placement.END, Placement.ABOVE), (Placement.ABOVE, Placement.END)):
        plain = strip_generated(put(text, "f", place=first).encode(), "f")
        again = compose(plain, find_target(plain, "m.py", "f"), code_for("f", second))
        assert again.decode() == put(text, "f", place=second)


def test_a_name_of_the_file_that_the_code_would_replace_is_refused() -> None:
    text = f"import os\n\n\n{TARGET}\n\ndef f_launch():\n    pass\n".encode()
    with pytest.raises(RequestError, match=r"m.py:8: the name 'f_launch' is used for something else"):
        compose(text, find_target(text, "m.py", "f"), code_for("f"))


def test_a_helper_that_the_file_already_contains_is_no_conflict() -> None:
    helper = "def helper():\n    return 1\n"
    text = f"import os\n\n\n{helper}\n\n{TARGET}".encode()
    code = GeneratedCode((), f"{helper}\n\ndef f_launch():\n    return helper()\n", "if True:\n    return f_launch()\n")
    result = compose(text, find_target(text, "m.py", "f"), code)
    assert strip_generated(result, "f") == text
    with pytest.raises(RequestError, match="'helper' is used for something else"):
        compose(text.replace(b"1", b"2"), find_target(text, "m.py", "f"), code)


def test_empty_lines_that_were_added_at_the_end_stay() -> None:
    text = f"import os\n\n\n{TARGET}"
    assert strip_generated(put(text, "f").encode() + b"\n\n", "f").decode() == text + "\n\n"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([*OTHERS.values(), *CALLERS.values()]), max_size=4),
    st.permutations(["f", "second", "M.forward"]),
    st.permutations(["f", "second", "M.forward"]),
    st.lists(st.sampled_from(Placement), min_size=3, max_size=3),
    st.booleans(),
)
def test_any_removal_order_gives_back_the_file_and_each_step_still_defines_what_it_uses(
    others: list[str], into: list[str], out_of: list[str], places: list[Placement], final_newline: bool
) -> None:
    targets = [
        TARGET,
        "def second():\n    return f()\n",
        "class M(nn.Module):\n    def forward(self):\n        return second()\n",
    ]
    parts = [targets[0], *others[:1], targets[1], *others[1:2], targets[2], *others[2:]]
    text = "\n\n".join(["from torch import nn\n", *parts]).encode()
    text = text if final_newline else text.rstrip(b"\n")
    current = text
    for name, place in zip(into, places, strict=True):
        code = code_for(name.replace(".", "_").lower(), place)
        current = compose(current, find_target(current, "m.py", name), code)
        ast.parse(current)
    for name in out_of:
        current = strip_generated(current, name)
        for block in current.split(b"# mtmc: begin ")[1:]:
            above = current[: current.index(block)] + block.partition(b"# mtmc: end ")[0]
            assert b"import math" in above
    assert current == text
