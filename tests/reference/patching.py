"""Twins of patching and of circuits: a Llama and a GPT-2 written out, the stream kept as the list of what was written.

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


def layer_norm(x: Tensor, module, rules: str) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    root = (centred.pow(2).mean(-1, keepdim=True) + module.eps).sqrt()
    return centred / (root if rules == PLAIN else root.detach()) * module.weight + module.bias


def gelu(x: Tensor, rules: str) -> Tensor:
    y = 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    return y if rules == PLAIN else x * (y / x).detach()


class Twin:
    """A Llama of transformers, written out.

    ``note(kind, layer, value)`` sees every value that may be patched, and gives what stands in its place; ``mix(reader,
    writes)`` gives a reader, by its number, what it reads of the list of writes. Readers are each head's queries, then
    each head's keys, then values, and the MLP; with ``whole`` an attention is one.
    """

    def __init__(self, model, note=None, mix=None, rules=PLAIN, whole=False):
        self.model = model
        self.note = note or (lambda kind, layer, value: value)
        self.mix = mix or (lambda reader, writes: sum(writes))
        self.rules = rules
        self.whole = whole
        self.reader = 0

    def read(self, writes, norm) -> Tensor:
        """What the next reader reads, behind its norm."""
        self.reader += 1
        return norm(self.mix(self.reader - 1, writes))

    def each(self, writes, norm, count) -> list[Tensor]:
        """What so many heads read, each for itself."""
        return [self.read(writes, norm) for _ in range(count)]

    def queries_keys_values(self, writes, norm, heads, groups) -> list[list[Tensor]]:
        if self.whole:
            x = self.read(writes, norm)
            return [[x] * heads, [x] * groups, [x] * groups]
        return [self.each(writes, norm, count) for count in (heads, groups, groups)]

    def attend(self, query, key, value) -> Tensor:
        """One head."""
        scores = half(query, key.T, torch.matmul, self.rules) / query.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        weights = scores.softmax(-1)
        return weights.detach() @ value if self.rules == RELP else half(weights, value, torch.matmul, self.rules)

    def written(self, writes, number, read, output) -> list[Tensor]:
        """The list, with what each head writes."""
        width = read[0].shape[-1]
        together = self.note("heads", number, torch.cat(read, -1))
        cuts = [slice(head * width, (head + 1) * width) for head in range(len(read))]
        parts = [together[:, cut] @ output[cut] for cut in cuts]
        whole = sum(parts)
        noted = self.note("attention", number, whole)
        return [*writes, *parts] if noted is whole else [*writes, noted]

    def behind(self, writes, number) -> list[Tensor]:
        """The list behind a layer."""
        whole = sum(writes)
        noted = self.note("residual", number, whole)
        return writes if noted is whole else [noted]

    def logits(self, ids, start=None) -> Tensor:
        """``[V]`` of the last position; ``start``: other embeddings ``[T, d]``."""
        inner, config = self.model.model, self.model.config
        heads, groups, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        writes = [inner.embed_tokens.weight[torch.tensor(ids)].detach() if start is None else start]
        writes = [self.note("embeddings", 0, writes[0])]
        place = torch.arange(len(ids))[None]
        cos, sin = (each[0] for each in inner.rotary_emb(writes[0][None], place))

        def normed(weight):
            return lambda x: norm(x, weight, config.rms_norm_eps, self.rules)

        for number, layer in enumerate(inner.layers):
            attention = layer.self_attn
            given = self.queries_keys_values(writes, normed(layer.input_layernorm.weight), heads, groups)
            made = []
            for each, matrix in zip(given, (attention.q_proj, attention.k_proj, attention.v_proj), strict=True):
                made.append([x @ matrix.weight[i * width : (i + 1) * width].T for i, x in enumerate(each)])
            queries, keys, values = made
            queries, keys = ([turn(x, cos, sin) for x in each] for each in (queries, keys))
            of = [head // (heads // groups) for head in range(heads)]
            read = [self.attend(queries[head], keys[of[head]], values[of[head]]) for head in range(heads)]
            writes = self.written(writes, number, read, attention.o_proj.weight.T)
            x = self.read(writes, normed(layer.post_attention_layernorm.weight))
            gate = silu(x @ layer.mlp.gate_proj.weight.T, self.rules)
            neurons = half(gate, x @ layer.mlp.up_proj.weight.T, torch.mul, self.rules)
            neurons = self.note("neurons", number, neurons)
            writes = [*writes, self.note("mlp", number, neurons @ layer.mlp.down_proj.weight.T)]
            writes = self.behind(writes, number)
        x = self.read(writes, normed(inner.norm.weight))
        return x[-1] @ self.model.lm_head.weight.T


class GPT2Twin(Twin):
    """A GPT-2 of transformers, whose queries, keys and values are one matrix; biases are no writer's, as nothing
    patches them."""

    def logits(self, ids, start=None) -> Tensor:
        inner, config = self.model.transformer, self.model.config
        heads, width = config.n_head, config.n_embd // config.n_head
        tokens = inner.wte.weight[torch.tensor(ids)] + inner.wpe.weight[: len(ids)]
        writes = [self.note("embeddings", 0, tokens.detach() if start is None else start)]
        for number, layer in enumerate(inner.h):
            given = self.queries_keys_values(writes, lambda x: layer_norm(x, layer.ln_1, self.rules), heads, heads)  # noqa: B023
            matrix, bias = layer.attn.c_attn.weight, layer.attn.c_attn.bias
            made = []
            for kind, each in enumerate(given):
                starts = [kind * config.n_embd + head * width for head in range(heads)]
                made.append(
                    [x @ matrix[:, i : i + width] + bias[i : i + width] for i, x in zip(starts, each, strict=True)]
                )
            read = [self.attend(*three) for three in zip(*made, strict=True)]
            writes = self.written(writes, number, read, layer.attn.c_proj.weight)
            writes = [*writes[:-1], writes[-1] + layer.attn.c_proj.bias]
            x = self.read(writes, lambda x: layer_norm(x, layer.ln_2, self.rules))  # noqa: B023
            neurons = gelu(x @ layer.mlp.c_fc.weight + layer.mlp.c_fc.bias, self.rules)
            written = self.note("neurons", number, neurons) @ layer.mlp.c_proj.weight + layer.mlp.c_proj.bias
            writes = self.behind([*writes, self.note("mlp", number, written)], number)
        x = self.read(writes, lambda x: layer_norm(x, inner.ln_f, self.rules))
        return x[-1] @ self.model.lm_head.weight.T


TWINS = {"LlamaForCausalLM": Twin, "GPT2LMHeadModel": GPT2Twin}


def twin_of(model, **how) -> Twin:
    return TWINS[type(model).__name__](model, **how)


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
    twin_of(model, mix=lambda _, writes: found.append(writes) or sum(writes)).logits(ids)
    return [each.detach() for each in found[-1]]


def edge_scores(model, clean, corrupt, right, wrong, rules, steps=1, whole=False) -> list[list[float]]:
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
        logits = twin_of(model, note=note, mix=mix, rules=rules, whole=whole).logits(clean, start)
        value, streams = logits[right] - logits[wrong], [stream for _, stream in read]
        gradients = torch.autograd.grad(value, streams, allow_unused=True)  # of queries and keys, under RelP's rules
        for number, ((count, stream), gradient) in enumerate(zip(read, gradients, strict=True)):
            if len(found) == number:
                found.append([0.0] * count)
            there = torch.zeros_like(stream) if gradient is None else gradient
            for writer in range(count):
                found[number][writer] += float(((other[writer] - ours[writer]) * there).sum()) / steps
    return found


def circuit(model, clean, corrupt, right, wrong, kept, whole=False) -> float:
    """The value where ``kept[reader][writer]`` says which edges are as they are in this run."""
    other = all_writes(model, corrupt)

    def mix(reader, writes):
        chosen = [each if kept[reader][number] else other[number] for number, each in enumerate(writes)]
        return sum(chosen)

    logits = twin_of(model, mix=mix, whole=whole).logits(clean)
    return float(logits[right] - logits[wrong])
