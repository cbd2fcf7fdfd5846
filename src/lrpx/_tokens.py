"""Text, chat messages and token ids: what each token reads as, and which tokens make up a word."""

from __future__ import annotations

import json
import operator
import re
import unicodedata
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import groupby, pairwise
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Literal

import jinja2
import torch

from lrpx.errors import InputError, TargetError

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from lrpx.errors import LRPxError

# How a vocabulary writes text. "bytes": one character per byte. "spaces": a mark for each space, <0xE2> for
# a byte. "wordpiece": a mark on the pieces that continue a word. "unknown": only decoding can tell.
Kind = Literal["bytes", "spaces", "wordpiece", "unknown"]

TEXTS = "sequence_ids"
"""Of which of two texts each token is, which a tokenizer knows beside its fields."""

# Han, Hiragana and Katakana, the scripts that put no space between words.
_CJK = re.compile(
    "[\u2e80-\u2fdf\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f"
    "\U0001b000-\U0001b16f\U00020000-\U000323af]"
)
_UNSPACED = re.compile(f"{_CJK.pattern}|[\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u19e0-\u19ff\uac00-\ud7a3]")
"""Characters of scripts without spaces between words, Thai, Lao, Tibetan, Burmese and Khmer too, and of Korean."""


@dataclass(frozen=True)
class Tokens:
    """``T`` tokens as a person reads them, and the words they make up.

    Args:
        ids: the token ids, ``T`` of them.
        pieces: what each token adds to the text, with the white space before it. A character cut across
            ``n`` tokens reads ``"🙂[1/n]"`` to ``"🙂[n/n]"``; bytes that never complete a character read
            in hexadecimal, ``"<F0 9F>"``.
        special: whether each token is one of the tokenizer's special tokens. The unknown token is not,
            unless it has another role too: it stands for a part of the text.
        word_spans: half-open token ranges ``(start, end)`` that cover all tokens in order.
        word_texts: the text of each word, with the white space before it and its cut characters whole.
    """

    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    special: tuple[bool, ...]
    word_spans: tuple[tuple[int, int], ...]
    word_texts: tuple[str, ...]


