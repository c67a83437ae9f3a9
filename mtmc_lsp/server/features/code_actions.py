"""Code actions for the target at the cursor.

An action has its command from the beginning: Helix runs no command that it gets when it resolves the action. Edits are computed
when the action is resolved.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from lsprotocol import types as lsp

from mtmc_lsp.core.run import RunStatus
from mtmc_lsp.core.workload import TargetKind
from mtmc_lsp.report.phrases import compiler_line
from mtmc_lsp.server.edits import workspace_edit
from mtmc_lsp.server.failures.syntax import target_error
from mtmc_lsp.server.features.quick_fixes import quick_fixes
from mtmc_lsp.server.features.steps.wording import position, step_title
from mtmc_lsp.server.handshake import CODE_ACTION_KIND as KIND
from mtmc_lsp.server.kernels_file.edits import pair_edit
from mtmc_lsp.server.kernels_file.texts import imported_kernels, whole_text
from mtmc_lsp.server.server import CERTIFY, Server
from mtmc_lsp.server.text import ERRORS, Document, has_kernels_of_author
from mtmc_lsp.source.compose import strip_generated
from mtmc_lsp.source.outline import LAUNCH, OutlineEntry
from mtmc_lsp.source.sibling.pair import FilePair, block_of, without_block
from mtmc_lsp.source.syntax import line_start
from mtmc_lsp.source.targets import find_targets
from mtmc_lsp.source.torch_compile.decorator import add_compile_decorator
from mtmc_lsp.source.workload.suggestion import suggest_directive

REVIEW_KIND = f"{KIND}.review"
REVIEW_NAMES = (
    "keep",
    "keepAll",
    "discard",
    "undo",
    "undoAll",
    "diff",
    "tryAnother",
    "markReviewed",
    "preview",
    "resume",
)
USE_COMPILER = "useCompiler"
"""The action that adds ``@torch.compile`` to the target."""
EDITS = ("addWorkload", USE_COMPILER)
"""Actions with an edit instead of a command."""


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
    """Name of the command without ``mtmc.``; also the last part of the kind."""
    title: str
    disabled: str = ""
    """Why the action is disabled, and the remedy; empty if it is enabled."""


def code_actions(ls: Server, params: lsp.CodeActionParams) -> list[lsp.CodeAction]:
    """Actions for the target at the cursor or at the selection."""
    document = ls.document(params.text_document.uri)
    if document is None or not document.uses_tensors:
        return []
    only = params.context.only
    fixes = quick_fixes(ls, document, params.range) if _is_requested(lsp.CodeActionKind.QuickFix.value, only) else []
    return fixes + (_target_actions(ls, document, params) if _wants_target_actions(only) else [])


def _target_actions(ls: Server, document: Document, params: lsp.CodeActionParams) -> list[lsp.CodeAction]:
    first, last = params.range.start.line, params.range.end.line
    # A generated block belongs to its target.
    block = document.block_at(first)
    owner = document.outline.find(block) if block is not None else None
    entry = owner or document.outline.target_at(first) or document.outline.target_at(last)
    if entry is None:
        return []
    offers = [*_review_offers(ls, document, entry), *_offers(ls, document, entry)]
    fitting = [offer for offer in offers if _is_requested(_kind(offer), params.context.only)]
    return [_action(ls, document, entry, o) for o in fitting if not o.disabled or _supports_disabled(ls)]


def _wants_target_actions(only: Any) -> bool:
    return not only or any(
        _is_subkind(KIND, str(_value(kind))) or _is_subkind(str(_value(kind)), KIND) for kind in only
    )


def _is_requested(kind: str, only: Any) -> bool:
    return not only or any(_is_subkind(kind, str(_value(wanted))) for wanted in only)


def _value(kind: Any) -> Any:
    return getattr(kind, "value", kind)


def _is_subkind(kind: str, above: str) -> bool:
    return kind == above or kind.startswith(f"{above}.") or not above


def _kind(offer: _Offer) -> str:
    is_review = offer.name in REVIEW_NAMES
    return f"{REVIEW_KIND if is_review else KIND}.{offer.name}"


def _offers(ls: Server, document: Document, entry: OutlineEntry) -> list[_Offer]:
    disabled_reason = _disabled_reason(ls, document, entry)
    has_kernel = block_of(whole_text(ls, document, entry.target.qualname), entry.target.qualname) is not None
    is_kernel = entry.target.kind is TargetKind.KERNEL
    kernel_reason = "It is a Triton kernel, which has no graph of operations. Optimise or repair it." * is_kernel
    no_kernel_reason = "" if has_kernel else "It has no generated kernel yet. Optimise it first and keep a step."
    directive_reason = "It already has a workload directive." if entry.has_directive else ""
    return [
        _Offer("optimize", _optimize_title(ls, document, entry), disabled_reason),
        _Offer("plan", "Show the plan first", disabled_reason or kernel_reason),
        _Offer("measure", "Measure this function", disabled_reason or kernel_reason),
        _Offer("verify", "Verify against reference", disabled_reason or no_kernel_reason),
        _Offer(
            "addWorkload",
            "Add a workload directive",
            target_error(document, entry) or kernel_reason or directive_reason,
        ),
        _Offer("record", "Record inputs from a command", disabled_reason or kernel_reason),
        *(
            [_Offer("tune", "Tune this kernel for this GPU", disabled_reason)]
            if has_kernels_of_author(document, entry)
            else []
        ),
        *([_Offer("repair", "Check and repair this kernel", disabled_reason)] if _is_repairable(entry) else []),
    ]


def _is_repairable(entry: OutlineEntry) -> bool:
    """Whether a target is a kernel, or a function in whose top-level statement a kernel is launched."""
    is_launcher = entry.target.kind is TargetKind.FUNCTION and LAUNCH.search(entry.chunk.text) is not None
    return entry.target.kind is TargetKind.KERNEL or is_launcher


def _optimize_title(ls: Server, document: Document, entry: OutlineEntry) -> str:
    review_state = ls.review_state(document, entry.target.qualname)
    if review_state is not None and review_state.changes:
        return f"Optimize again: {review_state.changes[0]}"
    if has_kernels_of_author(document, entry):
        return "Optimize this kernel"
    return "Optimize to Triton kernel"


def _disabled_reason(ls: Server, document: Document, entry: OutlineEntry) -> str:
    """Why the target cannot be optimised now, with the remedy; empty if it can."""
    if reason := target_error(document, entry):
        return reason
    if not document.path or not os.path.isfile(document.path):
        return "The file does not exist on disk. Save it first."
    job = ls.jobs.for_target(document.path, entry.target.qualname)
    return f"A job for it is already active: {job.title}. Wait for it or cancel it." if job is not None else ""


def _review_offers(ls: Server, document: Document, entry: OutlineEntry) -> list[_Offer]:
    """The commands of the code lenses, for clients without code lenses."""
    review_state = ls.review_state(document, entry.target.qualname)
    if review_state is None:
        return []
    offers = []
    stale_reason = ""
    if review_state.is_stale:
        change = (
            "The function changed since it was measured" if review_state.is_changed else review_state.stale_description
        )
        stale_reason = f"{change}. Optimise it again."
    active_reason = _active_job_reason(ls, document, entry)
    if review_state.pending:
        step = review_state.selected or review_state.pending[0]
        title = step_title(step)
        offers += [
            _Offer("keep", f"Keep {position(review_state, step)}: {title}", stale_reason),
            _Offer("diff", f"Diff of {title}"),
            _Offer("discard", f"Discard {title}", stale_reason or active_reason),
            _Offer("tryAnother", f"Retry: another step instead of {title}", stale_reason or active_reason),
            _Offer(
                "markReviewed",
                f"Mark {title} as {'not ' if ls.reviews.is_reviewed(review_state.review, step) else ''}reviewed",
            ),
            _Offer("keepAll", f"Keep all {len(review_state.pending)} steps", stale_reason),
        ]
        if not ls.options.diff_view:
            offers.append(_Offer("preview", "Preview all steps of the run", stale_reason))
    elif review_state.kept_count:
        step = review_state.kept_steps[-1]
        title = step_title(step)
        offers.append(_Offer("diff", f"Diff of {title}"))
        offers.append(_Offer("undo", f"Undo {title}", stale_reason or active_reason))
    result = review_state.review.result
    if result is not None and result.offer is not None and not active_reason:
        offers.append(_Offer(USE_COMPILER, f"Use torch.compile instead: {compiler_line(result)}", stale_reason))
    if review_state.kept_count or review_state.is_edited:
        offers.append(_Offer("undoAll", "Undo all steps"))
    if review_state.review.status is RunStatus.RUNNING and not active_reason:
        offers.append(_Offer("resume", "Go on with the run", stale_reason))
    return offers


def _active_job_reason(ls: Server, document: Document, entry: OutlineEntry) -> str:
    job = ls.jobs.for_target(document.path, entry.target.qualname)
    is_active = job is not None and job.kind != CERTIFY
    return "The run is still active. Wait for it or cancel it." if is_active else ""


def _action(ls: Server, document: Document, entry: OutlineEntry, offer: _Offer) -> lsp.CodeAction:
    action = lsp.CodeAction(
        title=offer.title,
        kind=_kind(offer),
        data={"uri": document.uri, "target": entry.target.qualname, "name": offer.name},
    )
    if offer.disabled:
        action.disabled = lsp.CodeActionDisabled(offer.disabled)
    elif offer.name not in EDITS or not _supports_resolve(ls):
        return resolve(ls, action)
    return action


def _supports_disabled(ls: Server) -> bool:
    """Whether the client can show disabled actions with their reason."""
    text = ls.client_capabilities.text_document
    return text is not None and text.code_action is not None and bool(text.code_action.disabled_support)


def _supports_resolve(ls: Server) -> bool:
    """Whether the client resolves an action before it runs it."""
    text = ls.client_capabilities.text_document
    support = text.code_action.resolve_support if text is not None and text.code_action is not None else None
    return support is not None and "command" in support.properties and "edit" in support.properties


def resolve(ls: Server, action: lsp.CodeAction) -> lsp.CodeAction:
    """Add the edit or the command to an action."""
    data = action.data if isinstance(action.data, dict) else {}
    name, uri, target = data.get("name"), data.get("uri"), data.get("target")
    if name == "addWorkload":
        action.edit = directive_edit(ls, str(uri), str(target))
    elif name == USE_COMPILER:
        action.edit = decorator_edit(ls, str(uri), str(target))
    elif name is not None:
        action.command = lsp.Command(action.title, f"mtmc.{name}", arguments=[{"uri": uri, "target": target}])
    return action


def decorator_edit(ls: Server, uri: str, qualname: str) -> lsp.WorkspaceEdit | None:
    """An edit that removes the kernels of a target and adds ``@torch.compile`` to it; None if that is not possible."""
    document = ls.document(uri)
    if document is None:
        return None
    plain = strip_generated(document.text.data, qualname)
    changed = add_compile_decorator(plain.decode("utf-8", ERRORS), qualname)
    if changed is None:
        return None
    kernels = imported_kernels(ls, document)
    without = without_block(kernels, qualname) if kernels is not None else None
    return pair_edit(ls, document, kernels, FilePair(changed.encode("utf-8", ERRORS), without))


def _relevant_source(text: bytes, entry: OutlineEntry) -> bytes:
    """The source that defines the parameters of a target: its own statement, or the file if a constructor is inherited."""
    part = entry.chunk.text
    is_whole = entry.target.kind is TargetKind.FUNCTION or b"def __init__" in part
    known = is_whole and any(target.qualname == entry.target.qualname for target in find_targets(part, ""))
    return part if known else text


def proposed_directive(document: Document, entry: OutlineEntry) -> str:
    """A suggested workload directive for a target, one line, derived from its code."""
    return suggest_directive(_relevant_source(document.text.data, entry), entry.target)


def directive_edit(ls: Server, uri: str, qualname: str, directive: str = "") -> lsp.WorkspaceEdit | None:
    """An edit that inserts a directive (default: the suggested one) above the target; None if the target no longer exists."""
    document = ls.document(uri)
    outlined = document.outline.find(qualname) if document is not None else None
    if document is None or outlined is None:
        return None
    text = document.text.data
    line = document.text.line(outlined.first_line - 1)
    indent = line[: len(line) - len(line.lstrip())].decode()
    newline = "\r\n" if b"\r\n" in text else "\n"
    directive = directive or proposed_directive(document, outlined)
    position = document.text.position(line_start(text, document.text.offset(lsp.Position(outlined.first_line - 1, 0))))
    edit = lsp.TextEdit(lsp.Range(position, position), f"{indent}{directive}{newline}")
    return workspace_edit(ls, document, [edit])
