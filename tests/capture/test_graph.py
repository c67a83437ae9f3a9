"""The captured graph: source lines, names, sizes, parameters, constants, and how the target is called."""

from __future__ import annotations

import pytest

from mtmc_lsp.core.errors import TargetUnsupported
from mtmc_lsp.core.graph import InputKind, Ref
from mtmc_lsp.core.sizes import NumberArgument
from tests.codegen.harness import verified
from tests.planning.situations import fully_fused, start

HEAD = "import torch\nfrom torch import nn\n\n\n"

NAMED = (
    HEAD
    + """\
# mtmc: x=f32[B,D] w=f32[D] B=8 D=48
def named(x, w, eps=1e-6, *, flag=True):
    scaled = x * w
    total = (
        scaled.sum(-1, keepdim=True)
        + eps
    )
    return scaled / total
"""
)


def test_nodes_have_the_line_and_the_variable_of_their_assignment(captured) -> None:
    graph = captured(NAMED, "named").graph
    seen = [(node.op.split(".")[1], node.line, node.variable) for node in graph.nodes]
    assert seen == [("mul", 7, "scaled"), ("sum", 9, ""), ("add", 9, "total"), ("div", 12, "")]


@pytest.mark.parametrize("arguments", ["0.5, training=False", "0.0, training=True"])
def test_a_dropout_that_drops_nothing_is_no_operation(captured, arguments: str) -> None:
    """The trace contains a copy that the eager call does not make."""
    body = f"    h = torch.dropout(torch.relu(x), {arguments.replace('training', 'train')})\n    return torch.relu(h) + 1.0\n"
    graph = captured(f"import torch\n\n\n# mtmc: x=f32[6,5]\ndef f(x):\n{body}", "f").graph
    assert [node.word for node in graph.nodes] == ["relu", "relu", "add"]


@pytest.mark.parametrize("body", ["x.clone() * 2.0", "(x * 2.0).clone()", "(x * 2.0).t().clone() + 1.0"])
def test_a_copy_that_the_caller_can_observe_stays(captured, body: str) -> None:
    """It is returned, or has other strides, or copies an argument."""
    graph = captured(f"import torch\n\n\n# mtmc: x=f32[6,5]\ndef f(x):\n    return {body}\n", "f").graph
    assert "clone" in [node.word for node in graph.nodes]


def test_sizes_keep_the_names_of_the_directive(captured) -> None:
    capture = captured(NAMED, "named")
    assert capture.graph.sizes == {"B": 8, "D": 48}
    assert capture.variable_sizes == ("B", "D")
    assert [str(size) for size in capture.graph.nodes[-1].type.shape] == ["B", "D"]
    assert [str(size) for size in capture.graph.nodes[1].type.shape] == ["B", "1"]


def test_a_flag_that_changes_the_rank_of_the_result_is_a_constant(captured) -> None:
    """The target is traced with the other value as well, whose result has no dimension in common with the eager run."""
    text = "# mtmc: x=f32[6,5]\ndef f(x, size_average=True):\n    loss = x * x\n    return loss.mean() if size_average else loss.mean(1)\n"
    graph = captured(text, "f").graph
    assert graph.constants == {"size_average": True} and graph.free_flags == ()


def test_defaults_are_constants_and_keyword_arguments_are_passed_by_name(captured) -> None:
    capture = captured(NAMED, "named")
    assert capture.graph.constants == {}
    assert capture.graph.free_flags == ("flag",), "nothing reads it"
    assert capture.graph.numbers == (NumberArgument("eps", "eps", 1e-6),)
    assert [(a.name, a.input, a.keyword) for a in capture.arguments] == [
        ("x", "x", False),
        ("w", "w", False),
        ("eps", None, False),
        ("flag", None, True),
    ]


def test_numeric_sizes_of_a_directive_with_named_sizes_are_constants(captured) -> None:
    text = HEAD + "# mtmc: x=f32[B,64] B=4\ndef f(x):\n    a, b = x.chunk(2, -1)\n    return a * b\n"
    capture = captured(text, "f")
    assert capture.graph.sizes == {"B": 4}
    assert [str(size) for size in capture.graph.nodes[-1].type.shape] == ["B", "32"]


def test_sizes_without_names_get_names(captured) -> None:
    text = HEAD + "# mtmc: x=f32[4,16] y=f32[16,8]\ndef f(x, y):\n    return torch.relu(x @ y)\n"
    capture = captured(text, "f")
    assert capture.graph.sizes == {"s0": 4, "s1": 16, "s2": 8}
    assert [str(size) for size in capture.graph.inputs[1].type.shape] == ["s1", "s2"]
    assert capture.flops == 2 * 4 * 16 * 8
    assert capture.bytes == 4 * (4 * 16 + 16 * 8 + 4 * 8)


