"""One pass over a corpus: the passages in which each latent neuron of a model is highest (ActMax, RelMax).

Activation maximisation (Nguyen et al. 2016) over real texts, and its counterpart by relevance (Achtibat et al. 2023):
of each text a neuron has one value, the highest of its tokens, and each neuron keeps the k texts where that is largest.
Relevance is the neuron's own, in an AttnLRP pass from the logit of what the model itself predicts next: after the last
token of each text, or after one in its second half that is drawn by the text's ids. Tokens behind it have none.

A part is so many texts of the corpus, one after another. It is the same whichever process makes it, and parts are
merged in any order to the same bytes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor

from lrpx._defined import settings_of_model
from lrpx.cards._best import keys
from lrpx.cards._corpus import digest_of, length, read_corpus, read_row
from lrpx.cards._reading import KIND, REFERENCES, References
from lrpx.cards._references import BINS, FACTS, Kept, bins, from_table, octave, octaves, schema, to_table
from lrpx.errors import DataError, InputError, ModelError, NonFiniteError
from lrpx.questions import Question, Questions
from lrpx.recipes import ATTNLRP
from lrpx.runs import Store, versions, write_table
from lrpx.targets import Logit, whole_number
from lrpx.tasks import Task
from lrpx.units import Place, Reading, places
from lrpx.units._asked import unseen
from lrpx.units._reading import Called

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import pyarrow as pa

    from lrpx._batching import Batch
    from lrpx._data.texts import Text
    from lrpx.engine import Tap
    from lrpx.engine._places import Side
    from lrpx.inputs import Row
    from lrpx.model import BoundModel, Spec

PART: Final = 2048
EVERY: Final = 16
"""The histogram counts one of so many tokens, others in each text."""
DENSE: Final = 6
"""Where more than one of so many peaks is better than what is kept, all of them are looked for at once."""
PACKAGES: Final = ("lrpx", "torch", "transformers", "pyarrow")


@dataclass(frozen=True)
class Collection:
    """What is collected, of which model, from which corpus.

    Args:
        model: a model of transformers that takes texts, in one argument.
        corpus: ``.txt`` (a text a line), ``.tsv``, ``.csv``, ``.jsonl`` or ``.parquet``; of any size.
        measures: by what units are ranked: ``"activation"``, ``"negative activation"`` (the lowest ones: where an
            MLP is gated they write the opposite), ``"relevance"``, which costs a backward pass a batch.
        k: passages kept of each unit.
        text: the column of the texts.
        context: the most tokens of a text; the model's own limit when None.
        long: what becomes of longer texts: ``"refuse"``, before the run begins, or ``"cut"``.
        at: where the prediction is read whose relevance is asked for: ``"drawn"`` or ``"last"``.
        skip: leave out the first so many tokens of each text, where many models park attention.
        part: texts in a part: a stopped run loses the part in work.
        batch_size: the most texts that run together.

    Raises:
        InputError, ModelError, DataError: an option is none, the model does not fit, or the corpus cannot be read.
        MethodError: no latent neurons are found in the model.
    """

    model: BoundModel
    corpus: Path
    measures: Sequence[str] = ("activation",)
    k: int = 16
    text: str = "text"
    context: int | None = None
    long: Literal["refuse", "cut"] = "refuse"
    at: Literal["drawn", "last"] = "drawn"
    skip: int = 0
    part: int = PART
    batch_size: int = 32
    places: tuple[Place, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "measures", tuple(dict.fromkeys(self.measures)))
        wrong = [name for name in self.measures if name not in FACTS]
        if wrong or not self.measures:
            raise InputError(f"units are ranked by {', '.join(FACTS)}; {wrong or 'nothing'} was asked for")
        for name, least in (("k", 1), ("context", 1), ("part", 1), ("batch_size", 1), ("skip", 0)):
            value = getattr(self, name)
            if not (name == "context" and value is None) and (whole_number(value) or 0) < least:
                raise InputError(f"{name} is {value!r}; pass a whole number, at least {least}")
        for name, known in (("long", ("refuse", "cut")), ("at", ("drawn", "last"))):
            if getattr(self, name) not in known:
                raise InputError(f"{name} is {getattr(self, name)!r}; pass {' or '.join(map(repr, known))}")
        model, task = self.model, self.model.task
        model.refuse_random()
        if task.arguments != ("input_ids",) or task.together is not None:
            raise ModelError(f"{type(model.module).__name__} does not take one text; collect a model that does")
        if model.padding_side != "right":
            raise ModelError(
                'units are collected with padding_side="right", where places count from each text\'s start'
            )
        if "relevance" in self.measures and not (task is Task.CAUSAL or task.reads == "whole"):
            raise ModelError(
                f"a {task.title} predicts nothing of a text without a place that is asked for; rank by activation"
            )
        object.__setattr__(self, "corpus", Path(self.corpus))
        object.__setattr__(self, "places", places(model.module, "neurons"))

    # ------------------------------------------------------------------------ settings

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What defines the references, as plain JSON values.

        Raises:
            DataError: the corpus cannot be read.
        """
        model = self.model
        return {
            "model": model.as_it_is,
            "weights and config": model.fingerprint(),
            "tokenizer": model.tokenizer_fingerprint(),
            "dtype": model.precision,
            "places": [[place.layer, place.name, place.width] for place in self.places],
            "corpus": _described(self.corpus),
            "text": self.text,
            "context": self.limit,
            "long": self.long,
            "measures": list(self.measures),
            "k": self.k,
            "recipe": ATTNLRP.describe() if "relevance" in self.measures else None,
            "at": self.at if "relevance" in self.measures else None,
            "skip": self.skip,
            "every": EVERY,
            "part": self.part,
        } | settings_of_model(model.module)

    @property
    def limit(self) -> int | None:
        """The most tokens of a text, or None."""
        return min((each for each in (self.context, self.model.limit) if each is not None), default=None)

    # ---------------------------------------------------------------------- the corpus

    def texts(self) -> Iterator[Text]:
        """The corpus, text by text.

        Raises:
            DataError: it cannot be read, or holds no text.
        """
        return read_corpus(self.corpus, self.text)

    def check(self) -> int:
        """Read the corpus once before anything runs: how many texts it has.

        Raises:
            DataError: it cannot be read, or a text is too long and is not to be cut.
            InputError: all tokens of all texts are skipped.
        """
        count = longest = 0
        refuses = self.long == "refuse" and self.limit is not None
        for each in self.texts():
            count += 1
            if refuses or longest <= self.skip:
                size = length(self.model, each.text)
                if refuses and self.limit is not None and size > self.limit:
                    raise DataError(
                        f"{self.corpus}:{each.line} has {size:,} tokens, more than {self.limit:,}; cut such texts with "
                        "long='cut', or leave them out"
                    )
                longest = max(longest, size if self.limit is None else min(size, self.limit))
        if longest <= self.skip:
            raise InputError(
                f"skip is {self.skip}, and no text of {self.corpus} has more than {longest} tokens; skip fewer"
            )
        return count

    def row(self, text: Text) -> Row:
        """A text as the model takes it.

        Raises:
            DataError: the model cannot take it.
        """
        try:
            return read_row(self.model, text.text, self.limit)
        except InputError as error:
            raise DataError(f"{self.corpus}:{text.line}: {error}") from error

    def position(self, row: Row) -> int | None:
        """Where the prediction is read whose relevance is asked for; None for a classifier."""
        ids = row.segments[0].tokens.ids
        if self.model.task.reads != "position":
            return None
        if self.at == "last" or len(ids) < 2:
            return len(ids) - 1
        drawn = int.from_bytes(hashlib.sha256(repr(ids).encode()).digest()[:8], "big")
        return len(ids) // 2 + drawn % (len(ids) - len(ids) // 2)

    # ------------------------------------------------------------------------- running

    @cached_property
    def _others(self) -> tuple[str, ...]:
        """Modules like those of the units, which no table has: a text that comes to one is refused."""
        return unseen(self.model.module, self.places)

    def of(self, texts: Sequence[Text], done: Callable[[int], object] = lambda _: None) -> pa.Table:
        """What some texts of the corpus give, the same in any process.

        Args:
            texts: of the corpus, each once.
            done: called with how many more are done.

        Raises:
            DataError: a text that the model cannot take.
            ModelError: a unit's module does not give a value for each token, or more often than it was found to.
            TraceError: a text comes to units that were not found, as those of an expert that no token was sent to then.
            NonFiniteError: NaN or infinity.
        """
        kept = {place: Kept.none(place.width, self.measures, self.k, self.model.device) for place in self.places}
        rows = [self.row(each) for each in texts]
        lines = torch.tensor([each.line for each in texts])
        asked = [Question(i, self.position(row), Logit(None)) for i, row in enumerate(rows)]
        questions = Questions(tuple(rows), tuple(asked))
        if "relevance" in self.measures:
            for group in self.model.groups(rows, self.batch_size):
                self._relevance(questions.about(group), lines[group], kept)
                done(len(group))
        else:

            def taps(batch: Batch, group: Sequence[int]) -> list[Tap]:
                done(len(group))
                return [_Listening(self, kept, batch, lines[list(group)]), Reading((), self._others)]

            self.model.values(questions, taps=taps, batch_size=self.batch_size, read=lambda *_: torch.zeros(()))
        return to_table(kept, self.measures)

    def _relevance(self, questions: Questions, lines: Tensor, kept: dict[Place, Kept]) -> None:
        listening: list[_Listening] = []

        def taps(batch: Batch) -> list[Tap]:
            listening.append(_Listening(self, kept, batch, lines))
            return [*listening, Reading((), self._others)]

        rows = [each.row for each in questions.asked]  # one question a row, in another order than the rows
        order = sorted(range(len(rows)), key=rows.__getitem__)
        positions = [questions.asked[i].position for i in order]
        with self.model.traced(questions, ATTNLRP, taps=taps) as ran:
            predicted = torch.tensor([getattr(ran.answers.targets[i], "token", -1) for i in order])
            for _ in ran.explained():  # one round
                with torch._C.DisableTorchFunction():
                    listening[0].rank_relevance(ran.trace.relevance_of, predicted, positions)


