"""LRPx: why did the transformer predict this?

Decomposes a prediction's logit over tokens, positions, heads and neurons of your own, unmodified model.
"""

from lrpx.attribution import Attribution
from lrpx.attributions import Attributions
from lrpx.engine import Tap, Trace, propagate
from lrpx.errors import LRPxError
from lrpx.explainer import Explainer
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
    "Attribution",
    "Attributions",
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
    "Recipe",
    "Similarity",
    "Span",
    "Tap",
    "Target",
    "Task",
    "Trace",
    "ZPlus",
    "propagate",
    "register",
]
