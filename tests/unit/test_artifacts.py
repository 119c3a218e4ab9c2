"""A file that exists is complete, whoever else writes it."""

from __future__ import annotations

from pathlib import Path

from specrl.artifacts import atomic_path


def test_two_writers_of_one_file_do_not_write_into_each_others(tmp_path: Path) -> None:
    """Processes of two hosts may have the same number."""
    path = tmp_path / "file"
    with atomic_path(path) as one:
        one.write_text("from one host")
        with atomic_path(path) as other:
            other.write_text("from another host")
            assert one.read_text() == "from one host"
        assert path.read_text() == "from another host"
    assert path.read_text() == "from one host" and list(tmp_path.iterdir()) == [path]