class _Listening(Called):
    """Reads the units of one batch of passages as the model runs."""

    def __init__(self, collection: Collection, kept: dict[Place, Kept], batch: Batch, lines: Tensor) -> None:
        self._collection = collection
        self._kept = kept
        super().__init__(place.path for place in kept)
        self._at = {(place.path, place.side, place.call): place for place in kept}
        self._leaves: dict[Place, Tensor] = {}
        device = collection.model.device
        real = batch.real
        begins = batch.starts[0][:, None]
        self._begins = batch.starts[0].to(device)
        places = torch.arange(real.shape[1]) - begins
        self._real = (real & (places >= collection.skip)).to(device)
        self._lines = lines.to(device)
        self._ids = batch.inputs["input_ids"]
        whole = self._real.all(0).tolist()
        # pieces of octaves, in order; those that hold no padding need no copy that masks it
        self._pieces = [
            (octave(begin), *piece) for begin, end in octaves(len(whole)) for piece in _pieces(whole, begin, end)
        ]
        sampled = ((places + lines[:, None]) % EVERY == 0) & self._real.cpu()
        self._sampled = [each.to(device) for each in sampled.nonzero(as_tuple=True)]

    def at(self, path: str, side: Side, call: int, value: Tensor) -> None:
        place = self._at.get((path, side, call))
        if place is None:
            return
        if value.shape[:-1] != self._real.shape or place.apart == self._real.shape[1]:  # or of latents, as many
            raise ModelError(
                f"{path} has values of shape {list(value.shape)} for {list(self._real.shape)} tokens; units are "
                "collected where each token has one"
            )
        if "relevance" in self._collection.measures:
            self._leaves[place] = value
        with torch._C.DisableTorchFunction():  # no part of the model: no rule is asked for what is done here
            self._rank_activations(place, value.detach())

    def _rank_activations(self, place: Place, value: Tensor) -> None:
        kept, measures = self._kept[place], self._collection.measures
        x = place.of(value)
        tops = self._peaks(x, self._real)
        best = tops.amax(1)
        if "activation" in measures:
            self._rank(kept, "activation", x, best, self._real)
        if "negative activation" in measures:
            self._rank(kept, "negative activation", -x, self._peaks(-x, self._real).amax(1), self._real)
        every = torch.ones(tops.shape[:2], dtype=torch.bool, device=tops.device)
        highest = _first(tops, best, every)[self._real.any(1)]
        for i in range(tops.shape[1]):
            kept.peaks[:, i] += (highest == i).sum(0)
        few = bins(x[self._sampled[0], self._sampled[1]].float()) + BINS * torch.arange(place.width, device=x.device)
        kept.counts += few.flatten().bincount(minlength=kept.counts.numel()).reshape(kept.counts.shape)

    def leaves(self) -> list[Tensor]:
        return list(self._leaves.values())

    def rank_relevance(
        self, relevance_of: Callable[[Tensor], Tensor], predicted: Tensor, positions: Sequence[int | None]
    ) -> None:
        """After the backward pass: rank the units by their relevance, of tokens up to the explained position."""
        seen = self._real
        if positions[0] is not None:
            last = torch.tensor(positions).to(self._begins) + self._begins
            seen = seen & (torch.arange(seen.shape[1], device=seen.device) <= last[:, None])
        for place, leaf in self._leaves.items():
            x = place.of(relevance_of(leaf))
            self._rank(self._kept[place], "relevance", x, self._peaks(x, seen).amax(1), seen, predicted.to(x.device))

    def _peaks(self, x: Tensor, seen: Tensor) -> Tensor:
        """``[B, octaves, U]`` float32: the highest in each octave of positions, −∞ where there is none."""
        out = x.new_empty((len(x), self._pieces[-1][0] + 1, x.shape[2]), dtype=torch.float32)
        before = None
        for number, begin, end, is_whole in self._pieces:
            part = x[:, begin:end]
            if not is_whole or seen is not self._real:
                part = part.masked_fill(~seen[:, begin:end, None], -torch.inf)
            highest = part.amax(1).float()
            out[:, number] = torch.maximum(out[:, number], highest) if number == before else highest
            before = number
        return out

    def _rank(
        self, kept: Kept, name: str, x: Tensor, tops: Tensor, seen: Tensor, predicted: Tensor | None = None
    ) -> None:
        there = seen.any(1).nonzero().flatten()
        seen_tops = tops if len(there) == len(tops) else tops[there]
        if not seen_tops.isfinite().all():
            raise NonFiniteError(f"NaN or infinity in the {name} of a unit; check the weights, or try dtype float32")

        def facts(rows: Tensor, units: Tensor) -> Tensor:
            if len(rows) * DENSE < tops.numel():
                at = x[rows, :, units].masked_fill(~seen[rows], -torch.inf).max(1).indices
            else:  # as of a part's first batches, where all is better than nothing
                at = _first(x, tops, seen)[rows, units].long()
            found = [at - self._begins[rows], self._ids[rows, at]]
            found += [] if predicted is None else [predicted[rows]]
            return torch.stack(found, 1).int()

        found = keys(seen_tops, self._lines[there, None])
        kept.best[name].offer(found, lambda rows, units: facts(there[rows], units))


