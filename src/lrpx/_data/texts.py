"""Texts with labels from a file: tab- or comma-separated, lines of JSON, Parquet, or plain text, a line each."""

from __future__ import annotations

import csv
import json
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from lrpx._files import named_once
from lrpx.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

PLAIN: Final = (".txt", "")
"""What plain text is called."""
TABLES: Final = (".tsv", ".csv", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Text:
    """A text of a file.

    Args:
        line: where it stands, from 1; in Parquet the number of the row.
        text: the text.
        label: its label as the file writes it, or None.
        decoder: what an encoder-decoder model has written so far, or None.
    """

    line: int
    text: str
    label: str | None
    decoder: str | None = None


def read_texts(
    path: Path,
    text: str = "text",
    label: str | None = "label",
    limit: int | None = None,
    decoder: str | None = None,
    *,
    whole: bool = False,
) -> list[Text]:
    """The texts of a file. White space around them and lines of nothing else are left out.

    Args:
        path: ``.tsv`` (tabs, no quotes), ``.csv``, ``.jsonl`` or ``.parquet``, with named columns; or ``.txt``, or any
            name without an ending, a text a line.
        text: the column of the texts.
        label: that of the labels, if there is such a column; None reads none.
        limit: take the first so many.
        decoder: the column of what an encoder-decoder model has written so far; None reads none.
        whole: leave the white space around them, but for the ends of lines of plain text.

    Raises:
        DataError: the file cannot be read, has no such column or no text, or a line is not as the others.
    """
    found = list(islice(stream_texts(path, text, label, decoder, whole=whole), limit))
    if not found:
        raise DataError(f"there is no text in {path}; name a file that holds some")
    return found


def stream_texts(
    path: Path,
    text: str = "text",
    label: str | None = "label",
    decoder: str | None = None,
    *,
    whole: bool = False,
) -> Iterator[Text]:
    """The same one by one, of a file of any size; none where there is none.

    Raises:
        DataError: as :func:`read_texts` does, when the line is reached.
    """
    if path.suffix not in PLAIN + TABLES:
        raise DataError(f"{path} ends in {path.suffix!r}; name a file that ends in {', '.join(TABLES)} or .txt")
    number = 0
    try:
        columns = [text, *([] if label is None else [label]), *([] if decoder is None else [decoder])]
        for number, row in _parquet(path, text, columns) if path.suffix == ".parquet" else _lines(path, text):
            given = _text(path, number, row, text, "texts with --text")
            if given is not None and given.strip():
                if "\0" in given:
                    raise DataError(f"{path}:{number} holds characters of zero, as UTF-16 does; convert it to UTF-8")
                said = None if decoder is None else _text(path, number, row, decoder, "decoder's texts with --decoder")
                if not whole:
                    given = given.strip()
                yield Text(number, given, None if label is None else _label(row.get(label)), said or None)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error.reason}, after line {number}); convert it") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; name another file") from error


def read_columns(path: Path, columns: Sequence[str], limit: int | None = None) -> list[tuple[int, dict[str, str]]]:
    """Some columns of a table, each with the number of its line.

    Args:
        path: ``.tsv`` (tabs, no quotes), ``.csv`` or ``.jsonl``, with named columns.
        columns: which, all of them texts.
        limit: take the first so many.

    Raises:
        DataError: the file cannot be read, lacks a column, holds something else than a text, or is empty.
    """
    kinds = [each for each in TABLES if each != ".parquet"]
    if path.suffix not in kinds:
        raise DataError(f"{path} ends in {path.suffix!r}; name a file that ends in {', '.join(kinds)}")
    found: list[tuple[int, dict[str, str]]] = []
    try:
        for number, row in _lines(path, columns[0]):
            if limit is not None and len(found) == limit:
                break
            wrong = next((name for name in columns if not isinstance(row.get(name), str)), None)
            if wrong is not None:
                what = f"holds {type(row[wrong]).__name__}" if wrong in row else "is missing"
                raise DataError(f"{path}:{number}: the column {wrong!r} {what}; give texts in {', '.join(columns)}")
            found.append((number, {name: row[name] for name in columns}))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}); convert it") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}; name another file") from error
    if not found:
        raise DataError(f"there is no line in {path}; name a file that holds some")
    return found


