"""What `raytrain check` leaves behind: nothing."""

from __future__ import annotations

from pathlib import Path

from jobs.check import _new_folders_removed


def test_folders_that_the_check_made_are_removed_unless_something_is_in_them(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name, uri in (("new/runs", ""), ("there/runs", ""), ("a/b c", "file://")):
        folder = tmp_path / name
        with _new_folders_removed(uri + str(folder).replace(" ", "%20" if uri else " ")):
            folder.mkdir(parents=True)
        assert not folder.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    with _new_folders_removed(str(tmp_path / "used" / "runs")):
        (tmp_path / "used" / "runs").mkdir(parents=True)
        (tmp_path / "used" / "file").touch()
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["file"]
    with _new_folders_removed(str(tmp_path / "there")), _new_folders_removed("s3://bucket/runs"):
        pass
    assert (tmp_path / "there").is_dir()
