"""Coder that uses the built-in coder first, and a model for actions that the built-in coder cannot write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import REMARK, ActionKind, MacroAction
from mtmc_lsp.core.chat import ModelNotUsable
from mtmc_lsp.core.device_model import DeviceModel
from mtmc_lsp.core.protocols import CannotCode
from mtmc_lsp.core.run import Author, Candidate, Placement
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.llm.coder.coder import LlmCoder
from mtmc_lsp.llm.open_regions import FREE_EDIT, OPEN_REGION


class AutoCoder:
    """Uses the model only for actions that the built-in coder cannot write."""

    def __init__(self, model: LlmCoder, device: DeviceModel | None = None, place: Placement = Placement.END) -> None:
        self._builtin = BuiltinCoder(device, place)
        self._model = model

    def start(self, capture: Capture, source: str) -> Candidate:
        """The original file, without generated code."""
        return self._builtin.start(capture, source)

    def write(self, capture: Capture, candidate: Candidate, action: MacroAction) -> Candidate:
        """``candidate`` with ``action`` applied."""
        return self.write_several(capture, candidate, action)[0]

    def write_several(self, capture: Capture, candidate: Candidate, action: MacroAction) -> list[Candidate]:
        """One version of the built-in coder, or the versions of the model if the built-in coder cannot write the action."""
        if candidate.author is Author.BUILTIN and not {FREE_EDIT, OPEN_REGION, REMARK} & set(action.params):
            try:
                return [self._builtin.write(capture, candidate, action)]
            except CannotCode:
                if action.kind is not ActionKind.FUSE:
                    # Other actions change an existing kernel; trust the built-in coder that they do not apply.
                    raise
        with _missing_model_tolerated():
            return self._model.write_several(capture, candidate, action)

    def repair(self, capture: Capture, candidate: Candidate, failed: Candidate, failure: str) -> Candidate:
        """Repair code of the model. The built-in coder is deterministic and would write the same code again."""
        if failed.author is Author.BUILTIN:
            raise CannotCode(failure)
        with _missing_model_tolerated():
            return self._model.repair(capture, candidate, failed, failure)


@contextmanager
def _missing_model_tolerated() -> Iterator[None]:
    """Turn ``ModelNotUsable`` into ``CannotCode``: the run keeps the results of the built-in coder."""
    try:
        yield
    except ModelNotUsable as failure:
        raise CannotCode(f"the built-in coder cannot write it, and {failure.message}") from None
