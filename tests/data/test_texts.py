"""Texts with labels: every format gives the same, and what is wrong is named with its line."""

from __future__ import annotations

import csv
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lrpx._data.texts import Text, read_texts
from lrpx.errors import DataError

ROWS = [('a “good” film, "really"', "1"), ("<b>bad</b> & worse", "0"), ("ünïcödé 電影", None)]
WANTED = [(text, label) for text, label in ROWS]


def write(folder, ending):
    path = folder / f"texts{ending}"
    if ending == ".tsv":
        path.write_text("label\ttext\n" + "".join(f"{label or ''}\t{text}\n" for text, label in ROWS), encoding="utf-8")
    elif ending == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *((text, label or "") for text, label in ROWS)])
    elif ending == ".jsonl":
        path.write_text(
            "".join(json.dumps({"text": t, "label": None if n is None else int(n)}) + "\n" for t, n in ROWS)
        )
    elif ending == ".parquet":
        labels = [None if label is None else float(label) for _, label in ROWS]
        pq.write_table(pa.table({"text": [text for text, _ in ROWS], "label": labels, "more": [1, 2, 3]}), path)
    return path


@pytest.mark.parametrize("ending", [".tsv", ".csv", ".jsonl", ".parquet"])
def test_every_format_says_the_same(ending, tmp_path):
    found = read_texts(write(tmp_path, ending))
    assert [(each.text, each.label) for each in found] == WANTED
    assert [each.text for each in read_texts(write(tmp_path, ending), limit=2)] == [text for text, _ in WANTED[:2]]
    assert {each.label for each in read_texts(write(tmp_path, ending), label=None)} == {None}


@pytest.mark.parametrize("ending", [".tsv", ".jsonl", ".parquet"])
def test_what_a_decoder_has_written(ending, tmp_path):
    path, written = tmp_path / f"texts{ending}", ["the keys", None]
    rows = [{"text": "a", "said": said} for said in written]
    if ending == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif ending == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        path.write_text("text\tsaid\na\tthe keys\na\t\n")
    assert [each.decoder for each in read_texts(path, label="said", decoder="said")] == written
    assert [each.decoder for each in read_texts(path)] == [None, None]
    with pytest.raises(DataError, match=r"has no column 'decoder', only 'text'.*with --decoder"):
        read_texts(path, decoder="decoder")


@pytest.mark.parametrize("ending", [".csv", ".tsv"])
def test_two_columns_of_one_name(ending, tmp_path):
    """Which of them is meant nobody can tell; of columns without a name nobody asks for one."""
    path, between = tmp_path / f"texts{ending}", {".csv": ",", ".tsv": "\t"}[ending]
    path.write_text("\n".join(between.join(row) for row in (["text", "text"], ["good", "bad"])))
    with pytest.raises(DataError, match=rf"texts{ending} has two columns called 'text'; rename one of them"):
        read_texts(path)
    path.write_text("\n".join(between.join(row) for row in (["text", "", ""], ["good", "", "bad"])))
    assert [each.text for each in read_texts(path)] == ["good"]


def test_two_columns_of_one_name_in_a_parquet_file(tmp_path):
    path = tmp_path / "texts.parquet"
    pq.write_table(pa.table([["good"], ["bad"], ["1"]], names=["text", "text", "label"]), path)
    with pytest.raises(DataError, match=r"texts.parquet has two columns called 'text'; rename one of them"):
        read_texts(path)
    pq.write_table(pa.table([["good"], ["bad"], ["1"]], names=["text", "more", "more"]), path)
    assert [each.text for each in read_texts(path)] == ["good"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_ends_of_lines_in_a_quoted_text_are_the_texts_own(end, tmp_path):
    path, text = tmp_path / "texts.csv", "one\r\ntwo\nthree\rfour"
    path.write_bytes(f'text,label{end}"{text}",1{end}five,2{end}'.encode())
    assert [(each.text, each.label) for each in read_texts(path)] == [(text, "1"), ("five", "2")]


def test_plain_text_and_windows_lines(tmp_path):
    plain = tmp_path / "plain.txt"
    plain.write_bytes("\ufeffone\r\n\r\n  two\t2 \n".encode())
    assert read_texts(plain) == [Text(1, "one", None), Text(3, "two\t2", None)]
    table = tmp_path / "table.tsv"
    table.write_bytes(b"text\tlabel\r\none\t1\r\n")
    assert read_texts(table) == [Text(2, "one", "1")]


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.tsv", "sentence\tlabel\nx\t1\n", r"a.tsv:2 has no column 'text', only 'sentence', 'label'; .*--text"),
        ("a.tsv", "text\tlabel\nx\n", r"a.tsv:2 has 1 columns and the first line 2; part them by tabs"),
        ("a.csv", 'text,label\n"x,1\n', r"a.csv:\d: unexpected end of data; quote"),
        ("a.csv", "text,label\nx,1,2\n", r"a.csv:2 has 3 columns and the first line 2; part them by commas"),
        ("a.jsonl", '{"text": "x"}\n{"text": \n', r"a.jsonl:2 is no JSON .*; write one object a line"),
        (
            "a.jsonl",
            '{"text": "x", "label": 1, "text": "y"}\n',
            r"a.jsonl:1 says text, label, text, .* stands twice; leave",
        ),
        ("a.csv", 'text\n"' + "x" * 200_000 + '"\n', r"a.csv:2: field larger .*; end each quote, .* a .jsonl or"),
        ("a.jsonl", '["x"]\n', r"a.jsonl:1 holds list; write one object a line"),
        ("a.jsonl", '{"text": 3}\n', r"a.jsonl:1: the column 'text' holds int; give texts"),
        ("a.parquet", "text", r"cannot read .*a.parquet: .*; name a Parquet file"),
        ("a.txt", "\n  \n", r"there is no text in .*a.txt"),
        ("a.tsv", "", r"there is no text in .*a.tsv"),
        ("a.csv", "text,label\n", r"there is no text in .*a.csv"),
        ("a.xlsx", "text", r"ends in '.xlsx'; name a file that ends in .tsv, .csv, .jsonl, .parquet or .txt"),
        ("a.txt", b"\xff\xfe", r"a.txt is not UTF-8 .*; convert it"),
        ("a.txt", "good\nbad".encode("utf-16-le"), r"a.txt:1 holds characters of zero, as UTF-16 does; convert it"),
        ("a.tsv", 'text\n5" or so\n"a ""good"" one"\n', r"a.tsv:3 is quoted as a .csv is, .*; write it without"),
    ],
)
def test_what_is_wrong_is_named(name, content, match, tmp_path):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=match):
        read_texts(path)


def test_a_parquet_file_without_the_column_and_no_file(tmp_path):
    with pytest.raises(DataError, match=r"has no column 'body', only 'text', 'label', 'more'"):
        read_texts(write(tmp_path, ".parquet"), text="body")
    with pytest.raises(DataError, match=r"cannot read .*: No such file"):
        read_texts(tmp_path / "none.txt")