def _text(path: Path, number: int, row: Mapping[str, Any], column: str, called: str) -> str | None:
    """What a column holds.

    Raises:
        DataError: there is no such column, or it holds something else than a text.
    """
    if column not in row:
        raise DataError(
            f"{path}:{number} has no column {column!r}, only {', '.join(map(repr, row)) or 'none'}; name the column "
            f"of the {called}"
        )
    found = row[column]
    if found is not None and not isinstance(found, str):
        raise DataError(f"{path}:{number}: the column {column!r} holds {type(found).__name__}; give texts")
    return found


def _label(value: Any) -> str | None:
    """A label as a text; a whole number that a format has as a float is one."""
    if value is None or value == "":
        return None
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _lines(path: Path, text: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    newline = "" if path.suffix == ".csv" else None  # which are in quotes a text's own
    with path.open(encoding="utf-8-sig", newline=newline) as file:
        if path.suffix == ".csv":
            yield from _comma(path, file)
        elif path.suffix == ".jsonl":
            yield from _json(path, file)
        elif path.suffix in PLAIN:
            yield from ((number, {text: line.removesuffix("\n")}) for number, line in enumerate(file, 1))
        else:
            head = next(file, "").rstrip("\n").split("\t")
            for number, line in enumerate(file, 2):
                cells = line.rstrip("\n").split("\t")
                if cells != [""]:
                    if any(map(_is_quoted, cells)):
                        raise DataError(
                            f"{path}:{number} is quoted as a .csv is, and quotes in a .tsv are its texts' own; write "
                            "it without them, or as a .csv"
                        )
                    yield number, _row(path, number, head, cells, "tabs")


def _is_quoted(cell: str) -> bool:
    """Whether a cell is quoted, with its own quotes doubled, as spreadsheets and pandas write one that holds quotes.

    >>> _is_quoted('"a ""b"" c"'), _is_quoted('"a" and "b"'), _is_quoted('"a"')
    (True, False, False)
    """
    inner = cell[1:-1]
    return len(cell) > 1 and cell[0] == cell[-1] == '"' and '""' in inner and '"' not in inner.replace('""', "")


def _comma(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.reader(lines, strict=True)
    try:
        head = next(reader, [])
        for cells in reader:
            if cells:
                yield reader.line_num, _row(path, reader.line_num, head, cells, "commas")
    except csv.Error as error:
        mend = "quote texts with commas or quotes in them"
        if "field larger" in str(error):  # one text of a book, or a quote that nothing ends
            mend = "end each quote, and write texts as long as that into a .jsonl or a .parquet file"
        raise DataError(f"{path}:{reader.line_num}: {error}; {mend}") from error


def _row(path: Path, number: int, head: list[str], cells: list[str], between: str) -> dict[str, str]:
    twice = next((name for name in head if name and head.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"{path} has two columns called {twice!r}; rename one of them")
    if len(cells) != len(head):
        raise DataError(
            f"{path}:{number} has {len(cells)} columns and the first line {len(head)}; part them by {between}"
        )
    return dict(zip(head, cells, strict=True))


def _json(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=partial(named_once, f"{path}:{number}"))
        except DataError:
            raise
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}:{number} is no JSON ({error}); write one object a line") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number} holds {type(row).__name__}; write one object a line")
        yield number, row


def _parquet(path: Path, text: str, columns: Sequence[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if text not in names:
                raise DataError(
                    f"{path} has no column {text!r}, only {', '.join(map(repr, names))}; name the column of the texts "
                    "with --text"
                )
            wanted = [name for name in names if name in columns]
            twice = next((name for name in wanted if names.count(name) > 1), None)
            if twice is not None:
                raise DataError(f"{path} has two columns called {twice!r}; rename one of them")
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=wanted):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except pa.ArrowException as error:
        raise DataError(f"cannot read {path}: {str(error).splitlines()[0]}; name a Parquet file") from error
