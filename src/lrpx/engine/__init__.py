"""The engine: run the user's own model under a recipe, and trace where the relevance goes."""

from lrpx.engine.places import Ran, Source
from lrpx.engine.running import propagate
from lrpx.engine.taps import Call, Running, Tap
from lrpx.engine.trace import Trace

__all__ = ["Call", "Ran", "Running", "Source", "Tap", "Trace", "propagate"]