def _first(x: Tensor, best: Tensor, seen: Tensor) -> Tensor:
    """``[B, U]``: the first place among those that are seen, ``[B, T]``, where ``x [B, T, U]`` is ``best [B, U]``.

    What ``argmax`` gives, which is made for the last dimension alone and takes ten times as long here.
    """
    count = x.shape[1]
    few = next(kind for kind in (torch.int8, torch.int16, torch.int32) if count <= torch.iinfo(kind).max)
    rank = torch.where(seen, torch.arange(count, 0, -1, dtype=few, device=x.device), 0)
    x = x.to(best.dtype) if x.dtype is torch.float64 else x  # of which the best was rounded
    are_best = x == best[:, None]
    ranks = (are_best.view(few) if few is torch.int8 else are_best.to(few)).mul_(rank[..., None])
    return count - ranks.amax(1).int()


def _pieces(whole: Sequence[bool], begin: int, end: int) -> Iterator[tuple[int, int, bool]]:
    """Where, from ``begin`` to ``end``, all or not all is ``True``: half-open ranges, and which of both.

    >>> list(_pieces([True, True, True, False], 1, 4))
    [(1, 3, True), (3, 4, False)]
    """
    for is_whole, columns in groupby(range(begin, end), key=whole.__getitem__):
        each = list(columns)
        yield each[0], each[-1] + 1, is_whole


