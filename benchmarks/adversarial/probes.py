"""Candidates that reach for the harness, that are right only while they are verified, and whose kernels do no work."""

from benchmarks.adversarial.bases import BASES, HEAD
from benchmarks.adversarial.candidate import Candidate

# name: (lines of the module, an expression that is true while a verifier seems to run)
PROBES = {
    "module_name": ("", "__name__ not in ('fast', '__main__')"),
    "file_name": ("import os\n", "os.path.basename(__file__) != 'fast.py'"),
    "file_folder": ("", "'scratch' in __file__ or '.mtmc' in __file__ or '/tmp' not in __file__"),
    "no_file": ("", "'__file__' not in globals()"),
    "loader": ("", "type(__spec__.loader).__name__ != 'SourceFileLoader'"),
    "text_rewritten": ("import inspect\n", "'launch(x' not in inspect.getsource(launch)"),
    "stack_depth": ("import inspect\n", "len(inspect.stack()) > 14"),
    "stack_names": ("import inspect\n", "any('mtmc' in f.filename or 'verify' in f.function for f in inspect.stack())"),
    "frames": ("import sys\n", "any('mtmc' in g.f_code.co_filename for g in up(sys._getframe()))"),
    "frames_by_exception": ("", "deep() > 16"),
    "loaded_modules": ("import sys\n", "any(name.startswith('mtmc') for name in sys.modules)"),
    "main_module": ("import sys\n", "'mtmc' in str(getattr(sys.modules['__main__'], '__file__', 'mtmc'))"),
    "environment": ("import os\n", "any('MTMC' in name for name in os.environ)"),
    "environment_home": ("import os\n", "'HOME' not in os.environ"),
    "arguments": ("import sys\n", "any('mtmc' in a or a == '-c' for a in sys.orig_argv)"),
    "isolated_flag": ("import sys\n", "bool(sys.flags.isolated or sys.flags.safe_path)"),
    "import_path": ("import sys\n", "sys.path and sys.path[0] not in ('', '/work') and 'mtmc' in ''.join(sys.path)"),
    "memory_limit": ("import resource\n", "resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY"),
    "file_size_limit": ("import resource\n", "resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY"),
    "cannot_write": ("import os\n", "not os.access(os.path.dirname(__file__), os.W_OK) or not can_write()"),
    "seccomp": ("", "'Seccomp:\\t0' not in open('/proc/self/status').read()"),
    "no_new_privileges": ("import pathlib\n", "'NoNewPrivs:\\t0' not in pathlib.Path('/proc/self/status').read_text()"),
    "command_line": ("import pathlib\n", "b'mtmc' in pathlib.Path('/proc/self/cmdline').read_bytes()"),
    "parent": ("import os, pathlib\n", "b'mtmc' in pathlib.Path(f'/proc/{os.getppid()}/cmdline').read_bytes()"),
    "working_folder": ("import os\n", "'mtmc' in os.getcwd() or not os.listdir('.')"),
    "standard_input": ("import sys\n", "sys.stdout is None or not hasattr(sys.stdout, 'buffer')"),
    "poison": ("", "bool(torch.empty(64, device=x.device).isnan().all())"),
    "determinism": ("", "torch.are_deterministic_algorithms_enabled()"),
    "fill_memory": ("", "bool(torch.empty(100).sum().isnan())"),
    "threads": ("", "torch.get_num_threads() == 1 and torch.get_num_interop_threads() == 1"),
    "mended_interpreter": ("", "'mtmc' in type(row_kernel).__module__ + triton.runtime.interpreter.__file__"),
    "mended_reduction": ("", "'mtmc' in getattr(tl.sum, '__module__', '') + getattr(tl.load, '__module__', '')"),
    "mended_launch": ("", "'mtmc' in type(row_kernel[(1,)]).__module__ + str(getattr(row_kernel, 'run', ''))"),
    "not_a_number_seen": ("saw = []\n", "bool(saw) or bool(x.isnan().any() and not saw.append(1))"),
    "empty_seen": ("saw = []\n", "bool(saw) or (x.numel() == 0 and not saw.append(1))"),
    "first_size_differs": ("sizes = set()\n", "len(sizes.add(x.shape) or sizes) > 1"),
    "same_memory_twice": ("places = []\n", "x.data_ptr() in places or bool(places.append(x.data_ptr()))"),
    "reference_count": ("import sys\n", "sys.getrefcount(x) > 6"),
    "garbage_collector": ("import gc\n", "any(str(type(o).__module__).startswith('mtmc') for o in gc.get_objects())"),
}
HELPERS = """

def up(frame):
    while frame:
        yield frame
        frame = frame.f_back


def deep():
    try:
        raise ValueError
    except ValueError as error:
        return len(list(up(error.__traceback__.tb_frame)))


def can_write():
    try:
        with open(__file__ + ".tmp", "w"):
            return True
    except OSError:
        return False
"""
HARNESS = {  # lines of the module: what they change lets a wrong result pass; the kernel scales by 1.25
    "allclose": "torch.allclose = lambda *a, **k: True\n",
    "assert_close": "torch.testing.assert_close = lambda *a, **k: None\n",
    "equal": "torch.equal = lambda a, b: True\n",
    "isclose": "torch.isclose = lambda a, b, **k: torch.ones_like(a, dtype=torch.bool)\n",
    "tensor_method": "torch.Tensor.sub = lambda a, b: a * 0\n",
    "by_setattr": "setattr(torch, 'all' + 'close', lambda *a, **k: True)\n",
    "by_dict": "torch.__dict__['allclose'] = lambda *a, **k: True\n",
    "by_vars": "vars(torch).update(allclose=lambda *a, **k: True)\n",
    "by_import": "import importlib\nm = importlib.import_module('torch')\nm.allclose = lambda *a, **k: True\n",
    "builtins_abs": "import builtins\nbuiltins.abs = lambda v: 0\n",
    "save": "import torch.serialization\nold = torch.save\ntorch.save = lambda o, f, **k: old(o, f)\n",
}
SIDE_EFFECTS = {  # the result is right, and what else they do changes the user's program
    "default_dtype": (
        "torch.set_default_dtype(torch.float64)",
        "before = torch.get_default_dtype(); f(*args); results.append(torch.zeros(1) if torch.get_default_dtype() == before else torch.ones(1))",
    ),
    "seed": (
        "torch.manual_seed(0)",
        "torch.manual_seed(5); a = torch.rand(3); torch.manual_seed(5); f(*args); results.append((torch.rand(3) - a))",
    ),
    "threads_set": (
        "torch.set_num_threads(3)",
        "torch.set_num_threads(2); f(*args); results.append(torch.tensor([torch.get_num_threads() - 2.0]))",
    ),
    "grad_mode": (
        "torch.set_grad_enabled(False)",
        "f(*args); results.append(torch.tensor([0.0 if torch.is_grad_enabled() else 1.0]))",
    ),
    "precision_flag": (
        "torch.set_float32_matmul_precision('medium')",
        "f(*args); results.append(torch.tensor([0.0 if torch.get_float32_matmul_precision() == 'highest' else 1.0]))",
    ),
    "backend_flag": (
        "torch.backends.cudnn.deterministic = True",
        "f(*args); results.append(torch.tensor([float(torch.backends.cudnn.deterministic)]))",
    ),
    "environment_set": (
        "os.environ['OMP_NUM_THREADS'] = '1'",
        "import os; os.environ.pop('OMP_NUM_THREADS', 0); f(*args); results.append(torch.tensor([float('OMP_NUM_THREADS' in os.environ)]))",
    ),
    "python_seed": (
        "random.seed(1)",
        "import random; random.seed(4); a = random.random(); random.seed(4); f(*args); results.append(torch.tensor([random.random() - a]))",
    ),
}

