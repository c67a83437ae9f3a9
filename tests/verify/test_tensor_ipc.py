"""Tensors shared between workers arrive unchanged, through files or GPU memory, also in a sandboxed process."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtmc_lsp.core.errors import TensorSharingFailed
from mtmc_lsp.process.worker import tensor_ipc

TAKER = """\
import json, os, sys
import torch
sys.path.insert(0, sys.argv[3])
from mtmc_lsp.process import sandbox
from mtmc_lsp.process.worker import tensor_ipc
torch.zeros(1, device="cuda")
isolation = sandbox.enter([os.path.dirname(sys.argv[2])], gpu=True)
found = tensor_ipc.import_(sys.argv[1], "cuda")
# What it does to its copy, and to what it opened, must not matter.
tensor_ipc.export_({"twice": found["x"] * 2, "after": {"mask": found["mask"]}}, sys.argv[2], in_memory=True)
found["x"].zero_()
print(json.dumps({"full": isolation.is_full, "stride": found["x"].stride(), "row": found["row"].stride()}), flush=True)
sys.stdin.readline()
"""


def test_small_things_and_constants_go_by_file(tmp_path: Path) -> None:
    path = str(tmp_path / "value.pt")
    value = {"results": [torch.arange(6).view(2, 3).t(), None, 2.5, "a name"], "facts": [{"type": "Tensor"}]}
    tensor_ipc.export_(value, path, in_memory=True)
    found = tensor_ipc.import_(path, "cpu")
    assert torch.equal(found["results"][0], value["results"][0])
    assert found["results"][1:] == value["results"][1:]
    assert found["facts"] == value["facts"]
    assert not tensor_ipc.is_large(value), "there is no GPU memory to leave it in"


def left(content: Any, packed: torch.Tensor | None = None) -> dict[str, Any]:
    return {"content": content, tensor_ipc.PACKED: packed}


MANY = {
    "whole": lambda: torch.arange(12.0).view(3, 4),
    "transposed": lambda: torch.arange(12.0).view(3, 4).t(),
    "expanded": lambda: torch.arange(3.0).expand(4, 3),
    "with gaps": lambda: torch.arange(24).view(4, 6)[:, ::2],
    "empty": lambda: torch.empty(0, 5),
    "one number": lambda: torch.tensor(2.5, dtype=torch.float64),
    "half": lambda: torch.arange(7).to(torch.bfloat16),
    "truth values": lambda: torch.tensor([True, False, True]),
    "conjugate": lambda: torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "sparse": lambda: torch.eye(3).to_sparse(),
}


def test_many_tensors_of_any_layout_arrive_as_they_were(tmp_path: Path) -> None:
    path, values = str(tmp_path / "values.pt"), {name: make() for name, make in MANY.items()}
    tensor_ipc.export_({"inputs": values, "again": [values["half"]]}, path, in_memory=False)
    found = tensor_ipc.import_(path, "cpu")
    for name, value in values.items():
        mine = found["inputs"][name]
        assert mine.dtype == value.dtype and mine.shape == value.shape
        if name == "sparse":
            mine, value = mine.to_dense(), value.to_dense()
        assert mine.stride() == value.stride() and torch.equal(mine, value)
    assert torch.equal(found["again"][0], values["half"])
    dense = [mine for name, mine in found["inputs"].items() if name not in ("sparse", "empty")]
    assert len({mine.untyped_storage().data_ptr() for mine in dense}) == 1, "one copy from a device for all of them"


@pytest.mark.parametrize(
    ("shape", "stride", "first"),
    [([200], [1], 0), ([4], [1], 512), ([2], [1 << 60], 0), ([2], [-1], 0), ([1], [1], -512), ([1], [1], 4)],
    ids=["longer", "behind the end", "far apart", "backwards", "in front", "between"],
)
def test_nothing_is_read_beside_what_was_packed(
    shape: list[int], stride: list[int], first: int, tmp_path: Path
) -> None:
    where = {tensor_ipc.OFFSET: first, "dtype": "float32", "shape": shape, "stride": stride}
    torch.save(left([where], torch.zeros(512, dtype=torch.uint8)), tmp_path / "results.pt")
    with pytest.raises(TensorSharingFailed, match=f"at {first} exceeds the 512 packed bytes"):
        tensor_ipc.import_(str(tmp_path / "results.pt"), "cpu")


BYTES = torch.zeros(512, dtype=torch.uint8)
WELL = {tensor_ipc.OFFSET: 0, "dtype": "float32", "shape": [2], "stride": [1]}
MALFORMED = {
    "something else": [torch.zeros(3)],
    "another mapping": {"content": 1},
    "no shape": left([{tensor_ipc.OFFSET: 0}], BYTES),
    "a shape that is none": left([{**WELL, "shape": 3}], BYTES),
    "a shape of words": left([{**WELL, "shape": ["a"]}], BYTES),
    "a stride that is no number of elements": left([{**WELL, "stride": [1.5]}], BYTES),
    "a stride too many": left([{**WELL, "stride": [1, 1]}], BYTES),
    "a place that is no number": left([{**WELL, tensor_ipc.OFFSET: "0"}], BYTES),
    "no such dtype": left([{**WELL, "dtype": "save"}], BYTES),
    "bytes that are none": left([WELL], [1, 2]),
    "bytes in rows": left([WELL], BYTES.view(2, 256)),
    "expanded bytes": left([WELL], BYTES[:1].expand(512)),
    "numbers for bytes": left([WELL], torch.zeros(512)),
    "an empty offer": left([], {}),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_file_of_something_else_is_refused(name: str, tmp_path: Path) -> None:
    torch.save(MALFORMED[name], tmp_path / "results.pt")
    with pytest.raises(TensorSharingFailed, match=r"is malformed|packed bytes|unknown dtype"):
        tensor_ipc.import_(str(tmp_path / "results.pt"), "cpu")


def test_what_was_withdrawn_is_not_taken_for_the_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file only says where the memory was; who then finds no file makes the value again."""
    freed: list[int] = []
    path = tmp_path / "inputs.pt"
    monkeypatch.setattr(tensor_ipc, "_driver", lambda: SimpleNamespace(cuMemFree_v2=lambda a: freed.append(a.value)))
    monkeypatch.setattr(tensor_ipc, "_shared", {str(path): [7, 8]})
    torch.save(left({"x": {tensor_ipc.HANDLE: "a handle"}}), path)
    tensor_ipc.release(str(path))
    assert freed == [7, 8] and not path.exists()
    tensor_ipc.export_({"x": torch.arange(3)}, str(path), in_memory=True)
    tensor_ipc.release(str(path))
    assert path.exists(), "what is in the file itself stays"


