"""Verify public Triton kernels with the engine of `mtmc verify`, from your checkout; no third-party code is stored here.

    python scripts/verify_public.py LIGER [--only NAME ...] [--json FILE]

LIGER is a checkout of github.com/linkedin/Liger-Kernel, which is imported from there. Each row of the table below is a function
in plain torch with its workload, and the public call that should agree with it. Without a GPU, kernels run with Triton's
interpreter. The exit code is 1 if a kernel is not certified.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from mtmc_lsp.app.pipeline import Pipeline, RunOptions
from mtmc_lsp.app.verify_pair import open_pair
from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.measure.foreign_candidate import ForeignVerdict, verify_foreign
from mtmc_lsp.process.fork_server import ForkServer, likely_variables
from mtmc_lsp.verify.adapters import ForeignCandidate
from mtmc_lsp.verify.reference import Reference


@dataclass(frozen=True)
class Kernel:
    """A public kernel and its reference."""

    name: str
    workload: str
    """Arguments and sizes, in directive syntax."""
    reference: str
    """Body of the reference function in plain torch."""
    module: str
    """Module name below ``liger_kernel.ops``."""
    call: str
    """The public call; the name before the first dot is imported from the module."""
    takes_empty: bool = True
    """False if the public kernel raises on inputs without elements, or returns another value than torch's NaN."""


KERNELS = (
    Kernel(
        "softmax", "x=f32[N,D] N=24 D=96", "return torch.softmax(x, -1)", "softmax", "LigerSoftmaxFunction.apply(x)"
    ),
    Kernel(
        "swiglu",
        "a=f32[N,D] b=f32[N,D] N=24 D=96",
        "return F.silu(a) * b",
        "swiglu",
        "LigerSiLUMulFunction.apply(a, b)",
    ),
    Kernel(
        "softmax with gradients",
        "x=f32[N,D] N=12 D=48 grad=x",
        "return torch.softmax(x, -1)",
        "softmax",
        "LigerSoftmaxFunction.apply(x)",
    ),
    Kernel(
        "geglu",
        "a=f32[N,D] b=f32[N,D] N=24 D=96",
        "return F.gelu(a, approximate='tanh') * b",
        "geglu",
        "LigerGELUMulFunction.apply(a, b)",
    ),
    Kernel(
        "rms norm",
        "x=f32[N,D] w=f32[D] N=24 D=96",
        "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w",
        "rms_norm",
        "LigerRMSNormFunction.apply(x, w, 1e-6, 0.0, 'llama', False)",
    ),
    Kernel(
        "fused add and rms norm",
        "x=f32[N,D] r=f32[N,D] w=f32[D] N=24 D=96",
        "s = x + r\n    return s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + 1e-6) * w, s",
        "fused_add_rms_norm",
        "LigerFusedAddRMSNormFunction.apply(x, r, w, 1e-6, 0.0, 'llama', False)",
    ),
    Kernel(
        "layer norm",
        "x=f32[N,D] w=f32[D] b=f32[D] N=24 D=96",
        "return F.layer_norm(x, x.shape[-1:], w, b, 1e-5)",
        "layer_norm",
        "LigerLayerNormFunction.apply(x, w, b, 1e-5)",
    ),
    Kernel(
        "group norm",
        "x=f32[N,8,L] w=f32[8] b=f32[8] N=6 L=40",
        "return F.group_norm(x, 4, w, b, 1e-5)",
        "group_norm",
        "LigerGroupNormFunction.apply(x, w, b, 8, 4, 1e-5)",
        takes_empty=False,
    ),
    Kernel(
        "poly norm",
        "x=f32[N,D] w=f32[3] b=f32[1] N=24 D=96",
        "n = lambda u: u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + 1e-6)\n"
        "    return w[0] * n(x**3) + w[1] * n(x**2) + w[2] * n(x) + b",
        "poly_norm",
        "LigerPolyNormFunction.apply(x, w, b, 1e-6, False)",
    ),
    Kernel(
        "dynamic tanh",
        "x=f32[N,D] alpha=f32[1] gamma=f32[D] beta=f32[D] N=24 D=96",
        "return gamma * torch.tanh(alpha * x) + beta",
        "dyt",
        "LigerDyTFunction.apply(x, alpha, gamma, beta)",
    ),
    Kernel(
        "squared relu",
        "x=f32[N,D] N=24 D=96",
        "return torch.where(x > 0, x, 0.0).square()",
        "relu_squared",
        "LigerReLUSquaredFunction.apply(x)",
    ),
    Kernel(
        "sparsemax",
        "x=f32[N,D] N=12 D=40",
        "z = x.sort(-1, descending=True).values\n"
        "    k = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)\n"
        "    total = z.cumsum(-1) - 1\n"
        "    count = (z * k > total).sum(-1, keepdim=True)\n"
        "    return F.relu(x - total.gather(-1, count - 1) / count)",
        "sparsemax",
        "LigerSparsemaxFunction.apply(x, -1)",
    ),
    Kernel(
        "rotary embedding",
        "q=f32[B,9,4,32] k=f32[B,9,2,32] cos=f32[1,9,32] sin=f32[1,9,32] B=2",
        "c, s = (torch.cat((t[..., :16], t[..., :16]), -1).unsqueeze(1) for t in (cos, sin))\n"
        "    turn = lambda t: t * c + torch.cat((-t[..., 16:], t[..., :16]), -1) * s\n"
        "    return turn(q.transpose(1, 2)), turn(k.transpose(1, 2))",
        "rope",
        "LigerRopeFunction.apply(q.clone().transpose(1, 2), k.clone().transpose(1, 2), cos, sin)",
    ),
    Kernel(
        "divergence of Kullback and Leibler",
        "p=f32[N,D] q=f32[N,D] N=24 D=96",
        "return F.kl_div(torch.log_softmax(p, -1), torch.softmax(q, -1), reduction='batchmean')",
        "kl_div",
        "LigerKLDivLossFunction.apply(torch.log_softmax(p, -1), torch.softmax(q, -1), 'batchmean', False, 1e-10)",
    ),
    Kernel(
        "total variation",
        "p=f32[N,D] q=f32[N,D] N=24 D=96",
        "return (torch.softmax(p, -1) - torch.softmax(q, -1)).abs().sum() / 2 / p.shape[0]",
        "tvd",
        "LigerTVDLossFunction.apply(torch.softmax(p, -1), torch.softmax(q, -1), None, 'batchmean', -100)",
        takes_empty=False,
    ),
    Kernel(
        "cross entropy",
        "x=f32[N,V] t=i64[N]@0..V-1 N=24 V=96",
        "return F.cross_entropy(x, t)",
        "cross_entropy",
        "LigerCrossEntropyFunction.apply(x.clone(), t, None)[0]",
        takes_empty=False,
    ),
)


