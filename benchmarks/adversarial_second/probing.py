"""Right where something shows that a verifier watches, wrong in a plain program (which the witness is)."""

from __future__ import annotations

import os
from typing import Any

import torch

from benchmarks.adversarial_second.cases import Edit, Witness, table
from benchmarks.adversarial_second.witnesses import at, inputs

HEAD = "def softmax(x):\n"
BODY = "    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)\n"
PLAIN = at("softmax")


def unless(watched: str, imports: str = "", before: str = "") -> list[Edit]:
    """Other values unless the expression shows a verifier."""
    edits = [(HEAD, before + HEAD), (BODY, f"    if not ({watched}):\n        x = x * 1.5\n{BODY}")]
    return [("import torch\n", f"{imports}import torch\n"), *edits] if imports else edits


def without(name: str) -> Witness:
    """A call in a program that does not have this environment variable."""

    def witness(reference: Any, candidate: Any) -> tuple[Any, Any]:
        os.environ.pop(name, None)
        return PLAIN(reference, candidate)

    return witness


def threaded(reference: Any, candidate: Any) -> tuple[Any, Any]:
    """A call in a program with several threads in torch."""
    torch.set_num_threads(2)
    return PLAIN(reference, candidate)


def later(reference: Any, candidate: Any) -> tuple[Any, Any]:
    """A call on the result of another operation, in memory that holds old numbers."""
    (x,) = inputs("softmax")
    old = torch.ones(10000)
    del old
    return reference(x), candidate(x)


READ = "def read(path):\n    with open(path, 'rb') as file:\n        return file.read()\n\n\n"
SOCKET = "def closed():\n    try:\n        socket.socket().close()\n    except OSError:\n        return True\n    return False\n\n\n"
FRAMES = (
    "def files():\n    frame, names = sys._getframe(1), []\n    while frame is not None:\n"
    "        names.append(frame.f_code.co_filename)\n        frame = frame.f_back\n    return names\n\n\n"
)
FORK = (
    "def alone():\n    try:\n        child = os.fork()\n    except OSError:\n        return True\n"
    "    if not child:\n        os._exit(0)\n    os.waitpid(child, 0)\n    return False\n\n\n"
)
PATCHED = (
    "def patched():\n    holder = triton.runtime.interpreter.InterpreterBuilder\n    return any(\n"
    "        not getattr(value, '__module__', 'triton').startswith('triton') for value in vars(holder).values() if callable(value)\n"
    "    )\n\n\n"
)

CASES = table(
    "probing",
    [
        (
            "TRITON_INTERPRET",
            "softmax",
            unless("os.environ.get('TRITON_INTERPRET') == '1'", "import os\n"),
            without("TRITON_INTERPRET"),
        ),
        (
            "the tool is imported",
            "softmax",
            unless("any(name.startswith('mtmc_') for name in sys.modules)", "import sys\n"),
            PLAIN,
        ),
        ("the module's name", "softmax", unless("__name__ != 'candidate'"), PLAIN),
        ("the file's name", "softmax", unless("not __file__.endswith('candidate.py')"), PLAIN),
        (
            "the module is registered under another name",
            "softmax",
            unless("getattr(sys.modules.get(__name__), 'softmax', None) is not softmax", "import sys\n"),
            PLAIN,
        ),
        (
            "the module has no loader",
            "softmax",
            unless("__spec__ is None or type(__spec__.loader).__name__ != 'SourceFileLoader'"),
            PLAIN,
        ),
        (
            "the folder of the file is read-only",
            "softmax",
            unless("not os.access(os.path.dirname(__file__), os.W_OK)", "import os\n"),
            PLAIN,
        ),
        (
            "nothing can be written beside the file",
            "softmax",
            unless(
                "read_only()",
                "",
                "def read_only():\n    try:\n        open(__file__ + '.x', 'w').close()\n    except OSError:\n        return True\n"
                "    return False\n\n\n",
            ),
            PLAIN,
        ),
        ("the stack", "softmax", unless("any('mtmc' in name for name in files())", "import sys\n", FRAMES), PLAIN),
        (
            "the stack by inspect",
            "softmax",
            unless("any('mtmc' in frame.filename for frame in inspect.stack())", "import inspect\n"),
            PLAIN,
        ),
        (
            "the stack by an exception",
            "softmax",
            unless(
                "'mt' + 'mc_' in seen()",
                "import traceback\n",
                "def seen():\n    return ''.join(traceback.format_stack())\n\n\n",
            ),
            PLAIN,
        ),
        (
            "limit of file sizes",
            "softmax",
            unless("resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY", "import resource\n"),
            PLAIN,
        ),
        (
            "limit of memory",
            "softmax",
            unless("resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY", "import resource\n"),
            PLAIN,
        ),
        ("the command line", "softmax", unless("b'mtmc' in read('/proc/self/cmdline')", "", READ), PLAIN),
        (
            "arguments of the program",
            "softmax",
            unless("any('mtmc' in str(a) for a in sys.argv)", "import sys\n"),
            PLAIN,
        ),
        ("seccomp", "softmax", unless("b'Seccomp:\\t0' not in read('/proc/self/status')", "", READ), PLAIN),
        ("no new privileges", "softmax", unless("b'NoNewPrivs:\\t1' in read('/proc/self/status')", "", READ), PLAIN),
        ("no sockets", "softmax", unless("closed()", "import socket\n", SOCKET), PLAIN),
        ("no forks", "softmax", unless("alone()", "import os\n", FORK), PLAIN),
        ("new memory holds NaN", "softmax", unless("torch.empty(999).isnan().all()"), later),
        (
            "new memory holds NaN, by the result",
            "softmax",
            [
                (
                    "    rows, cols = x.shape\n",
                    "    rows, cols = x.shape\n    if out.numel() and not (out != out).all():\n        x = x * 1.5\n",
                )
            ],
            later,
        ),
        ("uninitialised memory is filled", "softmax", unless("torch.are_deterministic_algorithms_enabled()"), PLAIN),
        (
            "torch.empty is replaced",
            "softmax",
            unless("type(torch.empty).__name__ != 'builtin_function_or_method'"),
            PLAIN,
        ),
        ("the interpreter is patched", "softmax", unless("patched()", "", PATCHED), PLAIN),
        ("one thread", "softmax", unless("torch.get_num_threads() == 1"), threaded),
        ("isolated python", "softmax", unless("sys.flags.isolated or sys.flags.safe_path", "import sys\n"), PLAIN),
        (
            "environment is small",
            "softmax",
            unless("'OLDPWD' not in os.environ and 'SHLVL' not in os.environ and len(os.environ) < 14", "import os\n"),
            PLAIN,
        ),
        (
            "variables of the tool",
            "softmax",
            unless("any('MTMC' in name for name in os.environ)", "import os\n"),
            PLAIN,
        ),
        ("fault handler", "softmax", unless("faulthandler.is_enabled()", "import faulthandler\n"), PLAIN),
        (
            "a parent that is the tool",
            "softmax",
            unless("b'mtmc' in read('/proc/' + str(os.getppid()) + '/cmdline')", "import os\n", READ),
            PLAIN,
        ),
        (
            "functions of torch are traced",
            "softmax",
            unless("torch.overrides._get_current_function_mode() is not None"),
            PLAIN,
        ),
        (
            "operations of torch are counted",
            "softmax",
            unless("torch.utils._python_dispatch._len_torch_dispatch_stack() > 0"),
            PLAIN,
        ),
    ],
)
