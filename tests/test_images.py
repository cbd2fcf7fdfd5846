"""An Explainer of images: what it takes, what it gives, and for which models."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import given as of
from hypothesis import settings
from hypothesis import strategies as st

import lrpx
from lrpx import ATTNLRP, LRP, Attribution, Cell, Epsilon, Explainer, Gamma, Task
from lrpx._images import Patches, as_shown
from lrpx.coverage._classes import choose
from lrpx.coverage._tiny import tiny_model
from lrpx.errors import InputError, MethodError, ModelError, ResultError, TargetError
from lrpx.recipes import ATTNLRP_VIT, LRP_VIT
from tests import tiny
from tests.families.without_torchvision import imported
from tests.pictures import BUILT, OwnViT, build, image

PATCHED = [name for name in BUILT if name != "resnet"]


def near(one, other, atol=1e-9):
    torch.testing.assert_close(one.clone(), other.clone(), rtol=0, atol=atol)


# ------------------------------------------------------------------------------- what comes out


@pytest.mark.parametrize("name", BUILT)
def test_every_model_alone_in_a_batch_and_with_a_ledger(name):
    model = build(name)
    images = torch.stack([image(0), image(1)])
    with torch.no_grad():
        logits = model(pixel_values=images).logits
    explain = Explainer(model)
    for method in ("attnlrp", "lrp", "attnlrp-vit", "lrp-vit"):
        many = explain(images, 2, method=method)
        for i, found in enumerate(many):
            alone = explain(images[i], 2, method=method, ledger=True)
            assert alone.explained.value == pytest.approx(float(logits[i, 2]), abs=1e-12)
            assert alone.ledger.closes(1e-9)
            assert set(found.parts) == set(alone.parts)
            for part in found.parts:
                near(found.parts[part].values, alone.parts[part].values)
            kinds = alone.ledger.by_kind()
            sources = {"inputs": "pixels", "class token": "class token", "positions": "positions"}
            for kind, part in sources.items():
                sums = float(alone.parts[part].values.sum()) if part in alone.parts else 0.0
                if not (kind == "positions" and name in ("beit", "swin")):  # which have relative ones in their scores
                    assert kinds.get(kind, 0.0) == pytest.approx(sums, abs=1e-9)
            if name == "resnet":
                assert "patches" not in found.parts
                assert found.tokens == ()
                continue
            rows, columns = found.parts["patches"].shape.values()
            size = 16 // rows
            assert (rows, columns, found.patch) == ((8, 8, (2, 2)) if name == "swin" else (4, 4, (4, 4)))
            blocks = found.parts["pixels"].values.clone().sum(0).reshape(rows, size, columns, size).sum((1, 3))
            near(found.parts["patches"].values, blocks)
            near(found.relevance, blocks.flatten())
            assert found.tokens[1] == "0,1"
            near(found.by_pixel(), found.parts["pixels"].values.clone().sum(0))
    assert not any(p.grad is not None for p in model.parameters())


TOKENS = {"deit": 2, "registers": 3, "vit": 1, "dinov2": 1, "beit": 1, "clip": 1}


@pytest.mark.parametrize("name", BUILT)
def test_class_tokens_and_positions_are_sources(name):
    found = Explainer(build(name))(image())
    assert ("class token" in found.parts) == (name in TOKENS)
    if name in TOKENS:
        assert found.parts["class token"].shape == {"learned token": TOKENS[name]}
    positions = {"vit": 17, "deit": 18, "dinov2": 17, "registers": 17, "clip": 17, "siglip": 16}
    assert ("positions" in found.parts) == (name in positions)
    if name in positions:
        assert found.parts["positions"].shape == {"place": positions[name]}


def test_positions_that_are_interpolated_are_positions():
    found = Explainer(build("dinov2"))(image(size=24), 1, ledger=True)
    assert found.ledger.closes(1e-9)
    positions = float(found.parts["positions"].values.sum())
    assert found.ledger.by_kind()["positions"] == pytest.approx(positions, abs=1e-9)
    assert abs(positions) > 1e-3
    assert "constants" not in found.ledger.by_kind()


def test_a_batch_of_images_of_two_sizes():
    model = build("resnet")
    given = [image(0), image(1, size=24), image(2)]
    many = Explainer(model)(given, 1)
    for each, found in zip(given, many, strict=True):
        near(found.by_pixel(), Explainer(model)(each, 1).by_pixel())


def test_an_image_that_a_processor_makes_a_film_of_is_refused():
    """The frames of a film, as a list, would be films of one frame each."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = tf.TimesformerConfig(**sizes, image_size=16, patch_size=8, num_frames=3, num_labels=3)
    torch.manual_seed(0)
    model = tf.TimesformerForVideoClassification(config).eval()
    side = {"height": 16, "width": 16}
    processor = tf.VideoMAEImageProcessorPil(size={"shortest_edge": 16}, crop_size=side)
    frames = [np.random.default_rng(i).integers(0, 256, (18, 20, 3), dtype=np.uint8) for i in range(3)]
    explain = Explainer(model, processor, task=Task.IMAGE_CLASSIFICATION)
    made = processor(frames, return_tensors="pt")
    expected = model(**made).logits[0, 1].item()
    assert explain(made, 1).explained.value == pytest.approx(expected, abs=1e-5)
    for given in (frames, np.stack(frames), frames[0]):
        with pytest.raises(InputError, match="makes a film of one frame of an image; pass what it returns of all"):
            explain(given, 1)


def test_several_targets_and_a_contrast():
    explain = Explainer(build("vit"))
    first, second, difference = (explain(image(), *asked) for asked in ((0,), (2,), (0, 2)))
    near(difference.relevance, first.relevance.clone() - second.relevance.clone())
    assert [a.explained.value for a in explain(image(), [0, 2])] == [first.explained.value, second.explained.value]


def test_a_result_as_a_file(tmp_path):
    found = Explainer(build("vit"))(image(), ledger=True)
    found.save(tmp_path / "a")
    read = Attribution.load(tmp_path / "a")
    assert read == found
    assert torch.equal(read.image, found.image)
    assert read != replace(found, image=255 - found.image.clone())
    assert read != replace(found, image=None)
    found.to_dict()
    with pytest.raises(ResultError):
        found.image[0] = 0
    with pytest.raises(ResultError, match="does not fit an image"):
        replace(found, image=found.image[:8].clone())
    with pytest.raises(ResultError, match="the image is no tensor"):
        replace(found, image=found.image.clone().float())
    with pytest.raises(ResultError, match="of no image"):
        Explainer.from_pretrained()("The doors").by_pixel()


# ----------------------------------------------------------------------------- which patches


@pytest.mark.parametrize("by", ["reshape", "unfold", "conv"])
def test_patches_of_a_model_of_ones_own(by):
    model = OwnViT(by).eval().double()
    explain = Explainer(model, task=Task.IMAGE_CLASSIFICATION)
    found = explain(image(), 1, method="attnlrp-vit", ledger=True)
    assert found.parts["patches"].shape == {"row": 4, "column": 4}
    assert found.patch == (4, 4)
    assert found.ledger.closes(1e-9)
    assert {"class token", "positions"} <= set(found.parts)
    assert sum(explain(image(), 1, method="rollout").relevance.tolist()) < 1


class Stem(torch.nn.Module):
    """Patches by a convolution of any kind."""

    def __init__(self, **how):
        super().__init__()
        self.conv, self.head = torch.nn.Conv2d(3, 4, **how), torch.nn.LazyLinear(2)

    def forward(self, x):
        return self.head(self.conv(x).flatten(1))


@pytest.mark.parametrize(
    ("how", "grid"),
    [
        ({"kernel_size": 4, "stride": 4}, Patches(4, 4, 4, 4)),
        ({"kernel_size": (4, 2), "stride": (4, 2)}, Patches(4, 8, 4, 2)),
        ({"kernel_size": 5, "stride": 5}, Patches(3, 3, 5, 5)),  # one row and column are left over
        ({"kernel_size": 3, "stride": 2}, None),
        ({"kernel_size": 4, "stride": 4, "padding": 2}, None),
        ({"kernel_size": 1, "stride": 1}, None),
        ({"kernel_size": 16, "stride": 16}, None),
        ({"kernel_size": 2, "stride": 4}, None),
    ],
)
def test_which_convolutions_make_patches(how, grid):
    model = Stem(**how).eval().double()
    with torch.no_grad():
        model(image()[None])
    found = Explainer(model, task=Task.IMAGE_CLASSIFICATION)(image())
    assert found.patch == (None if grid is None else (grid.height, grid.width))
    if grid is not None:
        assert found.parts["patches"].shape == {"row": grid.rows, "column": grid.columns}
        near(found.parts["patches"].values, grid.summed(found.parts["pixels"].values.clone()))