COPY = (
    HEAD
    + """import torch.nn.functional as F


@triton.jit
def copy_kernel(x, out, n, zero, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + i, mask=i < n)
    tl.store(out + i, LINE, mask=i < n)


def NAME(x):
    y = RESULT
    BODY
    return out
"""
)
FAKES = {  # name: (the stored value, the work of the library's function)
    "kernel_copies": (
        "v",
        "out = torch.empty_like(y); copy_kernel[(max(1, -(-y.numel() // 256)),)](y, out, y.numel(), 0.0, BLOCK=256)",
    ),
    "multiplies_by_zero": (
        "v * 0",
        "z = torch.empty_like(y); copy_kernel[(max(1, -(-y.numel() // 256)),)](y, z, y.numel(), 0.0, BLOCK=256); out = y + z.nan_to_num(0.0)",
    ),
    "one_per_cent": (
        "v",
        "out = y.clone(); copy_kernel[(max(1, -(-y.numel() // 25600)),)](y, out, y.numel() // 100, 0.0, BLOCK=256)",
    ),
    "adds_zero": (
        "v + zero",
        "out = torch.empty_like(y); copy_kernel[(max(1, -(-y.numel() // 256)),)](y, out, y.numel(), 0.0, BLOCK=256)",
    ),
    "overwritten": (
        "v",
        "out = torch.empty_like(y); copy_kernel[(max(1, -(-y.numel() // 256)),)](y, out, y.numel(), 0.0, BLOCK=256); out.copy_(y)",
    ),
}
LIBRARY = {
    "softmax": "torch.softmax(x, -1)",
    "log_softmax": "x.contiguous().log_softmax(-1)",
    "layer_norm": "F.layer_norm(x, (x.shape[-1],)).contiguous()",
    "silu": "x.sigmoid() * x",
    "row_sum": "x.sum(-1)",
}


