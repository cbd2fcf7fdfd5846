"""The reports of a run by the bundled model: what they say, which samples they show, and hostile text in them."""

from __future__ import annotations

import io
import re
import statistics
from html.parser import HTMLParser

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from lrpx._views.picture import visible
from lrpx.benchmarks import _heatmaps
from lrpx.benchmarks._report import figure, terminal
from lrpx.benchmarks._summary import summarise
from lrpx.errors import InputError, ResultFileError
from lrpx.metrics._ground_truth import METRICS
from lrpx.runs import Store
from tests.benchmarks.report_samples import BENCHMARK, METHODS, explained, random_rows, reports, row, write

FILES = ["heatmaps.tex", "report.html", "table.md", "table.tex"]
HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror="document.title=1">',
    "</style>",
    "</span></div></body>",
    "{{7*7}}",
    "<% for x in y %>",
    "<<7*7>>",
    "&lt;b&gt;",
    "\u202egnp.exe",
    "\x00\x1b[2J",
    "\r\n",
    "\t\tx",
    "   ",
    "",
    r"\input{/etc/passwd}",
    r"\end{document}",
    "}{$&#^_~%",
    "^^4d",
    "--- ?` ''",
    "é Ġ ▁ 中 🙂 ﷽",
    "|a|`b`*c*[d](e)",
)


def choose(folder, methods, show=()):
    return _heatmaps.choose(BENCHMARK, Store.read(folder), methods, METRICS["RMA"], show)


class Shown(HTMLParser):
    """The elements of a page, and the text of each token."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.tokens, self.inside = [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self.inside = "lrpx-t" in (dict(attrs).get("class") or "").split()
        if self.inside:
            self.tokens.append("")

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.tokens[-1] += data


def hostile_rows():
    rng = np.random.default_rng(1)
    facts = {"right": "<b>are", "wrong": r"is\&|", "attractors": 1, "logit_difference": 2.0}
    values = {method: rng.normal(size=len(HOSTILE)) for method in METHODS}
    return [row(f"<i>&|\\{number}", HOSTILE, [number], values, facts, number) for number in range(3)]


def hostile_run(folder):
    write(folder, hostile_rows(), model="<b>|x\n# y", command="lrpx `rm` </td>\n\\bye", counts={"<u>\\|": 1})
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run by the bundled model, with its reports."""
    folder = write(tmp_path_factory.mktemp("run"), explained())
    reports(folder, show=["dev:12"])
    return folder


def test_the_reports_are_written_and_nothing_is_left_behind(folder):
    assert sorted(path.name for path in folder.iterdir()) == sorted([*FILES, ".lock", "rows", "run.json"])


def test_the_same_run_gives_the_same_files(folder, tmp_path):
    reports(write(tmp_path, explained()), show=["dev:12"])
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("name", ["table.md", "table.tex", "report.html"])
def test_the_table_holds_every_mean_and_marks_the_best(folder, name):
    text = (folder / name).read_text(encoding="utf-8")
    for metric in METRICS:
        means = {m: statistics.fmean(each[f"{metric}/{m}"] for each in explained()) for m in METHODS}
        assert all(f"{mean:.3f}" in text for mean in means.values())
        best = f"{max(means.values()):.3f}"
        assert re.search(rf"\*\*{best}\*\*|\\textbf{{{best}}}|lrpx-best[^>]*><span class=\"lrpx-mean\">{best}<", text)
        chance = statistics.fmean(value for each in explained() for value in each[f"{metric}/random"])
        assert f"{chance:.3f}" in text


def test_the_markdown_names_what_a_reader_needs(folder):
    text = (folder / "table.md").read_text(encoding="utf-8")
    assert "In 12 of 12 samples, openai-community/gpt2 prefers" in text
    assert "| command | lrpx bench sva dev.tsv --out runs/sva |" in text
    assert "| versions torch | 2.13.0 |" in text
    assert "| mean tokens | 11.25 |" in text
    assert "| read | 14,000 |" in text
    rows = [line.count("|") for line in text.splitlines() if line.startswith("| LRP |")]
    assert rows == [6, 6, *[5] * 4]  # four metrics, four metrics, and for each metric three numbers of attractors


def test_a_small_setting_and_a_long_one_keep_their_digits(tmp_path):
    write(tmp_path, explained(), statistics={"threshold": 0.0004, "mean tokens": 1200.5, "seed": 2**63 + 1})
    reports(tmp_path)
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert "| threshold | 0.0004 |" in text
    assert "| mean tokens | 1,200.5 |" in text
    assert "| seed | 9,223,372,036,854,775,809 |" in text


@pytest.mark.parametrize("width", [80, 140])
def test_the_terminal_shows_the_table(folder, width):
    console = Console(width=width, file=io.StringIO())
    console.print(terminal(summarise(Store.read(folder))))
    text = console.file.getvalue()
    assert "…" not in text
    assert all(each in text for each in ("AttnLRP", "Gradient×Input", "Random", "12 of 12 samples"))


