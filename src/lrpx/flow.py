"""How relevance flows through the layers: the result, which can be read, saved and shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lrpx._files import kept
from lrpx._pictures import WIDTH
from lrpx.attribution import Attribution

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

__all__ = ["Flow"]


@dataclass(frozen=True)
class Flow:
    """The relevance of one explained value at each layer and token, in the units of that value.

    Args:
        attribution: the tokens, and the parts ``"residual"`` (the stream behind each layer), ``"attention"`` and
            ``"mlp"`` (what each branch gives to it), ``[layer, token]``, and ``"heads"`` ``[layer, head, token]``, as
            far as the model has them. What is lost from one layer to the next went to biases and to the softmax.
    """

    attribution: Attribution

    __hash__ = None  # type: ignore[assignment]

    @property
    def tokens(self) -> tuple[str, ...]:
        """``T`` texts."""
        return self.attribution.tokens

    def __getitem__(self, part: str) -> Tensor:
        """The numbers of a part, such as ``flow["attention"]`` ``[L, T]``.

        Raises:
            ResultError: there is no such part.
        """
        return self.attribution.parts[part].values

    def to_dataframe(self, part: str = "residual") -> Any:
        """A part as a table (:meth:`Attribution.to_dataframe <lrpx.Attribution.to_dataframe>`).

        Raises:
            MissingExtraError: neither polars nor pandas is installed.
            ResultError: there is no such part.
        """
        return self.attribution.to_dataframe(part)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file.

        Raises:
            ResultFileError: it cannot be written.
        """
        self.attribution.save(path)

    @classmethod
    def load(cls, path: str | Path) -> Flow:
        """Read what :meth:`save` wrote.

        Raises:
            ResultFileError: the file is missing, or no such thing.
        """
        return cls(Attribution.load(path))

    def to_html(self, path: str | Path | None = None) -> str:
        """One self-contained page, layers by tokens, where a click on a cell shows its branches and heads; without a
        script. Also written to ``path`` when given.

        Raises:
            ResultFileError: the file cannot be written.
        """
        from lrpx._views.flow import page

        return kept(page(self), path)

    def to_png(self, path: str | Path | None = None, width: float = WIDTH) -> bytes:
        """Layers by tokens as a PNG file: the stream and each branch; also written to ``path`` when given.

        Args:
            path: the file.
            width: in inches.

        Raises:
            MissingExtraError: matplotlib is not installed.
            ResultFileError: the file cannot be written.
        """
        from lrpx._views.figure import png
        from lrpx._views.flow import figure

        return kept(png(figure(self, width)), path)

    def _repr_html_(self) -> str:
        from lrpx._views.flow import fragment

        return fragment(self)

    def __str__(self) -> str:
        from lrpx._views.flow import tabled
        from lrpx._views.tabled import lines

        return lines([tabled(self)])

    def __rich__(self) -> Any:
        from lrpx._views.flow import tabled
        from lrpx._views.tabled import renderable

        return renderable([tabled(self)])
