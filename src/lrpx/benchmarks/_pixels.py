"""Which explanation of an image is true to the model? By what it says of images parts of which are covered, by masks of
the objects, and by mosaics of four images.

``pixels`` covers the most or the least relevant cells, tenth by tenth, and measures what the model says then
(:mod:`lrpx.metrics._images`; Achtibat et al. 2024, App. B.2; Chefer et al. 2021); where the data have masks, it can
measure the relevance against them. ``mosaics`` puts four images of different classes into one, and asks where the
relevance of each class is: a ground truth without masks.
"""

from __future__ import annotations

import io
import itertools
import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path  # noqa: TC003 - the fields' types are read
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, TypeVar

import numpy as np
import pyarrow as pa

from lrpx._covering import CELLS, FILLS, by_pixel, cells_of, outputs, pixels_of
from lrpx._data.pictures import Picture, Pictures
from lrpx._images import Patches, as_shown
from lrpx.benchmarks._contract import Benchmark, Case, Samples, Source, index_of, joined, labelled, register, rows_of
from lrpx.benchmarks._pixel_report import LEDGER, terminal, write_reports
from lrpx.errors import DataError, InputError, ModelError, TargetError
from lrpx.metrics import IMAGE_METRICS, MOSAIC_METRICS, Given, PerturbationMetric, SetMetric
from lrpx.metrics._images import STEPS, incompleteness
from lrpx.metrics._perturbation import Curve, even, least_relevant_first, most_relevant_first
from lrpx.questions import Question, Questions
from lrpx.targets import Logit
from lrpx.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch
    from numpy.typing import NDArray
    from rich.console import RenderableType

    from lrpx.metrics import Metric
    from lrpx.model import BoundModel
    from lrpx.runs import Store

S = TypeVar("S")

SHOWN: Final = 64
"""The most rows and columns of a heatmap that a run keeps; larger ones are summed."""
_ORDERS: Final = {"most": most_relevant_first, "least": least_relevant_first}
_SEEDS: Final = 2**32
METHODS: Final = (
    "attnlrp-vit", "lrp-vit", "attnlrp", "lrp", "lrp-chefer", "libragrad-fullgrad", "gradient-x-input",
    "integrated-gradients", "smoothgrad", "grad-cam", "rollout", "gradient-rollout", "atman", "random", "centre",
)  # fmt: skip
"""Those of Achtibat et al. 2024, Table 1, ViT column, and what no explanation should lose to."""


@dataclass(frozen=True)
class ImageSample:
    """An image that is explained.

    Args:
        picture: the image, not read yet.
        label: the index of the class that is right, or None where nobody says.
        named: how the class is called.
        target: what is explained.
    """

    picture: Picture
    label: int | None
    named: str | None
    target: Logit


@dataclass(frozen=True)
class Mosaic:
    """Four images of different classes.

    Args:
        id: its number.
        pictures: the images, in reading order.
        labels: the indices of their classes.
    """

    id: str
    pictures: tuple[Picture, ...]
    labels: tuple[int, ...]


