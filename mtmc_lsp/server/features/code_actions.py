"""Code actions: what can be done with the code at the cursor.

An action carries only its target until it is chosen: what it needs to know is looked up when it is resolved.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lsprotocol import types as lsp

from mtmc_lsp.core.run import RunStatus
from mtmc_lsp.core.workload import TargetKind
from mtmc_lsp.server.edits import edits_of
from mtmc_lsp.server.features.quick_fixes import quick_fixes
from mtmc_lsp.server.handshake import CODE_ACTION_KIND as KIND
from mtmc_lsp.server.server import Document, Server
from mtmc_lsp.source.outline import OutlineEntry
from mtmc_lsp.source.syntax import line_start
from mtmc_lsp.source.targets import find_targets
from mtmc_lsp.source.workload.suggestion import suggest_directive

REVIEW_KIND = f"{KIND}.review"


def register(server: Server) -> None:
    """Register code actions."""
    kinds = [lsp.CodeActionKind.QuickFix, KIND]
    options = lsp.CodeActionOptions(code_action_kinds=kinds, resolve_provider=True)
    server.feature(lsp.TEXT_DOCUMENT_CODE_ACTION, options)(code_actions)
    server.feature(lsp.CODE_ACTION_RESOLVE)(resolve)


@dataclass(frozen=True)
class _Offer:
    """An action on a target."""

    name: str
    """The command is ``mtmc.`` and this, the kind ends with it."""
    title: str
    disabled: str = ""
    """Why it cannot be done, and the remedy."""


def code_actions(ls: Server, params: lsp.CodeActionParams) -> list[lsp.CodeAction]:
    """What can be done with the target at the cursor, or with the selection's first."""
    document = ls.document(params.text_document.uri)
    if document is None or not is_ours(document):
        return []
    only = params.context.only
    fixes = quick_fixes(ls, document, params.range) if _fits(lsp.CodeActionKind.QuickFix.value, only) else []
    return fixes + (_of_target(ls, document, params) if _wanted(only) else [])


def _of_target(ls: Server, document: Document, params: lsp.CodeActionParams) -> list[lsp.CodeAction]:
    first, last = params.range.start.line, params.range.end.line
    # What was generated belongs to the target that it was generated for.
    block = document.block_at(first)
    owner = document.outline.find(block) if block is not None else None
    found = owner or document.outline.target_at(first) or document.outline.target_at(last)
    if found is None:
        return []
    offers = [*_review_offers(ls, document, found), *_offers(ls, document, found)]
    fitting = [offer for offer in offers if _fits(_kind(offer), params.context.only)]
    return [_action(ls, document, found, o) for o in fitting if not o.disabled or _shows_disabled(ls)]


def is_ours(document: Document) -> bool:
    """Whether it is a file of the user's own that has to do with tensors."""
    if {"site-packages", "dist-packages"} & set(Path(document.path).parts):
        return False
    tops = {path.split(".")[0] for path in document.outline.names.imports.values()}
    return bool(tops & {"torch", "triton", "jaxtyping"}) or b"# mtmc:" in document.text.data


def _wanted(only: Any) -> bool:
    return not only or any(_is_below(KIND, str(_value(kind))) or _is_below(str(_value(kind)), KIND) for kind in only)


def _fits(kind: str, only: Any) -> bool:
    return not only or any(_is_below(kind, str(_value(wanted))) for wanted in only)


def _value(kind: Any) -> Any:
    return getattr(kind, "value", kind)


def _is_below(kind: str, above: str) -> bool:
    return kind == above or kind.startswith(f"{above}.") or not above


def _kind(offer: _Offer) -> str:
    is_review = offer.name in ("keep", "keepAll", "undo", "undoAll", "diff", "tryAnother", "preview", "resume")
    return f"{REVIEW_KIND if is_review else KIND}.{offer.name}"


def _offers(ls: Server, document: Document, found: OutlineEntry) -> list[_Offer]:
    why_not = _why_not(ls, document, found)
    has_kernel = b"# mtmc: begin " + found.target.qualname.encode() in document.text.data
    is_kernel = found.target.kind is TargetKind.KERNEL
    no_launcher = "A Triton kernel is optimised through the function that launches it; choose that one." * is_kernel
    no_kernel = "" if has_kernel else "There is no generated kernel in it yet; optimise it first, and keep a step."
    directive = "It has one already." if found.has_directive else ""
    return [
        _Offer("optimize", _optimize_title(ls, document, found), why_not or no_launcher),
        _Offer("plan", "Show the plan first", why_not or no_launcher),
        _Offer("measure", "Measure this function", why_not or no_launcher),
        _Offer("verify", "Verify against reference", why_not or no_kernel),
        _Offer("addWorkload", "Add a workload directive", _broken(found) or no_launcher or directive),
        _Offer("record", "Record inputs from a command", why_not or no_launcher),
    ]


def _optimize_title(ls: Server, document: Document, found: OutlineEntry) -> str:
    standing = ls.standing(document, found.target.qualname)
    if standing is not None and standing.changes:
        return f"Optimize again: {standing.changes[0]}"
    return "Optimize to Triton kernel"


