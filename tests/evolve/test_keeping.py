"""From the lineage to steps of a run: written again, verified as a whole, and taken back like the steps of any run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from accepting import H200, Runner
from answers import KERNEL, LAUNCH, SOURCE, body, hunk
from searching import AgreeingMeasurer

from mtmc_lsp.app.pipeline import Pipeline
from mtmc_lsp.app.revisions.recompose import without_step
from mtmc_lsp.app.target_file import apply_result, open_target, parse_request
from mtmc_lsp.capture.client import find_workload, run_capture
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.run import Candidate, RunResult, RunStatus, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.evolve.evolution import key_of
from mtmc_lsp.evolve.keeping import keep_best, steps_of
from mtmc_lsp.evolve.knowledge.base import KnowledgeBase
from mtmc_lsp.evolve.lineage import EventKind, Generation, Lineage, Operator, Score, Setup, Version, VersionStatus
from mtmc_lsp.evolve.operators.base import Direction, Task
from mtmc_lsp.evolve.operators.tools import Tools, Workshop
from mtmc_lsp.evolve.start import start_versions
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.server.reviews import stored_reviews
from mtmc_lsp.source.compose import strip_generated

CHAIN = """\
import torch


# mtmc: x=f32[512,256]
def chain(x):
    y = torch.sort(torch.relu(x) + 1).values
    return torch.softmax(y * 2, -1)
"""


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreter_worker) -> Callable[[str, str], Pipeline]:
    """Pipelines with a shared capture worker and a measurer that accepts every version without the text ``broken``."""

    def captured(pipeline: Pipeline) -> Capture:
        target = pipeline.target
        workload = find_workload(str(target.path), target.plain, target.definition)
        return run_capture(workload, target.plain, interpreter_worker, 120)

    monkeypatch.setattr(Pipeline, "_run_capture", captured)
    monkeypatch.setattr(Pipeline, "_open_measurer", lambda *_: AgreeingMeasurer())
    monkeypatch.setattr(Pipeline, "_start_fork_server", lambda _: None)

    def make(text: str, name: str) -> Pipeline:
        (tmp_path / "pyproject.toml").write_text("[project]\nname = 'user'\n")
        file = tmp_path / "model.py"
        file.write_text(text)
        return Pipeline(open_target(parse_request(f"{file}::{name}")))

    return make


def begin(capture: Capture, source: str) -> Lineage:
    root = BuiltinCoder(H200).start(capture, source)
    setup = Setup("catalogue", 1, 0, (("as captured", {}),), False, H200.name)
    return Lineage(tuple(start_versions(root, [], Runner(capture), setup)), (Generation(0),))


def grown(lineage: Lineage, candidate: Candidate, *actions: MacroAction, gain: float = 2.0) -> Lineage:
    """The lineage with a child of its last version."""
    parent = lineage.versions[-1]
    version = Version(
        parent.number + 1, 1, 0, parent.number, Operator.CATALOGUE, VersionStatus.KEPT, "faster", Outcome.CORRECT,
        actions, candidate=candidate, key=key_of(candidate), scores=(Score(1.0, gain),),
    )  # fmt: skip
    return Lineage((*lineage.versions, version), (Generation(0), Generation(1)))


def first_actions(capture: Capture, candidate: Candidate, count: int) -> tuple[list[MacroAction], Candidate]:
    """The planner's best actions one after the other, with the version that they lead to."""
    coder, actions = BuiltinCoder(H200), list[MacroAction]()
    for _ in range(count):
        listed = RooflinePlanner().ranked(State(capture, candidate, (), H200, False))
        actions.append(next(action for action in listed if "variants" not in action.params))
        candidate = coder.write(capture, candidate, actions[-1])
    return actions, candidate


def test_a_version_becomes_a_verified_run_that_is_applied_and_taken_back(pipeline) -> None:
    with pipeline(CHAIN, "chain") as opened:
        capture = opened.capture()
        lineage = begin(capture, CHAIN)
        root = lineage.versions[0].candidate
        assert root is not None
        actions, candidate = first_actions(capture, root, 2)
        lineage = grown(lineage, candidate, *actions)
        steps = steps_of(lineage, 1, capture, BuiltinCoder(H200))
        result = opened.keep(steps)
        assert result.status is RunStatus.UNMEASURED
        assert [step.status for step in result.steps] == [StepStatus.ACCEPTED] * len(steps)
        assert all(step.verdict is not None and step.verdict.is_correct for step in result.steps)
        final = result.steps[-1].candidate
        assert final is not None and key_of(final) == key_of(candidate)
        assert opened.store().result(result.id) == result
        apply_result(opened.target, result)
        text = opened.target.path.read_bytes()
        assert b"mtmc: dispatch" in text
        assert strip_generated(text, "chain").decode() == CHAIN
        undone = without_step(opened.store(), result.id, len(steps), "you undid it")
        assert undone is not None


