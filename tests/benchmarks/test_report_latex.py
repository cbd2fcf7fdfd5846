"""LaTeX: no text can be taken for a command, and both fragments compile."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrpx._views.latex import escape
from tests.benchmarks.report_samples import explained, reports, write
from tests.benchmarks.test_report import HOSTILE, hostile_run

DOCUMENT = r"""\documentclass{article}
\usepackage{booktabs,xcolor}
\begin{document}
\begin{table}\footnotesize\input{table}\end{table}
\input{heatmaps}
%s
\end{document}
"""
COMMAND = re.compile(
    r"\\text(?:backslash|asciicircum|asciitilde|less|greater|bar|asciigrave|quotesingle|quote(?:dbl)?(?:left|right)"
    r"|endash|emdash|ellipsis|exclamdown|questiondown|visiblespace)\{\}"
    r"|\\textsuperscript\{2\}|\\symbol\{34\}|\\(?:ss|ae|AE|oe|OE|o|O|l|L)\{\}|\\texttt\{U\+[0-9A-F]{4,6}\}"
    r"|\\ensuremath\{(?:\\[a-z]+|-)\}|\\[`'^~\"=.uvHrc]\{[A-Za-z]\}|\\[{}$&#%_]|[-,]\{\}|~"
)
"""All that the escaping may write besides letters, digits and harmless signs."""
pdflatex = pytest.mark.skipif(
    shutil.which("pdflatex") is None,
    reason="needs pdflatex on the PATH (Debian: apt-get install texlive-latex-base texlive-latex-recommended)",
)


def compiled(folder, body=""):
    """The log of pdflatex."""
    (folder / "document.tex").write_text(DOCUMENT % body, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "document.tex"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=120)
    assert done.returncode == 0, done.stdout[-2000:]
    return (folder / "document.log").read_text(encoding="utf-8", errors="replace")


@given(st.text() | st.text(alphabet="\\{}$&#^_~%<>|\"'`-,?! \n\téĠ▁中🙂ABC"))
def test_what_is_escaped_holds_no_command_of_its_own(text):
    rest = COMMAND.sub("", escape(text))
    assert re.fullmatch(r"[A-Za-z0-9 !()*+./:;=?@\[\]]*", rest)


@given(st.text(), st.text())
def test_every_character_is_escaped_for_itself(one, other):
    assert escape(one + other) == escape(one) + escape(other)


@given(st.text(alphabet="\\{}$&#^_~%<>|\"'`-,?! éèñåçĠšőß中▁", max_size=3), st.text(max_size=3))
def test_different_texts_stay_different(one, other):
    assert (escape(one) == escape(other)) == (one == other)


@pdflatex
def test_the_fragments_of_a_real_run_compile(tmp_path):
    reports(write(tmp_path, explained()), show=["dev:12"])
    log = compiled(tmp_path)
    assert "Overfull" not in log
    assert "Output written on document.pdf" in log


@pdflatex
def test_hostile_text_compiles(tmp_path):
    reports(hostile_run(tmp_path))
    every = "".join(map(chr, [*range(32, 127), *range(0xA0, 0x180), *range(0x2010, 0x2030)]))
    log = compiled(tmp_path, "\n\n".join(escape(text) for text in (*HOSTILE, *every)))
    assert "Missing character" not in log
    assert "passwd" not in log
