"""Slow twins of the perturbation metrics and of the ways to hide a token, from the papers, in plain loops.

A metric's twin takes the relevance ``[N]`` and ``value``, from a frozenset of hidden token numbers to a number; it asks
for each set where it needs it. Where tokens are tied, a curve is the straight line between the ends of the tie.
"""

from __future__ import annotations

import math
from fractions import Fraction

import torch


def curve_at(relevance, value, count, *, most_first, insert=False):
    """The value with ``count`` tokens hidden (shown, if ``insert``), the most or the least relevant first."""
    everything = frozenset(range(len(relevance)))
    levels = sorted(set(relevance), reverse=most_first)
    taken, groups = 0, []
    for level in levels:
        group = [i for i in range(len(relevance)) if relevance[i] == level]
        groups.append((taken, taken + len(group), group))
        taken += len(group)

    def at_end(size):
        chosen = frozenset(i for _, end, group in groups if end <= size for i in group)
        return value(everything - chosen if insert else chosen)

    for begin, end, _ in groups:
        if count == begin:
            return at_end(begin)
        if begin < count < end:
            share = (count - begin) / (end - begin)
            return (1 - share) * at_end(begin) + share * at_end(end)
    return at_end(len(relevance))


def pearson(a, b):
    if len(set(a)) == 1 or len(set(b)) == 1:
        return 0.0
    a, b = [Fraction(x) for x in a], [Fraction(x) for x in b]
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    both = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True))
    sizes = sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b)
    return math.copysign(math.sqrt(both**2 / sizes), both)


def rank(values):
    """The mean place, from 1, over all orders of tied values."""
    found = []
    for each in values:
        below = sum(other < each for other in values)
        same = sum(other == each for other in values)
        found.append(below + (same + 1) / 2)
    return found


def lost(relevance, value):
    found = [value(frozenset()) - value(frozenset([i])) for i in range(len(relevance))]
    nothing = max(found) - min(found) <= 1e-5 * max(1.0, abs(value(frozenset())))  # but for rounding
    return [0.0] * len(found) if nothing else found


def loo_pearson(relevance, value):
    return pearson(relevance, lost(relevance, value))


def loo_pearson_normalised(relevance, value):
    loo = lost(relevance, value)
    if math.fsum(relevance) == 0 or math.fsum(loo) == 0:
        return 0.0
    return pearson([r / math.fsum(relevance) for r in relevance], [each / math.fsum(loo) for each in loo])


def loo_spearman(relevance, value):
    return pearson(rank(relevance), rank(lost(relevance, value)))


def spaced(count, steps):
    """0 to ``count`` in ``min(steps, count)`` steps, each rounded, halves up."""
    steps = min(steps, count)
    return [math.floor(Fraction(i * count, steps) + Fraction(1, 2)) for i in range(steps + 1)]


def mean_value(relevance, value, steps, most_first):
    counts = spaced(len(relevance), steps)
    return sum(curve_at(relevance, value, n, most_first=most_first) for n in counts) / len(counts)


def area(relevance, value, steps, most_first, insert):
    counts = spaced(len(relevance), steps)
    heights = [curve_at(relevance, value, n, most_first=most_first, insert=insert) for n in counts]
    total = 0.0
    for i in range(len(counts) - 1):
        total += (heights[i] + heights[i + 1]) / 2 * (counts[i + 1] - counts[i])
    return total / len(relevance)


def in_chunks(relevance, value, size=16):
    """Relevance and value of chunks of neighbouring tokens, each of which is hidden as a whole."""
    chunks = [range(start, min(start + size, len(relevance))) for start in range(0, len(relevance), size)]
    sums = [sum(relevance[i] for i in chunk) for chunk in chunks]
    return sums, lambda hidden: value(frozenset(i for chunk in hidden for i in chunks[chunk]))


def _tenths(relevance, value, *, most_first, insert):
    count = len(relevance)
    heights = [
        curve_at(relevance, value, math.ceil(Fraction(i, 10) * count), most_first=most_first, insert=insert)
        for i in range(11)
    ]
    return sum((heights[i] + heights[i + 1]) / 20 for i in range(10))


def generation(relevance, value):
    return _tenths(relevance, value, most_first=True, insert=True)


def pruning(relevance, value):
    return _tenths(relevance, value, most_first=False, insert=False)


def eraser(relevance, value, *, alone):
    """Comprehensiveness, or with the top part alone sufficiency."""
    total = 0.0
    for percent in (1, 5, 10, 20, 50):
        count = math.ceil(Fraction(percent, 100) * len(relevance))
        total += value(frozenset()) - curve_at(relevance, value, count, most_first=True, insert=alone)
    return total / 5


