"""The rules for layers of images, against zennit on a plain network, and their laws."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial

import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from lrpx import GRADIENT, LRP, Epsilon, Explainer, Gamma, Recipe, Task, ZPlus, propagate
from lrpx.coverage._classes import choose
from lrpx.coverage._inputs import tiny_inputs
from lrpx.coverage._tiny import tiny_model
from lrpx.errors import MethodError
from lrpx.recipes import ATTNLRP, ATTNLRP_VIT, LRP_VIT
from lrpx.rules import AlphaBeta, Flat, WSquare, ZBox, identity
from tests.families.without_torchvision import imported

RULES = [Epsilon(0.1), Gamma(0.25), ZPlus(), AlphaBeta(2.0, 1.0)]
FIRST = [Flat(), WSquare(), ZBox(-3.0, 3.0)]


def network(*, bias, seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1, bias=bias),
        torch.nn.ReLU(),
        torch.nn.Conv2d(4, 5, 3, stride=2, bias=bias),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(45, 3, bias=bias),
    ).double()


def pixels(seed=0):
    torch.manual_seed(seed)
    return torch.randn(3, 8, 8, dtype=torch.float64).clamp(-2.9, 2.9)


def ours(model, x, recipe):
    found = Explainer(model.eval(), task=Task.IMAGE_CLASSIFICATION)(x, 1, method=recipe)
    return found.parts["pixels"].values.clone(), found.explained.value


def by_zennit(model, x, layer, first):
    rules = imported("zennit.rules")
    tiny = {"stabilizer": 1e-13}
    made = {
        Epsilon: lambda rule: rules.Epsilon(rule.epsilon),
        Gamma: lambda rule: rules.Gamma(rule.gamma, **tiny),
        ZPlus: lambda _: rules.ZPlus(**tiny),
        AlphaBeta: lambda rule: rules.AlphaBeta(rule.alpha, rule.beta, **tiny),
        Flat: lambda _: rules.Flat(**tiny),
        WSquare: lambda _: rules.WSquare(**tiny),
        ZBox: lambda rule: rules.ZBox(torch.tensor(rule.low), torch.tensor(rule.high), **tiny),
    }
    handles = []
    chosen = [first, layer, layer]
    for module in model:
        if isinstance(module, torch.nn.ReLU):
            handles.append(rules.Pass().register(module))
        elif not isinstance(module, torch.nn.Flatten):
            rule = chosen.pop(0)
            handles.append(made[type(rule)](rule).register(module))
    x = x[None].clone().requires_grad_()
    out = model(x)
    (relevance,) = torch.autograd.grad(out, x, torch.eye(3, dtype=x.dtype)[1:2] * out.detach())
    for handle in handles:
        handle.remove()
    return relevance[0]


@pytest.mark.parametrize("first", [None, *FIRST], ids=str)
@pytest.mark.parametrize("layer", RULES, ids=str)
def test_a_plain_network_as_zennit_has_it(layer, first):
    # without biases, whose share zennit's rules treat each in their own way
    model, x = network(bias=False), pixels()
    recipe = Recipe("mine", linear=layer, convolution=layer, activation=identity, first=first)
    found, _ = ours(model, x, recipe)
    expected = by_zennit(model, x, layer, first or layer)
    assert expected.abs().max() > 1e-4
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("rule", FIRST, ids=str)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**16), bias=st.booleans())
def test_rules_of_the_first_layer_conserve_also_where_pixels_are_0(rule, seed, bias):
    model, x = network(bias=bias, seed=seed), pixels(seed)
    x[:, :3] = 0
    with torch.no_grad():
        model[5].bias.zero_() if bias else None
        model[2].bias.zero_() if bias else None
    found, value = ours(model, x, replace(LRP, name="mine", first=rule))
    assert float(found.sum()) == pytest.approx(value, abs=1e-9 * max(1.0, float(found.abs().sum())))
    assert float(found[:, :3].abs().max()) > 0  # no gradient times pixel could


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_alpha_1_beta_0_is_z_plus(seed):
    model, x = network(bias=True, seed=seed), pixels(seed)
    one, other = (
        ours(model, x, replace(LRP, name="m", linear=r, convolution=r))[0] for r in (AlphaBeta(1, 0), ZPlus())
    )
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_what_the_model_sees_stays_as_it_is():
    model, x = network(bias=True), pixels()
    x[0, 0, 0] = 0.0
    seen = []
    model[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    ours(model, x, replace(LRP, name="mine", first=Flat()))
    assert torch.equal(seen[-1][0], x)


def test_bounds_and_shares_that_are_none():
    for wrong in ((1.0, 0.0), (0.0, 0.0), (float("nan"), 1.0), ((0.0, 0.0), (1.0,)), ((), ())):
        with pytest.raises(MethodError, match="the bounds are"):
            ZBox(*wrong)
    with pytest.raises(MethodError, match="whose difference is 1"):
        AlphaBeta(2.0, 2.0)
    with pytest.raises(MethodError, match=r"reach from .* outside of the bounds of ZBox, 0.0 and 1.0"):
        ours(network(bias=True), pixels(), replace(LRP, name="mine", first=ZBox()))
    with pytest.raises(MethodError, match="bounds for 2 channels, and the first layer sees"):
        ours(network(bias=True), pixels(), replace(LRP, name="mine", first=ZBox((-9.0, -9.0), (9.0, 9.0))))


class Normalised(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = network(bias=True)

    def forward(self, x):
        return self.inner((x - 0.5) / 0.25)


def test_a_first_layer_that_sees_other_pixels_is_refused():
    with pytest.raises(MethodError, match=r"inner.0 is the first layer, and the model changes its input before it"):
        ours(Normalised(), pixels(), replace(LRP, name="mine", first=Flat()))
    ours(Normalised(), pixels(), replace(GRADIENT, name="plain"))


def test_recipes_with_places_as_files(tmp_path):
    own = {"first": ZBox((-2.1, -2.0), (2.2, 2.4)), "input_projection": AlphaBeta(), "output_projection": Epsilon(0.5)}
    recipe = replace(LRP, name="mine", **own).at("*.mlp", linear=Gamma(0.1), output_projection=None)
    recipe.save(tmp_path / "r.json")
    assert Recipe.load(tmp_path / "r.json") == recipe
    assert "first" in str(recipe)
    assert "output_projection" in recipe.describe()
    (tmp_path / "r.json").write_text((tmp_path / "r.json").read_text().replace("-2.1", '"x"'))
    with pytest.raises(MethodError, match="write a finite number"):
        Recipe.load(tmp_path / "r.json")


class Padded(torch.nn.Module):
    """A network whose first layer's input is padded before it, in one of two ways, or by the layer itself."""

    def __init__(self, how):
        super().__init__()
        self.inner, self.how = network(bias=True), how

    def forward(self, x):
        first, rest = self.inner[0], self.inner[1:]
        if self.how == "unfold":
            rows = torch.nn.functional.unfold(x, 3, padding=1).mT @ first.weight.flatten(1).T + first.bias
            return rest(rows.mT.unflatten(-1, x.shape[2:]))
        if self.how == "pad":
            return rest(torch.nn.functional.conv2d(torch.nn.functional.pad(x, (1, 1, 1, 1)), first.weight, first.bias))
        return rest(first(x))


