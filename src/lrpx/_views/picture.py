"""What every view shows of an attribution, before it becomes HTML or terminal colours.

Token text comes from outside and is hostile: here it becomes text that shows what it is made of,
with nothing in it that can steer a terminal or reorder a line.
"""

from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lrpx.attribution import scale

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lrpx.attribution import Attribution, Token

EMPTY = "∅"
_MOST_PLACES = 6
_LONGEST = 1e7  # beyond it, more digits than a float32 has
_JOINERS = "\u200c\u200d"  # Persian and Indic spelling and emoji families need them
_PRESENTATION = "\ufe0e\ufe0f"  # text or emoji style of the character before
_BLANK = "\u034f\u115f\u1160\u2065\u2800\u3164\uffa0"  # letters and signs that draw nothing


@dataclass(frozen=True)
class Piece:
    """One token, or one group of them, ready to be drawn.

    ``before + text + after`` is what is shown: the blanks before it, the visible text, and the line
    break after it; only ``text`` is coloured. ``ratio`` is the relevance as a share of the colour
    limit, within [-1, 1]; ``share`` is the relevance as a share of the explained value, None when that
    is zero, or when the relevance is no part of it.
    """

    index: int
    before: str
    text: str
    after: str
    relevance: float
    ratio: float
    share: float | None
    id: int | None
    special: bool
    sink: bool


@dataclass(frozen=True)
class Segment:
    """A segment, such as the encoder's tokens; ``name`` is empty for tokens in no segment."""

    name: str
    pieces: tuple[Piece, ...]

    @property
    def total(self) -> float:
        """Sum of the relevance of the segment."""
        return sum(piece.relevance for piece in self.pieces)


