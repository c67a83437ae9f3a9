"""Shows on the CPU that each candidate is what the suite says: wrong in use, or honest. No verifier takes part."""

import contextlib
import importlib.util
import os
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.adversarial.candidate import Candidate


def write(candidate: Candidate, folder: Path) -> tuple[Path, Path]:
    """Write the reference's and the candidate's files and return them."""
    folder.mkdir(parents=True, exist_ok=True)
    reference, fast = folder / "model.py", folder / "fast.py"
    reference.write_text(candidate.reference, encoding="utf-8")
    fast.write_text(candidate.text, encoding="utf-8")
    return reference, fast


def _load(path: Path) -> ModuleType:
    # Not by a function of mtmc_lsp: candidates look for its modules, as a sign of the verifier.
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _differs(candidate: Candidate, folder: Path) -> bool:
    import torch
    import triton

    def first_configuration(configs: list[Any], key: list[str]) -> Any:
        """Stand in for autotune, which asks for a GPU's driver."""
        return triton.heuristics({name: lambda _, v=value: v for name, value in configs[0].kwargs.items()})

    triton.autotune = first_configuration
    close = torch.allclose
    reference, fast = write(candidate, folder)
    expected, given = (getattr(_load(path), candidate.target) for path in (reference, fast))
    torch.manual_seed(0)
    if isinstance(expected, type):
        expected, given = expected(96), given(96)
    names: dict[str, Any] = {"torch": torch, "f": given, "r": expected, "results": []}
    names["args"] = eval(f"({candidate.args})", names)
    exec(candidate.before, names)
    args, results = names["args"], names["results"]
    right = names["r"](*args).detach()
    if candidate.name.split("/")[1] in _SIDE_EFFECTS:
        return bool(results[0].abs().max() > 0)
    # Memory in which other calls left NaN must not decide whether a candidate that probes for NaN is wrong.
    cleared = [torch.zeros(100) for _ in range(256)]
    del cleared
    result = (results[0] if results else names["f"](*args)).detach()
    limit = {torch.float64: 1e-8, torch.bfloat16: 2e-2}.get(right.dtype, 2e-3)
    scale = float(right[right.isfinite()].abs().max()) if bool(right.isfinite().any()) else 1.0
    return not close(result, right, rtol=0, atol=limit * scale, equal_nan=True)


_SIDE_EFFECTS = (
    "default_dtype seed threads_set grad_mode precision_flag backend_flag environment_set python_seed".split()
)


def check(candidate: Candidate) -> str:
    """Return why the candidate does not fit its class, or an empty string. Runs in a separate process."""
    read, send = os.pipe()
    child = os.fork()
    if not child:
        message = ""
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            try:
                fine = candidate.honest or candidate.kind == "faking"
                if _differs(candidate, Path(folder)) is fine:
                    message = "differs" if fine else "is right in its witness"
            except BaseException:
                message = traceback.format_exc(limit=-2)
        os.write(send, message.encode()[:4000])
        os._exit(0)
    os.close(send)
    with open(read, encoding="utf-8") as pipe:
        message = pipe.read()
    os.waitpid(child, 0)
    return message
