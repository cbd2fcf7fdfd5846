"""The methods that images are explained with for comparison, each against a slow twin or its formula."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from lrpx import Explainer, Task
from lrpx.errors import MethodError
from lrpx.methods import (
    AtMan,
    Centre,
    FullGrad,
    GradCam,
    GradientRollout,
    IntegratedGradients,
    Random,
    Rollout,
    SmoothGrad,
)
from tests.pictures import OwnViT, build, image
from tests.reference import attention_methods as twins

WITH_TOKENS = {"vit": 1, "deit": 2, "registers": 3, "beit": 1, "siglip": 0, "clip": 1}
CLASS = 1


def read(output):
    return output.logits[0, CLASS]


def eager(name):
    model = build(name)
    model.set_attn_implementation("eager")
    return model


def plain_softmax(monkeypatch):
    """Eager attention of transformers casts its softmax to float32; the twins are in float64."""
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda x, dim, **_: torch.softmax(x, dim))


@pytest.mark.parametrize("name", WITH_TOKENS)
def test_methods_of_attention_weights(name, monkeypatch):
    plain_softmax(monkeypatch)
    model, offset = eager(name), WITH_TOKENS[name]
    pixels = image()[None].requires_grad_()
    layers = twins.attentions(model, read, pixel_values=pixels)
    rows = np.abs(layers[-1][2]).max((0, 2)) > 0
    where = np.nonzero(rows)[0]
    lengths = (16 + offset,)
    cases = [
        (Rollout(), twins.rollout(layers, lengths, where)),
        (Rollout(discard=0.3, fusion="max"), twins.rollout(layers, lengths, where, "max", 0.3)),
        (GradientRollout(), twins.gradient_rollout(layers, lengths, where)),
        (GradCam(), twins.grad_cam(layers, lengths, where)),
    ]
    for sdpa in (False, True):
        explain = Explainer(build(name) if sdpa else model)
        for method, expected in cases:
            found = explain(image(), CLASS, method=method)
            np.testing.assert_allclose(found.relevance.numpy(), expected[offset:], rtol=0, atol=1e-9)
            learned = expected[:offset]
            if offset:
                np.testing.assert_allclose(found.parts["class token"].values.numpy(), learned, rtol=0, atol=1e-9)
            assert "pixels" not in found.parts
            assert float(found.by_pixel().sum()) == pytest.approx(float(found.relevance.sum()), abs=1e-12)


@pytest.mark.parametrize("name", ["vit", "registers", "siglip"])
def test_atman(name, monkeypatch):
    plain_softmax(monkeypatch)
    model, offset = eager(name), WITH_TOKENS[name]
    lengths = (16 + offset,)
    expected = twins.atman(model, read, lengths, 0.7, pixel_values=image()[None])
    found = Explainer(build(name))(image(), CLASS, method=AtMan(suppression=0.7))
    np.testing.assert_allclose(found.relevance.numpy(), expected[offset:], rtol=0, atol=1e-9)
    entered = []
    norm = next(
        m
        for p, m in model.named_modules()
        if p.endswith(("layers.0.layernorm_before", "layer.0.norm1", "layers.0.layer_norm1"))
    )
    norm.register_forward_hook(lambda *given: entered.append(given[-1][0].detach()))
    model(pixel_values=image()[None])
    wide = torch.nn.functional.normalize(entered[-1], dim=-1)
    cosine = (wide @ wide.T).numpy()
    likeness = np.where(cosine >= 0.2, cosine, 0.0)
    np.fill_diagonal(likeness, 1.0)
    expected = twins.atman(model, read, lengths, 0.7, likeness, pixel_values=image()[None])
    found = Explainer(build(name))(image(), CLASS, method=AtMan(suppression=0.7, threshold=0.2))
    np.testing.assert_allclose(found.relevance.numpy(), expected[offset:], rtol=0, atol=1e-9)


def test_patches_are_alike_by_their_own_image_whichever_was_explained_before():
    explain, method = Explainer(build("vit")), AtMan(suppression=0.7, threshold=0.2)
    explain(image(1), CLASS, method=method)
    found = explain(image(), CLASS, method=method)
    assert torch.equal(found.relevance, Explainer(build("vit"))(image(), CLASS, method=method).relevance)
    many = explain([image(1), image()], CLASS, method=method)
    torch.testing.assert_close(many[1].relevance, found.relevance, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["swin", "convnext", "resnet"])
def test_attention_over_windows_or_none_is_refused(name):
    for method in ("rollout", "gradient-rollout", "grad-cam", "atman", "libragrad-fullgrad"):
        with pytest.raises(MethodError, match=f"{method} needs attention over all patches of an image, and"):
            Explainer(build(name))(image(), method=method)


class OfDistances(OwnViT):
    """Biases of distances, made by a layer before the queries or after them, as in timm's vit_relpos."""

    def __init__(self, is_before):
        super().__init__()
        self.is_before, self.distances = is_before, torch.nn.Linear(1, 2)

    def forward(self, x):
        places = torch.arange(17, dtype=x.dtype)
        apart = (places[:, None] - places)[..., None]
        h = torch.cat([self.first.expand(len(x), -1, -1), self.patches(x)], 1) + self.where
        for block in self.blocks:
            bias = self.distances(apart) if self.is_before else None
            q, k, v = block["qkv"](block["n1"](h)).reshape(len(x), 17, 3, 2, 8).permute(2, 0, 3, 1, 4)
            bias = self.distances(apart) if bias is None else bias
            weights = (q @ k.mT + bias.permute(2, 0, 1)).softmax(-1)
            h = h + block["o"]((weights @ v).transpose(1, 2).reshape(len(x), 17, 16))
        return self.head(h[:, 0])


