"""What the command line answers to every mistake: exit code, one JSON document, a place and a remedy."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from runner import COMMAND, MODEL, environment, mtmc, project

LINES = MODEL.splitlines()


def line_of(text: str) -> int:
    return LINES.index(text) + 1


MISTAKES = [
    # arguments, exit code, error code, words of the message, line
    (["optimize", "model.py"], 2, "request", "model.py has 13 targets: two, picked", 0),
    (["optimize", "absent.py"], 2, "request", "no such file", 0),
    (["optimize", "model.py::two", "--all"], 2, "request", "--all needs a file", 0),
    (["apply"], 2, "request", "there is no run", 0),
    (["apply", "abc123"], 2, "request", "there is no run 'abc123'", 0),
    (["optimize"], 2, "request", "no target is named", 0),
    (["optimize", "absent.py::f"], 2, "request", "no such file", 0),
    (["optimize", "model.py::nope"], 2, "no-such-target", "'nope'", 0),
    (["optimize", "model.py::broken"], 2, "syntax-error", "does not parse", line_of("    return x +")),
    (["optimize", "model.py::no_workload"], 2, "no-workload", "no_workload", line_of("def no_workload(x):")),
    (["optimize", "model.py::no_size"], 2, "request", "n_rows", line_of("# mtmc: x=f32[8,n_rows]")),
    (["optimize", "model.py::two", "--planner", "policy"], 2, "request", "--planner policy", 0),
    (["optimize", "model.py::two", "--coder", "human"], 2, "request", "--coder human", 0),
    (["optimize", "model.py::two", "--search", "random"], 2, "request", "--search random", 0),
    (["optimize", "model.py::two", "--budget", "soon"], 2, "request", "--budget", 0),
    (["optimize", "model.py::two", "--budget", "0"], 2, "request", "budget_seconds", 0),
    (["optimize", "model.py::two", "--arch", "pentium"], 2, "request", "'pentium' is not an architecture", 0),
    (["optimize", "model.py::two", "--python", "/no/python"], 3, "environment", "/no/python", 0),
    (["optimize", "model.py::two", "--no-such-option"], 2, "request", "--no-such-option", 0),
    (["optimize", "model.py::two", "--resume"], 2, "request", "no unfinished run", 0),
    (["optimize", "abc123", "--resume"], 2, "request", "no run abc123", 0),
    (["evolve", "model.py::nope"], 2, "no-such-target", "'nope'", 0),
    (["evolve", "model.py::no_workload"], 2, "no-workload", "no_workload", line_of("def no_workload(x):")),
    (["evolve", "model.py::two", "--islands", "0"], 2, "request", "--islands", 0),
    (["evolve", "abc123", "--resume"], 2, "request", "no unfinished evolution that begins with 'abc123'", 0),
    (["lineage", "abc123"], 2, "request", "there is no evolution 'abc123'", 0),
    (["plan", "model.py::nope"], 2, "no-such-target", "'nope'", 0),
    (["export", "abc123"], 2, "request", "no finished run 'abc123'", 0),
    (["export", "abc123", "--format", "zip"], 2, "request", "--format zip", 0),
    (["no-such-command"], 2, "request", "no-such-command", 0),
]


@pytest.mark.parametrize(
    ("arguments", "code", "kind", "words", "line"), MISTAKES, ids=lambda v: " ".join(v) if isinstance(v, list) else ""
)
def test_a_mistake_is_one_document_with_code_place_and_remedy(
    arguments: list[str], code: int, kind: str, words: str, line: int, tmp_path: Path
) -> None:
    file = project(tmp_path)
    answer = mtmc(tmp_path, *arguments, "--json")
    assert answer.code == code, answer.err
    assert answer.document["schema"] == 1
    assert answer.error["code"] == kind
    assert words in answer.error["message"]
    assert answer.error["remedy"]
    if line:
        assert (answer.error["path"], answer.error["line"]) == (str(file), line)
        assert f"{file.name}:{line}: " in answer.err
    assert file.read_text() == MODEL


def test_without_json_a_mistake_is_told_on_standard_error_only(tmp_path: Path) -> None:
    file = project(tmp_path)
    answer = mtmc(tmp_path, "optimize", "model.py::broken")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == (
        f"error: {file.name}:{line_of('    return x +')}: broken does not parse\n  Correct the syntax error first.\n"
    )


WRONG_TARGETS = [
    ("raises", 2, "target-raises", "boom", line_of('    raise ValueError("boom")')),
    ("branches", 2, "unsupported", "values of a tensor", line_of("    if x.sum() > 0:")),
    ("nothing", 2, "unsupported", "has no tensor operations", line_of("def nothing(x):")),
    ("chance", 2, "unsupported", "different results", line_of("def chance(x):")),
    ("remembers", 2, "unsupported", "different results", line_of("def remembers(x):")),
    ("misfits", 2, "target-raises", "raises RuntimeError", line_of("    return y @ x[:3]")),
    ("huge", 3, "out-of-memory", "memory", 0),
]


@pytest.mark.parametrize(
    ("name", "code", "kind", "words", "line"), WRONG_TARGETS, ids=[row[0] for row in WRONG_TARGETS]
)
def test_a_target_that_cannot_be_captured_says_where_and_what_to_do(
    name: str, code: int, kind: str, words: str, line: int, tmp_path: Path
) -> None:
    # The file must import, so the syntax error at its end is left out.
    file = project(tmp_path, MODEL[: MODEL.index("def broken")])
    answer = mtmc(tmp_path, "optimize", f"model.py::{name}", "--json")
    assert (answer.code, answer.error["code"]) == (code, kind), answer.err
    assert words in answer.error["message"]
    assert answer.error["remedy"]
    assert answer.error["path"] == str(file)
    if line:
        # The place is the statement, or the definition that holds it.
        assert abs(answer.error["line"] - line) <= 1


def test_an_interpreter_without_torch_is_named_with_the_command_that_installs_it(tmp_path: Path) -> None:
    project(tmp_path)
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    answer = mtmc(tmp_path, "optimize", "model.py::two", "--python", str(bare / "bin" / "python"), "--json")
    assert (answer.code, answer.error["code"]) == (3, "environment")
    assert f"{bare}/bin/python -m pip install 'torch>=" in answer.error["remedy"]


def test_the_projects_own_environment_is_found_and_checked(tmp_path: Path) -> None:
    project(tmp_path)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / ".venv")], check=True)
    answer = mtmc(tmp_path, "optimize", "model.py::two", "--json")
    assert f"{tmp_path}/.venv/bin/python does not have torch" in answer.error["message"]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("precission = 'strict'", "unknown setting 'precission'"),
        ("precision = 'loose'", "'loose' is neither budget nor strict"),
        ("archs = 'sm_90'", "archs in [tool.mtmc] cannot be 'sm_90'"),
        ("max-steps = 0", "max_steps"),
        ("budget_seconds = true", "budget_seconds in [tool.mtmc] cannot be True"),
    ],
)
def test_a_wrong_setting_is_told_with_file_line_and_what_is_allowed(setting: str, words: str, tmp_path: Path) -> None:
    project(tmp_path, settings=f"[tool.mtmc]\n{setting}\n")
    answer = mtmc(tmp_path, "optimize", "model.py::two", "--json")
    assert (answer.code, answer.error["code"]) == (2, "request")
    assert words in answer.error["message"]
    assert (answer.error["path"], answer.error["line"]) == (str(tmp_path / "pyproject.toml"), 4)
    assert answer.error["remedy"]


def test_settings_that_are_no_toml_are_told(tmp_path: Path) -> None:
    project(tmp_path, settings="[tool.mtmc\n")
    assert "cannot be read" in mtmc(tmp_path, "optimize", "model.py::two", "--json").error["message"]


def test_a_file_that_is_not_utf_8_is_named_with_the_line(tmp_path: Path) -> None:
    file = project(tmp_path)
    file.write_bytes(b"import torch\n# caf\xe9\n")
    answer = mtmc(tmp_path, "optimize", "model.py::two", "--json")
    assert (answer.code, answer.error["line"]) == (2, 2)


def test_help_takes_less_than_300_ms_of_processor_time() -> None:
    def spent() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*COMMAND, "--help"], env=environment(), capture_output=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # Beside other tests, which share a core's caches and units, each run takes longer by chance.
    assert any(spent() < 0.3 for _ in range(12))


@pytest.mark.parametrize(
    "arguments", [["runs"], ["plan", "model.py::two"], ["optimize", "model.py::nope"]], ids=" ".join
)
def test_the_command_line_never_imports_torch_or_triton(arguments: list[str], tmp_path: Path) -> None:
    """A hook refuses them in our process; the worker is a process of its own and may import them."""
    project(tmp_path, MODEL[: MODEL.index("def broken")])
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        assert name not in ('torch', 'triton', 'numpy'), f'{name} is imported'\n"
        "sys.meta_path.insert(0, Refuse())\n"
        f"sys.argv = ['mtmc', *{arguments!r}]\n"
        "from mtmc_lsp.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert "is imported" not in done.stderr
    assert done.returncode == (2 if "model.py::nope" in arguments else 0), done.stderr
