"""Networks: repeated blocks are one step and one kernel, layouts propagate from end to end, and plans stay short."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import ActionKind
from mtmc_lsp.core.graph import Graph, GraphInput, InputKind, Node, Ref
from mtmc_lsp.core.protocols import CannotCode, State
from mtmc_lsp.core.run import Step, StepStatus
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.fusion.repeated_blocks import MANY, form, groups_of_equal
from mtmc_lsp.fusion.search import FusionSearch
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.rewrites import layout_propagation as propagation
from mtmc_lsp.rewrites.graph_editing import contiguous_type
from mtmc_lsp.schedule.precision_modes import Precisions
from mtmc_lsp.schedule.schedule import Schedule
from tests.codegen.harness import compile_errors, verified
from tests.planning.situations import H200, SLOW, act, schedule_of, start

HEAD = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n\n"
RESIDUAL = """
class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a, self.b = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.n, self.m = nn.BatchNorm2d(c), nn.BatchNorm2d(c)

    def forward(self, x):
        y = F.relu(self.n(self.a(x)))
        return F.relu(self.m(self.b(y)) + x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.blocks = nn.Sequential(Block(8), Block(8), Block(8))
        self.head = nn.Linear(8, 5)
        self.eval()

    def forward(self, x):
        x = F.max_pool2d(self.blocks(self.stem(x)), 2)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
"""
DENSE = """
class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n, self.c = nn.BatchNorm2d(c), nn.Conv2d(c, 6, 3, padding=1, bias=False)

    def forward(self, x):
        return self.c(F.relu(self.n(x)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(6 + 6 * i) for i in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x.flatten(1)
"""
SHUFFLED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(6, 6, 1, groups=3), nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.c = nn.ConvTranspose2d(6, 4, 2, stride=2)

    def forward(self, x):
        y = F.silu(self.a(x))
        n, c, h, w = y.shape
        y = y.view(n, 3, 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        y = self.c(x * torch.sigmoid(self.b(y)))
        return y, y.mean((2, 3)), y.sum(0)
"""
NETWORKS = {
    "residual": (RESIDUAL, "torch.randn(2, 3, 6, 6)"),
    "dense": (DENSE, "torch.randn(2, 6, 5, 5)"),
    "shuffled": (SHUFFLED, "torch.randn(2, 6, 4, 4)"),
}


def network(name: str) -> str:
    body, x = NETWORKS[name]
    return f"{HEAD}{body}\n\ndef get_inputs():\n    return [{x}]\n\n\ndef get_init_inputs():\n    return []\n"


def sequential(layers: list[str]) -> str:
    """A sequential network of layers with four features."""
    body = (
        f"class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        self.layers = nn.Sequential({', '.join(layers)})\n\n    def forward(self, x):\n        return self.layers(x)\n"
    )
    return f"{HEAD}{body}\n\ndef get_inputs():\n    return [torch.randn(3, 4)]\n"


def throughout(capture, candidate):
    return act(capture, candidate, ActionKind.CHANNELS_LAST, rule=propagation.RULE, node="", kernels=[])


def images(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if ".conv" in node.op]


@pytest.mark.parametrize("name", NETWORKS)
def test_channels_last_throughout_changes_only_layouts(name, captured):
    """Only copies are new, all convolutions are channels-last, and results keep their layouts."""
    text = network(name)
    capture = captured(text, "Net")
    before = capture.graph
    after = ir_of(before, schedule_of(throughout(capture, start(capture, text)))).graph
    assert all(node.type.is_channels_last for node in images(after))
    assert [after.type_of(ref) for ref in after.outputs if ref] == [before.type_of(r) for r in before.outputs if r]
    remaining = [node.op for node in after.nodes if node.name in before.named]
    assert remaining == [node.op for node in before.nodes]
    assert {node.op for node in after.nodes if node.name not in before.named} == {"aten.clone.default"}
    for node in after.nodes:
        original = before.named.get(node.name)
        if original is not None and not node.type.is_channels_last:
            assert node.outputs == original.outputs


@pytest.mark.parametrize("name", NETWORKS)
def test_channels_last_throughout_keeps_the_values(name, captured):
    """With the planner's first kernel the results equal those of the user's code."""
    text = network(name)
    capture = captured(text, "Net")
    candidate = throughout(capture, start(capture, text))
    actions = RooflinePlanner().ranked(State(capture, candidate, (), SLOW, False))
    candidate = BuiltinCoder().write(capture, candidate, next(a for a in actions if a.kind is ActionKind.FUSE))
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason
    with pytest.raises(CannotCode):
        throughout(capture, candidate)


def test_a_network_of_equal_blocks_takes_few_steps_and_few_kernels(captured):
    """Operations that the blocks share take one step and one kernel each; the final candidate is correct."""
    text = network("residual")
    capture = captured(text, "Net")
    candidate, history = start(capture, text), []
    for _ in range(4):
        actions = RooflinePlanner().ranked(State(capture, candidate, tuple(history), SLOW, False))
        if not actions:
            break
        candidate = BuiltinCoder().write(capture, candidate, actions[0])
        history.append(Step(len(history) + 1, actions[0], StepStatus.ACCEPTED, ""))
    assert history[0].action.params["rule"] == propagation.RULE
    blocks = [item["nodes"] for item in history[0].action.params["kernels"] if len(item["nodes"]) == 3]
    assert len(blocks) == 2, (
        "the second norm, the addition and the activation of two blocks; the third one has the pooling too"
    )
    written = len(re.findall(r"^@triton\.jit", candidate.source, re.MULTILINE))
    launched = len(re.findall(r"_kernel\[", candidate.source))
    assert written < launched
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


def test_a_network_of_many_tensors_is_an_operator_of_a_list(captured):
    """PyTorch's operators take at most 64 arguments: the tensors become a list, and the kernels compile."""
    text = sequential(["nn.Linear(4, 4)", "nn.ReLU()"] * 33)
    capture = captured(text, "Net")
    relu = next(node.name for node in capture.graph.nodes if "relu" in node.op)
    candidate = act(capture, start(capture, text), ActionKind.FUSE, relu)
    assert len(capture.graph.inputs) > 64
    assert "tensors: list[torch.Tensor]" in candidate.source
    assert not compile_errors(capture, candidate, ["sm_90"])


def test_tensors_that_a_network_changes_are_a_separate_list(captured):
    """A batch norm in training changes three tensors, so 22 of them exceed the arguments of an operator."""
    text = sequential(["nn.BatchNorm1d(4)"] * 23 + ["nn.ReLU()"])
    capture = captured(text, "Net")
    relu = next(node.name for node in capture.graph.nodes if "relu" in node.op)
    candidate = act(capture, start(capture, text), ActionKind.FUSE, relu)
    assert "updated: list[torch.Tensor], tensors: list[torch.Tensor]" in candidate.source
    assert not compile_errors(capture, candidate, ["sm_90"])
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


def test_a_slow_fusion_with_a_product_is_not_tried_with_fewer_nodes(captured):
    """If a kernel of a convolution and its norm was slower, a kernel of the convolution alone is not tried."""
    text = network("residual")
    capture = captured(text, "Net")
    ir = ir_of(capture.graph, Schedule())
    node = images(capture.graph)[1].name
    first = next(f for f in FusionSearch(ir, Schedule(), SLOW).best() if node in f.nodes)
    other_fusions = FusionSearch(ir, Schedule(), SLOW, slow=[first.nodes]).best()
    assert not any(node in fusion.nodes and fusion.nodes <= first.nodes for fusion in other_fusions)
    assert any(node not in fusion.nodes for fusion in other_fusions)


def test_sites_that_fail_together_are_tried_separately(captured):
    """After a failure the sites are tried separately; if all were correct but slower, none is tried again."""
    text = network("residual")
    capture = captured(text, "Net")
    candidate = throughout(capture, start(capture, text))
    state = State(capture, candidate, (), SLOW, False)
    group = next(a for a in RooflinePlanner().ranked(state) if "sites" in a.params)
    sites = {tuple(site["nodes"]) for site in group.params["sites"]}

    def proposed_sites(status: StepStatus) -> set[tuple[str, ...]]:
        after = replace(state, history=(Step(1, group, status, ""),))
        return {action.region for action in RooflinePlanner().ranked(after)} & sites

    assert proposed_sites(StepStatus.FAILED) == sites
    assert not proposed_sites(StepStatus.REJECTED)
    ir = ir_of(capture.graph, schedule_of(candidate))
    told = Precisions.of(ir, H200, [Step(1, group, StepStatus.REJECTED, "")])
    assert {tuple(sorted(nodes)) for _, nodes in told.slow} == {tuple(sorted(nodes)) for nodes in sites}


def test_channels_last_throughout_comes_first_and_once(captured):
    """It excludes the rewrite of single convolutions, and is not proposed again after a rejection."""
    text = network("residual")
    capture = captured(text, "Net")
    root = start(capture, text)

    def rules(*history: Step) -> set[object]:
        actions = RooflinePlanner().ranked(State(capture, root, history, SLOW, False))
        return {action.params.get("rule") for action in actions if action.kind is ActionKind.CHANNELS_LAST}

    first = RooflinePlanner().ranked(State(capture, root, (), SLOW, False))[0]
    assert rules() == {propagation.RULE}
    assert propagation.RULE not in rules(Step(1, first, StepStatus.REJECTED, ""))


def chain(operations: list[str], size: int, prefix: str) -> list[Node]:
    kind = contiguous_type((Size.of(size), Size.of(4)), "float32")
    names = [f"{prefix}{i}" for i in range(len(operations))]
    sources = [Ref("x"), *(Ref(name) for name in names)]
    return [
        Node(n, f"aten.{op}.default", (s,), {}, (kind,)) for n, op, s in zip(names, operations, sources, strict=False)
    ]


OPERATIONS = st.lists(st.sampled_from(["relu", "tanh", "exp"]), min_size=1, max_size=4)


@given(OPERATIONS, OPERATIONS, st.integers(1, 9), st.integers(1, 9))
def test_the_form_of_nodes_depends_on_operations_but_not_on_names_and_sizes(first, second, m, n):
    kind = contiguous_type((Size.of(m), Size.of(4)), "float32")
    a, b = chain(first, m, "a"), chain(second, n, "b")
    outputs = (Ref(a[-1].name), Ref(b[-1].name))
    graph = Graph((GraphInput("x", "x", InputKind.ARGUMENT, kind),), (*a, *b), outputs, "tuple", {})
    same = form(graph, [node.name for node in a]) == form(graph, [node.name for node in b])
    assert same == (first == second)


@given(st.lists(st.integers(0, 3), max_size=20))
def test_every_item_is_in_one_group_and_groups_are_large_or_single(items):
    groups = groups_of_equal(list(enumerate(items)), lambda item: item[1])
    assert sorted(item for group in groups for item in group) == list(enumerate(items))
    assert all(len({key for _, key in group}) == 1 for group in groups)
    assert all(len(group) == 1 or len(group) >= MANY for group in groups)
    assert all(len(group) == items.count(group[0][1]) for group in groups if len(group) > 1)