@pytest.mark.parametrize("method", ["rollout", "atman"])
def test_a_layer_that_makes_biases_of_distances_is_none_that_attention_is_entered_by(method):
    """The model was refused, as one without attention over all patches."""
    pixels = torch.randn(3, 16, 16, dtype=torch.float64)
    before, after = (
        Explainer(OfDistances(is_before).double().eval(), task=Task.IMAGE_CLASSIFICATION)(pixels, 1, method=method)
        for is_before in (True, False)
    )
    assert torch.equal(before.relevance, after.relevance)


class OfTorch(torch.nn.Module):
    """Patches, a learned token and torch's attention, as torchvision's and open_clip's ViTs have it; or the same,
    written out."""

    def __init__(self, is_written_out):
        super().__init__()
        torch.manual_seed(0)
        self.is_written_out = is_written_out
        self.cut, self.head = torch.nn.Conv2d(3, 8, 4, 4), torch.nn.Linear(8, 3)
        self.first = torch.nn.Parameter(torch.randn(1, 1, 8))
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def mixed(self, x):
        if not self.is_written_out:
            return self.attention(x, x, x, need_weights=False)[0]
        weight, bias = self.attention.in_proj_weight, self.attention.in_proj_bias
        given = torch.nn.functional.linear(x, weight, bias).unflatten(2, (3, 2, 4))
        q, k, v = given.permute(2, 0, 3, 1, 4)
        return self.attention.out_proj(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2))

    def forward(self, x):
        x = torch.cat([self.first.expand(len(x), -1, -1), self.cut(x).flatten(2).mT], 1)
        return self.head((x + self.mixed(x))[:, 0].tanh())


@pytest.mark.parametrize("method", ["rollout", "gradient-rollout", "grad-cam", "atman"])
def test_patches_are_found_in_front_of_torchs_attention(method):
    """Tokens are first in it, before the batch: the model was refused, as one without attention over all patches."""
    pixels = torch.randn(3, 16, 16, dtype=torch.float64)
    found, expected = (
        Explainer(OfTorch(how).double().eval(), task=Task.IMAGE_CLASSIFICATION)(pixels, 1, method=method)
        for how in (False, True)
    )
    assert found.parts["patches"].values.shape == (4, 4)
    torch.testing.assert_close(found.relevance, expected.relevance, rtol=0, atol=1e-12)


