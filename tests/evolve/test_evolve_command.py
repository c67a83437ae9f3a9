"""``mtmc evolve``, ``mtmc lineage`` and ``mtmc knowledge`` as a user runs them; only captures and trials are shared or faked."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from accepting import Runner
from answers import KERNEL, LAUNCH, SOURCE, body, hunk
from endpoint import Endpoint
from searching import AgreeingMeasurer
from typer.testing import CliRunner

from mtmc_lsp.app.pipeline import Pipeline
from mtmc_lsp.capture.client import find_workload, run_capture
from mtmc_lsp.cli import app, main
from mtmc_lsp.core.errors import EnvironmentNotAble
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.evolve.local_runner import Here
from mtmc_lsp.evolve.trials import TrialRequest, TrialResult
from mtmc_lsp.search.store import Store

MODEL = """\
import torch


# mtmc: x=f32[N,1024] N=8192
def chain(x):
    y = torch.sort(torch.relu(x) + 1).values
    return torch.softmax(y * 2, -1)


def bare(x):
    return x + 1
"""


@dataclass
class Project:
    """A user's project."""

    folder: Path
    run: Callable[..., str]
    """Runs a command, which must succeed; gives what it printed."""
    fail: Callable[..., str]
    """Runs a command, which must fail; gives its error as one text."""
    runners: list[Runner]

    def document(self, *arguments: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.run(*arguments, "--json"))
        return document


