"""How good explanations are: against a ground truth, or by what a model says of hidden tokens; what means are worth."""

from lrpx.metrics._ground_truth import ANSWERS, METRICS, iou, metric, mrr, pg, pta, rma, top1
from lrpx.metrics._images import IMAGE_METRICS, MOSAIC_METRICS, SetMetric
from lrpx.metrics._metric import Metric
from lrpx.metrics._perturbation import PERTURBATION_METRICS, Curve, Given, PerturbationMetric, perturbation_metric
from lrpx.metrics._statistics import holm, interval, paired_test

__all__ = [
    "ANSWERS",
    "IMAGE_METRICS",
    "METRICS",
    "MOSAIC_METRICS",
    "PERTURBATION_METRICS",
    "Curve",
    "Given",
    "Metric",
    "PerturbationMetric",
    "SetMetric",
    "holm",
    "interval",
    "iou",
    "metric",
    "mrr",
    "paired_test",
    "perturbation_metric",
    "pg",
    "pta",
    "rma",
    "top1",
]
