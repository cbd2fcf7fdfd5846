"""Slow twins of the metrics of images, from the papers, in plain loops."""

from __future__ import annotations

import math
from fractions import Fraction

from tests.reference.perturbation import area, curve_at, spaced


def tenths(relevance, value, *, most_first):
    """Chefer et al. 2021: the area under the points at 0.1, …, 0.9 of the cells, over its width."""
    counts = spaced(len(relevance), 10)
    counts = counts[1:-1] if len(counts) > 2 else counts
    heights = [curve_at(relevance, value, count, most_first=most_first) for count in counts]
    if len(counts) == 1:
        return heights[0]
    total = sum((a + b) / 2 * (q - p) for a, b, p, q in zip(heights, heights[1:], counts, counts[1:], strict=False))
    return total / (counts[-1] - counts[0])


def completeness_error(relevance, value):
    lost = value(frozenset()) - value(frozenset(range(len(relevance))))
    total = math.fsum(relevance)
    return 0.0 if total == 0 == lost else abs(total - lost) / (abs(total) + abs(lost))


PERTURBATION = {
    "positive perturbation": lambda r, f: tenths(r, f, most_first=True),
    "negative perturbation": lambda r, f: tenths(r, f, most_first=False),
    "A MoRF": lambda r, f: area(r, f, 10, True, False),
    "A LeRF": lambda r, f: area(r, f, 10, False, False),
    "ΔA": lambda r, f: area(r, f, 10, False, False) - area(r, f, 10, True, False),
    "deletion": lambda r, f: area(r, f, 10, True, False),
    "insertion": lambda r, f: area(r, f, 10, True, True),
    "completeness error": completeness_error,
}
"""``(relevance, value)``."""


def _classes(relevance, mask):
    """For each pixel, the class it is found to be and the class it is: 1 for the object."""
    mean = sum(map(Fraction, relevance)) / len(relevance)
    return [(int(Fraction(r) > mean), int(m)) for r, m in zip(relevance, mask, strict=True)]


def pixel_accuracy(images):
    pairs = [pair for image in images for pair in _classes(*image)]
    return sum(found == real for found, real in pairs) / len(pairs)


def mean_iou(images):
    pairs = [pair for image in images for pair in _classes(*image)]
    found = []
    for kind in (0, 1):
        union = sum(kind in pair for pair in pairs)
        found.append(sum(pair == (kind, kind) for pair in pairs) / union if union else 1.0)
    return sum(found) / 2


def average_precision(relevance, mask):
    """Over thresholds: at each level of relevance, precision times what it adds to the recall."""
    total, before = 0.0, 0
    for level in sorted(set(relevance), reverse=True):
        chosen = [m for r, m in zip(relevance, mask, strict=True) if r >= level]
        total += (sum(chosen) - before) / sum(mask) * sum(chosen) / len(chosen)
        before = sum(chosen)
    return total


SEGMENTATION = {
    "pixel accuracy": pixel_accuracy,
    "mIoU": mean_iou,
    "mAP": lambda images: sum(average_precision(*image) for image in images) / len(images),
}
"""Of images, each ``(relevance, mask)``."""


def quadrant_share(relevance, quadrant):
    """Of an image ``[row][column]``: the share of the positive relevance in a quadrant, 0 to 3 in reading order."""
    rows, columns = len(relevance), len(relevance[0])
    inside = total = 0.0
    for i in range(rows):
        for j in range(columns):
            mine = 2 * (i >= rows / 2) + (j >= columns / 2)
            total += max(relevance[i][j], 0.0)
            inside += max(relevance[i][j], 0.0) if mine == quadrant else 0.0
    return inside / total if total else 0.0


def quadrant_lead(relevance, quadrant):
    rows, columns = len(relevance), len(relevance[0])
    sums = [0.0] * 4
    for i in range(rows):
        for j in range(columns):
            sums[2 * (i >= rows / 2) + (j >= columns / 2)] += relevance[i][j]
    return (sums[quadrant] == max(sums)) / sums.count(max(sums))
