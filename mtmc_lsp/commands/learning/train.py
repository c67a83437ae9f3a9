"""``mtmc train policy``: train a policy on measured transitions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Optional

import typer

from mtmc_lsp.commands.learning.command_line import command_line
from mtmc_lsp.commands.learning.replay import replay
from mtmc_lsp.commands.options import AsJson, check_choice, write_output
from mtmc_lsp.core.errors import Location, RequestError

train = typer.Typer(help="Train policies that choose optimisation steps, and compare them.", no_args_is_help=True)
train.command()(replay)
SECONDS = 600.0


@dataclass(frozen=True)
class TrainRequest:
    """What the command line asks for, whatever the kind of policy."""

    data: Path
    out: Path
    seconds: float
    seed: int
    without: tuple[str, ...]
    share: float
    model: str
    layers: int
    new_model: str
    epochs: int | None
    updates: int
    walks: int
    replays: int
    command: str
    """The command, without the folders of its paths."""
    as_json: bool


@train.command()
def policy(
    data: Annotated[Path, typer.Option("--data", metavar="DIR", help="Transitions that `mtmc explore` wrote.")],
    out: Annotated[
        Path,
        typer.Option("--out", help="The ranker's file, with its report beside it; for lm a folder, to continue too."),
    ],
    kind: Annotated[str, typer.Option("--kind", help="What is trained: ranker or lm.")] = "ranker",
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="Most seconds of training.")] = SECONDS,
    seed: Annotated[int, typer.Option("--seed", help="The same seed and data give the same model.")] = 0,
    without: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NAMES", help="For ablations: history, device, compile-reward; of lm also supervised."),
    ] = None,
    share: Annotated[float, typer.Option("--share", help="Share of the training programs, for ablations.")] = 1.0,
    model: Annotated[
        str, typer.Option("--model", help="Of lm: a name on the Hugging Face hub, a folder or a GGUF file.")
    ] = "",
    layers: Annotated[
        int,
        typer.Option(
            "--layers", min=0, metavar="N", help="Of lm: use only the first N layers of the model; 0 for all."
        ),
    ] = 0,
    new_model: Annotated[
        str,
        typer.Option("--new-model", metavar="SIZE", help="Of lm: a new small model instead: 1M, 4M or 15M weights."),
    ] = "",
    epochs: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option("--epochs", min=1, help="Of lm: epochs of the supervised start; 2, of a new model 3."),
    ] = None,
    updates: Annotated[int, typer.Option("--updates", min=0, help="Of lm: updates by PPO.")] = 200,
    walks: Annotated[
        int, typer.Option("--walks", min=1, help="Of lm: walks through trees per update by PPO; a GPU can do many.")
    ] = 16,
    replays: Annotated[
        int, typer.Option("--replays", min=0, help="Of lm: replay it on so many programs of held-out families.")
    ] = 0,
    as_json: AsJson = False,
) -> int:
    """Train a policy on the training families of the data, and evaluate it on the others by replaying measured trees."""
    check_choice("kind", kind, tuple(KINDS))
    names = tuple(name.strip() for name in without.split(",")) if without else ()
    request = TrainRequest(
        *(data, out, seconds, seed, names, share),
        model=model,
        layers=layers,
        new_model=new_model,
        epochs=epochs,
        updates=updates,
        walks=walks,
        replays=replays,
        command=command_line(),
        as_json=as_json,
    )
    return KINDS[kind](request)


def _train_ranker(request: TrainRequest) -> int:
    from dataclasses import replace

    from mtmc_lsp.app.provenance import current_build
    from mtmc_lsp.core.errors import EnvironmentNotAble
    from mtmc_lsp.policies.model_file import ModelHeader
    from mtmc_lsp.policies.ranker import RankerModel
    from mtmc_lsp.programs.splits import split_of
    from mtmc_lsp.report.console import LiveLine, console, live
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.page import render
    from mtmc_lsp.training.data import read_tree
    from mtmc_lsp.training.evaluation import evaluate
    from mtmc_lsp.training.page import TrainingReport, markdown, page
    from mtmc_lsp.training.ranker import RankerOptions, train_ranker

    options = RankerOptions(request.seed, request.seconds, request.without, request.share)
    _check_out(request.out)
    given = {"model": request.model, "layers": request.layers, "new-model": request.new_model, "epochs": request.epochs}
    for name in (name for name, value in given.items() if value):
        raise RequestError(f"--{name} is an option of --kind lm", remedy="Leave it out, or add --kind lm.")

    def provenance(header: ModelHeader) -> ModelHeader:
        build = current_build()
        return replace(header, commit=build.commit, command=request.command)

    line = LiveLine(stage="reading the data")
    with live(console(stderr=True), line):
        tree = read_tree(request.data)
        trained = train_ranker(tree, split_of, options, provenance, line.enter)
        line.enter("replaying measured trees")
        parts = tuple(evaluate(tree, RankerModel(trained.model), split_of))
    report = TrainingReport(trained, options, parts)
    _write_model(request.out, trained.model.to_bytes())
    text = markdown(report)
    write_output(request.out.with_suffix(".md"), text)
    written = [request.out, request.out.with_suffix(".md"), request.out.with_suffix(".json")]
    write_output(written[-1], document(training=report.to_document()) + "\n")
    try:
        write_output(request.out.with_suffix(".html"), render(page(report)))
        written.append(request.out.with_suffix(".html"))
    except EnvironmentNotAble as error:
        print(f"no page with curves is written: {error.message}. {error.remedy}", file=sys.stderr)
    if request.as_json:
        print(document(training=report.to_document(), written=[str(path) for path in written]))
    else:
        print(text)
        print(f"written: {', '.join(str(path) for path in written)}")
    return 0


def _train_lm(request: TrainRequest) -> int:
    from mtmc_lsp.core.errors import EnvironmentNotAble
    from mtmc_lsp.explore.parquet import read_programs, read_transitions, read_versions
    from mtmc_lsp.report.console import LiveLine, console, live
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.page import render
    from mtmc_lsp.training.lm.evaluation import replay_held_out
    from mtmc_lsp.training.lm.files import PAGE
    from mtmc_lsp.training.lm.messages import TrainingStatus
    from mtmc_lsp.training.lm.page import page, summary
    from mtmc_lsp.training.lm.parameters import ablation_of, lm_parameters
    from mtmc_lsp.training.lm.train import CONTINUE, LmOptions, train_lm
    from mtmc_lsp.training.tree import MeasuredTree

    ablation = ablation_of(request.without, request.share)
    parameters = lm_parameters(
        request.model,
        layers=request.layers,
        new_model=request.new_model,
        seed=request.seed,
        epochs=request.epochs,
        updates=request.updates,
        walks=request.walks,
        ablation=ablation,
    )
    line = LiveLine(stage="reading the data")

    def show(status: TrainingStatus) -> None:
        line.enter(f"training, update {status.update} of {status.updates}")

    with live(console(stderr=True), line):
        data = (read_programs(request.data), read_versions(request.data), read_transitions(request.data))
        line.enter("loading the language model")
        trained = train_lm(LmOptions(request.out, request.seconds, parameters), *data, on_status=show)
        line.enter("replaying measured trees")
        evaluations = replay_held_out(trained, MeasuredTree.of(*data), request.replays) if request.replays else []
    written = [trained.policy]
    try:
        write_output(request.out / PAGE, render(page(trained, parameters)))
        written.append(request.out / PAGE)
    except EnvironmentNotAble as error:
        print(f"no page with curves is written: {error.message}. {error.remedy}", file=sys.stderr)
    facts = [*summary(trained, parameters), *(line for part in evaluations for line in part.lines)]
    if request.as_json:
        known = {"status": trained.status, "parameters": parameters, "points": trained.points}
        print(document(**known, replays=evaluations, written=[str(path) for path in written]))
        return 0
    print("\n".join(facts))
    if not trained.is_complete:
        print(f"The training is not complete. {CONTINUE}")
    print(f"written: {', '.join(str(path) for path in written)}")
    return 0


KINDS: Mapping[str, Callable[[TrainRequest], int]] = {"ranker": _train_ranker, "lm": _train_lm}
"""The kinds of policies that can be trained, and what trains each."""


def _check_out(path: Path) -> None:
    """Refuse an output that cannot be written before the training, not after it.

    Raises:
        RequestError: the folder does not exist, or the name is that of a folder or of a report.
    """
    if path.is_dir() or not path.absolute().parent.is_dir():
        problem = "is a folder" if path.is_dir() else "is in a folder that does not exist"
        raise RequestError(problem, where=Location(str(path)), remedy="Name a file in an existing folder.")
    if path.suffix in (".md", ".json", ".html"):
        raise RequestError(
            f"a model cannot have the suffix {path.suffix}, which its report has",
            where=Location(str(path)),
            remedy="Name it ranker.policy.",
        )


def _write_model(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise RequestError(
            f"cannot be written: {error.strerror}", where=Location(str(path)), remedy="Choose another file."
        ) from None
