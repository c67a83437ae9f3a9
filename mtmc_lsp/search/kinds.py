"""The searches by their names in the setting ``search``."""

from __future__ import annotations

from mtmc_lsp.search.greedy import GreedySearch
from mtmc_lsp.search.loop import Search
from mtmc_lsp.search.tree.search import BeamSearch, MctsSearch

SEARCHES: dict[str, type[Search]] = {"greedy": GreedySearch, "beam": BeamSearch, "mcts": MctsSearch}
