"""Loops in other forms of statements: appends to items, ``continue``, inner loops over modules, lists read by later loops."""

from __future__ import annotations

import pytest

from tests.codegen.harness import verified
from tests.planning.situations import fully_fused, start

STATEMENTS = """
import torch
import torch.nn as nn
import torch.nn.functional as F


# mtmc: x=f32[B,T,D] B=2 T=18 D=5
def extended_list(x):
    top = torch.full_like(x[:, 0], -float("inf"))
    outs = []
    for x_t in x.unbind(dim=1):
        top = torch.maximum(top, x_t)
        outs += [top]
    return torch.stack(outs, 1)


# mtmc: x=f32[B,T,D] B=2 T=18 D=5
def lists_in_a_dictionary(x):
    outputs = {"h": [], "y": []}
    h = torch.zeros_like(x[:, 0])
    for x_t in x.unbind(1):
        h = 0.5 * h + x_t
        outputs["h"].append(h)
        outputs["y"].append(torch.tanh(h))
    return {name: torch.stack(items, 1) for name, items in outputs.items()}


# mtmc: x=f32[B,T] B=2 T=20
def first_step_apart(x):
    s = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        if t == 0:
            s = x[:, 0]
            continue
        s = 0.5 * s + x[:, t]
    return s


# mtmc: logits=f32[B,T,K] changes=f32[K,K] B=2 T=18 K=5
def greedy_choices(logits, changes):
    chosen = torch.zeros_like(logits[:, 0])
    choices = []
    for t in range(logits.shape[1]):
        scores = logits[:, t] + chosen @ changes
        index = scores.argmax(dim=-1)
        worst = torch.argmin(scores, 1, keepdim=True)
        chosen = F.one_hot(index, logits.shape[2]).to(logits.dtype)
        choices.append(index + 10 * worst.squeeze(1))
    return torch.stack(choices, 1)


# mtmc: x=f32[B,T,D] B=2 T=18 D=6
class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.decays = nn.ParameterList([nn.Parameter(torch.full((6,), 0.2 * i)) for i in range(1, 4)])

    def forward(self, x):
        states = [torch.zeros_like(x[:, 0]) for _ in self.decays]
        outs = []
        for x_t in x.unbind(1):
            for i, decay in enumerate(self.decays):
                states[i] = decay * states[i] + x_t
                x_t = torch.tanh(states[i])
            outs.append(x_t)
        return torch.stack(outs, 1)
"""
TWO_LOOPS = """
import torch


# mtmc: x=f32[B,T,D] B=2 T=18 D=5
def there_and_back(x):
    h = torch.zeros_like(x[:, 0])
    outs = []
    for x_t in x.unbind(1):
        h = torch.tanh(0.5 * h + x_t)
        outs.append(h)
    total = torch.zeros_like(h)
    back = []
    for h in reversed(outs):
        total = 0.9 * total + h
        back.append(total)
    back.reverse()
    return torch.stack(back, 1)


# mtmc: scores=f32[B,T,K] changes=f32[K,K] B=2 T=18 K=5
def best_path(scores, changes):
    best = scores[:, 0]
    history = []
    for t in range(1, scores.shape[1]):
        best, index = (best.unsqueeze(2) + changes).max(dim=1)
        best = best + scores[:, t]
        history.append(index)
    last = best.argmax(1)
    path = [last]
    for index in reversed(history):
        last = index.gather(1, last.unsqueeze(1)).squeeze(1)
        path.append(last)
    path.reverse()
    return torch.stack(path, 1)
"""


@pytest.mark.parametrize(
    "name", ["extended_list", "lists_in_a_dictionary", "first_step_apart", "greedy_choices", "Layers"]
)
def test_a_loop_in_another_form_is_kept_with_the_results_of_the_users_code(name: str, captured) -> None:
    capture = captured(STATEMENTS, name)
    assert len([node for node in capture.graph.nodes if node.loop is not None]) == 1
    assert "unrolled" not in " ".join(capture.workload.assumed)
    assert verified(capture, fully_fused(capture, start(capture, STATEMENTS))).reason == ""


