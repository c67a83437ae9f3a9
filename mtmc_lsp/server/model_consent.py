"""Consent to send code of a folder to a language model: the user is asked once, before anything is sent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lsprotocol import types as lsp
from pygls.lsp.server import LanguageServer

from mtmc_lsp.app.folder_decisions import Consent, consent_question
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.settings import override_settings, read_settings

ALLOW, REFUSE = "Allow", "Not now"
MODEL_SETTINGS = ("planner", "coder", "llm")
"""Run settings that concern a model."""
MODEL_JOBS = ("optimize", "resume", "another")
"""Kinds of jobs that may use a model."""


class ModelConsent:
    """Asks once per session. Consent is stored for later sessions."""

    def __init__(self) -> None:
        self._stored = Consent()
        self._asked: set[tuple[Path, str]] = set()

    async def ensure(self, server: LanguageServer, root: Path, path: Path, client: dict[str, Any]) -> bool:
        """Whether a run of ``path`` may use a model. Asks the user if the settings select a model and there is no answer yet.

        Args:
            client: run settings from the client.
        """
        try:
            settings = override_settings(
                read_settings(path.parent), **{name: v for name, v in client.items() if name in MODEL_SETTINGS}
            )
        except RequestError:
            # The run reports what is wrong with the settings.
            return False
        if settings.planner != "llm" and settings.coder == "builtin":
            return False
        # Imported lazily: most sessions use no model, and the server must start fast.
        from mtmc_lsp.llm.endpoint.client import model_name
        from mtmc_lsp.llm.endpoint.endpoint import host_of

        host, model = host_of(os.environ), model_name(settings.llm, os.environ)
        if not host or not model:
            _report_missing_variable(server, host)
            return False
        if self._stored.has(root, host):
            return True
        if (root, host) in self._asked:
            return False
        self._asked.add((root, host))
        agreed = await _ask(server, consent_question(root, host, model))
        if agreed:
            self._stored.grant(root, host)
        return agreed


async def _ask(server: LanguageServer, question: str) -> bool:
    actions = [lsp.MessageActionItem(ALLOW), lsp.MessageActionItem(REFUSE)]
    request = lsp.ShowMessageRequestParams(lsp.MessageType.Warning, question, actions)
    answer = await server.window_show_message_request_async(request)
    return answer is not None and answer.title == ALLOW


def _report_missing_variable(server: LanguageServer, host: str) -> None:
    missing = "MTMC_LLM_MODEL (or the setting mtmc.llmModel)" if host else "OPENAI_BASE_URL"
    text = f"The run uses no language model: {missing} is not set in the environment of the server."
    server.window_show_message(lsp.ShowMessageParams(lsp.MessageType.Info, text))
