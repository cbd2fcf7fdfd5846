"""A result as LaTeX: nothing in it is a command that a text brought along, and it compiles."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from view_samples import HOSTILE, attribution, chat, hostile, methods, sentence, sink, translation, wide

from lrpx import Attributions
from lrpx._views.colour import colour
from lrpx._views.latex import escape

EVIL = (r"\input{/etc/passwd}", "$x_1^2$", "}", "{", "%", r"\end{document}", "^^5cinput", "\\", "#1", "&", "~", "--")
DOCUMENT = r"""\documentclass{article}
\usepackage{xcolor}
\begin{document}
Before.
\input{a}
After.
\end{document}
"""
BLOCK = re.compile(r"\\lrpx(token|sink)\{(\d+),(\d+),(\d+)\}\{(.*)\}%\n")
SAMPLES = [sentence, sink, translation, chat, wide, hostile]
COMMANDS = {"providecommand", "begingroup", "endgroup", "raggedright", "setlength", "parindent", "textbf", "small",
    "smallskip", "nopagebreak", "newline", "footnotesize", "par", "lrpxtoken", "lrpxsink", "lrpxstep"}  # fmt: skip
pdflatex = pytest.mark.skipif(
    shutil.which("pdflatex") is None,
    reason="needs pdflatex on the PATH (Debian: apt-get install texlive-latex-base texlive-latex-recommended)",
)


def compiled(folder, text):
    """The log of pdflatex."""
    (folder / "a.tex").write_text(text, encoding="ascii")
    (folder / "document.tex").write_text(DOCUMENT, encoding="ascii")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "document.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
    return (folder / "document.log").read_text(encoding="utf-8", errors="replace")


@pytest.mark.parametrize("sample", SAMPLES)
def test_every_token_stands_on_its_colour(sample):
    a = sample()
    found = BLOCK.findall(a.to_latex())
    assert len(found) == len(a)
    for (kind, *rgb, _), token in zip(found, a, strict=True):
        ratio = token.relevance / max(abs(t.relevance) for t in a) if kind == "token" and sample is not sink else None
        assert ratio is None or tuple(map(int, rgb)) == colour(ratio)
    assert [kind for kind, *_ in found].count("sink") == (sample is sink)


def test_it_says_what_was_explained():
    text = sentence().to_latex()
    assert r"\textbf{logit of \symbol{34} are\symbol{34} minus logit of \symbol{34} is\symbol{34}}" in text
    assert r"\ensuremath{=} +0.412" in text
    assert r"against \ensuremath{-}1.427 " in text
    assert " +1.427 for" in text
    assert "system: " in chat().to_latex()


@pytest.mark.parametrize("sample", [sentence, methods, translation])
def test_the_title_is_a_paragraph_of_its_own(sample):
    """After the title and its value comes an empty line; without one TeX sets the facts, or the tokens, on its line."""
    assert re.search(r"\\textbf\{[^\n]*\}[^\n]*\n\n", sample().to_latex())


def test_several_stand_below_each_other():
    text = methods().to_latex()
    assert len(BLOCK.findall(text)) == 3 * len(sentence()) + len(sink())
    assert text.index("attnlrp: +0.412") < text.index("lrp: +0.412") < text.index(r"gradient-{}l1: +0.412")


def test_it_is_written_to_a_file(tmp_path):
    text = sentence().to_latex(tmp_path / "a.tex")
    assert (tmp_path / "a.tex").read_text(encoding="ascii") == text


@settings(deadline=None, max_examples=150)
@given(st.lists(st.text() | st.sampled_from([*EVIL, *HOSTILE]), max_size=5), st.text() | st.sampled_from(EVIL))
def test_no_text_brings_a_command(tokens, description):
    a = attribution(tokens, [float(i - 2) for i in range(len(tokens))], description=description)
    text = Attributions([a, a]).to_latex()
    body = text[text.index(r"\begingroup") :]
    plain = attribution(["x"] * len(tokens), a.relevance.tolist(), description="x")
    own = Attributions([plain, plain]).to_latex()
    assert text.isascii()
    assert re.sub(r"[^\n -~]", "", text) == text
    escaped = escape("".join(tokens) + description + '"' + "∅␣◌⏎⇥⟨⟩−éßæœøł")
    for command in re.findall(r"\\([A-Za-z]+)", body):
        assert command in COMMANDS or f"\\{command}" in escaped, command
    assert body.count(r"\endgroup") == own.count(r"\endgroup") == 1
    assert len(BLOCK.findall(body)) == 2 * len(tokens)
    depth = 0
    for brace in re.findall(r"(?<!\\)(?:\\\\)*([{}])", re.sub(r"%\n", "\n", body)):
        depth += 1 if brace == "{" else -1
        assert depth >= 0
    assert depth == 0


@pdflatex
@pytest.mark.parametrize("sample", [*SAMPLES, methods, lambda: methods(hostile)])
def test_it_compiles(tmp_path, sample):
    log = compiled(tmp_path, sample().to_latex())
    assert "Missing character" not in log
    assert "Output written on document.pdf" in log


@pdflatex
def test_hostile_text_compiles_and_reads_no_file(tmp_path):
    tokens = [*EVIL, *HOSTILE, "\n", "\n\n", "a\nb"]
    a = attribution(tokens, [1.0] * len(tokens), description=EVIL[0])
    log = compiled(tmp_path, Attributions([a, a]).to_latex())
    assert "Missing character" not in log
    assert "passwd" not in log
