"""The files of ``mtmc record``: a line of JSON for each recorded function or kernel."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, TypeVar

from mtmc_lsp.core.errors import Location, RequestError
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.process.project_files import read_bytes, replace_bytes


class Recorded(Protocol):
    """A recorded function or kernel."""

    @property
    def path(self) -> str:
        """The file that defines it."""

    @property
    def qualname(self) -> str:
        """Its qualified name there."""


R = TypeVar("R", bound=Recorded)


def read_recorded(file: Path, kind: type[R], noun: str) -> list[R]:
    """Read a file; empty if it does not exist.

    Args:
        kind: the type of each line.
        noun: what the lines contain, for error messages: ``calls`` or ``launches``.

    Raises:
        RequestError: the file has invalid content.
        UnsafeFile: the file is a link, a pipe or a device.
    """
    items: list[R] = []
    for number, line in enumerate((read_bytes(file) or b"").splitlines(), 1):
        try:
            items.append(from_json(kind, json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            raise RequestError(
                f"the file of recorded {noun} is invalid: {error}",
                where=Location(str(file), number),
                remedy="Delete the file and record again.",
            ) from None
    return items


def store_recorded(file: Path, items: Iterable[Recorded]) -> None:
    """Replace a file atomically; of several items with the same path and name, the last one is stored."""
    last = {(item.path, item.qualname): item for item in items}
    replace_bytes(file, "".join(json.dumps(to_json(item)) + "\n" for item in last.values()).encode())
