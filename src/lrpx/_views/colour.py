"""The colour map of every heatmap: blue against, the paper's own colour at zero, red for."""

from __future__ import annotations

from typing import Final

RGB = tuple[int, int, int]

PAPER: Final[dict[bool, RGB]] = {False: (255, 255, 255), True: (24, 26, 31)}
"""The background at zero relevance, by whether the picture is dark."""

INK: Final[dict[bool, RGB]] = {False: (27, 29, 34), True: (240, 241, 244)}
"""The text on that paper; the ends of the map are chosen so that it stays readable on all of it."""

QUIET: Final[dict[bool, RGB]] = {False: (93, 98, 109), True: (164, 169, 180)}
"""Text of less weight on that paper."""

_FOR: Final[dict[bool, RGB]] = {False: (242, 84, 78), True: (206, 46, 48)}
_AGAINST: Final[dict[bool, RGB]] = {False: (80, 136, 242), True: (46, 102, 214)}

_BEND: Final[dict[bool, float]] = {False: 1.0, True: 0.7}
"""The power of the share, by whether the picture is dark: near black the eye needs more to tell a weak colour from
none. With it, weak relevance stands out from dark paper at least as much as from white (WCAG contrast)."""


def colour(ratio: float, *, dark: bool = False) -> RGB:
    """The background for a relevance, given as a share of the scale's limit.

    From the paper to red (positive) or blue (negative), linear on white paper and steeper at first on dark; beyond -1
    and 1 it stays at the end.

    >>> colour(0.0), colour(1.0), colour(-7.0)
    ((255, 255, 255), (242, 84, 78), (80, 136, 242))
    """
    end = (_FOR if ratio > 0 else _AGAINST)[dark]
    amount = min(abs(ratio), 1.0) ** _BEND[dark]
    red, green, blue = (round(p + (e - p) * amount) for p, e in zip(PAPER[dark], end, strict=True))
    return red, green, blue


_STEPS_FOR: Final[dict[bool, tuple[RGB, ...]]] = {
    False: ((255, 255, 255), (255, 215, 215), (255, 175, 175), (255, 135, 135), (255, 95, 95)),
    True: ((28, 28, 28), (95, 0, 0), (135, 0, 0), (175, 0, 0), (215, 0, 0)),
}
_STEPS_AGAINST: Final[dict[bool, tuple[RGB, ...]]] = {
    False: ((255, 255, 255), (215, 215, 255), (175, 175, 255), (135, 135, 255), (95, 135, 255)),
    True: ((28, 28, 28), (0, 0, 95), (0, 0, 135), (0, 0, 175), (0, 0, 215)),
}


def stepped(ratio: float, *, dark: bool = False) -> RGB:
    """The same map in colours that a palette of 256 has: the nearest of them to others is at times green or grey. Of
    so few steps the first ones come early on white paper too, so that 6 % of the scale has another colour than none.

    >>> stepped(0.05), stepped(0.1), stepped(0.5), stepped(-1.0)
    ((255, 255, 255), (255, 215, 215), (255, 175, 175), (95, 135, 255))
    """
    steps = (_STEPS_FOR if ratio > 0 else _STEPS_AGAINST)[dark]
    return steps[round(min(abs(ratio), 1.0) ** _BEND[True] * (len(steps) - 1))]


def ink(background: RGB) -> RGB:
    """The text colour that stands out more on a background: the dark ink or the light one.

    >>> ink((255, 255, 255)) == INK[False], ink((24, 26, 31)) == INK[True]
    (True, True)
    """
    return max(INK.values(), key=lambda candidate: contrast(candidate, background))


def luminance(rgb: RGB) -> float:
    """Relative luminance in [0, 1] (WCAG 2.2).

    >>> luminance((255, 255, 255))
    1.0
    """
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: RGB, other: RGB) -> float:
    """Contrast ratio of two colours, from 1 to 21 (WCAG 2.2); 4.5 is level AA for text.

    >>> contrast((0, 0, 0), (255, 255, 255))
    21.0
    """
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def hexadecimal(rgb: RGB) -> str:
    """A colour as CSS and rich write it.

    >>> hexadecimal((255, 0, 16))
    '#ff0010'
    """
    return "#{:02x}{:02x}{:02x}".format(*rgb)
