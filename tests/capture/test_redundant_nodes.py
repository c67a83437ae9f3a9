"""Operations that change nothing, and operations that compute the same twice, are not in the graph."""

from __future__ import annotations

import pytest

HEAD = "import torch\nimport torch.nn.functional as F\n\n\n# mtmc: x=f32[B,6,8] y=f32[B,6,8] i=i32[B,6,8] B=4\ndef f(x, y, i):\n"

NEUTRAL = {
    "a factor of one": "torch.relu(x * 1.0) / 1 - y",
    "an exponent of one": "torch.relu((x - y) ** 1)",
    "a subtracted zero": "torch.relu(x - y - 0.0)",
    "an added negative zero": "torch.relu(x - y + -0.0)",
    "an added zero of integers": "torch.relu(x - y) if (i + 0) is None else torch.relu(x - y)",
    "a permutation that keeps the order": "torch.relu(x.permute(0, 1, 2) - y.transpose(1, 1))",
    "a view of the same shape": "torch.relu(x.view(x.shape) - y.reshape(-1, 6, 8))",
    "a slice of everything": "torch.relu(x[:, :, :] - y[:])",
    "an expansion to the same shape": "torch.relu(x.expand(-1, 6, 8) - y)",
    "a dropout that drops nothing": "torch.relu(F.dropout(x - y, 0.0, True)).sub(F.dropout(x - y, 0.5, False))",
    "a result": "torch.relu(x - y) * 1.0",
}


def words(captured, body: str) -> list[str]:
    graph = captured(f"{HEAD}    {body}\n", "f").graph
    return sorted(node.word for node in graph.nodes)


@pytest.mark.parametrize("name", NEUTRAL)
def test_operations_that_change_nothing_vanish(name: str, captured) -> None:
    assert [word for word in words(captured, f"return {NEUTRAL[name]}") if word not in ("relu", "sub")] == []


OBSERVABLE = {
    "zero added to -0.0": ("return torch.relu(x + 0.0)", "add"),
    "negative zero subtracted from -0.0": ("return torch.relu(x - -0.0)", "sub"),
    "another dtype": ("return torch.relu(i * 1.0)", "mul"),
    "a returned copy of an input": ("return x * 1.0", "mul"),
    "a returned copy of another result": ("h = torch.relu(x)\n    return h, h * 1.0", "mul"),
    "another order": ("return torch.relu(x.permute(0, 2, 1))", "permute"),
    "a part": ("return torch.relu(x[:, 1:])", "slice"),
}


@pytest.mark.parametrize("name", OBSERVABLE)
def test_operations_whose_effect_can_be_observed_stay(name: str, captured) -> None:
    body, word = OBSERVABLE[name]
    assert word in words(captured, body)


def test_equal_operations_are_computed_once(captured) -> None:
    body = "a = torch.softmax(x @ y.transpose(1, 2), -1)\n    b = torch.softmax(x @ y.transpose(1, 2), -1)\n    return a + b.exp()"
    assert words(captured, body) == ["add", "exp", "matmul", "softmax", "transpose"]


def test_equal_regions_of_calls_are_computed_once(captured) -> None:
    text = HEAD.replace(
        "# mtmc", "def norm(x):\n    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()\n\n\n# mtmc"
    )
    graph = captured(f"{text}    return norm(x) * y + torch.relu(norm(x))\n", "f").graph
    assert sorted(node.word for node in graph.nodes) == ["add", "add", "div", "mean", "mul", "pow", "relu", "sqrt"]


@pytest.mark.parametrize(
    "body",
    [
        "return torch.relu(x), torch.relu(x)",
        "return torch.relu(x) + F.dropout(y, 0.5, True), torch.relu(y) * F.dropout(y, 0.5, True)",
        "return x * 2, x * 2.0",
        "return x / 0.0, x / -0.0",
    ],
)
def test_results_random_numbers_and_different_constants_stay_apart(body: str, captured) -> None:
    found = words(captured, body)
    assert len(found) == sum(body.count(word) for word in ("relu", "dropout", " * ", " + ", " / "))
