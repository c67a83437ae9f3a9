"""What nobody waits for at the keyboard lets the editor go first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mtmc_lsp.core.errors import MtmcError
from mtmc_lsp.core.priority import NICENESS, SHARE_OF_SESSION
from mtmc_lsp.core.worker import Worker

SAID = """
import os
from mtmc_lsp.core.priority import give_way, gives_way
before = gives_way()
give_way()
give_way()
print(before, gives_way(), os.getpriority(os.PRIO_PROCESS, 0))
"""


@pytest.mark.skipif(os.getpriority(os.PRIO_PROCESS, 0) > 0, reason="these tests give way already")
def test_giving_way_twice_is_giving_way_once() -> None:
    out = subprocess.check_output([sys.executable, "-c", SAID], text=True, start_new_session=True)
    assert out.split() == ["False", "True", str(NICENESS)]


@pytest.mark.skipif(not Path(SHARE_OF_SESSION).exists(), reason="this kernel does not share out by session")
def test_a_worker_that_gives_way_says_so_of_its_session(tmp_path: Path) -> None:
    with Worker(sys.executable, cwd=str(tmp_path), gives_way=True) as worker:
        with pytest.raises(MtmcError):
            worker.call("no.such.command", {}, 30)
        assert worker._process is not None
        process = worker._process.pid
        assert Path(f"/proc/{process}/autogroup").read_text().split()[-1] == str(NICENESS)
        assert os.getpriority(os.PRIO_PROCESS, process) == NICENESS
