"""The order of the folders, and who may import what."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "mtmc_lsp"
ORDER = ["core", "source", "capture", "macro", "micro", "measure", "search", "report", "server"]
IN_WORKER = {
    "worker.py", "capture/in_worker.py", "capture/calls.py", "capture/exporting.py", "capture/loading.py",
    "measure/in_worker.py", "measure/in_compiler.py", "measure/in_timer.py", "measure/inputs.py", "measure/oracle.py",
}  # fmt: skip
HEAVY = {"torch", "triton", "numpy"}
OURS_ONLY_HERE = {"tree_sitter", "tree_sitter_python", "typer", "rich", "pygls", "lsprotocol", "openai"}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_folder_imports_only_folders_to_its_left(path: Path) -> None:
    folder = path.relative_to(ROOT).parts[0]
    if folder not in ORDER:
        return
    for name in imports(path):
        if name.startswith("mtmc_lsp."):
            other = name.split(".")[1]
            assert ORDER.index(other) <= ORDER.index(folder), f"{path} imports {name}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_only_worker_files_import_torch_and_they_import_nothing_the_user_lacks(path: Path) -> None:
    tops = {name.split(".")[0] for name in imports(path)}
    if str(path.relative_to(ROOT)) in IN_WORKER:
        assert not tops & OURS_ONLY_HERE
    else:
        assert not tops & HEAVY


def test_the_command_line_starts_without_torch_or_triton() -> None:
    code = (
        "import sys, mtmc_lsp.cli, mtmc_lsp.search.session; print([m for m in ('torch', 'triton') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_worker_files_run_where_nothing_of_ours_is_installed() -> None:
    """Every module a worker needs imports with tree-sitter, typer and rich made unavailable."""
    names = [str(Path(p).with_suffix("")).replace("/", ".") for p in sorted(IN_WORKER) if p != "worker.py"]
    code = "import sys\n" + "".join(f"sys.modules[{n!r}] = None\n" for n in sorted(OURS_ONLY_HERE))
    code += "".join(f"import mtmc_lsp.{name}\n" for name in names)
    subprocess.run([sys.executable, "-c", code], check=True)
