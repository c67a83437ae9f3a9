"""Adapts source text to Triton's interpreter, which runs on CPU tensors."""

from __future__ import annotations

import functools
import re

GPU_TO_CPU = (
    (".is_cuda", ".is_cpu"),
    (".cuda()", ".cpu()"),
    ("torch.cuda.current_device()", "-1"),
    ("torch.cuda.synchronize()", "None"),
    ('"cuda"', '"cpu"'),
    ("'cuda'", "'cpu'"),
    ('"cuda:0"', '"cpu"'),
    ("'cuda:0'", "'cpu'"),
    ('torch.device("cpu", -1)', 'torch.device("cpu")'),
    ("torch.device('cpu', -1)", "torch.device('cpu')"),
    # On a CPU the reference computes products in full float32, so the kernel must not round its operands either.
    ("tl.where(x == x, rounded, x)", "x"),
)
BEGIN, END = "# mtmc: begin", "# mtmc: end"
"""Marks around generated code."""
HELPER = re.compile(r"def (_\w+)\(")
"""The definition of a helper function of generated code."""


@functools.lru_cache(maxsize=8)
def on_cpu(candidate: str, original: str) -> str:
    """The candidate with GPU names replaced by CPU names, so that its guard accepts calls under the interpreter.

    Only generated lines are changed: the user's code must do the same as in the reference.
    """
    user_lines = set(original.splitlines())
    # The statements of a region are indented further than in the original.
    user_statements = {line.strip() for line in user_lines}
    rewritten = []
    helpers: set[str] = set()
    in_block = in_new_block = in_helper = False
    for line in candidate.splitlines(keepends=True):
        text = line.rstrip("\r\n")
        # The file may contain the generated block of another target, with the same lines except the first.
        if text.startswith(BEGIN):
            in_block, in_new_block = True, text not in user_lines
        if text[:1].strip():
            # The last definition of a helper counts, also if it is in a later block of another target.
            helper = HELPER.match(text)
            in_helper = in_block and helper is not None and helper[1] in helpers
            if in_new_block and helper is not None:
                helpers.add(helper[1])
        is_generated = in_new_block or in_helper or text.strip() not in user_statements
        rewritten.append(_replaced(line, GPU_TO_CPU) if is_generated else line)
        if text.startswith(END):
            in_block = in_new_block = in_helper = False
    return "".join(rewritten)


def _replaced(text: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for old, new in pairs:
        text = text.replace(old, new)
    return text
