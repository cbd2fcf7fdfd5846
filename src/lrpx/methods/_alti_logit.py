"""ALTI-Logit: the logit along the residual stream, and tokens mixed by how close they are to what attention makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from lrpx import recipes
from lrpx.engine._book import rounding
from lrpx.errors import MethodError
from lrpx.ledger import Entry, Ledger
from lrpx.methods._attention_maps import refuse_mixers
from lrpx.methods._contract import Found, Method, register
from lrpx.methods._refusals import refuse_number, refuse_other
from lrpx.parts import Part as Named
from lrpx.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Sequence

    from lrpx._passes import Pass
    from lrpx.engine._stream import Part, Write
    from lrpx.engine._trace import Trace
    from lrpx.model import BoundModel
    from lrpx.questions import Questions
    from lrpx.recipes import Recipe

CHUNK = 2**23
"""So many numbers of ``T_ij`` are held at a time, over positions i, positions j and the width of the model."""


@dataclass(frozen=True)
class AltiLogit(Method):
    """ALTI-Logit and its two halves (Ferrando et al. 2022, 2023; Arras 2025, §2.1).

    The explained value is a sum along the residual stream: what the embedding puts there, what the heads of every layer
    write from every position ``j``, ``Δ^l_j``, what the feed-forward parts write, and biases. Attention weights and the
    standard deviations of norms are constants. Of a position ``j`` in layer ``l`` the share of each input token is then
    ``M^{l−1}_j``, the product of the contributions ``C`` of the layers below: ``C_ij`` says how close (in L1) what
    position ``j`` contributes to ``y_i`` comes to ``y_i``, the stream after attention.

    Args:
        name: how results call it.
        what: ``"alti-logit"``: ``Σ_l Δ^l M^{l−1}``; ``"logit"``: ``Σ_l Δ^l``, no mixing; both with what the explained
            position had in the stream at first. ``"alti"``: the row of ``M^{L−1}`` of the explained position.
        recipe: the rules.
        epsilon: added to every difference ``F_ij − y_i`` of a position that is attended to. The published code of the
            papers has 1e-6 there, by the default of a library function; here the distance is exact unless you ask.
        label: how tables spell it.

    Raises:
        MethodError: another ``what``, or an ``epsilon`` below 0.
    """

    name: str
    what: Literal["alti-logit", "logit", "alti"] = "alti-logit"
    recipe: Recipe = recipes.ALTI_LOGIT
    epsilon: float = 0.0
    label: str = ""

    tasks: ClassVar[frozenset[Task]] = frozenset(
        {Task.CAUSAL, Task.MASKED, Task.CLASSIFICATION, Task.TOKEN_CLASSIFICATION, Task.QUESTION_ANSWERING}
    )

    def __post_init__(self) -> None:
        refuse_other(self.name, "what", self.what, ("alti-logit", "logit", "alti"))
        refuse_number(self.name, "epsilon", self.epsilon, 0.0)

    @property
    def has_ledger(self) -> bool:
        """Whether its numbers are parts of the explained value; ALTI's are shares."""
        return self.what != "alti"

    def describe(self) -> str:
        """Which of the three, the recipe, and ε if there is one."""
        exact = f"; epsilon={self.epsilon}" if self.epsilon else ""
        return f"{self.what}; {self.recipe.describe()}{exact}"

    def pass_key(self) -> Hashable:
        """The three share the pass and, of one ε, the contributions."""
        return self.recipe, self.epsilon

    def check(self, model: BoundModel) -> None:
        """Refuse a model with more than one residual stream; see :meth:`Method.check`."""
        if model.task is Task.SEQ2SEQ or getattr(model.config, "is_encoder_decoder", False):
            kind = type(model.module).__name__
            raise MethodError(
                f"{self.name} follows one residual stream, and {kind} has an encoder's and a decoder's; use attnlrp or "
                "lrp"
            )
        super().check(model)

    def attribute(self, model: BoundModel, questions: Questions, *, ledger: bool = False) -> Found:
        """See :meth:`Method.attribute <lrpx.methods._contract.Method.attribute>`. The pass keeps the residual stream
        alone, and is not compiled.

        Raises:
            MethodError: the model has no residual stream that attention alone mixes positions of; says where and why.
        """
        return self.together([self], model, questions, ledger=ledger)[0]

    def together(
        self, methods: Sequence[AltiLogit], model: BoundModel, questions: Questions, *, ledger: bool = False
    ) -> list[Found]:
        """What several of these methods find, in one pass for all of them; see :meth:`attribute`."""
        self.check(model)
        if ledger and any(method.what == "alti" for method in methods):
            raise MethodError(
                "alti gives shares, not parts of the explained value; leave ledger out, or use alti-logit"
            )
        streams: list[_Stream] = []
        ledgers: list[Ledger] = []
        with model.traced(questions, self.recipe, ledger=ledger, heads=True) as ran:
            assert ran.trace.heads is not None
            shares = any(method.what == "alti" for method in methods)
            if shares:  # the others' parts are gradients, of whatever is read
                ran.trace.heads.check_end(ran.answers.values)
            for chosen in ran.explained():
                used = read_rows(ran, chosen) if shares else _read_at(ran.trace)
                with torch.no_grad():  # only the model's own pass needs a graph
                    streams.append(_Stream.read(ran.trace, used))
                    ledgers += [_ledger(ran.trace, ran.paths)] if ledger else []
        with torch.no_grad():
            found = _scores([method.what for method in methods], ran.trace, streams, self.epsilon)
        size = list(ran.batch.inputs["input_ids"].shape)
        embedded = list(found[self.what].shape[1:])
        if embedded != size:
            raise MethodError(f"the model embeds {embedded} tokens of an input of {size}; use attnlrp or lrp")
        heads = [stream.heads for stream in streams]
        even = len({each.shape for stream in heads for each in stream}) == 1
        drawn = [torch.stack(stream, 1).cpu() for stream in heads] if even else []
        refuse_mixers(model, questions)
        answers = ran.answers.detached()
        return [
            Found(
                answers,
                by_question(ran, list(found[method.what].cpu())),
                {"heads": tuple(Named("heads", each, ("layer", "head", "token")) for each in by_question(ran, drawn))}
                if even and method.what != "alti"
                else {},
                tuple(ledgers) if ledger else None,
            )
            for method in methods
        ]


