"""Incremental updates of chunks and outlines give the same result as parsing the whole file."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtmc_lsp.source.chunks import Change, Chunks, chunks_of, splice
from mtmc_lsp.source.outline import Outliner
from mtmc_lsp.source.syntax import parse

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*(ROOT / "examples").glob("*.py"), *(ROOT / "mtmc_lsp" / "server").rglob("*.py")])
STATEMENTS = [
    "import torch\n",
    "x = 1\n",
    "a = 1; b = 2\n",
    "def f(x):\n    return x\n",
    "@jit\ndef k(x):\n    # why\n    return x\n    # trailing\n",
    "class A:\n    def forward(self, x):\n        return x\n\n    y = 2\n",
    "if x:\n    y = 1\nelse:\n    y = 2\n",
    'text = """\nat the margin\n# no comment\n"""\n',
    "# alone\n\n",
    "# touching\n",
    "k[grid](x)\n",
    "f(\n    1,\n)\n",
    "y = 1 \\\n    + 2\n",
    "try:\n    z\nexcept A:\n    pass\n",
    "\n\n",
    "    # indented\n",
]
PIECES = [*STATEMENTS, "x", " ", "\n", "\r\n", "(", ")", '"""', "#", "\\", "else:\n", "    ", "é", "def ", ";", "@"]
TEXTS = st.tuples(st.sampled_from(["", "\ufeff"]), st.lists(st.sampled_from(STATEMENTS), max_size=14).map("".join)).map(
    "".join
)


@settings(max_examples=600, deadline=None)
@given(st.data(), TEXTS)
def test_an_edit_gives_the_same_chunks_as_the_whole_file(data: st.DataObject, start: str) -> None:
    text = start.encode()
    chunks = chunks_of(text, parse(text))
    for _ in range(5):
        begin, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        end = min(end, begin + data.draw(st.integers(0, 30)))
        new = "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=2))).encode()
        text, change = text[:begin] + new + text[end:], Change(begin, end, begin + len(new))
        chunks = check(chunks, text, change)


def check(chunks: Chunks, text: bytes, change: Change) -> Chunks:
    """The chunks after a change; they must equal those of the whole file if they are certain."""
    found, whole = splice(chunks, text, change), chunks_of(text, parse(text))
    if found is None:
        return whole
    assert not found.chunks.is_certain or found.chunks == whole
    for chunk in found.chunks.all:
        assert text[chunk.start :].startswith(chunk.text)
        assert text.count(b"\n", 0, chunk.start) == chunk.line
    starts = [chunk.start for chunk in found.chunks.all]
    assert starts == sorted(set(starts))
    return found.chunks


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_typing_in_a_real_file_never_parses_the_whole_file(path: Path) -> None:
    """Append a comment to each line, or insert a comment line; both keep the file valid."""
    text = path.read_bytes()
    chunks = chunks_of(text, parse(text))
    draw = random.Random(path.name)
    ends = [at for at in range(len(text)) if text[at : at + 1] == b"\n"]
    for at in draw.sample(ends, min(40, len(ends))):
        for new in (b"  # x", b"\n# x"):
            edited = text[:at] + new + text[at:]
            if not parse(edited).has_error:
                found = splice(chunks, edited, Change(at, at, at + len(new)))
                assert found is not None
                assert found.chunks == chunks_of(edited, parse(edited))


@given(st.data(), st.binary(max_size=30))
def test_two_changes_combine_to_one(data: st.DataObject, first: bytes) -> None:
    texts, changes = [first], []
    for new in data.draw(st.lists(st.binary(max_size=6), min_size=2, max_size=4)):
        text = texts[-1]
        begin, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        texts.append(text[:begin] + new + text[end:])
        changes.append(Change(begin, end, begin + len(new)))
    whole = changes[0]
    for change in changes[1:]:
        whole = whole.followed_by(change)
    assert texts[0][: whole.start] == texts[-1][: whole.start]
    assert texts[0][whole.old_end :] == texts[-1][whole.new_end :]


@settings(max_examples=200, deadline=None)
@given(st.data(), TEXTS)
def test_an_updated_outline_equals_the_outline_of_the_whole_file(data: st.DataObject, start: str) -> None:
    text = start.encode()
    outliner = Outliner("/m.py")
    outliner.outline(text, parse(text))
    for _ in range(3):
        at = data.draw(st.integers(0, len(text)))
        new = data.draw(st.sampled_from(STATEMENTS)).encode()
        text = text[:at] + new + text[at:]
        ours = outliner.edited(text, Change(at, at, at + len(new))) or outliner.outline(text, parse(text))
        if outliner.is_certain:
            fresh = Outliner("/m.py").outline(text, parse(text))
            assert (ours.targets, ours.kernels, ours.names) == (fresh.targets, fresh.kernels, fresh.names)
            assert (ours.launched, ours.called, ours.mentions_layout) == (
                fresh.launched,
                fresh.called,
                fresh.mentions_layout,
            )
