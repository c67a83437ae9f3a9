"""``mtmc train replay``: compare planners and searches on measured trees, without a GPU."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from mtmc_lsp.commands.learning.command_line import command_line
from mtmc_lsp.commands.options import AsJson, check_choice, write_output
from mtmc_lsp.core.errors import Location, RequestError

if TYPE_CHECKING:
    from mtmc_lsp.policies.lm.client import LmPolicy

PARTS = ("test", "validation")


def replay(
    data: Annotated[Path, typer.Option("--data", metavar="DIR", help="Transitions that `mtmc explore` wrote.")],
    out: Annotated[
        Path,
        typer.Option("--out", metavar="FILE", help="The report, a .md file; the .json and the .html are beside it."),
    ],
    policy_file: Annotated[
        str, typer.Option("--policy-file", metavar="FILE", help="The ranker; empty for the model of this version.")
    ] = "",
    lm: Annotated[
        Optional[list[Path]],  # noqa: UP045
        typer.Option("--lm", metavar="DIR", help="A policy of kind lm; may be given several times."),
    ] = None,
    part: Annotated[str, typer.Option("--part", help="The held-out families: test or validation.")] = PARTS[0],
    programs: Annotated[int, typer.Option("--programs", min=0, help="Most programs; 0 for all.")] = 0,
    as_json: AsJson = False,
) -> int:
    """Replay the roofline planner, the ranker and language models on held-out families: the speedup by candidates and seconds."""
    from mtmc_lsp.app.provenance import current_build
    from mtmc_lsp.core.errors import EnvironmentNotAble
    from mtmc_lsp.policies.lm.client import LmPolicy
    from mtmc_lsp.policies.model_file import model_path
    from mtmc_lsp.policies.ranker import RankerModel
    from mtmc_lsp.programs.splits import Split, split_of
    from mtmc_lsp.report.console import LiveLine, console, live
    from mtmc_lsp.report.documents import document
    from mtmc_lsp.report.page import render
    from mtmc_lsp.training.data import read_tree
    from mtmc_lsp.training.ranker import programs_of
    from mtmc_lsp.training.replay import replay, replayed_pairs
    from mtmc_lsp.training.replay_page import ReplayReport, replay_markdown, replay_page
    from mtmc_lsp.training.replays import Entrant, replay_all, usual_entrants

    check_choice("part", part, PARTS)
    if out.suffix != ".md" or not out.absolute().parent.is_dir():
        raise RequestError(
            "is not a .md file in an existing folder", where=Location(str(out)), remedy="Name such a file."
        )
    line = LiveLine(stage="reading the data")
    with live(console(stderr=True), line), ExitStack() as stack:
        model = RankerModel.of_file(model_path(policy_file))
        folders = lm or []
        policies = {_name(folder, len(folders)): LmPolicy(folder) for folder in folders}
        for each in policies.values():
            stack.callback(each.close)
        tree = read_tree(data)
        pairs = replayed_pairs(tree, programs_of(tree, split_of, Split(part)))
        pairs = pairs[:programs] if programs else pairs
        if not pairs:
            raise RequestError(
                f"the data has no timed program of a {part} family",
                where=Location(str(data)),
                remedy="Collect transitions of more programs with mtmc explore.",
            )
        entrants = usual_entrants(model)
        for name, each in policies.items():
            line.enter(f"loading {name}")
            # Its first decision loads the model, which is no part of a choice.
            replay(tree, pairs[0][0], each, pairs[0][1], limit=1)
            entrants |= {f"{name}-greedy": Entrant([each]), f"{name}-beam": Entrant([each], "beam")}
        line.enter(f"replaying {len(pairs)} measured trees")
        replayed = replay_all(tree, pairs, entrants)
    build = current_build()
    facts = (
        f"Data: {data.name}, {len(tree.programs)} programs",
        f"Ranker: {model.header.command or 'not recorded'}, at commit {model.header.commit or 'not recorded'}",
        *(_lm_fact(name, each) for name, each in policies.items()),
        f"Command: {command_line()}",
        f"Commit: {build.commit or 'not recorded'}",
    )
    report = ReplayReport(part, replayed, facts)
    text = replay_markdown(report)
    written = [out, out.with_suffix(".json")]
    write_output(out, text)
    write_output(written[-1], document(replays=report.to_document()) + "\n")
    try:
        write_output(out.with_suffix(".html"), render(replay_page(report)))
        written.append(out.with_suffix(".html"))
    except EnvironmentNotAble as error:
        print(f"no page with curves is written: {error.message}. {error.remedy}", file=sys.stderr)
    if as_json:
        print(document(replays=report.to_document(), written=[str(path) for path in written]))
        return 0
    print(text)
    print(f"written: {', '.join(str(path) for path in written)}")
    return 0


def _name(folder: Path, count: int) -> str:
    """``lm``; with several policies, the name of the training's folder too."""
    absolute = folder.absolute()
    return "lm" if count == 1 else f"lm {absolute.parent.name if absolute.name == 'policy' else absolute.name}"


def _lm_fact(name: str, policy: LmPolicy) -> str:
    description = policy.description
    layers = f"the first {description.layers} layers of " if description.layers else ""
    model = f"{layers}{Path(description.model).name}" if description.model else "a new model"
    latency = policy.latency.text if policy.latency is not None else "no decision"
    return f"{name}: {model}; {latency}"
