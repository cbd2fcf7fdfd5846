"""Rules by layer: in which layers does CP-LRP serve better than AttnLRP? (You et al. 2025, §4, Fig. 2 and Table A3.)

Every mix of the two is a method: AttnLRP with CP-LRP's rules in one layer, in the first k, or in the last k. They are
measured as ``loo`` measures methods, and drawn against the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from lrpx._modules import layer_of, layers
from lrpx._views.colour import QUIET, hexadecimal
from lrpx._views.picture import one_line
from lrpx.benchmarks._contract import register
from lrpx.benchmarks._curves import COLOURS
from lrpx.benchmarks._faithful_report import write_reports
from lrpx.benchmarks._faithfulness import Faithfulness
from lrpx.benchmarks._panels import png, sheet
from lrpx.benchmarks._report import figure
from lrpx.errors import ModelError
from lrpx.methods._backward import Backward
from lrpx.recipes import ATTNLRP, LRP
from lrpx.runs import write_whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

    from lrpx.benchmarks._faithful_summary import Summary
    from lrpx.benchmarks._summary import Score
    from lrpx.methods import Method
    from lrpx.model import BoundModel
    from lrpx.runs import Store

SWEEPS: Final = {
    "first": "CP-LRP from the first layer to this one",
    "last": "CP-LRP from this layer to the last",
    "one": "CP-LRP in this layer alone",
}
"""The three sweeps, and what each says of a layer."""


def count(model: BoundModel) -> int:
    """How many layers a model has, of its longest list of them.

    Raises:
        ModelError: it has no lists of layers.
    """
    numbers = [found.number for path in layers(model.paths) if (found := layer_of(path)) is not None]
    if not numbers:
        raise ModelError(f"{type(model.module).__name__} has no list of layers to sweep over; use the benchmark loo")
    return max(numbers) + 1


def chosen(sweep: str, layer: int, of: int) -> range:
    """The layers that have CP-LRP's rules at a place of a sweep.

    >>> chosen("first", 2, 6), chosen("last", 2, 6), chosen("one", 2, 6)
    (range(0, 3), range(2, 6), range(2, 3))
    """
    return {"first": range(layer + 1), "last": range(layer, of), "one": range(layer, layer + 1)}[sweep]


def named(mixed: range) -> str:
    """How a mix is called: ``"lrp in 0-2"``."""
    return f"lrp in {mixed[0]}" if len(mixed) == 1 else f"lrp in {mixed[0]}-{mixed[-1]}"


def mixes(of: int) -> list[Method]:
    """Each mix of ``of`` layers once: of the ``3·of`` places of the sweeps, three are two sweeps' at once.

    >>> [each.name for each in mixes(3)]
    ['lrp in 0', 'lrp in 0-1', 'lrp in 0-2', 'lrp in 1-2', 'lrp in 2', 'lrp in 1']
    """
    every = [chosen(sweep, layer, of) for sweep in SWEEPS for layer in range(of)]
    found: list[Method] = []
    for mixed in dict.fromkeys(every):
        found.append(Backward(named(mixed), ATTNLRP.at(layers=mixed, use=LRP)))
    return found


@register
@dataclass(frozen=True)
class Layers(Faithfulness):
    """In which layers do CP-LRP's rules serve better than AttnLRP's? In one, the first k, the last k (You et al. 2025).

    The options are those of ``faithfulness``. Beside its reports it writes ``layers.md`` and ``layers.png``.
    """

    name: ClassVar[str] = "layers"
    next_token: ClassVar[str] = "logit"
    title: ClassVar[str] = "Which rules in which layers?"
    methods: ClassVar[tuple[str, ...]] = ("attnlrp", "lrp")

    def usual(self) -> list[str]:
        """Those of You et al. 2025, Table A3."""
        return ["LOO Pearson", "AOPC LeRF", "AOPC MoRF", "AOPC Δ"]

    def of_model(self, model: BoundModel) -> Sequence[Method]:
        """The mixes of the model's layers."""
        return mixes(count(model))

    def report(self, store: Store, show: Sequence[str] = ()) -> RenderableType:
        """Write the reports of :class:`Faithfulness`, ``layers.md`` and ``layers.png``."""
        found = write_reports(store, self.title, show=show)
        of = _count(found)
        if of == 0:
            return super().report(store, show)
        write_whole(store.folder / "layers.md", markdown(found, of).encode())
        write_whole(store.folder / "layers.png", picture(found, of))
        return terminal(found, of)