def _why_not(ls: Server, document: Document, found: OutlineEntry) -> str:
    """Why the target cannot be optimised now, with the remedy; empty where it can."""
    if reason := _broken(found):
        return reason
    if not document.path or not Path(document.path).is_file():
        return "The file is not on disk yet; save it first."
    job = ls.jobs.of(document.path, found.target.qualname)
    return f"It is being worked on: {job.title}. Wait, or cancel that." if job is not None else ""


def _broken(found: OutlineEntry) -> str:
    return f"{found.target.qualname} has a syntax error; mend it first." if found.is_broken else ""


def _review_offers(ls: Server, document: Document, found: OutlineEntry) -> list[_Offer]:
    """The code lenses' commands, for clients that show no lenses."""
    standing = ls.standing(document, found.target.qualname)
    if standing is None:
        return []
    offers = []
    stale = ""
    if standing.is_stale:
        what = "The function was changed since it was measured" if standing.is_changed else standing.why_stale
        stale = f"{what}; optimise it again."
    going_on = _unless_over(ls, document, found)
    if standing.pending:
        step = standing.pending[0]
        offers += [
            _Offer("keep", f"Keep step {step.index}: {step.action.text}", stale),
            _Offer("diff", f"Diff of step {step.index}"),
            _Offer("undo", f"Undo step {step.index}", stale or going_on),
            _Offer("tryAnother", f"Try another instead of step {step.index}", stale or going_on),
            _Offer("keepAll", f"Keep all {len(standing.pending)} steps", stale),
        ]
        if not ls.options.diff_view:
            offers.append(_Offer("preview", "Preview the whole run", stale))
    elif standing.kept:
        step = standing.kept_steps[-1]
        offers.append(_Offer("diff", f"Diff of step {step.index}"))
        offers.append(_Offer("undo", f"Undo step {step.index}: {step.action.text}", stale or going_on))
    if standing.kept or standing.is_edited:
        offers.append(_Offer("undoAll", "Undo all steps"))
    if standing.review.status is RunStatus.RUNNING and not going_on:
        offers.append(_Offer("resume", "Go on with the run", stale))
    return offers


def _unless_over(ls: Server, document: Document, found: OutlineEntry) -> str:
    is_going_on = ls.jobs.of(document.path, found.target.qualname) is not None
    return "The run still goes on; wait for its end, or cancel it." if is_going_on else ""


def _action(ls: Server, document: Document, found: OutlineEntry, offer: _Offer) -> lsp.CodeAction:
    action = lsp.CodeAction(
        title=offer.title,
        kind=_kind(offer),
        data={"uri": document.uri, "target": found.target.qualname, "name": offer.name},
    )
    if offer.disabled:
        action.disabled = lsp.CodeActionDisabled(offer.disabled)
    elif not _resolves(ls):
        return resolve(ls, action)
    return action


def _shows_disabled(ls: Server) -> bool:
    """Whether the client can show an action that cannot be done now, with the reason."""
    text = ls.client_capabilities.text_document
    return text is not None and text.code_action is not None and bool(text.code_action.disabled_support)


def _resolves(ls: Server) -> bool:
    """Whether the client completes an action before it runs it."""
    text = ls.client_capabilities.text_document
    support = text.code_action.resolve_support if text is not None and text.code_action is not None else None
    return support is not None and "command" in support.properties and "edit" in support.properties


def resolve(ls: Server, action: lsp.CodeAction) -> lsp.CodeAction:
    """The action's edit or command."""
    data = action.data if isinstance(action.data, dict) else {}
    name, uri, target = data.get("name"), data.get("uri"), data.get("target")
    if name == "addWorkload":
        action.edit = directive_edit(ls, str(uri), str(target))
    elif name is not None:
        action.command = lsp.Command(action.title, f"mtmc.{name}", arguments=[{"uri": uri, "target": target}])
    return action


def _enough(text: bytes, found: OutlineEntry) -> bytes:
    """The part of a file that says what a target takes: its own statement, unless a constructor is inherited."""
    part = found.chunk.text
    is_whole = found.target.kind is TargetKind.FUNCTION or b"def __init__" in part
    known = is_whole and any(target.qualname == found.target.qualname for target in find_targets(part, ""))
    return part if known else text


def proposed_directive(document: Document, found: OutlineEntry) -> str:
    """The directive that a target could have, filled in as far as its code tells: one line."""
    return suggest_directive(_enough(document.text.data, found), found.target)


def directive_edit(ls: Server, uri: str, qualname: str, words: str = "") -> lsp.WorkspaceEdit | None:
    """The directive (by default a suggested one) as a comment above the target; None where the target is gone."""
    document = ls.document(uri)
    found = document.outline.find(qualname) if document is not None else None
    if document is None or found is None:
        return None
    text = document.text.data
    line = document.text.line(found.first_line - 1)
    indent = line[: len(line) - len(line.lstrip())].decode()
    newline = "\r\n" if b"\r\n" in text else "\n"
    words = words or proposed_directive(document, found)
    at = document.text.position(line_start(text, document.text.offset(lsp.Position(found.first_line - 1, 0))))
    edit = lsp.TextEdit(lsp.Range(at, at), f"{indent}{words}{newline}")
    return edits_of(ls, document, [edit])
