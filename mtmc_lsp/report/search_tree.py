"""The tree of a search with branches, as a picture of a page and as lines for a terminal.

Each trial stands below the version that it changed, with its speed over that version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rich.console import Console
from rich.text import Text

from mtmc_lsp.core.run import Step, StepStatus, parents
from mtmc_lsp.report.console import show
from mtmc_lsp.report.encoding import is_unicode
from mtmc_lsp.report.page import escape
from mtmc_lsp.report.phrases import outcome_text

T = TypeVar("T")
CAPTION = (
    "Each trial stands below the version that it changed. The number is its speed over that version, and the marked path leads "
    "to the delivered version."
)
ESTIMATED_CAPTION = (
    "Each trial stands below the version that it changed. Nothing was timed: the number is the predicted saving, and versions "
    "were ranked by predicted time. The marked path leads to the delivered version."
)
MARK = {StepStatus.ACCEPTED: ("✓", "green"), StepStatus.REJECTED: ("-", "yellow"), StepStatus.FAILED: ("✗", "red")}
WORDS = {StepStatus.ACCEPTED: "kept", StepStatus.REJECTED: "not faster", StepStatus.FAILED: "failed"}
ALTERNATIVE = "on another branch"


@dataclass
class Trial:
    """A node of the tree."""

    step: Step | None
    """None for the user's code."""
    title: str
    trials: list[Trial] = field(default_factory=list)
    """What was tried on this version."""


def is_tree(steps: Sequence[Step]) -> bool:
    """Whether the search tried actions on several versions; greedy searches do not."""
    return any(step.prior is not None for step in steps)


def trees(steps: Sequence[Step]) -> list[Trial]:
    """The user's code with all trials; one for each region if the run optimised several."""
    known, roots, nodes = parents(steps), dict[int, Trial](), dict[int, Trial]()
    for step in steps:
        name = f"your code, region {step.region}" if step.region else "your code"
        root = roots.setdefault(step.region, Trial(None, name))
        nodes[step.index] = Trial(step, step.action.text)
        nodes.get(known[step.index], root).trials.append(nodes[step.index])
    return list(roots.values())


def edge_text(step: Step) -> str:
    """The speed of a step over the version that it changed: ``1.25x``; the predicted saving if it was not timed."""
    ratio = (step.timing.against("previous") or step.timing.against("eager")) if step.timing is not None else None
    if ratio is not None:
        return f"{ratio.ratio:.2f}x"
    if step.status is StepStatus.FAILED or step.action.expected.saved_us <= 0:
        return ""
    return f"-{step.action.expected.saved_us:.0f} us, estimated"


def outcome_word(step: Step) -> str:
    """What came of a step, in few words."""
    return ALTERNATIVE if step.is_alternative else WORDS[step.status]


# A page ---------------------------------------------------------------------------------------------------------------


def tree_picture(steps: Sequence[Step]) -> str:
    """The section of the page; empty for a greedy search."""
    if not is_tree(steps):
        return ""
    caption = CAPTION if any(step.timing is not None for step in steps) else ESTIMATED_CAPTION
    picture = "".join(f'<ul class="tree">{_item(tree)}</ul>' for tree in trees(steps))
    return f'<h2>Search tree</h2>\n<div class="wide">{picture}</div>\n<p class="quiet">{escape(caption)}</p>'


def _item(trial: Trial) -> str:
    below = "".join(_item(item) for item in trial.trials)
    step = trial.step
    if step is None:
        return list_item("accepted", trial.title, below=below)
    state = "alternative" if step.is_alternative else step.status.value
    # The reason of a rejected step says that it was rejected.
    word = "" if step.status is StepStatus.REJECTED else outcome_word(step)
    why = "" if step.status is StepStatus.ACCEPTED else outcome_text(step)
    return list_item(state, f"{step.index}. {trial.title}", edge=edge_text(step), word=word, why=why, below=below)


def list_item(state: str, title: str, *, edge: str = "", word: str = "", why: str = "", below: str = "") -> str:
    """A node of a tree picture.

    Args:
        state: its class in the style sheet: ``accepted``, ``alternative``, ``rejected`` or ``failed``.
        edge: what led to it, in few characters.
        word: what came of it.
        why: the reason.
        below: the nodes below it, as HTML.
    """
    parts = [
        f'<span class="edge">{escape(edge)}</span> ' if edge else "",
        f'<span class="node">{escape(title)}</span>',
        f' <span class="state">{escape(word)}</span>' if word else "",
        f'<span class="quiet">: {escape(why)}</span>' if why else "",
        f"<ul>{below}</ul>" if below else "",
    ]
    return f'<li class="{state}">{"".join(parts)}</li>'


# A terminal -----------------------------------------------------------------------------------------------------------


def show_tree(out: Console, steps: Sequence[Step]) -> None:
    """Show the tree, a line for each trial; nothing for a greedy search."""
    if not is_tree(steps):
        return
    show(out, "Search tree", style="bold", indent=2)
    for tree in trees(steps):
        show(out, tree.title, indent=2)
        for branch, trial in branches(tree.trials, lambda item: item.trials, unicode=is_unicode(out.encoding)):
            step = trial.step
            assert step is not None, "only the root has no step"
            mark, style = MARK[step.status]
            first = Text.assemble(branch, (f"{mark} ", style), (f"{step.index}  ", "bold"))
            # A long title is cut off, the result is not.
            result = [text for text in (edge_text(step), outcome_word(step)) if text]
            show(out, Text(f"{', '.join(result)}: {step.action.text}"), first=first, indent=2, lines=1)


def branches(
    items: Sequence[T], below: Callable[[T], Sequence[T]], *, unicode: bool, margin: str = ""
) -> Iterator[tuple[str, T]]:
    """The nodes of a tree, each with the branch that leads to it.

    Args:
        below: the nodes below a node.
        unicode: whether the terminal shows box characters.
    """
    middle, last, down = ("├─ ", "└─ ", "│  ") if unicode else ("|- ", "`- ", "|  ")
    for number, item in enumerate(items, 1):
        is_last = number == len(items)
        yield f"{margin}{last if is_last else middle}", item
        further = f"{margin}{'   ' if is_last else down}"
        yield from branches(below(item), below, unicode=unicode, margin=further)
