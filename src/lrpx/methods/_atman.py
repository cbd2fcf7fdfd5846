"""AtMan: what the value loses when the attention scores of a token are turned down."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from lrpx.engine._attentions import Attentions
from lrpx.errors import MethodError
from lrpx.methods._attention_maps import attentions_of, refuse_layers_without, refuse_mixers
from lrpx.methods._contract import Found, Method, register
from lrpx.methods._embedded import embeddings_of
from lrpx.methods._refusals import (
    IMAGES,
    SERVED,
    refuse_count,
    refuse_ledger,
    refuse_no_places,
    refuse_number,
    refuse_twice_given,
)
from lrpx.parts import Part
from lrpx.recipes import GRADIENT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from lrpx._batching import Batch
    from lrpx.engine import Tap
    from lrpx.model import BoundModel
    from lrpx.questions import Answers, Questions
    from lrpx.tasks import Task


@register
@dataclass(frozen=True)
class AtMan(Method):
    """``f(x) − f(x with token i turned down)`` (Deb et al. 2023, Eq. 3–6; Achtibat et al. 2024, A.1.5).

    Before each softmax, the scores of key ``k`` are multiplied by ``1 − p · s_ik``, for all queries, heads and layers:
    ``s_ii = 1``, and for other tokens ``s_ik`` is the cosine of the two embeddings where it is at least the threshold,
    and else 0. What is added to the products of queries and keys (ALiBi, a relative bias) belongs to the scores. In an
    encoder-decoder the encoder's own attention and the cross-attention are turned down, and a token of the decoder,
    which is turned down nowhere, has 0. A score below 0 is raised, as the papers have it. Of an image the patches are
    turned down, and two are alike by what enters the first attention.

    With the target ``LogProb()`` it is the difference of losses that the paper has; by default it is that of logits.

    Args:
        name: how results call it.
        suppression: ``p``, above 0 and at most 1.
        threshold: κ, from −1 to 1, for tokens that are like token ``i``; None turns down no other token (as Achtibat et
            al. do for language models).
        batch_size: the most changed inputs that run together.
        label: how tables spell it.
    """

    name: str = "atman"
    suppression: float = 0.9
    threshold: float | None = None
    batch_size: int = 32
    label: str = "AtMan"

    tasks: ClassVar[frozenset[Task]] = SERVED | IMAGES

    @property
    def has_ledger(self) -> bool:
        """No: differences need not sum to the value."""
        return False

    def describe(self) -> str:
        """The suppression and the threshold."""
        return (
            f"f(x) − f(x with the scores of i turned down); suppression={self.suppression}; threshold={self.threshold}"
        )

    def check(self, model: BoundModel) -> None:
        """Refuse fields that are none, and what :meth:`Method.check` refuses."""
        super().check(model)
        refuse_twice_given(self, model)
        refuse_number(self.name, "suppression", self.suppression, 0, 1)
        if not self.suppression:
            raise MethodError(f"the suppression of {self.name} is 0, which changes nothing; pass a number above 0")
        if self.threshold is not None:
            refuse_number(self.name, "threshold", self.threshold, -1, 1)
        refuse_count(self.name, "batch_size", self.batch_size)

    def attribute(self, model: BoundModel, questions: Questions, *, ledger: bool = False) -> Found:
        """See :meth:`Method.attribute <lrpx.methods._contract.Method.attribute>`.

        Raises:
            MethodError: a ledger is asked for, or the scores of some attention cannot be changed.
        """
        self.check(model)
        refuse_ledger(self, ledger)
        answers = model.ask(questions)
        resolved = questions.with_targets(answers.targets)
        if model.task in IMAGES:
            return self._of_images(model, resolved, answers)
        found = []
        for i in range(len(resolved)):
            lengths = resolved.row_of(i).lengths
            factors = 1 - self.suppression * self._likeness(model, resolved, i)
            known = _of_tokens(model, resolved.alone([i]))
            changed = self._values(model, resolved.alone([i] * lengths[0]), factors, known=known)
            lost = answers.values[i] - changed
            found.append(torch.cat([lost, lost.new_zeros(sum(lengths[1:]))]))
        return Found(answers, tuple(found))

    def _of_images(self, model: BoundModel, questions: Questions, answers: Answers) -> Found:
        """The same for images, where the tokens are those that the model makes of the patches."""
        parts = []
        for i in range(len(questions)):
            row = questions.row_of(i)
            grid, places = refuse_no_places(self, model, row)
            own = slice(places.first, places.first + len(grid))
            likeness = torch.eye(places.count, dtype=torch.float64)
            if self.threshold is not None:
                entered = model.entering(row)
                assert entered is not None  # or there were no places
                wide = torch.nn.functional.normalize(entered.double(), dim=-1)
                likeness = torch.where(wide @ wide.T >= self.threshold, wide @ wide.T, 0.0).fill_diagonal_(1.0)
            factors = (1 - self.suppression * likeness)[own]
            _of_tokens(model, questions.alone([i]), (places.count,))
            changed = self._values(model, questions.alone([i] * len(grid)), factors, places.count)
            lost = (answers.values[i] - changed).reshape(grid.rows, grid.columns)
            parts.append(Part("patches", lost, ("row", "column")))
        return Found(answers, (torch.empty(0),) * len(parts), {"patches": tuple(parts)})

    def _likeness(self, model: BoundModel, questions: Questions, question: int) -> Tensor:
        """``s`` ``[T, T]`` of the tokens of the first segment."""
        identity = torch.eye(questions.row_of(question).lengths[0], dtype=torch.float64)
        if self.threshold is None:
            return identity
        embedded = embeddings_of(self, model, questions, question).values[0][0]
        wide = torch.nn.functional.normalize(embedded.double(), dim=-1)
        cosine = (wide @ wide.T).cpu()
        return torch.where(cosine >= self.threshold, cosine, 0.0).fill_diagonal_(1.0)

    def _values(
        self,
        model: BoundModel,
        questions: Questions,
        factors: Tensor,
        tokens: int = 0,
        known: Mapping[str, bool] | None = None,
    ) -> Tensor:
        """``[N]``: the values of the same row, with the scores of its keys multiplied by ``factors`` ``[N, T]``;
        ``tokens``: how many a model makes of an image; ``known``: which attention is the tokens', if not all."""
        used: list[Attentions] = []

        def taps(batch: Batch, rows: Sequence[int]) -> Sequence[Tap]:
            if used:
                used.pop().check()
            wide = torch.ones(len(rows), tokens or batch.wide, dtype=factors.dtype)
            for at, row in enumerate(rows):
                start = 0 if tokens else int(batch.starts[0][at])
                wide[at, start : start + factors.shape[1]] = factors[row]
            kinds: dict[Any, Tensor] = dict.fromkeys(("self", "encoder", "cross"), wide)
            used.append(Attentions(len(rows), (tokens,) if tokens else batch.widths, kinds, known=known))
            return used[:]

        # fewer rows than tokens, or nothing tells the two apart where torch's own attention has tokens before rows
        size = max(1, min(self.batch_size, factors.shape[1] - 1))
        values = model.values(questions, taps=taps, batch_size=size)
        used.pop().check()
        return values


def _of_tokens(model: BoundModel, questions: Questions, tokens: tuple[int, ...] = ()) -> Mapping[str, bool] | None:
    """Which attention is that of the tokens, where a model is given something beside them (:class:`Attentions`), for
    the changed inputs run without a graph; else None. ``tokens``: how many a model makes of an image.

    Raises:
        MethodError: attention looks at the tokens in other places, or from others, which takes a graph to see; or a
            layer has none.
    """
    with model.traced(questions, GRADIENT, plain=True, taps=lambda batch: [attentions_of(model, batch, tokens)]) as ran:
        tap = ran.trace.tap(Attentions)
        assert tap is not None
        if not tokens:
            tap.check_places()
        refuse_layers_without(model, tap.attended)
        for _ in ran.explained():
            tap.check_beside(ran.trace.gradient_of)
    if tap.is_square:
        refuse_mixers(model, questions, of_features=True)
    return tap.of_tokens if questions.rows[0].arguments else None
