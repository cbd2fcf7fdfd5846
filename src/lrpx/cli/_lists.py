"""``lrpx explain --texts``: many texts from a file or a pipe, a line of JSON for each, written as they are explained.

A line has ``"line"``, the number of its text's line in the file, ``"run"``, a digest of all that its numbers depend on,
and either an attribution (:meth:`Attribution.to_dict <lrpx.attribution.Attribution.to_dict>`), or ``"error"``. Started
again, a run reads what is there, refuses lines of another run, and goes on after the last that is whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final

import torch
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from lrpx._defined import digest_of_model
from lrpx._files import goes_on, named_once
from lrpx._scripts import digest_of
from lrpx.cli import in_one_line
from lrpx.cli._mends import on_the_command_line
from lrpx.cli._streams import DASH, decoded, standard_input, write_bytes
from lrpx.cli._wanted import read_ids
from lrpx.errors import DataError, InputError, LRPxError, NonFiniteError, ResultFileError, TargetError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from typing import BinaryIO

    from lrpx.attribution import Attribution
    from lrpx.cli._wanted import Wanted
    from lrpx.explainer import Explainer
    from lrpx.methods import Method

TOGETHER: Final = 64
"""So many texts are explained, and written, at a time; a stopped run loses no more."""
KEYS: Final = ("text", "pair", "choices", "ids", "messages", "decoder", "target", "contrast", "position")
"""What an object of a .jsonl file may say."""
KINDS: Final = {
    "text": (str, "in quotes"),
    "pair": (str, "in quotes"),
    "choices": ([str], 'as a list of texts, ["…", "…"]'),
    "ids": ([int], "as a list of whole numbers, [464, 8251]"),
    "messages": ([dict], 'as a list of messages, [{"role": "user", "content": "…"}]'),
}
"""What some of them are, or are lists of, and how that is written."""
OF_ONE_TEXT: Final = (InputError, TargetError, NonFiniteError)
"""Errors that belong to a text, and leave the others as they are."""
NO_MEMORY: Final = "there is not enough memory for this text; shorten it, or use --recompute"


@dataclass(frozen=True)
class Given:
    """A text of the file, with what is asked of it.

    Args:
        line: its number, from 1.
        input: as :class:`~lrpx.Explainer` takes it; the line itself where it cannot be read.
        asked: target, contrast, position and decoder.
        wrong: why it cannot be read.
    """

    line: int
    input: Any
    asked: dict[str, Any]
    wrong: LRPxError | None = None


def explain(
    wanted: Wanted, explainer: Explainer, chosen: Sequence[Method], show: Callable[[list[Attribution]], None]
) -> None:
    """Explain every text: into the file, or shown one after another.

    Raises:
        LRPxError: results of another run in the file; or, at the end, texts that could not be explained, or lines that
            could not be read.
    """
    assert wanted.texts is not None
    about = _settings(wanted, explainer, chosen)
    done = failed = 0
    with ExitStack() as stack:
        rows = _rows(wanted, stack)
        write: Callable[[bytes], None] | None = None
        if wanted.json == DASH:
            write = write_bytes
        elif wanted.json is not None:
            if goes_on(wanted.json):
                file: BinaryIO = stack.enter_context(wanted.json.open("ab"))
            else:
                file = stack.enter_context(_locked(wanted.json))
                done, failed, rows = _resumed(file, wanted.json, rows, about, len(chosen))
                if done:
                    Console(stderr=True).print(
                        Text(
                            f"lrpx: {done} {'text is' if done == 1 else 'texts are'} explained already; going on", "dim"
                        )
                    )
            write = _writer(file, wanted.json)
        console = Console(stderr=True)
        columns = Progress.get_default_columns()
        bar = stack.enter_context(
            Progress(*columns, console=console, disable=not console.is_terminal or wanted.json == DASH)
        )
        task = bar.add_task("Explaining", total=None)
        first = next(rows, None)
        if first is None and not done:
            raise DataError(f"{_name(wanted)} has no text; write one a line")
        rows = rows if first is None else chain([first], rows)
        while some := list(islice(rows, TOGETHER)):
            right = iter(_explained(wanted, explainer, chosen, [each for each in some if each.wrong is None]))
            for given in some:
                found = next(right) if given.wrong is None else given.wrong
                failed += isinstance(found, LRPxError)
                if write is not None:
                    write(_lines(given, found, about, chosen))
                elif isinstance(found, LRPxError):
                    told = f"lrpx: line {given.line}: {on_the_command_line(str(found))}"
                    console.print(Text(in_one_line(told)), soft_wrap=True)
                else:
                    show(found)
                    Console().print()
            bar.advance(task, len(some))
    if failed:
        told = (
            "1 text could not be explained; its line says"
            if failed == 1
            else (f"{failed} texts could not be explained; their lines say")
        )
        raise DataError(f"{told} why")


def _explained(
    wanted: Wanted, explainer: Explainer, chosen: Sequence[Method], some: Sequence[Given]
) -> list[list[Attribution] | LRPxError]:
    """What each method finds in each of some texts, or why it cannot; in batches, and alone where one is at fault."""
    if not some:
        return []
    how: dict[str, Any] = {
        name: [each.asked[name] for each in some] for name in ("target", "contrast", "position", "decoder")
    }
    if all(decoder is None for decoder in how["decoder"]):
        del how["decoder"]
    try:
        each = [
            explainer([one.input for one in some], method=method, ledger=wanted.ledger, progress=False, **how)
            for method in chosen
        ]
    except (*OF_ONE_TEXT, torch.OutOfMemoryError) as error:
        if len(some) == 1:
            return [error.with_traceback(None) if isinstance(error, LRPxError) else InputError(NO_MEMORY)]
        return [found for one in some for found in _explained(wanted, explainer, chosen, [one])]
    return [[a.words() if wanted.words else a for a in found] for found in zip(*each, strict=True)]


# ------------------------------------------------------------------------------------ what is read


def _rows(wanted: Wanted, stack: ExitStack) -> Iterator[Given]:
    """The texts, one after another as they come."""
    assert wanted.texts is not None
    name = _name(wanted)
    file = standard_input() if wanted.texts == DASH else stack.enter_context(wanted.texts.open("rb"))
    are_objects = wanted.texts.suffix.lower() == ".jsonl"
    for number, content in enumerate(file, 1):
        where = f"line {number} of {name}"
        try:
            text = decoded(content, where, begins=number == 1 or are_objects).rstrip("\r\n")
            if "\r" in text and not are_objects:
                raise DataError(f"{where} has ends of lines that are \\r alone; write \\n, such as by tr '\\r' '\\n'")
            if text.strip():
                found = _object(text, where) if are_objects else {}
                yield _given(wanted, number, found or {"text": text}, where)
        except (DataError, InputError) as error:
            yield Given(number, content, {}, error.with_traceback(None))


def _name(wanted: Wanted) -> str:
    """How messages call the file."""
    return "standard input" if wanted.texts == DASH else str(wanted.texts)


def _object(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=lambda pairs: _said(pairs, where))
    except DataError:
        raise
    except (ValueError, RecursionError) as error:
        raise DataError(f'{where} is no JSON ({error}); write an object such as {{"text": "…"}}') from error
    if isinstance(found, str):
        found = {"text": found}
    given = [name for name in ("text", "ids", "messages") if name in found] if isinstance(found, dict) else []
    if len(given) > 1:
        raise DataError(f"{where} has {', '.join(given[:-1])} and {given[-1]}; write one of them")
    if not isinstance(found, dict) or not given:
        raise DataError(f'{where} has no text; write {{"text": "…"}}, {{"ids": […]}} or {{"messages": […]}}')
    if unknown := set(found) - set(KEYS):
        raise DataError(f"{where} has {min(unknown)!r}; it may have {', '.join(KEYS)}")
    for name, (kind, written) in KINDS.items():
        if name in found and not _is(found[name], kind):
            raise DataError(f"the {name} in {where} is {type(found[name]).__name__}; write it {written}")
    return found


def _said(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    """An object of a line; null is how tables write what is not there."""
    return {name: value for name, value in named_once(where, pairs).items() if value is not None}


def _is(value: Any, kind: Any) -> bool:
    """Whether a value of a JSON object is of this type, or a list of values of it."""
    if isinstance(kind, list):
        return isinstance(value, list) and all(_is(each, kind[0]) for each in value)
    return isinstance(value, kind) and not isinstance(value, bool)


def _given(wanted: Wanted, number: int, found: dict[str, Any], where: str) -> Given:
    """A line as the explainer takes it; what it does not say, the options say for all."""
    target, contrast = wanted.asked
    given = found["text"] if "text" in found else found.get("ids", found.get("messages"))
    decoder = found.get("decoder", wanted.decoder)
    if wanted.ids:
        try:
            given = read_ids(given) if isinstance(given, str) else given
            decoder = read_ids(decoder) if isinstance(decoder, str) else decoder
        except InputError as error:
            raise DataError(f"{where}: {error}") from None
    if "pair" in found:
        given = (given, found["pair"])
    if "choices" in found:
        given = (given, found["choices"])
    asked = {
        "target": found.get("target", target),
        "contrast": found.get("contrast", contrast),
        "position": found.get("position", wanted.position),
    }
    for name, value in asked.items():
        kinds = (int,) if name == "position" else (int, str)
        if value is not None and (isinstance(value, bool) or not isinstance(value, kinds)):
            raise DataError(f"the {name} in {where} is {type(value).__name__}; write one {kinds[-1].__name__}")
    return Given(number, given, asked | {"decoder": decoder})


# ------------------------------------------------------------------------------------ what is written


def _settings(wanted: Wanted, explainer: Explainer, chosen: Sequence[Method]) -> str:
    """All that the numbers of every text depend on."""
    bound = explainer.bound
    described = [(method.name, method.describe(), digest_of(method)) for method in chosen]
    model = (bound.as_it_is, bound.fingerprint(), bound.tokenizer_fingerprint(), bound.dtype, bound.pooling)
    code = digest_of_model(bound.module)
    return repr((model, described, wanted.ledger, wanted.words, *([] if code is None else [code])))


def _digest(given: Given, about: str) -> str:
    all_of_it = repr((about, given.line, given.input, given.asked))
    return hashlib.sha256(all_of_it.encode(errors="backslashreplace")).hexdigest()[:16]


def _lines(given: Given, found: list[Attribution] | LRPxError, about: str, chosen: Sequence[Method]) -> bytes:
    """A line for each method."""
    head = {"line": given.line, "run": _digest(given, about)}
    if isinstance(found, LRPxError):
        error = on_the_command_line(str(found))
        plain: list[dict[str, Any]] = [head | {"method": method.name, "error": error} for method in chosen]
    else:
        plain = [head | a.to_dict() for a in found]
    return b"".join(json.dumps(each, ensure_ascii=False).encode(errors="backslashreplace") + b"\n" for each in plain)


@contextmanager
def _locked(path: Path) -> Iterator[BinaryIO]:
    """The file, to read and to write at its end; no other run's at the moment. One that was made, and stayed empty
    until an error ended the block, is removed."""
    is_new = not path.exists()
    try:
        file = path.open("a+b")
    except OSError as error:
        raise ResultFileError(f"cannot write {path}: {error.strerror}; choose another path") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ResultFileError(f"another run is writing {path}; wait until it ends, or name another file") from error
        try:
            yield file
        except BaseException:
            if is_new and not path.stat().st_size:
                path.unlink()
            raise


def _resumed(
    file: BinaryIO, path: Path, rows: Iterator[Given], about: str, per_text: int
) -> tuple[int, int, Iterator[Given]]:
    """How many texts are there already, how many of them failed, and the rows without them; of a text whose lines are
    not all whole, they are removed.

    Raises:
        ResultFileError: the file holds something else.
    """
    file.seek(0)
    kept = failed = texts = 0
    while block := list(islice(file, per_text)):
        given = next(rows, None)
        for content in block:
            if given is None or not _is_of(content, given, about):
                at = texts * per_text + 1
                mend = "name another file, or remove it"
                if b'"error": ' in content and kept:
                    mend = f"where its text was corrected since, remove that line and those after it; else {mend}"
                raise ResultFileError(f"{path} holds something else than the results of this run, at line {at}; {mend}")
        if len(block) < per_text or not block[-1].endswith(b"\n"):
            assert given is not None
            file.truncate(kept)
            return texts, failed, chain([given], rows)
        failed += b'"error": ' in block[0] and "error" in json.loads(block[0])
        texts += 1
        kept += sum(map(len, block))
    return texts, failed, rows


def _is_of(content: bytes, given: Given, about: str) -> bool:
    """Whether a line, or the beginning of one, is of the results of this text in this run."""
    head = json.dumps({"line": given.line, "run": _digest(given, about)}).encode()[:-1] + b", "
    if not content.endswith(b"\n"):
        return head.startswith(content) or content.startswith(head)
    try:
        return content.startswith(head) and isinstance(json.loads(content), dict)
    except (ValueError, RecursionError):
        return False


def _writer(file: BinaryIO, path: Path) -> Callable[[bytes], None]:
    def write(content: bytes) -> None:
        try:
            file.write(content)
            file.flush()
        except OSError as error:
            with suppress(OSError):  # which would be raised once more as the file is closed, without its name
                file.close()
            raise ResultFileError(
                f"cannot write {path}: {error.strerror}; make room, and run the same command again, which goes on "
                "after the last line"
            ) from error

    return write