class Strips(torch.nn.Module):
    """Patches by a convolution that takes one part of the image after another, or the first alone."""

    def __init__(self, dim, parts):
        super().__init__()
        self.conv, self.head = torch.nn.Conv2d(3, 4, 4, 4), torch.nn.Linear(32 * parts, 2)
        self.dim, self.parts = dim, parts

    def forward(self, x):
        parts = x.split(8, self.dim)[: self.parts]
        return self.head(torch.cat([self.conv(part) for part in parts], self.dim).flatten(1))


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize("parts", [1, 2])
def test_patches_of_a_part_of_the_image_are_all_where_the_rest_is_not_read(dim, parts):
    found = Explainer(Strips(dim, parts).eval().double(), task=Task.IMAGE_CLASSIFICATION)(image())
    assert found.patch == ((4, 4) if parts == 1 else None)
    assert ("patches" in found.parts) == (parts == 1)


class Scales(torch.nn.Module):
    """Patches of 5 × 5 pixels, which leave a row and a column over, and the whole image by other operations."""

    def __init__(self, how):
        super().__init__()
        self.large, self.small = torch.nn.Conv2d(3, 4, 5, 5), torch.nn.Conv2d(3, 4, 4, 4)
        self.head, self.how = torch.nn.Linear(36 + 64, 2), how

    def forward(self, x):
        large = self.large(x).flatten(1)
        if self.how == "mean":
            return self.head(torch.cat([large, x.mean(1).flatten(1)[:, -64:]], 1))
        read = x if self.how == "all" else x[..., :15, :15]
        small = self.small(torch.nn.functional.pad(read, (0, 16 - read.shape[-1]) * 2))
        return self.head(torch.cat([large, small.flatten(1)], 1))


@pytest.mark.parametrize(("how", "patch"), [("all", None), ("mean", None), ("inside", (5, 5))])
def test_patches_beside_which_pixels_are_read_are_none(how, patch):
    found = Explainer(Scales(how).eval().double(), task=Task.IMAGE_CLASSIFICATION)(image())
    assert found.patch == patch
    if patch is not None:
        near(found.parts["patches"].values.sum(), found.parts["pixels"].values.sum())


def test_patches_are_found_again_where_the_model_is_another():
    """With a head of zeros nothing tells that pixels beside the patches are read; and patches may be set anew."""
    model = Scales("all").eval().double()
    torch.nn.init.zeros_(model.head.weight)
    explain = Explainer(model, task=Task.IMAGE_CLASSIFICATION)
    assert explain(image()).patch == (5, 5)
    torch.nn.init.normal_(model.head.weight)
    assert explain(image()).patch is None
    model.how = "inside"
    assert explain(image()).patch == (5, 5)