class Pooled(OwnViT):
    """A learned query, or several, that look at all tokens, as SigLIP's head in timm; "unread": beside the head."""

    def __init__(self, how):
        super().__init__()
        self.how, count = how, 3 if how == "latents" else 1
        self.query = torch.nn.Parameter(torch.randn(1, 2, count, 8))
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        self.pool = torch.nn.Linear(16, 32)
        self.classes, self.head = self.head, torch.nn.Identity()

    def pooled(self, x):
        query = self.query.expand(len(x), -1, -1, -1)
        if self.how == "module":
            rows = query.transpose(1, 2).reshape(len(x), 1, 16)
            return self.attention(rows, x, x)[0]
        k, v = self.pool(x).reshape(len(x), 17, 2, 2, 8).permute(2, 0, 3, 1, 4)
        if self.how == "fused":
            found = torch.nn.functional.scaled_dot_product_attention(query, k, v)
        elif self.how == "three dimensions":
            query, k, v = query.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
            found = torch.bmm(torch.bmm(query, k.transpose(1, 2) * 8**-0.5).softmax(-1), v).unflatten(0, (len(x), 2))
        else:
            found = (query @ k.transpose(-1, -2) * 8**-0.5).softmax(-1) @ v
        return found.transpose(1, 2).flatten(2)

    def forward(self, x):
        rows = []
        hook = self.blocks[-1]["m"].register_forward_hook(lambda _, given, out: rows.append(out))
        whole = super().forward(x)
        hook.remove()
        pooled = self.pooled(rows[0]).mean(1)
        return self.classes(whole if self.how == "unread" else pooled)


@pytest.mark.parametrize("method", ["rollout", "gradient-rollout", "grad-cam", "atman"])
def test_attention_that_pools_the_tokens_is_refused(method):
    """No map of the tokens' own attention has it; but where nothing reads it, there is nothing to have."""
    for how in ("eager", "fused", "module", "three dimensions", "latents"):
        explain = Explainer(Pooled(how).eval().double(), task=Task.IMAGE_CLASSIFICATION)
        seen = "places that are none of them" if how == "latents" else "a place that is none of them"
        with pytest.raises(MethodError, match=f"looks at all tokens from {seen}"):
            explain(image(), CLASS, method=method)
    model, usual = Pooled("unread").eval().double(), OwnViT()
    usual.load_state_dict(model.state_dict(), strict=False)
    usual.head.load_state_dict(model.classes.state_dict())
    found, expected = (
        Explainer(each, task=Task.IMAGE_CLASSIFICATION)(image(), CLASS, method=method)
        for each in (model, usual.eval().double())
    )
    torch.testing.assert_close(found.relevance, expected.relevance, rtol=0, atol=1e-12)


def test_patches_in_another_order_are_refused():
    class Turned(OwnViT):
        def patches(self, x):
            return super().patches(x).flip(1)

    class ByColumn(OwnViT):
        """The first and the last are where they would be."""

        def patches(self, x):
            return self.embed(x).transpose(2, 3).flatten(2).transpose(1, 2)

    for model in (Turned(), ByColumn("conv")):
        with pytest.raises(MethodError, match="rollout needs attention over all patches"):
            Explainer(model.eval().double(), task=Task.IMAGE_CLASSIFICATION)(image(), method="rollout")


@pytest.mark.parametrize("rows", [1, 2, 3, 7])
def test_patches_are_found_however_many(rows):
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.q, self.head = torch.nn.Conv2d(3, 8, 4, 4), torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)
            self.learned = torch.nn.Parameter(torch.randn(1, 2, 8))

        def forward(self, x):
            patches = self.embed(x).flatten(2).transpose(1, 2)
            h = self.q(torch.cat([self.learned.expand(len(x), -1, -1), patches], 1))[:, None]
            return self.head(torch.nn.functional.scaled_dot_product_attention(h, h, h)[:, 0, 0])

    bound = Explainer(Own().eval().double(), task=Task.IMAGE_CLASSIFICATION).bound
    found = bound.places(bound.reader.row(torch.randn(3, 4 * rows, 12, dtype=torch.float64)))
    assert (found.count, found.first) == (2 + 3 * rows, 2)


