"""Who plans and who writes in a run: the built-in ones, or those that ask a language model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.chat import ChatModel, Exchange, Message, ModelUse
from mtmc_lsp.core.protocols import CannotCode, Coder, Planner, State
from mtmc_lsp.core.run import Author, Step
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.llm.coder.auto import AutoCoder
from mtmc_lsp.llm.coder.coder import LlmCoder, editable_code_of
from mtmc_lsp.llm.coder.prompts import coding_messages
from mtmc_lsp.llm.coder.stored_edits import NoModel, recorded_edits
from mtmc_lsp.llm.open_regions import OPEN_REGION, BuiltinFirstPlanner, OpenRegionPlanner
from mtmc_lsp.llm.planner import MAX_ACTIONS, LlmPlanner, planning_messages
from mtmc_lsp.llm.redaction import redacted
from mtmc_lsp.planners.roofline import RooflinePlanner

RANKING = {"builtin": RooflinePlanner, "auto": BuiltinFirstPlanner, "llm": OpenRegionPlanner}
"""Who knows the legal actions, by the coder: one that writes freely is offered more."""


class LedgerModel(ChatModel, Protocol):
    """A model that keeps a ledger of what it was asked."""

    def listen(self, listener: Callable[[Exchange], None]) -> None:
        """Tell ``listener`` every exchange from now on, also those that fail."""

    def use(self) -> ModelUse:
        """What all exchanges came to."""

    def resume(self, exchanges: Sequence[Exchange]) -> None:
        """Count what an earlier part of the run asked already."""


@dataclass(frozen=True)
class Question:
    """What a model would be asked."""

    purpose: str
    """``plan`` or ``code``."""
    messages: tuple[Message, ...]


@dataclass(frozen=True)
class Backends:
    """The choice of planner and coder."""

    planner: str = "roofline"
    coder: str = "builtin"

    @classmethod
    def of(cls, settings: Settings) -> Backends:
        """Those that the settings name."""
        return cls(settings.planner, settings.coder)

    @property
    def ask_a_model(self) -> bool:
        """Whether any of them asks a language model."""
        return self.planner == "llm" or self.coder in ("llm", "auto")

    def after(self, steps: Sequence[Step]) -> Backends:
        """Those that can go on behind steps, or write them again: the built-in coder would undo what a model wrote."""
        by_model = any(step.candidate is not None and step.candidate.author is Author.MODEL for step in steps)
        return replace(self, coder="auto") if by_model and self.coder == "builtin" else self

    def open(
        self, settings: Settings, model: ChatModel | None, capture: Capture | None = None, steps: Sequence[Step] = ()
    ) -> tuple[Planner, Coder]:
        """The planner and the coder.

        Args:
            settings: the project's.
            model: is asked where one of them asks; None where none may be.
            capture: of the run whose steps are given.
            steps: of an earlier run, whose edits need not be asked for again.
        """
        planner: Planner = self.ranking(settings)
        if model is not None and self.planner == "llm":
            planner = LlmPlanner(model, self.ranking(settings), context_tokens=settings.llm.context_tokens)
        if self.coder == "builtin":
            return planner, BuiltinCoder()
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
        )
        return planner, AutoCoder(coder) if self.coder == "auto" else coder

    def ranking(self, settings: Settings) -> RooflinePlanner:
        """Who knows the legal actions."""
        return RANKING[self.coder](strict=settings.precision == "strict")

    def first_questions(self, settings: Settings, state: State, project: Path) -> list[Question]:
        """What a model would be asked in the first step, as it would be sent."""
        actions = self.ranking(settings).ranked(state)[:MAX_ACTIONS]
        max_tokens, archs = settings.llm.context_tokens, settings.archs
        found = []
        if actions and self.planner == "llm":
            found.append(("plan", planning_messages(state, actions, max_tokens)))
        # The built-in coder goes first where it can; a model would be asked for what is left.
        written = [action for action in actions if self.coder == "llm" or action.params.get(OPEN_REGION)]
        if self.coder == "auto" and not written:
            wide = OpenRegionPlanner(strict=settings.precision == "strict").ranked(state)
            written = [action for action in wide if action.params.get(OPEN_REGION)]
        if written and self.coder != "builtin":
            try:
                sheet = editable_code_of(state.capture, state.candidate)
                about = (state.capture, state.candidate, written[0], sheet)
                found.append(("code", coding_messages(*about, max_tokens=max_tokens, archs=archs)))
            except CannotCode:
                # The run would say why, and would not ask either.
                pass
        return [
            Question(purpose, tuple(Message(item.role, redacted(item.content, project)) for item in messages))
            for purpose, messages in found
        ]


BUILTIN = Backends()
