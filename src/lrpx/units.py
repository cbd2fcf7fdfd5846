"""The units of a model: its latent neurons, heads, queries, keys, values, branches and layers, and where each is read.

They are found by what they do and not by a module's name. The model is run once, on a few tokens, and a tap follows
what its torch functions make: what a non-linearity gives and a second matrix takes back to the width of the layer are
latent neurons; what softmax attention gives, head beside head, to an output projection are heads.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from glob import escape
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from lrpx import tasks
from lrpx._hooks import hooks
from lrpx._modules import adapted_layers, attending_as_before, layer_of, named_modules
from lrpx.engine import Tap, propagate
from lrpx.engine._book import storage_of
from lrpx.engine._observer import first_tensor
from lrpx.engine._running import CACHES, is_running
from lrpx.engine._tensors import any_carries, carries
from lrpx.errors import LRPxError, MethodError, ModelError, TraceError
from lrpx.recipes import GRADIENT

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torch.nn import Module

    from lrpx.engine import Call, Running
    from lrpx.engine._places import Side
    from lrpx.rules import Rule

__all__ = ["KINDS", "Kind", "Place", "Reading", "place_in", "places"]

Kind = Literal["neurons", "heads", "queries", "keys", "values", "attention", "mlp", "residual"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""``"neurons"``: the input of an MLP's second matrix, also of a gated one, or of a state-space mixer's last;
``"heads"``: what each attention head has read, before the output projection; ``"queries"``, ``"keys"``, ``"values"``:
the features of what attention reads with, and reads; ``"attention"``, ``"mlp"``: what each branch gives to the residual
stream; ``"residual"``: the stream behind each layer."""

READS: tuple[Kind, ...] = ("queries", "keys", "values")
"""Of these, what attention reads with, and what it reads; in the order in which it is given them."""
TITLES: dict[Kind, str] = {
    **{kind: kind for kind in KINDS},
    "attention": "attention branches",
    "mlp": "MLPs",
    "residual": "layers",
}
"""How messages and tables call them."""

LENGTH = 5
"""On so many tokens a model is run to find its units."""

REARRANGES = frozenset(
    """chunk split tensor_split split_with_sizes unsafe_chunk unsafe_split unbind narrow select repeat repeat_interleave
    tile flip roll __getitem__ slice broadcast_to cat concat concatenate stack""".split()
)
"""Torch functions that put numbers elsewhere and change none, beside those that move the mark of a gate."""
CASTS = frozenset("type float half bfloat16 double to type_as dropout".split())
"""Of these, those that leave them where they are."""
PRODUCTS = ("matmul", "baddbmm", "grouped_mm")
RANKS = ("heads", "weights", "scores", "neurons", "linear")
"""Of two marks that meet in a product, the first here goes on."""


AGAIN = (
    "{} runs again in the backward pass, where nobody knows which call it is that was changed; switch the model's "
    "checkpoints off"
)


@dataclass(frozen=True)
class Place:
    """Where units of one kind can be read and written: the input or output of a module of the model, ``[B, T, n]``.

    Unit ``i`` is ``size`` features of the ``n``, one after another: ``columns[i * size : (i + 1) * size]``. A
    module that is called several times in a pass, as a layer that is run again and again, has a place for each call.

    Args:
        layer: the number of the layer, from 0; where a layer is run several times, of the run.
        path: the module.
        side: ``"input"`` or ``"output"``.
        kind: what they are.
        width: how many units there are.
        size: of how many features each is: 1 for a neuron, the width of a head for a head.
        columns: which of the module's features they are; None for all of them in order.
        call: which call of the module, from 0, in one forward pass.
        calls: how many calls there are.
        stack: the list that the layer is in.
        heads: of queries, keys and values: of how many heads they are, as many of one head after another; 0 where they
            stand otherwise.
    """

    layer: int
    path: str
    side: Side
    kind: Kind
    width: int
    size: int = 1
    columns: tuple[int, ...] | None = None
    call: int = 0
    calls: int = 1
    stack: str = field(default="", compare=False)
    heads: int = field(default=0, compare=False)

    @property
    def name(self) -> str:
        """The module's path; of one of several calls with its number, from 0.

        >>> Place(0, "layers.0.mlp", "input", "neurons", 8).name
        'layers.0.mlp'
        >>> Place(2, "layer.mlp", "input", "neurons", 8, call=2, calls=12).name
        'layer.mlp#2'
        """
        return called(self.path, self.call if self.calls > 1 else None)

    def of(self, value: Tensor) -> Tensor:
        """``[…, width]``, each a sum over its features, or the feature itself; from ``[…, n]``."""
        if self.columns is not None:
            value = value[..., torch.tensor(self.columns, device=value.device)]
        return value if self.size == 1 else value.reshape(*value.shape[:-1], self.width, self.size).sum(-1)

    def features(self, unit: int) -> tuple[int, ...]:
        """The module's features that a unit is.

        Raises:
            MethodError: there is no such unit.
        """
        if not 0 <= unit < self.width:
            raise MethodError(f"{self.name} has {self.width} {self.kind}; {unit} is none of them, count from 0")
        chosen = range(unit * self.size, (unit + 1) * self.size)
        return tuple(chosen) if self.columns is None else tuple(self.columns[i] for i in chosen)


def called(path: str, call: int | None) -> str:
    """How a call of a module is named; None stands for every call, or the only one."""
    return path if call is None else f"{path}#{call}"


def split_name(name: str) -> tuple[str, int | None]:
    """A module's path and which of its calls is meant.

    >>> split_name("layer.mlp#2"), split_name("layer.mlp")
    (('layer.mlp', 2), ('layer.mlp', None))
    """
    path, _, call = name.rpartition("#")
    return (path, int(call)) if path and call.isdecimal() else (name, None)


