"""A file of texts to lines of JSON, written as they are explained; started again, the run goes on."""

from __future__ import annotations

import fcntl
import io
import json
import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import lrpx
from lrpx.cli import _lists
from tests.cli.commands import finish, start

TEXTS = ["The doors of the house", "The key to the cabinets", "", "The boys near the tree", "A film"]
ASKED = ("--target", " are", "--contrast", " is")


@pytest.fixture(autouse=True)
def two_at_a_time(monkeypatch):
    """So that a few texts are several steps."""
    monkeypatch.setattr(_lists, "TOGETHER", 2)


@pytest.fixture
def texts(tmp_path):
    """A file of texts, with an empty line in it."""
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return path


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_text_is_a_line_with_the_librarys_numbers(run, texts, tmp_path):
    found = tmp_path / "found.jsonl"
    assert run("explain", "--texts", texts, "--json", found, *ASKED) == (0, "", "")
    assert [row["line"] for row in rows(found)] == [1, 2, 4, 5]
    explainer = lrpx.Explainer.from_pretrained()
    for row in rows(found):
        wanted = explainer(TEXTS[row["line"] - 1], " are", " is")
        assert row["parts"]["tokens"]["values"] == pytest.approx(wanted.relevance.tolist(), rel=1e-4, abs=1e-5)
        assert tuple(row["tokens"]) == wanted.tokens


def test_only_a_file_begins_with_a_byte_order_mark(run, tmp_path):
    """Where a line of texts begins with that character, it is one of the text."""
    path, found = tmp_path / "texts.txt", tmp_path / "found.jsonl"
    path.write_text("\ufeffThe doors\n\ufeffThe doors\n", encoding="utf-8")
    assert run("explain", "--texts", path, "--json", found, *ASKED) == (0, "", "")
    explainer = lrpx.Explainer.from_pretrained()
    wanted = [explainer(text, " are", " is").ids for text in ("The doors", "\ufeffThe doors")]
    assert [tuple(row["ids"]) for row in rows(found)] == wanted


def test_from_a_pipe_to_a_pipe(run, texts, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(texts.read_bytes())))
    code, out, err = run("explain", "--texts", "-", "--json", "-", *ASKED)
    assert (code, err) == (0, "")
    assert [json.loads(line)["line"] for line in out.splitlines()] == [1, 2, 4, 5]


def test_without_a_file_they_are_shown_one_after_another(run, texts):
    code, out, err = run("explain", "--texts", texts, *ASKED)
    assert (code, err) == (0, "")
    places = [out.index(word) for word in ("doors", "key", "boys")]
    assert places == sorted(places)


