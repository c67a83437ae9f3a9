"""Blocks that exceed shared memory: kernels are compiled on save in a worker, without a GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from editor import REAL, Editor, editor
from lsprotocol import types as lsp

from mtmc_lsp import docs
from mtmc_lsp.core.results import KernelReport
from mtmc_lsp.core.run import KernelLaunch
from mtmc_lsp.server.features.on_save import finding_at
from mtmc_lsp.server.features.resource_findings import resource_findings
from mtmc_lsp.source.lint.finding import Severity
from mtmc_lsp.source.triton.launch_sites import LaunchForm

pytestmark = pytest.mark.timeout(120)

PAGE = (docs.FOLDER / "checks" / "shared-memory.md").read_text()


def example(heading: str) -> str:
    return PAGE.split(f"## {heading}\n```python\n")[1].split("```")[0]


def found(ide: Editor, uri: str) -> list[lsp.Diagnostic]:
    return [item for item in ide.client.diagnostics.get(uri, []) if item.code == "shared-memory"]


def save(ide: Editor, uri: str) -> None:
    ide.client.text_document_did_save(lsp.DidSaveTextDocumentParams(lsp.TextDocumentIdentifier(uri)))


async def checked(ide: Editor, uri: str) -> None:
    """Save, and wait for the end of the check, which sends a refresh request."""
    # As editors do after the last refresh: until then, there is no further one.
    await ide.lenses(uri)
    before = len(ide.refreshed)
    save(ide, uri)
    await ide.until(lambda: len(ide.refreshed) > before)
    # Diagnostics are pushed directly afterwards; without findings, nothing is pushed.
    await asyncio.sleep(0.1)


@pytest.mark.asyncio
async def test_a_too_large_block_is_reported_on_save_and_cleared_on_edit(tmp_path: Path) -> None:
    async with editor(tmp_path, REAL, settings={"archs": ["sm_90"]}) as ide:
        uri = ide.open(example("Reported"))
        save(ide, uri)
        (diagnostic,) = await ide.until(lambda: found(ide, uri))
        assert diagnostic.severity == lsp.DiagnosticSeverity.Error
        assert diagnostic.message.startswith("product with BLOCK=128, num_stages=5 needs ")
        assert "bytes of shared memory, and sm_90 has 232448; use smaller blocks" in diagnostic.message
        assert diagnostic.code_description.href.endswith("checks/shared-memory.md")
        line = ide.texts[uri].splitlines()[diagnostic.range.start.line]
        assert "product[(1,)]" in line
        ide.replace(uri, "num_stages=5", "num_stages=2")
        await ide.until(lambda: not found(ide, uri))
        await checked(ide, uri)
        assert found(ide, uri) == []
        # With the old text the report is back at the next save.
        ide.replace(uri, "num_stages=2", "num_stages=5")
        await checked(ide, uri)
        await ide.until(lambda: found(ide, uri))
        ide.replace(uri, "    product[(1,)]", "    # mtmc: ignore[shared-memory]\n    product[(1,)]")
        await checked(ide, uri)
        assert found(ide, uri) == []


TUNED = """\
import torch
import triton
import triton.language as tl


def configs():
    return [triton.Config({"BLOCK": 64}, num_stages=s, num_warps=8) for s in (5, 9)]


@triton.autotune(configs=configs(), key=["K"])
@triton.jit
def product(a_ptr, b_ptr, out_ptr, K, BLOCK: tl.constexpr):
    rows = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for k in range(0, K, BLOCK):
        a = tl.load(a_ptr + rows[:, None] * K + k + rows[None, :])
        b = tl.load(b_ptr + (k + rows)[:, None] * BLOCK + rows[None, :])
        total = tl.dot(a, b, total)
    tl.store(out_ptr + rows[:, None] * BLOCK + rows[None, :], total)


# mtmc: a=f32[64,512] b=f32[512,64]
def launch(a, b):
    assert a.is_contiguous()
    product[(1,)](a, b, torch.empty(64, 64, device=a.device), a.shape[1])
