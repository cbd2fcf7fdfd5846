"""Pictures of matplotlib: what is drawn where, and that no text does more than stand there."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from view_samples import HOSTILE, attribution, chat, hostile, methods, sentence, sink, translation, wide

from lrpx import Attributions
from lrpx._views.colour import colour
from lrpx.errors import MissingExtraError, ResultError, ResultFileError

mpl = pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from matplotlib.colors import to_rgb  # noqa: E402
from matplotlib.patches import Rectangle  # noqa: E402
from matplotlib.text import Text  # noqa: E402
from PIL import Image  # noqa: E402

SAMPLES = [sentence, sink, wide, translation, chat, hostile]
MATHS = ("$x_1^2$", r"$\frac{1}{2}$", "$", "$$", r"\$", r"$\undefined$", r"\alpha", "_^{}", "100%", "#")


def texts(figure):
    return [each.get_text() for each in figure.findobj(Text)]


def boxes(figure):
    return [each for each in figure.findobj(Rectangle) if each is not figure.patch]


def by_place(figure, width=6.5):
    """Every text with its place in inches, from the top left."""
    return [(each.get_text(), each.get_position()) for each in figure.findobj(Text)]


@pytest.mark.parametrize("sample", [*SAMPLES, methods, lambda: Attributions(each() for each in SAMPLES)])
def test_a_picture_is_drawn_without_a_word(sample, tmp_path):
    found = sample()
    content = found.to_png(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes() == content
    image = Image.open(io.BytesIO(content))
    assert image.format == "PNG"
    assert image.size[0] == 1300
    text = found.to_svg(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text(encoding="utf-8") == text
    ElementTree.fromstring(text)


def test_every_token_stands_on_its_colour():
    a = sentence()
    figure = a.to_figure()
    fills = [tuple(round(255 * part) for part in to_rgb(box.get_facecolor())) for box in boxes(figure)]
    limit = float(a.relevance.abs().max())
    assert fills[: len(a)] == [colour(value / limit) for value in a.relevance.tolist()]
    for box, token in zip(boxes(figure), a, strict=False):
        inside = [text for text, (x, y) in by_place(figure) if box.get_x() <= x < box.get_x() + box.get_width()
                  and box.get_y() < y < box.get_y() + box.get_height()]  # fmt: skip
        assert inside == [token.text.strip()]


def test_it_says_what_was_explained():
    said = " ".join(texts(sentence().to_figure()))
    assert said.startswith('logit of " are" minus logit of " is" +0.412')
    assert "−1.427" in said
    assert "system" in texts(chat().to_figure())
    assert "gradient-l1" in texts(methods().to_figure())


def test_the_sink_is_framed():
    edges = [box.get_edgecolor()[3] for box in boxes(sink().to_figure())]
    assert edges[0] == 1
    assert set(edges[1:]) == {0}


@pytest.mark.parametrize("width", [1.5, 3.3, 6.5, 20])
@pytest.mark.parametrize("sample", [sentence, hostile, wide])
def test_nothing_leaves_the_picture(sample, width):
    figure = sample().to_figure(width)
    across, down = figure.get_size_inches()
    assert across == pytest.approx(width)
    for box in boxes(figure):
        assert box.get_x() >= 0
        assert box.get_x() + box.get_width() <= across + 1e-6
        assert box.get_y() >= 0
        assert box.get_y() + box.get_height() <= down
    renderer = figure.canvas.get_renderer()
    for each in figure.findobj(Text):
        assert each.get_window_extent(renderer).x1 <= across * figure.dpi + 3


@pytest.mark.parametrize("text", MATHS)
def test_dollars_are_dollars_whatever_the_settings_are(text):
    with mpl.rc_context(
        {"text.usetex": True, "text.parse_math": True, "savefig.bbox": "tight", "font.family": "serif"}
    ):
        a = attribution([text, " and", text], [1.0, 2.0, -1.0], description=text)
        figure = a.to_figure()
        assert texts(figure).count(text) == 3
        assert Image.open(io.BytesIO(a.to_png())).size[0] == 1300
        ElementTree.fromstring(a.to_svg())


def test_the_users_settings_stay():
    before = dict(mpl.rcParams)
    sentence().to_svg()
    assert dict(mpl.rcParams) == before
    assert (
        "matplotlib.pyplot" not in __import__("sys").modules or not __import__("matplotlib.pyplot").pyplot.get_fignums()
    )


def test_the_same_result_is_the_same_file():
    assert sentence().to_svg() == sentence().to_svg()
    assert sentence().to_png() == sentence().to_png()
    assert not re.search(
        r"https?://(?!www\.w3\.org|purl\.org|creativecommons\.org|matplotlib\.org)", sentence().to_svg()
    )


def test_what_no_font_has_is_a_number():
    a = attribution(["\U0001f3ac", "\U00012000", "ok"], [1.0, 2.0, 3.0])
    assert {"⟨1F3AC⟩", "⟨12000⟩", "ok"} <= set(texts(a.to_figure()))


def test_arabic_and_hebrew_are_read_from_the_right():
    a = attribution([" مرحبا", " بالع", "الم", " hello", " שלום"], [1.0, -1.0, 0.5, 0.2, 0.1])
    places = {text: x for text, (x, _) in by_place(a.to_figure())}
    assert places["مرحبا"] > places["بالع"] > places["الم"] > places["hello"] > places["שלום"]
    mixed = attribution(["one", " مرحبا", " بالع", " two"], [1.0, -1.0, 0.5, 0.2])
    places = {text: x for text, (x, _) in by_place(mixed.to_figure())}
    assert places["one"] < places["بالع"] < places["مرحبا"] < places["two"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("אב 1948 גד", "דג 1948 בא"),
        ("م 1948 م", "م 1948 م"),
        ("م ١٩٤٨", "١٩٤٨ م"),
        ("אב 3.5% גד", "דג 3.5% בא"),
        ("ab אב 12 cd", "ab 12 בא cd"),
        ("א ab 12 ב", "ב ab 12 א"),
        ("ab 12 cd", "ab 12 cd"),
        ("אב (ab) גד", "דג (ab) בא"),
        ("(אב) ab", "ab (בא)"),
        ("ab (אב) גד", "ab (בא) דג"),
        ("אב [ab] ab", "ab [ab] בא"),
        ("אב < גד", "דג > בא"),
        ("ab (cd) אב", "ab (cd) בא"),
    ],
)
def test_digits_and_brackets_stand_as_they_are_read(text, shown):
    tokens = re.findall(r" ?\S", text)
    drawn = by_place(attribution(tokens, [1.0] * len(tokens)).to_figure())
    height = dict(drawn)[tokens[0]][1]
    line = sorted((place[0], each) for each, place in drawn if place[1] == height)
    assert "".join(each for _, each in line) == shown.replace(" ", "")


def test_a_special_token_does_not_say_from_where_a_text_is_read():
    a = attribution(["[CLS]", "אב", " ab", " גד"], [1.0] * 4, special=(True, False, False, False))
    places = {text: x for text, (x, _) in by_place(a.to_figure())}
    assert places["גד"] < places["ab"] < places["אב"] < places["[CLS]"]
    assert '" dir="auto" id="t0"' in a.to_html()


def test_new_lines_break_the_line():
    places = {text: y for text, (_, y) in by_place(sink().to_figure())}
    assert places["is"] > places["⏎⏎"] > places["the"]


def test_a_sink_of_several_lines_is_named_on_one():
    figure = attribution(["\n\n", "keys", " to"], [40.0, 1.0, 0.5]).to_figure()
    assert texts(figure).count("⏎⏎") == 2
    assert not any("\n" in text for text in texts(figure))


@settings(deadline=None, max_examples=30)
@given(st.lists(st.text(max_size=12) | st.sampled_from([*HOSTILE, *MATHS]), max_size=6), st.text(max_size=30))
def test_no_text_breaks_a_picture(tokens, description):
    a = attribution(tokens, [float(i - 2) for i in range(len(tokens))], description=description, predicted=description)
    text = Attributions([a, a]).to_svg()
    names = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(text).iter()}
    assert names <= set("svg metadata RDF Work type format title defs style g path use".split()) | {"clipPath", "rect"}
    assert a.to_png(width=2)


def test_sizes_are_refused_by_name():
    for width in (0, -1, 0.5, float("nan"), float("inf"), "6"):
        with pytest.raises(ResultError, match=r"the width is .*; pass inches, at least 1"):
            sentence().to_png(width=width)
    with pytest.raises(ResultError, match=r"the picture would be 6 by \d+ inches; pass fewer or shorter texts"):
        attribution(["\n"] * 2000, [1.0] * 2000).to_figure()
    with pytest.raises(ResultFileError, match=r"there is no folder"):
        sentence().to_png("none/a.png")


def test_the_extra_is_named_where_matplotlib_is_not(monkeypatch):
    import sys

    monkeypatch.delitem(sys.modules, "lrpx._views.figure", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r"a picture needs matplotlib: pip install 'lrpx\[pictures\]'"):
        sentence().to_png()
