"""Kernels are named after the user's variables, and keep their names from step to step."""

from __future__ import annotations

import re
from collections.abc import Callable

from mtmc_lsp.core.action import ActionKind as K
from mtmc_lsp.core.run import Candidate
from mtmc_lsp.core.workload import Capture
from tests.planning.situations import act, start

STAGED = """import torch
# mtmc: x=f32[8,48]
def f(x):
    hidden = torch.relu(x) * 2
    ranked = hidden.sort(-1).values
    scaled = torch.tanh(ranked) + 1
    return scaled.sort(-1).values * 3
"""


def kernels(candidate: Candidate) -> dict[str, str]:
    """The source of each kernel, by name."""
    parts = re.split(r"^(?=@triton\.jit\n)", candidate.source, flags=re.MULTILINE)[1:]
    return {re.findall(r"def (\w+)\(", part)[0]: part.split("\n\n\n")[0] for part in parts}


def nodes_of(capture: Capture, *words: str) -> list[str]:
    return [next(node.name for node in capture.graph.nodes if node.word == word) for word in words]


def test_a_later_kernel_does_not_rename_the_earlier_ones(captured: Callable[[str, str], Capture]) -> None:
    capture = captured(STAGED, "f")
    relu, tanh = nodes_of(capture, "relu", "tanh")
    names = [node.name for node in capture.graph.nodes]
    after = names[names.index(tanh) + 1]
    first = act(capture, start(capture, STAGED), K.FUSE, after, config={})
    assert set(kernels(first)) == {"f_scaled_kernel"}
    second = act(capture, first, K.FUSE, relu, config={})
    third = act(capture, second, K.FUSE, names[-1], config={})
    for before, later in ((first, second), (second, third)):
        assert kernels(before).items() <= kernels(later).items()
    extended = act(capture, third, K.FUSE, tanh, after, config={})
    assert set(kernels(extended)) == set(kernels(third)), "the fused kernel computes the same result as before"
    changed = {name for name, source in kernels(extended).items() if source != kernels(third)[name]}
    assert changed == {"f_scaled_kernel"}


REPEATED = """import torch
# mtmc: x=f32[8,48]
def f(x):
    for _ in range(3):
        y = torch.relu(x) * 2
        x = y.sort(-1).values
    return x
"""


def test_a_kernel_that_another_one_is_equal_to_gives_it_its_name(captured: Callable[[str, str], Capture]) -> None:
    capture = captured(REPEATED, "f")
    regions = [
        (node.name, capture.graph.nodes[i + 1].name)
        for i, node in enumerate(capture.graph.nodes)
        if node.word == "relu"
    ]
    second = act(capture, start(capture, REPEATED), K.FUSE, *regions[1], config={})
    both = act(capture, second, K.FUSE, *regions[0], config={})
    assert set(kernels(both)) == set(kernels(second))
    assert both.source.count("f_mul_kernel[") == 2


TWO_PRODUCTS = """import torch
# mtmc: x=f32[64,64] a=f32[64,64] b=f32[64,64]
def f(x, a, b):
    left = x @ a
    right = torch.sigmoid(x @ b)
    return left.sort(-1).values + right
"""


def test_a_kernel_that_splits_operands_keeps_its_name_if_an_earlier_product_uses_it_too(
    captured: Callable[[str, str], Capture],
) -> None:
    capture = captured(TWO_PRODUCTS, "f")
    left, right = (node.name for node in capture.graph.nodes if node.word in ("mm", "matmul"))
    sigmoid = nodes_of(capture, "sigmoid")[0]
    config = {"block_m": 16, "block_n": 16, "block_k": 16, "warps": 1, "stages": 1, "group_m": 2, "precision": "fp16x3"}
    first = act(capture, start(capture, TWO_PRODUCTS), K.TENSOR_CORE, right, sigmoid, config=config)
    both = act(capture, first, K.TENSOR_CORE, left, config=config)
    splits = {name: source for name, source in kernels(first).items() if "_split" in name}
    assert splits, "the operands are split by a kernel"
    assert splits.items() <= kernels(both).items()


def test_a_kernel_of_the_whole_target_is_named_after_it(captured: Callable[[str, str], Capture]) -> None:
    text = "import torch\n# mtmc: x=f32[8,48]\ndef f(x):\n    y = torch.relu(x)\n    return y.T * 2\n"
    capture = captured(text, "f")
    whole = act(capture, start(capture, text), K.FUSE, *(node.name for node in capture.graph.nodes), config={})
    assert set(kernels(whole)) == {"f_kernel"}


def test_a_name_of_the_users_file_is_not_used(captured: Callable[[str, str], Capture]) -> None:
    text = STAGED + "\n\ndef f_hidden_kernel():\n    pass\n"
    capture = captured(text, "f")
    relu = nodes_of(capture, "relu")
    names = [node.name for node in capture.graph.nodes]
    region = [*relu, names[names.index(relu[0]) + 1]]
    assert set(kernels(act(capture, start(capture, text), K.FUSE, *region, config={}))) == {"f_hidden_2_kernel"}