@pytest.mark.parametrize("name", ["vit", "resnet"])
def test_integrated_gradients_is_captums(name):
    captum = pytest.importorskip("captum.attr", reason="captum is not installed")
    model = build(name)
    found = Explainer(model)(image(), CLASS, method=IntegratedGradients(steps=12))
    of_captum = captum.IntegratedGradients(lambda x: model(pixel_values=x).logits[:, CLASS])
    expected = of_captum.attribute(image()[None], torch.zeros(1, 3, 16, 16), n_steps=12, method="gausslegendre")
    torch.testing.assert_close(found.parts["pixels"].values.clone(), expected[0].detach(), rtol=0, atol=1e-9)
    nodes, weights = np.polynomial.legendre.leggauss(12)  # and the formula
    mean = torch.zeros(3, 16, 16, dtype=torch.float64)
    for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        x = (node * image()[None]).requires_grad_()
        mean += weight * torch.autograd.grad(model(pixel_values=x).logits[0, CLASS], x)[0][0]
    torch.testing.assert_close(found.parts["pixels"].values.clone(), image() * mean, rtol=0, atol=1e-8)


def test_gradient_x_input_that_is_rounding_alone_at_the_patches_is_refused():
    """A norm stands right behind the patches' embeddings, which have no bias, so that their length is nothing to it."""
    model = build("convnext").bfloat16()
    (first,) = [each for each in model.modules() if isinstance(each, torch.nn.Conv2d)][:1]
    torch.nn.init.zeros_(first.bias)
    with pytest.raises(MethodError, match="gradient-x-input has nothing but rounding at the patches here"):
        Explainer(model)(image().bfloat16(), CLASS, method="gradient-x-input")
    assert Explainer(model)(image().bfloat16(), CLASS).relevance.abs().max() > 0
    assert Explainer(model)(image().bfloat16(), CLASS, method="gradient-l1").relevance.abs().max() > 0
    torch.nn.init.normal_(first.bias)
    single, double = (
        Explainer(model.to(dtype))(image().to(dtype), CLASS, method="gradient-x-input").relevance.double()
        for dtype in (torch.float32, torch.float64)
    )
    torch.testing.assert_close(single, double, rtol=0, atol=1e-3 * double.abs().max().item())


def test_smoothgrad():
    pytest.importorskip("captum.attr", reason="captum is not installed")
    explain = Explainer(build("vit"))
    still = explain(image(), CLASS, method=SmoothGrad(n_samples=3, sigma=0.0))
    plain = explain(image(), CLASS, method="gradient-x-input")
    torch.testing.assert_close(still.by_pixel(), plain.by_pixel(), rtol=0, atol=1e-9)
    noisy = [explain(image(), CLASS, method=SmoothGrad(n_samples=8, sigma=0.1, seed=s)).by_pixel() for s in (0, 0, 1)]
    assert torch.equal(noisy[0], noisy[1])
    assert not torch.equal(noisy[0], noisy[2])
    state = torch.random.get_rng_state()
    explain(image(), CLASS, method="smoothgrad")
    assert torch.equal(state, torch.random.get_rng_state())


def test_a_baseline_that_pixels_have_not():
    pytest.importorskip("captum.attr", reason="captum is not installed")
    with pytest.raises(MethodError, match="has no pad token; use baseline='zero'"):
        Explainer(build("vit"))(image(), method=IntegratedGradients(baseline="pad"))


@pytest.mark.parametrize("name", ["vit", "dinov2", "registers", "clip", "siglip"])
def test_fullgrad_has_what_the_ledger_has(name):
    """All that is added to tokens is theirs: inputs, positions, class tokens and biases, but for the head's."""
    model = build(name)
    explain = Explainer(model)
    ledger = explain(image(), CLASS, method="libragrad", ledger=True).ledger
    kinds = ("inputs", "positions", "class token", "biases")
    expected = sum(e.value for e in ledger.entries if e.kind in kinds and e.name != "classifier.bias")
    many = explain([image(1), image()], CLASS, method=FullGrad())
    for found in (explain(image(), CLASS, method="libragrad-fullgrad"), many[1]):
        total = sum(float(found.parts[part].values.sum()) for part in ("patches", "class token") if part in found.parts)
        assert total == pytest.approx(expected, abs=1e-9)