def test_a_line_may_say_what_is_asked_of_it(run, tmp_path):
    path, found = tmp_path / "texts.jsonl", tmp_path / "found.jsonl"
    lines = [
        {"text": "The doors of the house", "target": " are"},
        {"text": "The doors of the house", "target": 262, "contrast": " is", "position": 2},
        {"ids": [0, 5, 6]},
        "The doors",
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    assert run("explain", "--texts", path, "--json", found, "--target", " were", "--method", "lrp") == (0, "", "")
    first, second, third, last = rows(found)
    explainer = lrpx.Explainer.from_pretrained()
    for row, wanted in (
        (first, explainer("The doors of the house", " are", method="lrp")),
        (second, explainer("The doors of the house", 262, " is", "lrp", position=2)),
        (third, explainer([0, 5, 6], " were", method="lrp")),
        (last, explainer("The doors", " were", method="lrp")),
    ):
        assert row["explained"]["description"] == wanted.explained.description
        assert row["parts"]["tokens"]["values"] == pytest.approx(wanted.relevance.tolist(), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize(
    "several",
    [
        pytest.param((), id="one method", marks=pytest.mark.slow),
        pytest.param(("--method", "lrp", "--method", "attnlrp"), id="two"),
    ],
)
def test_stopped_anywhere_it_goes_on_to_the_same_file(run, texts, tmp_path, several):
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "cut.jsonl"
    arguments = ("explain", "--texts", texts, *ASKED, *several)
    assert run(*arguments, "--json", whole)[0] == 0
    content = whole.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    assert len(ends) == 4 * (2 if several else 1)
    for length in (0, 1, ends[0] - 1, ends[0], ends[0] + 40, ends[1], ends[-1] - 1, ends[-1]):
        cut.write_bytes(content[:length])
        code, out, _ = run(*arguments, "--json", cut)
        assert (code, out) == (0, "")
        now = [row | {"parts": None, "explained": None, "prediction": None} for row in rows(cut)]
        then = [row | {"parts": None, "explained": None, "prediction": None} for row in rows(whole)]
        assert now == then, "but for the rounding of other batches"
        kept = content[
            : max([0, *(end for i, end in enumerate(ends, 1) if end <= length and not i % (len(ends) // 4))])
        ]
        assert cut.read_bytes().startswith(kept)


@pytest.mark.parametrize(
    "changed",
    [
        ["--target", " were"],
        ["--method", "lrp"],
        ["--ledger"],
        ["--words"],
        ["--dtype", "float64"],
        ["--position", "1"],
    ],
    ids=" ".join,
)
def test_results_of_another_run_are_left_as_they_are(run, texts, tmp_path, changed):
    found = tmp_path / "found.jsonl"
    run("explain", "--texts", texts, "--json", found)
    before = found.read_bytes()
    code, out, err = run("explain", "--texts", texts, "--json", found, *changed)
    assert (code, out) == (2, "")
    assert "holds something else than the results of this run, at line 1" in err
    assert found.read_bytes() == before
    texts.write_text(texts.read_text().replace("key", "keys"))
    assert "at line 2" in run("explain", "--texts", texts, "--json", found)[2]
    assert found.read_bytes() == before


@pytest.mark.slow
def test_results_of_another_chat_template_or_tokenizer_are_left_as_they_are(run, tmp_path):
    explainer = lrpx.Explainer.from_pretrained()
    explainer.tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"
    explainer.model.save_pretrained(tmp_path / "model")
    explainer.tokenizer.save_pretrained(tmp_path / "model")
    texts, found = tmp_path / "texts.jsonl", tmp_path / "found.jsonl"
    texts.write_text('{"messages": [{"role": "user", "content": "Is it?"}]}\n{"text": "The doors"}\n')
    command = ("explain", "--texts", texts, "--model", tmp_path / "model", "--json", found)
    assert run(*command)[0] == 0
    before = found.read_bytes()
    assert run(*command)[0] == 0
    changes = {
        "chat_template.jinja": lambda text: text.replace(":", " says"),
        "tokenizer.json": lambda text: json.dumps(json.loads(text) | {"post_processor": None}),
    }
    for name, change in changes.items():
        path = tmp_path / "model" / name
        was = path.read_text()
        path.write_text(change(was))
        code, _, err = run(*command)
        assert (code, "holds something else than the results of this run" in err) == (2, True)
        assert found.read_bytes() == before
        path.write_text(was)


def test_another_file_is_left_as_it_is(run, texts, tmp_path):
    found = tmp_path / "found.jsonl"
    for content in (b"notes", b"notes\n", b'{"line": 1}\n', b'{"line": 1, "run": [\nnotes\n', b"{\n"):
        found.write_bytes(content)
        code, _, err = run("explain", "--texts", texts, "--json", found)
        assert (code, err.count("\n")) == (2, 1)
        assert "holds something else than" in err
        assert found.read_bytes() == content


def test_two_runs_do_not_write_one_file(run, texts, tmp_path):
    found = tmp_path / "found.jsonl"
    with found.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code, _, err = run("explain", "--texts", texts, "--json", found)
    assert code == 2
    assert "another run is writing" in err


def test_a_text_that_cannot_be_explained_stands_with_its_error_beside_the_others(run, tmp_path):
    path, found = tmp_path / "texts.txt", tmp_path / "found.jsonl"
    path.write_text("The doors\n" + "word " * 600 + "\nThe key\n")
    code, out, err = run("explain", "--texts", path, "--json", found)
    assert (code, out) == (2, "")
    assert err == "lrpx: 1 text could not be explained; its line says why\n"
    first, second, third = rows(found)
    assert "the model's context is 512; shorten it" in second["error"]
    assert first["tokens"][1:] == ["The", " doors"]
    assert third["tokens"][1:] == ["The", " key"]
    again = found.read_bytes()
    assert run("explain", "--texts", path, "--json", found)[0] == 2
    assert found.read_bytes() == again
    code, out, err = run("explain", "--texts", path)
    assert (code, err.count("\n")) == (2, 2)
    assert "lrpx: line 2: the input has 6" in err
    assert "key" in out


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "line 1 of {path} is no JSON"),
        (b'{"target": " are"}', "line 1 of {path} has no text"),
        (b'{"text": "a", "ids": [1]}', "line 1 of {path} has text and ids; write one of them"),
        (b'{"text": "a", "ids": [1], "messages": []}', "has text, ids and messages; write one of them"),
        (b"[5, 7]", "has no text"),
        (b'{"text": null}', "has no text"),
        (b'{"text": "a", "target": " is", "target": " are"}', "line 1 of {path} says text, target, target, of which"),
        (b'{"text": 5}', "the text in line 1 of {path} is int"),
        (b'{"text": "a", "colour": 1}', "has 'colour'; it may have text, pair"),
        (b'{"text": "a", "position": "b"}', "the position in line 1 of {path} is str"),
        (b'{"text": "a", "target": [1]}', "the target in line 1 of {path} is list"),
        (b'{"text": "a", "target": true}', "is bool"),
        (b'"a"\n"caf\xe9"', "line 2 of {path} is not UTF-8, at byte 4"),
    ],
)
def test_a_line_that_is_none_is_refused_by_its_number(run, tmp_path, content, said):
    path = tmp_path / "texts.jsonl"
    path.write_bytes(content)
    refuses(run, path, said)


def test_null_in_a_line_is_what_it_does_not_say(run, tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "The doors", "target": null, "position": null, "pair": null}\n')
    code, out, _ = run("explain", "--texts", path, "--target", " are", "--json", "-")
    assert (code, json.loads(out)["explained"]["description"]) == (0, "logit of ' are'")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"one\rtwo\rthree", "line 1 of {path} has ends of lines that are \\r alone; write \\n"),
        (b"one\nt\0wo", "line 2 of {path} holds bytes of zero, as UTF-16 does"),
    ],
)
def test_lines_of_other_systems(run, tmp_path, content, said):
    path = tmp_path / "texts.txt"
    path.write_bytes(content)
    code, out, err = run("explain", "--texts", path, "--json", "-")
    assert (code, err) == (2, "lrpx: 1 text could not be explained; its line says why\n")
    assert said.format(path=path) in json.loads(out.splitlines()[-1])["error"]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_a_file_that_begins_as_utf16_is_refused_whole(run, tmp_path, encoding):
    path = tmp_path / "texts.txt"
    path.write_bytes("one\ntwo".encode(encoding))
    code, out, err = run("explain", "--texts", path, "--json", tmp_path / "found.jsonl")
    assert (code, out) == (2, "")
    assert "as UTF-16 does, and no UTF-8; convert it first, such as by iconv -f utf-16 -t utf-8" in err
    assert not (tmp_path / "found.jsonl").exists()


