"""Models as linearised networks, for the slow twin of ALTI-Logit: their weights, read by name, in float64.

Attention weights are constants and a norm keeps its standard deviation at the row it was applied to, so the
explained value is a sum over vectors that enter the residual stream of token t. ``path`` is what lies between:
linear stages, each with its own bias. A vector that enters at stage s is carried through ``path[s:]``, the bias of
stage s through ``path[s + 1:]``. A pre-norm decoder has only its final norm and its head there, and everything enters
at the first stage; in BERT every layer adds its two norms. An element-wise function (tanh on Gemma 2's logits, the
activation in BERT's heads) is the constant ratio ``g(x) / x`` (identity rule), 0 where x = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers as tf

from tests.reference.blocks import ACTIVATIONS
from tests.reference.llama import rotate
from tests.reference.rules import ratio

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from tests.reference.rules import Array


# --- the parts of a network --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norm:
    """A LayerNorm (``centred``) or RMSNorm, together with the rows ``at [T, d]`` it was applied to."""

    name: str
    at: Array
    gamma: Array
    beta: Array
    eps: float
    centred: bool

    def linear(self, vector: Array, row: int) -> Array:
        """``γ ⊙ (v − mean v) / std(at_row)``; an RMSNorm has no mean."""
        at = self.at[row] - self.at[row].mean() if self.centred else self.at[row]
        vector = vector - vector.mean() if self.centred else vector
        return self.gamma * vector / np.sqrt((at**2).mean() + self.eps)

    def output(self) -> Array:
        """The norm itself, ``[T, d]``: its linear map at its own rows, and β."""
        return np.stack([self.linear(row, i) + self.beta for i, row in enumerate(self.at)])


@dataclass(frozen=True)
class Attention:
    """The attention of one layer; head h reads ``values[h]``, whatever group they come from."""

    weights: Array  # [H, T, T]
    values: Array  # [H, T, dh]
    out: Array  # [H, dh, d] W_O by head
    bias: Array  # [d] b_O

    def term(self, h: int, i: int, j: int) -> Array:
        """``A^h_ij v_j^h W_O^h``."""
        return self.weights[h, i, j] * self.values[h, j] @ self.out[h]

    def moved(self, i: int, j: int) -> Array:
        """``Σ_h A^h_ij v_j^h W_O^h``."""
        return sum((self.term(h, i, j) for h in range(len(self.out))), start=np.zeros_like(self.bias))

    def output(self) -> Array:
        """``Σ_j Σ_h A^h_ij v_j^h W_O^h + b_O`` for every row i."""
        rows = range(self.weights.shape[1])
        return np.stack([sum((self.moved(i, j) for j in rows), start=self.bias) for i in rows])


@dataclass(frozen=True)
class Block:
    """One layer: what enters it, its attention, what its MLP adds, and where on the path both arrive."""

    x: Array  # [T, d] the residual stream that enters
    attention: Attention
    mlp: Array  # [T, d]
    branch_norm: Norm | None = None  # between the attention and the residual sum (Gemma 2)
    sum_norm: Norm | None = None  # after the residual sum (BERT)
    attention_enters: int = 0
    mlp_enters: int = 0

    def to_sum(self, vector: Array, row: int) -> Array:
        """From the attention's output to the residual sum."""
        return vector if self.branch_norm is None else self.branch_norm.linear(vector, row)

    def past_sum(self, vector: Array, row: int) -> Array:
        """Through the norm that follows the residual sum, where there is one (its β apart)."""
        return vector if self.sum_norm is None else self.sum_norm.linear(vector, row)


@dataclass(frozen=True)
class Stage:
    """A linear map on the residual path of token t, and its bias."""

    linear: Callable[[Array], Array]
    bias: Array | None = None
    name: str = ""


@dataclass(frozen=True)
class Network:
    """A linearised model, seen from position t."""

    value: float
    embeddings: dict[str, Array]  # [d] by kind, at position t
    blocks: list[Block]
    path: list[Stage]
    position: int

    def carry(self, vector: Array, start: int) -> float:
        """What ``vector`` adds to the explained value when it enters at stage ``start``."""
        for stage in self.path[start:]:
            vector = stage.linear(vector)
        return float(vector)


# --- reading a model ---------------------------------------------------------------------------------------


def weight(model: nn.Module, name: str, rows: list[int] | None = None) -> Array:
    """A parameter, or some of its rows, as a float64 array."""
    parameter = model.get_parameter(name).detach()
    return (parameter if rows is None else parameter[rows]).double().numpy()


def bias(model: nn.Module, name: str, size: int, rows: list[int] | None = None) -> Array:
    """A bias, zeros where the model has none."""
    module, _, child = name.rpartition(".")
    missing = getattr(model.get_submodule(module), child, None) is None
    return np.zeros(size) if missing else weight(model, name, rows)


