"""What the editor shows of a run: diagnostics both ways, hovers, inlay hints, symbols, folding."""

from __future__ import annotations

import asyncio
from pathlib import Path
from urllib.parse import unquote, urlparse

import pytest
from editor import Editor, capabilities, editor, position
from lsprotocol import types as lsp

from mtmc_lsp import docs

pytestmark = pytest.mark.asyncio

MODEL = """\
# fake f: better wrong better
# fake h: slower
# fake w: wrong
import torch
import triton.language as tl


def f(x):
    return torch.relu(x) + 1


def h(x):
    return tl.load(x)


def w(x):
    return x
"""


async def diagnostics(ide: Editor, uri: str) -> dict[str, lsp.Diagnostic]:
    """By code, as the client pulls them."""
    params = lsp.DocumentDiagnosticParams(lsp.TextDocumentIdentifier(uri))
    report = await ide.client.text_document_diagnostic_async(params)
    return {str(item.code): item for item in report.items if item.source == "mtmc"}


async def hover(ide: Editor, uri: str, words: str) -> str | None:
    at = position(ide.texts[uri], ide.texts[uri].index(words))
    params = lsp.HoverParams(lsp.TextDocumentIdentifier(uri), at)
    found = await ide.client.text_document_hover_async(params)
    return found.contents.value if found is not None else None


async def optimized(ide: Editor, name: str = "f") -> str:
    uri = ide.open(MODEL)
    await ide.optimized(uri, name)
    return uri


async def test_good_results_are_no_diagnostics(ide: Editor) -> None:
    uri = await optimized(ide)
    assert await diagnostics(ide, uri) == {}
    await ide.command("keepAll", uri, "f")
    assert await diagnostics(ide, uri) == {}


async def test_every_diagnostic_links_to_its_page(ide: Editor) -> None:
    uri = await optimized(ide, "h")
    found = (await diagnostics(ide, uri))["not-faster"]
    page = Path(unquote(urlparse(found.code_description.href).path))
    assert page.read_text().startswith("# not-faster: ")


async def test_a_failure_is_marked_at_its_function_until_that_is_edited(ide: Editor) -> None:
    uri = ide.open(MODEL.replace("better wrong better", "broken"))
    await ide.optimized(uri, "f")
    found = (await diagnostics(ide, uri))["run-failed"]
    assert (found.message, found.severity) == (
        "f: the target raises ValueError. Correct it.",
        lsp.DiagnosticSeverity.Error,
    )
    assert ide.texts[uri].splitlines()[found.range.start.line] == "def f(x):"
    context = lsp.CodeActionContext(diagnostics=[found], only=[lsp.CodeActionKind.QuickFix])
    params = lsp.CodeActionParams(lsp.TextDocumentIdentifier(uri), found.range, context)
    (action,) = await ide.client.text_document_code_action_async(params)
    assert "Try again" in str(action)
    assert "mtmc.optimize" in str(action)
    ide.change(uri, 0, 0, "# x\n")
    moved = (await diagnostics(ide, uri))["run-failed"]
    assert ide.texts[uri].splitlines()[moved.range.start.line] == "def f(x):"
    ide.replace(uri, "torch.relu(x)", "torch.relu(x + 1)")
    assert await diagnostics(ide, uri) == {}


async def test_not_faster_is_a_hint_and_nothing_verified_is_said(ide: Editor) -> None:
    uri = await optimized(ide, "h")
    await ide.optimized(uri, "w")
    found = await diagnostics(ide, uri)
    assert found["not-faster"].severity == lsp.DiagnosticSeverity.Hint
    assert "values: relative error 0.5" in found["unverified"].message


async def test_a_change_of_the_function_is_stale_at_once_and_one_elsewhere_is_not(ide: Editor) -> None:
    uri = await optimized(ide)
    await ide.command("keep", uri, "f")
    ide.replace(uri, "tl.load(x)", "tl.load(x + 1)")
    assert await diagnostics(ide, uri) == {}
    ide.replace(uri, "torch.relu(x)", "torch.relu(x + 1)")
    found = await diagnostics(ide, uri)
    assert list(found) == ["stale"]
    assert "the kernel in the file still computes the old version" in found["stale"].message
    ide.replace(uri, "torch.relu(x + 1)", "torch.relu(x)")
    assert await diagnostics(ide, uri) == {}


