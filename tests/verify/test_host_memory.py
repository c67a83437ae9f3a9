"""Workers use freed memory again."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource
from mtmc_lsp.process.worker.host_memory import keep_freed_memory

keep_freed_memory()
for _ in range(20):
    block = b"x" * (64 << 20)
    del block
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""
PAGES = (64 << 20) // 4096


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator of another C library")
def test_the_system_clears_a_freed_block_once() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 2 * PAGES
