"""Methods of one forward and one backward pass: the LRP family and the gradient baselines."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrpx import recipes, tasks
from lrpx.engine.running import propagate
from lrpx.errors import MethodError, ModelError, NonFiniteError
from lrpx.targets import Contrast, Logit, Margin
from lrpx.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from torch.nn import Module

    from lrpx.engine.compiled import Compiler
    from lrpx.engine.places import Source
    from lrpx.engine.trace import Trace
    from lrpx.ledger import Ledger
    from lrpx.recipes import Recipe
    from lrpx.targets import Target


@dataclass(frozen=True)
class Batch:
    """``B`` padded rows: the model's keyword arguments, and ``[B]`` positions of the logits to read (None
    for a classifier)."""

    inputs: dict[str, Tensor]
    positions: Tensor | None


@dataclass(frozen=True)
class Found:
    """What a method found for a batch.

    Args:
        tokens: ``[B, T]`` relevance of the input tokens; padding included.
        decoder_tokens: ``[B, T']`` the same for the decoder's tokens of an encoder-decoder model.
        logits: ``[B, V]`` the row of logits each target was read from.
        targets: ``B`` targets with their tokens resolved.
        values: ``[B]`` the explained values.
        ledger: where every unit of the explained value went, if that was asked for.
        heads: ``[B, L, H, T]``: what each attention head of each layer writes into the explained value from each
            position, for methods that tell.
    """

    tokens: Tensor
    decoder_tokens: Tensor | None
    logits: Tensor
    targets: Sequence[Target]
    values: Tensor
    ledger: Ledger | None = None
    heads: Tensor | None = None


@dataclass(frozen=True)
class Options:
    """How a pass is run: with a ledger, in the memory of one layer, as compiled code."""

    ledger: bool = False
    recompute: bool = False
    compiler: Compiler | None = None


def value_times_gradient(value: Tensor, gradient: Tensor) -> Tensor:
    """``Σ_d x ⊙ ∂x``: relevance under a rule recipe, Gradient×Input under none."""
    return (value.to(gradient.dtype) * gradient).sum(-1)


def l1(_: Tensor, gradient: Tensor) -> Tensor:
    """``‖∂x‖₁`` (Arras 2025, §2.4)."""
    return gradient.abs().sum(-1)


def squared_l2(_: Tensor, gradient: Tensor) -> Tensor:
    """``‖∂x‖₂²`` (Arras 2025, §2.4)."""
    return gradient.square().sum(-1)


@dataclass(frozen=True)
class Backward:
    """One forward pass under a recipe, one backward pass, and a reduction over the embedding.

    Args:
        name: how results call it.
        recipe: the rules.
        reduce: from embeddings and their gradients ``[..., d]`` to scores ``[...]``.
    """

    name: str
    recipe: Recipe
    reduce: Callable[[Tensor, Tensor], Tensor] = value_times_gradient

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
        """Explain one value for each row of a batch.

        Args:
            model: a Hugging Face model.
            task: what its logits are about.
            batch: padded inputs.
            targets: from logits ``[B, V]`` to ``B`` resolved targets.
            ledger: also keep the ledger. A bias has one relevance for all rows, so give one row.
            recompute: compute each layer again in the backward pass, in the memory of one.
            compiler: runs the pass as compiled code, unless it is one with a ledger or checkpoints.

        Raises:
            MethodError: a ledger of a method whose scores are not in the units of the explained value.
            NonFiniteError: NaN or infinity in the logits or the relevance; names the first module.
            ModelError: the token embedding was not used, or the model cannot be compiled.
        """
        options = Options(ledger, recompute, compiler)
        return self.together([self], model, task, batch, targets, options)[0]

    @staticmethod
    def together(
        methods: Sequence[Backward],
        model: Module,
        task: Task,
        batch: Batch,
        targets: Callable[[Tensor], Sequence[Target]],
        options: Options,
    ) -> list[Found]:
        """What methods of one recipe find, in one pass for all of them; see :meth:`attribute`."""
        for method in methods:
            if options.ledger and method.reduce is not value_times_gradient:
                raise MethodError(
                    f"{method.name} does not measure in the units of the explained value, so no ledger can add up to "
                    "it; leave ledger out, or use attnlrp, lrp or gradient-x-input"
                )
        try:
            return _attribute(methods, model, task, batch, targets, (), options)
        except NonFiniteError:
            # once more, watching every module, so that the error can name the first one
            return _attribute(methods, model, task, batch, targets, ("*",), replace(options, compiler=None))


def _attribute(
    methods: Sequence[Backward],
    model: Module,
    task: Task,
    batch: Batch,
    targets: Callable[[Tensor], Sequence[Target]],
    observe: Sequence[str],
    options: Options,
) -> list[Found]:
    paths = tasks.embedding_paths(model, task)
    recipe = methods[0].recipe
    kept: dict[str, Any] = {"ledger": options.ledger, "recompute": options.recompute}

    def forward(given: Mapping[str, Any]) -> AbstractContextManager[tuple[Trace, Tensor]]:
        return run_model(propagate(model, recipe, observe, **kept), model, **given)

    given = batch.inputs | {"positions": batch.positions}
    compiler = None if any(kept.values()) else options.compiler
    run = forward(given) if compiler is None else compiler.run(model, forward, given, frozenset(paths), recipe)
    with run as (trace, logits):
        chosen, values = explain_values(trace, logits, targets)
    found = [source for source in trace.sources if not paths.isdisjoint(source.paths)]
    names = ("input_ids", "decoder_input_ids") if task is Task.SEQ2SEQ else ("input_ids",)
    if len(found) != len(names):
        raise ModelError(
            f"the token embedding {min(paths)} was used {len(found)} times, not {len(names)}; "
            "use lrpx.propagate(model, recipe) and read trace.sources"
        )
    pairs = [(source.value.detach(), trace.source_gradient(source)) for source in found]
    results = []
    for method in methods:
        each = zip(names, found, pairs, strict=True)
        scores = [_like(batch.inputs[name], source, method.reduce(*pair)) for name, source, pair in each]
        results.append(
            Found(
                tokens=scores[0].cpu(),
                decoder_tokens=scores[1].cpu() if task is Task.SEQ2SEQ else None,
                logits=logits.detach().cpu(),
                targets=chosen,
                values=values.detach().cpu(),
                ledger=trace.ledger(paths) if options.ledger else None,
            )
        )
    return results


def explain_values(
    trace: Trace, logits: Tensor, targets: Callable[[Tensor], Sequence[Target]]
) -> tuple[Sequence[Target], Tensor]:
    """The targets of the logits ``[B, V]`` and their values ``[B]``, explained."""
    trace.refuse_non_finite(logits.detach().masked_fill(logits == -torch.inf, 0.0), "logits")
    chosen = targets(logits.detach())
    values = torch.stack([target.value(row) for target, row in zip(chosen, logits, strict=True)])
    linear = all(isinstance(target, (Logit, Contrast, Margin)) for target in chosen)
    trace.explain(values, None if linear else logits)
    return chosen, values


@contextmanager
def run_model(
    block: AbstractContextManager[Trace], model: Module, positions: Tensor | None, **inputs: Any
) -> Iterator[tuple[Trace, Tensor]]:
    """Run a model inside ``block``: the trace, and the logits ``[B, V]`` at the positions."""
    with ExitStack() as stack:
        trace = stack.enter_context(block)
        if positions is not None:
            stack.enter_context(tasks.only_rows(model, positions))
        output = model(**inputs)
        logits = output["logits"] if "logits" in output else output[0]
        yield trace, logits if positions is None else tasks.rows_of(logits, positions)


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


ATTNLRP = Backward("attnlrp", recipes.ATTNLRP)
LRP = Backward("lrp", recipes.LRP)
GRADIENT_X_INPUT = Backward("gradient-x-input", recipes.GRADIENT)
GRADIENT_L1 = Backward("gradient-l1", recipes.GRADIENT, l1)
GRADIENT_L2_SQUARED = Backward("gradient-l2-squared", recipes.GRADIENT, squared_l2)
