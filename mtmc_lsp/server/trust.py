"""Whether code of a folder may be run. The answer is kept outside the folder, where its code cannot write it."""

from __future__ import annotations

from pathlib import Path

from lsprotocol import types as lsp
from pygls.lsp.server import LanguageServer

from mtmc_lsp.app.folder_decisions import StoredStrings, state_folder

TRUST, REFUSE = "Trust this folder", "Cancel"


class Trust:
    """The folders whose code the user lets us run."""

    def __init__(self, *, whole_workspace: bool, folder: Path | None = None) -> None:
        """Start from what is stored; ``whole_workspace`` is the client's word for all that it opens."""
        self._all = whole_workspace
        self._file = StoredStrings((folder or state_folder()) / "trusted.json")

    def has(self, root: Path, *, is_linked: bool = False) -> bool:
        """Whether a project's code may be run; ``is_linked`` where a link leads to it from another, which alone was opened."""
        return (self._all and not is_linked) or str(root) in self._file.load()

    async def ensure(self, server: LanguageServer, root: Path, *, is_linked: bool = False) -> bool:
        """Ask the user once for this folder, unless they or the client already said yes."""
        if self.has(root, is_linked=is_linked):
            return True
        answer = await server.window_show_message_request_async(
            lsp.ShowMessageRequestParams(
                type=lsp.MessageType.Warning,
                message=f"This runs the code in {root}: its files are imported and their functions called. Trust it?",
                actions=[lsp.MessageActionItem(TRUST), lsp.MessageActionItem(REFUSE)],
            )
        )
        if answer is None or answer.title != TRUST:
            return False
        self.remember(root)
        return True

    def remember(self, root: Path) -> None:
        """Store that a folder is trusted."""
        self._file.save(self._file.load() | {str(root)})