JOINED = """
import torch


# mtmc: x=f32[B,T] B=18 T=18
def numpy_axis(x):
    total = torch.zeros_like(x[:, 0])
    outs = []
    for t in reversed(range(x.shape[1])):
        total = 0.9 * total + x[:, t]
        outs.append(total)
    return torch.stack(outs[::-1], axis=1)


# mtmc: x=f32[B,T,D] B=3 T=18 D=4
def joined_in_other_ways(x):
    h = torch.zeros_like(x[:, 0])
    rows, columns, pieces, scalars = [], [], [], []
    for x_t in x.unbind(1):
        h = torch.tanh(0.5 * h + x_t)
        rows.append(h)
        columns.append(h[:, 0])
        pieces.append(h)
        scalars.append(h[0, 0])
    joined = torch.concatenate(pieces, axis=-1)
    return torch.vstack(rows), torch.hstack(rows), torch.column_stack(columns), joined, torch.hstack(scalars)


# mtmc: values=f32[B,T] rewards=f32[B,T] B=4 T=18
def numbers_among_the_arguments(values, rewards, gamma: float = 0.99, decay: float = 0.95):
    total, outs = 0, []
    for t in reversed(range(values.shape[1])):
        following = values[:, t + 1] if t < values.shape[1] - 1 else 0.0
        total = rewards[:, t] + gamma * following - values[:, t] + gamma * decay * total
        outs.append(total)
    return torch.stack(outs[::-1], axis=1) + values
"""


@pytest.mark.parametrize("name", ["numpy_axis", "joined_in_other_ways", "numbers_among_the_arguments"])
def test_lists_are_joined_along_the_dimension_that_torch_uses(name: str, captured) -> None:
    capture = captured(JOINED, name)
    assert len([node for node in capture.graph.nodes if node.loop is not None]) == 1
    assert "unrolled" not in " ".join(capture.workload.assumed)
    assert verified(capture, fully_fused(capture, start(capture, JOINED))).reason == ""


@pytest.mark.parametrize("name", ["there_and_back", "best_path"])
def test_a_loop_over_the_list_of_an_earlier_loop_is_kept(name: str, captured) -> None:
    capture = captured(TWO_LOOPS, name)
    assert len([node for node in capture.graph.nodes if node.loop is not None]) == 2
    assert "unrolled" not in " ".join(capture.workload.assumed)
    assert verified(capture, fully_fused(capture, start(capture, TWO_LOOPS))).reason == ""


def test_a_continue_in_the_middle_of_a_choice_leaves_the_loop_unrolled(captured) -> None:
    text = """
import torch


# mtmc: x=f32[B,T] B=2 T=17
def nested_choice(x):
    s = torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        if t > 2:
            if t == 4:
                continue
            s = s * 0.5
        s = s + x[:, t]
    return s
"""
    capture = captured(text, "nested_choice")
    assert all(node.loop is None for node in capture.graph.nodes)
    assert verified(capture, fully_fused(capture, start(capture, text))).reason == ""


