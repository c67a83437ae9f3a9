"""Import the user's file as it imports for the user: package-relative imports, sibling modules, project root."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from mtmc_lsp.capture.loading_paths import module_name, package_of, project_root


def load_user_module(path: str, source: str | None = None, as_name: str | None = None) -> ModuleType:
    """Run the file (or another text in its place) as a module, never as ``__main__``.

    Args:
        path: the user's file; relative imports and ``__file__`` are as for it.
        source: text to run instead; it is put into a real file, because Triton reads a kernel's source back.
        as_name: name in ``sys.modules``; the file's own name by default.
    """
    file = Path(path).resolve()
    package, folder = package_of(file)
    for entry in (str(project_root(file)), str(folder)):
        if entry not in sys.path:
            sys.path.insert(0, entry)
    if package:
        importlib.import_module(package)
    name = as_name or module_name(file)
    location = file
    if source is not None:
        location = Path(tempfile.mkdtemp(prefix="mtmc-")) / file.name
        location.write_bytes(source.encode("utf-8"))
    spec = importlib.util.spec_from_file_location(name, location)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(file)
    module.__package__ = package
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
