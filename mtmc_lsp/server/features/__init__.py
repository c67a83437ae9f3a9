"""One module per protocol feature; each has ``register(server)``."""

from __future__ import annotations

from mtmc_lsp.server.features import code_actions, commands, lenses, lifecycle, review
from mtmc_lsp.server.server import Server


def register_all(server: Server) -> None:
    """Register every feature."""
    for feature in (lifecycle, code_actions, commands, review, lenses):
        feature.register(server)
