"""How good explanations are: against a ground truth, and what their means are worth."""

from lrpx.metrics.metric import Metric

__all__ = ["Metric"]
