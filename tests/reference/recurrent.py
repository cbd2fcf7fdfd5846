"""LRP of recurrent cells, unit by unit and step by step, from their equations.

A sum hands each summand its share of what it has, ``R_i = z_i / Σ z · R``; an element-wise function hands on what it
has; of a gate's product the signal takes all (Arras et al. 2017) or each factor half (Achtibat et al. 2024).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, tanh

Vector = list[float]
Matrix = list[Vector]


@dataclass
class Weights:
    """Of the input, of the hidden state, and their biases; gates one below the other, as torch has them."""

    input: Matrix
    hidden: Matrix
    input_bias: Vector
    hidden_bias: Vector


def _sigmoid(x: float) -> float:
    return 1 / (1 + exp(-x))


def _layer(matrix: Matrix, bias: Vector, x: Vector) -> Vector:
    return [sum(w * v for w, v in zip(row, x, strict=True)) + b for row, b in zip(matrix, bias, strict=True)]


def _back(matrix: Matrix, x: Vector, z: Vector, relevance: Vector) -> Vector:
    """``R_i = Σ_j x_i w_ji / z_j · R_j``."""
    return [
        sum(x[i] * row[i] / z_j * r for row, z_j, r in zip(matrix, z, relevance, strict=True)) for i in range(len(x))
    ]


def _rows(weights: Weights, gate: int, size: int) -> Weights:
    here = slice(gate * size, (gate + 1) * size)
    return Weights(weights.input[here], weights.hidden[here], weights.input_bias[here], weights.hidden_bias[here])


def lstm(xs: Matrix, weights: Weights, size: int, seed: Vector, signal_takes_all: bool) -> Matrix:
    """The relevance of each input ``[T][I]`` for ``Σ_j seed_j h_j`` after the last step, from a state of zeros."""
    gates = [_rows(weights, gate, size) for gate in range(4)]
    h, c = [0.0] * size, [0.0] * size
    steps = []
    for x in xs:
        z = [
            [a + b for a, b in zip(_layer(w.input, w.input_bias, x), _layer(w.hidden, w.hidden_bias, h), strict=True)]
            for w in gates
        ]
        i, f, o = ([_sigmoid(v) for v in z[gate]] for gate in (0, 1, 3))
        g = [tanh(v) for v in z[2]]
        new = [f[j] * c[j] + i[j] * g[j] for j in range(size)]
        steps.append((x, h, c, z, i, f, g, new))
        h, c = [o[j] * tanh(new[j]) for j in range(size)], new
    signal, gate = (1.0, 0.0) if signal_takes_all else (0.5, 0.5)
    of_h, of_c = [seed[j] * h[j] for j in range(size)], [0.0] * size
    found: Matrix = []
    for x, before, c, z, i, f, g, new in reversed(steps):
        of_c = [of_c[j] + signal * of_h[j] for j in range(size)]
        of_o = [gate * of_h[j] for j in range(size)]
        kept = [of_c[j] * f[j] * c[j] / new[j] for j in range(size)]
        added = [of_c[j] * i[j] * g[j] / new[j] for j in range(size)]
        at = [
            [gate * r for r in added],
            [gate * r for r in kept] if any(c) else [0.0] * size,
            [signal * r for r in added],
            of_o,
        ]
        of_x, of_h = [0.0] * len(x), [0.0] * size
        for w, z_of_gate, relevance in zip(gates, z, at, strict=True):
            of_x = [a + b for a, b in zip(of_x, _back(w.input, x, z_of_gate, relevance), strict=True)]
            of_h = [a + b for a, b in zip(of_h, _back(w.hidden, before, z_of_gate, relevance), strict=True)]
        of_c = [signal * r for r in kept]
        found.insert(0, of_x)
    return found


def gru(xs: Matrix, weights: Weights, size: int, seed: Vector, signal_takes_all: bool) -> Matrix:
    """The same for ``n = tanh(x + r h)``, ``h' = (1 − z) n + z h``; the 1 is a constant, and so is what the state of
    zeros gives, beside which the gate has all."""
    gates = [_rows(weights, gate, size) for gate in range(3)]
    h = [0.0] * size
    steps = []
    for x in xs:
        ins = [_layer(w.input, w.input_bias, x) for w in gates]
        hids = [_layer(w.hidden, w.hidden_bias, h) for w in gates]
        r, z = ([_sigmoid(a + b) for a, b in zip(ins[k], hids[k], strict=True)] for k in (0, 1))
        inner = [ins[2][j] + r[j] * hids[2][j] for j in range(size)]
        n = [tanh(v) for v in inner]
        new = [(1 - z[j]) * n[j] + z[j] * h[j] for j in range(size)]
        steps.append((x, h, ins, hids, r, z, inner, n, new))
        h = new
    signal, gate = (1.0, 0.0) if signal_takes_all else (0.5, 0.5)
    of_h = [seed[j] * h[j] for j in range(size)]
    found: Matrix = []
    for x, before, ins, hids, r, z, inner, n, new in reversed(steps):
        of_new = [of_h[j] * (1 - z[j]) * n[j] / new[j] for j in range(size)]
        of_old = [of_h[j] * z[j] * before[j] / new[j] for j in range(size)]
        # of 1 − z, what is not the 1: −z / (1 − z)
        of_z = [gate * of_new[j] * -z[j] / (1 - z[j]) + gate * of_old[j] for j in range(size)]
        of_inner = [signal * relevance for relevance in of_new]
        of_product = [of_inner[j] * r[j] * hids[2][j] / inner[j] for j in range(size)]
        of_r = [(gate if any(before) else 1.0) * relevance for relevance in of_product]
        sums = [[a + b for a, b in zip(ins[k], hids[k], strict=True)] for k in (0, 1)]
        of_x = [0.0] * len(x)
        of_h = [signal * relevance for relevance in of_old]
        for k, relevance in ((0, of_r), (1, of_z)):
            of_x = [a + b for a, b in zip(of_x, _back(gates[k].input, x, sums[k], relevance), strict=True)]
            of_h = [a + b for a, b in zip(of_h, _back(gates[k].hidden, before, sums[k], relevance), strict=True)]
        of_x = [a + b for a, b in zip(of_x, _back(gates[2].input, x, inner, of_inner), strict=True)]
        of_hidden = [signal * relevance for relevance in of_product]
        of_h = [a + b for a, b in zip(of_h, _back(gates[2].hidden, before, hids[2], of_hidden), strict=True)]
        found.insert(0, of_x)
    return found


def simple(xs: Matrix, weights: Weights, size: int, seed: Vector, signal_takes_all: bool) -> Matrix:
    """The same for ``h' = tanh(x + h)``, which has no gates."""
    h = [0.0] * size
    steps = []
    for x in xs:
        ins, hids = (
            _layer(weights.input, weights.input_bias, x),
            _layer(weights.hidden, weights.hidden_bias, h),
        )
        inner = [a + b for a, b in zip(ins, hids, strict=True)]
        steps.append((x, h, inner))
        h = [tanh(v) for v in inner]
    of_h = [seed[j] * h[j] for j in range(size)]
    found: Matrix = []
    for x, before, inner in reversed(steps):
        found.insert(0, _back(weights.input, x, inner, of_h))
        of_h = _back(weights.hidden, before, inner, of_h)
    return found
