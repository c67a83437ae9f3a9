"""How a file prepares its modules: dtype and mode, read from its statements."""

from __future__ import annotations

import textwrap

import pytest

from mtmc_lsp.core.workload import ModuleForm
from mtmc_lsp.source.targets import find_target
from mtmc_lsp.source.workload.module_usage import ModuleUsage, module_usage

CODE = """\
import torch
from torch import nn

HALF = torch.float16


class Block(nn.Module):
    def forward(self, x):
        return x


def step(x):
    return x


"""


def usage(statements: str, name: str = "Block") -> ModuleUsage | None:
    text = (CODE + textwrap.dedent(statements)).encode()
    return module_usage(text, find_target(text, "m.py", name))


@pytest.mark.parametrize(
    ("statements", "form"),
    [
        ("model = Block().to(torch.bfloat16).eval()", ModuleForm("bfloat16", False)),
        ("model = Block(4).half()\nmodel.train()", ModuleForm("float16", True)),
        ("model = Block()\nmodel = model.cuda()\nmodel.to('cuda', dtype=torch.bfloat16)", ModuleForm("bfloat16")),
        ("model = Block().half().float()", ModuleForm("float32")),
        ("model = Block().train(False)", ModuleForm("", False)),
        ("model = Block().to(HALF)", ModuleForm("float16")),
        ("with torch.no_grad():\n    y = Block().to('cuda').bfloat16()(x).float()", ModuleForm("bfloat16")),
        ("if __name__ == '__main__':\n    model = torch.compile(Block().bfloat16())", ModuleForm("bfloat16")),
        (
            "def main():\n    net = Block()\n    net.eval().half()\n    print(net(x).float())",
            ModuleForm("float16", False),
        ),
        ("first = Block().half()\nsecond = Block().half()", ModuleForm("float16")),
    ],
)
def test_method_calls_on_instances_set_dtype_and_mode(statements: str, form: ModuleForm) -> None:
    read = usage(statements)
    assert read is not None and read.form == form


@pytest.mark.parametrize(
    "statements",
    [
        "model = Block()",
        "model = Other().half()",
        "y = model.half()",
        "y = Block()(x).half()",
        "model = Block()\ny = model(x)\ny = y.half()",
        "first = Block().half()\nsecond = Block().bfloat16()",
        "class Outer(nn.Module):\n    def __init__(self):\n        self.block = Block().half()",
    ],
)
def test_results_other_classes_and_contradictions_set_nothing(statements: str) -> None:
    assert usage(statements) is None


def test_the_line_of_the_last_deciding_call_is_named() -> None:
    read = usage("model = Block()\nmodel.half()\nmodel.cuda()")
    assert read is not None and read.line == CODE.count("\n") + 2


def test_a_function_has_no_module() -> None:
    assert usage("step(x).half()", "step") is None


NESTED = """

class Layer(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(Layer(2), Layer(3))


"""


@pytest.mark.parametrize(
    ("statements", "form"),
    [
        ("model = Model().to('cuda', torch.bfloat16).eval()", ModuleForm("bfloat16", False)),
        ("def main():\n    model = Model()\n    model.half()", ModuleForm("float16")),
        ("model = Model().half()\nlayer = Layer().half()", ModuleForm("float16")),
        ("model = Model().half()\nblock = Block().bfloat16()", ModuleForm("bfloat16")),
    ],
)
def test_a_module_is_prepared_with_the_one_that_contains_it(statements: str, form: ModuleForm) -> None:
    read = usage(NESTED + textwrap.dedent(statements))
    assert read is not None and read.form == form


@pytest.mark.parametrize("statements", ["Model().half()\nLayer().float()", "Model()", "Layer().half()\nModel()"])
def test_modules_in_models_that_differ_are_not_prepared(statements: str) -> None:
    assert usage(NESTED + statements) is None


def test_a_class_that_contains_itself_or_is_contained_by_the_target_is_no_container() -> None:
    recursive = "\n\nclass Tree(nn.Module):\n    def grow(self):\n        return Tree()\n\n\ntree = Tree().half()\n"
    assert usage(recursive) is None
    read = usage(NESTED + "block = Block().half()", "Model")
    assert read is None
