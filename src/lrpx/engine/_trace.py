"""What one run under a recipe leaves behind: the places relevance can be read at."""

from __future__ import annotations

import warnings
from cmath import isfinite
from collections import Counter
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from lrpx.engine import _biases
from lrpx.engine._book import Book
from lrpx.engine._graph import Nodes, Walk
from lrpx.engine._heads import Heads
from lrpx.engine._places import Ran, Source, is_among
from lrpx.engine._positions import Positions
from lrpx.engine._taps import Tap
from lrpx.errors import NonFiniteError, TraceError, UnknownOperationError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from contextlib import AbstractContextManager

    from lrpx.engine._places import Place, Side
    from lrpx.engine._sinks import Kept
    from lrpx.engine._stream import Write
    from lrpx.ledger import Ledger
    from lrpx.recipes import Recipe


T = TypeVar("T", bound=Tap)


def _is_of_positions(source: Source, tokens: Tensor) -> bool:
    """Whether what was looked up seems to be of positions, or the same everywhere; and is not of these tokens."""
    ids = source.ids
    if ids is None or is_among(ids.flatten().tolist(), tokens):
        return False
    return bool((ids.diff(dim=-1) == 1).all() if ids.ndim else True) or bool((ids == ids.flatten()[:1]).all())


class Notes:
    """What may be why nothing arrives at an input.

    Attributes:
        has_no_gradients: whether the model was called where gradients are off.
        cut: the path of the first module that computed with what depends on the input where gradients are off.
        left: the path of the first module that took ids of tokens to where nothing follows them, and by what; and
            the ids.
        has_tokens: whether something was looked up with ids of tokens.
    """

    def __init__(self) -> None:
        self.has_no_gradients = False
        self.cut = ""
        self.left: tuple[str, Tensor] | None = None
        self.has_tokens = False


