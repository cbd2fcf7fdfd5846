"""The reports of a run with a ground truth: a table in Markdown and LaTeX, heatmaps in LaTeX, and one page with it all.

Captions, ranges, directions and rankings are the metrics' own (:class:`~lrpx.metrics.Metric`), a method's label is the
method's, and the benchmark says the rest (:class:`~lrpx.benchmarks._words.Words`).

Text from outside (tokens, ids, the model's name, what ``run.json`` holds) is escaped for each format by the template's
environment, whatever the template does.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from typing import TYPE_CHECKING, Any, Final

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from rich.console import Group
from rich.text import Text

from lrpx._views import html, latex
from lrpx._views.picture import one_line
from lrpx.benchmarks._heatmaps import choose, shown
from lrpx.benchmarks._pieces import Pieces
from lrpx.benchmarks._summary import described, summarise
from lrpx.benchmarks._words import RANDOM
from lrpx.metrics._metric import TRUTH, number
from lrpx.metrics._statistics import least_p_value
from lrpx.runs import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from lrpx.benchmarks._summary import Summary
    from lrpx.benchmarks._words import Reported
    from lrpx.metrics import Metric
    from lrpx.runs import Store

BASELINE: Final = "Random"
"""How tables spell the random baseline."""
UNTOLD: Final = ("spec", "labels", "digest")
"""What the record says for programs alone."""


def write_reports(benchmark: Reported, store: Store, *, show: Sequence[str] = ()) -> Summary:
    """Write ``table.md``, ``table.tex``, ``heatmaps.tex`` and ``report.html`` into a run's folder.

    Each replaces the file of before as a whole.

    Args:
        benchmark: whose rows they are.
        store: the run's folder.
        show: ids of samples to show as heatmaps, besides those of largest value and the worst explained.

    Returns:
        The numbers that the reports hold.

    Raises:
        InputError: an id is of no sample.
        ResultFileError: the folder holds no readable run, no rows, or not one correctly predicted sample; or a file
            cannot be written.
    """
    _, methods, metrics = described(store)
    chosen = choose(benchmark, store, methods, shown(metrics), show)
    found = summarise(store, benchmark.group)
    context = _context(benchmark, found, store.record) | {"chosen": chosen}
    pieces = [piece for kind in chosen for each in kind.heatmaps for line in each.lines for piece in line.pieces]
    sheet = html.style(pieces, whole_page=True) + _html().get_template("report.css.j2").render()
    digest = html.content_hash(sheet)
    texts = {
        "table.md": _markdown().get_template("table.md.j2").render(context),
        "table.tex": _latex().get_template("table.tex.j2").render(context),
        "heatmaps.tex": _latex().get_template("heatmaps.tex.j2").render(context),
        "report.html": _html().get_template("report.html.j2").render(context, style=Markup(sheet), style_hash=digest),
    }
    for name, text in texts.items():
        write_whole(store.folder / name, text.encode())
    return found


def terminal(found: Summary) -> Group:
    """The table for ``rich``: each metric's mean and 95 % interval, the best bold."""
    columns = [
        (
            f"{metric.name} {metric.arrow}",
            [*(_cell(found, metric.name, method) for method in found.methods), _chance(found, metric.name)],
        )
        for metric in found.metrics
    ]
    names = [*(one_line(found.labels[method]) for method in found.methods), BASELINE]
    table = Pieces("method", names, columns, wrapped=True, apart=1)
    counts = f"{found.correct:,} of {found.samples:,} samples predicted correctly, accuracy {figure(found.accuracy)}"
    return Group(Text(f"{one_line(found.model)}: {counts}; mean and 95 % interval over these"), table)


def _cell(found: Summary, metric: str, method: str) -> Text:
    score = found.scores[metric][method]
    text = Text(figure(score.mean), style="" if found.rank(metric, method) else "bold")
    return text.append(f" {figure(score.low)}–{figure(score.high)}", style="dim not bold")


def _chance(found: Summary, metric: str) -> Text:
    chance = found.chance[metric]
    return Text(f"{figure(chance.mean)} ±{figure(chance.std)}")


def figure(value: float) -> str:
    """A score with the three decimals of the paper's tables.

    >>> figure(0.88449), figure(-0.5)
    ('0.884', '−0.500')
    """
    return f"{value:.3f}".replace("-", "−")


def p_value(p: float | None) -> str:
    """A p-value for a table; the best method itself has none.

    >>> p_value(0.0421), p_value(2e-7), p_value(None)
    ('0.042', '< 0.001', 'best')
    """
    if p is None:
        return "best"
    return figure(p) if p >= 0.001 else "< 0.001"


