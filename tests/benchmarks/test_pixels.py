"""The benchmarks of images: rows against loops over single images, masks, mosaics, reports, and bad input."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from dataclasses import dataclass

import numpy as np
import polars
import pytest
import torch
import transformers as tf

from lrpx import Ledger
from lrpx._data.pictures import Pictures
from lrpx._images import Patches
from lrpx.benchmarks import Run, _pixel_report, find, keep
from lrpx.benchmarks._pixel_report import overlay
from lrpx.benchmarks._pixels import _as_seen, _of_cells
from lrpx.errors import DataError, InputError, ModelError, ResultFileError
from lrpx.methods import Found, Method
from lrpx.methods import find as find_method
from lrpx.metrics import IMAGE_METRICS
from lrpx.metrics._images import mean_iou
from lrpx.metrics._statistics import paired_test, swap_test
from lrpx.model import BoundModel, Spec
from lrpx.questions import Question, Questions
from lrpx.targets import Logit
from lrpx.tasks import Task
from tests import pictured
from tests.pictured import CLASSES, PATCH, SIDE, processor, vit
from tests.reference import images as twins

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

METHODS = ["attnlrp", "gradient-x-input"]
HOSTILE = "a<script>alert(1) & b.png"
OF_PYTHON = re.compile("Traceback|Error:.*Error")


@pytest.fixture(scope="module")
def model():
    return BoundModel(vit().double(), processor())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return pictured.saved(tmp_path_factory.mktemp("vit"))


@pytest.fixture
def arrays(tmp_path):
    return pictured.arrays(tmp_path / "images.npz")


@pytest.fixture
def files(tmp_path):
    """A table, its images and its masks."""
    draw = np.random.default_rng(1)
    rows = [["file", "class", "object"]]
    for i in range(4):
        name = HOSTILE if i == 0 else f"{i}.png"
        Image.fromarray(draw.integers(0, 255, (20, 24, 3), dtype=np.uint8)).save(tmp_path / name)
        Image.fromarray((draw.random((20, 24)) < 0.5).astype(np.uint8) * 255).save(tmp_path / f"mask{i}.png")
        rows.append([name, f"c{i}", f"mask{i}.png"])
    path = tmp_path / "table.csv"
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


def of_table(path, **how):
    return find("pixels")(data=path, image="file", label="class", mask="object", **how)


def asked(model):
    row = model.reader.row(Image.fromarray(np.zeros((SIDE, SIDE, 3), dtype=np.uint8)))
    return Questions((row,), (Question(0, None, Logit(0)),))


def logits_of(model, pixels):
    with torch.no_grad():
        return model.module(pixel_values=pixels[None]).logits[0]


@pytest.mark.parametrize("cells", ["patches", "pixels"])
@pytest.mark.parametrize("fill", ["zero", "mean"])
def test_rows_are_what_a_loop_over_covered_images_gives(model, arrays, cells, fill):
    """Each covered image alone, covered pixel by pixel, and the slow twins of the metrics."""
    size = PATCH if cells == "patches" else 1
    benchmark = find("pixels")(data=arrays, limit=2, cells=cells, fill=fill)
    run = Run(benchmark, model, METHODS, list(twins.PERTURBATION))
    for row, sample in zip(run.part(0).to_pylist(), run.samples.kept, strict=True):
        pixels = model.reader.row(benchmark.pictures.open(sample.picture)).arguments["pixel_values"][0]
        explained = int(logits_of(model, pixels).argmax())

        def said(hidden, pixels=pixels):
            covered = pixels.clone()
            for cell in hidden:
                top, left = size * (cell // (SIDE // size)), size * (cell % (SIDE // size))
                for channel in range(3):
                    colour = 0.0 if fill == "zero" else float(pixels[channel].mean())
                    covered[channel, top : top + size, left : left + size] = colour
            return logits_of(model, covered)

        reads = {
            "": lambda hidden, said=said, at=explained: float(said(hidden)[at]),
            "logit": lambda hidden, said=said, at=explained: float(said(hidden)[at]),
            "probability": lambda hidden, said=said, at=explained: float(said(hidden).softmax(0)[at]),
            "first": lambda hidden, said=said, at=explained: float(said(hidden).argmax() == at),
        }
        for method in METHODS:
            if cells == "patches":
                relevance = row[f"relevance/{method}"]
                assert row["grid"] == [4, 4, PATCH, PATCH]
            else:
                found = Run(benchmark, model, [method])._explained([sample], [benchmark.ask(sample, model)])[0]
                relevance = found.parts[method][0]["pixels"].values.sum(0).flatten().tolist()
            for name, twin in twins.PERTURBATION.items():
                if cells == "pixels" and name not in ("ΔA", "completeness error"):
                    continue
                value = reads[IMAGE_METRICS[name].reads]
                assert row[f"{name}/{method}"] == pytest.approx(twin(relevance, value), abs=1e-5), name


def test_cells_that_mirror_each_other_are_covered_at_once(model):
    """A sum hangs on the order of its terms, and so would the order of cells that are alike."""
    (heat,) = find_method("centre").attribute(model, asked(model)).parts["pixels"]
    found = _of_cells(heat.values.double().sum(0), Patches(4, 4, PATCH, PATCH))
    corner, edge, middle = sorted(set(found.tolist()))
    row = [corner, edge, edge, corner], [edge, middle, middle, edge]
    assert found.tolist() == [*row[0], *row[1], *row[1], *row[0]]


def test_completeness_is_of_the_logit_whatever_areas_are_under(model, arrays):
    """The relevance adds up to a logit, so no loss of a probability is what it should be."""
    names = ["completeness error", "ΔA"]
    rows = {
        read_out: Run(find("pixels")(data=arrays, read_out=read_out), model, METHODS, names).part(0).to_pylist()
        for read_out in ("logit", "probability", "log-probability")
    }
    for method in METHODS:
        column = f"completeness error/{method}"
        wanted = [row[column] for row in rows["logit"]]
        for read_out in ("probability", "log-probability"):
            assert [row[column] for row in rows[read_out]] == pytest.approx(wanted, abs=1e-9)
            assert rows[read_out][0][f"ΔA/{method}"] != pytest.approx(rows["logit"][0][f"ΔA/{method}"], abs=1e-9)


def test_the_ledger_of_each_image_is_kept_where_a_method_has_one(model, arrays, monkeypatch):
    benchmark = find("pixels")(data=arrays, limit=2)
    run = Run(benchmark, model, ["attnlrp", "attnlrp-vit", "random"], ["ΔA"])
    name = "completeness error by the ledger"
    for row in run.part(0).to_pylist():
        assert row[f"{name}/random"] is None
        assert all(0 <= row[f"{name}/{method}"] < 1e-7 for method in ("attnlrp", "attnlrp-vit"))  # of a small value
    total = Ledger.total.fget
    monkeypatch.setattr(Ledger, "total", property(lambda ledger: 3 * total(ledger)))
    for row in Run(benchmark, model, ["attnlrp"], ["ΔA"]).part(0).to_pylist():
        assert row[f"{name}/attnlrp"] == pytest.approx(0.5, abs=1e-6)  # |3 v − v| / (|3 v| + |v|)


def test_masks_are_counted_over_the_set(model, files):
    names = ["pixel accuracy", "mIoU", "mAP"]
    benchmark = of_table(files)
    run = Run(benchmark, model, METHODS, names)
    rows = run.part(0).to_pylist()
    images = {method: [] for method in METHODS}
    for sample in run.samples.kept:
        found = run._explained([sample], [benchmark.ask(sample, model)])[0]
        mask = Image.fromarray(benchmark.pictures.open_mask(sample.picture)).convert("RGB").resize((SIDE, SIDE), 2)
        for method in METHODS:
            relevance = found.parts[method][0]["pixels"].values.sum(0).flatten().tolist()
            images[method].append((relevance, (np.asarray(mask)[..., 0] > 127).ravel().tolist()))
    for method in METHODS:
        for name in names:
            counted = sum(np.array(row[f"{name}/{method}"]) for row in rows)
            assert IMAGE_METRICS[name](counted) == pytest.approx(twins.SEGMENTATION[name](images[method]), abs=1e-9)


def test_what_is_counted_over_the_set_is_tested_as_such(model, arrays, tmp_path, monkeypatch):
    """One large object, which the second method finds, decides the set's IoU; in each of 20 images of small ones the
    first is better, so the mean of the images' IoUs is another number, and surely larger for the first."""
    first = [[8.0, 2.0, 2.0, 244.0]] * 20 + [[100.0, 0.0, 100.0, 56.0]]
    second = [[4.0, 2.0, 6.0, 244.0]] * 20 + [[195.0, 0.0, 5.0, 56.0]]
    of_images = [[mean_iou(each) for each in every] for every in (first, second)]
    assert np.mean(of_images[0]) > np.mean(of_images[1])
    assert paired_test(*of_images) < 0.01
    run = Run(find("pixels")(data=arrays), model, METHODS, ["mIoU"])
    with keep(run, tmp_path / "run") as kept:
        kept.explain()
    columns = dict(zip((f"mIoU/{method}" for method in METHODS), (first, second), strict=True))
    curves = {f"curve {order}/{method}": [[0.0]] * 21 for order in ("most", "least") for method in METHODS}
    table = polars.DataFrame({"correct": [True] * 21} | columns | curves)
    monkeypatch.setattr(_pixel_report, "select", lambda *_: table)
    found = _pixel_report.summarise(kept.store, IMAGE_METRICS)
    assert found.best("mIoU") == [METHODS[1]]
    assert found.p_value("mIoU", *METHODS) == swap_test(first, second, mean_iou) > 0.5
    assert found.verdict.apart == 0


