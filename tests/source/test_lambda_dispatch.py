"""Kernels of a lambda expression: its dispatch, the user's text in it, and the removal."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.errors import TargetUnsupported
from mtmc_lsp.core.run import GeneratedCode
from mtmc_lsp.guard.worker.observed_calls import guards_of
from mtmc_lsp.source.compose import compose, strip_generated
from mtmc_lsp.source.target_text import target_source
from mtmc_lsp.source.targets import find_target, find_targets

BLOCK = "def act_fits(x):\n    return x > 0\n\n\ndef act_launch(x):\n    return 100 * x\n"
DISPATCH = "if act_fits(x):\n    return act_launch(x)\n"
LONG = ", ".join(f"an_argument_with_a_long_name_{i}" for i in range(6))

TEXTS = [
    "act = lambda x: x + 1\n",
    "act = lambda x: x + 1  # a comment\nother = 3\n",
    "act = lambda x: x + 1 if x < -5 else x - 1\n",
    "act = lambda x, y=2: (\n    # the user's comment\n    x + y\n)\n\n\nvalue = 2\n",
    "if True:\n    act = lambda x: (x +\n        1)\n",
    "act = lambda x: x + 1",
    "act = lambda x: x + 1\r\nother = 3\r\n",
    "act: object = lambda x: max(\n    x,\n    1,\n)\n",
]


def composed(text: str, dispatch: str = DISPATCH, block: str = BLOCK) -> str:
    target = find_target(text.encode(), "m.py", "act")
    return compose(text.encode(), target, GeneratedCode((), block, dispatch)).decode()


@pytest.mark.parametrize("text", TEXTS)
def test_the_expression_runs_where_the_guard_refuses_and_kernels_run_elsewhere(text: str) -> None:
    names: dict[str, object] = {}
    plain: dict[str, object] = {}
    exec(composed(text), names)
    exec(text, plain)
    assert [names["act"](value) for value in (1, 7)] == [100, 700]
    assert [names["act"](value) for value in (-9, -1)] == [plain["act"](value) for value in (-9, -1)]


@pytest.mark.parametrize("text", TEXTS)
def test_each_byte_of_the_file_is_restored(text: str) -> None:
    changed = composed(text)
    assert changed != text
    assert strip_generated(changed.encode(), "act") == text.encode()
    assert [target.qualname for target in find_targets(changed.encode(), "m.py")][:1] == ["act"]
    assert target_source(changed.encode(), "act") == target_source(text.encode(), "act") is not None
    assert guards_of(changed, "act") == ("act_fits",)


def test_no_line_of_the_dispatch_is_longer_than_120_characters() -> None:
    text = f"act = lambda {LONG}: 1\n"
    dispatch = f"if act_fits({LONG}):\n    return (act_launch if True else act_launch)({LONG})\n"
    changed = composed(text, dispatch, BLOCK.replace("(x)", "(*x)"))
    dispatch_lines = changed.splitlines()[1 : changed.splitlines().index(")") + 1]
    assert max(map(len, dispatch_lines)) <= 120
    assert strip_generated(changed.encode(), "act") == text.encode()


def test_a_result_that_needs_a_statement_is_refused_with_the_remedy() -> None:
    dispatch = "if act_fits(x):\n    act_results = act_launch(x)\n    return {'a': act_results[0]}\n"
    with pytest.raises(TargetUnsupported) as caught:
        composed("act = lambda x: {'a': x}\n", dispatch)
    assert "act is a lambda expression with a nested result" in caught.value.message
    assert "with def" in caught.value.remedy
