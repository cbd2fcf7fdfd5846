"""A ranking of units as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lrpx._views.picture import number, one_line, percent
from lrpx._views.tabled import Tabled, ratios

if TYPE_CHECKING:
    from lrpx.ranking import Ranking

TITLES = {
    "neurons": ("neuron", "neurons"), "heads": ("head", "heads"), "queries": ("query feature", "query features"),
    "keys": ("key feature", "key features"), "values": ("value feature", "value features"),
    "attention": ("", "attention branches"), "mlp": ("", "MLPs"), "residual": ("", "layers"),
}  # fmt: skip
"""How one unit of a kind is called, and many; one is called nothing where a layer has but one."""


def drawn(ranking: Ranking) -> Tabled:
    """What the views show of a ranking; token text and names made plain."""
    unit, many = TITLES[ranking.kind]
    columns = [("layer", True)] + ([(unit, True)] if unit else [])
    rows: list[tuple[str, ...]] = []
    several = ranking.explained is None
    if several:
        columns += [("mean relevance", True), ("from", True), ("to", True), ("sum", True)]
    else:
        columns += [("position", True), ("token", False), ("activation", True), ("relevance", True), ("share", True)]
    columns.append(("module", False))
    for row in ranking:
        first = [str(row.layer)] + ([str(row.unit)] if unit else [])
        if several:
            middle = [number(row.mean), number(row.low), number(row.high), number(row.total)]
        else:
            middle = [
                str(row.position), one_line(row.token) or " ", number(row.activation), number(row.relevance),
                percent(row.share),
            ]  # fmt: skip
        rows.append((*first, *middle, one_line(row.path)))
    sizes = [row.mean if several else row.relevance for row in ranking]
    made = ranking.provenance
    among = f"{ranking.count:,} {many}" if several else f"{ranking.count:,} {many} at positions"
    facts = f"the {len(rows)} most relevant of {among} · {made.method} · {made.model}"
    if not several:
        assert ranking.explained is not None
        title = f"{ranking.explained.description} = {number(ranking.explained.value)}"
        note = "activation: of several features the length of their vector; share: of the explained value"
    else:
        counts = " less ".join("1 text" if count == 1 else f"{count:,} texts" for count in ranking.texts)
        title = f"mean relevance over {counts}"
        note = "from, to: 95 % bootstrap interval of each unit alone; the largest of many are partly so by chance"
        if len(ranking.texts) > 1:
            note += "; sum: over the first texts"
    return Tabled(one_line(title), one_line(facts), tuple(columns), tuple(rows), ratios(sizes), note)
