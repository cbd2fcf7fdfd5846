"""The flow of relevance, layers by tokens: as a page whose cells open, in a notebook, as a figure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final

from lrpx._views.colour import colour
from lrpx._views.grid import LARGEST, Cell, _blocks, beyond
from lrpx._views.html import _fragment, _page, _provenance, environment, style
from lrpx._views.picture import aligned, number, one_line, share_of_scale, visible
from lrpx._views.tabled import Tabled, ratios
from lrpx.attribution import scale

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure
    from torch import Tensor

    from lrpx.attribution import Attribution
    from lrpx.flow import Flow

TITLES: Final = {"residual": "The stream behind each layer", "attention": "Attention branches", "mlp": "MLPs"}
_TOKENS: Final = 2
"""So many tokens are named of each layer."""
_ROW: Final = 0.16
_SIZE: Final = 7


@dataclass(frozen=True)
class Opened:
    """What a cell shows when it is opened: the numbers of its branches, and its heads."""

    id: str
    place: str
    numbers: tuple[tuple[str, str], ...]
    heads: tuple[Cell, ...]


@dataclass(frozen=True)
class Map:
    """Layers by tokens, ready to be drawn; the last layer comes first."""

    layers: tuple[str, ...]
    tokens: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    opened: tuple[Opened, ...]
    limit: float
    note: str

    def number(self, value: float) -> str:
        """A value with as many decimals as give the colour limit three digits."""
        return aligned(value, self.limit)


def _shortened(a: Attribution) -> tuple[Attribution, str]:
    """The same with tokens in blocks where there are many."""
    spans = _blocks(len(a), LARGEST)
    if len(spans) == len(a):
        return a, ""
    return a.spans(spans), f"tokens in blocks of {spans[0][1]}, each the sum of its tokens"


def drawn(flow: Flow) -> Map:
    """What the views show of a flow; token text made plain."""
    a, note = _shortened(flow.attribution)
    stream = a.parts["residual"].values
    limit, sink = scale(stream.flatten())
    heads = a.parts["heads"].values if "heads" in a.parts else None
    most = 0.0 if heads is None else float(heads.abs().max())
    attending = _attending(heads)
    names = tuple(one_line(name) for name in a.parts["residual"].labels["layer"])
    tokens = tuple(visible(token)[1] or " " for token in a.tokens)
    rows, opened = [], []
    for layer in reversed(range(len(names))):
        cells = []
        for token in range(len(tokens)):
            place = f"{names[layer]}, {tokens[token]}"
            value = float(stream[layer, token])
            cells.append(Cell(layer, token, place, value, share_of_scale(value, limit)))
            numbers = [(TITLES["residual"], number(value))]
            numbers += [
                (TITLES[part], number(float(a.parts[part].values[layer, token])))
                for part in ("attention", "mlp")
                if part in a.parts
            ]
            each = heads[layer, :, token].tolist() if heads is not None and layer in attending else []
            inside = tuple(
                Cell(layer, head, f"head {head}", amount, share_of_scale(amount, most))
                for head, amount in enumerate(each)
            )
            opened.append(Opened(f"c{layer}-{token}", place, tuple(numbers), inside))
        rows.append(tuple(cells))
    if sink is not None:
        cell = rows[len(names) - 1 - sink // len(tokens)][sink % len(tokens)]
        note += "; " * bool(note) + beyond(cell.place, cell.value)
    return Map(names[::-1], tokens, tuple(rows), tuple(opened), limit, note)


def _attending(heads: Tensor | None) -> set[int]:
    """The layers whose heads have relevance: of a hybrid model's others, which have no heads, there are zeros."""
    return set() if heads is None else {layer for layer, each in enumerate(heads) if bool(each.any())}


def page(flow: Flow) -> str:
    """One self-contained HTML page; it loads nothing and runs nothing: a cell opens by a link to its numbers."""
    context = _context(flow)
    shown = context["map"]
    cells = [cell for row in shown.rows for cell in row] + [cell for each in shown.opened for cell in each.heads]
    more = environment().get_template("flow.css.j2").render(scope="lrpx")
    return _page("flow.html.j2", context, style(cells, whole_page=True) + more)


def fragment(flow: Flow) -> str:
    """Layers by tokens as a piece of HTML for a notebook; its cells do not open."""
    context = _context(flow)
    cells = [cell for row in context["map"].rows for cell in row]
    return _fragment("flow.html.j2", context, lambda **options: style(cells, **options))