def describe(tokenizer: PreTrainedTokenizerBase | None, ids: Sequence[int], *, is_read: bool = False) -> Tokens:
    r"""What ``T`` token ids read as.

    A word is what white space delimits, together with the white space before it. A special token is a word
    alone, and so is a token of white space that breaks the line. A Han, Hiragana or Katakana character
    starts a word, and so does a letter or digit after one. In a WordPiece vocabulary a word is a piece
    and the ``##`` pieces that continue it. Text is spelled the way the tokenizer itself spells it: a
    SentencePiece tokenizer's prefix space stays, and WordPiece pieces are a space apart except before
    ``. , ! ?`` and between two Chinese or Japanese characters.

    Args:
        tokenizer: a transformers tokenizer; with None, the ids themselves are shown.
        ids: ``T`` token ids.
        is_read: whether they are what an encoder reads, for which a tokenizer of translations may have a vocabulary of
            its own.

    Raises:
        InputError: an id is not a whole number or not in the vocabulary.

    >>> from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    >>> from transformers import PreTrainedTokenizerFast
    >>> backend = Tokenizer(models.BPE({"a": 0, "b": 1, "Ġ": 2, "Ã": 3, "©": 4}, []))
    >>> backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    >>> backend.decoder = decoders.ByteLevel()
    >>> tokens = describe(PreTrainedTokenizerFast(tokenizer_object=backend), [0, 1, 2, 1, 3, 4])
    >>> tokens.pieces
    ('a', 'b', ' ', 'b', 'é[1/2]', 'é[2/2]')
    >>> tokens.word_texts, tokens.word_spans
    (('ab', ' bé'), ((0, 2), (2, 6)))
    >>> describe(None, [7, 12]).pieces
    ('#7', ' #12')
    """
    try:
        numbers = tuple(operator.index(number) for number in ids)
    except TypeError as error:
        raise InputError("the token ids are no flat list of integers; pass ids such as [5, 7]") from error
    if tokenizer is None:
        shown = tuple(f"{' ' if at else ''}#{number}" for at, number in enumerate(numbers))
        return Tokens(numbers, shown, (False,) * len(shown), tuple(pairwise(range(len(shown) + 1))), shown)
    strings = _vocabulary_strings(tokenizer, numbers)
    if is_read and not tokenizer.is_fast and tokenizer.convert_tokens_to_ids(strings) != list(numbers):
        own = {number: string for string, number in tokenizer.get_vocab().items()}
        strings = [own.get(number, string) for number, string in zip(numbers, strings, strict=True)]
    special_ids = _special_ids(tokenizer)
    special = tuple(number in special_ids for number in numbers)
    kind, mark = _spelling(tokenizer)
    if kind == "unknown":
        contents = _contents_by_decoding(tokenizer, numbers, strings, special)
    else:
        tokens = zip(numbers, strings, special, strict=True)
        contents = _contents(kind, mark, tokenizer.added_tokens_decoder, tokens)
    pieces = list(strings)
    starts = [True] * len(numbers)
    for first, end in _runs(special):
        read, begin = _read(contents[first:end])
        if kind == "wordpiece":
            begin = [not string.startswith(mark) for string in strings[first:end]]
        pieces[first:end] = [piece or pieces[first + at] for at, piece in enumerate(read)]
        starts[first + 1 : end] = begin[1:]
    spans = tuple(pairwise([*(at for at, start in enumerate(starts) if start), len(numbers)]))
    texts = (_text(b"".join(contents[a:b])) or "".join(pieces[a:b]) for a, b in spans)
    return Tokens(numbers, tuple(pieces), special, spans, tuple(texts))


def encode(tokenizer: PreTrainedTokenizerBase | None, text: str, pair: str | None = None) -> dict[str, list[int]]:
    """A text, or a pair of texts in one input, as its tokenizer gives it: ``"input_ids"`` with the special tokens that
    the tokenizer adds, and what else it says of each token (``"token_type_ids"``; of a pair ``"sequence_ids"``, too);
    ``[MASK]`` in the text is the mask.

    Raises:
        InputError: there is no tokenizer, or no text in a text, or one that begins or ends with a special token that
            the tokenizer adds as well.
    """
    if tokenizer is None:
        raise InputError("there is no tokenizer to read the text with; pass token ids, or a tokenizer")
    texts = [text] if pair is None else [text, pair]
    for each in texts:
        if not isinstance(each, str):
            raise InputError(f"the text is {type(each).__name__}; pass a str, chat messages or token ids")
        if not each.strip():
            raise InputError("the text is empty; pass a text of at least one character that is not white space")
    fields = _fields(tokenizer, texts, InputError, special=True)
    if len(fields["input_ids"]) <= tokenizer.num_special_tokens_to_add(pair is not None):
        raise InputError(f"the tokenizer makes no token of {text[:60]!r}; pass another text, or token ids")
    _refuse_twice(tokenizer, texts, fields["input_ids"])
    return fields


