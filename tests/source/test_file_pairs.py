"""The user's file and the file of its kernels: split, joined, and written so that the user's file always works."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mtmc_lsp.core.errors import FileChanged, RequestError, SourceSyntaxError
from mtmc_lsp.core.run import GeneratedCode, Placement
from mtmc_lsp.source import files
from mtmc_lsp.source.compose import compose, strip_generated
from mtmc_lsp.source.sibling.disk import read_kernels, write_pair
from mtmc_lsp.source.sibling.pair import FilePair, joined, module_of_kernels, separated, without_block
from mtmc_lsp.source.sibling.statement import find_kernel_import
from mtmc_lsp.source.targets import find_target

TEXT = b"import math\nimport os\n\n\ndef f(x):\n    return math.sqrt(x)\n\n\ndef g(x):\n    return x\n\n\nprint(f(4.0), g(1.0))\n"
RESULT = "2.0 1.0\n"


def code_for(name: str, value: str = "math.sqrt(x)", *, extra: str = "", argument: str = "x") -> GeneratedCode:
    """Kernels of a target that compute ``value``, with a launcher of another name for each ``extra``."""
    fits = f"def {name}_fits({argument}):\n    return {argument} > 0\n"
    block = f"{fits}\n\ndef {name}_launch{extra}({argument}):\n    return {value}\n"
    dispatch = f"if {name}_fits({argument}):\n    return {name}_launch{extra}({argument})\n"
    return GeneratedCode(("import math",), block, dispatch, Placement.SIBLING)


def put(pair: FilePair, name: str, code: GeneratedCode | None = None, path: str = "m.py") -> FilePair:
    plain = strip_generated(pair.user, name)
    text = compose(plain, find_target(plain, path, name), code or code_for(name))
    return separated(text, name, Path(path), "", pair.kernels)


def test_the_two_texts_join_to_the_one_that_was_verified() -> None:
    text = compose(TEXT, find_target(TEXT, "m.py", "f"), code_for("f"))
    pair = separated(text, "f", Path("m.py"), "", None)
    assert joined(pair, find_target(TEXT, "m.py", "f")) == text
    both = put(pair, "g", code_for("g", "x"))
    assert joined(both, find_target(TEXT, "m.py", "g")).count(b"# mtmc: begin") == 1
    assert without_block(both.kernels or b"", "g") == pair.kernels
    assert strip_generated(both.user, "g") == pair.user


def test_a_text_without_kernels_beside_it_is_its_own_whole() -> None:
    target = find_target(TEXT, "m.py", "f")
    pair = put(FilePair(TEXT, None), "g", code_for("g", "x"))
    assert joined(pair, target) == pair.user
    assert joined(FilePair(pair.user, None), target) == pair.user
    inside = compose(TEXT, target, code_for("f"))
    assert joined(FilePair(inside, pair.kernels), target) == inside


def test_kernels_that_were_edited_to_nonsense_are_an_error_with_the_file() -> None:
    pair = put(FilePair(TEXT, None), "f")
    broken = FilePair(pair.user, (pair.kernels or b"").replace(b"return x > 0", b"return x >"))
    with pytest.raises(SourceSyntaxError, match=r"m_kernels\.py: the kernels of f do not parse"):
        joined(broken, find_target(TEXT, "m.py", "f"))


def test_an_import_that_a_formatter_split_or_a_user_moved_is_still_ours() -> None:
    pair = put(put(FilePair(TEXT, None), "f"), "g", code_for("g", "x"))
    line = b"from m_kernels import f_fits, f_launch, g_fits, g_launch  # mtmc: kernels\n"
    assert line in pair.user
    split = b"from m_kernels import (  # mtmc: kernels\n    f_fits,\n    f_launch,\n    g_fits,\n    g_launch,\n)\n"
    moved = pair.user.replace(line, b"").replace(b"import math\n", split + b"import math\n")
    found = find_kernel_import(moved)
    assert found is not None
    assert (found.module, found.names) == ("m_kernels", ("f_fits", "f_launch", "g_fits", "g_launch"))
    left = strip_generated(moved, "f")
    assert left.startswith(b"from m_kernels import g_fits, g_launch  # mtmc: kernels\nimport math\n")
    assert strip_generated(left, "g") == TEXT


def test_a_long_import_is_written_over_several_lines() -> None:
    name = "a_function_with_a_name_that_takes_more_than_half_of_a_line"
    text = f"def {name}(x):\n    return x\n".encode()
    pair = put(FilePair(text, None), name, code_for(name, "x"))
    assert pair.user.startswith(b"from m_kernels import (  # mtmc: kernels\n")
    assert max(map(len, pair.user.splitlines())) <= 120
    assert strip_generated(pair.user, name) == text


def test_other_functions_in_a_target_keep_their_kernels_and_their_dispatch() -> None:
    text = b"def f(x):\n    def inner(y):\n        return y\n\n    return inner(x)\n"
    pair = put(FilePair(text, None), "f.inner", code_for("inner", "y", argument="y"))
    pair = put(pair, "f", code_for("f", "x"))
    assert b"inner_launch(y)" in strip_generated(pair.user, "f")
    assert strip_generated(strip_generated(pair.user, "f.inner"), "f") == text


def test_a_name_that_is_taken_in_the_file_of_kernels_is_refused() -> None:
    pair = put(FilePair(TEXT, None), "f")
    pair = FilePair(pair.user, (pair.kernels or b"") + b"\n\ndef g_launch():\n    return 3\n")
    with pytest.raises(RequestError, match=r"m_kernels\.py:.*'g_launch' is used for something else"):
        put(pair, "g", code_for("g", "x"))


def test_kernels_of_a_renamed_file_are_not_mixed_with_new_ones() -> None:
    pair = put(FilePair(TEXT, None), "f")
    with pytest.raises(RequestError, match=r"new.py:3: imports the kernels of other targets from m_kernels.py"):
        put(FilePair(pair.user, None), "g", code_for("g", "x"), path="new.py")


@pytest.mark.parametrize(
    ("package", "text", "module"),
    [
        ("", "import torch", "m_kernels"),
        ("p", "import torch", ".m_kernels"),
        ("p.q", "from p.other import x", "p.q.m_kernels"),
        ("p", "import p.other as o\nif __name__ == '__main__':\n    pass", "p.m_kernels"),
        ("p", "from .other import x\nif __name__ == '__main__':\n    pass", ".m_kernels"),
    ],
)
def test_the_import_is_of_the_kind_that_the_file_uses(package: str, text: str, module: str) -> None:
    assert module_of_kernels(Path("m.py"), package, text.encode()) == module


@pytest.mark.parametrize(
    "text",
    [
        "import torch\n\nif __name__ == '__main__':\n    pass",
        "try:\n    from .other import x\nexcept ImportError:\n    from other import x",
    ],
)
def test_a_file_that_runs_in_a_package_and_as_a_script_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="no import of m_kernels works in both"):
        module_of_kernels(Path("m.py"), "p", text.encode())


# On disk -------------------------------------------------------------------------------------------------------------


class Crash(BaseException):
    """The end of the process."""


def crashing_after(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """End the process before the change of a file that follows ``count`` changes."""
    left = iter(range(count))

    def wrapped(change: Callable[..., None]) -> Callable[..., None]:
        def checked(path: object, *rest: object, **named: object) -> None:
            if "mtmc-new" not in str(path) or rest:
                next(left, None) is None and crash()
            change(path, *rest, **named)

        return checked

    def crash() -> None:
        raise Crash

    monkeypatch.setattr(files.os, "replace", wrapped(os.replace))
    monkeypatch.setattr(files.os, "link", wrapped(os.link))


def runs(folder: Path) -> bool:
    done = subprocess.run([sys.executable, "m.py"], cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout == RESULT


def written(folder: Path, pair: FilePair) -> None:
    (folder / "m.py").write_bytes(pair.user)
    kernels = folder / "m_kernels.py"
    kernels.unlink(missing_ok=True)
    if pair.kernels is not None:
        kernels.write_bytes(pair.kernels)


def changes() -> Iterator[tuple[str, FilePair, FilePair]]:
    first = put(FilePair(TEXT, None), "f")
    yield "new", FilePair(TEXT, None), first
    yield "other names and arguments", first, put(first, "f", code_for("f", "math.sqrt(x) + 0.0", extra="_other"))
    yield "undo", first, FilePair(TEXT, None)
    both = put(first, "g", code_for("g", "x"))
    yield "undo one of two", both, FilePair(strip_generated(both.user, "f"), without_block(both.kernels or b"", "f"))


@pytest.mark.parametrize(("before", "after"), [item[1:] for item in changes()], ids=[item[0] for item in changes()])
def test_the_users_file_works_wherever_the_process_ends_between_two_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: FilePair, after: FilePair
) -> None:
    plain = strip_generated(before.user, "f")
    for count in range(4):
        written(tmp_path, before)
        with monkeypatch.context() as patch:
            crashing_after(patch, count)
            try:
                write_pair(tmp_path / "m.py", "f", before, plain, after, tmp_path / ".mtmc" / "backups")
            except Crash:
                pass
            else:
                assert FilePair((tmp_path / "m.py").read_bytes(), read_kernels(tmp_path / "m.py")) == after
        assert runs(tmp_path), f"after {count} writes"
        assert not list(tmp_path.glob("*.mtmc-new"))


def test_a_file_of_kernels_that_changed_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    before = put(FilePair(TEXT, None), "f")
    after = put(before, "g", code_for("g", "x"))
    written(tmp_path, FilePair(before.user, (before.kernels or b"") + b"# typed\n"))
    with pytest.raises(FileChanged):
        write_pair(tmp_path / "m.py", "g", before, before.user, after, tmp_path / "backups")
    assert (tmp_path / "m.py").read_bytes() == before.user
    assert (tmp_path / "m_kernels.py").read_bytes().endswith(b"# typed\n")
    written(tmp_path, FilePair(before.user + b"# typed\n", before.kernels))
    with pytest.raises(FileChanged):
        write_pair(tmp_path / "m.py", "g", before, before.user, after, tmp_path / "backups")
    assert (tmp_path / "m_kernels.py").read_bytes() == before.kernels
    written(tmp_path, FilePair(TEXT, b"# made meanwhile\n"))
    with pytest.raises(FileChanged):
        write_pair(tmp_path / "m.py", "f", FilePair(TEXT, None), TEXT, before, tmp_path / "backups")
    assert (tmp_path / "m_kernels.py").read_bytes() == b"# made meanwhile\n"


def test_the_file_of_kernels_has_the_mode_of_the_users_file(tmp_path: Path) -> None:
    written(tmp_path, FilePair(TEXT, None))
    (tmp_path / "m.py").chmod(0o640)
    after = put(FilePair(TEXT, None), "f")
    write_pair(tmp_path / "m.py", "f", FilePair(TEXT, None), TEXT, after, tmp_path / "backups")
    assert (tmp_path / "m_kernels.py").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/etc/hostname", path)])
def test_kernels_are_only_read_from_regular_files(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "m_kernels.py")
    with pytest.raises(RequestError, match="no kernels are read from it or written to it"):
        read_kernels(tmp_path / "m.py")
