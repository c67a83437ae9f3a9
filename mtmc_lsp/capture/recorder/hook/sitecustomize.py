"""Starts the recorder in every Python process of a command that ``mtmc record`` runs.

The folder of this file is first in ``PYTHONPATH``, so Python imports this module at start, also in child processes. It
hides the user's ``sitecustomize``, which runs right after it.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run(name: str, path: str) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)


def _start() -> None:
    # The user's program must see its usual ``sys.path``. Its child processes find this folder through ``PYTHONPATH``.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    if "MTMC_RECORD" in os.environ:
        for name in ("arguments", "launches", "recorder"):
            _run(f"_mtmc_{name}", os.path.join(os.path.dirname(_HERE), f"{name}.py"))
    users_module = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if users_module is not None and users_module.origin:
        _run("sitecustomize", users_module.origin)


_start()