@of(st.integers(1, 5), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_what_is_spread_sums_to_what_it_was(rows, columns, height, width, rest):
    grid = Patches(rows, columns, height, width)
    values = torch.randn(rows, columns, dtype=torch.float64)
    spread = grid.spread(values, rows * height + rest, columns * width + rest)
    near(grid.summed(spread), values)
    assert float(spread.sum()) == pytest.approx(float(values.sum()), abs=1e-12)


# ------------------------------------------------------------------------------ layers' roles


PROJECTIONS = {  # input and output projections, by their names in transformers
    "vit": (["*.q_proj", "*.k_proj", "*.v_proj"], ["*.attention.o_proj"]),
    "deit": (["*.q_proj", "*.k_proj", "*.v_proj"], ["*.attention.o_proj"]),
    "dinov2": (["*.q_proj", "*.k_proj", "*.v_proj"], ["*.attention.o_proj"]),
    "beit": (["*.q_proj", "*.k_proj", "*.v_proj"], ["*.attention.o_proj"]),
    "swin": (["*.q_proj", "*.k_proj", "*.v_proj"], ["*.attention.o_proj"]),
    "clip": (["*.q_proj", "*.k_proj", "*.v_proj"], ["*.self_attn.out_proj"]),
    "siglip": (["*.q_proj", "*.k_proj", "*.v_proj"], ["*.self_attn.out_proj"]),
    "convnext": ([], []),
}
OLDER = {"dinov2": (["*.attention.query", "*.attention.key", "*.attention.value"], ["*.attention.output.dense"])}
"""In transformers before q_proj was everywhere."""


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", [ATTNLRP, LRP], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("name", PROJECTIONS)
def test_projections_are_found_by_what_they_do(name, family, implementation):
    model = build(name)
    if name != "convnext":
        model.set_attn_implementation(implementation)
    rules = {"linear": Gamma(0.3), "convolution": Gamma(0.7)}
    found = replace(family, name="a", **rules, input_projection=Epsilon(0.2), output_projection=Epsilon(0.4))
    by_name = replace(family, name="b", **rules)
    is_older = name in OLDER and not any(path.endswith(".q_proj") for path, _ in model.named_modules())
    for epsilon, paths in zip((0.2, 0.4), (OLDER if is_older else PROJECTIONS)[name], strict=True):
        for path in paths:
            by_name = by_name.at(path, linear=Epsilon(epsilon))
    explain = Explainer(model)
    one, other, plain = (explain(image(), 1, method=each) for each in (found, by_name, replace(family, name="c")))
    scale = float(other.relevance.abs().max())
    near(one.relevance, other.relevance, atol=1e-9 * scale)
    assert float((plain.relevance - other.relevance.clone()).abs().max()) > 1e-4 * scale


def test_projections_of_a_model_of_ones_own():
    explain = Explainer(OwnViT().eval().double(), task=Task.IMAGE_CLASSIFICATION)
    by_name = replace(ATTNLRP, name="b", linear=Gamma(0.05)).at("*.qkv", linear=Epsilon()).at("*.o", linear=Epsilon())
    near(explain(image(), 1, method=ATTNLRP_VIT).relevance, explain(image(), 1, method=by_name).relevance)


@pytest.mark.parametrize("recipe", [ATTNLRP_VIT, LRP_VIT], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("groups", [1, 12], ids=["all channels", "each channel"])
def test_the_layer_before_a_convolution_that_projects_is_no_projection(groups, recipe):
    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.embed, self.o = torch.nn.Linear(4, 12 if groups > 1 else 4), torch.nn.Linear(4, 4)
            self.qkv = torch.nn.Conv1d(self.embed.out_features, 12, 1, groups=groups)
            self.double()

        def forward(self, x):
            q, k, v = self.qkv(self.embed(x).mT).mT.chunk(3, -1)
            return self.o(torch.nn.functional.scaled_dot_product_attention(q, k, v))

    by_name = replace(recipe, name="b", input_projection=None)
    if groups > 1:  # what pools queries, keys and values channel by channel makes none
        by_name = by_name.at("embed", linear=Epsilon())
    x = torch.randn(1, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model, found = Attention(), []
    for each in (recipe, by_name):
        with lrpx.propagate(model, each) as trace:
            trace.explain(model(x)[0, -1].sum())
        found.append(trace.relevance("x"))
    near(*found)


SOFTMAXES = {
    "exponentials": lambda s: s.exp() / s.exp().sum(-1, keepdim=True),
    "logsumexp": lambda s: (s - s.logsumexp(-1, keepdim=True)).exp(),
    "log_softmax": lambda s: s.log_softmax(-1).exp(),
    "its own sum": lambda s: s.softmax(-1) / s.softmax(-1).sum(-1, keepdim=True),
    "divided in place": lambda s: (e := s.exp()).div_(e.sum(-1, keepdim=True)),
}


@pytest.mark.parametrize("recipe", [ATTNLRP_VIT, LRP_VIT], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("spelled", SOFTMAXES)
def test_projections_are_found_however_the_softmax_is_written(spelled, recipe):
    class Attention(torch.nn.Module):
        def __init__(self, softmax):
            super().__init__()
            torch.manual_seed(2)
            self.q, self.k, self.v = (torch.nn.Linear(5, 5, dtype=torch.float64) for _ in "qkv")
            self.softmax = softmax

        def forward(self, x):
            return self.softmax(self.q(x) @ self.k(x).mT) @ self.v(x)

    x = torch.randn(1, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def relevance(softmax):
        model = Attention(softmax)
        with lrpx.propagate(model, recipe) as trace:
            trace.explain(model(x)[0, -1].sum())
        return trace.relevance("x")

    near(relevance(SOFTMAXES[spelled]), relevance(lambda s: s.softmax(-1)))


def by_keys(q, k, v):
    """A key after another: of weights, or of exponentials that are divided last."""
    p = (q @ k.mT).softmax(-1)
    out = 0
    for i in range(k.shape[2]):
        out = out + p[..., i : i + 1] * v[..., i : i + 1, :]
    return out


def in_blocks(q, k, v):
    """By a running maximum and a running sum, as flash attention does."""
    scores = q @ k.mT
    largest = torch.full((*scores.shape[:-1], 1), -torch.inf, dtype=v.dtype)
    total, out = torch.zeros_like(largest), torch.zeros_like(v)
    for start in range(0, 6, 2):
        some = scores[..., start : start + 2]
        new = torch.maximum(largest, some.amax(-1, keepdim=True))
        e, decay = torch.exp(some - new), torch.exp(largest - new)
        total, out = total * decay + e.sum(-1, keepdim=True), out * decay + e @ v[..., start : start + 2, :]
        largest = new
    return out / total


def by_a_column(q, k, v):
    """The denominator is what ones beside the values give."""
    both = (q @ k.mT).exp() @ torch.cat([v, torch.ones_like(v[..., :1])], -1)
    return both[..., :-1] / both[..., -1:]


def by_vectors(q, k, v):
    """Of each query a product of a matrix and a vector, divided last."""
    rows = zip(*(each.flatten(0, 1) for each in ((q @ k.mT).exp(), v)), strict=True)
    return torch.stack([torch.stack([v.mT @ each / each.sum() for each in e]) for e, v in rows]).view_as(v)


ATTENTIONS = {  # of queries, keys and values [B, H, T, d]
    "a product": lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
    "einsum": lambda q, k, v: torch.einsum("bhij,bhjd->bhid", torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1), v),
    "values first": lambda q, k, v: (v.mT @ (k @ q.mT).softmax(-2)).mT,
    "values first in an einsum": lambda q, k, v: torch.einsum("bhjd,bhij->bhid", v, (q @ k.mT).softmax(-1)),
    "a sample after another": lambda q, k, v: torch.stack(
        [(q[i] @ k[i].mT).softmax(-1) @ v[i] for i in range(q.shape[0])]
    ),
    "a head after another": lambda q, k, v: torch.stack(
        [(q[:, i] @ k[:, i].mT).softmax(-1) @ v[:, i] for i in range(q.shape[1])], 1
    ),
    "heads by unbind": lambda q, k, v: torch.stack(((q @ k.mT).softmax(-1) @ v).unbind(1), 1),
    "heads by chunks": lambda q, k, v: torch.cat(((q @ k.mT).softmax(-1) @ v).chunk(2, 1), 1),
    "heads by sizes": lambda q, k, v: torch.cat(((q @ k.mT).softmax(-1) @ v).split([1, 1], 1), 1),
    "rolled": lambda q, k, v: ((q.roll(2, 2) @ k.roll(2, 2).mT).softmax(-1) @ v.roll(2, 2)).roll(-2, 2),
    "flipped": lambda q, k, v: ((q.flip(2) @ k.mT).softmax(-1) @ v).flip(2),
    "gathered": lambda q, k, v: ((q @ k.mT).softmax(-1) @ v).gather(2, torch.arange(6).view(6, 1).expand(v.shape)),
    "repeated": lambda q, k, v: ((q @ k.mT).softmax(-1) @ v).repeat(1, 1, 2, 1)[:, :, :6],
    "added to zeros": lambda q, k, v: torch.baddbmm(
        torch.zeros(1, 1, 1, dtype=v.dtype), (q @ k.mT).softmax(-1).flatten(0, 1), v.flatten(0, 1)
    ).view_as(v),
    "divided last": lambda q, k, v: ((e := (q @ k.mT).exp()) @ v) / e.sum(-1, keepdim=True),
    "values first, divided last": lambda q, k, v: (v.mT @ (e := (q @ k.mT).exp()).mT).mT / e.sum(-1, keepdim=True),
    "by a column of ones": by_a_column,
    "by vectors": by_vectors,
    "in blocks": in_blocks,
    "key by key": by_keys,
    "element by element": lambda q, k, v: ((q @ k.mT).softmax(-1)[..., None] * v[:, :, None]).sum(-2),
    "element by element, divided last": lambda q, k, v: (
        ((e := (q @ k.mT).exp())[..., None] * v[:, :, None]).sum(-2) / e.sum(-1, keepdim=True)
    ),
    "element by element in an einsum": lambda q, k, v: torch.einsum(
        "bhij,bhjd->bhijd", (q @ k.mT).softmax(-1), v
    ).sum(3),
    "element by element, added to a product": lambda q, k, v: torch.addcmul(
        (p := (q @ k.mT).softmax(-1))[..., 1:] @ v[..., 1:, :], p[..., :1], v[..., :1, :]
    ),
    "added by index": lambda q, k, v: torch.zeros_like(v).index_add(
        2, torch.arange(6).repeat_interleave(6), ((q @ k.mT).softmax(-1)[..., None] * v[:, :, None]).flatten(2, 3)
    ),
    "values as a weight": lambda q, k, v: torch.stack(
        [torch.stack([torch.nn.functional.linear((a @ b.T).softmax(-1), c.T) for a, b, c in zip(*each, strict=True)])
         for each in zip(q, k, v, strict=True)]
    ),
}  # fmt: skip


class Projections(torch.nn.Module):
    """The layers into attention and out of it; how it attends is each test's own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.q, self.k, self.v, self.o = (torch.nn.Linear(4, 4, dtype=torch.float64) for _ in "qkvo")

    def heads(self, x):
        return (f(x).unflatten(-1, (2, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))


@pytest.mark.parametrize("recipe", [ATTNLRP_VIT, LRP_VIT], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("spelled", ATTENTIONS)
def test_projections_are_found_however_attention_is_written(spelled, recipe):
    class Attention(Projections):
        def forward(self, x):
            q, k, v = self.heads(x)
            return self.o(ATTENTIONS[spelled](q, k, v).transpose(1, 2).flatten(2))

    x = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def relevance(recipe):
        model = Attention()
        with lrpx.propagate(model, recipe) as trace:
            trace.explain(model(x)[0, -1].sum())
        return trace.relevance("x")

    recipe = replace(recipe, input_projection=Epsilon(0.2), output_projection=Epsilon(0.4))
    by_name = replace(recipe, linear=Epsilon(0.2), input_projection=None, output_projection=None)
    near(relevance(recipe), relevance(by_name.at("o", linear=Epsilon(0.4))))


@pytest.mark.parametrize("recipe", [ATTNLRP_VIT, LRP_VIT], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("spelled", ATTENTIONS)
def test_a_layer_that_gives_keys_and_what_values_are_made_of_is_a_projection(spelled, recipe):
    """Also where weights are constants, so that only the values lead back to it, by way of another layer (DeepSeek)."""

    class Attention(Projections):
        def __init__(self):
            super().__init__()
            self.k = torch.nn.Linear(4, 8, dtype=torch.float64)

        def forward(self, x):
            keys, latent = self.k(x).chunk(2, -1)
            parts = self.q(x), keys, self.v(latent)
            q, k, v = (each.unflatten(-1, (2, 2)).transpose(1, 2) for each in parts)
            return self.o(ATTENTIONS[spelled](q, k, v).transpose(1, 2).flatten(2))

    near(*found_by_name(Attention(), recipe, "qkvo"))


@pytest.mark.parametrize("recipe", [ATTNLRP_VIT, LRP_VIT], ids=lambda recipe: recipe.name)
def test_a_ledger_changes_no_rule_of_a_layer_behind_attention_and_a_constant(recipe):
    """A learned query is added to what attention gives it (V-JEPA 2): a constant, of which a ledger makes a leaf."""

    class Pooled(Projections):
        def __init__(self):
            super().__init__()
            self.query = torch.nn.Parameter(torch.randn(1, 1, 2, 2, dtype=torch.float64))

        def forward(self, x):
            _, k, v = self.heads(x)
            pooled = self.query.mT + (self.query.mT @ k.mT).softmax(-1) @ v
            return self.o(pooled.transpose(1, 2).flatten(2))

    x = torch.randn(1, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model, found = Pooled(), []
    recipe = replace(recipe, output_projection=Epsilon(0.4))
    for ledger in (False, True):
        with lrpx.propagate(model, recipe, ledger=ledger) as trace:
            trace.explain(model(x)[0, -1].sum())
        found.append(trace.relevance("x"))
    near(*found)


GATED = {  # of weights [B, H, Q, K], values [B, H, K, d], and a gate of each query [B, H, Q, 1]
    "weights": lambda p, v, g: (p * g) @ v,
    "weights, gate first": lambda p, v, g: (g * p) @ v,
    "element by element": lambda p, v, g: ((p * g)[..., None] * v[:, :, None]).sum(3),
    "products": lambda p, v, g: (g[..., None] * (p[..., None] * v[:, :, None])).sum(3),
    "einsum of three": lambda p, v, g: torch.einsum("bhij,bhi,bhjd->bhid", p, g[..., 0], v),
    "the largest": lambda p, v, g: g * (p * (p >= p.topk(3).values[..., -1:])) @ v,
    "given": lambda p, v, g: (p @ v) * g,
}


@pytest.mark.parametrize("recipe", [ATTNLRP_VIT, LRP_VIT], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("spelled", GATED)
def test_a_gate_of_attention_weights_is_no_projection(spelled, recipe):
    class Attention(Projections):
        def __init__(self):
            super().__init__()
            self.gate = torch.nn.Linear(4, 2, dtype=torch.float64)

        def forward(self, x):
            q, k, v = self.heads(x)
            gate = torch.sigmoid(self.gate(x)).mT[..., None]
            return self.o(GATED[spelled]((q @ k.mT).softmax(-1), v, gate).transpose(1, 2).flatten(2))

    near(*found_by_name(Attention(), recipe, "qkvo"))


MIXES = {  # of weights [B, H, Q, K] and a matrix
    "linear": lambda p, mix: torch.nn.functional.linear(p.movedim(1, -1), mix).movedim(-1, 1),
    "einsum": lambda p, mix: torch.einsum("bhij,gh->bgij", p, mix),
    "convolution": lambda p, mix: torch.nn.functional.conv2d(p, mix[..., None, None]),
    "normalised": lambda p, mix: torch.nn.functional.layer_norm(p.movedim(1, -1) @ mix, (2,)).movedim(-1, 1),
}


@pytest.mark.parametrize("recipe", [ATTNLRP_VIT, LRP_VIT], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("spelled", MIXES)
def test_heads_whose_weights_are_mixed_are_attention(spelled, recipe):
    class Attention(Projections):
        def __init__(self):
            super().__init__()
            self.mix = torch.nn.Parameter(torch.randn(2, 2, dtype=torch.float64))

        def forward(self, x):
            q, k, v = self.heads(x)
            return self.o((MIXES[spelled]((q @ k.mT).softmax(-1), self.mix) @ v).transpose(1, 2).flatten(2))

    near(*found_by_name(Attention(), recipe, "qkvo"))


@pytest.mark.parametrize("kernel", [1, 3])
def test_queries_and_keys_whose_scores_a_convolution_mixes(kernel):
    class Attention(Projections):
        def __init__(self):
            super().__init__()
            self.mix = torch.nn.Conv2d(2, 2, kernel, padding="same", dtype=torch.float64)

        def forward(self, x):
            q, k, v = self.heads(x)
            return self.o((self.mix(q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))

    near(*found_by_name(Attention(), ATTNLRP_VIT, "qkvo"))


STREAMS = {  # of what attention, and two other layers, have given, and a stream of the model's input
    "of attention": lambda x, given, made, more: given + made,
    "with the input": lambda x, given, made, more: x + given + made,
    "normalised": lambda x, given, made, more: torch.nn.functional.layer_norm(x + given, (4,)) + made,
    "of two": lambda x, given, made, more: x + made + more,
    "of all": lambda x, given, made, more: x + more + given + made,
}


@pytest.mark.parametrize("recipe", [ATTNLRP_VIT, LRP_VIT], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("summed", STREAMS)
def test_a_stream_that_is_pooled_by_scores_is_no_layers(summed, recipe):
    class Pooled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.q, self.k, self.v, self.o, self.up, self.down, self.more, self.after = (
                torch.nn.Linear(4, 4, dtype=torch.float64) for _ in range(8)
            )
            self.score = torch.nn.Linear(4, 1, dtype=torch.float64)

        def forward(self, x):
            given = self.o((self.q(x) @ self.k(x).mT).softmax(-1) @ self.v(x))
            h = STREAMS[summed](x, given, self.down(torch.relu(self.up(given))), self.more(torch.tanh(x)))
            return self.after((self.score(h).softmax(1) * h).sum(1, keepdim=True))

    by_name = replace(recipe, linear=Epsilon(), input_projection=None, output_projection=None)
    for path in ("up", "down", "more"):
        by_name = by_name.at(path, linear=recipe.linear)
    x = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def relevance(recipe):
        model = Pooled()
        with lrpx.propagate(model, recipe) as trace:
            trace.explain(model(x).sum())
        return trace.relevance("x")

    near(relevance(recipe), relevance(by_name))


GIVEN = {  # of what attention gives, [B, T, d]
    "LayerNorm": lambda y: torch.nn.functional.layer_norm(y, (4,)),
    "RMSNorm": lambda y: torch.nn.functional.rms_norm(y, (4,)),
    "GroupNorm": lambda y: torch.nn.functional.group_norm(y.mT, 2).mT,
    "written out": lambda y: (y - y.mean(-1, keepdim=True)) / y.std(-1, keepdim=True),
    "pooled": lambda y: y.mean(1, keepdim=True),
    "summed": lambda y: y.sum(1, keepdim=True),
}


@pytest.mark.parametrize("recipe", [ATTNLRP_VIT, LRP_VIT], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("change", GIVEN)
def test_what_attention_gives_is_that_normalised_and_pooled_too(change, recipe):
    class Attention(Projections):
        def forward(self, x):
            return self.o(GIVEN[change]((self.q(x) @ self.k(x).mT).softmax(-1) @ self.v(x)))

    near(*found_by_name(Attention(), recipe, "qkvo"))


def found_by_name(model, recipe, into_and_out):
    """The relevance under a recipe by place, and under one that names the projections, the last letter the output's."""
    by_name = replace(recipe, input_projection=None, output_projection=None)
    for path in into_and_out[:-1]:
        by_name = by_name.at(path, linear=recipe.input_projection)
    by_name = by_name.at(into_and_out[-1], linear=recipe.output_projection)
    x = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for each in (recipe, by_name):
        with lrpx.propagate(model, each) as trace:
            trace.explain(model(x)[0, -1].sum())
        yield trace.relevance("x")


SCORED = {  # of rows [B, T, d] and a vector, which weighs them
    "by a matrix": lambda h, w: (h @ w[:, None]).mT,
    "by a vector": lambda h, w: (h @ w)[:, None],
    "on the left": lambda h, w: w[None] @ h.mT,
    "einsum": lambda h, w: torch.einsum("btd,d->bt", h, w)[:, None],
    "tensordot": lambda h, w: torch.tensordot(h, w, 1)[:, None],
    "inner": lambda h, w: torch.inner(h, w)[:, None],
    "as many as places": lambda h, w: (h @ (w[:, None] + torch.arange(6))).mT,
    "of a layer": lambda h, w: torch.nn.functional.linear(h, w + torch.arange(6)[:, None]).permute(0, 2, 1),
}


@pytest.mark.parametrize("recipe", [ATTNLRP_VIT, LRP_VIT], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("spelled", SCORED)
def test_a_softmax_over_places_of_what_a_learned_query_scores_is_attention(spelled, recipe):
    class Pooled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(2)
            self.before, self.key, self.after = (torch.nn.Linear(4, 4, dtype=torch.float64) for _ in "vko")
            self.query = torch.nn.Parameter(torch.randn(4, dtype=torch.float64))

        def forward(self, x):
            h = self.before(x)
            return self.after((SCORED[spelled](torch.tanh(self.key(x)), self.query).softmax(-1) @ h)[:, 0])

    x = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def relevance(recipe):
        model = Pooled()
        with lrpx.propagate(model, recipe) as trace:
            trace.explain(model(x).sum())
        return trace.relevance("x")

    recipe = replace(recipe, input_projection=Epsilon(0.2), output_projection=Epsilon(0.4))
    by_name = replace(recipe, linear=Epsilon(0.2), input_projection=None, output_projection=None)
    near(relevance(recipe), relevance(by_name.at("after", linear=Epsilon(0.4))))


@pytest.mark.parametrize("recipe", [ATTNLRP_VIT, LRP_VIT], ids=lambda recipe: recipe.name)
def test_a_learned_query_in_torchs_attention_with_weights_and_without(recipe):
    class Pooled(torch.nn.Module):
        def __init__(self, **how):
            super().__init__()
            torch.manual_seed(2)
            self.attention, self.how = torch.nn.MultiheadAttention(4, 2, batch_first=True, dtype=torch.float64), how
            self.query = torch.nn.Parameter(torch.randn(1, 1, 4, dtype=torch.float64))

        def forward(self, x):
            return self.attention(self.query.expand(len(x), -1, -1), x, x, **self.how)[0][:, 0]

    x = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def relevance(recipe, **how):
        model = Pooled(**how)
        with lrpx.propagate(model, recipe) as trace:
            trace.explain(model(x).sum())
        return trace.relevance("x")

    recipe = replace(recipe, input_projection=Epsilon(0.0), output_projection=Epsilon(0.0))
    expected = relevance(replace(recipe, input_projection=None, output_projection=None, linear=Epsilon(0.0)))
    near(relevance(recipe), expected)
    near(relevance(recipe, need_weights=False), expected)


POOLINGS = {  # of rows [B, T, d] and a mask [B, T]
    "on the left": lambda h, mask: (mask[:, None] @ h).squeeze(1),
    "on the right": lambda h, mask: (h.mT @ mask[..., None]).squeeze(-1),
    "einsum": lambda h, mask: torch.einsum("bt,btd->bd", mask, h),
}


@pytest.mark.parametrize("recipe", [ATTNLRP_VIT, LRP_VIT], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("spelled", POOLINGS)
def test_a_mask_that_pools_is_no_attention(spelled, recipe):
    class Pooled(torch.nn.Module):
        def __init__(self, pool):
            super().__init__()
            torch.manual_seed(2)
            self.before, self.after = (torch.nn.Linear(4, 4, dtype=torch.float64) for _ in "ab")
            self.pool = pool

        def forward(self, x, mask):
            return self.after(self.pool(self.before(x), mask.to(x.dtype)))

    x = torch.randn(2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])

    def relevance(pool):
        model = Pooled(pool)
        with lrpx.propagate(model, replace(recipe, linear=Gamma(0.5))) as trace:
            trace.explain(model(x, mask)[1].sum())
        return trace.relevance("x")

    near(relevance(POOLINGS[spelled]), relevance(lambda h, mask: (h * mask[..., None]).sum(1)))


def test_the_recipes_of_table_4():
    for recipe, family in ((ATTNLRP_VIT, ATTNLRP), (LRP_VIT, LRP)):
        assert recipe.convolution == Gamma(0.25)
        assert recipe.linear == Gamma(0.05)
        assert recipe.input_projection == recipe.output_projection == Epsilon()
        assert recipe.softmax == family.softmax


# ------------------------------------------------------------------------------- what goes in


@pytest.fixture
def processed():
    pytest.importorskip("PIL", reason="Pillow is not installed")
    return Explainer(build("vit").float(), tf.ViTImageProcessor(size={"height": 16, "width": 16}))


@pytest.fixture
def photograph(tmp_path):
    pil = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    pixels = np.random.default_rng(0).integers(0, 255, (40, 30, 3), dtype=np.uint8)
    pil.fromarray(pixels).save(tmp_path / "cat.png")
    return tmp_path / "cat.png"


def test_a_path_a_pil_image_an_array_and_pixels_are_one(processed, photograph):
    from PIL import Image

    opened = Image.open(photograph)
    ready = processed.tokenizer(images=opened, return_tensors="pt")
    found = processed(photograph, 1)
    for given in (str(photograph), opened, np.asarray(opened), ready, ready["pixel_values"], ready["pixel_values"][0]):
        assert processed(given, 1) == found
    many = processed([photograph, opened], 1)
    assert len(many) == 2
    near(many[0].relevance, found.relevance, atol=1e-5)
    shown = np.asarray(opened.resize((16, 16), Image.Resampling.BILINEAR))
    assert np.abs(found.image.numpy().astype(int) - shown).max() <= 2


def test_grey_transparent_and_turned_files_are_read_as_the_model_takes_them(processed, photograph, tmp_path):
    from PIL import Image

    grey = Image.open(photograph).convert("L")
    grey.save(tmp_path / "grey.png")
    near(processed(tmp_path / "grey.png", 1).relevance, processed(grey.convert("RGB"), 1).relevance, atol=1e-6)
    Image.open(photograph).convert("RGBA").save(tmp_path / "clear.png")
    near(processed(tmp_path / "clear.png", 1).relevance, processed(photograph, 1).relevance, atol=1e-6)
    opened = Image.open(photograph)
    exif = opened.getexif()
    exif[0x0112] = 6  # the camera was held upright
    opened.save(tmp_path / "turned.png", exif=exif)
    upright = opened.transpose(Image.Transpose.ROTATE_270)
    near(processed(tmp_path / "turned.png", 1).relevance, processed(upright, 1).relevance, atol=1e-6)
    assert processed(Image.open(tmp_path / "turned.png"), 1) == processed(tmp_path / "turned.png", 1)


def test_sixteen_bits_are_read_as_eight(processed, tmp_path):
    from PIL import Image

    grey = np.random.default_rng(1).integers(0, 256, (40, 30), dtype=np.uint8)
    Image.fromarray(grey).save(tmp_path / "eight.png")
    wanted = processed(tmp_path / "eight.png", 1)
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "sixteen.png")
    Image.fromarray(grey.astype(np.float32)).save(tmp_path / "floats.tiff")
    for name in ("sixteen.png", "floats.tiff"):
        found = processed(tmp_path / name, 1)
        assert found.explained.value == wanted.explained.value
        near(found.relevance, wanted.relevance, atol=0)
    for i, numbers in enumerate((grey.astype(np.int32) * 300, grey.astype(np.float32) / 255, grey - 9.0)):
        Image.fromarray(numbers.astype(np.int32 if not i else np.float32)).save(tmp_path / "odd.tiff")
        with pytest.raises(InputError, match=r"odd.tiff', whose numbers are from .* to .*, and nothing tells"):
            processed(tmp_path / "odd.tiff", 1)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("converts", [False, True])
def test_a_pil_image_of_any_mode_is_read_as_its_file_is(channels, converts, tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = tf.ViTConfig(**sizes, image_size=16, patch_size=4, num_channels=channels)
    processor = tf.CLIPImageProcessorPil(
        size={"height": 16, "width": 16}, do_center_crop=False, do_convert_rgb=converts and channels == 3,
        image_mean=[0.5] * channels, image_std=[0.5] * channels,
    )  # fmt: skip
    explain = Explainer(tf.ViTForImageClassification(config).eval(), processor)
    grey = np.random.default_rng(1).integers(0, 256, (16, 16), dtype=np.uint8)
    palette = image.fromarray(255 - grey).convert("P")
    palette.putpalette([255 - i for i in range(256) for _ in range(3)])
    given = {
        "P": palette,
        "1": image.fromarray(grey > 128),
        "I;16": image.fromarray(grey.astype(np.uint16) * 257),
        "I": image.fromarray(grey.astype(np.int32)),
        "F": image.fromarray(grey.astype(np.float32)),
    }
    for mode, each in given.items():
        assert each.mode == mode
        each.save(tmp_path / "same.tiff")
        found = explain(each, 1)
        assert found == explain(tmp_path / "same.tiff", 1)
        shown = np.where(grey > 128, 255, 0) if mode == "1" else grey
        assert np.array_equal(found.image[..., 0], shown), mode
    for numbers in (grey.astype(np.int32) * 300, grey.astype(np.float32) / 255):
        with pytest.raises(InputError, match=r"the image is of mode ., whose numbers are from .*, and nothing tells"):
            explain(image.fromarray(numbers), 1)


def test_an_array_of_more_than_eight_bits_is_refused(processed, photograph):
    from PIL import Image

    pixels = np.asarray(Image.open(photograph))
    wide = pixels.astype(np.uint16) * 257
    for given in (wide, torch.tensor(wide), wide.astype(np.int64), wide.astype(np.float32), pixels / 127.5 - 1):
        with pytest.raises(InputError, match=r"takes 255 for white; pass whole numbers from 0 to 255, as image // 257"):
            processed(given, 1)
    assert processed(wide // 257, 1) == processed(pixels, 1)
    own = copy.deepcopy(processed.tokenizer)
    own.do_resize, own.rescale_factor = False, 1 / 65535
    assert Explainer(processed.model, own)(wide[:16, :16], 1).image.float().std() > 0


def test_colours_that_a_processor_would_read_as_others_are_refused(processed, photograph):
    from PIL import Image

    opened = Image.open(photograph)
    for mode in ("HSV", "YCbCr"):
        with pytest.raises(InputError, match=rf"of mode {mode}, .*; pass image.convert\('RGB'\)"):
            processed(opened.convert(mode), 1)
    pixels = np.asarray(opened)
    for given in (pixels / 255, (pixels / 255).astype(np.float32), pixels > 128):
        with pytest.raises(InputError, match="divides by 255, as if it were nearly black; pass whole numbers"):
            processed(given, 1)
    near(processed(pixels.astype(np.float64), 1).relevance, processed(opened, 1).relevance, atol=1e-6)


def test_pixels_as_they_are_shown_are_none_as_the_model_takes_them(processed, photograph):
    """What ``ToTensor`` makes was explained as if it were normalised."""
    from PIL import Image

    shown = torch.tensor(np.asarray(Image.open(photograph).resize((16, 16)))).permute(2, 0, 1).float()
    for given in (shown, shown[None], shown / 255):
        with pytest.raises(InputError, match=r"the model's processor normalises it; pass whole numbers from 0 to 255"):
            processed(given, 1)
    meant = processed({"pixel_values": shown[None] / 255}, 1)
    assert meant.parts == Explainer(processed.model)(shown / 255, 1).parts
    ready = processed.tokenizer(images=shown.byte(), return_tensors="pt")["pixel_values"]
    assert processed(ready[0], 1) == processed(shown.byte(), 1)
    scales = copy.deepcopy(processed.tokenizer)  # around 0 already
    scales.image_mean = [0.0, 0.0, 0.0]
    assert Explainer(processed.model, scales)(shown / 255, 1).parts == meant.parts


def test_a_processor_of_timm_says_its_colours_in_a_dictionary():
    """As transformers' TimmWrapperImageProcessor does, which has no other fields."""

    class Reads(tf.BaseImageProcessor):
        data_config = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225), "crop_pct": 0.95}  # noqa: RUF012

    mean, std = (torch.tensor(Reads.data_config[name]).double()[:, None, None] for name in ("mean", "std"))
    shown = torch.arange(80, 80 + 16 * 16 * 3).reshape(16, 16, 3).remainder(97).add(60).to(torch.uint8)
    shares = shown.permute(2, 0, 1).double() / 255
    assert torch.equal(as_shown((shares - mean) / std, Reads()), shown)
    explain = Explainer(build("vit"), Reads())
    with pytest.raises(InputError, match=r"the model's processor normalises it; pass whole numbers from 0 to 255"):
        explain(shares, 1)
    assert torch.equal(explain((shares - mean) / std, 1).image.clone(), shown)


def test_what_is_no_image_says_so(processed, photograph, tmp_path):
    whole = photograph.read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "empty.png").write_bytes(b"")
    for name, told in (("cut", "no whole image"), ("text", "no image"), ("empty", "no image")):
        with pytest.raises(InputError, match=rf"the image is .*{name}.png', a file that holds {told}.*; pass"):
            processed(tmp_path / f"{name}.png")
    for missing in (tmp_path / "none.png", tmp_path, "a text"):
        with pytest.raises(InputError, match=r"the image is .*, and there is no such file; pass pixel_values"):
            processed(missing)
    with pytest.raises(InputError, match=r"cannot take pixels of 3 × 24 × 24 .*; pass an image through"):
        Explainer(build("vit"))(image(size=24))
    with pytest.raises(InputError, match="takes 3 channels, not 1"):
        Explainer(build("vit"))(image(channels=1))
    with pytest.raises(InputError, match="together with the model's processor"):
        Explainer(build("vit"))(photograph)


def test_patches_that_a_processor_cuts_itself_are_refused_by_name():
    pil = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config = tf.Siglip2Config(vision_config={**small, "patch_size": 8, "num_patches": 16}, num_labels=3)
    read = Siglip2ImageProcessorPil(patch_size=8, max_num_patches=16)
    explain = Explainer(tf.Siglip2ForImageClassification(config).eval(), read)
    photo = pil.fromarray(np.random.default_rng(0).integers(0, 255, (48, 64, 3), dtype=np.uint8))
    for given in (photo, read(photo, return_tensors="pt")):
        with pytest.raises(InputError, match=r"cuts images into patches itself.*; .*use lrpx.propagate"):
            explain(given)


def test_patches_that_a_processor_cuts_itself_are_refused_beside_text_too():
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    vision = small | {"model_type": "siglip2_vision_model", "patch_size": 8, "num_patches": 16}
    text = small | {"model_type": "lfm2", "num_key_value_heads": 2, "vocab_size": 40, "layer_types": ["full_attention"]}
    config = tf.Lfm2VlConfig(vision_config=vision, text_config=text, image_token_id=39)
    given = {"input_ids": torch.tensor([[5, 39, 39, 39, 39, 7]]), "attention_mask": torch.ones(1, 6, dtype=torch.int64)}
    given |= {"pixel_values": torch.zeros(1, 16, 192), "pixel_attention_mask": torch.ones(1, 16, dtype=torch.int64)}
    with pytest.raises(InputError, match="cuts images into patches itself, and says in spatial_shapes"):
        Explainer(tf.Lfm2VlForConditionalGeneration(config).eval())(given | {"spatial_shapes": torch.tensor([[4, 4]])})


def test_pixels_that_are_whole_numbers_are_refused_by_name(processed, photograph):
    processed.tokenizer.do_rescale = processed.tokenizer.do_normalize = False
    made = processed.tokenizer(images=np.zeros((16, 16, 3), dtype=np.uint8), return_tensors="pt")
    assert made["pixel_values"].dtype == torch.uint8
    for given in (photograph, made, {"pixel_values": np.zeros((1, 3, 16, 16), dtype=np.int64)}):
        with pytest.raises(InputError, match=r"pixel_values are u?int.*; pass pixel_values.float\(\)"):
            processed(given)


def test_a_module_of_ones_own_that_cannot_take_the_size():
    explain = Explainer(OwnViT("conv").eval().double(), task=Task.IMAGE_CLASSIFICATION)
    with pytest.raises(InputError, match="OwnViT cannot take pixels of 3 × 20 × 20"):
        explain(image(size=20))


def test_colours_in_the_last_dimension_are_refused_by_name():
    class ColoursLast(Stem):
        def forward(self, x):
            return super().forward(x.permute(0, 3, 1, 2))

    class Turned(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, pixels):
            return self.model(pixels.permute(0, 2, 3, 1))

    model = ColoursLast(kernel_size=4, stride=4).eval().double()
    with torch.no_grad():
        model(image().permute(1, 2, 0)[None])
    explain = Explainer(model, task=Task.IMAGE_CLASSIFICATION)
    for given in (image().permute(1, 2, 0), {"x": image().permute(1, 2, 0)[None]}):
        with pytest.raises(InputError, match=r"are 16 × 16 × 3, which is \[rows, columns, channels\].*; pass these"):
            explain(given)
    found = Explainer(Turned(model).eval(), task=Task.IMAGE_CLASSIFICATION)(image())
    assert found.parts["pixels"].shape == {"channel": 3, "row": 16, "column": 16}
    assert found.patch == (4, 4)


def test_two_images_under_a_name_of_ones_own_are_not_one():
    class Own(torch.nn.Sequential):
        def forward(self, colours):
            return super().forward(colours)

    model = Own(torch.nn.Conv2d(3, 4, 4, 4), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(64, 5)).eval()
    explain = Explainer(model, task=Task.IMAGE_CLASSIFICATION)
    two = torch.randn(2, 3, 16, 16)
    with pytest.raises(InputError, match="Own answers 2 inputs where 1 can be told apart; pass a list"):
        explain({"colours": two})
    found = explain([{"colours": two[:1]}, {"colours": two[1:]}])
    assert [a.explained.value for a in found] == pytest.approx(model(two).amax(-1).tolist())


def test_an_error_of_the_models_own_stays_one():
    class Broken(OwnViT):
        def forward(self, x):
            if x.requires_grad:
                raise RuntimeError("mine")
            return super().forward(x)

    with pytest.raises(RuntimeError, match="mine"):
        Explainer(Broken("conv").eval().double(), task=Task.IMAGE_CLASSIFICATION)(image(), method="attnlrp")


def test_pixels_as_shown():
    processor = tf.ViTImageProcessor(
        size={"height": 2, "width": 2}, image_mean=[0.1, 0.2, 0.3], image_std=[0.5, 0.4, 0.3]
    )
    given = np.arange(12, dtype=np.uint8).reshape(2, 2, 3) * 20
    made = processor(images=given, return_tensors="pt")["pixel_values"][0]
    assert np.array_equal(as_shown(made, processor).numpy(), given)
    assert as_shown(torch.randn(1, 4, 5)).shape == (4, 5, 3)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        (tf.MobileViTImageProcessor, {"do_center_crop": False}),  # blue first
        (tf.EfficientNetImageProcessor, {}),  # divided by the deviation twice
        (tf.EfficientNetImageProcessor, {"rescale_factor": 1 / 127.5, "rescale_offset": True, "include_top": False}),
    ],
)
def test_what_other_processors_do_to_colours_is_undone(kind, how):
    size = {"shortest_edge": 2} if kind is tf.MobileViTImageProcessor else {"height": 2, "width": 2}
    processor = kind(size=size, **how)
    given = np.arange(12, dtype=np.uint8).reshape(2, 2, 3) * 20
    made = processor(images=given, return_tensors="pt")["pixel_values"][0]
    assert np.abs(as_shown(made, processor).numpy().astype(int) - given).max() <= 1


# --------------------------------------------------------------------------- maps, and texts


def test_a_cell_of_a_map():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24, "image_size": 16, "patch_size": 4}
    config = tf.BeitConfig(**sizes, num_hidden_layers=4, num_labels=3, initializer_range=0.3, out_indices=[0, 1, 2, 3])
    model = tf.BeitForSemanticSegmentation(config).eval().double()
    explain = Explainer(model)
    assert explain.task is Task.IMAGE_MAP
    with torch.no_grad():
        logits = model(pixel_values=image()[None]).logits[0]
    found = explain(image(), Cell(1, 2, -1), method="lrp", ledger=True)
    assert found.explained.value == pytest.approx(float(logits[1, 2, -1]), abs=1e-12)
    assert found.explained.description == "logit of 'LABEL_1' at row 2, column 15"
    assert found.ledger.closes(1e-8)
    assert explain(image()).explained.value == pytest.approx(float(logits.max()), abs=1e-12)
    best = explain(image(), Cell("LABEL_2"))
    assert best.explained.value == pytest.approx(float(logits[2].max()), abs=1e-12)
    assert best.prediction is None
    for wrong, told in ((Cell(3), "class 3"), (Cell(0, 16), "row 16"), (Cell(0, 0, -17), "column -17")):
        with pytest.raises(TargetError, match=f"{told} is outside the map, 3 classes × 16 rows × 16 columns"):
            explain(image(), wrong)
    with pytest.raises(TargetError, match=r"an? image segmenter has no Logit to explain; pass Cell"):
        explain(image(), lrpx.Logit(0))
    with pytest.raises(TargetError, match="has no Cell to explain"):
        Explainer(build("vit"))(image(), Cell(0))


