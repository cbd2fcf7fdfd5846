"""Slow twins of the methods that Captum does for us: the model is called with ``inputs_embeds``, row by row."""

from __future__ import annotations

from itertools import combinations
from math import comb

import numpy as np
import torch


def value_and_gradient(model, read, embedded):
    """``f`` and ``∂f`` at embeddings ``[T, d]``."""
    x = embedded.clone().requires_grad_()
    value = read(model(inputs_embeds=x[None]))
    (gradient,) = torch.autograd.grad(value, x)
    return float(value.detach()), gradient


def value(model, read, embedded):
    with torch.no_grad():
        return float(read(model(inputs_embeds=embedded[None])))


def integrated_gradients(model, read, x, baseline, steps):
    """``Σ_d (x − x₀) Σ_k w_k ∂f(x₀ + α_k (x − x₀))``, nodes and weights of Gauss and Legendre on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(steps)
    total = torch.zeros_like(x)
    for node, weight in zip(nodes, weights, strict=True):
        point = baseline + (node + 1) / 2 * (x - baseline)
        total += weight / 2 * value_and_gradient(model, read, point)[1]
    return ((x - baseline) * total).sum(-1)


def occlusion(model, read, x, baseline):
    whole = value(model, read, x)
    found = []
    for i in range(len(x)):
        changed = x.clone()
        changed[i] = baseline[i]
        found.append(whole - value(model, read, changed))
    return torch.tensor(found, dtype=torch.float64)


def mean_gradient(model, read, points):
    return torch.stack([value_and_gradient(model, read, point)[1] for point in points]).mean(0)


def of_set(model, read, x, baseline, kept):
    """``f`` with the baseline in place of all tokens that are not kept."""
    changed = baseline.clone()
    for i in kept:
        changed[i] = x[i]
    return value(model, read, changed)


def shapley(model, read, x, baseline):
    """Exact Shapley values over all sets of tokens."""
    count = len(x)
    values = {
        kept: of_set(model, read, x, baseline, kept) for n in range(count + 1) for kept in combinations(range(count), n)
    }
    found = []
    for i in range(count):
        total = 0.0
        for kept, before in values.items():
            if i not in kept:
                after = values[tuple(sorted((*kept, i)))]
                total += (after - before) / (count * comb(count - 1, len(kept)))
        found.append(total)
    return torch.tensor(found, dtype=torch.float64)


def least_squares(masks, values):
    """Weighted least squares of values on masks, with an intercept; the full and the empty set count 10⁶ times."""
    masks = np.asarray(masks, dtype=float)
    full = masks.sum(1)
    weights = np.sqrt(np.where((full == 0) | (full == masks.shape[1]), 1e6, 1.0))
    design = np.concatenate([np.ones((len(masks), 1)), masks], 1)
    found, *_ = np.linalg.lstsq(design * weights[:, None], np.asarray(values) * weights, rcond=None)
    return found[1:]
