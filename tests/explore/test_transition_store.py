"""The folder of transitions: what is written is read again, and damage is named."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as files
import pytest
from growing import ENVIRONMENT, action, capture, grow, program

from mtmc_lsp.core.action import MacroAction
from mtmc_lsp.core.errors import EnvironmentNotAble, RequestError
from mtmc_lsp.core.json_codec import from_json, to_json
from mtmc_lsp.core.learning.transitions import Outcome, Program, Transition, Version
from mtmc_lsp.explore.identity import one_line, program_id, version_id
from mtmc_lsp.explore.parquet import (
    Writer,
    compact,
    only_writer,
    prepare_store,
    read_programs,
    read_transitions,
    read_versions,
)
from mtmc_lsp.explore.rows import TABLES

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = program(capture(), source="def f(x): ...\n")
VERSION = Version("v1", PROGRAM.id, "v0", "fuse(a;)", 1, {"kernels": [{"nodes": ["a"]}]}, 12.5, None)
TRANSITION = Transition(
    program=PROGRAM.id,
    version="v0",
    action=to_json(action("fast:a", config={"rows": 4})),
    key="fuse(a;)",
    rank=0,
    chosen_by="roofline",
    outcome=Outcome.FASTER,
    result="v1",
    before_us=25.0,
    after_us=12.5,
    ratio=2.0,
    ratio_error=0.01,
    seconds=1.5,
    detail="",
    device="NVIDIA H200",
    environment=ENVIRONMENT,
)


def write(folder: Path, number: int, *programs: Program) -> None:
    """A process that adds one version and one transition of each program."""
    with Writer(folder) as writer:
        for item in programs or (PROGRAM,):
            writer.add_program(item)
            writer.add_version(replace(VERSION, id=f"v{number}", program=item.id))
            writer.add_transition(replace(TRANSITION, key=f"key {number}", program=item.id))


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    for flushed in (False, True):
        if flushed:
            writer.flush()
        else:
            writer.add_program(PROGRAM)
            writer.add_version(VERSION)
            writer.add_transition(TRANSITION)
        assert read_programs(tmp_path) == [PROGRAM]
        assert read_versions(tmp_path) == [VERSION]
        assert read_transitions(tmp_path) == [TRANSITION]
        assert bool(list(tmp_path.glob("*.parquet"))) is flushed
        assert bool(list(tmp_path.glob("*.jsonl"))) is not flushed
    read = from_json(MacroAction, read_transitions(tmp_path)[0].action)
    assert read == action("fast:a", config={"rows": 4})


def test_one_program_is_read_without_the_others(tmp_path: Path) -> None:
    other = program(capture(name="g"))
    write(tmp_path, 1, PROGRAM, other)
    assert read_programs(tmp_path, other.id) == [other]
    assert [v.program for v in read_versions(tmp_path, PROGRAM.id)] == [PROGRAM.id]
    assert [t.program for t in read_transitions(tmp_path, other.id)] == [other.id]


def test_columns_that_are_filtered_are_flat_and_compressed_by_zstd(tmp_path: Path) -> None:
    write(tmp_path, 1)
    table = files.read_table(next(tmp_path.glob("transitions-*.parquet")))
    row = table.to_pylist()[0]
    assert (row["kind"], row["outcome"], row["family"], row["ratio"]) == ("fuse", "faster", "norm", 2.0)
    assert json.loads(row["action"])["params"]["config"] == {"rows": 4}
    assert (
        files.ParquetFile(next(tmp_path.glob("programs-*.parquet"))).metadata.row_group(0).column(0).compression
        == "ZSTD"
    )


def test_parts_are_merged_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    for number in (3, 1, 2):
        write(tmp_path, number)
    assert len(list(tmp_path.glob("transitions-*.parquet"))) == 3
    before = read_transitions(tmp_path)
    compact(tmp_path)
    assert [t.key for t in before] == ["key 3", "key 1", "key 2"]
    assert read_transitions(tmp_path) == before
    assert [len(list(tmp_path.glob(f"{table.name}-*"))) for table in TABLES] == [1, 1, 1]
    write(tmp_path, 9)
    assert [t.key for t in read_transitions(tmp_path)] == ["key 3", "key 1", "key 2", "key 9"]


def test_a_merge_that_was_killed_before_it_removed_the_parts_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    parts = {path: path.read_bytes() for path in tmp_path.glob("*.parquet")}
    before = read_transitions(tmp_path)
    compact(tmp_path)
    for path, data in parts.items():
        path.write_bytes(data)
    assert read_transitions(tmp_path) == before
    compact(tmp_path)
    assert read_transitions(tmp_path) == before


def test_a_version_that_is_timed_later_gets_its_time(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        writer.add_version(replace(VERSION, median_us=None))
        writer.add_version(VERSION)
        writer.add_version(replace(VERSION, median_us=99.0))
    assert [v.median_us for v in read_versions(tmp_path)] == [12.5]


def test_a_line_that_a_kill_cut_off_is_left_out(tmp_path: Path) -> None:
    writer = Writer(tmp_path)
    writer.add_program(PROGRAM)
    writer.add_transition(TRANSITION)
    journal = next(tmp_path.glob("*.jsonl"))
    journal.write_bytes(journal.read_bytes()[:-20])
    assert read_programs(tmp_path) == [PROGRAM]
    assert read_transitions(tmp_path) == []


def test_two_commands_do_not_write_to_one_folder(tmp_path: Path) -> None:
    with (
        only_writer(tmp_path),
        pytest.raises(RequestError, match="another `mtmc explore` writes to it"),
        only_writer(tmp_path),
    ):
        pass
    with only_writer(tmp_path):
        pass


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for use in (prepare_store, Writer):
        with pytest.raises(RequestError, match="holds files of something else"):
            use(tmp_path)
    with pytest.raises(RequestError, match="holds no transitions"):
        read_transitions(tmp_path)
    with pytest.raises(RequestError, match="no such folder"):
        read_transitions(tmp_path / "missing")


def test_files_of_another_version_of_the_schema_and_of_something_else_are_named(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = next(tmp_path.glob("transitions-*.parquet"))
    table = files.read_table(path)
    files.write_table(table.replace_schema_metadata({"mtmc:schema": "99", "mtmc:written": "1"}), path)
    with pytest.raises(RequestError) as caught:
        read_transitions(tmp_path)
    assert caught.value.message == "has columns of version 99; this version of mtmc-lsp reads version 1"
    assert caught.value.where is not None and caught.value.where.path == str(path)
    for wrong in (b"no parquet", b""):
        path.write_bytes(wrong)
        with pytest.raises(RequestError) as damaged:
            read_transitions(tmp_path)
        assert str(damaged.value) == (
            f"{path}: is damaged, or no Parquet file\n  Copy it again, or move it out of this folder."
        )
    files.write_table(arrow.table({"a": [1]}), path)
    with pytest.raises(RequestError, match="was not written by `mtmc explore`"):
        prepare_store(tmp_path)


@pytest.mark.parametrize("place", ["pages", "footer", "end", "half"])
def test_a_damaged_file_is_named_wherever_the_damage_is(tmp_path: Path, place: str) -> None:
    with Writer(tmp_path) as writer:
        writer.add_program(PROGRAM)
        writer.add([], [replace(TRANSITION, key=f"fuse({number};)") for number in range(200)])
    path = next(tmp_path.glob("transitions-*.parquet"))
    data = bytearray(path.read_bytes())
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    begin = {
        "pages": 4,
        "footer": footer,
        "end": len(data) - 4,
        "half": len(data) // 2,
    }
    if place == "half":
        del data[begin[place] :]
    else:
        data[begin[place] : begin[place] + 200] = bytes(len(data[begin[place] : begin[place] + 200]))
    path.write_bytes(data)
    with pytest.raises(RequestError) as caught:
        read_transitions(tmp_path)
    assert caught.value.message.startswith("is damaged") and caught.value.where is not None
    assert caught.value.where.path == str(path)
    assert caught.value.remedy == "Copy it again, or move it out of this folder."


def test_a_folder_with_the_name_of_a_part_is_named(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "transitions-other.parquet").mkdir()
    with pytest.raises(RequestError, match="is damaged, or no Parquet file"):
        read_transitions(tmp_path)


def test_a_flipped_bit_of_a_page_does_not_change_a_row_silently(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = next(tmp_path.glob("transitions-*.parquet"))
    whole, before = path.read_bytes(), read_transitions(tmp_path)
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    refused = 0
    for position in range(4, footer, 97):
        data = bytearray(whole)
        data[position] ^= 0x10
        path.write_bytes(data)
        try:
            assert read_transitions(tmp_path) == before
        except RequestError:
            refused += 1
    assert refused


def test_a_row_whose_content_cannot_be_read_is_named_with_its_table(tmp_path: Path) -> None:
    write(tmp_path, 1)
    path = next(tmp_path.glob("transitions-*.parquet"))
    table = files.read_table(path)
    column = table.schema.get_field_index("outcome")
    files.write_table(table.set_column(column, "outcome", arrow.array(["splendid"])), path)
    with pytest.raises(RequestError) as caught:
        read_transitions(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: a row of transitions is damaged\n  Copy the folder again, or explore into a new one."
    )


def test_lines_of_a_journal_that_are_no_rows_are_left_out(tmp_path: Path) -> None:
    with Writer(tmp_path) as writer:
        writer.add_program(PROGRAM)
        journal = next(tmp_path.glob("journal-*.jsonl"))
        whole = journal.read_text()
        wrong = [
            '{"table": "programs"}',
            "[1, 2]",
            '"a"',
            '{"table": "programs", "row": {"id": "x"}}',
            '{"table": [], "row": {}}',
        ]
        journal.write_text("\n".join(wrong) + "\n" + whole)
        assert read_programs(tmp_path) == [PROGRAM]
    assert read_programs(tmp_path) == [PROGRAM], "the journal became a part"


def test_without_pyarrow_one_message_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for use in (prepare_store, read_transitions):
        with pytest.raises(EnvironmentNotAble) as caught:
            use(tmp_path)
        assert str(caught.value) == "Parquet files need the package pyarrow\n  pip install 'mtmc-lsp[learn]'"


def test_ids_depend_on_content_and_not_on_the_machine() -> None:
    assert program_id(capture(path="/a/model.py")) == program_id(capture(path="/b/model.py"))
    assert program_id(capture()) != program_id(capture(name="g"))
    assert program_id(capture(gpu=True)) == program_id(capture())
    kernels = [{"nodes": ["a"]}, {"nodes": ["b"]}]
    one, two = ({"kernels": order, "kernel_names": [order]} for order in (kernels, kernels[::-1]))
    assert version_id("p", one) == version_id("p", two)
    assert version_id("p", one) != version_id("q", one)
    assert version_id("p", one) != version_id("p", {**one, "cuda_graph": True})


def test_a_detail_has_no_path_and_no_second_line() -> None:
    assert one_line("\n  wrong at /project/model.py:3\nx + 1") == "wrong at model.py:3"
    assert len(one_line("a" * 1000)) == 200


def test_the_page_of_the_schema_lists_each_column_and_its_example_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "transitions.md").read_text()
    for table in TABLES:
        section = page.partition(f"## {table.name}")[2].partition("\n## ")[0]
        listed = [line.split("|")[1].strip(" `*") for line in section.splitlines() if line.startswith("| `")]
        assert listed == list(table.columns), table.name
    grow(tmp_path / "transitions", has_gpu=True)
    code = page.partition("```python\n")[2].partition("```")[0]
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert "fast" in done.stdout and "1.25" in done.stdout
