"""The first step of a network: kernels between its library calls, channels last and a CUDA graph at once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtmc_lsp.actions.networks.first_version import BESIDE, FIRST_LAUNCHES, RULES
from mtmc_lsp.codegen.coder import BuiltinCoder
from mtmc_lsp.core.action import ActionKind, MacroAction
from mtmc_lsp.core.protocols import State
from mtmc_lsp.core.run import Candidate, Step, StepStatus
from mtmc_lsp.core.sizes import Size
from mtmc_lsp.core.workload import Capture
from mtmc_lsp.ir.regions import RegionKind, analyse
from mtmc_lsp.planners.roofline import RooflinePlanner
from mtmc_lsp.rewrites import ir_of
from mtmc_lsp.rewrites import layout_propagation as propagation
from mtmc_lsp.rewrites.graph_editing import CannotRewrite
from mtmc_lsp.rewrites.whole_graph import convolution_biases, one_position
from mtmc_lsp.schedule.launch_units import launch_count
from mtmc_lsp.schedule.schedule import Schedule
from mtmc_lsp.tuning.cost import matmul_flops
from tests.codegen.harness import compile_errors, verified
from tests.planning.situations import H200, SLOW, act, schedule_of, start, timing

HEAD = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n\n"
CONVOLUTIONS = """
class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a, self.b = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.Conv2d(c, c, 1, bias=False)
        self.n, self.m = nn.BatchNorm2d(c), nn.BatchNorm2d(c)

    def forward(self, x):
        y = F.relu(self.n(self.a(x)))
        return F.relu(self.m(self.b(y)) + x)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.blocks = nn.Sequential(*[Block(8) for _ in range(5)])
        self.head = nn.Linear(8, 5)
        self.eval()

    def forward(self, x):
        x = F.max_pool2d(self.blocks(self.stem(x)), 2)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))
