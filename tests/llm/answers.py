"""A target that the built-in coder cannot write, and possible answers of a model."""

from __future__ import annotations

from typing import Any

SOURCE = """\
import torch


# mtmc: x=f32[3,40]
def ranks(x):
    s = torch.sort(x, -1).values
    return torch.cumsum(torch.relu(s), -1) * 2
"""
KERNEL = '''\
@triton.jit
def ranks_kernel(x_ptr, out_ptr, n_cols, BLOCK: tl.constexpr):
    """Each row is sorted, its negatives are cut, and doubled running sums are written. NaN comes last."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n_cols
    x = tl.load(x_ptr + row * n_cols + cols, mask=mask, other=float("inf"))
    n_nan = tl.sum((x != x).to(tl.int32), 0)
    s = tl.sort(tl.where(x != x, float("inf"), x))
    s = tl.where(cols < n_cols - n_nan, tl.maximum(s, 0.0), float("nan"))
    s = tl.where(mask, s, 0.0)
    tl.store(out_ptr + row * n_cols + cols, tl.cumsum(s, 0) * 2, mask=mask)
'''
LAUNCH = """\
    out = torch.empty_like(x)
    n_rows, n_cols = x.shape
    ranks_kernel[(n_rows,)](x, out, n_cols, BLOCK=triton.next_power_of_2(n_cols), num_warps=4)
    return out
"""


def editable_text(request: dict[str, Any]) -> str:
    """The editable text in the prompt."""
    first = str(request["messages"][1]["content"])
    return first[first.index("# Text to edit") :].partition("\n")[2]


def hunk(search: str, replace: str) -> str:
    return f"<<<<<<< SEARCH\n{search}=======\n{replace}>>>>>>> REPLACE\n"


def body(text: str) -> str:
    """The statements of the launcher."""
    return text[text.rindex('"""\n') + 4 :].rstrip("\n") + "\n"


def good(request: dict[str, Any]) -> str:
    """Hunks that implement the step."""
    return f"Here it is:\n```\n{hunk('', KERNEL)}```\n{hunk(body(editable_text(request)), LAUNCH)}"


def good_complete_text(request: dict[str, Any]) -> str:
    text = editable_text(request)
    return f"```python\n{KERNEL}\n\n{text.replace(body(text), LAUNCH)}```"


def good_diff(request: dict[str, Any]) -> str:
    text = editable_text(request)
    lines = text.splitlines()
    kernel = [f"+{line}" for line in [*KERNEL.splitlines(), "", ""]]
    head = [f" {line}" for line in lines[: len(lines) - len(body(text).splitlines())]]
    removed = [f"-{line}" for line in body(text).splitlines()]
    added = [f"+{line}" for line in LAUNCH.splitlines()]
    return "```diff\n@@ -1,9 +1,20 @@\n" + "\n".join([*kernel, *head, *removed, *added]) + "\n```"