def test_a_map_of_a_module_of_ones_own():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 4, 4), torch.nn.ReLU(), torch.nn.Conv2d(4, 1, 1)).eval().double()
    found = Explainer(model, task=Task.IMAGE_MAP)(image(), Cell(0, 1, 2), method="gradient-x-input")
    patches = found.parts["patches"].values.clone()
    assert float(patches[1, 2]) != 0
    patches[1, 2] = 0
    assert not patches.any()  # a cell sees its own patch alone
    flat = torch.nn.Sequential(model, torch.nn.Flatten(1, 2)).eval()
    assert torch.equal(Explainer(flat, task=Task.IMAGE_MAP)(image(), Cell(0, 1, 2)).by_pixel(), Explainer(
        model, task=Task.IMAGE_MAP)(image(), Cell(0, 1, 2)).by_pixel())  # fmt: skip
    with pytest.raises(ModelError, match=r"returns a map \[B, K, R, C\]"):
        Explainer(
            torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 3)).eval().double(), task=Task.IMAGE_MAP
        )(image())


def test_queries_are_no_places_of_a_map():
    """The classes of each query, ``[B, Q, C]``, were taken for a map of one class, and a cell's column for a place."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = tf.YolosConfig(**sizes, image_size=[16, 16], patch_size=4, num_detection_tokens=5, num_labels=3)
    model = tf.YolosForObjectDetection(config).double().eval()
    with pytest.raises(ModelError, match="gives pred_boxes, a row for each query and none for the places of a map"):
        Explainer(model, task=Task.IMAGE_MAP)(image())


@pytest.mark.parametrize("kind", ["beit", "mae"])
def test_what_is_said_of_each_patch_is_no_map(kind):
    """The codebook entries or pixels of each patch, ``[B, T, V]``, were taken for a map of one class."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"image_size": 16, "patch_size": 4}
    if kind == "beit":
        model = tf.BeitForMaskedImageModeling(tf.BeitConfig(**sizes, vocab_size=30))
    else:
        decoder = {"decoder_hidden_size": 16, "decoder_intermediate_size": 24}
        decoder |= {"decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
        model = tf.ViTMAEForPreTraining(tf.ViTMAEConfig(**sizes, **decoder))
    with pytest.raises(ModelError, match="a row for each patch and none for those of a map"):
        Explainer(model.double().eval(), task=Task.IMAGE_MAP)(image())


@pytest.mark.parametrize(("end", "named"), [(torch.nn.Softmax(1), "softmax"), (torch.nn.Sigmoid(), "sigmoid")])
def test_a_map_of_probabilities(end, named):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 4, 4), torch.nn.ReLU(), torch.nn.Conv2d(4, 3, 1), end).eval()
    for method in ("attnlrp", "gradient-x-input"):
        with pytest.raises(ModelError, match=f"gives probabilities, not logits.*without the {named}"):
            Explainer(model.double(), task=Task.IMAGE_MAP)(image(), Cell(0, 1, 2), method=method)


