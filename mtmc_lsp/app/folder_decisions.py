"""What the user decided about folders. It is kept outside of them, where their code cannot write it."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path


def state_folder() -> Path:
    """Where this program keeps what belongs to the user and to no project."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "mtmc"


class Remembered:
    """A set of words in a file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def words(self) -> set[str]:
        """All of them; none where the file is not there, or damaged: then the user is asked again."""
        try:
            found = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return set()
        return {str(item) for item in found} if isinstance(found, list) else set()

    def put(self, words: set[str]) -> None:
        """Keep these and no others."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self._file.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(sorted(words), stream)
        os.replace(temporary, self._file)


class Consent:
    """Where the user lets a folder's code be sent: a project and a host, since another host is another question."""

    def __init__(self, folder: Path | None = None) -> None:
        """Look in ``folder``, by default the user's own."""
        self._file = Remembered((folder or state_folder()) / "model-consent.json")

    def has(self, root: Path, host: str) -> bool:
        """Whether code of the project at ``root`` may be sent to ``host``."""
        return _word(root, host) in self._file.words()

    def hosts(self, root: Path) -> list[str]:
        """Every host that code of the project may be sent to."""
        found = (word.partition(" ") for word in self._file.words())
        return sorted(host for host, _, where in found if where == str(root))

    def give(self, root: Path, host: str) -> None:
        """Remember a yes."""
        self._file.put(self._file.words() | {_word(root, host)})

    def withdraw(self, root: Path) -> None:
        """Forget every yes for the project."""
        self._file.put(self._file.words() - {_word(root, host) for host in self.hosts(root)})


def _word(root: Path, host: str) -> str:
    return f"{host} {root}"


def consent_question(root: Path, host: str, model: str) -> str:
    """What the user is asked before anything is sent."""
    return (
        f"May the language model {model or '(none is named)'} at {host} be asked for {root}? It is sent the function that "
        "is optimised, its operations and shapes, the kernels so far, and what came of each step; no other code, "
        "no tensors; keys and absolute paths are taken out."
    )
