"""The coder that asks a model for one step's hunks, applies them strictly, and lets it mend what fails."""

from __future__ import annotations

import ast
import contextlib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mtmc_lsp.actions.catalogue import IllegalAction, apply_action
from mtmc_lsp.codegen.coder import BuiltinCoder, render
from mtmc_lsp.core.action import REMARK, MacroAction
from mtmc_lsp.core.chat import BudgetSpent, ChatModel, Message, ModelFailed, truncate_answer, truncation_notice
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import Author, Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.ir.regions import VIEWS
from mtmc_lsp.llm.coder.code_policy import ALLOCATION, check_rules
from mtmc_lsp.llm.coder.editable_text import Sheet, functions_of, launched_kernels, put_together, taken_apart
from mtmc_lsp.llm.coder.hunks import BadAnswer, edited
from mtmc_lsp.llm.coder.prompts import coding_messages, repair_message
from mtmc_lsp.llm.open_regions import OPEN
from mtmc_lsp.llm.prompting import recent
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.rewrites.graph_editing import CannotRewrite
from mtmc_lsp.schedule.launch_units import units
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.source.compose import compose, strip_generated


class LlmCoder:
    """Writes one action by a model's answer; unlike the built-in coder's, its answers need not repeat.

    The first step starts from a launcher that makes every torch call itself, which the model then moves into kernels.
    """

    def __init__(
        self,
        model: ChatModel,
        *,
        context_tokens: int,
        repairs: int = 3,
        samples: int = 1,
        archs: Sequence[str] = (),
        known: Mapping[str, str] | None = None,
    ) -> None:
        """Ask ``model``.

        Args:
            model: who is asked.
            context_tokens: of a prompt at most; notes and old tries are left out where it would be longer.
            repairs: how often it may mend one step, whatever is wrong with it.
            samples: how many versions of a step it is asked for at once.
            archs: what kernels are compiled for where there is no GPU.
            known: edits of an earlier run by the key of their action, which are taken before the model is asked.
        """
        self._model = model
        self._context_tokens = context_tokens
        self._repairs = repairs
        self._samples = samples
        self._archs = archs
        self._known = dict(known or {})
        self._left = 0
        self._talks: dict[str, list[Message]] = {}
        """The conversation that led to each version, by its id."""
        self._seen: dict[str, str] = {}
        """What became of each program that was written: the same one is never run twice."""

    def start(self, capture: Capture, source: str) -> Candidate:
        """The user's own file, nothing generated."""
        return BuiltinCoder().start(capture, source)

    def write(self, capture: Capture, candidate: Candidate, action: MacroAction) -> Candidate:
        """``candidate`` with ``action`` applied by the model: its first version that can be applied."""
        return self.write_several(capture, candidate, action)[0]

    def write_several(self, capture: Capture, candidate: Candidate, action: MacroAction) -> list[Candidate]:
        """Versions of ``candidate`` with ``action`` applied by the model, no two of them alike.

        Raises:
            CannotCode: no answer within the repairs could be applied, or there is nothing to start from.
            ModelNotUsable: the endpoint, the key or the model is not there.
        """
        self._left = self._repairs
        known = self._known.get(_without_remark(action).key, "")
        unwanted = known if REMARK in action.params else ""
        talk = coding_messages(
            capture,
            candidate,
            action,
            sheet_of(capture, candidate),
            most_tokens=self._context_tokens,
            unwanted=unwanted,
            archs=self._archs,
        )
        if known and not unwanted:
            with contextlib.suppress(BadAnswer):
                return [self._read(capture, candidate, action, known, [*talk, Message("assistant", known)])]
        return self._asked("code", capture, candidate, action, talk, self._samples)

    def repair(self, capture: Capture, candidate: Candidate, failed: Candidate, failure: str) -> Candidate:
        """Another try at the action of ``failed``, after ``failure`` was found in it."""
        assert failed.action is not None, "only the root has no action, and it cannot fail"
        self._seen[_form(failed)] = failure
        talk = self._next_try(self._talks[failed.id], failure, from_scratch=False)
        return self._asked("repair", capture, candidate, failed.action, talk, 1)[0]

    def _next_try(self, talk: list[Message], failure: str, hint: str = "", *, from_scratch: bool) -> list[Message]:
        if self._left <= 0:
            raise CannotCode(f"{failure} (after {self._repairs} repairs)" if self._repairs else failure)
        self._left -= 1
        told = repair_message(f"{failure}\n{hint}".strip(), from_scratch=from_scratch)
        return recent([*talk, told], self._context_tokens)

    def _asked(
        self,
        purpose: str,
        capture: Capture,
        candidate: Candidate,
        action: MacroAction,
        talk: list[Message],
        samples: int,
    ) -> list[Candidate]:
        while True:
            try:
                replies = self._model.ask(purpose, talk, samples=samples)
            except (BudgetSpent, ModelFailed) as failure:
                raise CannotCode(failure.message) from None
            made: dict[str, Candidate] = {}
            bad: list[tuple[list[Message], str, str]] = []
            for reply in replies:
                said = [*talk, Message("assistant", truncate_answer(reply.text))]
                try:
                    version = self._read(capture, candidate, action, reply.text, said)
                    made.setdefault(_form(version), version)
                except BadAnswer as wrong:
                    bad.append((said, f"{wrong} {truncation_notice(reply)}".strip(), wrong.hint))
            for form in made:
                self._seen[form] = "It was tried already."
            if made:
                return list(made.values())
            talk = self._next_try(*bad[0], from_scratch=True)
            purpose, samples = "repair", 1

    def _read(
        self, capture: Capture, candidate: Candidate, action: MacroAction, answer: str, talk: list[Message]
    ) -> Candidate:
        """The version that an answer makes.

        Raises:
            BadAnswer: it cannot be applied, breaks a rule, or is nothing new.
        """
        sheet = sheet_of(capture, candidate)
        text = edited(sheet.text, answer, sheet.launcher)
        after = _schedule_after(capture, candidate, action)
        elsewhere = _elsewhere(capture, candidate, after, sheet)
        check_rules(sheet, text, moved_calls=_moved_calls(capture, candidate, action), elsewhere=elsewhere)
        target = capture.workload.target
        plain = strip_generated(candidate.source.encode(), target.qualname)
        code = put_together(sheet, text, elsewhere)
        source = compose(plain, target, code).decode()
        made = Candidate(_key(source), candidate.id, action, source, code, to_json(after), author=Author.MODEL)
        if made.source == candidate.source:
            raise BadAnswer("The edit changes nothing.")
        if _form(made) in self._seen:
            raise BadAnswer(f"That is the same code as before. {self._seen[_form(made)]}")
        self._talks[made.id] = talk
        return made


