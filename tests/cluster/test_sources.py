"""Which cluster is named, and which files travel to its workers."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from mtmc_lsp.app.bench.suite import Problem
from mtmc_lsp.cluster import bundle as bundles
from mtmc_lsp.cluster.address import parse_cluster
from mtmc_lsp.cluster.bundle import Bundle, pack, unpack
from mtmc_lsp.cluster.imports import bundle_of
from mtmc_lsp.cluster.local import worker_environments
from mtmc_lsp.cluster.machine import SLOT, Software
from mtmc_lsp.cluster.opening import merge
from mtmc_lsp.cluster.results import file_of_kind
from mtmc_lsp.core.errors import RequestError
from mtmc_lsp.core.settings import Settings


def test_a_cluster_is_local_or_the_address_of_a_scheduler() -> None:
    assert (parse_cluster("local").is_local, parse_cluster("local").workers) == (True, None)
    assert parse_cluster("local:4").workers == 4
    for text in ("tcp://10.0.0.1:8786", "tls://login-node.example.org:8786", "tcp://[::1]:8786"):
        assert not parse_cluster(text).is_local
    for text in (
        "local:0",
        "local:x",
        "localhost:8786",
        "http://host:1",
        "tcp://host",
        "tcp://host:1/x",
        "",
        "inproc://x:1",
    ):
        with pytest.raises(RequestError, match="cannot read --cluster"):
            parse_cluster(text)


def test_a_local_cluster_has_one_worker_per_gpu_or_as_many_as_named() -> None:
    assert worker_environments(None, ["0", "3"]) == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "3"}]
    assert worker_environments(1, ["0", "3"]) == [{"CUDA_VISIBLE_DEVICES": "0"}]
    assert worker_environments(3, []) == [{SLOT: "0/3"}, {SLOT: "1/3"}, {SLOT: "2/3"}]
    with pytest.raises(RequestError, match="needs 3 GPUs, and this machine has 2"):
        worker_environments(3, ["0", "3"])


def test_the_first_difference_of_versions_is_named() -> None:
    here = Software("3.11", "2.13.0", "3.9.0", "0.1.0 (abc)")
    assert here.difference(here) == ""
    assert here.difference(Software("3.12", "2.13.0", "", "0.1.0 (abc)")) == (
        "python 3.12 instead of 3.11, triton missing instead of 3.9.0"
    )
    assert (
        here.difference(Software("3.11", "2.13.0", "3.9.0", "0.1.0 (def)")) == "mtmc 0.1.0 (def) instead of 0.1.0 (abc)"
    )


def test_each_kind_of_gpu_has_a_file_of_results(tmp_path: Path) -> None:
    assert file_of_kind(tmp_path / "r.jsonl", "NVIDIA H100 80GB HBM3").name == "r-nvidia-h100-80gb-hbm3.jsonl"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with packages, a ``src`` folder, data, and files that nothing needs."""
    files = {
        "pyproject.toml": "[project]\nname = 'p'\n",
        "models/__init__.py": "from . import registry\n",
        "models/registry.py": "import os\n",
        "models/block.py": "import torch\nfrom .parts import norm\nfrom models.parts.scale import two as _\nimport shared.numbers\n",
        "models/parts/__init__.py": "",
        "models/parts/norm.py": "def late():\n    from src_only import x\n",
        "models/parts/scale.py": "two = 2\n",
        "models/parts/unused.py": "",
        "src/src_only.py": "x = 1\n",
        "shared/numbers.py": "import broken_syntax\n",
        "broken_syntax.py": "def (\n",
        "secrets.py": "KEY = 1\n",
        "configs/small.json": "{}",
        ".mtmc/records.jsonl": "{}\n",
    }
    root = tmp_path / "project"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def packed(project: Path, place: Path, **settings: object) -> tuple[Bundle, list[str]]:
    problem = Problem("models/block::f", project / "models" / "block.py", project, "", "f")
    bundle = bundle_of([problem], Settings(**settings))  # type: ignore[arg-type]
    unpack(bundle, place)
    copy = Path(bundle.copies(place)[str(project)])
    return bundle, sorted(str(path.relative_to(copy)) for path in copy.rglob("*") if path.is_file())


NEEDED = [
    ".mtmc/records.jsonl",
    "broken_syntax.py",
    "models/__init__.py",
    "models/block.py",
    "models/parts/__init__.py",
    "models/parts/norm.py",
    "models/parts/scale.py",
    "models/registry.py",
    "pyproject.toml",
    "shared/numbers.py",
    "src/src_only.py",
]


def test_a_bundle_has_what_the_target_imports_and_nothing_else(project: Path, tmp_path: Path) -> None:
    _, names = packed(project, tmp_path / "cache")
    assert names == NEEDED
    _, more = packed(project, tmp_path / "cache", cluster_files=("configs/*.json",))
    assert more == sorted([*NEEDED, "configs/small.json"])


