"""Transformers compiled from programs (Lindner et al. 2023), by ``training/compiled.py``: what is in them is known."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn


class Attention(nn.Module):
    """Softmax attention of one head over all positions."""

    def __init__(self, d: int, k: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.linear = (
            nn.Linear(d, k),
            nn.Linear(d, k),
            nn.Linear(d, k),
            nn.Linear(k, d),
        )

    def forward(self, x):
        q, k, v = (each(x).unsqueeze(1) for each in (self.query, self.key, self.value))
        weights = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)
        return self.linear((weights @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, d: int, m: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(d, m), nn.Linear(m, d)

    def forward(self, x):
        return self.linear_2(torch.relu(self.linear_1(x)))


class Layer(nn.Module):
    def __init__(self, d: int, k: int, m: int) -> None:
        super().__init__()
        self.attn, self.mlp = Attention(d, k), Mlp(d, m)

    def forward(self, x):
        x = x + self.attn(x)
        return x + self.mlp(x)


class Compiled(nn.Module):
    """A compiled program: token ids ``[B, T]``, the first of them BOS, to logits of what it gives ``[B, T, V]``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        with safe_open(Path(__file__).with_name("compiled.safetensors"), "pt") as file:
            notes = json.loads(file.metadata()[name])
            weights = {key: file.get_tensor(key) for key in file.keys() if key.startswith(f"{name}/")}  # noqa: SIM118
        tokens, places = (weights[f"{name}/{each}_embed/embeddings"] for each in ("token", "pos"))
        k = weights[f"{name}/transformer/layer_0/attn/key/w"].shape[1]
        m = weights[f"{name}/transformer/layer_0/mlp/linear_1/w"].shape[1]
        self.tokens, self.places = (nn.Embedding.from_pretrained(each) for each in (tokens, places))
        self.layers = nn.ModuleList(Layer(tokens.shape[1], k, m) for _ in range(notes["layers"]))
        self.head = nn.Linear(tokens.shape[1], len(notes["out"]), bias=False)
        self.encoding, self.labels = notes["encoding"], notes["labels"]
        with torch.no_grad():
            for number, layer in enumerate(self.layers):
                for part in ("attn.query", "attn.key", "attn.value", "attn.linear", "mlp.linear_1", "mlp.linear_2"):
                    found = f"{name}/transformer/layer_{number}/{part.replace('.', '/')}"
                    module = layer.get_submodule(part)
                    module.weight.copy_(weights[f"{found}/w"].T)
                    module.bias.copy_(weights[f"{found}/b"])
            self.head.weight.zero_()
            self.head.weight[torch.arange(len(notes["out"])), torch.tensor(notes["out"])] = 10.0  # no probabilities
        self.double().eval().requires_grad_(False)

    def get_input_embeddings(self):
        return self.tokens

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids):
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def ids(self, letters: str) -> list[int]:
        """Of BOS and some letters."""
        return [self.encoding["BOS"], *(self.encoding[each] for each in letters)]
