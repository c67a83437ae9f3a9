"""The order of the folders, and who may import what (README, architecture)."""

from __future__ import annotations

import ast
import collections
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "mtmc_lsp"
ORDER = [
    "core", "docs", "process", "device", "source", "capture", "guard", "ir", "schedule", "rewrites", "tuning", "fusion", "actions", "planners",
    "codegen", "compile", "verify", "timing", "measure", "kernels", "llm", "policies", "search", "app", "cluster", "programs", "explore", "evolve", "report", "training", "server", "commands",
]  # fmt: skip
FACES = {"__init__.py", "__main__.py", "cli.py", "launch.py"}
"""Files beside the folders, which may import any of them."""
IN_USERS_PROGRAM = [
    f"capture/recorder/{name}.py" for name in ("hook/sitecustomize", "arguments", "launches", "recorder")
]
"""Files that ``mtmc record`` loads into the user's program: they need the standard library alone."""
HEAVY = {"torch", "triton", "numpy", "transformers", "peft"}
PROTOCOL = {"pygls", "lsprotocol"}
DASK = {"dask", "distributed"}
THERE = {"torch", "triton", "numpy"} | set(sys.stdlib_module_names) | {"__future__", "mtmc_lsp", "sympy"}
"""What workers may import; torch itself needs sympy."""
LEARNING = {"transformers", "peft"}
"""What the workers of learned policies import as well. They run in our interpreter, not in the user's."""
SCRIPTS = {"launch.py", "process/worker/main.py", "app/worker/probe.py"}
"""Run by their path, never imported."""
MODULES = sorted(str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py"))
FILES = frozenset(MODULES)
IN_WORKER = {name for name in MODULES if "worker" in name.split("/")[:-1]}
"""Files that run in the user's interpreter: those below a folder called ``worker``. Only these import torch."""
MOST_FILES = 17
"""Modules of one folder, its ``__init__.py`` left out."""


# Each rule is one test over all files: a test for each file and rule would be 40 % of the suite's tests.
@functools.cache
def imports(name: str) -> tuple[str, ...]:
    return tuple(_imports(name))


@functools.cache
def tops(name: str) -> frozenset[str]:
    """The packages that a file imports."""
    return frozenset(module.split(".")[0] for module in imports(name))


def _imports(name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / name).read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{name}: imports are absolute, so that they can be read and checked"
            yield node.module or ""


def ours(name: str) -> set[str]:
    """Files of ours that a file imports, and those that they import."""
    found: set[str] = set()
    pending = [name]
    while pending:
        files = direct(pending.pop())
        pending += files - found
        found |= files
    return found


@functools.cache
def direct(name: str) -> frozenset[str]:
    """Files of ours that a file imports."""
    paths = ["/".join(module.split(".")[1:]) for module in imports(name) if module.split(".")[0] == "mtmc_lsp"]
    return frozenset(file for path in paths for file in (f"{path}.py", f"{path}/__init__.py") if file in FILES)


def importers(refused: set[str], *, outside: str) -> list[str]:
    """What files outside of a folder import of the refused packages."""
    return [
        f"{name} imports {tops(name) & refused}"
        for name in MODULES
        if not name.startswith(outside) and tops(name) & refused
    ]


def test_a_folder_imports_only_folders_to_its_left() -> None:
    wrong = []
    for name in MODULES:
        folder = name.split("/")[0]
        if name in FACES:
            continue
        assert folder in ORDER, f"the new folder {folder} needs its place in the order"
        for module in imports(name):
            if module.startswith("mtmc_lsp."):
                other = module.split(".")[1]
                if other not in ORDER or ORDER.index(other) > ORDER.index(folder):
                    wrong.append(f"{name} imports {module}")
    assert wrong == []


def test_no_folder_holds_more_files_than_a_reader_takes_in() -> None:
    folders = collections.Counter(name.rpartition("/")[0] for name in MODULES if not name.endswith("__init__.py"))
    assert {folder: count for folder, count in folders.items() if count > MOST_FILES} == {}


def test_core_imports_only_core() -> None:
    of_core = [(name, module) for name in MODULES if name.startswith("core/") for module in imports(name)]
    others = [pair for pair in of_core if pair[1].startswith("mtmc_lsp") and not pair[1].startswith("mtmc_lsp.core")]
    assert of_core
    assert others == []


def test_only_worker_files_import_torch() -> None:
    wrong = []
    for name in sorted(FILES - IN_WORKER):
        reached = ours(name) & IN_WORKER
        wrong += [f"{name} imports {tops(name) & HEAVY}"] * bool(tops(name) & HEAVY)
        wrong += [f"{name} brings in {reached}"] * bool(reached)
    assert wrong == []


def test_only_the_cluster_knows_of_dask() -> None:
    assert importers(DASK, outside="cluster/") == []


def test_only_the_server_knows_of_the_protocol() -> None:
    assert importers(PROTOCOL, outside="server/") == []


def test_what_the_server_process_imports_brings_in_no_torch() -> None:
    """Nothing that it reaches runs in a worker; how it is in fact is looked at in tests/server."""
    assert not ours("server/app.py") & IN_WORKER


def test_a_worker_file_needs_only_what_the_user_has() -> None:
    wrong = []
    for name in sorted(IN_WORKER):
        for file in {name} | ours(name):
            allowed = THERE | LEARNING if file.startswith(("policies/lm/worker/", "training/lm/worker/")) else THERE
            if not tops(file) <= allowed:
                wrong.append(f"{name} needs {tops(file) - allowed} through {file}")
    assert wrong == []


def test_what_runs_in_the_users_program_needs_the_standard_library_alone() -> None:
    allowed = set(sys.stdlib_module_names) | {"__future__"}
    assert {name: tops(name) - allowed for name in IN_USERS_PROGRAM if not tops(name) <= allowed} == {}


def test_worker_files_import_where_nothing_of_ours_is_installed() -> None:
    """The same in fact: they import with every other package refused."""
    names = [name.removesuffix(".py").replace("/", ".") for name in sorted(IN_WORKER - SCRIPTS)]
    code = "import sys\nimport torch, triton\n"
    code += "for name in ('tree_sitter', 'typer', 'rich', 'pygls', 'lsprotocol'):\n    sys.modules[name] = None\n"
    code += "".join(f"import mtmc_lsp.{name}\n" for name in names)
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_command_line_starts_without_torch_triton_or_dask() -> None:
    heavy = {"torch", "triton", "numpy", *DASK}
    code = f"import sys, mtmc_lsp.cli, mtmc_lsp.report.text; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
