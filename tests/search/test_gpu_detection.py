"""The GPU that torch would use is detected without importing torch; tests use fake builds of torch and a fake driver."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mtmc_lsp.app.interpreter import gpu_of

DRIVER = """
#include <string.h>
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 7; return DEVICES ? 0 : 101; }
int cuDeviceGetName(char *name, int size, int device) { strncpy(name, device == 7 ? "Pretended GPU" : "?", size); return 0; }
"""


@pytest.fixture
def torch_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``torch/version.py`` of a build that the interpreter finds before its own."""
    version = tmp_path / "site/torch/version.py"
    version.parent.mkdir(parents=True)
    (version.parent / "__init__.py").write_text("raise SystemExit('it was imported')")
    version.write_text("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    return version


def drive(folder: Path, devices: int) -> None:
    """Build the driver's library there."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    command = [compiler, "-shared", "-fPIC", f"-DDEVICES={devices}", "-x", "c", "-", "-o", str(folder / "libcuda.so.1")]
    subprocess.run(command, input=DRIVER, text=True, check=True)


def test_the_driver_names_its_first_device(torch_of: Path, tmp_path: Path) -> None:
    drive(tmp_path, devices=1)
    assert gpu_of(sys.executable) == "Pretended GPU"


def test_without_a_device_there_is_no_gpu(torch_of: Path, tmp_path: Path) -> None:
    drive(tmp_path, devices=0)
    assert gpu_of(sys.executable) == ""


@pytest.mark.parametrize("cuda", ["None", "'13.0'"])
def test_a_torch_that_cannot_use_the_driver_uses_no_gpu(torch_of: Path, tmp_path: Path, cuda: str) -> None:
    drive(tmp_path, devices=1)
    torch_of.write_text(f"cuda: Optional[str] = {cuda}\nhip: Optional[str] = None\n")
    assert gpu_of(sys.executable) == ""


def test_nothing_is_said_of_other_builds_or_of_none(torch_of: Path, tmp_path: Path) -> None:
    torch_of.write_text("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n")
    assert gpu_of(sys.executable) is None
    torch_of.write_text("")
    assert gpu_of(sys.executable) is None
    assert gpu_of(str(tmp_path / "no-python")) is None
    assert gpu_of(shutil.which("false") or os.devnull) is None