# ------------------------------------------------------------------------------ a folder


def collect(
    collection: Collection, folder: Path, command: str = "", done: Callable[[int, int], object] = lambda *_: None
) -> References:
    """Collect into a folder: parts, and in the end ``references.parquet``, a row a unit. Started again, it goes on.

    Args:
        collection: what is collected.
        folder: where everything is written; made if it is missing.
        command: how it was asked for, for the record.
        done: called with how many more texts are done, and of how many.

    Raises:
        ResultFileError: the folder cannot be written, holds another run, or another run is writing in it.
        DataError, ModelError, NonFiniteError: as :class:`Collection` has it.
    """
    total = collection.check()
    columns, measures = schema(collection.measures), collection.measures
    with Store.begin(folder, KIND, collection.settings, versions(PACKAGES)) as store:
        model = collection.model
        spec = None if model.spec is None else model.spec.to_dict()
        store.note(
            spec=spec, corpus=str(collection.corpus.resolve()), texts=total, command=command, device=model.device
        )
        merged: dict[Place, Kept] | None = None
        texts, number = collection.texts(), 0
        while chunk := list(islice(texts, collection.part)):
            name = f"{number:06}"
            table = store.part(name, columns)
            if table is None:
                table = collection.of(chunk, lambda more: done(more, total))
                store.keep(name, table)
            else:
                done(len(chunk), total)
            part = from_table(table, collection.places, measures, collection.k)
            merged = part if merged is None else merge(merged, part)
            number += 1
        store.remove_all_but([f"{i:06}" for i in range(number)])
        assert merged is not None
        write_table(folder / REFERENCES, to_table(merged, measures), store.digest)
    return References.read(folder)


def refuse_other(folder: Path, model: Spec, corpus: Path, measures: Sequence[str], **more: Any) -> None:
    """Refuse a folder that holds another run, as far as it can be told before a model is loaded.

    Args:
        folder: of the run.
        model: what will be loaded.
        corpus, measures: as :class:`Collection` takes them.
        more: other settings of the references, such as ``k``.

    Raises:
        ResultFileError: it holds another run; says what differs.
        DataError: the corpus cannot be read.
    """
    known = {"model": model.called, "corpus": _described(corpus), "measures": list(dict.fromkeys(measures))}
    Store.refuse_other(folder, KIND, known | more)


def _described(corpus: Path) -> dict[str, str]:
    """A corpus, wherever it lies."""
    return {"file": corpus.name, "sha256": digest_of(corpus)}


def merge(one: dict[Place, Kept], other: dict[Place, Kept]) -> dict[Place, Kept]:
    """What two parts give together, in either order; the first is changed."""
    for place, kept in one.items():
        kept.merge(other[place])
    return one
