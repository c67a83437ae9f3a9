"""Which stored runs can be replayed, and the errors for others."""

from __future__ import annotations

from pathlib import Path

import pytest
from answers import SOURCE

from mtmc_lsp.app.run_recorder import Revision, RunConfig
from mtmc_lsp.app.stored_runs import open_replay
from mtmc_lsp.app.target_file import open_target, parse_request
from mtmc_lsp.core.chat import Exchange, Message
from mtmc_lsp.core.errors import FileChanged, RequestError
from mtmc_lsp.core.settings import Settings
from mtmc_lsp.core.workload import Environment
from mtmc_lsp.search.store import Store

ASKED = Exchange("code", (Message("user", "write it"),), "so", "tiny", 1, 1, 0.1, question=1)


@pytest.fixture
def store(user_file, tmp_path: Path):
    user_file(SOURCE)
    with Store(tmp_path / ".mtmc") as opened:
        yield opened


def stored(store: Store, *, revision: Revision | None = None, asked: bool = True, plain_hash: str = "") -> str:
    """Store a run of the current file, or of another file with the hash ``plain_hash``."""
    path = store.folder.parent / "model.py"
    opened = open_target(parse_request(f"{path}::ranks"))
    run = store.begin(str(path), "ranks", opened.source_hash, Environment("3.11", "2.13", "3.9", "", ""))
    store.add_config(run, RunConfig("llm", "auto", Settings(max_steps=3), plain_hash or opened.plain_hash, revision))
    if asked:
        store.add_exchange(run, 1, ASKED)
    return run


def test_a_run_is_opened_with_its_backends_its_settings_and_what_it_changed_of_another(store: Store) -> None:
    first = stored(store)
    revision = Revision("another", first, 1, "make it readable")
    replay = open_replay(store, stored(store, revision=revision))
    assert replay.revision == revision
    assert (replay.backends.planner, replay.backends.coder) == ("llm", "auto")
    assert replay.target.settings.max_steps == 3
    assert [reply.text for reply in replay.model.ask("code", ASKED.messages)] == ["so"]
    assert open_replay(store, first).revision is None


def test_a_replay_of_a_revision_of_a_missing_run_is_an_error(store: Store) -> None:
    run = stored(store, revision=Revision("undo", "gone", 2))
    with pytest.raises(
        RequestError, match=f"run {run} changes a step of run gone, which is not in the store, so it cannot be"
    ):
        open_replay(store, run)


def test_a_run_in_which_nobody_was_asked_says_so(store: Store) -> None:
    with pytest.raises(RequestError, match="contains no answers of a model"):
        open_replay(store, stored(store, asked=False))
    path = str(store.folder.parent / "model.py")
    without_setup = store.begin(path, "ranks", "hash", Environment("3.11", "2.13", "3.9", "", ""))
    with pytest.raises(RequestError, match="contains no answers of a model"):
        open_replay(store, without_setup)


def test_a_run_of_a_changed_file_is_rejected(store: Store) -> None:
    with pytest.raises(FileChanged, match="the file changed since run"):
        open_replay(store, stored(store, plain_hash="another"))
