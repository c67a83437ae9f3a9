"""The versions of an evolution in an editor: listed, opened, and verified as a run to review."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from editor import Editor, editor
from lsprotocol import types as lsp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "search"))
from fake_host import ComposingCoder
from fakes import ENVIRONMENT, action, capture

from mtmc_lsp.core.learning.transitions import Outcome
from mtmc_lsp.core.run import Candidate, Placement
from mtmc_lsp.evolve.evolution import key_of
from mtmc_lsp.evolve.lineage import Generation, Operator, Score, Setup, Version, VersionStatus
from mtmc_lsp.evolve.stored import storing
from mtmc_lsp.search.store import Store
from mtmc_lsp.source.dependencies import with_definitions
from mtmc_lsp.source.targets import find_target

pytestmark = pytest.mark.asyncio

MODEL = "import torch\n\n\ndef f(x):\n    return torch.relu(x) + 1\n\n\ndef g(x):\n    return x\n"


def stored_evolution(ide: Editor, name: str = "model.py") -> tuple[str, list[Candidate]]:
    """Store an evolution of ``f``: the user's code, a version, a version after it, and one that was not written."""
    path = str(ide.root / name)
    made = capture(path)
    target = find_target(MODEL.encode(), path, "f")
    made = replace(made, workload=replace(made.workload, target=target))
    coder, actions = ComposingCoder(Placement.END), [action(1, "better"), action(2, "better")]
    dependencies = with_definitions([], target, MODEL.encode(), [str(ide.root)])
    candidates = [replace(coder.start(made, MODEL), dependencies=tuple(dependencies))]
    for item in actions:
        candidates.append(coder.write(made, candidates[-1], item))
    root = Version(0, 0, 0, None, Operator.START, VersionStatus.KEPT, "the start", Outcome.CORRECT)
    versions = [replace(root, candidate=candidates[0], scores=(Score(100.0, 1.0, 1.0, 0.0),))]
    for number in (1, 2):
        gain = 1.25**number
        version = Version(
            number, number, 0, number - 1, Operator.CATALOGUE, VersionStatus.KEPT, f"reason {number}", Outcome.CORRECT
        )
        scores = (Score(100.0 / gain, gain, 1.25, 0.0),)
        versions.append(
            replace(
                version,
                actions=(actions[number - 1],),
                candidate=candidates[number],
                key=key_of(candidates[number]),
                scores=scores,
            )
        )
    failed = Version(3, 3, 0, 2, Operator.CATALOGUE, VersionStatus.FAILED, "not legal", Outcome.NOT_LEGAL)
    plain_hash = hashlib.sha256(MODEL.encode()).hexdigest()
    setup = Setup("catalogue", 1, 0, (("N=64", {"N": 64}),), False, "H200", plain_hash=plain_hash)
    with Store(ide.root / ".mtmc") as store:
        run = store.begin(path, "f", plain_hash, ENVIRONMENT)
        store.add_evolution(run, setup)
        storing(store, run)(Generation(0), [*versions, failed])
    return run, candidates


async def ask(ide: Editor, method: str, **params: object) -> Any:
    return await ide.client.protocol.send_request_async(f"mtmc/{method}", params)


async def test_the_versions_of_a_file_are_listed_with_parent_speedup_and_reason(tmp_path: Path) -> None:
    async with editor(tmp_path) as ide:
        uri = ide.open(MODEL)
        assert await ask(ide, "lineage", uri=uri) == []
        run, _ = stored_evolution(ide)
        (evolution,) = await ask(ide, "lineage", uri=uri)
        names = ("run", "uri", "target", "best", "estimated", "workloads")
        assert [evolution[name] for name in names] == [run, uri, "f", 2, True, ["N=64"]]
        fields = ("number", "parent", "status", "title", "reason", "written")
        shown = [tuple(version[name] for name in fields) for version in evolution["versions"]]
        assert shown == [
            (0, None, "kept", "your code", "the start", True),
            (1, 0, "kept", "action 1", "reason 1", True),
            (2, 1, "kept", "action 2", "reason 2", True),
            (3, 2, "failed", "no version", "not legal", False),
        ]
        assert [round(version["speedup"], 4) for version in evolution["versions"]] == [1.0, 1.25, 1.5625, 0.0]
        assert await ask(ide, "lineage", uri=ide.open("x = 1\n", "other.py")) == []


async def test_a_version_is_the_text_of_the_whole_file(tmp_path: Path) -> None:
    async with editor(tmp_path) as ide:
        uri = ide.open(MODEL)
        run, candidates = stored_evolution(ide)
        for number, candidate in enumerate(candidates):
            assert (await ask(ide, "version", uri=uri, run=run, version=number)).text == candidate.source
        for name, number in ((run, 3), (run, 4), (run, -1), ("nope", 1)):
            assert await ask(ide, "version", uri=uri, run=name, version=number) is None
        assert ide.texts[uri] == MODEL


async def test_a_version_is_verified_and_its_steps_are_reviewed_like_those_of_a_run(tmp_path: Path) -> None:
    async with editor(tmp_path) as ide:
        uri = ide.open(MODEL)
        run, candidates = stored_evolution(ide)
        job = await ide.command("keepVersion", uri, "f", run=run, version=2)
        await ide.finished(job["job"] if isinstance(job, dict) else job.job)
        (review,) = await ask(ide, "reviews", uri=uri)
        assert review["run"]["run"] != run
        assert [step["action"]["text"] for step in review["run"]["steps"]] == ["action 1", "action 2"]
        assert review["pending"] == [1, 2]
        assert ide.texts[uri] == MODEL, "nothing is written before the user keeps a step"
        await ide.command("keepAll", uri, "f")
        await ide.until(lambda: ide.texts[uri] == candidates[2].source)


async def test_a_version_that_is_not_there_or_not_of_this_function_is_one_message(tmp_path: Path) -> None:
    async with editor(tmp_path) as ide:
        uri = ide.open(MODEL)
        run, _ = stored_evolution(ide)
        for target, name, number in (("f", run, 3), ("f", run, 9), ("g", run, 1), ("f", "nope", 1)):
            assert await ide.command("keepVersion", uri, target, run=name, version=number) is None
            last = await ide.until(lambda: ide.client.messages and ide.client.messages[-1])
            assert last.message == f"The evolution {name} of {target} has no version {number} with code."
            assert last.type == lsp.MessageType.Error
            ide.client.messages.clear()


async def test_a_version_of_changed_code_is_refused(tmp_path: Path) -> None:
    async with editor(tmp_path) as ide:
        uri = ide.open(MODEL)
        run, _ = stored_evolution(ide)
        ide.replace(uri, "+ 1", "+ 2")
        ide.save(uri)
        job = await ide.command("keepVersion", uri, "f", run=run, version=1)
        message = await ide.finished(job["job"] if isinstance(job, dict) else job.job)
        assert f"changed since evolution {run} began" in message
        assert "+ 2" in ide.texts[uri]
