"""``mtmc evolve FILE::NAME``: evolve versions of a target for minutes or days, from its best stored version."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from mtmc_lsp.commands.consent import limit_to_consent
from mtmc_lsp.commands.options import (
    Arch,
    AsJson,
    Cluster,
    PolicyFile,
    Python,
    RequireSandbox,
    Verbose,
    check_choice,
    open_spec,
)
from mtmc_lsp.core.errors import RequestError

if TYPE_CHECKING:
    from mtmc_lsp.app.target_file import OpenTarget
    from mtmc_lsp.evolve.run import EvolutionRun, Evolved, Plan
    from mtmc_lsp.evolve.stored import StoredEvolution

DEFAULT_SECONDS, HOUR = 3600.0, 3600.0
OPERATORS = ("catalogue", "agent", "both")


def evolve(
    spec: Annotated[
        str,
        typer.Argument(metavar="FILE::NAME", help="What to evolve. With --resume an evolution's id, or nothing."),
    ] = "",
    hours: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--hours", min=0, help="Most hours for all generations; 1 by default."),
    ] = None,
    seconds: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--seconds", min=0, help="The same in seconds."),
    ] = None,
    generations: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--generations", min=1, help="Most generations."),
    ] = None,
    operator: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--operator", help="What makes versions: catalogue (the default), agent (a model), or both."),
    ] = None,
    model: Annotated[
        str, typer.Option("--model", help="The language model's name at the endpoint; else MTMC_LLM_MODEL.")
    ] = "",
    tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--tokens", min=1, help="Most tokens of the model, prompts and answers."),
    ] = None,
    cost: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--cost", min=0, help="Most money for the model; needs its prices in [tool.mtmc.llm]."),
    ] = None,
    islands: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            "--islands", min=1, max=16, help="Populations that evolve side by side; by default 2, or one per worker."
        ),
    ] = None,
    seed: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--seed", help="Of the random choices; 0 by default."),
    ] = None,
    planner: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--planner", help="What weighs the actions: roofline (the default), ranker or lm."),
    ] = None,
    policy_file: PolicyFile = None,
    arch: Arch = None,
    python: Python = "",
    apply: Annotated[bool, typer.Option("--apply", help="Write the final version into the file.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue an evolution that was not finished.")] = False,
    require_sandbox: RequireSandbox = False,
    cluster: Cluster = "",
    verbose: Verbose = False,
    as_json: AsJson = False,
) -> int:
    """Evolve versions of a target over several sizes, from its best stored version; the file stays as it is without --apply.

    With agent or both, the target's code and its operations are sent to the endpoint in OPENAI_BASE_URL; nothing else is.
    """
    from mtmc_lsp.app.stored_runs import result_in_current_text
    from mtmc_lsp.app.target_file import apply_result, check_inside_project
    from mtmc_lsp.core.run import KEPT
    from mtmc_lsp.core.settings import PLANNERS
    from mtmc_lsp.report.console import console
    from mtmc_lsp.report.lineage.document import evolved_document
    from mtmc_lsp.report.run_text import show_written

    check_choice("operator", operator or OPERATORS[0], OPERATORS)
    check_choice("planner", planner or PLANNERS[0], tuple(name for name in PLANNERS if name != "llm"))
    if hours is not None and seconds is not None:
        raise RequestError("--hours and --seconds are both set", remedy="Choose one.")
    if cost is not None and not cost:
        raise RequestError("--cost 0 allows no answer", remedy="Leave it out, or use --operator catalogue.")
    limit = seconds if seconds is not None else hours * HOUR if hours is not None else DEFAULT_SECONDS
    llm = {name: value for name, value in (("budget_tokens", tokens), ("budget_money", cost)) if value is not None}

    def read_target(name: str) -> OpenTarget:
        return open_spec(name, python, arch, planner=planner, policy_file=policy_file, llm=llm or None)

    target, stored = _choose(spec, resume, read_target)
    if apply and "::" not in spec:
        check_inside_project(target, Path.cwd())
    plan = _plan(stored, limit, generations, operator, islands, seed, model)
    plan = replace(plan, needs_sandbox=require_sandbox)
    _check_consent(target, plan, explicit=operator in ("agent", "both"), may_ask=not as_json)
    evolved = _run(target, plan, stored, cluster, verbose=verbose, as_json=as_json)
    result = evolved.result
    if apply and result.status in KEPT:
        # The file may have changed during the hours of the evolution.
        target = read_target(f"{target.path}::{target.qualname}")
        written = apply_result(target, result_in_current_text(result, target))
        if written is not None:
            show_written(console(stderr=as_json), target.path, written)
    if as_json:
        print(evolved_document(evolved))
    return 0 if result.status in KEPT else 1


def _choose(
    spec: str, resume: bool, read_target: Callable[[str], OpenTarget]
) -> tuple[OpenTarget, StoredEvolution | None]:
    """The target, and the evolution to resume."""
    from mtmc_lsp.app.stored_runs import open_project_store, open_store
    from mtmc_lsp.evolve.stored import find_unfinished_evolution, read_evolution

    if not resume:
        if "::" not in spec:
            raise RequestError(
                "no target is named", remedy="Write FILE::NAME, as in mtmc evolve model.py::Block.forward."
            )
        return read_target(spec), None
    if "::" in spec:
        target = read_target(spec)
        with open_store(target.path) as store:
            return target, read_evolution(store, find_unfinished_evolution(store, target=target))
    with open_project_store() as store:
        stored = read_evolution(store, find_unfinished_evolution(store, run=spec))
    return read_target(f"{stored.record.path}::{stored.record.qualname}"), stored


def _plan(
    stored: StoredEvolution | None,
    seconds: float,
    generations: int | None,
    operator: str | None,
    islands: int | None,
    seed: int | None,
    model: str,
) -> Plan:
    """The plan of a new evolution, or that of the stored one with the limits of the command line.

    Raises:
        RequestError: the command line names something else than the stored evolution began with.
    """
    from mtmc_lsp.evolve.evolution import Limits
    from mtmc_lsp.evolve.run import Plan

    limits = Limits(seconds, generations or 0)
    if stored is None:
        return Plan(limits, operator or OPERATORS[0], islands or 0, seed or 0, model)
    setup, run = stored.setup, stored.record.id
    for name, wanted, began in (
        ("operator", operator, setup.operator),
        ("islands", islands, setup.islands),
        ("seed", seed, setup.seed),
        ("model", model or None, setup.model),
    ):
        if wanted is not None and wanted != began:
            raise RequestError(
                f"evolution {run} began with --{name} {began}",
                remedy=f"Resume it without --{name}, or start a new one with --{name} {wanted}.",
            )
    return Plan(limits, setup.operator, setup.islands, setup.seed, setup.model)


def _check_consent(target: OpenTarget, plan: Plan, *, explicit: bool, may_ask: bool) -> None:
    """Refuse to ask a model without the user's consent: a stored evolution alone is none.

    Raises:
        RequestError: the user did not agree.
    """
    from mtmc_lsp.app.backends import Backends

    if plan.operator == "catalogue":
        return
    wanted = Backends(coder="llm")
    if limit_to_consent(target, wanted, explicit=explicit, may_ask=may_ask) != wanted:
        raise RequestError(
            f"this evolution asks a language model (--operator {plan.operator}), and you have not agreed to it",
            remedy=f"Repeat the command with --operator {plan.operator}, which is consent for this call.",
        )


def _run(
    target: OpenTarget, plan: Plan, stored: StoredEvolution | None, cluster: str, *, verbose: bool, as_json: bool
) -> Evolved:
    """Evolve, and show what happens."""
    from mtmc_lsp.cluster.opening import open_remote
    from mtmc_lsp.evolve.evolution import Progress
    from mtmc_lsp.evolve.run import Callbacks, EvolutionRun
    from mtmc_lsp.evolve.service import SERVICE
    from mtmc_lsp.report.console import console, live
    from mtmc_lsp.report.lineage.text import EvolutionText
    from mtmc_lsp.search.components import Events

    out = console(stderr=as_json)
    shown = EvolutionText(out, verbose=verbose)
    shown.start(target.qualname, target.path, plan.limits.seconds)
    callbacks = Callbacks(
        Events(on_stage=shown.line.enter, on_action=shown.action, on_captured=shown.captured, on_note=shown.note),
        Progress(on_stage=shown.line.enter, on_generation=shown.generation),
        on_begin=shown.begin,
    )
    resumed = stored.record if stored is not None else None
    with ExitStack() as resources:
        remote = None
        if cluster:
            workers = open_remote(cluster, target, needs_sandbox=plan.needs_sandbox, program=SERVICE)
            remote = resources.enter_context(workers)
        evolution: EvolutionRun = EvolutionRun(target, plan, callbacks, resumed=resumed, remote=remote)
        with live(out, shown.line):
            evolved = evolution.run()
    shown.end(evolved)
    return evolved
