"""Slow twins of the methods of attention weights, in plain loops.

The weights and their gradients are those that transformers itself returns with eager attention.
"""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch


def attentions(model, read, **inputs):
    """``[(kind, weights [H, Q, K], gradients [H, Q, K])]`` in the order of the forward pass, of one input.

    Args:
        model: with eager attention.
        read: from the output to the explained value.
        inputs: the model's arguments, for one row.
    """
    embedded = [module.weight.requires_grad_() for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    try:
        output = model(**inputs, output_attentions=True)
        if hasattr(output, "encoder_attentions"):
            found = [("encoder", each) for each in output.encoder_attentions]
            for own, cross in zip(output.decoder_attentions, output.cross_attentions, strict=True):
                found += [("decoder", own), ("cross", cross)]
        else:
            found = [("self", each) for each in output.attentions]
        gradients = torch.autograd.grad(read(output), [each for _, each in found], allow_unused=True)
    finally:
        for weight in embedded:
            weight.requires_grad_(False)
    return [
        (kind, each[0].detach().double().numpy(), np.zeros(each.shape[1:]) if g is None else g[0].double().numpy())
        for (kind, each), g in zip(found, gradients, strict=True)
    ]


def discarded(fused, share, outliers):
    """The share of the weights above 0 that is lowest or highest, set to 0."""
    places = [(fused[i, j], i, j) for i in range(len(fused)) for j in range(fused.shape[1]) if fused[i, j] > 0]
    places.sort(reverse=outliers == "highest")
    result = fused.copy()
    for _, i, j in places[: int(share * len(places) + 1e-9)]:
        result[i, j] = 0.0
    return result


def rollout(layers, lengths, read, fusion="mean", share=0.0, outliers="lowest"):
    """Abnar & Zuidema 2020: from each position that is read, all ways down, each worth the product of its steps."""
    count, first = sum(lengths), lengths[0]
    where = {"self": (0, 0), "encoder": (0, 0), "decoder": (first, first), "cross": (first, 0)}
    steps = []
    for kind, weights, _ in layers:
        fused = discarded({"mean": np.mean, "max": np.max, "min": np.min}[fusion](weights, axis=0), share, outliers)
        step = np.eye(count)
        q, k = where[kind]
        for i in range(len(fused)):
            row = np.eye(count)[q + i]
            for j in range(fused.shape[1]):
                row[k + j] += fused[i, j]
            step[q + i] = row / row.sum()
        steps.append(step)
    found = np.zeros(count)
    for position in read:
        shares = np.eye(count)[position + (0 if len(lengths) == 1 else first)]
        for step in reversed(steps):
            shares = np.array([sum(shares[i] * step[i, j] for i in range(count)) for j in range(count)])
        found += shares / len(read)
    return found


def normalised(relevance):
    """Chefer et al. 2021a, Eq. 8 and 9."""
    added = relevance - np.eye(len(relevance))
    for i in range(len(added)):
        added[i] = added[i] / added[i].sum() if added[i].sum() > 0 else 0.0
    return added + np.eye(len(relevance))


def gradient_rollout(layers, lengths, read, share=0.0, outliers="lowest"):
    """Chefer et al. 2021a, Eq. 5 to 10."""
    own = [np.eye(length) for length in lengths]
    across = np.zeros((lengths[-1], lengths[0]))
    for kind, weights, gradient in layers:
        mean = discarded(np.mean(np.maximum(weights * gradient, 0.0), axis=0), share, outliers)  # Eq. 5
        if kind in ("self", "encoder"):
            own[0] = own[0] + mean @ own[0]  # Eq. 6
        elif kind == "decoder":
            own[1], across = own[1] + mean @ own[1], across + mean @ across  # Eq. 6, 7
        else:
            across = across + normalised(own[1]).T @ mean @ normalised(own[0])  # Eq. 10
    rows = []
    for position in read:
        mine = own[-1][position] - np.eye(lengths[-1])[position]
        rows.append(mine if len(lengths) == 1 else np.concatenate([across[position], mine]))
    return np.mean(rows, axis=0)


def grad_cam(layers, lengths, read):
    """Heads of the last attention as channels, weighted by their mean gradient."""
    last = {kind: (weights, gradient) for kind, weights, gradient in layers}
    found = []
    for kind in ("self",) if len(lengths) == 1 else ("cross", "decoder"):
        weights, gradient = last[kind]
        cams = []
        for i in read:
            cam = np.zeros(weights.shape[2])
            for h in range(len(weights)):
                seen = [j for j in range(weights.shape[2]) if weights[h, i, j] > 0]
                channel = np.mean([gradient[h, i, j] for j in seen])
                for j in seen:
                    cam[j] += channel * weights[h, i, j] / len(weights)
            cams.append(np.maximum(cam, 0.0))
        found.append(np.mean(cams, axis=0))
    return np.concatenate(found)


@contextmanager
def only_in(module):
    """Inside, a list that is empty but while the module runs."""
    running = []
    hooks = [
        module.register_forward_pre_hook(lambda *_: running.append(True)),
        module.register_forward_hook(lambda *_: running.clear()),
    ]
    try:
        yield running
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def turned_down(factors, lengths, inside):
    """Inside, softmaxes of attention scores at the first segment's tokens have these multiplied by ``factors [T]``."""
    shapes = {(lengths[0], lengths[0])} | ({(lengths[1], lengths[0])} if len(lengths) > 1 else set())
    plain = torch.nn.functional.softmax

    def changed(scores, *args, **kwargs):
        if scores.ndim == 4 and tuple(scores.shape[-2:]) in shapes and (inside is None or inside):
            scores = torch.where(scores < -5e3, scores, scores * torch.tensor(factors, dtype=scores.dtype))
        return plain(scores, *args, **kwargs)

    with mock.patch.object(torch.nn.functional, "softmax", changed):
        yield


def atman(model, read, lengths, suppression, likeness=None, inside=None, **inputs):
    """``f(x) − f(x with token i turned down)``, one run for each token (Deb et al. 2023); ``inside``: of
    :func:`only_in`, where not all attention is the tokens'."""

    def value():
        with torch.no_grad():
            return float(read(model(**inputs)))

    whole = value()
    found = np.zeros(sum(lengths))
    for i in range(lengths[0]):
        s = np.eye(lengths[0])[i] if likeness is None else likeness[i]
        with turned_down([1 - suppression * s[k] for k in range(lengths[0])], lengths, inside):
            found[i] = whole - value()
    return found