async def test_code_that_does_not_verify_is_an_error_until_it_changes(ide: Editor) -> None:
    uri = ide.open(MODEL.replace("better wrong better", "better incorrect"))
    await ide.optimized(uri, "f")
    await ide.command("keep", uri, "f")
    job = await ide.command("verify", uri, "f")
    assert "incorrect on the GPU" in await ide.finished(job["job"])
    found = (await diagnostics(ide, uri))["incorrect"]
    assert found.severity == lsp.DiagnosticSeverity.Error
    assert found.related_information[0].message == "the kernels of f"
    ide.change(uri, 0, 0, "# x\n")
    assert "incorrect" not in await diagnostics(ide, uri)


async def test_a_pull_of_what_is_known_answers_unchanged(ide: Editor) -> None:
    uri = await optimized(ide)
    document = lsp.TextDocumentIdentifier(uri)
    first = await ide.client.text_document_diagnostic_async(lsp.DocumentDiagnosticParams(document))
    again = lsp.DocumentDiagnosticParams(document, previous_result_id=first.result_id)
    assert (await ide.client.text_document_diagnostic_async(again)).kind == "unchanged"


async def test_a_client_that_does_not_pull_is_told(ide: Editor) -> None:
    uri = await optimized(ide)

    def codes() -> list[object]:
        return [item.code for item in ide.client.diagnostics.get(uri, []) if item.source == "mtmc"]

    ide.replace(uri, "torch.relu(x)", "torch.relu(x + 1)")
    await ide.until(lambda: codes() == ["stale"])
    ide.client.text_document_did_close(lsp.DidCloseTextDocumentParams(lsp.TextDocumentIdentifier(uri)))
    await ide.until(lambda: codes() == [])


async def test_a_client_that_pulls_is_asked_to_pull_again_and_pushed_nothing(tmp_path: Path) -> None:
    known = capabilities()
    known.text_document.diagnostic = lsp.DiagnosticClientCapabilities()
    known.workspace.diagnostics = lsp.DiagnosticWorkspaceClientCapabilities(refresh_support=True)
    async with editor(tmp_path, client_capabilities=known) as ide:
        uri = ide.open(MODEL)
        await ide.optimized(uri, "f")
        await ide.until(lambda: ide.client.diagnostic_refresh_count)
        assert await diagnostics(ide, uri) == {}
        assert ide.client.diagnostics == {}


async def test_hover_shows_the_run_on_the_def_the_kernel_and_the_dispatch_line(ide: Editor) -> None:
    uri = await optimized(ide)
    await ide.command("keep", uri, "f")
    table = await hover(ide, uri, "def f(x)")
    assert table == await hover(ide, uri, "def f_kernel") == await hover(ide, uri, "if x is None")
    assert table.startswith("**f** · 1 kept, 1 pending, 1 rejected\n\n| | |\n|---|---|\n| step | 1/2 Action 1 |\n")
    assert "| time | 80.0 us |" in table
    assert "| speedup | 1.25x (1.24 to 1.26) over eager |" in table
    assert "| roofline | 25% |" in table
    assert "| peak memory | 48 MB, as much as your code |" in table
    assert "| correctness | correct on the GPU: all 0 checks passed, relative error 1.0e-07" in table
    assert f"[fuse]({docs.page('actions', 'fuse').as_uri()}): reason 1" in table
    assert "Fake GPU, torch 2.13, triton 3.9 |" in table
    assert len(table.splitlines()) <= 13, "it fits"
    assert await hover(ide, uri, "torch.relu") is None


GUARDED = (Path(__file__).parent.parent / "golden" / "fuse" / "after.py").read_text()
RUN_IF = """\
**The kernels run** on tensors of the current GPU, without gradients and autocast, if

```python
x.dtype == torch.float32
x.ndim == 2
x.is_contiguous()
bias.dtype == torch.float32
bias.ndim == 1
bias.shape[0] == x.shape[1]
bias.is_contiguous()
x.shape[1] <= 8388480
```"""


async def test_hover_shows_when_the_kernels_run_also_without_a_known_run(ide: Editor) -> None:
    uri = ide.open(GUARDED)
    assert await hover(ide, uri, "def bias_gelu(x") == RUN_IF == await hover(ide, uri, "if bias_gelu_fits")
    ide.replace(uri, "x.ndim == 2", "x.ndim == (")
    assert await hover(ide, uri, "def bias_gelu(x") is None, "the guard is being edited"


