"""``mtmc optimize FILE::NAME``: optimize a target step by step; also resume and replay a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from mtmc_lsp.commands.consent import limit_to_consent
from mtmc_lsp.commands.options import (
    Arch,
    AsJson,
    Fresh,
    MaxAutotune,
    Python,
    RequireSandbox,
    check_choice,
    open_spec,
)
from mtmc_lsp.core.errors import RequestError

if TYPE_CHECKING:
    from mtmc_lsp.app.target_file import OpenTarget
    from mtmc_lsp.search.store import RunRecord


def optimize(
    spec: Annotated[
        str, typer.Argument(metavar="FILE::NAME", help="What to optimize; with --resume a run's id, or nothing.")
    ] = "",
    planner: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Who chooses the next step: roofline (the default) or llm."),
    ] = None,
    coder: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="Who writes it: builtin (the default), llm, or auto: a model only where the built-in cannot."
        ),
    ] = None,
    search: Annotated[str, typer.Option(help="How steps are tried: greedy.")] = "greedy",
    budget: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--budget", help="Most seconds for the run, from its start to its end."),
    ] = None,
    baseline: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="What a version must beat: current (the default), eager, compile or best."),
    ] = None,
    place: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="Where the kernels go: end of the file (the default), above the target, or sibling: NAME_kernels.py."
        ),
    ] = None,
    arch: Arch = None,
    python: Python = "",
    apply: Annotated[bool, typer.Option("--apply", help="Write the accepted steps into the file.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue a run that was not finished.")] = False,
    diff: Annotated[bool, typer.Option(help="Show each step's diff.")] = True,
    replay: Annotated[
        str,
        typer.Option("--replay", metavar="RUN", help="Repeat a run with its model's stored answers; sends nothing."),
    ] = "",
    max_autotune: MaxAutotune = None,
    fresh: Fresh = False,
    require_sandbox: RequireSandbox = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what a model would be sent; send nothing.")] = False,
    as_json: AsJson = False,
) -> int:
    """Optimise a target step by step; every step is verified, and timed where there is a GPU.

    With llm, the target's code and its operations are sent to the endpoint in OPENAI_BASE_URL; nothing else is.
    """
    from mtmc_lsp.app.backends import Backends
    from mtmc_lsp.app.pipeline import Pipeline, RunOptions
    from mtmc_lsp.app.stored_runs import open_project_store, open_replay
    from mtmc_lsp.app.target_file import apply_result, check_inside_project
    from mtmc_lsp.core.run import KEPT
    from mtmc_lsp.core.settings import BASELINES, CODERS, PLACES, PLANNERS
    from mtmc_lsp.report import text
    from mtmc_lsp.report.documents import run_document
    from mtmc_lsp.search.components import Events

    check_choice("planner", planner or PLANNERS[0], PLANNERS)
    check_choice("coder", coder or CODERS[0], CODERS)
    check_choice("baseline", baseline or BASELINES[0], BASELINES)
    check_choice("place", place or PLACES[0], PLACES)
    check_choice("search", search, ("greedy",))

    def read_target(name: str) -> OpenTarget:
        return open_spec(
            name,
            python,
            arch,
            budget,
            planner=planner,
            coder=coder,
            place=place,
            max_autotune=max_autotune,
            baseline=baseline,
        )

    options = RunOptions(fresh=fresh, needs_sandbox=require_sandbox)
    if replay:
        with open_project_store() as store:
            stored = open_replay(store, replay, python)
        target = stored.target
        options = replace(options, backends=stored.backends, model=stored.model, revision=stored.revision)
    elif dry_run:
        return _show_questions(read_target(spec), as_json)
    else:
        target, resumed = _choose_target(spec, resume, read_target)
        backends = limit_to_consent(
            target,
            Backends.from_settings(target.settings),
            explicit="llm" in (planner, coder),
            may_ask=not as_json,
        )
        options = replace(options, backends=backends, resumed=resumed)
    if apply and (replay or "::" not in spec):
        check_inside_project(target, Path.cwd())
    out = text.console(stderr=as_json)
    began, budget_seconds = time.monotonic(), target.settings.budget_seconds
    text.show_start(out, target.qualname, target.path, budget_seconds)
    with out.status("starting") as status:
        events = Events(
            on_stage=lambda stage: status.update(text.RunClock(stage, began, budget_seconds)),
            on_step=lambda step: text.show_step(out, step, diff=diff and not as_json),
            on_replayed=lambda step: text.show_replayed(out, step),
            on_withdrawn=lambda step: text.show_withdrawn(out, step),
            on_retimed=lambda step: text.show_retimed(out, step),
            on_captured=lambda capture: text.show_head(out, capture),
        )
        with Pipeline(target, options, events) as pipeline:
            result = pipeline.optimize()
        text.show_result(out, result)
    written = apply_result(target, result) if apply else None
    if written is not None:
        files = f"{target.path} and {written.kernels.name}" if written.kernels is not None else str(target.path)
        out.print(f"  written to {files}; the text before is in {written.backup}")
    if as_json:
        print(run_document(result))
    return 0 if result.status in KEPT else 1


def _show_questions(target: OpenTarget, as_json: bool) -> int:
    """Print the messages that a model would get in the first step."""
    from mtmc_lsp.app.backends import Backends
    from mtmc_lsp.app.pipeline import Pipeline, RunOptions
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.text import console, show_questions

    backends = Backends.from_settings(target.settings)
    if not backends.ask_a_model:
        raise RequestError(
            "nothing is ever sent without a model", remedy="Add --planner llm, --coder llm or --coder auto."
        )
    with (
        console(stderr=True).status("capturing the target"),
        Pipeline(target, RunOptions(backends)) as pipeline,
    ):
        questions = pipeline.first_questions()
    if as_json:
        print(document(target=target.definition, questions=questions))
    else:
        show_questions(console(), questions)
    return 0 if questions else 1


def _choose_target(
    spec: str, resume: bool, read_target: Callable[[str], OpenTarget]
) -> tuple[OpenTarget, RunRecord | None]:
    """The target, and the run to resume.

    Raises:
        RequestError: no target is named, or there is no run to resume.
    """
    from mtmc_lsp.app.stored_runs import find_unfinished, open_project_store, open_store

    if not resume:
        if not spec:
            raise RequestError(
                "no target is named", remedy="Write FILE::NAME, as in mtmc optimize model.py::Block.forward."
            )
        return read_target(spec), None
    if "::" in spec:
        target = read_target(spec)
        with open_store(target.path) as store:
            return target, find_unfinished(store, target=target)
    with open_project_store() as store:
        record = find_unfinished(store, run=spec)
    return read_target(f"{record.path}::{record.qualname}"), record
