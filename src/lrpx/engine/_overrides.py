"""Where the overrides of a recipe hold: paths of modules, and the layers they are in."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lrpx._modules import layer_of
from lrpx.errors import MethodError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lrpx.recipes import Override, Recipe


def covers(override: Override, path: str) -> bool:
    """Whether an override names a module by its path and layer."""
    layer = layer_of(path)
    return override.covers(path, None if layer is None else layer.number)


def _covered(override: Override, path: str) -> list[str]:
    """The modules around one, from the outermost, and itself, as far as an override covers them."""
    around = ["", *(path[: match.start()] for match in re.finditer(r"\.", path))] if path else []
    return [place for place in (*around, path) if covers(override, place)]


def begins(override: Override, path: str) -> bool:
    """Whether an override covers a module but none of the modules around it."""
    return covers(override, path) and _covered(override, path) == [path]


def recipe_in(recipe: Recipe, path: str) -> Recipe:
    """The recipe in a module: every override that covers it or a module around it, the later over the earlier."""
    for override in recipe.overrides:
        if _covered(override, path):
            recipe = recipe.with_rules(override.rules)
    return recipe


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