def test_sizes_in_divisions_become_constants(captured) -> None:
    text = HEAD + "# mtmc: x=f32[8,4,6]\ndef f(x):\n    return x.reshape(8, -1, 12).sum(-1)\n"
    capture = captured(text, "f")
    assert capture.graph.sizes == {}
    assert [size.value(capture.graph.sizes) for size in capture.graph.nodes[-1].type.shape] == [8, 2]


def test_the_graph_has_strides_and_several_results(captured) -> None:
    text = HEAD + "# mtmc: x=f32[4,16]{1,4}\ndef f(x):\n    return torch.relu(x), x.t() + 1, None\n"
    graph = captured(text, "f").graph
    assert [str(size) for size in graph.inputs[0].type.stride] == ["1", "s0"]
    assert graph.returns == "(results[0], results[1], None)"
    assert len(graph.outputs) == 2


def test_an_operator_with_the_name_of_an_argument_gets_another_name(captured) -> None:
    text = HEAD + "# mtmc: table=f32[10,16] index=i64[4]@0..9\ndef f(table, index):\n    return table[index] + 1\n"
    graph = captured(text, "f").graph
    names = [item.name for item in graph.inputs] + [node.name for node in graph.nodes]
    assert len(set(names)) == len(names)
    lookup = next(node for node in graph.nodes if node.op == "aten.index.Tensor")
    assert Ref("index") in list(lookup.inputs())
    assert Ref(lookup.name) in list(graph.nodes[-1].inputs())


def test_sizes_of_indexed_dimensions_do_not_vary(captured) -> None:
    text = HEAD + "# mtmc: table=f32[10,16] index=i64[4]@0..9\ndef f(table, index):\n    return table[index] + 1\n"
    capture = captured(text, "f")
    rows = str(capture.graph.inputs[0].type.shape[0])
    assert capture.graph.sizes[rows] == 10
    assert rows not in capture.variable_sizes


@pytest.mark.parametrize(
    "body",
    [
        "x.expand(len(x), 5) * 2.0",
        "(x[:, None] - x).sum((1, 2)) / len(x)",
        "x * torch.arange(len(x), device=x.device)[:, None]",
        "torch.stack([x for _ in [0] * len(x.shape)])",
    ],
)
def test_the_length_of_a_tensor_may_vary(captured, body: str) -> None:
    """``len`` of Python converts the size to a number."""
    assert captured(
        f"import torch\n\n\n# mtmc: x=f32[N,5] N=12\ndef f(x):\n    return {body}\n", "f"
    ).variable_sizes == ("N",)


def test_a_list_with_an_item_for_each_row_fixes_their_number(captured) -> None:
    text = "import torch\n\n\n# mtmc: x=f32[N,5] N=3\ndef f(x):\n    rows = [None] * len(x)\n    for i in range(len(x)):\n        rows[i] = x[i] * i\n    return torch.stack(rows)\n"
    capture = captured(text, "f")
    assert [str(size) for size in capture.graph.inputs[0].type.shape] == ["3", "5"]


BIASED = (
    HEAD
    + """\
# mtmc: x=f32[N,9,9] N=12
class Biased(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(5, 5, 1))
        self.register_buffer("index", torch.arange(81) % 25)

    def forward(self, x):
        return x + self.table.view(-1)[self.index].view(9, 9)
"""
)


def test_a_table_that_a_buffer_of_indices_refers_to_does_not_vary(captured) -> None:
    assert captured(BIASED, "Biased").variable_sizes == ("N",)


EDGES = (
    HEAD
    + """\
# mtmc: x=f32[N,16] edges=i64[2,E]@0..11 N=12 E=40
def messages(x, edges):
    out = torch.zeros_like(x)
    return out.index_add(0, edges[1], x[edges[0]])
"""
)


def test_sizes_that_indices_do_not_refer_to_vary_whatever_the_range_of_the_indices(captured) -> None:
    """Only the rows of ``x`` must stay: the number of edges is larger than the range, but no index counts edges."""
    assert captured(EDGES, "messages").variable_sizes == ("E",)


@pytest.mark.parametrize("index", ["i // 2 + 3", "(i * 0.5).long()", "torch.where(i > 3, i, 9 - i)"])
def test_a_table_that_computed_values_of_an_input_refer_to_does_not_vary(captured, index: str) -> None:
    text = (
        HEAD + f"# mtmc: table=f32[V,16] i=i64[B]@0..9 V=10 B=32\ndef f(table, i):\n    return table[{index}] * 2.0\n"
    )
    assert captured(text, "f").variable_sizes == ("B",)


