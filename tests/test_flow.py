"""The flow of relevance through layers, and its split over paths, against slow twins; pictures of it."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import transformers as tf
from rich.console import Console

import lrpx
from lrpx._views.flow import figure as drawn_figure
from lrpx.attribution import scale
from lrpx.errors import InputError, MethodError
from lrpx.flow import Flow
from lrpx.methods import find
from lrpx.recipes import ATTNLRP, LRP
from lrpx.units import places
from tests import test_patching, tiny
from tests.engine.samples import SAMPLES
from tests.reference import llama, models

IDS = [5, 9, 3, 12, 7, 22, 8]
RECIPES = pytest.mark.parametrize("recipe", [ATTNLRP, LRP], ids=lambda recipe: recipe.name)


@RECIPES
def test_layers_and_heads_are_those_of_the_twin(recipe):
    model = models.tiny_llama()
    expected = llama.explain(model, np.array(IDS), 6, np.eye(31)[5], recipe.name)
    flow = lrpx.Explainer(model).flow(IDS, 5, method=recipe)
    assert torch.allclose(flow["tokens"], torch.tensor(expected.tokens), rtol=0, atol=1e-9)
    assert torch.allclose(flow["residual"][0], torch.tensor(expected.layers[1].sum(-1)), rtol=0, atol=1e-9)
    for layer in range(2):
        for head in range(4):
            for token in range(7):
                one = sum(float(expected.heads[layer][token, head * 4 + i]) for i in range(4))
                assert abs(float(flow["heads"][layer, head, token]) - one) < 1e-9
    with lrpx.propagate(model, recipe) as trace:
        value = model(torch.tensor([IDS])).logits[0, -1, 5]
    trace.explain(value)
    for part, module in (("attention", "self_attn.o_proj"), ("mlp", "mlp.down_proj")):
        for layer in range(2):
            one = trace.relevance(f"model.layers.{layer}.{module}").sum(-1)[0]
            assert torch.allclose(flow[part][layer], one, rtol=0, atol=1e-9)


def cut(model, path, keep):
    """A copy of the gradient of a logit, where of what arrives at a module's input only some features pass; or, for
    None, nothing does: with torch's own hooks, under no rule."""
    seen = []
    module = model.get_submodule(path)

    def before(_, args):
        x = args[0] * 1
        x.register_hook(lambda g: g * keep)
        seen.append(x)
        return (x,)

    with module.register_forward_pre_hook(before):
        embedded = model.model.embed_tokens.weight[torch.tensor([IDS])].detach().requires_grad_()
        logit = model(inputs_embeds=embedded).logits[0, -1, 5]
    (gradient,) = torch.autograd.grad(logit, embedded)
    return (embedded.detach() * gradient).sum(-1)[0]


@pytest.mark.parametrize(("kind", "module"), [("heads", "self_attn.o_proj"), ("neurons", "mlp.down_proj")])
@pytest.mark.parametrize("layer", [0, 1])
def test_paths_are_what_hooks_that_cut_leave(kind, module, layer):
    """Gradient × Input, where torch's own hooks can cut: a path is the whole less what is left without its unit."""
    model = models.tiny_llama()
    path = f"model.layers.{layer}.{module}"
    place = places(model, kind)[layer]
    wide = place.width * place.size
    whole, past = cut(model, path, torch.ones(wide)), cut(model, path, torch.zeros(wide))
    found = lrpx.Explainer(model).paths(IDS, 5, layer=layer, kind=kind, units=[2, 0], method="gradient-x-input")
    rows = found.parts["paths"].values
    for row, unit in zip(rows, (2, 0), strict=False):
        keep = torch.ones(wide)
        keep[list(place.features(unit))] = 0
        assert torch.allclose(row, whole - cut(model, path, keep), rtol=0, atol=1e-9)
    assert torch.allclose(rows[3], past, rtol=0, atol=1e-9)
    one = kind.removesuffix("s")
    assert found.parts["paths"].labels["unit"] == (f"{one} 2", f"{one} 0", f"all other {kind}", f"past the {kind}")


