"""Dispatch statements of regions are inserted between the user's statements and removed again, byte for byte."""

from __future__ import annotations

import ast
import random

import pytest

from mtmc_lsp.capture.regions.runs import Run, Runs, has_dispatch
from mtmc_lsp.capture.regions.statements import Statements, function_at
from mtmc_lsp.core.errors import TargetUnsupported
from mtmc_lsp.core.run import GeneratedCode
from mtmc_lsp.core.workload import CodeRegion, Target
from mtmc_lsp.source.compose import compose, strip_generated
from mtmc_lsp.source.targets import find_target

TEXT = '''\
import torch


def f(x, w):
    """Doc."""
    h = x @ w
    # Comment on the text.
    text = """a
  b
"""
    h = (h
  + 1)  # odd indentation

    print(h)
    for i in range(3):
        if i:
            h = h * 2

            y = h + 1
    return h
'''


def region_of(runs: Runs, first: int, last: int, number: int = 1) -> CodeRegion:
    """The region of some statements of the body, by their positions in it."""
    body = runs.function.body
    return runs.region(Run(tuple(body[first:last]), last == len(body)), number)


def dispatch(region: CodeRegion) -> str:
    results = ", ".join(region.outputs)
    action = "return call()" if region.returns else f"{results} = call()" if results else "call()"
    return f"if f_region_{region.number}_fits({', '.join(region.inputs)}):\n    {action}\n"


def code_for(regions: list[CodeRegion]) -> GeneratedCode:
    block = "\n\n\n".join(f"def f_region_{region.number}_fits(*_):\n    return False" for region in regions)
    return GeneratedCode((), f"{block}\n", "", regions=tuple((region, dispatch(region)) for region in regions))


def composed(text: str, *spans: tuple[int, int]) -> tuple[str, Target, list[CodeRegion]]:
    """Compose code for regions; check that the result is valid Python and that stripping it is exact."""
    raw = text.encode()
    target = find_target(raw, "m.py", "f")
    runs = Runs(target, text)
    regions = [region_of(runs, *span, number) for number, span in enumerate(spans, 1)]
    result = compose(raw, target, code_for(regions))
    ast.parse(result)
    assert strip_generated(result, "f") == raw
    return result.decode(), target, regions


def test_a_region_in_the_middle_becomes_the_other_branch_and_strings_keep_their_text() -> None:
    text, _, _ = composed(TEXT, (1, 4))
    assert (
        "    if f_region_1_fits(x, w):  # mtmc: dispatch\n"
        "        h = call()\n"
        "    else:\n"
        "        h = x @ w\n"
        "        # Comment on the text.\n"
        '        text = """a\n'
        "  b\n"
        '"""\n'
        "        h = (h\n"
        "      + 1)  # odd indentation\n"
        "\n"
        "    print(h)\n"
    ) in text


def test_a_region_at_the_end_leaves_the_users_lines_as_they_are() -> None:
    text, _, _ = composed(TEXT, (5, 7))
    body = TEXT[TEXT.index("    for i") :]
    assert "    print(h)\n    if f_region_1_fits(h):  # mtmc: dispatch\n        return call()\n" + body in text


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
@pytest.mark.parametrize("tabs", [False, True])
def test_several_regions_round_trip(newline: str, tabs: bool) -> None:
    plain = TEXT.replace("    ", "\t") if tabs else TEXT
    composed(plain.replace("\n", newline), (1, 4), (5, 6), (6, 7))


def test_a_region_inside_a_loop_round_trips() -> None:
    raw = TEXT.encode()
    target = find_target(raw, "m.py", "f")
    runs = Runs(target, TEXT)
    inner = runs.function.body[5].body[0].body
    region = runs.region(Run(tuple(inner[:1]), False))
    result = compose(raw, target, code_for([region]))
    assert b"            if f_region_1_fits(h):  # mtmc: dispatch\n                h = call()\n" in result
    assert strip_generated(result, "f") == raw


def test_the_statements_of_a_version_have_the_numbers_of_the_users_file() -> None:
    text, target, regions = composed(TEXT, (1, 4), (6, 7))
    line = text[: text.index("def f(")].count("\n") + 1
    version = Statements(function_at(text, "f", line), text.splitlines())
    plain = Runs(target, TEXT).statements
    assert [ast.dump(item) for item in version.all] == [ast.dump(item) for item in plain.all if item is not None]
    for region in regions:
        first = version.run(region.first, region.last)[0]
        assert isinstance(first, ast.If) and "_fits" in ast.unparse(first.test)
    moved = find_target(text.encode(), "m.py", "f")
    assert [has_dispatch(moved, item, text) for item in regions] == [True, True]
    assert not has_dispatch(target, regions[0], TEXT)


def test_what_the_user_adds_to_a_composed_file_stays() -> None:
    text, _, _ = composed(TEXT, (1, 4))
    edited = text.replace("        h = x @ w\n", "        h = x @ w\n        h = h.abs()\n") + "\n\nz = 1\n"
    expected = TEXT.replace("    h = x @ w\n", "    h = x @ w\n    h = h.abs()\n") + "\n\nz = 1\n"
    assert strip_generated(edited.encode(), "f").decode() == expected


def test_a_region_on_the_line_of_the_def_is_refused() -> None:
    raw = b"def f(x): y = x + 1; return y\n"
    target = find_target(raw, "m.py", "f")
    with pytest.raises(TargetUnsupported, match="several statements on a line"):
        compose(raw, target, code_for([CodeRegion(1, 0, 0, 1, 1, ("x",), ("y",))]))


def test_random_runs_of_random_bodies_round_trip() -> None:
    generator = random.Random(7)
    for _ in range(60):
        lines = []
        for number in range(generator.randrange(2, 7)):
            kind = generator.randrange(4)
            if kind == 0:
                lines += [f"    a{number} = x + {number}  # note"]
            elif kind == 1:
                lines += [f"    a{number} = (x", "# odd", f"      + {number})"]
            elif kind == 2:
                lines += [f'    a{number} = """t', "    text", '"""', ""]
            else:
                lines += ["    if x:", f"        a{number} = x", "", "    else:", f"        a{number} = -x"]
        text = "def f(x):\n" + "\n".join([*lines, "    return x"]) + "\n"
        body = function_at(text, "f", 1).body
        first = generator.randrange(len(body))
        composed(text, (first, generator.randrange(first + 1, len(body) + 1)))