def _groups(relevance):
    """How many tokens are hidden after each of 20 groups, or of as many as there are tokens."""
    count = len(relevance)
    steps = min(20, count)
    counts = [0]
    for step in range(steps):
        counts.append(counts[-1] + count // steps + (1 if step < count % steps else 0))
    return counts


def _response(relevance, value):
    heights = [curve_at(relevance, value, n, most_first=True) for n in _groups(relevance)]
    first, last = heights[0], heights[-1]
    least, found = 1.0, []
    for height in heights:
        nothing = abs(first - last) <= 1e-5 * max(1.0, abs(first))  # but for rounding
        scaled = 1.0 if nothing else min(1.0, max(0.0, (height - last) / abs(first - last)))
        least = min(least, scaled)
        found.append(least)
    return found


def _auc(heights):
    return (sum(heights) - heights[0] / 2 - heights[-1] / 2) / (len(heights) - 1)


def rise(relevance, value):
    return _auc(_response(relevance, value))


def mas(relevance, value):
    response, counts, total = _response(relevance, value), _groups(relevance), math.fsum(relevance)

    def left(hidden):
        return 1.0 - math.fsum(relevance[i] for i in hidden) / total

    if total > 0:
        density = [curve_at(relevance, left, n, most_first=True) for n in counts]
    else:
        density = [1.0 - i / (len(counts) - 1) for i in range(len(counts))]
    corrected = [min(1.0, max(0.0, c + abs(c - d))) for c, d in zip(response, density, strict=True)]
    low, high = min(corrected), max(corrected)
    return 0.5 if low == high else _auc([(each - low) / (high - low) for each in corrected])


def _flipping(most_first, insert):
    return lambda r, f, steps: area(r, f, steps, most_first, insert)


def _aopc(most_first):
    return lambda r, f, steps: mean_value(r, f, steps, most_first)


def _chunked(most_first):
    return lambda r, f, steps: mean_value(*in_chunks(r, f), steps, most_first)


def _less(a, b):
    return lambda r, f, steps: a(r, f, steps) - b(r, f, steps)


def _stepless(twin):
    return lambda r, f, steps: twin(r, f)


METRICS = {
    "LOO Pearson": _stepless(loo_pearson),
    "LOO Pearson Σ": _stepless(loo_pearson_normalised),
    "LOO Spearman": _stepless(loo_spearman),
    "AOPC MoRF": _aopc(True),
    "AOPC LeRF": _aopc(False),
    "AOPC Δ": _less(_aopc(False), _aopc(True)),
    "AOPC16 MoRF": _chunked(True),
    "AOPC16 LeRF": _chunked(False),
    "AOPC16 Δ": _less(_chunked(False), _chunked(True)),
    "A flipping MoRF": _flipping(True, False),
    "A flipping LeRF": _flipping(False, False),
    "ΔA flipping": _less(_flipping(False, False), _flipping(True, False)),
    "A insertion MoRF": _flipping(True, True),
    "A insertion LeRF": _flipping(False, True),
    "ΔA insertion": _less(_flipping(True, True), _flipping(False, True)),
    "AUAC generation": _stepless(generation),
    "AU-MSE generation": _stepless(generation),
    "AUAC pruning": _stepless(pruning),
    "AU-MSE pruning": _stepless(pruning),
    "comprehensiveness": _stepless(lambda r, f: eraser(r, f, alone=False)),
    "sufficiency": _stepless(lambda r, f: eraser(r, f, alone=True)),
    "RISE": _stepless(rise),
    "MAS": _stepless(mas),
}
"""``(relevance, value, steps)``; the random parts are checked by what they are, not by what they draw."""


def hidden_output(model, ids, hidden, how, *, token=None, position=None):
    """The model's output for one text some tokens of which are hidden, alone in its batch.

    Args:
        model: takes ``input_ids``, ``attention_mask`` and ``inputs_embeds``.
        ids: the token ids.
        hidden: the numbers of the hidden tokens.
        how: one of the ways.
        token: what stands in a hidden token's place.
        position: where the logits are read, which sees itself alone where nothing else is left to see.

    Returns:
        The output, and where the position is now.
    """
    count = len(ids)
    places = {"position_ids": torch.arange(count)[None]} if how == "attention-mask" else {}
    kept = [i for i in range(count) if i not in hidden]
    with torch.no_grad():
        if how == "attention-mask":
            mask = [int(i not in hidden) for i in range(count)]
            if position is not None and not any(mask[: position + 1]):
                mask[position] = 1
            return model(input_ids=torch.tensor([ids]), attention_mask=torch.tensor([mask]), **places), position
        if how == "zero-embedding":
            embeddings = model.get_input_embeddings()(torch.tensor([ids])).clone()
            for i in hidden:
                embeddings[0, i] = 0.0
            return model(inputs_embeds=embeddings, attention_mask=torch.ones(1, count, dtype=torch.int64)), position
        if how == "delete":
            at = None if position is None else kept.index(position)
            left = torch.tensor([[ids[i] for i in kept]])
            return model(input_ids=left, attention_mask=torch.ones_like(left)), at
        changed = torch.tensor([[token if i in hidden else ids[i] for i in range(count)]])
        return model(input_ids=changed, attention_mask=torch.ones_like(changed)), position
