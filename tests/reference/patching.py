"""Twins of patching and of circuits: a Llama written out, its stream kept as the list of what was written into it.

Rules are modified forward passes; gradients are torch's. Nothing of lrpx is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Callable

PLAIN, RELP, ATTNLRP = "plain", "relp", "attnlrp"


def half(a: Tensor, b: Tensor, of: Callable[[Tensor, Tensor], Tensor], rules: str) -> Tensor:
    """A product of two that depend on the input, half of its gradient to each."""
    product = of(a, b)
    return product if rules == PLAIN else 0.5 * product + 0.5 * product.detach()


def norm(x: Tensor, weight: Tensor, eps: float, rules: str) -> Tensor:
    root = (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()
    return x / (root if rules == PLAIN else root.detach()) * weight


def silu(x: Tensor, rules: str) -> Tensor:
    y = x / (1 + torch.exp(-x))
    return y if rules == PLAIN else x * (y / x).detach()


class Twin:
    """A Llama of transformers, written out.

    ``note(kind, layer, value)`` sees every value that may be patched, and gives what stands in its place; ``mix(reader,
    writes)`` gives a reader what it reads of the list of writes.
    """

    def __init__(self, model, note=None, mix=None, rules=PLAIN):
        self.model = model
        self.note = note or (lambda kind, layer, value: value)
        self.mix = mix or (lambda reader, writes: sum(writes))
        self.rules = rules

    def logits(self, ids, start=None) -> Tensor:
        """``[V]`` of the last position; ``start``: other embeddings ``[T, d]``."""
        inner, config = self.model.model, self.model.config
        heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        writes = [inner.embed_tokens.weight[torch.tensor(ids)].detach() if start is None else start]
        writes = [self.note("embeddings", 0, writes[0])]
        place = torch.arange(len(ids))[None]
        cos, sin = (each[0] for each in inner.rotary_emb(writes[0][None], place))
        reader = 0
        for number, layer in enumerate(inner.layers):
            attention = layer.self_attn
            x = norm(self.mix(reader, writes), layer.input_layernorm.weight, config.rms_norm_eps, self.rules)
            reader += 1
            q, k, v = (x @ each.weight.T for each in (attention.q_proj, attention.k_proj, attention.v_proj))
            read = []
            for head in range(heads):
                group = head // (heads // groups)
                mine = slice(head * width, (head + 1) * width)
                theirs = slice(group * width, (group + 1) * width)
                scores = half(turn(q[:, mine], cos, sin), turn(k[:, theirs], cos, sin).T, torch.matmul, self.rules)
                scores = scores / width**0.5
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
                weights = scores.softmax(-1)
                if self.rules == RELP:
                    read.append(weights.detach() @ v[:, theirs])
                else:
                    read.append(half(weights, v[:, theirs], torch.matmul, self.rules))
            together = self.note("heads", number, torch.cat(read, -1))
            output = attention.o_proj.weight.T
            parts = [
                together[:, head * width : (head + 1) * width] @ output[head * width : (head + 1) * width]
                for head in range(heads)
            ]
            whole = sum(parts)
            noted = self.note("attention", number, whole)
            writes = [*writes, *parts] if noted is whole else [*writes, noted]
            x = norm(self.mix(reader, writes), layer.post_attention_layernorm.weight, config.rms_norm_eps, self.rules)
            reader += 1
            gate = silu(x @ layer.mlp.gate_proj.weight.T, self.rules)
            neurons = half(gate, x @ layer.mlp.up_proj.weight.T, torch.mul, self.rules)
            neurons = self.note("neurons", number, neurons)
            writes = [*writes, self.note("mlp", number, neurons @ layer.mlp.down_proj.weight.T)]
            whole = sum(writes)
            noted = self.note("residual", number, whole)
            writes = writes if noted is whole else [noted]
        x = norm(self.mix(reader, writes), inner.norm.weight, config.rms_norm_eps, self.rules)
        return x[-1] @ self.model.lm_head.weight.T


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def values(model, ids) -> dict[tuple[str, int], Tensor]:
    """Every value that may be patched."""
    found = {}

    def note(kind, layer, value):
        found[kind, layer] = value.detach()
        return value

    Twin(model, note).logits(ids)
    return found


def parts(kind: str, value: Tensor, units: int) -> list[tuple[slice, slice]]:
    """Rows and columns of each part of a value ``[T, w]``."""
    if kind in ("residual", "attention", "mlp"):
        return [(slice(at, at + 1), slice(None)) for at in range(len(value))]
    width = value.shape[1] // units
    return [(slice(None), slice(at * width, (at + 1) * width)) for at in range(units)]


def exact(model, clean, corrupt, kind, units, right, wrong) -> Tensor:
    """``[L, parts]``: one part after another."""
    other = values(model, corrupt)

    def value(patch=None) -> float:
        def note(each, layer, there):
            if patch is None or (each, layer) != patch[:2]:
                return there
            changed = there.clone()
            changed[patch[2]] = other[each, layer][patch[2]]
            return changed

        logits = Twin(model, note).logits(clean)
        return float(logits[right] - logits[wrong])

    before = value()
    layers = [layer for each, layer in other if each == kind]
    return torch.tensor(
        [
            [value((kind, layer, where)) - before for where in parts(kind, other[kind, layer], units)]
            for layer in layers
        ],
        dtype=torch.float64,
    )


def attributed(model, clean, corrupt, kind, units, right, wrong, rules, steps=1) -> Tensor:
    """``[L, parts]``: ``Σ (a_corrupt − a_clean) · ∂``, the gradient's mean over points from corrupt to clean."""
    ours, other = values(model, clean), values(model, corrupt)
    layers = [layer for each, layer in other if each == kind]
    gradients = {layer: torch.zeros_like(ours[kind, layer]) for layer in layers}
    for step in range(1, steps + 1):
        start = other["embeddings", 0] + step / steps * (ours["embeddings", 0] - other["embeddings", 0])
        leaves = {}

        def note(each, layer, there):
            if each == "embeddings":
                return there.clone().requires_grad_()
            if each == kind:
                leaves[layer] = there = there * 1  # noqa: B023
            return there

        logits = Twin(model, note, rules=rules).logits(clean, start)
        found = torch.autograd.grad(logits[right] - logits[wrong], [leaves[layer] for layer in layers])
        for layer, gradient in zip(layers, found, strict=True):
            gradients[layer] += gradient / steps
    table = []
    for layer in layers:
        product = (other[kind, layer] - ours[kind, layer]) * gradients[layer]
        table.append([float(product[where].sum()) for where in parts(kind, product, units)])
    return torch.tensor(table, dtype=torch.float64)