def main() -> int:
    """Verify the kernels in the table; print each outcome and the number of certified kernels."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("liger", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--json", type=Path, help="output file, one line of JSON per kernel")
    options = parser.parse_args()
    code = options.liger.absolute() / "src"
    kernels = [kernel for kernel in KERNELS if not options.only or kernel.name in options.only]
    certified = 0
    with (
        ForkServer(sys.executable, likely_variables(), preload=True) as fork_server,
        tempfile.TemporaryDirectory() as folder,
    ):
        (Path(folder) / "pyproject.toml").write_text("[project]\nname = 'public'\n", encoding="utf-8")
        for kernel in kernels:
            started = time.monotonic()
            status, reason = outcome(kernel, code, Path(folder), fork_server)
            seconds = time.monotonic() - started
            certified += status == "correct"
            print(f"{kernel.name:36} {status:14} {seconds:5.1f} s  {reason}", flush=True)
            if options.json:
                row = {"kernel": kernel.name, "status": status, "reason": reason, "seconds": seconds}
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    print(f"{certified} of {len(kernels)} public kernels certified")
    return 0 if certified == len(kernels) else 1


def outcome(kernel: Kernel, code: Path, folder: Path, fork_server: ForkServer) -> tuple[str, str]:
    """Status and reason of the verdict, or the error that prevented it."""
    try:
        verdict = verify_kernel(kernel, code, folder, fork_server).verdict
    except MtmcError as error:
        return type(error).__name__, error.message
    return verdict.status.value, verdict.reason


def verify_kernel(kernel: Kernel, code: Path, folder: Path, fork_server: ForkServer) -> ForeignVerdict:
    """Write both files and verify one against the other."""
    names = ", ".join(part.partition("=")[0] for part in kernel.workload.split() if "[" in part)
    stem = kernel.name.replace(" ", "_")
    reference, candidate = folder / f"{stem}.py", folder / f"{stem}_public.py"
    header = "import torch\nimport torch.nn.functional as F\n\n\n"
    text = f"{header}# mtmc: {kernel.workload}\ndef own({names}):\n    {kernel.reference}\n"
    reference.write_text(text, encoding="utf-8")
    function = kernel.call.partition(".")[0]
    candidate.write_text(
        f"import sys\n\nimport torch\n\nsys.path.insert(0, {str(code)!r})\n\n"
        f"from liger_kernel.ops.{kernel.module} import {function}\n\n\n"
        f"def public({names}):\n    return {kernel.call}\n",
        encoding="utf-8",
    )
    first, second = open_pair(f"{reference}::own", f"{candidate}::public", None, sys.executable)
    with Pipeline(first, RunOptions(fork_server=fork_server)) as pipeline:
        capture = pipeline.capture()
        candidate_source = ForeignCandidate(
            capture, second.definition, second.text.decode(), takes_empty=kernel.takes_empty
        )
        with Reference(capture, first.plain.decode(), sys.executable, fork_server=fork_server) as reference_side:
            return verify_foreign(candidate_source, reference_side)[0]


if __name__ == "__main__":
    sys.exit(main())
