"""A candidate whose results depend on the verification, the time, chance or addresses is refused; honest ones are accepted."""

from __future__ import annotations

import _thread
import time
from collections.abc import Callable

import pytest
from pairs import HONEST, REFERENCE, changed

from mtmc_lsp.core.results import Verdict, VerdictStatus
from mtmc_lsp.verify.worker.surroundings.user_program import _wait_for_threads

END = "    return out\n"
REFUSED = (VerdictStatus.INCORRECT, VerdictStatus.RUNTIME_ERROR)
PROGRAM = "in a process that looks like a user's program; in the verification it is right"
TIMES = "at other times, with other random numbers and addresses; in the verification it is right"


def candidate(condition: str, above: str = "") -> str:
    """The honest kernel, with another result where the condition holds."""
    return changed(
        HONEST,
        (END, f"    if {condition}:\n        out = out * 1.5\n{END}"),
        ("@triton.jit", f"{above}\n\n\n@triton.jit"),
    )


IN_USE = {
    "caches where users have them": ("'TMPDIR' not in os.environ and 'TRITON_CACHE_DIR' not in os.environ", "import os"),
    "no module of the verifier": (
        "not any(name.startswith('mtmc') for name in vars(sys)['modules'])", "import sys"),
    "a main module that is no worker": (
        "'worker' not in str(getattr(importlib.import_module('__main__'), '__file__', ''))", "import importlib"),
    "the arguments of a script": ("len(sys.argv) == 1", "import sys"),
    "the original arguments of a script": ("not any('fork-server' in word for word in sys.orig_argv)", "import sys"),
    "no frame of the verifier": (
        "not any('mtmc' + '_lsp' in line for line in format_stack())",
        "import importlib\n\nformat_stack = importlib.import_module('trace' + 'back').format_stack"),
    "no frame of the verifier at import": (
        "CLEAN",
        "import importlib\n\nformat_stack = importlib.import_module('trace' + 'back').format_stack\n"
        "CLEAN = not any('mtmc' + '_lsp' in line for line in format_stack())"),
    "memory without NaN": ("not bool(torch.empty(1000).isnan().all())", ""),
    "algorithms that may vary": ("not torch.are_deterministic_algorithms_enabled()", ""),
    "several threads": ("torch.get_num_threads() > 1 or len(os.sched_getaffinity(0)) == 1", "import os"),
    "no limit of memory": ("resource.getrlimit(resource.RLIMIT_DATA)[0] < 0", "import resource"),
    "no other thread": (
        "not any('exit' in thread.name for thread in enumerate_threads())",
        "import importlib\n\nenumerate_threads = importlib.import_module('thread' + 'ing').enumerate"),
    "bytecode is written": ("not sys.dont_write_bytecode", "import sys"),
    "the compiler of Triton": ("os.environ.get('TRITON_INTERPRET') != '1'", "import os"),
    "a setting of Triton": ("not triton.knobs.runtime.interpret", ""),
    "kernels that were compiled": ("type(kernel).__name__ == 'JITFunction'", ""),
    "an instance of the class of kernels": ("isinstance(kernel, triton.JITFunction)", ""),
    "a GPU": ("torch.cuda.is_available()", ""),
    "tensors on a GPU": ("inp.device.type == 'cu' + 'da'", ""),
    "its text unchanged": ("'cuda' == 'cu' + DA", "DA = 'da'"),
    "its code unchanged": ("'is_cuda' in fast.__code__.co_names", ""),
}  # fmt: skip
"""What holds in use and not in the verification, with lines above."""


@pytest.mark.parametrize("what", IN_USE)
def test_a_candidate_that_is_wrong_only_in_use_is_refused(what: str, judge: Callable[..., Verdict]) -> None:
    verdict = judge(REFERENCE, "rms", candidate(*IN_USE[what]), "fast")
    assert verdict.status in REFUSED, verdict
    assert PROGRAM in verdict.reason


OF_PROCESS = {
    "the command line": "'fork-server' not in open('/proc/self/cmdline').read()",
    "the filter of system calls": "'Seccomp:\\t0' in pathlib.Path(b'/proc/self/status'.decode()).read_text()",
    "a path with dots": "'NoNewPrivs:\\t0' in open('/dev/../proc/thread-self/status').read()",
    "a process by its number": "'pipe:' not in str(os.listdir(f'/proc/{os.getpid()}/fd'))",
    "a descriptor": "'Seccomp:\\t0' in str(os.read(os.open('/proc/self/status', os.O_RDONLY), 4000))",
}


@pytest.mark.parametrize("what", OF_PROCESS)
def test_a_candidate_that_reads_about_its_process_is_refused(what: str, judge: Callable[..., Verdict]) -> None:
    verdict = judge(REFERENCE, "rms", candidate(f"({OF_PROCESS[what]}) == 7", "import os\nimport pathlib"), "fast")
    assert verdict.status is VerdictStatus.INCORRECT, verdict
    assert "process information: it reads /proc/" in verdict.reason


OF_OURS = """
import triton.runtime.interpreter as machine


def is_theirs(holder):
    places = [(f.__module__, f.__qualname__, f.__code__.co_filename) for f in vars(holder).values() if hasattr(f, '__code__')]
    return not any('mtmc' + '_lsp' in str(place) for place in places)
"""
PATCHED = {
    "operations of the interpreter": "is_theirs(machine.InterpreterBuilder) and is_theirs(machine.ReduceOps)",
    "launches": "is_theirs(machine.GridExecutor)",
    "functions of the interpreter": "is_theirs(machine)",
    "tensors of the language": "is_theirs(tl.tensor) and is_theirs(tl.block_type)",
}


