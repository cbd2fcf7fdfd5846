"""Leave-one-out from its definition (You et al. 2025, §2): one run of the model for each token, nothing batched."""

from __future__ import annotations

import torch


def leave_one_out(model, ids, read, **more):
    """``f(x) − f(x without i)`` for every token ``i``.

    Args:
        model: takes ``input_ids`` and ``attention_mask``.
        ids: the token ids.
        read: from the model's output for one input to the explained value.
        more: other arguments, such as the places of the tokens.
    """

    def value(mask):
        with torch.no_grad():
            return float(read(model(input_ids=torch.tensor([ids]), attention_mask=torch.tensor([mask]), **more)))

    whole = value([1] * len(ids))
    found = []
    for i in range(len(ids)):
        mask = [1] * len(ids)
        mask[i] = 0
        found.append(whole - value(mask))
    return torch.tensor(found, dtype=torch.float64)


def deleted(model, ids, read):
    """The same where a token is taken out of the text; equal in a model that knows no positions."""

    def value(kept):
        with torch.no_grad():
            return float(read(model(input_ids=torch.tensor([kept]))))

    whole = value(ids)
    return torch.tensor([whole - value(ids[:i] + ids[i + 1 :]) for i in range(len(ids))], dtype=torch.float64)
