"""The engine: run the user's own model under a recipe, and trace where the relevance goes."""

from lrpx.engine.running import propagate
from lrpx.engine.trace import Source, Trace

__all__ = ["Source", "Trace", "propagate"]