"""


@pytest.mark.asyncio
async def test_oversized_configurations_are_reported_at_their_definition_with_dtypes_of_the_directive(
    tmp_path: Path,
) -> None:
    async with editor(tmp_path, REAL, settings={"archs": ["sm_90", "sm_86"]}) as ide:
        # This code cannot run here, but it must not matter.
        uri = ide.open(TUNED + "\n\nDEVICE = torch.device(torch.cuda.get_device_name(99))\nlaunch(1, 2)\n")
        save(ide, uri)
        (diagnostic,) = await ide.until(lambda: found(ide, uri))
        assert ide.texts[uri].splitlines()[diagnostic.range.start.line].startswith("    return [triton.Config(")
        # Nine stages of 32 KiB, as both operands are float32, fit neither; five fit one.
        assert diagnostic.severity == lsp.DiagnosticSeverity.Warning
        assert diagnostic.message.startswith("2 of 2 configurations are too large: product with BLOCK=64, num_stages=9")
        assert "sm_90 has 232448, sm_86 has 101376" in diagnostic.message


def test_a_kernel_that_fits_another_architecture_gives_a_hint() -> None:
    form = LaunchForm(KernelLaunch("k", {}, {"BLOCK": 64}, 4, 3), 5, 9, is_tuned=False)
    reports = [KernelReport("k", "sm_90", shared_bytes=150_000), KernelReport("k", "sm_86", shared_bytes=150_000)]
    finding = finding_at([(form, reports)])
    assert (finding.severity, finding.start, finding.end) == (Severity.HINT, 5, 9)
    assert finding.message == (
        "k with BLOCK=64, num_stages=3 needs 150000 bytes of shared memory, and sm_86 has 101376; it fits sm_90"
    )
    assert finding_at([(form, reports[:1])]) is None
    assert finding_at([(form, [KernelReport("k", "sm_90", error="it does not compile")])]) is None
    assert finding_at([(form, reports[1:])]).severity == Severity.ERROR


@pytest.mark.asyncio
async def test_nothing_is_imported_in_a_folder_that_is_not_trusted(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    witness = tmp_path / "imported"
    async with editor(tmp_path / "user", REAL, options={}, settings={"archs": ["sm_90"]}) as ide:
        (ide.root / "beside.py").write_text(f"open({str(witness)!r}, 'w').close()\n")
        uri = ide.open(f"import beside\n{example('Reported')}")
        save(ide, uri)
        assert await ide.command("jobs") == []
        assert ide.questions == []
    assert not witness.exists()


def form(kernel: str = "k", *, is_tuned: bool = False) -> LaunchForm:
    return LaunchForm(KernelLaunch(kernel, {}, {"BLOCK": 8192}, 4, 3), 5, 9, is_tuned=is_tuned)


def reported(*reports: list[KernelReport], products: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Codes and messages for one location with these reports of each form."""
    forms = [(form(is_tuned=len(reports) > 1), each) for each in reports]
    return [(finding.code, finding.message) for finding in resource_findings(forms, products)]


def compiled(arch: str = "sm_90", registers: int = 64, spills: int = 0, occupancy: float = 0.5) -> KernelReport:
    return KernelReport("k", arch, registers, spills, occupancy=occupancy)


def test_spills_are_reported_for_a_launch_and_for_configurations_that_all_spill() -> None:
    ((code, message),) = reported([compiled("sm_80", 255, 104), compiled("sm_90", 255, 128, 0.12)])
    assert code == "register-spills"
    assert message.startswith(
        "k with BLOCK=8192, num_warps=4 spills 128 bytes of each thread to memory on sm_90; use smaller"
    )
    assert reported([compiled(spills=16)]) == []
    assert reported([compiled(spills=64)], [compiled()]) == [], "the autotuner chooses the other one"
    assert "like all 2 configurations" in reported([compiled(spills=64)], [compiled(spills=64)])[0][1]
    assert reported([compiled(spills=64)], []) == [], "one was not compiled"


def test_few_warps_are_reported_with_the_architecture_and_the_cause() -> None:
    ((code, message),) = reported([compiled("sm_80", 168, occupancy=0.1875), compiled("sm_90", 160, occupancy=0.2)])
    assert code == "low-occupancy"
    assert (
        "k with BLOCK=8192, num_warps=4 runs at 19% of the warps that sm_80 can hold, because of 168 registers"
        in message
    )
    assert reported([compiled(occupancy=0.18)], [compiled(occupancy=0.5)]) == [], "the autotuner chooses the other one"
    assert reported([compiled(occupancy=0.18)], products=("k",)) == []
    assert reported([KernelReport("k", "gfx1100")]) == [], "nothing is known"
    shared = KernelReport("k", "sm_90", 32, 0, shared_bytes=120_000, occupancy=0.06)
    assert "because of 120000 bytes of shared memory" in reported([shared])[0][1]


@pytest.mark.asyncio
async def test_a_launch_that_spills_is_reported_at_its_line_on_save(tmp_path: Path) -> None:
    text = (docs.FOLDER / "checks" / "register-spills.md").read_text()
    async with editor(tmp_path, REAL, settings={"archs": ["sm_90"]}) as ide:
        uri = ide.open(text.split("## Reported\n```python\n")[1].split("```")[0])
        save(ide, uri)
        (diagnostic,) = await ide.until(
            lambda: [item for item in ide.client.diagnostics.get(uri, []) if item.code == "register-spills"]
        )
        assert "row_sums with BLOCK=8192, num_warps=2 spills" in diagnostic.message
        assert "row_sums[(x.shape[0],)]" in ide.texts[uri].splitlines()[diagnostic.range.start.line]
        ide.replace(uri, "num_warps=2", "num_warps=16")
        await checked(ide, uri)
        codes = {item.code for item in ide.client.diagnostics.get(uri, [])}
        assert not codes & {"register-spills", "low-occupancy"}
