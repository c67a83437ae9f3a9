"""Complete runs of `mtmc` in a user project with a scripted endpoint."""

from __future__ import annotations

import re
import shutil
import sqlite3
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from answers import KERNEL, SOURCE, body, editable_text, good
from endpoint import Endpoint

from mtmc_lsp.app.backends import BUILTIN, Backends
from mtmc_lsp.app.target_file import OpenTarget, Request
from mtmc_lsp.commands.consent import limit_to_consent
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.core.workload import Target, TargetKind

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cli"))
from runner import Answer, mtmc

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def project(folder: Path) -> Path:
    (folder / "pyproject.toml").write_text("[project]\nname = 'user'\n[tool.mtmc.llm]\nretries = 0\n")
    (folder / "model.py").write_text(SOURCE)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return project(tmp_path)


def optimised(folder: Path, endpoint: Endpoint, *arguments: str, **variables: str) -> Answer:
    with endpoint.serving() as environ:
        options = ("--arch", "sm_90", "--json", *(arguments or ("--coder", "llm")))
        return mtmc(folder, "optimize", "model.py::ranks", *options, **{**NO_GPU, **environ, **variables})


@dataclass(frozen=True)
class Whole:
    """A run with a model as planner and coder: rejected because of its key, resumed with a valid key, applied to the file."""

    folder: Path
    refused: Answer
    resumed: Answer
    endpoint: Endpoint


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = project(tmp_path_factory.mktemp("whole"))
    versions = ["no code"]

    def answer(request: dict[str, Any]) -> str:
        if "You write Triton" in request["messages"][0]["content"]:
            return versions.pop() if versions else good(request)
        number = re.search(r"^(\d+)\. Write ", str(request["messages"][1]["content"]), re.MULTILINE)
        return f'{{"action": {number[1] if number else 0}, "reason": "sorting stays in registers"}}'

    endpoint = Endpoint(answer)
    backends = ("--coder", "llm", "--planner", "llm")
    refused = optimised(folder, endpoint, *backends, OPENAI_API_KEY="bad")
    return Whole(folder, refused, optimised(folder, endpoint, *backends, "--resume", "--apply"), endpoint)


def test_a_run_with_a_rejected_key_can_be_resumed(whole: Whole) -> None:
    assert (whole.refused.code, whole.refused.error["code"]) == (3, "model-not-usable")
    assert whole.resumed.code == 0, whole.resumed.err
    asked = whole.resumed.document["model_use"]["requests"]
    assert asked == len(whole.endpoint.requests) + 1, "what was refused was asked too"


def test_the_model_plans_and_writes_what_the_built_in_coder_cannot(whole: Whole) -> None:
    document = whole.resumed.document
    assert document["status"] == "unmeasured"
    step = document["steps"][0]
    assert step["status"] == "accepted", step["reason"]
    assert "The model: sorting stays in registers" in step["action"]["rationale"]
    assert [(k["kernel"], k["arch"]) for k in step["report"]["kernels"]] == [("ranks_kernel", "sm_90")]
    text = (whole.folder / "model.py").read_text()
    assert KERNEL in text
    assert "def ranks_launch(x, ranks_kernel=_DirectLaunches(ranks_kernel)):" in text
    assert "wrap_triton(ranks_kernel)" in text
    assert SOURCE[SOURCE.index("    s = ") :] in text
    rows = sqlite3.connect(whole.folder / ".mtmc" / "store.db").execute(
        "select run, step from exchanges order by number"
    )
    assert rows.fetchall()[:4] == [(document["id"], 1)] * 4, "a refused plan, a plan, no code, and the kernel"


def test_a_run_is_replayed_without_network_or_key(whole: Whole) -> None:
    first, file = whole.resumed.document, whole.folder / "model.py"
    again = mtmc(whole.folder, "optimize", "--replay", first["id"], "--json", **NO_GPU)
    assert again.code == 0, again.err
    for name in ("reason", "diff", "status", "action"):
        assert [step[name] for step in again.document["steps"]] == [step[name] for step in first["steps"]]
    assert again.document["final"]["source"] == first["final"]["source"] == file.read_text()
    assert again.document["model_use"] == {
        **{"model": "tiny", "requests": 0, "prompt_tokens": 0, "answer_tokens": 0, "cost": None, "counted": True},
        "replay_of": first["id"],
    }
    unknown = mtmc(whole.folder, "optimize", "--replay", "nothing", "--json")
    assert (unknown.code, unknown.error["message"]) == (2, "there is no run 'nothing'")


