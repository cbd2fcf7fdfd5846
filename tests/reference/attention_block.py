"""Attention as one function of its scores and values, explained by its Aumann–Shapley value: plain loops and integrals.

Notation, for one head: scores ``z_ij = s q_i·k_j + b_ij`` where ``j`` is admitted, ``o_i = Σ_j A_ij v_j`` with
``A_ij = exp z_ij / Σ_k exp z_ik``; ``g_i`` is the gradient that arrives at ``o_i``, so that its relevance is
``o_i ⊙ g_i``. On the way from nothing, ``A(α)`` are the weights of the scores ``αz``, and ``o(α)`` what they make of
``v``.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import quad

Array = NDArray[np.float64]


def scores(q: Array, k: Array, bias: Array, scale: float) -> Array:
    """``z_ij = s q_i·k_j + b_ij``; ``b_ij = −∞`` where ``j`` is not admitted."""
    z = np.array(bias, dtype=float)
    for i in range(len(q)):
        for j in range(len(k)):
            z[i, j] += scale * sum(q[i, d] * k[j, d] for d in range(q.shape[1]))
    return z


def weights(z: Array, alpha: float) -> Array:
    """``A_ij(α)``, for one row of scores; what is not admitted has none."""
    raised = [math.exp(alpha * (each - max(z))) if each > -math.inf else 0.0 for each in z]
    return np.array([each / sum(raised) for each in raised])


def aumann_shapley(z: Array, v: Array, g: Array) -> tuple[Array, Array]:
    """Relevance of the scores ``[n, m]`` and of the values ``[m, d]``.

    ``R_v(j) = v_j ⊙ Σ_i g_i ∫ A_ij(α) dα`` and ``R_z(i, j) = z_ij ∫ α A_ij(α) (v_j − o_i(α))·g_i dα``.
    """
    of_scores, of_values = np.zeros_like(z), np.zeros_like(v)
    for i in range(len(z)):
        for j in range(len(v)):
            if z[i, j] == -math.inf:
                continue

            def weight(alpha: float, i: int = i, j: int = j) -> float:
                return float(weights(z[i], alpha)[j])

            def slope(alpha: float, i: int = i, j: int = j) -> float:
                a = weights(z[i], alpha)
                o = sum(a[n] * v[n] for n in range(len(v)))
                return float(alpha * a[j] * sum((v[j, d] - o[d]) * g[i, d] for d in range(v.shape[1])))

            of_values[j] += v[j] * g[i] * quad(weight, 0, 1, epsabs=1e-12, epsrel=1e-12)[0]
            of_scores[i, j] = z[i, j] * quad(slope, 0, 1, epsabs=1e-12, epsrel=1e-12)[0]
    return of_scores, of_values


def of_queries_and_keys(of_scores: Array, z: Array, q: Array, k: Array, scale: float) -> tuple[Array, Array, Array]:
    """Relevance of queries, keys and the bias: a score hands its relevance to the terms of its sum by their size
    (LRP-0), and each of the two factors of ``s q_id k_jd`` gets half (the uniform rule)."""
    of_q, of_k, of_bias = np.zeros_like(q), np.zeros_like(k), np.zeros_like(of_scores)
    for i in range(len(q)):
        for j in range(len(k)):
            if z[i, j] in (0.0, -math.inf):
                continue
            share = of_scores[i, j] / z[i, j]
            product = 0.0
            for d in range(q.shape[1]):
                term = scale * q[i, d] * k[j, d]
                of_q[i, d] += share * term / 2
                of_k[j, d] += share * term / 2
                product += term
            of_bias[i, j] = share * (z[i, j] - product)
    return of_q, of_k, of_bias