@contextmanager
def cutting(tokenizer: Any) -> Iterator[None]:
    """In the block a tokenizer may be asked to cut a text; it is left as it was, for it keeps what it was asked last,
    and would be saved as one that cuts."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    before: Any = getattr(backend, "truncation", None)
    try:
        yield
    finally:
        if backend is not None and before is None:
            backend.no_truncation()
        elif backend is not None:
            backend.enable_truncation(**before)


def _refuse_twice(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], ids: Sequence[int]) -> None:
    """Refuse a text that begins or ends with a special token that the tokenizer adds there, too.

    Raises:
        InputError: it does; the model would read it twice.
    """
    special = _special_ids(tokenizer)
    for text, whole, ends in ((texts[0], ids, "begins"), (texts[-1], ids[::-1], "ends")):
        if not (whole[0] in special and whole[:2] == [whole[0]] * 2):
            continue
        own = _fields(tokenizer, [text], InputError)["input_ids"]
        own = own if ends == "begins" else own[::-1]
        if own[:1] == whole[:1] and _at_the_start(own) < _at_the_start(whole):
            name = tokenizer.convert_ids_to_tokens([whole[0]])[0]
            raise InputError(
                f"the text {ends} with {name!r}, and the tokenizer adds it once more, so that the model would read it "
                "twice; leave it out of the text, or pass tokenizer(text, add_special_tokens=False), and chats as "
                "messages"
            )


def ends_of(tokenizer: PreTrainedTokenizerBase, text: str, ids: Sequence[int]) -> int:
    """How many special tokens its tokenizer has put behind a text."""
    own = _fields(tokenizer, [text], InputError)["input_ids"]
    return next((at for at in range(len(ids)) if [*ids[: len(ids) - at][-len(own) :]] == own), 0)


def _at_the_start(ids: Sequence[int]) -> int:
    """How many of the ids, from the first on, are the first."""
    return next((at for at, each in enumerate(ids) if each != ids[0]), len(ids))


def encode_chat(
    tokenizer: PreTrainedTokenizerBase | None,
    messages: Sequence[Mapping[str, str]],
    processor: Any = None,
    *,
    goes_on: bool = True,
) -> tuple[dict[str, list[int]], tuple[tuple[str, int, int], ...]]:
    """What the tokenizer's chat template makes of messages ``{"role": ..., "content": ...}``.

    Where the model goes on writing, the ids end inside the last message if that is the assistant's, ready to be
    continued, and else with the prompt for the assistant's answer. What reads a whole chat, such as a reward model,
    has it with the end of its last message, and nothing after that.

    Args:
        tokenizer: what has the template.
        messages: the chat.
        processor: what holds the tokenizer, if anything does; one with a template reads the chat itself, by that, and
            puts the tokenizer's special tokens around it where the template does not begin with one.
        goes_on: whether the model goes on writing.

    Returns:
        ``"input_ids"`` and what else the tokenizer says of each token; and whose the tokens are, as named half-open
        ranges of all of them: each message by its role, what lies between as ``"template"``. No ranges where only the
        template could tell, because it changes what the messages say, or where a processor reads them otherwise.

    Raises:
        InputError: there is no tokenizer or template, no message, or one the template cannot take.
    """
    if tokenizer is None:
        raise InputError("there is no tokenizer to read chat messages with; pass token ids, or a tokenizer")
    by_itself = processor is not tokenizer and bool(getattr(processor, "chat_template", None))
    if not (by_itself or getattr(tokenizer, "chat_template", None)):
        raise InputError(
            f"this {type(tokenizer).__name__} has no chat template; pass the conversation as one text, "
            "or set tokenizer.chat_template"
        )
    if isinstance(messages, str) or not messages:
        raise InputError('there are no chat messages; pass at least one {"role": "user", "content": "..."}')
    for number, message in enumerate(messages):
        for key in ("role", "content"):
            if not (hasattr(message, "get") and isinstance(message.get(key), str)):
                raise InputError(
                    f"chat message {number} has no {key} that is a text; "
                    'pass messages like {"role": "user", "content": "..."}'
                )
    continues = messages[-1]["role"] == "assistant"
    how = {"add_generation_prompt": goes_on and not continues, "continue_final_message": goes_on and continues}
    plain = [dict(message) for message in messages]
    more = {"verbose": False} | ({"return_offsets_mapping": True} if tokenizer.is_fast else {})
    try:
        read = _by_processor(processor, plain, how) if by_itself else None
        if read is not None and not getattr(tokenizer, "chat_template", None):
            return read, ()
        encoding: Any = tokenizer.apply_chat_template(plain, return_dict=True, tokenizer_kwargs=more, **how)
    except (ValueError, TypeError, jinja2.TemplateError) as error:
        raise InputError(f"the chat template refuses these messages: {error}; change the messages") from error
    offsets = encoding.pop("offset_mapping", None)
    fields = {name: [int(number) for number in values] for name, values in encoding.items() if name != "attention_mask"}
    if read is not None and read["input_ids"] != fields["input_ids"]:
        return read, ()
    spoken = None if offsets is None else _spoken(tokenizer, plain, how)
    return fields | (read or {}), () if spoken is None else tuple(_by_speaker(plain, offsets, spoken))


def _by_processor(
    processor: Any, messages: Sequence[Mapping[str, str]], how: Mapping[str, Any]
) -> dict[str, list[int]]:
    """What a processor makes of messages, of each token."""
    made = processor.apply_chat_template(
        [dict(each) for each in messages], tokenize=True, return_dict=True, return_tensors="pt", **how
    )
    shape = made["input_ids"].shape
    per_token = {name: values for name, values in made.items() if getattr(values, "shape", None) == shape}
    return {name: values[0].tolist() for name, values in per_token.items() if name != "attention_mask"}


_MARK = "\ue0f0{}\ue0f1"
"""What stands for a message where a template is read: characters that no message holds."""


def _spoken(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]], how: Mapping[str, Any]
) -> list[tuple[int, int]] | None:
    """Where each message stands in the text that the template makes, as half-open ranges of characters; None where the
    text is not the template's own parts with the messages between them."""
    marks = [_MARK.format(i) for i in range(len(messages))]
    marked = [dict(message) | {"content": mark} for message, mark in zip(messages, marks, strict=True)]
    try:
        text: Any = tokenizer.apply_chat_template([dict(each) for each in messages], tokenize=False, **how)
        rest: Any = tokenizer.apply_chat_template(marked, tokenize=False, **how)
    except (ValueError, TypeError, jinja2.TemplateError):
        return None
    at, found = 0, []
    for message, mark in zip(messages, marks, strict=True):
        before, is_there, rest = rest.partition(mark)
        after = re.split("\ue0f0", rest)[0]
        if not is_there or not text.startswith(before, at):
            return None
        at += len(before)
        content = message["content"]
        forms = (content, content.strip(), content.lstrip(), content.rstrip())  # templates like to trim
        said = next((form for form in forms if text.startswith(form + after, at)), None)
        if said is None:
            return None
        found.append((at, at + len(said)))
        at += len(said)
    return found if text[at:] == rest else None


