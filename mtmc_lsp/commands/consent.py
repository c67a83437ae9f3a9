"""``mtmc consent``: whether a language model may get a project's code, and the question before the first request."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtmc_lsp.commands.options import AsJson
from mtmc_lsp.core.errors import RequestError

if TYPE_CHECKING:
    from mtmc_lsp.app.backends import Backends
    from mtmc_lsp.app.target_file import OpenTarget


def consent(
    give: Annotated[bool, typer.Option("--give", help="Allow it for this project and the present endpoint.")] = False,
    withdraw: Annotated[bool, typer.Option("--withdraw", help="Forget every answer for this project.")] = False,
    as_json: AsJson = False,
) -> int:
    """Show or change whether a language model may be sent this project's code; --planner llm and --coder llm need no consent."""
    from mtmc_lsp.app.folder_decisions import Consent, consent_question
    from mtmc_lsp.capture.module_paths import project_root
    from mtmc_lsp.core.chat import ModelNotUsable
    from mtmc_lsp.core.settings import read_settings
    from mtmc_lsp.llm.endpoint.client import model_name
    from mtmc_lsp.llm.endpoint.endpoint import host_of
    from mtmc_lsp.report.documents import document

    if give and withdraw:
        raise RequestError("--give and --withdraw are opposites", remedy="Choose one.")
    project, decisions, host = project_root(Path.cwd() / "any.py"), Consent(), host_of(os.environ)
    if withdraw:
        decisions.withdraw(project)
    if give and not host:
        raise ModelNotUsable("no endpoint for a model is set", remedy="Set OPENAI_BASE_URL (or OPENAI_API_KEY) first.")
    if give:
        decisions.grant(project, host)
    hosts = decisions.hosts(project)
    if as_json:
        print(document(project=str(project), hosts=hosts, endpoint=host or None))
        return 0
    if hosts:
        print(f"code of {project} may be sent to {', '.join(hosts)}; --withdraw ends that")
    else:
        print(f"nothing of {project} is sent to a model")
        if host:
            print(
                f"{consent_question(project, host, model_name(read_settings(project).llm, os.environ))} --give says yes"
            )
    return 0


def limit_to_consent(target: OpenTarget, backends: Backends, *, explicit: bool, may_ask: bool) -> Backends:
    """``backends`` if the user agreed to them, else those without a model: settings alone are not consent.

    Args:
        backends: the planner and the coder that the settings and the command line name.
        explicit: whether the command line names a model as planner or coder.
        may_ask: whether the user can be asked now.
    """
    from mtmc_lsp.app.folder_decisions import Consent, consent_question
    from mtmc_lsp.llm.endpoint.client import model_name
    from mtmc_lsp.llm.endpoint.endpoint import host_of

    if explicit or not backends.ask_a_model:
        return backends
    host, model = host_of(os.environ), model_name(target.settings.llm, os.environ)
    if not host or not model:
        what = "no endpoint is set (OPENAI_BASE_URL)" if not host else "no model is named (MTMC_LLM_MODEL)"
        print(f"no language model takes part: {what}", file=sys.stderr)
        return backends.without_model
    decisions = Consent()
    if decisions.has(target.project, host):
        return backends
    if may_ask and sys.stdin.isatty() and typer.confirm(consent_question(target.project, host, model), err=True):
        decisions.grant(target.project, host)
        return backends
    print(
        f"no language model takes part: you have not agreed to it for {target.project}; see `mtmc consent`",
        file=sys.stderr,
    )
    return backends.without_model