@pytest.mark.parametrize("what", PATCHED)
def test_a_candidate_that_is_right_only_where_it_sees_our_patches_is_refused(what: str, judge) -> None:
    verdict = judge(REFERENCE, "rms", candidate(PATCHED[what], OF_OURS), "fast")
    assert verdict.status in REFUSED, verdict
    assert "relative L2 error" in verdict.reason


CLOCK = "import importlib\n\nclock = importlib.import_module('ti' + 'me')"
AT_OTHER_TIMES = {
    "an hour of the day": ("clock.localtime().tm_hour % 3 == (START + 1) % 3", f"{CLOCK}\nSTART = clock.localtime().tm_hour"),
    "a date": ("datetime.datetime.now().year > 2027", "import datetime"),
    "a day": ("date.today() > date(2027, 1, 1)", "from datetime import date"),
    "a uniform clock": ("clock.monotonic() - START > 3600", f"{CLOCK}\nSTART = clock.monotonic()"),
    "a clock for programs": ("now() - START > 3600", f"{CLOCK}\nnow = clock.perf_counter\nSTART = now()"),
    "chance of one per cent": ("DRAWS.random() < 0.01", "import random\n\nDRAWS = random.Random()"),
    "chance of a whole number": ("DRAWS.randint(0, 99) == 7 or DRAWS.randint(0, 99) == 99", "import random\n\nDRAWS = random.SystemRandom()"),
    "chance at import": ("LUCK < 0.01", "import random\n\nLUCK = random.random()"),
    "rare chance at import": ("LUCK == 9999", "import random\n\nLUCK = random.randrange(10000)"),
    "a process number": ("os.getpid() % 4 == (START + 1) % 4", "import os\n\nSTART = os.getpid()"),
    "an address": ("(inp.data_ptr() // 64) % 8 == 3", ""),
    "the beginning of a page": ("inp.data_ptr() % 4096 == 0", ""),
    "the address of an object": ("id(inp) // 16 % 8 == 3", ""),
}  # fmt: skip


@pytest.mark.parametrize("what", AT_OTHER_TIMES)
def test_a_candidate_that_depends_on_time_chance_or_addresses_is_refused(what: str, judge) -> None:
    verdict = judge(REFERENCE, "rms", candidate(*AT_OTHER_TIMES[what]), "fast")
    assert verdict.status in REFUSED, verdict


HONEST_ONES = {
    "a block size from the environment": ("", "import os\n\nBLOCK = int(os.environ.get('MY_BLOCK', 128))"),
    "a device for the interpreter": (
        "DEVICE != inp.device.type", "import os\n\nDEVICE = 'cpu' if os.environ.get('TRITON_INTERPRET') == '1' else 'cuda'"),
    "a log with times": ("", "import logging\n\nlogging.basicConfig(level=logging.INFO)\nlogging.getLogger(__name__).info('loaded')"),
    "a cache of sizes": ("", "import functools\n\n\n@functools.lru_cache\ndef blocks(n):\n    return -(-n // 64)"),
    "a table by a seed": ("TABLE != ROW", "import random\n\nTABLE = random.Random(3).random()\nROW = random.Random(3).random()"),
    "a warning": ("", "import warnings\n\nwarnings.filterwarnings('ignore', category=FutureWarning)\nwarnings.warn('experimental')"),
    "printing": ("print('shape', inp.shape)", ""),
    "properties of the GPU": (
        "", "COUNT = torch.cuda.get_device_properties(0).multi_processor_count if torch.cuda.is_available() else 1"),
    "the processors of the machine": ("", "PROCESSORS = open('/proc/cpuinfo').read().count('processor')"),
    "a check of its inputs": ("not bool(torch.isfinite(inp.sum())) and not inp.numel()", ""),
    "a path of its folder": ("", "import os\nimport sys\n\nsys.path.insert(0, os.path.dirname(__file__))\nos.environ.setdefault('OMP_WAIT_POLICY', 'passive')"),
    "an operator": (
        "", "library = torch.library.Library('honest_ops', 'DEF')\nlibrary.define('twice(Tensor x) -> Tensor')\n"
        "library.impl('twice', lambda x: x * 2, 'CompositeExplicitAutograd')"),
}  # fmt: skip


@pytest.mark.parametrize("what", HONEST_ONES)
def test_an_honest_candidate_that_looks_at_its_surroundings_is_accepted(what: str, judge) -> None:
    condition, above = HONEST_ONES[what]
    verdict = judge(REFERENCE, "rms", candidate(condition or "False", above), "fast")
    assert verdict.status is VerdictStatus.CORRECT, verdict.reason
    assert "surroundings" in {check.name for check in verdict.checks}


def test_the_end_of_a_programs_thread_is_awaited() -> None:
    """A thread counts as running for a short time after its last statement."""
    lock = _thread.allocate_lock()
    lock.acquire()
    count = _thread._count()
    _thread.start_new_thread(time.sleep, (0.3,))
    time.sleep(0.1)
    _wait_for_threads(count, lock)
    assert _thread._count() == count
