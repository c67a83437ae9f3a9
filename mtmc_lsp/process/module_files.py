"""Python files as modules, under any name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def module_of(path: Path, name: str) -> ModuleType:
    """The module of a file, not yet run. It is in ``sys.modules``, where classes and pickles look it up."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    return module


def load_file(path: Path, name: str = "") -> ModuleType:
    """Run a file as a module; by default its name is the stem of the file. An earlier module of that name is replaced."""
    module = module_of(path, name or path.stem)
    assert module.__spec__ is not None and module.__spec__.loader is not None
    module.__spec__.loader.exec_module(module)
    return module