@pytest.mark.parametrize("rule", FIRST, ids=str)
@pytest.mark.parametrize("how", ["pad", "unfold"])
def test_what_the_input_was_padded_with_has_no_share(rule, how):
    x, recipe = pixels(), replace(LRP, name="mine", first=rule)
    expected, _ = ours(Padded("layer"), x, recipe)
    found, _ = ours(Padded(how), x, recipe)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_padding_with_other_numbers_than_0_is_a_bias_to_the_first_layer():
    layers = torch.nn.Conv2d(1, 1, 3), torch.nn.Flatten(), torch.nn.Linear(9, 2, bias=False)
    model = torch.nn.Sequential(torch.nn.ConstantPad2d(1, 2.0), *layers).double()
    x = torch.rand(1, 3, 3, dtype=torch.float64)
    for rule in FIRST:
        recipe = replace(LRP, name="mine", first=rule)
        found = Explainer(model.eval(), task=Task.IMAGE_CLASSIFICATION)(x, 0, method=recipe)
        assert float(found.parts["pixels"].values.sum()) == pytest.approx(found.explained.value, abs=1e-9)


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
def test_what_a_first_layer_is_padded_with_may_be_pixels(mode):
    conv = torch.nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode)
    model = torch.nn.Sequential(conv, torch.nn.Flatten(), torch.nn.Linear(256, 3, bias=False)).double()
    found, value = ours(model, pixels(), replace(LRP, name="mine", first=Flat()))
    assert float(found.sum()) == pytest.approx(value, abs=1e-9)


def test_bounds_of_channels_are_none_of_rows_of_patches():
    class Patches(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = torch.nn.Linear(12, 5), torch.nn.Linear(45, 3)

        def forward(self, x):
            rows = x.reshape(-1, 3, 3, 2, 3, 2).permute(0, 2, 4, 1, 3, 5).flatten(3)  # [B, 3, 3, 12]
            return self.head(self.embedding(rows).relu().flatten(1))

    recipe = replace(LRP, name="mine", first=ZBox((-3.0, -4.0, -5.0), (3.0, 4.0, 5.0)))
    with pytest.raises(MethodError, match="bounds for 3 channels, and the first layer sees"):
        ours(Patches().double(), pixels()[:, :6, :6], recipe)


def test_a_gate_may_stand_on_either_side_of_what_attention_gives():
    class Gated(torch.nn.Module):
        def __init__(self, by):
            super().__init__()
            torch.manual_seed(0)
            self.by = by
            self.embedding = torch.nn.Embedding(20, 16)
            self.q, self.k, self.v, self.gate, self.out = (torch.nn.Linear(16, 16) for _ in range(5))
            self.head = torch.nn.Linear(16, 20)

        def get_input_embeddings(self):
            return self.embedding

        def forward(self, input_ids):
            x = self.embedding(input_ids)
            given = torch.nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), is_causal=True)
            return self.head(x + self.out(self.by(given, torch.sigmoid(self.gate(x)))))

    def found(by):
        return Explainer(Gated(by).double().eval(), task=Task.CAUSAL)([3, 5, 7, 9], 4, method="attnlrp-vit").relevance

    first = found(lambda given, gate: given * gate)
    assert torch.allclose(found(lambda given, gate: gate * given), first, rtol=0, atol=1e-12)


class Attending(torch.nn.Module):
    """A layer of attention that is written by ``attend(q, k, v)``."""

    def __init__(self, attend):
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.embedding = attend, torch.nn.Embedding(20, 16)
        self.q, self.k, self.v, self.out = (torch.nn.Linear(16, 16) for _ in range(4))
        self.head = torch.nn.Linear(16, 20)

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids):
        x = self.embedding(input_ids)
        return self.head(x + self.out(self.attend(self.q(x), self.k(x), self.v(x))))


def found_by(attend, method):
    return Explainer(Attending(attend).double().eval(), task=Task.CAUSAL)([3, 5, 7, 9], 4, method=method).relevance


@pytest.mark.parametrize("method", ["attnlrp-vit", "attnlrp"])
def test_exponentials_that_einsum_multiplies_before_they_are_divided(method):
    """Attention is attention, and its layers projections, as where the softmax is one function."""

    def late(equation):
        def attend(scores, v):
            e = torch.exp(scores - scores.amax(-1, keepdim=True))
            return torch.einsum(equation, e, v) / e.sum(-1, keepdim=True)

        return attend

    def found(attend):
        def by_heads(*given):
            q, k, v = (each.unflatten(-1, (4, 4)).transpose(1, 2) for each in given)
            return attend(q @ k.mT / 2, v).transpose(1, 2).flatten(2)

        return found_by(by_heads, method)

    expected = found(lambda scores, v: scores.softmax(-1) @ v)
    for equation in ("bhij,bhjd->bhid", "...ij,...jd->...id"):
        assert torch.allclose(found(late(equation)), expected, rtol=0, atol=1e-12)


ANGLES = torch.outer(torch.arange(4.0).double(), torch.tensor([1.0, 0.3, 0.1, 0.7], dtype=torch.float64))
COS, SIN = ANGLES.cos(), ANGLES.sin()  # [places, pairs]
TURNS = torch.cat(
    [torch.cat([COS.diag_embed(), -SIN.diag_embed()], -1), torch.cat([SIN.diag_embed(), COS.diag_embed()], -1)], -2
)
TURNED = {  # queries or keys [B, T, 8], by a matrix of each place
    "einsum": lambda x: torch.einsum("tij,btj->bti", TURNS, x),
    "its transpose": lambda x: torch.einsum("btj,tji->bti", x, TURNS.mT),
    "a product": lambda x: (TURNS @ x[..., None])[..., 0],
    "a product on the right": lambda x: (x[..., None, :] @ TURNS.mT)[..., 0, :],
}


