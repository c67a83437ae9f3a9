"""Run a module of this package like ``python -m``, without importing anything from the working folder.

Usage: ``python -I mtmc_lsp/launch.py MODULE ...``. With ``-I`` Python ignores the working folder and PYTHONPATH. The package is
loaded from the folder of this file, and its dependencies from where they are installed.
"""

import importlib.util
import os
import runpy
import site
import sys

DEPENDENCIES = ("tree_sitter", "tree_sitter_python", "pygls", "lsprotocol", "typer", "rich", "pynvml")
"""Packages that our processes import."""


def _register_package() -> None:
    """Make the package importable, without the other packages and files in its parent folder."""
    folder = os.path.dirname(os.path.abspath(__file__))
    spec = importlib.util.spec_from_file_location(
        "mtmc_lsp", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mtmc_lsp"] = module
    spec.loader.exec_module(module)


def _lacks_dependencies() -> bool:
    return any(importlib.util.find_spec(name) is None for name in DEPENDENCIES)


def _find_dependencies() -> None:
    """Search where ``-I`` does not: the user's site-packages, and then the absolute entries of PYTHONPATH.

    They are added at the end, so they never replace a module that is found without them.
    """
    if _lacks_dependencies() and sys.prefix == sys.base_prefix:
        site.addsitedir(site.getusersitepackages())
    if _lacks_dependencies():
        entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        sys.path += [entry for entry in entries if os.path.isabs(entry) and not _is_working_folder(entry)]


def _is_working_folder(entry: str) -> bool:
    try:
        return os.path.samefile(entry, os.curdir)
    except OSError:
        return False


def main() -> None:
    """Run the module named by the first argument."""
    if not sys.flags.isolated:
        sys.exit("error: start it as `python -I launch.py MODULE`")
    del sys.argv[0]
    _register_package()
    _find_dependencies()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
