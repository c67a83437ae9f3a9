"""``place = "sibling"``: the kernels go to ``NAME_kernels.py`` beside ``NAME.py``, as a user sees it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runner import environment, mtmc, project

from mtmc_lsp.source.compose import strip_generated
from mtmc_lsp.verify.worker.interpreter.source import on_cpu

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
SIBLING = '[tool.mtmc]\nplace = "sibling"\n'
TEXT = """\
from __future__ import annotations

import torch
from torch import nn

K = 2.0


def scaled(x):
    return x * K


# mtmc: x=f32[M,N] M=8 N=48
def two(x):
    return torch.relu(scaled(x)) + 1


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(48))

    # mtmc: x=f32[M,48] M=8
    def forward(self, x):
        return torch.tanh(x * self.gain) * K


if __name__ == "__main__":
    print(two(torch.full((2, 2), 3.0)).sum().item(), Gate()(torch.zeros(2, 48)).sum().item())
"""
IMPORT = "from model_kernels import two_fits, two_launch, two_triton  # mtmc: kernels"


def optimise(folder: Path, name: str, *options: str, file: str = "model.py") -> str:
    answer = mtmc(folder, "optimize", f"{file}::{name}", "--arch", "sm_90", "--apply", *options, **NO_GPU)
    assert answer.code == 0, answer.out + answer.err
    return answer.out


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder in which ``two`` was optimised, and what was printed."""
    folder = tmp_path_factory.mktemp("written")
    project(folder, TEXT, SIBLING)
    return folder, optimise(folder, "two")


@pytest.fixture
def folder(written: tuple[Path, str], tmp_path: Path) -> Path:
    """A copy of that folder."""
    copied = tmp_path / "copied"
    shutil.copytree(written[0], copied)
    return copied


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**environment(), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def on_the_cpu(folder: Path, name: str) -> None:
    """Let the guards accept CPU tensors in the files of a folder."""
    user, kernels = folder / f"{name}.py", folder / f"{name}_kernels.py"
    user.write_text(on_cpu(user.read_text(), TEXT))
    kernels.write_text(on_cpu(kernels.read_text(), ""))


def test_the_file_gets_one_import_and_the_dispatch_and_nothing_else_changes(written: tuple[Path, str]) -> None:
    folder, output = written
    text = (folder / "model.py").read_text()
    kernels = (folder / "model_kernels.py").read_text()
    added = [line for line in text.splitlines() if line not in TEXT.splitlines()]
    assert added == [
        IMPORT,
        "    if two_fits(x, __name__):  # mtmc: dispatch",
        "        return (two_triton if torch.compiler.is_compiling() else two_launch)(x)",
    ]
    assert [line for line in text.splitlines() if line not in added] == TEXT.splitlines()
    assert strip_generated(text.encode(), "two").decode() == TEXT
    assert kernels.startswith("# mtmc: Triton kernels of model.py.")
    assert kernels.count("@triton.jit") == 1
    assert "written to model.py and model_kernels.py" in output.replace("\n  ", " ")


def test_the_script_and_an_import_of_it_still_work(folder: Path) -> None:
    script = run(folder, "model.py")
    assert script.stdout == "28.0 0.0\n", script.stderr
    assert run(folder, "-m", "model").stdout == script.stdout
    imported = run(folder, "-c", "import model_kernels, model; print(model.two.__module__)")
    assert imported.stdout == "model\n", imported.stderr


def test_the_kernels_run_and_give_the_results_of_the_original(folder: Path) -> None:
    optimise(folder, "Gate")
    on_the_cpu(folder, "model")
    script = """
import warnings
warnings.simplefilter("error")
import torch, model
torch.manual_seed(0)
x = torch.randn(8, 48)
with torch.no_grad():
    torch.testing.assert_close(model.two(x), torch.relu(x * 2.0) + 1)
    torch.testing.assert_close(model.Gate()(x), torch.tanh(x) * 2.0)
"""
    # A guard that refuses would warn, and warnings are errors.
    done = run(folder, "-c", script, TRITON_INTERPRET="1", MTMC_GUARD="warn")
    assert done.returncode == 0, done.stderr


def test_a_changed_global_of_the_file_is_noticed_and_named(folder: Path) -> None:
    on_the_cpu(folder, "model")
    (folder / "model.py").write_text((folder / "model.py").read_text().replace("K = 2.0", "K = 5.0"))
    done = run(folder, "model.py", TRITON_INTERPRET="1", MTMC_GUARD="warn")
    assert done.stdout.startswith("64.0 "), done.stderr
    assert "model.py::two runs its original code: K is 5.0; the kernels were made for 2.0" in done.stderr


