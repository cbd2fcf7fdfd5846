"""Perturbations: what a model says of a text some tokens of which are hidden, and how a token is hidden.

:func:`outputs` runs any number of hidden sets of any number of questions, each different one once, in full batches.

>>> Perturbation("mask-token").how, sorted(WAYS) == sorted(["attention-mask", "delete", "mask-token", "pad", "unk",
... "zero-embedding"])
('mask-token', True)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from lrpx import tasks
from lrpx._holding import PLACES
from lrpx._tokens import describe
from lrpx.errors import InputError, ModelError, TargetError
from lrpx.model import AT_A_TIME
from lrpx.targets import Contrast, LogProb, Similarity, Span, Target
from lrpx.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from lrpx.inputs import Row
    from lrpx.model import BoundModel
    from lrpx.questions import Answers, Question, Questions

__all__ = ["READS", "WAYS", "Perturbation", "outputs"]

WAYS: Final = {
    "attention-mask": "no other token sees it; it keeps its place",
    "zero-embedding": "its embedding is zero",
    "mask-token": "the tokenizer's mask token stands in its place",
    "unk": "the tokenizer's unknown token stands in its place, or “#” where it has none",
    "pad": "the padding token stands in its place, and is seen",
    "delete": "it is taken out, and the tokens behind it move up",
}
"""How a token can be hidden."""

SERVED: Final = (
    Task.CAUSAL,
    Task.MASKED,
    Task.CLASSIFICATION,
    Task.TOKEN_CLASSIFICATION,
    Task.QUESTION_ANSWERING,
    Task.SEQ2SEQ,
)
"""The tasks whose texts can be perturbed; of an encoder and a decoder, the encoder's."""

_SLAB = 16
"""So many batches are made ready at a time: what is waiting needs memory, and fuller batches need less time."""
_SAME: Final = 8
"""How many times its precision a value may move where nothing is hidden."""


def _logit(target: Target, logits: Tensor, full: Tensor, of_classes: bool) -> Tensor:
    del full, of_classes
    return target.value(logits)


def _log_probability(target: Target, logits: Tensor, full: Tensor, of_classes: bool) -> Tensor:
    del full, of_classes
    if isinstance(target, Span):
        assert isinstance(target.token, int)
        assert target.end is not None
        starts, ends = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in logits.chunk(2))
        return starts.log_softmax(-1)[target.token] + ends.log_softmax(-1)[target.end]
    return LogProb(target.token).value(logits)


def _probability(target: Target, logits: Tensor, full: Tensor, of_classes: bool) -> Tensor:
    return _log_probability(target, logits, full, of_classes).exp()


def _squared_error(target: Target, logits: Tensor, full: Tensor, of_classes: bool) -> Tensor:
    full = full.to(logits.device)
    moved = logits - full if of_classes else target.value(logits) - target.value(full)
    return moved.to(torch.promote_types(moved.dtype, torch.float32)).square().sum()


READS: Final[dict[str, Callable[[Target, Tensor, Tensor, bool], Tensor]]] = {
    "logit": _logit,
    "probability": _probability,
    "log-probability": _log_probability,
    "squared-error": _squared_error,
}
"""What can be read at the output: the explained value itself, a logit or a difference of two; the softmax probability
of the explained token, class or answer, or its logarithm; or how far the logits are from those of the whole text,
``Σ_c (z_c − z_c^full)²`` over the classes of a classifier, and at the explained token or answer of other models."""


