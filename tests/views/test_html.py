from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from view_samples import HOSTILE, attribution, chat, hostile, long_text, parts, sentence, sink, translation, wide

from lrpx._views.html import STEPS, fragment, page
from lrpx._views.picture import one_line, picture, visible
from lrpx.ledger import Entry, Ledger
from lrpx.parts import Part
from tests.work import calls

VOID = {"meta"}
TAGS = set(
    "html head meta title style body main div header p b bdi span section footer a h2 table thead tbody tfoot "
    "tr th td details summary svg rect".split()
)
ATTRIBUTES = set(
    "lang charset http-equiv content name class id dir tabindex aria-description aria-label aria-hidden role "
    "aria-level href scope open viewbox preserveaspectratio x y width height".split()
)
SAMPLES = [sentence, sink, wide, translation, chat, hostile, parts]


class Reader(HTMLParser):
    """Reads a view back: tokens, whole text, styles, tags; refuses what the templates never write."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[tuple[str, set[str]]] = []
        self.tokens: list[str] = []
        self.tips: list[str] = []
        self.classes: list[set[str]] = []
        self.texts: list[str] = []
        self.style = self.title = self.all = ""
        self.metas: dict[str, str] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        assert tag in TAGS
        assert set(values) <= ATTRIBUTES
        assert re.fullmatch(r"#(t\d+|lrpx-after)", values.get("href") or "#t0")
        if tag == "meta":
            self.metas[values.get("http-equiv") or values.get("name") or "charset"] = values.get("content") or ""
        classes = set((values.get("class") or "").split())
        if "lrpx-t" in classes:
            self.tokens.append("")
            self.tips.append(values["aria-description"] or "")
            self.classes.append(classes)
        if "lrpx-text" in classes:
            self.texts.append("")
        if tag not in VOID and tag != "rect":
            self.open.append((tag, classes))

    def handle_endtag(self, tag: str) -> None:
        if tag != "rect":
            assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        inside = [tag for tag, _ in self.open]
        classes = set().union(*(names for _, names in self.open)) if self.open else set()
        if "style" in inside:
            self.style += data
            return
        self.all += data
        if "title" in inside:
            self.title += data
        if "lrpx-t" in classes:
            self.tokens[-1] += data
        if "lrpx-text" in classes:
            self.texts[-1] += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment: {data}")


def read(text: str) -> Reader:
    return Reader(text)


@pytest.mark.parametrize("view", [page, fragment])
@pytest.mark.parametrize("sample", SAMPLES)
def test_tokens_read_back_as_they_are_shown(view, sample):
    a = sample()
    shown, back = picture(a), read(view(a))
    assert back.tokens == [visible(token)[1] for token in a.tokens]
    assert back.texts == ["".join(p.before + p.text + p.after for p in segment.pieces) for segment in shown.segments]


@pytest.mark.parametrize("sample", SAMPLES)
def test_the_page_allows_itself_one_style_sheet_and_nothing_else(sample):
    text = page(sample())
    back = read(text)
    digest = base64.b64encode(hashlib.sha256(back.style.encode()).digest()).decode()
    assert back.metas["Content-Security-Policy"] == (
        f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    assert text.index("Content-Security-Policy") < text.index("<style>")
    assert not re.search(r"url\(|@import|https?://", back.style)
    assert " style=" not in re.sub(r">[^<]*<", "><", text)
    assert "<script" not in text
    text.encode()


def test_the_header_says_what_was_explained():
    back = read(page(sentence()))
    assert back.title == 'logit of " are" minus logit of " is" · LRPx'
    assert 'logit of " are" minus logit of " is" +0.412' in back.all
    assert "Prediction  are at 43.2% · openai-community/gpt2 · attnlrp" in back.all
    assert "Sum +0.279 of +0.412 (67.7%) · +1.714 for, −1.435 against" in back.all
    assert "against −1.427+1.427 for" in back.all


def test_a_token_tells_its_number_share_and_id():
    tips = read(page(sentence())).tips
    assert tips[1].replace("\xa0", " ") == "+1.427 · 346.4% of the value · token 1 · id 101"
    assert tips[5].replace("\xa0", " ") == "−0.641 · −155.6% of the value · token 5 · id 105"


def test_groups_have_no_id():
    grouped = sentence().spans([(5, 7)])
    back = read(page(grouped))
    assert back.tokens[5] == "cabinet"
    assert back.tips[5].replace("\xa0", " ") == "−0.959 · −232.8% of the value · group 5"
    assert "Every group as a table" in back.all


def test_levels_follow_the_relevance():
    a = attribution(["a", "b", "c", "d"], [1.0, -0.5, 0.0, 0.25])
    names = [next(iter(found - {"lrpx-t"}), "") for found in read(page(a)).classes]
    assert names == [f"lrpx-p{STEPS}", f"lrpx-n{STEPS // 2}", "", f"lrpx-p{STEPS // 4}"]


@pytest.mark.parametrize("view", [page, fragment])
def test_a_sink_is_told_outlined_and_leaves_the_scale_to_the_rest(view):
    back = read(view(sink()))
    assert "<s> alone carries +14.2, 4.9 times the next largest." in back.all
    assert [i for i, found in enumerate(back.classes) if "lrpx-sink" in found] == [0]
    assert f"lrpx-p{STEPS}" in back.classes[5]
    assert "against −2.87+2.87 for" in back.all
    assert back.tips[0].endswith("beyond\xa0the\xa0colour\xa0scale")


def test_no_sink_no_note():
    assert "alone carries" not in page(sentence())


def test_segments_are_labelled_only_when_there_are_several():
    assert "encoder +4" in read(page(translation())).all
    assert "decoder +0.93" in read(page(translation())).all
    assert "lrpx-label" not in page(sentence()).partition("</style>")[2]


def test_the_messages_of_a_chat_are_segments_with_their_sums():
    shown = [(segment.name, len(segment.pieces)) for segment in picture(chat()).segments]
    assert shown == [("", 3), ("system", 3), ("", 4), ("user", 4), ("", 4), ("user", 2), ("", 4)]
    text = read(page(chat())).all
    for segment in picture(chat()).segments:
        label = f"{segment.name or 'other'} {segment.total:+.4g}".replace("-", "−")
        assert label in text


def test_the_ledger_is_a_waterfall_that_reads_as_a_table():
    text = re.sub(r"\s+", " ", read(page(sentence())).all)
    assert "Where the value came from FromRelevanceOf the value tokens+0.27967.7% positions−0.171−41.6% " in text
    assert "biases+0.06215.0% softmax residue+0.24358.9% Sum+0.412100.0%" in text
    assert "It closes" in text
    assert "Where the value came from" in fragment(sentence())
    assert "Where the value came from" not in page(sink())
    assert "Every entry of the ledger" not in page(sink())


def test_the_waterfall_goes_from_zero_to_the_value():
    bars = re.findall(r'class="lrpx-(for|against|sum)" x="([\d.]+)" y="8" width="([\d.]+)"', fragment(sentence()))
    kinds = [kind for kind, _, _ in bars]
    edges = [(float(x), float(x) + float(width) - 4) for _, x, width in bars]
    assert kinds == ["for", "against", "for", "for", "sum"]
    tokens, positions, biases, softmax, total = edges
    assert tokens[0] == total[0] == 0
    assert tokens[1] == pytest.approx(positions[1], abs=0.11)
    assert positions[0] == pytest.approx(biases[0], abs=0.11)
    assert biases[1] == pytest.approx(softmax[0], abs=0.11)
    assert softmax[1] == pytest.approx(total[1], abs=0.11)
    assert total[1] == pytest.approx(996, abs=0.11)


def test_every_entry_is_in_a_table_largest_first():
    text = re.sub(r"\s+", " ", read(page(sentence())).all)
    _, _, text = text.partition("Every entry of the ledger")
    names = ["transformer.wte", "transformer.wpe", "transformer.ln_f.bias", "transformer.h.1.attn.c_proj.bias"]
    places = [text.index(name) for name in [*names, "transformer.h.0.mlp.c_fc.bias", "softmax in transformer.h.0.attn"]]
    assert places == sorted(places)
    assert "positions where the tokens stand−0.171−41.6% transformer.wpe−0.1713−41.6%" in text


def test_a_ledger_that_does_not_close_says_what_is_missing():
    lacking = Ledger((Entry("tokens", "wte", 1.0), Entry("biases", "b", -0.5)), explained=1.0)
    text = read(page(attribution(["a"], [1.0], value=1.0, ledger=lacking))).all
    assert "It does not close: +0.5 (50.00%) is missing." in text


@pytest.mark.parametrize(
    "ledger",
    [
        Ledger((), 0.0),
        Ledger((), 1.0),
        Ledger((Entry("tokens", "wte", 0.0),), 0.0),
        Ledger((Entry("tokens", "wte", 1e308), Entry("biases", "b", 1e308), Entry("biases", "c", -1e308)), -1e308),
        Ledger((Entry("tokens", "wte", 1e-320),), 1e-320),
    ],
    ids=["nothing of nothing", "nothing", "zeros", "huge", "tiny"],
)
def test_ledgers_at_the_edge(ledger):
    a = attribution(["a"], [1.0], ledger=ledger)
    for view in (page, fragment):
        assert all(
            0 <= float(place) <= 1000 for place in re.findall(r' (?:x|width)="([^"]*)" (?:y="8"|height)', view(a))
        )


def test_a_part_of_several_axes_is_a_table_of_its_cells():
    text = re.sub(r"\s+", " ", read(page(parts())).all)
    heads = parts().parts["heads"].summed("token")
    assert "Heads: layer × head Summed over token. Strongest: layer 0, head 5 −0.850, layer 2, head 0 −0.751," in text
    for (layer, head), value in zip(
        ((i, j) for i in range(4) for j in range(8)), heads.values.flatten().tolist(), strict=True
    ):
        assert f"layer {layer}, head {head}: {value:+.3f}".replace("-", "−") in text
    assert "Pixels: row × column Summed over channel; row in blocks of 2; column in blocks of 3." in text
    assert "Answer: answer token × token Strongest:" in text
    assert page(parts()).count('<td class="lrpx-c') == 4 * 8 + 35 * 50 + len(HOSTILE) ** 2
    assert "lrpx-c" not in fragment(parts()).partition("</style>")[2]


@pytest.mark.parametrize("values", [torch.zeros(2, 3, 2), torch.full((2, 3, 2), 1e-300, dtype=torch.float64)])
def test_parts_at_the_edge(values):
    a = attribution(["a", "b"], [0.0, 1.0], parts=(Part("heads", values, ("layer", "head", "token")),))
    assert page(a).count('<td class="lrpx-c') == 6
    assert ("Strongest: none." in read(page(a)).all) == (float(values.sum()) == 0)
    nothing = attribution([], [], parts=(Part("heads", torch.ones(2, 3, 0), ("layer", "head", "token")),))
    assert '<td class="lrpx-c' not in page(nothing)


def test_the_page_holds_its_provenance():
    back = read(page(sentence()))
    for fact in ("607a30d783dfa663caf39e06633721c8d4cfcd7e", "AttnLRP", "float32", "2.13.0", "5.23.0"):
        assert fact in back.all


def test_white_space_is_kept_and_shown():
    back = read(page(attribution(["def", " f", "\n", "    ", "\tx", "  y", "\n\n"], [1.0] * 7)))
    assert back.texts == ["def f⏎\n␣␣␣␣⇥x  y⏎\n⏎\n"]


def test_fragments_keep_their_styles_to_themselves():
    one, other = fragment(sentence()), fragment(sink())
    scopes = [re.match(r'<div class="(lrpx-[0-9a-f]{8})">', text)[1] for text in (one, other)]
    assert scopes[0] != scopes[1]
    assert fragment(sentence()) == one
    assert " id=" not in one
    assert "href" not in one
    for scope, text in zip(scopes, (one, other), strict=True):
        for selectors in re.findall(r"^([^@{}\n]+)\{", read(text).style, re.M):
            assert all(f".{scope}" in selector for selector in selectors.split(","))


@pytest.mark.parametrize(
    "a",
    [
        attribution(["one"], [0.5]),
        attribution(["one"], [0.0]),
        attribution([" a", " b"], [0.0, 0.0], value=0.0),
        attribution([], []),
        attribution(["a", "b"], [1e-300, -1e300], value=1e-5),
        attribution(["a", "b"], [1e-300, -1e-300], value=1e300),
        sentence().words(),
        translation().words(),
    ],
    ids=["one", "one zero", "zeros", "none", "huge", "tiny", "words", "words of two segments"],
)
def test_small_zero_and_grouped(a):
    for view in (page, fragment):
        assert len(read(view(a)).tokens) == len(a)


def test_a_text_of_twice_the_length_is_twice_the_work():
    page(sentence())
    assert calls(page, long_text(1000)) < 2.2 * calls(page, long_text(500))


def test_a_long_text_can_be_skipped():
    a = long_text()
    text = page(a)
    assert len(text) < 1_000_000
    assert "Skip the 2000 tokens" in read(text).all


anything = st.text(st.one_of(st.characters(), st.sampled_from("<>&\"'{}%`/=\0\r\n\u202e\ud800")))


@settings(deadline=None, max_examples=200)
@given(st.lists(anything | st.sampled_from(HOSTILE), max_size=6), anything, anything)
def test_no_text_breaks_out(tokens, description, name):
    a = attribution(
        tokens,
        [(i % 5) - 2.0 for i in range(len(tokens))],
        description=description,
        predicted=description,
        segments=((name, 0, 1), (name, 1, len(tokens))) if len(tokens) > 1 else None,
        ledger=Ledger((Entry("biases", name, 1.0),), 1.0),
        parts=(Part("answer", torch.ones(1, len(tokens)), ("answer token", "token"), {"answer token": [name]}),),
    )
    for view in (page, fragment):
        text = view(a)
        back = read(text)
        assert back.tokens == [visible(token)[1] for token in tokens]
        assert one_line(description) in back.all
        assert view is fragment or one_line(name) in back.all
        assert view is fragment or not tokens or f"answer token {one_line(name).strip()}, token " in back.all
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
        text.encode()