def dense(model: nn.Module, name: str, x: Array, transposed: bool = False) -> Array:
    """``x W + b``; a Conv1D keeps its weight transposed, ``[in, out]``."""
    matrix = weight(model, f"{name}.weight") if transposed else weight(model, f"{name}.weight").T
    return x @ matrix + bias(model, f"{name}.bias", matrix.shape[1])


def layer_norm(model: nn.Module, name: str, at: Array, eps: float) -> Norm:
    """A LayerNorm at its input."""
    gamma = weight(model, f"{name}.weight")
    return Norm(f"{name}.bias", at, gamma, bias(model, f"{name}.bias", len(gamma)), eps, centred=True)


def rms_norm(model: nn.Module, name: str, at: Array, eps: float, plus: float = 0.0) -> Norm:
    """An RMSNorm at its input; Gemma's weights count from 1 (``plus``)."""
    gamma = plus + weight(model, f"{name}.weight")
    return Norm(f"{name}.bias", at, gamma, np.zeros_like(gamma), eps, centred=False)


def heads_of(x: Array, heads: int, shared: int = 1) -> Array:
    """``[T, H dh] -> [H, T, dh]``; with grouped queries each group's rows are read by ``shared`` heads."""
    return np.stack([part for part in np.split(x, heads, axis=1) for _ in range(shared)])


def rotary(module: Any, tokens: int) -> tuple[Array, Array]:
    """cos and sin ``[T, dr]``: the model's own table, float32 as the model computes it, then widened."""
    with torch.no_grad():
        cos, sin = module(torch.zeros(1, dtype=torch.float64), torch.arange(tokens)[None])
    return cos[0].numpy(), sin[0].numpy()


def turn(x: Array, cos: Array, sin: Array) -> Array:
    """Rotary embedding of the first components of ``x [H, T, dh]``, as many as the table has."""
    turned = cos.shape[-1]
    return np.concatenate([rotate(x[..., :turned], cos, sin), x[..., turned:]], axis=-1)


def attention_weights(
    q: Array, k: Array, scale: float, *, causal: bool = True, window: int | None = None, cap: float | None = None
) -> Array:
    """``A^h_ij``: softmax over the j that i sees of ``scale q_i · k_j``, itself capped to ``cap tanh(s / cap)``."""
    heads, tokens = q.shape[:2]
    result = np.zeros((heads, tokens, tokens))
    for h in range(heads):
        for i in range(tokens):
            seen = [j for j in range(tokens) if not causal or (j <= i and (window is None or i - j < window))]
            scores = np.array([scale * (q[h, i] @ k[h, j]) for j in seen])
            if cap is not None:
                scores = cap * np.tanh(scores / cap)
            powers = np.exp(scores - scores.max())
            result[h, i, seen] = powers / powers.sum()
    return result


def attention(model: nn.Module, name: str, weights: Array, values: Array, transposed: bool = False) -> Attention:
    """The attention of a layer whose output projection is ``name``."""
    out = weight(model, f"{name}.weight") if transposed else weight(model, f"{name}.weight").T
    by_head = out.reshape(len(values), -1, out.shape[1])
    return Attention(weights, values, by_head, bias(model, f"{name}.bias", out.shape[1]))


def read_head(
    model: nn.Module, head: str, rows: list[int], x: Array, cap: float | None = None, bias_name: str = ""
) -> tuple[float, list[Stage]]:
    """The explained value and the last stages: chosen rows of the head, their soft cap, their difference."""
    matrix = weight(model, f"{head}.weight", rows)
    name = bias_name or f"{head}.bias"
    constant = bias(model, name, len(rows), rows)
    raw, signs = matrix @ x + constant, np.array([1.0, -1.0])[: len(rows)]
    logits = raw if cap is None else cap * np.tanh(raw / cap)
    capped = ratio(logits, raw)
    kept = constant if constant.any() else None
    stages = [Stage(lambda v: matrix @ v, kept, name), Stage(lambda v: signs @ (capped * v))]
    return float(signs @ logits), stages


def read_decoder(
    model: nn.Module,
    embeddings: dict[str, Array],
    blocks: list[Block],
    final: Norm,
    position: int | None,
    rows: list[int],
    cap: float | None = None,
) -> Network:
    """A pre-norm decoder: everything enters before the final norm."""
    if position is None:
        raise ValueError("a language model is explained at a position")
    t = range(len(final.at))[position]
    value, head = read_head(model, "lm_head", rows, final.output()[t], cap)
    first = Stage(lambda v: final.linear(v, t), final.beta if final.centred else None, final.name)
    return Network(value, {kind: part[t] for kind, part in embeddings.items()}, blocks, [first, *head], t)


