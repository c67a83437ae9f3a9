"""Whether a language model may be asked for a folder: the user is asked once, before anything is sent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lsprotocol import types as lsp
from pygls.lsp.server import LanguageServer

from mtmc_lsp.app.folder_decisions import Consent, consent_question
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.settings import Settings, override_settings, read_settings

ALLOW, REFUSE = "Allow", "Not now"
OURS = ("planner", "coder", "llm")
"""Settings of a run that are about a model."""
ASKING = ("optimize", "resume", "another")
"""Kinds of jobs in which a model may have a part."""


class ModelConsent:
    """Asks once in a session; a yes is kept for later ones."""

    def __init__(self) -> None:
        self._kept = Consent()
        self._asked: set[tuple[Path, str]] = set()

    async def ensure(self, server: LanguageServer, root: Path, path: Path, client: dict[str, Any]) -> bool:
        """Whether a model may be asked in a run of ``path``; asks the user where the settings want one and nobody answered yet.

        Args:
            server: shows the question.
            root: the project.
            path: the file.
            client: the client's settings of a run.
        """
        try:
            settings = override_settings(
                read_settings(path.parent), **{name: v for name, v in client.items() if name in OURS}
            )
        except RequestError:
            # The run says what is wrong with them.
            return False
        if not _wants_a_model(settings):
            return False
        # Only here: most sessions ask no model, and the server has little time to start.
        from mtmc_lsp.llm.endpoint.client import model_name
        from mtmc_lsp.llm.endpoint.endpoint import host_of

        host, model = host_of(os.environ), model_name(settings.llm, os.environ)
        if not host or not model:
            _say_what_is_missing(server, host)
            return False
        if self._kept.has(root, host):
            return True
        if (root, host) in self._asked:
            return False
        self._asked.add((root, host))
        agreed = await _asked(server, consent_question(root, host, model))
        if agreed:
            self._kept.grant(root, host)
        return agreed


def _wants_a_model(settings: Settings) -> bool:
    """Whether the settings name a model as planner or coder."""
    return settings.planner == "llm" or settings.coder != "builtin"


async def _asked(server: LanguageServer, question: str) -> bool:
    actions = [lsp.MessageActionItem(ALLOW), lsp.MessageActionItem(REFUSE)]
    request = lsp.ShowMessageRequestParams(lsp.MessageType.Warning, question, actions)
    answer = await server.window_show_message_request_async(request)
    return answer is not None and answer.title == ALLOW


def _say_what_is_missing(server: LanguageServer, host: str) -> None:
    what = "MTMC_LLM_MODEL (or the setting mtmc.llmModel)" if host else "OPENAI_BASE_URL"
    text = f"No language model takes part: {what} is not set where the server was started."
    server.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Info, text))
