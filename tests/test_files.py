"""Files are written whole or not at all, and are the user's own."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lrpx import LRP, Attribution, Explainer, _files
from lrpx._files import write_text, write_whole
from lrpx.errors import ResultFileError
from tests.reference import models


@pytest.fixture(scope="module")
def result():
    return Explainer(models.tiny_gpt2())([5, 6, 7])


@pytest.fixture
def writers(result):
    """Everything of a result and a recipe that writes a file."""
    return {"save": result.save, "html": result.to_html, "recipe": LRP.save, "text": lambda path: write_text(path, "x")}


@pytest.mark.parametrize("name", ["save", "html", "recipe", "text"])
def test_a_write_that_fails_leaves_what_was_there(writers, name, tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_text("old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_files.os, "fsync", full)
    with pytest.raises(ResultFileError, match="No space left on device; make room"):
        writers[name](path)
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]

    def stopped(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(_files.os, "fsync", stopped)
    with pytest.raises(KeyboardInterrupt):
        writers[name](path)
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("name", ["save", "html", "recipe", "text"])
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_a_new_file_has_the_mode_that_the_umask_leaves(writers, name, tmp_path, mask):
    before = os.umask(mask)
    try:
        writers[name](tmp_path / "a")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("name", ["save", "html", "recipe", "text"])
def test_a_file_that_was_there_keeps_its_mode_and_its_links(writers, name, tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "real").chmod(0o640)
    (tmp_path / "link").symlink_to("real")
    writers[name](tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() != b"old"
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o640


def test_what_is_no_plain_file_is_written_to():
    write_whole("/dev/null", b"gone")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    read, write = os.pipe()
    write_whole(f"/dev/fd/{write}", b"through")
    assert os.read(read, 9) == b"through"
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("name", [None, 3, b"a"])
def test_what_is_no_name(name):
    with pytest.raises(ResultFileError, match=r"cannot write"):
        write_text(name, "x")


@pytest.mark.parametrize("name", ["a" * 300, "a\0b", "there/is/none"])
def test_names_that_are_none(tmp_path, name):
    with pytest.raises(ResultFileError, match=r"cannot write"):
        write_text(tmp_path / name, "x")
    assert not list(tmp_path.iterdir())


def test_the_longest_names_and_half_characters(tmp_path):
    write_text(tmp_path / ("é" * 120), "x")
    write_text(tmp_path / ("a" * 255), "x")
    with pytest.raises(ResultFileError, match="leave such characters out"):
        write_text(tmp_path / "a", "half \ud800")
    assert len(list(tmp_path.iterdir())) == 2


def test_a_result_is_saved_over_a_result(result, tmp_path):
    path = tmp_path / "a"
    result.save(path)
    loaded = Attribution.load(path)
    loaded.words().save(path)  # over the file it was read from
    assert torch.equal(loaded.relevance, result.relevance)
    assert Attribution.load(path) == loaded.words()


def test_standard_output_that_goes_to_a_file_is_written_to(tmp_path):
    """Replacing that file would lose what is printed besides."""
    code = "from lrpx._files import write_text; print('before', flush=True); write_text('/dev/stdout', 'text\\n')"
    with (tmp_path / "out").open("ab") as out:
        subprocess.run([sys.executable, "-c", code + "; print('after')"], stdout=out, check=True)
    assert (tmp_path / "out").read_text() == "before\ntext\nafter\n"
