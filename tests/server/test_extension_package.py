"""The VS Code extension's ``package.json`` for the marketplaces, and the ranges and defaults of its settings."""

from __future__ import annotations

import dataclasses
import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from mtmc_lsp.core.settings import LlmSettings, Settings

EXTENSION = Path(__file__).parents[2] / "vscode-extension"
PACKAGE: dict[str, Any] = json.loads((EXTENSION / "package.json").read_text())
PROPERTIES: dict[str, Any] = PACKAGE["contributes"]["configuration"]["properties"]
CATEGORIES = {
    *("AI", "Azure", "Chat", "Data Science", "Debuggers", "Education", "Extension Packs", "Formatters", "Keymaps"),
    *("Language Packs", "Linters", "Machine Learning", "Notebooks", "Other", "Programming Languages", "SCM Providers"),
    *("Snippets", "Testing", "Themes", "Visualization"),
}
"""The categories of the Visual Studio Marketplace."""
MAX_KEYWORDS = 30
MIN_ICON = 128
SITUATIONS = ("first-step", "second-step", "after-keep", "failure", "no-workload", "killed", "report")
PICTURES = EXTENSION / "media" / "pictures"
MAX_PICTURE_BYTES = 2_000_000
RESTRICTED = ("python", "serverPython", "installSpec")
"""Settings that name programs: an untrusted workspace must not set them."""


def model_name(setting: str) -> str:
    return re.sub(r"[A-Z]", lambda letter: f"_{letter[0].lower()}", setting)


def settings_type(setting: str) -> tuple[type[Settings] | type[LlmSettings], str]:
    """The server's class and field for a setting of the extension."""
    name = model_name(setting)
    return (LlmSettings, name.removeprefix("llm_")) if name.startswith("llm_") else (Settings, name)


def server_default(setting: str) -> Any:
    kind, name = settings_type(setting)
    return next((field.default for field in dataclasses.fields(kind) if field.name == name), None)


def numbers() -> list[str]:
    return [
        name.removeprefix("mtmc.") for name, value in PROPERTIES.items() if {"number", "integer"} & set(value["type"])
    ]


def test_the_marketplaces_get_what_they_show() -> None:
    assert PACKAGE["repository"]["type"] == "git" and PACKAGE["repository"]["directory"] == "vscode-extension"
    repository = PACKAGE["repository"]["url"].removesuffix(".git")
    assert re.fullmatch(r"https://github\.com/[\w-]+/[\w-]+", repository)
    assert PACKAGE["bugs"]["url"] == f"{repository}/issues"
    assert PACKAGE["homepage"].startswith(repository)
    assert PACKAGE["description"] and PACKAGE["displayName"] and PACKAGE["publisher"]
    assert PACKAGE["license"] == "Apache-2.0" and (EXTENSION.parent / "LICENSE").exists()
    assert set(PACKAGE["categories"]) <= CATEGORIES and "Machine Learning" in PACKAGE["categories"]
    assert {"pytorch", "triton", "gpu"} <= set(PACKAGE["keywords"]) and len(PACKAGE["keywords"]) <= MAX_KEYWORDS
    assert re.fullmatch(r"#[0-9a-f]{6}", PACKAGE["galleryBanner"]["color"])
    assert PACKAGE["galleryBanner"]["theme"] in ("dark", "light")


def test_badges_come_from_a_host_that_the_marketplace_allows_and_link_to_the_repository() -> None:
    repository = PACKAGE["repository"]["url"].removesuffix(".git")
    assert PACKAGE["badges"]
    for badge in PACKAGE["badges"]:
        assert badge["url"].startswith("https://img.shields.io/badge/") and badge["url"].endswith(".svg")
        assert badge["href"].startswith(repository) and badge["description"]