def _count(found: Summary) -> int:
    """How many layers a run has swept; 0 where some of the mixes were not measured."""
    of = 0
    while named(range(of, of + 1)) in found.methods:
        of += 1
    return of if of and all(each.name in found.methods for each in mixes(of)) else 0


def scores(found: Summary, variant: str, of: int) -> Mapping[str, list[Score | None]]:
    """``[sweep][layer]``."""
    table = found.scores[variant]
    return {sweep: [table[named(chosen(sweep, layer, of))] for layer in range(of)] for sweep in SWEEPS}


def markdown(found: Summary, of: int) -> str:
    """A table a sweep: a line for each layer, a column for each metric."""
    lines = [f"# Rules by layer: {_plain(found.model)}", ""]
    lines += [f"{found.samples:,} samples; means with their bootstrap 95 % intervals. Layers count from 0.", ""]
    head = [f"{_plain(each.name)} {each.metric.arrow}" for each in found.variants]
    lines += ["| rules | " + " | ".join(head) + " |", "|---|" + "---|" * len(head)]
    for method in ("attnlrp", "lrp"):
        if method in found.methods:
            cells = [_cell(found.scores[each.name][method]) for each in found.variants]
            lines.append(f"| {method} in all | " + " | ".join(cells) + " |")
    for sweep, said in SWEEPS.items():
        columns = [scores(found, each.name, of)[sweep] for each in found.variants]
        for layer in range(of):
            cells = [_cell(column[layer]) for column in columns]
            lines.append(f"| {said}: {layer} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", "![Layers](layers.png)", ""])


def terminal(found: Summary, of: int) -> Group:
    """The means for ``rich``: a line for each layer, the sweeps beside each other."""
    parts: list[RenderableType] = [Text(f"{one_line(found.model)}: {found.samples:,} samples; layers count from 0")]
    for each in found.variants:
        table = Table(
            Column("layer", justify="right"), *SWEEPS.values(), title=Text(f"{each.name} {each.metric.arrow}")
        )
        by_sweep = scores(found, each.name, of)
        for layer in range(of):
            cells = (by_sweep[sweep][layer] for sweep in SWEEPS)
            table.add_row(str(layer), *("" if cell is None else figure(cell.mean) for cell in cells))
        whole = [found.scores[each.name].get(method) for method in ("attnlrp", "lrp")]
        told = zip(("AttnLRP", "CP-LRP"), whole, strict=True)
        table.caption = ", ".join(f"{name} in all layers: {figure(one.mean)}" for name, one in told if one is not None)
        parts.append(table)
    return Group(*parts)


def picture(found: Summary, of: int) -> bytes:
    """The means against the layer, a panel each, as a PNG file (You et al. 2025, Fig. 2).

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    with sheet((4.2 * len(found.variants), 3.6), 150, "curves as a picture need") as drawn:
        axes = drawn.subplots(1, len(found.variants), squeeze=False)[0]
        for each, panel in zip(found.variants, axes, strict=True):
            for (light, _), (sweep, column) in zip(COLOURS, scores(found, each.name, of).items(), strict=False):
                there = [(layer, score) for layer, score in enumerate(column) if score is not None]
                places = [layer for layer, _ in there]
                panel.plot(places, [score.mean for _, score in there], "o-", color=light, label=SWEEPS[sweep], ms=3)
            for method, style, label in (("attnlrp", "--", "AttnLRP in all"), ("lrp", ":", "CP-LRP in all")):
                score = found.scores[each.name].get(method)
                if score is not None:
                    panel.axhline(score.mean, linestyle=style, color=hexadecimal(QUIET[False]), label=label, lw=1)
            panel.set_title(f"{each.name} {each.metric.arrow}", fontsize=9)
            panel.set_xlabel("layer", color=hexadecimal(QUIET[False]))
            panel.spines[["top", "right"]].set_visible(False)
        handles, names = axes[0].get_legend_handles_labels()
        drawn.legend(handles, names, loc="outside lower center", ncols=min(3, len(names)), frameon=False)
        drawn.suptitle(f"{one_line(found.model)}: {found.samples:,} samples", fontsize=10)
        return png(drawn)


def _cell(score: Score | None) -> str:
    return "" if score is None else f"{figure(score.mean)} [{figure(score.low)}, {figure(score.high)}]"


def _plain(text: str) -> str:
    """A text in Markdown, with nothing in it that would be read as more."""
    from lrpx.benchmarks._report import _for_markdown

    return _for_markdown(text)
