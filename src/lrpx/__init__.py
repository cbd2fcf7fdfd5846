"""LRPx: why did the transformer predict this?

Decomposes a prediction's logit over tokens, positions, heads and neurons of your own, unmodified model.
"""

from lrpx.attribution import Attribution
from lrpx.engine import Trace, propagate
from lrpx.errors import LRPxError
from lrpx.explainer import Explainer
from lrpx.recipes import ATTNLRP, GRADIENT, LRP, Recipe
from lrpx.targets import Contrast, Logit, LogProb, Margin

__version__ = "0.1.0"

__all__ = [
    "ATTNLRP",
    "GRADIENT",
    "LRP",
    "Attribution",
    "Contrast",
    "Explainer",
    "LRPxError",
    "LogProb",
    "Logit",
    "Margin",
    "Recipe",
    "Trace",
    "propagate",
]