class Trace:
    """The record of a run inside :func:`~lrpx.propagate`.

    Call :meth:`explain` on the scalar to explain; :meth:`relevance` and :meth:`gradient` then answer for every
    source, and for every observed module's input and output. To ask for several values of one run, keep its graph:
    ``explain(value, keep=True)``; the answers are those of the newest.

    Args:
        recipe: the recipe of the run. A strict one allows only those custom autograd functions that are rules of its
            own; for one with rules that is not strict the operations that run are counted.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.sources: list[Source] = []
        self.carried: dict[str, int] = {}
        """The arguments that were given what an earlier call of the model has computed, and from which call on."""
        self.places: list[Place] = []
        self.taps: Sequence[Tap] = ()
        self.ran: Counter[tuple[str, str, str]] | None = None
        if recipe.has_rules() and not recipe.strict:
            self.ran = Counter()
        self.nodes = Nodes()
        self.notes = Notes()
        self.during_backward: Callable[[], AbstractContextManager[object]] = nullcontext
        self._gradients: dict[int, Tensor] | None = None
        self._explained: Tensor | None = None
        self._asked: set[int] = set()
        self._spent = False

    @property
    def operations(self) -> tuple[Ran, ...]:
        """Which operations on the way from the input ran, under which rule, in which module, and how often.

        Raises:
            TraceError: it was not recorded, for the recipe is strict, where every operation is known, or has no rules.
        """
        if self.ran is None:
            raise TraceError(
                "operations are recorded for a recipe with strict=False: "
                "propagate(model, dataclasses.replace(recipe, strict=False))"
            )
        return tuple(Ran(*key, count) for key, count in self.ran.items())

    def tap(self, kind: type[T]) -> T | None:
        """The first tap of a kind that listens to the run."""
        return next((tap for tap in self.taps if isinstance(tap, kind)), None)

    @property
    def heads(self) -> Heads | None:
        """The attention heads, if the run follows them."""
        return self.tap(Heads)

    def explain(self, value: Tensor, outputs: Tensor | None = None, keep: bool = False) -> Tensor:
        """Propagate back from ``value`` in one backward pass, with seed 1.

        What the trace then answers (relevance, gradients, the ledger, the heads) is about this value, and no longer
        about one explained before.

        Args:
            value: a scalar, or ``[B]`` with one value for each independent row of a batch.
            outputs: the model's outputs that ``value`` was computed from outside of the block, if not by sums and
                differences alone: what was computed from them has its plain gradient then, and with a ledger what it
                keeps for itself is an entry (a log-probability's normaliser). What is computed inside the block has
                rules as the model has.
            keep: keep the graph, so that another value of the same run can be explained after this one.

        Returns:
            ``value``, detached.

        Raises:
            TraceError: the model was not called inside the block, the value does not depend on it, or the run was
                explained without ``keep`` before.
            NonFiniteError: NaN or infinity in the value, or in the relevance of a source.
            UnknownOperationError: something on the way that no rule has reached, under a strict recipe.
        """
        if value.ndim > 1:
            raise TraceError(f"the explained value has shape {list(value.shape)}; pass a scalar or one value a row")
        tensors = self._explainable(value)
        if value.numel() > 1 and all(source.value.shape[:1] == (1,) for source in self.sources):
            raise TraceError(
                f"there are {value.numel()} values of one row, whose relevance would be that of their sum; explain "
                "each by itself, with keep=True for all but the last, or their sum"
            )
        if outputs is not None and value.grad_fn is not None and self.nodes.is_own(value.grad_fn):
            outputs = None  # it was computed inside the block, where rules and taps have seen it
        with ExitStack() as stack:
            for tap in self.taps:
                stack.enter_context(tap.backward(value, outputs))
            gradients = self.gradients(value.sum(), tensors, keep=keep, since=outputs)
        self._spent = not keep
        self._hold(value.detach(), tensors, gradients)
        return value.detach()

    def explain_together(self, values: Tensor, outputs: Tensor | None = None) -> Iterator[Tensor]:
        """Propagate back from each of ``values`` ``[P]`` in one backward pass for all, with seed 1; for short inputs,
        where a pass has more overhead than work. The graph is kept. ``outputs``: as :meth:`explain` takes them.

        Yields:
            Each value, detached; until the next the trace answers about it.

        Raises:
            TraceError, NonFiniteError, UnknownOperationError: as :meth:`explain`; or a ledger is kept, which measures
                one pass at a time.
            RuntimeError: an operation cannot be batched by ``torch.vmap``.
        """
        if any(type(tap).backward is not Tap.backward for tap in self.taps):
            raise TraceError("a ledger, or another tap, measures one pass at a time; call explain() for each value")
        tensors = self._explainable(values)
        seeds = torch.eye(len(values), dtype=values.dtype, device=values.device)
        gradients = self.gradients(values, tensors, seeds, keep=True, batched=True, since=outputs)
        for i, value in enumerate(values.detach()):
            self._hold(value, tensors, [None if each is None else each[i] for each in gradients])
            yield value

    def _explainable(self, value: Tensor) -> list[Tensor]:
        """The tensors whose gradients an explanation of a value is read from."""
        if self.notes.has_no_gradients and not value.requires_grad:
            raise TraceError(
                "the model ran where gradients are off, as inside torch.no_grad(), generate(), encode() or predict(), "
                "so nothing was recorded; call the model itself, model(...), inside the block"
            )
        left = None if self.notes.has_tokens else self.notes.left
        if left is not None and all(_is_of_positions(source, left[1]) for source in self.sources):
            raise TraceError(
                f"{left[0]}, where nothing follows them, and nothing was seen that tokens are looked up in; "
                "index with the tensor of ids itself, W[tokens], or use torch.nn.functional.embedding"
            )
        if not self.sources:
            raise TraceError(
                "nothing was recorded: call the very module that was given to propagate(), inside the block; neither "
                "its methods, as model.encode(), nor a part of it are seen, and its input must be looked up in an "
                "embedding or be floating-point tensors, and not inside of the model's own torch.no_grad()"
            )
        if self._spent:
            raise TraceError(
                "this run was explained already, and its graph is gone; pass keep=True to every explain() but the "
                "last, or run the model again in a new block"
            )
        for tap in self.taps:
            tap.check()
        if not value.requires_grad:
            cut = f", or where gradients are off, as {self.notes.cut} computes" if self.notes.cut else ""
            raise TraceError(
                "the value does not depend on the model's inputs under this recipe, as where it ends in a softmax that "
                f"the recipe holds constant{cut}; pass a logit of this very run"
            )
        self.refuse_non_finite(value.detach(), "explained value")
        self._gradients = self._explained = None
        tensors = self._leaves()
        self._asked = {id(tensor) for tensor in tensors}
        tensors += _biases.sums_behind(list(tensors))
        return list({id(tensor): tensor for tensor in tensors if tensor.requires_grad}.values())

    def _leaves(self) -> list[Tensor]:
        """Where relevance ends, and what the taps have named."""
        tensors = [source.value for source in self.sources]
        for tap in self.taps:
            tensors += tap.leaves()
        return tensors

    def _hold(self, value: Tensor, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """What a backward pass has found, for the trace to answer from."""
        self._explained = value
        self._gradients = {
            id(tensor): gradient for tensor, gradient in zip(tensors, gradients, strict=True) if gradient is not None
        }
        for source in self.sources:
            gradient = self._gradients.get(id(source.value))
            if gradient is None and source.ids is None and self.notes.cut:
                warnings.warn(
                    f"nothing arrives at {source.paths[0]}: {self.notes.cut} computes where gradients are off",
                    stacklevel=3,
                )
            if gradient is not None and not is_finite(gradient):
                raise NonFiniteError(
                    f"the relevance of {source.paths[0]} is not finite{self._blame_backward()}; try dtype float32"
                )

    def gradients(
        self,
        outputs: Tensor,
        tensors: Sequence[Tensor],
        seed: Tensor | None = None,
        keep: bool = False,
        batched: bool = False,
        since: Tensor | None = None,
    ) -> Sequence[Tensor | None]:
        """``∂tensor`` for each of ``tensors`` under the recipe, from ``seed`` (1 for a scalar) at ``outputs``.

        With ``keep`` the graph stays for another pass; ``batched`` seeds have a first dimension of their own, and so
        have the gradients then. What was computed since the model's outputs ``since`` has its plain gradient.

        Raises:
            UnknownOperationError: something on the way that no rule has reached, under a strict recipe, or that torch
                has no derivative of.
            TraceError: a checkpoint of the model's own computes something else when it runs again; or the model has
                written over what the backward pass needs.
        """
        with self.during_backward():  # the walk, too, may look at what a checkpoint computes again
            if self._recipe.has_rules():
                leaves = {id(leaf) for leaf in self._leaves()}
                limit = 2**64 if since is None or since.grad_fn is None else since.grad_fn._sequence_nr() + 1
                for name, where in Walk(self._recipe, self.nodes, leaves, limit).unseen(outputs):
                    if self.ran is not None:
                        self.ran[name, "unknown", where] += 1
            how: dict[str, Any] = {"retain_graph": keep, "is_grads_batched": batched, "allow_unused": True}
            try:
                return torch.autograd.grad(outputs, tensors, seed, **how)
            except CheckpointError as error:
                raise TraceError(
                    "a part of the model in a checkpoint of its own, torch.utils.checkpoint, computes something else "
                    "when it is run again, as with a state that it changes; switch the checkpoints off, "
                    "model.gradient_checkpointing_disable()"
                ) from error
            except NotImplementedError as error:  # torch tells it in the backward pass alone, as of unique
                raise UnknownOperationError(
                    f"the explained value hangs on what torch has no derivative of ({error}); let the model take it "
                    "for a constant, by detach()"
                ) from error
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):
                    raise
                raise TraceError(
                    "the model writes over a value that the backward pass needs, as with a state or a cache that it "
                    "updates in place; run it so that it keeps none, as by use_cache=False"
                ) from error

    def refuse_non_finite(self, value: Tensor, name: str) -> None:
        """Raise NonFiniteError when ``value`` holds NaN or infinity; name the first observed module that does."""
        if is_finite(value):
            return
        outputs = ((place.path, place.value) for place in self.places if place.side == "output")
        first = next(_non_finite(outputs), None)
        where = "" if first is None else f", first in the output of {first}"
        raise NonFiniteError(f"NaN or infinity in the {name}{where}; check the model's weights, or try dtype float32")

    def relevance(self, path: str, of: Side = "output", call: int | None = None) -> Tensor:
        """``x ⊙ ∂x`` at a place, in float32 at least, of the place's own shape (such as ``[B, T, d]``).

        Args:
            path: the path of an embedding or another observed module, or the name of a floating-point
                argument of the model (``"pixel_values"``).
            of: a module's ``"input"`` (its first tensor) or ``"output"``.
            call: which call, from 0, of a module that was called several times.

        Raises:
            TraceError: there is no such place, or it was called several times and ``call`` is None.
        """
        return self.relevance_of(self._find(path, of, call))

    def gradient(self, path: str, of: Side = "output", call: int | None = None) -> Tensor:
        """``∂x`` at a place, under the recipe; see :meth:`relevance`."""
        return self.gradient_of(self._find(path, of, call))

    def ledger(self, tokens: Collection[str] | None = None) -> Ledger:
        """Where every unit of the explained value went; in a batch, of the sum of its values.

        Args:
            tokens: the paths of the token embeddings, none where the model takes no tokens; without them every
                embedding that is not called one of positions or token types is one of tokens.

        Raises:
            TraceError: nothing was explained yet, or the run was not asked for a ledger.
        """
        book = self.tap(Book)
        if book is None:
            raise TraceError("no ledger was kept; ask for one with propagate(model, recipe, ledger=True)")
        if self._gradients is None or self._explained is None:
            raise TraceError("nothing was explained yet; call trace.explain(value) first")
        sources = [(source, self.source_relevance(source)) for source in self.sources]
        positions = self.tap(Positions)
        lines = () if positions is None else positions.lines()
        return book.close(float(self._explained.double().sum()), sources, self._gradients, tokens, lines)

    def positions(self, *, by_head: bool = False) -> list[Kept]:
        """The relevance of positions, layer by layer: where a model adds or multiplies them, or biases attention by
        them, under a recipe that gives them some (:data:`lrpx.recipes.PA_LRP`).

        Args:
            by_head: whether by heads, which the run must have kept apart: ``propagate(model, recipe,
                taps=[Positions(model, by_head=True)])``.

        Raises:
            TraceError: nothing was explained yet, the recipe takes positions for constants, or heads were not kept.
        """
        tap = self.tap(Positions)
        if tap is None or not self._recipe.has_positions():
            raise TraceError("positions are constants under this recipe; use lrpx.PA_LRP, or position=rules.uniform")
        if by_head and not tap.by_head:
            raise TraceError("heads were not kept apart; run with taps=[Positions(model, by_head=True)]")
        if self._gradients is None:
            raise TraceError("nothing was explained yet; call trace.explain(value) first")
        return tap.kept(self._gradients, by_head=by_head)

    def source_relevance(self, source: Source) -> Tensor:
        """``x ⊙ ∂x`` of one of :attr:`sources`."""
        return self.relevance_of(source.value)

    def source_gradient(self, source: Source) -> Tensor:
        """``∂x`` of one of :attr:`sources`."""
        return self.gradient_of(source.value)

    def gradient_at(self, write: Write) -> Tensor:
        """``∂x`` of what a layer adds to the residual stream, ``[B, T, d]``."""
        return self.gradient_of(write.leaf).reshape(write.stream.shape)

    def relevance_of_beginning(self) -> Tensor:
        """``x ⊙ ∂x`` of the residual stream before any layer has added to it, ``[B, T, d]``."""
        heads = self.heads
        assert heads is not None
        assert heads.beginning is not None
        stream = heads.writes[0].stream
        gradient = self.gradient_of(heads.beginning).reshape(stream.shape)
        return stream.to(gradient.dtype) * gradient

    def relevance_of(self, value: Tensor) -> Tensor:
        """``x ⊙ ∂x`` of a leaf that a tap has named."""
        gradient = self.gradient_of(value)
        return value.detach().to(gradient.dtype) * gradient

    def gradient_of(self, value: Tensor) -> Tensor:
        """``∂x`` of a leaf that a tap has named, in float32 at least; 0 where nothing arrives."""
        if self._gradients is None:
            raise TraceError("nothing was explained yet; call trace.explain(value) first")
        if id(value) not in self._asked:
            raise TraceError("no tap named this tensor among its leaves() when the value was explained; name it there")
        gradient = _biases.gradient(value, self._gradients)
        wide = torch.promote_types(value.dtype, torch.float32)
        return torch.zeros_like(value, dtype=wide) if gradient is None else gradient.to(wide)

    def _find(self, path: str, of: Side, call: int | None) -> Tensor:
        if of == "output" and path in self.carried and not (call is not None and 0 <= call < self.carried[path]):
            raise TraceError(
                f"{path} was given what an earlier call has computed in this block, which is no input: relevance goes "
                f"on to what that call was given; detach it, {path}.detach(), to end there"
            )
        values = [source.value for source in self.sources if path in source.paths and of == "output"]
        if not values:
            found = [place for place in self.places if place.path == path and place.side == of]
            changed = [place for place in found if place.value._version != place.version]
            if changed:
                raise TraceError(f"the {of} of {path} was changed in place later; observe a module beside it")
            values = [place.value for place in found]
        if not values:
            names = sorted({name for source in self.sources for name in source.paths})
            raise TraceError(
                f"no {of} of {path!r} was recorded; the sources are {', '.join(names)}, and modules are "
                "recorded when propagate(..., observe=[pattern]) names them and they are called"
            )
        if call is None and len(values) > 1:
            raise TraceError(f"{path} was called {len(values)} times; pass call=0 to {len(values) - 1}")
        try:
            return values[call or 0]
        except IndexError:
            raise TraceError(f"{path} was called {len(values)} times; call={call} is not one of them") from None

    def _blame_backward(self) -> str:
        assert self._gradients is not None
        pairs = ((place.path, self._gradients.get(id(place.value))) for place in reversed(self.places))
        first = next(_non_finite(pairs), None)
        return "" if first is None else f", first at {first}"


def is_finite(x: Tensor) -> bool:
    """Whether every element is finite; at a glance where their sum is."""
    with torch._C.DisableTorchFunction():  # a question of ours, which no mode need hear
        return isfinite(x.sum().item()) or bool(torch.isfinite(x).all())


def _non_finite(pairs: Iterator[tuple[str, Tensor | None]]) -> Iterator[str]:
    for path, value in pairs:
        if value is not None and not is_finite(value):
            yield path
