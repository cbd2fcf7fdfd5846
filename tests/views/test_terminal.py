from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.color import Color, ColorSystem
from rich.console import Console
from view_samples import HOSTILE, attribution, chat, hostile, long_text, parts, sentence, sink, translation, wide

from lrpx._views.colour import INK, PAPER, colour, contrast, hexadecimal, ink, luminance, stepped
from lrpx._views.picture import number, picture, visible
from lrpx.ledger import Entry, Ledger
from lrpx.parts import Part

COLOUR_CODE = re.compile(r"\x1b\[[\d;]*m")
SAMPLES = [sentence, sink, wide, translation, chat, hostile, parts]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORFGBG", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLORTERM", "truecolor")


def printed(a) -> str:
    """What ``str`` gives where standard output is a terminal."""
    with contextlib.redirect_stdout(Terminal()):
        return str(a)


def drawn(a, width: int = 60, colours: bool = True) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=colours, color_system="truecolor" if colours else None, width=width)
    console.print(a)
    return out.getvalue()


def plain(text: str) -> str:
    return COLOUR_CODE.sub("", text)


def test_a_line_that_is_not_for_a_terminal_is_plain_text_with_numbers():
    text = str(sentence())
    assert text.startswith('logit of " are" minus logit of " is" = +0.412:  The[+0.08] keys[+1.43] to[-0.11]')
    assert text.isascii()
    assert "\n" not in text


def test_a_line_for_a_terminal_is_coloured():
    text = printed(sentence())
    red, green, blue = colour(1.0, dark=True)
    assert f"48;2;{red};{green};{blue}mkeys\x1b[0m" in text
    assert plain(text).endswith("The keys to the old cabinet in the hallway")


