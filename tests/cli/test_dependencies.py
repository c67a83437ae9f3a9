"""A version is used only while everything that it was computed from is as it was: the file is edited after ``--apply``, and run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runner import environment, mtmc, project

from mtmc_lsp.verify.worker.interpreter.source import on_cpu

CFG = """\
SCALE = 2.0


class Config:
    alpha = 0.5


def third(x):
    import late

    return late.same(x) * SCALE
"""
LATE = """\
def same(x):
    return x
"""
MODEL = """\
import os

import torch

import cfg
from cfg import Config, third

A = 3
K = A * 1
D = 7.0


def helper(x, d=D):
    return x + d


class Base(torch.nn.Module):
    gain = 1.5

    def scaled(self, x):
        return x * self.gain


# mtmc: x=f32[8,48]
class Block(Base):
    def forward(self, x):
        return torch.softmax(torch.relu(self.scaled(x)) * K, -1)


def make(s):
    def inner(x):
        return x * s

    return inner


times = make(0.25)


# mtmc: x=f32[8,48]
def f(x):
    y = helper(torch.relu(x)) * K * cfg.SCALE + Config.alpha
    y = times(third(y))
    if os.environ.get("MODE") == "sum":
        y = y + torch.sin(x)
    return torch.softmax(y, -1)
"""
CHANGES: dict[str, tuple[str, str, str, str]] = {
    "nothing": ("", "", "", ""),
    "comments and layout": ("f Block", "model.py", "    return x + d", "    # shifted\n    return (x+d)"),
    "a global": ("f Block", "model.py", "K = A * 1", "K = A * 2"),
    "what a global is computed from": ("f Block", "model.py", "A = 3", "A = 1"),
    "a helper": ("f", "model.py", "return x + d", "return x * d"),
    "the default of a helper": ("f", "model.py", "D = 7.0", "D = torch.pi"),
    "a closure": ("f", "model.py", "make(0.25)", "make(0.75)"),
    "the function in a closure": ("f", "model.py", "return x * s\n", "return x - s * x.exp()\n"),
    "another module's constant": ("f", "cfg.py", "SCALE = 2.0", "SCALE = 0.25"),
    "a class attribute": ("f", "cfg.py", "alpha = 0.5", "alpha = __import__('torch').ones(48).cumsum(0)"),
    "another module's function": ("f", "cfg.py", "(x) * SCALE", "(x) / SCALE"),
    "a module that the first call imports": ("f", "late.py", "return x", "return x + 1"),
    "the own body of a function": ("f", "model.py", "helper(torch.relu(x))", "helper(torch.sin(x))"),
    "a class attribute of a module": ("Block", "model.py", "gain = 1.5", "gain = 0.5"),
    "a method of a base class": ("Block", "model.py", "x * self.gain", "x.sin() * self.gain"),
    "the own body of a module": ("Block", "model.py", "torch.relu(self", "torch.sin(self"),
    "an environment variable": ("f", "MODE", "", "sum"),
    "a constant at run time": ("f", "cfg", "", ""),
    "a global at run time": ("f Block", "model", "", ""),
    "a global that is gone": ("helper", "model", "", ""),
}
"""For each change the targets whose kernels must not run, the file, the old text and the new one."""
DRIVER = """
import importlib, json, os, sys
import torch

torch.manual_seed(0)
changes, out = json.load(open("changes.json")), {}
files = {name: open(name).read() for name in ("cfg.py", "late.py", "model.py", "optimised.py")}
for number, (what, (_, file, old, new)) in enumerate(changes.items()):
    reader, writer = os.pipe()
    if os.fork():
        os.close(writer)
        out[what] = json.loads(os.fdopen(reader).read())
        os.wait()
        continue
    folder = f"case{number}"
    os.mkdir(folder)
    for name, text in files.items():
        edited = text.replace(old, new) if file == name or file == "model.py" and name == "optimised.py" else text
        open(f"{folder}/{name}", "w").write(edited)
    sys.path.insert(0, folder)
    if file == "MODE":
        os.environ["MODE"] = new
    import cfg, model, optimised
    if file == "cfg":
        cfg.SCALE = 0.125
    if what == "a global at run time":
        model.K = optimised.K = 1
    if what == "a global that is gone":
        optimised.helper_2 = optimised.helper
        del optimised.helper
    launched = []
    for name in ("f_launch", "block_launch"):
        def launch(*given, own=getattr(optimised, name), name=name, **named):
            launched.append(name.removesuffix("_launch"))
            return own(*given, **named)
        setattr(optimised, name, launch)
    seen = {}
    with torch.no_grad():
        x = torch.randn(8, 48)
        for name in ("f", "Block"):
            own, ours = getattr(model, name), getattr(optimised, name)
            own, ours = (own(), ours()) if name == "Block" else (own, ours)
            try:
                seen[name] = float((ours(x) - own(x)).abs().max())  # the kernels run first
            except NameError as error:
                seen[name] = str(error)
    os.fdopen(writer, "w").write(json.dumps({"seen": seen, "launched": launched}))
    os._exit(0)
json.dump(out, open("out.json", "w"))
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each change led to: the difference to the edited file without kernels, and the launchers that were called."""
    folder: Path = tmp_path_factory.mktemp("dependencies")
    file = project(folder, MODEL)
    (folder / "cfg.py").write_text(CFG)
    (folder / "late.py").write_text(LATE)
    for name in ("f", "Block"):
        answer = mtmc(folder, "optimize", f"model.py::{name}", "--arch", "sm_90", "--apply", CUDA_VISIBLE_DEVICES="")
        assert answer.code == 0, answer.err
    optimised = file.read_text()
    assert "# mtmc: begin f" in optimised and "# mtmc: begin Block" in optimised
    (folder / "optimised.py").write_text(on_cpu(optimised, MODEL))
    file.write_text(MODEL)
    (folder / "changes.json").write_text(json.dumps(CHANGES))
    (folder / "driver.py").write_text(DRIVER)
    variables = {**environment(), "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "driver.py"], cwd=folder, env=variables, check=True, timeout=800)
    return json.loads((folder / "out.json").read_text())


@pytest.mark.parametrize("what", [what for what in CHANGES if what != "a global that is gone"])
def test_results_are_those_of_the_file_as_it_is_now(outcomes: Any, what: str) -> None:
    for name, difference in outcomes[what]["seen"].items():
        assert difference < 1e-5, f"{name} after a change of {what}"


@pytest.mark.parametrize("what", CHANGES)
def test_kernels_run_unless_what_they_were_computed_from_changed(outcomes: Any, what: str) -> None:
    refused = set() if what == "comments and layout" else set(CHANGES[what][0].lower().split())
    refused = {"f"} if refused == {"helper"} else refused
    assert set(outcomes[what]["launched"]) == {"f", "block"} - refused


def test_a_guard_does_not_raise_where_a_global_is_gone(outcomes: Any) -> None:
    """The user's own code does, in its own words."""
    assert outcomes["a global that is gone"]["seen"]["f"] == "name 'helper' is not defined"
