"""The coder that asks a model for one step's hunks, applies them strictly, and lets it mend what fails."""

from __future__ import annotations

import hashlib

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.chat import BudgetSpent, ChatModel, Message, ModelFailed
from mtmc_lsp.core.jsonable import from_json, to_json
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import Candidate, GeneratedCode
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.macro.catalogue import IllegalAction, apply_action
from mtmc_lsp.macro.open_regions import OPEN
from mtmc_lsp.macro.regions import VIEWS
from mtmc_lsp.macro.rewrites import program_of
from mtmc_lsp.macro.rewrites.editing import CannotRewrite
from mtmc_lsp.macro.schedule import Schedule
from mtmc_lsp.macro.units import units
from mtmc_lsp.micro.builtin.coder import BuiltinCoder, render
from mtmc_lsp.micro.llm.hunks import BadAnswer, edited
from mtmc_lsp.micro.llm.prompts import coding_messages, repair_message
from mtmc_lsp.micro.llm.rules import ALLOCATION, check_rules
from mtmc_lsp.micro.llm.sheet import Sheet, put_together, taken_apart
from mtmc_lsp.source.compose import compose, strip_generated


class LlmCoder:
    """Writes one action by a model's answer; unlike the built-in coder's, its answers need not repeat.

    The first step starts from a launcher that makes every torch call itself, which the model then moves into kernels.
    """

    def __init__(self, model: ChatModel, *, repairs: int = 3) -> None:
        """``repairs`` is how often the model may mend one step, whatever is wrong with it."""
        self._model = model
        self._repairs = repairs
        self._left = 0
        self._talk: list[Message] = []
        self._last = ""
        """The id of what was written last."""
        self._seen: dict[str, str] = {}
        """What became of each text that was written: the same code is never run twice."""

    def start(self, capture: Capture, source: str) -> Candidate:
        """The user's own file, nothing generated."""
        return BuiltinCoder().start(capture, source)

    def write(self, capture: Capture, candidate: Candidate, action: MacroAction) -> Candidate:
        """``candidate`` with ``action`` applied by the model.

        Raises:
            CannotCode: no answer within the repairs could be applied, or there is nothing to start from.
            ModelNotUsable: the endpoint, the key or the model is not there.
        """
        self._left = self._repairs
        self._talk = coding_messages(capture, candidate, action, sheet_of(capture, candidate))
        return self._asked("code", capture, candidate, action)

    def repair(self, capture: Capture, candidate: Candidate, action: MacroAction, failure: str) -> Candidate:
        """Another try at the action that was written last, after ``failure`` was found in it."""
        self._seen[self._last] = failure
        self._next_try(failure, from_scratch=False)
        return self._asked("repair", capture, candidate, action)

    def _next_try(self, failure: str, *, from_scratch: bool) -> None:
        if self._left <= 0:
            raise CannotCode(f"{failure} (after {self._repairs} repairs)" if self._repairs else failure)
        self._left -= 1
        self._talk.append(repair_message(failure, from_scratch=from_scratch))

    def _asked(self, purpose: str, capture: Capture, candidate: Candidate, action: MacroAction) -> Candidate:
        schedule = _schedule_after(capture, candidate, action)
        sheet = sheet_of(capture, candidate)
        while True:
            try:
                answer = self._model.ask(purpose, self._talk)
            except (BudgetSpent, ModelFailed) as failure:
                raise CannotCode(failure.message) from None
            self._talk.append(Message("assistant", answer))
            try:
                text = edited(sheet.text, answer, sheet.launcher)
                check_rules(sheet, text, moved_calls=_moved_calls(capture, candidate, action))
                return self._candidate(capture, candidate, action, put_together(sheet, text), schedule)
            except BadAnswer as wrong:
                self._next_try(str(wrong), from_scratch=True)
                purpose = "repair"

    def _candidate(
        self, capture: Capture, candidate: Candidate, action: MacroAction, code: GeneratedCode, schedule: Schedule
    ) -> Candidate:
        target = capture.workload.target
        plain = strip_generated(candidate.source.encode(), target.qualname)
        text = compose(plain, target, code).decode()
        made = Candidate(_key(text), candidate.id, action, text, code, to_json(schedule))
        if made.source == candidate.source:
            raise BadAnswer("The edit changes nothing.")
        if made.id in self._seen:
            raise BadAnswer(f"That is the same code as before. {self._seen[made.id]}")
        self._last, self._seen[made.id] = made.id, "It was tried already."
        return made


def sheet_of(capture: Capture, candidate: Candidate) -> Sheet:
    """What the model may edit: of the user's own file, a launcher that makes every torch call itself.

    Raises:
        CannotCode: the target is nothing that a launcher can take over.
    """
    code = candidate.code
    if code is None:
        program = program_of(capture.graph, Schedule())
        code, _ = render(capture, program, Schedule(), candidate.source)
    return taken_apart(code)


def _schedule_after(capture: Capture, candidate: Candidate, action: MacroAction) -> Schedule:
    """The schedule that planners see afterwards; what an open action writes is in none."""
    schedule = from_json(Schedule, candidate.schedule)
    if action.params.get(OPEN):
        return schedule
    try:
        return apply_action(capture.graph, schedule, action)
    except IllegalAction as reason:
        raise CannotCode(str(reason)) from None


def _moved_calls(capture: Capture, candidate: Candidate, action: MacroAction) -> int:
    """How many torch calls of the action's region a kernel is to take over."""
    schedule = from_json(Schedule, candidate.schedule)
    try:
        program = program_of(capture.graph, schedule)
    except CannotRewrite as reason:
        raise CannotCode(str(reason)) from None
    free = {name for unit in units(program, schedule) if unit.plan is None for name in unit.nodes}
    after = {name for kernel in _schedule_after(capture, candidate, action).kernels for name in kernel.nodes}
    taken = free & set(action.region) if action.params.get(OPEN) else free & after
    operations = [program.graph.node(name).op.split(".")[1] for name in taken]
    return sum(1 for operation in operations if operation not in VIEWS | ALLOCATION)


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