@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_an_image_and_a_text(kind):
    from tests.pictures import TOWER, WORDS

    config = getattr(tf, f"{kind}Config")(vision_config=TOWER, text_config=WORDS)
    model = getattr(tf, f"{kind}Model")(config).eval().double()
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.2)
        ids = [1, 7, 9, 2]
        out = model(pixel_values=image()[None], input_ids=torch.tensor([ids]))
    cosine = torch.nn.functional.cosine_similarity(out.image_embeds, out.text_embeds)
    explain = Explainer(model)
    for method in ("attnlrp", "lrp", "attnlrp-vit"):
        found = explain((image(), ids), method=method, ledger=True)
        assert found.explained.value == pytest.approx(float(cosine), abs=1e-12)
        assert found.explained.description == "similarity of the image and the text"
        assert found.ledger.closes(1e-9)
        assert len(found.tokens) == 4
        assert found.parts["patches"].shape == {"row": 4, "column": 4}
    many = explain([(image(), ids), (image(1), [1, 5, 2])])
    near(many[0].relevance, explain((image(), ids)).relevance)
    assert [len(each.tokens) for each in many] == [4, 3]
    with pytest.raises(InputError, match=r"compares an image with a text; pass them as a tuple: \(image, text\)"):
        explain(image())
    given = {"input_ids": torch.tensor([ids]), "pixel_values": torch.stack([image(), image(1)])}
    with pytest.raises(InputError, match=r"pixel_values has 2 rows for 1 text; pass one image with each text, such as"):
        explain(given)
    texts = {key: torch.cat([value, value])[:2] for key, value in given.items()}
    near(explain(texts)[1].relevance, explain((image(1), ids)).relevance)


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize("length", [3, 5])  # of the image there are five places, too
def test_positions_beside_a_text_are_the_images(length, is_trained):
    model = tiny.clip()
    given = {"pixel_values": image(size=8)[None], "input_ids": torch.tensor([[5, 7, 9, 11, 2][-length:]])}
    table = model.vision_model.embeddings.position_embedding.weight.requires_grad_()
    out = model(**given)
    similarity = torch.nn.functional.cosine_similarity(out.image_embeds, out.text_embeds).sum()
    (gradient,) = torch.autograd.grad(similarity, table)
    for tower in (model.vision_model, model.text_model):
        tower.embeddings.position_embedding.weight.requires_grad_(is_trained)
    found = Explainer(model)(given, method="gradient-x-input", ledger=True)
    near(found.parts["positions"].values, (table * gradient).sum(-1).detach())
    assert [each.name.split(".")[0] for each in found.ledger.entries if each.kind == "positions"] == [
        "vision_model", "text_model"
    ]  # fmt: skip
    assert found.ledger.closes(1e-9)