def all_writes(model, ids) -> list[Tensor]:
    """What each writer writes."""
    found = []
    Twin(model, mix=lambda _, writes: found.append(writes) or sum(writes)).logits(ids)
    return [each.detach() for each in found[-1]]


def edge_scores(model, clean, corrupt, right, wrong, rules, steps=1) -> list[list[float]]:
    """``[readers][writers before it]``."""
    ours, other = all_writes(model, clean), all_writes(model, corrupt)
    found: list[list[float]] = []
    for step in range(1, steps + 1):
        read = []

        def mix(_, writes):
            read.append((len(writes), sum(writes) * 1))  # noqa: B023
            return read[-1][1]  # noqa: B023

        def note(each, _, there):
            return there.clone().requires_grad_() if each == "embeddings" else there

        start = other[0] + step / steps * (ours[0] - other[0])
        logits = Twin(model, note, mix, rules).logits(clean, start)
        gradients = torch.autograd.grad(logits[right] - logits[wrong], [value for _, value in read])
        for number, ((count, _), gradient) in enumerate(zip(read, gradients, strict=True)):
            if len(found) == number:
                found.append([0.0] * count)
            for writer in range(count):
                found[number][writer] += float(((other[writer] - ours[writer]) * gradient).sum()) / steps
    return found


def circuit(model, clean, corrupt, right, wrong, kept) -> float:
    """The value where ``kept[reader][writer]`` says which edges are as they are in this run."""
    other = all_writes(model, corrupt)

    def mix(reader, writes):
        chosen = [each if kept[reader][number] else other[number] for number, each in enumerate(writes)]
        return sum(chosen)

    logits = Twin(model, mix=mix).logits(clean)
    return float(logits[right] - logits[wrong])