def refuses(run, path, said):
    """The last line is refused, and a good one behind it is explained."""
    path.write_bytes(path.read_bytes() + b'\n"The doors"\n')
    code, out, err = run("explain", "--texts", path, "--json", "-")
    assert (code, err) == (2, "lrpx: 1 text could not be explained; its line says why\n")
    *_, wrong, right = map(json.loads, out.splitlines())
    assert said.format(path=path) in wrong["error"]
    assert right["line"] == wrong["line"] + 1
    assert right["tokens"][1:] == ["The", " doors"]


@pytest.mark.slow
def test_a_run_with_a_malformed_line_goes_on_where_it_was_stopped(run, tmp_path):
    path, found = tmp_path / "texts.jsonl", tmp_path / "found.jsonl"
    path.write_bytes(b'"The doors"\n{"text": \n"caf\xe9"\n"The key"\n')
    arguments = ("explain", "--texts", path, "--json", found)
    assert run(*arguments)[0] == 2
    assert ["error" in row for row in rows(found)] == [False, True, True, False]
    whole = found.read_bytes()
    for keep in range(4):
        found.write_bytes(b"".join(whole.splitlines(keepends=True)[:keep]) + b'{"li')
        code, out, err = run(*arguments)
        assert (code, out) == (2, "")
        assert "lrpx: 2 texts could not be explained; their lines say why\n" in err
        assert found.read_bytes()[:200] == whole[:200]
        assert [row["line"] for row in rows(found)] == [1, 2, 3, 4]
    code, _, err = run("explain", "--texts", path)
    assert (code, err.count("lrpx: line ")) == (2, 2)


def test_a_corrected_line_is_told_how_to_go_on(run, tmp_path):
    path, found = tmp_path / "texts.jsonl", tmp_path / "found.jsonl"
    arguments = ("explain", "--texts", path, "--json", found)
    path.write_text('"The doors"\n{"text": \n"The key"\n')
    assert run(*arguments)[0] == 2
    path.write_text('"The doors"\n{"text": "The"}\n"The key"\n')
    code, _, err = run(*arguments)
    assert code == 2
    assert "at line 2; where its text was corrected since, remove that line and those after it; else" in err
    found.write_bytes(found.read_bytes().splitlines(keepends=True)[0])
    assert run(*arguments)[0] == 0
    assert [row["line"] for row in rows(found)] == [1, 2, 3]


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_a_text_is_refused(run, tmp_path, content):
    path, found = tmp_path / "texts.txt", tmp_path / "found.jsonl"
    path.write_text(content)
    code, out, err = run("explain", "--texts", path, "--json", found)
    assert (code, out, err) == (2, "", f"lrpx: {path} has no text; write one a line\n")
    assert not found.exists()