def test_a_text_beside_an_image_is_padded_where_the_model_reads_padding():
    """SigLIP's tokenizer makes no mask, and its own pipeline pads texts to the context."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    from tests.pictures import TOWER, WORDS

    known = {word: at for at, word in enumerate(("<unk>", "</s>", "a", "cat", "photo", "of"))}
    backend = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    named = {"tokenizer_object": backend, "unk_token": "<unk>", "eos_token": "</s>", "pad_token": "</s>"}
    tokenizer = tf.PreTrainedTokenizerFast(**named, model_input_names=["input_ids"])
    model = tf.SiglipModel(tf.SiglipConfig(vision_config=TOWER, text_config=WORDS)).eval().double()
    given = tokenizer("a photo of a cat", padding="max_length", max_length=12, return_tensors="pt")
    given["pixel_values"] = image()[None]
    with torch.no_grad():
        out = model(**given)
    explain = Explainer(model, tokenizer)
    found = explain((image(), "a photo of a cat"))
    assert found.explained.value == pytest.approx(float(out.image_embeds @ out.text_embeds.T), abs=1e-12)
    assert len(found) == 12
    near(explain(given).relevance, found.relevance)
    masked = tf.PreTrainedTokenizerFast(**named)  # as Siglip2Tokenizer is by default
    given = masked("a photo of a cat", padding="max_length", max_length=12, return_tensors="pt")
    for refuse, what in ((Explainer(model, masked), (image(), "a photo of a cat")), (explain, given)):
        if what is given:
            what["pixel_values"] = image()[None]
        with pytest.raises(InputError, match=r"reads a text's last place.*model_input_names = \['input_ids'\]"):
            refuse(what)
    refuse = Explainer(model, masked)  # which is asked first where its texts all say the same
    for block in (lrpx.intervene(model, {("text_model.final_layer_norm", "output"): 0.0}), nullcontext()):
        with pytest.raises(InputError, match="reads a text's last place"), block:
            refuse((image(), "a photo of a cat"))
    clip = tf.CLIPModel(tf.CLIPConfig(vision_config=TOWER, text_config=WORDS | {"eos_token_id": 1})).eval().double()
    assert len(Explainer(clip, masked)(given)) == 6
    with pytest.raises(InputError, match=r"there is a tokenizer, .*, and nothing that reads images; pass the model"):
        Explainer(clip, masked)((image().permute(1, 2, 0).numpy(), "a cat"))  # as of a pipeline, which has two readers

    forward = clip.text_model.forward

    def last(*args, **named):
        found = forward(*args, **named)
        found.pooler_output = found.last_hidden_state[:, -1]
        return found

    explain = Explainer(clip, masked)
    explain(given)
    clip.text_model.forward = last  # what was tried is tried again
    with pytest.raises(InputError, match="reads a text's last place"):
        explain(given)


class Centred(torch.nn.Module):
    """Takes the mean of a batch off each image."""

    def __init__(self):
        super().__init__()
        self.cut, self.head = torch.nn.Conv2d(3, 4, 8, 8), torch.nn.Linear(4, 3)

    def forward(self, pixel_values):
        x = self.cut(pixel_values).flatten(2).mean(-1)
        return self.head((x - x.mean(0) / 2).relu())


class Shown(Centred):
    """Takes a mask first, where nobody would look for the image."""

    def forward(self, shown=None, x=None):
        x = torch.ones(1, 3, 16, 16, dtype=torch.float64) if x is None else x
        return self.head(self.cut(x if shown is None else x * shown).flatten(2).mean(-1).relu())


class Asking(Shown):
    def forward(self, shown, x):
        return super().forward(shown, x)


class Choosing(Shown):
    def forward(self, x, shown=None):
        return super().forward(shown, x)


class Masked(Shown):
    def forward(self, mask, x=None):
        return super().forward(mask, x)


def test_an_image_is_no_mask_that_comes_first():
    """It was given as the mask."""
    with pytest.raises(ModelError, match=r"forward takes mask, x, and nobody knows which .* call it pixel_values"):
        Explainer(Masked().double().eval(), task=Task.IMAGE_CLASSIFICATION)(image(), 1)
    for kind in (Shown, Asking):
        with pytest.raises(ModelError, match=r"forward takes shown, x, and nobody knows which .* call it pixel_values"):
            Explainer(kind().double().eval(), task=Task.IMAGE_CLASSIFICATION)(image(), 1)
    model = Choosing().double().eval()
    found = Explainer(model, task=Task.IMAGE_CLASSIFICATION)(image(), 1)
    assert found.explained.value == pytest.approx(model(image()[None])[0, 1].item(), abs=1e-12)


class Placed(Shown):
    def forward(self, x, /):
        return super().forward(None, x)


class PlacedAnyhow(Shown):
    def forward(self, *given):
        return super().forward(None, *given)


@pytest.mark.parametrize("kind", [Placed, PlacedAnyhow])
def test_an_image_without_a_name_is_refused(kind):
    """It was passed by a name that the model does not take."""
    with pytest.raises(ModelError, match=r"given by its place alone, .* name the image .* pixel_values"):
        Explainer(kind().double().eval(), task=Task.IMAGE_CLASSIFICATION)(image(), 1)


@pytest.mark.parametrize("around", [torch.nn.DataParallel, torch.optim.swa_utils.AveragedModel])
def test_an_image_goes_to_the_argument_of_the_module_inside(around):
    """It was passed as pixel_values, which ended in a TypeError."""
    model = Choosing().double().eval()
    found, expected = (
        Explainer(each.eval(), task=Task.IMAGE_CLASSIFICATION)(image(), 1) for each in (around(model), model)
    )
    torch.testing.assert_close(found.relevance, expected.relevance, rtol=0, atol=1e-12)


def test_images_that_see_each_other_run_one_by_one():
    explain = Explainer(Centred().double().eval(), task=Task.IMAGE_CLASSIFICATION)
    images = [image(seed) for seed in range(3)]
    for many, each in zip(explain(images, 1), images, strict=True):
        near(many.relevance, explain(each, 1).relevance)


# ---------------------------------------------------------------------------------- timm


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "resnet18"])
def test_timm_without_torchvision(name):
    timm = imported("timm")
    torch.manual_seed(0)
    small = {} if name == "resnet18" else {"img_size": 32, "patch_size": 8, "depth": 2}
    model = timm.create_model(name, num_classes=5, **small).eval().double()
    found = Explainer(model, task=Task.IMAGE_CLASSIFICATION)(image(size=32), 3, method="attnlrp-vit", ledger=True)
    assert found.ledger.closes(1e-9)
    assert ("patches" in found.parts) == bool(small)
    if small:
        assert found.parts["class token"].shape["learned token"] == (2 if "deit" in name else 1)
        by_name = replace(ATTNLRP, name="b", linear=Gamma(0.05), convolution=Gamma(0.25))
        by_name = by_name.at("*.qkv", linear=Epsilon()).at("*.attn.proj", linear=Epsilon())
        other = Explainer(model, task=Task.IMAGE_CLASSIFICATION)(image(size=32), 3, method=by_name)
        near(found.relevance, other.relevance)


def test_a_vit_of_timm_is_that_of_transformers():
    timm, model = imported("timm"), build("vit")
    other = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=16, depth=2, num_heads=2, mlp_ratio=1.5,
        num_classes=3,
    ).eval().double()  # fmt: skip
    mine, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    embeddings = "vit.embeddings."
    pairs = {
        "cls_token": f"{embeddings}cls_token",
        "pos_embed": f"{embeddings}position_embeddings",
        "patch_embed.proj": f"{embeddings}patch_embeddings.projection",
        "norm": "vit.layernorm",
        "head": "classifier",
    }
    for i in range(2):
        parts = {"norm1": "layernorm_before", "norm2": "layernorm_after", "attn.proj": "attention.o_proj",
                 "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}  # fmt: skip
        pairs |= {f"blocks.{i}.{a}": f"vit.layers.{i}.{b}" for a, b in parts.items()}
    with torch.no_grad():
        for name, weight in theirs.items():
            path, _, kind = name.rpartition(".")
            if path.endswith("attn.qkv"):
                at = f"vit.layers.{path.split('.')[1]}.attention"
                weight.copy_(torch.cat([mine[f"{at}.{part}_proj.{kind}"] for part in "qkv"]))
            else:
                weight.copy_(mine[pairs[name]] if name in pairs else mine[f"{pairs[path]}.{kind}"])
        for module in other.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.eps = model.config.layer_norm_eps
    for method in ("attnlrp", "attnlrp-vit", "lrp-vit"):
        one = Explainer(model)(image(), 1, method=method)
        two = Explainer(other, task=Task.IMAGE_CLASSIFICATION)(image(), 1, method=method)
        for part in ("pixels", "class token", "positions"):
            near(one.parts[part].values, two.parts[part].values)


# ------------------------------------------------------------------------------- what is refused


def test_methods_of_tokens_refuse_images_by_name():
    for method in ("alti-logit", "leave-one-out", "occlusion", "kernel-shap", "ifr", "position"):
        with pytest.raises(MethodError, match=f"{method} does not serve ViTForImageClassification"):
            Explainer(build("vit"))(image(), method=method)
    with pytest.raises(MethodError, match="centre does not serve"):
        Explainer.from_pretrained()("The doors", method="centre")


def test_a_model_of_images_that_inherits_token_embeddings_has_a_gradient() -> None:
    """Perceiver's class has some, which it does not call."""
    (chosen,) = (each for each in choose(["perceiver"], "image-classification") if "Learned" in each.name)
    model = tiny_model(chosen).double()
    pixels = torch.linspace(-1, 1, 3 * 32 * 32, dtype=torch.float64).reshape(1, 3, 32, 32).requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs=pixels).logits[0, 0], pixels)
    found = Explainer(model)({"pixel_values": pixels.detach()}, target=0, method="gradient-x-input")
    torch.testing.assert_close(
        found.parts["pixels"].values.double(), (pixels * gradient)[0].detach(), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("method", ["attnlrp", "smoothgrad", "random", "centre"])
def test_pixels_as_a_processor_calls_them_are_those_the_model_calls_otherwise(method):
    """Perceiver's processor returns pixel_values, which its model takes as its inputs."""
    (chosen,) = (each for each in choose(["perceiver"], "image-classification") if "Fourier" in each.name)
    explain = Explainer(tiny_model(chosen))
    pixels = torch.linspace(-1, 1, 3 * 32 * 32).reshape(1, 3, 32, 32)
    found, expected = (explain({name: pixels}, 0, method=method) for name in ("pixel_values", "inputs"))
    near(found.by_pixel(), expected.by_pixel())


class Captioned(torch.nn.Module):
    """An image against a text of the model's own, whose encoder has a class token, too, as CoCa's has."""

    def __init__(self):
        super().__init__()
        self.cut, self.first = torch.nn.Conv2d(3, 8, 4, 4), torch.nn.Parameter(torch.randn(1, 1, 8))
        self.words, self.last = torch.nn.Embedding(9, 8), torch.nn.Parameter(torch.randn(1, 1, 8))

    def forward(self, pixels):
        patches = self.cut(pixels).flatten(2).mT
        seen = torch.cat([self.first.expand(len(pixels), -1, -1), patches], 1).mean(1)
        text = self.words(torch.tensor([[3, 4, 5]]))
        return seen @ torch.cat([text, self.last], 1).mean(1).T


def test_a_texts_class_token_is_none_of_the_images():
    torch.manual_seed(0)
    explain = Explainer(Captioned().double().eval(), task=Task.IMAGE_CLASSIFICATION)
    pixels = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    alone, many = explain(pixels[1], 0, ledger=True), explain(pixels, 0)
    assert alone.parts["class token"].shape == {"learned token": 1}
    near(alone.parts["class token"].values, many[1].parts["class token"].values)
    assert alone.ledger.by_kind()["class token"] == pytest.approx(float(alone.parts["class token"].values.sum()))
    assert alone.ledger.closes(1e-9)


class InPlace(torch.nn.Module):
    """Normalises what it is given in the place of it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = torch.nn.Linear(3 * 4 * 4, 3).double()

    def forward(self, pixel_values):
        return self.head(pixel_values.mul_(2).flatten(1))


@pytest.mark.parametrize("method", ["attnlrp", "gradient-x-input", "integrated-gradients", "random"])
def test_a_model_that_writes_into_its_pixels_leaves_the_given_ones(method):
    """A second call of it saw pixels of the first: relevance was twice the value, and the user's pixels were others."""
    model = InPlace().eval()
    given = torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    kept = given.clone()
    weight, bias = (each[1].detach() for each in (model.head.weight, model.head.bias))
    wanted = 2 * kept * weight.reshape(3, 4, 4)
    explain = Explainer(model, task=Task.IMAGE_CLASSIFICATION)
    for found, pixels in ((explain(given[0], 1, method=method), 0), (explain(given, 1, method=method)[1], 1)):
        assert torch.equal(given, kept)
        assert found.explained.value == pytest.approx(float(wanted[pixels].sum() + bias), abs=1e-12)
        if method != "random":
            torch.testing.assert_close(found.parts["pixels"].values, wanted[pixels], rtol=0, atol=1e-9)