@pytest.mark.parametrize("spelled", TURNED)
@pytest.mark.parametrize("recipe", [ATTNLRP_VIT, replace(ATTNLRP, linear=Epsilon(0.1))], ids=["vit", "epsilon"])
def test_rotary_angles_as_matrices_are_no_layers(recipe, spelled):
    def found(turn):
        def attend(q, k, v):
            q, k = (torch.cat([turn(each[..., :8]), each[..., 8:]], -1) for each in (q, k))
            return (q @ k.mT / 4).softmax(-1) @ v

        return found_by(attend, recipe)

    def by_hand(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * COS - b * SIN, b * COS + a * SIN], -1)

    assert torch.allclose(found(TURNED[spelled]), found(by_hand), rtol=0, atol=1e-12)


HIDDEN = torch.ones(4, 4, dtype=torch.bool).triu(1)
HIDES = {
    "tril": lambda p: p.tril(),
    "nan_to_num": lambda p: p.masked_fill(HIDDEN, torch.nan).nan_to_num(0.0),
    "clamp": lambda p: p.masked_fill(HIDDEN, 0).clamp(0, 1),
    "scatter_add": lambda p: torch.zeros_like(p).scatter_add(-1, torch.arange(4).expand_as(p), p).tril(),
}
PASSES = {
    "nan_to_num": torch.nan_to_num,
    "clamp": lambda x: x.clamp(-1e4, 1e4),
    "index_add": lambda x: torch.zeros_like(x).index_add(1, torch.arange(4), x),
    "masked_select": lambda x: x.masked_select(torch.ones_like(x, dtype=torch.bool)).view_as(x),
    "fold": lambda x: torch.nn.functional.fold(x.mT, (2, 2), 1).flatten(2).mT,
}


@pytest.mark.parametrize("name", [*HIDES, *(f"then {name}" for name in PASSES), "rms_norm"])
@pytest.mark.parametrize("method", ["attnlrp-vit", "lrp-vit"])
def test_what_hides_some_weights_or_hands_on_what_attention_gives(method, name):
    """The layers are projections, as where it is written otherwise, or left out."""

    def found(hides, then):
        return found_by(lambda q, k, v: then(hides((q @ k.mT / 4).softmax(-1)) @ v), method)

    def hide(p):
        return p.masked_fill(HIDDEN, 0)

    if name == "rms_norm":
        spelled = found(hide, lambda x: torch.nn.functional.rms_norm(x, (16,), eps=1e-5))
        plain = found(hide, lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt())
    else:
        then = PASSES[name.removeprefix("then ")] if name.startswith("then ") else lambda x: x
        spelled = found(HIDES.get(name, hide), then)
        plain = found(hide, lambda x: x)
    assert torch.allclose(spelled, plain, rtol=0, atol=1e-12)


TWICE = {
    "weights": lambda one, other, v: (one - 0.5 * other) @ v,
    "what each gives": lambda one, other, v: one @ v - 0.5 * (other @ v),
    "weights of either side": lambda one, other, v: (one.tril() + one.triu(1)) @ v + other @ v,
}


@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("recipe", [ATTNLRP_VIT, LRP_VIT], ids=lambda recipe: recipe.name)
def test_a_difference_of_two_attentions_is_attention(recipe, name):
    """As in a differential transformer: the numbers of a recipe that names the layers."""

    class Differential(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.into = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(5))
            self.out, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)

        def forward(self, x):
            q, k, others, keys, v = (layer(x) for layer in self.into)
            given = TWICE[name]((q @ k.mT).softmax(-1), (others @ keys.mT).softmax(-1), v)
            return self.head(torch.tanh(self.out(given)))

    named = replace(recipe, input_projection=None, output_projection=None)
    named = named.at("into.*", linear=recipe.input_projection).at("out", linear=recipe.output_projection)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model, found = Differential().double(), []
    for each in (recipe, named):
        with propagate(model, each) as trace:
            trace.explain(model(x)[..., 1].sum())
        found.append(trace.relevance("x"))
    assert torch.allclose(*found, rtol=0, atol=1e-12)


SIZES = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
RELATIVE = {
    "deberta": (
        tf.DebertaV2ForMaskedLM,
        tf.DebertaV2Config(**SIZES, relative_attention=True, pos_att_type=["c2p"], share_att_key=True),
        ("*.query_proj", "*.key_proj", "*.value_proj", "*.attention.output.dense"),
    ),
    "prophetnet": (
        tf.ProphetNetForCausalLM,
        tf.ProphetNetConfig(
            vocab_size=31, hidden_size=16, num_decoder_layers=2, num_decoder_attention_heads=4, decoder_ffn_dim=24,
            is_decoder=True, add_cross_attention=False,
        ),
        ("*.query_proj", "*.key_proj", "*.value_proj", "*.out_proj"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RELATIVE)
def test_queries_and_keys_whose_scores_are_a_sum(name):
    """Of contents and of places: the numbers of a recipe that names these layers."""
    kind, config, paths = RELATIVE[name]
    torch.manual_seed(0)
    model = kind(config).eval()  # in float64 ProphetNet's masks are no numbers
    with torch.no_grad():
        for each in model.parameters():
            each.add_(0.2 * torch.randn_like(each))
    named = replace(ATTNLRP_VIT, input_projection=None, output_projection=None)
    for path in paths:
        named = named.at(path, linear=Epsilon())
    explainer = Explainer(model)
    expected, found = (explainer([3, 5, 7, 9], 4, position=3, method=each) for each in (named, ATTNLRP_VIT))
    size = float(expected.relevance.abs().max())
    assert torch.allclose(found.relevance, expected.relevance, rtol=0, atol=1e-4 * size)


class Experts(torch.nn.Module):
    """A model of attention, and of experts of which a router mixes what they give, by ``chosen(scores)``: weights, and
    of which experts."""

    def __init__(self, chosen) -> None:
        super().__init__()
        self.chosen = chosen
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(20, 16)
        self.q, self.k, self.v, self.out = (torch.nn.Linear(16, 16) for _ in range(4))
        self.router, self.head = torch.nn.Linear(16, 3), torch.nn.Linear(16, 20)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(3))

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embedding

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(input_ids)
        given = torch.nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), is_causal=True)
        x = x + self.out(given)
        rows = x.flatten(0, 1)
        made = torch.stack([expert(rows) for expert in self.experts], 1)  # [tokens, 3, features]
        weights, best = self.chosen(self.router(rows))
        made = made.gather(1, best[..., None].expand(-1, -1, made.shape[-1]))
        mixed = torch.einsum("tij,ti->tj", made, weights)
        return self.head(x + mixed.view_as(x))


