"""What is tried of a model, where nothing tells but short runs of it: which rows may run together, what its mask hides,
and whether that is all it does. Each is tried once, as long as the user has put the same into the model and it has the
same weights, and without interventions: what is told of the model is so behind their block, too, and no position of
theirs is a trial's.

(:mod:`lrpx.tasks` has the runs of a few tokens; where a user's questions are needed, the bound model runs them.)
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lrpx import tasks
from lrpx._dropping import can_drop, can_tell, proven, told_apart, with_another_end
from lrpx._holding import PLACES
from lrpx._intervening import intervened, intervened_at, without_interventions
from lrpx._kept import as_it_was
from lrpx._modules import argument_names, unpacked
from lrpx._padding import end_of
from lrpx.errors import ModelError, NonFiniteError
from lrpx.questions import Question, Questions
from lrpx.targets import Span
from lrpx.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.nn import Module

    from lrpx._batching import Batch
    from lrpx.inputs import Reader, Row
    from lrpx.targets import Target

    Read = Callable[[int, Target, Tensor], Tensor]
    Run = Callable[[Questions, Sequence[Tensor] | None, int, Read, bool], Tensor]
    Batched = Callable[[Questions], Batch]

TRIED = 13
"""Of so many tokens is a text that tells what a model does with its mask."""
SAME = 8
"""So many times the precision, at the largest logit, values may differ where nothing is changed that is seen."""


@dataclass
class _Tried:
    """What runs have told of a model as long as its user has put the same into it (:func:`lrpx.tasks.changes`), and it
    has the same weights and flags (:func:`lrpx.tasks.state`): one whose attention writes nothing yet, before it is
    trained, heeds any mask.

    Attributes:
        changes: what its user has put into it.
        state: its weights and flags.
        is_seen: whether it says what stands in hidden places.
        reads_on: whether it reads the same token where one before that is hidden.
        read_alone: how many hidden places may be before one that is read, or on either side, without a trace in it.
        dropping: in which precision, place and attention it says the same without hidden tokens, up to how many tokens,
            and from how many it does not.
        padded: how far padding changed nothing, and from where it does.
        apart: how many tokens ran together of which none saw others of another row.
        first: what it calls the first place of a text, once that is tried, or None where nothing tells.
        meet: whether more of them did.
        found: the rest, by name.
    """

    changes: tuple[object, ...]
    state: tuple[object, ...] = ()
    is_seen: bool | None = None
    reads_on: bool | None = None
    read_alone: dict[object, float] = field(default_factory=dict)
    dropping: dict[object, tuple[int, float]] = field(default_factory=dict)
    padded: tuple[float, float] = (7.0, math.inf)
    apart: int = 24
    meet: bool = False
    first: list[int | None] = field(default_factory=list)
    found: dict[str, bool] = field(default_factory=dict)

    @property
    def is_hooked(self) -> bool:
        return any(isinstance(each, tuple) and each[0] == "hook" for each in self.changes)

    def once(self, name: str, trial: Callable[[], bool]) -> bool:
        """What a trial tells, which is made the first time."""
        if name not in self.found:
            with without_interventions():
                self.found[name] = trial()
        return self.found[name]


def _hidden_beside(seen: Sequence[int], place: int) -> tuple[float, float]:
    """How many places in a row are hidden before a hidden one, and behind it; up to an end, any number.

    >>> _hidden_beside([1, 0, 0, 0], 2), _hidden_beside([1, 0, 0, 1], 2), _hidden_beside([1, 1, 1, 0], 2)
    ((1, inf), (1, 0), (0, 0))
    """
    if seen[place]:
        return 0, 0
    before, after = (
        next((n for n, each in enumerate(side) if each), math.inf) for side in (seen[:place][::-1], seen[place + 1 :])
    )
    return before, after


def _as_said(_: int, __: Target, logits: Tensor) -> Tensor:
    """All that is said, and 0 where it is no number, as of what is excluded."""
    return logits.double().nan_to_num(0.0, 0.0, 0.0)


class Trials:
    """What is tried of one model, each once.

    Args:
        reader: what makes rows for it.
        padding_side: where shorter rows are padded.

    What needs a user's questions is given a ``run`` of them: from questions, a mask for each row or None, how many rows
    run together, what is read of each question's logits, and whether without padding
    (:meth:`BoundModel.values <lrpx.model.BoundModel.values>`).
    """

    def __init__(self, reader: Reader, padding_side: Literal["left", "right"]) -> None:
        self.reader = reader
        self.module: Module = reader.model
        self.task: Task = reader.task
        self.padding_side: Literal["left", "right"] = padding_side
        self._known = _Tried(())

    @property
    def tried(self) -> _Tried:
        """What runs have told of the model; nothing, where something else of its user's is in it since, or it was
        trained."""
        changes, state = tasks.changes(self.module), tasks.state(self.module)
        if (changes, state) != (self._known.changes, self._known.state):
            self._known = _Tried(changes, state)
        return self._known

    @property
    def rows_meet(self) -> bool:
        """Whether rows that run together see each other, so that each must run alone. Tried once; a hook of the user's
        may mix them, or count them, and is given one at a time."""
        tried = self.tried
        return tried.is_hooked or tried.once("rows meet", lambda: tasks.rows_meet(self.module, self.task))

    def meet_in(self, rows: Sequence[Row], batch_size: int, images_meet: Callable[[], bool]) -> bool:
        """Whether rows see each other that did not where fewer ran together: experts of a module of one's own may take
        a number of tokens that no attribute tells. Tried where there are more of them than twice what was; and whether
        images do, by a run of the first."""
        tried = self.tried
        if not self.task.segments:
            return tried.once("images meet", images_meet)
        wide, count = max(max(row.lengths) for row in rows), min(len(rows), batch_size)
        if wide * count > tried.apart and not (tried.meet or tasks.is_theirs(self.module)):
            count = min(2 * count, batch_size)
            tried.meet = tasks.seem_to_meet(self.module, self.task, count, wide)
            tried.apart = wide * count
        return tried.meet

    @property
    def _hides(self) -> bool:
        """Tried once, where nothing that is hidden makes a difference."""
        return self.tried.once("hides", lambda: tasks.hides(self.module, self.task))

    @property
    def heeds_mask(self) -> bool:
        """Tried once."""
        how = self.module, self.task, self._pad_id or 0, self.padding_side
        return self.tried.once("heeds its mask", lambda: tasks.heeds_mask(*how))

    @property
    def hides_ones(self) -> bool:
        """Tried once, before a run."""
        if not self.task.segments or tasks.is_theirs(self.module):
            return False
        return self.tried.once("hides ones", lambda: tasks.hides_ones(self.module, self.task, self._pad_id or 0))

    def pads_to(self, wide: int) -> bool:
        """Whether a module of one's own says the same of a text that is padded to so many tokens: its angles may hang
        on how many there are. Tried where there are more than ever before; transformers' says so (``tasks.border``)."""
        tried = self.tried
        held, failed = tried.padded
        if wide > held and wide < failed and self.task.segments and not tasks.is_theirs(self.module):
            how = self.module, self.task, self._pad_id or 0, self.padding_side
            tried.padded = (wide, failed) if tasks.heeds_mask(*how, wide) else (held, wide)
        return wide < tried.padded[1]

    @property
    def looks_back(self) -> bool:
        """Tried once, not for each call: it takes two runs of the model, or of what a classifier of texts reads."""
        body = getattr(self.module, "base_model", None) if self.task.reads == "whole" else None
        module = body if isinstance(body, torch.nn.Module) else self.module
        return self.tried.once("looks back", lambda: tasks.looks_back(module))

    @property
    def rows_alone(self) -> bool:
        """Tried once, before a run; an intervention at the head is given all rows, which are those at its positions."""
        if self.task.reads != "position":
            return True
        if intervened(self.module):
            around = tasks.around_head(self.module)
            if around and intervened_at([*around, *around[-1].modules()]):
                return False
        return not tasks.head_is_hooked(self.module) and self._head_is_alone

    @property
    def _head_is_alone(self) -> bool:
        return self.tried.once("head", lambda: tasks.rows_alone(self.module, self.task, self._pad_id or 0))

    @property
    def _pad_id(self) -> int | None:
        return tasks.pad_id(self.module)

    @property
    def _spare(self) -> list[int]:
        """Two tokens to try the model with, out of the middle of its vocabulary."""
        count = tasks.first_weight(self.module).shape[0]
        return [i for i in range(count // 2, count) if i != self._pad_id][:2]

    @property
    def _first(self) -> int | None:
        """Tried once."""
        tried = self.tried
        if not tried.first:
            tried.first.append(tasks.first_position(self.module, self.task))
        return tried.first[0]

    def first_position(self) -> int:
        """What the model calls the first place of a text.

        Raises:
            ModelError: nothing tells.
        """
        if self._first is None:
            raise self._of_unknown_places()
        return self._first

    def _of_unknown_places(self) -> ModelError:
        return ModelError(
            f"{type(self.module).__name__} takes position_ids, and without them says something else than with any that "
            "count up by one from 0, 1, 2 or behind its padding's, so nobody knows which places its tokens keep where "
            "one is hidden; let it count so, pass position_ids with the input, or use a method or a perturbation that "
            "changes the tokens or their embeddings"
        )

    def moves_places(self, run: Run, questions: Questions) -> bool:
        """Whether the model, with nothing hidden, says something else of one of the texts with the places that a mask's
        tokens keep: a module of one's own may begin anew behind the end of a text, and RoBERTa does not count padding,
        wherever it stands. transformers' are believed of other texts, where nothing put into them takes places."""
        if not tasks.accepts(self.module, "position_ids"):
            return False
        put_in: list[Any] = [each[-1] for each in self.tried.changes if isinstance(each, tuple)]
        taken = (argument_names(each.forward if isinstance(each, torch.nn.Module) else each) for each in put_in)
        counts = not tasks.is_theirs(self.module) or any(PLACES in names for names in taken)
        first = {id(questions.rows[asked.row]): i for i, asked in reversed([*enumerate(questions.asked)])}
        whole = questions.alone(sorted(first.values()))
        if counts:
            return any(self._moves(run, whole.alone([each])) for each in range(len(whole)))
        padded = (row for row in whole.rows if self._pad_id in row.tokens.ids and len(row.segments) == 1)
        row = next(padded, None)
        if row is None or row.arguments:
            return False
        (segment,), last = row.segments, len(row.tokens.ids) - 1
        ids = list(row.tokens.ids)
        ids[min(1, last - 1)] = self._pad_id or 0  # before most of them
        short = replace(row, segments=(replace(segment, tokens=replace(segment.tokens, ids=tuple(ids))),))
        asked = Question(0, last if self.task.reads == "position" else None, questions.asked[0].target)
        return self.tried.once("moves behind padding", lambda: self._moves(run, Questions((short,), (asked,))))

    def _moves(self, run: Run, asked: Questions) -> bool:
        mask = torch.ones(asked.rows[0].lengths[0], dtype=torch.int64)
        try:
            kept, plain = (run(asked, given, 1, _as_said, True) for given in ([mask], None))
        except Exception:  # of the module's own: it must be told its places
            return False
        lost = SAME * torch.finfo(tasks.first_weight(self.module).dtype).eps * plain.abs().max()
        return bool((kept - plain).abs().max() > lost)

    def refuse_drawing(self, run: Run, questions: Questions) -> None:
        """Refuse a model that says something else of the same input in another run.

        Raises:
            ModelError: it does.
        """
        if self._draws(run, questions):
            raise ModelError(
                f"{type(self.module).__name__} draws random numbers as it runs, and says something else of the same "
                "input each time, so differences between runs tell nothing of what was changed; let it draw the same "
                "(Reformer's hash_seed)"
            )

    def _draws(self, run: Run, questions: Questions) -> bool:
        """Whether the model says something else of the same input in another run. Tried once."""

        def differ() -> bool:
            asked = questions.alone([0])
            one, other = (run(asked, None, 1, _as_said, True) for _ in range(2))
            lost = SAME * torch.finfo(tasks.first_weight(self.module).dtype).eps * one.abs().max()
            return bool((one - other).abs().max() > lost)

        return self.tried.once("draws", differ)

    def refuse_unmoved(self, values: Tensor) -> None:
        """Refuse a model that does not look at its mask.

        Args:
            values: what it said with masks of several kinds.

        Raises:
            ModelError: it said the same, and does.
        """
        moved = (values - values[:1]).abs().max()
        if moved <= 16 * torch.finfo(values.dtype).eps * values.abs().max() and not self._hides:
            dtype = str(tasks.first_weight(self.module).dtype).removeprefix("torch.")
            is_half = dtype in ("bfloat16", "float16")
            told = f", as far as {dtype} tells," if is_half else ""
            mend = "try dtype float32, or " if is_half else ""
            raise ModelError(
                f"{type(self.module).__name__} takes an attention_mask and{told} does not look at it, so no token "
                f"can be hidden from it; {mend}use a method or a perturbation that changes the tokens or their "
                "embeddings"
            )

    def refuse_hiding(self, run: Run, batched: Batched, questions: Questions, masks: Sequence[Tensor]) -> None:
        """Refuse a model that does with its mask anything but to hide tokens, or sees what is hidden.

        Args:
            run: of questions, as above.
            batched: the batch of questions, without padding.
            questions: what was asked.
            masks: for each row ``[T]``, 0 at hidden tokens.

        Raises:
            ModelError: it does.
        """
        if self.moves_places(run, questions):
            raise self._of_unknown_places()
        if self._counts_places(batched, questions):
            raise ModelError(
                f"{type(self.module).__name__} counts tokens' places by its attention_mask, or which one it reads, so "
                "others move where a token is hidden, and none can be hidden in its place; let it take position_ids, "
                "or use a method or a perturbation that changes the tokens or their embeddings"
            )
        if self.sees_hidden(run, questions):
            raise ModelError(
                f"in {type(self.module).__name__} other tokens see what its attention_mask hides, as by a convolution, "
                "a recurrence or a pooling over tokens, so no token can be hidden so; use a method or a perturbation "
                "that changes the tokens or their embeddings"
            )
        if self.reads_another(run, questions):
            raise ModelError(
                f"{type(self.module).__name__} counts by its attention_mask which token it reads, and reads one before "
                "it where a token is hidden, so no token can be hidden so; use a method or a perturbation that changes "
                "the tokens or their embeddings"
            )
        if self.reads_hidden(run, questions, masks):
            raise ModelError(
                f"in {type(self.module).__name__} a hidden token that is read looks at others that are hidden, as "
                "where they fill its window of attention, of which nothing tells; use a method or a perturbation that "
                "changes the tokens or their embeddings"
            )

    def sees_hidden(self, run: Run, questions: Questions) -> bool:
        """Whether what the model says hangs on what stands in hidden places that are not read. Tried once, on the first
        text that can tell."""
        tried = self.tried
        if tried.is_seen is not None:
            return tried.is_seen
        some = told_apart(questions, self.task is Task.CAUSAL, self._spare, self._pad_id)
        if some:
            third, every = some
            tried.is_seen = self._tells_apart(run, *third, SAME)
            with suppress(RuntimeError, ValueError, IndexError, NonFiniteError):  # with next to nothing left
                # which is small beside what is lost
                tried.is_seen = tried.is_seen or self._tells_apart(run, *every, 4 * SAME)
        return bool(tried.is_seen)

    def reads_hidden(self, run: Run, questions: Questions, masks: Sequence[Tensor]) -> bool:
        """Whether what is read at a hidden place hangs on hidden places beside it: a softmax over nothing but numbers
        far below 0 is a mean of all. Tried where most are hidden before it, or on either side, until there are more."""
        tried = self.tried.read_alone
        most: dict[object, tuple[float, int, list[int]]] = {}
        for i, (asked, mask) in enumerate(zip(questions.asked, masks, strict=True)):
            row, target = questions.rows[asked.row], asked.target
            if row.arguments or len(row.segments) > 1:
                continue
            read: list[Any] = [target.token, target.end] if isinstance(target, Span) else [asked.position]
            if self.task.reads == "whole":
                read = [0, end_of(row.tokens.ids, self._pad_id), len(mask) - 1]
            places = [place for place in read if isinstance(place, int)]
            for place in places:
                before, after = _hidden_beside(mask.tolist(), place)
                for side, wide in (("before", before), ("either", min(before, after))):
                    kind = side, place == 0
                    if wide > max(tried.get(kind, 0), most.get(kind, (0,))[0]):
                        most[kind] = wide, i, places
        if not can_tell(tasks.first_weight(self.module).dtype):
            return False
        for which, (wide, i, places) in most.items():
            asked, mask = questions.asked[i], masks[i]
            row, spare = questions.rows[asked.row], self._spare
            (first,) = row.segments
            ids = list(first.tokens.ids)
            for place in (mask == 0).nonzero().flatten().tolist():
                if place not in places and ids[place] != self._pad_id:
                    ids[place] = next(each for each in spare if each != ids[place])
            other = replace(row, segments=(replace(first, tokens=replace(first.tokens, ids=tuple(ids))),))
            pair = replace(questions, rows=(row, other), asked=(replace(asked, row=0), replace(asked, row=1)))
            if self._tells_apart(run, pair, [mask] * 2, [at for at in range(len(ids)) if at not in places], SAME):
                return True
            tried[which] = wide
        return False

    def _tells_apart(
        self, run: Run, pair: Questions, masks: Sequence[Tensor], places: Sequence[int], same: int
    ) -> bool:
        """Whether what the model says elsewhere than in these places is another of the second text, by more than so
        many times the precision."""

        def elsewhere(_: int, __: Target, logits: Tensor) -> Tensor:
            kept = logits.double().masked_fill(logits == -torch.inf, 0.0)
            if self.task.reads == "span":  # each place has its own, those too
                kept[[*places, *(place + len(kept) // 2 for place in places)]] = 0.0
            return kept

        with without_interventions():
            alone, beside = (run(pair, masks, size, elsewhere, True) for size in (1, 2))
        lost = same * torch.finfo(tasks.first_weight(self.module).dtype).eps * alone.abs().max()
        lost = lost.maximum(4 * (alone - beside).abs().max())
        return bool((alone[0] - alone[1]).abs().max() > lost)

    def reads_another(self, run: Run, questions: Questions) -> bool:
        """Whether a model that reads a text as a whole looks at its last token, and no longer where one before that is
        hidden, as one that pools at ``attention_mask.sum() - 1``. Tried once, on the first text that can tell."""
        tried = self.tried
        if tried.reads_on is None and self.task.reads == "whole":
            found = with_another_end(questions, self._spare)
            if found is None:
                return False
            try:
                with without_interventions():
                    logits = run(*found, 1, lambda _, __, logits: logits.double(), True)
            except (RuntimeError, ValueError, IndexError):  # it reads where a certain token is
                tried.reads_on = True
                return False
            lost = SAME * torch.finfo(tasks.first_weight(self.module).dtype).eps * logits.abs().max()
            whole, hidden = ((one - other).abs().max() for one, other in (logits[:2], logits[2:]))
            tried.reads_on = not bool(whole > lost >= hidden)
        return tried.reads_on is False

    def _counts_places(self, batched: Batched, questions: Questions) -> bool:
        """Whether a module of one's own does more with its mask than to hide tokens (:class:`~lrpx.tasks.Counting`):
        what it says of a text without one is then of other places, too. Tried once, on a text of :data:`TRIED` tokens
        out of the first; transformers' are known (BLOOM's distances are the method's own words)."""
        if tasks.is_theirs(self.module):
            return False
        return self.tried.once("counts places", lambda: self._tries_another_mask(batched, questions))

    def _tries_another_mask(self, batched: Batched, questions: Questions) -> bool:
        row, wide = questions.rows[0], TRIED
        first, *others = row.segments
        if row.arguments:
            wide = len(first)
        elif self.reader.limit is not None:
            wide = min(wide, self.reader.limit)
        some = [place * len(first) // wide for place in range(wide)]
        segments = (first if row.arguments else first.only(some), *others)
        read = len(segments[-1]) - 1 if self.task.reads == "position" else None
        asked = Questions((replace(row, segments=segments),), (Question(0, read, questions.asked[0].target),))
        if wide < 2:
            return False
        middle = (wide - 1) // 2
        without = torch.ones(wide, wide, dtype=torch.int64).fill_diagonal_(0)  # each of its rows hides another token
        without[:, middle] = 0
        apart = [place for place in (0, wide * 3 // 16, wide * 3 // 4) if place != middle]
        without[middle] = 1
        without[middle, apart] = 0  # no place but the first has as many before it
        hidden = [[*apart, middle] if place == middle else [place] for place in range(wide - 1)]
        batch = batched(asked)
        seen = torch.ones(wide, dtype=torch.int64)
        seen[middle] = 0  # and the last token is hidden in none, where a classifier may read
        places = self.first_position
        every = [batch.changed(self.module, "attention_mask", [each], places).inputs for each in (seen, *without[:-1])]

        def run(inputs: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> tasks.Counting:
            masks = [each["attention_mask"] for each in others]
            counting = tasks.Counting(self.module, tasks.first_weight(self.module), inputs, masks, hidden[: len(masks)])
            with (
                suppress(RuntimeError, ValueError, IndexError),  # it reads where a certain token is, or takes fewer
                torch.no_grad(), as_it_was(self.module), unpacked(self.module), batch.places_held(self.module),
                counting,
            ):  # fmt: skip
                counting.end(self.module(**inputs))
            return counting

        found = run(every[0], every[1:])
        return found.counts or (bool(found.unseen) and found.saw_other(run(every[1 + middle], [])))

    def says_the_same(self, run: Run, questions: Questions) -> bool:
        """Whether the model says the same of rows without their hidden tokens. Tried on the longest of them, and known
        from then on of rows that are not longer, in this precision, place and attention. (Interventions may be at
        places of the text.)"""
        if not can_drop(questions, self.task, self._pad_id) or not tasks.accepts(self.module, "position_ids"):
            return False
        if intervened(self.module):
            return False
        row = max(questions.rows, key=lambda each: each.lengths)
        (length,) = row.lengths
        dtype = tasks.first_weight(self.module).dtype
        if not can_tell(dtype):
            return False
        config = getattr(self.module, "config", None)
        kind = dtype, str(tasks.input_device(self.module)), getattr(config, "_attn_implementation", None)
        dropping = self.tried.dropping
        holds, fails = dropping.get(kind, (0, torch.inf))
        if holds < length < fails:

            def logits(_: int, __: Target, found: Tensor) -> Tensor:
                return found.double().masked_fill(found == -torch.inf, 0.0)

            def shorter(some: Questions, masks: Sequence[Tensor], exactly: bool, batch_size: int) -> Tensor:
                return run(some, masks, batch_size, logits, exactly)

            read_at = length - 1 if self.task.reads == "position" else None  # as far from the others as there is any
            asked = Question(0, read_at, questions.asked[0].target)
            tried = Questions((row,), (asked,))
            same = self._first is not None and proven(shorter, tried, self._first, torch.finfo(dtype).eps)
            holds, fails = (length, fails) if same else (holds, length)
            dropping[kind] = holds, fails
        return length <= holds
