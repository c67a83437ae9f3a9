"""Whether code of a folder may be run. The answer is kept outside the folder, where its code cannot write it."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from lsprotocol import types as lsp
from pygls.lsp.server import LanguageServer

TRUST, REFUSE = "Trust this folder", "Cancel"


def state_folder() -> Path:
    """Where this program keeps what belongs to the user and to no project."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "mtmc"


class Trust:
    """The folders whose code the user lets us run."""

    def __init__(self, *, whole_workspace: bool, folder: Path | None = None) -> None:
        """Start from what is stored; ``whole_workspace`` is the client's word for all that it opens."""
        self._all = whole_workspace
        self._file = (folder or state_folder()) / "trusted.json"

    def has(self, root: Path) -> bool:
        """Whether a project's code may be run."""
        return self._all or str(root) in self._stored()

    async def ensure(self, server: LanguageServer, root: Path) -> bool:
        """Ask the user once for this folder, unless they or the client already said yes."""
        if self.has(root):
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
        folders = sorted({*self._stored(), str(root)})
        self._file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self._file.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(folders, stream)
        os.replace(temporary, self._file)

    def _stored(self) -> list[str]:
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            # Nothing was trusted yet, or the file is damaged: then the user is asked again.
            return []
        return [str(item) for item in found] if isinstance(found, list) else []