def read_gpt2(model: tf.GPT2LMHeadModel, ids: list[int], position: int | None, rows: list[int]) -> Network:
    """GPT-2: query, key and value in one Conv1D, learned positions."""
    config, eps = model.config, model.config.layer_norm_epsilon
    embeddings = {
        "token": weight(model, "transformer.wte.weight", ids),
        "position": weight(model, "transformer.wpe.weight")[: len(ids)],
    }
    x, blocks = embeddings["token"] + embeddings["position"], []
    for index in range(config.n_layer):
        name = f"transformer.h.{index}"
        scale = (config.n_embd // config.n_head) ** -0.5 if config.scale_attn_weights else 1.0
        scale /= index + 1 if config.scale_attn_by_inverse_layer_idx else 1
        normed = layer_norm(model, f"{name}.ln_1", x, eps).output()
        qkv = np.split(dense(model, f"{name}.attn.c_attn", normed, transposed=True), 3, axis=1)
        q, k, v = (heads_of(part, config.n_head) for part in qkv)
        attended = attention(model, f"{name}.attn.c_proj", attention_weights(q, k, scale), v, transposed=True)
        y = x + attended.output()
        hidden = dense(model, f"{name}.mlp.c_fc", layer_norm(model, f"{name}.ln_2", y, eps).output(), transposed=True)
        act = ACTIVATIONS[config.activation_function]
        mlp = dense(model, f"{name}.mlp.c_proj", act(hidden), transposed=True)
        blocks.append(Block(x, attended, mlp))
        x = y + mlp
    return read_decoder(model, embeddings, blocks, layer_norm(model, "transformer.ln_f", x, eps), position, rows)


def read_neox(model: tf.GPTNeoXForCausalLM, ids: list[int], position: int | None, rows: list[int]) -> Network:
    """GPT-NeoX: each head keeps its own query, key and value rows; partial rotary; MLP beside the attention."""
    config, eps = model.config, model.config.layer_norm_eps
    cos, sin = rotary(model.gpt_neox.rotary_emb, len(ids))
    x, blocks = weight(model, "gpt_neox.embed_in.weight", ids), []
    embeddings = {"token": x}
    for index in range(config.num_hidden_layers):
        name = f"gpt_neox.layers.{index}"
        normed = layer_norm(model, f"{name}.input_layernorm", x, eps).output()
        qkv = heads_of(dense(model, f"{name}.attention.query_key_value", normed), config.num_attention_heads)
        q, k, v = np.split(qkv, 3, axis=-1)
        scale = q.shape[-1] ** -0.5
        weights = attention_weights(turn(q, cos, sin), turn(k, cos, sin), scale)
        attended = attention(model, f"{name}.attention.dense", weights, v)
        y = x + attended.output()
        read = x if config.use_parallel_residual else y
        normed = layer_norm(model, f"{name}.post_attention_layernorm", read, eps).output()
        hidden = ACTIVATIONS[config.hidden_act](dense(model, f"{name}.mlp.dense_h_to_4h", normed))
        mlp = dense(model, f"{name}.mlp.dense_4h_to_h", hidden)
        blocks.append(Block(x, attended, mlp))
        x = y + mlp
    final = layer_norm(model, "gpt_neox.final_layer_norm", x, eps)
    return read_decoder(model, embeddings, blocks, final, position, rows)


def read_llama(
    model: tf.LlamaForCausalLM | tf.Gemma2ForCausalLM, ids: list[int], position: int | None, rows: list[int]
) -> Network:
    """Llama, and Gemma 2 as a Llama with four norms a layer, caps, windows and a scaled embedding."""
    config, eps, gemma = model.config, model.config.rms_norm_eps, isinstance(model, tf.Gemma2ForCausalLM)
    plus = 1.0 if gemma else 0.0
    shared = config.num_attention_heads // config.num_key_value_heads
    cos, sin = rotary(model.model.rotary_emb, len(ids))
    x, blocks = weight(model, "model.embed_tokens.weight", ids), []
    x = x * float(model.model.embed_tokens.embed_scale) if gemma else x
    embeddings = {"token": x}
    for index in range(config.num_hidden_layers):
        name = f"model.layers.{index}"
        normed = rms_norm(model, f"{name}.input_layernorm", x, eps, plus).output()
        q, k, v = (dense(model, f"{name}.self_attn.{part}_proj", normed) for part in "qkv")
        q = turn(heads_of(q, config.num_attention_heads), cos, sin)
        k = turn(heads_of(k, config.num_key_value_heads, shared), cos, sin)
        v = heads_of(v, config.num_key_value_heads, shared)
        if gemma:
            window = config.sliding_window if config.layer_types[index] == "sliding_attention" else None
            scale, cap = config.query_pre_attn_scalar**-0.5, config.attn_logit_softcapping
            weights = attention_weights(q, k, scale, window=window, cap=cap)
        else:
            weights = attention_weights(q, k, config.head_dim**-0.5)
        attended = attention(model, f"{name}.self_attn.o_proj", weights, v)
        branch, second = attended.output(), "pre_feedforward_layernorm" if gemma else "post_attention_layernorm"
        branch_norm = rms_norm(model, f"{name}.post_attention_layernorm", branch, eps, plus) if gemma else None
        y = x + (branch if branch_norm is None else branch_norm.output())
        normed = rms_norm(model, f"{name}.{second}", y, eps, plus).output()
        act = ACTIVATIONS[config.hidden_activation if gemma else config.hidden_act]
        gate = act(dense(model, f"{name}.mlp.gate_proj", normed))
        mlp = dense(model, f"{name}.mlp.down_proj", gate * dense(model, f"{name}.mlp.up_proj", normed))
        mlp = rms_norm(model, f"{name}.post_feedforward_layernorm", mlp, eps, plus).output() if gemma else mlp
        blocks.append(Block(x, attended, mlp, branch_norm))
        x = y + mlp
    cap = config.final_logit_softcapping if gemma else None
    return read_decoder(model, embeddings, blocks, rms_norm(model, "model.norm", x, eps, plus), position, rows, cap)


def read_bert(
    model: tf.BertForMaskedLM | tf.BertForSequenceClassification, ids: list[int], position: int | None, rows: list[int]
) -> Network:
    """BERT, post-norm: the residual path passes two norms a layer, then the masked LM head or the pooler."""
    config, eps, classifies = model.config, model.config.layer_norm_eps, position is None
    if classifies != isinstance(model, tf.BertForSequenceClassification):
        raise ValueError("a language model is explained at a position, a classifier at none")
    t = 0 if position is None else range(len(ids))[position]  # the pooler reads the first token
    name, act = "bert.embeddings", ACTIVATIONS[config.hidden_act]
    embeddings = {
        "token": weight(model, f"{name}.word_embeddings.weight", ids),
        "position": weight(model, f"{name}.position_embeddings.weight")[: len(ids)],
        "token_type": weight(model, f"{name}.token_type_embeddings.weight", [0] * len(ids)),
    }
    norms, blocks = [layer_norm(model, f"{name}.LayerNorm", sum(embeddings.values()), eps)], []
    for index in range(config.num_hidden_layers):
        name, x = f"bert.encoder.layer.{index}", norms[-1].output()
        parts = (dense(model, f"{name}.attention.self.{part}", x) for part in ("query", "key", "value"))
        q, k, v = (heads_of(part, config.num_attention_heads) for part in parts)
        weights = attention_weights(q, k, q.shape[-1] ** -0.5, causal=False)
        attended = attention(model, f"{name}.attention.output.dense", weights, v)
        first = layer_norm(model, f"{name}.attention.output.LayerNorm", x + attended.output(), eps)
        hidden = act(dense(model, f"{name}.intermediate.dense", first.output()))
        mlp = dense(model, f"{name}.output.dense", hidden)
        second = layer_norm(model, f"{name}.output.LayerNorm", first.output() + mlp, eps)
        entry = len(norms)
        blocks.append(Block(x, attended, mlp, None, first, attention_enters=entry, mlp_enters=entry + 1))
        norms += [first, second]
    path = [Stage(lambda v, norm=norm: norm.linear(v, t), norm.beta, norm.name) for norm in norms]

    name = "bert.pooler.dense" if classifies else "cls.predictions.transform.dense"
    matrix, constant = weight(model, f"{name}.weight"), weight(model, f"{name}.bias")
    before = matrix @ norms[-1].output()[t] + constant
    after = (np.tanh if classifies else act)(before)
    path += [Stage(lambda v: matrix @ v, constant, f"{name}.bias"), Stage(lambda v: ratio(after, before) * v)]
    if classifies:
        value, head = read_head(model, "classifier", rows, after)
    else:
        last = layer_norm(model, "cls.predictions.transform.LayerNorm", after[None], eps)
        path.append(Stage(lambda v: last.linear(v, 0), last.beta, last.name))
        value, head = read_head(
            model, "cls.predictions.decoder", rows, last.output()[0], bias_name="cls.predictions.bias"
        )
    return Network(value, {kind: part[t] for kind, part in embeddings.items()}, blocks, [*path, *head], t)


READERS = {
    tf.GPT2LMHeadModel: read_gpt2,
    tf.LlamaForCausalLM: read_llama,
    tf.Gemma2ForCausalLM: read_llama,
    tf.GPTNeoXForCausalLM: read_neox,
    tf.BertForMaskedLM: read_bert,
    tf.BertForSequenceClassification: read_bert,
}
