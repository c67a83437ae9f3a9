"""A candidate that leaves its process changed is refused: settings of torch and Python, and patches of shared modules."""

from __future__ import annotations

import decimal  # noqa: F401
import sys
from collections.abc import Callable
from types import ModuleType

import pytest
from pairs import HONEST, MODEL, MODEL_NEW, REFERENCE, changed

from mtmc_lsp.core.results import Verdict, VerdictStatus
from mtmc_lsp.verify.worker.observation.process_changes import ProcessChanges

END = "    return out\n"
LOAD = "import importlib\n\nsystem = importlib.import_module('sys')\n"
IN_A_CALL = {
    "the treatment of denormal numbers": ("torch.set_flush_denormal(True)", ""),
    "anomaly detection": ("torch.autograd.set_detect_anomaly(True)", ""),
    "deterministic algorithms": ("torch._C._set_deterministic_algorithms(False)", ""),
    "how tensors are printed": ("torch.set_printoptions(precision=2)", ""),
    "Python's recursion limit": ("system.setrecursionlimit(5000)", LOAD),
    "how often Python changes threads": ("system.setswitchinterval(0.1)", LOAD),
    "where modules are imported from": ("system.path.append('/nowhere')", LOAD),
    "how modules are imported": ("system.meta_path.append(None)", LOAD),
    "garbage collection": ("importlib.import_module('g' + 'c').disable()", "import importlib"),
    "warnings that are errors": ("warnings.simplefilter('error')", "import warnings"),
    "signal handlers": ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "import signal"),
    "numpy's random state": ("numpy.random.seed(0)", "import numpy"),
    "numpy's treatment of errors": ("numpy.seterr(all='ignore')", "import numpy"),
    "standard output and errors": ("vars(system).update(stdout=io.StringIO())", f"{LOAD}\nimport io"),
    "torch's hooks of all modules": ("torch.nn.modules.module.register_module_forward_hook(lambda *_: None)", ""),
    "torch's modes of functions and operations": ("Mode().__enter__()", "from torch.overrides import BaseTorchFunctionMode as Mode"),
    "torch's setting math_sdp_enabled": ("torch.backends.cuda.enable_math_sdp(False)", ""),
    "torch.nn.functional.relu": ("vars(torch.nn.functional).update(relu=torch.sigmoid)", ""),
    "math.sqrt": ("vars(math).update(sqrt=abs)", "import math"),
    "torch.Tensor.square": ("type.__setattr__(torch.Tensor, 'square', torch.Tensor.abs)", ""),
    "triton.cdiv": ("vars(triton).update(cdiv=lambda a, b: a)", ""),
}  # fmt: skip
"""For each name in messages: a call that changes it, and lines above."""


@pytest.mark.parametrize("name", IN_A_CALL)
def test_a_candidate_that_changes_its_process_in_a_call_is_refused(name: str, judge: Callable[..., Verdict]) -> None:
    call, above = IN_A_CALL[name]
    text = changed(HONEST, (END, f"    {call}\n{END}"), ("@triton.jit", f"{above}\n\n\n@triton.jit"))
    verdict = judge(REFERENCE, "rms", text, "fast")
    assert verdict.status is VerdictStatus.INCORRECT, verdict
    assert "global state: it changes" in verdict.reason and name in verdict.reason


AT_IMPORT = {
    "the working folder": "import os\n\nos.chdir('/')",
    "environment variables": "import os\n\nos.environ['PYTORCH_NO_CUDA_MEMORY_CACHING'] = '1'",
    "the treatment of denormal numbers": "torch.set_flush_denormal(True)",
    "torch.relu": "vars(torch).update(relu=torch.sigmoid)",
    "torch's own operations": (
        "library = torch.library.Library('aten', 'IMPL')\nlibrary.impl('relu', lambda x: x * 2, 'CPU')"),
    "sys.modules['decimal']": "import decimal\nimport sys\n\nvars(sys)['modules']['decimal'] = torch",
}  # fmt: skip


@pytest.mark.parametrize("name", AT_IMPORT)
def test_a_candidate_that_changes_its_process_at_import_is_refused(name: str, judge: Callable[..., Verdict]) -> None:
    text = changed(HONEST, ("@triton.jit", f"{AT_IMPORT[name]}\n\n\n@triton.jit"))
    verdict = judge(REFERENCE, "rms", text, "fast")
    assert verdict.status is VerdictStatus.INCORRECT, verdict
    assert "global state: it changes" in verdict.reason and name in verdict.reason


def test_a_module_that_changes_its_process_in_its_constructor_is_refused(judge: Callable[..., Verdict]) -> None:
    change = "        super().__init__()\n        torch.set_default_dtype(torch.float64)\n"
    text = changed(MODEL_NEW, ("        super().__init__()\n", change))
    verdict = judge(MODEL, "Model", text, "ModelNew")
    assert verdict.status is VerdictStatus.INCORRECT, verdict
    assert "global state: it changes the default dtype" in verdict.reason


HONEST_ONES = {
    "settings within a block": (
        "    with warnings.catch_warnings():\n        warnings.simplefilter('error')\n        pass\n", "import warnings"),
    "a higher recursion limit": ("", f"{LOAD}\nsystem.setrecursionlimit(5000)"),
    "variables of its own": ("", "import os\n\nos.environ['MY_KERNEL'] = '1'"),
    "a seed at import": ("", "import random\n\nrandom.seed(0)\ntorch.manual_seed(0)"),
    "new modules": ("    import colorsys, zipfile\n", "import sqlite3"),
}  # fmt: skip


@pytest.mark.parametrize("what", HONEST_ONES)
def test_a_candidate_with_harmless_changes_is_accepted(what: str, judge: Callable[..., Verdict]) -> None:
    lines, above = HONEST_ONES[what]
    text = changed(HONEST, (END, f"{lines}{END}"), ("@triton.jit", f"{above}\n\n\n@triton.jit"))
    verdict = judge(REFERENCE, "rms", text, "fast")
    assert verdict.status is VerdictStatus.CORRECT, verdict.reason


def test_launchers_of_triton_are_no_changes_by_the_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton compiles a launcher for each signature of a kernel, as a module of the same name."""
    monkeypatch.setitem(sys.modules, "__triton_launcher", ModuleType("__triton_launcher"))
    changes = ProcessChanges()
    monkeypatch.setitem(sys.modules, "__triton_launcher", ModuleType("__triton_launcher"))
    assert changes.replaced() == []
    monkeypatch.setitem(sys.modules, "decimal", ModuleType("decimal"))
    assert changes.replaced() == ["sys.modules['decimal']"]