@dataclass(frozen=True)
class Perturbation:
    """A way to hide tokens.

    Args:
        how: one of :data:`WAYS`.
        specials: whether the tokenizer's special tokens may be hidden too; by default they never are.

    Raises:
        InputError: there is no such way.
    """

    how: str = "attention-mask"
    specials: bool = False

    def __post_init__(self) -> None:
        if self.how not in WAYS:
            raise InputError(f"there is no perturbation {self.how!r}; the perturbations are {', '.join(WAYS)}")

    def describe(self, model: BoundModel) -> str:
        """What it does to a model's texts, exactly."""
        token = self._token(model)
        placed = "" if token is None else f" ({describe(model.reader.text_tokenizer, [token]).pieces[0]!r}, id {token})"
        whom = "special tokens too" if self.specials else "special tokens never"
        return f"{self.how}{placed}: {WAYS[self.how]}; {whom}"

    def check(self, model: BoundModel) -> None:
        """Refuse a model whose texts cannot be perturbed so, before any work.

        Raises:
            ModelError: the model is of another kind, or does not take what is to be changed.
            InputError: the tokenizer has no such token.
        """
        kind = type(model.module).__name__
        if model.task not in SERVED:
            served = ", ".join(task.title for task in SERVED)
            raise ModelError(f"{kind} is {model.task.named}; texts are perturbed of: {served}. Pass such a model")
        pair = bool(getattr(model.config, "is_encoder_decoder", False))
        if pair and model.task is not Task.SEQ2SEQ:
            raise ModelError(
                f"{kind} gives the tokens to a decoder too, where a hidden one would still be seen; pass a model that "
                "is an encoder or a decoder alone"
            )
        needed = {"attention-mask": "attention_mask", "zero-embedding": "inputs_embeds"}.get(self.how)
        if needed is not None and not model.accepts(needed):
            raise ModelError(f"{kind} takes no {needed}, which {self.how} needs; use another perturbation, such as unk")
        if self.how == "delete" and model.task is Task.QUESTION_ANSWERING:
            raise ModelError(
                f"the answers of {kind} are places in the text, which delete would move; use another perturbation, "
                "such as attention-mask"
            )
        self._token(model)

    def hideable(self, model: BoundModel, questions: Questions, question: int) -> NDArray[np.bool_]:
        """``[T]``: which tokens of a question's row may be hidden, the segments one after another.

        Special tokens may not unless ``specials`` says so, nor what a decoder has written, nor a masked model's mask;
        and under ``delete`` not the token that is read at, which everything else is counted from.
        """
        row = questions.row_of(question)
        found = np.zeros(sum(row.lengths), dtype=bool)
        first = row.segments[0].tokens
        found[: len(first.ids)] = True if self.specials else ~np.array(first.special, dtype=bool)
        position = questions.asked[question].position
        if position is not None and len(row.segments) == 1:
            mask = getattr(model.reader.text_tokenizer, "mask_token_id", None)
            if self.how == "delete" or (model.task is Task.MASKED and first.ids[position] == mask):
                found[position] = False
        return found

    # -------------------------------------------------------------------------------- below: one row

    def _token(self, model: BoundModel) -> int | None:
        """What stands in a hidden token's place.

        Raises:
            InputError: the tokenizer has no such token.
        """
        tokenizer = model.reader.text_tokenizer
        name = {"mask-token": "mask_token_id", "unk": "unk_token_id", "pad": "pad_token_id"}.get(self.how)
        if name is None:
            return None
        if tokenizer is None:
            raise InputError(f"{self.how} needs a tokenizer, and there is none; use attention-mask or zero-embedding")
        found = getattr(tokenizer, name, None)
        if found is None and self.how == "unk":
            ids = tokenizer.encode("#", add_special_tokens=False)
            found = ids[0] if len(ids) == 1 else None
        if found is None:
            called = {"mask-token": "mask token", "unk": "unknown token, nor “#”,", "pad": "padding token"}[self.how]
            raise InputError(
                f"the tokenizer, {type(tokenizer).__name__}, has no {called} to put in a token's place; use another "
                "perturbation, such as attention-mask or zero-embedding"
            )
        size = tasks.first_weight(model.module).shape[0]
        if not 0 <= found < size:
            raise InputError(
                f"the tokenizer's token for {self.how} is id {found}, and the model's vocabulary ends at {size - 1}; "
                "use another perturbation, such as attention-mask or zero-embedding"
            )
        return int(found)

    def refuse(self, model: BoundModel, questions: Questions, question: int, hidden: NDArray[np.bool_]) -> None:
        """Refuse hidden sets ``[S, T]`` of a question that cannot be run.

        Raises:
            InputError: another shape, a token that may not be hidden, or nothing would be left.
        """
        row = questions.row_of(question)
        count = sum(row.lengths)
        if hidden.dtype != np.bool_ or hidden.ndim != 2 or hidden.shape[1] != count:
            raise InputError(
                f"the hidden sets are {hidden.dtype} {list(hidden.shape)}; give booleans [S, {count}], one for each "
                f"token of the row{row.where}"
            )
        if row.arguments:
            raise InputError(f"the row holds {', '.join(row.arguments)} beside its tokens; pass texts alone{row.where}")
        kept = ~self.hideable(model, questions, question)
        wrong = (hidden & kept).any(0)
        if wrong.any():
            at = int(wrong.argmax())
            raise InputError(
                f"token {at}, {row.tokens.pieces[at]!r}, may not be hidden by {self.how}; hide others, or pass "
                f"specials=True for special tokens{row.where}"
            )
        given = row.segments[0].fields.get(PLACES, ())
        if self.how == "delete" and any(after - before != 1 for before, after in pairwise(given)):
            raise InputError(
                "the position_ids do not count up by one, so nobody knows to which places the tokens behind a deleted "
                "one move up; leave them out, or use another perturbation, such as attention-mask"
                f"{row.where}"
            )
        read_last = model.task.reads == "whole" and self._token(model) == model.pad_id is not None
        if read_last and hidden[:, [model.end_of(row), -1]].any():
            raise InputError(
                f"{type(model.module).__name__} may look for its last token by the padding, which {self.how} would put "
                f"there; use another perturbation, such as attention-mask{row.where}"
            )
        first = hidden[:, : row.lengths[0]]
        sees_place = self.how == "attention-mask" and model.task.reads == "position" and len(row.segments) == 1
        if self.how in ("attention-mask", "delete") and first.all(1).any() and not sees_place:
            raise InputError(
                f"{self.how} would leave nothing of a text whose tokens are all hidden; use another perturbation, such "
                f"as zero-embedding{row.where}"
            )

    def mask(self, model: BoundModel, row: Row, asked: Question, hidden: NDArray[np.bool_]) -> Tensor:
        """``[T]``: the attention mask of the first segment. Where all that a place can see in some layer is hidden, the
        place that is read sees itself, too, for a softmax over nothing is no number: that of the last token, where a
        classifier of whole texts looks back alone.

        Raises:
            ModelError: it is one end of an answer, and would be seen from the other.
        """
        seen = ~hidden[: row.lengths[0]]
        ends = [asked.target.token, asked.target.end] if isinstance(asked.target, Span) else []
        read = {*ends} or {model.end_of(row) if model.task.reads == "whole" else asked.position}
        for place in read if len(row.segments) == 1 else ():
            if isinstance(place, int) and model.sees_nothing(place, seen):
                if len(read) > 1:
                    raise ModelError(
                        f"{type(model.module).__name__} looks back alone, and where token {place} is hidden, the "
                        "answer that starts or ends there sees nothing; use a method or a perturbation that changes "
                        f"the tokens or their embeddings{row.where}"
                    )
                seen = seen.copy()
                seen[place] = True
        return torch.from_numpy(seen.astype(np.int64))

    def row(self, model: BoundModel, row: Row, hidden: NDArray[np.bool_]) -> Row:
        """The row with other tokens in the places of the hidden ones, or without these."""
        first = row.segments[0]
        chosen = hidden[: len(first)].tolist()
        if self.how == "delete":
            changed = first.only([i for i, gone in enumerate(chosen) if not gone])
            if PLACES in first.fields:  # in the places of those that are gone
                kept = first.fields[PLACES][: len(changed)]
                changed = replace(changed, fields={**changed.fields, PLACES: kept})
        else:
            token = self._token(model)
            assert token is not None
            ids = tuple(token if gone else each for each, gone in zip(first.tokens.ids, chosen, strict=True))
            changed = replace(first, tokens=replace(first.tokens, ids=ids))
        return replace(row, segments=(changed, *row.segments[1:]), where="")

    def __str__(self) -> str:
        return self.how