class PretendedDriver:
    """Opens any handle as an allocation of a given size that begins a little before the address; ``fails`` ends asking for it."""

    def __init__(self, size: int, *, before: int = 0, fails: int = 0) -> None:
        self.size, self.before, self.fails = size, before, fails
        self.open: list[int] = []

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> int:
        address._obj.value = 0x7F0000000000
        self.open.append(address._obj.value)
        return 0

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: Any) -> int:
        assert address.value in self.open
        base._obj.value, size._obj.value = address.value - self.before, self.size
        return self.fails

    def cuIpcCloseMemHandle(self, address: Any) -> int:
        self.open.remove(address.value)
        return 0


def offered(shape: list[int], stride: list[int]) -> dict[str, Any]:
    handle = base64.b64encode(bytes(64)).decode()
    return {tensor_ipc.HANDLE: handle, "dtype": "float32", "shape": shape, "stride": stride}


@pytest.mark.parametrize(
    ("shape", "stride", "driver", "said"),
    [
        (
            [1 << 20],
            [1],
            PretendedDriver(4 << 20, before=4),
            "4194304 bytes exceeds the shared allocation of 4194300 bytes",
        ),
        (
            [4, 4],
            [1 << 20, 1],
            PretendedDriver(3 << 22),
            "12582928 bytes exceeds the shared allocation of 12582912 bytes",
        ),
        ([2], [1 << 62], PretendedDriver(1 << 30), "exceeds the shared allocation"),
        ([8], [1], PretendedDriver(64, fails=1), r"is unknown \(CUDA error 1\)"),
        ([8], [-1], PretendedDriver(64), "invalid shape"),
    ],
    ids=["one element less", "a last row that is not there", "beyond all memory", "unknown", "backwards"],
)
def test_what_is_said_to_be_offered_is_not_read_beyond_the_memory_that_is_there(
    shape: list[int],
    stride: list[int],
    driver: PretendedDriver,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensor_ipc, "_driver", lambda: driver)
    monkeypatch.setattr(tensor_ipc, "_elements", lambda *_: pytest.fail("it was read"))
    torch.save(left({"results": [offered(shape, stride)]}), tmp_path / "results.pt")
    with pytest.raises(TensorSharingFailed, match=said):
        tensor_ipc.import_(str(tmp_path / "results.pt"), "cpu")
    assert not driver.open


