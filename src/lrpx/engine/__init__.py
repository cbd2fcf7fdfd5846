"""The engine: run the user's own model under a recipe, and trace where the relevance goes."""

from lrpx.engine._places import Ran, Source
from lrpx.engine._positions import Positions
from lrpx.engine._running import propagate
from lrpx.engine._taps import Call, Running, Tap
from lrpx.engine._trace import Trace

__all__ = ["Call", "Positions", "Ran", "Running", "Source", "Tap", "Trace", "propagate"]
