"""Where the overrides of a recipe hold: paths of modules, and the layers they are in."""

from __future__ import annotations

import re
from collections import Counter
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from lrpx._kinds import shown
from lrpx._modules import layer_of, layers
from lrpx.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from lrpx.recipes import Override, Recipe


def covers(override: Override, path: str) -> bool:
    """Whether an override names a module by its path and layer."""
    layer = layer_of(path)
    return override.covers(path, None if layer is None else layer.number)


def _around(path: str) -> list[str]:
    """The modules around one, from the outermost, and itself."""
    return ["", *(path[: match.start()] for match in re.finditer(r"\.", path)), path] if path else [path]


def _covered(override: Override, path: str) -> list[str]:
    """The modules around one, from the outermost, and itself, as far as an override covers them."""
    return [place for place in _around(path) if covers(override, place)]


def begins(override: Override, path: str, lists: Collection[str]) -> bool:
    """Whether an override covers a module, by itself or by a list around it, but no module around it that is called.

    Args:
        override: the override.
        path: of the module.
        lists: the paths of modules that are never called, such as ``torch.nn.ModuleList``.
    """
    covered = _covered(override, path)
    if not covered or path in lists:
        return False
    return all(place in lists for place in _around(path)[:-1] if len(place) >= len(covered[0]))


def recipe_in(recipe: Recipe, path: str) -> Recipe:
    """The recipe in a module: every override that covers it or a module around it, the later over the earlier."""
    for override in recipe.overrides:
        if _covered(override, path):
            recipe = recipe.with_rules(override.rules)
    return recipe


def refuse_unmet(recipe: Recipe, path: str, kind: str, place: str) -> None:
    """Refuse an override that names modules and changes the rule of a kind of layer there, where a layer in them has
    an earlier rule by its place, for that would hold all the same.

    Args:
        recipe: with the overrides.
        path: of the module that the layer is, or is in.
        kind: of the layer, ``"linear"`` or ``"convolution"``.
        place: what it is to the model, one of :data:`lrpx._kinds.PLACES`, which the recipe has a rule for.

    Raises:
        MethodError: names the override and the layer.
    """
    unmet = None
    for override in recipe.overrides:
        kinds = dict(override.rules)
        if (kind in kinds or place in kinds) and _covered(override, path):
            unmet = None if place in kinds or override.path == "*" else override
    if unmet is not None:
        raise MethodError(
            f"{unmet.description!r} would change nothing at {path}: the recipe has a rule for such a layer, "
            f"{place}={shown(recipe.rule(place))}, which holds in the place of the one for {kind}; pass {place}= there "
            f"too, a rule or None for that of {kind}, or name modules without such a layer"
        )


def refuse_lost(recipe: Recipe, replayed: Sequence[str]) -> None:
    """Refuse overrides that begin at or around a module that checkpoints itself, for its replay would not have them.

    Raises:
        MethodError: names the first.
    """
    for override in recipe.overrides:
        if any(_covered(override, path) for path in replayed):
            raise MethodError(
                f"the model's own gradient checkpointing would lose the rules of {override.description!r} when it runs "
                "its layers again; disable it, and use lrpx.propagate(model, recipe, recompute=True)"
            )


def refuse_shared(recipe: Recipe, paths: Sequence[str], lists: Collection[str]) -> None:
    """Refuse layers that are some of the places of one module, for it has the same rules at all of them.

    Raises:
        MethodError: names two of the places.
    """
    within = [path for path in paths if layer_of(path) is not None]
    for override in recipe.overrides:
        if override.layers is None or not any(begins(override, path, lists) for path in within):
            continue
        one = next(path for path in within if _covered(override, path))
        other = next((path for path in within if not _covered(override, path)), None)
        if other is not None:
            raise MethodError(
                f"{one} is one module with {other}, and has the same rules at both places, of which {override.where!r} "
                "names one; name both or none"
            )


class Runs:
    """Counts the calls of a model's layers in one forward pass, where overrides name layers by number: of layers that
    run several times the number is that of the run, and a module has the same rules in all of them.

    Args:
        recipe: with the overrides.
        paths: of the model's modules.
    """

    def __init__(self, recipe: Recipe, paths: Collection[str]) -> None:
        self._overrides: dict[str, list[Override]] = {}
        for override in recipe.overrides:
            if override.layers is not None:
                inside = {layer for path in paths if fnmatchcase(path, override.path) and (layer := layer_of(path))}
                for layer in inside:
                    self._overrides.setdefault(layer.path, []).append(override)
        self._layers = frozenset(layers(paths) if self._overrides else ())
        self.begin()

    def begin(self) -> None:
        """A forward pass begins."""
        self._of_list: Counter[str] = Counter()
        self._of_layer: Counter[str] = Counter()
        self._again: set[str] = set()

    def of(self, paths: Sequence[str]) -> Iterator[str]:
        """The layers that a module is, by its paths."""
        return (path for path in paths if path in self._layers)

    def meet(self, places: Sequence[str]) -> None:
        """A layer is called, which stands at these places.

        Raises:
            MethodError: an override would hold in some of its runs, and not in others.
        """
        path = places[0]
        layer = layer_of(path)
        assert layer is not None
        of = path.rpartition(".")[0]
        run = self._of_list[of]
        self._of_list[of] += 1
        self._of_layer[path] += 1
        if self._of_layer[path] > len(places):
            self._again.add(of)
        if of not in self._again:
            return
        for override in self._overrides.get(path, ()):
            assert override.layers is not None
            if (run in override.layers) != (layer.number in override.layers):
                raise MethodError(
                    f"{override.where!r} names some runs of {path}, which runs several times, and a module has the "
                    "same rules in all of them; leave the layers out, or name it by its path alone"
                )


class Passed:
    """Finds the modules whose rules would be nothing, for they are never called in a forward pass where something in
    them is: the model runs them by their ``forward``, or by another method, which no hook sees.

    Args:
        begins: the paths of the modules where an override begins.
    """

    def __init__(self, begins: Collection[str]) -> None:
        self._begins = begins
        self.begin()

    def begin(self) -> None:
        """A forward pass begins."""
        self._called: set[str] = set()
        self._inside: set[str] = set()

    def concerns(self, paths: Sequence[str]) -> bool:
        """Whether a module's calls matter, by its paths."""
        return any(place in self._begins for path in paths for place in _around(path))

    def meet(self, paths: Sequence[str]) -> None:
        """A module is called, which stands at these paths. One of several may be called for another place's sake."""
        self._called.update(paths)
        if len(paths) == 1:
            self._inside.update(paths)

    def refuse(self) -> None:
        """The forward pass is over.

        Raises:
            MethodError: names the first such module.
        """
        for path in self._begins:
            if path in self._called:
                continue
            inside = next((each for each in sorted(self._inside) if each.startswith(f"{path}.")), None)
            if inside is not None:
                raise MethodError(
                    f"an override begins at {path}, which the model does not call, while it calls {inside}: it runs "
                    f"{path} by its forward() or another method, or part by part, where no rules can be changed; name "
                    f"what is called in it, {path}.*, or write {path}(...) in the model"
                )