async def test_hover_names_the_condition_that_refuses_the_workload_until_the_text_changes(ide: Editor) -> None:
    uri = ide.open(f"{GUARDED}# refused\n")
    job = await ide.command("verify", uri, "bias_gelu")
    await ide.finished(job["job"])
    refused = "**They do not run for the file's workload:** x is float16; the kernels were made for float32"
    assert await hover(ide, uri, "def bias_gelu(x") == f"{RUN_IF}\n\n{refused}"
    ide.change(uri, 0, 0, "# x\n")
    assert await hover(ide, uri, "def bias_gelu(x") == RUN_IF


async def test_a_guard_of_many_conditions_is_cut_after_those_on_arguments(ide: Editor) -> None:
    uri = ide.open((Path(__file__).parent.parent / "golden" / "recurrent" / "after.py").read_text())
    lines = (await hover(ide, uri, "class Net")).splitlines()
    assert lines[3:7] == [
        "x.dtype == torch.float32",
        "x.is_contiguous()",
        "x.ndim == 3",
        "x.shape[2] == 8",
    ]
    assert lines[7] == "self.layer.bidirectional is False"
    assert lines[-2] == "... # and 33 more"


async def test_hover_explains_the_words_of_triton(ide: Editor) -> None:
    uri = ide.open(MODEL)
    assert "Where `mask` is false" in await hover(ide, uri, "tl.load")
    ide.replace(uri, "import triton.language as tl", "import other as tl")
    assert await hover(ide, uri, "tl.load") is None


async def test_hover_explains_what_kernels_use_of_triton() -> None:
    """Everything that Triton offers, but for what its own library is made of and newer names for atomics."""
    import triton.language as tl

    from mtmc_lsp.source.triton.glossary import TRITON

    inner = {
        "PropagateNan",
        "TRITON_MAX_TENSOR_NUMEL",
        "atomic_load",
        "atomic_poll",
        "atomic_store",
        "bitonic_merge",
        "const",
    }
    inner |= {
        "block_type",
        "condition",
        "constexpr_type",
        "expect_zero",
        "extra",
        "math",
        "pair_uniform_to_normal",
        "slice",
    }
    inner |= {"philox_impl", "pi32_t", "target_info", "to_tensor", "tuple", "uint_to_uniform_float", "void"}
    assert set(tl.__all__) - set(TRITON) <= inner


async def test_inlay_hints_are_off_until_asked_for(ide: Editor) -> None:
    uri = await optimized(ide)
    await ide.command("keepAll", uri, "f")
    whole = lsp.Range(lsp.Position(0, 0), lsp.Position(99, 0))
    params = lsp.InlayHintParams(lsp.TextDocumentIdentifier(uri), whole)
    assert not await ide.client.text_document_inlay_hint_async(params)
    ide.client.set_configuration({"inlayHints": True}, section="mtmc")
    ide.client.workspace_did_change_configuration(lsp.DidChangeConfigurationParams(settings=None))
    hints: list[lsp.InlayHint] | None = None
    for _ in range(500):
        # The server asks for the setting, and then has the client ask for hints anew.
        if hints := await ide.client.text_document_inlay_hint_async(params):
            break
        await asyncio.sleep(0.02)
    assert hints
    (hint,) = hints
    assert hint.label == "64.0 us (1.56x)"
    assert ide.texts[uri].splitlines()[hint.position.line] == "def f(x):"


async def test_symbols_and_folding(ide: Editor) -> None:
    uri = await optimized(ide)
    await ide.command("keep", uri, "f")
    document = lsp.TextDocumentIdentifier(uri)
    symbols = await ide.client.text_document_document_symbol_async(lsp.DocumentSymbolParams(document))
    assert [(s.name, s.detail) for s in symbols][:: len(symbols) - 1] == [
        ("f", "function"),
        ("f_kernel", "Triton kernel"),
    ]
    (fold,) = await ide.client.text_document_folding_range_async(lsp.FoldingRangeParams(document))
    lines = ide.texts[uri].splitlines()
    assert (lines[fold.start_line], lines[fold.end_line]) == ("# mtmc: begin f", "# mtmc: end f")


async def test_every_code_has_a_page_and_every_page_a_code() -> None:
    from mtmc_lsp.server.features import diagnostics as feature

    source = (
        Path(feature.__file__).read_text()
        + (Path(feature.__file__).parents[1] / "failures/feature.py").read_text()
        + (Path(feature.__file__).parents[1] / "failures/syntax.py").read_text()
    )
    pages = {path.stem for path in (docs.FOLDER / "diagnostics").glob("*.md")}
    assert pages == {"incorrect", "stale", "not-faster", "unverified", "run-failed", "not-analysed", "syntax-error"}
    assert all(f'"{code}"' in source for code in pages)
