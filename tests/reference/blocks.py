"""What the model twins share: weights as float64 arrays, attention, the gated product, the bias ledger."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.reference import rules

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from tests.reference.rules import Array

RECIPES = ("lrp", "attnlrp")


def check_recipe(recipe: str) -> None:
    """Refuse a recipe name that no twin knows."""
    if recipe not in RECIPES:
        raise ValueError(f"recipe must be one of {RECIPES}, got {recipe!r}")


def parameter(model: nn.Module, name: str) -> Array:
    """A parameter of the model as a float64 array, by its dotted name."""
    return model.get_parameter(name).detach().double().cpu().numpy().copy()


def ids(values: Any) -> np.ndarray:
    """Token ids as a flat integer array (accepts lists, arrays, tensors, a leading batch axis of 1)."""
    return np.asarray(values, dtype=np.int64).reshape(-1)


@dataclass
class Ledger:
    """Relevance that ends in constants of the network, each entry measured where it is kept."""

    biases: dict[str, float] = field(default_factory=dict)
    softmax_residue: dict[str, float] = field(default_factory=dict)

    def keep(self, name: str, relevance: Array) -> None:
        """Book the relevance of one bias parameter (all tokens and outputs together)."""
        self.biases[name] = self.biases.get(name, 0.0) + float(relevance.sum())

    def total(self) -> float:
        """Everything booked."""
        return sum(self.biases.values()) + sum(self.softmax_residue.values())


# --- activations (forward only; their rule is the identity) -----------------------------------------------

_erf = np.vectorize(math.erf, otypes=[float])


def _gelu_tanh(x: Array) -> Array:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": lambda x: 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0))),
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "silu": lambda x: x / (1.0 + np.exp(-x)),
    "relu": lambda x: np.maximum(x, 0.0),
    "tanh": np.tanh,
}


# --- layers -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Linear:
    """A linear layer ``[out, in]`` of the model, propagated with LRP-0."""

    weight: Array
    bias: Array | None
    bias_name: str

    @classmethod
    def read(cls, model: nn.Module, name: str, transposed: bool = False, bias_name: str = "") -> Linear:
        """Read ``name.weight`` (``transposed``: stored as [in, out]) and its bias, if it has one."""
        weight = parameter(model, f"{name}.weight")
        bias_name = bias_name or f"{name}.bias"
        bias = parameter(model, bias_name) if getattr(model.get_submodule(name), "bias", None) is not None else None
        return cls(weight.T.copy() if transposed else weight, bias, bias_name)

    def __call__(self, x: Array) -> Array:
        return rules.linear(x, self.weight, self.bias)

    def relevance(self, x: Array, relevance: Array, ledger: Ledger) -> Array:
        """LRP-0; the bias's share goes to the ledger."""
        r_x, r_b = rules.linear_zero(x, self.weight, self.bias, relevance)
        if self.bias is not None:
            ledger.keep(self.bias_name, r_b)
        return r_x


@dataclass(frozen=True)
class LayerNorm:
    """LayerNorm with its standard deviation held constant."""

    gamma: Array
    beta: Array
    eps: float
    bias_name: str

    @classmethod
    def read(cls, model: nn.Module, name: str, eps: float) -> LayerNorm:
        """Read ``name.weight`` and ``name.bias``."""
        return cls(parameter(model, f"{name}.weight"), parameter(model, f"{name}.bias"), eps, f"{name}.bias")

    def __call__(self, x: Array) -> Array:
        return rules.layernorm(x, self.gamma, self.beta, self.eps)

    def relevance(self, x: Array, relevance: Array, ledger: Ledger) -> Array:
        """Standard deviation constant, then LRP-0; beta's share goes to the ledger."""
        r_x, r_b = rules.layernorm_constant_std(x, self.gamma, self.beta, self.eps, relevance)
        ledger.keep(self.bias_name, r_b)
        return r_x


@dataclass(frozen=True)
class RMSNorm:
    """RMSNorm with its root mean square held constant."""

    gamma: Array
    eps: float

    @classmethod
    def read(cls, model: nn.Module, name: str, eps: float) -> RMSNorm:
        """Read ``name.weight``."""
        return cls(parameter(model, f"{name}.weight"), eps)

    def __call__(self, x: Array) -> Array:
        return rules.rmsnorm(x, self.gamma, self.eps)

    def relevance(self, x: Array, relevance: Array) -> Array:
        """Root mean square constant: the identity."""
        return rules.rmsnorm_constant_std(x, self.gamma, self.eps, relevance)[0]