def every(scores):
    return torch.arange(3).expand_as(scores)


def best(scores):
    return scores.argsort(-1, descending=True)[:, :2]


def least(scores):
    return scores.topk(2).values[:, -1:]


ROUTERS = {
    "every expert": lambda s: (s.softmax(-1), every(s)),
    "topk": lambda s: ((some := s.topk(2, -1))[0].softmax(-1), some[1]),
    "sort": lambda s: (s.sort(-1, descending=True).values[:, :2].softmax(-1), best(s)),
    "gather": lambda s: (s.gather(-1, best(s)).softmax(-1), best(s)),
    "index": lambda s: (s[torch.arange(len(s))[:, None], best(s)].softmax(-1), best(s)),
    "scatter": lambda s: (torch.full_like(s, -torch.inf).scatter(-1, best(s), s.topk(2).values).softmax(-1), every(s)),
    "masked": lambda s: (s.masked_fill(s < least(s), -torch.inf).softmax(-1), every(s)),
    "where": lambda s: (torch.where(s < least(s), -torch.inf, s).softmax(-1), every(s)),
    "temperature": lambda s: ((s / 0.7 + 0.1).softmax(-1), every(s)),
    "of log-sigmoids": lambda s: (
        ((of := torch.nn.functional.logsigmoid(s)) - of.logsumexp(-1, keepdim=True)).exp(), every(s)
    ),
    "written out": lambda s: ((e := torch.exp(s)) / e.sum(-1, keepdim=True), every(s)),
    "moved": lambda s: (s.mT.softmax(0).mT, every(s)),
    "another dimension": lambda s: (s[:, :, None].softmax(1)[..., 0], every(s)),
    "in other rows": lambda s: (s.view(1, 2, 2, 3, 1).softmax(3).view_as(s), every(s)),
    "topk, moved": lambda s: ((some := s.T.topk(2, 0))[0].softmax(0).T, some[1].T),
    "written out, moved": lambda s: ((e := torch.exp(s.mT)).div(e.sum(0)).mT, every(s)),
    "largest taken off": lambda s: (
        (e := torch.exp(s - s.amax(-1, keepdim=True))) / e.sum(-1, keepdim=True), every(s)
    ),
}  # fmt: skip


@pytest.mark.parametrize("chosen", ROUTERS.values(), ids=list(ROUTERS))
def test_what_a_router_mixes_is_no_attention(chosen) -> None:
    """The layers of attention alone are projections: the numbers of a recipe that names them."""
    named = replace(ATTNLRP_VIT, input_projection=None, output_projection=None)
    for path in "qkv":
        named = named.at(path, linear=ATTNLRP_VIT.input_projection)
    named = named.at("out", linear=ATTNLRP_VIT.output_projection)
    explainer = Explainer(Experts(chosen).double().eval(), task=Task.CAUSAL)
    expected, found = (explainer([3, 5, 7, 9], 4, method=each).relevance for each in (named, ATTNLRP_VIT))
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def attention(m: Roles, x: torch.Tensor) -> torch.Tensor:
    return m.o((m.q(x) @ m.k(x).mT).softmax(-1) @ m.v(x))


def synthesized(m: Roles, x: torch.Tensor, heads: int) -> torch.Tensor:
    weights = m.w(x).unflatten(-1, (heads, 5)).transpose(1, 2).softmax(-1)
    given = weights @ m.v(x).unflatten(-1, (heads, -1)).transpose(1, 2)
    return x + m.o(given.transpose(1, 2).flatten(2))


def synthesized_by_one_head(m: Roles, x: torch.Tensor) -> torch.Tensor:
    return x + m.o(m.w(torch.relu(m.u(x))).softmax(-1) @ m.v(x))


def additive(m: Roles, x: torch.Tensor) -> torch.Tensor:
    pairs = torch.tanh(m.q(x)[:, :, None] + m.k(x)[:, None])
    return x + m.o(m.w(pairs)[..., 0].softmax(-1) @ m.v(x))


def by_distance(m: Roles, x: torch.Tensor) -> torch.Tensor:
    return x + m.o((-torch.cdist(m.q(x), m.k(x))).softmax(-1) @ m.v(x))


def by_squared_distance(m: Roles, x: torch.Tensor) -> torch.Tensor:
    scores = -(m.q(x)[:, :, None] - m.k(x)[:, None]).square().sum(-1)
    return x + m.o(scores.softmax(-1) @ m.v(x))


def graph(m: Roles, x: torch.Tensor) -> torch.Tensor:
    v = m.v(x)
    return x + m.o(torch.nn.functional.leaky_relu(m.w(v) + m.u(v).mT, 0.2).softmax(-1) @ v)


def by_rows_and_columns(m: Roles, x: torch.Tensor) -> torch.Tensor:
    """Scores that have a table's of places besides, of two rows and two columns, as in SAM where it is not fused."""
    q, k, v = m.q(x), m.k(x)[:, :4], m.v(x)[:, :4]
    places = m.w(q)[:, :, :, None] + m.u(q)[:, :, None, :]
    return x + m.o((q @ k.mT + places.flatten(2)).softmax(-1) @ v)


def by_two_biases(m: Roles, x: torch.Tensor) -> torch.Tensor:
    """Scores of contents and of places, each with a bias of its own, as Transformer-XL, XLNet and Conformers have."""
    q, v = m.q(x), m.v(x)
    scores = (q + m.u.bias) @ m.k(x).mT + (q + 4 * m.w.bias) @ m.constant[0].mT
    return x + m.o(scores.softmax(-1) @ v)


def beside_others(m: Roles, x: torch.Tensor, *, first: bool) -> torch.Tensor:
    """What attention gives, put together with what it does not, before one layer."""
    given, other = (m.q(x) @ m.k(x).mT).softmax(-1) @ m.v(x), torch.relu(m.w(x))
    return x + m.u(torch.cat([given, other] if first else [other, given], 1)).unflatten(1, (2, 5)).sum(1)


def by_temperature(m: Roles, x: torch.Tensor) -> torch.Tensor:
    scores = m.q(x) @ m.k(x).mT * torch.nn.functional.softplus(m.w(x))
    return x + m.o(scores.softmax(-1) @ m.v(x))


