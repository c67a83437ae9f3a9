"""Run by its path under the user's interpreter for ``mtmc doctor``: checks Triton's interpreter and cross-compilation.

Prints one JSON object with the fields of a class of ``app/messages.py``. Imports nothing of this package: with ``--sandbox``
it loads ``process/sandbox.py`` by its path, enters the sandbox and tries CUDA there.
"""

import json
import os
import sys

interpreted = sys.argv[1:] == ["--interpret"]
if interpreted:
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402


@triton.jit  # type: ignore
def double(x_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore  # a kernel takes no Python values
    """out = 2 * x."""
    offsets = tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out_ptr + offsets, 2.0 * tl.load(x_ptr + offsets, mask=mask, other=0.0), mask=mask)


def interpret() -> dict[str, object]:
    """Run the kernel on the CPU."""
    x = torch.arange(5, dtype=torch.float32)
    out = torch.empty_like(x)
    double[(1,)](x, out, 5, BLOCK=8)
    return {"interpreter": "works" if torch.equal(out, 2 * x) else "computes wrongly"}


def cross_compile() -> dict[str, object]:
    """Compile the kernel for two architectures, which this machine may lack, and detect a GPU."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    compilers: dict[str, str] = {}
    for name, target in {"sm_90": GPUTarget("cuda", 90, 32), "gfx942": GPUTarget("hip", "gfx942", 64)}.items():
        signature = {"x_ptr": "*fp32", "out_ptr": "*fp32", "n": "i32", "BLOCK": "constexpr"}
        source = ASTSource(double, signature, constexprs={"BLOCK": 8})
        try:
            triton.compile(source, target=target)
            compilers[name] = "works"
        except Exception as error:  # the user must see any error
            compilers[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return {"compilers": compilers, "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else ""}


def sandboxed() -> dict[str, object]:
    """Run the kernel on the GPU, in the sandbox that candidates run in."""
    import importlib.util
    import tempfile

    folder = tempfile.mkdtemp(prefix="mtmc-")
    os.environ.update(TMPDIR=folder, TRITON_CACHE_DIR=folder, CUDA_CACHE_PATH=folder)
    tempfile.tempdir = None
    spec = importlib.util.spec_from_file_location("sandbox", sys.argv[2])
    assert spec is not None and spec.loader is not None
    sandbox = importlib.util.module_from_spec(spec)
    sys.modules["sandbox"] = sandbox
    spec.loader.exec_module(sandbox)
    level = sandbox.enter([folder], gpu=True).text
    try:
        x = torch.arange(5, dtype=torch.float32, device="cuda")
        out = torch.empty_like(x)
        double[(1,)](x, out, 5, BLOCK=8)
        return {"level": level, "cuda": "works" if torch.equal(out, 2 * x) else "computes wrongly"}
    except Exception as error:  # the user must see any error
        return {"level": level, "cuda": f"{type(error).__name__}: {error}".splitlines()[0]}


if sys.argv[1:2] == ["--sandbox"]:
    print(json.dumps(sandboxed()))
else:
    print(json.dumps(interpret() if interpreted else cross_compile()))
