"""Recording inputs from the editor: the calls of the user's program become the workload."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from editor import REAL, Editor, editor
from test_runs import children_of

from mtmc_lsp.source.entry_points import programs_using

pytestmark = pytest.mark.asyncio

MODEL = "import torch\n\n\ndef f(x, scale):\n    return torch.relu(x) * scale\n"
TRAIN = """\
import torch
from model import f

if __name__ == "__main__":
    print("noise on standard output")
    for _ in range(3):
        f(torch.zeros(4, 6), 2.0)
"""


async def test_the_calls_of_a_chosen_program_become_the_directive(ide: Editor) -> None:
    (ide.root / "train.py").write_text(TRAIN)
    uri = ide.open(MODEL)
    ide.answers = ["python train.py", "Add as directive"]
    job = await ide.command("record", uri, "f")
    assert await ide.finished(job["job"]) == "f: called 3 times, all the same: # mtmc: x=f32[4,6] scale=2.0"
    await ide.until(lambda: ide.texts[uri] != MODEL)
    assert "# mtmc: x=f32[4,6] scale=2.0\ndef f(x, scale):" in ide.texts[uri]
    which, what = ide.questions
    assert [action.title for action in which.actions] == ["python train.py"]
    assert str(ide.root) in which.message
    assert what.message.startswith("f was called 3 times, all the same: # mtmc: x=f32[4,6] scale=2.0. Optimising uses")
    assert "running python train.py" in ide.stages(job["job"])
    assert (ide.root / ".mtmc" / "records.jsonl").is_file()


async def test_the_configured_program_runs_without_a_question_and_missing_calls_are_reported(tmp_path: Path) -> None:
    async with editor(tmp_path, settings={"recordCommand": "python -c 'raise SystemExit(3)'"}) as ide:
        uri = ide.open(MODEL)
        job = await ide.command("record", uri, "f")
        said = "f: the program did not call it with a tensor; the program ended with exit code 3"
        assert await ide.finished(job["job"]) == said
        await ide.until(lambda: [m.message for m in ide.client.messages] == [said])
        job = await ide.command("record", uri, "f", command="no-such-program --now")
        assert "cannot start no-such-program" in await ide.finished(job["job"])
        job = await ide.command("record", uri, "f", command="python 'open")
        assert "cannot parse the command" in await ide.finished(job["job"])
        assert ide.questions == []


async def test_without_a_matching_program_the_message_names_the_setting(ide: Editor) -> None:
    uri = ide.open(MODEL)
    assert await ide.command("record", uri, "f") is None
    await ide.until(lambda: any("mtmc.recordCommand" in m.message for m in ide.client.messages))


async def test_cancelling_a_recording_ends_its_program(tmp_path: Path) -> None:
    async with editor(tmp_path, settings={"recordCommand": "python -c 'import time; time.sleep(60)'"}) as ide:
        uri = ide.open(MODEL)
        job = (await ide.command("record", uri, "f"))["job"]
        await ide.until(lambda: any("running" in stage for stage in ide.stages(job)))
        (recorder,) = children_of(ide.client._server.pid)
        await ide.until(lambda: children_of(recorder))
        programs = children_of(recorder)
        began = time.monotonic()
        await ide.command("cancel", job=job)
        assert await ide.finished(job) == "cancelled"
        assert time.monotonic() - began < 20
        await ide.until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in [recorder, *programs]), 20)


async def test_no_program_runs_in_an_untrusted_folder(tmp_path: Path) -> None:
    (tmp_path / "user").mkdir()
    async with editor(tmp_path / "user", options={}, settings={"recordCommand": "touch ran"}) as ide:
        uri = ide.open(MODEL)
        ide.answers = ["Cancel"]
        assert await ide.command("record", uri, "f") is None
        assert not (ide.root / "ran").exists()


async def test_suggested_programs_import_the_file_and_precede_tests(tmp_path: Path) -> None:
    files = {
        "model.py": MODEL,
        "train.py": TRAIN,
        "scripts/run it.py": "import pkg, model\nif __name__ == '__main__':\n    pass\n",
        "scripts/other.py": "import models\nif __name__ == '__main__':\n    pass\n",
        "library.py": "import model\n",
        "tests/test_model.py": "from model import f\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = programs_using(tmp_path / "model.py", tmp_path)
    assert found == ["python train.py", "python 'scripts/run it.py'", "python -m pytest tests/test_model.py"]
    (tmp_path / "model.py").write_text(MODEL + "\nif __name__ == '__main__':\n    f(torch.ones(2), 1.0)\n")
    assert programs_using(tmp_path / "model.py", tmp_path)[0] == "python model.py"


@pytest.mark.parametrize("offers_itself", [False, True])
async def test_a_run_without_inputs_offers_to_add_them_unless_the_client_does(
    tmp_path: Path, offers_itself: bool
) -> None:
    options = {"trusted": True, "runState": True, "offersWorkload": offers_itself}
    async with editor(tmp_path, REAL, options=options) as ide:
        uri = ide.open(MODEL)
        ide.answers = ["Add a workload directive"]
        end = await ide.optimized(uri, "f")
        assert "no example inputs are known for f" in end
        state = await ide.until(lambda: next((s for s in ide.states if s.state == "failed"), None))
        assert state.answer.error.code == "no-workload"
        if offers_itself:
            await ide.command("jobs")
            assert ide.questions == []
        else:
            await ide.until(lambda: "# mtmc: x=" in ide.texts[uri])
            (question,) = ide.questions
            assert [a.title for a in question.actions] == ["Add a workload directive", "Record inputs from a command"]
        assert ide.client.messages == [], "nothing is said twice"
