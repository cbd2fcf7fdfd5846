"""What every view shows of an image: the image itself, and its relevance over it, by patch and by pixel."""

from __future__ import annotations

import base64
import hashlib
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from lrpx._images import Patches
from lrpx._views.colour import colour
from lrpx._views.grid import beyond
from lrpx._views.picture import aligned, share, share_of_scale
from lrpx.attribution import scale
from lrpx.metrics._images import incompleteness

if TYPE_CHECKING:
    from lrpx.attribution import Attribution

CELLS: Final = 64
"""The most rows, and columns, that can be pointed at: more are shown in blocks."""
QUANTILE: Final = 0.995
"""Of so many pixels the absolute relevance is within the colour scale: a few would swallow it."""
PALE: Final = 0.55
"""How much of the contrast of the image is left under its relevance, which has its own colours."""


@dataclass(frozen=True)
class Cell:
    """A patch, or a block of pixels, that can be pointed at: where it is in pixels, and what it has."""

    x: int
    y: int
    width: int
    height: int
    place: str
    value: float
    ratio: float


@dataclass(frozen=True, eq=False)
class Layer:
    """Relevance over the image.

    Args:
        name: ``"patches"`` or ``"pixels"``.
        ratios: ``[R, C]``: of each pixel of the image its relevance as a share of the colour limit, within [-1, 1].
        limit: of the colour scale.
        cells: what can be pointed at.
        largest: the number of largest size, of a patch or a pixel; it may be beyond the limit.
        total, positive, negative: sums of what is shown, of what speaks for the value, and against it.
        share: the sum as a share of the value; None where it is none.
        note: what else is to be said of it.
    """

    name: str
    ratios: Tensor
    limit: float
    cells: tuple[Cell, ...]
    largest: float
    total: float
    positive: float
    negative: float
    share: float | None
    note: str

    def number(self, value: float) -> str:
        """A value with as many decimals as give the largest cell three digits."""
        return aligned(value, max((abs(cell.value) for cell in self.cells), default=self.limit))

    def strongest(self, count: int) -> tuple[Cell, ...]:
        """The cells of largest absolute value, zero left out, largest first."""
        ranked = sorted(self.cells, key=lambda cell: -abs(cell.value))
        return tuple(cell for cell in ranked[:count] if cell.value)

    @property
    def heat(self) -> Tensor:
        """``[R, C, 4]``, ``uint8``: red for, blue against, the more solid the stronger."""
        ends = torch.tensor([colour(-1.0), colour(1.0)], dtype=torch.uint8)
        solid = (self.ratios.abs() * 255).round().to(torch.uint8)
        return torch.cat([ends[(self.ratios > 0).long()], solid[..., None]], -1)

    @property
    def heat_uri(self) -> str:
        """The same as a PNG file in a URI."""
        return uri(self.heat)


@dataclass(frozen=True, eq=False)
class Canvas:
    """An image with the layers of its relevance, patches first.

    Args:
        image: ``[R, C, 3]``, ``uint8``.
        layers: over it.
        incomplete: how far what is named is from adding up to the value (completeness error): the ledger, if there is
            one, and the first layer alone; none where the relevance is in other units.
    """

    image: Tensor
    layers: tuple[Layer, ...]
    incomplete: tuple[tuple[str, float], ...] = ()

    @property
    def name(self) -> str:
        """One that no other image's canvas on a page has."""
        shown = "".join([self.image_uri, *(layer.heat_uri for layer in self.layers)])
        return f"lrpx-{hashlib.sha256(shown.encode()).hexdigest()[:12]}"

    @property
    def height(self) -> int:
        """In pixels."""
        return int(self.image.shape[0])

    @property
    def width(self) -> int:
        """In pixels."""
        return int(self.image.shape[1])

    @property
    def pale(self) -> Tensor:
        """``[R, C, 3]``, ``uint8``: the image in light grey, for what lies over it."""
        weights = torch.tensor([0.299, 0.587, 0.114])
        grey = (self.image.float() * weights).sum(-1, keepdim=True)
        return (255 - (255 - grey) * PALE).round().to(torch.uint8).expand(-1, -1, 3).contiguous()

    @property
    def image_uri(self) -> str:
        """The image as a PNG file in a URI."""
        return uri(self.image)

    @property
    def pale_uri(self) -> str:
        """The grey image likewise."""
        return uri(self.pale)

    def over(self, layer: Layer) -> Tensor:
        """``[R, C, 3]``, ``uint8``: a layer over the grey image."""
        heat = layer.heat.float()
        solid = heat[..., 3:] / 255
        return (self.pale.float() * (1 - solid) + heat[..., :3] * solid).round().to(torch.uint8)


