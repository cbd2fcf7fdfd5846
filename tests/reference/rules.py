"""One function per relevance propagation rule, written as its equation.

Notation: ``z_ij = x_i w_ij`` is the contribution of input ``i`` to output ``j``, ``z_j = sum_i z_ij + b_j``
the output, ``R_j`` the relevance of the output. A linear rule is a table of shares ``s_ij`` and ``s_bj``;
then ``R_i = sum_j s_ij R_j`` and the bias of output ``j`` keeps ``R_bj = s_bj R_j``.
The quotient 0/0 counts as 0: an output that is exactly zero hands nothing back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable

Array = NDArray[np.float64]
Shares = tuple[Array, Array]


def ratio(numerator: Array, denominator: Array) -> Array:
    """``numerator / denominator``, and 0 where the denominator is exactly 0."""
    zero = denominator == 0
    return np.where(zero, 0.0, numerator / np.where(zero, 1.0, denominator))


# --- shares: how one output divides its relevance among its inputs (last axis) and its bias -------------


def shares_zero(z_ij: Array, b_j: Array) -> Shares:
    """LRP-0: ``s_ij = z_ij / z_j``, the epsilon rule with epsilon = 0 (Arras 2025, Eq. 1; Bach 2015)."""
    z_j = z_ij.sum(-1) + b_j
    return ratio(z_ij, z_j[..., None]), ratio(b_j, z_j)


def shares_epsilon(z_ij: Array, b_j: Array, epsilon: float) -> Shares:
    """LRP-epsilon: ``s_ij = z_ij / (z_j + epsilon sign(z_j))``, sign(0) = +1.

    Arras 2025, Eq. 1; Achtibat 2024, Eq. 8.
    """
    z_j = z_ij.sum(-1) + b_j
    sign = np.where(z_j >= 0, 1.0, -1.0)
    denominator = z_j + epsilon * sign
    return ratio(z_ij, denominator[..., None]), ratio(b_j, denominator)


def shares_z_plus(z_ij: Array, b_j: Array) -> Shares:
    """alpha1-beta0 (z+): ``s_ij = (z_ij)+ / z_j_pos`` with ``z_j_pos = sum_i (z_ij)+ + (b_j)+``.

    Arras 2025, Eq. 8. Where ``z_j_pos`` is 0 nothing is handed back.
    """
    positive, bias = np.maximum(z_ij, 0.0), np.maximum(b_j, 0.0)
    z_pos = positive.sum(-1) + bias
    return ratio(positive, z_pos[..., None]), ratio(bias, z_pos)


def shares_gamma(z_ij: Array, b_j: Array, gamma: float) -> Shares:
    """Generalised gamma: contributions that agree with the sign of ``z_j`` count ``1 + gamma`` times.

    ``s_ij = (z_ij + gamma z_ij^+-) / sum_k (z_kj + gamma z_kj^+-)``, where ``^+-`` is the positive part if
    ``z_j >= 0`` and the negative part otherwise; the bias is one of the terms k (Achtibat 2024, Eq. 24).
    """
    z_j = z_ij.sum(-1) + b_j
    positive = z_j >= 0
    favoured = np.where(positive[..., None], np.maximum(z_ij, 0.0), np.minimum(z_ij, 0.0))
    favoured_bias = np.where(positive, np.maximum(b_j, 0.0), np.minimum(b_j, 0.0))
    numerator, bias = z_ij + gamma * favoured, b_j + gamma * favoured_bias
    denominator = numerator.sum(-1) + bias
    return ratio(numerator, denominator[..., None]), ratio(bias, denominator)


def shares_alpha_beta(z_ij: Array, b_j: Array, alpha: float, beta: float) -> Shares:
    """alpha-beta: ``s_ij = alpha (z_ij)+ / z_j_pos - beta (z_ij)- / z_j_neg`` (Bach 2015, Eq. 60).

    The bias is among the terms. Where one of the two sums is 0 its part is not handed back.
    """
    positive, bias_positive = np.maximum(z_ij, 0.0), np.maximum(b_j, 0.0)
    negative, bias_negative = np.minimum(z_ij, 0.0), np.minimum(b_j, 0.0)
    z_pos, z_neg = positive.sum(-1) + bias_positive, negative.sum(-1) + bias_negative
    s_ij = alpha * ratio(positive, z_pos[..., None]) - beta * ratio(negative, z_neg[..., None])
    return s_ij, alpha * ratio(bias_positive, z_pos) - beta * ratio(bias_negative, z_neg)


# --- linear layers: x [..., in], weight [out, in], bias [out] or None, relevance [..., out] ---------------


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """The layer itself, ``z_j = sum_i x_i w_ij + b_j``, summed in the order the rules use."""
    z = (x[..., None, :] * weight).sum(-1)
    return z if bias is None else z + bias


def _linear(x: Array, weight: Array, bias: Array | None, relevance: Array, shares: Callable) -> Shares:
    """``R_i = sum_j s_ij R_j`` and ``R_bj = s_bj R_j``."""
    z_ij = x[..., None, :] * weight
    b_j = np.zeros(relevance.shape) if bias is None else np.broadcast_to(bias, relevance.shape)
    s_ij, s_bj = shares(z_ij, b_j)
    return np.einsum("...ji,...j->...i", s_ij, relevance), s_bj * relevance


def linear_zero(x: Array, weight: Array, bias: Array | None, relevance: Array) -> Shares:
    """LRP-0 of a linear layer (Arras 2025, Eq. 1 with epsilon = 0). Returns (R_x, R_b [..., out])."""
    return _linear(x, weight, bias, relevance, shares_zero)


def linear_epsilon(x: Array, weight: Array, bias: Array | None, relevance: Array, epsilon: float) -> Shares:
    """LRP-epsilon of a linear layer (Arras 2025, Eq. 1). Returns (R_x, R_b [..., out])."""
    return _linear(x, weight, bias, relevance, lambda z, b: shares_epsilon(z, b, epsilon))


def linear_z_plus(x: Array, weight: Array, bias: Array | None, relevance: Array) -> Shares:
    """alpha1-beta0 of a linear layer (Arras 2025, Eq. 8). Returns (R_x, R_b [..., out])."""
    return _linear(x, weight, bias, relevance, shares_z_plus)


def linear_gamma(x: Array, weight: Array, bias: Array | None, relevance: Array, gamma: float) -> Shares:
    """Generalised gamma of a linear layer (Achtibat 2024, Eq. 24). Returns (R_x, R_b [..., out])."""
    return _linear(x, weight, bias, relevance, lambda z, b: shares_gamma(z, b, gamma))


def linear_alpha_beta(
    x: Array, weight: Array, bias: Array | None, relevance: Array, alpha: float, beta: float
) -> Shares:
    """alpha-beta of a linear layer (Bach 2015, Eq. 60). Returns (R_x, R_b [..., out])."""
    return _linear(x, weight, bias, relevance, lambda z, b: shares_alpha_beta(z, b, alpha, beta))


def linear_flat(x: Array, weight: Array, relevance: Array) -> Array:
    """``R_i = sum_j R_j / n``: all of the n inputs of an output alike (Lapuschkin et al. 2019)."""
    return np.broadcast_to(relevance.sum(-1, keepdims=True) / weight.shape[1], x.shape).copy()


def linear_w_square(weight: Array, relevance: Array) -> Array:
    """``R_i = sum_j w_ij^2 / sum_k w_kj^2 R_j`` (Montavon et al. 2017, Eq. 12)."""
    square = weight**2
    return np.einsum("ji,...j->...i", ratio(square, square.sum(-1, keepdims=True)), relevance)


def linear_z_box(x: Array, weight: Array, relevance: Array, low: Array, high: Array) -> Array:
    """``R_i = sum_j c_ij / sum_k c_kj R_j`` with ``c_ij = x_i w_ij - l_i w_ij+ - h_i w_ij-``.

    Montavon et al. 2017, Eq. 14.
    """
    c_ij = x[..., None, :] * weight - low * np.maximum(weight, 0.0) - high * np.minimum(weight, 0.0)
    return np.einsum("...ji,...j->...i", ratio(c_ij, c_ij.sum(-1, keepdims=True)), relevance)


# --- 2-D convolutions: x [N, C, H, W], weight [O, C, kh, kw], bias [O] or None, relevance [N, O, H', W'] --


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def _convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    relevance: Array,
    stride: int | tuple[int, int],
    padding: int | tuple[int, int],
    shares: Callable,
) -> Shares:
    """Every output pixel is a linear neuron over its receptive field; the padding contributes zeros."""
    (sy, sx), (py, px) = _pair(stride), _pair(padding)
    kh, kw = weight.shape[2:]
    padded = np.pad(x, ((0, 0), (0, 0), (py, py), (px, px)))
    spread = np.zeros_like(padded)
    kept = np.zeros_like(relevance)
    for n, o, i, j in np.ndindex(relevance.shape):
        field = (n, slice(None), slice(i * sy, i * sy + kh), slice(j * sx, j * sx + kw))
        z_ij = (padded[field] * weight[o]).reshape(-1)
        b_j = np.asarray(0.0 if bias is None else bias[o])
        s_ij, s_bj = shares(z_ij, b_j)
        spread[field] += (s_ij * relevance[n, o, i, j]).reshape(weight.shape[1:])
        kept[n, o, i, j] = s_bj * relevance[n, o, i, j]
    height, width = x.shape[2:]
    return spread[:, :, py : py + height, px : px + width], kept


def conv2d_epsilon(
    x: Array,
    weight: Array,
    bias: Array | None,
    relevance: Array,
    epsilon: float,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
) -> Shares:
    """LRP-epsilon of a convolution (Arras 2025, Eq. 1); epsilon = 0 is LRP-0. Returns (R_x, R_b)."""
    return _convolution(x, weight, bias, relevance, stride, padding, lambda z, b: shares_epsilon(z, b, epsilon))


def conv2d_z_plus(
    x: Array,
    weight: Array,
    bias: Array | None,
    relevance: Array,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
) -> Shares:
    """alpha1-beta0 of a convolution (Arras 2025, Eq. 8). Returns (R_x, R_b [N, O, H', W'])."""
    return _convolution(x, weight, bias, relevance, stride, padding, shares_z_plus)


def conv2d_gamma(
    x: Array,
    weight: Array,
    bias: Array | None,
    relevance: Array,
    gamma: float,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] = 0,
) -> Shares:
    """Generalised gamma of a convolution (Achtibat 2024, Eq. 24). Returns (R_x, R_b [N, O, H', W'])."""
    return _convolution(x, weight, bias, relevance, stride, padding, lambda z, b: shares_gamma(z, b, gamma))


# --- element-wise operations and products -----------------------------------------------------------------


def identity(x: Array, relevance: Array) -> Array:
    """Activation ``z = g(x)``: ``R_i = R_j`` (Arras 2025, D.3; Achtibat 2024, Eq. 9).

    An input that is exactly 0 contributes nothing and gets nothing.
    """
    return np.where(x == 0, 0.0, relevance)


def addition(terms: list[Array], relevance: Array) -> list[Array]:
    """``z = sum_k t_k``: each term gets ``t_k / z`` of the relevance (Arras 2025, Eq. 1, weights of 1)."""
    z = sum(terms[1:], start=terms[0])
    return [ratio(term, z) * relevance for term in terms]


def product_uniform(a: Array, b: Array, relevance: Array) -> Shares:
    """``z = a b``, both depending on the input: half each (Achtibat 2024, Eq. 14)."""
    half = np.where(a * b == 0, 0.0, 0.5 * relevance)
    return half, half.copy()


def product_signal_take_all(gate: Array, signal: Array, relevance: Array) -> Shares:
    """``z = gate signal``: ``R_gate = 0``, ``R_signal = R`` (Arras 2025, D.4, Eqs. 31-32)."""
    return np.zeros_like(relevance), np.where(gate * signal == 0, 0.0, relevance)


def matmul(a: Array, b: Array) -> Array:
    """``z_nm = sum_k a_nk b_km``, summed in the order the rules below use."""
    return (a[..., :, :, None] * b[..., None, :, :]).sum(-2)


def matmul_uniform(a: Array, b: Array, relevance: Array) -> Shares:
    """``z_nm = sum_k a_nk b_km``: LRP-0 over the sum, then half to each factor (Achtibat 2024, Eq. 15).

    ``R_a[n,k] = 1/2 sum_m a_nk b_km / z_nm R_nm`` and ``R_b[k,m] = 1/2 sum_n a_nk b_km / z_nm R_nm``.
    """
    per_output = ratio(relevance, matmul(a, b))
    r_a = 0.5 * np.einsum("...nk,...km,...nm->...nk", a, b, per_output)
    r_b = 0.5 * np.einsum("...nk,...km,...nm->...km", a, b, per_output)
    return r_a, r_b


def matmul_signal_take_all(a: Array, b: Array, relevance: Array) -> Shares:
    """The product with ``a`` held constant: ``R_a = 0``, ``R_b[k,m] = sum_n a_nk b_km / z_nm R_nm``.

    LRP-0 over the sum (Arras 2025, Eq. 1), signal-take-all on each summand (D.4); CP-LRP's attention.
    """
    per_output = ratio(relevance, matmul(a, b))
    return np.zeros_like(a), np.einsum("...nk,...km,...nm->...km", a, b, per_output)


# --- softmax and normalisation ----------------------------------------------------------------------------


def softmax(x: Array, visible: Array | None = None) -> Array:
    """``s_j = exp(x_j) / sum_i exp(x_i)`` over the visible entries of the last axis (Arras 2025, Eq. 35)."""
    seen = np.ones(x.shape, dtype=bool) if visible is None else np.broadcast_to(visible, x.shape)
    top = np.max(np.where(seen, x, -np.inf), axis=-1, keepdims=True, initial=-1e300)
    powers = np.where(seen, np.exp(np.where(seen, x - top, 0.0)), 0.0)
    return ratio(powers, np.broadcast_to(powers.sum(-1, keepdims=True), x.shape))


def softmax_attnlrp(x: Array, s: Array, relevance: Array) -> Shares:
    """AttnLRP's softmax: ``R_xi = x_i (R_si - s_i sum_j R_sj)`` (Achtibat 2024, Eq. 13; Arras 2025, Eq. 42).

    It does not conserve. The Taylor expansion at x leaves the bias ``b_j = s_j - sum_i (ds_j/dx_i) x_i
    = s_j (1 - x_j + sum_i s_i x_i)``, whose relevance ``R_bj = b_j / s_j R_sj`` is returned second.
    Entries with ``s = 0`` (masked) get zero, whatever stands in ``x`` there.
    """
    x = np.where(s == 0, 0.0, x)
    relevance = np.where(s == 0, 0.0, relevance)
    r_x = x * (relevance - s * relevance.sum(-1, keepdims=True))
    r_b = (1.0 - x + (s * x).sum(-1, keepdims=True)) * relevance
    return r_x, r_b


def softmax_constant(s: Array, relevance: Array) -> Shares:
    """CP-LRP's softmax: the output is a constant, so the input gets 0 and the constant keeps all (Ali 2022).

    Under CP-LRP the attention weights are gates that receive no relevance, so there is nothing to keep.
    """
    return np.zeros_like(s), relevance.copy()


def layernorm_matrix(x: Array, gamma: Array, eps: float) -> Array:
    """The linear map of one token's LayerNorm once its standard deviation is a constant.

    ``w_ij = gamma_j (delta_ij - 1/d) / sqrt(Var[x] + eps)``, as ``[out j, in i]`` (Arras 2025, Eq. 34).
    """
    d = x.shape[-1]
    std = np.sqrt(((x - x.mean()) ** 2).mean() + eps)
    return gamma[:, None] * (np.eye(d) - 1.0 / d) / std


def layernorm(x: Array, gamma: Array, beta: Array | None, eps: float) -> Array:
    """``z = (x - E[x]) / sqrt(Var[x] + eps) gamma + beta`` for every row of ``x [T, d]`` (Arras, Eq. 33)."""
    return np.stack([linear(row, layernorm_matrix(row, gamma, eps), beta) for row in x])


def layernorm_constant_std(x: Array, gamma: Array, beta: Array | None, eps: float, relevance: Array) -> Shares:
    """LayerNorm with its standard deviation held constant and its mean in the graph; then LRP-0.

    Arras 2025, D.5 (Ali 2022). ``x [T, d]``; returns (R_x [T, d], R_beta [T, d]).
    """
    rows = [linear_zero(row, layernorm_matrix(row, gamma, eps), beta, r) for row, r in zip(x, relevance, strict=True)]
    return np.stack([r_x for r_x, _ in rows]), np.stack([r_b for _, r_b in rows])


def rmsnorm(x: Array, gamma: Array, eps: float, beta: Array | None = None) -> Array:
    """``z = x / sqrt(E[x^2] + eps) gamma (+ beta)`` (Achtibat 2024, Eq. 17)."""
    z = x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * gamma
    return z if beta is None else z + beta


def rmsnorm_constant_std(x: Array, gamma: Array, eps: float, relevance: Array, beta: Array | None = None) -> Shares:
    """RMSNorm with its root mean square held constant: a diagonal linear map, then LRP-0.

    ``R_i = x_i w_i / (x_i w_i + beta_i) R_i``, which is the identity without beta (Achtibat 2024, Eq. 19;
    Arras 2025, D.5). Returns (R_x [T, d], R_beta [T, d]).
    """
    scaled = rmsnorm(x, gamma, eps)
    r_x, r_b = addition([scaled, np.broadcast_to(0.0 if beta is None else beta, x.shape)], relevance)
    return r_x, r_b


# --- older rules of softmax and norms, by their Jacobians -------------------------------------------------


def softmax_temperature(x: Array, relevance: Array, temperature: float) -> Array:
    """GIM: ``R_i = x_i sum_j s_Tj (delta_ij - s_Ti) g_j`` with ``g_j = R_j / s_j`` and ``s_T = softmax(x / T)``: ``T``
    times the gradient of a softmax at ``x / T`` (Edin et al. 2025). One row ``x [n]``.
    """
    s, warm = softmax(x), softmax(x / temperature)
    found = np.zeros_like(x)
    for i in range(len(x)):
        for j in range(len(x)):
            found[i] += x[i] * warm[j] * ((i == j) - warm[i]) * ratio(relevance[j], s[j])
    return found


def _taylor_with_uniform_bias(x: Array, y: Array, jacobian: Array, relevance: Array, inputs: list[int]) -> Array:
    """``R_i = sum_j (J_ji x_i + b_j / N) / y_j R_j`` with ``b_j = y_j - sum_i J_ji x_i`` (Achtibat 2024, A.2.1)."""
    found = np.zeros_like(x)
    for j in range(len(y)):
        bias = y[j] - sum(jacobian[j, i] * x[i] for i in inputs)
        for i in inputs:
            found[i] += (jacobian[j, i] * x[i] + bias / len(inputs)) * float(ratio(relevance[j], y[j]))
    return found


def softmax_uniform_bias(x: Array, visible: list[int], relevance: Array) -> Array:
    """A softmax over the visible entries of one row, expanded at ``x``; the bias goes to all of them alike."""
    seen = np.zeros(len(x), dtype=bool)
    seen[visible] = True
    s = softmax(x, seen)
    jacobian = np.diag(s) - np.outer(s, s)
    return _taylor_with_uniform_bias(np.where(seen, x, 0.0), s, jacobian, relevance, visible)


def norm_uniform_bias(x: Array, eps: float, relevance: Array, *, centred: bool) -> Array:
    """One token's LayerNorm (``centred``) or RMSNorm without weights, expanded at ``x``; the bias goes to all inputs
    alike. ``y_j = c_j / sd``, ``c = x - mean`` or ``x``, ``J_ji = (delta_ij - 1/n) / sd - c_j c_i / (n sd^3)``.
    """
    n = len(x)
    c = x - x.mean() if centred else x
    sd = np.sqrt((c**2).mean() + eps)
    jacobian = np.zeros((n, n))
    for j in range(n):
        for i in range(n):
            linear_part = (i == j) - (1 / n if centred else 0.0)
            jacobian[j, i] = linear_part / sd - c[j] * c[i] / (n * sd**3)
    return _taylor_with_uniform_bias(x, c / sd, jacobian, relevance, list(range(n)))
