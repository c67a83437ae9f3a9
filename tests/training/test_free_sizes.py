"""Sizes that torch's own backward pass or its C++ code would fix stay sizes at run time."""

from __future__ import annotations

import pytest

from mtmc_lsp.verify.cases import FORWARD, Case
from tests.codegen.checker import Checker
from tests.training.targets import HEAD, cases, planned

FREE: dict[str, tuple[str, tuple[str, ...]]] = {
    "label smoothing": (
        """# mtmc: x=f32[B,V] t=i64[B]@0..V-1 B=16 V=40 grad=x
def f(x, t):
    return F.cross_entropy(x, t, label_smoothing=0.1)
""",
        ("B", "V"),
    ),
    "label smoothing of images with weights": (
        """# mtmc: x=f32[B,5,H,W] t=i64[B,H,W]@0..4 w=f32[5]@0..1 B=2 H=6 W=4 grad=x
def f(x, t, w):
    return F.cross_entropy(x, t, w, ignore_index=2, label_smoothing=0.2)
""",
        ("B", "H", "W"),
    ),
    "smoothed probabilities": (
        """# mtmc: x=f32[B,V] t=f32[B,V] B=8 V=24 grad=x
def f(x, t):
    return F.cross_entropy(x, t.softmax(-1), reduction="none", label_smoothing=0.1)
""",
        ("B", "V"),
    ),
    "probabilities with weights of classes": (
        """# mtmc: x=f32[B,V,S] t=f32[B,V,S] w=f32[V]@0.5..2 B=4 V=24 S=3 grad=x
def f(x, t, w):
    p = t.softmax(1)
    return F.cross_entropy(x, p, w), F.cross_entropy(x, p, reduction="sum")
""",
        ("B", "V", "S"),
    ),
    "one hot": (
        """# mtmc: x=f32[B,V] t=i64[B]@0..V-1 B=16 V=24 grad=x
def f(x, t):
    return 1 - (F.one_hot(t, x.size(1)) * x.softmax(-1)).sum(-1)
""",
        ("B", "V"),
    ),
    "instance norm": (
        """class f(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm2d(6, affine=True)

    # mtmc: x=f32[B,6,H,W] B=2 H=6 W=8 grad=x
    def forward(self, x):
        return F.silu(self.norm(x))
""",
        ("B", "H", "W"),
    ),
    "halves of a batch": (
        """# mtmc: logp=f32[B,S] kept=f32[B,S] B=8 S=12 grad=logp
def f(logp, kept):
    chosen, rejected = (logp * kept).sum(-1).chunk(2, 0)
    return -F.logsigmoid(0.1 * (chosen - rejected)).mean()
""",
        ("B_div_2", "S"),
    ),
    "parts of a symbolic size": (
        """# mtmc: x=f32[B,S,8] B=2 S=12 grad=x
def f(x):
    first, second = torch.cat((x, x.sin()), 1).split(x.shape[1], 1)
    return first * second
""",
        ("B", "S"),
    ),
    "groups of rewards": (
        """# mtmc: logp=f32[B,S] rewards=f32[B] B=8 S=12 grad=logp
def f(logp, rewards, size=4):
    grouped = rewards.view(-1, size)
    advantages = (grouped - grouped.mean(1, keepdim=True)).view(-1, 1)
    return -(logp.exp() * advantages).mean()
""",
        ("B_div_4", "S"),
    ),
    "a batch norm": (
        """class f(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(4)

    # mtmc: x=f32[B,4,H,W] B=2 H=6 W=8 grad=x
    def forward(self, x):
        return F.relu(self.norm(x))
""",
        ("B", "H", "W"),
    ),
    "a convolution": (
        """class f(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8)

    # mtmc: x=f32[B,4,H,W] B=2 H=6 W=8 grad=x
    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))
""",
        ("B", "H", "W"),
    ),
    "a convolution with a stride": (
        """class f(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3, stride=2, padding=1)

    # mtmc: x=f32[B,4,L] B=2 L=12 grad=x
    def forward(self, x):
        return torch.tanh(self.conv(x))
""",
        ("B", "L_div_2"),
    ),
    "images of double size": (
        """# mtmc: x=f32[B,3,H,W] B=2 H=6 W=4 grad=x
def f(x):
    return F.interpolate(x.sin(), scale_factor=2) * F.interpolate(x, scale_factor=2, mode="bilinear")
""",
        ("B", "H", "W"),
    ),
    "images of the size of others": (
        """# mtmc: x=f32[B,3,H,W] y=f32[B,3,2*H,2*W] B=2 H=4 W=6 grad=x,y
def f(x, y):
    return y + F.interpolate(x, size=y.shape[-2:], mode="bilinear", align_corners=True)
""",
        ("B", "H", "W"),
    ),
    "two tensors that are flattened": (
        """class f(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)

    # mtmc: i=i64[B,S]@0..19 t=i64[B,S]@0..19 B=2 S=6 grad=parameters
    def forward(self, i, t):
        logits = self.embedding(i) @ self.embedding.weight.t()
        return F.cross_entropy(logits.view(-1, logits.size(-1)), t.view(-1))
""",
        ("B", "S"),
    ),
}


@pytest.mark.parametrize("name", FREE)
def test_sizes_of_the_workload_vary_in_both_passes(checker: Checker, name: str) -> None:
    text, free = FREE[name]
    capture = checker.capture(HEAD + text)
    assert capture.graph.backward is not None, capture.workload.assumed
    # Sizes without a name are those of parameters.
    assert tuple(size for size in capture.variable_sizes if not size.startswith("s")) == free, capture.workload.assumed
    assert checker.first_failure(capture, planned(capture), cases(capture)) == ""


def test_ignored_labels_are_no_part_of_a_smoothed_loss(checker: Checker) -> None:
    text = FREE["label smoothing"][0].replace("@0..V-1", "@-1..V-1").replace("label_sm", "ignore_index=-1, label_sm")
    capture = checker.capture(HEAD + text)
    assert checker.first_failure(capture, planned(capture), cases(capture)) == ""


def test_interpolation_of_infinite_values_is_that_of_eager_mode(checker: Checker) -> None:
    capture = checker.capture(HEAD + FREE["images of the size of others"][0])
    every = [Case(dict(capture.graph.sizes), "infinite", seed, FORWARD) for seed in range(4)]
    assert checker.first_failure(capture, planned(capture), every) == ""