@RECIPES
@pytest.mark.parametrize("kind", ["heads", "neurons"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mamba", "bart"])
def test_all_paths_sum_to_the_whole(name, kind, recipe):
    if (name, kind) == ("mamba", "heads"):
        pytest.skip("Mamba has no heads")
    built = {"bart": tiny.bart, "llama": models.tiny_llama}.get(name, SAMPLES[name].build)
    explainer = lrpx.Explainer(built())
    lost = 1e-6 if name == "mamba" else 1e-9  # its norms compute in float32
    how = {"decoder": [2, 5, 9]} if name == "bart" else {}
    how |= {"position": 3} if name == "bert" else {}
    layers = [place.path for place in places(explainer.model, kind)]
    whole = explainer(IDS, 5, method=recipe, **how)
    for layer in layers:
        found = explainer.paths(IDS, 5, layer=layer, kind=kind, units=3, method=recipe, **how)
        rows = found.parts["paths"].values
        assert torch.allclose(found.relevance, whole.relevance, rtol=0, atol=lost)
        assert torch.allclose(rows.sum(0), whole.relevance, rtol=0, atol=lost)
        assert rows.abs().sum(1).min() > 0 or layer == layers[-1]
        assert found.explained == whole.explained


def test_the_units_are_named_or_the_most_relevant():
    explainer = lrpx.Explainer(models.tiny_llama())
    found = explainer.paths(IDS, 5, layer=1, kind="neurons", units=24)
    assert len(found.parts["paths"].labels["unit"]) == 26
    assert float(found.parts["paths"].values[-2].abs().max()) == 0  # no others are left
    ranked = [row for row in explainer.neurons([IDS], 5, top=99) if row.layer == 1]
    assert found.parts["paths"].labels["unit"][0] == f"neuron {ranked[0].unit}"


def test_an_encoder_and_a_decoder_have_their_own_layers():
    flow = lrpx.Explainer(tiny.bart()).flow([4, 8, 2], 7, decoder=[2, 5, 9])
    assert flow["residual"].shape == (4, 6)
    assert flow["residual"][:2, 3:].abs().max() == 0
    assert flow["residual"][:2, :3].abs().max() > 0
    assert "heads" not in flow.attribution.parts  # a decoder's layer has two attentions


def test_other_families():
    for name in ("mamba", "mixtral", "albert"):
        dtype = torch.float32 if name == "mixtral" else torch.float64
        refused = pytest.warns(UserWarning, match="without MLPs: MixtralForCausalLM computes its MLPs inside")
        with refused if name == "mixtral" else contextlib.nullcontext():
            flow = lrpx.Explainer(SAMPLES[name].build(dtype)).flow(IDS, 5, position=3 if name == "albert" else None)
        assert flow["residual"].shape == (2, 7)
        assert ("heads" in flow.attribution.parts) == (name != "mamba")
        assert ("mlp" in flow.attribution.parts) == (name != "mixtral")


def test_a_layer_without_attention_shows_no_head():
    config = tf.JambaConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=32,
        vocab_size=40, attn_layer_period=2, attn_layer_offset=1, num_experts=1, mamba_d_state=4,
        use_mamba_kernels=False,
    )  # fmt: skip
    flow = lrpx.Explainer(tf.JambaForCausalLM(config).double().eval()).flow(IDS, 5)
    rows = [[cell.strip() for cell in line.split("│")] for line in str(flow).splitlines() if line.startswith("│ ")]
    assert ": " in rows[0][5]
    assert rows[1][5] == ""
    assert flow.to_html().count("head 3:") == len(IDS)


@pytest.fixture(scope="module")
def bundled():
    return lrpx.Explainer.from_pretrained()


def test_it_is_kept_and_shown(bundled, tmp_path):
    flow = bundled.flow("The <b>doors</b> & more", " are")
    flow.save(tmp_path / "flow.safetensors")
    assert Flow.load(tmp_path / "flow.safetensors") == flow
    page = flow.to_html(tmp_path / "flow.html")
    assert page == (tmp_path / "flow.html").read_text()
    assert "<b>doors" not in page + flow._repr_html_()
    assert "<script" not in page
    layers, tokens = flow["residual"].shape
    for layer in range(layers):
        for token in range(tokens):
            assert page.count(f'href="#c{layer}-{token}"') == page.count(f'id="c{layer}-{token}"') == 1
    assert page.count("head 7:") == layers * tokens
    assert "href" not in flow._repr_html_()
    assert len(flow.to_dataframe("heads")) == layers * tokens * 8


def test_the_table(bundled):
    flow = bundled.flow("The <b>doors</b> & [red]more", " are")
    said = str(flow)
    for layer in range(6):
        (line,) = (line for line in said.splitlines() if line.startswith(f"│ {layer} "))
        cells = [cell.strip() for cell in line.split("│")[1:-1]]
        for cell, part in zip(cells[1:4], ("residual", "attention", "mlp"), strict=True):
            assert float(cell) == pytest.approx(float(flow[part][layer].sum()), rel=1e-3)
        head, amount = cells[4].split(": ")
        heads = flow["heads"][layer].sum(-1)
        assert int(head) == int(heads.abs().argmax())
        assert float(amount) == pytest.approx(float(heads[int(head)]), rel=1e-3)
        best = flow.tokens[int(flow["residual"][layer].abs().argmax())]
        assert cells[5].startswith(best.strip())
    assert "layers of model.layers" in said
    albert = lrpx.Explainer(SAMPLES["albert"].build()).flow(IDS, 5, position=3)
    assert "│ albert_layer_groups.0#1 │" in str(albert) or "│ 0#1 " in str(albert)
    assert "encoder.layers.1" in str(lrpx.Explainer(tiny.bart()).flow([4, 8, 2], 7, decoder=[2, 5, 9]))


def test_long_texts_are_shown_in_blocks(bundled):
    flow = bundled.flow("The doors of the house " * 20, " are")
    assert len(flow.tokens) > 64
    assert "tokens in blocks of 2" in flow.to_html()


def test_the_picture(bundled, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    flow = bundled.flow("The $x_1$ <doors> 中", " are")
    assert flow.to_png(tmp_path / "flow.png").startswith(b"\x89PNG")
    assert (tmp_path / "flow.png").stat().st_size > 10_000
    told = drawn_figure(flow, 6.5).get_suptitle()
    largest = max(scale(flow[part].flatten())[0] for part in ("residual", "attention", "mlp"))
    assert told.endswith(f"red speaks for, blue against; the colours end at ±{largest:.4g}")


def test_what_is_refused(bundled):
    with pytest.raises(MethodError, match="no heads in layer 6; there are in 0 to 5"):
        bundled.paths("The doors", layer=6)
    with pytest.raises(MethodError, match="no paths through 'keys'"):
        bundled.paths("The doors", layer=1, kind="keys")
    with pytest.raises(MethodError, match="has 8 heads; 8 is none"):
        bundled.paths("The doors", layer=1, units=[8])
    for units in ([], 0, [-1], [0.5]):
        with pytest.raises(InputError, match="pass how many"):
            bundled.paths("The doors", layer=1, units=units)
    with pytest.raises(MethodError, match="stands twice"):
        bundled.paths("The doors", layer=1, units=[1, 1])
    with pytest.raises(InputError, match="pass one text"):
        bundled.flow(["The doors"])
    with pytest.raises(MethodError, match="tells nothing of"):
        bundled.flow("The doors", method="ifr")
    with pytest.raises(MethodError, match="pass the path of one of them"):
        lrpx.Explainer(tiny.bart()).paths([4, 8, 2], layer=1, decoder=[2])


def test_paths_of_a_decoder_beside_a_sound():
    """Whose encoder is given numbers where another looks tokens up."""
    model = SAMPLES["whisper"].build()
    batch = {name: value[:1] for name, value in SAMPLES["whisper"].batch().items()}
    found = lrpx.Explainer(model).paths(batch, 7, layer="model.decoder.layers.1.fc2", kind="neurons", units=2)
    assert float(found.relevance.abs().sum()) > 0


@pytest.mark.parametrize("of", ["both", "positions"])
def test_tokens_that_have_more_than_their_embeddings_are_refused(of, bundled):
    positions = replace(find("pa-lrp-single-sink"), name="mine", of=of)
    for followed in (bundled.flow, partial(bundled.paths, layer=2)):
        with pytest.raises(MethodError, match="mine gives a token what its position has"):
            followed("The doors", method=positions)


@pytest.mark.parametrize("name", ["pa-lrp-tokens", "attnlrp", "gim"])
def test_tokens_are_those_of_the_method(name, bundled):
    alone = bundled("The doors of", " the", method=name).relevance
    for found in (
        bundled.flow("The doors of", " the", method=name),
        bundled.paths("The doors of", " the", layer=2, method=name),
    ):
        assert torch.allclose(getattr(found, "attribution", found).relevance, alone, rtol=0, atol=1e-4)


@pytest.mark.parametrize("width", [20, 40, 50, 60, 70, 80])
def test_a_terminal_cuts_no_number_in_two(width):
    """A cell of tokens has their numbers in it, "+6.9" and below it "48"."""
    flow = lrpx.Explainer.from_pretrained().flow("The ice bear lives in the")
    out = io.StringIO()
    Console(file=out, width=width).print(flow)
    stream = flow["residual"][0]
    assert f"{float(stream[stream.abs().argmax()]):+.4g}" in re.split(r"[\s│]+", out.getvalue())


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "olmo2"])
def test_a_branch_is_what_it_gives_behind_its_norm(name):
    """Gradient × Input, by torch alone: before a norm it sums to nothing, for the norm takes the length away."""
    model = SAMPLES[name].build() if name in SAMPLES else test_patching.olmo2()
    ends = {"attention": "post_attention_layernorm", "mlp": "post_feedforward_layernorm"}
    seen = {}

    def hook(path):
        return lambda _, args, out: (out.retain_grad(), seen.update({path: out}))[0]

    handles = [
        module.register_forward_hook(hook(path))
        for path, module in model.named_modules()
        if path.endswith(tuple(ends.values()))
    ]
    model(torch.tensor([IDS])).logits[0, -1, 5].backward()
    for each in handles:
        each.remove()
    wanted = {path: (out * out.grad).sum(-1)[0].detach().double() for path, out in seen.items()}
    explainer = lrpx.Explainer(model)
    flow = explainer.flow(IDS, 5, method="gradient-x-input")
    for part, end in ends.items():
        rows = torch.stack([each for path, each in sorted(wanted.items()) if path.endswith(end)])
        assert torch.allclose(flow[part], rows, rtol=0, atol=1e-6 * float(rows.abs().max()))
        best = explainer.neurons(IDS, 5, kind=part, method="gradient-x-input", top=1)[0]
        assert abs(best.relevance) == pytest.approx(float(rows.abs().max()), rel=1e-5)
        assert best.path.endswith(end)
