"""Wrong now and then: by counts, clocks, chance, checksums and addresses; or results that later calls overwrite."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.adversarial_second.cases import Edit, Witness, table
from benchmarks.adversarial_second.witnesses import calls, inputs

BODY = "    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)\n"
HEAD = "def softmax(x):\n"


def wrong_if(condition: str, before: str = "", imports: str = "") -> list[Edit]:
    """``softmax`` of other values under a condition."""
    edits = [(HEAD, f"{before}{HEAD}"), (BODY, f"    if {condition}:\n        x = x * 1.5\n{BODY}")]
    return [("import torch\n", f"{imports}import torch\n"), *edits] if imports else edits


def over_time(seconds: float, number: int) -> Witness:
    """Calls with pauses between them."""

    def witness(reference: Any, candidate: Any) -> tuple[Any, Any]:
        (x,) = inputs("softmax")
        results = []
        for _ in range(number):
            results.append(candidate(x))
            time.sleep(seconds)
        return [reference(x)] * number, results

    return witness


def written_outside(reference: Any, candidate: Any) -> tuple[Any, Any]:
    """The same tensor with other contents, written through NumPy."""
    (x,) = inputs("softmax")
    before = candidate(x)
    view = x.numpy()
    view[:] = view[::-1].copy()
    return (reference(x.flip(0)), reference(x)), (before, candidate(x))


def hundreds(reference: Any, candidate: Any) -> tuple[Any, Any]:
    """Inputs that differ by chance until one has the wanted property."""
    x = torch.randn(400, 1, 40, generator=torch.Generator().manual_seed(0)).unbind()
    return [reference(each) for each in x], [candidate(each) for each in x]


COUNT = "calls = [0]\n\n\ndef counted():\n    calls[0] += 1\n    return calls[0]\n\n\n"
BUFFER = "buffers = {}\n\n\n"

CASES = table(
    "state",
    [
        ("after 60 calls, module", "softmax", wrong_if("counted() > 60", COUNT), calls("softmax", 80)),
        ("after 500 calls, module", "softmax", wrong_if("counted() > 500", COUNT), calls("softmax", 520, 2, 6)),
        ("every 17th call", "softmax", wrong_if("counted() % 17 == 0", COUNT), calls("softmax", 20)),
        ("every 97th call", "softmax", wrong_if("counted() % 97 == 0", COUNT), calls("softmax", 100)),
        (
            "after 100 calls, closure",
            "softmax",
            wrong_if(
                "next(counter) > 100",
                "def numbers():\n    n = 0\n    while True:\n        n += 1\n        yield n\n\n\ncounter = numbers()\n\n\n",
            ),
            calls("softmax", 120),
        ),
        (
            "after 100 calls, default argument",
            "softmax",
            [
                (HEAD, "def softmax(x, seen=[]):\n    seen.append(0)\n"),
                (BODY, f"    if len(seen) > 100:\n        x = x * 1.5\n{BODY}"),
            ],
            calls("softmax", 120),
        ),
        (
            "after 100 calls, function attribute",
            "softmax",
            [
                (HEAD, HEAD + "    softmax.calls = getattr(softmax, 'calls', 0) + 1\n"),
                (BODY, f"    if softmax.calls > 100:\n        x = x * 1.5\n{BODY}"),
            ],
            calls("softmax", 120),
        ),
        (
            "after 100 calls, attribute of the kernel",
            "softmax",
            [
                *wrong_if("softmax_kernel.calls > 100", "softmax_kernel.calls = 0\n\n\n"),
                ("    rows, cols", "    softmax_kernel.calls += 1\n    rows, cols"),
            ],
            calls("softmax", 120),
        ),
        (
            "after a million elements",
            "softmax",
            [
                *wrong_if("total[0] > 1000000", "total = [0]\n\n\n"),
                ("    rows, cols", "    total[0] += x.numel()\n    rows, cols"),
            ],
            calls("softmax", 30, 200, 200),
        ),
        (
            "the same shape for the 40th time",
            "softmax",
            [
                *wrong_if(
                    "shapes[tuple(x.shape)] > 40", "shapes = collections.Counter()\n\n\n", "import collections\n"
                ),
                ("    rows, cols", "    shapes[tuple(x.shape)] += 1\n    rows, cols"),
            ],
            calls("softmax", 50),
        ),
        (
            "instance counts its calls",
            "gated_norm",
            [
                ("        self.eps = eps\n", "        self.eps = eps\n        self.calls = 0\n"),
                (
                    "        x = x.contiguous()\n",
                    "        x = x.contiguous()\n        self.calls += 1\n        x = x + 0.5 if self.calls > 90 else x\n",
                ),
            ],
            lambda reference, candidate: _module_calls(reference, candidate, 100),
        ),
        (
            "class counts all instances",
            "gated_norm",
            [
                ("class GatedNorm(nn.Module):\n", "class GatedNorm(nn.Module):\n    made = 0\n\n"),
                (
                    "        self.eps = eps\n",
                    "        self.eps = eps\n        GatedNorm.made += 1\n        self.number = GatedNorm.made\n",
                ),
                (
                    "        x = x.contiguous()\n",
                    "        x = x.contiguous()\n        x = x + 0.5 if self.number > 20 else x\n",
                ),
            ],
            lambda reference, candidate: _many(reference, candidate, 25),
        ),
        (
            "half a second in four",
            "softmax",
            wrong_if("time.time() % 4 > 3.5", "", "import time\n"),
            over_time(0.4, 12),
        ),
        (
            "in a twentieth of each second",
            "softmax",
            wrong_if("time.time() % 1 < 0.05", "", "import time\n"),
            over_time(0.013, 120),
        ),
        (
            "one call in 300 by chance",
            "softmax",
            wrong_if("random.random() < 1 / 300", "", "import random\n"),
            calls("softmax", 3000, 2, 6),
        ),
        (
            "one call in 256 by the system's chance",
            "softmax",
            wrong_if("os.urandom(1) == b'7'", "", "import os\n"),
            calls("softmax", 3000, 2, 6),
        ),
        ("checksum of the contents", "softmax", wrong_if("int(x.sum() * 1000) % 61 == 7"), hundreds),
        (
            "last bits of the first element",
            "softmax",
            wrong_if("x.numel() > 1 and x.contiguous().view(torch.int32).flatten()[0] % 64 == 5"),
            hundreds,
        ),
        (
            "first element between 2.2 and 2.9",
            "softmax",
            wrong_if("x.numel() > 2 and 2.2 < float(x[0, 0]) < 2.9"),
            hundreds,
        ),
        ("address of the argument", "softmax", wrong_if("x.data_ptr() // 64 % 59 == 3"), calls("softmax", 400, 3, 40)),
        (
            "one result buffer for each shape",
            "softmax",
            [
                (HEAD, BUFFER + HEAD),
                (BODY, "    out = buffers.setdefault(x.shape, torch.empty(x.shape, dtype=x.dtype, device=x.device))\n"),
            ],
            calls("softmax", 3),
        ),
        (
            "eight result buffers in turn",
            "softmax",
            [
                (HEAD, BUFFER + HEAD),
                (
                    BODY,
                    "    turn = buffers['turn'] = (buffers.get('turn', 0) + 1) % 8\n    out = buffers.setdefault((turn, x.shape), "
                    "torch.empty(x.shape, dtype=x.dtype, device=x.device))\n",
                ),
            ],
            calls("softmax", 12),
        ),
        (
            "sixty-four result buffers in turn",
            "softmax",
            [
                (HEAD, BUFFER + HEAD),
                (
                    BODY,
                    "    turn = buffers['turn'] = (buffers.get('turn', 0) + 1) % 64\n    out = buffers.setdefault((turn, x.shape), "
                    "torch.empty(x.shape, dtype=x.dtype, device=x.device))\n",
                ),
            ],
            calls("softmax", 80),
        ),
        (
            "one arena for small results",
            "softmax",
            [
                (HEAD, "arena = torch.empty(1 << 18)\nused = [0]\n\n\n" + HEAD),
                (
                    BODY,
                    "    if used[0] + x.numel() > arena.numel():\n        used[0] = 0\n    out = arena[used[0] : used[0] + x.numel()].view(x.shape)\n"
                    "    used[0] += x.numel()\n",
                ),
            ],
            calls("softmax", 40, 100, 100),
        ),
        (
            "results kept by tensor and version",
            "softmax",
            [
                (HEAD, BUFFER + HEAD),
                (
                    BODY,
                    "    key = (id(x), x._version)\n    if key in buffers:\n        return buffers[key].clone()\n"
                    + BODY,
                ),
                ("    return out\n", "    buffers[key] = out.clone()\n    return out\n"),
            ],
            written_outside,
        ),
        (
            "results kept by sum and corners",
            "softmax",
            [
                (HEAD, BUFFER + HEAD),
                (
                    BODY,
                    "    key = (x.shape, float(x.sum()), float(x[0, 0]), float(x[-1, -1])) if x.numel() else None\n"
                    "    if key in buffers:\n        return buffers[key].clone()\n" + BODY,
                ),
                ("    return out\n", "    buffers[key] = out.clone()\n    return out\n"),
            ],
            lambda reference, candidate: _permuted(reference, candidate),
        ),
    ],
)


def _module_calls(reference: Any, candidate: Any, number: int) -> tuple[Any, Any]:
    """Many calls of one instance."""
    made, other = reference(64), candidate(64)
    other.load_state_dict(made.state_dict())
    x = torch.randn(1, 2, 64)
    return [made(x)] * number, [other(x) for _ in range(number)]


def _many(reference: Any, candidate: Any, number: int) -> tuple[Any, Any]:
    """Many instances, each called once."""
    made = reference(64)
    x = torch.randn(1, 2, 64)
    results = []
    for _ in range(number):
        other = candidate(64)
        other.load_state_dict(made.state_dict())
        results.append(other(x))
    return [made(x)] * number, results


def _permuted(reference: Any, candidate: Any) -> tuple[Any, Any]:
    """Whole numbers, then the same ones in another order."""
    x = torch.arange(40.0).view(4, 10) % 7
    other = x.clone()
    other[1:3] = x[1:3].flip(1)
    return (reference(x), reference(other)), (candidate(x), candidate(other))
