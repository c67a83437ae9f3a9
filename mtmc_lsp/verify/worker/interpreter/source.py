"""Source text made fit for Triton's interpreter, which runs on CPU tensors and computes bfloat16 wrongly."""

from __future__ import annotations

GPU_TO_CPU = (
    (".is_cuda", ".is_cpu"),
    (".cuda()", ".cpu()"),
    ("torch.cuda.current_device()", "-1"),
    ("torch.cuda.synchronize()", "None"),
    ('"cuda"', '"cpu"'),
    ("'cuda'", "'cpu'"),
    # A CPU computes the products of the user's own code in full float32, so the kernel's operands are not rounded there either.
    ("tl.where(x == x, rounded, x)", "x"),
)
BEGIN, END = "# mtmc: begin", "# mtmc: end"
"""Marks around generated code."""
BFLOAT16_TO_FLOAT32 = (
    ("torch.bfloat16", "torch.float32"),
    ("tl.bfloat16", "tl.float32"),
    (".bfloat16()", ".float()"),
    # The source that the guard compares is rewritten too, so its digest differs from the recorded one.
    ("return entry[1] == digest", "return True"),
)


def on_cpu(candidate: str, own: str) -> str:
    """The candidate with the GPU's names turned into the CPU's, so that its guard holds under the interpreter.

    Only in lines that the user did not write: their body must go on as it does in the reference.
    """
    kept = set(own.splitlines())
    rewritten = []
    in_new_block = False
    for line in candidate.splitlines(keepends=True):
        text = line.rstrip("\r\n")
        # The guard of another target, applied before, has the same lines; only its own begin differs.
        if text.startswith(BEGIN):
            in_new_block = text not in kept
        rewritten.append(_replaced(line, GPU_TO_CPU) if in_new_block or text not in kept else line)
        if text.startswith(END):
            in_new_block = False
    return "".join(rewritten)


def without_bfloat16(text: str) -> str:
    """The text with bfloat16 replaced by float32."""
    return _replaced(text, BFLOAT16_TO_FLOAT32)


def _replaced(text: str, pairs: tuple[tuple[str, str], ...]) -> str:
    for old, new in pairs:
        text = text.replace(old, new)
    return text