RELATIVE = (
    HEAD
    + """\
# mtmc: x=f32[N,16] init: span=4
class Relative(nn.Module):
    def __init__(self, span):
        super().__init__()
        self.span, self.table = span, nn.Embedding(2 * span + 1, 16)

    def forward(self, x):
        positions = torch.arange(x.shape[0], device=x.device)
        distances = (positions[:, None] - positions).clamp(-self.span, self.span) + self.span
        return x + self.table(distances).sum(1)
"""
)


def test_a_table_that_computed_indices_refer_to_does_not_vary(captured) -> None:
    capture = captured(RELATIVE.replace("init:", "N=12 init:"), "Relative")
    rows = str(next(item for item in capture.graph.inputs if item.kind is InputKind.PARAMETER).type.shape[0])
    assert capture.graph.sizes[rows] == 9
    assert rows not in capture.variable_sizes
    assert "N" in capture.variable_sizes


def test_a_dimension_whose_size_determines_the_indices_varies(captured) -> None:
    text = HEAD + "# mtmc: x=f32[N,5] N=12\ndef f(x):\n    return x[torch.argsort(x[:, 0])] * 2\n"
    assert "N" in captured(text, "f").variable_sizes


MODULE = (
    HEAD
    + """\
class Inner(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.register_buffer("shift", torch.zeros(width))
        self.slope = 0.1

    def forward(self, x):
        return torch.where(x > 0, x, x * self.slope) * self.gain + self.shift


# mtmc: x=f32[4,16] init: width=16
class Outer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList([Inner(width), Inner(width)])
        self.unused = nn.Linear(3, 3)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    # mtmc: x=f32[4,16] init: width=16
    def half(self, x, by=0.5):
        return self.norm(x) * by
"""
)


def test_parameters_and_buffers_that_are_read_are_inputs_with_their_access(captured) -> None:
    graph = captured(MODULE, "Outer").graph
    assert [(item.name, item.access, item.kind) for item in graph.inputs] == [
        ("x", "x", InputKind.ARGUMENT),
        ("layers_0_gain", "self.layers[0].gain", InputKind.PARAMETER),
        ("layers_1_gain", "self.layers[1].gain", InputKind.PARAMETER),
        ("norm_weight", "self.norm.weight", InputKind.PARAMETER),
        ("norm_bias", "self.norm.bias", InputKind.PARAMETER),
        ("layers_0_shift", "self.layers[0].shift", InputKind.BUFFER),
        ("layers_1_shift", "self.layers[1].shift", InputKind.BUFFER),
    ]
    assert set(graph.sizes) == {"s0"}, "the sizes of what is not read are none of the graph's"


def test_numbers_that_modules_read_from_their_attributes_are_constants(captured) -> None:
    constants = captured(MODULE, "Outer").graph.constants
    assert constants["self.layers[0].slope"] == 0.1
    assert constants["self.norm.eps"] == 1e-5
    assert constants["self.norm.normalized_shape"] == [16]


def test_a_method_other_than_forward_is_captured(captured) -> None:
    graph = captured(MODULE, "Outer.half").graph
    assert {item.access for item in graph.inputs} == {"x", "self.norm.weight", "self.norm.bias"}
    assert graph.numbers == (NumberArgument("by", "by", 0.5),)


def test_a_changed_argument_is_a_mutation_and_dropout_is_random(captured) -> None:
    text = HEAD + (
        "# mtmc: x=f32[8,48]\ndef f(x):\n    x.add_(1)\n    return torch.nn.functional.dropout(x, 0.5, True)\n"
    )
    capture = captured(text, "f")
    assert [mutation.input for mutation in capture.graph.mutations] == ["x"]
    assert capture.uses_random


def test_a_compiled_function_is_captured_without_torch_compile(captured) -> None:
    text = HEAD + "# mtmc: x=f32[8,48]\n@torch.compile\ndef f(x):\n    return torch.relu(x) + 1\n"
    assert [node.op for node in captured(text, "f").graph.nodes] == ["aten.relu.default", "aten.add.Tensor"]


def test_kernelbench_constructor_arguments_can_be_positional_and_named(captured) -> None:
    text = HEAD + (
        "class Model(nn.Module):\n    def __init__(self, scale, shift):\n        super().__init__()\n"
        "        self.scale, self.shift = scale, shift\n\n"
        "    def forward(self, x):\n        return torch.relu(x) * self.scale + self.shift\n\n\n"
        "def get_inputs():\n    return [torch.rand(8, 48)]\n\n\n"
        "def get_init_inputs():\n    return [[2.0], {'shift': 0.5}]\n"
    )
    constants = captured(text, "Model").graph.constants
    assert (constants["self.scale"], constants["self.shift"]) == (2.0, 0.5)


