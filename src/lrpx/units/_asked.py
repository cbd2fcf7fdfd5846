"""What is asked of a model's units: where they are, and what is known of the modules there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lrpx._modules import layer_of
from lrpx.errors import LRPxError, MethodError
from lrpx.units._looking import found_at, found_in
from lrpx.units._place import KINDS, TITLES, Kind, Place, is_in, own_paths

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch.nn import Module

    from lrpx.engine._places import Side


class NoUnitsError(MethodError):
    """A model has no units of a kind, as far as is seen, and none that are refused."""


def places(model: Module, kind: Kind, inputs: Mapping[str, Any] | None = None) -> tuple[Place, ...]:
    """The places of all units of a kind, in the order of the forward pass.

    The model is run once, under no recipe; what was found is kept with it, as long as it and the inputs are the same.

    Args:
        model: a model in eval mode.
        kind: one of :data:`KINDS`.
        inputs: an example of what its forward pass takes; a few tokens by default, or an empty image.

    Raises:
        MethodError: there are none, or the model computes some of them inside a module (experts in one tensor), where
            nothing can be read or written; or some queries, keys or values are those of no linear layer,
            or the heads of some attention are not side by side for all tokens, or a layer has none where the modules of
            another have some.
        ModelError: it is in training mode, or nobody knows what it takes.

    >>> from lrpx.model import Spec
    >>> found = places(Spec().build().module, "neurons")
    >>> len(found), found[0].path, found[0].width
    (6, 'model.layers.0.mlp.down_proj', 704)
    """
    if kind not in KINDS:
        raise MethodError(f"there are no units called {kind!r}; pass one of {', '.join(KINDS)}")
    found = found_in(model, inputs)
    chosen = tuple(place for place in found.places if place.kind == kind)
    if chosen and kind in ("neurons", "mlp") and found.experts:
        raise MethodError(
            f"{type(model).__name__} computes some of its {TITLES[kind]} inside {found.experts[0]}, where no module "
            "takes or gives them for all tokens, as with experts whose weights are one tensor or a second stream, or "
            "several layers read them, and others elsewhere; ask for other units, or for those alone that "
            f"{chosen[0].path} is given: "
            'trace.relevance(path, of="input"), lrpx.intervene of (path, "input")'
        )
    if chosen and kind in ("heads", "attention") and "heads" in found.unknown:
        raise MethodError(
            f"the heads that {found.unknown['heads']} of {type(model).__name__} makes or is given do not stand side by "
            f"side for all tokens where one linear layer takes them, and the {TITLES[kind]} of the other layers are "
            "not all; ask for other units, or for a module's relevance by its path: "
            'trace.relevance(path, of="input")'
        )
    if chosen and kind in found.unknown:
        raise MethodError(
            f"the {TITLES[kind]} of the attention in {found.unknown[kind]} of {type(model).__name__} are not seen to "
            "be what one linear layer gives, as where those of another layer are added to them, and those of the other "
            "layers are not all; ask for other units, or for a module's relevance by its path: trace.relevance(path)"
        )
    if chosen and kind == "residual" and found.double:
        raise MethodError(
            f"{found.double} of {type(model).__name__} is given two streams and gives both, and what stands behind a "
            "layer is not one of them alone; ask for other units, or for a module's relevance by its path: "
            "trace.relevance(path)"
        )
    if chosen and kind in found.unlike:
        raise MethodError(
            f"{found.unlike[kind]} of {type(model).__name__} is not seen to have {TITLES[kind]}, as the module of that "
            "name in another layer has, and those of the other layers are not all; ask for other units, or for a "
            "module's relevance by its path: trace.relevance(path)"
        )
    if not chosen:
        inside = found.inside.get("neurons" if kind == "mlp" else "heads" if kind == "attention" else kind)
        name = type(model).__name__
        if inside and kind == "residual" and inside in (found.inside.get("heads"), found.inside.get("neurons")):
            raise MethodError(
                f"{inside} of {name} is in no layer that is seen, as in a list of lists or one that gives no tensor "
                f"itself, and the {TITLES[kind]} that are seen are not all; ask for a module's relevance by its path: "
                "trace.relevance(path)"
            )
        if inside and kind == "residual":
            raise MethodError(
                f"the modules in {inside} of {name} are branches, which it adds to its stream itself, and none is a "
                "layer whose output is the stream; ask for attention or mlp, or for another module's relevance by its "
                "path: trace.relevance(path)"
            )
        if inside:
            raise MethodError(
                f"{name} computes its {TITLES[kind]} inside {inside}, where no module takes or gives them for all "
                "tokens, as with experts whose weights are one tensor, or several layers read them, as with a low-rank "
                "adapter in the block's own forward pass, or in a layer that gives no tensor itself, but what "
                "holds some; ask for other units"
            )
        raise NoUnitsError(
            f"no {TITLES[kind]} were found in {name}: none of its modules does what makes them (lrpx.units); ask for "
            "other units"
        )
    return chosen


def neurons_or_heads(model: Module, path: str) -> dict[str, Place]:
    """The modules at a path, or in the module there, at which latent neurons or heads are; none where some of these are
    computed inside of it (experts), and are at no module, or may be at another that has not run.

    Raises:
        ModelError: as :func:`places`.
    """
    found = found_at(model, path)
    if any(is_in(each, path) for each in found.experts):
        return {}
    there = [place for place in found.places if place.kind in ("neurons", "heads") and is_in(place.path, path)]
    if any(is_in(each, path) for each in unseen(model, there)):
        return {}
    inside: dict[str, Place] = {}
    for each in there:
        inside.setdefault(each.path, each)
    return inside


def calls_of(model: Module, path: str) -> int:
    """How often a module is called in one forward pass.

    Raises:
        ModelError: nobody knows what the model takes.
    """
    return found_at(model, path).calls[path]


def unseen(model: Module, chosen: Iterable[Place], *, beside: bool = False) -> tuple[str, ...]:
    """The modules like those of some places, which were not called when the model's units were looked for: other
    experts, or layers that were passed over; or those of the same layers alone (``beside``).

    Raises:
        ModelError: nobody knows what the model takes.
    """
    chosen = list(chosen)
    calls = found_at(model, chosen[0].path).calls if chosen else {}
    alike = {(_alike(place.path), layer_of(place.path) if beside else None) for place in chosen}
    return tuple(
        path
        for path, own in own_paths(model).items()
        if path == own and calls.get(path, 0) == 0 and (_alike(path), layer_of(path) if beside else None) in alike
    )


def is_turned(model: Module, path: str, side: Side) -> bool | None:
    """Whether a module takes, or gives, the tokens before the rows, ``[T, B, n]``; None where nobody knows what the
    model takes."""
    try:
        return (own_paths(model)[path], side) in found_at(model, path).turned
    except LRPxError:
        return None


def apart_of(model: Module, path: str, side: Side) -> int:
    """How many places there were of what a module takes or gives, where these were not as many as the tokens when the
    model's units were looked for, as of latents; else 0, also where nobody knows what the model takes."""
    try:
        return found_at(model, path).apart.get((own_paths(model)[path], side), 0)
    except LRPxError:
        return 0


def is_picked(model: Module, path: str, side: Side) -> bool:
    """Whether a module, or another expert beside it, takes or gives rows that were picked among the tokens by their
    numbers, in whatever order; False where nobody knows what the model takes."""
    try:
        picked = found_at(model, path).picked
        return (_alike(own_paths(model)[path]), side) in {(_alike(each), its) for each, its in picked}
    except LRPxError:
        return False


def _alike(path: str) -> str:
    """A path without the numbers in it, the same of all experts.

    >>> _alike("layers.0.experts.3.up")
    'layers.#.experts.#.up'
    """
    return ".".join("#" if each.isdigit() else each for each in path.split("."))
