"""A slow twin of the blur that covers a cell: a Gaussian of a tenth of the side, one axis after the other."""

from __future__ import annotations

import math


def _axis(values):
    side = len(values)
    found = []
    for at in range(side):
        weights = [math.exp(-((at - other) ** 2) / (2 * (side / 10) ** 2)) for other in range(side)]
        found.append(sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights))
    return found


def blurred(image):
    """Of an image ``[row][column]``."""
    rows = [_axis(row) for row in image]
    columns = [_axis([row[j] for row in rows]) for j in range(len(rows[0]))]
    return [[columns[j][i] for j in range(len(columns))] for i in range(len(image))]
