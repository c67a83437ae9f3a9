"""Whether code of a folder may be run. The answer is stored outside the folder, so that code in it cannot change the answer."""

from __future__ import annotations

from pathlib import Path

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcMethodNotFound
from pygls.lsp.server import LanguageServer

from mtmc_lsp.app.folder_decisions import StoredStrings, state_folder

TRUST, REFUSE = "Trust this folder", "Cancel"
CANNOT_ASK = "To trust every folder that you open, set the initialization option `trusted` in its configuration."
"""What to do in an editor that does not support ``window/showMessageRequest``, such as Helix."""


class Trust:
    """The folders whose code the user trusts."""

    def __init__(self, *, whole_workspace: bool, folder: Path | None = None) -> None:
        """Load the stored answers. ``whole_workspace``: the client declares every opened folder trusted."""
        self._trusts_workspace = whole_workspace
        self._stored = StoredStrings((folder or state_folder()) / "trusted.json")

    def has(self, root: Path, *, is_linked: bool = False) -> bool:
        """Whether the code of a project may be run. ``is_linked``: only another project was opened, and a link leads here."""
        return (self._trusts_workspace and not is_linked) or str(root) in self._stored.load()

    async def ensure(self, server: LanguageServer, root: Path, *, is_linked: bool = False) -> bool:
        """Whether the folder is trusted; asks the user unless the user or the client already trusts it."""
        if self.has(root, is_linked=is_linked):
            return True
        question = lsp.ShowMessageRequestParams(
            type=lsp.MessageType.Warning,
            message=f"This runs the code in {root}: its files are imported and their functions called. Trust it?",
            actions=[lsp.MessageActionItem(TRUST), lsp.MessageActionItem(REFUSE)],
        )
        try:
            answer = await server.window_show_message_request_async(question)
        except JsonRpcMethodNotFound:
            text = f"This runs the code in {root}, which is not trusted, and your editor cannot ask. {CANNOT_ASK}"
            server.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Error, text))
            return False
        if answer is None or answer.title != TRUST:
            return False
        self.remember(root)
        return True

    def remember(self, root: Path) -> None:
        """Store that a folder is trusted."""
        self._stored.save(self._stored.load() | {str(root)})
