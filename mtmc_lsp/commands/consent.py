"""``mtmc consent``: whether a language model may be asked for a project, and the question before it first is."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtmc_lsp.core.errors import RequestError

if TYPE_CHECKING:
    from mtmc_lsp.app.backends import Backends
    from mtmc_lsp.app.pipeline import OpenTarget


def consent(
    give: Annotated[bool, typer.Option("--give", help="Allow it for this project and the present endpoint.")] = False,
    withdraw: Annotated[bool, typer.Option("--withdraw", help="Forget every answer for this project.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")] = False,
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
    here, kept, host = project_root(Path.cwd() / "x.py"), Consent(), host_of(os.environ)
    if withdraw:
        kept.withdraw(here)
    if give and not host:
        raise ModelNotUsable("no endpoint for a model is set", remedy="Set OPENAI_BASE_URL (or OPENAI_API_KEY) first.")
    if give:
        kept.grant(here, host)
    hosts = kept.hosts(here)
    if as_json:
        print(document(project=str(here), hosts=hosts, endpoint=host or None))
        return 0
    if hosts:
        print(f"code of {here} may be sent to {', '.join(hosts)}; --withdraw ends that")
    else:
        print(f"nothing of {here} is sent to a model")
        if host:
            print(f"{consent_question(here, host, model_name(read_settings(here).llm, os.environ))} --give says yes")
    return 0


def consented(opened: OpenTarget, makers: Backends, *, explicit: bool, may_ask: bool) -> Backends:
    """The makers as far as the user agreed to them: settings alone are no consent.

    Args:
        opened: what is optimised.
        makers: those that the settings and the command line name.
        explicit: whether the command line names a model as planner or coder.
        may_ask: whether the user can be asked now.
    """
    from mtmc_lsp.app.backends import BUILTIN
    from mtmc_lsp.app.folder_decisions import Consent, consent_question
    from mtmc_lsp.llm.endpoint.client import model_name
    from mtmc_lsp.llm.endpoint.endpoint import host_of

    if explicit or not makers.ask_a_model:
        return makers
    host, model = host_of(os.environ), model_name(opened.request.settings.llm, os.environ)
    if not host or not model:
        what = "no endpoint is set (OPENAI_BASE_URL)" if not host else "no model is named (MTMC_LLM_MODEL)"
        print(f"no language model takes part: {what}", file=sys.stderr)
        return BUILTIN
    kept = Consent()
    if kept.has(opened.root, host):
        return makers
    if may_ask and sys.stdin.isatty() and typer.confirm(consent_question(opened.root, host, model), err=True):
        kept.grant(opened.root, host)
        return makers
    print(
        f"no language model takes part: you have not agreed to it for {opened.root}; see `mtmc consent`",
        file=sys.stderr,
    )
    return BUILTIN