def test_a_mask_is_cut_at_half_whatever_white_becomes(model, files):
    """EfficientNet's processor divides by a deviation though it is told not to normalise: what is above 127 of that is
    more than the object."""
    size = {"height": SIDE, "width": SIDE}
    double = BoundModel(model.module, tf.EfficientNetImageProcessor(size=size, resample=2, include_top=True))
    pictures = of_table(files).pictures
    for picture in pictures.listed():
        mask = pictures.open_mask(picture)
        seen = np.asarray(Image.fromarray(mask).convert("RGB").resize((SIDE, SIDE), 2))[..., 0] > 127
        np.testing.assert_array_equal(_as_seen(mask, double), seen)
        np.testing.assert_array_equal(_as_seen(mask, model), seen)


def test_mosaics_are_read_quadrant_by_quadrant(model, arrays):
    benchmark = find("mosaics")(data=arrays, count=3)
    run = Run(benchmark, model, METHODS)
    rows = run.part(0).to_pylist()
    for row, sample in zip(rows, run.samples.kept, strict=True):
        assert len(set(sample.labels)) == 4
        asked = benchmark.ask(sample, model)
        found = run._explained([sample], [asked])[0]
        for method in METHODS:
            maps = [parts["pixels"].values.sum(0).tolist() for parts in found.parts[method]]
            for name, twin in (("share", twins.quadrant_share), ("lead", twins.quadrant_lead)):
                expected = sum(twin(each, i) for i, each in enumerate(maps)) / 4
                assert row[f"{name}/{method}"] == pytest.approx(expected, abs=1e-5)
    again = Run(find("mosaics")(data=arrays, count=3), model, METHODS)
    assert again.samples.kept == run.samples.kept
    assert Run(find("mosaics")(data=arrays, count=3, seed=1), model, METHODS).samples.kept != run.samples.kept