@dataclass(frozen=True)
class Picture:
    """All pieces in their segments, the colour scale they share, and the explained value, if they are parts of it."""

    segments: tuple[Segment, ...]
    limit: float
    whole: float | None

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Every piece, in reading order."""
        return tuple(piece for segment in self.segments for piece in segment.pieces)

    @property
    def sink(self) -> Piece | None:
        """The piece that alone would swallow the colour scale, if there is one."""
        return next((piece for piece in self.pieces if piece.sink), None)

    @property
    def positive(self) -> float:
        """Sum of the relevance that speaks for the explained value."""
        return sum(piece.relevance for piece in self.pieces if piece.relevance > 0)

    @property
    def negative(self) -> float:
        """Sum of the relevance that speaks against it."""
        return sum(piece.relevance for piece in self.pieces if piece.relevance < 0)

    @property
    def total(self) -> float:
        """Sum of all relevance."""
        return sum(piece.relevance for piece in self.pieces)

    @property
    def share(self) -> float | None:
        """The sum as a share of the explained value; None when that is zero, or when the pieces are no parts of it."""
        return None if self.whole is None else share(self.total, self.whole)

    def number(self, relevance: float) -> str:
        """A relevance with as many decimals as give the colour limit three digits, alike for all."""
        return aligned(relevance, self.limit)

    def strongest(self, count: int) -> tuple[Piece, ...]:
        """The pieces of largest absolute relevance, zero left out, largest first."""
        ranked = sorted(self.pieces, key=lambda piece: -abs(piece.relevance))
        return tuple(piece for piece in ranked[:count] if piece.relevance)


def picture(a: Attribution) -> Picture:
    """Lay out an attribution: clean text, colour ratios, shares, segments."""
    limit, sink = scale(a.relevance)
    tokens = tuple(a)
    whole = a.explained.value if a.is_decomposition else None

    def piece(token: Token) -> Piece:
        before, text, after = visible(token.text)
        return Piece(
            index=token.index,
            before=before,
            text=text,
            after=after,
            relevance=token.relevance,
            ratio=share_of_scale(token.relevance, limit),
            share=None if whole is None else share(token.relevance, whole),
            id=token.id,
            special=token.special,
            sink=token.index == sink,
        )

    segments = (Segment(name, tuple(map(piece, tokens[start:end]))) for name, start, end in _ranges(a))
    return Picture(tuple(segments), limit, whole)


def _ranges(a: Attribution) -> Iterator[tuple[str, int, int]]:
    """The segments in order, with the tokens that no segment holds in between: none is hidden."""
    reached = 0
    for name, start, end in sorted(a.segments, key=lambda segment: segment[1]):
        if start > reached:
            yield "", reached, start
        if end > max(start, reached):
            yield one_line(name), max(start, reached), end
            reached = end
    if reached < len(a):
        yield "", reached, len(a)


def share_of_scale(value: float, limit: float) -> float:
    """A value as a share of the colour limit, at most 1 in size; 0 where there is no limit.

    >>> share_of_scale(-1.0, 2.0), share_of_scale(9.0, 2.0), share_of_scale(0.0, 0.0)
    (-0.5, 1.0, 0.0)
    """
    return max(-1.0, min(1.0, value / limit)) if limit else 0.0


def share(part: float, whole: float) -> float | None:
    """The part as a share of the whole; None where that is not a number."""
    ratio = part / whole if whole else math.nan
    return ratio if math.isfinite(ratio) else None


def visible(token: str) -> tuple[str, str, str]:
    r"""A token as ``(blanks before it, text, line break after it)``, with nothing invisible in the text.

    Leading spaces stay spaces, a new line is ``⏎``, a tab ``⇥``; other control characters, and
    those that reorder or hide text, are written as their code.

    >>> visible(" keys"), visible("\n"), visible("   ")
    ((' ', 'keys', ''), ('', '⏎', '\n'), ('', '␣␣␣', ''))
    >>> visible("\x1b[31m\u202e")[1]
    '⟨001B⟩[31m⟨202E⟩'
    """
    body = token.lstrip(" ")
    before = token[: len(token) - len(body)]
    if not body.strip():
        before, text = "", "".join("␣" if _is_space(c) else _shown(c) for c in token) or EMPTY
    elif all(_has_no_width(c) for c in body):
        text = "◌" + "".join(f"⟨{ord(c):04X}⟩" if c in _JOINERS else _shown(c) for c in body)
    else:
        text = "".join(map(_shown, body))
    stem = text.removesuffix("\n")
    return before, stem, text[len(stem) :]


def one_line(text: str) -> str:
    r"""Text from outside, such as a target's description, on one line with nothing invisible in it.

    >>> one_line("logit of '\n'")
    "logit of '⏎'"
    """
    return "".join(map(_shown, text)).replace("\n", "")


def _is_space(character: str) -> bool:
    return unicodedata.category(character) == "Zs"


def _has_no_width(character: str) -> bool:
    return character in _JOINERS or unicodedata.category(character) in ("Mn", "Me")


def _shown(character: str) -> str:
    if character == "\n":
        return "⏎\n"
    if character == "\t":
        return "⇥"
    return f"⟨{ord(character):04X}⟩" if _is_hidden(character) else character


def _is_hidden(character: str) -> bool:
    """Whether a character draws nothing of its own, or reorders what is drawn."""
    code = ord(character)
    if character in _JOINERS or character in _PRESENTATION:
        return False
    selector_or_tag = 0xFE00 <= code <= 0xFE0F or 0xE0000 <= code <= 0xE0FFF
    noncharacter = code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF
    control = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
    return control or selector_or_tag or noncharacter or character in _BLANK


def aligned(value: float, limit: float) -> str:
    """A signed number with as many decimals as give the limit three digits.

    >>> aligned(2.31449, 8.0), aligned(-0.002, 8.0), aligned(-0.0, 8.0), aligned(2.31449, 1e-9), aligned(3e38, 3e38)
    ('+2.31', '-0.00', '+0.00', '+2.31e+00', '+3.00e+38')
    """
    places = 2 - math.floor(math.log10(limit)) if limit and math.isfinite(limit) else 2
    is_short = places < _MOST_PLACES and max(abs(value), limit) < _LONGEST
    return f"{value + 0.0:+.{max(0, places)}f}" if is_short else f"{value + 0.0:+.2e}"


def number(value: float) -> str:
    """A signed number with four significant digits and an ASCII sign.

    >>> number(2.31449), number(-0.5), number(0.0), number(3e-9)
    ('+2.314', '-0.5', '0', '+3e-09')
    """
    return f"{value:+.4g}" if value else "0"


def percent(part: float | None) -> str:
    """A share as a percentage; empty when there is none.

    >>> percent(0.4021), percent(-0.18), percent(None)
    ('40.2%', '-18.0%', '')
    """
    if part is None:
        return ""
    return f"{part:.1%}" if abs(part) < 100 else f"{100 * part:.4g}%"