def own_paths(model: Module) -> dict[str, str]:
    """Of each path in a model the first one of the same module, which stands for it."""
    first: dict[Module, str] = {}
    return {path: first.setdefault(module, path) for path, module in named_modules(model)}


def calls_of(model: Module) -> Mapping[str, int]:
    """How often each module is called in one forward pass.

    Raises:
        ModelError: nobody knows what the model takes.
    """
    return _found(model, None).calls


def is_turned(model: Module, path: str, side: Side) -> bool | None:
    """Whether a module takes, or gives, the tokens before the rows, ``[T, B, n]``; None where nobody knows what the
    model takes."""
    try:
        return (own_paths(model)[path], side) in _found(model, None).turned
    except LRPxError:
        return None


def is_picked(model: Module, path: str, side: Side) -> bool:
    """Whether a module, or another expert beside it, takes or gives rows that were picked among the tokens by their
    numbers, in whatever order; False where nobody knows what the model takes."""
    try:
        picked = _found(model, None).picked
        return (_alike(own_paths(model)[path]), side) in {(_alike(each), its) for each, its in picked}
    except LRPxError:
        return False


def _alike(path: str) -> str:
    """A path without the numbers in it, the same of all experts.

    >>> _alike("layers.0.experts.3.up")
    'layers.#.experts.#.up'
    """
    return ".".join("#" if each.isdigit() else each for each in path.split("."))


def has_turned(model: Module) -> bool:
    """Whether some module of a model whose units were looked for takes or gives the tokens before the rows."""
    known = _known.get(model)
    return known is not None and bool(known.turned)


def with_tokens(model: Module, inputs: Mapping[str, Any]) -> frozenset[tuple[str, Side]]:
    """The modules that take, or give, in every call what is computed from the tokens that a model is given: not what it
    makes of an image or a sound before they meet, of which no shape tells how many places it has.

    The model is run once on such inputs; what was found is kept with it. Where this thread runs a model under a recipe
    it cannot be, and if nothing was found before there are none.

    Raises:
        ModelError: it has no input embeddings.
    """
    inputs = {name: value for name, value in inputs.items() if value is not None and name not in CACHES}
    own = own_paths(model)
    names = frozenset(name for name, value in inputs.items() if isinstance(value, (Tensor, list, tuple)))
    known = _with_tokens.setdefault(model, {})
    key = names, frozenset(own)
    if key not in known:
        if is_running():
            return frozenset()
        known[key] = _look_for_tokens(model, own, inputs)
    return known[key]


def places(model: Module, kind: Kind, inputs: Mapping[str, Any] | None = None) -> tuple[Place, ...]:
    """The places of all units of a kind, in the order of the forward pass.

    The model is run once, under no recipe; what was found is kept with it.

    Args:
        model: a model in eval mode.
        kind: one of :data:`KINDS`.
        inputs: an example of what its forward pass takes; a few tokens by default, or an empty image.

    Raises:
        MethodError: there are none, or the model computes some of them inside a module (experts in one tensor), where
            nothing can be read or written.
        ModelError: it is in training mode, or nobody knows what it takes.

    >>> from lrpx.model import Spec
    >>> found = places(Spec().build().module, "neurons")
    >>> len(found), found[0].path, found[0].width
    (6, 'model.layers.0.mlp.down_proj', 704)
    """
    if kind not in KINDS:
        raise MethodError(f"there are no units called {kind!r}; pass one of {', '.join(KINDS)}")
    found = _found(model, inputs)
    chosen = tuple(place for place in found.places if place.kind == kind)
    if chosen and kind in ("neurons", "mlp") and found.experts:
        raise MethodError(
            f"{type(model).__name__} computes some of its {TITLES[kind]} inside {found.experts[0]}, where no module "
            "takes or gives them for all tokens, as with experts whose weights are one tensor or a second stream, or "
            "several layers read them, and others elsewhere; ask for other units, or for those alone that "
            f"{chosen[0].path} is given: "
            'trace.relevance(path, of="input"), lrpx.intervene of (path, "input")'
        )
    if not chosen:
        inside = found.inside.get("neurons" if kind == "mlp" else "heads" if kind == "attention" else kind)
        name = type(model).__name__
        if inside:
            raise MethodError(
                f"{name} computes its {TITLES[kind]} inside {inside}, where no module takes or gives them for all "
                "tokens, as with experts whose weights are one tensor, or several layers read them, as with a low-rank "
                "adapter in the block's own forward pass; ask for other units"
            )
        raise MethodError(
            f"no {TITLES[kind]} were found in {name}: none of its modules does what makes them (lrpx.units); ask for "
            "other units"
        )
    return chosen


def neurons_or_heads(model: Module, path: str) -> dict[str, Place]:
    """The modules at a path, or in the module there, at which latent neurons or heads are; none where some of these are
    computed inside of it (experts), and are at no module.

    Raises:
        ModelError: as :func:`places`.
    """
    found = _found(model, None)

    if any(_is_in(each, path) for each in found.experts):
        return {}
    there = (place for place in found.places if place.kind in ("neurons", "heads") and _is_in(place.path, path))
    inside: dict[str, Place] = {}
    for each in there:
        inside.setdefault(each.path, each)
    return inside


def attends(model: Module, path: str) -> bool:
    """Whether attention is computed in a module of a layer, or what it gives is read by a linear layer there: one of
    heads, if :func:`neurons_or_heads` knows some in it, and else one whose heads nobody knows.

    Raises:
        ModelError: as :func:`places`.
    """
    return layer_of(path) is not None and any(_is_in(each, path) for each in _found(model, None).attending)