def test_a_run_of_another_file_is_not_replayed(whole: Whole, tmp_path: Path) -> None:
    shutil.copytree(whole.folder, tmp_path / "copy")
    with sqlite3.connect(tmp_path / "copy" / ".mtmc" / "store.db") as store:
        store.execute("update runs set path = ?", (str(tmp_path / "copy" / "model.py"),))
    (tmp_path / "copy" / "model.py").write_text(SOURCE.replace("* 2", "* 3"))
    run = whole.resumed.document["id"]
    changed = mtmc(tmp_path / "copy", "optimize", "--replay", run, "--json", **NO_GPU)
    assert (changed.code, changed.error["code"]) == (2, "file-changed")
    assert "Put the file back" in changed.error["remedy"]


def instead(old: str, new: str):
    """The correct answer with a change that violates no rule."""

    def answer(request: dict[str, Any]) -> str:
        assert old in good(request)
        return good(request).replace(old, new)

    return answer


STORED = "tl.cumsum(s, 0) * 2, mask"
REPAIRED = [
    ("contains no code", lambda request: "def f(): pass"),
    (
        "There is no line 'return nothing'",
        lambda request: good(request).replace(body(editable_text(request)), "    return nothing\n"),
    ),
    ("bitonic_merge_sort", instead("tl.sort(tl.where", "tl.bitonic_merge_sort(tl.where")),
    ("values", instead("tl.maximum(s, 0.0)", "tl.maximum(s, 1.0)")),
    ("values", instead(STORED, "(tl.cumsum(s, 0) * 2).to(tl.float16), mask")),
    ("values", instead("mask = cols < n_cols", "mask = cols < 40")),
    ("values", instead("tl.store(out_ptr + row * n_cols + cols", "tl.store(out_ptr + cols")),
    ("values", instead("ranks_kernel[(n_rows,)](x, out,", "ranks_kernel[(n_rows,)](x, torch.empty_like(x),")),
    ("shares memory with", instead("ranks_kernel[(n_rows,)](x, out,", "out = x\n    ranks_kernel[(n_rows,)](x, x,")),
]
"""Answers that fail in different checks, with a part of the repair message."""


def test_failures_are_repaired_with_their_error_message(folder: Path) -> None:
    settings = folder / "pyproject.toml"
    settings.write_text(settings.read_text() + f"repairs = {len(REPAIRED)}\n")
    endpoint = Endpoint(*(answer for _, answer in REPAIRED), good)
    run = optimised(folder, endpoint)
    assert run.code == 0, run.err
    step = run.document["steps"][0]
    assert step["status"] == "accepted"
    assert KERNEL in step["candidate"]["source"], "none of the wrong ones"
    told = [str(request["messages"][-1]["content"]) for request in endpoint.requests[1:]]
    assert len(told) == len(REPAIRED)
    for (word, _), message in zip(REPAIRED, told, strict=True):
        assert word in message


def test_consent_comes_from_the_command_line_but_not_from_settings(folder: Path, monkeypatch, capsys) -> None:
    host = {
        "OPENAI_BASE_URL": "http://model.example:8000/v1",
        "MTMC_LLM_MODEL": "m",
        "XDG_STATE_HOME": str(folder / "s"),
    }
    for name, value in host.items():
        monkeypatch.setenv(name, value)
    target = Target(str(folder / "model.py"), "ranks", TargetKind.FUNCTION, 5, 7)
    opened = OpenTarget(Request(folder / "model.py", "ranks", Settings(), sys.executable), b"", target)
    for backends in (Backends("llm"), Backends(coder="llm"), Backends(coder="auto")):
        assert limit_to_consent(opened, backends, explicit=False, may_ask=True) == BUILTIN
        assert "you have not agreed to it" in capsys.readouterr().err
        assert limit_to_consent(opened, backends, explicit=True, may_ask=True) == backends
    asked = mtmc(folder, "consent", **host)
    assert "nothing of" in asked.out
    assert "to the language model m at model.example:8000?" in asked.out
    assert mtmc(folder, "consent", "--give", "--json", **host).document["hosts"] == ["model.example:8000"]
    assert limit_to_consent(opened, Backends(coder="auto"), explicit=False, may_ask=False) == Backends(coder="auto")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://elsewhere.example/v1")
    assert limit_to_consent(opened, Backends(coder="auto"), explicit=False, may_ask=False) == BUILTIN, (
        "another host is asked anew"
    )
    assert mtmc(folder, "consent", "--withdraw", "--json", **host).document["hosts"] == []


def test_a_dry_run_shows_the_questions_and_sends_nothing(folder: Path) -> None:
    endpoint = Endpoint(good)
    run = optimised(folder, endpoint, "--coder", "llm", "--planner", "llm", "--dry-run")
    assert run.code == 0, run.err
    assert not endpoint.requests
    questions = run.document["questions"]
    assert [question["purpose"] for question in questions] == ["plan", "code"]
    shown = "\n".join(message["content"] for question in questions for message in question["messages"])
    assert "def ranks(x):" in shown
    assert str(folder) not in shown
