"""Train a small sparse autoencoder on a layer's output of a language model, for the pages on features.

    python training/sae.py --data texts.txt --layer 3 --out runs/sae [--model FOLDER] [--features 2048] [--k 16]

A TopK autoencoder (Gao et al. 2024) of one pass over the texts: the encoder starts as the decoder's transpose, the
decoder's bias as the mean, the decoder's rows have length 1. The texts' first tokens, which many models park attention
at and whose norm is many times the others', are left out. The last tenth of the texts is held out; log.jsonl has the
share of its variance that is explained, and how many features are ever active on it. Written as SAELens writes them.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lrpx._data.texts import read_texts
from lrpx.model import BoundModel, Spec
from lrpx.sae import SparseAutoencoder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SEED = 1
RATE, TOKENS, ROWS, LENGTH = 3e-3, 512, 32, 64


def streams(model: BoundModel, texts: Sequence[str], path: str) -> Iterator[torch.Tensor]:
    """What a module puts out, ``[N, d]``, for batches of texts, without their first tokens and the padding."""
    tokenizer, kept = model.tokenizer, []
    pad = tokenizer.pad_token_id or 0
    handle = model.module.get_submodule(path).register_forward_hook(
        lambda _, __, out: kept.append(out if isinstance(out, torch.Tensor) else out[0])
    )
    try:
        for start in range(0, len(texts), ROWS):
            ids = [tokenizer(text)["input_ids"][:LENGTH] for text in texts[start : start + ROWS]]
            width = max(map(len, ids))
            padded = torch.tensor([[*each, *[pad] * (width - len(each))] for each in ids])
            real = torch.arange(width) < torch.tensor([len(each) for each in ids])[:, None]
            with torch.no_grad():
                model.module(input_ids=padded, attention_mask=real.long())
            real[:, 0] = False
            yield kept.pop()[real].float()
    finally:
        handle.remove()


def explained(sae: SparseAutoencoder, held: torch.Tensor) -> tuple[float, int]:
    """The share of the variance that the autoencoder explains, and how many features are ever active."""
    features = sae.encode(held)
    missed = (held - sae.decode(features)).square().sum()
    return float(1 - missed / (held - held.mean(0)).square().sum()), int((features > 0).any(0).sum())


def train(
    model: BoundModel, texts: Sequence[str], layer: int, count: int, k: int, say: Any = lambda **_: None
) -> SparseAutoencoder:
    """An autoencoder of ``count`` features, ``k`` of them active, of what layer ``layer`` puts out."""
    hook = f"blocks.{layer}.hook_resid_post"
    none = torch.zeros(0, 0), torch.zeros(0), torch.zeros(0, 0), torch.zeros(0)
    path = SparseAutoencoder(*none, hook=hook).path(model)
    split = len(texts) - max(1, len(texts) // 10)
    held = torch.cat(list(streams(model, texts[split:], path)))
    draw = torch.Generator().manual_seed(SEED)
    first = next(streams(model, texts[:split], path))
    directions = torch.nn.functional.normalize(torch.randn(count, first.shape[1], generator=draw), dim=1)
    weights = [directions.T.clone(), torch.zeros(count), directions.clone(), first.mean(0)]
    for each in weights:
        each.requires_grad_()
    optimizer = torch.optim.Adam(weights, lr=RATE)
    seen, shown, pool = 0, 0.0, torch.empty(0, first.shape[1])

    def current() -> SparseAutoencoder:
        return SparseAutoencoder(*(each.detach() for each in weights), activation="topk", k=k, centred=True, hook=hook)

    for batch in streams(model, texts[:split], path):
        pool = torch.cat([pool, batch[torch.randperm(len(batch), generator=draw)]])
        while len(pool) >= TOKENS:
            x, pool = pool[:TOKENS], pool[TOKENS:]
            sae = SparseAutoencoder(*weights, activation="topk", k=k, centred=True)
            loss = (x - sae.decode(sae.encode(x))).square().sum() / (x - x.mean(0)).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                weights[2] /= weights[2].norm(dim=1, keepdim=True)
            seen, shown = seen + len(x), float(loss.detach())
            if seen // TOKENS % 100 == 0:
                say(tokens=seen, loss=round(shown, 4))
    share, alive = explained(current(), held)
    say(tokens=seen, held_tokens=len(held), explained=round(share, 4), active_features=alive, features=count)
    return current()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", help="the bundled model by default")
    parser.add_argument("--layer", type=int, default=3)
    parser.add_argument("--features", type=int, default=2048)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--limit", type=int)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with open(options.out / "log.jsonl", "w", encoding="utf-8") as log:

        def say(**facts: Any) -> None:
            line = json.dumps(facts | {"seconds": round(time.perf_counter() - began)})
            print(line, flush=True)
            print(line, file=log, flush=True)

        model = Spec(options.model, "float32").build()
        texts = [each.text for each in read_texts(options.data, label=None, limit=options.limit)]
        train(model, texts, options.layer, options.features, options.k, say).save(options.out)


if __name__ == "__main__":
    main()