def test_a_program_without_the_module_runs_the_original_code(folder: Path) -> None:
    on_the_cpu(folder, "model")
    script = "import torch\nscope = {'__name__': 'nowhere'}\nexec(open('model.py').read(), scope)\n"
    done = run(folder, "-c", f"{script}print(scope['two'](torch.ones(1, 2)).tolist())", TRITON_INTERPRET="1")
    assert done.stdout == "[[3.0, 3.0]]\n", done.stderr


def test_why_calls_the_two_files_as_they_are(folder: Path) -> None:
    answer = mtmc(folder, "why", "model.py::two", **NO_GPU)
    assert answer.code == 0, answer.out + answer.err
    assert "the kernels run for 1 of 1 known calls" in answer.out
    (folder / "model.py").write_text((folder / "model.py").read_text().replace("K = 2.0", "K = 5.0"))
    answer = mtmc(folder, "why", "model.py::two", **NO_GPU)
    assert answer.code == 1
    assert "K is 5.0; the kernels were made for 2.0\n    two_fits: K == 2.0\n" in answer.out


@pytest.mark.slow
def test_a_second_target_shares_both_files_and_each_is_replaced_and_removed_alone(folder: Path) -> None:
    user, kernels = folder / "model.py", folder / "model_kernels.py"
    optimise(folder, "Gate")
    both = user.read_text(), kernels.read_text()
    names = "gate_fits, gate_launch, gate_triton, two_fits, two_launch, two_triton"
    assert f"from model_kernels import {names}  # mtmc: kernels" in both[0]
    assert both[0].count("import gate_fits") == 1
    assert both[1].count("import triton  # mtmc: import") == 1
    assert run(folder, "model.py").stdout == "28.0 0.0\n"
    optimise(folder, "Gate")
    assert (user.read_text(), kernels.read_text()) == both
    # Back into the file: the other target's kernels stay where they are.
    optimise(folder, "Gate", "--place", "end")
    assert IMPORT in user.read_text()
    assert "# mtmc: begin Gate" in user.read_text()
    assert "Gate" not in kernels.read_text()
    optimise(folder, "two", "--place", "end")
    assert not kernels.exists()
    assert "model_kernels" not in user.read_text()
    assert run(folder, "model.py").stdout == "28.0 0.0\n"


@pytest.mark.slow
def test_in_a_package_the_import_follows_the_imports_of_the_file(tmp_path: Path) -> None:
    own_imports = {
        "relative": ("from . import other", "from .relative_kernels import "),
        "absolute": ("import package.other", "from package.absolute_kernels import "),
        "plain": ("", "from .plain_kernels import "),
    }
    project(tmp_path, TEXT, SIBLING)
    package = tmp_path / "package"
    package.mkdir()
    for name in ("__init__", "other"):
        (package / f"{name}.py").touch()
    for name, (line, expected) in own_imports.items():
        text = TEXT.partition("if __name__")[0].replace("import torch\n", f"import torch\n{line}\n", 1)
        (package / f"{name}.py").write_text(text)
        optimise(tmp_path, "two", file=f"package/{name}.py")
        assert expected in (package / f"{name}.py").read_text()
        done = run(tmp_path, "-c", f"import package.{name} as m, torch; print(m.two(torch.ones(1)).item())")
        assert done.stdout == "3.0\n", done.stderr


def refused(folder: Path, spec: str) -> str:
    """The error of a run that must be refused at once, without a change of any file."""
    before = {path: path.read_bytes() for path in folder.rglob("*.py")}
    answer = mtmc(folder, "optimize", spec, "--arch", "sm_90", "--apply", "--json", **NO_GPU)
    assert answer.code == 2, answer.out + answer.err
    assert {path: path.read_bytes() for path in folder.rglob("*.py")} == before
    return f"{answer.error['message']} {answer.error.get('remedy')}"


def test_a_file_of_kernels_that_the_user_wrote_is_never_touched(tmp_path: Path) -> None:
    project(tmp_path, TEXT, SIBLING)
    (tmp_path / "model_kernels.py").write_text("VALUE = 1\n")
    error = refused(tmp_path, "model.py::two")
    assert "exists and was not written by mtmc" in error
    assert 'leave out place = "sibling"' in error