STACKED = """
import torch
import torch.nn as nn


# mtmc: x=f32[B,T,D] B=2 T=20 D=4
class StackedCells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList([nn.GRUCell(4, 4) for _ in range(3)])

    def forward(self, x):
        states = [torch.zeros_like(x[:, 0]) for _ in self.cells]
        outs = []
        for x_t in x.unbind(1):
            for i, cell in enumerate(self.cells):
                states[i] = x_t = cell(x_t, states[i])
            outs.append(x_t)
        return torch.stack(outs, 1), states


# mtmc: x=f32[B,T,D] B=2 T=20 D=4
class NewListOfStates(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTMCell(4, 4) for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(4) for _ in range(2)])

    def forward(self, x):
        state = [(x.new_zeros(x.shape[0], 4), x.new_zeros(x.shape[0], 4)) for _ in self.cells]
        outs = []
        for t in range(x.shape[1]):
            y = x[:, t]
            new_state = []
            for cell, norm, (h, c) in zip(self.cells, self.norms, state):
                h, c = cell(y, (h, c))
                new_state.append((h, c))
                y = norm(h)
            state = new_state
            outs.append(y)
        return torch.stack(outs, 1), state


# mtmc: x=f32[B,T] B=2 T=20
class SplitSequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.LSTMCell(1, 5)
        self.second = nn.LSTMCell(5, 4)
        self.linear = nn.Linear(4, 1)

    def forward(self, x):
        h, c = torch.zeros(x.size(0), 5), torch.zeros(x.size(0), 5)
        g, d = torch.zeros(x.size(0), 4), torch.zeros(x.size(0), 4)
        outs = []
        for x_t in x.split(1, dim=1):
            h, c = self.first(x_t, (h, c))
            before = g
            g, d = self.second(h, (g, d))
            outs += [self.linear(g) + before.mean(1, keepdim=True)]
        return torch.cat(outs, dim=1), before


# mtmc: x=f32[B,T,D] B=2 T=20 D=4
class DelayedLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lower, self.upper = nn.GRUCell(4, 4), nn.GRUCell(4, 4)

    def forward(self, x):
        below = last = above = torch.zeros_like(x[:, 0])
        outs = []
        for x_t in x.unbind(1):
            above = self.upper(below + last, above)
            last = below
            below = self.lower(x_t, below)
            outs.append(above)
        return torch.stack(outs, 1), below, last


# mtmc: x=f32[B,T,D] B=2 T=20 D=4
class Feedback(nn.Module):
    def __init__(self):
        super().__init__()
        self.lower, self.upper = nn.GRUCell(8, 4), nn.GRUCell(4, 4)

    def forward(self, x):
        below = above = torch.zeros_like(x[:, 0])
        outs = []
        for x_t in x.unbind(1):
            below = self.lower(torch.cat((x_t, above), 1), below)
            above = self.upper(below, above)
            outs.append(above)
        return torch.stack(outs, 1)
"""


@pytest.mark.parametrize(
    ("name", "count"),
    [("StackedCells", 3), ("NewListOfStates", 2), ("SplitSequence", 2), ("DelayedLayer", 2), ("Feedback", 1)],
)
def test_stacked_layers_are_one_loop_each_where_no_layer_reads_a_higher_one(name: str, count: int, captured) -> None:
    capture = captured(STACKED, name)
    loops = [node.loop for node in capture.graph.nodes if node.loop is not None]
    assert len(loops) == count
    candidate = fully_fused(capture, start(capture, STACKED))
    assert verified(capture, candidate).reason == ""
    for layer in loops if name == "StackedCells" else ():
        # The product of the input runs before the loop.
        assert len([node for node in layer.nodes if node.word in ("linear", "addmm", "mm", "matmul")]) == 1
    assert "for step in range(" not in candidate.code.block


def test_elementwise_layers_stay_in_one_loop(captured) -> None:
    capture = captured(STATEMENTS, "Layers")
    assert len([node for node in capture.graph.nodes if node.loop is not None]) == 1


PARTS = """
import torch


def field(y):
    a, b, c = y.unbind(-1)
    return torch.stack([10.0 * (b - a), a * (1.5 - c) - b, a * b - 2.0 * c], -1)


# mtmc: y=f32[B,3] B=5
def path(y, step: float = 0.01):
    path = [y]
    for _ in range(20):
        middle = y + 0.5 * step * field(y)
        first, *_, last = torch.unbind(middle, dim=1)
        y = y + step * field(middle) + 0.001 * (first - last).unsqueeze(1)
        path.append(y)
    return torch.stack(path)
"""


def test_a_state_is_read_by_its_parts(captured) -> None:
    capture = captured(PARTS, "path")
    assert len([node for node in capture.graph.nodes if node.loop is not None]) == 1
    assert "unrolled" not in " ".join(capture.workload.assumed)
    assert verified(capture, fully_fused(capture, start(capture, PARTS))).reason == ""