def test_a_text_without_generated_code_is_captured_under_the_name_of_the_file(
    captured, interpreter_worker, user_file
) -> None:
    """The file may contain kernels of an earlier run. Lines are those of the text without them."""
    from mtmc_lsp.capture.client import find_workload, run_capture
    from mtmc_lsp.source.targets import find_target

    path = user_file("raise RuntimeError('what is on disk is not run')\n")
    text = NAMED.encode()
    target = find_target(text, str(path), "named")
    graph = run_capture(find_workload(str(path), text, target), text, interpreter_worker, 120).graph
    assert [node.line for node in graph.nodes] == [7, 9, 9, 12]


BRANCHES = """
import torch
import torch.nn.functional as F


# mtmc: x=f32[B,T] B=8 T=16
def f(x):
    if x.shape[0] == 7:
        return x * 2
    return x.softmax(-1) if x.shape[1] > 1 else x * 3


# mtmc: q=f32[B,H,T,16] k=f32[B,H,S,16] v=f32[B,H,S,16] B=2 H=2 T=24 S=32
def attend(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=bool(q.shape[2] > 1))


# mtmc: x=f32[B,T] B=8 T=16
def steps(x):
    total = x[0]
    for i in range(1, 5):
        total = total * 0.9 + x[i] if i < x.shape[0] else total
    return total


# mtmc: x=f32[B,T,D] w=f32[E,D] B=8 T=16 D=32 E=48
def plain(x, w):
    folded = x.transpose(1, 2).contiguous().view(-1, x.shape[1]).sum(-1)
    return F.linear(x, w).mean(1), folded, torch.cat([x, x], 1)[:, 1:].flip(1), F.layer_norm(x, x.shape[-1:])
"""


ONLY_SIZES = """
import torch


# mtmc: q=f32[T,D] x=f32[B] T=12 D=8 B=4
def distances(q, x):
    i = torch.arange(q.shape[0], device=q.device)
    return (i[:, None] - i).abs() * 2, x + 1
"""


def test_an_argument_whose_sizes_alone_are_read_stays_an_input(captured) -> None:
    capture = captured(ONLY_SIZES, "distances")
    assert [item.name for item in capture.graph.inputs] == ["q", "x"]
    assert capture.graph.sizes == {"T": 12, "D": 8, "B": 4}
    assert verified(capture, fully_fused(capture, start(capture, ONLY_SIZES))).reason == ""


@pytest.mark.parametrize(
    ("name", "conditions"), [("f", ("B != 7", "T > 1")), ("attend", ("T > 1",)), ("steps", ("B > 4",)), ("plain", ())]
)
def test_sizes_with_other_behaviour_run_the_original_code(captured, name: str, conditions: tuple) -> None:
    """Attention of a single decoded token is not causal, but the export assumes that every size is at least 2."""
    assert captured(BRANCHES, name).graph.conditions == conditions


STEPS = """
import torch


# mtmc: x=f32[B,C,H,W] B=2 C=3 H=8 W=9
def f(x):
    steps = (x[:, :, 1:] - x[:, :, :-1]).abs().mean()
    return x[..., 2:].transpose(1, 2).reshape(-1) * steps, torch.cat([x, x], 2)[:, :, 1:]
"""


def test_calls_with_an_empty_intermediate_run_the_original_code(captured) -> None:
    """The mean of zero elements is NaN, and a kernel has no block for zero elements."""
    capture = captured(STEPS, "f")
    assert [text for text in capture.graph.conditions if text.endswith(" > 0")] == ["H - 1 > 0", "W - 2 > 0"]
    assert verified(capture, fully_fused(capture, start(capture, STEPS))).reason == ""


def test_a_kernel_is_refused_and_the_message_names_valid_targets(captured) -> None:
    text = "import triton\n\n\n@triton.jit\ndef k(x_ptr):\n    pass\n"
    with pytest.raises(TargetUnsupported, match="k is a Triton kernel, which has no graph") as caught:
        captured(text, "k")
    assert caught.value.where is not None and caught.value.where.line == 5


NAMED_ALIKE = """
import torch


# mtmc: logits=f32[B,T,V] labels=i64[B,T]@0..V-1 B=4 T=6 V=11
def picked(logits, labels):
    chosen, rejected = labels.chunk(2)
    one = logits.log_softmax(-1).gather(2, labels[..., None]).squeeze(2).sum(-1)
    return one * 2, chosen.sum(-1) - rejected.sum(-1)
"""


def test_a_size_is_constant_in_all_dimensions_with_its_name(captured) -> None:
    """Torch only requires that the index of a gather is not longer than the input, so it would keep two separate sizes."""
    graph = captured(NAMED_ALIKE, "picked").graph
    assert [str(item.type.shape[0]) for item in graph.inputs] == ["4", "4"]
    assert not graph.conditions, "that a size is no more than itself is no condition"
