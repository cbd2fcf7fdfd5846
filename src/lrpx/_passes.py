"""One forward pass under a recipe, and the backward passes that explain it."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrpx.engine._places import place_of_tokens
from lrpx.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lrpx._batching import Batch
    from lrpx.engine import Source, Trace
    from lrpx.questions import Answers, Questions


PACK = 16
"""The most rounds that one backward pass answers."""
SHORT = 128
"""Rounds share a backward pass where the rows have no more tokens than this in all; a pass over more of them has more
work than overhead (measured on a CPU, ``bench/questions.py``)."""


@dataclass(frozen=True)
class Pass:
    """One forward pass under a recipe.

    Args:
        questions: what was asked.
        batch: the rows as the model took them.
        trace: the record of the run.
        answers: what the model says, in the graph.
        paths: where relevance ends: the paths of the token embeddings, or the argument that takes an image.
        packs: whether one backward pass may answer several rounds at once.
        pad_id: what the model takes for padding, or None.
    """

    questions: Questions
    batch: Batch
    trace: Trace
    answers: Answers
    paths: frozenset[str]
    packs: bool = False
    pad_id: int | None = None

    def explained(self) -> Iterator[list[int]]:
        """Explain the questions, round after round: one backward pass answers one question of each row.

        Yields:
            The questions of a round; the trace holds their relevance until the next.

        Raises:
            NonFiniteError: NaN or infinity in the relevance.
            UnknownOperationError: a custom autograd function on the way, under a strict recipe.
        """
        rounds = self.questions.rounds()
        done = 0
        while done < len(rounds):
            pack = rounds[done : done + PACK]
            if self.packs and len(pack) > 1 and self.batch.tokens <= SHORT:
                yield from self._explained_together(pack)
            else:
                yield from self._explained_alone(pack, done + len(pack) == len(rounds))
            done += len(pack)

    def _explained_together(self, pack: Sequence[list[int]]) -> Iterator[list[int]]:
        values = torch.stack([self.answers.values[chosen].sum() for chosen in pack])
        explained = self.trace.explain_together(values, self.answers.logits)
        for i, chosen in enumerate(pack):
            try:
                next(explained)
            except RuntimeError:
                if i:
                    raise
                # some operation's gradient cannot be batched (rules of one's own never come here): one by one then
                yield from self._explained_alone(pack, last=False)
                return
            yield chosen

    def _explained_alone(self, pack: Sequence[list[int]], last: bool) -> Iterator[list[int]]:
        answers = self.answers
        for i, chosen in enumerate(pack):
            every = len(chosen) == len(self.questions)
            values = answers.values if every else answers.values[torch.tensor(chosen, device=answers.values.device)]
            self.trace.explain(values, answers.logits, keep=not last or i < len(pack) - 1)
            yield chosen

    @property
    def other_tables(self) -> list[Source]:
        """What tokens are looked up in besides the token embeddings, as in a table of each layer."""
        return [each for each in self.trace.sources if each.is_of_tokens and each.among(self.paths) is None]

    @cached_property
    def sources(self) -> list[list[Source]]:
        """Where relevance ends, for each argument that takes tokens; or the argument that takes an image. One more
        where a decoder is given the same tokens one place later, as an encoder-decoder classifier's is. Each is several
        where the same tokens are looked up in several tables, as in those of an adapter, or of each layer.

        Raises:
            ModelError: the token embedding was used more often, for types of tokens too, or not at all.
        """
        found: list[list[Source]] = []
        for source in self.trace.sources:
            whole = source.among(self.paths)
            if whole is None:
                continue
            is_part = found and found[-1][0].among(self.paths) == whole
            if is_part and all(each.paths != source.paths and _are_same(each.ids, source.ids) for each in found[-1]):
                found[-1].append(source)
            else:
                found.append([source])
        for source in self.other_tables:
            fitting = (group for group in found if _are_same(group[0].ids, source.ids))
            if (group := next(fitting, None)) is not None:
                group.append(source)
        self._refuse_types(found)
        self._warn_of_others([source for group in found for source in group])
        names = self.batch.task.arguments
        for groups in (found, [group for group in found if not self._is_padding(group[0])]):
            is_twice = names == ("input_ids",) and len(groups) == 2
            if len(groups) == len(names) or (is_twice and _one_later(self.batch.inputs["input_ids"], groups[1][0].ids)):
                return groups
        if not found:
            raise ModelError(
                f"the token embedding {min(self.paths)} was not called: its rows are looked up by another module, as "
                "where peft trains a few of them (trainable_token_indices); pass model.merge_and_unload(), or use "
                "lrpx.propagate(model, recipe) and read trace.sources"
            )
        raise ModelError(
            f"the token embedding {min(self.paths)} was used {len(found)} times, not {len(names)}; "
            "use lrpx.propagate(model, recipe) and read trace.sources"
        )

    def _refuse_types(self, found: Sequence[Sequence[Source]]) -> None:
        """Refuse types of tokens that are looked up in the table of the tokens themselves, as GPT-2 does: what they add
        is no token's.

        Raises:
            ModelError: there are such.
        """
        types, ids = (self.batch.inputs.get(name) for name in ("token_type_ids", "input_ids"))
        if types is None or ids is None or torch.equal(types, ids):
            return
        if any(_are_same(group[0].ids, types.flatten(0, -2)) for group in found):
            raise ModelError(
                f"the token embedding {min(self.paths)} was used for the token_type_ids too; pass the input without "
                "them, as tokenizer(text, return_token_type_ids=False) makes it"
            )

    def _warn_of_others(self, known: Sequence[Source]) -> None:
        """Say which tables have a share of the value that is no token's: looked up is a number for each token that is
        neither its id nor its position or type, which go up by one at most."""
        lengths = {tuple(self.batch.inputs[name].shape) for name in self.batch.arguments}
        for source in self.trace.sources:
            ids, is_known = source.ids, any(source is each for each in known)
            if ids is None or is_known or place_of_tokens(source.paths[0], "") or tuple(ids.shape[:2]) not in lengths:
                continue
            given = any(_are_same(ids, each) for each in self.batch.inputs.values())
            if not (given or bool(((steps := ids.diff(dim=1)) >= 0).logical_and(steps <= 1).all())):
                warnings.warn(
                    f"{source.paths[0]} looks up other numbers than the tokens' ids, as those of n-grams: what that is "
                    "worth is in no token's relevance, and an entry of the ledger (ledger=True)",
                    stacklevel=2,
                )

    def _is_padding(self, source: Source) -> bool:
        """Whether nothing but padding was looked up, which the model itself puts behind what it was given, up to a
        multiple of its window (LED)."""
        if self.pad_id is None or source.ids is None or not bool((source.ids == self.pad_id).all()):
            return False
        given = (self.batch.inputs[name].to(source.ids.device) for name in self.batch.arguments)
        return not any(torch.equal(ids, source.ids) for ids in given)

    @property
    def tables(self) -> frozenset[str]:
        """The paths of all tables that the tokens are looked up in."""
        return self.paths.union(*(source.paths for group in self.sources for source in group))

    def by_token(self, scores: Sequence[Tensor]) -> list[Tensor]:
        """Scores of each of :attr:`sources` ``[B, W]`` in the shape of the ids that were given to the model, ``[B, W]``
        or ``[B, C, W]``. What a token has in an encoder and one place later in a decoder is summed.

        Raises:
            ModelError: the model embeds other ids than it was given.
        """
        found = []
        scores = list(scores)
        if len(scores) > len(
            self.batch.arguments
        ):  # the first place of the decoder is that of its start token, no input
            scores[0] = scores[0] + torch.nn.functional.pad(scores.pop()[:, 1:], (0, 1))
        for name, (source, *_), each in zip(self.batch.arguments, self.sources, scores, strict=False):
            ids = self.batch.inputs[name]
            flat = _like(ids.flatten(0, -2), source, each)
            several = self.batch.task.together is not None
            found.append(flat.reshape(len(self.batch.rows), -1, flat.shape[-1]) if several else flat)
        return found


def _are_same(ids: Tensor | None, others: Any) -> bool:
    return ids is not None and isinstance(others, Tensor) and torch.equal(ids, others.to(ids.device))


def _one_later(ids: Tensor, looked_up: Tensor | None) -> bool:
    """Whether the ids that were looked up are those given, each one place later."""
    if looked_up is None or looked_up.shape != ids.shape:
        return False
    return torch.equal(looked_up[:, 1:].to(ids.device), ids[:, :-1])


def _like(ids: Tensor, source: Source, scores: Tensor) -> Tensor:
    """The scores ``[B, T]`` of the ids given to the model, which may turn them round or pad them further."""
    looked_up = None if source.ids is None else source.ids.to(ids.device)
    if looked_up is not None and not torch.equal(looked_up, ids):
        if torch.equal(looked_up, ids.T):
            return scores.T
        if looked_up.ndim == 2 and torch.equal(looked_up[:, : ids.shape[1]], ids):
            return scores[:, : ids.shape[1]]
    if scores.shape != ids.shape:
        raise ModelError(
            f"the token embedding {source.paths[0]} was given ids of shape {list(scores.shape)} for an input of "
            f"{list(ids.shape)}; use lrpx.propagate(model, recipe) and read trace.sources"
        )
    return scores
