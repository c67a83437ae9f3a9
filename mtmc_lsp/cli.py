"""``mtmc``: optimise, plan, list runs, export and check the environment from a terminal.

Every command answers on standard output (one JSON document with ``--json``) and tells its progress on standard error.
Exit codes: 0 done, 1 the answer is no, 2 the request is wrong, 3 the environment is not able.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from mtmc_lsp import __version__
from mtmc_lsp.commands.bench import bench
from mtmc_lsp.commands.calibrate import calibrate
from mtmc_lsp.commands.consent import consent, consented
from mtmc_lsp.commands.profile import profile
from mtmc_lsp.commands.report import report
from mtmc_lsp.core.errors import EnvironmentNotAble, Location, MtmcError, RequestError

if TYPE_CHECKING:
    from mtmc_lsp.app.pipeline import OpenTarget, Replay
    from mtmc_lsp.core.settings import Settings
    from mtmc_lsp.search.store import RunRecord, Store

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells give it."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Turn PyTorch functions into verified Triton kernels, step by step.",
)

app.command()(report)

# typer reads these at run time, on Python 3.10 too.
Spec = Annotated[str, typer.Argument(metavar="FILE::NAME", help="The function, method, module or kernel.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Python = Annotated[str, typer.Option("--python", help="The interpreter that your code runs under.")]
Arch = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--arch", help="Compile for these, comma-separated, where there is no GPU."),
]
MaxAutotune = Annotated[
    Optional[bool],  # noqa: UP045
    typer.Option("--max-autotune", help="Time torch.compile(mode='max-autotune') too, which takes minutes."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Time again what was timed before.")]
Budget = Annotated[Optional[float], typer.Option("--budget", help="Most seconds for the run.")]  # noqa: UP045
Out = Annotated[Optional[Path], typer.Option("--out", help="Where to write it; else standard output.")]  # noqa: UP045

RequireSandbox = Annotated[
    bool, typer.Option("--require-sandbox", help="Refuse where a candidate's process cannot be locked in.")
]


def main() -> None:
    """Entry point of ``mtmc``."""
    own = sys.argv[: sys.argv.index("--")] if "--" in sys.argv else sys.argv
    as_json = "--json" in own
    try:
        code = app(standalone_mode=False)
    except MtmcError as error:
        code = _fail(error, as_json)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted; steps that were done are stored: go on with --resume", file=sys.stderr)
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone, as `head` is; nothing more can be said.
        sys.stderr.close()
        code = 0
    except Exception as error:
        # typer and click each bring their own class for a wrong command line; both can format it.
        if not hasattr(error, "format_message"):
            raise
        text = error.format_message()
        code = _fail(RequestError(text, remedy="See `mtmc --help`."), as_json) if text else RequestError.exit_code
    sys.exit(code)


def _fail(error: MtmcError, as_json: bool) -> int:
    if as_json:
        from mtmc_lsp.report.documents import error_document

        print(error_document(error))
    print(f"error: {error}", file=sys.stderr)
    return error.exit_code


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mtmc {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Turn PyTorch functions into verified Triton kernels, step by step."""


app.command()(consent)