def gated_product_relevance(gate: Array, signal: Array, relevance: Array, recipe: str) -> tuple[Array, Array]:
    """``act(g) u``: uniform under AttnLRP (Achtibat, Eq. 14), all to ``u`` under LRP (Arras, D.4)."""
    rule = rules.product_uniform if recipe == "attnlrp" else rules.product_signal_take_all
    return rule(gate, signal, relevance)


# --- attention --------------------------------------------------------------------------------------------


def split_heads(x: Array, heads: int) -> Array:
    """``[T, H dh] -> [H, T, dh]``."""
    return x.reshape(x.shape[0], heads, -1).transpose(1, 0, 2)


def merge_heads(x: Array) -> Array:
    """``[H, T, dh] -> [T, H dh]``."""
    return x.transpose(1, 0, 2).reshape(x.shape[1], -1)


def visible_keys(queries: int, keys: int, causal: bool, key_mask: Any = None) -> np.ndarray:
    """``[queries, keys]`` of booleans: key not padded and, if causal, not later than the query."""
    seen = np.ones(keys, dtype=bool) if key_mask is None else np.asarray(key_mask).reshape(-1).astype(bool)
    order = np.arange(queries)[:, None] >= np.arange(keys)[None, :]
    return np.broadcast_to(seen, (queries, keys)) & (order if causal else True)


@dataclass(frozen=True)
class Attention:
    """``softmax(scale q k^T + bias) v`` per head, with everything its relevance needs."""

    q: Array
    k: Array
    v: Array
    scale: float
    bias: Array | None
    dots: Array
    scores: Array
    weights: Array
    output: Array


def attend(q: Array, k: Array, v: Array, visible: np.ndarray, scale: float, bias: Array | None = None) -> Attention:
    """Forward pass for ``q [H, Tq, dh]``, ``k`` and ``v [H, Tk, dh]``; ``bias [H, Tq, Tk]`` or None."""
    dots = rules.matmul(q, k.transpose(0, 2, 1))
    scores = scale * dots if bias is None else scale * dots + bias
    weights = rules.softmax(scores, visible)
    return Attention(q, k, v, scale, bias, dots, scores, weights, rules.matmul(weights, v))


@dataclass(frozen=True)
class AttentionRelevance:
    """Relevance at the three inputs of attention, at the score bias, and what the softmax keeps."""

    q: Array
    k: Array
    v: Array
    bias: Array
    residue: float


def attention_relevance(attention: Attention, relevance: Array, recipe: str) -> AttentionRelevance:
    """Hand ``relevance [H, Tq, dh]`` at the attention output back to q, k and v.

    ``lrp``: the attention weights are constant gates, all relevance goes to v (Ali 2022; Arras 2025, D.4).
    ``attnlrp``: uniform on ``A V`` (Achtibat 2024, Eq. 15), softmax (Eq. 13), the sum of scores and bias
    split by contribution, the constant scale passed through, uniform on ``q k^T`` (Eq. 15).
    """
    a = attention
    if recipe == "lrp":
        gate, r_v = rules.matmul_signal_take_all(a.weights, a.v, relevance)
        r_scores, kept = rules.softmax_constant(a.weights, gate)
        return AttentionRelevance(np.zeros_like(a.q), np.zeros_like(a.k), r_v, r_scores, float(kept.sum()))
    r_weights, r_v = rules.matmul_uniform(a.weights, a.v, relevance)
    r_scores, kept = rules.softmax_attnlrp(a.scores, a.weights, r_weights)
    no_bias = np.zeros_like(a.scores)
    r_dots, r_bias = rules.addition([a.scale * a.dots, no_bias if a.bias is None else a.bias], r_scores)
    r_q, r_kt = rules.matmul_uniform(a.q, a.k.transpose(0, 2, 1), r_dots)
    return AttentionRelevance(r_q, r_kt.transpose(0, 2, 1), r_v, r_bias, float(kept.sum()))


def seed(logits: Array, position: int, weights: Any) -> tuple[float, Array]:
    """The explained scalar ``logits[position] @ weights`` and the relevance ``[T, V]`` it starts with.

    The scalar is a sum, so each logit starts with its own term: ``R_v = weights_v logits_v``.
    """
    chosen = np.asarray(weights, dtype=np.float64).reshape(-1)
    relevance = np.zeros_like(logits)
    relevance[position] = chosen * logits[position]
    return float(logits[position] @ chosen), relevance