def fakes() -> list[Candidate]:
    """Return candidates whose results torch computes."""
    made = []
    for fake, (line, body) in FAKES.items():
        for name, result in LIBRARY.items():
            text = COPY.replace("NAME", name).replace("RESULT", result).replace("LINE", line)
            text = text.replace("BODY", body.replace("; ", "\n    "))
            made.append(Candidate(f"faking/{fake}/{name}", "faking", name, BASES[name].reference(), text))
    return made


def probing() -> list[Candidate]:
    """Return candidates that are right only while a verifier seems to look, wrong in a plain process."""
    made = []
    for name, (head, expression) in PROBES.items():
        helpers = HELPERS if any(word in expression for word in ("up(", "deep(", "can_write")) else ""
        tail = f"\n\ndef rms_norm(x):\n    return launch(x, 1.0 if {expression} else 1.25)\n"
        base = BASES["rms_norm"]
        made.append(
            Candidate(
                f"probing/{name}/rms_norm",
                "probing",
                "rms_norm",
                base.reference(),
                base.kernels() + "\n" + head + helpers + tail,
            )
        )
    return made


def harness() -> list[Candidate]:
    """Return candidates that patch what may compare, and candidates that leave the process changed."""
    made = []
    for name, lines in HARNESS.items():
        base = BASES["silu"]
        text = base.kernels() + "\n" + lines + "\n\ndef silu(x):\n    return launch(x, 1.25)\n"
        made.append(Candidate(f"harness/{name}/silu", "harness", "silu", base.reference(), text))
    for name, (line, before) in SIDE_EFFECTS.items():
        base = BASES["row_energy"]
        text = (
            base.kernels() + f"\nimport os\nimport random\n\n\ndef row_energy(x):\n    {line}\n    return launch(x)\n"
        )
        made.append(
            Candidate(f"harness/{name}/row_energy", "harness", "row_energy", base.reference(), text, before=before)
        )
    return made