def _choice(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise RequestError(f"--{option} {value} does not exist", remedy=f"There is {' and '.join(known)}.")


def _settings(folder: Path, arch: str | None = None, budget: float | None = None, **more: object) -> Settings:
    from mtmc_lsp.core.settings import override_settings, read_settings

    archs = tuple(name.strip() for name in arch.split(",")) if arch is not None else None
    return override_settings(read_settings(folder), archs=archs, budget_seconds=budget, **more)


def _open(spec: str, python: str, arch: str | None, budget: float | None = None, **more: object) -> OpenTarget:
    from mtmc_lsp.app.pipeline import open_target, parse_request

    settings = _settings(Path(spec.partition("::")[0]).absolute().parent, arch, budget, **more)
    return open_target(parse_request(spec, settings, python))


def _project_store() -> Store:
    from mtmc_lsp.app.pipeline import open_store

    return open_store(Path.cwd() / "x.py")


@app.command()
def optimize(
    spec: Annotated[
        str, typer.Argument(metavar="FILE::NAME", help="What to optimise; with --resume a run's id, or nothing.")
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
    budget: Budget = None,
    arch: Arch = None,
    python: Python = "",
    apply: Annotated[bool, typer.Option("--apply", help="Write the accepted steps into the file.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was not finished.")] = False,
    diff: Annotated[bool, typer.Option(help="Show each step's diff.")] = True,
    replay: Annotated[
        str,
        typer.Option("--replay", metavar="RUN", help="Do a run again with the answers its model gave; sends nothing."),
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
    from mtmc_lsp.app import pipeline as session
    from mtmc_lsp.app import review
    from mtmc_lsp.app.backends import Backends
    from mtmc_lsp.core.run import KEPT
    from mtmc_lsp.core.settings import CODERS, PLANNERS
    from mtmc_lsp.report import text
    from mtmc_lsp.report.documents import run_document
    from mtmc_lsp.search.greedy import Events

    _choice("planner", planner or PLANNERS[0], PLANNERS)
    _choice("coder", coder or CODERS[0], CODERS)
    _choice("search", search, ("greedy",))

    def open_spec(name: str) -> OpenTarget:
        return _open(name, python, arch, budget, planner=planner, coder=coder, max_autotune=max_autotune)

    out = text.console(stderr=as_json)
    record, again = None, None
    if replay:
        again = _replayed(replay, python)
        opened, makers = again.opened, again.makers
    elif dry_run:
        return _dry_run(open_spec(spec), as_json)
    else:
        opened, record = _opened_run(spec, resume, open_spec)
        wanted = Backends.of(opened.request.settings)
        makers = consented(opened, wanted, explicit="llm" in (planner, coder), may_ask=not as_json)
    if apply and (replay or "::" not in spec):
        session.check_inside(opened, Path.cwd())
    with session.open_store(opened.request.path) as store, session.warmed(opened) as fork_server:
        with out.status("capturing the target") as status:
            capture = session.capture_target(opened, fork_server)
            text.show_head(out, capture)
            events = Events(
                on_action=lambda index, action: text.show_action(out, index, action),
                on_stage=status.update,
                on_step=lambda step: text.show_step(out, step, diff=diff and not as_json),
                on_replayed=lambda step: text.show_replayed(out, step),
                on_withdrawn=lambda step: text.show_withdrawn(out, step),
            )
            if again is not None and again.revision is not None:
                result = review.replayed_revision(again, capture, store, events)
            else:
                result = session.optimize(
                    opened,
                    capture,
                    store,
                    events,
                    resumed=record,
                    makers=makers,
                    model=again.model if again is not None else None,
                    fresh=fresh,
                    needs_sandbox=require_sandbox,
                    fork_server=fork_server,
                )
        text.show_result(out, result)
    backup = session.apply(opened, result) if apply else None
    if backup is not None:
        out.print(f"  written to {opened.request.path}; the text before is in {backup}")
    if as_json:
        print(run_document(result))
    return 0 if result.status in KEPT else 1


def _replayed(run: str, python: str) -> Replay:
    """A stored run, to be done again."""
    from mtmc_lsp.app.pipeline import open_replay

    with _project_store() as store:
        return open_replay(store, run, python)


def _dry_run(opened: OpenTarget, as_json: bool) -> int:
    """Show the messages of the first step."""
    from mtmc_lsp.app import pipeline as session
    from mtmc_lsp.app.backends import Backends
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.text import console, show_questions

    makers = Backends.of(opened.request.settings)
    if not makers.ask_a_model:
        raise RequestError(
            "nothing is ever sent without a model", remedy="Add --planner llm, --coder llm or --coder auto."
        )
    with console(stderr=True).status("capturing the target"):
        questions = session.first_messages(opened, session.capture_target(opened), makers)
    if as_json:
        print(document(target=opened.target, questions=questions))
    else:
        show_questions(console(), questions)
    return 0 if questions else 1


def _opened_run(spec: str, resume: bool, open_spec: Callable[[str], OpenTarget]) -> tuple[OpenTarget, RunRecord | None]:
    """The target, and the run to go on with."""
    from mtmc_lsp.app.pipeline import open_store, unfinished

    if not resume:
        if not spec:
            raise RequestError("what is to be optimised?", remedy="Write FILE::NAME, as in model.py::Block.forward.")
        return open_spec(spec), None
    if "::" in spec:
        opened = open_spec(spec)
        with open_store(opened.request.path) as store:
            return opened, unfinished(store, opened=opened)
    with _project_store() as store:
        record = unfinished(store, run=spec)
    return open_spec(f"{record.path}::{record.qualname}"), record


@app.command()
def plan(spec: Spec, arch: Arch = None, python: Python = "", as_json: AsJson = False) -> int:
    """Show what could be tried first, best first, with reasons; nothing is written."""
    from mtmc_lsp.app import pipeline as session
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.text import console, show_plan

    opened = _open(spec, python, arch)
    with console(stderr=True).status("capturing the target"):
        capture = session.capture_target(opened)
        actions, device = session.plan(opened, capture)
    if as_json:
        print(document(target=opened.target, device=device, actions=actions))
    else:
        show_plan(console(), actions, device, capture.workload.assumed)
    return 0 if actions else 1


@app.command()
def record(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="What to run: -- python train.py ...")],
    target: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(metavar="FILE::NAME", help="Note this target alone; may be given several times."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Run a command and note how your functions are called with tensors: shapes and ranges, never data."""
    from mtmc_lsp.app.record import record as run_recorded
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.text import console, show_recording

    recording = run_recorded(command, Path.cwd(), target or (), quiet=as_json)
    if as_json:
        print(document(**{name: getattr(recording, name) for name in ("command", "exit_code", "targets")}))
    show_recording(console(stderr=True) if as_json else console(), recording)
    return recording.exit_code or (0 if recording.targets else 1)


@app.command()
def runs(as_json: AsJson = False) -> int:
    """List the project's runs, newest first."""
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.text import console, runs_table

    with _project_store() as store:
        records = store.runs()
    if as_json:
        print(document(runs=records))
    elif records:
        console().print(runs_table(records))
    else:
        print("no runs yet: start one with `mtmc optimize FILE::NAME`")
    return 0


@app.command()
def export(
    run: Annotated[str, typer.Argument(help="A run's id, see `mtmc runs`.")],
    form: Annotated[str, typer.Option("--format", help="The form of the file: kernelbench.")] = "kernelbench",
    out: Out = None,
    reference: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--reference", help="Where to write your own code in the same form, to compare with."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Write a run's last good version as a self-contained file."""
    from mtmc_lsp.app.export import kernelbench, kernelbench_reference
    from mtmc_lsp.report.documents import document

    _choice("format", form, ("kernelbench",))
    with _project_store() as store:
        result = store.result(run)
    if result is None:
        raise RequestError(
            f"there is no finished run {run!r}", where=Location(str(store.folder)), remedy="See `mtmc runs`."
        )
    source = kernelbench(result)
    own = kernelbench_reference(result) if reference is not None else ""
    for path, text in ((out, source), (reference, own)):
        if path is not None:
            try:
                path.write_text(text, encoding="utf-8", newline="")
            except OSError as error:
                raise RequestError(
                    f"cannot be written: {error.strerror}", where=Location(str(path)), remedy="Choose another file."
                ) from None
    if as_json:
        print(document(run=run, format=form, path=str(out) if out else None, source=source))
    elif out is None:
        sys.stdout.write(source)
    return 0


@app.command()
def verify(
    reference: Annotated[str, typer.Argument(metavar="REFERENCE", help="FILE::NAME, or a file with `Model`.")],
    candidate: Annotated[str, typer.Argument(metavar="CANDIDATE", help="FILE::NAME, or a file with `ModelNew`.")],
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", help="Where to write the smallest failing case; else below .mtmc/failures."),
    ] = None,
    seed: Annotated[Optional[int], typer.Option("--seed", help="Of the inputs; else a secret one.")] = None,  # noqa: UP045
    allow_no_kernel: Annotated[
        bool, typer.Option("--allow-no-kernel", help="Accept a candidate that launches no Triton kernel.")
    ] = False,
    never_empty: Annotated[
        bool,
        typer.Option("--never-empty", help="Inputs have at least one element: the candidate need not take empty ones."),
    ] = False,
    far: Annotated[
        bool,
        typer.Option("--far", help="On a GPU, also try sizes at which offsets of elements pass 2^31, if they fit."),
    ] = False,
    sanitize: Annotated[
        bool, typer.Option("--sanitize", help="On a GPU, run it under NVIDIA's compute-sanitizer as well.")
    ] = False,
    require_sandbox: RequireSandbox = False,
    max_autotune: MaxAutotune = None,
    fresh: Fresh = False,
    python: Python = "",
    as_json: AsJson = False,
) -> int:
    """Check any candidate against any reference, check by check; a failure is written as a file that runs."""
    from mtmc_lsp.app.verify_pair import open_pair, verify_pair
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.text import console, show_pair

    settings = _settings(Path(reference.partition("::")[0]).absolute().parent, max_autotune=max_autotune)
    first, second = open_pair(reference, candidate, settings, python)
    with console(stderr=True).status("capturing the reference") as status:
        found = verify_pair(
            first,
            second,
            reproduction=out,
            seed=seed,
            needs_kernel=not allow_no_kernel,
            needs_sandbox=require_sandbox,
            takes_empty=not never_empty,
            far=far,
            sanitize=sanitize,
            on_case=lambda case: status.update(case.label),
            fresh=fresh,
        )
    if as_json:
        targets = {"reference": first.target, "candidate": second.target}
        times = {"speed": found.speed, "timing": found.timing, "untimed": found.untimed or None}
        print(document(**targets, verdict=found.verdict, **times, reproduction=found.reproduction or None))
    else:
        show_pair(console(), found)
    return 0 if found.verdict.is_correct else 1


@app.command()
def doctor(python: Python = "", as_json: AsJson = False) -> int:
    """Check what the tool needs, and say what to do about what is missing."""
    from mtmc_lsp.app.doctor import check_environment
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.text import console, findings_table

    with console(stderr=True).status("looking at the environment"):
        findings = check_environment(python)
    if as_json:
        print(document(findings=findings))
    else:
        console().print(findings_table(findings))
    able = all(finding.ok or not finding.required for finding in findings)
    return 0 if able else EnvironmentNotAble.exit_code


@app.command()
def lsp(
    tcp: Annotated[str, typer.Option("--tcp", metavar="HOST:PORT", help="Serve clients on this address.")] = "",
    log: Annotated[str, typer.Option("--log", metavar="FILE", help="Write a log there.")] = "",
) -> int:
    """Start the language server on standard input and output, as `mtmc-lsp` does."""
    from mtmc_lsp.server.app import serve

    serve(tcp=tcp or None, log_file=log or None)
    return 0


app.command()(bench)
app.command()(calibrate)
app.command()(profile)
