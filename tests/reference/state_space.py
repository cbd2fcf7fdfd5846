"""A selective state-space model as the recurrence it is, and its relevance term by term, in plain loops.

``h_t = exp(Δ_t A) h_{t−1} + Δ_t B_t x_t`` and ``y_t = C_t h_t + D x_t`` (Gu and Dao 2023, Eq. 2), with
``Δ = softplus(dt + bias)``. Unrolled, ``y_t`` is a sum of products ``C_t B_s x_s Δ_s · exp(A Σ_{s<r≤t} Δ_r)``: each of
the four factors gets a quarter of its relevance (Achtibat et al. 2024, Prop. 3.3), the decay none (Jafari et al. 2024),
and the softplus hands on what it gets. Under CP-LRP ``Δ``, a positive function, is a gate, and each of the others gets
a third.
"""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tests.reference.rules import Array


def softplus(x: Array) -> Array:
    return np.log1p(np.exp(-np.abs(x))) + np.maximum(x, 0)


def scan(x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array, bias: Array) -> Array:
    """``y`` ``[T, H, P]`` of ``x`` ``[T, H, P]``, ``dt`` ``[T, H]``, ``a`` ``[H, N]``, ``b`` and ``c`` ``[T, H, N]``,
    ``d`` and ``bias`` ``[H]``."""
    delta = softplus(dt + bias)
    y = np.zeros_like(x)
    state = np.zeros((*x.shape[1:], a.shape[1]))
    for t in range(len(x)):
        for h, p, n in itertools.product(*map(range, state.shape)):
            state[h, p, n] = math.exp(delta[t, h] * a[h, n]) * state[h, p, n] + delta[t, h] * b[t, h, n] * x[t, h, p]
            y[t, h, p] += c[t, h, n] * state[h, p, n]
        y[t] += d[:, None] * x[t]
    return y


def explain(
    x: Array, dt: Array, a: Array, b: Array, c: Array, d: Array, bias: Array, weights: Array, has_gates: bool
) -> dict[str, Array]:
    """The relevance of ``x``, ``dt``, ``b``, ``c`` and the bias for ``Σ weights · y``; under CP-LRP if it has gates."""
    sharing = 3 if has_gates else 4
    delta = softplus(dt + bias)
    r_x, r_delta, r_b, r_c = np.zeros_like(x), np.zeros_like(dt), np.zeros_like(b), np.zeros_like(c)
    for h, p in itertools.product(range(x.shape[1]), range(x.shape[2])):
        for t in range(len(x)):
            r_x[t, h, p] += weights[t, h, p] * d[h] * x[t, h, p]
            for s, n in itertools.product(range(t + 1), range(a.shape[1])):
                decay = math.exp(a[h, n] * delta[s + 1 : t + 1, h].sum())
                term = weights[t, h, p] * c[t, h, n] * b[s, h, n] * x[s, h, p] * delta[s, h] * decay
                r_x[s, h, p] += term / sharing
                r_delta[s, h] += 0 if has_gates else term / sharing
                r_b[s, h, n] += term / sharing
                r_c[t, h, n] += term / sharing
    share = dt / (dt + bias)
    return {"x": r_x, "dt": share * r_delta, "b": r_b, "c": r_c, "bias": ((1 - share) * r_delta).sum(0)}