def _context(benchmark: Reported, found: Summary, record: Mapping[str, Any]) -> dict[str, Any]:
    """What the templates read; plain text throughout, their environments do the escaping."""
    leaders: defaultdict[str, list[str]] = defaultdict(list)
    for metric in found.metrics:
        for method in found.best(metric.name):
            leaders[method].append(metric.name)
    told = {name: value for name, value in record.items() if name not in UNTOLD}
    told["settings"] = {name: value for name, value in record["settings"].items() if name != "metrics"}
    data = [fact for name in ("counts", "statistics") for fact in _facts(told.pop(name, {}))]
    command = {"command": told.pop("command")} if "command" in told else {}
    pairs = len(found.methods) * (len(found.methods) - 1) // 2
    return {
        "s": found,
        "words": benchmark.words,
        "group": benchmark.group,
        "metrics": found.metrics,
        "labels": dict(found.labels) | {RANDOM: BASELINE},
        "names": [*found.methods, RANDOM],
        "scale": _scale(found.metrics),
        "captions": _captions(found.metrics, benchmark.words.truth),
        "shown": shown(found.metrics),
        "draws": next(iter(found.chance.values())).draws,
        "pairs": pairs,
        "least": min(1.0, pairs * least_p_value(found.correct)),
        "leaders": [(method, _listed(where)) for method, where in leaders.items()],
        "tallest": {name: max(map(max, table.values())) for name, table in found.shares.items()},
        "groups": [str(group.number) for group in found.groups],
        "group_facts": [
            ("Samples", [f"{group.samples:,}" for group in found.groups]),
            ("Prediction accuracy", [figure(group.correct / group.samples) for group in found.groups]),
        ],
        "data": data,
        "made": list(_facts(command | told)),
        "model_comment": Markup(re.sub(r"[^ -~]", "?", found.model)),
    }


def _scale(metrics: Sequence[Metric]) -> str:
    """What the metrics have in common, range and direction, or nothing."""
    return metrics[0].scale if len({metric.scale for metric in metrics}) == 1 else ""


def _captions(metrics: Sequence[Metric], truth: str) -> list[tuple[str, str]]:
    """Each metric with what it says, and with its range and direction where these are not the same for all."""
    texts = {metric.name: metric.caption.replace(TRUTH, truth) for metric in metrics}
    if _scale(metrics):
        return list(texts.items())
    return [(metric.name, f"{texts[metric.name]} ({metric.scale})") for metric in metrics]


def _listed(names: Sequence[str]) -> str:
    """Names in a sentence.

    >>> _listed(["PG2", "MRR", "RMA"])
    'PG2, MRR and RMA'
    """
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _facts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """What JSON holds as lines of name and text, on one line each."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _facts(each, f"{name} {key}".strip())
    elif isinstance(value, list) and any(isinstance(each, dict) for each in value):
        for at, each in enumerate(value):
            yield from _facts(each, f"{name} {at + 1}")
    elif isinstance(value, list):
        yield one_line(name), one_line(", ".join(map(str, value)))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield one_line(name), _told(value)
    elif value is not None:
        yield one_line(name), one_line(str(value))


def _told(value: float) -> str:
    """A setting or a count: a whole number with all its digits, another with three decimals, or four digits below one.

    >>> _told(14000), _told(2**53 + 1), _told(11.25), _told(1200.0), _told(0.0004), _told(0.0)
    ('14,000', '9,007,199,254,740,993', '11.25', '1,200', '0.0004', '0')
    """
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.3f}".rstrip("0").rstrip(".") if abs(value) >= 1 else f"{value:.4g}"


def _for_markdown(text: str) -> str:
    r"""Text in a table's cell, with nothing in it that Markdown or HTML would read.

    >>> _for_markdown("a|b *c* <i>")
    'a\\|b \\*c\\* \\<i\\>'
    """
    return re.sub(r"([\\`*_{}\[\]<>#|~&$])", r"\\\1", one_line(text))


def _ranked(text: str, rank: int) -> Markup:
    """The best bold, the second best underlined, as in the paper's Table 2."""
    escaped = latex.escape(text)
    return Markup({0: rf"\textbf{{{escaped}}}", 1: rf"\underline{{{escaped}}}"}.get(rank, escaped))


_FILTERS: Final[dict[str, Callable[..., Any]]] = {
    "figure": figure,
    "p_value": p_value,
    "one_line": one_line,
    "digits": lambda value: f"{value:.2f}".replace("-", "−"),
    "mille": lambda value, ends: round(1000 * (value - ends[0]) / (ends[1] - ends[0])),
    "plain": number,
    "ranked": _ranked,
    "rgb": latex.rgb,
}


@cache
def _html() -> Environment:
    """The views' environment with this package's templates."""
    environment = html.environment().overlay(loader=PackageLoader("lrpx.benchmarks"))
    environment.filters = environment.filters | _FILTERS
    return environment


@cache
def _markdown() -> Environment:
    """This package's Markdown templates."""
    environment = latex.escaping("lrpx.benchmarks", _for_markdown)
    environment.filters |= _FILTERS
    return environment


@cache
def _latex() -> Environment:
    """The views' environment for LaTeX with this package's templates."""
    environment = latex.environment().overlay(loader=PackageLoader("lrpx.benchmarks"))
    environment.filters = environment.filters | _FILTERS
    return environment