def place_in(found: Sequence[Place], layer: int | str) -> Place:
    """The place of a layer's units, by its number or the path of a module.

    Raises:
        MethodError: there is none, or there are several.
    """
    if isinstance(layer, str):
        path, call = split_name(layer)
        inside = [place for place in found if place.path == path or place.path.startswith(f"{path}.")]
        fitting = [place for place in inside if call in (None, place.call)]
    else:
        fitting = [place for place in found if place.layer == layer]
    kind = found[0].kind
    if not fitting:
        numbers = sorted({place.layer for place in found})
        raise MethodError(f"there are no {kind} in layer {layer!r}; there are in {numbers[0]} to {numbers[-1]}")
    if len(fitting) > 1:
        told = ", ".join(place.name for place in fitting)
        raise MethodError(f"layer {layer!r} has {kind} in {told}; pass the path of one of them")
    return fitting[0]


class Called(Tap):
    """A tap at some modules that is told which of its module's calls it stands at.

    Args:
        paths: of the modules.
    """

    writes: ClassVar[bool] = False
    """Whether it puts another value in the place of one."""
    _run: Running | None = None

    def __init__(self, paths: Iterable[str]) -> None:
        self.patterns = tuple({escape(path): None for path in paths})
        self._calls: Counter[tuple[str, Side]] = Counter()

    def begin(self, run: Running) -> None:
        """A new run."""
        self._run = weakref.proxy(run)
        self._calls.clear()

    def module(self, path: str, side: Side, value: Tensor) -> Tensor | None:
        """What enters or leaves a module, once more.

        Raises:
            TraceError: a part of the model that is to be changed runs again in the backward pass.
        """
        if self._run is not None and self._run.replaying:
            if self.writes:
                raise TraceError(AGAIN.format(path))
            return None
        call = self._calls[path, side]
        self._calls[path, side] += 1
        return self.at(path, side, call, value)

    def at(self, path: str, side: Side, call: int, value: Tensor) -> Tensor | None:
        """What enters or leaves a module in one of its calls, from 0; another value in its place, or None."""
        raise NotImplementedError


