"""The tools of the agent: everything that a language model can do in one variation. None reaches files, a shell or the network.

Generated code is compiled and runs only in the sandboxed processes of the trial runner.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from mtmc_lsp.actions.base import lines_of, lines_text
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.protocols import CannotCode, Coder, State
from mtmc_lsp.core.run import Author, Candidate, Placement, Step, StepStatus
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.evolve.knowledge.base import KnowledgeBase
from mtmc_lsp.evolve.lineage import Version
from mtmc_lsp.evolve.operators.base import Task, steps_to
from mtmc_lsp.evolve.trials import Stage, TrialRequest, TrialResult, TrialRunner
from mtmc_lsp.explore.judgement import GOOD
from mtmc_lsp.ir.lower import lower
from mtmc_lsp.llm.coder.code_policy import findings
from mtmc_lsp.llm.coder.coder import apply_edit, editable_code_of
from mtmc_lsp.llm.coder.editable_text import functions_of
from mtmc_lsp.llm.coder.hunks import InvalidAnswer
from mtmc_lsp.llm.open_regions import FREE_EDIT
from mtmc_lsp.llm.profile_text import profile_text
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.search.trial import version_key

MOST_RESULT = 6000
"""Most characters of a tool's result."""
MOST_TRIALS = 8
"""Most times that a version is compiled, verified or timed in one variation."""
MOST_LISTED = 16
"""Most actions in a list."""
MOST_VERSIONS = 25
"""Most versions in the list of the lineage, the last ones."""
MOST_NAMES = 3
"""Most functions in the title of an edit."""
MOST_WORDS = 240
"""Most characters of a query or a reason."""


class ToolFailed(Exception):
    """A call of a tool had no effect. The message tells the model why."""


@dataclass(frozen=True)
class Workshop:
    """What the tools of all variations share."""

    capture: Capture
    coder: Coder
    """The built-in coder."""
    planner: RooflinePlanner
    runner: TrialRunner
    knowledge: KnowledgeBase
    device: DeviceModel
    place: Placement = Placement.END


