"""Run a module of this package like ``python -m``, without importing anything from the working folder.

Usage: ``python -I mtmc_lsp/launch.py MODULE ...``. With ``-I`` Python ignores the working folder and PYTHONPATH. The package is
loaded from the folder of this file, and its dependencies from where they are installed. The VS Code extension brings them in
``mtmc-libraries`` beside the package: in ``any``, and in one folder for each platform. Only our processes search these folders.
Workers run user code and start without this file, so they see the user's packages alone.
"""

import importlib.util
import os
import runpy
import site
import sys

DEPENDENCIES = ("tree_sitter", "tree_sitter_python", "pygls", "lsprotocol", "typer", "rich", "pynvml")
"""Packages that our processes import."""
BUNDLED = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "mtmc-libraries")
"""The folder with the libraries that the VS Code extension brings."""


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


def _use_bundled_libraries() -> None:
    """Search the libraries of the extension first: the package was tested with them, not with the user's versions."""
    sys.path[:0] = [os.path.join(BUNDLED, "any"), os.path.join(BUNDLED, f"{sys.platform}-{os.uname().machine}")]
    # The openai package is optional and not bundled; it may be among the user's packages.
    if sys.prefix == sys.base_prefix:
        site.addsitedir(site.getusersitepackages())


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
    if os.path.isdir(BUNDLED):
        _use_bundled_libraries()
    else:
        _find_dependencies()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
