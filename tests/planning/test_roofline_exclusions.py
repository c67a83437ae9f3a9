"""Actions and rewrite rules that the settings exclude are never proposed."""

from __future__ import annotations

from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.planners.roofline import RooflinePlanner
from tests.codegen.families import source
from tests.planning.situations import SLOW, start


def test_an_excluded_action_is_not_proposed_and_all_others_still_are(captured) -> None:
    text = source("x: torch.softmax(x, -1)", "f32")
    capture = captured(text, "f")
    state = State(capture, start(capture, text), (), SLOW, True)
    every = RooflinePlanner().ranked(state)
    assert "fuse" in {action.kind.value for action in every}
    rest = RooflinePlanner.of(Settings(exclude_actions=("fuse",))).ranked(state)
    assert rest == [action for action in every if action.kind.value != "fuse"]