def deformable(m: Roles, x: torch.Tensor, heads: int, queries: str = "of the input") -> torch.Tensor:
    q = x if queries == "of the input" else m.constant
    weights = m.w(q).unflatten(-1, (heads, 3)).softmax(-1).transpose(1, 2)
    grid = torch.tanh(m.u(q)).unflatten(-1, (heads, 3, 2)).transpose(1, 2)
    v = m.v(x).unflatten(-1, (heads, -1)).movedim(1, -1)[0][:, :, None]  # [heads, features, 1, places]
    read = torch.nn.functional.grid_sample(v, grid[0], align_corners=False)
    return x + m.o((read * weights[0][:, None]).sum(-1).flatten(0, 1).mT[None])


def over_depth(m: Roles, x: torch.Tensor, spelled: str) -> torch.Tensor:
    states = torch.stack([x, y := x + attention(m, x), y + m.u(y)], 2)
    if spelled == "fused":
        query = m.constant[0, 0].expand(1, 5, 1, 8)
        return torch.nn.functional.scaled_dot_product_attention(query, states, states)[:, :, 0]
    scores = (x[:, :, None] * states).sum(-1) if spelled == "of the input" else states @ m.constant[0, 0]
    if spelled == "summed":
        return (scores.softmax(-1)[..., None] * states).sum(2)
    return torch.einsum("btl,btld->btd", scores.softmax(-1), states)


def streams(m: Roles, x: torch.Tensor) -> torch.Tensor:
    """Hyper-connections."""
    both = x[:, :, None].expand(-1, -1, 2, -1)
    for layer in (attention, lambda m, x: m.u(x)):
        made = m.w(both.flatten(2))
        mixes, back, into = made[..., :4].unflatten(-1, (2, 2)).softmax(-1), *made[..., 4:].sigmoid().chunk(2, -1)
        mixes = mixes / mixes.sum(-2, keepdim=True)
        read = layer(m, (into[..., None] * both).sum(2))
        both = back[..., None] * read[:, :, None] + mixes @ both
    return both.mean(2)


def stacked_experts(m: Roles, x: torch.Tensor) -> torch.Tensor:
    x = x + attention(m, x)
    made = m.u(x[:, :, None] + m.constant[0, :2])  # of one layer, beside a vector of each
    return x + (m.w(x).softmax(-1)[:, :, None] @ made)[:, :, 0]


def repeated_tokens(m: Roles, x: torch.Tensor) -> torch.Tensor:
    """Experts, each of its own tokens, which come twice."""
    x = x + attention(m, x)
    shares, chosen = m.w(x[0]).softmax(-1).topk(2)
    shares, tokens = shares / shares.sum(-1, keepdim=True), x[0].repeat_interleave(2, 0)
    made = torch.zeros_like(tokens)
    for i, expert in enumerate((m.u, m.last, m.into[0])):
        made[chosen.flatten() == i] = expert(tokens[chosen.flatten() == i])
    return x + (made.view(5, 2, 8) * shares[..., None]).sum(1)


def dispatched_tokens(m: Roles, x: torch.Tensor) -> torch.Tensor:
    """Experts, each of as many places as there are tokens, into which one-hot rows move these."""
    x = x + attention(m, x)
    shares = m.w(x).softmax(-1)
    chosen = torch.nn.functional.one_hot(shares.argmax(-1), 3)
    place = torch.nn.functional.one_hot((chosen.cumsum(1) * chosen - 1).clamp(min=0), 5) * chosen[..., None]
    made = torch.einsum("btec,btd->ebcd", place.to(x.dtype), x)
    made = torch.stack([expert(each) for expert, each in zip((m.u, m.last, m.into[0]), made, strict=True)])
    return x + torch.einsum("btec,ebcd->btd", shares[..., None] * place, made)


def gated_features(m: Roles, x: torch.Tensor) -> torch.Tensor:
    x = x + attention(m, x)
    return x + (m.w(x).softmax(-1) * m.u(x)).mean(1, keepdim=True)


def attended_states(m: Roles, x: torch.Tensor) -> torch.Tensor:
    """Of a stack that has no places but its own."""
    both = torch.stack([m.q(x.mean(1)), m.k(x.amax(1))], 1)
    return x + m.o((m.w(torch.tanh(m.u(both))).softmax(1) * both).sum(1, keepdim=True))


def neighbours(x: torch.Tensor, spelled: str) -> torch.Tensor:
    """Those of each place, ``[B, T, 3, d]``."""
    padded = torch.nn.functional.pad(x, (0, 0, 1, 1))
    if spelled == "rolled":
        return torch.stack([x.roll(i, 1) for i in (1, 0, -1)], 2)
    if spelled == "unfolded":
        return padded.unfold(1, 3, 1).mT
    cut = [padded[:, i : i + 5] for i in range(3)]
    return torch.stack(cut, 2) if spelled == "stacked" else torch.cat([each[:, :, None] for each in cut], 2)


def of_neighbours(m: Roles, x: torch.Tensor, spelled: str) -> torch.Tensor:
    k, v = neighbours(m.k(x), spelled), neighbours(m.v(x), spelled)
    return x + m.o(((m.q(x)[:, :, None] * k).sum(-1).softmax(-1)[..., None] * v).sum(2))


def dynamic_convolution(m: Roles, x: torch.Tensor, spelled: str, heads: int) -> torch.Tensor:
    weights, v = m.w(x).unflatten(-1, (heads, 3)).softmax(-1), neighbours(m.v(x), spelled).unflatten(-1, (heads, -1))
    return x + m.o(torch.einsum("bthk,btkhd->bthd", weights, v).flatten(2))


def slots(m: Roles, x: torch.Tensor) -> torch.Tensor:
    shares = m.w(x).softmax(-1) + 1e-8
    return m.o((shares / shares.sum(1, keepdim=True)).mT @ m.v(x))


def of_vectors(m: Roles, x: torch.Tensor) -> torch.Tensor:
    """Weights for each feature, as point transformers have them."""
    weights = m.u(torch.relu(m.q(x)[:, :, None] - m.k(x)[:, None])).softmax(2)
    return x + m.o((weights * m.v(x)[:, None]).sum(2))


def by_key_gates(m: Roles, x: torch.Tensor) -> torch.Tensor:
    """Weights that something as large as a row of them multiplies are no weighed values."""
    weights = (m.q(x) @ m.k(x).mT).softmax(-1) * m.w(x).sigmoid().mT
    return x + m.o(weights @ m.v(x))


