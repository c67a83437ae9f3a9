"""Launch parameters derived from a file's source."""

from __future__ import annotations

import pytest

from mtmc_lsp.source.outline import Outliner
from mtmc_lsp.source.syntax import parse
from mtmc_lsp.source.triton.launch_sites import LaunchForm, launch_forms

HEAD = "import torch\nimport triton\nimport triton.language as tl\n\nSIZE = 32\nSTAGES = [2, 3]\n\n\n"
KERNEL = """@triton.jit
def k(x_ptr, i_ptr, y_ptr, n, stride_x, stride_n, BLOCK: tl.constexpr, ACT: tl.constexpr = "relu"):
    at = tl.arange(0, BLOCK)
    index = tl.load(i_ptr + at)
    base = x_ptr + index * stride_x
    x = tl.load(base + at * stride_n, mask=at < n)
    tl.store(y_ptr + at, x)


"""
LAUNCH = "def f(x, i, y):\n    k[(1,)](x, i, y, x.shape[0], x.stride(0), x.stride(1), BLOCK={block})\n"


def forms(text: str) -> list[LaunchForm]:
    outline = Outliner("/m.py").outline(text.encode(), parse(text.encode()))
    return launch_forms(outline, "/m.py")


def sizes(text: str) -> list[tuple[object, int]]:
    return sorted((form.launch.constexprs["BLOCK"], form.launch.num_stages) for form in forms(text))


@pytest.mark.parametrize("block", ["32", "SIZE", "32, num_warps=4"])
def test_a_launch_with_constants_is_known_completely(block: str) -> None:
    text = HEAD + KERNEL + LAUNCH.format(block=block)
    (form,) = forms(text)
    assert form.launch.signature == {"x_ptr": "*fp16", "i_ptr": "*i64", "y_ptr": "*fp16", "n": "i32", "stride_x": "i32"}
    assert form.launch.constexprs == {"stride_n": 1, "BLOCK": 32, "ACT": "relu"}
    assert text[form.start : form.end] == "k[(1,)]"


def test_types_come_from_the_directive_and_float8_from_the_text() -> None:
    text = HEAD + KERNEL + "# mtmc: x=f32[8,8] i=i32[8] y=bf16[8]\n" + LAUNCH.format(block="32")
    (form,) = forms(text)
    assert [form.launch.signature[n] for n in ("x_ptr", "i_ptr", "y_ptr")] == ["*fp32", "*i32", "*bf16"]
    (form,) = forms(HEAD + KERNEL + LAUNCH.format(block="32") + "KIND = torch.float8_e5m2\n")
    assert form.launch.signature["x_ptr"] == "*fp8e5"


def test_launches_with_sizes_known_only_at_run_time_are_skipped() -> None:
    assert forms(HEAD + KERNEL + LAUNCH.format(block="triton.next_power_of_2(x.shape[0])")) == []
    assert forms(HEAD + KERNEL) == [], "a helper, or launched from elsewhere"


CONFIGS = [
    "[triton.Config({'BLOCK': 64}), triton.Config({'BLOCK': SIZE}, num_stages=2)]",
    "[triton.Config({'BLOCK': b}, num_stages=s) for b, s in ((1, 2),)]",
    "[triton.Config({'BLOCK': b}, num_stages=s) for b in [32, 64] for s in STAGES]",
    "configs()",
    "CONFIGS",
]
EXPECTED = [[(32, 2), (64, 3)], [], [(32, 2), (32, 3), (64, 2), (64, 3)], [(128, 4)], [(256, 3)]]


@pytest.mark.parametrize(("configs", "expected"), list(zip(CONFIGS, EXPECTED, strict=True)))
def test_configurations_are_found_inline_in_loops_and_by_name(configs: str, expected: list[object]) -> None:
    behind = "def configs():\n    return [triton.Config({'BLOCK': 128}, num_stages=4)]\n\n\n"
    behind += "CONFIGS = [triton.Config({'BLOCK': 256})]\n\n\n"
    text = f"{HEAD}{behind}@triton.autotune(configs={configs}, key=['n'])\n{KERNEL}"
    assert sizes(text) == expected
