"""The planner and the coder of a run: built in, or asking a language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.chat import ChatModel, Message
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.protocols import CannotCode, Coder, Planner, State
from mtmc_lsp.core.run import Author, Placement, Step
from mtmc_lsp.core.settings import RANDOM, Settings
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.llm.coder.auto import AutoCoder
from mtmc_lsp.llm.coder.coder import LlmCoder, editable_code_of
from mtmc_lsp.llm.coder.prompts import coding_messages
from mtmc_lsp.llm.coder.stored_edits import NoModel, recorded_edits
from mtmc_lsp.llm.open_regions import OPEN_REGION, BuiltinFirstPlanner, OpenRegionPlanner
from mtmc_lsp.llm.planner import MAX_ACTIONS, LlmPlanner, planning_messages
from mtmc_lsp.llm.redaction import redacted
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.policies.lm.opening import open_lm, prepare_lm
from mtmc_lsp.policies.opening import open_ranker
from mtmc_lsp.policies.planner import PolicyPlanner
from mtmc_lsp.policies.random import RandomPolicy

RANKERS = {"builtin": RooflinePlanner, "auto": BuiltinFirstPlanner, "llm": OpenRegionPlanner}
"""The planner that lists the legal actions, by coder: a model can write more actions than the built-in coder."""


@dataclass(frozen=True)
class Question:
    """The messages of one request to a model."""

    purpose: str
    """``plan`` or ``code``."""
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Backends:
    """The choice of planner and coder."""

    planner: str = "roofline"
    coder: str = "builtin"

    @classmethod
    def from_settings(cls, settings: Settings) -> Backends:
        """The planner and the coder that the settings name."""
        return cls(settings.planner, settings.coder)

    @property
    def ask_a_model(self) -> bool:
        """Whether the planner or the coder asks a language model."""
        return self.planner == "llm" or self.coder in ("llm", "auto")

    @property
    def without_model(self) -> Backends:
        """The same choice without what asks a language model."""
        return Backends(BUILTIN.planner if self.planner == "llm" else self.planner, BUILTIN.coder)

    def prepare(self, settings: Settings) -> None:
        """Begin what the planner needs before its first choice, beside the capture."""
        if self.planner == "lm":
            prepare_lm(settings.policy_file)

    def after(self, steps: Sequence[Step]) -> Backends:
        """The backends that can continue after ``steps``: the built-in coder would remove the code that a model wrote."""
        by_model = any(step.candidate is not None and step.candidate.author is Author.MODEL for step in steps)
        return replace(self, coder="auto") if by_model and self.coder == "builtin" else self

    def open(
        self,
        settings: Settings,
        model: ChatModel | None,
        capture: Capture | None = None,
        steps: Sequence[Step] = (),
        device: DeviceModel | None = None,
        on_note: Callable[[str], None] = lambda note: None,
    ) -> tuple[Planner, Coder]:
        """Make the planner and the coder.

        Args:
            model: the language model to ask; None if none may be asked.
            capture: of the run that ``steps`` belong to.
            steps: of an earlier run; the model is not asked again for their edits.
            device: the GPU that the built-in coder writes for; None for the representative one.
            on_note: called with what the user should know about the planner, for example why a trained policy is not used.
        """
        planner: Planner = self.ranking(settings)
        if self.planner == "ranker":
            opened = open_ranker(self.ranking(settings), settings.policy_file, device)
            planner = opened.planner
            if opened.note:
                on_note(opened.note)
        if self.planner == RANDOM:
            planner = PolicyPlanner(self.ranking(settings), RandomPolicy())
        if self.planner == "lm":
            planner = open_lm(self.ranking(settings), settings.policy_file, device, on_note)
        if model is not None and self.planner == "llm":
            planner = LlmPlanner(model, self.ranking(settings), context_tokens=settings.llm.context_tokens)
        place = Placement(settings.place)
        if self.coder == "builtin":
            return planner, BuiltinCoder(device, place)
        known = {}
        if capture is not None and steps:
            source = next((step.candidate.source for step in steps if step.candidate is not None), "")
            known = recorded_edits(capture, BuiltinCoder().start(capture, source), steps)
        coder = LlmCoder(
            model or NoModel(),
            context_tokens=settings.llm.context_tokens,
            repairs=settings.llm.repairs,
            samples=settings.llm.samples,
            archs=settings.archs,
            known_edits=known,
            place=place,
        )
        return planner, AutoCoder(coder, device, place) if self.coder == "auto" else coder

    def ranking(self, settings: Settings) -> RooflinePlanner:
        """The planner that lists the legal actions for this coder."""
        return RANKERS[self.coder].of(settings)

    def first_questions(self, settings: Settings, state: State, project: Path) -> list[Question]:
        """The messages that a model would get in the first step, exactly as they would be sent."""
        actions = self.ranking(settings).ranked(state)[:MAX_ACTIONS]
        max_tokens, archs = settings.llm.context_tokens, settings.archs
        questions = []
        if actions and self.planner == "llm":
            questions.append(("plan", planning_messages(state, actions, max_tokens)))
        # With the coder ``auto``, the model only writes what the built-in coder cannot.
        written = [action for action in actions if self.coder == "llm" or action.params.get(OPEN_REGION)]
        if self.coder == "auto" and not written:
            wide = OpenRegionPlanner.of(settings).ranked(state)
            written = [action for action in wide if action.params.get(OPEN_REGION)]
        if written and self.coder != "builtin":
            try:
                sheet = editable_code_of(state.capture, state.candidate)
                subject = (state.capture, state.candidate, written[0], sheet)
                questions.append(("code", coding_messages(*subject, max_tokens=max_tokens, archs=archs)))
            except CannotCode:
                # The run would not ask either; its step would say why.
                pass
        return [
            Question(purpose, tuple(Message(item.role, redacted(item.content, project)) for item in messages))
            for purpose, messages in questions
        ]


BUILTIN = Backends()