@pytest.mark.parametrize("width", [22, 40, 60, 70])
def test_no_number_is_cut_off_in_a_narrow_terminal(folder, width):
    found = summarise(Store.read(folder))
    console = Console(width=width, file=io.StringIO())
    console.print(terminal(found))
    text = console.file.getvalue()
    assert "…" not in text
    assert max(map(cell_len, text.splitlines())) <= width
    cells = re.findall(r"−?\d\.\d{3}(?:–−?\d\.\d{3})?", text.partition("interval")[2])
    scores = [found.scores[metric.name][method] for metric in found.metrics for method in found.methods]
    wanted = [figure(each.mean) for each in scores] + [f"{figure(each.low)}–{figure(each.high)}" for each in scores]
    wanted += [figure(each) for chance in found.chance.values() for each in (chance.mean, chance.std)]
    assert sorted(cells) == sorted(wanted)


def test_chosen_are_those_asked_for_the_surest_and_the_worst(folder):
    found = choose(folder, METHODS, ["dev:12", "dev:1", "dev:12"])
    assert [each.id for each in found[0].heatmaps] == ["dev:12", "dev:1"]
    surest = sorted(explained(), key=lambda each: -each["logit_difference"])[:5]
    assert [each.id for each in found[1].heatmaps] == [each["id"] for each in surest]
    worst = sorted(explained(), key=lambda each: statistics.fmean(each[f"RMA/{m}"] for m in METHODS))[:5]
    assert [each.id for each in found[2].heatmaps] == [each["id"] for each in worst]


def test_a_heatmap_holds_the_model_s_own_numbers(folder):
    heatmap = choose(folder, METHODS, ["dev:1"])[0].heatmaps[0]
    assert (heatmap.told, heatmap.correct) == ("logit of “are” − logit of “is”", True)
    assert "".join(heatmap.lines[0].pieces[at].text for at in sorted(heatmap.truth)) == "keys"
    for line in heatmap.lines:
        values = explained()[0][f"relevance/{line.method}"]
        assert [piece.relevance for piece in line.pieces] == values
        assert max(abs(piece.ratio) for piece in line.pieces) == 1.0
        assert all(piece.ratio * value >= 0 for piece, value in zip(line.pieces, values, strict=True))


def test_a_wrong_prediction_is_shown_only_when_asked_for(tmp_path):
    found = random_rows(30)
    wrong = next(each["id"] for each in found if not each["correct"])
    shown = choose(write(tmp_path, found), METHODS, [wrong])
    assert (shown[0].heatmaps[0].told, shown[0].heatmaps[0].correct) == ("logit of “is” − logit of “are”", False)
    assert all(heatmap.correct and heatmap.value > 0 for kind in shown[1:] for heatmap in kind.heatmaps)
    reports(tmp_path, show=[wrong])
    assert "wrong prediction" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "a wrong prediction" in (tmp_path / "heatmaps.tex").read_text(encoding="utf-8")


def test_an_unknown_sample_is_named_before_anything_is_written(tmp_path):
    write(tmp_path, explained())
    with pytest.raises(InputError, match=r"no sample 'dev:13', 'x' in .* ids such as 'dev:1'"):
        reports(tmp_path, show=["dev:1", "x", "dev:13"])
    assert not [name for name in FILES if (tmp_path / name).exists()]


def test_a_report_that_cannot_be_written_leaves_the_old_one(folder, tmp_path):
    write(tmp_path, explained())
    (tmp_path / "table.md").mkdir()
    with pytest.raises(ResultFileError, match=r"cannot write .*table\.md"):
        reports(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "rows", "run.json", "table.md"]


def test_the_page_shows_each_token_and_underlines_the_subject(folder):
    shown = Shown((folder / "report.html").read_text(encoding="utf-8"))
    expected = [p.text for kind in choose(folder, METHODS, ["dev:12"]) for h in kind.heatmaps for _ in METHODS
                for p in h.lines[0].pieces]  # fmt: skip
    assert shown.tokens == expected
    underlined = [attrs for _, attrs in shown.elements if {"lrpx-t", "lrpx-truth"} <= {*attrs.get("class", "").split()}]
    counts = [len(heatmap.truth) for kind in choose(folder, METHODS, ["dev:12"]) for heatmap in kind.heatmaps]
    assert len(underlined) == sum(counts) * len(METHODS)


def test_hostile_text_stays_text_on_the_page(tmp_path):
    reports(hostile_run(tmp_path), show=["<i>&|\\1"])
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    shown = Shown(page)
    assert {tag for tag, _ in shown.elements}.isdisjoint({"script", "img", "i", "u", "link", "iframe"})
    assert {name for _, attrs in shown.elements for name in attrs}.isdisjoint({"onerror", "style", "href", "src"})
    assert shown.tokens[: len(HOSTILE)] == [visible(token)[1] for token in HOSTILE]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202a-\u202e\u2066-\u2069]", page)


def test_hostile_text_stays_text_in_markdown(tmp_path):
    reports(hostile_run(tmp_path))
    text = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert r"| settings model | \<b\>\|x⏎\# y |" in text
    assert r"| command | lrpx \`rm\` \</td\>⏎\\bye |" in text
    assert not re.search(r"(?<!\\)<[a-z/]", text)
