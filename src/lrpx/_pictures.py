"""What one result and several have in common: pictures for a paper, as LaTeX, PNG, SVG or a figure of matplotlib."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

WIDTH = 6.5
"""Inches: the text of a page."""


class Pictures(ABC):
    """Pictures of attributions. Token text is escaped, and what a font or LaTeX lacks is shown as its number."""

    @abstractmethod
    def _pictured(self) -> Sequence[Any]:
        """The attributions to be drawn."""

    def to_latex(self, path: str | Path | None = None) -> str:
        r"""A piece of LaTeX to ``\\input``: the tokens on their colours; also written to ``path`` when given.

        It is plain ASCII and needs ``\\usepackage{xcolor}`` and nothing else; it is meant for pdflatex, xelatex and
        lualatex alike. Several results of the same tokens stand below each other.

        Raises:
            ResultError: one of them is of an image.
            ResultFileError: the file cannot be written.
        """
        from lrpx._files import kept
        from lrpx._views.latex import snippet

        return kept(snippet(self._pictured()), path)

    def to_figure(self, width: float = WIDTH) -> Any:
        """A ``matplotlib.figure.Figure``, as tall as the text needs; it belongs to no window and to no pyplot.

        Args:
            width: in inches.

        Raises:
            MissingExtraError: matplotlib is not installed.
            ResultError: the width is no number of inches a line fits in, or the figure would be too tall.
        """
        pictured = self._pictured()
        if any(each.image is not None for each in pictured):
            from lrpx._views.image_figure import figure
        else:
            from lrpx._views.figure import figure
        return figure(pictured, width)

    def to_png(self, path: str | Path | None = None, width: float = WIDTH) -> bytes:
        """The picture as a PNG file of 200 pixels an inch; also written to ``path`` when given.

        Args:
            path: the file.
            width: in inches.

        Raises:
            MissingExtraError, ResultError: see :meth:`to_figure`.
            ResultFileError: the file cannot be written.
        """
        from lrpx._files import kept
        from lrpx._views.figure import png

        return kept(png(self.to_figure(width)), path)

    def to_svg(self, path: str | Path | None = None, width: float = WIDTH) -> str:
        """The picture as an SVG file, whose text is drawn as shapes and so needs no font; also written to ``path``.

        Args:
            path: the file.
            width: in inches.

        Raises:
            MissingExtraError, ResultError: see :meth:`to_figure`.
            ResultFileError: the file cannot be written.
        """
        from lrpx._files import kept
        from lrpx._views.figure import svg

        return kept(svg(self.to_figure(width)), path)
