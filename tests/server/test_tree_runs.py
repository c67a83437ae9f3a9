"""A run of a search with branches in the editor: steps that join and leave the fastest path, and the tree of trials."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from editor import Editor, editor

pytestmark = pytest.mark.asyncio

MODEL = """\
# fake f: better nap-first slower
import torch


def f(x):
    return torch.relu(x) + 1
"""
OPTIONS = {"trusted": True, "runState": True}
BEAM = {"search": "beam", "maxSteps": 5}


async def ended(ide: Editor) -> Any:
    return await ide.until(lambda: next((state for state in ide.states if state.state == "done"), None))


def statuses(run: Any) -> list[str]:
    return ["alternative" if step.is_alternative else step.status for step in run.steps]


async def test_the_view_gets_each_step_with_its_parent_and_the_path_that_is_delivered(tmp_path: Path) -> None:
    async with editor(tmp_path, options=OPTIONS, settings=BEAM) as ide:
        uri = ide.open(MODEL)
        result = await ide.optimized(uri, "f")
        assert "improved: 2.50x" in result
        run = (await ended(ide)).run
        # Nothing is faster after the first action. On the user's code the second one is, and the first faster still on top of it.
        assert [step.parent for step in run.steps] == [0, 1, 1, 0, 4]
        assert statuses(run) == ["alternative", "rejected", "rejected", "accepted", "accepted"]
        assert run.steps[0].reason.startswith("another branch is faster: 1.25x the speed of your code")
        assert all(0 < step.prior <= 1 for step in run.steps)
        seen = [statuses(state.run) for state in ide.states if state.state == "running" and state.run]
        assert ["accepted"] in seen, "the first step was offered until another branch was faster"
        assert ["alternative", "rejected", "rejected", "accepted"] in seen


async def test_the_accepted_steps_are_kept_one_after_the_other_and_undone(tmp_path: Path) -> None:
    async with editor(tmp_path, options=OPTIONS, settings=BEAM) as ide:
        uri = ide.open(MODEL)
        await ide.optimized(uri, "f")
        await ended(ide)
        assert await ide.command("keep", uri, "f") is True
        assert "# action 2" in ide.texts[uri] and "# action 1" not in ide.texts[uri]
        assert await ide.command("keep", uri, "f") is True
        assert "# action 2" in ide.texts[uri] and "# action 1" in ide.texts[uri]
        assert await ide.command("undoAll", uri, "f") is True
        assert ide.texts[uri] == MODEL


async def test_a_step_that_was_kept_before_another_branch_was_faster_is_replaced_by_it(tmp_path: Path) -> None:
    async with editor(tmp_path, options=OPTIONS, settings=BEAM) as ide:
        uri = ide.open(MODEL)
        await ide.command("optimize", uri, "f")
        await ide.until(lambda: any(state.run and statuses(state.run) == ["accepted"] for state in ide.states))
        assert await ide.command("keep", uri, "f") is True
        assert "# action 1" in ide.texts[uri]
        await ended(ide)
        assert await ide.command("keepAll", uri, "f") is True
        kernel = ide.texts[uri][ide.texts[uri].index("def f_kernel") :]
        assert kernel.index("# action 2") < kernel.index("# action 1")
        await ide.command("undoAll", uri, "f")
        assert ide.texts[uri] == MODEL


async def test_a_step_of_the_path_is_taken_out_and_the_later_one_is_written_again(tmp_path: Path) -> None:
    async with editor(tmp_path, options=OPTIONS, settings=BEAM) as ide:
        uri = ide.open(MODEL)
        await ide.optimized(uri, "f")
        await ended(ide)
        await ide.command("keepAll", uri, "f")
        await ide.command("undo", uri, "f", step=4)
        await ide.until(lambda: "# action 2" not in ide.texts[uri])
        assert "# action 1" in ide.texts[uri]


async def test_another_step_is_found_on_the_version_before_or_on_another_branch(tmp_path: Path) -> None:
    async with editor(tmp_path, options=OPTIONS, settings=BEAM) as ide:
        uri = ide.open(MODEL)
        await ide.optimized(uri, "f")
        first = (await ended(ide)).run
        job = await ide.command("tryAnother", uri, "f", step=4)
        await ide.finished(job["job"])
        run = (
            await ide.until(lambda: next((s for s in ide.states if s.job == job["job"] and s.state == "done"), None))
        ).run
        assert run.run != first.run
        assert (run.steps[3].status, run.steps[3].reason) == ("rejected", "you asked for another")
        accepted = [step for step in run.steps if step.status == "accepted"]
        assert accepted and all(step.action.text != run.steps[3].action.text for step in accepted)
        assert run.steps[0].status == "accepted", "the branch that was slower before"
        assert ide.texts[uri] == MODEL


async def test_a_stopped_run_goes_on_with_its_search_and_its_trials(tmp_path: Path) -> None:
    # The verification of a nap takes two seconds, and the run is stopped during the second one.
    async with editor(tmp_path, options=OPTIONS, settings=BEAM) as ide:
        uri = ide.open(MODEL)
        job = (await ide.command("optimize", uri, "f"))["job"]
        await ide.until(lambda: any(state.run and len(state.run.steps) == 3 for state in ide.states))
        await ide.command("cancel")
        assert await ide.finished(job) == "cancelled"
    # The settings changed since.
    async with editor(tmp_path, options=OPTIONS, settings={"maxSteps": 5}) as ide:
        uri = ide.open(MODEL)
        await ide.until_async(lambda: _can_go_on(ide, uri))
        job = (await ide.command("resume", uri, "f"))["job"]
        await ide.finished(job)
        run = (await ended(ide)).run
        assert statuses(run) == ["alternative", "rejected", "rejected", "accepted", "accepted"]
        assert all(step.prior is not None for step in run.steps)
        stages = ide.stages(job)
        assert any(stage.startswith("step 5") for stage in stages)
        assert not any(stage.startswith(("step 1", "step 2")) for stage in stages), "nothing is measured again"


async def _can_go_on(ide: Editor, uri: str) -> bool:
    return "Go on with the run" in await ide.lenses(uri)


async def test_the_report_has_a_picture_of_the_tree(tmp_path: Path) -> None:
    async with editor(tmp_path, options=OPTIONS, settings=BEAM) as ide:
        uri = ide.open(MODEL)
        await ide.optimized(uri, "f")
        await ended(ide)
        report = await ide.client.protocol.send_request_async("mtmc/report", {"uri": uri, "target": "f"})
        assert '<ul class="tree">' in report.body
        assert (
            '<li class="alternative"><span class="edge">1.25x</span> <span class="node">1. action 1</span>'
            in report.body
        )
