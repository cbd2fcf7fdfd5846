"""Agreement samples as one model reads them (Arras et al. 2025, App. B, *tokenized ground truth*)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from operator import truediv
from statistics import fmean, median, pstdev
from typing import TYPE_CHECKING, Any, NamedTuple

from lrpx._data.agreement import Dropped, Sample
from lrpx._tokens import describe
from lrpx.errors import InputError, ModelError
from lrpx.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from transformers import PreTrainedTokenizerBase

SPLIT = "a verb form is not one token of the vocabulary"
SAME = "both verb forms read as the same token"
CONTEXT = "the words around the verb are cut differently for its two forms"
NO_TRUTH = "no token reads the ground truth"
AFTER = "ground truth after the verb"
ALL_TRUTH = "the whole input is ground truth"
SHORT = "fewer than two tokens besides special ones"


@dataclass(frozen=True)
class TokenSample:
    """A sample as one model reads it: ``T`` tokens.

    Args:
        sample: the sample.
        ids: the ``T`` ids that the model gets, special tokens included: for a masked language model the sentence
            with the mask for the verb, for a causal one what is before the verb.
        tokens: what they read as, ``T`` pieces of :func:`lrpx._tokens.describe`.
        position: where the logits are read: at the mask, or at the last token.
        right: the vocabulary id of the right form.
        wrong: the vocabulary id of the other form.
        ground_truth: the positions of the tokens that read any part of the ground truth, in order.
    """

    sample: Sample
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    position: int
    right: int
    wrong: int
    ground_truth: tuple[int, ...]


@dataclass(frozen=True)
class Tokenised:
    """What a tokenizer made of samples; the statistics are those that App. B prints, by what they count."""

    samples: tuple[TokenSample, ...]
    dropped: tuple[Dropped, ...]
    statistics: dict[str, float]


def tokenise(samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase, task: Task) -> Tokenised:
    """Every sample as a model reads it, less those that are trivial or that the model has no token for.

    Both sentences, with the right and with the other verb form, are read as a whole. A sample stays where each
    form is one token at its place (with the space before it, where the vocabulary has it there), while all
    tokens before it, and for a masked language model those after it, are the same; where the ground truth is
    before the verb, for a causal one; and where at least two tokens are not special, and one of them is not
    ground truth. (The paper asks for an input longer than the ground truth, and does not say whether special
    tokens count in it; here they do not, so that none is trivial.)

    Args:
        samples: the samples.
        tokenizer: a fast tokenizer of transformers.
        task: what the model predicts, the next token or a masked one.

    Raises:
        InputError: there are no samples, or none stays.
        ModelError: the task is another, or the tokenizer has no offsets, no mask, or no verb form as one token.
    """
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    if task not in {Task.CAUSAL, Task.MASKED}:
        raise ModelError(f"{task.named} predicts no verb in a sentence; use a causal or a masked language model")
    if not tokenizer.is_fast:
        raise ModelError(f"the tokenizer of {name} does not tell which characters a token reads; use a fast tokenizer")
    mask = tokenizer.mask_token_id
    if task is Task.MASKED and not isinstance(mask, int):
        raise ModelError(f"the tokenizer of {name} has no mask token; set tokenizer.mask_token, or use a causal model")
    if not samples:
        raise InputError("there are no samples to tokenise; pass at least one")
    kept: list[TokenSample] = []
    dropped: list[Dropped] = []
    for sample, right, wrong in _read(samples, tokenizer):
        result = _token_sample(sample, right, wrong, tokenizer, mask if task is Task.MASKED else None)
        if isinstance(result, TokenSample):
            kept.append(result)
        else:
            dropped.append(Dropped(sample.id, sample.line, result, sample.text))
    if not kept:
        reasons = Counter(row.reason for row in dropped)
        if set(reasons) == {SPLIT}:
            raise ModelError(
                f"the tokenizer of {name} splits a form of every verb, so that no two logits tell the forms apart; "
                "use a model with a larger vocabulary"
            )
        listed = ", ".join(f"{reason}: {count}" for reason, count in reasons.most_common())
        raise InputError(f"none of {len(samples)} samples is left for the tokenizer of {name} ({listed}); pass others")
    return Tokenised(tuple(kept), tuple(dropped), _statistics(kept))


class _Reading(NamedTuple):
    """A sentence as the tokenizer reads it: its text, its ids, and the half-open characters of each."""

    text: str
    ids: list[int]
    offsets: list[tuple[int, int]]

    def over(self, start: int, end: int) -> list[int]:
        """The tokens that read any of these characters."""
        return [at for at, (a, b) in enumerate(self.offsets) if a < end and start < b and a < b]

    def exactly(self, start: int, end: int) -> int | None:
        """The one token that reads these characters, and none besides but white space before them."""
        over = self.over(start, end)
        if len(over) != 1:
            return None
        a, b = self.offsets[over[0]]
        return over[0] if b == end and a <= start and not self.text[a:start].strip() else None


def _read(samples: Sequence[Sample], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[Sample, _Reading, _Reading]]:
    """Each sample with its sentence as it is, and with the other form in it, read a thousand at a time."""
    for first in range(0, len(samples), 1000):
        chunk = samples[first : first + 1000]
        texts = [sample.text for sample in chunk]
        texts += [f"{each.text[: each.verb[0]]}{each.other}{each.text[each.verb[1] :]}" for each in chunk]
        encoding: Any = tokenizer(texts, return_offsets_mapping=True, verbose=False)
        readings = list(map(_Reading, texts, encoding["input_ids"], encoding["offset_mapping"]))
        yield from zip(chunk, readings[: len(chunk)], readings[len(chunk) :], strict=True)


def _token_sample(
    sample: Sample, right: _Reading, wrong: _Reading, tokenizer: PreTrainedTokenizerBase, mask: int | None
) -> TokenSample | str:
    """The sample as a causal model reads it, or with this mask as a masked one does; or why it is dropped."""
    start, end = sample.verb
    at, other = right.exactly(start, end), wrong.exactly(start, start + len(sample.other))
    if at is None or other is None or tokenizer.unk_token_id in {right.ids[at], wrong.ids[other]}:
        return SPLIT
    if right.ids[at] == wrong.ids[other]:
        return SAME
    if right.ids[:at] != wrong.ids[:other] or (mask is not None and right.ids[at + 1 :] != wrong.ids[other + 1 :]):
        return CONTEXT
    truth = sorted({token for word in sample.subject for token in right.over(*word)})
    if not truth:
        return NO_TRUTH
    if mask is None and truth[-1] > at:
        return AFTER
    ids = right.ids[:at] if mask is None else [*right.ids[:at], mask, *right.ids[at + 1 :]]
    tokens = describe(tokenizer, ids)
    effective = tokens.special.count(False)
    if effective < 2:
        return SHORT
    if len(truth) >= effective:
        return ALL_TRUTH
    position = at - 1 if mask is None else at
    forms = right.ids[at], wrong.ids[other]
    return TokenSample(sample, tuple(ids), tokens.pieces, position, *forms, tuple(truth))


def _statistics(samples: Sequence[TokenSample]) -> dict[str, float]:
    """What App. B prints of a model's benchmark, and the mean share of the input that is ground truth."""
    lengths = [len(each.ids) for each in samples]
    truths = [len(each.ground_truth) for each in samples]
    return {
        "samples": len(samples),
        "plural verb forms, share": fmean(each.sample.plural for each in samples),
        "tokens, min": min(lengths),
        "tokens, max": max(lengths),
        "tokens, mean": fmean(lengths),
        "tokens, standard deviation": pstdev(lengths),
        "tokens, median": median(lengths),
        "ground truth tokens, min": min(truths),
        "ground truth tokens, max": max(truths),
        "ground truth tokens, mean": fmean(truths),
        "ground truth of 1 token, share": fmean(size == 1 for size in truths),
        "ground truth of 2 tokens, share": fmean(size == 2 for size in truths),
        "ground truth in the input, mean share": fmean(map(truediv, truths, lengths)),
    }