def test_no_color_is_honoured(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in printed(sentence())
    assert "keys[+1.43]" in printed(sentence())


def test_a_dumb_terminal_gets_no_codes(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    assert "\x1b" not in printed(sentence())


def test_a_terminal_without_24_bits_gets_what_it_can_show():
    # In a process of its own: rich remembers the codes of a style for the first depth it drew.
    code = "from view_samples import sentence; print(sentence())"
    variables = {name: value for name, value in os.environ.items() if name != "COLORTERM"}
    variables |= {"FORCE_COLOR": "1", "PYTHONIOENCODING": "utf-8", "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, check=True)
    assert b"48;5;" in ran.stdout
    assert b"48;2;" not in ran.stdout


def test_force_color_colours_a_pipe(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "48;2;" in str(sentence())


def test_a_light_terminal_gets_the_light_map(monkeypatch):
    monkeypatch.setenv("COLORFGBG", "0;15")
    assert "48;2;{};{};{}mkeys".format(*colour(1.0)) in COLOUR_CODE.sub(lambda m: m[0], drawn(sentence()))


def test_the_line_tells_the_sink_and_the_segments():
    assert plain(printed(sink())).endswith('"<s>" alone: +14.2')
    assert " encoder: ▁The house" in plain(printed(translation()))
    assert " decoder: <pad>Das" in plain(printed(translation()))


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_line_is_one_line(sample):
    assert "\n" not in str(sample())
    assert "\n" not in printed(sample())


def test_the_heatmap_says_what_was_explained():
    lines = plain(drawn(sentence())).splitlines()
    assert lines[0] == 'logit of " are" minus logit of " is"  +0.412'
    assert lines[1].strip() == 'predicted " are" 43.2%  openai-community/gpt2, attnlrp'
    assert lines[3].strip() == "The keys to the old cabinet in the hallway"
    assert lines[5].startswith("against -1.427 ")
    assert lines[5].endswith(" +1.427 for")
    assert lines[6].strip() == "sum +0.279 of +0.412 (67.7%); +1.714 for, -1.435 against"


def test_the_strongest_tokens_come_with_bars_and_numbers():
    text = plain(drawn(sentence()))
    assert re.search(r"^keys +━{16} +\+1\.43 +346\.4%", text, re.M)
    assert re.search(r"^cab +━{7} +-0\.64 +-155\.6%", text, re.M)


def test_a_sink_is_named_underlined_and_leaves_the_scale_to_the_rest():
    text = drawn(sink(), width=200)
    assert '"<s>" alone carries +14.2, 4.9 times the next largest; it is underlined' in plain(text)
    assert "against -2.87 " in plain(text)
    assert re.search(r"\x1b\[[\d;]*\b4;[\d;]*m<s>", text)
    assert re.search(r"<s> +━{15}▶ +\+14\.20", plain(text))


def test_the_ledger_is_a_waterfall_with_its_largest_entries():
    lines = [line.rstrip() for line in plain(drawn(sentence(), width=80)).splitlines()]
    at = lines.index("where the value came from")
    bars = ["tokens", "positions", "biases", "softmax residue", "sum"]
    wanted = ["+0.279   67.7%", "-0.171  -41.6%", "+0.062   15.0%", "+0.243   58.9%", "+0.412  100.0%"]
    places = []
    for line, name, numbers in zip(lines[at + 1 :], bars, wanted, strict=False):
        assert line.startswith(name)
        assert line.endswith(numbers)
        places.append(re.search("━+", line).span())
    assert places[0][0] == places[4][0]
    assert places[0][1] == places[1][1]
    assert places[1][0] == places[2][0]
    assert places[2][1] == places[3][0]
    assert places[3][1] == places[4][1]
    assert lines[at + 6].startswith("It closes")
    assert lines[at + 8] == "largest single entries"
    assert [line.split()[1:] for line in lines[at + 9 : at + 12]] == [
        ["transformer.ln_f.bias", "+0.120"],
        ["transformer.h.1.attn.c_proj.bias", "-0.100"],
        ["transformer.h.0.mlp.c_fc.bias", "+0.042"],
    ]


@pytest.mark.parametrize("width", [24, 32, 40, 50, 60])
@pytest.mark.parametrize("sample", [sentence, sink], ids=["sentence", "sink"])
def test_where_there_is_little_room_bars_are_short_and_numbers_whole(sample, width):
    def numbers(width):
        lines = plain(drawn(sample(), width=width)).splitlines()
        return [line.split()[-2:] for line in lines if re.search(r"[+-][\d.]+ +-?[\d.]+%$", line.rstrip())]

    assert len(numbers(100)) >= 5
    assert numbers(width) == numbers(100)


def test_bars_in_little_room_are_to_scale():
    lines = plain(drawn(attribution(["a", "b", "c"], [4.0, 2.0, 1.0]), width=24)).splitlines()
    bars = [line for line in lines if re.match(r"[abc] +[━╸]+ +\+", line)]
    halves = [2 * bar.count("━") + bar.count("╸") for bar in bars]
    assert 8 <= halves[0] < 32
    assert halves[1:] == [pytest.approx(halves[0] / 2, abs=1), pytest.approx(halves[0] / 4, abs=1)]


def test_a_ledger_that_does_not_close_says_what_is_missing():
    lacking = Ledger((Entry("tokens", "wte", 1.0), Entry("biases", "b", -0.5)), explained=1.0)
    assert "It does not close: +0.5 (50.00%) is missing." in drawn(attribution(["a"], [1.0], ledger=lacking))
    close = Ledger((Entry("tokens", "wte", 1.0001),), explained=1.0)
    assert "It closes to the precision of float32; the difference is -0.0001." in plain(
        drawn(attribution(["a"], [1.0], ledger=close), width=100)
    )


def test_without_a_ledger_there_is_none():
    assert "where the value came from" not in drawn(sink())


def test_segments_stand_on_labelled_lines():
    lines = [line.strip() for line in plain(drawn(translation())).splitlines()]
    assert lines[lines.index("encoder  +4") + 1] == "▁The house is wonderful.</s>"
    assert lines[lines.index("decoder  +0.93") + 1] == "<pad>Das Haus ist"


def test_without_colours_every_token_carries_its_number():
    text = drawn(sink(), colours=False)
    assert "\x1b" not in text
    assert "<s>[+14.20] The[+0.31]" in text
    assert "⏎[-0.13]\n⏎⏎[+0.06]\nthe[+0.10]" in re.sub(" +\n", "\n", text)


def test_rich_markup_in_tokens_is_text():
    text = plain(drawn(hostile(), width=200))
    assert "[bold red]markup[/bold red][/]:smile:" in text


@pytest.mark.parametrize("sample", SAMPLES)
@pytest.mark.parametrize("width", [20, 37, 80])
@pytest.mark.parametrize("colours", [True, False])
def test_the_width_is_honoured_for_wide_characters_too(sample, width, colours):
    for line in plain(drawn(sample(), width, colours)).splitlines():
        assert cell_len(line) <= width


def test_a_long_text_is_drawn_whole():
    text = plain(drawn(long_text(), width=100))
    assert text.count("⏎") == 2 * (2000 // 97)


@pytest.mark.parametrize(
    "a",
    [
        attribution(["one"], [0.5]),
        attribution(["one"], [0.0]),
        attribution([" a", " b"], [0.0, 0.0], value=0.0),
        attribution([], []),
        attribution(["a", "b"], [1e-300, -1e300], value=1e-5),
        sentence().words(),
        sentence().spans([(5, 7)]),
    ],
    ids=["one", "one zero", "zeros", "none", "extreme", "words", "spans"],
)
def test_small_zero_and_grouped(a):
    assert number(a.explained.value) in str(a)
    for width in (1, 10, 80):
        assert drawn(a, width)
        assert drawn(a, width, colours=False)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.text(st.one_of(st.characters(), st.sampled_from("\x1b\x9b\x07\r\b\u202e\ud800[]")))))
def test_no_token_text_steers_the_terminal(tokens):
    a = attribution(tokens, [(i % 5) - 2.0 for i in range(len(tokens))])
    for text in (str(a), printed(a), drawn(a), drawn(a, colours=False)):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", plain(text))
        plain(text).encode()


@pytest.mark.parametrize("token", HOSTILE)
def test_every_token_shows_something(token):
    before, text, after = visible(token)
    assert text.strip()
    assert not before.strip(" ")
    assert after in ("", "\n")


def test_words_of_other_scripts_stay_as_they_are():
    for token in ("喜欢", "مرحبا", "می\u200cخواهم", "हिन्दी", "👩\u200d👩\u200d👧", "❤\ufe0f", "café"):
        assert visible(" " + token) == (" ", token, "")


@pytest.mark.parametrize("width", [20, 40, 60])
@pytest.mark.parametrize("colours", [True, False])
def test_a_token_that_ends_in_a_joiner_costs_the_line_no_letter(width, colours):
    tokens = ["ක්\u200d", "ර", "ම", "👩\u200d", "👧", " boys\u200d", " keys"] * 8
    shown = plain(drawn(attribution(tokens, [0.1] * len(tokens)), width, colours))
    letters = "".join(shown.split()).replace("⟨200D⟩", "\u200d").replace("[+0.100]", "")
    assert "".join(tokens).replace(" ", "") in letters
    assert all(cell_len(line) <= width for line in shown.splitlines())


def test_tokens_outside_the_segments_are_shown():
    a = attribution(["a", "b", "c", "d"], [1.0, 1.0, 1.0, 1.0], segments=(("middle", 1, 3),))
    assert [(segment.name, len(segment.pieces)) for segment in picture(a).segments] == [("", 1), ("middle", 2), ("", 1)]


def test_the_colour_map_is_monotone_and_readable():
    for dark in (False, True):
        assert colour(0.0, dark=dark) == PAPER[dark]
        steps = [colour(i / 200, dark=dark) for i in range(-200, 201)]
        assert min(contrast(ink(step), step) for step in steps) >= 4.5
        assert {ink(step) for step in steps} == {INK[dark]}
        distances = [contrast(step, PAPER[dark]) for step in steps]
        assert distances[:201] == sorted(distances[:201], reverse=True)
        assert distances[200:] == sorted(distances[200:])
    assert hexadecimal(colour(2.0)) == hexadecimal(colour(1.0))


def test_weak_relevance_stands_out_from_dark_paper_as_from_white():
    for ratio in [sign * step / 100 for step in range(1, 76) for sign in (-1, 1)]:
        light, dark = (contrast(colour(ratio, dark=is_dark), PAPER[is_dark]) for is_dark in (False, True))
        assert dark >= light * 0.995, ratio
    assert contrast(colour(0.1, dark=True), PAPER[True]) > 1.1


def test_shares_need_a_value():
    assert picture(attribution(["a"], [1.0], value=0.0)).pieces[0].share is None
    assert picture(attribution(["a"], [1.0], value=4.0)).pieces[0].share == 0.25


def test_a_part_of_several_axes_is_drawn_in_colour_with_its_strongest_places():
    text = drawn(parts(), width=100)
    lines = plain(text).splitlines()
    at = lines.index("heads: layer × head  summed over token")
    assert [line.strip() for line in lines[at + 1 : at + 5]] == ["0", "1", "2", "3"]
    assert lines[at + 5].split() == ["layer", "0,", "head", "5", "-0.850"]
    red, green, blue = colour(-1.0, dark=True)
    assert f"48;2;{red};{green};{blue}m  " in text.splitlines()[at + 1]
    assert "pixels: row × column  summed over channel; row in blocks of 2; column in blocks of 4" in lines


def test_without_colours_a_part_is_its_strongest_places():
    lines = drawn(parts(), width=100, colours=False).splitlines()
    at = lines.index("heads: layer × head  summed over token")
    assert lines[at + 1].split() == ["layer", "0,", "head", "5", "-0.850"]
    assert next(line for line in lines[at + 5 :] if line).startswith("pixels")


@pytest.mark.parametrize("width", [20, 30, 60, 100, 200])
@pytest.mark.parametrize("colours", [True, False])
def test_parts_are_no_wider_than_the_console(width, colours):
    assert max(cell_len(line) for line in plain(drawn(parts(), width, colours)).splitlines()) <= width


def test_a_part_is_drawn_in_ascii_where_that_is_all_there_is():
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    heads = Part("heads", torch.ones(2, 3, 2), ("layer", "head", "token"))
    Console(file=file, width=60).print(attribution(["a", "b"], [1.0, 2.0], parts=(heads,)))
    file.flush()
    assert b"heads: layer x head  summed over token" in file.buffer.getvalue()


# ------------------------------------------------------------------------------ few colours, notebooks


def rendered(a, system: str, width: int = 60) -> str:
    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system=system, width=width).print(a)
    return out.getvalue()


RAMP = attribution([f" t{i}" for i in range(-20, 21)], [i / 20 for i in range(-20, 21)])
BACKGROUND = re.compile(r"\x1b\[[\d;]*?((?:48;[25];[\d;]+?|4\d|10\d))m")


@pytest.mark.parametrize("system", ["standard", "windows"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_sixteen_colours_are_numbers(system, sample):
    """They once showed the strongest token yellow, a weaker one red, and a weak one without its sign."""
    text = rendered(sample(), system)
    assert not BACKGROUND.search(text)
    assert not re.search(r"\x1b\[[\d;]*\b(3[0-7]|9[0-7])m", text)
    assert plain(text) == plain(drawn(sample(), 60, colours=False))


@pytest.mark.parametrize("term", ["xterm-color", "xterm", "xterm-16color", "linux", "ansi"])
def test_a_line_for_sixteen_colours_has_numbers(monkeypatch, term):
    monkeypatch.setenv("TERM", term)
    monkeypatch.delenv("COLORTERM")
    assert "keys[+1.43]" in printed(sentence())
    assert not BACKGROUND.search(printed(sentence()))


def test_a_cell_of_a_notebook_prints_numbers(monkeypatch):
    """ipykernel's standard output says that it is a terminal, of kind ``xterm-color``."""
    for name, value in {"TERM": "xterm-color", "CLICOLOR": "1", "CLICOLOR_FORCE": "1", "PAGER": "cat"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("COLORTERM")
    text = printed(sentence())
    assert "keys[+1.43]" in text
    assert not BACKGROUND.search(text)


def test_rich_in_a_notebook_is_coloured():
    console = Console(force_jupyter=True, file=io.StringIO(), width=80)
    assert console.color_system == "truecolor"
    segments = list(console.render(sentence()))
    assert any(each.style and each.style.bgcolor for each in segments)


@pytest.mark.parametrize("dark", [True, False])
def test_two_hundred_and_fifty_six_colours_show_sign_and_order(dark):
    """As rich has them on the terminal: stronger is never paler, and red and blue are nothing else."""
    last = {True: -1.0, False: -1.0}
    for step in range(101):
        for positive in (True, False):
            ratio = step / 100 if positive else -step / 100
            wanted = stepped(ratio, dark=dark)
            seen = tuple(Color.from_rgb(*wanted).downgrade(ColorSystem.EIGHT_BIT).get_truecolor())
            assert seen == wanted, "a colour of the palette itself"
            assert contrast(ink(seen), seen) >= 4.5
            away = abs(luminance(seen) - luminance(stepped(0.0, dark=dark)))
            assert away >= last[positive]
            last[positive] = away
            red, green, blue = seen
            if step >= 6:
                assert (red > blue) == positive
                assert (red < blue) == (not positive)
                assert green <= max(red, blue)
    assert min(last.values()) > 0


def test_the_palette_is_what_a_terminal_of_256_colours_gets():
    text = rendered(RAMP, "256")
    codes = {piece.index: stepped(piece.ratio, dark=True) for piece in picture(RAMP).pieces}
    for index in (0, 10, 30, 40):
        number = Color.from_rgb(*codes[index]).downgrade(ColorSystem.EIGHT_BIT).number
        assert re.search(rf"48;5;{number}mt{index - 20}\x1b", text), index


@pytest.mark.parametrize("system", ["standard", "256", "truecolor"])
@pytest.mark.parametrize("width", [12, 20, 37])
@pytest.mark.parametrize("sample", SAMPLES)
def test_narrow_widths_at_every_depth(system, width, sample):
    for line in plain(rendered(sample(), system, width)).splitlines():
        assert cell_len(line) <= width


@pytest.mark.parametrize("colours", ["truecolor", "standard", None])
def test_of_a_sink_only_what_is_seen_is_told(colours):
    """Where tokens carry numbers instead of colours, none is underlined."""
    file = io.StringIO()
    Console(file=file, width=200, force_terminal=True, color_system=colours).print(sink())
    assert ("it is underlined, and the colours" in file.getvalue()) is (colours == "truecolor")
    assert ("the bars are scaled by the rest" in file.getvalue()) is (colours != "truecolor")