def by_elements(m: Roles, x: torch.Tensor, features: str) -> torch.Tensor:
    """Queries and keys that are multiplied element by element, and summed or not."""
    q, k, v = m.q(x)[:, :, None], m.k(x)[:, None], m.v(x)
    if features == "summed":
        return x + m.o(((q * k).sum(-1) * torch.nn.functional.softplus(m.w(x))).softmax(-1) @ v)
    return x + m.o(((q * k).softmax(2) * v[:, None]).sum(2))


def efficient(m: Roles, x: torch.Tensor, spelled: str) -> torch.Tensor:
    """Efficient attention (Shen et al., 2021): queries over features, keys over places."""
    q, k, v = (each(x).unflatten(-1, (2, -1)).transpose(1, 2) for each in (m.q, m.k, m.v))
    q, k = q.softmax(-1), k.softmax(-2)
    products = {
        "values first": lambda: q @ (k.mT @ v),
        "by columns": lambda: ((v.mT @ k) @ q.mT).mT,
        "weights first": lambda: (q @ k.mT) @ v,
    }
    return x + m.o(products[spelled]().transpose(1, 2).flatten(2))


def by_landmarks(m: Roles, x: torch.Tensor, order: str) -> torch.Tensor:
    """Nyströmformer's attention, which is three matrices of weights, one of them inverted by products."""
    q, k, v = m.q(x), m.k(x), m.v(x)
    few_q, few_k = (each[:, :4].unflatten(1, (2, 2)).mean(2) for each in (q, k))
    one, between, other = (a @ b.mT for a, b in ((q, few_k), (few_q, few_k), (few_q, k)))
    one, between, other = (each.softmax(-1) for each in (one, between, other))
    eye, z = torch.eye(2, dtype=x.dtype), between.mT / 2
    z = 0.25 * z @ (13 * eye - between @ z @ (15 * eye - between @ z @ (7 * eye - between @ z)))
    products = {
        "by two": lambda: (one @ z) @ (other @ v),
        "weights first": lambda: (one @ z @ other) @ v,
        "values first": lambda: one @ (z @ (other @ v)),
    }
    return x + m.o(products[order]())


def by_mean_weights(m: Roles, x: torch.Tensor, spelled: str) -> torch.Tensor:
    """Temporal Fusion Transformers' attention, whose heads share their values."""
    q, k = (each(x).unflatten(-1, (2, -1)).transpose(1, 2) for each in (m.q, m.k))
    weights = (q @ k.mT).softmax(-1)
    if spelled == "sum":
        return x + m.o(weights.sum(1) / 2 @ m.v(x))
    if spelled == "stack":
        return x + m.o(torch.stack(list(weights.unbind(1))).mean(0) @ m.v(x))
    if spelled == "einsum":
        return x + m.o(torch.einsum("bhij->bij", weights) / 2 @ m.v(x))
    if spelled == "weighted":
        return x + m.o((weights * m.constant[0, :2, :1, None].softmax(0)).sum(1) @ m.v(x))
    return x + m.o(weights.mean(1) @ m.v(x) if spelled == "mean" else (weights @ m.v(x)[:, None]).mean(1))


def by_branches(m: Roles, x: torch.Tensor, spelled: str) -> torch.Tensor:
    """Native sparse attention: a layer weighs, at each place, what several kinds of attention give."""
    q, k, v = m.q(x), m.k(x), m.v(x)
    each = [(q @ k[:, part].mT).softmax(-1) @ v[:, part] for part in (slice(0, 5), slice(0, 2), slice(2, 5))]
    gates = m.w(x).softmax(-1) if spelled == "by a router" else m.w(x).sigmoid()
    products = {
        "by elements": lambda: (torch.stack(each, -1) * gates[:, :, None]).sum(-1),
        "product": lambda: (torch.stack(each, -1) @ gates[..., None])[..., 0],
    }
    einsum = partial(torch.einsum, "bts,sbtd->btd", gates, torch.stack(each))
    return x + m.o(products.get(spelled, einsum)())


def in_one_block(m: Roles, x: torch.Tensor) -> torch.Tensor:
    """FlashAttention, as its first paper has it, of a text no longer than a block."""
    s = m.q(x) @ m.k(x).mT
    highest = s.amax(-1, keepdim=True)
    p, most = (s - highest).exp(), torch.maximum(highest, torch.full_like(highest, -1e10))
    total = (highest - most).exp() * p.sum(-1, keepdim=True)
    return x + m.o(((highest - most).exp() / total) * (p @ m.v(x)))


def pooled(m: Roles, x: torch.Tensor, spelled: str) -> torch.Tensor:
    """A weight for each place, by one output of a layer, which is no router of one expert."""
    scores, v = m.w(torch.tanh(m.u(x))), m.v(x)
    if spelled == "softmax":
        return x + m.o((scores.softmax(1) * v).sum(1, keepdim=True))
    e = scores.exp()
    if spelled == "moved":
        return x + m.o((e.mT / e.mT.sum(-1, keepdim=True)) @ v)
    given = (e * v).sum(1, keepdim=True) if spelled == "divided after a sum" else e.mT @ v
    return x + m.o(given / e.sum(1, keepdim=True))


def pooled_by_heads(m: Roles, x: torch.Tensor, spelled: str) -> torch.Tensor:
    """A weight for each place and head; as many heads as places, so that shapes do not tell."""
    e, v = m.w(x).exp(), m.v(x).repeat(1, 1, 5).unflatten(-1, (5, 8))
    if spelled == "einsum":
        given = torch.einsum("bth,bthd->bhd", e, v) / e.sum(1)[..., None]
    elif spelled == "moved":
        given = ((e.mT / e.mT.sum(-1, keepdim=True))[:, :, None] @ v.transpose(1, 2))[:, :, 0]
    else:
        given = (e.mT[:, :, None] @ v.transpose(1, 2))[:, :, 0] / e.mT.sum(-1, keepdim=True)
    return x + m.o(given.sum(1, keepdim=True))


def mixed_after_a_move(m: Roles, x: torch.Tensor, more: float = 0.0) -> torch.Tensor:
    """A router's choice among experts, by exponentials that were moved before they are summed; with ``more`` the first
    outweighs the others everywhere."""
    e = (m.w(x) + torch.tensor([more, 0, 0], dtype=x.dtype)).mT.exp()
    experts = torch.stack([torch.tanh(each(x)) for each in (m.q, m.k, m.v)], 1)
    return x + m.u((e[..., None] * experts).sum(1) / e.sum(1)[..., None])


