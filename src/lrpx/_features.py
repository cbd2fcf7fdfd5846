"""The relevance of an autoencoder's features: the result, which can be read and shown."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from lrpx._files import kept
from lrpx._views.picture import number, one_line, percent, share
from lrpx._views.tabled import Tabled, fragment, lines, page, ratios, renderable

if TYPE_CHECKING:
    from pathlib import Path

    from lrpx.attribution import Attribution

TOP: Final = 20
"""So many features are shown where nobody says how many."""
ENTRIES: Final = ("features", "decoder's bias", "error")


@dataclass(frozen=True)
class Feature:
    """A feature at a token.

    Args:
        token: the token's place, from 0.
        text: the token.
        feature: the feature's number.
        activation: how active it is.
        relevance: in the units of the explained value.
    """

    token: int
    text: str
    feature: int
    activation: float
    relevance: float


@dataclass(frozen=True, eq=False)
class FeatureRelevance:
    """The relevance at one place of a model, split over an autoencoder's features, its bias and its error.

    Args:
        attribution: the tokens' relevance: what reaches them through the features.
        path: the module.
        features: how many features there are.
        indices: ``[N, 2]``: the token and the feature of each one that is active.
        activations: ``[N]``.
        relevance: ``[N]``, in the units of the explained value.
        bias: ``[T]``: of the decoder's bias, token by token.
        error: ``[T]``: of what the autoencoder misses.
    """

    attribution: Attribution
    path: str
    features: int
    indices: Tensor
    activations: Tensor
    relevance: Tensor
    bias: Tensor
    error: Tensor

    @property
    def total(self) -> float:
        """The sum of all entries: the relevance that passes through this place."""
        return float(sum(each.double().sum() for each in (self.relevance, self.bias, self.error)))

    @property
    def sparse(self) -> Tensor:
        """``[T, F]``: the relevance as a sparse tensor."""
        shape = len(self.attribution), self.features
        return torch.sparse_coo_tensor(self.indices.T, self.relevance, shape, is_coalesced=True, check_invariants=True)

    def top(self, count: int = 20) -> list[Feature]:
        """The features at tokens of the largest relevance, in absolute terms; of equal ones the first."""
        order = self.relevance.abs().argsort(descending=True, stable=True)[:count].tolist()
        tokens = self.attribution.tokens
        found = []
        for i in order:
            token, feature = self.indices[i].tolist()
            values = float(self.activations[i]), float(self.relevance[i])
            found.append(Feature(token, tokens[token], feature, *values))
        return found

    def by_feature(self) -> dict[int, float]:
        """The relevance of each feature that is active, summed over the tokens, the largest in absolute terms first."""
        summed = torch.zeros(self.features, dtype=torch.float64)
        summed.index_add_(0, self.indices[:, 1], self.relevance.double())
        active = torch.tensor(sorted(set(self.indices[:, 1].tolist())), dtype=torch.int64)
        order = summed[active].abs().argsort(descending=True, stable=True)
        return {int(i): float(summed[i]) for i in active[order]}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types: every feature that is active, the bias and the error at each token, and the tokens."""
        features = [asdict(each) for each in self.top(len(self.indices))]
        entries = {"features": features, "bias": self.bias.tolist(), "error": self.error.tolist()}
        return {"path": self.path, "count": self.features, **entries, "attribution": self.attribution.to_dict()}

    def to_html(self, path: str | Path | None = None, top: int = TOP) -> str:
        """One self-contained page: features at tokens and summed over them, and all entries token by token; also
        written to ``path`` when given.

        Raises:
            ResultFileError: the file cannot be written.
        """
        return kept(page(whole(self, top)), path)

    def _repr_html_(self) -> str:
        return fragment(drawn(self))

    def __str__(self) -> str:
        return lines(drawn(self))

    def __rich__(self) -> Any:
        return renderable(drawn(self))


def drawn(found: FeatureRelevance, top: int = TOP) -> list[Tabled]:
    """What a terminal shows: the features at tokens of the largest relevance, and what passes through their place."""
    explained, made = found.attribution.explained, found.attribution.provenance
    best = found.top(top)
    active = len(found.indices)
    features = Tabled(
        f"{one_line(explained.description)} = {number(explained.value)}",
        f"the {len(best)} most relevant of {active:,} active features at tokens · {one_line(made.model)}",
        (("token", False), ("feature", True), ("activation", True), ("relevance", True), ("share", True)),
        tuple(
            (
                f"{each.token} {one_line(each.text)}", str(each.feature), number(each.activation),
                number(each.relevance), percent(share(each.relevance, explained.value)),
            )
            for each in best
        ),
        ratios([each.relevance for each in best]),
        "share: of the explained value",
    )  # fmt: skip
    sums = [float(values.double().sum()) for values in (found.relevance, found.bias, found.error)]
    sizes = [*sums, found.total]
    names = ("all features", *ENTRIES[1:], f"through {one_line(found.path)}")
    entries = Tabled(
        f"What passes through {one_line(found.path)}",
        "error: what the autoencoder misses; features, bias and error sum to the last row",
        (("entry", False), ("relevance", True), ("share", True)),
        tuple(
            (name, number(size), percent(share(size, explained.value))) for name, size in zip(names, sizes, strict=True)
        ),
        ratios(sizes),
    )
    return [features, entries]


def whole(found: FeatureRelevance, top: int = TOP) -> list[Tabled]:
    """What a page shows: also each feature's sum over the tokens, and the entries token by token."""
    by_feature = list(found.by_feature().items())[:top]
    summed = Tabled(
        "Features, summed over the tokens",
        f"the {len(by_feature)} most relevant",
        (("feature", True), ("relevance", True)),
        tuple((str(feature), number(size)) for feature, size in by_feature),
        ratios([size for _, size in by_feature]),
    )
    tokens = found.attribution.tokens
    each = torch.zeros(len(tokens), dtype=torch.float64).index_add_(0, found.indices[:, 0], found.relevance.double())
    columns = [each.tolist(), found.bias.tolist(), found.error.tolist()]
    sizes = [sum(row) for row in zip(*columns, strict=True)]
    by_token = Tabled(
        "Token by token",
        "what passes through the place at each token",
        (("token", False), *((name, True) for name in ENTRIES), ("sum", True)),
        tuple(
            (f"{i} {one_line(token)}", *(number(column[i]) for column in columns), number(sizes[i]))
            for i, token in enumerate(tokens)
        ),
        ratios(sizes),
    )
    return [*drawn(found, top), summed, by_token]