def outputs(
    model: BoundModel,
    questions: Questions,
    answers: Answers,
    hidden: Sequence[NDArray[np.bool_]],
    reads: Sequence[str] = ("logit",),
    perturbation: Perturbation = Perturbation(),
    batch_size: int = AT_A_TIME,
) -> list[NDArray[np.float64]]:
    """What the model says with some tokens hidden.

    Each different set of a question is run once, however often it is asked for, and the sets of all questions share
    batches: ask for everything at once.

    Args:
        model: the model.
        questions: ``K`` of them.
        answers: what the model says to them as they are (:meth:`BoundModel.ask <lrpx.model.BoundModel.ask>`).
        hidden: for each question ``[S_k, T_k]``, True at the tokens of its row that are hidden.
        reads: what is read, names of :data:`READS`.
        perturbation: how tokens are hidden.
        batch_size: the most texts run together.

    Returns:
        For each question ``[S_k, len(reads)]``.

    Raises:
        InputError: hidden sets that cannot be run, something that cannot be read, or a tokenizer without the token.
        ModelError: a model whose texts cannot be perturbed so.
        TargetError: there is no probability of what is explained.
        NonFiniteError: NaN or infinity in an output.
    """
    perturbation.check(model)
    check_reads(model, reads, answers.targets)
    resolved = questions.with_targets(answers.targets)
    for i, each in enumerate(hidden):
        perturbation.refuse(model, questions, i, each)
    places, jobs = _different(hidden)
    if perturbation.how == "zero-embedding":
        _refuse_other_embeddings(model, resolved, answers)
    # rows of like length run together, whether with their hidden tokens or without
    jobs_order = sorted(
        range(len(jobs)), key=lambda job: (resolved.row_of(jobs[job][0]).lengths, int(jobs[job][1].sum()))
    )
    found = np.empty((len(jobs), len(reads)))
    slab = batch_size * _SLAB
    for start in range(0, len(jobs), slab):
        chosen = jobs_order[start : start + slab]
        found[chosen] = _run(model, resolved, answers, [jobs[job] for job in chosen], reads, perturbation, batch_size)
    return [found[each] for each in places]


