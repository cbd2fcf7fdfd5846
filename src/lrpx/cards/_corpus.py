"""The corpus: its texts as the model reads them, and the file they are in."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from lrpx._data.texts import stream_texts
from lrpx._tokens import cutting, encode
from lrpx.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from lrpx._data.texts import Text
    from lrpx.cards._reading import References
    from lrpx.inputs import Row
    from lrpx.model import BoundModel


def digest_of(path: Path) -> str:
    """The digest of a file.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; name another file") from error


def read_corpus(path: Path, text: str) -> Iterator[Text]:
    """The texts of a corpus, one by one.

    Args:
        path: of any size.
        text: the column of the texts.

    Raises:
        DataError: it cannot be read, or holds no text; when the line, or the end, is reached.
    """
    empty = True
    for each in stream_texts(path, text, None):
        empty = False
        yield each
    if empty:
        raise DataError(f"there is no text in {path}; name a file that holds some")


def length(model: BoundModel, text: str) -> int:
    """How many tokens a text has."""
    return len(encode(model.reader.text_tokenizer, text)["input_ids"])


def read_row(model: BoundModel, text: str, limit: int | None) -> Row:
    """A text as the model takes it, cut to so many tokens as its tokenizer cuts.

    Raises:
        InputError: the model cannot take it.
    """
    tokenizer = model.reader.text_tokenizer
    fields = encode(tokenizer, text)
    if limit is not None and len(fields["input_ids"]) > limit:
        cut = _cut(tokenizer, text, limit)
        fields = {name: list(cut[name]) for name in fields}
    return model.reader.row(fields | {"attention_mask": [1] * len(fields["input_ids"])})


def _cut(tokenizer: Any, text: str, limit: int, **more: bool) -> Any:
    """What a tokenizer makes of a text in so many tokens."""
    with cutting(tokenizer):
        return tokenizer(text, truncation=True, max_length=limit, **more)


def as_cut(model: BoundModel, text: str, limit: int | None) -> str:
    """What is left of a text that :func:`read_row` cuts; the tokens' own text where the tokenizer does not tell which
    characters they are of."""
    if limit is None or length(model, text) <= limit:
        return text
    tokenizer = model.reader.text_tokenizer
    if not tokenizer.is_fast:
        return str(tokenizer.decode(_cut(tokenizer, text, limit)["input_ids"]))
    places = _cut(tokenizer, text, limit, return_offsets_mapping=True)["offset_mapping"]
    kept = [(start, end) for start, end in places if start < end]
    return text[kept[0][0] : kept[-1][1]] if kept else ""


def texts_of(references: References, corpus: Path | None) -> Iterator[Text]:
    """The texts that were collected.

    Raises:
        DataError: the file cannot be read, or is another than the one that was collected.
    """
    path = references.corpus if corpus is None else corpus
    mend = "name the corpus with corpus="
    try:
        found = digest_of(path)
    except DataError as error:
        raise DataError(f"{str(error).rpartition(';')[0]}; {mend}") from error
    if found != references.settings["corpus"]["sha256"]:
        raise DataError(f"{path} is another file than the one that was collected; {mend}")
    yield from stream_texts(path, references.settings["text"], None)


def read_lines(references: References, lines: Collection[int], corpus: Path | None = None) -> dict[int, str]:
    """The texts of some lines of the corpus; see :func:`texts_of`."""
    last = max(lines, default=0)
    found: dict[int, str] = {}
    for each in texts_of(references, corpus):
        if each.line in lines:
            found[each.line] = each.text
        if each.line >= last:
            break
    return found