class Reading(Called):
    """What stands at some places in one run, in its graph.

    Args:
        places: where to look.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        super().__init__(place.path for place in places)
        self.places = tuple(places)
        self._wanted = {(place.path, place.side, place.call) for place in places}
        self._values: dict[tuple[str, Side, int], tuple[Tensor, int]] = {}

    def begin(self, run: Running) -> None:
        """A new run."""
        super().begin(run)
        self._values = {}

    def at(self, path: str, side: Side, call: int, value: Tensor) -> Tensor | None:
        """What enters or leaves a module."""
        if (path, side, call) in self._wanted:
            self._values[path, side, call] = value, value._version
        return None

    def leaves(self) -> list[Tensor]:
        """What was there."""
        return [value for value, _ in self._values.values()]

    def keep(self, place: Place, value: Tensor) -> None:
        """Another tensor for what stands at a place."""
        self._values[place.path, place.side, place.call] = value, value._version

    def value(self, place: Place) -> Tensor:
        """``[B, T, n]``: what stood there, every feature of the module's input or output.

        Raises:
            TraceError: the model did not come there, came there more often than when its units were looked for, or has
                changed the value in place since.
        """
        value, version = self._values.get((place.path, place.side, place.call), (None, 0))
        if value is None:
            raise TraceError(f"{place.path} was not called, or less than {place.call + 1} times; choose other units")
        calls = self._calls[place.path, place.side]
        if calls > max(place.calls, place.call + 1):
            raise TraceError(
                f"{place.path} was called {calls} times, and {place.calls} when its units were looked for, as in one "
                "whose depth depends on its input; choose other units"
            )
        if value._version != version:
            raise TraceError(f"the {place.side} of {place.name} was changed in place later; choose other units")
        return value


# ------------------------------------------------------------------------------ looking


@dataclass(frozen=True)
class _Found:
    modules: tuple[str, ...]
    places: tuple[Place, ...]
    inside: dict[str, str]
    experts: tuple[str, ...]
    calls: Mapping[str, int]
    turned: frozenset[tuple[str, Side]]
    attending: frozenset[str]
    """Modules that compute attention themselves, and the linear layers that these call behind it."""
    picked: frozenset[tuple[str, Side]]


_known: weakref.WeakKeyDictionary[Module, _Found] = weakref.WeakKeyDictionary()
_with_tokens: weakref.WeakKeyDictionary[Module, dict[object, frozenset[tuple[str, Side]]]] = weakref.WeakKeyDictionary()
_looking = threading.local()


def is_looking() -> bool:
    """Whether this thread runs a model to find its units, and not for its user."""
    return getattr(_looking, "now", False)


def _found(model: Module, inputs: Mapping[str, Any] | None) -> _Found:
    modules = tuple(f"{path} {type(module).__name__}" for path, module in named_modules(model))
    known = _known.get(model)
    if known is None or known.modules != modules:
        if model.training or tasks.active_dropout(model):
            raise ModelError(f"{type(model).__name__} is in training mode; call model.eval()")
        _known[model] = known = _look(model, modules, example(model) if inputs is None else inputs)
    return known


def example(model: Module) -> dict[str, Any]:
    """A short input.

    Raises:
        ModelError: nobody knows what the model takes.
    """
    config: Any = getattr(model, "config", None)
    weight = tasks.first_weight(model)
    device = tasks.input_device(model)
    names = getattr(model, "main_input_name", None) or "input_ids"
    if names == "pixel_values" and isinstance(side := getattr(config, "image_size", None), (int, list, tuple)):
        size = (side, side) if isinstance(side, int) else tuple(side)
        shape = 1, getattr(config, "num_channels", 3), *size
        numbers = torch.linspace(-1, 1, shape[1] * size[0] * size[1], device=device)
        return {"pixel_values": numbers.reshape(shape).to(weight.dtype)}
    if names != "input_ids" or not tasks.accepts(model, "input_ids"):
        raise ModelError(
            f"nobody knows what {type(model).__name__} takes; pass an example, places(model, kind, inputs={{…}})"
        )
    ids = torch.arange(LENGTH, device=device)[None] % len(weight)  # that of the token embedding
    end = tasks.end_read(model, tasks.Task.CLASSIFICATION)
    if end is not None:  # which a classifier reads, and at one place
        ids = torch.where(ids == end, end - 1 if end else 1, ids)
        ids[0, -1] = end
    found: dict[str, Any] = {"input_ids": ids}
    if getattr(config, "is_encoder_decoder", False) and "SequenceClassification" not in type(model).__name__:
        found["decoder_input_ids"] = ids[:, :-1]
    if tasks.accepts(model, "use_cache"):
        found["use_cache"] = False
    return found


def _look(model: Module, modules: tuple[str, ...], inputs: Mapping[str, Any]) -> _Found:
    follower = _Follower(own_paths(model), map(storage_of, model.parameters()), adapted_layers(model))
    with (
        _now_looking(),
        torch.random.fork_rng(devices=[]),
        attending_as_before(model),
        propagate(model, GRADIENT, (), taps=[follower]),
    ):
        try:
            model(**inputs)
        except (RuntimeError, ValueError, IndexError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, LRPxError):
                raise
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelError(
                f"{type(model).__name__} cannot be run to find its units ({first}); pass an example of what it takes, "
                "places(model, kind, inputs={…})"
            ) from error
    found = tuple(follower.found())
    experts = follower.experts({place.path for place in found})
    return _Found(
        modules,
        found,
        follower.inside,
        experts,
        follower.calls,
        turned=frozenset(follower.turned),
        picked=frozenset(follower.picked),
        attending=frozenset(follower.attending),
    )


def _look_for_tokens(model: Module, own: Mapping[str, str], inputs: Mapping[str, Any]) -> frozenset[tuple[str, Side]]:
    """The same, from one run, whose graph keeps no values."""
    is_both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    tables = tasks.source_paths(model, tasks.Task.SEQ2SEQ if is_both else tasks.Task.CAUSAL)
    begins: dict[Any, bool] = {}
    sees: dict[tuple[str, Side], bool] = {}

    def begin(value: Tensor) -> Tensor:
        leaf = value.detach().requires_grad_()
        begins[get_gradient_edge(leaf).node] = True
        return leaf.clone()  # into which the model may write

    def look(path: str, side: Side, value: Tensor | None) -> None:
        if value is not None:
            sees[path, side] = sees.get((path, side), True) and _comes_from(value, begins)

    def entered(path: str) -> Callable[..., Any]:
        return lambda _, args, kwargs: look(path, "input", first_tensor((*args, *kwargs.values())))

    def left(path: str) -> Callable[..., Any]:
        def after(_: Module, args: Any, output: Any) -> Any:
            is_table = path in tables and args and first_tensor(args) is None and isinstance(output, Tensor)
            found = begin(output) if is_table else None
            look(path, "output", first_tensor(output) if found is None else found)
            return found

        return after

    with (
        _now_looking(),
        torch.random.fork_rng(devices=[]),
        attending_as_before(model),
        torch.inference_mode(False),
        torch.enable_grad(),
        saved_tensors_hooks(lambda _: None, lambda kept: kept),
        hooks() as on,
    ):
        for path, module in named_modules(model):
            if own[path] == path:
                on.before(module, entered(path), with_kwargs=True)
                on.after(module, left(path))
        given = {name: _plain(value) for name, value in inputs.items()}
        if isinstance(given.get("inputs_embeds"), Tensor):
            given["inputs_embeds"] = begin(given["inputs_embeds"])
        if tasks.accepts(model, "use_cache"):
            given["use_cache"] = False
        model(**given)
    return frozenset(place for place, is_seen in sees.items() if is_seen)


def _plain(value: Any) -> Any:
    """A tensor that a graph can keep, which one made in inference mode is not."""
    return value.clone() if isinstance(value, Tensor) and value.is_inference() else value


def _comes_from(value: Tensor, known: dict[Any, bool]) -> bool:
    """Whether a value is computed from what is known to be; what is found on the way is known from then on."""
    if not value.requires_grad:
        return False
    start = get_gradient_edge(value).node
    seen, waiting = set(), [start]
    while waiting:
        node = waiting.pop()
        if known.get(node, False):
            known[start] = True
            return True
        if node not in seen and node not in known:
            seen.add(node)
            waiting += [each for each, _ in node.next_functions if each is not None]
    known.update(dict.fromkeys(seen, False))
    return False


@contextmanager
def _now_looking() -> Iterator[None]:
    _looking.now = True
    try:
        yield
    finally:
        _looking.now = False


@dataclass(frozen=True, eq=False)
class _Mark:
    """What is known of a tensor that is on its way.

    Args:
        kind: one of :data:`RANKS`.
        index: of the tensor's own shape: which feature of a linear layer, which head or which neuron stands where.
        path: the linear layer's module; of heads, which attention's they are.
        made_of: of attention's scores and weights: the queries and keys they were made of.
    """

    kind: str
    index: Tensor
    path: str = ""
    made_of: tuple[_Mark | None, _Mark | None] = (None, None)


ATTRIBUTE = "_lrpx_unit"
LEARNED = "_lrpx_learned"
"""The attribute of a tensor that was chosen of a weight."""
PICKED = "_lrpx_picked"
"""The attribute of a tensor whose rows were picked among the tokens by their numbers, as those of an expert: of several
that it is given all of, nobody knows the order."""
PICKS = ("__getitem__", "index_select", "gather", "take_along_dim")
"""Torch functions that pick."""
PUTS = ("index_", "scatter", "masked_scatter", "__setitem__", "put")
"""How the names of those begin that put rows back to where they were."""


def _mark_of(x: Any) -> _Mark | None:
    mark, version = vars(x).get(ATTRIBUTE, (None, 0)) if isinstance(x, Tensor) else (None, 0)
    return mark if mark is not None and x._version == version and mark.index.shape == x.shape else None


def _with(x: Tensor, mark: _Mark | None) -> Tensor:
    if mark is not None and mark.index.shape == x.shape:
        setattr(x, ATTRIBUTE, (mark, x._version))
    return x


def _along(x: Tensor, dim: int) -> Tensor:
    """Numbers along one dimension, in the shape of ``x``."""
    count = torch.arange(x.shape[dim], device=x.device).reshape(-1, *(1,) * (-dim - 1))
    return torch.empty_like(x, dtype=torch.int64, requires_grad=False).copy_(count.expand(x.shape))  # lying as x does


class _Follower(Tap):
    """Follows what torch functions make, through one forward pass."""

    patterns = ("*",)

    def __init__(self, own: Mapping[str, str], weights: Iterable[int], adapted: Collection[str] = ()) -> None:
        self._own = own
        self._adapted = adapted
        self._inner: dict[str, list[str]] = {}  # of each module the names of those in it
        for each in own:
            holder, _, name = each.rpartition(".")
            self._inner.setdefault(holder, []).append(name)
        self._weights = set(weights) - {0}  # where they lie
        self._run: Running
        self.calls: Counter[str] = Counter()
        self._entered: dict[str, Tensor] = {}
        self._made: dict[str, Tensor] = {}
        self._attentions = 0
        self._gives: set[str] = set()
        self._products: dict[tuple[str, int], Tensor] = {}  # which a module's call has given
        self._read: dict[tuple[str, int], list[Tensor]] = {}  # of which attention has read a part
        self._around: dict[tuple[str, int], list[tuple[str, int]]] = {}  # of a layer of units, what is given them, too
        self._readers: dict[tuple[str, int], set[str]] = {}  # the layers of units in a module that is given them
        self._units: dict[tuple[str, int], Tensor] = {}  # which a layer of units was given
        self._wraps: set[tuple[str, int]] = set()  # of these, what gives no more than a layer in it
        self._rows: dict[tuple[str, int], torch.Size] = {}  # of the layers and their calls, in order
        self._given: dict[tuple[str, int], torch.Size] = {}  # what they took
        self._embedded: set[int] = set()  # how wide the first of the sources is
        self._running: list[tuple[str, int]] = []
        self._seen: list[tuple[Place, int, int, tuple[str, int]]] = []  # and their layer
        self.inside: dict[str, str] = {}
        self._inside: list[tuple[str, int]] = []  # where neurons are that no module takes, and how wide what they give
        self.turned: set[tuple[str, Side]] = set()
        self._attended: set[tuple[str, int]] = set()  # calls of modules in which attention has been computed
        self.attending: set[str] = set()
        self.picked: set[tuple[str, Side]] = set()

    def begin(self, run: Running) -> None:
        self._run = weakref.proxy(run)

    # ------------------------------------------------------------------- modules

    def module(self, path: str, side: Side, value: Tensor) -> None:
        if self._own[path] != path:
            return
        if value.ndim == 3 and len(value) > value.shape[1] == 1:  # of one row
            self.turned.add((path, side))
        if PICKED in vars(value):
            self.picked.add((path, side))
        layer = layer_of(path)
        is_layer = layer is not None and layer.path == path
        if side == "input":
            self._entered[path] = value
            if is_layer:
                self._running.append((path, self.calls[path]))
                self._given[path, self.calls[path]] = value.shape
                self._embedded |= {source.value.shape[-1] for source in self._run.sources[:1]}
            return
        self._beside(path, value)
        made = self._made.get(path)
        if made is not None and _is_same(made, value):
            self._gives.add(path)
            self._products[path, self.calls[path]] = made
        at = path, self.calls[path]
        if any(each in self._made and _is_same(self._made[each], value) for each in self._readers.get(at, ())):
            self._wraps.add(at)
        if is_layer and (path, self.calls[path]) in self._running:
            call = self.calls[path]
            self._rows[path, call] = value.shape
            self._saw(Place(0, path, "output", "residual", 1, value.shape[-1], call=call))
            self._running.remove((path, call))
        self.calls[path] += 1

    def _beside(self, path: str, value: Tensor) -> None:
        """What a module makes of its input by a linear layer in it, and perhaps an adapter beside that, is linear: also
        where the adapter is off."""
        given, mark = self._entered.get(path), _mark_of(value)
        if given is None or not carries(value):
            return
        for child in (f"{path}.{name}" for name in self._inner.get(path, ())):
            made, its = self._made.get(child), self._entered.get(child)
            if made is None or its is None or not _is_same(its, given) or (mark is not None and mark.path != child):
                continue
            if made.numel() == value.numel() and made.shape[-1] == value.shape[-1]:
                self._made[path] = _with(value, _Mark("linear", _along(value, -1), path))

    def _here(self) -> str:
        """The path of the module that runs now; of one with several, the first."""
        return self._own.get(where := self._run.where(), where)

    def _saw(self, place: Place, wide: int = 0, rows: int = 0) -> None:
        if self._running:
            self._seen.append((place, wide, rows, self._running[-1]))

    # ---------------------------------------------------------------- operations

    def around(self, call: Call, proceed: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        args, row = call.args, call.operation
        name = call.name if row is None else row.name
        marks = [_mark_of(x) for x in args]  # before what is changed in place
        lists = [_mark_of(x) for x in args[0] if x.numel()] if _is_list(args[:1]) else []  # a cache may be empty
        out = proceed(args, call.kwargs)
        if self._running and _is_picked(call, out):
            setattr(out, PICKED, True)
        if row is None or not args:
            return out
        moves = row.gate == "moves" or call.name in REARRANGES
        is_linear = name in ("linear", "addmm") or (name == "matmul" and _is_weight(args[1]))
        if carries(out) and not (moves or is_linear):
            self._reads(name, args, marks)
        if isinstance(out, Tensor) and moves and self._is_learned(args[0]):
            setattr(out, LEARNED, True)
        is_product = name in PRODUCTS or name == "einsum"
        if name == "attention" or (is_product and any(mark is not None and mark.kind == "weights" for mark in marks)):
            self._attends()
        if name == "attention":
            return self._attention(args, call.kwargs, out)
        if not isinstance(out, Tensor):
            return self._rearranged(call, name, marks, out, proceed)
        if is_linear:
            return self._linear(args[1] if name == "addmm" else args[0] if args else None, marks[name == "addmm"], out)
        if name in PRODUCTS:
            two = [*args, *call.kwargs.values()][name == "baddbmm" :][:2]
            return self._product(two, [_mark_of(x) for x in two], out)
        if name == "softmax":
            made_of = (None, None) if marks[0] is None else marks[0].made_of
            return _with(out, _Mark("weights", _along(out, -1), made_of=made_of)) if carries(out) else out
        if name == "clamp" and _guards(call):
            vars(out).pop(ATTRIBUTE, None)
            return _with(out, marks[0])
        if row.kind == "activation":
            if marks[0] is not None and marks[0].kind == "scores":  # as where they are kept between bounds
                return _with(out, marks[0])
            return self._activated(args[0], marks[0], out)
        if moves:
            if call.name in CASTS:
                return _with(out, marks[0])
            if lists:
                return self._joined(lists, call, out, proceed)
            return self._rearranged(call, name, marks, out, proceed)
        if row.kind in ("plain", "norm", "product") and name != "cumsum":
            return self._kept(name, args, marks, out)
        return out

    def rule(
        self, kind: str, rule: Rule, op: Callable[..., Any], inputs: Sequence[Any], proceed: Callable[..., Any]
    ) -> Any:
        """An activation that is run as one function is seen here alone."""
        out = proceed(*inputs)
        return self._activated(inputs[0], _mark_of(inputs[0]), out) if kind == "activation" else out

    @staticmethod
    def _activated(x: Any, mark: _Mark | None, out: Tensor) -> Tensor:
        is_one = carries(out) and out.ndim > 1 and isinstance(x, Tensor) and out.shape == x.shape
        if not is_one:
            return out
        return _with(out, _Mark("neurons", _along(out, -1) if mark is None else mark.index))

    def _attends(self) -> None:
        path = self._here()
        self._attended.add((path, self.calls[path]))
        self.attending.add(path)

    def _attention(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Tensor:
        given = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        for kind, name in zip(READS, ("query", "key", "value"), strict=True):
            self._features(kind, _mark_of(given[name]))
        return self._heads(out, _along(out, -3)) if out.ndim == 4 else out

    def _heads(self, out: Tensor, index: Tensor) -> Tensor:
        self._attentions += 1
        return _with(out, _Mark("heads", index, f"attention {self._attentions}"))

    def _product(self, args: Sequence[Any], marks: Sequence[_Mark | None], out: Tensor) -> Tensor:
        """A product of two that depend on the input: scores, or what attention reads."""
        left, right = marks
        if not all(map(any_carries, args)):
            for mark, other, dim in zip(marks, reversed(args), (-1, -2), strict=True):
                if mark is not None and mark.kind == "neurons":  # the weights of all experts in one tensor
                    self.inside.setdefault("neurons", self._run.where())
                    if self._is_learned(other) and out.ndim > 1:
                        self._inside.append((self._run.where(), out.shape[dim]))
            return out
        if left is not None and left.kind == "weights" and out.ndim > 2:
            for kind, mark in zip(READS, (*left.made_of, right), strict=True):
                self._features(kind, mark)
            heads = _along(out, -3)
            if out.ndim == 3:  # the heads of each row of the batch, one row after another
                heads = heads % (len(out) // self._run.sources[0].value.shape[0])
            return self._heads(out, heads)
        if left is not None and right is not None and {left.kind, right.kind} == {"linear"}:
            return _with(out, _Mark("scores", _along(out, -1), made_of=(left, right)))
        return out

    def _is_learned(self, x: Any) -> bool:
        """Whether a tensor is a weight of the model, or was chosen of one."""
        return isinstance(x, Tensor) and (LEARNED in vars(x) or storage_of(x) in self._weights)

    def _linear(self, x: Any, mark: _Mark | None, out: Tensor) -> Tensor:
        path = self._here()
        self._made[path] = out
        holder = path.rpartition(".")[0]
        if (holder, self.calls[holder]) in self._attended:
            self.attending.add(path)
        if mark is not None and mark.kind in ("neurons", "heads"):
            self._second(path, x, mark, out)
        return _with(out, _Mark("linear", _along(out, -1), path))

    def _second(self, path: str, x: Tensor, mark: _Mark, out: Tensor) -> None:
        """A linear layer of latent neurons, or of heads side by side."""
        if layer_of(path) is None:
            return
        self._units[path, self.calls[path]] = x
        self._around[path, self.calls[path]] = around = list(self._given_units(path, x, mark))
        for each in around:
            self._readers.setdefault(each, set()).add(path)
        index = mark.index.reshape(-1, x.shape[-1])
        entered = self._entered.get(path)
        kind: Any = mark.kind
        size, first = 1, index[0]
        if kind == "heads":
            size = max(int((first == 0).sum()), 1)
            first = torch.arange(len(first), device=index.device) // size  # one head after another
        if entered is None or not _is_same(x, entered) or PICKED in vars(x):
            self.inside.setdefault(kind, path)
            self._inside += [(path, out.shape[-1])] if kind == "neurons" else []
        elif torch.equal(index, first.expand_as(index)):
            place = Place(0, path, "input", kind, x.shape[-1] // size, size, call=self.calls[path])
            self._saw(place, out.shape[-1], x.shape.numel() // x.shape[-1])

    def _reads(self, name: str, args: Sequence[Any], marks: Sequence[_Mark | None]) -> None:
        """An operation of units, which a module that is given them does beside its linear layer, as adapters do that
        scale them first or sum parts of them."""
        path = self._here()
        for x, mark in zip(args, marks, strict=True):
            if mark is not None and mark.kind in ("neurons", "heads"):
                for each in self._given_units(path, x, mark):
                    self._readers.setdefault(each, set()).add(f"{path} {name}")

    def _given_units(self, path: str, x: Tensor, mark: _Mark) -> Iterator[tuple[str, int]]:
        """A module of a layer and those that hold it, where they are given some units, the innermost first."""
        layer = layer_of(path)
        while layer is not None and len(path) > len(layer.path):
            its = _mark_of(given := self._entered.get(path))
            if its is mark or (its is not None and its.kind == mark.kind and storage_of(given) == storage_of(x)):
                yield path, self.calls[path]  # also in another precision, or in another shape
            path = path.rpartition(".")[0]

    def _whole(self, place: Place) -> Place:
        """The module that is given some units where several layers in it read them, as a matrix and its adapter do; or
        may do, where the adapter is off; peft's own, which may change what the matrix gives (RoAd), in any case."""
        around = self._around[place.path, place.call]
        wraps = [each for each in reversed(around) if each in self._wraps] or [(place.path, place.call)]
        shared = (each for each in around if each[0] in self._adapted or len(self._readers[each]) > 1)
        path, call = next(shared, wraps[0])
        return replace(place, path=path, call=call)

    def _features(self, kind: Kind, mark: _Mark | None) -> None:
        if mark is None or mark.kind != "linear" or layer_of(mark.path) is None:
            return
        made = self._made[mark.path]
        columns = tuple(sorted(set(mark.index.flatten().tolist())))
        all_of_them = len(columns) == made.shape[-1]
        call = max(self.calls[mark.path] - 1, 0)  # it has given its output
        place = Place(0, mark.path, "output", kind, len(columns), 1, None if all_of_them else columns, call)
        self._read.setdefault((mark.path, call), []).append(made)
        self._saw(replace(place, heads=_heads_of(mark.index, columns)))

    def _rearranged(
        self, call: Call, name: str, marks: list[_Mark | None], out: Any, proceed: Callable[..., Any]
    ) -> Any:
        mark = marks[0] if marks else None
        several = isinstance(out, (tuple, list))
        if mark is None or not (several or isinstance(out, Tensor)) or not (name in REARRANGES or call.operation.gate):  # type: ignore[union-attr]
            return out
        index = self._moved(mark.index, call, proceed)
        if index is None:
            return out
        pairs = zip(out, index, strict=True) if several else [(out, index)]
        for each, its in pairs:
            if isinstance(its, Tensor):
                _with(each, _Mark(mark.kind, its, mark.path, mark.made_of))
        return out

    def _joined(self, marks: list[_Mark | None], call: Call, out: Tensor, proceed: Callable[..., Any]) -> Tensor:
        known = [mark for mark in marks if mark is not None]
        kinds, paths = {mark.kind for mark in known}, {mark.path for mark in known}
        if len(known) < len(marks) or len(kinds) > 1 or (len(paths) > 1 and kinds != {"heads"}):
            return out
        given = [mark.index for mark in known]
        if kinds == {"heads"} and len(paths) == len(known):
            is_beside = out.ndim > given[0].ndim or sum(each.shape[-1] for each in given) == out.shape[-1]
            if is_beside:  # each head is an attention of its own
                begins = [0, *accumulate(int(each.max()) + 1 for each in given)]
                given = [each + begin for each, begin in zip(given, begins, strict=False)]
        index = self._moved(given, call, proceed)
        return out if index is None else _with(out, _Mark(known[0].kind, index, known[0].path, known[0].made_of))

    @staticmethod
    def _moved(index: Any, call: Call, proceed: Callable[..., Any]) -> Any:
        """The numbers where the call puts them; None where it cannot take them."""
        try:
            return proceed((index, *call.args[1:]), call.kwargs)
        except RuntimeError:  # as a view of what lies otherwise in memory
            return None

    @staticmethod
    def _kept(name: str, args: Sequence[Any], marks: Sequence[_Mark | None], out: Tensor) -> Tensor:
        """The mark that goes on where numbers stay in their places."""
        known = [mark for mark in marks if mark is not None and mark.index.shape == out.shape]
        if not known:
            return out
        best = min(known, key=lambda mark: RANKS.index(mark.kind))
        ends = ("add", "sub", "rsub")
        others = any(
            carries(x) and (mark is None or (mark.kind, mark.path) != (best.kind, best.path))
            for x, mark in zip(args, marks, strict=True)
        )
        if name in ends and others and best.kind != "scores":  # to which a bias that is learned may be added
            return out
        return _with(out, best)

    # -------------------------------------------------------------------- result

    def found(self) -> Iterator[Place]:
        """The places, those of no layer and of another width than their layer's left out."""
        numbers = self._numbers()
        whole = {path for place, _, _, (path, _) in self._seen if place.kind != "residual"}
        done = set()
        for place, wide, rows, layer in self._seen:
            shape = self._rows.get(layer)
            if shape is None or (place.kind == "residual" and layer[0] not in whole):
                continue
            given = self._given[layer]
            if wide == given[-1] and rows == given.numel() // wide:  # a stage may make them wider and fewer at its end
                shape = given
            if wide and wide != shape[-1]:
                continue
            if rows and rows != shape.numel() // shape[-1]:  # as of an expert, which is given some of the tokens
                self.inside.setdefault(place.kind, place.path)
                self._inside += [(place.path, wide)] if place.kind == "neurons" else []
                continue
            if place.side == "output" and place.kind != "residual" and not self._is_given(place):
                self.inside.setdefault(place.kind, place.path)
                continue
            if place.kind in ("neurons", "heads"):
                units = self._units[place.path, place.call]
                place = self._whole(place)
                if any(_is_same(x, units) for (path, _), x in self._units.items() if not _is_in(path, place.path)):
                    self.inside.setdefault(place.kind, place.path)
                    self._inside += [(place.path, wide)] if place.kind == "neurons" else []
                    continue
            each = [replace(place, layer=numbers[layer], calls=self.calls[place.path], stack=stack_of(layer[0]))]
            if place.kind in ("neurons", "heads"):
                branch: Kind = "mlp" if place.kind == "neurons" else "attention"
                each.append(replace(each[0], side="output", kind=branch, width=1, size=wide))
            for one in each:
                if one not in done:  # keys that several heads read
                    done.add(one)
                    yield one

    def _is_given(self, place: Place) -> bool:
        """Whether a module gives what was read: torch's attention makes queries, keys and values inside, and gives
        another product."""
        at = place.path, place.call
        return place.path in self._gives and all(each is self._products.get(at) for each in self._read.get(at, ()))

    def experts(self, known: Collection[str]) -> tuple[str, ...]:
        """Where neurons are computed that no module takes or gives for all tokens, and what they give is as wide as
        their layer, or as the embeddings, of which hyper-connections make a wider stream; but for paths at which
        others are known."""
        widths = {shape[-1] for shape in self._rows.values()} | self._embedded
        return tuple({path: None for path, wide in self._inside if wide in widths and path not in known})

    def _numbers(self) -> dict[tuple[str, int], int]:
        """The number of each layer's call: the layer's own; of a list whose layers run several times, of the run."""
        again = {stack_of(path) for path, call in self._rows if call}
        runs: Counter[str] = Counter()
        found = {}
        for path, call in self._rows:
            layer, stack = layer_of(path), stack_of(path)
            assert layer is not None
            found[path, call] = runs[stack] if stack in again else layer.number
            runs[stack] += 1
        return found


def _heads_of(index: Tensor, columns: Sequence[int]) -> int:
    """Of how many heads some features are: ``index`` ``[…, H, T, n]`` or ``[…, H, n, T]`` says which stand where."""
    blocks = index.reshape(-1, *index.shape[-2:])
    each = list(dict.fromkeys(tuple(sorted(set(one.flatten().tolist()))) for one in blocks))
    return len(each) if [i for one in each for i in one] == list(columns) and len({*map(len, each)}) == 1 else 0


def _layer(path: str) -> str:
    layer = layer_of(path)
    return path if layer is None else layer.path


def stack_of(path: str) -> str:
    """The list that a module's layer is in.

    >>> stack_of("decoder.layers.3.mlp")
    'decoder.layers'
    """
    return _layer(path).rpartition(".")[0]


def _is_in(path: str, holder: str) -> bool:
    """Whether a module is another, or is in it."""
    return f"{path}.".startswith(f"{holder}.")


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two are one, but for how many dimensions there are before the last."""
    return one.numel() == other.numel() and one.shape[-1] == other.shape[-1] and one.data_ptr() == other.data_ptr()


def _is_picked(call: Call, out: Any) -> bool:
    """Whether a call picks rows among the tokens by their numbers, or computes with such rows.

    Those that a mask picks, or a slice, stay in order: of these there are as many as tokens where they are all.
    """
    if not isinstance(out, Tensor) or out.ndim != 2 or not carries(out) or not call.args:
        return False
    if any(isinstance(x, Tensor) and PICKED in vars(x) and len(x) == len(out) for x in call.args):
        return not call.name.startswith(PUTS) or call.name in PICKS
    x = call.args[0]
    if call.name not in PICKS or not isinstance(x, Tensor) or not carries(x) or x.ndim < 2:
        return False
    given = [*call.args[1:], *call.kwargs.values()]
    if call.name == "__getitem__":
        given = list(given[0][: x.ndim - 1]) if isinstance(given[0], tuple) else given
    elif 0 not in [each for each in given if isinstance(each, int)]:
        return False
    return any(
        isinstance(each, Tensor) and each.ndim > 0 and each.dtype in (torch.int32, torch.int64) for each in given
    )


def _is_list(args: Sequence[Any]) -> bool:
    return bool(args) and isinstance(args[0], (list, tuple)) and all(isinstance(x, Tensor) for x in args[0])


def _guards(call: Call) -> bool:
    """Whether a clamp leaves alone what is near 0, as one that keeps half precision from overflowing, or queries small:
    it makes no neurons, as one from 0 up does, which is a ReLU."""
    names = ("max",) if call.name.startswith("clamp_max") else ("min", "max")
    given = dict(zip(names, call.args[1:], strict=False)) | call.kwargs
    low, high = given.get("min"), given.get("max")
    return (low is None or bool(torch.as_tensor(low < 0).all())) and (
        high is None or bool(torch.as_tensor(high > 0).all())
    )


def _is_weight(x: Any) -> bool:
    return isinstance(x, Tensor) and x.ndim == 2 and not carries(x)
