"""Images with labels and masks: a folder, an npz file, or a table that names files."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from lrpx._data.texts import TABLES, _label, _lines
from lrpx._images import open_image
from lrpx.errors import DataError, InputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray
    from PIL.Image import Image

SUFFIXES: Final = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""What images in a folder are called."""


@dataclass(frozen=True)
class Picture:
    """An image, not read yet.

    Args:
        id: its file's name in the folder or the table, or its number in the npz file.
        line: where it stands, from 1.
        label: its label as the data write it, or None.
        mask: the file of the object's mask; the id again in an npz file; None where there is none.
    """

    id: str
    line: int
    label: str | None = None
    mask: str | None = None


@dataclass(frozen=True)
class Pictures:
    """The images of a folder (those of its subfolders have these as labels), of an npz file (``x`` of ``[N, R, C, 3]``
    or ``[N, R, C]``, uint8; perhaps ``y`` of ``[N]``; perhaps ``mask`` of ``[N, R, C]``), or of a table (``.tsv``,
    ``.csv``, ``.jsonl``: a column of files, beside it or anywhere; perhaps one of labels; perhaps one of masks).

    Args:
        path: the folder or file.
        image, label, mask: the columns of a table.
    """

    path: Path
    image: str = "image"
    label: str = "label"
    mask: str = "mask"

    def listed(self) -> list[Picture]:
        """The images, in order.

        Raises:
            DataError: there is none, or something cannot be read.
        """
        try:
            if self.path.is_dir():
                found = self._in_folder()
            elif self.path.suffix == ".npz":
                found = self._in_arrays()
            elif self.path.suffix in TABLES and self.path.suffix != ".parquet":
                found = self._in_table()
            else:
                raise DataError(
                    f"{self.path} is no folder of images; name one, an .npz file, or a .tsv, .csv or .jsonl"
                )
        except UnicodeDecodeError as error:
            raise DataError(f"{self.path} is not UTF-8 ({error.reason} at byte {error.start}); convert it") from error
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error.strerror or error}; name another file") from error
        if not found:
            raise DataError(f"there is no image in {self.path}; name a folder or a file that holds some")
        return found

    def digest(self) -> str:
        """Of all images, labels and masks, wherever they lie.

        Raises:
            DataError: something cannot be read.
        """
        made = hashlib.sha256()
        for each in self.listed():
            made.update(repr((each.id, each.label)).encode())
            if self.path.suffix != ".npz":
                for name in filter(None, (each.id, each.mask)):
                    made.update(_bytes(self._at(name)))
        if self.path.suffix == ".npz":
            for name, values in self._arrays.items():
                made.update(name.encode() + np.ascontiguousarray(values).tobytes())
        return made.hexdigest()

    def open(self, picture: Picture, channels: int = 3) -> Image:
        """The image: in grey for one channel, else in red, green and blue.

        Raises:
            DataError: it cannot be read.
        """
        from PIL.Image import fromarray

        if self.path.suffix == ".npz":
            return fromarray(self._arrays["x"][int(picture.id)]).convert("L" if channels == 1 else "RGB")
        try:
            found: Image = open_image(self._at(picture.id), channels)
        except InputError as error:
            raise DataError(f"{self.path}:{picture.line}: {str(error).split('; ')[0]}; mend the file") from error
        return found

    def open_mask(self, picture: Picture) -> NDArray[np.bool_] | None:
        """``[R, C]``, True at the object's pixels, which are all that are not black; None where there is no mask.

        Raises:
            DataError: it cannot be read, has another size than the image, or no pixel; or what is black in it cannot be
                told: it is a JPEG, or partly transparent.
        """
        if picture.mask is None:
            return None
        where = f"{self.path}:{picture.line}"
        if self.path.suffix == ".npz":
            found = self._arrays["mask"][int(picture.id)] != 0
        else:
            try:
                found = (np.asarray(open_image(self._at(picture.mask), 3)) > 0).any(-1)
            except InputError as error:
                raise DataError(f"{where}: the mask: {str(error).split('; ')[0]}; mend the file") from error
            wrong = _is_unclear(self._at(picture.mask))
            if wrong:
                raise DataError(
                    f"{where}: the mask {picture.mask} {wrong}, so what is black in it cannot be told; save it as a "
                    "PNG of black and white"
                )
        columns, rows = self.open(picture).size
        if found.shape != (rows, columns):
            raise DataError(
                f"{where}: the mask of {picture.id} has {found.shape[0]} × {found.shape[1]} pixels and the image "
                f"{rows} × {columns}; make them the same"
            )
        if not found.any():
            raise DataError(f"{where}: the mask of {picture.id} has no pixel of an object; leave the image out")
        return np.asarray(found)

    # ----------------------------------------------------------------------------- below: one kind each

    def _at(self, name: str) -> Path:
        return (self.path if self.path.is_dir() else self.path.parent) / name

    def _in_folder(self) -> list[Picture]:
        files = sorted(each for each in _files_in(self.path, ()) if each.suffix.lower() in SUFFIXES and each.is_file())
        named = [each.relative_to(self.path) for each in files]
        return [
            Picture(each.as_posix(), i, each.parts[0] if len(each.parts) > 1 else None)
            for i, each in enumerate(named, 1)
        ]

    @cached_property
    def _arrays(self) -> dict[str, NDArray[Any]]:
        try:
            with self.path.open("rb") as opened:  # which numpy leaves open where it can read nothing
                arrays = np.load(opened, allow_pickle=False)
                if not isinstance(arrays, np.lib.npyio.NpzFile):
                    raise ValueError("it is one array without a name")
                found = {name: arrays[name] for name in ("x", "y", "mask") if name in arrays}
        except (ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"{self.path} is no npz file of arrays ({error}); make one by numpy.savez") from error
        x = found.get("x", np.zeros(0))
        if x.dtype != np.uint8 or not (x.ndim == 3 or (x.ndim == 4 and x.shape[3] == 3)):
            raise DataError(
                f"{self.path} needs images as x, uint8, [N, row, column, 3] or [N, row, column]; its x is {x.dtype} "
                f"{list(x.shape)}"
            )
        for name, shape in (("y", x.shape[:1]), ("mask", x.shape[:3])):
            if name in found and found[name].shape != shape:
                raise DataError(f"{self.path}: {name} is {list(found[name].shape)}; make it {list(shape)}, as x has it")
        return found

    def _in_arrays(self) -> list[Picture]:
        count, labels = len(self._arrays["x"]), self._arrays.get("y")
        return [
            Picture(
                str(i), i + 1,
                None if labels is None else _label(labels[i].item()),
                str(i) if "mask" in self._arrays else None,
            )
            for i in range(count)
        ]  # fmt: skip

    def _in_table(self) -> list[Picture]:
        found = []
        for line, row in _lines(self.path, self.image):
            if self.image not in row:
                raise DataError(
                    f"{self.path}:{line} has no column {self.image!r}, only {', '.join(map(repr, row)) or 'none'}; "
                    "name the column of the images with --image"
                )
            name, mask = row[self.image], row.get(self.mask)
            if not isinstance(name, str) or not (mask is None or isinstance(mask, str)):
                raise DataError(f"{self.path}:{line}: the columns {self.image!r} and {self.mask!r} hold names of files")
            found.append(Picture(name, line, _label(row.get(self.label)), mask or None))
        return found


def _files_in(folder: Path, around: tuple[Path, ...]) -> Iterator[Path]:
    """What lies in a folder and in those below it, links to folders included, but for one to a folder around it."""
    around = (*around, folder.resolve())
    for each in folder.iterdir():
        if not each.is_dir():
            yield each
        elif each.resolve() not in around:
            yield from _files_in(each, around)


def _is_unclear(path: Path) -> str:
    """Why the black pixels of a mask may be others than were meant; empty where they are not."""
    from PIL import Image

    with Image.open(path) as opened:
        if opened.format in ("JPEG", "MPO"):
            return "is a JPEG, which has grey around edges"
        is_solid = not opened.has_transparency_data or bool((np.asarray(opened.convert("RGBA"))[..., 3] == 255).all())
    return "" if is_solid else "is partly transparent"


def _bytes(path: Path) -> bytes:
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; name another file") from error
