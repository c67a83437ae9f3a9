"""What a piece of code changed in its process, for everything that runs there later. Runs in workers."""

from __future__ import annotations

from types import ModuleType

from mtmc_lsp.verify.worker.observation.global_state import changed_by_import, global_state
from mtmc_lsp.verify.worker.observation.patched_modules import public_attributes, replaced_attributes

MOST_NAMES = 4
"""Attributes that a message names."""


class ProcessChanges:
    """The changes since this object was created."""

    def __init__(self) -> None:
        """Read the present state."""
        self._state = global_state()
        self._attributes = public_attributes()

    def by_import(self, module: ModuleType) -> list[str]:
        """What the import of a file changed, and should not have."""
        return [*changed_by_import(self._state), *self.replaced(module)]

    def replaced(self, module: ModuleType | None = None) -> list[str]:
        """The attributes of shared modules that were replaced."""
        return replaced_attributes(self._attributes, module)[:MOST_NAMES]