class Pictured(Benchmark[S]):
    """A benchmark of image classifiers, whose samples are made of images."""

    tasks: ClassVar[frozenset[Task]] = frozenset({Task.IMAGE_CLASSIFICATION})
    methods: ClassVar[tuple[str, ...]] = METHODS
    source: ClassVar[pa.Schema] = pa.schema(
        {"id": pa.string(), "line": pa.int32(), "label": pa.string(), "mask": pa.string()}
    )
    title: ClassVar[str]

    data: Path
    image: str
    label: str
    mask: str
    limit: int | None

    @cached_property
    def pictures(self) -> Pictures:
        """The data."""
        return Pictures(self.data, self.image, self.label, self.mask)

    def drawn_pictures(self) -> list[Picture]:
        """The first so many images, in an order that is drawn, always the same: data are often sorted by class."""
        every = self.pictures.listed()
        order = np.random.default_rng(0).permutation(len(every))[: self.limit]
        return [every[i] for i in order]

    def settings(self) -> dict[str, Any]:
        """Its fields; the data are all their images, labels and masks, wherever they lie."""
        found = {"data": {"file": self.data.name, "sha256": self.pictures.digest()}}
        names = [name for name in self.options() if name != "data"]
        return found | {name: getattr(self, name) for name in names} | {"shown": SHOWN}

    def check(self) -> None:
        """See the class."""
        if self.limit is not None and self.limit < 1:
            raise InputError(f"limit is {self.limit}; give at least 1")

    def check_model(self, model: BoundModel) -> None:
        """See :meth:`Benchmark.check_model`."""
        if model.task in self.tasks and model.tokenizer is None:
            raise ModelError(
                "the model has no image processor to read images with; save its processor in the same folder"
            )
        super().check_model(model)

    def listed(self, pictures: Sequence[Picture]) -> Source:
        """Images as rows, each looked at once.

        Raises:
            DataError: one cannot be read, or its mask has another size.
        """
        rows = []
        for each in pictures:
            if each.mask is None:
                self.pictures.open(each)
            else:
                self.pictures.open_mask(each)
            rows.append({"id": each.id, "line": each.line, "label": each.label, "mask": each.mask})
        return Source(pa.Table.from_pylist(rows, self.source), (), {"counts": {"images": len(rows)}})

    @property
    def facts(self) -> pa.Schema:
        """``id`` and ``label``."""
        return pa.schema({"id": pa.string(), "label": pa.string()})

    def columns(self, methods: Sequence[str], metrics: Sequence[Metric]) -> pa.Schema:
        """See the class."""
        found = [*self.facts, pa.field("explained", pa.string()), pa.field("value", pa.float64())]
        found += [pa.field("correct", pa.bool_()), pa.field("image", pa.binary())]
        found.append(pa.field("grid", pa.list_(pa.int32())))
        for method in methods:
            found.append(pa.field(f"relevance/{method}", pa.list_(pa.float32())))
            for each in metrics:
                of_set = isinstance(each, SetMetric)
                found.append(pa.field(f"{each.name}/{method}", pa.list_(pa.float64()) if of_set else pa.float64()))
            found += self.drawn(method)
        return pa.schema(found)

    def drawn(self, method: str) -> list[pa.Field[Any]]:
        """The columns of a method's curves."""
        del method
        return []

    def judge(self, case: Case[S], model: BoundModel, metrics: Sequence[Metric]) -> dict[str, Any]:
        """See :meth:`judge_all`."""
        return self.judge_all([case], model, metrics, 32)[0]

    @abstractmethod
    def correct(self, case: Case[S]) -> bool | None:
        """Whether the model predicts what it should; None where nobody says."""

    def maps(self, case: Case[S], model: BoundModel, patches: Patches | None, question: int) -> dict[str, torch.Tensor]:
        """``[R, C]`` of each method, of one question."""
        rows, columns = pixels_of(model, case.questions.rows[0]).shape[-2:]
        return {
            name: by_pixel(parts[question], patches, (rows, columns), name) for name, parts in case.parts.items()
        }  # fmt: skip

    def shown(
        self, case: Case[S], model: BoundModel, relevance: Mapping[str, torch.Tensor], patches: Patches | None
    ) -> dict[str, Any]:
        """What a row has of a case but for metrics: relevance ``[R, C]`` of each method as its heatmap shows it."""
        pixels = pixels_of(model, case.questions.rows[0])
        rows, columns = pixels.shape[-2:]
        if patches is None:
            step = -(-max(rows, columns) // SHOWN)
            patches = Patches(-(-rows // step), -(-columns // step), step, step)
        return {
            "explained": "; ".join(each.describe(model.label) for each in case.answers.targets),
            "value": float(case.answers.values[0]),
            "correct": self.correct(case),
            "image": _png(pixels, model),
            "grid": [patches.rows, patches.columns, patches.height, patches.width],
        } | {f"relevance/{name}": patches.summed(values).flatten().tolist() for name, values in relevance.items()}

    def report(self, store: Store, show: Sequence[str] = ()) -> RenderableType:
        """Write ``table.md``, ``report.html`` and, of curves, ``curves.png``; see
        :func:`lrpx.benchmarks._pixel_report.write_reports`."""
        return terminal(write_reports(store, self.title, self.metrics, show=show))


@register
@dataclass(frozen=True)
class Pixels(Pictured[ImageSample]):
    """Which explanation is true to your image classifier? By what it says of images parts of which are covered.

    Args:
        data: the images.
        image, label, mask: the columns of a table.
        target: what is explained: the model's own prediction, the data's label, or a class by its name.
        cells: what is covered at once.
        fill: what stands in the place of what is covered.
        read_out: what the areas are under.
        limit: take so many images; which is drawn, always the same.
        last: take the last so many of these.
    """

    data: Annotated[Path, "Images: a folder (of folders named by class), .npz, or a table: .tsv, .csv, .jsonl."]
    image: Annotated[str, "The column of the files of a table's images."] = "image"
    label: Annotated[str, "The column of the labels, if there is one."] = "label"
    mask: Annotated[str, "The column of the files of the objects' masks, if there is one."] = "mask"
    target: Annotated[str, "What is explained: predicted, label, or the name of a class."] = "predicted"
    cells: Annotated[str, "What is covered at once: patches or pixels."] = "patches"
    fill: Annotated[str, "What covers it: zero (the mean colour), mean (the image's own) or blur."] = "zero"
    read_out: Annotated[str, "What ΔA and its parts read: logit, probability or log-probability."] = "logit"
    limit: Annotated[int | None, "Take so many images, drawn, always the same."] = None
    last: Annotated[int | None, "Take the last so many of these."] = None

    name: ClassVar[str] = "pixels"
    title: ClassVar[str] = "Which explanation of an image is true to the model?"
    metrics: ClassVar[Mapping[str, Metric]] = IMAGE_METRICS

    def check(self) -> None:
        """See the class."""
        super().check()
        if self.last is not None and self.last < 1:
            raise InputError(f"last is {self.last}; give at least 1")
        reads = ("logit", "probability", "log-probability")
        for name, known in (("cells", CELLS), ("fill", tuple(FILLS)), ("read_out", reads)):
            if getattr(self, name) not in known:
                flag = name.replace("_", "-")
                raise InputError(f"--{flag} is {getattr(self, name)!r}; choose of {', '.join(known)}")

    def usual(self) -> list[str]:
        """Those that need no mask, less the parts of ΔA, so that the verdict counts nothing twice, and the completeness
        error, which is no faithfulness."""
        left = ("A MoRF", "A LeRF", "completeness error")
        return [
            name for name, each in self.metrics.items() if isinstance(each, PerturbationMetric) and name not in left
        ]

    def read(self) -> Source:
        """The images, each looked at once.

        Raises:
            DataError: there is none, one cannot be read, or a mask has another size than its image.
        """
        every = self.drawn_pictures()
        found = self.listed(every if self.last is None else every[-self.last :])
        return replace(found, notes={"counts": {"images": len(every)}})

    def samples(self, source: Source, model: BoundModel) -> Samples[ImageSample]:
        """The images, each with what is explained.

        Raises:
            DataError, TargetError: a label is none of the model's, or one is missing that is to be explained.
        """
        kept = []
        for row in rows_of(source, model, self.data, self.target):
            label = None if row["label"] is None else labelled(row, model, self.data)
            picture = Picture(row["id"], row["line"], row["label"], row["mask"])
            named = None if label is None else model.label(label)
            kept.append(ImageSample(picture, label, named, self._target(row, label, model)))
        return Samples(kept, (), {"kept": len(kept)})

    def _target(self, row: Mapping[str, Any], label: int | None, model: BoundModel) -> Logit:
        if self.target == "predicted":
            return Logit()
        if self.target != "label":
            try:
                return Logit(index_of(self.target, model))
            except TargetError as error:
                raise TargetError(str(error).removesuffix(", or the index of a class")) from error
        if label is None:
            raise DataError(
                f"{self.data}:{row['line']} has no label, which is to be explained; name its column with --label, or "
                "explain --target predicted"
            )
        return Logit(label)

    def facts_of(self, sample: ImageSample) -> dict[str, Any]:
        """The sample in the columns :attr:`facts`."""
        return {"id": sample.picture.id, "label": sample.named}

    def ask(self, sample: ImageSample, model: BoundModel) -> Questions:
        """Its one question."""
        row = model.reader.row(self.pictures.open(sample.picture, _channels(model)))
        return Questions((row,), (Question(0, None, sample.target),))

    def correct(self, case: Case[ImageSample]) -> bool | None:
        """Whether the label has the largest logit."""
        label = case.sample.label
        return None if label is None else int(case.answers.logits[0].argmax()) == label

    def drawn(self, method: str) -> list[pa.Field[Any]]:
        """The curves of ΔA, and how far the ledger is from adding up to the value."""
        curves = [pa.field(f"curve {order}/{method}", pa.list_(pa.float64())) for order in _ORDERS]
        return [*curves, pa.field(f"{LEDGER}/{method}", pa.float64())]

    def columns(self, methods: Sequence[str], metrics: Sequence[Metric]) -> pa.Schema:
        """See the class."""
        wrong = next((each for each in metrics if not isinstance(each, (PerturbationMetric, SetMetric))), None)
        if wrong is not None:
            raise InputError(f"{wrong.name} is no metric of images; leave it out")
        return super().columns(methods, metrics)

    def judge_all(
        self, cases: Sequence[Case[ImageSample]], model: BoundModel, metrics: Sequence[Metric], batch_size: int
    ) -> list[dict[str, Any]]:
        """What each method's relevance earns by each metric, all covered images of all cases run together.

        Raises:
            InputError: a metric gives a value that is none.
            DataError: there is no mask for a metric that needs one.
            NonFiniteError: NaN or infinity in an output.
        """
        together, answers = joined(cases)
        own = [each.reads for each in metrics if isinstance(each, PerturbationMetric) and each.reads]
        reads = list(dict.fromkeys([self.read_out, *own]))
        cells, rows, maps = [], [], []
        for case in cases:
            (image,) = case.questions.rows
            patches, grid = cells_of(model, image, "patches"), cells_of(model, image, self.cells)
            if grid is None:
                kind = type(model.module).__name__
                raise ModelError(f"{kind} does not cut images into patches; cover --cells pixels instead")
            found = self.maps(case, model, patches, 0)
            rows.append(self.shown(case, model, found, patches) | _ledgers(case, model))
            cells.append(grid)
            maps.append(found)
        nothing = [np.zeros((1, len(each)), dtype=bool) for each in cells]
        full = outputs(model, together, answers, nothing, cells, reads, self.fill, batch_size)
        plans = [
            self._planned(case, each, found, metrics, dict(zip(reads, values[0].tolist(), strict=True)))
            for case, each, found, values in zip(cases, cells, maps, full, strict=True)
        ]
        sets = [np.concatenate([each for _, each, _, _ in mine]) for mine in plans]
        said = outputs(model, together, answers, sets, cells, reads, self.fill, batch_size)
        for row, mine, values in zip(rows, plans, said, strict=True):
            start = 0
            for column, hidden, read, measure in mine:
                end = start + len(hidden)
                row[column] = measure(values[start:end, reads.index(read)])
                start = end
        of_masks = [each for each in metrics if isinstance(each, SetMetric)]
        if of_masks:
            for row, case, found in zip(rows, cases, maps, strict=True):
                row |= self._masked(case, model, found, of_masks)
        return rows

    def _planned(
        self,
        case: Case[ImageSample],
        cells: Patches,
        found: Mapping[str, torch.Tensor],
        metrics: Sequence[Metric],
        full: Mapping[str, float],
    ) -> list[tuple[str, NDArray[np.bool_], str, Callable[[NDArray[np.float64]], Any]]]:
        """What is run for a case: the column, the covered sets, what is read, and what is made of it."""
        plans: list[tuple[str, NDArray[np.bool_], str, Callable[[NDArray[np.float64]], Any]]] = []
        for method, values in found.items():
            given = Given(_of_cells(values, cells), 0.0, STEPS, case.sample.picture.id)
            for each in metrics:
                if isinstance(each, PerturbationMetric):
                    read = each.reads or self.read_out
                    asked = replace(given, full=full[read])
                    measure = _measured(each, asked)
                    plans.append((f"{each.name}/{method}", each.sets(asked), read, measure))
            for order, taken in _ORDERS.items():
                curve = taken(given, even(len(given), STEPS))
                plans.append((f"curve {order}/{method}", curve.sets, self.read_out, _points(curve)))
        return plans

    def _masked(
        self,
        case: Case[ImageSample],
        model: BoundModel,
        found: Mapping[str, torch.Tensor],
        metrics: Sequence[SetMetric],
    ) -> dict[str, Any]:
        mask = self.pictures.open_mask(case.sample.picture)
        if mask is None:
            raise DataError(
                f"{self.data}:{case.sample.picture.line} has no mask, which {metrics[0].name} needs; name its column "
                "with --mask, or leave the metric out"
            )
        seen = _as_seen(mask, model)
        if not seen.any():
            raise DataError(
                f"{self.data}:{case.sample.picture.line}: the model's processor cuts the whole object away; leave the "
                "image out"
            )
        return {
            f"{each.name}/{method}": each.counts(values.flatten().numpy(), seen.ravel()).tolist()
            for method, values in found.items()
            for each in metrics
        }


@register
@dataclass(frozen=True)
class Mosaics(Pictured[Mosaic]):
    """Where is the relevance of a class, in a mosaic of four images of different classes? A ground truth without masks.

    Each image is cut to its middle square and put into one quadrant; the four classes are explained one by one.

    Args:
        data: the images, with labels.
        image, label: the columns of a table.
        count: how many mosaics are made.
        seed: of their draw.
        limit: take so many images; which is drawn, always the same.
    """

    data: Annotated[Path, "Images with labels: a folder of folders, .npz, or a table: .tsv, .csv, .jsonl."]
    image: Annotated[str, "The column of the files of a table's images."] = "image"
    label: Annotated[str, "The column of the labels."] = "label"
    count: Annotated[int, "How many mosaics are made."] = 100
    seed: Annotated[int, "Of their draw."] = 0
    limit: Annotated[int | None, "Take so many images, drawn, always the same."] = None

    mask: ClassVar[str] = "mask"  # type: ignore[misc]  # which is not read
    name: ClassVar[str] = "mosaics"
    title: ClassVar[str] = "Which explanation finds a class among four images?"
    metrics: ClassVar[Mapping[str, Metric]] = MOSAIC_METRICS

    def check(self) -> None:
        """See the class."""
        super().check()
        if self.count < 1 or not 0 <= self.seed < _SEEDS:
            raise InputError(f"{self.count} mosaics of seed {self.seed}; make at least 1, of a seed from 0")

    def read(self) -> Source:
        """The images, each looked at once.

        Raises:
            DataError: there is none, or one cannot be read or has no label.
        """
        found = self.drawn_pictures()
        wrong = next((each for each in found if each.label is None), None)
        if wrong is not None:
            raise DataError(
                f"{self.data}:{wrong.line} has no label, which a mosaic needs; name its column with --label"
            )
        return self.listed([replace(each, mask=None) for each in found])

    def samples(self, source: Source, model: BoundModel) -> Samples[Mosaic]:
        """The mosaics: each of four classes drawn evenly, and one image of each.

        Raises:
            InputError: there are fewer than four classes.
        """
        by_class: dict[int, list[Picture]] = {}
        for row in rows_of(source, model, self.data, "label"):
            by_class.setdefault(labelled(row, model, self.data), []).append(
                Picture(row["id"], row["line"], row["label"])
            )
        if len(by_class) < 4:
            told = f"{len(by_class)} class{'es' * (len(by_class) != 1)}"
            raise InputError(f"the images have {told} and a mosaic needs 4; pass other data")
        draw = np.random.default_rng(self.seed)
        classes = sorted(by_class)
        made = []
        for number in range(self.count):
            chosen = [classes[i] for i in draw.choice(len(classes), 4, replace=False)]
            pictures = tuple(by_class[each][int(draw.integers(len(by_class[each])))] for each in chosen)
            made.append(Mosaic(f"mosaic {number}", pictures, tuple(chosen)))
        return Samples(made, (), {"mosaics": len(made), "classes": len(classes)})

    def facts_of(self, sample: Mosaic) -> dict[str, Any]:
        """The sample in the columns :attr:`facts`."""
        return {"id": sample.id, "label": ", ".join(each.id for each in sample.pictures)}

    def ask(self, sample: Mosaic, model: BoundModel) -> Questions:
        """The logit of each of the four classes."""
        from PIL import Image

        squares = [_square(self.pictures.open(each, _channels(model))) for each in sample.pictures]
        side = max(each.size[0] for each in squares)
        whole = Image.new(squares[0].mode, (2 * side, 2 * side))
        for i, each in enumerate(squares):
            whole.paste(each.resize((side, side), Image.Resampling.BICUBIC), (i % 2 * side, i // 2 * side))
        row = model.reader.row(whole)
        return Questions((row,), tuple(Question(0, None, Logit(label)) for label in sample.labels))

    def correct(self, case: Case[Mosaic]) -> bool | None:
        """Whether one of the four has the largest logit."""
        return int(case.answers.logits[0].argmax()) in case.sample.labels

    def judge_all(
        self, cases: Sequence[Case[Mosaic]], model: BoundModel, metrics: Sequence[Metric], batch_size: int
    ) -> list[dict[str, Any]]:
        """The mean over the four classes of what each method's relevance earns; the heatmap is that of the first."""
        del batch_size
        rows = []
        for case in cases:
            patches = cells_of(model, case.questions.rows[0], "patches")
            every = [self.maps(case, model, patches, i) for i in range(4)]
            row = self.shown(case, model, every[0], patches)
            for name in case.relevance:
                for metric in metrics:
                    scores = [metric(*in_quadrants(found[name].numpy(), i)) for i, found in enumerate(every)]
                    row[f"{metric.name}/{name}"] = float(np.mean(scores))
            rows.append(row)
        return rows


# ------------------------------------------------------------------------------------ below: one image


def in_quadrants(relevance: NDArray[np.float64], quadrant: int) -> tuple[list[float], list[bool]]:
    """The relevance ``[R, C]`` quadrant after quadrant, and which of it is in one of them; of an odd number of rows or
    columns the middle one, which is in two, is left out.

    >>> in_quadrants(np.array([[1.0, 2.0], [3.0, 4.0]]), 2)
    ([1.0, 2.0, 3.0, 4.0], [False, False, True, False])
    """
    rows, columns = (size // 2 for size in relevance.shape)
    parts = [part[..., side] for part in (relevance[:rows], relevance[-rows:]) for side in _sides(columns)]
    ordered = np.stack([part.ravel() for part in parts])
    truth = np.zeros(ordered.shape, dtype=bool)
    truth[quadrant] = True
    return ordered.ravel().tolist(), truth.ravel().tolist()


def _sides(columns: int) -> tuple[slice, slice]:
    return slice(None, columns), slice(-columns, None)


def _ledgers(case: Case[Any], model: BoundModel) -> dict[str, float | None]:
    """How far each method's ledger is from adding up to the value; None where it has none."""
    asked = case.questions.with_targets(case.answers.targets)
    found: dict[str, float | None] = {}
    for name, method in case.methods.items():
        found[f"{LEDGER}/{name}"] = None
        if method.has_ledger:
            ledgers = method.attribute(model, asked, ledger=True).ledgers
            assert ledgers is not None
            found[f"{LEDGER}/{name}"] = incompleteness(ledgers[0].total, ledgers[0].explained)
    return found


def _channels(model: BoundModel) -> int:
    return int(getattr(model.config, "num_channels", 3))


def _of_cells(relevance: torch.Tensor, cells: Patches) -> NDArray[np.float64]:
    """``[N]`` from pixels ``[R, C]``: the sum in each cell, rounded once, so that cells of the same numbers are tied
    in whatever order they stand there, as mirror images do."""
    place = cells.places(*relevance.shape).flatten().numpy()
    order = np.argsort(place, kind="stable")
    ends = np.searchsorted(place[order], np.arange(len(cells) + 1))
    values = relevance.double().flatten().numpy()[order]
    return np.array([math.fsum(values[start:end]) for start, end in itertools.pairwise(ends)])


def _measured(metric: PerturbationMetric, asked: Given) -> Callable[[NDArray[np.float64]], float]:
    return lambda values: metric(asked, values)


def _points(curve: Curve) -> Callable[[NDArray[np.float64]], list[float]]:
    return lambda values: list(map(float, curve.points(values)))


def _png(pixels: torch.Tensor, model: BoundModel) -> bytes:
    """What the model was given, as a person sees it."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(as_shown(pixels, model.tokenizer).numpy()).save(file, "PNG", optimize=True)
    return file.getvalue()


def _square(image: Any) -> Any:
    """The middle square."""
    side = min(image.size)
    left, top = ((size - side) // 2 for size in image.size)
    return image.crop((left, top, left + side, top + side))


def _as_seen(mask: NDArray[np.bool_], model: BoundModel) -> NDArray[np.bool_]:
    """A mask ``[R, C]`` of the image as the model's processor resizes and cuts it."""
    from PIL import Image

    processor = getattr(model.tokenizer, "image_processor", model.tokenizer)
    each = (mask * np.uint8(255), np.full(mask.shape, 255, np.uint8))
    grey = [Image.fromarray(values).convert("L" if _channels(model) == 1 else "RGB") for values in each]
    made = (processor(images=image, return_tensors="pt", do_normalize=False, do_rescale=False) for image in grey)
    given, white = (values["pixel_values"][0].float().mean(0).numpy() for values in made)
    # EfficientNet's divides by a deviation all the same, so that white is not 255
    found: NDArray[np.bool_] = given > white.max() * 127 / 255
    return found