def test_the_end_of_what_is_offered_may_be_the_end_of_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, values = PretendedDriver(4 * 13, before=4), torch.arange(12.0)
    monkeypatch.setattr(tensor_ipc, "_driver", lambda: driver)
    monkeypatch.setattr(tensor_ipc, "_elements", lambda address, size, dtype: values.clone()[: size // 4])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    made = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *arguments, device, **more: made(*arguments, **more))
    torch.save(left(offered([3, 4], [1, 3])), tmp_path / "results.pt")
    assert torch.equal(tensor_ipc.import_(str(tmp_path / "results.pt"), "cpu"), values.view(4, 3).t())
    assert not driver.open


LIED_TO = """\
import sys
import torch
sys.path.insert(0, sys.argv[2])
from mtmc_lsp.process.worker import tensor_ipc
torch.zeros(1, device="cuda")
try:
    tensor_ipc.import_(sys.argv[1], "cuda")
except tensor_ipc.TensorSharingFailed as error:
    print(error.message)
print(float(torch.ones(3, device="cuda").sum()))
"""


@pytest.mark.gpu
def test_memory_that_is_smaller_than_said_is_not_read_and_the_reader_goes_on(tmp_path: Path) -> None:
    path = str(tmp_path / "given.pt")
    tensor_ipc.export_({"x": torch.ones(1 << 24, device="cuda")}, path, in_memory=True)
    told = torch.load(path, weights_only=True)
    told["content"]["x"]["shape"] = [1 << 34]
    torch.save(told, path)
    arguments = [sys.executable, "-c", LIED_TO, path, str(Path(tensor_ipc.__file__).parents[3])]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=800)
    tensor_ipc.release(path)
    refused, alive = done.stdout.splitlines()
    assert refused.startswith(f"a tensor of {1 << 36} bytes exceeds the shared allocation of ")
    assert alive == "3.0", done.stderr


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
    tensor_ipc.export_(value, given, in_memory=True)
    assert os.path.getsize(given) < 1 << 20
    kept = x.clone()
    x.zero_()
    taker = subprocess.Popen(
        [sys.executable, "-c", TAKER, given, answered, str(Path(tensor_ipc.__file__).parents[3])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert taker.stdin is not None
    assert taker.stdout is not None
    try:
        seen = json.loads(taker.stdout.readline())
        assert seen == {"full": True, "stride": [1, 4096], "row": [0, 1]}
        answer = tensor_ipc.import_(answered, "cuda")
        assert torch.equal(answer["twice"], kept * 2)
        assert answer["twice"].stride() == x.stride()
        assert torch.equal(answer["after"]["mask"], value["mask"])
        assert torch.equal(
            tensor_ipc._elements(tensor_ipc._shared[given][0], x.numel() * 4, x.dtype), kept.t().flatten()
        )
        taker.stdin.write("\n")
    finally:
        taker.communicate(timeout=30)
    with pytest.raises(TensorSharingFailed, match="cannot be opened"):
        tensor_ipc.import_(answered, "cuda")
    free = torch.cuda.mem_get_info()[0]
    tensor_ipc.release(given)
    assert torch.cuda.mem_get_info()[0] >= free + x.numel() * 4