ROLES = {  # the model, the outputs of w and u, and the layers into attention; the one out of it is o
    "a layer makes the weights": (partial(synthesized, heads=2), 10, 8, "wv"),
    "a layer makes the weights of one head": (synthesized_by_one_head, 5, 8, "wuv"),
    "additive": (additive, 1, 8, "wqkv"),
    "by distance": (by_distance, 1, 1, "qkv"),
    "by squared distance": (by_squared_distance, 1, 1, "qkv"),
    "of a graph": (graph, 1, 1, "wuv"),
    "places by rows and columns": (by_rows_and_columns, 2, 2, "qkv"),
    "contents and places, with biases": (by_two_biases, 8, 8, "qkv"),
    "attention beside others": (partial(beside_others, first=True), 8, 8, "qkv"),
    "others beside attention": (partial(beside_others, first=False), 8, 8, "qkv"),
    "temperature": (by_temperature, 1, 1, "qkv"),
    "deformable": (partial(deformable, heads=2), 6, 12, "wv"),
    "deformable, one head": (partial(deformable, heads=1), 3, 6, "wv"),
    "deformable, queries that are constants": (partial(deformable, heads=2, queries="constants"), 6, 12, "v"),
    **{
        f"depth, {name}": (partial(over_depth, spelled=name), 1, 8, "qkv")
        for name in ("fused", "summed", "einsum", "of the input")
    },
    "streams": (streams, 8, 8, "qkv"),
    "experts of one layer": (stacked_experts, 2, 8, "qkv"),
    "experts of repeated tokens": (repeated_tokens, 3, 8, "qkv"),
    "experts of dispatched tokens": (dispatched_tokens, 3, 8, "qkv"),
    "features, then pooled": (gated_features, 8, 8, "qkv"),
    **{
        f"neighbours, {spelled}": (partial(of_neighbours, spelled=spelled), 1, 8, "qkv")
        for spelled in ("stacked", "put together", "rolled", "unfolded")
    },
    "dynamic convolution": (partial(dynamic_convolution, spelled="unfolded", heads=2), 6, 8, "wv"),
    "dynamic convolution, one head": (partial(dynamic_convolution, spelled="stacked", heads=1), 3, 8, "wv"),
    "slots": (slots, 3, 8, "wv"),
    "stacked states without places": (attended_states, 1, 8, "qkwu"),
    "of vectors": (of_vectors, 1, 8, "uqkv"),
    "gated keys": (by_key_gates, 1, 8, "qkv"),
    "by elements": (partial(by_elements, features="summed"), 1, 8, "qkv"),
    "by elements, each by itself": (partial(by_elements, features="each"), 1, 8, "qkv"),
    **{
        f"efficient, {spelled}": (partial(efficient, spelled=spelled), 1, 8, "qkv")
        for spelled in ("values first", "by columns", "weights first")
    },
    **{
        f"by landmarks, {order}": (partial(by_landmarks, order=order), 1, 8, "qkv")
        for order in ("by two", "weights first", "values first")
    },
    **{
        f"mean weights, {spelled}": (partial(by_mean_weights, spelled=spelled), 1, 8, "qkv")
        for spelled in ("mean", "sum", "stack", "einsum", "weighted", "after")
    },
    **{
        f"branches, {spelled}": (partial(by_branches, spelled=spelled), 3, 8, "qkv")
        for spelled in ("by elements", "einsum", "product", "by a router")
    },
    "in one block": (in_one_block, 1, 8, "qkv"),
    **{
        f"pooled, {spelled}": (partial(pooled, spelled=spelled), 1, 8, "wuv")
        for spelled in ("softmax", "moved", "divided after a sum", "divided after a product")
    },
    **{
        f"pooled by heads, {spelled}": (partial(pooled_by_heads, spelled=spelled), 5, 8, "wv")
        for spelled in ("moved", "einsum", "product")
    },
    "experts, exponentials that were moved": (mixed_after_a_move, 3, 8, ""),
    "experts, one of which outweighs the others": (partial(mixed_after_a_move, more=40.0), 3, 8, ""),
}