@dataclass
class Tools:
    """The tools of one variation, with its draft."""

    workshop: Workshop
    task: Task
    candidate: Candidate
    """The draft."""
    actions: list[MacroAction] = field(default_factory=list)
    """What was done since the parent."""
    trials: int = 0
    reason: str = ""
    """Why the variation ended, in the model's words."""
    is_committed: bool = False
    is_given_up: bool = False

    @property
    def is_ended(self) -> bool:
        """Whether no further call is possible."""
        return self.is_committed or self.is_given_up

    def call(self, name: str, argument: str) -> str:
        """The result of a tool as text for the model.

        Raises:
            ToolFailed: the call had no effect.
        """
        tool = TOOLS.get(name)
        if tool is None:
            raise ToolFailed(f"There is no tool {printable(name, 40)!r}. Tools: {', '.join(TOOLS)}.")
        text = tool.run(self, argument)
        return text if len(text) <= MOST_RESULT else f"{text[:MOST_RESULT]}\n[cut]"

    # Reading -----------------------------------------------------------------------------------------------------

    def lineage(self, _: str) -> str:
        """The versions so far."""
        lineage = self.task.lineage
        shown = [item for item in lineage.versions if item.candidate is not None or item.scores][-MOST_VERSIONS:]
        best = lineage.best()
        lines = [_line(item) for item in shown]
        return "\n".join([f"Best: version {best.number}, {best.gain:.2f}x the speed of the user's code.", *lines])

    def version(self, argument: str) -> str:
        """One version."""
        lineage = self.task.lineage
        number = _number(argument, len(lineage.versions) - 1, least=0)
        item = lineage.version(number)
        code = item.candidate.code if item.candidate is not None else None
        return f"{_line(item)}\n{code.block if code is not None else 'It has no kernels.'}"

    def knowledge(self, argument: str) -> str:
        """Notes and lessons."""
        hits = self.workshop.knowledge.search(argument[:MOST_WORDS], limit=4)
        return "\n\n".join(f"[{hit.entry.title}]\n{hit.entry.text}" for hit in hits) or "Nothing is known about that."

    def profile(self, _: str) -> str:
        """Where the time goes."""
        return profile_text(self._state())

    def text(self, _: str = "") -> str:
        """The text that edits apply to."""
        return editable_code_of(self.workshop.capture, self.candidate).text

    def lint(self, _: str) -> str:
        """Static checks."""
        return "\n".join(f"{code}: {message}" for code, message in findings(self.text())) or "No findings."

    # Changing the draft ------------------------------------------------------------------------------------------

    def list_actions(self, _: str = "") -> str:
        """The legal actions of the catalogue."""
        listed = self._legal()
        return (
            "\n".join(
                f"{number}. {action.text} ({lines_text(action.lines)}) [{action.kind.value}]: predicted to save "
                f"{action.expected.saved_us:.1f} us. {action.rationale}"
                for number, action in enumerate(listed, 1)
            )
            or "No action of the catalogue is legal."
        )

    def apply(self, argument: str) -> str:
        """One action of the catalogue."""
        listed = self._legal()
        if not listed:
            raise ToolFailed("No action of the catalogue is legal.")
        action = listed[_number(argument, len(listed)) - 1]
        try:
            self._take(action, self.workshop.coder.write(self.workshop.capture, self.candidate, action))
        except CannotCode as reason:
            raise ToolFailed(f"The action cannot be written: {reason}") from None
        return f"Applied: {action.text}."

    def edit(self, argument: str) -> str:
        """An edit of the kernels and the launcher."""
        capture, before = self.workshop.capture, self.candidate
        if capture.graph.backward is not None:
            raise ToolFailed("Kernels with a backward pass cannot be edited; use the actions of the catalogue.")
        nodes = tuple(node.name for node in capture.graph.nodes)
        mark = hashlib.sha256(f"{before.id}\0{argument}".encode()).hexdigest()[:12]
        action = MacroAction(
            ActionKind.FUSE,
            nodes,
            lines_of(lower(capture.graph), nodes),
            {FREE_EDIT: mark},
            "A language model edited the kernels or the launcher.",
            text="Edit the kernels",
        )
        try:
            after = apply_edit(capture, before, action, argument, self.workshop.place)
            names = _changed_functions(editable_code_of(capture, before).text, editable_code_of(capture, after).text)
        except (InvalidAnswer, CannotCode) as reason:
            hint = getattr(reason, "hint", "")
            raise ToolFailed(f"{reason}\n{hint}".strip()) from None
        if after.source == before.source:
            raise ToolFailed("The edit changes nothing.")
        action = replace(action, text=f"Edit {names}")
        self._take(action, replace(after, action=action))
        return f"Edited: {names}."

    def reset(self, _: str) -> str:
        """Begin again."""
        assert self.task.parent.candidate is not None
        self.candidate, self.actions = self.task.parent.candidate, []
        return f"The draft is version {self.task.parent.number} again."

    # Trying ------------------------------------------------------------------------------------------------------

    def compile(self, _: str) -> str:
        """Compile the draft."""
        result = self._try(Stage.COMPILE)
        return f"It compiles.\n{result.compiled}"

    def verify(self, _: str) -> str:
        """Verify the draft on few cases."""
        self._try(Stage.VERIFY)
        return "It is correct on the quick cases."

    def time(self, _: str) -> str:
        """The speed of the draft on every workload."""
        result = self._try(Stage.SCORE)
        what = "measured" if self.workshop.runner.has_gpu else "estimated by the cost model"
        return (
            "\n".join(
                f"workload {number}: {item.us:.1f} us, {item.ratio:.3f}x the speed of version {self.task.parent.number} ({what})"
                for number, item in enumerate(result.workloads, 1)
            )
            or result.detail
        )

    # Ending ------------------------------------------------------------------------------------------------------

    def commit(self, argument: str) -> str:
        """End with the draft."""
        if not self.actions:
            raise ToolFailed("The draft is the same as its parent: change it first.")
        if self.task.is_known(version_key(self.candidate)):
            raise ToolFailed("The same version was tried before. See lineage.")
        self.reason, self.is_committed = printable(argument), True
        return "The draft is tried on all workloads."

    def give_up(self, argument: str) -> str:
        """End without a version."""
        self.reason, self.is_given_up = printable(argument), True
        return "No version."

    # Parts -------------------------------------------------------------------------------------------------------

    def _take(self, action: MacroAction, candidate: Candidate) -> None:
        dependencies = self.workshop.capture.graph.dependencies
        self.candidate = replace(candidate, dependencies=dependencies)
        self.actions.append(action)

    def _legal(self) -> list[MacroAction]:
        if self.candidate.author is Author.MODEL:
            raise ToolFailed("Actions of the catalogue would remove your edits: reset, apply them first, then edit.")
        actions = self.workshop.planner.ranked(self._state())
        return [action for action in actions if "variants" not in action.params][:MOST_LISTED]

    def _state(self) -> State:
        history = [*steps_to(self.task.lineage, self.task.parent)]
        for action in self.actions:
            history.append(Step(len(history) + 1, action, StepStatus.ACCEPTED, ""))
        runner = self.workshop.runner
        times = partial(runner.kernel_times, self.candidate)
        return State(self.workshop.capture, self.candidate, tuple(history), self.workshop.device, runner.has_gpu, times)

    def _try(self, stage: Stage) -> TrialResult:
        if not self.actions:
            raise ToolFailed("The draft is the same as its parent: change it first.")
        if self.trials >= MOST_TRIALS:
            raise ToolFailed(f"{MOST_TRIALS} trials were made: commit the draft or give up.")
        self.trials += 1
        assert self.task.parent.candidate is not None
        (result,) = self.workshop.runner.run([TrialRequest(self.task.parent.candidate, self.candidate, stage)])
        if result.outcome not in GOOD:
            raise ToolFailed(f"{result.outcome.value}: {result.detail}")
        return result