def canvas(a: Attribution) -> Canvas | None:
    """The image of an attribution with its relevance; None where it is of a text alone."""
    if a.image is None:
        return None
    image = a.image.clone()
    height, width = image.shape[:2]
    layers = []
    if a.patch is not None and "patches" in a.parts:
        values = a.parts["patches"].values.clone().double()
        rows, columns = values.shape
        patches = Patches(rows, columns, *a.patch)
        place = patches.places(height, width)
        spread = torch.where(place >= 0, values.flatten()[place.clamp(min=0)], 0.0)
        limit, sink = scale(values.flatten())
        note = ""
        if sink is not None:
            note = beyond(f"row {sink // columns}, column {sink % columns}", float(values.flatten()[sink]))
        layers.append(_layer(a, "patches", values, spread, limit, a.patch, note))
    if "pixels" in a.parts:
        values = a.by_pixel().double()
        limit = float(values.abs().flatten().quantile(QUANTILE)) if values.numel() < 2**24 else 0.0
        note = f"colours reach their end at {100 * QUANTILE:g} % of the pixels"
        if not limit:
            limit, note = float(values.abs().max()), ""
        layers.append(_layer(a, "pixels", values, values, limit, (1, 1), note))
    incomplete = [] if a.ledger is None else [("by the ledger", incompleteness(a.ledger.total, a.ledger.explained))]
    if layers and a.is_decomposition:
        incomplete.append((f"of the {layers[0].name} alone", incompleteness(layers[0].total, a.explained.value)))
    return Canvas(image, tuple(layers), tuple(incomplete))


def _layer(
    a: Attribution, name: str, values: Tensor, spread: Tensor, limit: float, size: tuple[int, int], note: str
) -> Layer:
    ratios = (spread / limit).clamp(-1, 1) if limit else torch.zeros_like(spread)
    step = max(-(-max(values.shape) // CELLS), 1)
    cells = []
    for row in range(0, values.shape[0], step):
        for column in range(0, values.shape[1], step):
            block = values[row : row + step, column : column + step]
            value = float(block.sum())
            y, x = row * size[0], column * size[1]
            tall = min(block.shape[0] * size[0], spread.shape[0] - y)
            wide = min(block.shape[1] * size[1], spread.shape[1] - x)
            place = f"row {_range(row, block.shape[0])}, column {_range(column, block.shape[1])}"
            ratio = share_of_scale(value / block.numel(), limit)
            cells.append(Cell(x, y, wide, tall, place, value, ratio))
    total = float(values.sum())
    return Layer(
        name=name,
        ratios=ratios,
        limit=limit,
        cells=tuple(cells),
        largest=float(values.flatten()[values.abs().argmax()]),
        total=total,
        positive=float(values.clamp(min=0).sum()),
        negative=float(values.clamp(max=0).sum()),
        share=share(total, a.explained.value) if a.is_decomposition else None,
        note=note,
    )


def _range(start: int, count: int) -> str:
    return str(start) if count == 1 else f"{start}–{start + count - 1}"


def shrunk(values: Tensor, rows: int, columns: int) -> Tensor:
    """``[rows, columns, …]`` from ``[R, C, …]``: means over blocks, for a terminal."""
    flat = values.float().reshape(*values.shape[:2], -1).permute(2, 0, 1)[None]
    made = torch.nn.functional.adaptive_avg_pool2d(flat, (rows, columns))[0].permute(1, 2, 0)
    return made.reshape(rows, columns, *values.shape[2:])


def uri(image: Tensor) -> str:
    """Pixels ``[R, C, 3 or 4]``, ``uint8``, as a PNG file in a URI."""
    return "data:image/png;base64," + base64.b64encode(png(image)).decode()


def png(image: Tensor) -> bytes:
    """Pixels ``[R, C, 3 or 4]``, ``uint8``, as a PNG file."""
    height, width, channels = image.shape
    rows = b"".join(b"\0" + row.numpy().tobytes() for row in image.contiguous())

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, {3: 2, 4: 6}[channels], 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
