"""The process that runs the user's program for the server, and notes how a target is called in it."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any, TextIO

from mtmc_lsp.app.interpreter import find_python
from mtmc_lsp.app.record import record
from mtmc_lsp.core.errors import MtmcError, RequestError
from mtmc_lsp.core.json_codec import to_json
from mtmc_lsp.core.settings import read_settings
from mtmc_lsp.server.child import begin, report


def main() -> None:
    """Do the one job that standard input asks for."""
    request, out = begin()
    try:
        _record(request, out)
    except MtmcError as error:
        report(out, "error", error=error.to_json())


def _record(request: dict[str, Any], out: TextIO) -> None:
    path = Path(request["path"])
    try:
        command = shlex.split(request["command"])
    except ValueError as error:
        command, why = [], f": {error}"
    else:
        why = ""
    if not command:
        raise RequestError(f"cannot read the command {request['command']!r}{why}", remedy="Write it as in a terminal.")
    # `python` is the project's, as in a terminal where its environment is active.
    python = request["settings"].get("python") or find_python(path, read_settings(path.parent))
    folder = os.path.dirname(python)
    if folder:
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
    report(out, "stage", text=f"running {request['command']}")
    found = record(command, Path(request["folder"]), [f"{path}::{request['target']}"], quiet=True)
    calls = to_json(found.targets[0]) if found.targets else None
    report(out, "recorded", calls=calls, exit_code=found.exit_code, python_seen=found.python_seen)


if __name__ == "__main__":
    main()
