"""The checks of generated guards are not mistaken for attempts to deceive, and nothing else passes for them."""

from __future__ import annotations

import pytest

from mtmc_lsp.codegen.module.direct_launches import DIRECT_LAUNCHES
from mtmc_lsp.codegen.module.guard_helpers import GUARD_HELPERS, HAVE_NUMBER_TYPES
from mtmc_lsp.codegen.module.up_to_date import write_check
from mtmc_lsp.core.dependencies import Dependency, DependencyKind
from mtmc_lsp.core.results import CheckStatus
from mtmc_lsp.verify.generated_helpers import without_generated_checks
from mtmc_lsp.verify.source_scan import scan

DEPENDENCIES = (
    Dependency("K", DependencyKind.VALUE, value="3", type="int", access="K"),
    Dependency("helper", DependencyKind.CODE, digest="0123", access="helper"),
    Dependency("MODE", DependencyKind.ENVIRONMENT, value="fast", type="str", access="MODE"),
)


def failed(text: str) -> list[str]:
    return [check.detail for check in scan(text, "model.py") if check.status is CheckStatus.FAILED]


def test_the_check_that_a_guard_makes_of_its_dependencies_passes_the_scan() -> None:
    text = write_check("f_up_to_date", DEPENDENCIES)
    assert "inspect" in text and "except" in text
    assert failed(f"import torch\n\n\n{text}") == []


@pytest.mark.parametrize(
    "change", [("K == 3", "K == 3 and spoil()"), ("import os", "import inspect"), ("_has_source(helper", "exec(helper")]
)
def test_a_check_that_does_anything_else_is_scanned_like_all_code(change: tuple[str, str]) -> None:
    text = write_check("f_up_to_date", DEPENDENCIES)
    assert change[0] in text
    assert failed(f"import torch\n\n\n{text.replace(*change)}")


def test_the_helper_of_launches_passes_the_scan_and_a_changed_one_does_not() -> None:
    text = f"import torch\nimport triton\n\n\n{DIRECT_LAUNCHES}"
    assert "return eval(" in text
    assert failed(text) == []
    assert "calls eval" in failed(text.replace(" or not all(map(str.isidentifier, given))", ""))[0]
    assert "calls eval" in failed(f"{text}\n\neval('1')\n")[0]


NUMBERS = GUARD_HELPERS[HAVE_NUMBER_TYPES]
CHECK = f"import math\nimport torch\n\n\n{NUMBERS}\n\ndef f_fits(a, b):\n    return {HAVE_NUMBER_TYPES}(lambda: (a / b,), float)\n"


def test_imports_of_user_modules_in_a_check_stay_in_the_scanned_text() -> None:
    """Also two of them in one line, and those in a handler, which no generated check has."""
    check = "def f_up_to_date():\n    try:\n        import one; import two\n        return True\n    except KeyError:\n        return False\n"
    assert "import one; import two" in without_generated_checks(check)
    other = check.replace("        return False", "        import three\n        return False")
    assert without_generated_checks(other) == other


def test_the_check_that_python_can_compute_numbers_passes_the_scan() -> None:
    assert "except" in CHECK
    assert failed(CHECK) == []
    assert failed(CHECK.replace("a / b", "math.sqrt(1 - options['b'] ** -step)")) == []


@pytest.mark.parametrize(
    "change",
    [
        ("a / b", "run(a)"),
        ("a / b", "math.factorial(9)"),
        ("a / b", "[x for x in a]"),
        (f"{HAVE_NUMBER_TYPES}(lambda: (a / b,), float)", f"{HAVE_NUMBER_TYPES}(run, float)"),
        (f"return {HAVE_NUMBER_TYPES}(lambda: (a / b,), float)", f"attempt = {HAVE_NUMBER_TYPES}; return attempt(run)"),
        ("except (ArithmeticError, ValueError)", "except Exception"),
    ],
)
def test_an_attempt_at_anything_but_arithmetic_is_scanned_like_all_code(change: tuple[str, str]) -> None:
    assert change[0] in CHECK
    assert failed(CHECK.replace(*change))
