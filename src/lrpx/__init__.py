"""LRPx: why did the transformer predict this?

Decomposes a prediction's logit over tokens, positions, heads and neurons of your own, unmodified model.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Any

    from lrpx.attribution import Attribution
    from lrpx.attributions import Attributions
    from lrpx.engine import Tap, Trace, propagate
    from lrpx.errors import LRPxError
    from lrpx.explainer import Explainer
    from lrpx.interventions import Add, Along, Clamp, Patch, Scale, Set, intervene
    from lrpx.ledger import Ledger
    from lrpx.methods import METHODS, Method, register
    from lrpx.parts import Part
    from lrpx.recipes import ATTNLRP, GRADIENT, LRP, Recipe
    from lrpx.rules import Epsilon, Gamma, ZPlus
    from lrpx.targets import Contrast, Logit, LogProb, Margin, Similarity, Span, Target
    from lrpx.tasks import Task

__version__ = "0.1.0"

__all__ = [
    "ATTNLRP",
    "GRADIENT",
    "LRP",
    "METHODS",
    "Add",
    "Along",
    "Attribution",
    "Attributions",
    "Clamp",
    "Contrast",
    "Epsilon",
    "Explainer",
    "Gamma",
    "LRPxError",
    "Ledger",
    "LogProb",
    "Logit",
    "Margin",
    "Method",
    "Part",
    "Patch",
    "Recipe",
    "Scale",
    "Set",
    "Similarity",
    "Span",
    "Tap",
    "Target",
    "Task",
    "Trace",
    "ZPlus",
    "intervene",
    "propagate",
    "register",
]

_HOMES = {
    "attribution": "Attribution",
    "attributions": "Attributions",
    "engine": "Tap Trace propagate",
    "errors": "LRPxError",
    "explainer": "Explainer",
    "interventions": "Add Along Clamp Patch Scale Set intervene",
    "ledger": "Ledger",
    "methods": "METHODS Method register",
    "parts": "Part",
    "recipes": "ATTNLRP GRADIENT LRP Recipe",
    "rules": "Epsilon Gamma ZPlus",
    "targets": "Contrast Logit LogProb Margin Similarity Span Target",
    "tasks": "Task",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """A public name, or a public module, from where it lives, when it is first asked for: torch takes a second to
        import, and ``lrpx --help`` does not need it."""
        if name in _HOME:
            globals()[name] = getattr(import_module(f"lrpx.{_HOME[name]}"), name)
            return globals()[name]
        if name.isidentifier() and not name.startswith("_") and find_spec(f"lrpx.{name}") is not None:
            return import_module(f"lrpx.{name}")
        raise AttributeError(f"module 'lrpx' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
