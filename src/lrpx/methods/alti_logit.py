"""ALTI-Logit: the logit along the residual stream, and tokens mixed by how close they are to what attention makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from lrpx import recipes, tasks
from lrpx.engine.running import propagate
from lrpx.errors import MethodError
from lrpx.ledger import Entry, Ledger
from lrpx.methods.backward import Found, Options, explain_values, run_model
from lrpx.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.nn import Module

    from lrpx.engine.compiled import Compiler
    from lrpx.engine.stream import Part, Write
    from lrpx.engine.trace import Trace
    from lrpx.methods.backward import Batch
    from lrpx.recipes import Recipe
    from lrpx.targets import Target

CHUNK = 2**23
"""So many numbers of ``T_ij`` are held at a time, over positions i, positions j and the width of the model."""


@dataclass(frozen=True)
class AltiLogit:
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
    """

    name: str
    what: Literal["alti-logit", "logit", "alti"] = "alti-logit"
    recipe: Recipe = recipes.ALTI_LOGIT
    epsilon: float = 0.0

    def attribute(
        self,
        model: Module,
        task: Task,
        batch: Batch,
        targets: Callable[[Tensor], Sequence[Target]],
        *,
        ledger: bool = False,
        recompute: bool = False,
        compiler: Compiler | None = None,
    ) -> Found:
        """Explain one value for each row of a batch; see :meth:`lrpx.methods.backward.Backward.attribute`.

        ``recompute`` and ``compiler`` change nothing: the pass keeps the residual stream alone, and is not compiled.

        Raises:
            MethodError: the model has no residual stream that attention alone mixes positions of; says where and why.
        """
        return self.together([self], model, task, batch, targets, Options(ledger, recompute, compiler))[0]

    @staticmethod
    def together(
        methods: Sequence[AltiLogit],
        model: Module,
        task: Task,
        batch: Batch,
        targets: Callable[[Tensor], Sequence[Target]],
        options: Options,
    ) -> list[Found]:
        """What several of these methods find, in one pass for all of them; see :meth:`attribute`."""
        names = [method.name for method in methods]
        if task is Task.SEQ2SEQ or getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise MethodError(
                f"{names[0]} follows one residual stream, and {type(model).__name__} has an encoder's and a decoder's; "
                "use attnlrp or lrp"
            )
        if options.ledger and any(method.what == "alti" for method in methods):
            raise MethodError(
                "alti gives shares, not parts of the explained value; leave ledger out, or use alti-logit"
            )
        run = run_model(
            propagate(model, methods[0].recipe, (), ledger=options.ledger, heads=True),
            model,
            **batch.inputs,
            positions=batch.positions,
        )
        with torch.no_grad():  # inside the block only the model's own pass needs a graph
            with run as (trace, logits):
                chosen, values = explain_values(trace, logits, targets)
            found, heads = _scores([method.what for method in methods], trace, methods[0].epsilon)
        size, embedded = list(batch.inputs["input_ids"].shape), list(found[methods[0].what].shape)
        if embedded != size:
            raise MethodError(f"the model embeds {embedded} tokens of an input of {size}; use attnlrp or lrp")
        paths = tasks.embedding_paths(model, task)
        return [
            Found(
                tokens=found[method.what].cpu(),
                decoder_tokens=None,
                logits=logits.detach().cpu(),
                targets=chosen,
                values=values.detach().cpu(),
                ledger=_ledger(trace, paths) if options.ledger else None,
                heads=None if heads is None or method.what == "alti" else heads.cpu(),
            )
            for method in methods
        ]


def _scores(what: Sequence[str], trace: Trace, epsilon: float) -> tuple[dict[str, Tensor], Tensor | None]:
    """The token relevance ``[B, T]`` of each method, and that of the heads ``[B, L, H, T]``, if all layers have as
    many."""
    assert trace.heads is not None
    writes = [write for write in trace.heads.writes if write.reads]
    rows = _explained_rows(trace, writes)
    heads = [head_relevance(trace, write, rows) for write in writes]
    deltas = [each.sum(1) for each in heads]
    embedding = trace.relevance_of_beginning().sum(-1)
    found = {"logit": torch.stack(deltas).sum(0) + embedding}
    mixes = "alti-logit" in what or "alti" in what
    relevance = deltas[-1]
    shares = torch.zeros_like(embedding)
    if "alti" in what:
        if rows.shape[1] != 1:
            raise MethodError("alti gives the shares of one position, and the explained value is read from several")
        last = contributions(writes[-1], rows, epsilon)
        shares = last[:, 0]
    for write, delta in zip(reversed(writes[:-1]), reversed(deltas[:-1]), strict=True) if mixes else ():
        below = delta
        mixed_shares = torch.zeros_like(shares)
        for positions, mixed in _in_chunks(write, epsilon):
            relevance_there = torch.take_along_dim(relevance, positions, 1)
            below = below + torch.einsum("bi,bij->bj", relevance_there, mixed)
            mixed_shares += torch.einsum("bi,bij->bj", torch.take_along_dim(shares, positions, 1), mixed)
        relevance, shares = below, mixed_shares
    found |= {"alti-logit": relevance + embedding, "alti": shares}
    return found, torch.stack(heads, 1) if len({each.shape for each in heads}) == 1 else None


def _explained_rows(trace: Trace, writes: Sequence[Write]) -> Tensor:
    """``[B, K]``: the positions that the explained value is read from, as the gradient tells; the same one again where
    a row of the batch has fewer."""
    used = torch.stack([trace.gradient_at(write).abs().amax(-1) for write in writes]).amax(0) > 0
    count = max(int(used.sum(1).max()), 1)
    return used.to(torch.uint8).topk(count, dim=1).indices


def head_relevance(trace: Trace, write: Write, rows: Tensor) -> Tensor:
    """``[B, H, T]``: what each head of a layer writes from each token into the explained value, ``Δ^{l,h}_j``."""
    gradient = torch.take_along_dim(trace.gradient_at(write), rows[..., None], 1)
    found = []
    for part in write.reads:
        assert part.attention is not None
        weights = _weights(part, rows)
        toward = torch.einsum("bthd,bkd->bhkt", part.through(part.attention.projected()), gradient)
        found.append((weights * toward).sum(2))
    return torch.cat(found, 1)


def _weights(part: Part, rows: Tensor) -> Tensor:
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
            weights = _weights(part, rows)
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


def _ledger(trace: Trace, paths: set[str]) -> Ledger:
    """Where every unit of the value went: the ledger of the stream, with what each layer wrote."""
    assert trace.heads is not None
    ledger = trace.ledger(paths)
    entries = list(ledger.entries)
    found: dict[tuple[str, str], float] = {}
    for write in trace.heads.writes:
        gradient = trace.gradient_at(write).double()
        for part in write.parts:
            value = float((part.written().double() * gradient).sum())
            found[part.kind, part.name] = found.get((part.kind, part.name), 0.0) + value
    entries += [Entry(kind, name, value) for (kind, name), value in found.items() if value]
    return Ledger(tuple(entries), ledger.explained)


ALTI_LOGIT = AltiLogit("alti-logit")
LOGIT = AltiLogit("logit", "logit")
ALTI = AltiLogit("alti", "alti")
