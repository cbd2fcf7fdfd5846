"""Standard input, output and error that are full, closed, badly encoded, or a terminal: never a traceback."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import DOORS, finish, start

FULL = Path("/dev/full")
slow = pytest.mark.slow
"""Most of what a process is started for, which takes seconds: one of each kind is fast."""


def slowly(*given):
    return pytest.param(*given, marks=slow)


@pytest.mark.parametrize("arguments", [slowly(DOORS), slowly([*DOORS, "--json", "-"]), ["--help"], ["--version"]])
def test_a_full_disk_behind_standard_output(arguments):
    if not FULL.exists():
        pytest.skip("no /dev/full here")
    with FULL.open("wb") as full:
        code, _, err = finish(start(*arguments, stdout=full))
    assert code == 2
    assert err == "lrpx: cannot use standard output: No space left on device; choose another file, or make room\n"


@pytest.mark.parametrize("arguments", [slowly(DOORS), slowly([*DOORS, "--json", "-"]), ["explain", "--help"]])
def test_nobody_reads_standard_output_any_more(arguments):
    read, write = os.pipe()
    os.close(read)
    process = start(*arguments, stdout=write)
    os.close(write)
    code, _, err = finish(process)
    assert code in (1, 128 + signal.SIGPIPE)
    assert err == ""


@slow
def test_only_the_first_lines_of_many_are_read(tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text("The doors of the house\n" * 500)
    with start("explain", "--texts", texts, "--json", "-") as process:
        assert json.loads(process.stdout.readline())["line"] == 1
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
    assert process.returncode == 1


@pytest.mark.parametrize("closed", [0, 1, slowly(2)])
def test_a_closed_stream(closed):
    text = "-" if closed == 0 else "The doors of the house"
    given = f"exec {closed}>&-" if closed else "exec 0<&-"
    process = start("explain", text, preexec_fn=lambda: os.close(closed), stdin=None)
    code, out, err = finish(process)
    if closed == 0:
        assert (code, out) == (2, ""), given
        assert err == "lrpx: standard input is closed; pipe a text in, or write it on the command line\n"
    else:
        assert (code, err) == (0, ""), given
        assert ("doors" in out) == (closed == 2)


def test_both_outputs_full():
    if not FULL.exists():
        pytest.skip("no /dev/full here")
    with FULL.open("wb") as full:
        assert finish(start("explain", " ", stdout=full, stderr=full))[0] == 2


@pytest.mark.parametrize("encoding", ["ascii", slowly("latin-1"), slowly("utf-8")])
def test_a_terminal_of_any_encoding(encoding):
    text = "Die Türen des Hauses 🙂"
    process = start("explain", text, "--target", " are", "--contrast", " is", env={"PYTHONIOENCODING": encoding})
    out, err = process.communicate()
    assert (process.returncode, b"Traceback" in err) == (0, False)
    assert "logit of ' are'" in out.decode(encoding)
    if encoding == "ascii":
        assert "logit of ' are' - logit of ' is'" in out.decode(encoding)
        assert "\\xfc" in out.decode(encoding)  # what nothing looks like


@slow
@pytest.mark.parametrize("encoding", ["ascii", slowly("utf-8")])
def test_json_is_utf_8_whatever_the_terminal_has(encoding):
    process = start(*DOORS, "--json", "-", env={"PYTHONIOENCODING": encoding, "LC_ALL": "C"})
    code, out, err = finish(process)
    assert (code, err) == (0, "")
    assert json.loads(out)["explained"]["description"] == "logit of ' are' − logit of ' is'"


@pytest.mark.parametrize(
    ("given", "read"),
    [
        slowly(b"caf\xc3\xa9\n", "café"),
        (b"\xef\xbb\xbfcaf\xc3\xa9\r\n", "café"),
        slowly(b"The doors", "The doors"),
    ],
)
def test_a_text_from_a_pipe(given, read):
    code, out, err = finish(start("explain", "-", "--json", "-", stdin=subprocess.PIPE), given)
    assert (code, err) == (0, "")
    assert "".join(json.loads(out)["word_texts"][1:]) == read


@slow
def test_an_argument_that_is_no_text():
    """Bytes that are no UTF-8, as a shell may pass them on."""
    process = start("explain", os.fsdecode(b"caf\xe9"))
    code, out, err = finish(process)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "pass whole Unicode characters; bytes that the locale cannot read need one of UTF-8" in err


def in_terminal(*command):
    """The exit code of a command, and what it writes to a terminal of 60 columns."""
    leader, follower = pty.openpty()
    env = os.environ | {"HF_HUB_OFFLINE": "1", "TERM": "xterm-256color", "COLUMNS": "60"}
    process = subprocess.Popen(
        list(command), stdin=follower, stdout=follower, stderr=follower, env=env, start_new_session=True
    )
    os.close(follower)
    written = b""
    while True:
        try:
            piece = os.read(leader, 4096)
        except OSError:  # the terminal is closed
            break
        if not piece:
            break
        written += piece
    process.wait()
    os.close(leader)
    return process.returncode, written


def test_in_a_terminal_progress_goes_and_the_cursor_comes_back():
    code = f"""
import sys
import lrpx.cli
from lrpx.cli import _streams
_streams.PATIENCE = 0.0
sys.argv[:] = ["lrpx", *{DOORS!r}]
lrpx.cli.main()
"""
    ended, written = in_terminal(sys.executable, "-c", code)
    assert ended == 0
    assert b"doors" in written
    assert b"--ledger" in written
    assert written.count(b"\x1b[?25l") == written.count(b"\x1b[?25h") > 0, "the cursor is hidden as often as shown"


@slow
def test_interrupted_while_it_imports_a_model_the_cursor_comes_back():
    """Ctrl-C under the spinner, which has put a stream of its own in the place of standard error."""
    code = """
import os, signal, sys, time
before = sys.stderr
class Spring:
    def find_spec(self, name, *rest):
        if name == "transformers.models.llama.modeling_llama":
            for _ in range(6000):
                if sys.stderr is not before:
                    break
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Spring())
sys.argv[:] = ["lrpx", "explain", "Hello"]
import lrpx.cli
lrpx.cli.main()
"""
    ended, written = in_terminal(sys.executable, "-c", code)
    assert ended == 130
    assert b"\x1b[?25l" in written, "the spinner turns, and hides the cursor"
    assert written.rfind(b"\x1b[?25h") > written.rfind(b"\x1b[?25l"), "the cursor is back"


def test_what_an_error_names_cannot_move_the_cursor(run):
    """Escapes, a zero byte, and what turns a text around, as they are written in Python."""
    code, out, err = run("explain", "The doors", "--model", "/\x1b[31m\u202e\x00")
    assert (code, out) == (2, "")
    assert "/\\x1b[31m\\u202e\\x00" in err
    assert err[:-1].isprintable()
