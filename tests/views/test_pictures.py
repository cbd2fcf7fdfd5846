"""Pictures of images: HTML, PNG, SVG and blocks in a terminal, from one result."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from lrpx import Attributions, Explainer
from lrpx._views.canvas import canvas, png
from lrpx._views.colour import colour
from lrpx.errors import ResultError
from tests.pictures import build, image

pil = pytest.importorskip("PIL.Image", reason="Pillow is not installed")


@pytest.fixture(scope="module")
def found():
    return Explainer(build("vit"))(image(), 1, method="attnlrp-vit", ledger=True)


@pytest.fixture(scope="module")
def without_patches():
    return Explainer(build("resnet"))(image(), 1)


def drawn(page):
    uris = re.findall(r'href="data:image/png;base64,([^"]+)"', page)
    return [np.asarray(pil.open(io.BytesIO(base64.b64decode(uri)))) for uri in uris]


@pytest.mark.parametrize("channels", [3, 4])
def test_our_own_png_is_one(channels):
    pixels = torch.randint(0, 256, (7, 5, channels), dtype=torch.uint8)
    assert np.array_equal(np.asarray(pil.open(io.BytesIO(png(pixels)))), pixels.numpy())


def test_the_colours_say_what_the_numbers_do(found):
    shown = canvas(found)
    patches = found.parts["patches"].values.clone()
    layer = shown.layers[0]
    assert [each.name for each in shown.layers] == ["patches", "pixels"]
    assert layer.total == pytest.approx(float(patches.sum()), abs=1e-9)
    strongest = int(patches.abs().argmax())
    row, column = divmod(strongest, 4)
    sign = 1.0 if patches[row, column] > 0 else -1.0
    heat = layer.heat[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
    assert (heat[..., 3] == 255).all() or layer.limit < float(patches.abs().max())
    assert tuple(heat[0, 0, :3].tolist()) == colour(sign)
    assert layer.strongest(1)[0].place == f"row {row}, column {column}"
    none = replace(found, parts=type(found.parts)(_zeros(part) for part in found.parts.values()))
    assert (canvas(none).layers[0].heat[..., 3] == 0).all()
    assert torch.equal(canvas(none).over(canvas(none).layers[0]), canvas(none).pale)


def _zeros(part):
    return type(part)(part.name, torch.zeros_like(part.values.clone()), part.axes)


def test_a_page(found, without_patches):
    page = found.to_html()
    pictures = drawn(page)
    assert [each.shape for each in pictures] == [(16, 16, 3), (16, 16, 3), (16, 16, 4), (16, 16, 3), (16, 16, 4)]
    assert np.array_equal(pictures[0], found.image.numpy())
    assert page.count('<rect class="lrpx-cellbox"') == 16 + 16 * 16
    assert "<title>row 0, column 0: " in page
    assert "img-src data:" in page
    assert "<script" not in page
    assert "Strongest patches" in page
    assert len(drawn(without_patches.to_html())) == 3
    assert "img-src" not in Explainer.from_pretrained()("The doors").to_html()
    assert found._repr_html_()


def test_hostile_names_are_escaped(found):
    hostile = replace(found, explained=replace(found.explained, description="<script>alert(1)</script>"))
    for page in (hostile.to_html(), Attributions([hostile, found]).to_html(), hostile._repr_html_()):
        assert "<script" not in page


def test_the_completeness_error_is_told_beside_every_image(found):
    (by_ledger, error), (of_patches, alone) = canvas(found).incomplete
    assert (by_ledger, of_patches) == ("by the ledger", "of the patches alone")
    assert error < 1e-9  # float64
    total, value = float(found.parts["patches"].values.sum()), found.explained.value
    assert alone == pytest.approx(abs(value - total) / (abs(value) + abs(total)), abs=1e-12)
    assert alone > 0.01
    plain, rollout = (Explainer(build("vit"))(image(), 1, method=name) for name in ("lrp", "rollout"))
    assert [name for name, _ in canvas(plain).incomplete] == ["of the patches alone"]
    assert canvas(rollout).incomplete == ()  # which is in no units of the value
    assert found.to_html().count("Completeness error") == 1
    assert Attributions([found, plain, rollout]).to_html().count("Completeness error") == 2


def test_methods_side_by_side(found):
    other = Explainer(build("vit"))(image(), 1, method="rollout")
    elsewhere = Explainer(build("vit"))(image(1), 1, method="rollout")
    page = Attributions([found, other, elsewhere]).to_html()
    assert page.count('class="lrpx-pics lrpx-many"') == 2  # one for each image
    assert len(drawn(page)) == (1 + 2 + 2) + (1 + 2)


def test_figures(found, without_patches):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    content = np.asarray(pil.open(io.BytesIO(found.to_png(width=4))).convert("RGB"))
    assert content.shape[1] == 800
    strong = np.array(colour(1.0))
    assert (np.abs(content.astype(int) - strong).sum(-1) < 12).any()  # the red end is in it
    assert found.to_svg().startswith("<?xml")
    assert found.to_png() == found.to_png()
    many = Attributions([found, Explainer(build("vit"))(image(), 1, method="lrp"), without_patches])
    many.to_png()
    hostile = replace(found, explained=replace(found.explained, description="$x_{" + "y" * 300))
    hostile.to_png()
    with pytest.raises(ResultError, match="some results are of images and some of texts"):
        Attributions([found, Explainer.from_pretrained()("The doors")]).to_png()
    with pytest.raises(ResultError, match=r"an image is no text to be set in LaTeX; use to_png"):
        found.to_latex()


def test_beside_a_picture_no_number_is_cut_and_none_beyond_the_colours_is_left_out(found):
    """At four in a row `±0.003608  sum +0.02309` read `±0.003608  sum +0.0…`; and ±0.01 stood beside a patch of 5."""
    text = pytest.importorskip("matplotlib.text", reason="matplotlib is not installed")
    patches = found.parts["patches"].values.clone().fill_(0.0034567)
    patches[1, 3] = 5.0
    rest = (part for name, part in found.parts.items() if name not in ("patches", "pixels"))
    sunk = replace(found, parts=type(found.parts)([*rest, replaced(found.parts["patches"], patches)]))
    four = Attributions([sunk, *(made_by(found, method) for method in ("one", "two", "three"))])
    drawn = [each.get_text() for each in four.to_figure().findobj(text.Text)]
    assert {"±0.003457", "sum +5.052", "largest +5, beyond"} <= set(drawn)
    assert "row 1, column 3 alone has +5, beyond the colours" in four.to_html()
    for line in four:
        sums = float(line.parts["patches"].values.sum())
        assert f"sum {sums:+.4g}".replace("-", "−") in drawn


def replaced(part, values):
    return type(part)(part.name, values, part.axes)


def made_by(a, method):
    return replace(a, provenance=replace(a.provenance, method=method))


def told(result, **how):
    file = io.StringIO()
    Console(file=file, width=60, **how).print(result)
    return file.getvalue()


def test_blocks_in_a_terminal(found, without_patches):
    coloured = told(found, force_terminal=True, color_system="truecolor")
    rows = [line for line in coloured.splitlines() if "▀" in line]
    assert len(rows) == 8
    assert all(row.count("▀") == 32 for row in rows)
    assert "where the value came from" in coloured
    plain = told(found, color_system=None)
    assert "▀" not in plain
    assert "patches: sum" in plain
    assert "pixels: sum" in told(without_patches, color_system=None)
    both = told(Attributions([found, found]), force_terminal=True, color_system="256")
    assert both.count("patches: sum") == 2
    assert str(found).startswith("logit of 'LABEL_1' = ")
    assert "image of 16 × 16 pixels" in str(found)
    assert "image of 16 × 16 pixels" in repr(found)