def sheet_of(capture: Capture, candidate: Candidate) -> Sheet:
    """What the model may edit: of the user's own file, a launcher that makes every torch call itself.

    Raises:
        CannotCode: the target is nothing that a launcher can take over.
    """
    code = candidate.code
    if code is None:
        program = ir_of(capture.graph, Schedule())
        code, _ = render(capture, program, Schedule(), candidate.source)
    return taken_apart(code)


def _schedule_after(capture: Capture, candidate: Candidate, action: MacroAction) -> Schedule:
    """The schedule that planners see afterwards; what an open action writes is in none."""
    schedule = from_json(Schedule, candidate.schedule)
    if action.params.get(OPEN):
        return schedule
    try:
        return apply_action(capture.graph, schedule, _without_remark(action))
    except IllegalAction as reason:
        raise CannotCode(str(reason)) from None


def _without_remark(action: MacroAction) -> MacroAction:
    return replace(action, params={name: value for name, value in action.params.items() if name != REMARK})


def _elsewhere(capture: Capture, candidate: Candidate, after: Schedule, sheet: Sheet) -> set[str]:
    """The kernels that an action leaves as they are, by the schedule ``after`` it; as far as that is known."""
    before = from_json(Schedule, candidate.schedule)
    kernels = launched_kernels(functions_of(sheet.text)[sheet.launcher])
    if before.rewrites != after.rewrites:
        return set()
    if all(plan in after.kernels for plan in before.kernels):
        # It is about torch calls alone, none of which any kernel makes.
        return kernels
    names = [launch.kernel for launch in candidate.launches]
    plans = [unit.plan for unit in units(ir_of(capture.graph, before), before) if unit.plan is not None]
    if len(names) != len(plans):
        # What a model wrote is in no schedule, and some parts are several kernels.
        return set()
    return {name for name, plan in zip(names, plans, strict=True) if plan in after.kernels} & kernels


def _moved_calls(capture: Capture, candidate: Candidate, action: MacroAction) -> int:
    """How many torch calls of the action's region a kernel is to take over."""
    schedule = from_json(Schedule, candidate.schedule)
    try:
        program = ir_of(capture.graph, schedule)
    except CannotRewrite as reason:
        raise CannotCode(str(reason)) from None
    free = {name for unit in units(program, schedule) if unit.plan is None for name in unit.nodes}
    after = {name for kernel in _schedule_after(capture, candidate, action).kernels for name in kernel.nodes}
    taken = free & set(action.region) if action.params.get(OPEN) else free & after
    operations = [program.graph.node(name).op.split(".")[1] for name in taken]
    return sum(1 for operation in operations if operation not in VIEWS | ALLOCATION)


def _form(candidate: Candidate) -> str:
    """What makes two versions the same program: comments and line breaks do not."""
    assert candidate.code is not None, "only the root has no code"
    return ast.dump(ast.parse(candidate.code.block))


def _key(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
