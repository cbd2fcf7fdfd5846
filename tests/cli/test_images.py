"""``lrpx explain --image``."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers as tf

from lrpx import Attribution, Attributions, Explainer
from lrpx.cli._explain import show
from tests.pictures import SIZES, build

pil = pytest.importorskip("PIL.Image", reason="Pillow is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("images")
    pixels = np.random.default_rng(0).integers(0, 255, (24, 20, 3), dtype=np.uint8)
    pil.fromarray(pixels).save(found / "cat.png")
    (found / "cut.png").write_bytes((found / "cat.png").read_bytes()[:200])
    (found / "text.png").write_text("hello")
    processor = tf.ViTImageProcessor(size={"height": 16, "width": 16})
    for name, size in (("vit", 16), ("other size", 24)):
        build("vit").float().save_pretrained(found / name)
        processor.size = {"height": size, "width": size}
        processor.save_pretrained(found / name)
    torch.manual_seed(0)
    config = tf.BeitConfig(**SIZES | {"num_hidden_layers": 4}, out_indices=[0, 1, 2, 3])
    tf.BeitForSemanticSegmentation(config).eval().save_pretrained(found / "maps")
    processor.size = {"height": 16, "width": 16}
    processor.save_pretrained(found / "maps")
    return found


def test_an_image_on_the_command_line(run, folder, tmp_path):
    code, out, err = run(
        "explain", "--image", folder / "cat.png", "--model", folder / "vit", "--target", "LABEL_1",
        "--method", "attnlrp-vit",
        "--ledger", "--html", tmp_path / "a.html", "--json", tmp_path / "a.json", "--save", tmp_path / "a",
    )  # fmt: skip
    assert (code, err) == (0, "")
    assert "logit of 'LABEL_1'" in out
    assert "patches: sum" in out
    assert "class token" in out
    found = Attribution.load(tmp_path / "a")
    expected = Explainer.from_pretrained(folder / "vit")(
        folder / "cat.png", "LABEL_1", method="attnlrp-vit", ledger=True
    )
    assert found == expected
    written = json.loads((tmp_path / "a.json").read_text())
    assert np.allclose(written["parts"]["patches"]["values"], expected.parts["patches"].values)
    page = (tmp_path / "a.html").read_text()
    assert page.count('href="data:image/png;base64,') == 5  # the image, and two layers over it
    assert "img-src data:" in page


def tiny_clip():
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    texts = small | {"vocab_size": 20, "max_position_embeddings": 8, "eos_token_id": 19, "pad_token_id": 0}
    images = small | {"image_size": 16, "patch_size": 8}
    return tf.CLIPModel(tf.CLIPConfig(text_config=texts, vision_config=images, projection_dim=8)).eval()


def test_the_rest_of_an_image_and_a_text_is_what_neither_has(capsys):
    given = {"input_ids": torch.tensor([[5, 6, 19]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)}
    a = Explainer(tiny_clip(), None)(given | {"pixel_values": torch.randn(1, 3, 16, 16)})
    missing = a.explained.value - float(a.relevance.sum()) - float(a.by_pixel().sum())
    assert abs(float(a.relevance.sum())) > 0.01 * abs(missing)
    show([a])
    out = " ".join(capsys.readouterr().out.split())
    assert f"the other {missing:+.4g} (" in out
    assert ") came from no token or pixel, but from positions" in out


def test_the_words_of_a_text_beside_an_image_are_shown(capsys):
    given = {"input_ids": torch.tensor([[5, 6, 19]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)}
    a = Explainer(tiny_clip(), None)(given | {"pixel_values": torch.randn(1, 3, 16, 16)}).spans([(0, 2)])
    assert "#5 #6[" in str(a)
    assert "image of" not in repr(a)
    show([a])
    out = " ".join(capsys.readouterr().out.split())
    assert "#5 #6[" in out
    assert "patches: sum" in out
    missing = a.explained.value - float(a.relevance.sum()) - float(a.by_pixel().sum())
    assert f"the other {missing:+.4g} (" in out
    for page in (a.to_html(), Attributions([a, a]).to_html()):
        assert "#5 #6" in page
    show([a, a])
    assert "#5 #6[" in capsys.readouterr().out


def test_an_image_and_a_text_are_both_told_of_everywhere(capsys):
    mpl = pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    given = {"input_ids": torch.tensor([[5, 6, 19]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)}
    a = Explainer(tiny_clip(), None)(given | {"pixel_values": torch.randn(1, 3, 16, 16)})
    patches = f"{float(a.parts['patches'].values.sum()):+.4g}"
    assert f"image of 16 × 16 pixels, patches sum to {patches}; strongest row" in str(a)
    assert "; text: #5[" in str(a)
    show([a, a])
    out = " ".join(capsys.readouterr().out.split())
    assert out.count(f"patches: sum {patches}") == 2
    assert out.count(f"text sum {float(a.relevance.sum()):+.4g}") == 2
    for pictured, count in ((a, 1), (Attributions([a, a, a.spans([(0, 2)])]), 2)):
        drawn = pictured.to_figure()
        texts = [each.get_text() for each in drawn.findobj(mpl.text.Text)]
        assert texts.count("#5") == count
        assert texts.count("#19") == len(Attributions([pictured]).flat())
        assert sum(each.get_position()[1] < 0 for each in drawn.findobj(mpl.text.Text)) == 0
        pictured.to_png()


def test_methods_side_by_side_and_a_cell(run, folder):
    code, out, err = run(
        "explain", "--image", folder / "cat.png", "--model", folder / "vit", "--method", "lrp", "--method", "rollout"
    )
    assert (code, err) == (0, "")
    assert out.count("patches: sum") == 2
    code, out, err = run(
        "explain", "--image", folder / "cat.png", "--model", folder / "maps", "--cell", "2,-1", "--target", "LABEL_2"
    )
    assert (code, err) == (0, "")
    assert "logit of 'LABEL_2' at row 2, column 15" in out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--image", "cut.png", "--model", "vit"], "a file that holds no whole image"),
        (["--image", "text.png", "--model", "vit"], "a file that holds no image; pass"),
        (["--image", "none.png", "--model", "vit"], "No such file or directory; name another file"),
        (["--image", "cat.png", "--model", "other size"], "cannot take pixels of 3 × 24 × 24"),
        (["--image", "cat.png", "--model", "vit", "--target", "dog"], "there is no class 'dog'; pass one of 'LABEL_0'"),
        (["--image", "cat.png"], "--image needs a model of images"),
        (["--image", "cat.png", "--model", "vit", "--cell", "1,2"], "which makes no map; leave --cell out"),
        (["--image", "cat.png", "--model", "maps", "--cell", "1"], "pass a row and a column, such as --cell 3,4"),
        (["--image", "cat.png", "--model", "maps", "--cell", "99,0"], "row 99 is outside the map"),
        (["a text", "--image", "cat.png", "--model", "vit"], "which takes an image alone; leave the text out"),
        (["a text", "--model", "vit"], "is an image classifier; pass an image with --image"),
        (["--cell", "1,2", "a text"], "pass --image, too"),
        (["--image", "cat.png", "--words", "--model", "vit"], "--image and --words exclude each other"),
        (["--image", "cat.png", "--model", "vit", "--method", "alti-logit"], "alti-logit does not serve"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_one_line(run, folder, arguments, told, monkeypatch):
    monkeypatch.chdir(folder)
    code, out, err = run("explain", *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert told in err


def test_a_model_of_texts_reads_no_image(run, folder, tmp_path):
    from tests.reference import models

    models.tiny_gpt2().save_pretrained(tmp_path)
    code, _, err = run("explain", "--image", folder / "cat.png", "--model", tmp_path)
    assert code == 2
    assert "GPT2LMHeadModel is a causal language model, which reads no images; leave --image out" in err
