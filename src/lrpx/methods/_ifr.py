"""Information flow routes: what each token brings to the explained position, by how near its parts come to the sums."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from lrpx import recipes
from lrpx.errors import MethodError
from lrpx.methods._alti_logit import CHUNK, attention_at, by_question, read_rows
from lrpx.methods._attention_maps import refuse_mixers
from lrpx.methods._contract import Found, Method, register
from lrpx.methods._refusals import refuse_ledger, refuse_number
from lrpx.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Sequence

    from torch import Tensor

    from lrpx.engine._stream import Write
    from lrpx.engine._trace import Trace
    from lrpx.model import BoundModel
    from lrpx.questions import Questions


@register
@dataclass(frozen=True)
class InformationFlow(Method):
    """Information flow routes (Ferrando & Voita 2024, §2).

    What a layer adds to the residual stream makes a sum ``y``, of the stream before, what each head writes from each
    position, and what the feed-forward part writes (all of it at once in a parallel block). A part ``a`` of it counts
    ``max(0, ‖y‖₁ − ‖a − y‖₁)``, and its share is that over the sum of all parts' (attention's biases are no part, as in
    ALTI; the feed-forward part has its own in what it writes). The share of an input token is the sum, over the ways
    from the position where the value is read down to it, of the product of the shares on the way: what a position has
    kept, and what its own feed-forward part writes, stay with it.
    (Where the value is read at several positions, it is their mean.) It is the same whatever is explained at a
    position. ALTI differs in that it takes what all heads write from a position for one part.

    Norms after the sums are linear with their deviation as a constant, as in ALTI-Logit.

    Args:
        name: how results call it.
        threshold: a share below it is left out, so that only routes above it count; 0 keeps all, and the relevance
            then sums to 1.
        label: how tables spell it.
    """

    name: str = "ifr"
    threshold: float = 0.0
    label: str = "Information flow"

    tasks: ClassVar[frozenset[Task]] = frozenset(
        {Task.CAUSAL, Task.MASKED, Task.CLASSIFICATION, Task.TOKEN_CLASSIFICATION, Task.QUESTION_ANSWERING}
    )

    @property
    def has_ledger(self) -> bool:
        """No: shares have no value to sum to."""
        return False

    def describe(self) -> str:
        """The threshold."""
        return f"information flow routes; threshold={self.threshold}"

    def pass_key(self) -> Hashable:
        """Those of several thresholds share the pass."""
        return "information flow"

    def check(self, model: BoundModel) -> None:
        """Refuse a model with more than one residual stream, and a threshold that is none."""
        if model.task is Task.SEQ2SEQ or getattr(model.config, "is_encoder_decoder", False):
            kind = type(model.module).__name__
            raise MethodError(
                f"{self.name} follows one residual stream, and {kind} has an encoder's and a decoder's; use attnlrp "
                "or rollout"
            )
        super().check(model)
        refuse_number(self.name, "threshold", self.threshold, 0, 1)

    def attribute(self, model: BoundModel, questions: Questions, *, ledger: bool = False) -> Found:
        """See :meth:`Method.attribute <lrpx.methods._contract.Method.attribute>`.

        Raises:
            MethodError: a ledger is asked for, or the model has no residual stream that attention alone mixes
                positions of.
        """
        return self.together([self], model, questions, ledger=ledger)[0]

    def together(
        self, methods: Sequence[InformationFlow], model: BoundModel, questions: Questions, *, ledger: bool = False
    ) -> list[Found]:
        """What several thresholds leave, in one pass for all; see :meth:`attribute`."""
        for method in methods:
            method.check(model)
            refuse_ledger(method, ledger)
        rounds: list[Tensor] = []
        with model.traced(questions, recipes.ALTI_LOGIT, heads=True) as ran:
            assert ran.trace.heads is not None
            ran.trace.heads.check_end(ran.answers.values)
            for chosen in ran.explained():
                rounds.append(read_rows(ran, chosen))
        with torch.no_grad():
            found = [_flow(ran.trace, rounds, method.threshold) for method in methods]
        size = list(ran.batch.inputs["input_ids"].shape)
        if list(found[0][0].shape) != size:
            raise MethodError(f"the model embeds {list(found[0][0].shape)} tokens of an input of {size}; use attnlrp")
        refuse_mixers(model, questions)
        answers = ran.answers.detached()
        return [Found(answers, by_question(ran, [each.cpu() for each in mine])) for mine in found]


def _flow(trace: Trace, rounds: Sequence[Tensor], threshold: float) -> list[Tensor]:
    """``[B, T]`` for each round: the shares of the input's tokens in the positions that are read."""
    assert trace.heads is not None
    read = torch.stack(list(rounds)).double()
    total = read.sum(-1, keepdim=True)
    flow = read / torch.where(total == 0, 1.0, total)  # nothing is read of a row that has no question left
    for write in reversed(_together(trace.heads.writes)):
        if not write.reads and not threshold:
            continue  # all of it stays where it is
        below = torch.zeros_like(flow)
        for rows, mixed in _in_chunks(write, threshold):
            every = rows.expand(len(flow), *rows.shape)
            below += torch.einsum("rbi,bij->rbj", torch.take_along_dim(flow, every, 2), mixed.to(flow.dtype))
        flow = below
    return list(flow)