class Roles(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.made, of_w, of_u, _ = ROLES[name]
        self.into = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.q, self.k, self.v, self.o = (torch.nn.Linear(8, 8) for _ in range(4))
        self.w, self.u = torch.nn.Linear(16 if name == "streams" else 8, of_w), torch.nn.Linear(8, of_u)
        self.last, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 3)
        self.constant = torch.nn.Parameter(torch.randn(1, 5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = sum(layer(x) for layer in self.into)
        return self.head(torch.relu(self.last(self.made(self, x))))


def by_place_and_by_name(recipe: Recipe, into: str) -> tuple[Recipe, Recipe]:
    """A recipe with rules of their own for projections, and one that names the layers that have them: those of one
    letter each into attention, and ``o`` out of it."""
    recipe = replace(recipe, input_projection=Epsilon(0.2), output_projection=Epsilon(0.4))
    named = replace(recipe, input_projection=None, output_projection=None)
    for path in into:
        named = named.at(path, linear=recipe.input_projection)
    return recipe, named.at("o", linear=recipe.output_projection)


def same(model: torch.nn.Module, *recipes: Recipe) -> None:
    """Two recipes give the same relevance."""
    x = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model, found = model.double(), []
    for each in recipes:
        with propagate(model, each) as trace:
            trace.explain(model(x)[0, -1, 1])
        found.append(trace.relevance("x"))
    assert torch.allclose(*found, rtol=0, atol=1e-12)


def in_a_part(made: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    made[..., :5] += more[..., :5]
    return made


ADAPTED = {
    "one": lambda m, x: m.plain(x) + 0.5 * m.up(m.down(x)),
    "two": lambda m, x: m.plain(x) + 0.5 * m.up(m.down(x)) + m.other_up(m.other_down(x)),
    "two first": lambda m, x: (m.up(m.down(x)) + m.other_up(m.other_down(x))) + m.plain(x),
    "with the bias taken off": lambda m, x: (
        (y := m.plain(x)) + (0.3 * (y - m.bias) + m.up(m.down(x))) + m.other_up(m.other_down(x))
    ),
    "of a part, in place": lambda m, x: in_a_part(m.plain(x), m.up(m.down(x))),
    "of some tokens": lambda m, x: m.plain(x).index_add(1, torch.tensor([1, 4]), m.up(m.down(x[:, [1, 4]]))),
    "put beside zeros": lambda m, x: m.plain(x) + torch.nn.functional.pad(m.up(m.down(x))[..., :5], (0, 3)),
    "one after another": lambda m, x: sum([m.plain(x), m.up(m.down(x)), m.other_up(m.other_down(x))]),
    "by a weight that is computed": lambda m, x: (
        m.plain(x) + 0.5 * torch.nn.functional.linear(x, m.up.weight @ m.down.weight)
    ),
    "by one, and another": lambda m, x: (
        m.plain(x) + (torch.nn.functional.linear(x, m.up.weight @ m.down.weight) + m.other_up(m.other_down(x)))
    ),
    "with its own matrix called again": lambda m, x: (
        m.plain(x) + (0.3 * torch.nn.functional.linear(x, m.weight) + 0.5 * m.up(m.down(x)))
    ),
    "beside a weight that is computed": lambda m, x: (
        torch.nn.functional.linear(x, 1.0 * m.weight, m.bias) + 0.5 * m.up(m.down(x))
    ),
    "addmm": lambda m, x: torch.addmm(m.plain(x)[0], m.down(x)[0], m.up.weight.T)[None],
}


class Adapted(torch.nn.Linear):
    """A linear layer with adapters beside it, as LoRA has it."""

    def __init__(self, how: str) -> None:
        super().__init__(8, 8)
        self.how = ADAPTED[how]
        self.down, self.up = torch.nn.Linear(8, 3, bias=False), torch.nn.Linear(3, 8, bias=False)
        self.other_down, self.other_up = torch.nn.Linear(8, 2, bias=False), torch.nn.Linear(2, 8, bias=False)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self, x)


@pytest.mark.parametrize("how", ADAPTED)
@pytest.mark.parametrize("name", ["layer", "without residuals"])
@pytest.mark.parametrize("recipe", [ATTNLRP_VIT, LRP_VIT], ids=lambda recipe: recipe.name)
def test_a_layer_and_its_adapters_are_one_projection(recipe: Recipe, name: str, how: str) -> None:
    """The numbers of a recipe that names the layers; a layer after the projection that is no adapter is none."""
    recipe, named = by_place_and_by_name(recipe, "qkv")
    model = Roles("by distance")
    model.made = attention if name == "layer" else lambda m, x: m.into[1](z := attention(m, m.into[0](x))) + z
    for path in "qkvo":
        setattr(model, path, Adapted(how))
    same(model, recipe, named)


@pytest.mark.parametrize("other", [Gamma(1.0), Epsilon(0.4)], ids=["gamma", "that of projections"])
@pytest.mark.parametrize("path", ["o.up", "o.down", "o.other_up", "q.up", "q.down"])
def test_another_rule_for_a_part_of_a_projection_leaves_the_others_theirs(path: str, other: Epsilon | Gamma) -> None:
    """Also where it takes the rule for projections away there."""
    recipe, named = by_place_and_by_name(ATTNLRP_VIT, "qkv")
    named = named.at(path, linear=other)
    place = "output_projection" if path.startswith("o") else "input_projection"
    model = Roles("by distance")
    model.made = attention
    for each in "qkvo":
        setattr(model, each, Adapted("two"))
    same(model, recipe.at(path, linear=other, **{place: None}), named)


@pytest.mark.parametrize("how", ADAPTED)
@pytest.mark.parametrize("recipe", [ATTNLRP_VIT, LRP_VIT], ids=lambda recipe: recipe.name)
def test_a_layer_behind_the_output_projection_is_none_with_adapters_beside_it(recipe: Recipe, how: str) -> None:
    """As Zamba 2 has it behind a norm, or a head behind attention that pools."""
    recipe, named = by_place_and_by_name(recipe, "qkv")
    model = Roles("by distance")
    model.made, model.into[1] = lambda m, x: m.into[1](attention(m, m.into[0](x))), Adapted(how)
    same(model, recipe, named)


@pytest.mark.parametrize("name", ROLES)
@pytest.mark.parametrize("recipe", [ATTNLRP_VIT, LRP_VIT], ids=lambda recipe: recipe.name)
def test_attention_weighs_places(recipe: Recipe, name: str) -> None:
    """And nothing else is attention, however alike it is written: the numbers of a recipe that names the layers."""
    recipe, named = by_place_and_by_name(recipe, ROLES[name][-1])
    same(Roles(name), recipe, named)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
@pytest.mark.parametrize("name", ROLES)
def test_the_layer_that_makes_the_first_stream_is_no_projection(name: str, normed: bool) -> None:
    """As a linear embedding of patches does, however scores are made of what it gives."""
    recipe, named = by_place_and_by_name(ATTNLRP_VIT, ROLES[name][-1])
    model = Roles(name)
    made, model.into = model.made, model.into[:1]
    model.made = lambda m, x: made(m, torch.nn.functional.layer_norm(x, (8,)) if normed else x)
    same(model, recipe, named)


@pytest.mark.parametrize("recipe", [ATTNLRP_VIT, LRP_VIT], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize(
    ("model_type", "mapping", "others", "into", "out"),
    [
        ("inkling2_text", "causal-lm", ("lm_head", "*.mlp.gate"), ("*.q_proj", "*.0.*.[kv]_proj"), ("*.o_proj",)),
        ("deepseek_v4", "causal-lm", ("*.attn_hc", "*.ffn_hc", "*.o_b_proj"), ("*.self_attn.q_b_proj",), ()),
        ("lw_detr", "object-detection", (), ("*.cross_attn.value_proj",), ("*.cross_attn.output_proj",)),
        ("deformable_detr", "object-detection", (), ("*.value_proj",), ("*.output_proj",)),
    ],
)
def test_layers_around_what_is_like_attention(
    model_type: str, mapping: str, others: tuple[str, ...], into: tuple[str, ...], out: tuple[str, ...], recipe: Recipe
) -> None:
    """Attention over depth, streams that are mixed, and deformable attention whose first queries are constants."""
    if model_type not in tf.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    (model_class,) = choose([model_type], mapping)
    model = tiny_model(model_class)
    inputs = tiny_inputs(model_class, model)
    into = () if recipe is LRP_VIT else into  # queries and keys have nothing there
    recipe = replace(recipe, input_projection=Epsilon(0.2), output_projection=Epsilon(0.4), strict=False)
    with propagate(model, recipe, observe=()) as trace:
        trace.explain(model(**inputs)["logits"].float().square().sum())
    rules = {place.module: place.rule for place in trace.operations if place.operation == "linear"}
    for paths, rule in ((others, recipe.linear), (into, recipe.input_projection), (out, recipe.output_projection)):
        for path in paths:
            found = {name: given for name, given in rules.items() if fnmatchcase(name, path)}
            assert found, path
            assert set(found.values()) == {str(rule)}, found