def test_nothing_outside_the_project_is_sent(project: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside.py"
    outside.write_text("SECRET = 1\n")
    (project / "secrets.py").unlink()
    (project / "secrets.py").symlink_to(outside)
    (project / "models" / "block.py").write_text(
        "import secrets\nfrom ... import outside\nfrom ........ import outside\n"
    )
    _, names = packed(project, tmp_path / "cache", cluster_files=("*.py",))
    assert names == [
        ".mtmc/records.jsonl",
        "broken_syntax.py",
        "models/__init__.py",
        "models/block.py",
        "models/registry.py",
        "pyproject.toml",
    ]
    with pytest.raises(ValueError, match="not a pattern of files inside the project"):
        Settings(cluster_files=("../*.py",))


def test_a_bundle_is_called_by_its_content_and_unpacked_once_read_only(project: Path, tmp_path: Path) -> None:
    place = tmp_path / "cache"
    first, _ = packed(project, place)
    again, _ = packed(project, place)
    assert first.digest == again.digest
    copy = Path(first.copies(place)[str(project)]) / "models" / "block.py"
    assert stat.S_IMODE(copy.stat().st_mode) == 0o444
    assert stat.S_IMODE(copy.parent.stat().st_mode) == 0o555
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    os.utime(project / "models" / "block.py", (1, 1))
    assert packed(project, place)[0].digest == first.digest, "times do not count"
    (project / "models" / "parts" / "scale.py").write_text("two = 3\n")
    assert packed(project, place)[0].digest != first.digest
    assert len(list(place.iterdir())) == 2, "no unfinished folder is left"


def test_a_bundle_with_other_content_or_a_file_outside_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.py").write_text("x = 1\n")
    good = pack({tmp_path / "a": [tmp_path / "a" / "x.py"]})
    with pytest.raises(ValueError, match="the content of the bundle is not that of 0000"):
        unpack(Bundle("0000", good.data, good.folders), tmp_path / "cache")
    contents = {"../escaped.py": b"x"}
    escaped = Bundle(bundles._digest(contents), zipped(contents), ())
    with pytest.raises(ValueError, match="is outside the bundle"):
        unpack(escaped, tmp_path / "cache")
    assert not (tmp_path / "escaped.py").exists()
    assert list((tmp_path / "cache").iterdir()) == []


def zipped(contents: dict[str, bytes]) -> bytes:
    import io
    import zipfile

    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return stream.getvalue()


def test_a_copy_without_a_project_file_is_a_project_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "alone"
    folder.mkdir()
    (folder / "f.py").write_text("x = 1\n")
    bundle = pack({folder: [folder / "f.py"]})
    unpack(bundle, tmp_path / "cache")
    copy = Path(bundle.copies(tmp_path / "cache")[str(folder)])
    assert copy.name == "alone", "the name of a package stays"
    assert sorted(path.name for path in copy.iterdir()) == ["f.py", "setup.cfg"]


def test_files_that_are_too_large_are_refused_with_the_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "MAX_BYTES", 1 << 20)
    (tmp_path / "weights.bin").write_bytes(b"0" * (2 << 20))
    (tmp_path / "f.py").write_text("x = 1\n")
    with pytest.raises(RequestError, match=r"have 2 MB, more than 1 MB; the largest is 0/.*/weights\.bin"):
        pack({tmp_path: [tmp_path / "weights.bin", tmp_path / "f.py"]})


def test_the_policy_that_the_user_names_travels_too(project: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policies" / "ranker.json"
    policy.parent.mkdir()
    policy.write_text("{}")
    (policy.parent / "other.json").write_text("{}")
    bundle, _ = packed(project, tmp_path / "cache", policy_file=str(policy))
    copy = Path(bundle.copies(tmp_path / "cache")[str(policy.parent)])
    assert sorted(path.name for path in copy.iterdir()) == ["ranker.json", "setup.cfg"]


def test_runs_on_several_kinds_go_on_at_the_same_time_and_an_error_ends_them() -> None:
    met = threading.Barrier(2, timeout=60)

    def counted(count: int) -> Iterator[int]:
        met.wait()
        yield from range(count)

    assert sorted(merge({"a": counted(2), "b": counted(1)})) == [("a", 0), ("a", 1), ("b", 0)]
    assert list(merge({"a": iter([1, 2])})) == [("a", 1), ("a", 2)]

    def failing() -> Iterator[int]:
        raise RequestError("no")
        yield 0

    with pytest.raises(RequestError, match="no"):
        list(merge({"a": failing(), "b": iter([1])}))
    assert list(merge({})) == []