class Interrupted(BaseException):
    """Ends a command at once, as a kill does."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all projects of this module: a capture depends on the path of its file, and each takes seconds."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def captures() -> dict[tuple[bytes, str], Capture]:
    """Captures by text and target."""
    return {}


@pytest.fixture
def project(home: Path, captures, monkeypatch: pytest.MonkeyPatch, interpreter_worker, capfd) -> Project:
    runners: list[Runner] = []

    def captured(pipeline: Pipeline) -> Capture:
        target = pipeline.target
        if (target.plain, target.qualname) not in captures:
            workload = find_workload(str(target.path), target.plain, target.definition)
            captures[target.plain, target.qualname] = run_capture(workload, target.plain, interpreter_worker, 120)
        return captures[target.plain, target.qualname]

    def runner(here: Here, verifier: object) -> Runner:
        runners.append(Runner(here.capture, workloads=here.workloads))
        return runners[-1]

    monkeypatch.setattr(Pipeline, "_run_capture", captured)
    monkeypatch.setattr(Pipeline, "_open_measurer", lambda *_: AgreeingMeasurer())
    monkeypatch.setattr(Pipeline, "_start_fork_server", lambda _: None)
    monkeypatch.setattr("mtmc_lsp.evolve.run.EvolutionRun._start_fork_server", lambda _: None)
    monkeypatch.setattr("mtmc_lsp.evolve.run.LocalRunner", runner)
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "state"))
    monkeypatch.setenv("COLUMNS", "300")
    folder = home / "project"
    for place in (folder, home / "state"):
        shutil.rmtree(place, ignore_errors=True)
    folder.mkdir()
    (folder / "pyproject.toml").write_text("[project]\nname = 'user'\n[tool.mtmc.llm]\nretries = 0\n")
    (folder / "model.py").write_text(MODEL)
    monkeypatch.chdir(folder)

    def run(*arguments: str) -> str:
        answer = CliRunner().invoke(app, list(arguments), standalone_mode=False, catch_exceptions=False)
        assert not answer.return_value, answer.output
        return answer.stdout

    def fail(*arguments: str) -> str:
        capfd.readouterr()
        monkeypatch.setattr("sys.argv", ["mtmc", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code
        return " ".join(capfd.readouterr().err.split())

    return Project(folder, run, fail, runners)


EVOLVE = ("evolve", "model.py::chain", "--arch", "sm_90")


def test_an_evolution_starts_from_a_run_and_ends_as_a_run_that_apply_writes(project: Project) -> None:
    shown = project.run(*EVOLVE, "--generations", "3")
    assert "Evolving chain in model.py, at most 60 min of generations" in shown
    assert "estimated" in shown
    assert "The evolution ended: the limit of 3 generations is reached." in shown
    assert (project.folder / "model.py").read_text() == MODEL
    with Store(project.folder / ".mtmc") as store:
        optimised, evolved = [record.id for record in reversed(store.runs())]
        assert store.evolutions() == {evolved}
        result = store.result(evolved)
    assert result is not None
    assert all(step.verdict is not None for step in result.steps)
    assert f"the result of run {optimised}" in shown
    project.run("apply", evolved)
    assert "mtmc: dispatch" in (project.folder / "model.py").read_text()


def test_the_document_has_every_version_with_parent_operator_score_cost_and_reason(project: Project) -> None:
    document = project.document(*EVOLVE, "--generations", "3", "--islands", "1")
    versions = document["versions"]
    assert [version["number"] for version in versions] == list(range(len(versions)))
    assert [name for name, _ in document["setup"]["workloads"]] == ["N=8192", "N=4096", "N=16384"]
    assert not document["setup"]["has_gpu"]
    for version in versions[1:]:
        assert version["parent"] < version["number"]
        assert version["operator"] in ("start", "catalogue")
        assert version["reason"]
        assert version["diff"].startswith("--- ")
        assert len(version["scores"]) == 3
        assert "seconds" in version["spent"]
    assert document["result"]["status"] == "unmeasured"
    assert document["learned"] > 0
    assert project.document("lineage")["versions"] == versions


def test_a_second_evolution_begins_at_the_best_stored_version_without_a_new_run(project: Project) -> None:
    first = project.document(*EVOLVE, "--generations", "2")
    second = project.document(*EVOLVE, "--generations", "1")
    assert second["setup"]["started_from"] == first["run"]
    with Store(project.folder / ".mtmc") as store:
        assert len(store.runs()) == 3


@pytest.mark.parametrize("has_stored_run", [False, True])
def test_without_a_complete_sandbox_nothing_is_tried_if_one_is_required(
    project: Project, has_stored_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_stored_run:
        project.run(*EVOLVE, "--generations", "1")
    tried = len(project.runners)

    class Unlocked(AgreeingMeasurer):
        def isolation(self) -> None:
            raise EnvironmentNotAble("a complete sandbox is not possible here", remedy="Leave out --require-sandbox.")

    measurers = [Unlocked()]
    required: list[bool] = []

    def opened(pipeline: Pipeline, *_: object) -> Unlocked:
        required.append(pipeline._options.needs_sandbox)
        return measurers[0]

    monkeypatch.setattr(Pipeline, "_open_measurer", opened)
    shown = project.fail(*EVOLVE, "--generations", "1", "--require-sandbox")
    assert "a complete sandbox is not possible here" in shown
    assert required
    assert all(required)
    assert measurers[0].seen == []
    assert len(project.runners) == tried


def test_a_target_whose_run_gains_nothing_evolves_from_the_users_code(project: Project) -> None:
    (project.folder / "model.py").write_text(
        MODEL + "\n\n# mtmc: x=f32[8,48]\ndef sorted_rows(x):\n    return torch.sort(x).values\n"
    )
    answer = CliRunner().invoke(
        app, ["evolve", "model.py::sorted_rows", "--generations", "1", "--json"], standalone_mode=False
    )
    assert answer.return_value == 1
    document = json.loads(answer.stdout)
    assert document["setup"]["started_from"] == ""
    assert document["best"] == 0


def test_the_lineage_is_shown_as_text_page_and_repository(project: Project) -> None:
    document = project.document(*EVOLVE, "--generations", "4")
    text = project.run("lineage")
    assert f"evolution {document['run']}" in text
    assert "times are estimates for NVIDIA H200" in text
    assert f"How version {document['best']} got faster" in text
    assert "one kernel" in text
    project.run("lineage", document["run"][:6], "--html", "page.html", "--git", "repository")
    page = (project.folder / "page.html").read_text()
    assert '<ul class="tree"><li class="accepted">' in page
    assert "Times are estimates of the cost model" in page
    assert "<script" not in page

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", "repository", *arguments], capture_output=True, text=True, check=True)
        return done.stdout

    tags = git("tag").split()
    assert sorted(tags) == sorted(f"v{version['number']}" for version in document["versions"])
    for version in document["versions"][1:]:
        assert git("rev-parse", f"v{version['number']}^").strip() == git("rev-parse", f"v{version['parent']}").strip()
        assert version["reason"] in git("log", "-1", "--format=%B", f"v{version['number']}")
    best = document["best"]
    assert git("rev-parse", "main") == git("rev-parse", f"v{best}")
    assert git("show", f"v{best}:model.py") == project.run("lineage", "--show", str(best))
    assert git("status", "--porcelain") == ""


def test_versions_are_printed_and_compared(project: Project) -> None:
    project.document(*EVOLVE, "--generations", "2")
    assert project.run("lineage", "--show", "0") == MODEL
    diff = project.run("lineage", "--show", "1", "--against", "0")
    assert diff.startswith("--- a/model.py\n+++ b/model.py\n")
    assert "+@triton.jit" in diff


def test_any_version_is_kept_in_the_file_and_a_backup_holds_the_text_before(project: Project) -> None:
    document = project.document(*EVOLVE, "--generations", "4")
    number = next(v["number"] for v in document["versions"] if v["operator"] == "catalogue" and v["status"] != "failed")
    kept = json.loads(project.run("lineage", "--keep", str(number), "--json"))
    text = (project.folder / "model.py").read_text()
    assert text == kept["final"]["source"] != MODEL
    assert all(step["verdict"]["status"] == "correct" for step in kept["steps"])
    backups = list((project.folder / ".mtmc" / "backups").rglob("*"))
    assert any(path.is_file() and path.read_text() == MODEL for path in backups)
    # The run of the kept version is a run like any other.
    assert kept["id"] in project.run("runs")


def test_apply_writes_the_final_version_alone_with_the_option(project: Project) -> None:
    document = project.document(*EVOLVE, "--generations", "1", "--apply")
    assert (project.folder / "model.py").read_text() == document["result"]["final"]["source"]


def test_what_was_learned_is_found_by_words(project: Project) -> None:
    project.document(*EVOLVE, "--generations", "3")
    assert "lesson: fuse" in project.run("knowledge", "fuse", "softmax", "--limit", "10")
    assert "note: op-sort" in project.run("knowledge", "sort")
    document = project.document("knowledge", "fuse")
    assert document["lessons"] > 0 and document["notes"] > 20
    assert "notes and" in project.run("knowledge")


# Resuming -------------------------------------------------------------------------------------------------------------


def interrupt_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The runner is interrupted when it tries the version with this number."""
    run = Runner.run

    def interrupted(self: Runner, requests: Sequence[TrialRequest]) -> list[TrialResult]:
        if len(self.requests) >= count:
            raise Interrupted
        return run(self, requests)

    monkeypatch.setattr(Runner, "run", interrupted)