def _context(flow: Flow) -> dict[str, Any]:
    a = flow.attribution
    return {"title": one_line(a.explained.description), "a": a, "map": drawn(flow), "provenance": _provenance(a)}


def tabled(flow: Flow) -> Tabled:
    """A row a layer, the last first: what the stream behind it and each branch have of all tokens, the head with the
    largest relevance, and the tokens that the stream has it at."""
    a = flow.attribution
    branches = [part for part in ("attention", "mlp") if part in a.parts]
    heads = a.parts["heads"].values if "heads" in a.parts else None
    attending = _attending(heads)
    columns = [("layer", False), ("stream", True), *((part, True) for part in branches)]
    columns += [] if heads is None else [("first head", True)]
    names = a.parts["residual"].labels["layer"]
    around = zip(*(name.split(".")[:-1] for name in names), strict=False)
    shared = ".".join(same[0] for same in takewhile(lambda each: len(set(each)) == 1, around))
    rows, sizes = [], []
    for layer, name in reversed(list(enumerate(names))):
        stream = a.parts["residual"].values[layer]
        sizes.append(float(stream.sum()))
        cells = [one_line(name.removeprefix(f"{shared}.")), number(sizes[-1])]
        cells += [number(float(a.parts[part].values[layer].sum())) for part in branches]
        if heads is not None:
            each = heads[layer].sum(-1)
            head = int(each.abs().argmax())
            cells.append(f"{head}: {number(float(each[head]))}" if layer in attending else "")
        best = stream.abs().argsort(descending=True, stable=True)[:_TOKENS].tolist()
        told = (f"{one_line(a.tokens[token]) or ' '} {number(float(stream[token]))}" for token in best if stream[token])
        rows.append((*cells, " · ".join(told)))
    return Tabled(
        f"{one_line(a.explained.description)} = {number(a.explained.value)}",
        one_line(f"layers of {shared} · {a.provenance.method} · {a.provenance.model}"),
        (*columns, ("tokens", False)),
        tuple(rows),
        ratios(sizes),
        "stream: behind the layer, of all tokens; what is lost on the way went to biases and the softmax",
    )


def figure(flow: Flow, width: float) -> Figure:
    """Layers by tokens: the stream and each branch, one below the other, on one colour scale, whose ends are told.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    from lrpx._views.figure import _drawable, _font  # which says what is missing

    a, note = _shortened(flow.attribution)
    parts = [part for part in TITLES if part in a.parts]
    count = len(a.parts["residual"].labels["layer"])
    limit = max(scale(a.parts[part].values.flatten())[0] for part in parts)
    each = 0.6 + _ROW * count
    found = Figure(figsize=(width, each * len(parts) + 0.7), dpi=200, layout="constrained")
    title = f"{one_line(a.explained.description)} = {number(a.explained.value)}"
    title += f"\nred speaks for, blue against; the colours end at ±{number(limit).removeprefix('+')}"
    plain: dict[str, Any] = {"usetex": False, "parse_math": False}
    found.suptitle(_drawable(title), fontproperties=_font(title, 9), **plain)
    tokens = [visible(token)[1] or " " for token in a.tokens]
    for at, part in enumerate(parts):
        axes = found.add_subplot(len(parts), 1, at + 1)
        rows: list[Sequence[Any]] = [
            [[c / 255 for c in colour(share_of_scale(value, limit))] for value in row]
            for row in a.parts[part].values.tolist()
        ]
        axes.imshow(rows, aspect="auto", origin="lower", interpolation="nearest")
        most = a.parts[part].values.flatten()[a.parts[part].values.abs().argmax()].item()
        told = f"largest {number(most)}, beyond the colours, which end at {number(limit)}" if abs(most) > limit else ""
        told = "; ".join(filter(None, (note, told)))
        axes.set_title(f"{TITLES[part]}{f' ({told})' if told else ''}", fontsize=_SIZE, loc="left", **plain)
        axes.set_yticks(range(0, count, max(1, count // 8)))
        axes.set_ylabel("layer", fontsize=_SIZE)
        axes.tick_params(labelsize=_SIZE, length=1)
        axes.set_xticks(range(len(tokens)), [] if at < len(parts) - 1 else [_drawable(token) for token in tokens])
        for label, token in zip(axes.get_xticklabels(), tokens, strict=False):
            label.set(rotation=90, fontproperties=_font(token, _SIZE), **plain)
    return found