"""
TRANSFORMER = """
class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.qkv, self.out = nn.Linear(c, 3 * c), nn.Linear(c, c)
        self.up, self.down = nn.Linear(c, 2 * c), nn.Linear(2 * c, c)
        self.n, self.m = nn.LayerNorm(c), nn.LayerNorm(c)

    def forward(self, x):
        b, s, c = x.shape
        q, k, v = self.qkv(self.n(x)).view(b, s, 3, 2, c // 2).permute(2, 0, 3, 1, 4).unbind(0)
        weights = torch.softmax(q @ k.transpose(-2, -1) * (c // 2) ** -0.5, -1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, s, c))
        return x + self.down(F.gelu(self.up(self.m(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[Layer(32) for _ in range(3)])

    def forward(self, x):
        return self.layers(x)
"""
NETWORKS = {
    "convolutions": (CONVOLUTIONS, "torch.randn(2, 3, 6, 6)"),
    "transformer": (TRANSFORMER, "torch.randn(2, 5, 32)"),
}


def network(name: str) -> str:
    body, x = NETWORKS[name]
    return f"{HEAD}{body}\n\ndef get_inputs():\n    return [{x}]\n\n\ndef get_init_inputs():\n    return []\n"


def opening(capture: Capture, root: Candidate, *history: Step, device=H200, **planner: object) -> MacroAction:
    action = RooflinePlanner(**planner).propose(State(capture, root, history, device, True))
    assert isinstance(action, MacroAction)
    return action


@pytest.mark.parametrize("name", NETWORKS)
def test_the_first_step_of_a_network_fuses_everything_between_library_calls(name, captured) -> None:
    """Only products, weights in another layout and views remain outside kernels, and one graph replays all launches."""
    text = network(name)
    capture = captured(text, "Net")
    root = start(capture, text)
    action = opening(capture, root)
    assert action.kind is ActionKind.CUDA_GRAPH and len(action.params["kernels"]) > 3
    candidate = BuiltinCoder(H200).write(capture, root, action)
    schedule = schedule_of(candidate)
    assert schedule.cuda_graph
    ir = ir_of(capture.graph, schedule)
    inside = {node for plan in schedule.kernels for node in plan.nodes}
    left = [node for node in ir.graph.nodes if node.name not in inside and node.name in capture.graph.named]
    products = {node.name for node in left if matmul_flops(ir, node.name)}
    views = {"view", "flatten", "permute", "unbind", "transpose", "select"}
    calls = [node for node in left if node.name not in products and node.op.split(".")[1] not in views]
    assert len(calls) <= 1, "a norm alone may stay a call of the library"
    before = launch_count(ir_of(capture.graph, Schedule()), Schedule())
    assert before > FIRST_LAUNCHES and launch_count(ir, schedule) <= 0.75 * before


@pytest.mark.parametrize("name", NETWORKS)
def test_the_first_version_of_a_network_is_correct_and_compiles(name, captured) -> None:
    text = network(name)
    capture = captured(text, "Net")
    root = start(capture, text)
    action = opening(capture, root, device=SLOW)
    candidate = BuiltinCoder(SLOW).write(capture, root, action)
    assert schedule_of(candidate).kernels
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason
    assert not compile_errors(capture, candidate, ["sm_90"])


def test_convolutions_of_a_network_are_channels_last_from_the_first_step(captured) -> None:
    text = network("convolutions")
    capture = captured(text, "Net")
    root = start(capture, text)
    action = opening(capture, root, device=SLOW)
    graph = ir_of(capture.graph, schedule_of(BuiltinCoder(SLOW).write(capture, root, action))).graph
    assert propagation.is_channels_last(graph)
    assert action.params[RULES] == [convolution_biases.RULE, propagation.RULE]
    assert "with channels last" in action.text


def test_copies_of_weights_share_launches_and_are_correct(captured) -> None:
    """The five 3 x 3 weights are copied by one launch. The version is verified without its graph, which a CPU cannot capture."""
    text = network("convolutions")
    capture = captured(text, "Net")
    root = start(capture, text)
    action = opening(capture, root)
    (together,) = action.params[BESIDE]
    candidate = BuiltinCoder(H200).write(capture, root, action)
    schedule = schedule_of(candidate)
    graph = ir_of(capture.graph, schedule).graph
    copied = [ref for name in together for ref in graph.named[name].inputs()]
    assert len(copied) == 5 and {graph.type_of(ref).shape[2:] for ref in copied} == {(Size.of(3), Size.of(3))}
    assert schedule.launches == (tuple(together),)
    layout = {"rule": propagation.RULE, "node": "", RULES: action.params[RULES], "kernels": action.params["kernels"]}
    direct = act(
        capture, act(capture, root, ActionKind.CHANNELS_LAST, **layout), ActionKind.SIDE_BY_SIDE, launches=[together]
    )
    assert replace(schedule_of(direct), kernel_names=()) == replace(schedule, cuda_graph=False, kernel_names=())
    verdict = verified(capture, direct)
    assert verdict.is_correct, verdict.reason
    assert not compile_errors(capture, direct, ["sm_90"])


BIASED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.ConvTranspose2d(4, 6, 2, stride=2)
        self.c, self.d = nn.Conv2d(6, 6, 3, groups=6, bias=False), nn.Conv1d(6, 5, 3)

    def forward(self, x):
        y = self.b(F.relu(self.a(x)))
        return y, F.silu(self.d(self.c(y).flatten(2)))
"""


def test_biases_of_convolutions_become_additions_of_kernels(captured) -> None:
    """No convolution keeps a bias, whether its result is returned or read, and the values are the same."""
    text = f"{HEAD}{BIASED}\n\ndef get_inputs():\n    return [torch.randn(2, 3, 5, 4)]\n"
    capture = captured(text, "Net")
    rules = [convolution_biases.RULE, propagation.RULE]
    layout = {"rule": propagation.RULE, "node": "", RULES: rules, "kernels": []}
    candidate = act(capture, start(capture, text), ActionKind.CHANNELS_LAST, **layout)
    graph = ir_of(capture.graph, schedule_of(candidate)).graph
    assert not convolution_biases.matches(graph)
    assert sum(node.op == "aten.add.Tensor" for node in graph.nodes) == 3
    ranked = RooflinePlanner().ranked(State(capture, candidate, (), SLOW, False))
    candidate = BuiltinCoder().write(capture, candidate, next(a for a in ranked if a.kind is ActionKind.FUSE))
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason
    with pytest.raises(CannotRewrite, match="no convolution has a bias"):
        convolution_biases.without_biases(graph)


EXCITED = """
class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.down, self.up = nn.Conv2d(c, c // 2, 1), nn.Conv2d(c // 2, c, 1)

    def forward(self, x):
        x = F.silu(self.norm(self.conv(x)))
        s = F.silu(self.down(F.adaptive_avg_pool2d(x, 1)))
        return x * torch.sigmoid(self.up(s))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[Block(8) for _ in range(4)])
        self.half().eval()

    def forward(self, x):
        return self.blocks(x)
"""


def test_convolutions_of_one_position_are_linear_layers_from_the_first_step(captured) -> None:
    text = f"{HEAD}{EXCITED}\n\ndef get_inputs():\n    return [torch.randn(2, 8, 6, 5).half()]\n"
    capture = captured(text, "Net")
    root = start(capture, text)
    action = opening(capture, root, device=SLOW)
    assert action.params[RULES] == [convolution_biases.RULE, one_position.RULE, propagation.RULE]
    candidate = BuiltinCoder(SLOW).write(capture, root, action)
    schedule = schedule_of(candidate)
    graph = ir_of(capture.graph, schedule).graph
    assert [sum(node.op == f"aten.{name}.default" for node in graph.nodes) for name in ("conv2d", "linear")] == [4, 8]
    inside = {name for plan in schedule.kernels for name in plan.nodes}
    added = [node.name for node in graph.nodes if node.name.endswith(("_bias0", "_bias1"))]
    assert len(added) == 16 and inside >= {*added}, "kernels add the biases"
    assert candidate.source.count("torch.nn.functional.linear(") == 8
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason
    assert not compile_errors(capture, candidate, ["sm_90"])


OTHERS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.strided = nn.Conv2d(4, 6, 1, bias=False), nn.Conv2d(4, 6, 1, stride=3, bias=False)
        self.same, self.line = nn.Conv2d(4, 6, 1, padding="same", bias=False), nn.Conv1d(4, 6, 1, bias=False)
        self.padded = nn.Conv2d(4, 6, 1, stride=3, padding=1, bias=False)
        self.grouped, self.wide = nn.Conv2d(4, 6, 1, groups=2, bias=False), nn.Conv2d(4, 6, 3, padding=1, bias=False)
        self.upward, self.biased = nn.ConvTranspose2d(4, 6, 1, bias=False), nn.Conv2d(4, 6, 1)
        self.half()

    def forward(self, x, y):
        same = self.linear(x), self.strided(x), self.same(x), self.line(x[:, :, 0])
        others = self.padded(x), self.grouped(x), self.wide(x), self.upward(x), self.biased(x), self.linear(y)
        return *same, *others, F.relu(x)
"""


def test_only_plain_convolutions_of_one_position_are_linear_layers(captured) -> None:
    """A border, groups, larger kernels and images, transposed convolutions, biases and float32 do not fit."""
    inputs = "[torch.randn(3, 4, 1, 1).half(), torch.randn(3, 4, 2, 2).half()]"
    text = f"{HEAD}{OTHERS}\n\ndef get_inputs():\n    return {inputs}\n"
    capture = captured(text, "Net")
    candidate = act(capture, start(capture, text), ActionKind.FUSE, sites=[], **{RULES: [one_position.RULE]})
    candidate = act(capture, candidate, ActionKind.FUSE, "relu", config={})
    graph = ir_of(capture.graph, schedule_of(candidate)).graph
    assert sum(node.op == "aten.linear.default" for node in graph.nodes) == 4
    assert not one_position.matches(graph)
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason
    with pytest.raises(CannotRewrite, match="no convolution has images with one position"):
        one_position.with_linear_layers(graph)
    full = captured(text.replace(".half()", ".float()"), "Net")
    assert not one_position.matches(full.graph)


def test_an_attention_that_the_code_writes_out_is_one_kernel_from_the_first_step(captured) -> None:
    text = network("transformer")
    capture = captured(text, "Net")
    ir = ir_of(capture.graph, Schedule())
    kinds = [
        analyse(ir, tuple(item["nodes"])).kind for item in opening(capture, start(capture, text)).params["kernels"]
    ]
    assert kinds.count(RegionKind.ATTENTION) == 3
    assert RegionKind.MATMUL not in kinds


def test_a_network_whose_launches_are_hidden_needs_no_graph(captured) -> None:
    """On a device whose kernels take longer than their launches, the same kernels are the first step without a graph."""
    text = network("transformer")
    capture = captured(text, "Net")
    root = start(capture, text)
    fast, slow = opening(capture, root), opening(capture, root, device=SLOW)
    assert (fast.kind, slow.kind) == (ActionKind.CUDA_GRAPH, ActionKind.FUSE)
    assert len(slow.params["sites"]) > 3
    assert not schedule_of(BuiltinCoder(SLOW).write(capture, root, slow)).cuda_graph


def test_a_network_that_is_channels_last_already_keeps_its_layout(captured) -> None:
    """Its first step separates biases and rewrites nothing else; without a graph, it is a fusion."""
    text = network("convolutions").replace("self.stem(x)", "self.stem(x.contiguous(memory_format=torch.channels_last))")
    capture = captured(text, "Net")
    root = start(capture, text)
    action = opening(capture, root, device=SLOW)
    assert action.kind is ActionKind.FUSE and action.params[RULES] == [convolution_biases.RULE]
    candidate = BuiltinCoder(SLOW).write(capture, root, action)
    assert not convolution_biases.matches(ir_of(capture.graph, schedule_of(candidate)).graph)
    verdict = verified(capture, candidate)
    assert verdict.is_correct, verdict.reason


def test_after_a_failure_the_graph_alone_and_single_fusions_follow(captured) -> None:
    text = network("convolutions")
    capture = captured(text, "Net")
    root = start(capture, text)
    first = opening(capture, root)
    failed = Step(1, first, StepStatus.FAILED, "a kernel does not compile")
    second = opening(capture, root, failed)
    assert second.kind is ActionKind.CUDA_GRAPH and "kernels" not in second.params
    third = opening(capture, root, failed, Step(2, second, StepStatus.FAILED, "it was not captured"))
    assert third.kind in (ActionKind.FUSE, ActionKind.CHANNELS_LAST) and third.key not in (first.key, second.key)


@pytest.mark.parametrize("excluded", ["cuda-graph", "fuse", "channels-last", propagation.RULE])
def test_a_first_version_contains_nothing_that_is_excluded(excluded: str, captured) -> None:
    text = network("convolutions")
    capture = captured(text, "Net")
    root = start(capture, text)
    action = opening(capture, root, exclude=(excluded,))
    schedule = schedule_of(BuiltinCoder(H200).write(capture, root, action))
    assert action.kind.value != excluded
    assert not (excluded == "fuse" and schedule.kernels)
    assert not (excluded in ("channels-last", propagation.RULE) and schedule.rewrites)


def test_small_targets_and_runs_without_a_gpu_keep_single_fusions(captured) -> None:
    text = network("convolutions").replace("range(5)", "range(2)")
    small = captured(text, "Net")
    assert "between library calls" not in opening(small, start(small, text)).text
    text = network("convolutions")
    capture = captured(text, "Net")
    state = State(capture, start(capture, text), (), SLOW, False)
    assert not any("between library calls" in action.text for action in RooflinePlanner().ranked(state))


def test_the_first_version_is_not_proposed_again(captured) -> None:
    text = network("transformer")
    capture = captured(text, "Net")
    root = start(capture, text)
    first = opening(capture, root)
    candidate = BuiltinCoder(H200).write(capture, root, first)
    step = Step(1, first, StepStatus.ACCEPTED, "", candidate=candidate, timing=timing(100.0, 2.0, None))
    ranked = RooflinePlanner().ranked(State(capture, candidate, (step,), H200, True))
    assert not any("between library calls" in action.text for action in ranked)