def check_reads(model: BoundModel, reads: Iterable[str], targets: Iterable[Target] = ()) -> None:
    """Refuse what cannot be read of a model's outputs.

    Raises:
        InputError: there is no such thing.
        TargetError: there is no probability of it.
    """
    for read in reads:
        if read not in READS:
            raise InputError(f"nothing is called {read!r} that could be read; choose of {', '.join(READS)}")
        if "probability" not in read:
            continue
        other = next((each for each in targets if isinstance(each, (Contrast, Similarity))), None)
        if other is not None:
            raise TargetError(f"a {other.name} has no {read}; read the logit, or explain one token or class")
        kind = getattr(model.config, "problem_type", None)
        labels = getattr(model.config, "num_labels", None)
        if model.task is Task.CLASSIFICATION and (kind not in (None, "single_label_classification") or labels == 1):
            raise TargetError(
                f"the outputs of {type(model.module).__name__} are no classes that exclude each other "
                f"({kind or 'one output'}), so a softmax over them is no {read}; read the logit"
            )


def _different(hidden: Sequence[NDArray[np.bool_]]) -> tuple[list[list[int]], list[tuple[int, NDArray[np.bool_]]]]:
    """Where each set of each question stands among the different ones, and these, each with its question."""
    jobs: list[tuple[int, NDArray[np.bool_]]] = []
    places: list[list[int]] = []
    for question, sets in enumerate(hidden):
        known: dict[bytes, int] = {}
        mine = []
        for each, packed in zip(sets, np.packbits(sets, axis=1), strict=True):
            key = packed.tobytes()
            if key not in known:
                known[key] = len(jobs)
                jobs.append((question, each))
            mine.append(known[key])
        places.append(mine)
    return places, jobs