def _together(writes: Sequence[Write]) -> list[Write]:
    """The sums, those of a parallel block as one, in whatever order it adds up."""
    found: list[Write] = []
    for write in writes:
        if write.joins:
            before = found.pop()
            write = replace(write, parts=(*before.parts, *write.parts), stream=before.stream)
        found.append(write)
    return found


def _in_chunks(write: Write, threshold: float) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of the shares a few at a time: positions ``[B, I]`` and what they have of others ``[B, I, T]``."""
    layer = _Sum(write)
    batch, length, width = write.stream.shape
    step = max(1, CHUNK // (batch * length * width))
    every = torch.arange(length, device=write.stream.device).expand(batch, -1)
    for start in range(0, length, step):
        rows = every[:, start : start + step]
        yield rows, layer.shares(rows, threshold)


class _Sum:
    """A sum of the residual stream with what a layer writes, and the parts that it is made of."""

    def __init__(self, write: Write) -> None:
        wide = torch.promote_types(write.stream.dtype, torch.float32)
        stream = write.stream.to(wide)
        self.reads = write.reads
        self.projected = [part.through(part.attention.projected()) for part in self.reads if part.attention is not None]
        kept = [part.written() for part in write.parts if part.kind == "MLPs"]
        after = stream + sum(part.written() for part in write.parts)
        self.norm = None if write.carried_on else write.norm
        if self.norm is not None:
            stream, kept, after = self.norm(stream), [self.norm(each) for each in kept], self.norm.output.to(wide)
            for function in self.norm.fixed:
                self.projected = [function(each) for each in self.projected]
        self.after = after
        self.size = torch.linalg.vector_norm(after, 1, dim=-1)
        self.own = [self._close(each, after, self.size) for each in (stream, *kept)]

    @staticmethod
    def _close(part: Tensor, after: Tensor, size: Tensor) -> Tensor:
        distance: Tensor = torch.linalg.vector_norm(part - after, 1, dim=-1)
        return (size - distance).clamp(min=0)

    def shares(self, rows: Tensor, threshold: float) -> Tensor:
        """``[B, I, T]``: the shares of the positions in those of ``rows`` ``[B, I]``, those below the threshold left
        out; a sum that no part comes near to stays with its own position."""
        after = torch.take_along_dim(self.after, rows[..., None], 1)[:, None]
        size = torch.take_along_dim(self.size, rows, 1)[:, None]
        heads = []
        for part, projected in zip(self.reads, self.projected, strict=True):
            weights = attention_at(part, rows)
            if self.norm is not None:
                weights = weights * torch.take_along_dim(self.norm.rows, rows[..., None], 1)[:, None]
            for head in range(projected.shape[2]):
                one = weights[:, head].transpose(1, 2)[..., None] * projected[:, :, None, head]  # [B, T, I, d]
                heads.append(self._close(one, after, size).transpose(1, 2))
        own = [torch.take_along_dim(each, rows, 1) for each in self.own]
        total = torch.stack([*(each.sum(-1) for each in heads), *own]).sum(0)

        def share(close: Tensor, total: Tensor) -> Tensor:
            found = torch.where(total > 0, close / total, 0.0)
            return torch.where(found >= threshold, found, 0.0)

        alone = torch.nn.functional.one_hot(rows, self.after.shape[1]).to(self.after.dtype)
        kept = torch.stack([share(each, total) for each in own]).sum(0).masked_fill(total == 0, 1.0)
        found = alone * kept[..., None]
        for each in heads:
            found += share(each, total[..., None])
        return found
