"""Files that are written: whole or not at all, with the user's own mode."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

import lrpx
from lrpx._files import write_text, write_whole
from lrpx.errors import ResultFileError
from tests.test_attribution import KEYS

WRITERS = {
    "html": lambda path: KEYS.to_html(path),
    "recipe": lambda path: lrpx.ATTNLRP.save(path),
    "text": lambda path: write_text(path, "text"),
}
LIMITED = """
import resource, signal, sys
from pathlib import Path
from lrpx._files import write_whole
from lrpx.errors import ResultFileError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_whole(Path(sys.argv[1]), b"x" * 2000)
except ResultFileError as error:
    print(error)
"""


@contextmanager
def mask(value):
    before = os.umask(value)
    try:
        yield
    finally:
        os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_a_new_file_has_the_mode_of_the_users_mask(tmp_path, name, umask):
    with mask(umask):
        WRITERS[name](tmp_path / "a")
    assert mode(tmp_path / "a") == 0o666 & ~umask
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("name", WRITERS)
def test_a_replaced_file_keeps_its_mode_and_a_link_stays_one(tmp_path, name):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    WRITERS[name](link)
    assert link.is_symlink()
    assert mode(real) == 0o640
    assert real.read_bytes() == link.read_bytes() != b"old"


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_is_replaced_and_not_written_into(tmp_path, name):
    path = tmp_path / "a"
    path.write_text("old")
    with path.open("rb") as reader:
        WRITERS[name](path)
        assert reader.read() == b"old"
    assert path.read_bytes() != b"old"


def test_a_file_that_cannot_grow_leaves_the_old_one(tmp_path):
    path = tmp_path / "a"
    path.write_text("old")
    done = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"cannot write {path}: File too large; make room in that folder")
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_an_interrupted_write_leaves_the_old_one(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_text("old")

    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("name", WRITERS)
def test_folders_are_named(tmp_path, name):
    with pytest.raises(ResultFileError, match=r"there is no folder .*none; create it first"):
        WRITERS[name](tmp_path / "none" / "a")
    with pytest.raises(ResultFileError, match=r"cannot write .*: Is a directory; .* choose another path"):
        WRITERS[name](tmp_path)


def test_a_pipe_is_written_to(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    found = []
    reader = threading.Thread(target=lambda: found.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write_whole(tmp_path / "pipe", b"through")
    reader.join()
    assert found == [b"through"]