def test_a_mosaic_has_its_images_where_it_says(model, tmp_path):
    """Four plain colours: the pixels of each quadrant are its image's."""
    colours = [10, 80, 160, 250]
    np.savez(tmp_path / "plain.npz", x=np.stack([np.full((8, 8, 3), c, np.uint8) for c in colours]), y=np.arange(4))
    benchmark = find("mosaics")(data=tmp_path / "plain.npz", count=2)
    run = Run(benchmark, model, METHODS)
    for sample in run.samples.kept:
        pixels = benchmark.ask(sample, model).rows[0].arguments["pixel_values"][0, 0]
        for i, label in enumerate(sample.labels):
            corner = pixels[-1 if i // 2 else 0, -1 if i % 2 else 0]
            assert float(corner) == pytest.approx((colours[label] / 255 - 0.5) / 0.5, abs=1e-6)


@pytest.mark.parametrize("y", [np.arange(3.0), np.arange(3, dtype=np.uint8), np.array(["0", "1", "2"])])
def test_labels_of_arrays_are_numbers_in_whatever_type_they_are_kept(y, tmp_path):
    """A whole number that an array has as a float is one, as in a table."""
    np.savez(tmp_path / "labels.npz", x=np.zeros((3, 8, 8), np.uint8), y=y)
    assert [each.label for each in Pictures(tmp_path / "labels.npz").listed()] == ["0", "1", "2"]


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_same_rows(model, arrays, tmp_path):
    benchmark = find("pixels")(data=arrays)
    run = Run(benchmark, model, METHODS, ["ΔA"], part=2)
    whole = [run.part(number) for number in range(run.parts)]

    class Stopped(Exception):  # noqa: N818 - a stop is no error
        pass

    def stop(_, done=[]):  # noqa: B006 - it counts over calls
        done.append(1)
        if len(done) == 3:
            raise Stopped

    with pytest.raises(Stopped), keep(Run(benchmark, model, METHODS, ["ΔA"], part=2), tmp_path / "out") as kept:
        kept.explain(stop)
    with keep(Run(benchmark, model, METHODS, ["ΔA"], part=2), tmp_path / "out") as kept:
        kept.explain()
        found = [kept.store.part(f"{number:05}", run.columns) for number in range(run.parts)]
        assert all(a.equals(b) for a, b in zip(found, whole, strict=True))
        benchmark.report(kept.store)
    other = np.load(arrays)
    np.savez(arrays, x=255 - other["x"], y=other["y"])
    with (
        pytest.raises(ResultFileError),
        keep(Run(find("pixels")(data=arrays), model, METHODS, ["ΔA"]), tmp_path / "out"),
    ):
        pass


def test_reports_are_whole_and_escaped(run, folder, files, tmp_path):
    arguments = ["--data", files, "--image", "file", "--label", "class", "--mask", "object", "--model", folder]
    code, out, err = run(
        "benchmark", "pixels", *arguments, "--methods", ",".join(METHODS), "--metrics", "ΔA,deletion,mIoU,mAP", "--out",
        tmp_path / "out",
    )  # fmt: skip
    assert (code, err) == (0, ""), err
    assert "mIoU" in out
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert page.count("data:image/png;base64,") == 3 * (1 + len(METHODS))
    assert page.count('title="completeness error by the ledger"') == 3 * len(METHODS)
    assert "| completeness error by the ledger | " in (tmp_path / "out" / "table.md").read_text(encoding="utf-8")
    assert "mean over" in (tmp_path / "out" / "table.md").read_text(encoding="utf-8").lower()
    assert (tmp_path / "out" / "curves.png").read_bytes().startswith(b"\x89PNG")
    code, out, err = run(
        "benchmark", "mosaics", *arguments[:6], "--model", folder, "--count", 3, "--methods", METHODS[0], "--out",
        tmp_path / "mosaics",
    )  # fmt: skip
    assert (code, err) == (0, ""), err
    assert not (tmp_path / "mosaics" / "curves.png").exists()


def test_a_heatmap_shows_where(tmp_path):
    """Red where it speaks for it, blue against, the image's grey between."""
    grey = Image.new("RGB", (4, 4), (128, 128, 128))
    grey.save(tmp_path / "grey.png")
    made = overlay((tmp_path / "grey.png").read_bytes(), [1.0, -1.0, 0.0, 0.0], [2, 2, 2, 2])
    drawn = base64.b64decode(made.partition("base64,")[2])
    pixels = np.asarray(Image.open(io.BytesIO(drawn)).convert("RGB")).astype(int)
    red, blue, nothing = pixels[0, 0], pixels[0, -1], pixels[-1, 0]
    assert red[0] > red[2] + 100
    assert blue[2] > blue[0] + 100
    assert len(set(nothing.tolist())) == 1


WRONG = [
    ({"cells": "words"}, InputError, "--cells is 'words'; choose of patches, pixels"),
    ({"fill": "black"}, InputError, "--fill is 'black'; choose of zero, mean, blur"),
    ({"limit": 0}, InputError, "limit is 0"),
]


@pytest.mark.parametrize("colour", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_a_mask_of_any_colour(tmp_path, colour):
    """Grey of it may be 0, as of the first numbers of objects that are written as colours."""
    Image.new("RGB", (3, 2)).save(tmp_path / "image.png")
    mask = Image.new("RGB", (3, 2))
    mask.putpixel((2, 1), colour)
    mask.save(tmp_path / "mask.png")
    (tmp_path / "table.csv").write_text("image,mask\nimage.png,mask.png\n")
    pictures = find("pixels")(data=tmp_path / "table.csv").pictures
    assert pictures.open_mask(pictures.listed()[0]).tolist() == [[False] * 3, [False, False, True]]


@pytest.mark.parametrize(("how", "error", "said"), WRONG)
def test_options_that_are_none(model, arrays, how, error, said):
    with pytest.raises(error, match=re.escape(said)):
        Run(find("pixels")(data=arrays, **how), model, METHODS)


def bad(tmp_path, files, kind):
    """A table with a mistake in its first line, or other bad data; and what is said of it."""
    first = tmp_path / HOSTILE
    if kind == "size":
        Image.new("L", (20, 24), 255).save(tmp_path / "mask0.png")
        return files, "20 × 24"
    if kind == "cut short":
        first.write_bytes(first.read_bytes()[:200])
        return files, "no whole image"
    if kind == "no image":
        first.write_text("a text")
        return files, "no image"
    if kind == "missing":
        first.unlink()
        return files, "no such file"
    if kind == "empty mask":
        Image.new("L", (24, 20), 0).save(tmp_path / "mask0.png")
        return files, "has no pixel of an object"
    if kind == "JPEG":
        Image.open(tmp_path / "mask0.png").save(tmp_path / "mask0.jpg")
        files.write_text(files.read_text().replace("mask0.png", "mask0.jpg"))
        return files, "the mask mask0.jpg is a JPEG, which has grey around edges"
    if kind == "transparent":
        mask = Image.open(tmp_path / "mask0.png")
        white = Image.new("L", mask.size, 255)
        Image.merge("RGBA", [white, white, white, mask]).save(tmp_path / "mask0.png")
        return files, "the mask mask0.png is partly transparent"
    if kind == "label":
        files.write_text(files.read_text().replace("c0", "zebra"))
        return files, "has the label 'zebra', which is not one of the model's classes"
    if kind == "column":
        files.write_text(files.read_text().replace("file", "path"))
        return files, "no column 'file'"
    if kind == "pickle":
        np.savez(tmp_path / "bad.npz", x=np.array([{}], dtype=object))
        return tmp_path / "bad.npz", "no npz file of arrays"
    if kind == "floats":
        np.savez(tmp_path / "bad.npz", x=np.zeros((2, 4, 4, 3)))
        return tmp_path / "bad.npz", "needs images as x, uint8"
    (tmp_path / "empty").mkdir()
    return tmp_path / "empty", "no image in"


KINDS = [
    "size", "cut short", "no image", "missing", "empty mask", "JPEG", "transparent", "label", "column", "pickle",
    "floats", "empty",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_bad_data_say_what_is_wrong(model, files, tmp_path, kind):
    path, said = bad(tmp_path, files, kind)
    with pytest.raises(DataError, match=re.escape(said)) as caught:
        Run(of_table(path), model, METHODS, ["ΔA"]).part(0)
    assert "\n" not in str(caught.value)


def test_the_command_says_it_in_one_line(run, folder, files, tmp_path):
    path, said = bad(tmp_path, files, "size")
    code, _, err = run(
        "benchmark", "pixels", "--data", path, "--image", "file", "--mask", "object", "--label", "class", "--model",
        folder, "--out", tmp_path / "out",
    )  # fmt: skip
    assert (code, err.count("\n")) == (2, 1), err
    assert said in err
    assert not OF_PYTHON.search(err)
    code, _, err = run("benchmark", "pixels", "--data", tmp_path, "--out", tmp_path / "text")
    assert (code, err.count("\n")) == (2, 1), err
    assert "pixels asks an image" in err


def test_what_is_not_there_is_asked_for(model, arrays, tmp_path):
    flat = tmp_path / "flat"
    flat.mkdir()
    for i in range(4):
        Image.new("RGB", (20, 20), (i, 50, 90)).save(flat / f"{i}.png")
    with pytest.raises(DataError, match="has no mask, which mIoU needs"):
        Run(find("pixels")(data=flat), model, METHODS, ["mIoU"]).part(0)
    with pytest.raises(DataError, match="has no label, which is to be explained"):
        Run(find("pixels")(data=flat, target="label"), model, METHODS, ["ΔA"]).part(0)
    with pytest.raises(DataError, match="has no label, which a mosaic needs"):
        Run(find("mosaics")(data=flat), model, METHODS).part(0)
    few = tmp_path / "few.npz"
    np.savez(few, x=np.zeros((4, 8, 8, 3), np.uint8), y=np.array([0, 1, 0, 1]))
    with pytest.raises(InputError, match="2 classes and a mosaic needs 4"):
        Run(find("mosaics")(data=few), model, METHODS).part(0)
    with pytest.raises(ModelError, match="no image processor"):
        Run(find("pixels")(data=flat), BoundModel(vit()), METHODS)
    with pytest.raises(ModelError, match="asks a"):
        Run(find("pixels")(data=flat), Spec(dtype="float32").build(), METHODS)


def test_folders_are_labels(model, tmp_path):
    for name in ("c1", "c3"):
        (tmp_path / "set" / name).mkdir(parents=True)
        Image.new("RGB", (20, 20), (90, 50, 90)).save(tmp_path / "set" / name / "one.png")
    run = Run(find("pixels")(data=tmp_path / "set", target="label"), model, METHODS, ["ΔA"])
    assert {sample.picture.id: sample.label for sample in run.samples.kept} == {"c1/one.png": 1, "c3/one.png": 3}
    assert {row["explained"] for row in run.part(0).to_pylist()} == {"logit of 'c1'", "logit of 'c3'"}


def test_linked_folders_are_read_and_no_circle(model, tmp_path):
    (tmp_path / "away").mkdir()
    (tmp_path / "set" / "c1").mkdir(parents=True)
    for folder in (tmp_path / "away", tmp_path / "set" / "c1"):
        Image.new("RGB", (20, 20), (90, 50, 90)).save(folder / "one.png")
    (tmp_path / "set" / "c3").symlink_to(tmp_path / "away", target_is_directory=True)
    (tmp_path / "set" / "c1" / "again").symlink_to(tmp_path / "set", target_is_directory=True)
    run = Run(find("pixels")(data=tmp_path / "set", target="label"), model, METHODS, ["ΔA"])
    assert {sample.picture.id: sample.label for sample in run.samples.kept} == {"c1/one.png": 1, "c3/one.png": 3}


def test_labels_are_names_or_numbers_and_not_some_of_both(arrays, tmp_path):
    """Of classes called "1" to "5" the labels 0 to 4 were those of 0, 0, 1, 2, 3."""
    module = vit().double()
    module.config.id2label = {i: str(i + 1) for i in range(CLASSES)}
    module.config.label2id = {name: i for i, name in module.config.id2label.items()}
    named = BoundModel(module, processor())
    for y, right in ((np.arange(1, CLASSES + 1), True), (np.arange(CLASSES), False)):
        np.savez(tmp_path / "named.npz", x=np.zeros((CLASSES, 8, 8, 3), np.uint8), y=y)
        for name in ("pixels", "mosaics"):
            run = Run(find(name)(data=tmp_path / "named.npz"), named, METHODS)
            if not right:
                with pytest.raises(DataError, match=r"npz:1 has the label '0', .* '\d', which is the name of class \d"):
                    run.samples  # noqa: B018
            elif name == "pixels":
                assert sorted(each.label for each in run.samples.kept) == list(range(CLASSES))


def test_some_of_the_images_are_a_sample(model, tmp_path):
    """Of data that are sorted by class too, and always the same."""
    x = np.zeros((50, 8, 8, 3), np.uint8)
    np.savez(tmp_path / "sorted.npz", x=x, y=np.repeat(np.arange(5), 10))
    runs = [Run(find("pixels")(data=tmp_path / "sorted.npz", limit=n), model, METHODS) for n in (20, 20, 10)]
    labels = [[sample.label for sample in each.samples.kept] for each in runs]
    assert set(labels[0]) == set(range(5))
    assert labels[0] == labels[1]
    assert labels[2] == labels[0][:10]
    last = Run(find("pixels")(data=tmp_path / "sorted.npz", limit=20, last=5), model, METHODS)
    assert [sample.label for sample in last.samples.kept] == labels[0][15:]


def test_a_convolutional_network_has_pixels_and_no_patches(arrays):
    config = tf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=CLASSES, layer_type="basic"
    )  # fmt: skip
    torch.manual_seed(0)
    model = BoundModel(tf.ResNetForImageClassification(config).eval(), processor(32))
    with pytest.raises(ModelError, match="does not cut images into patches; cover --cells pixels instead"):
        Run(find("pixels")(data=arrays, limit=1), model, ["gradient-x-input"], ["ΔA"]).part(0)
    run = Run(find("pixels")(data=arrays, limit=1, cells="pixels"), model, ["gradient-x-input"], ["ΔA"])
    (row,) = run.part(0).to_pylist()
    assert row["grid"] == [32, 32, 1, 1]


def test_labels_of_one_score_are_scores_and_refuse_nothing(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 255, (2, SIDE, SIDE, 3), dtype=np.uint8)
    np.savez(tmp_path / "scores.npz", x=pixels, y=np.array([0.5, 4.0]))
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "num_labels": 1}
    one = tf.ViTForImageClassification(tf.ViTConfig(image_size=SIDE, patch_size=PATCH, **small)).eval()
    run = Run(find("pixels")(tmp_path / "scores.npz"), BoundModel(one, processor()), ["attnlrp"], ["ΔA"])
    rows = run.part(0).to_pylist()
    assert [(row["label"], row["correct"]) for row in rows] == [(None, None)] * 2


def test_a_method_of_tokens_alone_is_refused_by_name(model, arrays):
    @dataclass(frozen=True)
    class Tokens(Method):
        name: str = "of-tokens"
        tasks = frozenset({Task.IMAGE_CLASSIFICATION})

        def attribute(self, model, questions, *, ledger=False):
            rows = [questions.row_of(i) for i in range(len(questions))]
            return Found(model.ask(questions), tuple(torch.ones(sum(row.lengths)) for row in rows))

    with pytest.raises(InputError, match="of-tokens found no relevance of pixels or patches"):
        Run(find("pixels")(arrays, limit=2), model, [Tokens()], ["ΔA"]).part(0)


def test_the_spec_makes_the_same_rows(folder, arrays):
    run = Run(find("pixels")(data=arrays, limit=2), Spec(str(folder)).build(), METHODS, ["ΔA", "mIoU"])
    again = Run.from_spec(json.loads(json.dumps(run.spec)))
    assert again.part(0).equals(run.part(0))