def _by_speaker(
    messages: Sequence[Mapping[str, str]], offsets: Sequence[tuple[int, int]], spoken: Sequence[tuple[int, int]]
) -> Iterable[tuple[str, int, int]]:
    """Ranges of tokens by the message that they have characters of, or the template."""

    def speaker(start: int, end: int) -> int | None:
        return next((i for i, (a, b) in enumerate(spoken) if max(a, start) < min(b, end)), None)

    found = [speaker(start, end) for start, end in offsets]
    at = 0
    for who, group in groupby(found):
        end = at + len(list(group))
        yield "template" if who is None else messages[who]["role"], at, end
        at = end


def is_inside_word(text: str, at: int) -> bool:
    """Whether a place of a text is inside a word or a number; between two characters of a script without spaces, or of
    Korean, whose particles stand at the word, it is not.

    >>> [at for at in range(9) if is_inside_word("the 1,99", at)]
    [1, 2, 5, 6, 7]
    """
    if not 0 < at < len(text):
        return False
    before, after = text[at - 1], text[at]
    if before in ".," or after in ".,":
        return re.fullmatch("[0-9][.,][0-9]", text[at - 2 if before in ".," else at - 1 :][:3]) is not None
    if _is_mark(after):
        return True
    before = next((each for each in reversed(text[:at]) if not _is_mark(each)), "")
    if _UNSPACED.match(before) or _UNSPACED.match(after):
        return False
    return re.match(r"\w\w", before + after) is not None