@dataclass(frozen=True)
class Tool:
    """One tool."""

    run: Callable[[Tools, str], str]
    text: str
    """What it does and what its argument is, for the model."""


TOOLS: Mapping[str, Tool] = {
    "lineage": Tool(Tools.lineage, "lists the last versions with their speed, their parents and what became of them"),
    "version": Tool(Tools.version, "argument: the number of a version; shows its kernels"),
    "knowledge": Tool(Tools.knowledge, "argument: words; searches notes on kernels and lessons of earlier runs"),
    "profile": Tool(Tools.profile, "shows where the time of the draft goes"),
    "text": Tool(Tools.text, "shows the kernels and the launcher of the draft, to which edits apply"),
    "lint": Tool(Tools.lint, "runs static checks on the draft"),
    "actions": Tool(Tools.list_actions, "lists the legal actions of the catalogue with their predicted savings"),
    "apply": Tool(Tools.apply, "argument: the number of an action in that list; applies it to the draft"),
    "edit": Tool(Tools.edit, "argument: search/replace hunks; edits the kernels and the launcher of the draft"),
    "reset": Tool(Tools.reset, "makes the draft the parent again"),
    "compile": Tool(Tools.compile, "compiles the draft: registers, spills, shared memory"),
    "verify": Tool(Tools.verify, "verifies the draft on quick cases"),
    "time": Tool(Tools.time, "the speed of the draft on every workload"),
    "commit": Tool(Tools.commit, "argument: why, in one sentence; ends with the draft"),
    "give_up": Tool(Tools.give_up, "argument: why, in one sentence; ends without a version"),
}
"""The tools by name."""


def printable(text: str, most: int = MOST_WORDS) -> str:
    """A model's text as one line: without control characters, which could change a terminal, and not too long."""
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= most else f"{line[:most]}..."


def _line(item: Version) -> str:
    parent = f"from {item.parent}" if item.parent is not None else "the user's code"
    speed = f"{item.gain:.2f}x" if item.scores else "no score"
    return f"version {item.number} ({parent}): {speed}, {item.status.value}. {item.title}. {item.reason}"


def _number(argument: str, most: int, least: int = 1) -> int:
    text = argument.strip()
    if not text.isascii() or not text.isdigit() or len(text) > 6 or not least <= int(text) <= most:
        raise ToolFailed(f"The argument must be a number from {least} to {most}, not {printable(text, 40)!r}.")
    return int(text)


def _changed_functions(before: str, after: str) -> str:
    """The functions that an edit adds or changes: ``f_kernel and f_launch``."""
    old = {name: ast.dump(function) for name, function in functions_of(before).items()}
    names = [name for name, function in functions_of(after).items() if old.get(name) != ast.dump(function)]
    return " and ".join(names[:MOST_NAMES]) or "the launcher"
