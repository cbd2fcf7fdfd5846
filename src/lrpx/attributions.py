"""Several results: a list that shows itself, those of the same tokens side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, SupportsIndex, overload

from lrpx._files import kept
from lrpx._pictures import Pictures
from lrpx.attribution import Attribution
from lrpx.errors import ResultError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

__all__ = ["Attributions"]


class Attributions(list[Any], Pictures):
    """A list of attributions, or of such lists where each text was asked several questions.

    It is a list in all else. What has the same tokens is drawn side by side, wherever it stands in the list, so the
    methods of one text can be compared, or its targets:

    >>> import lrpx
    >>> explain = lrpx.Explainer.from_pretrained()
    >>> found = lrpx.Attributions(explain("The doors", method=name) for name in ("attnlrp", "lrp"))
    >>> [a.provenance.method for a in found], type(found[:1]).__name__
    (['attnlrp', 'lrp'], 'Attributions')
    """

    def flat(self) -> Attributions:
        """Every attribution in order, out of the lists in this list.

        Raises:
            ResultError: something in it is no attribution.
        """
        found: list[Attribution] = []
        for at, each in enumerate(self):
            if isinstance(each, Attribution):
                found.append(each)
            elif isinstance(each, (list, tuple)):
                found += Attributions(each).flat()
            else:
                raise ResultError(f"item {at} of the list is {type(each).__name__}; pass attributions alone")
        return Attributions(found)

    def _pictured(self) -> Sequence[Attribution]:
        found = self.flat()
        if not found:
            raise ResultError("there is no attribution in this list; pass at least one to draw")
        return found

    def to_html(self, path: str | Path | None = None) -> str:
        """One self-contained page of all; also written to ``path`` when given.

        Raises:
            ResultError: the list is empty, or holds something that is no attribution.
            ResultFileError: the file cannot be written.
        """
        from lrpx._views.html import gallery_page

        return kept(gallery_page(self._pictured()), path)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> Attributions: ...

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        return Attributions(found) if isinstance(index, slice) else found

    def __add__(self, other: Iterable[Any]) -> Attributions:
        return Attributions([*self, *other])

    def __mul__(self, count: SupportsIndex) -> Attributions:
        return Attributions(super().__mul__(count))

    __rmul__ = __mul__

    def copy(self) -> Attributions:
        """A list of the same attributions."""
        return Attributions(self)

    def _repr_html_(self) -> str | None:
        from lrpx._views.html import gallery_fragment

        return gallery_fragment(self._pictured()) if self else None

    def __str__(self) -> str:
        return "\n".join(map(str, self.flat())) if self else "[]"

    def __rich__(self) -> Any:
        from lrpx._views.gallery_terminal import Gallery

        return Gallery(tuple(self.flat()))