def test_actions_that_later_ones_replace_are_no_steps(pipeline) -> None:
    with pipeline(CHAIN, "chain") as opened:
        capture = opened.capture()
        lineage = begin(capture, CHAIN)
        root = lineage.versions[0].candidate
        assert root is not None
        coder = BuiltinCoder(H200)
        (whole,), fused = first_actions(capture, root, 1)
        # First fuses two operations alone, which the larger fusion takes in.
        part = replace(whole, region=whole.region[:1], text="Fuse a part")
        candidate = coder.write(capture, coder.write(capture, root, part), whole)
        assert key_of(candidate) == key_of(fused)
        steps = steps_of(grown(lineage, candidate, part, whole), 1, capture, coder)
        assert [step.action.text for step in steps] == [whole.text]


def test_edits_of_a_model_are_kept_without_asking_it_again(pipeline) -> None:
    with pipeline(SOURCE, "ranks") as opened:
        capture = opened.capture()
        lineage = begin(capture, SOURCE)
        workshop = Workshop(capture, BuiltinCoder(H200), RooflinePlanner(), Runner(capture), KnowledgeBase([]), H200)
        root = lineage.version(0).candidate
        assert root is not None
        tools = Tools(workshop, Task(lineage.version(0), 0, lineage, Direction(), None), root)  # type: ignore[arg-type]
        tools.call("apply", "1")
        tools.call("edit", hunk("", KERNEL) + hunk(body(tools.call("text", "")), LAUNCH))
        lineage = grown(lineage, tools.candidate, *tools.actions)
        steps = steps_of(lineage, 1, capture, BuiltinCoder(H200))
        assert len(steps) == 2
        result = opened.keep(steps)
        assert result.status is RunStatus.UNMEASURED
        assert result.final.source == tools.candidate.source
        assert result.steps[-1].action.text == "Edit ranks_kernel and ranks_launch"
        assert result.model_use is None


def test_a_version_that_the_whole_verification_refuses_makes_way_for_the_next_best(pipeline) -> None:
    with pipeline(CHAIN, "chain") as opened:
        capture = opened.capture()
        lineage = begin(capture, CHAIN)
        root = lineage.versions[0].candidate
        assert root is not None
        actions, candidate = first_actions(capture, root, 2)
        first = BuiltinCoder(H200).write(capture, root, actions[0])
        lineage = grown(grown(lineage, first, actions[0], gain=1.5), candidate, actions[1], gain=2.0)
        stored: list[Generation] = []
        kept: list[int] = []
        good = opened.keep(steps_of(lineage, 1, capture, BuiltinCoder(H200)))

        def keep(version: Version) -> RunResult:
            kept.append(version.number)
            if version.number == 2:
                wrong = replace(good.steps[-1], status=StepStatus.FAILED, reason="values differ at s0=37")
                return replace(good, steps=(wrong,))
            return good

        after, result = keep_best(lineage, keep, lambda generation, versions: stored.append(generation))
        assert kept == [2, 1]
        assert result == good
        assert after.best().number == 1
        assert after.refused == {2}
        (event,) = stored[0].events
        assert event.kind is EventKind.REFUSED
        assert event.text == "the whole verification refused version 2: values differ at s0=37"


def test_the_users_code_as_the_best_version_is_a_run_without_steps(pipeline) -> None:
    with pipeline(CHAIN, "chain") as opened:
        lineage = begin(opened.capture(), CHAIN)
        assert steps_of(lineage, 0, opened.capture(), BuiltinCoder(H200)) == []
        result = opened.keep([])
        assert result.status is RunStatus.NO_GAIN
        assert result.final.source == CHAIN
        assert result.steps == ()


def test_a_version_that_was_not_written_cannot_be_kept(pipeline) -> None:
    with pipeline(CHAIN, "chain") as opened:
        lineage = begin(opened.capture(), CHAIN)
        lost = replace(lineage.versions[0], number=1, parent=0, candidate=None, reason="the model gave up")
        lineage = Lineage((*lineage.versions, lost), lineage.generations)
        with pytest.raises(RequestError, match="version 1 was not written: the model gave up"):
            steps_of(lineage, 1, opened.capture(), BuiltinCoder(H200))


def test_an_evolution_that_goes_on_hides_no_finished_run_from_the_editor(pipeline) -> None:
    with pipeline(CHAIN, "chain") as opened:
        path, store = str(opened.target.path), opened.store()
        finished = opened.keep([])
        evolving = opened.begin_run()
        assert [review.run for review in stored_reviews(path, store)] == [evolving]
        store.add_evolution(evolving, Setup("catalogue", 1, 0, (), False, H200.name))
        assert [review.run for review in stored_reviews(path, store)] == [finished.id]
        opened.keep([], evolving)
        assert [review.run for review in stored_reviews(path, store)] == [evolving]