def test_a_text_too_large_for_the_memory_stops_no_other(run, texts, tmp_path, monkeypatch):
    explain = lrpx.Explainer.__call__

    def limited(self, inputs, *rest, **how):
        if any("boys" in text for text in inputs):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return explain(self, inputs, *rest, **how)

    monkeypatch.setattr(lrpx.Explainer, "__call__", limited)
    assert run("explain", "--texts", texts, "--json", tmp_path / "found.jsonl")[0] == 2
    assert [row.get("error") for row in rows(tmp_path / "found.jsonl")] == [None, None, _lists.NO_MEMORY, None]


def test_a_target_that_is_no_token_is_told_before_anything_is_written(run, texts, tmp_path):
    found = tmp_path / "found.jsonl"
    code, _, err = run("explain", "--texts", texts, "--json", found, "--target", "antidisestablishmentarian")
    assert (code, found.exists()) == (2, False)
    assert "--target-id" in err


@pytest.mark.parametrize("end", ["\n", "", ' "a"'], ids=["a line", "without its end", "cut"])
@pytest.mark.parametrize("changed", [("--method", "lrp"), ("--method", "attnlrp", "--method", "lrp")])
def test_the_only_line_of_another_run_is_left_as_it_is(run, tmp_path, changed, end):
    """Which is shorter than the lines of a text would be, or looks as if it was cut."""
    path, found = tmp_path / "texts.txt", tmp_path / "found.jsonl"
    path.write_text("The doors\n")
    run("explain", "--texts", path, "--json", found)
    before = (found.read_text().rstrip()[:-40] if end == ' "a"' else found.read_text().rstrip() + end).encode()
    found.write_bytes(before)
    code, out, err = run("explain", "--texts", path, "--json", found, *changed)
    assert (code, out) == (2, "")
    assert "holds something else than the results of this run, at line 1" in err
    assert found.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"ids": "The doors"}', "the ids in line 1 of {path} is str; write it as a list of whole numbers"),
        ('{"ids": [true]}', "the ids in"),
        ('{"ids": ["The", "doors"]}', "the ids in"),
        ('{"messages": "The doors"}', "the messages in line 1 of {path} is str; write it as a list of messages"),
        ('{"messages": [5, 6]}', "the messages in"),
        ('{"messages": [[5, 6]]}', "the messages in"),
        ('{"text": "a", "choices": "b"}', 'write it as a list of texts, ["…", "…"]'),
        ('{"text": "a", "pair": ["b", "c"]}', "the pair in line 1 of {path} is list; write it in quotes"),
    ],
)
def test_a_word_of_a_line_holds_nothing_else(run, tmp_path, content, said):
    path = tmp_path / "texts.JSONL"
    path.write_text(content)
    refuses(run, path, said)


def test_ids_that_are_none_are_refused_by_their_line(run, tmp_path):
    path = tmp_path / "ids.txt"
    for wrong in ("The doors", "9" * 5000):
        path.write_text(f"5 6\n{wrong}\n")
        code, out, err = run("explain", "--texts", path, "--ids", "--json", "-")
        assert (code, err.count("\n")) == (2, 1)
        assert f"line 2 of {path}: '{wrong[:60]}' are no token ids" in json.loads(out.splitlines()[1])["error"]


@pytest.mark.slow
def test_from_a_named_pipe_into_another(tmp_path):
    given, found = tmp_path / "given", tmp_path / "found"
    os.mkfifo(given)
    os.mkfifo(found)
    with subprocess.Popen(["cat", found], stdout=subprocess.PIPE) as reader:
        process = start("explain", "--texts", given, "--json", found)
        with given.open("w") as file:
            file.write("The doors\nThe key\n")
        assert finish(process) == (0, "", "")
        lines = reader.stdout.read().splitlines()
    assert [json.loads(line)["line"] for line in lines] == [1, 2]


def test_a_device_is_no_file_to_go_on_with(run, texts):
    null, full = Path("/dev/null"), Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    assert run("explain", "--texts", texts, "--json", null) == (0, "", "")
    code, out, err = run("explain", "--texts", texts, "--json", full)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "cannot write /dev/full: No space left" in err


@pytest.mark.slow
def test_where_there_is_no_room_the_file_is_named_and_the_run_goes_on_later(run, texts, tmp_path):
    found = tmp_path / "found.jsonl"
    arguments = ("explain", "--texts", texts, "--json", found)
    unmeasured = {"COVERAGE_PROCESS_CONFIG": "", "COVERAGE_PROCESS_START": ""}  # whose file would have no room, either
    small = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (2500, 2500))
    process = start(*arguments, env=unmeasured, preexec_fn=small)
    code, out, err = finish(process)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"cannot write {found}: " in err
    assert "run the same command again" in err
    begun = found.read_bytes()
    assert 0 < len(begun) <= 2500
    assert run(*arguments)[0] == 0
    assert found.read_bytes().startswith(begun[: begun.rfind(b"\n") + 1])
    assert [row["line"] for row in rows(found)] == [1, 2, 4, 5]
