"""What a user passes, as rows: texts, pairs of texts, chats, token ids, images, and what a tokenizer or processor makes
of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from lrpx import _encoded, _tokens, tasks
from lrpx._padding import Padding
from lrpx._signals import refuse_colours_last, refuse_cut, refuse_whole, signal
from lrpx._tokens import Tokens
from lrpx.errors import InputError, LRPxError
from lrpx.targets import whole_number
from lrpx.tasks import Task

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

__all__ = ["Reader", "Row", "Segment"]

PLAIN = "a text, token ids or chat messages"
PAIR = "pass them as a tuple: (text, other)"


@dataclass(frozen=True)
class Segment:
    """A part of an input.

    Args:
        name: what it is to the model: ``"input"``, ``"encoder"``, …
        tokens: its tokens.
        fields: what else the tokenizer says of each (``"token_type_ids"``).
        parts: named half-open ranges of all its tokens: the messages of a chat and its template; none otherwise.
        texts: of which of two texts each token is, 0, 1 or -1 for special tokens; none where no tokenizer says it.
        before: how much padding stood before its tokens in what the tokenizer returned.
        ends: how many special tokens its tokenizer has put behind a text that a model goes on writing.
    """

    name: str
    tokens: Tokens
    fields: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    parts: tuple[tuple[str, int, int], ...] = ()
    texts: tuple[int, ...] = ()
    before: int = 0
    ends: int = 0

    def __len__(self) -> int:
        return len(self.tokens.ids)

    def refuse_counted(self, place: int | None, name: str, error: type[LRPxError] = InputError) -> None:
        """Refuse a place that is counted from the first of an input that began with padding, which is taken off: it may
        be meant with the padding or without.

        Raises:
            InputError, or the ``error`` given: it is.
        """
        if self.before and place is not None and place >= 0:
            raise error(
                f"{name} {place} is counted from the first token, and the input began with {self.before} of padding, "
                "of which nobody says whether it counts; pass what the tokenizer returns with padding_side='right', or "
                "count from the end where that may be"
            )

    def only(self, places: Sequence[int]) -> Segment:
        """Some of its tokens, in their order, with their fields, without its words and parts."""

        def pick(values: Sequence[Any]) -> tuple[Any, ...]:
            return tuple(values[at] for at in places)

        tokens = Tokens(pick(self.tokens.ids), pick(self.tokens.pieces), pick(self.tokens.special), (), ())
        fields = {name: pick(each) for name, each in self.fields.items()}
        return replace(self, tokens=tokens, fields=fields, parts=(), texts=pick(self.texts) if self.texts else ())


@dataclass(frozen=True)
class Row:
    """One input.

    Args:
        segments: its parts, as :class:`~lrpx.tasks.Task` names them: one, an encoder's and a decoder's, one for each
            choice; none for an image.
        arguments: the model's arguments that hold no tokens, such as ``pixel_values``, each as a batch of one.
        where: what an error about this row adds: nothing, or its number.
        ends: how many end-of-text tokens it has, where the model reads the last of them and takes together only rows
            that have as many.
    """

    segments: tuple[Segment, ...]
    arguments: Mapping[str, Tensor] = field(default_factory=dict)
    where: str = ""
    ends: int = 0

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens each segment has."""
        return tuple(map(len, self.segments))

    def within_context(self, logits: Tensor) -> Tensor:
        """The logits ``[2T]`` of a span's start and end, with minus infinity at all places but the context's: those of
        the text behind the question, without special tokens; of one text alone, all of its own. The tokenizer tells the
        two apart; of plain ids the tokens' types where they differ, else what stands between them and at the end, too,
        which a mask in the question is not. Ids without anything between are one text."""
        segment = self.segments[0]
        ids, special, types = segment.tokens.ids, segment.tokens.special, segment.fields.get("token_type_ids")
        places = [at for at, each in enumerate(special) if not each]
        if not places:
            return logits
        told = next((each for each in (segment.texts, types) if each and len({each[at] for at in places}) > 1), None)
        if told is not None:
            kept = [at for at in places if told[at] == told[places[-1]]]
        else:
            ends = ids[places[-1] + 1 :] or ids
            inside = range(places[0], places[-1])
            between = next((at for at in inside if special[at] and ids[at] in ends), -1)
            kept = [at for at in places if at > between]
        held = logits.new_full(logits.shape, -torch.inf)
        for start in (0, len(logits) // 2):
            at = torch.tensor([start + each for each in kept], device=logits.device, dtype=torch.long)
            held[at] = logits[at]
        return held

    @property
    def tokens(self) -> Tokens:
        """The tokens of all segments, one after another."""
        found, offset = [segment.tokens for segment in self.segments], 0
        if len(found) == 1:
            return found[0]
        spans: list[tuple[int, int]] = []
        for each in found:
            spans += [(a + offset, b + offset) for a, b in each.word_spans]
            offset += len(each.ids)
        return Tokens(
            ids=tuple(number for each in found for number in each.ids),
            pieces=tuple(piece for each in found for piece in each.pieces),
            special=tuple(special for each in found for special in each.special),
            word_spans=tuple(spans),
            word_texts=tuple(text for each in found for text in each.word_texts),
        )


@dataclass(frozen=True)
class Reader:
    """Reads inputs for one model.

    Args:
        model: the user's module.
        tokenizer: its tokenizer or processor, or None.
        task: what it predicts.
        most: the most tokens that the model's files or its pipeline allow, or None for as many as it has positions for.
        cutter: what would cut longer texts off.
    """

    model: Module
    tokenizer: Any
    task: Task
    most: int | None = None
    cutter: str = ""
    _tried: dict[str, tuple[object, bool]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def text_tokenizer(self) -> Any:
        """The tokenizer; a processor of images and texts holds one."""
        return getattr(self.tokenizer, "tokenizer", None) or self.tokenizer

    @property
    def limit(self) -> int | None:
        """The most tokens that the model takes now, or None for any number; its table of positions may be cut, or
        grow."""
        positions = tasks.context_length(self.model) if self.task.segments else None
        return min((each for each in (self.most, positions) if each is not None), default=None)

    def is_many(self, inputs: Any) -> bool:
        """Whether the input is several inputs rather than one text, pair of texts, list of ids or chat.

        A tuple of two is one input, or refused; so two rows are for a text encoder, and those of a multiple choice.

        Raises:
            InputError: a tuple that may be meant as one or as several, or a table.
        """
        if isinstance(inputs, Mapping):
            return self.task is not Task.EMBEDDINGS and _encoded.rows_in(inputs, self._rank) > 1
        if hasattr(inputs, "columns"):
            raise InputError(
                f"the input is {type(inputs).__name__}, a table; pass the list of one column, as "
                "table['text'].to_list() makes one"
            )
        if self.task.pictures and getattr(inputs, "ndim", 0) == 2:
            return False  # one image in grey
        is_signal = getattr(inputs, "ndim", 0) in (2, 3) and self.task.arguments[0] != "input_ids"
        if is_signal and self._reads_spectrograms:
            return bool(inputs.ndim == 3 and len(inputs) > 1)
        if not isinstance(inputs, tuple) or not inputs:
            return is_many(inputs)
        if self.task is Task.IMAGE_TEXT and len(inputs) == 2:
            return isinstance(inputs[1], tuple)
        texts = all(isinstance(each, str) for each in inputs)
        if texts and len(inputs) != 2:
            raise InputError(
                f"the input is a tuple of {len(inputs)} texts, and two make a pair; pass a list for several inputs"
            )
        if texts or len(inputs) != 2:
            return not texts and is_many(inputs)
        if self.task is Task.EMBEDDINGS:
            if all(isinstance(each, tuple) for each in inputs):
                raise InputError(
                    "the input is a tuple of two tuples; pass a list for two inputs, [(text, other), (text, other)]"
                )
            return False
        mixed = any(isinstance(each, (str, tuple)) for each in inputs)
        if is_many(inputs) and not mixed and self.task.together is None:
            raise InputError(
                "the input is a tuple of two, and only two texts make a pair; pass a list for two inputs, or the pair "
                "as tokenizer(text, other) returns it"
            )
        return is_many(inputs)

    def rows(self, inputs: Any, decoder: Any = None) -> list[Row]:
        """A row for each of several inputs; the decoder's text is one for all, or a list.

        Raises:
            InputError: see :meth:`row`; the row is named.
        """
        many = _encoded.rows_of(self._told(inputs), self._rank) if isinstance(inputs, Mapping) else list(inputs)
        if not many:
            raise InputError("the list of inputs is empty; pass at least one text")
        if "input_ids" in self.task.arguments:
            self._padding.refuse_rows(many, self.task.segments[0])
        texts = isinstance(decoder, tuple) and all(isinstance(each, str) for each in decoder)
        several = (
            texts or is_many(decoder) or (isinstance(decoder, (list, tuple)) and any(each is None for each in decoder))
        )
        decoders = spread(decoder, len(many), "decoder") if several else [decoder] * len(many)
        pairs = zip(many, decoders, strict=True)
        return [self.row(each, written, f" (row {i} of the batch)") for i, (each, written) in enumerate(pairs)]

    def row(self, given: Any, decoder: Any = None, where: str = "") -> Row:
        """One input as a row.

        Args:
            given: a text; a pair of texts (a tuple of two: premise and hypothesis, question and context, or the two
                texts to compare); for multiple choice ``(text, [choice, choice, …])``; token ids; chat messages; an
                image; or what a tokenizer or processor returns.
            decoder: what an encoder-decoder model has written so far: a text, or ids with the start token.
            where: what an error adds.

        Raises:
            InputError: no tokens, too many, ids outside the vocabulary, or something that this model cannot take.
        """
        try:
            decoder = _decoder_of(given, decoder)
            self._refuse_labels(given, decoder)
            written = self._decoder_ids(decoder)
            segments, arguments = self._read(given)
            self._refuse_samples(arguments)
            if written is not None:
                segments = (*segments, self._segment(self.task.segments[-1], {"input_ids": written}))
            ends = self._ends(segments)
        except InputError as error:
            raise InputError(f"{error}{where}") if where else error from None
        return Row(segments, arguments, where, ends)

    def position(self, row: Row, position: Any = None) -> int | None:
        """Where the logits of a row are read, from 0; None where they belong to the whole of it.

        Raises:
            InputError: a position that is none, or one for a model whose logits have none.
        """
        try:
            return self._position(row, position)
        except InputError as error:
            raise InputError(f"{error}{row.where}") if row.where else error from None

    # -------------------------------------------------------------------------- what is passed

    @property
    def _rank(self) -> int:
        """How many dimensions the ids of several inputs have."""
        return 3 if self.task is Task.MULTIPLE_CHOICE else 2

    def _read(self, given: Any) -> tuple[tuple[Segment, ...], dict[str, Tensor]]:
        """The segments but for the decoder's, and the other arguments."""
        if self.task.together is not None:
            parts = self._rows_together(given) if _is_encoding(given) else self._texts_together(given)
            count = len(parts)
            names = self.task.segments if len(self.task.segments) == count else [f"choice {i}" for i in range(count)]
            return tuple(self._plain(each, name) for each, name in zip(parts, names, strict=True)), {}
        name = self.task.segments[0] if self.task.segments else "input"
        if _is_encoding(given):
            if {"question", "context"} <= set(given):
                return (self._plain((given["question"], given["context"]), name),), {}
            return self._processed(given, name)
        if self.task.arguments[0] != "input_ids":
            argument = tasks.signal_argument(self.model, self.task)
            is_image = self.task.pictures or argument == "pixel_values"
            return (), signal(self.model, self.tokenizer, given, argument, is_image=is_image)
        if self.task is Task.IMAGE_TEXT:
            return self._image_and_text(given, name)
        return (self._plain(given, name),), {}

    def _image_and_text(self, given: Any, name: str) -> tuple[tuple[Segment, ...], dict[str, Tensor]]:
        """An image, and the text that it is compared with."""
        if not (isinstance(given, tuple) and len(given) == 2):
            raise InputError(
                f"the input is {type(given).__name__}, and a {self.task.title} compares an image with a text; pass "
                "them as a tuple: (image, text)"
            )
        image, text = given
        pixels = signal(self.model, self.tokenizer, image, "pixel_values", is_image=True)
        if self._reads_padding and isinstance(text, str):
            return (self._padded(text, name),), pixels
        segment = self._plain(text, name)
        if isinstance(text, str) and self._is_moved_by_padding(segment.tokens.ids, pixels):
            raise InputError(
                f"{type(self.model).__name__} reads a text's last place, as SigLIP does, which was trained with texts "
                "padded to its context, and the tokenizer makes an attention_mask that hides the padding; set "
                "tokenizer.model_input_names = ['input_ids'], which pads texts and hides nothing, or pass token ids"
            )
        return (segment,), pixels

    def _is_moved_by_padding(self, ids: Sequence[int], arguments: Mapping[str, Tensor]) -> bool:
        """Whether the text beside an image is another to the model with padding behind it; tried once, as long as its
        user puts nothing else into it, and does not train it."""
        changes = tasks.changes(self.model), tasks.state(self.model)
        if self._tried.get("padding", (None, False))[0] != changes:
            full = self.limit is not None and len(ids) >= self.limit
            if full or not tasks.accepts(self.model, "attention_mask"):
                return False
            moved = tasks.is_moved_by_padding(self.model, ids, arguments, self._padding.id or 0)
            self._tried["padding"] = changes, moved
        return self._tried["padding"][1]

    @property
    def _reads_padding(self) -> bool:
        """Whether padding is a part of what the model reads beside an image: its tokenizer makes no attention mask, as
        SigLIP's, which reads a text's last place, and was trained with texts that are all as long as its context."""
        names = getattr(self.text_tokenizer, "model_input_names", None)
        return self.task is Task.IMAGE_TEXT and names is not None and "attention_mask" not in names

    def _padded(self, text: str, name: str) -> Segment:
        """A text, and padding up to the model's context."""
        ids = _tokens.encode(self.text_tokenizer, text)["input_ids"]
        if self.limit is not None and self._padding.id is not None:
            ids = ids + [self._padding.id] * (self.limit - len(ids))
        return self._segment(name, {"input_ids": ids})

    def _texts_together(self, given: Any) -> Sequence[Any]:
        """The two inputs to compare, or each choice beside its text."""
        if self.task is Task.MULTIPLE_CHOICE:
            text, choices = _choices(given)
            return [(text, choice) for choice in choices]
        if not (isinstance(given, (tuple, list)) and len(given) == 2) or whole_number(given[0]) is not None:
            raise InputError(f"a text encoder compares two texts; {PAIR}")
        self._refuse_choices(given, "input")
        return given

    def _rows_together(self, given: Mapping[str, Any]) -> Sequence[Any]:
        """The same, as the rows of what a tokenizer returned."""
        if _encoded.depth(given.get("input_ids")) == 3:  # [1, C, T], as the model takes one question
            given = {key: value[0] for key, value in given.items() if value is not None}
        rows = _encoded.rows_of(given)
        if len(rows) < 2 or (self.task is Task.EMBEDDINGS and len(rows) > 2):
            raise InputError(
                f"the input is {type(given).__name__}, and {self.task.named} takes several texts; {PAIR}, "
                "or (text, [choice, choice]) for multiple choice; or what the tokenizer returns of all of them"
            )
        return rows

    def _plain(self, given: Any, name: str) -> Segment:
        """A text, a pair of texts, chat messages, token ids or what a tokenizer returned of one of them."""
        if _is_encoding(given):
            (segment,), arguments = self._processed(given, name)
            if arguments:
                raise InputError(f"the {name} has {', '.join(arguments)} besides its tokens; pass the tokens alone")
            return segment
        if isinstance(given, str):
            segment = self._segment(name, _tokens.encode(self.text_tokenizer, given))
            if self.task is not Task.CAUSAL:
                return segment
            return replace(segment, ends=_tokens.ends_of(self.text_tokenizer, given, segment.tokens.ids))
        if isinstance(given, tuple) and len(given) == 2 and all(isinstance(each, str) for each in given):
            return self._segment(name, self._pair(*given))
        if isinstance(given, (bytes, bytearray, memoryview)):
            raise InputError(
                f"the {name} is {type(given).__name__}, which is no text; pass a str, such as bytes(…).decode()"
            )
        self._refuse_choices(given, name)
        kind = type(given).__name__
        if hasattr(given, "ndim"):  # a tensor or an array
            given = given[0] if given.ndim == 2 and len(given) == 1 else given
            if given.ndim != 1:
                raise InputError(
                    f"the {name} has shape {list(given.shape)}; pass the token ids of one text as a flat list"
                )
            given = given.tolist()
        if isinstance(given, list) and len(given) == 1 and _encoded.depth(given) == 2:
            return self._plain(given[0], name)
        if not isinstance(given, Sequence):
            several = "; several inputs are a list, as list(texts) makes one" if hasattr(given, "__iter__") else ""
            raise InputError(f"the {name} is {type(given).__name__}; pass {PLAIN}{several}")
        if given and all(isinstance(message, Mapping) for message in given):
            goes_on = self.task.default == "last"  # a classifier reads the whole chat
            fields, parts = _tokens.encode_chat(self.text_tokenizer, given, self.tokenizer, goes_on=goes_on)
            return self._segment(name, fields, parts)
        if not given:
            raise InputError(f"the {name} has no token ids; pass at least one")
        ids = [whole_number(each) for each in given]
        whole = [i for i in ids if i is not None]
        if len(whole) != len(ids):
            other = type(given[ids.index(None)]).__name__
            listed = "; several inputs are a list, one input a text" if other.startswith("str") else ""
            raise InputError(f"the {name} is a {kind} that holds {other}; pass {PLAIN}{listed}")
        self._refuse_unknown(whole)
        self._padding.refuse(whole, name)
        return self._segment(name, {"input_ids": whole})

    def _refuse_choices(self, given: Any, name: str) -> None:
        if not (isinstance(given, tuple) and [type(each) for each in given] == [str, list]):
            return
        if all(isinstance(each, str) for each in given[1]):
            raise InputError(
                f"the {name} is a text with choices, and {self.task.named} has none; leave the choices out"
            )

    def _pair(self, text: str, other: str) -> dict[str, list[int]]:
        """A pair of texts in one input, which the tokenizer must keep apart."""
        if self.task in (Task.CAUSAL, Task.SEQ2SEQ, Task.SPEECH):
            raise InputError(
                f"the input is a pair of texts, and {self.task.named} takes one; pass a list for two inputs, or one "
                "text that holds both"
            )
        fields = _tokens.encode(self.text_tokenizer, text, other)
        tokenizer = self.text_tokenizer
        apart = tokenizer.num_special_tokens_to_add(True) > tokenizer.num_special_tokens_to_add(False)
        if not apart and len(set(fields.get("token_type_ids", ()))) < 2:
            raise InputError(
                f"the tokenizer, {type(tokenizer).__name__}, puts nothing between a pair of texts; pass one text with "
                "what the model was trained to see between them"
            )
        return fields

    def _segment(
        self, name: str, fields: Mapping[str, Sequence[int]], parts: tuple[tuple[str, int, int], ...] = ()
    ) -> Segment:
        """A segment, when the model can take it."""
        ids = fields["input_ids"]
        size = tasks.first_weight(self.model).shape[0]
        wrong = next((i for i in ids if not 0 <= i < size), None)
        if wrong is not None:
            raise InputError(
                f"the tokenizer makes token id {wrong}, the model's vocabulary ends at {size - 1}; "
                "pass the model's own tokenizer"
            )
        if self.limit is not None and len(ids) > self.limit:
            cut = f", where {self.cutter} cuts it" if self.limit == self.most else ""
            raise InputError(f"the {name} has {len(ids)} tokens, the model's context is {self.limit}{cut}; shorten it")
        others = {
            each: tuple(values)
            for each, values in fields.items()
            if each not in ("input_ids", _tokens.TEXTS) and len(values) == len(ids) and self._takes(each, values)
        }
        for each, values in others.items():
            self._refuse_beyond(each, values)
        tokens = _tokens.describe(self.text_tokenizer, ids, is_read=name == "encoder")
        return Segment(name, tokens, others, parts, tuple(fields.get(_tokens.TEXTS, ())))

    def _takes(self, argument: str, values: Any) -> bool:
        """Whether the model takes a field of its input. One of different numbers is not left out where nobody knows."""
        if tasks.accepts(self.model, argument):
            return True
        takes_any = tasks.may_hand_on(self.model)
        hands_on = takes_any or tasks.is_named_inside(self.model, argument)
        if hands_on and _encoded.differs(argument, values):  # what is no numbers is nobody's
            if not takes_any and "input_ids" in self.task.arguments:
                moved = tasks.is_moved_by_field(self.model, self.task, argument, torch.as_tensor(values))
                if moved is not None:
                    return moved
            raise InputError(
                f"the input has {argument}, and the forward pass of {type(self.model).__name__} takes arguments of any "
                f"name, so nobody knows whether it would hand them on; name {argument} among its arguments, or pass "
                "an input without them"
            )
        return False

    def _refuse_beyond(self, argument: str, values: Sequence[int]) -> None:
        """Refuse types and places of tokens that the model has no embeddings of."""
        size = tasks.sizes(self.model).get(argument)
        wrong = next((i for i in values if i < 0 or (size is not None and i >= size)), None)
        if wrong is not None:
            taken = "numbers from 0" if size is None else f"0 to {size - 1}"
            raise InputError(f"the {argument} hold {wrong}, the model takes {taken}; pass these, or leave them out")

    def _refuse_unknown(self, ids: Sequence[int]) -> None:
        size = tasks.first_weight(self.model).shape[0]
        wrong = next((i for i in ids if not 0 <= i < size), None)
        if wrong is not None:
            raise InputError(f"token id {wrong} is outside the model's vocabulary; pass ids 0 to {size - 1}")

    def _processed(self, given: Mapping[str, Any], name: str) -> tuple[tuple[Segment, ...], dict[str, Tensor]]:
        """What a tokenizer or a processor returned for one input."""
        refuse_cut(given)
        if self.task.pictures or self.task is Task.IMAGE_TEXT:
            refuse_whole(given)
        given = self._under_its_name(self._told(given))
        found = _encoded.read(given, lambda key, value: key == _tokens.TEXTS or self._takes(key, value))
        if found.per_token:
            ids = found.per_token["input_ids"]
            self._refuse_unknown(ids)
            images = len(found.arguments.get("pixel_values", ()))
            if self.task is Task.IMAGE_TEXT and not images:
                raise InputError(
                    f"the {name} is {type(given).__name__} without pixel_values, and a {self.task.title} compares an "
                    "image with a text; pass what the processor returned of both, or a tuple: (image, text)"
                )
            if self.task is Task.IMAGE_TEXT and images > 1:
                raise InputError(
                    f"pixel_values has {images} rows for 1 text; pass one image with each text, such as "
                    "[(image, text), (other, text)]"
                )
            is_padded = self.task is Task.IMAGE_TEXT and len(ids) < torch.as_tensor(given["input_ids"]).numel()
            if is_padded and self._is_moved_by_padding(ids, found.arguments):
                raise InputError(
                    f"{type(self.model).__name__} reads a text's last place, which is padding here, and an explanation "
                    "has no padding that an attention_mask hides; set tokenizer.model_input_names = ['input_ids'], and "
                    "leave the attention_mask out, or the padding"
                )
            if not (found.has_mask or self._reads_padding):
                self._padding.refuse(ids, name)
            self._refuse_without_mask(found)
            return (replace(self._segment(name, found.per_token), before=found.before),), found.arguments
        if "input_ids" in self.task.arguments or not found.arguments:
            wanted = "input_ids" if self.task.segments else tasks.signal_argument(self.model, self.task)
            raise InputError(
                f"the {name} is {type(given).__name__} without {wanted}; pass what the tokenizer returned, or a text"
            )
        if self.task.pictures:
            refuse_colours_last(self.model, found.arguments.get(tasks.signal_argument(self.model, self.task)))
        return (), found.arguments

    def _refuse_without_mask(self, found: _encoded.Encoded) -> None:
        """Refuse a text and what stands beside it without an attention mask, with which all runs are, where one of ones
        makes a difference."""
        if found.has_mask or not found.arguments or not tasks.accepts(self.model, "attention_mask"):
            return
        if tasks.is_moved_by_ones(self.model, self.task, found.per_token["input_ids"], found.arguments):
            raise InputError(
                f"the input has no attention_mask, and one of ones changes what {type(self.model).__name__} says; pass "
                "all that the processor returned, with its attention_mask"
            )

    @property
    def _reads_spectrograms(self) -> bool:
        """Whether a sound is a spectrogram, ``[steps, frequencies]`` or the reverse, rather than samples."""
        argument = tasks.signal_argument(self.model, self.task)
        return argument == "input_features" or (argument == "input_values" and self._is_ast)

    @property
    def _is_ast(self) -> bool:
        """Whether the model calls spectrograms by the name that others have for samples, as AST alone does."""
        return getattr(getattr(self.model, "config", None), "model_type", None) == "audio-spectrogram-transformer"

    def _refuse_samples(self, arguments: Mapping[str, Tensor]) -> None:
        """Refuse a sound as samples, or a spectrogram of other frequencies, where a model takes them as AST does."""
        sound = arguments.get("input_values")
        if sound is None or not self._is_ast:
            return
        bins = getattr(self.model.config, "num_mel_bins", None)
        if sound.ndim != 3 or sound.shape[-1] != bins:
            raise InputError(
                f"the input_values have shape {list(sound.shape)}, and {type(self.model).__name__} takes the "
                f"spectrogram of a sound, [1, steps, {bins}]; pass what its processor returned"
            )

    def _under_its_name(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """An image as its processor calls it, under the name of the model's main input, where it takes either:
        Perceiver's ``pixel_values`` are its ``inputs``."""
        usual = tasks.Task.IMAGE_CLASSIFICATION.arguments[0]
        wanted = tasks.pixel_argument(self.model, self.task) if self.task.pictures else None
        if wanted in (None, usual, "input_ids") or given.get(wanted) is not None or given.get(usual) is None:
            return given
        kept = {key: value for key, value in given.items() if key not in (usual, wanted)}
        return {**kept, wanted: given[usual]} if tasks.accepts(self.model, usual) else given

    def _told(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a tokenizer returned of a question and its context, with which is which, if it says so."""
        asks = self.task is Task.QUESTION_ANSWERING and given.get("input_ids") is not None
        return _tokens.with_texts(given) if asks else given

    def _ends(self, segments: Sequence[Segment]) -> int:
        """How many end-of-text tokens there are, where an encoder-decoder classifier reads the last."""
        end = tasks.end_read(self.model, self.task)
        found = 0 if end is None else segments[0].tokens.ids.count(end)
        if end is not None and not found:
            raise InputError(
                f"{type(self.model).__name__} reads the end-of-text token (id {end}), and the input has none; pass ids "
                "that end with it, as the tokenizer makes them"
            )
        return found

    @property
    def _padding(self) -> Padding:
        return Padding.of(self.text_tokenizer, tasks.text_config(self.model))

    # ---------------------------------------------------------------------- decoder, position

    def _refuse_labels(self, given: Any, written: Any) -> None:
        """Refuse labels without a decoder's text, of which the model would make one by itself."""
        labels = given.get("labels") if _is_encoding(given) else None
        if "decoder" in self.task.segments and written is None and labels is not None:
            raise InputError(
                f"the input has labels, of which {type(self.model).__name__} would make the decoder's text, and no "
                "decoder_input_ids; pass these, or decoder=…, or leave the labels out for the first token it writes"
            )

    def _decoder_ids(self, decoder: Any) -> list[int] | None:
        if "decoder" not in self.task.segments:
            if decoder is not None:
                raise InputError(f"{type(self.model).__name__} has no decoder of its own; leave decoder out")
            return None
        if decoder is not None and not isinstance(decoder, str):
            return list(self._plain(decoder, "decoder").tokens.ids)
        configs = [getattr(self.model, name, None) for name in ("config", "generation_config")]
        names = ("decoder_start_token_id", "bos_token_id")
        starts, others = ([getattr(each, name, None) for each in configs] for name in names)
        if None not in starts and starts[0] != starts[1]:
            raise InputError(
                f"the model's config names {starts[0]} as decoder_start_token_id, its generation config {starts[1]}; "
                "make them one, or pass decoder ids that begin with the one that is meant"
            )
        start = next((each for each in (*starts, *others) if each is not None), None)
        if start is None:
            raise InputError("the model's config names no decoder_start_token_id; pass decoder ids that begin with one")
        if decoder is None:
            return [start]
        if self.tokenizer is None:
            raise InputError("there is no tokenizer to read the decoder's text with; pass decoder ids")
        first = whole_number(getattr(configs[1], "forced_bos_token_id", None))  # what it must write before all else
        ids = _tokens.decoder_ids(self.text_tokenizer, decoder)
        if ids[:1] == [start]:
            raise InputError(
                f"the decoder's text begins with the token that the model starts with (id {start}), which is put "
                "before a text; leave it out, or pass decoder ids that begin with one"
            )
        _refuse_without_times(type(self.model).__name__, configs[1], ids)
        return [start, *([] if first is None or ids[:1] == [first] else [first]), *ids]

    def _position(self, row: Row, position: Any) -> int | None:
        if self.task.reads != "position":
            if position is not None:
                raise InputError(f"the logits of {self.task.named} belong to the whole input; leave position out")
            return None
        ids = row.segments[-1].tokens.ids
        if position is None and self.task.default is None:
            raise InputError(
                f"{self.task.named} predicts something for each token; pass position, the token that is meant"
            )
        if position is None and self.task.default == "mask":
            return self._mask_position(ids)
        count = row.segments[-1].ends
        if position is None and count:
            ends = "".join(row.segments[-1].tokens.pieces[-count:]).strip()
            raise InputError(
                f"the tokenizer, {type(self.text_tokenizer).__name__}, puts {ends!r} behind a text, and the model "
                f"would say what comes after that; pass position={-1 - count} for what comes after the text, "
                "position=-1 for what comes after the end, or token ids without it"
            )
        at = -1 if position is None else whole_number(position)
        if at is None:
            raise InputError(f"the position is {position!r}; pass a whole number for each input")
        row.segments[-1].refuse_counted(at, "position")
        if not -len(ids) <= at < len(ids):
            raise InputError(f"position {at} is outside the {len(ids)} tokens; pass {-len(ids)} to {len(ids) - 1}")
        return at % len(ids)

    def _mask_position(self, ids: Sequence[int]) -> int:
        tokenizer = self.text_tokenizer
        mask = None if tokenizer is None else tokenizer.mask_token_id
        found = [i for i, token in enumerate(ids) if token == mask]
        if len(found) != 1:
            shown = "the mask token" if tokenizer is None else repr(tokenizer.mask_token)
            raise InputError(
                f"a masked language model is explained at {shown}, and the input has {len(found)} of it; "
                "put exactly one in the text, or pass position"
            )
        return found[0]


def _refuse_without_times(model: str, config: Any, ids: Sequence[int]) -> None:
    """Refuse the text of a Whisper's decoder that begins otherwise than it writes: with a language and a task, if it
    knows several languages, and with the token for no times, or a time.

    Raises:
        InputError: it does.
    """
    languages, tasks = (getattr(config, name, None) or {} for name in ("lang_to_id", "task_to_id"))
    no_times = whole_number(getattr(config, "no_timestamps_token_id", None))  # times come after it
    before = f"{next(iter(languages))}<|transcribe|>" if languages else ""
    mend = f"write {before}<|notimestamps|> before it, or pass decoder ids"
    if languages and (not ids or ids[0] not in languages.values()):
        raise InputError(f"{model} writes a language and a task before a text, and the decoder's text has none; {mend}")
    begins = next((each for each in ids if each not in {*languages.values(), *tasks.values()}), None)
    if no_times is not None and begins is not None and begins < no_times:
        raise InputError(
            f"{model} writes <|notimestamps|> or a time before a text, and the decoder's text has neither; {mend}"
        )


def is_many(inputs: Any) -> bool:
    """Whether the input is several inputs rather than one text, pair of texts, list of ids or chat.

    >>> is_many("a text"), is_many(("a premise", "a hypothesis")), is_many([5, 7])
    (False, False, False)
    >>> is_many(["a text"]), is_many([[5, 7], [5]]), is_many([]), is_many([("one", "two"), ("three", "four")])
    (True, True, True, True)
    >>> is_many([{"role": "user", "content": "hi"}]), is_many({"input_ids": [[5, 7], [5, 2]]})
    (False, True)
    """
    if isinstance(inputs, Mapping):
        return _encoded.rows_in(inputs) > 1
    if hasattr(inputs, "ndim"):
        return bool(inputs.ndim in (2, 4) and len(inputs) > 1)  # rows of ids, or images
    if isinstance(inputs, (str, bytes)) or not isinstance(inputs, Sequence):
        return False
    if not inputs:
        return True
    first = inputs[0]
    if isinstance(inputs, tuple) and len(inputs) == 2 and isinstance(first, str):
        return False
    if isinstance(first, Mapping):
        return not ("role" in first or "content" in first)
    return not isinstance(first, (bool, float)) and whole_number(first) is None


def spread(value: Any, count: int, name: str) -> list[Any]:
    """One value for each of ``count`` inputs: a list of as many, or the same for all.

    Raises:
        InputError: a list of another length.
    """
    if not isinstance(value, (list, tuple)) and getattr(value, "ndim", 0) == 0:
        return [value] * count
    if len(value) != count:
        raise InputError(
            f"{name} is a list of {len(value)} for {count} inputs; pass one for all, or one for each input"
        )
    return list(value)


def _is_encoding(given: Any) -> bool:
    """Whether this is what a tokenizer returns, and no chat message."""
    return isinstance(given, Mapping) and not {"role", "content"} <= set(given)


def _decoder_of(given: Any, decoder: Any) -> Any:
    """The decoder's text: given beside the input, or in what a tokenizer returned, without its padding."""
    if not isinstance(given, Mapping) or given.get("decoder_input_ids") is None:
        return decoder
    if decoder is not None:
        raise InputError("the decoder's text is given twice, as decoder_input_ids and as decoder; pass one of them")
    return _encoded.decoder_ids(given)


def _choices(given: Any) -> tuple[str, Sequence[str]]:
    """The text and the choices of a multiple choice question."""
    if isinstance(given, (tuple, list)) and len(given) == 2 and isinstance(given[1], (tuple, list)):
        text, choices = given
        if isinstance(text, str) and len(choices) > 1 and all(isinstance(choice, str) for choice in choices):
            return text, choices
    raise InputError("a multiple choice model takes a text and at least two choices; pass (text, [choice, choice])")