def by_question(ran: Pass, rounds: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """``[…, T]`` for each question, from ``[B, …, W]`` of each round."""
    found = [torch.empty(0)] * len(ran.questions)
    for chosen, values in zip(ran.questions.rounds(), rounds, strict=True):
        for i in chosen:
            found[i] = ran.batch.of_row(ran.questions.asked[i].row, [values]).clone()
    return tuple(found)


@dataclass(frozen=True, eq=False)
class _Stream:
    """What one backward pass tells: the positions that the values are read from ``[B, I]``, what each head of each
    layer writes from each token ``[B, H, T]``, and the relevance of the embedding ``[B, T]``."""

    rows: Tensor
    heads: list[Tensor]
    embedding: Tensor

    @classmethod
    def read(cls, trace: Trace, used: Tensor) -> _Stream:
        writes = _writes(trace)
        rows = _explained_rows(used)
        heads = [head_relevance(trace, write, rows) for write in writes]
        return cls(rows, heads, trace.relevance_of_beginning().sum(-1))


def _writes(trace: Trace) -> list[Write]:
    """What layers with attention add to the stream."""
    assert trace.heads is not None
    return [write for write in trace.heads.writes if write.reads]


def _scores(what: Sequence[str], trace: Trace, streams: Sequence[_Stream], epsilon: float) -> dict[str, Tensor]:
    """The token relevance ``[R, B, T]`` of each method in each of ``R`` rounds. The contributions are made once for
    all of them."""
    writes = _writes(trace)
    deltas = [torch.stack([stream.heads[layer].sum(1) for stream in streams]) for layer in range(len(writes))]
    embedding = torch.stack([stream.embedding for stream in streams])
    found = {"logit": torch.stack(list(deltas)).sum(0) + embedding}
    mixes = "alti-logit" in what or "alti" in what
    relevance = deltas[-1]
    shares = torch.zeros_like(embedding)
    if "alti" in what:
        if any(stream.rows.shape[1] != 1 for stream in streams):
            raise MethodError(
                "alti gives the shares of one position, and the explained value is read from several; use alti-logit, "
                "or ifr, which takes the mean of their shares"
            )
        shares = torch.stack([contributions(writes[-1], stream.rows, epsilon)[:, 0] for stream in streams])
    for write, delta in zip(reversed(writes[:-1]), reversed(deltas[:-1]), strict=True) if mixes else ():
        below = delta
        mixed_shares = torch.zeros_like(shares)
        for positions, mixed in _in_chunks(write, epsilon):
            every = positions.expand(len(streams), *positions.shape)
            below = below + torch.einsum("rbi,bij->rbj", torch.take_along_dim(relevance, every, 2), mixed)
            mixed_shares += torch.einsum("rbi,bij->rbj", torch.take_along_dim(shares, every, 2), mixed)
        relevance, shares = below, mixed_shares
    return found | {"alti-logit": relevance + embedding, "alti": shares}


def read_rows(ran: Pass, chosen: Sequence[int]) -> Tensor:
    """``[B, T]``: the positions that the values of the chosen questions are read from.

    Raises:
        MethodError: one is read from none, for its gradient is 0, so nothing tells whose shares to give.
    """
    read = _read_at(ran.trace)
    if not bool(read[[ran.questions.asked[i].row for i in chosen]].any(-1).all()):
        raise MethodError("the explained value does not depend on the last layer; use attnlrp or lrp")
    return read


def _read_at(trace: Trace) -> Tensor:
    """``[B, T]``: whether the explained value is read from a position, as the gradient tells."""
    return torch.stack([trace.gradient_at(write).abs().amax(-1) for write in _writes(trace)]).amax(0) > 0


def _explained_rows(used: Tensor) -> Tensor:
    """``[B, K]``: the positions that the explained value is read from, of ``[B, T]``; the same one again where a row of
    the batch has fewer."""
    count = max(int(used.sum(1).max()), 1)
    return used.to(torch.uint8).topk(count, dim=1).indices


def head_relevance(trace: Trace, write: Write, rows: Tensor) -> Tensor:
    """``[B, H, T]``: what each head of a layer writes from each token into the explained value, ``Δ^{l,h}_j``."""
    gradient = torch.take_along_dim(trace.gradient_at(write), rows[..., None], 1)
    found = []
    for part in write.reads:
        assert part.attention is not None
        weights = attention_at(part, rows)
        toward = torch.einsum("bthd,bkd->bhkt", part.through(part.attention.projected()), gradient)
        found.append((weights * toward).sum(2))
    return torch.cat(found, 1)


def attention_at(part: Part, rows: Tensor) -> Tensor:
    """``[B, H, I, T]``: attention weights, times what the row's norms multiply with."""
    assert part.attention is not None
    weights = part.attention.weights(rows)
    return weights if part.rows is None else weights * torch.take_along_dim(part.rows, rows[..., None], 1)[:, None]


def contributions(write: Write, rows: Tensor, epsilon: float = 0.0) -> Tensor:
    """``C_ij`` ``[B, I, T]`` of a layer at the positions ``rows`` ``[B, I]`` (Ferrando et al. 2022, §3).

    ``c_ij = max(0, ‖y_i‖₁ − ‖F_ij − y_i‖₁)``, normalised over ``j``, where ``F_ij`` is what position ``j`` contributes
    to ``y_i``: what the heads write at ``i`` from ``j`` and, at ``j = i``, the stream before. A row without any
    closeness keeps its own token.
    """
    return _Layer(write, epsilon).contributions(rows)


class _Layer:
    """What a layer's ``C`` is made of, computed once for all rows."""

    def __init__(self, write: Write, epsilon: float) -> None:
        self.epsilon = epsilon
        wide = torch.promote_types(write.stream.dtype, torch.float32)
        stream = write.stream.to(wide)
        self.reads = write.reads
        self.projected = [part.through(part.attention.projected()) for part in self.reads if part.attention is not None]
        after = stream + sum(part.written() for part in write.parts if part.kind != "MLPs")
        self.norm = None if write.carried_on else write.norm
        if self.norm is None:
            self.stream, self.after = stream, after
        else:
            self.stream, self.after = self.norm(stream), self.norm.output.to(wide)
            for function in self.norm.fixed:
                self.projected = [function(each) for each in self.projected]
        # the length of y_i as that of F_ij − y_i, so that where nothing is contributed both are the same to the bit
        self.size = torch.linalg.vector_norm(self.after, 1, dim=-1)

    def contributions(self, rows: Tensor) -> Tensor:
        after = torch.take_along_dim(self.after, rows[..., None], 1)
        distance_from = None
        attended = torch.zeros((), device=rows.device)
        for part, projected in zip(self.reads, self.projected, strict=True):
            weights = attention_at(part, rows)
            attended = attended.maximum((weights != 0).any(1).transpose(1, 2).to(weights.dtype))
            if self.norm is not None:
                weights = weights * torch.take_along_dim(self.norm.rows, rows[..., None], 1)[:, None]
            contributed = weights.permute(0, 3, 2, 1) @ projected  # [B, T, I, H] @ [B, T, H, d]
            distance_from = contributed if distance_from is None else distance_from.add_(contributed)
        assert distance_from is not None
        batch, chosen = (
            torch.arange(len(rows), device=rows.device)[:, None],
            torch.arange(rows.shape[1], device=rows.device),
        )
        distance_from[batch, rows, chosen] += torch.take_along_dim(self.stream, rows[..., None], 1)
        distance_from.sub_(after[:, None])
        if self.epsilon:
            distance_from.add_(self.epsilon * attended[..., None])
        distance = torch.linalg.vector_norm(distance_from, 1, dim=-1)
        close = (torch.take_along_dim(self.size, rows, 1)[:, None] - distance).clamp_(min=0).transpose(1, 2)
        total = close.sum(-1, keepdim=True)
        alone = torch.nn.functional.one_hot(rows, close.shape[-1]).to(close.dtype)
        return torch.where(total > 0, close / total, alone)


def _in_chunks(write: Write, epsilon: float) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of ``C`` a few at a time: positions ``[B, I]`` and contributions ``[B, I, T]``."""
    layer = _Layer(write, epsilon)
    batch, length, width = write.stream.shape
    step = max(1, CHUNK // (batch * length * width))
    every = torch.arange(length, device=write.stream.device).expand(batch, -1)
    for start in range(0, length, step):
        rows = every[:, start : start + step]
        yield rows, layer.contributions(rows)


def _ledger(trace: Trace, paths: Collection[str]) -> Ledger:
    """Where every unit of the value went: the ledger of the stream, with what each layer wrote."""
    assert trace.heads is not None
    ledger = trace.ledger(paths)
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for write in trace.heads.writes:
        gradient = trace.gradient_at(write).double()
        for part in write.parts:
            written = part.written()
            value, error = found.get((part.kind, part.name), (0.0, 0.0))
            value += float((written.double() * gradient).sum())
            error += float(rounding(written, gradient, write.stream.dtype))
            found[part.kind, part.name] = value, error
    entries = (Entry(kind, name, value) for (kind, name), (value, error) in found.items() if not abs(value) <= error)
    return Ledger((*ledger.entries, *entries), ledger.explained)


register(AltiLogit("alti-logit", label="ALTI-Logit"))
register(AltiLogit("logit", "logit", label="Logit"))
register(AltiLogit("alti", "alti", label="ALTI"))
