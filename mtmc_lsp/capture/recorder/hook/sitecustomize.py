"""Starts the recorder in every Python process of a command run by ``mtmc record``.

The folder of this file stands first in PYTHONPATH there, so Python runs it at start, in child processes too. The user's
own ``sitecustomize``, which this one hides, runs right after.
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
    # The user's program must see the path that it has without us; its children find us by PYTHONPATH.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
    if "MTMC_RECORD" in os.environ:
        _run("_mtmc_recorder", os.path.join(os.path.dirname(_HERE), "recorder.py"))
    own = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if own is not None and own.origin:
        _run("sitecustomize", own.origin)


_start()
