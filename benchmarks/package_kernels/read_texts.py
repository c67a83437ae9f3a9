"""``python -m benchmarks.package_kernels.read_texts SITE --out FILE``: every kernel of the packages is read from its text.

SITE is the folder that :mod:`benchmarks.package_kernels.run` takes. The packages are not imported. A function with
``@triton.jit`` is read if its operations are listed. The findings of the static checks are counted, too.
"""

from __future__ import annotations

import argparse
import ast
import json
from collections import Counter
from pathlib import Path

from benchmarks.package_kernels.run import MANIFEST, MARK
from mtmc_lsp.app.provenance import current_build
from mtmc_lsp.kernels.reading import read_kernels
from mtmc_lsp.source.lint import check, context_of
from mtmc_lsp.source.outline import Outliner
from mtmc_lsp.source.syntax import parse
from mtmc_lsp.source.triton.launch_sites import launch_forms

JIT = ("triton.jit", "jit")


def jit_functions(text: bytes) -> list[str]:
    """The names of the functions that Triton compiles."""
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    return [function.name for function in functions if any(_is_jit(item) for item in function.decorator_list)]


def _is_jit(decorator: ast.expr) -> bool:
    return ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator) in JIT


def read_package(folder: Path) -> tuple[Counter[str], list[str]]:
    """The counts of a package, and its functions that are not read, as ``file::name``."""
    counts, missing = Counter[str](), list[str]()
    for file in sorted(folder.rglob("*.py")):
        text = file.read_bytes()
        names = jit_functions(text) if MARK in text else []
        if not names:
            continue
        counts["files"] += 1
        counts["functions"] += len(names)
        read = {reading.name.rsplit(".", 1)[-1] for reading in read_kernels(str(file), text)}
        missed = [name for name in names if name not in read]
        counts["read"] += len(names) - len(missed)
        missing += [f"{file.relative_to(folder.parent)}::{name}" for name in missed]
        outline = Outliner(str(file)).outline(text, parse(text))
        context = context_of(outline)
        findings = [finding.code for chunk in outline.chunks for finding in check(chunk.text, context)]
        counts.update(f"finding {code}" for code in findings)
        launch_forms(outline, str(file), assumes=True)
    return counts, missing


def main() -> None:
    """Read the packages of the manifest, and write one line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    build = current_build()
    with options.out.open("w", encoding="utf-8") as stream:
        for package in json.loads(MANIFEST.read_text(encoding="utf-8"))["packages"]:
            counts, missing = read_package((options.site / package["folder"]).resolve())
            line = {"package": package["name"], **counts, "missing": missing, "commit": build.commit}
            stream.write(json.dumps(line) + "\n")
            print(f"{package['name']}: {counts['read']} of {counts['functions']} functions read")


if __name__ == "__main__":
    main()