def _is_mark(character: str) -> bool:
    """Whether a character belongs to the one before it: a vowel's sign, an accent."""
    return unicodedata.category(character)[0] == "M"


def token_id(tokenizer: PreTrainedTokenizerBase | None, text: str, whole: str = "", *, decoder: bool = False) -> int:
    """The one token that a target string means; ``whole`` is what the error says of several, ``decoder`` whether a
    decoder writes it, for which a tokenizer of translations has another vocabulary than for what it reads.

    That is, in this order: the only token the text encodes to; the vocabulary entry spelled exactly so
    (``"Ġare"``, ``"▁are"``, ``"##s"``); and, for a tokenizer that puts a space before each text, the
    word-starting token of the text without its own space, or the one token after the added space.

    Raises:
        TargetError: the text is empty, several tokens, or not in the vocabulary; or it is a letter of several tokens
            whose sign stands for another byte there.
    """
    if tokenizer is None:
        raise TargetError(f"there is no tokenizer to read the target {text!r} with; pass its token id")
    if not text:
        raise TargetError('the target is empty; pass the text of one token, such as " are", or its id')
    ids = _target_ids(tokenizer, text, decoder)
    unknown, name = _unknown(tokenizer)
    if len(ids) == 1 and (ids[0] != unknown or text == name):
        return ids[0]
    entry = tokenizer.convert_tokens_to_ids(text)
    if isinstance(entry, int) and (entry != unknown or text == name) and tokenizer.convert_ids_to_tokens(entry) == text:
        if len(text) == 1 and text not in "ĠĊ" and len(ids) > 1 and _spelling(tokenizer)[0] == "bytes":
            (byte,), letter = describe(tokenizer, [entry]).pieces, describe(tokenizer, ids).pieces
            raise TargetError(
                f"the target {text!r} is {len(ids)} tokens, {_listed(letter, ids)}, and what the vocabulary writes for "
                f"the byte {byte!r} (id {entry}); pass the id of the one that is meant"
            )
        return entry
    if text.startswith(" ") and not text[1:2].isspace():
        bare = _target_ids(tokenizer, text[1:], decoder)
        if len(bare) == 1 and bare[0] != unknown and describe(tokenizer, bare).pieces[0].startswith(" "):
            return bare[0]
    if not ids or (unknown in ids and name not in text):
        raise TargetError(
            f"the vocabulary does not have the target {text[:60]!r}: it becomes "
            f"{name if ids else 'nothing'}; pass a text that is one token, or a token id"
        )
    pieces = describe(tokenizer, ids).pieces
    if pieces == (" ", text):
        return ids[1]
    raise TargetError(
        f"the target {text[:60]!r} is {len(ids)} tokens: {_listed(pieces, ids)}; "
        f"pass one of them by its id, such as {ids[0]} for {pieces[0]!r}{whole}"
    )


def _unknown(tokenizer: PreTrainedTokenizerBase) -> tuple[int | None, str]:
    """The token for what the vocabulary does not have, and its name: where the tokenizer was not told, that of its
    backend, which writes it all the same."""
    if tokenizer.unk_token_id is not None or not tokenizer.is_fast:
        return tokenizer.unk_token_id, str(tokenizer.unk_token)
    backend = tokenizer.backend_tokenizer
    if type(backend.model).__name__ == "Unigram":  # which does not tell but in its file
        number = json.loads(backend.to_str())["model"]["unk_id"]
        return number, "" if number is None else str(backend.id_to_token(number))
    name = getattr(backend.model, "unk_token", None)
    return (None, "") if name is None else (backend.token_to_id(name), name)


