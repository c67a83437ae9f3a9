"""Workers that are forked with the imports of a user's file are as if they had imported these themselves."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtmc_lsp.process.fork_server import ForkServer
from tests.core.test_fork_server import copy_of, said


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    with ForkServer(sys.executable, {"TRITON_INTERPRET": "1"}) as one:
        one.start()
        yield one


def seen(fork_server: ForkServer, folder: Path, file: str, dependency: str) -> list[str]:
    """What a file reports in a worker of the fork server and in one of a branch for the file."""
    (folder / "dependency.py").write_text(dependency)
    path = folder / "users_file.py"
    path.write_text(file)
    with copy_of(fork_server, folder) as worker:
        texts = [said(worker, path, file)]
    with fork_server.branch(str(path), str(folder)) as branch, copy_of(branch, folder) as worker:
        texts.append(said(worker, path, file))
    return [re.search(r"seen: (.*)", text)[1] for text in texts]  # type: ignore[index]


STATES = {
    "a variable": ("import os\nos.environ['SET'] = 'yes'", "__import__('os').environ.get('SET')"),
    "a removed variable": ("import os\nos.environ.pop('HOME', None)", "__import__('os').environ.get('HOME')"),
    "a folder": ("import os\nos.chdir('/')", "__import__('os').getcwd()"),
    "a path": ("import sys\nsys.path.insert(0, '/nowhere')", "__import__('sys').path[:3]"),
    "the handler of a signal": (
        "import signal\ndef handler(*_): pass\nsignal.signal(signal.SIGCHLD, handler)",
        "(s := __import__('signal')).getsignal(s.SIGCHLD) is dependency.handler",
    ),
    "the default dtype": ("import torch\ntorch.set_default_dtype(torch.float64)", "torch.ones(1).dtype"),
    "the seed": ("import torch\ntorch.manual_seed(3)", "torch.rand(2)"),
    "one thread": ("import torch\ntorch.set_num_threads(1)", "torch.get_num_threads()"),
    "two threads": ("import torch\ntorch.set_num_threads(2)", "torch.get_num_threads()"),
    "a patched function": ("import torch\ntorch.cuda.is_available = lambda: 'patched'", "torch.cuda.is_available()"),
    "a child process": (
        "import subprocess\nchild = subprocess.Popen(['sleep', '20'])",
        "dependency.child.poll(), dependency.child.kill()",
    ),
    "a folder for temporary files": (
        "import os, tempfile\nplace = os.path.basename(tempfile.gettempdir())",
        "dependency.place == __import__('os').path.basename(__import__('tempfile').gettempdir())",
    ),
}


@pytest.mark.parametrize("state", STATES)
def test_what_an_import_changes_is_changed_in_workers(fork_server: ForkServer, tmp_path: Path, state: str) -> None:
    dependency, expression = STATES[state]
    file = f"import torch\nimport dependency\nraise RuntimeError('seen: ' + str(({expression})))"
    alone, branched = seen(fork_server, tmp_path, file, dependency)
    assert alone == branched


def test_an_import_that_failed_runs_once(fork_server: ForkServer, tmp_path: Path) -> None:
    dependency = "import sys\nsys.seen = getattr(sys, 'seen', 0) + 1\nimport no_such_module"
    file = "try:\n    import dependency\nexcept ImportError:\n    import sys\nraise RuntimeError(f'seen: {sys.seen}')"
    assert seen(fork_server, tmp_path, file, dependency) == ["1", "1"]


BEFORE_AN_IMPORT = {
    "a call": "import torch\ntorch.set_default_dtype(torch.float64)\nimport dependency",
    "a variable": "import os\nos.environ['KIND'] = 'set'\nimport dependency",
    "a failed import": "try:\n    import no_such_module\n    import dependency\nexcept ImportError:\n    import torch\n"
    "    torch.set_default_dtype(torch.float64)\n    import dependency",
}


@pytest.mark.parametrize("before", BEFORE_AN_IMPORT)
def test_an_import_sees_what_earlier_statements_changed(fork_server: ForkServer, tmp_path: Path, before: str) -> None:
    dependency = "import os, torch\nkind = torch.ones(1).dtype, os.environ.get('KIND')"
    alone, branched = seen(
        fork_server,
        tmp_path,
        f"{BEFORE_AN_IMPORT[before]}\nraise RuntimeError('seen: ' + str(dependency.kind))",
        dependency,
    )
    assert alone == branched


def test_a_module_that_imports_the_file_sees_the_module_of_the_worker(fork_server: ForkServer, tmp_path: Path) -> None:
    file = "import dependency, sys\nif hasattr(dependency, 'file'):\n"
    file += "    raise RuntimeError(f'seen: {dependency.file is sys.modules[__name__]}')"
    assert seen(fork_server, tmp_path, file, "import users_file as file") == ["True", "True"]
