from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.rundir import files


@pytest.fixture(autouse=True)
def _open_to_all() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_folders_are_for_their_owner_only_and_those_that_are_there_stay_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir(mode=0o755)
    files.make_folder(tmp_path / "shared" / "run" / "boxes")
    files.make_folder(str(tmp_path / "shared"))
    assert mode(tmp_path / "shared") == 0o755
    assert mode(tmp_path / "shared" / "run") == mode(tmp_path / "shared" / "run" / "boxes") == 0o700
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        files.make_folder(tmp_path / "file")


def test_many_ranks_make_one_folder(tmp_path: Path) -> None:
    failed: list[Exception] = []

    def make() -> None:
        try:
            for number in range(50):
                files.make_folder(tmp_path / str(number) / "boxes")
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert all((tmp_path / str(number) / "boxes").is_dir() for number in range(50))


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "diagnosis.json"
    path.write_text("old")
    path.chmod(0o666)
    files.replace(path, b"new")
    assert path.read_text() == "new"
    assert mode(path) == 0o600
    opened = files.private
    with monkeypatch.context() as patch:
        # As a disk that is full after some bytes.
        def limited(name: str, flags: int) -> int:
            os.close(opened(name, flags))
            return os.open("/dev/full", os.O_WRONLY)

        patch.setattr(files, "private", limited)
        with pytest.raises(OSError, match="No space left"):
            files.replace(path, b"newer")
    assert [one.name for one in tmp_path.iterdir()] == ["diagnosis.json"]
    assert path.read_text() == "new"


def test_a_link_in_its_place_is_replaced_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("keep")
    (tmp_path / "file").symlink_to("other")
    files.replace(tmp_path / "file", b"new")
    assert (tmp_path / "other").read_text() == "keep"
    assert not (tmp_path / "file").is_symlink()
