"""The VS Code extension's ``package.json`` against what the server knows."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from mtmc_lsp.core.settings import CHECKS
from mtmc_lsp.server.app import make_server
from mtmc_lsp.server.options import ClientSettings, read_settings

EXTENSION = Path(__file__).parents[2] / "vscode-extension"
CLIENT_ONLY = {"serverPython", "installSpec", "review", "trace.server"}
"""Settings that the extension itself reads."""
OWN_COMMANDS = {
    *("diffAll", "diffFromOriginal", "diffToFinal", "lineage", "report", "exportReport", "exportPicture", "reveal"),
    *(
        "review",
        "reviewStep",
        "help",
        "choosePython",
        "showAllLines",
        "keep.title",
        "discard.title",
        "tryAnother.title",
        "diff.title",
        "keepAll.title",
    ),
    *("previousPending.title", "nextPending.title"),
    *("nextPending", "previousPending", "openExample", "tryExample", "restart", "install", "showLog", "trace", "menu"),
}
"""Commands that the extension itself does."""
WITHOUT_A_TITLE = {"jobs", "preview"}
"""Commands of the server's that the extension shows otherwise: by its tree, and by a diff editor."""


def contributed() -> Any:
    return json.loads((EXTENSION / "package.json").read_text())["contributes"]


def properties() -> dict[str, Any]:
    return {name.removeprefix("mtmc."): value for name, value in contributed()["configuration"]["properties"].items()}


def test_every_setting_of_the_server_is_described_and_no_other() -> None:
    ours = {
        first + "".join(part.capitalize() for part in rest)
        for first, *rest in (field.name.split("_") for field in dataclasses.fields(ClientSettings))
    }
    assert set(properties()) - CLIENT_ONLY == ours
    for name, setting in properties().items():
        assert setting.get("description") or setting.get("markdownDescription"), name


def test_defaults_leave_the_server_at_its_own() -> None:
    # The extension leaves out what is empty; the rest has to be what the server does by itself.
    given = {name: value["default"] for name, value in properties().items() if value["default"] not in ("", None, [])}
    assert read_settings(given) == (ClientSettings(), [])


@pytest.mark.parametrize("name", ["baseline", "place", "precision"])
def test_each_choice_of_a_setting_is_one_that_a_run_takes(name: str) -> None:
    choices = properties()[name]["enum"]
    assert [value for value in choices if CHECKS[name](value)] == [""]


def test_every_command_of_the_server_has_a_title_and_no_other() -> None:
    served = {name.removeprefix("mtmc.") for name in make_server().protocol.fm.commands}
    titled = {item["command"].removeprefix("mtmc.") for item in contributed()["commands"]}
    assert titled - OWN_COMMANDS == served - WITHOUT_A_TITLE


def test_menus_and_keys_name_commands_that_there_are() -> None:
    contributes = contributed()
    there = {item["command"] for item in contributes["commands"]}
    used = [item["command"] for menu in contributes["menus"].values() for item in menu]
    used += [item["command"] for item in contributes["keybindings"]]
    assert [command for command in used if command not in there] == []
