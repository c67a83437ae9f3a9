"""The user's decisions about folders. Stored outside of these folders, so that code in them cannot change the decisions."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path


def state_folder() -> Path:
    """Folder for per-user state that belongs to no project."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "mtmc"


class StoredStrings:
    """A set of strings stored in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def load(self) -> set[str]:
        """All strings; empty if the file is missing or damaged, so that the user is asked again."""
        try:
            stored = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return set()
        return {str(item) for item in stored} if isinstance(stored, list) else set()

    def save(self, strings: set[str]) -> None:
        """Replace the stored strings."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self._file.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(sorted(strings), stream)
        os.replace(temporary, self._file)


class Consent:
    """To which hosts the user allows a project's code to be sent. Consent is per project and host."""

    def __init__(self, folder: Path | None = None) -> None:
        """Store decisions in ``folder``, by default the user's state folder."""
        self._file = StoredStrings((folder or state_folder()) / "model-consent.json")

    def has(self, root: Path, host: str) -> bool:
        """Whether code of the project at ``root`` may be sent to ``host``."""
        return _entry(root, host) in self._file.load()

    def hosts(self, root: Path) -> list[str]:
        """Every host that code of the project may be sent to."""
        stored = (word.partition(" ") for word in self._file.load())
        return sorted(host for host, _, where in stored if where == str(root))

    def grant(self, root: Path, host: str) -> None:
        """Store the user's consent."""
        self._file.save(self._file.load() | {_entry(root, host)})

    def withdraw(self, root: Path) -> None:
        """Remove the consent for all hosts of the project."""
        self._file.save(self._file.load() - {_entry(root, host) for host in self.hosts(root)})


def _entry(root: Path, host: str) -> str:
    return f"{host} {root}"


def consent_question(root: Path, host: str, model: str) -> str:
    """The question to the user before anything is sent."""
    return (
        f"Allow sending code of {root} to the language model {model or '(no model is set)'} at {host}? Sent are the optimised "
        "function, its operations and shapes, the kernels so far and the result of each step. No other code and no tensors are "
        "sent; keys and absolute paths are removed."
    )
