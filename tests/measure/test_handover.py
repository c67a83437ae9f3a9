"""What one worker gives another arrives as it was, by file or in GPU memory, also where the taker is locked in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mtmc_lsp.core.errors import HandoverFailed
from mtmc_lsp.measure import handover

TAKER = """\
import json, os, sys
import torch
sys.path.insert(0, sys.argv[3])
from mtmc_lsp.core import sandbox
from mtmc_lsp.measure import handover
torch.zeros(1, device="cuda")
isolation = sandbox.enter([os.path.dirname(sys.argv[2])], gpu=True)
found = handover.take(sys.argv[1], "cuda")
# What it does to its copy, and to what it opened, must not matter.
handover.give({"twice": found["x"] * 2, "after": {"mask": found["mask"]}}, sys.argv[2], in_memory=True)
found["x"].zero_()
print(json.dumps({"full": isolation.is_full, "stride": found["x"].stride(), "row": found["row"].stride()}), flush=True)
sys.stdin.readline()
"""


def test_small_things_and_constants_go_by_file(tmp_path: Path) -> None:
    path = str(tmp_path / "value.pt")
    value = {"results": [torch.arange(6).view(2, 3).t(), None, 2.5, "a name"], "facts": [{"type": "Tensor"}]}
    handover.give(value, path, in_memory=True)
    found = handover.take(path, "cpu")
    assert torch.equal(found["results"][0], value["results"][0])
    assert found["results"][1:] == value["results"][1:]
    assert found["facts"] == value["facts"]
    assert not handover.is_large(value), "there is no GPU memory to leave it in"


@pytest.mark.gpu
def test_large_tensors_stay_in_gpu_memory_and_reach_a_process_that_is_locked_in(tmp_path: Path) -> None:
    own, theirs = tmp_path / "own", tmp_path / "theirs"
    own.mkdir()
    theirs.mkdir()
    x = torch.randn(4096, 4096, device="cuda").t()
    value = {
        "x": x,
        "mask": torch.rand(1 << 26, device="cuda") < 0.5,
        "row": torch.randn(1 << 24, device="cuda").expand(3, -1),
        "small": torch.ones(3, device="cuda"),
    }
    given, answered = str(own / "given.pt"), str(theirs / "answer.pt")
    handover.give(value, given, in_memory=True)
    assert os.path.getsize(given) < 1 << 20
    kept = x.clone()
    x.zero_()
    taker = subprocess.Popen(
        [sys.executable, "-c", TAKER, given, answered, str(Path(handover.__file__).parents[2])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert taker.stdin is not None
    assert taker.stdout is not None
    try:
        seen = json.loads(taker.stdout.readline())
        assert seen == {"full": True, "stride": [1, 4096], "row": [0, 1]}
        answer = handover.take(answered, "cuda")
        assert torch.equal(answer["twice"], kept * 2)
        assert answer["twice"].stride() == x.stride()
        assert torch.equal(answer["after"]["mask"], value["mask"])
        assert torch.equal(handover._elements(handover._offered[given][0], x.numel() * 4, x.dtype), kept.t().flatten())
        taker.stdin.write("\n")
    finally:
        taker.communicate(timeout=30)
    with pytest.raises(HandoverFailed, match="cannot be opened"):
        handover.take(answered, "cuda")
    free = torch.cuda.mem_get_info()[0]
    handover.withdraw(given)
    assert torch.cuda.mem_get_info()[0] >= free + x.numel() * 4
