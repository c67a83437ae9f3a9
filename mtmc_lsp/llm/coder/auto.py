"""The built-in coder first, and a model where that one says that it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import REMARK, ActionKind, MacroAction
from mtmc_lsp.core.chat import ModelNotUsable
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import Author, Candidate
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.llm.coder.coder import LlmCoder
from mtmc_lsp.llm.open_regions import OPEN


class AutoCoder:
    """Asks a model for nothing that the built-in coder writes."""

    def __init__(self, model: LlmCoder) -> None:
        self._builtin = BuiltinCoder()
        self._model = model

    def start(self, capture: Capture, source: str) -> Candidate:
        """The user's own file, nothing generated."""
        return self._builtin.start(capture, source)

    def write(self, capture: Capture, candidate: Candidate, action: MacroAction) -> Candidate:
        """``candidate`` with ``action`` applied."""
        return self.write_several(capture, candidate, action)[0]

    def write_several(self, capture: Capture, candidate: Candidate, action: MacroAction) -> list[Candidate]:
        """The built-in coder's one version, or where it cannot write the action, a model's versions."""
        if candidate.author is Author.BUILTIN and not {OPEN, REMARK} & set(action.params):
            try:
                return [self._builtin.write(capture, candidate, action)]
            except CannotCode:
                if action.kind is not ActionKind.FUSE:
                    # Other actions change a kernel that is there; the built-in one is the better judge of those.
                    raise
        with _usable():
            return self._model.write_several(capture, candidate, action)

    def repair(self, capture: Capture, candidate: Candidate, failed: Candidate, failure: str) -> Candidate:
        """Another try at what a model wrote; the built-in coder would only write the same again."""
        if failed.author is Author.BUILTIN:
            raise CannotCode(failure)
        with _usable():
            return self._model.repair(capture, candidate, failed, failure)


@contextmanager
def _usable() -> Iterator[None]:
    """A model that is not there ends no run: what the built-in coder wrote is worth having without it."""
    try:
        yield
    except ModelNotUsable as failure:
        raise CannotCode(f"the built-in coder cannot write it, and {failure.message}") from None