def test_links_of_the_readme_point_into_the_repository() -> None:
    repository = PACKAGE["repository"]["url"].removesuffix(".git")
    command = PACKAGE["scripts"]["package"]
    assert f"--baseContentUrl {repository}/blob/main/vscode-extension" in command
    assert f"--baseImagesUrl {repository}/raw/main/vscode-extension" in command
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", (EXTENSION / "README.md").read_text()):
        assert (EXTENSION / link).exists(), link


def test_the_icon_is_a_square_png_of_sufficient_size() -> None:
    header = (EXTENSION / PACKAGE["icon"]).read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:])
    assert width == height >= MIN_ICON


@pytest.mark.parametrize("name", sorted(PROPERTIES))
def test_a_setting_has_a_type_a_scope_a_default_and_a_place_in_the_list(name: str) -> None:
    setting = PROPERTIES[name]
    assert setting["type"] and setting["scope"] and setting["order"] > 0
    types = {"string": str, "boolean": bool, "array": list, "null": type(None), "number": float, "integer": int}
    accepted = [types[kind] for kind in ([setting["type"]] if isinstance(setting["type"], str) else setting["type"])]
    assert isinstance(setting["default"], tuple(accepted))
    if "enum" in setting:
        assert setting["default"] in setting["enum"] and len(setting.get("enumDescriptions", setting["enum"])) == len(
            setting["enum"]
        )


@pytest.mark.parametrize("name", numbers())
def test_the_range_of_a_number_is_that_of_the_server(name: str) -> None:
    setting = PROPERTIES[f"mtmc.{name}"]
    lowest = setting["exclusiveMinimum"] + 0.5 if "exclusiveMinimum" in setting else setting["minimum"]
    kind, field = settings_type(name)
    # A cost limit needs a price.
    more = {"price_prompt": 1.0} if field == "budget_money" else {}
    kind(**{**more, field: lowest})
    if name != "llmTemperature":  # Below 0, the server uses the endpoint's default.
        with pytest.raises(ValueError, match=field):
            kind(**{**more, field: setting.get("exclusiveMinimum", setting.get("minimum", 0) - 1)})


@pytest.mark.parametrize("name", [*numbers(), "archs"])
def test_the_description_names_the_default_of_the_server(name: str) -> None:
    text = PROPERTIES[f"mtmc.{name}"]["markdownDescription"]
    default = server_default(name)
    if name == "archs":
        words = "`" + "`, `".join(default[:-1]) + f"` and `{default[-1]}`"
    else:
        words = {"llmTemperature": "the endpoint's default", "llmBudgetMoney": "no limit"}.get(name, f"{default:.0f}")
    assert text.endswith(f"else {words}.")


@pytest.mark.parametrize("name", ["baseline", "precision", "place", "planner", "search", "coder"])
def test_the_first_choice_names_the_default_of_the_server(name: str) -> None:
    setting = PROPERTIES[f"mtmc.{name}"]
    assert setting["default"] == setting["enum"][0] == ""
    assert setting["enumDescriptions"][0].endswith(f"else {server_default(name)}.")


def test_an_untrusted_workspace_cannot_choose_programs() -> None:
    restricted = PACKAGE["capabilities"]["untrustedWorkspaces"]["restrictedConfigurations"]
    assert set(restricted) == {f"mtmc.{name}" for name in RESTRICTED}


def test_each_situation_has_a_picture_in_both_themes_and_all_are_small() -> None:
    files = sorted(PICTURES.iterdir())
    assert [file.name for file in files] == sorted(
        f"{name}-{theme}.png" for name in SITUATIONS for theme in ("light", "dark")
    )
    assert sum(file.stat().st_size for file in files) < MAX_PICTURE_BYTES


def test_the_readmes_show_the_pictures() -> None:
    for readme in (EXTENSION / "README.md", EXTENSION.parent / "README.md"):
        shown = re.findall(r"!\[[^]]+\]\((\S+)\)", readme.read_text())
        assert shown
        assert all(
            (readme.parent / picture).parent == PICTURES and (readme.parent / picture).exists() for picture in shown
        )