def test_an_interrupted_evolution_goes_on_with_the_same_lineage(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = project.document(*EVOLVE, "--generations", "4", "--seed", "3")
    # From the same start: no stored run, no lesson.
    for folder in (project.folder / ".mtmc", project.folder.parent / "state"):
        shutil.rmtree(folder)
    with monkeypatch.context() as patched:
        interrupt_after(patched, 5)
        with pytest.raises(Interrupted):
            project.run(*EVOLVE, "--generations", "4", "--seed", "3")
    assert "is not finished: continue with mtmc evolve --resume" in project.run("lineage")
    resumed = project.document("evolve", "--resume", "--generations", "4", "--arch", "sm_90")

    def made(document: dict[str, Any]) -> list[Any]:
        return [
            (v["parent"], v["title"], v["status"], v["scores"], v["diff"])
            for v in document["versions"]
            if v["operator"] == "catalogue"
        ]

    assert len(made(resumed)) > 4
    assert made(resumed) == made(whole)
    assert "there is no unfinished evolution" in project.fail("evolve", "--resume", "model.py::chain")


def test_optimize_does_not_continue_an_evolution(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        interrupt_after(patched, 4)
        with pytest.raises(Interrupted):
            project.run(*EVOLVE, "--generations", "4")
    with Store(project.folder / ".mtmc") as store:
        (run,) = store.evolutions()
    assert f"run {run} is an evolution mtmc evolve --resume {run}" in project.fail("optimize", "--resume", run)
    assert "there is no unfinished run" in project.fail("optimize", "--resume")
    assert f"continue with mtmc evolve --resume {run}" in project.run("report", run)
    assert "began with --seed 0" in project.fail("evolve", "--resume", run, "--seed", "1")
    (project.folder / "model.py").write_text(MODEL.replace("* 2", "* 3"))
    assert "model.py, or something that chain reads, changed since evolution" in project.fail("evolve", "--resume", run)


# Language models ------------------------------------------------------------------------------------------------------


def call(tool: str, argument: str = "") -> str:
    return json.dumps({"tool": tool, "argument": argument})


def edit(request: dict[str, Any]) -> str:
    text = str(request["messages"][-1]["content"]).partition("as data:\n")[2]
    return call("edit", f"{hunk('', KERNEL)}{hunk(body(text), LAUNCH)}")


def test_the_agents_version_is_verified_delivered_and_its_cost_is_shown(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    (project.folder / "model.py").write_text(SOURCE)
    replies = (
        call("text"),
        edit,
        call("verify"),
        call("commit", "One kernel sorts and sums."),
        call("give_up", "done"),
    )
    with Endpoint(*replies).serving() as environ:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        document = project.document(
            "evolve",
            "model.py::ranks",
            "--operator",
            "agent",
            "--generations",
            "2",
            "--islands",
            "1",
            "--arch",
            "sm_90",
        )
    made = [version for version in document["versions"] if version["operator"] == "agent"]
    assert [version["status"] for version in made] == ["kept", "failed"]
    assert made[0]["remark"] == "One kernel sorts and sums."
    assert made[0]["spent"]["tokens"] > 0
    assert document["best"] == made[0]["number"]
    assert "def ranks_kernel" in document["result"]["final"]["source"]
    assert document["spent"]["tokens"] >= sum(version["spent"]["tokens"] for version in made)
    assert "ranks_kernel" in project.run("report", document["run"], "--diff")
    project.run("report", document["run"], "--html", "report.html")
    assert "cannot be replayed" in project.fail("optimize", "--replay", document["run"])
    text = project.run("lineage")
    assert 'The model: "One kernel sorts and sums."' in text
    assert "tokens" in text


def test_both_operators_take_turns_and_the_model_of_the_command_line_is_asked(project: Project, monkeypatch) -> None:
    endpoint = Endpoint(call("give_up", "no idea"))
    with endpoint.serving() as environ:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("MTMC_LLM_MODEL", "another")
        document = project.document(
            *EVOLVE, "--operator", "both", "--generations", "4", "--islands", "1", "--model", "tiny"
        )
    generations = {v["generation"]: v["operator"] for v in document["versions"] if v["generation"]}
    assert set(generations.values()) == {"agent", "catalogue"}
    assert {request["model"] for request in endpoint.requests} == {"tiny"}


def test_a_spent_budget_ends_the_evolution_and_says_so(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    with Endpoint(*[call("knowledge", f"word {number}") for number in range(200)]).serving() as environ:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        document = project.document(*EVOLVE, "--operator", "agent", "--tokens", "12000", "--islands", "1")
    assert "the model's budget is spent" in document["end_reason"]
    assert document["result"]["status"] == "unmeasured"


def test_a_stored_evolution_is_no_consent_to_ask_a_model(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = Endpoint(call("give_up", "no idea"))
    with endpoint.serving() as environ:
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        with monkeypatch.context() as patched:
            patched.setattr(Runner, "close", lambda self: (_ for _ in ()).throw(Interrupted()))
            with pytest.raises(Interrupted):
                project.run(*EVOLVE, "--operator", "agent", "--generations", "1")
        asked = len(endpoint.requests)
        message = project.fail("evolve", "--resume")
        assert "this evolution asks a language model (--operator agent), and you have not agreed to it" in message
        assert len(endpoint.requests) == asked


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("evolve",), "error: no target is named Write FILE::NAME, as in mtmc evolve model.py::Block.forward."),
        (
            ("evolve", "model.py"),
            "error: no target is named Write FILE::NAME, as in mtmc evolve model.py::Block.forward.",
        ),
        (
            ("evolve", "model.py::chain", "--operator", "magic"),
            "error: --operator magic does not exist Choose catalogue or agent or both.",
        ),
        (
            ("evolve", "model.py::chain", "--hours", "1", "--seconds", "5"),
            "error: --hours and --seconds are both set Choose one.",
        ),
        (
            ("evolve", "model.py::chain", "--cost", "0"),
            "error: --cost 0 allows no answer Leave it out, or use --operator catalogue.",
        ),
        (
            ("evolve", "model.py::chain", "--cost", "1"),
            "error: llm.budget_money: needs a price; set llm.price_prompt or llm.price_answer Change the option.",
        ),
        (
            ("evolve", "--resume"),
            "error: .mtmc: there is no unfinished evolution See `mtmc runs`. Start a new one: mtmc evolve FILE::NAME.",
        ),
        (("lineage",), "error: .mtmc: there is no evolution See `mtmc runs`, or start one: mtmc evolve FILE::NAME."),
        (
            ("lineage", "--against", "1"),
            "error: --against needs --show Write mtmc lineage RUN --show VERSION --against VERSION.",
        ),
        (("lineage", "--show", "1", "--keep", "1"), "error: --show and --keep are both set Choose one."),
    ],
)
def test_a_wrong_request_is_one_message_with_a_remedy(
    project: Project, arguments: tuple[str, ...], message: str
) -> None:
    assert project.fail(*arguments) == message


def test_errors_about_versions_and_folders_name_what_exists(project: Project) -> None:
    document = project.document(*EVOLVE, "--generations", "1")
    run, count = document["run"], len(document["versions"])
    assert f"run {run} has no version 99 Choose one from 0 to {count - 1}; see `mtmc lineage {run}`." in project.fail(
        "lineage", "--show", "99"
    )
    (project.folder / "full").mkdir()
    (project.folder / "full" / "file").write_text("mine")
    assert project.fail("lineage", "--git", "full") == "error: full: is not empty Choose a new folder."
    with Store(project.folder / ".mtmc") as store:
        optimised = next(record.id for record in store.runs() if record.id != run)
    assert f"run {optimised} has no lineage: it is no evolution" in project.fail("lineage", optimised)
