"""The reports of a run that hides tokens: a table in Markdown, the curves as a picture, and one page with it all."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from markupsafe import Markup
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from lrpx._views import html
from lrpx._views.picture import one_line
from lrpx.benchmarks import _report
from lrpx.benchmarks._curves import COLOURS, DASHES, HEIGHT, WIDTH, panels, picture
from lrpx.benchmarks._faithful_summary import CHANCE, SURE, Summary, summarise
from lrpx.benchmarks._heatmaps import pieces
from lrpx.benchmarks._keeping import check_shown
from lrpx.benchmarks._pieces import Pieces
from lrpx.benchmarks._report import UNTOLD, figure, p_value
from lrpx.benchmarks._summary import select
from lrpx.metrics import SetMetric
from lrpx.metrics._statistics import least_p_value
from lrpx.runs import write_whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lrpx._views.picture import Piece
    from lrpx.benchmarks._summary import Score
    from lrpx.runs import Store

NUMBER: Final = 5
"""How wide a correlation is, with its sign."""
SHOWN: Final = 3
"""Samples whose heatmaps are shown where none is asked for."""


def write_reports(store: Store, title: str, *, show: Sequence[str] = ()) -> Summary:
    """Write ``table.md``, ``report.html`` and, of curves, ``curves.png`` into a run's folder, each as a whole.

    Args:
        store: the run's folder.
        title: the headline.
        show: ids of samples to show as heatmaps; the first few where none is given.

    Raises:
        InputError: an id is of no sample.
        ResultFileError: the folder holds no readable run, or a file cannot be written.
        MissingExtraError: matplotlib is not installed.
    """
    found = summarise(store)
    context = _context(found, store.record, title) | {"heatmaps": _heatmaps(store, found.methods, show)}
    every = [piece for each in context["heatmaps"] for line in each["lines"] for piece in line["pieces"]]
    write_files(store, found, context, "faithfulness.html.j2", pieces=every)
    return found


def write_files(
    store: Store,
    found: Summary,
    context: Mapping[str, Any],
    page: str,
    *,
    pieces: Sequence[Piece] = (),
    sheets: Sequence[str] = (),
) -> None:
    """Write the table, the page and, where there are curves, their picture.

    Args:
        store: the run's folder.
        found: its numbers.
        context: what the templates read.
        page: the page's template.
        pieces: the texts that the page shows in colours.
        sheets: more style sheets of the page.
    """
    environment = _report._html()
    sheet = html.style(pieces, whole_page=True)
    for each in ("report.css.j2", "faithfulness.css.j2", *sheets):
        sheet += environment.get_template(each).render(context)
    styled = {"style": Markup(sheet), "style_hash": html.content_hash(sheet)}
    files = {
        "table.md": _report._markdown().get_template("faithfulness.md.j2").render(context).encode(),
        "report.html": environment.get_template(page).render(context, **styled).encode(),
    }
    if found.curves:
        title = f"{one_line(found.model)}: {context['title']}"
        files["curves.png"] = picture(found.curves, found.labels, context["curve_value"], title, context["noun"])
    for name, content in files.items():
        write_whole(store.folder / name, content)


def terminal(found: Summary) -> Group:
    """The tables for ``rich``: a line for each metric, the best method bold; which metrics agree; the verdict."""
    count, known = found.correct
    right = f", {count:,} of {known:,} predicted as labelled" if known else ""
    head = Text(
        f"{one_line(found.model)}: {found.samples:,} samples{right}; means over all of them, intervals in the report"
    )
    columns = [
        (one_line(found.labels[method]), [_cell(found, each.name, method) for each in found.variants])
        for method in found.methods
    ]
    scores = Pieces("metric", [f"{each.name} {each.metric.arrow}" for each in found.variants], columns)
    parts: list[Any] = [head, scores]
    if found.verdict is not None:
        parts.append(Text("\n".join(verdict(found))))
    if _agree(found):
        # names are folded sooner than a number, which is no wider than this
        with_others = ("agrees with the others", "the least with")
        columns_of = (Column(name, min_width=NUMBER, overflow="fold") for name in with_others)
        agreement = Table(Column("metric", overflow="fold"), *columns_of)
        for each in found.variants:
            others = {
                other.name: value
                for other in found.variants
                if other.name != each.name and (value := found.agreement[each.name][other.name]) is not None
            }
            if others:
                least = min(others, key=others.__getitem__)
                mean = sum(others.values()) / len(others)
                agreement.add_row(Text(each.name), _number(mean), Text(f"{least}: {_number(others[least])}"))
        parts.append(agreement)
    return Group(*parts)


def verdict(found: Summary) -> list[str]:
    """Which explanation to believe, in sentences."""
    made = found.verdict
    assert made is not None
    label = one_line(found.labels[made.method])
    same = [one_line(found.labels[each]) for each in made.level_ranks]
    shared = f", as {_report._listed(same)} have" if len(same) > 1 else f", as {same[0]} has" if same else ""
    over = "the one metric that says" if made.variants == 1 else f"the {made.variants} metrics that say"
    told = (
        f"{label} has the best mean rank, {figure(made.ranks[made.method])} of {len(made.ranks)} methods{shared}, over "
        f"{over} something of it: it is the best by {made.leads}, and by {made.level} "
        f"more it is not told apart from the best (adjusted p at least {SURE:g})."
    )
    if made.method in CHANCE:
        return [f"Believe none of these: {told} It knows nothing of the model.", "Run more samples, or other methods."]
    if not made.apart:
        return [f"Nothing to recommend yet. {told} No metric tells it apart from another method; run more samples."]
    lines = [
        f"Recommended: {made.method}. {told} By {made.apart} it is better than another method, and told apart from it."
    ]
    for chance, count in made.over.items():
        lines.append(
            f"It is better than {one_line(found.labels[chance])}, and told apart, by {count} of these metrics."
        )
        if not count:
            lines.append("So this run gives no reason to believe it: run more samples, or other methods.")
    if not made.over:
        lines.append(
            "No method here knows nothing of the model; add random, and position for texts or centre for images, to "
            "see what chance earns."
        )
    return lines


def _agree(found: Summary) -> bool:
    """Whether there are metrics that can agree."""
    values = (value for table in found.agreement.values() for value in table.values())
    return len(found.variants) > 1 and any(value is not None for value in values)


def _cell(found: Summary, variant: str, method: str) -> Text:
    score, place = found.scores[variant][method], found.rank(variant, method)
    if score is None:
        return Text("itself", style="dim")
    return Text(figure(score.mean), style="" if place else "bold")


def _context(found: Summary, record: Mapping[str, Any], title: str, noun: str = "tokens") -> dict[str, Any]:
    """What the templates read; plain text throughout, their environments do the escaping."""
    told = {name: value for name, value in record.items() if name not in UNTOLD}
    told["settings"] = {name: value for name, value in record["settings"].items() if name != "metrics"}
    data = [fact for name in ("counts", "statistics") for fact in _report._facts(told.pop(name, {}))]
    command = {"command": told.pop("command")} if "command" in told else {}
    pairs = min((len(each) for each in found.p_values.values() if each), default=0)  # fewer where one is "itself"
    way, read = found.curve_of
    captions = [(each.metric.name, f"{each.metric.caption} ({each.metric.scale})") for each in found.variants]
    return {
        "s": found,
        "title": title,
        "labels": found.labels,
        "verdict": [] if found.verdict is None else verdict(found),
        "extra": [],
        "ranks": {} if found.verdict is None else found.verdict.ranks,
        "captions": list(dict.fromkeys(captions)),
        "narrowed": narrowed(record["settings"].get("perturbation") or ""),
        "reads": list(dict.fromkeys((each.name, each.way, each.reads) for each in found.variants)),
        "agreement": _agree(found),
        "pairs": pairs,
        "swapped": any(isinstance(each.metric, SetMetric) for each in found.variants),
        "least": min(1.0, pairs * least_p_value(found.samples)),
        "panels": panels(found.curves, noun),
        "noun": noun,
        "curve_value": f"mean {read}, by {way}",
        "colours": [
            (number, COLOURS[number % len(COLOURS)], DASHES[number // len(COLOURS) % len(DASHES)])
            for number in range(len(found.methods))
        ],
        "width": WIDTH,
        "height": HEIGHT,
        "data": data,
        "made": list(_report._facts(command | told)),
        "score": _score,
        "agreed": _number,
        "against": _plain_p,
    }


def narrowed(ways: str) -> str:
    """What is said of a run's numbers where one of its several ways to hide tokens hides fewer than the others would
    alone; empty where none does."""
    several = ways.split(",")
    if len(several) < 2 or "delete" not in several:
        return ""
    return (
        "All ways hide the same tokens, those that each of them may: beside delete, the token that is read at is "
        "hidden by none, where a text has one; in a run of its own another way hides it, too."
    )


def _score(score: Score | None) -> str:
    return "itself" if score is None else f"{figure(score.mean)} [{figure(score.low)}, {figure(score.high)}]"


def _heatmaps(store: Store, methods: Sequence[str], show: Sequence[str]) -> list[dict[str, Any]]:
    """The samples asked for, or the first few, as every method explains them."""
    ids = select(store, ["id"])["id"].to_list()
    check_shown(show, ids, store.folder)
    wanted = list(dict.fromkeys(show)) or ids[:SHOWN]
    columns = ["id", "tokens", "explained", "value", *(f"relevance/{method}" for method in methods)]
    rows = {row["id"]: row for row in select(store, columns, ids=wanted).iter_rows(named=True)}
    return [
        {
            "id": name,
            "told": rows[name]["explained"],
            "value": rows[name]["value"],
            "lines": [
                {"method": method, "pieces": pieces(rows[name]["tokens"], rows[name][f"relevance/{method}"])}
                for method in methods
            ],
        }
        for name in wanted
    ]


def _plain_p(found: Summary, variant: str, method: str) -> str:
    return "itself" if found.scores[variant][method] is None else p_value(found.against_best(variant, method))


def _number(value: float | None) -> str:
    return "" if value is None else re.sub("^-", "−", f"{value:.2f}")
