"""Kernels with a line that is wrong for some values or dtypes."""

from dataclasses import dataclass

from benchmarks.adversarial.bases import BASES
from benchmarks.adversarial.candidate import Candidate


@dataclass(frozen=True)
class Line:
    """A kernel with a wrong line, for a base."""

    kind: str
    name: str
    base: str
    body: str
    args: str
    dtype: str = "f32"
    acc: str = "float32"

    def candidate(self) -> Candidate:
        """Return the candidate."""
        base = BASES[self.base]
        text = base.kernels(self.body, self.acc) + f"\n\ndef {self.base}(x):\n    return launch(x)\n"
        return Candidate(
            f"{self.kind}/{self.name}/{self.base}", self.kind, self.base, base.reference(self.dtype), text, self.args
        )


WIDE = "torch.randn(3, 40) + 3e3,"
ROUND = ".to(tl.bfloat16).to(tl.float32)"
LINES = [
    Line(
        "values",
        "no_maximum",
        "softmax",
        "e = tl.where(m, tl.exp(v), 0.0); y = e / tl.sum(e, 0)",
        "torch.randn(3, 40) + 120,",
    ),
    Line(
        "values",
        "maximum_from_zero",
        "softmax",
        "h = tl.max(tl.where(m, v, 0.0), 0); e = tl.where(m, tl.exp(v - h), 0.0); y = e / tl.sum(e, 0)",
        "torch.randn(3, 40) - 120,",
    ),
    Line(
        "values",
        "clamped_logits",
        "softmax",
        "w = tl.where(m, tl.minimum(v, 60.0), -1e30); e = tl.exp(w - tl.max(w, 0)); y = e / tl.sum(e, 0)",
        "torch.arange(120.0).view(3, 40),",
    ),
    Line(
        "values",
        "no_maximum",
        "log_softmax",
        "y = v - tl.log(tl.sum(tl.where(m, tl.exp(v), 0.0), 0))",
        "torch.randn(3, 40) + 120,",
    ),
    Line(
        "values",
        "log_of_probability",
        "log_softmax",
        "h = tl.max(tl.where(m, v, -1e30), 0); e = tl.where(m, tl.exp(v - h), 0.0); y = tl.log(e / tl.sum(e, 0) + 1e-30)",
        "torch.arange(120.0).view(3, 40) * 5,",
    ),
    Line(
        "values",
        "finite_mask",
        "softmax",
        "w = tl.where(m, v, -1e4); e = tl.exp(w - tl.max(w, 0)); y = e / tl.sum(e, 0)",
        "torch.randn(3, 40) - 2e4,",
    ),
    Line(
        "values",
        "one_pass_variance",
        "layer_norm",
        "u = tl.sum(v, 0) / n; y = (v - u) * tl.rsqrt(tl.maximum(tl.sum(v * v, 0) / n - u * u, 0.0) + 1e-5)",
        WIDE,
    ),
    Line(
        "values",
        "epsilon_too_large",
        "layer_norm",
        "c = tl.where(m, v - tl.sum(v, 0) / n, 0.0); y = c * tl.rsqrt(tl.sum(c * c, 0) / n + 2e-5)",
        "torch.randn(3, 40) * 1e-3,",
    ),
    Line(
        "values",
        "epsilon_outside",
        "layer_norm",
        "c = tl.where(m, v - tl.sum(v, 0) / n, 0.0); y = c / (tl.sqrt(tl.sum(c * c, 0) / n) + 1e-5)",
        "torch.randn(3, 40) * 1e-3,",
    ),
    Line("values", "no_epsilon", "rms_norm", "y = v * tl.rsqrt(tl.sum(v * v, 0) / n)", "torch.randn(3, 40) * 1e-4,"),
    Line(
        "values",
        "overflowing_sum",
        "unit_rows",
        "y = v / tl.maximum(tl.sqrt(tl.sum(v * v * 1e6, 0) * 1e-6), 1e-12)",
        "torch.randn(3, 40) * 3e16,",
    ),
    Line(
        "values",
        "larger_minimum",
        "unit_rows",
        "y = v / tl.maximum(tl.sqrt(tl.sum(v * v, 0)), 1e-6)",
        "torch.randn(3, 40) * 1e-9,",
    ),
    Line(
        "values", "saturated", "silu", "y = tl.where(v > 30.0, 30.0, v / (1 + tl.exp(-v)))", "torch.randn(3, 40) + 60,"
    ),
    Line(
        "values",
        "zero_below",
        "silu",
        "y = tl.where(v < -8.0, 0.0, v / (1 + tl.exp(-v)))",
        "torch.full((3, 40), -8.5),",
    ),
    Line(
        "values",
        "tanh_approximation",
        "gelu",
        "y = v / (1 + tl.exp(-1.5957691216057308 * (v + 0.044715 * v * v * v)))",
        "torch.full((3, 40), -3.0),",
    ),
    Line("values", "sigmoid_approximation", "gelu", "y = v / (1 + tl.exp(-1.702 * v))", "torch.full((3, 40), -2.0),"),
    Line("values", "flushes_small", "row_sum", "y = tl.where(tl.abs(v) < 1e-20, 0.0, v)", "torch.rand(3, 40) * 1e-22,"),
    Line("values", "clipped", "row_energy", "y = tl.minimum(v * v, 1e4)", "torch.randn(3, 40) * 200,"),
    Line("values", "absolute", "row_sum", "y = tl.where(v < -50.0, -v, v)", "torch.randn(3, 40) - 80,"),
    Line(
        "dtypes",
        "float64_as_float32",
        "row_sum",
        "y = v",
        "torch.full((1, 64), 1.0 + 1e-12, dtype=torch.float64) * torch.tensor([1.0, -1.0 + 1e-9], dtype=torch.float64).repeat(32),",
        "f64",
    ),
    Line("dtypes", "float64_as_float32", "softmax", "", "(torch.arange(80.0).double().view(2, 40) + 1e8) / 2,", "f64"),
    Line("dtypes", "float64_as_float32", "layer_norm", "", "torch.randn(2, 40).double() + 1e9,", "f64"),
    Line(
        "dtypes",
        "rounds_to_bfloat16",
        "layer_norm",
        "c = tl.where(m, v - tl.sum(v, 0)REST / n, 0.0)REST; y = c * tl.rsqrt(tl.sum(c * c, 0) / n + 1e-5)".replace(
            "REST", ROUND
        ),
        "(torch.randn(2, 256) + 60).bfloat16(),",
        "bf16",
    ),
    Line(
        "dtypes",
        "rounds_square",
        "row_energy",
        f"y = (v * v){ROUND}{ROUND}; y = tl.where(y > 300.0, y * 0.9, y)",
        "torch.randn(2, 256).mul(30).bfloat16(),",
        "bf16",
    ),
    Line(
        "dtypes",
        "rounds_exponentials",
        "softmax",
        "w = tl.where(m, v, -1e30)REST; e = (tl.exp(w - tl.max(w, 0))REST); y = e / (tl.sum(e, 0)REST)".replace(
            "REST", ROUND
        ),
        "(torch.randn(2, 300) * 3 + 100.3),",
    ),
    Line("dtypes", "rounds_sum_input", "row_sum", f"y = v{ROUND}", "torch.full((2, 40), 1.00390624),"),
    Line(
        "dtypes",
        "rounds_half",
        "row_energy",
        "y = (v.to(tl.float16) * v.to(tl.float16)).to(tl.float32)",
        "torch.randn(2, 40) * 400,",
    ),
]