def alone(tokenizer: PreTrainedTokenizerBase | None, number: int, piece: str, *, decoder: bool = False) -> str:
    """How a token is called where it stands alone: by its ``piece``; if that continues a word, with its mark
    (``"##s"``); if another token is meant by the piece, or spelled so, and reads the same, with its id
    (``"a (100)"``)."""
    if tokenizer is None:
        return piece
    (string,), (kind, mark) = _vocabulary_strings(tokenizer, [number]), _spelling(tokenizer)
    if kind == "wordpiece" and string.startswith(mark) and string != mark:
        return string
    try:
        meant = token_id(tokenizer, piece, decoder=decoder)
    except TargetError:
        meant = None
    if meant == number:
        return piece
    others = [each for each in (meant, tokenizer.convert_tokens_to_ids(piece)) if isinstance(each, int)]
    alike = any(each != number and describe(tokenizer, [each]).pieces == (piece,) for each in others)
    return f"{piece} ({number})" if alike else piece


def _listed(pieces: Sequence[str], ids: Sequence[int]) -> str:
    """Tokens with their ids, the first eight."""
    shown = [f"{piece!r} (id {number})" for piece, number in zip(pieces, ids, strict=True)]
    return ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")


def pad(
    rows: Sequence[Sequence[int]], pad_id: int, side: Literal["left", "right"], width: int = 0
) -> tuple[Tensor, Tensor]:
    """Rows of token ids as one batch: ``(ids [B, T], mask [B, T])``, int64; the mask is 1 on real tokens.

    T is the length of the longest row, at least ``width``.

    Raises:
        InputError: there are no rows, or one of them is empty.

    >>> ids, mask = pad([[5, 6, 7], [8]], pad_id=0, side="left")
    >>> ids.tolist(), mask.tolist()
    ([[5, 6, 7], [0, 0, 8]], [[1, 1, 1], [0, 0, 1]])
    """
    if not rows:
        raise InputError("there are no rows of token ids; pass at least one text")
    longest = max(width, *(len(row) for row in rows))
    ids = torch.full((len(rows), longest), pad_id, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        if len(row) == 0:
            raise InputError(f"row {number} has no tokens; pass at least one token id per row")
        start = longest - len(row) if side == "left" else 0
        ids[number, start : start + len(row)] = torch.as_tensor(row, dtype=torch.int64)
        mask[number, start : start + len(row)] = 1
    return ids, mask


def decoder_ids(tokenizer: PreTrainedTokenizerBase, text: str, error: type[LRPxError] = InputError) -> list[int]:
    """A text that a decoder writes, without special tokens.

    Raises:
        InputError, or the ``error`` given: the tokenizer cannot read it.
    """
    try:
        encoding: Any = tokenizer(text_target=text, add_special_tokens=False, verbose=False)
    except (TypeError, ValueError) as cause:  # half a surrogate pair, for one
        raise error(_unreadable(text)) from cause
    return list(encoding["input_ids"])


def _unreadable(*texts: str) -> str:
    """What is said of texts that no tokenizer reads: which, and why."""
    whole = [_is_whole(text) for text in texts]
    text = texts[whole.index(False) if False in whole else 0]
    undecoded = any("\udc80" <= character <= "\udcff" for character in text)  # what Python makes of such bytes
    mend = "; bytes that the locale cannot read need one of UTF-8, such as LC_ALL=C.UTF-8" if undecoded else ""
    return f"the tokenizer cannot read {text[:60]!r}; pass whole Unicode characters{mend}"


def _is_whole(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _target_ids(tokenizer: PreTrainedTokenizerBase, text: str, decoder: bool) -> list[int]:
    if decoder:
        return decoder_ids(tokenizer, text, TargetError)
    return _fields(tokenizer, [text], TargetError)["input_ids"]


def with_texts(batch: Mapping[str, Any]) -> dict[str, Any]:
    """What a tokenizer returned, and :data:`TEXTS`, 0, 1 or -1 for special tokens, if its ids are as it made them."""
    made: Any = getattr(batch, "encodings", None)
    if not made:
        return dict(batch)
    ids = _as_list(batch["input_ids"])
    is_one = not any(hasattr(each, "__len__") for each in ids[:1])
    rows = [ids] if is_one else [_as_list(each) for each in ids]
    if rows != [each.ids for each in made]:
        return dict(batch)
    texts = [[-1 if each is None else each for each in row.sequence_ids] for row in made]
    return {**batch, TEXTS: texts[0] if is_one else texts}


def _as_list(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _fields(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], error: type[LRPxError], *, special: bool = False
) -> dict[str, list[int]]:
    try:
        encoding: Any = tokenizer(*texts, add_special_tokens=special, verbose=False)
    except (TypeError, ValueError) as cause:  # half a surrogate pair, for one
        raise error(_unreadable(*texts)) from cause
    fields = with_texts(encoding) if len(texts) > 1 else encoding
    return {name: [int(number) for number in values] for name, values in fields.items() if name != "attention_mask"}


def _vocabulary_strings(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """The vocabulary's own spelling of each id."""
    size = len(tokenizer)
    added: Any = tokenizer.added_tokens_decoder
    # A Rust backend gives None for an unknown id; a Python one makes something up, so its size must tell.
    limit = 2**32 if tokenizer.is_fast else size
    strings = []
    for at, number in enumerate(ids):
        known = 0 <= number < limit or number in added
        string = tokenizer.convert_ids_to_tokens([number])[0] if known else None
        if string is None:
            raise InputError(
                f"token id {number} at position {at} is not in the tokenizer's vocabulary of {size}; "
                "pass ids from this tokenizer"
            )
        strings.append(str(string))
    return strings


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    added: Any = tokenizer.added_tokens_decoder
    named: Any = tokenizer.special_tokens_map
    ids = set(tokenizer.all_special_ids) | {number for number, token in added.items() if token.special}
    if named.get("unk_token") not in [named[role] for role in named if role != "unk_token"]:
        ids.discard(tokenizer.unk_token_id)
    return ids


def _spelling(tokenizer: PreTrainedTokenizerBase) -> tuple[Kind, str]:
    """The kind and its mark, read from a Rust backend's decoder or a Python one's SentencePiece model."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        pieces = any(getattr(tokenizer, name, None) is not None for name in ("sp_model", "spm_source"))
        return ("spaces", "▁") if pieces else ("unknown", "")
    if backend.decoder is None:
        return "unknown", ""
    state = json.loads(backend.decoder.__getstate__())  # far cheaper than the whole tokenizer's JSON
    steps = {step["type"]: step for step in [state, *state.get("decoders", [])]}
    if "ByteLevel" in steps and not getattr(backend.model, "end_of_word_suffix", None):
        return "bytes", ""
    if "WordPiece" in steps:
        return "wordpiece", steps["WordPiece"]["prefix"]
    if "Metaspace" in steps:
        return "spaces", steps["Metaspace"]["replacement"]
    if steps.get("Replace", {}).get("content") == " ":
        return "spaces", steps["Replace"]["pattern"].get("String", "▁")
    return "unknown", ""


def _runs(special: Sequence[bool]) -> list[tuple[int, int]]:
    """The half-open ranges of tokens between special ones."""
    edges = [at for at in range(1, len(special)) if special[at] != special[at - 1]]
    return [(a, b) for a, b in pairwise([0, *edges, len(special)]) if a < b and not special[a]]


def _contents(kind: Kind, mark: str, added: Container[int], tokens: Iterable[tuple[int, str, bool]]) -> list[bytes]:
    """The UTF-8 bytes that each token adds to the text; an added token is spelled as it is."""
    contents: list[bytes] = []
    alphabet = _byte_alphabet()
    before = ""  # the text token before this one
    for number, string, is_special in tokens:
        text = string
        if is_special:
            contents.append(_utf8(text))
            continue
        if kind == "spaces":
            text = text.replace(mark, " ")
        elif kind == "wordpiece" and text.startswith(mark):
            text = text.removeprefix(mark)
        elif kind == "wordpiece" and before and text not in {".", ",", "!", "?"}:
            text = text if _CJK.match(before[-1]) and _CJK.match(text) else f" {text}"
        before = string
        byte = re.fullmatch("<0x([0-9A-Fa-f]{2})>", text) if kind == "spaces" else None
        if byte:
            contents.append(bytes.fromhex(byte[1]))
        elif kind == "bytes" and number not in added and alphabet.keys() >= set(text):
            contents.append(bytes(alphabet[character] for character in text))
        else:
            contents.append(_utf8(text))
    return contents


def _contents_by_decoding(
    tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], strings: Sequence[str], special: Sequence[bool]
) -> list[bytes]:
    """The same for an unknown spelling: how far each prefix decodes to what the whole decodes to.

    Tokens that add no text until a later one completes a character share the bytes of that character.
    """
    contents = [_utf8(string) for string in strings]
    for first, end in _runs(special):
        prefixes = [ids[first:stop] for stop in range(first + 1, end + 1)]
        decoded = [tokenizer.decode(list(ids), clean_up_tokenization_spaces=False) for ids in prefixes]
        reached = 0
        waiting: list[int] = []
        for at, text in enumerate(decoded, first):
            added = decoded[-1][reached : len(commonprefix([text, decoded[-1]]))]  # noqa: RUF071
            reached += len(added)
            rest = _utf8(added)
            waiting.append(at)
            if added:
                for earlier in waiting[-len(_utf8(added[0])) : -1]:
                    contents[earlier], rest = rest[:1], rest[1:]
                waiting = []
            contents[at] = rest
    return contents


def _read(contents: Sequence[bytes]) -> tuple[list[str], list[bool]]:
    """What tokens in a row read as, and which of them start a word where white space delimits words."""
    owner = [token for token, content in enumerate(contents) for _ in content]
    pieces = [""] * len(contents)
    starts = [False] * len(contents)
    indent = [True] * len(contents)  # white space that belongs to the word after it
    at, last = 0, ""
    for character in b"".join(contents).decode("utf-8", "surrogateescape"):
        size = len(character.encode("utf-8", "surrogateescape"))
        parts = list(dict.fromkeys(owner[at : at + size]))
        before = owner[at - 1] if at else None
        if before != parts[0]:
            starts[parts[0]] = before is None or (not indent[before] and _apart(last, character))
        if "\udc80" <= character <= "\udcff":  # a byte that completes no character
            goes_on = before == parts[0] and "\udc80" <= last <= "\udcff"
            code = f"{ord(character) - 0xDC00:02X}>"
            pieces[parts[0]] = f"{pieces[parts[0]][:-1]} {code}" if goes_on else f"{pieces[parts[0]]}<{code}"
        else:
            for part, token in enumerate(parts, 1):
                pieces[token] += character if len(parts) == 1 else f"{character}[{part}/{len(parts)}]"
        for token in parts:
            indent[token] &= character in " \t\xa0\u3000"
        at, last = at + size, character
    return pieces, starts


def _text(content: bytes) -> str:
    """What a word's bytes read as."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return _read([content])[0][0]


def _apart(last: str, character: str) -> bool:
    """Whether a token that starts with this character starts a word."""
    if last.isspace() or character.isspace():
        return True
    if _CJK.match(character):
        return not unicodedata.combining(character)
    return bool(_CJK.match(last)) and character.isalnum()


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@cache
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte: itself where it prints, else the next one from U+0100 on."""
    prints = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(0x100) if byte not in prints]
    return {chr(byte): byte for byte in prints} | {chr(0x100 + n): byte for n, byte in enumerate(rest)}
