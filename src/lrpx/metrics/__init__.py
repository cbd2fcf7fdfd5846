"""How good explanations are: against a ground truth, and what their means are worth."""

from lrpx.metrics._ground_truth import METRICS, metric, mrr, pg, pta, rma
from lrpx.metrics._metric import Metric
from lrpx.metrics._statistics import holm, interval, paired_test

__all__ = ["METRICS", "Metric", "holm", "interval", "metric", "mrr", "paired_test", "pg", "pta", "rma"]
