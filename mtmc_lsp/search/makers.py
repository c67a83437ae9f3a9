"""Who plans and who writes in a run: the built-in ones, or those that ask a language model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mtmc_lsp.core.chat import ChatModel, Message
from mtmc_lsp.core.protocols import CannotCode, Coder, Planner, State
from mtmc_lsp.core.redaction import redacted
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.macro.llm import MOST_LISTED, LlmPlanner, planning_messages
from mtmc_lsp.macro.open_regions import WidePlanner
from mtmc_lsp.macro.roofline import RooflinePlanner
from mtmc_lsp.micro.builtin.coder import BuiltinCoder
from mtmc_lsp.micro.llm.coder import LlmCoder, sheet_of
from mtmc_lsp.micro.llm.prompts import coding_messages

PLANNERS = ("roofline", "llm")
CODERS = ("builtin", "llm")


@dataclass(frozen=True)
class Question:
    """What a model would be asked."""

    purpose: str
    """``plan`` or ``code``."""
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Makers:
    """The choice of planner and coder."""

    planner: str = "roofline"
    coder: str = "builtin"

    @property
    def ask_a_model(self) -> bool:
        """Whether any of them asks a language model."""
        return "llm" in (self.planner, self.coder)

    def open(self, settings: Settings, model: ChatModel | None) -> tuple[Planner, Coder]:
        """The planner and the coder; ``model`` is there where one of them asks it."""
        planner: Planner = self.ranking(settings)
        coder: Coder = BuiltinCoder()
        if model is not None and self.planner == "llm":
            planner = LlmPlanner(model, self.ranking(settings))
        if model is not None and self.coder == "llm":
            coder = LlmCoder(model, repairs=settings.llm.repairs, samples=settings.llm.samples)
        return planner, coder

    def ranking(self, settings: Settings) -> RooflinePlanner:
        """Who knows the legal actions: a coder that writes freely is offered more."""
        kind = WidePlanner if self.coder == "llm" else RooflinePlanner
        return kind(strict=settings.precision == "strict")

    def first_questions(self, settings: Settings, state: State, project: Path) -> list[Question]:
        """What a model would be asked in the first step, as it would be sent."""
        actions = self.ranking(settings).ranked(state)[:MOST_LISTED]
        found = []
        if actions and self.planner == "llm":
            found.append(("plan", planning_messages(state, actions)))
        if actions and self.coder == "llm":
            try:
                sheet = sheet_of(state.capture, state.candidate)
                found.append(("code", coding_messages(state.capture, state.candidate, actions[0], sheet)))
            except CannotCode:
                # The run would say why, and would not ask either.
                pass
        return [
            Question(purpose, tuple(Message(item.role, redacted(item.content, project)) for item in messages))
            for purpose, messages in found
        ]


BUILTIN = Makers()