def _run(
    model: BoundModel,
    questions: Questions,
    answers: Answers,
    jobs: Sequence[tuple[int, NDArray[np.bool_]]],
    reads: Sequence[str],
    perturbation: Perturbation,
    batch_size: int,
) -> NDArray[np.float64]:
    """``[len(jobs), len(reads)]``."""
    each = questions.alone(question for question, _ in jobs)
    of_classes = model.task.logits == "classes"

    def read(job: int, target: Target, logits: Tensor) -> Tensor:
        full = answers.logits[jobs[job][0]]
        return torch.stack([READS[name](target, logits, full, of_classes).double() for name in reads])

    pairs = list(zip(each.rows, each.asked, (hidden for _, hidden in jobs), strict=True))
    how: dict[str, Any] = {}
    if perturbation.how == "attention-mask":
        how["attention_mask"] = [perturbation.mask(model, row, asked, gone) for row, asked, gone in pairs]
    elif perturbation.how == "zero-embedding":
        made = {question: _embeddings(model, questions.row_of(question)) for question, _ in jobs}
        how["embeddings"] = [
            made[question] * torch.from_numpy(~gone[: len(made[question])]).to(made[question])[:, None]
            for question, gone in jobs
        ]
    else:
        rows = tuple(perturbation.row(model, row, gone) for row, _, gone in pairs)
        asked = each.asked
        if perturbation.how == "delete":
            single = len(each.rows[0].segments) == 1
            asked = tuple(
                one
                if one.position is None or not single
                else replace(one, position=one.position - int(gone[: one.position].sum()))
                for _, one, gone in pairs
            )
        each = replace(each, rows=rows, asked=asked)
    return model.values(each, **how, batch_size=batch_size, read=read).numpy()


def _embeddings(model: BoundModel, row: Row) -> Tensor:
    """``[T, d]``: the embeddings of the first segment, as the model's own module makes them, on the CPU."""
    module: Any = model.module
    encoder = tasks.part_of(module, "encoder") if model.task is Task.SEQ2SEQ else None
    own = getattr(encoder, "get_input_embeddings", None)  # FSMT's encoder has none, and the model gives it
    embedding = tasks.input_embedding(module)[1] if own is None else own()
    ids = torch.tensor(row.segments[0].tokens.ids, device=tasks.input_device(module))
    with torch.no_grad():
        found: Tensor = embedding(ids[None])[0]
    return found.cpu()


def _refuse_other_embeddings(model: BoundModel, questions: Questions, answers: Answers) -> None:
    """Refuse a model that makes something else of its own embeddings than of the ids, of whichever question: it may
    look for padding or an end in these, which not every text has.

    Raises:
        ModelError: a value moves though nothing is hidden.
    """
    single = questions.alone(range(len(questions)))
    made = {each.row: _embeddings(model, questions.rows[each.row]) for each in questions.asked}
    given = [made[each.row] for each in questions.asked]
    try:
        values = model.values(single, embeddings=given, batch_size=1)
        wanted = model.values(single, batch_size=1)  # alone, too: a batch would round otherwise
    except (ValueError, TypeError, RuntimeError, IndexError, AttributeError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"{type(model.module).__name__} cannot be given embeddings ({str(error).splitlines()[0]}); use another "
            "perturbation, such as attention-mask"
        ) from error
    lost = torch.finfo(tasks.first_weight(model.module).dtype).eps
    sizes = answers.logits.masked_fill(answers.logits.isinf(), 0.0).abs().amax(-1).clamp(min=1.0)
    moved = ((values - wanted).abs() > _SAME * lost * sizes.to(values.dtype)).nonzero().flatten().tolist()
    if moved:
        value, other = float(values[moved[0]]), float(wanted[moved[0]])
        raise ModelError(
            f"{type(model.module).__name__} makes {value:.6g} of its own embeddings and {other:.6g} of the ids, so a "
            "hidden embedding would say nothing; use another perturbation, such as attention-mask"
            f"{questions.row_of(moved[0]).where}"
        )