@pytest.mark.slow
def test_the_users_additions_to_the_file_of_kernels_stay(folder: Path) -> None:
    kernels = folder / "model_kernels.py"
    kernels.write_text(kernels.read_text() + "\n\nMINE = 3\n")
    optimise(folder, "two")
    assert "\nMINE = 3\n" in kernels.read_text()
    optimise(folder, "two", "--place", "end")
    assert kernels.read_text().endswith("MINE = 3\n")
    assert "mtmc: begin" not in kernels.read_text()


def test_kernels_are_not_written_through_a_link(tmp_path: Path) -> None:
    project(tmp_path / "project", TEXT, SIBLING)
    outside = tmp_path / "outside.py"
    outside.write_text("# mtmc: Triton kernels of model.py.\n")
    (tmp_path / "project" / "model_kernels.py").symlink_to(outside)
    answer = mtmc(tmp_path / "project", "optimize", "model.py::two", "--apply", "--json", **NO_GPU)
    assert answer.code == 2
    assert "is a link" in answer.error["message"]
    assert outside.read_text() == "# mtmc: Triton kernels of model.py.\n"


def test_files_that_no_import_can_serve_are_refused_with_the_remedy(tmp_path: Path) -> None:
    project(tmp_path, TEXT, SIBLING)
    (tmp_path / "my-model.py").write_text(TEXT)
    assert "its name is no identifier" in refused(tmp_path, "my-model.py::two")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "script.py").write_text(TEXT)
    assert "also runs as a script" in refused(tmp_path, "package/script.py::two")


def test_line_endings_are_those_of_the_users_file(tmp_path: Path) -> None:
    file = project(tmp_path, "", SIBLING)
    file.write_bytes(TEXT.replace("\n", "\r\n").encode())
    optimise(tmp_path, "two")
    for path in (file, tmp_path / "model_kernels.py"):
        assert b"\n" not in path.read_bytes().replace(b"\r\n", b"")
    assert strip_generated(file.read_bytes(), "two").decode() == TEXT.replace("\n", "\r\n")
    assert run(tmp_path, "model.py").stdout == "28.0 0.0\n"


def test_kernels_for_their_own_file_are_not_exported_to_one_file(folder: Path) -> None:
    run_id = mtmc(folder, "runs", "--json").document["runs"][0]["id"]
    answer = mtmc(folder, "export", run_id, "--json")
    assert answer.code == 2
    assert "--place end" in str(answer.error)


def test_the_old_texts_of_both_files_are_kept(folder: Path) -> None:
    before = {(folder / name).read_bytes() for name in ("model.py", "model_kernels.py")}
    optimise(folder, "Gate")
    assert before <= {path.read_bytes() for path in (folder / ".mtmc" / "backups").iterdir()}


@pytest.mark.slow
def test_code_regions_go_to_the_file_of_kernels_too(tmp_path: Path) -> None:
    text = """\
import torch


# mtmc: x=f32[N,64] w=f32[64,64] N=24
def talks(x, w):
    h = torch.tanh(x @ w) * 2.0 + 1.0
    print("shape", tuple(h.shape))
    return torch.softmax(h * 2.0, dim=-1) * torch.sigmoid(h)
"""
    file = project(tmp_path, text, SIBLING)
    optimise(tmp_path, "talks")
    written = file.read_text()
    assert written.count("# mtmc: dispatch") == 2
    assert written.count("# mtmc: kernels") == 1
    assert "mtmc: begin" not in written
    assert strip_generated(written.encode(), "talks").decode() == text
    done = run(tmp_path, "-c", "import model, torch; print(model.talks(torch.ones(2, 64), torch.ones(64, 64)).shape)")
    assert done.stdout.endswith("torch.Size([2, 64])\n"), done.stderr


@pytest.mark.slow
def test_compiled_code_traces_the_guard_in_the_other_file_and_recompiles_when_a_global_changes(folder: Path) -> None:
    optimise(folder, "Gate")
    on_the_cpu(folder, "model")
    # The interpreter's kernels cannot be compiled, so only the decisions of the guards are.
    script = """
import torch, model
x, gate = torch.randn(8, 48), model.Gate()
decide = torch.compile(
    lambda x: (x * 0 + 1 if model.two_fits(x, "model") else x * 0, x * 0 + 1 if model.gate_fits(gate, x, "model") else x * 0),
    backend="eager",
    fullgraph=True,
)
with torch.no_grad():
    for K, expected in ((2.0, 1.0), (5.0, 0.0), (2.0, 1.0)):
        model.K = K
        assert [part.mean().item() for part in decide(x)] == [expected, expected], K
"""
    done = run(folder, "-c", script, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr
