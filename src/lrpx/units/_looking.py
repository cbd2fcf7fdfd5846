"""A model runs once on a few tokens, so that its units are known; what was found is kept with it."""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks

from lrpx import tasks
from lrpx._hooks import hooks
from lrpx._kept import as_it_was
from lrpx._modules import adapted_layers, layers, named_modules
from lrpx.engine import propagate
from lrpx.engine._book import storage_of
from lrpx.engine._observer import first_given, first_tensor
from lrpx.engine._running import CACHES, is_running
from lrpx.engine._settings import Settings
from lrpx.engine._tensors import any_carries
from lrpx.errors import LRPxError, ModelError
from lrpx.recipes import GRADIENT
from lrpx.units._follower import Follower
from lrpx.units._place import Kind, Place, own_paths

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.nn import Module

    from lrpx.engine._places import Side

LENGTHS = (5, 4, 3, 6, 7, 9)
"""On so many tokens a model is run to find its units: the first of which it has no rows of weights. It may have
positions of five."""


@dataclass(frozen=True)
class _Found:
    places: tuple[Place, ...]
    inside: dict[str, str]
    unknown: dict[Kind, str]
    unlike: dict[Kind, str]
    experts: tuple[str, ...]
    calls: Mapping[str, int]
    turned: frozenset[tuple[str, Side]]
    picked: frozenset[tuple[str, Side]]
    apart: Mapping[tuple[str, Side], int]
    double: str = ""


@dataclass
class _Kept:
    """What was found in a model as long as nothing in it is another.

    Attributes:
        built: what its units hang on.
        alone: what was found on a few tokens.
        given: what was found on the inputs that its user gave last, and the names and numbers of these.
        inputs: these inputs, or none.
    """

    built: tuple[Any, ...]
    alone: _Found | None = None
    given: tuple[Any, _Found] | None = None
    inputs: Mapping[str, Any] | None = None


_known: weakref.WeakKeyDictionary[Module, _Kept] = weakref.WeakKeyDictionary()
_with_tokens: weakref.WeakKeyDictionary[Module, dict[object, tuple[object, frozenset[tuple[str, Side]]]]] = (
    weakref.WeakKeyDictionary()
)
_looking = threading.local()


def is_looking() -> bool:
    """Whether this thread runs a model to find its units, and not for its user."""
    return getattr(_looking, "now", False)


def found_in(model: Module, inputs: Mapping[str, Any] | None) -> _Found:
    """What is found in a model that is run on these inputs, or on a few tokens; where it cannot be run on these, on
    what its user gave it last."""
    known = _kept(model)
    if inputs is not None:
        return _found_on(model, known, inputs)
    if known.alone is None:
        try:
            known.alone = _look(model, example(model))
        except ModelError:
            if known.inputs is None:
                raise
            known.alone = _found_on(model, known, known.inputs)
    return known.alone


def found_at(model: Module, path: str) -> _Found:
    """What is found in a model where a module was called, if it was in any of the runs that were made."""
    found, known = found_in(model, None), _kept(model)
    is_elsewhere = known.given is not None and not found.calls.get(path) and known.given[1].calls.get(path)
    return known.given[1] if known.given is not None and is_elsewhere else found


def _kept(model: Module) -> _Kept:
    known = _known.get(model)
    if known is not None and is_running():  # which may count its calls as it runs
        return known
    built = _built(model)
    if known is None or known.built != built:
        _known[model] = known = _Kept(built, inputs=None if known is None else known.inputs)
    return known


def _found_on(model: Module, known: _Kept, inputs: Mapping[str, Any]) -> _Found:
    key = Settings().of(dict(inputs))
    if known.given is None or known.given[0] != key:
        known.given, known.inputs = (key, _look(model, inputs)), inputs
    return known.given[1]


def _built(model: Module) -> tuple[Any, ...]:
    """What a model's units hang on: its modules, how wide they are, what its user has put into it, and the flags and
    numbers of its config and of modules of one's own, as of its layers and heads."""
    modules = named_modules(model)
    shapes = [[each.shape for each in module._parameters.values() if each is not None] for _, module in modules]
    paths = [(path, type(module)) for path, module in modules]
    return paths, shapes, tasks.changes(model), tasks.flags(model, numbers=True)


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
    counts = {each.shape[-2] for each in model.parameters() if each.ndim > 1}  # latents, say: they are no tokens
    length = next((each for each in LENGTHS if each not in counts), LENGTHS[0])
    ids = torch.arange(length, device=device)[None] % len(weight)  # that of the token embedding
    end = tasks.end_read(model, tasks.Task.CLASSIFICATION)
    if end is not None:  # which a classifier reads, and at one place
        ids = torch.where(ids == end, end - 1 if end else 1, ids)
        ids[0, -1] = end
    found: dict[str, Any] = {"input_ids": ids}
    is_both = getattr(config, "is_encoder_decoder", config is None and tasks.accepts(model, "decoder_input_ids"))
    if is_both and "SequenceClassification" not in type(model).__name__:
        found["decoder_input_ids"] = ids[:, :-1]
    if tasks.accepts(model, "use_cache"):
        found["use_cache"] = False
    return found


def _look(model: Module, inputs: Mapping[str, Any]) -> _Found:
    if model.training or tasks.active_dropout(model):
        raise ModelError(f"{type(model).__name__} is in training mode; call model.eval()")
    own = own_paths(model)
    follower = Follower(own, map(storage_of, model.parameters()), adapted_layers(model))
    double: list[str] = []

    def left(path: str) -> Callable[..., Any]:
        def after(_: Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if _gives_two_streams([*args, *kwargs.values()], output):
                double.append(path)

        return after

    with (
        _now_looking(),
        as_it_was(model),
        propagate(model, GRADIENT, (), taps=[follower]),
        hooks() as on,
    ):
        for path in layers(own):
            on.after(model.get_submodule(path), left(path), with_kwargs=True)
        try:
            model(**inputs)
        except Exception as error:
            if isinstance(error, LRPxError):
                raise
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelError(
                f"{type(model).__name__} cannot be run to find its units ({first}); pass an example of what it takes, "
                "places(model, kind, inputs={…})"
            ) from error
    found = tuple(follower.found())
    experts = follower.experts({place.path for place in found if place.kind == "neurons"})
    return _Found(
        found,
        follower.inside,
        follower.unknown,
        follower.unlike,
        experts,
        follower.calls,
        turned=frozenset(follower.turned),
        picked=frozenset(follower.picked),
        apart=follower.apart,
        double=double[0] if double else "",
    )


def _gives_two_streams(given: Sequence[Any], output: Any) -> bool:
    """Whether a layer is given two streams and gives both, changed, as TNT's of pixels and of patches."""
    if not isinstance(output, (tuple, list)):
        return False
    given = [x for x in given if isinstance(x, Tensor) and x.ndim > 2 and any_carries(x)]
    made = [x for x in output if isinstance(x, Tensor) and any_carries(x) and not any(x is each for each in given)]
    shapes = [each.shape for each in given if made and each.ndim == made[0].ndim]  # a bias of scores is no stream
    found = 0
    for x in made:
        if x.shape in shapes:
            shapes.remove(x.shape)
            found += 1
    return found > 1


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
        return lambda module, args, kwargs: look(path, "input", first_given(module, args, kwargs))

    def left(path: str) -> Callable[..., Any]:
        def after(_: Module, args: Any, output: Any) -> Any:
            is_table = path in tables and args and first_tensor(args) is None and isinstance(output, Tensor)
            found = begin(output) if is_table else None
            look(path, "output", first_tensor(output) if found is None else found)
            return found

        return after

    with (
        _now_looking(),
        as_it_was(model),
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


def has_turned(model: Module) -> bool:
    """Whether some module of a model whose units were looked for takes or gives the tokens before the rows."""
    known = _known.get(model)
    found = [] if known is None else [known.alone, *(known.given or ())[1:]]
    return any(each is not None and each.turned for each in found)


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
    if is_running():
        return known[key][1] if key in known else frozenset()
    now = tasks.changes(model), tasks.flags(model)
    if key not in known or known[key][0] != now:
        known[key] = now, _look_for_tokens(model, own, inputs)
    return known[key][1]
