r"""Any text as LaTeX that pdflatex, xelatex and lualatex set alike, in plain ASCII and with no package.

A character that LaTeX has no name for in every font, such as ``中``, becomes its visible number, ``\texttt{U+4E2D}``.
"""

from __future__ import annotations

import unicodedata
from functools import cache
from typing import TYPE_CHECKING, Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from lrpx._views.colour import colour
from lrpx._views.gallery import groups
from lrpx._views.picture import number
from lrpx.errors import ResultError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lrpx.attribution import Attribution

_NAMES: Final = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\symbol{34}",  # babel may have made the character itself a command
    "`": r"\textasciigrave{}",
    "'": r"\textquotesingle{}",
    "-": "-{}",  # so that -- stays two hyphens
    ",": ",{}",
    "\N{NO-BREAK SPACE}": "~",
    "‘": r"\textquoteleft{}",
    "’": r"\textquoteright{}",
    "“": r"\textquotedblleft{}",
    "”": r"\textquotedblright{}",
    "–": r"\textendash{}",
    "—": r"\textemdash{}",
    "…": r"\textellipsis{}",
    "ß": r"\ss{}",
    "æ": r"\ae{}",
    "Æ": r"\AE{}",
    "œ": r"\oe{}",
    "Œ": r"\OE{}",
    "ø": r"\o{}",
    "Ø": r"\O{}",
    "ł": r"\l{}",
    "Ł": r"\L{}",
    "¡": r"\textexclamdown{}",
    "¿": r"\textquestiondown{}",
    "²": r"\textsuperscript{2}",
    "×": r"\ensuremath{\times}",
    "±": r"\ensuremath{\pm}",
    "−": r"\ensuremath{-}",
    "·": r"\ensuremath{\cdot}",
    "∅": r"\ensuremath{\emptyset}",
    "⟨": r"\ensuremath{\langle}",
    "⟩": r"\ensuremath{\rangle}",
    "⏎": r"\ensuremath{\hookleftarrow}",
    "⇥": r"\ensuremath{\mapsto}",
    "␣": r"\textvisiblespace{}",
    "◌": r"\ensuremath{\circ}",
}
_ACCENTS: Final = {
    "\N{COMBINING GRAVE ACCENT}": r"\`",
    "\N{COMBINING ACUTE ACCENT}": r"\'",
    "\N{COMBINING CIRCUMFLEX ACCENT}": r"\^",
    "\N{COMBINING TILDE}": r"\~",
    "\N{COMBINING DIAERESIS}": r"\"",
    "\N{COMBINING MACRON}": r"\=",
    "\N{COMBINING BREVE}": r"\u",
    "\N{COMBINING DOT ABOVE}": r"\.",
    "\N{COMBINING CARON}": r"\v",
    "\N{COMBINING DOUBLE ACUTE ACCENT}": r"\H",
    "\N{COMBINING RING ABOVE}": r"\r",
    "\N{COMBINING CEDILLA}": r"\c",
}


def escape(text: str) -> str:
    r"""Text with nothing in it that LaTeX would take for a command.

    >>> escape("50 % of {it}"), escape("é ▁ 中")
    ('50 \\% of \\{it\\}', "\\'{e} \\texttt{U+2581} \\texttt{U+4E2D}")
    """
    return "".join(map(_character, text))


def _character(character: str) -> str:
    if character in _NAMES:
        return _NAMES[character]
    if " " <= character <= "~":
        return character
    letter, mark = (*unicodedata.normalize("NFD", character), "", "")[:2]
    if mark in _ACCENTS and letter.isascii() and len(unicodedata.normalize("NFD", character)) == 2:
        return f"{_ACCENTS[mark]}{{{letter}}}"
    return rf"\texttt{{U+{ord(character):04X}}}"


def snippet(attributions: Sequence[Attribution]) -> str:
    r"""Attributions as a piece of LaTeX to ``\input``, those of the same tokens below each other.

    Raises:
        ResultError: one is of an image.
    """
    if any(a.image is not None for a in attributions):
        raise ResultError("an image is no text to be set in LaTeX; use to_png() or to_svg(), and \\includegraphics")
    found = groups(attributions)
    return environment().get_template("snippet.tex.j2").render(groups=found, steps=[i / 4 for i in range(-4, 5)])


def escaping(package: str, escape: Callable[[str], str], **syntax: str) -> Environment:
    """Jinja2 with a package's templates, which escapes whatever a template prints, except what is Markup.

    Args:
        package: that has the templates.
        escape: for what the templates are written in.
        syntax: how the templates mark their blocks, as Jinja2 names it, where not in its own way.
    """
    return Environment(
        loader=PackageLoader(package),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else Markup(escape(str(value))),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **syntax,  # type: ignore[arg-type]
    )


@cache
def environment() -> Environment:
    """The views' LaTeX templates, ``<% … %>`` and ``<< … >>``."""
    environment = escaping(
        "lrpx._views",
        escape,
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="<<",
        variable_end_string=">>",
        comment_start_string="<#",
        comment_end_string="#>",
    )
    environment.filters |= {"rgb": rgb, "number": typeset, "flat": lambda text: text.replace("\n", "")}
    return environment


def rgb(ratio: float) -> Markup:
    """The colour of a relevance as xcolor reads it."""
    return Markup(",".join(map(str, colour(ratio))))


def typeset(value: float) -> str:
    """A number with a real minus sign."""
    return number(value).replace("-", "−")
