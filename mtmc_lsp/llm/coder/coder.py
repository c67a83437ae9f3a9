"""Coder that asks a model for the hunks of one step, applies them strictly, and lets the model repair failures."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mtmc_lsp.actions.catalogue import IllegalAction, apply_action
from mtmc_lsp.codegen.coder import BuiltinCoder, content_id, render
from mtmc_lsp.codegen.standalone import placed
from mtmc_lsp.core.action import REMARK, MacroAction
from mtmc_lsp.core.chat import BudgetSpent, ChatModel, Message, ModelFailed, truncate_answer, truncation_notice
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import Author, Candidate, Placement
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.device.choice import default_model
from mtmc_lsp.ir.regions import VIEWS
from mtmc_lsp.llm.coder.code_policy import ALLOCATION, check_policy
from mtmc_lsp.llm.coder.editable_text import EditableCode, assemble_code, functions_of, launched_kernels, split_code
from mtmc_lsp.llm.coder.hunks import InvalidAnswer, apply_answer
from mtmc_lsp.llm.coder.prompts import coding_messages, repair_message
from mtmc_lsp.llm.open_regions import FREE_EDIT, OPEN_REGION
from mtmc_lsp.llm.prompting import trim_conversation
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.rewrites.graph_editing import CannotRewrite
from mtmc_lsp.schedule.launch_units import units
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.source.compose import compose, strip_generated


class LlmCoder:
    """Writes one action with a model. Unlike the built-in coder, it is not deterministic.

    The first step starts from a launcher that contains every torch call; the model then moves calls into kernels.
    """

    def __init__(
        self,
        model: ChatModel,
        *,
        context_tokens: int,
        repairs: int = 3,
        samples: int = 1,
        archs: Sequence[str] = (),
        known_edits: Mapping[str, str] | None = None,
        place: Placement = Placement.END,
    ) -> None:
        """Create a coder.

        Args:
            context_tokens: maximum tokens of a prompt; notes and old attempts are omitted from longer prompts.
            repairs: maximum number of repair requests per step.
            samples: number of versions requested at once for each step.
            archs: architectures to compile for if there is no GPU.
            known_edits: edits of an earlier run by the key of their action, used before the model is asked.
            place: where the code goes in the user's file.
        """
        self._model = model
        self._context_tokens = context_tokens
        self._repairs = repairs
        self._samples = samples
        self._archs = archs
        self._place = place
        self._known_edits = dict(known_edits or {})
        self._remaining_repairs = 0
        self._conversations: dict[str, list[Message]] = {}
        """The conversation that led to each version, by candidate id."""
        self._outcomes: dict[str, str] = {}
        """The outcome of each version by its syntax tree, so that the same code is never run twice."""

    def start(self, capture: Capture, source: str) -> Candidate:
        """The original file, without generated code."""
        return BuiltinCoder().start(capture, source)

    def write(self, capture: Capture, candidate: Candidate, action: MacroAction) -> Candidate:
        """``candidate`` with ``action`` applied by the model: the first valid version."""
        return self.write_several(capture, candidate, action)[0]

    def write_several(self, capture: Capture, candidate: Candidate, action: MacroAction) -> list[Candidate]:
        """Distinct versions of ``candidate`` with ``action`` applied by the model.

        Raises:
            CannotCode: no valid answer within the allowed repairs, or no launcher can be generated for the target.
            ModelNotUsable: the endpoint, the API key or the model is missing or invalid.
        """
        if capture.graph.backward is not None:
            raise CannotCode(
                "a model cannot write kernels with a backward pass; leave out grad=, or use --coder builtin"
            )
        self._remaining_repairs = self._repairs
        known_edit = self._known_edits.get(_without_remark(action).key, "")
        rejected_edit = known_edit if REMARK in action.params else ""
        conversation = coding_messages(
            capture,
            candidate,
            action,
            editable_code_of(capture, candidate),
            max_tokens=self._context_tokens,
            rejected_edit=rejected_edit,
            archs=self._archs,
        )
        if known_edit and not rejected_edit:
            with contextlib.suppress(InvalidAnswer):
                return [
                    self._parse_answer(
                        capture, candidate, action, known_edit, [*conversation, Message("assistant", known_edit)]
                    )
                ]
        return self._request_candidates("code", capture, candidate, action, conversation, self._samples)

    def repair(self, capture: Capture, candidate: Candidate, failed: Candidate, failure: str) -> Candidate:
        """Ask the model to repair ``failed``, whose verification or compilation reported ``failure``."""
        assert failed.action is not None, "only the root has no action, and it cannot fail"
        self._outcomes[_syntax(failed)] = failure
        conversation = self._next_attempt(self._conversations[failed.id], failure, from_scratch=False)
        return self._request_candidates("repair", capture, candidate, failed.action, conversation, 1)[0]

    def _next_attempt(
        self, conversation: list[Message], failure: str, hint: str = "", *, from_scratch: bool
    ) -> list[Message]:
        if self._remaining_repairs <= 0:
            raise CannotCode(f"{failure} (after {self._repairs} repairs)" if self._repairs else failure)
        self._remaining_repairs -= 1
        message = repair_message(f"{failure}\n{hint}".strip(), from_scratch=from_scratch)
        return trim_conversation([*conversation, message], self._context_tokens)

    def _request_candidates(
        self,
        purpose: str,
        capture: Capture,
        candidate: Candidate,
        action: MacroAction,
        conversation: list[Message],
        samples: int,
    ) -> list[Candidate]:
        while True:
            try:
                replies = self._model.ask(purpose, conversation, samples=samples)
            except (BudgetSpent, ModelFailed) as failure:
                raise CannotCode(failure.message) from None
            candidates: dict[str, Candidate] = {}
            failures: list[tuple[list[Message], str, str]] = []
            for reply in replies:
                next_conversation = [*conversation, Message("assistant", truncate_answer(reply.text))]
                try:
                    version = self._parse_answer(capture, candidate, action, reply.text, next_conversation)
                    candidates.setdefault(_syntax(version), version)
                except InvalidAnswer as error:
                    failures.append((next_conversation, f"{error} {truncation_notice(reply)}".strip(), error.hint))
            for syntax in candidates:
                self._outcomes[syntax] = "It was already tried."
            if candidates:
                return list(candidates.values())
            conversation = self._next_attempt(*failures[0], from_scratch=True)
            purpose, samples = "repair", 1

    def _parse_answer(
        self, capture: Capture, candidate: Candidate, action: MacroAction, answer: str, conversation: list[Message]
    ) -> Candidate:
        """The version that results from an answer.

        Raises:
            InvalidAnswer: the edit cannot be applied, violates a rule, or repeats earlier code.
        """
        version = apply_edit(capture, candidate, action, answer, self._place)
        if version.source == candidate.source:
            raise InvalidAnswer("The edit changes nothing.")
        if _syntax(version) in self._outcomes:
            raise InvalidAnswer(f"That is the same code as before. {self._outcomes[_syntax(version)]}")
        self._conversations[version.id] = conversation
        return version


def apply_edit(
    capture: Capture, candidate: Candidate, action: MacroAction, answer: str, place: Placement = Placement.END
) -> Candidate:
    """``candidate`` after the edit in a model's answer.

    Args:
        place: where the code goes in the user's file.

    Raises:
        InvalidAnswer: the edit cannot be applied, or violates a rule.
        CannotCode: no launcher can be generated for this target, or the action does not apply.
    """
    editable = editable_code_of(capture, candidate)
    text = apply_answer(editable.text, answer, editable.launcher)
    new_schedule = _schedule_after(capture, candidate, action)
    unrelated_kernels = _unrelated_kernels(capture, candidate, action, new_schedule, editable)
    check_policy(
        editable, text, moved_calls=_moved_calls(capture, candidate, action), unrelated_kernels=unrelated_kernels
    )
    target = capture.workload.target
    original = strip_generated(candidate.source.encode(), target.qualname)
    code = placed(assemble_code(editable, text, unrelated_kernels), place, original)
    source = compose(original, target, code).decode()
    return Candidate(content_id(source), candidate.id, action, source, code, to_json(new_schedule), author=Author.MODEL)


def editable_code_of(capture: Capture, candidate: Candidate) -> EditableCode:
    """The code that the model may edit. Without generated code: a launcher that contains every torch call.

    Raises:
        CannotCode: no launcher can be generated for this target.
    """
    code = candidate.code
    if code is None:
        ir = ir_of(capture.graph, Schedule())
        # Torch calls alone are the same for every device.
        code = render(capture, ir, Schedule(), candidate.source, default_model()).code
    return split_code(code)


def _schedule_after(capture: Capture, candidate: Candidate, action: MacroAction) -> Schedule:
    """The schedule after ``action``. Actions on open regions, and edits of any kernel, do not change it."""
    schedule = from_json(Schedule, candidate.schedule)
    if {OPEN_REGION, FREE_EDIT} & set(action.params):
        return schedule
    try:
        return apply_action(capture.graph, schedule, _without_remark(action))
    except IllegalAction as reason:
        raise CannotCode(str(reason)) from None


def _without_remark(action: MacroAction) -> MacroAction:
    return replace(action, params={name: value for name, value in action.params.items() if name != REMARK})


def _unrelated_kernels(
    capture: Capture, candidate: Candidate, action: MacroAction, after: Schedule, editable: EditableCode
) -> set[str]:
    """The kernels that an action must not change, derived from the schedule ``after`` it; empty if unknown."""
    if FREE_EDIT in action.params:
        return set()
    before = from_json(Schedule, candidate.schedule)
    kernels = launched_kernels(functions_of(editable.text)[editable.launcher])
    if before.rewrites != after.rewrites:
        return set()
    if all(plan in after.kernels for plan in before.kernels):
        # The action concerns only torch calls, so no existing kernel changes.
        return kernels
    names = [launch.kernel for launch in candidate.launches]
    plans = [unit.plan for unit in units(ir_of(capture.graph, before), before) if unit.plan is not None]
    if len(names) != len(plans):
        # Kernels of a model are not in the schedule, and some launch units are several kernels.
        return set()
    return {name for name, plan in zip(names, plans, strict=True) if plan in after.kernels} & kernels


def _moved_calls(capture: Capture, candidate: Candidate, action: MacroAction) -> int:
    """Number of torch calls in the action's region that a kernel must replace."""
    if FREE_EDIT in action.params:
        return 0
    schedule = from_json(Schedule, candidate.schedule)
    try:
        ir = ir_of(capture.graph, schedule)
    except CannotRewrite as reason:
        raise CannotCode(str(reason)) from None
    torch_nodes = {name for unit in units(ir, schedule) if unit.plan is None for name in unit.nodes}
    kernel_nodes = {name for kernel in _schedule_after(capture, candidate, action).kernels for name in kernel.nodes}
    moved_nodes = torch_nodes & set(action.region) if action.params.get(OPEN_REGION) else torch_nodes & kernel_nodes
    operations = [ir.graph.node(name).op.split(".")[1] for name in moved_nodes]
    return sum(1 for operation in operations if operation not in VIEWS | ALLOCATION)


def _syntax(candidate: Candidate) -> str:
    """The syntax tree as text: equal for versions that differ only in comments or formatting."""
    assert candidate.code is not None, "only the root has no code"
    return ast.dump(ast.parse(candidate.code.block))
