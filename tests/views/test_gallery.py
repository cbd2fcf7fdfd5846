"""Several results: what stands side by side, how each is told from the others, and the list itself."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from test_html import Reader, anything
from view_samples import HOSTILE, attribution, chat, hostile, long_text, methods, parts, sentence, sink, wide

import lrpx
from lrpx import Attributions
from lrpx._views.gallery import FEW, groups
from lrpx._views.html import gallery_fragment, gallery_page
from lrpx._views.picture import one_line, visible
from lrpx.errors import ResultError
from lrpx.parts import Part, Parts

COLOUR_CODE = re.compile(r"\x1b\[[\d;]*m")


def drawn(found, width=80, colours=True):
    out = io.StringIO()
    system = "truecolor" if colours else None
    Console(file=out, force_terminal=colours, color_system=system, width=width).print(found)
    return out.getvalue()


def plain(text):
    return COLOUR_CODE.sub("", text)


def made_by(a, **facts):
    return replace(a, provenance=replace(a.provenance, **facts))


# ------------------------------------------------------------------------- what stands together


def test_the_same_tokens_stand_together_wherever_they_are():
    found = groups(methods())
    assert [[line.number for line in group.lines] for group in found] == [[1, 3, 4], [2]]
    assert [line.label for line in found[0].lines] == ["attnlrp", "lrp", "gradient-l1"]
    assert found[0].title == 'logit of " are" minus logit of " is"'
    assert found[0].facts == ('predicted " are" 43.2%', "openai-community/gpt2")
    assert found[1].facts == ('predicted " Paris" 43.2%', "openai-community/gpt2", "attnlrp")
    assert [len(row) for row in found[0].rows] == [3] * len(sentence())


def test_what_has_no_tokens_has_no_sum_of_them():
    """A sound: its relevance is a part of two axes, and a sum of no tokens would say that there is none."""
    values = torch.tensor([[0.5, -2.0, 0.25], [1.0, 0.0, 1.0]])
    a = attribution((), [], value=4.0, parts=(Part("input_features", values, ("dimension 0", "dimension 1")),))
    several = Attributions([a, made_by(a, method="lrp")])
    shown = [str(a), plain(drawn(a)), a.to_html(), a._repr_html_(), a.to_latex()]
    for view in (*shown, plain(drawn(several)), several.to_html(), several._repr_html_(), several.to_latex()):
        body = re.sub(r"<style>.*?</style>|<[^>]+>", " ", view, flags=re.S)
        assert "+4" in body
        assert not re.search(r"[Ss]um\s+0\b|0\.0%|against\s+0|0\s+for", body), body
    assert all(told in view for view, told in zip(shown, ["sum to +0.75", "sum +0.75", "Sum +0.75"], strict=False))
    assert a.to_png()
    assert several.to_svg()


def test_only_what_differs_tells_them_apart():
    a = sentence()
    other = replace(a, explained=replace(a.explained, description='logit of " is"'))
    later = replace(a, explained=replace(a.explained, position=3))

    def labels(*several):
        (group,) = groups(several)
        return [line.label for line in group.lines]

    assert labels(a, other) == [a.explained.description, 'logit of " is"']
    assert labels(a, later) == ["position 10", "position 3"]
    assert labels(a, made_by(a, model="bert")) == ["openai-community/gpt2", "bert"]
    assert labels(a, made_by(a, dtype="bfloat16")) == ["float32", "bfloat16"]
    assert labels(a, made_by(a, recipe="AttnLRP, changed")) == ["AttnLRP", "AttnLRP, changed"]
    assert labels(a, made_by(other, method="lrp"), made_by(a, method="lrp")) == [
        f"attnlrp, {a.explained.description}",
        'lrp, logit of " is"',
        f"lrp, {a.explained.description}",
    ]
    assert labels(a, made_by(other, method="lrp")) == [f"attnlrp, {a.explained.description}", 'lrp, logit of " is"']
    assert labels(a, made_by(replace(other, explained=later.explained), model="bert")) == [
        "position 10, openai-community/gpt2",
        "position 3, bert",
    ]
    assert labels(a, made_by(a, method="lrp", dtype="bfloat16")) == ["attnlrp", "lrp"]
    assert labels(a, a) == ["no. 1", "no. 2"]
    assert labels(a) == [""]
    assert groups((a, other))[0].title == "2 explanations of the same text"


def test_the_same_tokens_in_other_segments_do_not_stand_together():
    a = sentence()
    assert len(groups((a, replace(a, segments=(("one", 0, 3), ("two", 3, 11)))))) == 2


def test_strong_is_what_is_strong_in_any():
    tokens = ["a", "b", "c", "d"]
    one, other = attribution(tokens, [1.0, 0.5, 0.0, 0.0]), attribution(tokens, [0.0, 0.0, 0.0, 200.0])
    (group,) = groups((one, other))
    assert [row[0].text for row in group.strongest(9)] == ["a", "d", "b"]


# --------------------------------------------------------------------------------- the list itself


def test_it_is_a_list():
    found = methods()
    assert isinstance(found, list)
    assert found == list(found)
    assert type(found[1:]) is type(found + [sink()]) is Attributions  # noqa: RUF005 - the sum is what is tested
    assert type(2 * found) is type(found * 2) is type(found.copy()) is Attributions
    assert 2 * found == [*found, *found]
    assert found[1] == sink()
    assert lrpx.Attributions is Attributions


def test_what_is_no_attribution_is_named():
    with pytest.raises(ResultError, match=r"item 1 of the list is str; pass attributions alone"):
        Attributions([sink(), "text"]).to_html()
    for draw in (Attributions.to_html, Attributions.to_latex):
        with pytest.raises(ResultError, match=r"no attribution in this list; pass at least one"):
            draw(Attributions())
    assert Attributions()._repr_html_() is None
    assert str(Attributions()) == "[]"


def test_lists_of_several_questions_are_drawn_in_one():
    nested = Attributions([Attributions([sentence(), sink()]), [wide()]])
    assert list(nested.flat()) == [sentence(), sink(), wide()]
    assert "3 explanations" in nested.to_html()


def test_an_explainer_gives_such_lists():
    explain = lrpx.Explainer.from_pretrained()
    found = explain(["The doors", "A house"], target=[[" are", " is"], None])
    assert type(found) is type(found[0]) is Attributions
    assert [len(group.lines) for group in groups(found.flat())] == [2, 1]


# ------------------------------------------------------------------------------------------- pages


def test_a_page_of_several_reads_back():
    text = gallery_page(methods())
    back = Reader(text)
    shown = [visible(token)[1] for a in (*methods()[::2], methods()[3], sink()) for token in a.tokens]
    assert back.tokens == shown
    assert back.title == "4 explanations · LRPx"
    for said in ("attnlrp +0.412", "lrp +0.412", "gradient-l1 +0.412", "Token by token", "alone carries +14.2"):
        assert said in back.all
    assert "607a30d783dfa663caf39e06633721c8d4cfcd7e" in back.all
    assert back.all.count("Revision") == 3, "once for each way that they were made"


def test_a_page_of_several_allows_itself_one_style_sheet():
    text = gallery_page([hostile(), sentence()])
    back = Reader(text)
    digest = base64.b64encode(hashlib.sha256(back.style.encode()).digest()).decode()
    assert f"style-src 'sha256-{digest}'" in back.metas["Content-Security-Policy"]
    assert not re.search(r"url\(|@import|https?://", back.style)
    assert " style=" not in re.sub(r">[^<]*<", "><", text)


def test_the_numbers_of_each_stand_side_by_side():
    back = re.sub(r"\s+", " ", Reader(gallery_page(methods())).all)
    _, _, table = back.partition("Token by token")
    assert table.startswith(" No.Tokenattnlrplrpgradient-l1 0The+0.08+0.15−0.27 1keys+1.43+0.08+0.15 ")


def test_a_notebook_shows_the_first_few():
    many = Attributions(made_by(attribution(["a", f" {i}"], [1.0, 2.0]), method=f"m{i}") for i in range(FEW + 5))
    text = many._repr_html_()
    assert f"The first {FEW} are shown; to_html() has all." in Reader(text).all
    assert len(Reader(text).tokens) == 2 * FEW
    assert len(Reader(many.to_html()).tokens) == 2 * (FEW + 5)
    assert "are shown" not in many[:FEW]._repr_html_()
    assert "and 5 more" in plain(drawn(many))


def test_fragments_of_several_keep_their_styles_to_themselves():
    text = gallery_fragment(methods())
    scope = re.match(r'<div class="(lrpx-[0-9a-f]{8})">', text)[1]
    assert " id=" not in text
    for selectors in re.findall(r"^([^@{}\n]+)\{", Reader(text).style, re.M):
        assert all(f".{scope}" in selector for selector in selectors.split(","))


@pytest.mark.parametrize(
    "a",
    [attribution([], []), attribution(["a"], [0.0]), attribution(["a", "b"], [1e-300, -1e300]), sentence().words()],
)
def test_small_zero_and_grouped(a):
    for several in ([a], [a, made_by(a, method="lrp")], [a, a, sink()]):
        for view in (gallery_page, gallery_fragment):
            assert len(Reader(view(several)).tokens) == sum(map(len, several))
        assert drawn(Attributions(several))
        assert str(Attributions(several)).count("\n") == len(several) - 1


@settings(deadline=None, max_examples=60)
@given(st.lists(anything | st.sampled_from(HOSTILE), max_size=5), anything, anything)
def test_no_text_breaks_out(tokens, description, name):
    a = attribution(tokens, [(i % 5) - 2.0 for i in range(len(tokens))], description=description)
    found = Attributions([a, made_by(a, method=name), made_by(a, model=name)])
    for text in (gallery_page(found), gallery_fragment(found)):
        back = Reader(text)
        assert back.tokens == [visible(token)[1] for token in tokens] * 3
        assert one_line(name) in back.all
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
        text.encode()
    for text in (drawn(found), drawn(found, colours=False), str(found)):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", plain(text))


# --------------------------------------------------------------------------------------- terminals


def test_a_terminal_has_the_strongest_side_by_side():
    lines = [line.rstrip() for line in plain(drawn(methods())).splitlines()]
    at = next(i for i, line in enumerate(lines) if line.startswith("strongest"))
    assert lines[at].split() == ["strongest", "attnlrp", "lrp", "gradient-l1"]
    assert lines[at + 1].split() == ["keys", "+1.43", "+0.08", "+0.15"]
    assert lines[at + 9].split() == ["sum", *["+0.279"] * 3]
    assert lines[at + 10].split() == ["of", "the", "value", "67.7%", "67.7%"], "no share of what is no part of it"
    assert lines[0] == 'logit of " are" minus logit of " is"'
    assert "attnlrp  +0.412  sum +0.279" in lines


@pytest.mark.parametrize("width", [20, 37, 80, 200])
@pytest.mark.parametrize("colours", [True, False])
@pytest.mark.parametrize("sample", [sentence, wide, hostile, chat, parts])
def test_the_width_is_honoured(sample, width, colours):
    found = Attributions([*methods(sample), long_text(200), chat()])
    assert max(cell_len(line) for line in plain(drawn(found, width, colours)).splitlines()) <= width


@pytest.mark.parametrize("width", [30, 80, 200])
def test_no_number_of_another_size_is_on_two_lines(width):
    """They are wider than most: "+1.00e-0" and below it "7" is read as another."""
    small, large = (attribution(["The", " keys"], values) for values in ([1e-7, -5e-8], [1e6, -0.5]))
    found = Attributions([made_by(small, method="small"), made_by(large, method="large")])
    words = plain(drawn(found, width, False)).split()
    for number in ("+1.00e-07", "-5.00e-08", "+1000000.000", "-0.500"):
        assert number in words


def test_a_printed_list_is_a_line_for_each():
    text = str(methods())
    assert text.splitlines() == [str(a) for a in methods()]


def test_other_numbers_of_the_same_tokens_are_seen():
    a = sentence()
    other = replace(a, parts=Parts([Part("tokens", -a.relevance, ("token",))]))
    back = Reader(gallery_page([a, other]))
    assert "no. 1" in back.all
    assert "lrpx-n32" in "".join(" ".join(names) for names in back.classes)
