"""``mtmc optimize FILE::NAME``: optimize a target step by step; also resume and replay a run."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from mtmc_lsp.commands.consent import limit_to_consent
from mtmc_lsp.commands.options import (
    Arch,
    AsJson,
    Cluster,
    Fresh,
    MaxAutotune,
    PolicyFile,
    Python,
    RequireSandbox,
    Search,
    Verbose,
    check_choice,
    open_spec,
)
from mtmc_lsp.core.errors import Location, MtmcError, RequestError

if TYPE_CHECKING:
    from mtmc_lsp.app.pipeline import RunOptions
    from mtmc_lsp.app.target_file import ListedTarget, OpenTarget
    from mtmc_lsp.core.run import RunResult
    from mtmc_lsp.search.store import RunRecord


def optimize(
    spec: Annotated[
        str,
        typer.Argument(
            metavar="FILE::NAME",
            help="What to optimize; a FILE alone lists its targets. With --resume a run's id, or nothing.",
        ),
    ] = "",
    every: Annotated[bool, typer.Option("--all", help="Optimize every target of FILE, one after the other.")] = False,
    planner: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="Chooses the next step: roofline (the default), ranker, lm or llm."),
    ] = None,
    policy_file: PolicyFile = None,
    coder: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            help="Who writes it: builtin (the default), llm, or auto: a model only where the built-in cannot."
        ),
    ] = None,
    search: Search = None,
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
    diff: Annotated[bool, typer.Option(help="Show each step's diff.")] = False,
    verbose: Verbose = False,
    replay: Annotated[
        str,
        typer.Option("--replay", metavar="RUN", help="Repeat a run with its model's stored answers; sends nothing."),
    ] = "",
    max_autotune: MaxAutotune = None,
    fresh: Fresh = False,
    require_sandbox: RequireSandbox = False,
    cluster: Cluster = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what a model would be sent; send nothing.")] = False,
    as_json: AsJson = False,
) -> int:
    """Optimise a target step by step; every step is verified, and timed where there is a GPU.

    With llm, the target's code and its operations are sent to the endpoint in OPENAI_BASE_URL; nothing else is.
    """
    from mtmc_lsp.app.pipeline import RunOptions
    from mtmc_lsp.app.stored_runs import keep_search, open_project_store, open_replay
    from mtmc_lsp.app.target_file import check_inside_project
    from mtmc_lsp.core.run import KEPT
    from mtmc_lsp.core.settings import BASELINES, CODERS, PLACES, PLANNERS, SEARCHES
    from mtmc_lsp.report.documents import document, run_document

    check_choice("planner", planner or PLANNERS[0], PLANNERS)
    check_choice("coder", coder or CODERS[0], CODERS)
    check_choice("baseline", baseline or BASELINES[0], BASELINES)
    check_choice("place", place or PLACES[0], PLACES)
    check_choice("search", search or SEARCHES[0], SEARCHES)

    def read_target(name: str) -> OpenTarget:
        return open_spec(
            name,
            python,
            arch,
            budget,
            planner=planner,
            search=search,
            policy_file=policy_file,
            coder=coder,
            place=place,
            max_autotune=max_autotune,
            baseline=baseline,
        )

    options = RunOptions(fresh=fresh, needs_sandbox=require_sandbox)
    view = _View(apply=apply, diff=diff and not as_json, verbose=verbose, as_json=as_json, cluster=cluster)
    if replay:
        with open_project_store() as store:
            stored = open_replay(store, replay, python)
        if apply:
            check_inside_project(stored.target, Path.cwd())
        options = replace(options, backends=stored.backends, model=stored.model, revision=stored.revision)
        results = [_run(stored.target, options, view)]
    else:
        specs = [spec]
        if spec and "::" not in spec and not resume:
            specs = _choose_names(spec, every=every, may_ask=not as_json)
        elif every:
            raise RequestError("--all needs a file", remedy="Write mtmc optimize FILE --all.")
        if dry_run:
            return _show_questions(read_target(specs[0]), as_json)

        def optimize_one(name: str) -> RunResult:
            target, resumed = _choose_target(name, resume, read_target)
            if apply and "::" not in name:
                check_inside_project(target, Path.cwd())
            if resumed is not None:
                # Opens the store of the target's project, so after the check.
                target = keep_search(target, resumed, search)
            explicit = "llm" in (planner, coder)
            return _run(target, options, view, resumed=resumed, explicit=explicit)

        if not every:
            results = [optimize_one(specs[0])]
        else:
            results, failures = _run_all(specs, optimize_one)
            if as_json:
                print(document(runs=results, errors=[error.to_json() for error in failures]))
            if failures and not results:
                return failures[0].exit_code
    if as_json and not every:
        print(run_document(results[0]))
    return 0 if any(result.status in KEPT for result in results) else 1


@dataclass(frozen=True)
class _View:
    """What a run shows and writes."""

    apply: bool
    diff: bool
    verbose: bool
    as_json: bool
    cluster: str
    """The cluster where trials run; empty for this machine."""


def _run(
    target: OpenTarget,
    options: RunOptions,
    view: _View,
    *,
    resumed: RunRecord | None = None,
    explicit: bool | None = None,
) -> RunResult:
    """Optimise one target, and show and write what the user wants.

    Args:
        resumed: the run to continue.
        explicit: whether the command line names a model as planner or coder; None for a replayed run, which asks none.
    """
    from mtmc_lsp.app.backends import Backends
    from mtmc_lsp.app.kernels.opening import is_kernel_target
    from mtmc_lsp.app.kernels.optimize import KernelOptimization
    from mtmc_lsp.app.pipeline import Pipeline
    from mtmc_lsp.app.target_file import apply_result
    from mtmc_lsp.cluster.opening import open_remote
    from mtmc_lsp.report.console import console, live
    from mtmc_lsp.report.run_text import RunText, show_written
    from mtmc_lsp.search.components import Events

    has_kernels = is_kernel_target(target)
    if has_kernels:
        _check_kernel_options(target, view, needs_pipeline=resumed is not None or bool(explicit))
    if explicit is not None:
        backends = limit_to_consent(
            target, Backends.from_settings(target.settings), explicit=explicit, may_ask=not view.as_json
        )
        options = replace(options, backends=backends, resumed=resumed)
    out = console(stderr=view.as_json)
    shown = RunText(out, verbose=view.verbose, diff=view.diff)
    shown.start(target.qualname, target.path, target.settings.budget_seconds)
    events = Events(
        on_action=shown.trial,
        on_stage=shown.line.enter,
        on_step=shown.step,
        on_replayed=shown.replayed,
        on_withdrawn=shown.withdrawn,
        on_retimed=shown.retimed,
        on_switched=shown.switched,
        on_captured=shown.captured,
        on_note=shown.note,
    )
    if has_kernels:
        run = KernelOptimization(target, events, fresh=options.fresh)
        with live(out, shown.line):
            result = run.run(target.settings.budget_seconds)
    else:
        with ExitStack() as resources:
            if view.cluster:
                workers = open_remote(view.cluster, target, needs_sandbox=options.needs_sandbox, fresh=options.fresh)
                options = replace(options, remote=resources.enter_context(workers))
            with live(out, shown.line), Pipeline(target, options, events) as pipeline:
                result = pipeline.optimize()
    shown.result(result)
    written = apply_result(target, result) if view.apply else None
    if written is not None:
        show_written(out, target.path, written)
    shown.next_commands(result, applied=written is not None)
    return result


def _check_kernel_options(target: OpenTarget, view: _View, *, needs_pipeline: bool) -> None:
    """Check the options of a target that consists of Triton kernels.

    Args:
        needs_pipeline: whether the command line continues a run, or names a model.

    Raises:
        RequestError: an option does not apply to kernels.
    """
    where = Location(str(target.path), target.definition.start_line)
    if needs_pipeline:
        raise RequestError(
            f"{target.qualname} consists of Triton kernels, which are edited without a model and in one go",
            where=where,
            remedy="Leave out --resume, --planner llm and --coder llm.",
        )
    if view.cluster:
        raise RequestError(
            f"{target.qualname} consists of Triton kernels, which are optimised on this machine",
            where=where,
            remedy="Leave out --cluster.",
        )


def _run_all(specs: Sequence[str], optimize_one: Callable[[str], RunResult]) -> tuple[list[RunResult], list[MtmcError]]:
    """Optimise several targets. If one of them is refused, the others continue."""
    from mtmc_lsp.report.console import console, show_error

    results, failures = [], []
    for name in specs:
        try:
            results.append(optimize_one(name))
        except MtmcError as error:
            show_error(console(stderr=True), error)
            failures.append(error)
    return results, failures


def _choose_names(file: str, *, every: bool, may_ask: bool) -> list[str]:
    """Choose targets of a file: all targets with example inputs, or a single one by the user's answer.

    Raises:
        RequestError: the user cannot be asked, or there is nothing to choose from.
    """
    from mtmc_lsp.app.target_file import list_targets, no_target_named
    from mtmc_lsp.report.console import console
    from mtmc_lsp.report.text import show_targets

    targets = list_targets(file)
    ready = [item for item in targets if item.is_ready]
    if every:
        if not ready:
            raise RequestError(f"no target in {file} has example inputs", remedy=targets[0].remedy)
        return [item.spec for item in ready]
    if len(targets) == 1:
        return [targets[0].spec]
    if may_ask and sys.stdin.isatty() and sys.stderr.isatty():
        show_targets(console(stderr=True), file, targets, numbered=True)
        return [_ask(targets).spec]
    if may_ask:
        show_targets(console(stderr=True), file, targets)
    error = no_target_named(targets)
    error.remedy = f"Name one: mtmc optimize {(ready or targets)[0].spec}; or add --all."
    raise error


def _ask(targets: Sequence[ListedTarget]) -> ListedTarget:
    """The target that the user chooses by its number or name."""
    while True:
        answer = str(typer.prompt("Which one? Its number or name", err=True)).strip()
        chosen = [item for number, item in enumerate(targets, 1) if answer in (str(number), item.name)]
        if chosen:
            return chosen[0]


def _show_questions(target: OpenTarget, as_json: bool) -> int:
    """Print the messages that a model would get in the first step."""
    from mtmc_lsp.app.backends import Backends
    from mtmc_lsp.app.pipeline import Pipeline, RunOptions
    from mtmc_lsp.report.console import LiveLine, console, live
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.text import show_questions

    backends = Backends.from_settings(target.settings)
    if not backends.ask_a_model:
        raise RequestError(
            "nothing is ever sent without a model", remedy="Add --planner llm, --coder llm or --coder auto."
        )
    with (
        live(console(stderr=True), LiveLine(stage="capturing the target")),
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
