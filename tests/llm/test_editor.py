"""A model in the editor over stdio: consent, steps and remarks of the user."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from endpoint import Endpoint
from lsprotocol import types as lsp
from targets import TARGETS, TOP, Target
from test_model_targets import before

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "server"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cli"))
from editor import REAL, Editor, editor, position
from runner import mtmc

from mtmc_lsp.search.store import Store

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]
SERVER = [sys.executable, str(Path(__file__).with_name("llm_server.py"))]
SETTINGS = {"coder": "llm", "archs": ["sm_90"], "maxSteps": 1}


def scripted(target: Target) -> Endpoint:
    def answer(request: dict[str, Any]) -> str:
        if "You write Triton" in request["messages"][0]["content"]:
            return target.answer(request)
        return '{"action": 1, "reason": "it is all of the time"}'

    return Endpoint(answer)


async def run(ide: Editor, target: Target) -> str:
    """Open and optimise the target's file. Returns the final message."""
    uri = ide.open(target.source)
    job = await ide.command("optimize", uri, target.name)
    return (await ide.until(lambda: ide._end_of(job["job"]), 200)).message


async def hover(ide: Editor, text: str) -> str:
    uri = ide.uri()
    cursor = position(ide.texts[uri], ide.texts[uri].index(text))
    result = await ide.client.text_document_hover_async(lsp.HoverParams(lsp.TextDocumentIdentifier(uri), cursor))
    assert result is not None
    return result.contents.value


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "pyproject.toml").write_text("[tool.mtmc.llm]\nretries = 0\n")
    return tmp_path / "user"


async def test_nothing_is_sent_before_consent_and_the_user_is_asked_once(folder: Path, monkeypatch) -> None:
    endpoint = scripted(TOP)
    with endpoint.serving() as environ:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        async with editor(folder, SERVER, settings=SETTINGS) as ide:
            ide.answers = ["Not now"]
            await run(ide, TOP)
            (question,) = ide.questions
            assert environ["OPENAI_BASE_URL"].split("/")[2] in question.message
            assert "Sent are the optimised function" in question.message
            assert [action.title for action in question.actions] == ["Allow", "Not now"]
            await ide.command("optimize", ide.uri(), TOP.name)
            await ide.command("cancel")
            assert len(ide.questions) == 1, "a no holds for the session"
        assert not endpoint.requests
        monkeypatch.delenv("OPENAI_BASE_URL")
        monkeypatch.delenv("OPENAI_API_KEY")
        async with editor(folder, SERVER, settings=SETTINGS) as ide:
            uri = ide.open(TOP.source)
            await ide.command("optimize", uri, TOP.name)
            await ide.command("cancel")
            assert not ide.questions
            assert "OPENAI_BASE_URL is not set" in ide.client.messages[0].message


async def test_a_models_step_is_kept_hovered_and_tried_again_with_a_remark(folder: Path, monkeypatch, captured) -> None:
    endpoint = scripted(TOP)
    with endpoint.serving() as environ:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        async with editor(folder, SERVER, settings={**SETTINGS, "planner": "llm", "llmSamples": 2}) as ide:
            ide.answers = ["Allow"]
            assert "unmeasured" in await run(ide, TOP)
            assert len(endpoint.requests) == 3, "one for the choice, and two versions at once"
            assert await ide.command("keepAll", ide.uri(), TOP.name) is True
            assert ide.texts[ide.uri()] == TOP.by_hand(before(captured(TOP.source, TOP.name), TOP.source))
            told = await hover(ide, "def top(x)")
            assert "The model: it is all of the time Written by a language model." in told
            assert "tiny: 3 requests" in told
            (review,) = await ide.client.protocol.send_request_async("mtmc/reviews", {"uri": ide.uri()})
            assert review["run"]["model"] == "tiny", "a client asks for a remark where there is someone to read it"
            remark = "make it readable"
            job = await ide.command("tryAnother", ide.uri(), TOP.name, step=1, remark=remark)
            await ide.until(lambda: ide._end_of(job["job"]), 200)
            prompt = endpoint.prompt(3)
            assert f"# The user's request for this step\n{remark}" in prompt
            assert f"# The earlier edit that the user rejected\n<<<<<<< SEARCH\n=======\n{TOP.kernel}" in prompt
            (review,) = await ide.client.protocol.send_request_async("mtmc/reviews", {"uri": ide.uri()})
            assert f"you asked for another: {remark}" in [step["reason"] for step in review["run"]["steps"]]
            assert len(ide.questions) == 1
        with Store(folder / ".mtmc") as store:
            newest = store.runs()[0].id
            wanted = store.result(newest)
        assert wanted is not None
        assert endpoint.requests[3:], "another version was asked for"
        async with editor(folder, SERVER, settings=SETTINGS) as ide:
            uri = ide.open(TOP.source)
            await ide.command("optimize", uri, TOP.name)
            await ide.command("cancel")
            assert not ide.questions, "a yes is stored"
    for name in environ:
        monkeypatch.delenv(name)
    again = mtmc(folder, "optimize", "--replay", newest, "--json", CUDA_VISIBLE_DEVICES="")
    assert again.code in (0, 1), again.err
    assert again.document["final"]["source"] == wanted.final.source
    told = [(step["action"]["text"], step["status"]) for step in again.document["steps"]]
    assert told == [(step.action.text, step.status.value) for step in wanted.steps]
    assert told[-1][0].endswith(f", and {remark}")
    assert again.document["model_use"]["replay_of"] == newest


@pytest.mark.timeout(600)
async def test_real_runs_in_the_editor_match_manual_edits(folder: Path, monkeypatch, captured) -> None:
    """Only the model is fake: each target is captured, written, compiled, verified by the interpreter, and kept."""

    def answer(request: dict[str, Any]) -> str:
        asked = str(request["messages"][1]["content"])
        return next(target for target in TARGETS if f"def {target.name}(" in asked).answer(request)

    with Endpoint(answer).serving() as environ:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        async with editor(folder, REAL, settings=SETTINGS) as ide:
            ide.answers = ["Allow"]
            uris = {target: ide.open(target.source, f"{target.name}.py") for target in TARGETS}
            jobs = {target: await ide.command("optimize", uri, target.name) for target, uri in uris.items()}
            for target, uri in uris.items():
                end = await ide.until(partial(ide._end_of, jobs[target]["job"]), 250)
                assert "verified by Triton's interpreter" in end.message
                assert await ide.command("keepAll", uri, target.name) is True
                assert ide.texts[uri] == target.by_hand(before(captured(target.source, target.name), target.source))