def test_fullgrad_refuses_constants_at_some_of_the_tokens():
    """Nothing tells where the patches are in a slice of the tokens."""
    model = build("registers")

    def sliced(module, args, output):
        return torch.cat([output[:, :1], output[:, 1:] + output.new_ones(18, 1)], 1)

    model.dinov2_with_registers.embeddings.register_forward_hook(sliced)
    with pytest.raises(MethodError, match="adds a constant to 18 of its 19 tokens, and nothing tells where"):
        Explainer(model)(image(), CLASS, method="libragrad-fullgrad")


class Staged(OwnViT):
    """Whose second block has other tokens than the first."""

    def __init__(self, between, learned):
        super().__init__("conv")
        self.between, self.learned = between, learned

    def forward(self, x):
        h = self.patches(x) + self.where[:, 1:]
        h = torch.cat([self.first.expand(len(x), -1, -1), h], 1) if self.learned else h
        for i, block in enumerate(self.blocks):
            h = self.between(self, h) if i else h
            q, k, v = block["qkv"](block["n1"](h)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            h = h + block["o"](((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
            h = h + block["m"](block["n2"](h))
        return self.head(h.mean(1))


STAGES = {
    "a class token behind the first": (lambda self, h: torch.cat([self.first.expand(len(h), -1, -1), h], 1), False),
    "all but the last": (lambda self, h: h[:, :-1], True),
    "all but the last, copied": (lambda self, h: h[:, torch.arange(16)], True),
    "the class token at the end": (lambda self, h: torch.cat([h[:, 1:], h[:, :1]], 1), True),
}


@pytest.mark.parametrize("name", STAGES)
def test_fullgrad_refuses_a_stage_of_other_tokens(name):
    """As many as there are patches need not be the patches."""
    model = Staged(*STAGES[name]).eval().double()
    with pytest.raises(MethodError, match=r"libragrad-fullgrad would .*; use libragrad"):
        Explainer(model, task=Task.IMAGE_CLASSIFICATION)(image(), CLASS, method="libragrad-fullgrad")


def test_fullgrad_has_a_stage_of_the_patches_alone():
    explain = Explainer(Staged(lambda self, h: h[:, 1:], True).eval().double(), task=Task.IMAGE_CLASSIFICATION)
    found = explain(image(), CLASS, method="libragrad-fullgrad")
    ledger = explain(image(), CLASS, method="libragrad", ledger=True).ledger
    kinds = ("inputs", "positions", "class token", "biases")
    expected = sum(e.value for e in ledger.entries if e.kind in kinds and e.name != "head.bias")
    total = sum(float(found.parts[part].values.sum()) for part in ("patches", "class token"))
    assert total == pytest.approx(expected, abs=1e-9)


class Spelled(OwnViT):
    """A block that adds constants in another way."""

    def __init__(self, between):
        super().__init__("conv")
        self.between = between
        self.shift, self.more = torch.nn.Parameter(torch.randn(16)), torch.nn.Linear(16, 16)
        self.normed = torch.nn.BatchNorm2d(16)
        torch.nn.init.normal_(self.normed.bias)
        self.wide, self.narrow = torch.nn.Linear(16, 20), torch.nn.Linear(20, 16)
        self.pointwise, self.pairs = torch.nn.Conv1d(20, 20, 1), torch.nn.Bilinear(16, 16, 16)
        self.upward = torch.nn.ConvTranspose2d(16, 16, 1)

    def forward(self, x):
        h = torch.cat([self.first.expand(len(x), -1, -1), self.patches(x)], 1)
        h = self.between(self, h)
        for block in self.blocks:
            q, k, v = block["qkv"](block["n1"](h)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            h = h + block["o"](((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return self.head(h[:, 0])


def written(self, h):
    placed = torch.zeros_like(h)
    placed[:, :1] = self.first
    placed[:, 1:] = h[:, 1:]
    return placed


def normed(self, h):
    at = self.normed(h[:, 1:].mT.unflatten(2, (4, 4)))
    return torch.cat([h[:, :1], at.flatten(2).mT], 1)


def convolved(self, h):
    at = self.upward(h[:, 1:].mT.unflatten(2, (4, 4)))
    return torch.cat([h[:, :1], at.flatten(2).mT], 1)


def masked(self, h):
    """By one head, causally."""
    x = self.more(h)
    return h + (x @ x.mT).masked_fill(torch.ones(17, 17).triu(1).bool(), -torch.inf).softmax(-1) @ x


def windowed(self, h):
    at = h[:, 1:].unflatten(1, (2, 2, 2, 2)).transpose(2, 3).reshape(-1, 4, 16)
    at = self.more(at).view(len(h), 2, 2, 2, 2, 16).transpose(2, 3).reshape(len(h), 16, 16)
    return torch.cat([h[:, :1], h[:, 1:] + at], 1)


def placed(self, h):
    into = self.where.expand(len(h), -1, -1).clone()
    into[:, 1:] = h[:, 1:]
    return into


SPELLED = {
    "taken off": lambda self, h: h - self.where,
    "taken from": lambda self, h: self.where - h,
    "in part": lambda self, h: torch.add(h, self.where, alpha=0.5),
    "by name": lambda self, h: torch.add(input=h, other=self.where),
    "in place": lambda self, h: h.clone().sub_(self.where),
    "a number": lambda self, h: h + 0.7,
    "a multiple": lambda self, h: torch.addcmul(self.where, h, self.shift),
    "stacked": lambda self, h: torch.hstack([self.first.expand(len(h), -1, -1), h[:, 1:]]) + self.where,
    "filled": lambda self, h: h.masked_fill(self.shift > 0, 0.5),
    "a batch norm": normed,
    "from a number": lambda self, h: 1 - h,
    "to a constant in place": lambda self, h: self.where.expand(len(h), -1, -1).clone().add_(h),
    "a bilinear layer": lambda self, h: h + self.pairs(h, h),
    "a transposed convolution": convolved,
    "with a mask": masked,
}
IN_OTHER_SHAPES = {
    "flat": lambda self, h: h + self.more(h.flatten(0, 1)).unflatten(0, h.shape[:2]),
    "tokens first": lambda self, h: self.more(h.transpose(0, 1)).transpose(0, 1),
    "heads": lambda self, h: (h.unflatten(2, (2, 8)) + self.shift.view(2, 8)).flatten(2),
    "written": written,
    "written into": placed,
    "written elsewhere": lambda self, h: h.index_add(1, torch.arange(17), self.where[0].expand(len(h), -1, -1)),
    "features first": lambda self, h: h + self.narrow(self.pointwise(self.wide(h).mT).mT),
    "windows": windowed,
    "squares": lambda self, h: torch.cat(
        [h[:, :1], (h[:, 1:].unflatten(1, (2, 2, 2, 2)) + self.shift).flatten(1, 4)], 1
    ),
}


@pytest.mark.parametrize("name", SPELLED)
def test_fullgrad_has_constants_however_they_are_added(name):
    explain = Explainer(Spelled(SPELLED[name]).eval().double(), task=Task.IMAGE_CLASSIFICATION)
    ledger = explain(image(), CLASS, method="libragrad", ledger=True).ledger
    expected = sum(e.value for e in ledger.entries if e.kind != "softmax residue" and e.name != "head.bias")
    for found in (
        explain(image(), CLASS, method="libragrad-fullgrad"),
        explain([image(1), image()], CLASS, method="libragrad-fullgrad")[1],
    ):
        total = sum(float(found.parts[part].values.sum()) for part in ("patches", "class token"))
        assert total == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", IN_OTHER_SHAPES)
def test_fullgrad_refuses_constants_in_other_shapes(name):
    explain = Explainer(Spelled(IN_OTHER_SHAPES[name]).eval().double(), task=Task.IMAGE_CLASSIFICATION)
    for given in (image(), [image(1), image()]):
        with pytest.raises(MethodError, match="so libragrad-fullgrad would leave it out; use libragrad"):
            explain(given, CLASS, method="libragrad-fullgrad")


def test_fullgrad_by_hooks():
    """Biases at each token, read off where the modules of transformers add them."""
    from lrpx import propagate
    from lrpx.recipes import LIBRAGRAD

    model = build("vit")
    with propagate(model, LIBRAGRAD) as trace:
        value = model(pixel_values=image()[None]).logits[0, CLASS]
    trace.explain(value)
    expected = torch.zeros(17, dtype=torch.float64)
    for path, module in model.named_modules():
        bias = getattr(module, "bias", None)
        if bias is None or path == "classifier":
            continue
        gradient = trace.gradient(path)[0]
        if gradient.ndim == 3:
            expected[1:] += (bias.detach()[:, None, None] * gradient).sum(0).flatten()
        else:
            expected += (bias.detach() * gradient).sum(-1)
    embedded = trace.gradient("vit.layers.0.layernorm_before", of="input")[0]
    at_input = trace.gradient("vit.embeddings")[0]
    assert embedded.shape == at_input.shape
    expected += (model.vit.embeddings.position_embeddings[0].detach() * at_input).sum(-1)
    expected[0] += (model.vit.embeddings.cls_token[0, 0].detach() * at_input[0]).sum()
    expected[1:] += trace.relevance("pixel_values")[0].sum(0).reshape(4, 4, 4, 4).sum((1, 3)).flatten()
    found = Explainer(model)(image(), CLASS, method=FullGrad())
    torch.testing.assert_close(found.relevance.clone(), expected[1:], rtol=0, atol=1e-9)
    torch.testing.assert_close(found.parts["class token"].values.clone(), expected[:1], rtol=0, atol=1e-9)


def test_random_and_centre_look_at_no_model():
    explain, other = Explainer(build("vit")), Explainer(build("resnet", seed=3))
    one, two = (each(image(), CLASS, method=Random(seed=5)).parts["pixels"].values.clone() for each in (explain, other))
    assert torch.equal(one, two)
    assert -1 <= float(one.min()) < -0.9 < 0.9 < float(one.max()) < 1
    many = explain([image(1), image()], CLASS, method=Random(seed=5))
    assert torch.equal(many[1].parts["pixels"].values, one)
    assert not torch.equal(many[0].parts["pixels"].values, one)
    found = explain(image(), CLASS, method=Centre(sigma=0.2)).by_pixel()
    for r, c in ((0, 0), (7, 8), (3, 12)):
        expected = np.exp(-0.5 * (((r - 7.5) / 3.2) ** 2 + ((c - 7.5) / 3.2) ** 2))
        assert float(found[r, c]) == pytest.approx(expected, abs=1e-12)
    with pytest.raises(MethodError, match="the sigma of centre is 0"):
        explain(image(), method=Centre(sigma=0))


def test_every_method_of_the_column_leaves_the_model_as_it_is():
    model = build("vit")
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    names = (
        "integrated-gradients smoothgrad grad-cam rollout gradient-rollout atman lrp-chefer libragrad "
        "libragrad-fullgrad random centre gradient-l1"
    )
    for method in names.split():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that few steps have not converged
            found = Explainer(model)(image(), method=method)
        assert found.relevance.isfinite().all()
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class OfFilms(torch.nn.Module):
    """A linear classifier of films ``[B, frame, channel, row, column]``."""

    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(4 * 3 * 6 * 8, 2, bias=False)

    def forward(self, pixel_values):
        return self.last(pixel_values.flatten(1))


@pytest.mark.parametrize(
    "method", [IntegratedGradients(), SmoothGrad(), "gradient-x-input", Random(), Centre()], ids=str
)
def test_films_have_frames_too(method):
    torch.manual_seed(0)
    model, film = OfFilms().double().eval(), torch.randn(4, 3, 6, 8, dtype=torch.float64)
    explain = Explainer(model, task=Task.IMAGE_CLASSIFICATION)
    (found,) = explain({"pixel_values": film[None]}, [CLASS], method=method)
    part = found.parts["pixels"]
    assert (part.values.shape, part.axes) == (film.shape, tuple(f"dimension {i}" for i in range(4)))
    if isinstance(method, Centre):
        assert float(part.values[0, 0].sum()) == pytest.approx(float(part.values[3, 2].sum()))
        assert part.values[1, 2].argmax() in (2 * 8 + 3, 2 * 8 + 4, 3 * 8 + 3, 3 * 8 + 4)
    elif not isinstance(method, Random):
        torch.testing.assert_close(
            part.values.double(), film * model.last.weight[CLASS].view_as(film), rtol=1e-3, atol=1e-5
        )
