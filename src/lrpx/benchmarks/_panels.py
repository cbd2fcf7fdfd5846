"""Pictures of runs, drawn alike whatever matplotlib's settings are; no text in them is read as mathematics."""

from __future__ import annotations

import io
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lrpx.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.figure import Figure


@contextmanager
def sheet(size: tuple[float, float], dpi: int, needed: str, font: float = 9.0) -> Iterator[Figure]:
    """A figure to draw in, and to be written by :func:`png`, inside the block.

    Args:
        size: in inches.
        dpi: pixels an inch.
        needed: what needs matplotlib, for the error: ``"a grid as a picture needs"``.
        font: the size of its texts.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(f"{needed} matplotlib: pip install 'lrpx[benchmarks]'") from error
    settings = {"font.family": ["DejaVu Sans"], "font.size": font, "text.usetex": False, "text.parse_math": False}
    with mpl.rc_context(mpl.rcParamsDefault | settings):
        made = Figure(figsize=size, dpi=dpi, layout="constrained")
        FigureCanvasAgg(made)
        yield made


def png(figure: Figure) -> bytes:
    """A figure as a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
