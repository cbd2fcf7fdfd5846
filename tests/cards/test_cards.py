"""A neuron's card: its passages explained, the vocabulary of its row, and where it is found again."""

from __future__ import annotations

import copy
import io
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from tokenizers import normalizers
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

import lrpx
from lrpx.cards import Collection, Lens, References, card, collect, explain_units, index_page, page, search
from lrpx.cards._lens import _scale
from lrpx.engine import propagate
from lrpx.errors import DataError, InputError, MethodError, ModelError, TargetError
from lrpx.model import BoundModel, Spec
from lrpx.units import places
from tests import tiny
from tests.cards import samples
from tests.cards.samples import TEXTS, corpus
from tests.reference import models
from tests.reference import references as twin

ALL = ("activation", "negative activation", "relevance")


@pytest.fixture
def model(byte_tokenizer):
    return samples.llama(byte_tokenizer)


@pytest.fixture
def references(model, tmp_path):
    return collect(Collection(model, corpus(tmp_path), ALL, k=4), tmp_path / "run")


# ---------------------------------------------------------------------------- an inner value


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_an_activation_is_explained_as_propagate_explains_it(name, byte_tokenizer):
    model = getattr(samples, name)(byte_tokenizer)
    place = places(model.module, "neurons")[1]
    rows = [model.reader.row(text) for text in TEXTS[:4]]
    units, positions = [3, 3, 20, 0], [2, 9, 5, 0]
    found = explain_units(model, rows, place, units, positions)
    for row, unit, position, a in zip(rows, units, positions, found, strict=True):
        with propagate(model.module, lrpx.ATTNLRP, [place.path]) as trace:
            model.module(input_ids=torch.tensor([row.tokens.ids]))
            (entered,) = (each.value for each in trace.places if each.side == "input")
            value = trace.explain(entered[0, position, unit])
        wanted = trace.source_relevance(trace.sources[0])[0].sum(-1)
        torch.testing.assert_close(a.relevance, wanted, rtol=0, atol=1e-9)
        assert a.explained.value == pytest.approx(float(value), abs=1e-9)
        assert a.explained.position == position
        assert a.explained.description == f"activation of neuron {unit} of layer 1"
        assert a.relevance[position + 1 :].abs().sum() == 0
    with pytest.raises(InputError, match="position 99 of a text of"):
        explain_units(model, rows[:1], place, [0], [99])


def test_an_activation_closes_with_its_ledger(model):
    """Of the first layer's neurons: what tokens, biases and the softmax have is the activation."""
    place = places(model.module, "neurons")[0]
    ids = torch.tensor([model.reader.row(TEXTS[0]).tokens.ids])
    with propagate(model.module, lrpx.ATTNLRP, [place.path], ledger=True) as trace:
        model.module(input_ids=ids)
        (entered,) = (each.value for each in trace.places if each.side == "input")
        trace.explain(entered[0, 7, 3])
    (a,) = explain_units(model, [model.reader.row(TEXTS[0])], place, [3], [7])
    assert trace.ledger().closes(1e-9)
    assert float(a.relevance.sum()) == pytest.approx(trace.ledger().by_kind()["tokens"], abs=1e-9)


# ---------------------------------------------------------------------------- the lens


def weights(model, name, path):
    module = model.module.get_submodule(path)
    return (module.weight if name == "gpt2" else module.weight.T).double().numpy()


@pytest.mark.parametrize(
    ("name", "norm", "centred"), [("llama", "model.norm", False), ("gpt2", "transformer.ln_f", True)]
)
def test_the_lens_is_the_formula(name, norm, centred, byte_tokenizer):
    model = getattr(samples, name)(byte_tokenizer)
    (_, place) = places(model.module, "neurons")
    lens = Lens.of(model, [place])
    assert lens.final.centred == centred
    directions = lens.directions(model.module.get_submodule(place.path), place.path)
    unembedding = model.module.get_output_embeddings().weight.double().numpy()
    scale = model.module.get_submodule(norm).weight.double().numpy()
    rows = weights(model, name, place.path)
    for unit in (0, 11):
        wanted = twin.lens(unembedding, scale, centred, rows[unit])
        np.testing.assert_allclose(lens.logits(directions[unit]).numpy(), wanted, atol=1e-5)
    token = 17
    logits = lens.logits(directions)
    standardised = (logits[:, token] - logits.mean(1)) / logits.std(1, correction=0)
    torch.testing.assert_close(lens.scores(directions, token), standardised, rtol=1e-4, atol=1e-4)


def test_the_lens_is_what_the_neuron_adds_to_the_logits(model):
    """More of a neuron of the last layer, the norm's deviation held as it is: the logits move by the lens."""
    place = places(model.module, "neurons")[-1]
    lens = Lens.of(model, [place])
    direction = lens.directions(model.module.get_submodule(place.path), place.path)[5]
    ids = torch.tensor([[5, 6, 7]])
    streams = {}
    handle = model.module.model.norm.register_forward_pre_hook(lambda _, args: streams.__setitem__("x", args[0]))
    with torch.no_grad():
        model.module(input_ids=ids)
    handle.remove()
    x = streams["x"][0, -1]
    row = model.module.get_submodule(place.path).weight[:, 5]
    deviation = x.square().mean().sqrt()
    before, after = (
        model.module.lm_head(model.module.model.norm.weight * each / deviation) for each in (x, x + 0.5 * row)
    )
    torch.testing.assert_close(
        (after - before).float(), lens.logits(0.5 * direction) / deviation.float(), rtol=1e-4, atol=1e-5
    )


def test_a_norm_behind_the_mlp_comes_first():
    """Gemma 3's scales are 1 + w, and one stands between its MLPs and the stream."""
    import transformers as tf

    sizes = {"num_key_value_heads": 2, "head_dim": 4, "sliding_window": 8, "pad_token_id": 0}
    config = tf.Gemma3TextConfig(**tiny.SIZES | sizes)
    model = BoundModel(tiny.build(tf.Gemma3ForCausalLM, config), None)
    place = places(model.module, "neurons")[1]
    lens = Lens.of(model, [place])
    layer = model.module.model.layers[1]
    row = layer.mlp.down_proj.weight[:, 4].double()
    behind, final = (1 + norm.weight.double() for norm in (layer.post_feedforward_layernorm, model.module.model.norm))
    wanted = model.module.lm_head.weight.double() @ (final * behind * row)
    found = lens.logits(lens.directions(layer.mlp.down_proj, place.path)[4])
    torch.testing.assert_close(found.double(), wanted.detach(), rtol=1e-4, atol=1e-4)


def test_a_norm_without_a_scale():
    """OLMo's LayerNorms have no weights: the mean is taken off, and no more."""
    import transformers as tf

    config = tf.OlmoConfig(**tiny.SIZES | {"num_key_value_heads": 2, "pad_token_id": 0})
    model = BoundModel(tiny.build(tf.OlmoForCausalLM, config), None)
    place = places(model.module, "neurons")[1]
    lens = Lens.of(model, [place])
    module = model.module.get_submodule(place.path)
    row = module.weight[:, 4].double()
    wanted = model.module.lm_head.weight.double() @ (row - row.mean())
    found = lens.logits(lens.directions(module, place.path)[4])
    torch.testing.assert_close(found.double(), wanted.detach(), rtol=1e-4, atol=1e-4)


MULTIPLYING = {
    "Granite": ({"residual_multiplier": 0.22, "logits_scaling": 8.0}, 0.22 / 8.0),
    "Cohere": ({"logit_scale": 0.0625}, 0.0625),
    "Gemma2": ({"head_dim": 4, "final_logit_softcapping": 5.0}, 1.0),
}


@pytest.mark.parametrize("name", MULTIPLYING)
def test_constants_that_a_model_multiplies_by_come_in(name):
    """Behind the MLP and behind the head, and no more: a soft cap of the logits is left out."""
    import transformers as tf

    more, gain = MULTIPLYING[name]
    config = getattr(tf, f"{name}Config")(**tiny.SIZES | {"num_key_value_heads": 2, "pad_token_id": 0} | more)
    model = BoundModel(tiny.build(getattr(tf, f"{name}ForCausalLM"), config, "eager"), None)
    for place in places(model.module, "neurons"):
        lens = Lens.of(model, [place])
        module = model.module.get_submodule(place.path)
        row = module.weight.detach()[:, 4].float()
        if place.path in lens.branch:
            row = lens.branch[place.path](row)
        wanted = gain * lens.logits(lens.final(row))
        found = lens.logits(lens.directions(module, place.path)[4])
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def test_constants_behind_a_mamba_come_in_where_an_mlp_follows_in_its_layer():
    """What the MLP makes of the Mamba's part of the stream is no gain of the Mamba, and hides none."""
    import transformers as tf

    mamba = {"mamba_n_heads": 8, "mamba_d_head": 4, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_expand": 2}
    more = {"num_key_value_heads": 2, "pad_token_id": 0, "num_local_experts": 0, "num_experts_per_tok": 0}
    given = {"shared_intermediate_size": 24, "residual_multiplier": 0.22, "layer_types": ["mamba", "attention"]}
    config = tf.GraniteMoeHybridConfig(**tiny.SIZES | more | mamba | given)
    model = BoundModel(tiny.build(tf.GraniteMoeHybridForCausalLM, config, "eager"), None)
    found = places(model.module, "neurons")
    assert [place.path.rpartition(".")[2] for place in found] == ["out_proj", "output_linear", "output_linear"]
    for place in found:
        (gain,) = Lens.of(model, [place]).gains.values()
        torch.testing.assert_close(gain, torch.full((16,), 0.22))


def test_models_without_a_vocabulary(byte_tokenizer):
    bert = BoundModel(models.tiny_bert(vocab_size=340), byte_tokenizer)
    classifier = BoundModel(tiny.bert_classifier(vocab_size=340, pad_token_id=0), byte_tokenizer)
    with pytest.raises(ModelError, match=r"no head over a vocabulary"):
        Lens.of(classifier)
    with pytest.raises(ModelError, match=r"before the head of BertForMaskedLM stands more than a norm"):
        Lens.of(bert, places(bert.module, "neurons"))  # a dense layer and an activation


# ---------------------------------------------------------------------------- the card


def test_a_card(references, model):
    found = card(references, 1, 7, model, passages=3, words=5)
    assert set(found.passages) == set(ALL)
    for name, some in found.passages.items():
        assert [each.passage for each in some] == references.passages(1, 7, name)[:3]
        for each in some:
            text = TEXTS[(each.passage.line - 1) // 2]
            assert "".join(each.attribution.tokens).strip() == text
            assert each.attribution.explained.position == each.passage.position
            if name != "relevance":
                assert each.attribution.explained.value == pytest.approx(each.passage.value, rel=1e-5)
    assert [len(found.top), len(found.bottom)] == [5, 5]
    assert found.top[0].logit > found.top[4].logit > found.bottom[4].logit > found.bottom[0].logit
    assert sum(count for *_, count in found.peaks) == found.texts == len(TEXTS)
    assert [count for *_, count in found.histogram] == references.counts(1, 7)
    told = references.passages(1, 7, "relevance")
    assert sum(count for _, count, _ in found.relevant_for) == len(told)
    assert sum(value for *_, value in found.relevant_for) == pytest.approx(sum(each.value for each in told))


def test_cards_that_there_are_not(references, model, tmp_path):
    with pytest.raises(MethodError, match=r"there is no layer 2; the layers with neurons are 0 to 1"):
        card(references, 2, 0, model)
    with pytest.raises(MethodError, match=r"layer 1 has 24 neurons, 0 to 23; 24 is none of them"):
        card(references, 1, 24, model)
    with pytest.raises(ModelError, match="loaded by no name"):
        card(references, 1, 0)
    other = BoundModel(models.tiny_llama(vocab_size=340, seed=1), model.tokenizer)
    with pytest.raises(ModelError, match="with other weights, or another config, than"):
        card(references, 1, 0, other)
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(ModelError, match=r"another tokenizer than that of .* reads them"):
        card(references, 1, 0, BoundModel(model.module, tokenizer))
    moved = tmp_path / "moved.txt"
    (tmp_path / "corpus.txt").rename(moved)
    with pytest.raises(DataError, match=r"cannot read .*; name the corpus with corpus="):
        card(references, 1, 0, model)
    assert card(references, 1, 0, model, corpus=moved).texts == len(TEXTS)
    moved.write_text("something else\n")
    with pytest.raises(DataError, match="is another file than the one that was collected"):
        card(references, 1, 0, model, corpus=moved)


def test_a_model_without_a_vocabulary_has_a_card(byte_tokenizer, tmp_path):
    model = BoundModel(tiny.bert_classifier(vocab_size=340, pad_token_id=0), byte_tokenizer)
    found = card(collect(Collection(model, corpus(tmp_path), ALL, k=2), tmp_path / "run"), 0, 3, model)
    assert not found.top
    assert "no head over a vocabulary" in found.note
    assert found.note in page(found).replace("&#39;", "'")


# ---------------------------------------------------------------------------- how it is shown

HOSTILE = [
    "a </script><script>alert(1)</script> b",
    '<img src=x onerror="alert(1)"> & " \' `',
    "x \x1b[31mred \u202eback\u202c y",
    "{{ 7 * 7 }} {% raw %}",
]


@pytest.fixture
def hostile(model, tmp_path):
    return collect(Collection(model, corpus(tmp_path, HOSTILE), ALL, k=4), tmp_path / "run")


def test_hostile_text_is_text(hostile, model):
    html = page(card(hostile, 0, 0, model))
    index = index_page(hostile, model)
    assert "<script" not in html
    assert "<img" not in html + index
    assert "49" not in re.findall(r"\b49\b", html)
    assert index.count("<script") == index.count("</script>") == 2  # the data, and the one that is known by its hash
    assert not re.search("[\x1b\u202e]", html + index)
    console = Console(width=100, file=io.StringIO(), force_terminal=False)
    console.print(card(hostile, 0, 0, model))
    assert not re.search("[\x1b\u202e]", console.file.getvalue())


def test_the_index_has_every_neuron(references, model):
    import json

    done = []
    html = index_page(references, model, done=done.append)
    data = json.loads(re.search(r'id="units">(.*?)</script>', html)[1])
    assert len(data["units"]) == sum(done) == 48
    layer, unit, top, bottom, peaks, highest = data["units"][31]
    assert (layer, unit) == (1, 7)
    made = card(references, 1, 7, model, words=6)
    assert [data["words"][i].strip() for i in top] == [each.text.strip() for each in made.top]
    assert [data["words"][i].strip() for i in bottom] == [each.text.strip() for each in made.bottom]
    assert float(highest) == pytest.approx(references.passages(1, 7)[0].value, rel=1e-3)
    wanted = {model.label(each.token).strip() for each in references.passages(1, 7)}
    assert {data["words"][i].strip() for i in peaks} == wanted


@pytest.mark.parametrize(
    ("measure", "told", "head"),
    [
        ("activation", "its activation is highest", "Highest"),
        ("negative activation", "its activation is lowest", "Lowest"),
        ("relevance", "its relevance is highest", "Highest"),
    ],
)
def test_the_index_tells_what_its_numbers_are(measure, told, head, references, model):
    import json

    html = index_page(references, model, measure=measure)
    assert told in html
    assert f">{head}</th>" in html
    for layer, unit, *_, best in json.loads(re.search(r'id="units">(.*?)</script>', html)[1])["units"]:
        wanted = references.passages(layer, unit, measure)[0].value
        assert float(best) == pytest.approx(wanted, rel=1e-3)


def test_an_index_of_units_that_were_ranked_by_something_else_is_refused(model, tmp_path):
    found = collect(Collection(model, corpus(tmp_path), ("relevance",), k=4), tmp_path / "run")
    with pytest.raises(InputError, match=r"ranked by relevance, not by activation; collect them again"):
        index_page(found, model)
    assert "units" in index_page(found, model, measure="relevance")


def test_in_the_terminal(references, model):
    console = Console(width=100, file=io.StringIO())
    console.print(card(references, 1, 7, model, passages=2))
    said = console.file.getvalue()
    for each in ("Neuron 7 of layer 1", "raises", "lowers", "highest negative activation", "most often relevant for"):
        assert each in said


@pytest.mark.parametrize("width", [24, 30, 40, 57, 100])
def test_no_count_is_cut_off_in_a_narrow_terminal(width, references, model):
    made = card(references, 1, 7, model, passages=1)
    counts = [1_234_567 + i for i in range(len(made.histogram))]
    histogram = [(low, high, count) for (low, high, _), count in zip(made.histogram, counts, strict=True)]
    console = Console(width=width, file=io.StringIO())
    console.print(replace(made, histogram=histogram))
    lines = console.file.getvalue().splitlines()
    assert all(any(line.endswith(f"{count:,}") for line in lines) for count in counts)
    assert max(map(len, lines)) <= width


# ---------------------------------------------------------------------------- search


def test_by_what_it_writes(references, model):
    (first, second) = search(references, "key", "writes", model, top=2)
    assert abs(first.score) >= abs(second.score)
    every = search(references, "key", "writes", model, top=48)
    assert len({(each.layer, each.unit) for each in every}) == 48
    place = places(model.module, "neurons")[first.layer]
    lens = Lens.of(model, [place])
    logits = lens.logits(lens.directions(model.module.get_submodule(place.path), place.path)[first.unit])
    token = model.index("key")
    assert first.score == pytest.approx(float((logits[token] - logits.mean()) / logits.std(correction=0)), rel=1e-3)


def test_by_where_it_peaks_and_by_passages(references, model):
    def counted(text, unit, layer, by):
        passages = references.passages(layer, unit)
        if by == "peaks":
            return sum(model.label(each.token).strip().casefold() == text for each in passages)
        return sum(text in TEXTS[(each.line - 1) // 2].casefold() for each in passages)

    for by in ("peaks", "passages"):
        hits = {(each.layer, each.unit): each for each in search(references, "The", by, model, top=99)}
        for layer in (0, 1):
            for unit in range(24):
                wanted = counted("the", unit, layer, by)
                found = hits.get((layer, unit))
                assert (found.score if found else 0) == wanted
                assert found is None or found.of == 4
        scores = [each.score for each in hits.values()]
        assert scores == sorted(scores, reverse=True)
    assert search(references, "nothing like it", "passages", model) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["rms", "gemma", "layer"])
def test_a_norm_with_one_large_scale_is_read_in_every_precision(kind, dtype):
    """In bfloat16 1 + w was taken for w, and a norm that takes no mean off for one that does."""
    scale = torch.rand(64, generator=torch.Generator().manual_seed(0)) * 4 + 2
    scale[10] = 400.0
    made = {"rms": nn.RMSNorm(64), "gemma": Gemma3RMSNorm(64), "layer": nn.LayerNorm(64)}[kind].to(dtype)
    made.weight.data.copy_(scale)
    found = _scale(made, "norm", torch.device("cpu"))
    assert found.centred == (kind == "layer")
    torch.testing.assert_close(found.weight, made.weight.detach().float() + (kind == "gemma"), rtol=0, atol=0)


@pytest.mark.parametrize("side", ["right", "left"])
def test_by_passages_finds_no_word_that_was_cut_away(side, model, tmp_path):
    tokenizer = model.reader.text_tokenizer
    tokenizer.truncation_side = side
    references = collect(Collection(model, corpus(tmp_path), k=7, context=8, long="cut"), tmp_path / "run")
    for text in ("The", "table", "old", "x", "."):
        kept = [tokenizer.decode(tokenizer(each, truncation=True, max_length=8)["input_ids"]) for each in TEXTS]
        wanted = sum(text.casefold() in each.casefold() for each in kept)
        hits = search(references, text, "passages", model, top=99)
        assert {(each.score, each.of) for each in hits} == ({(wanted, 7)} if wanted else set())
        assert len(hits) == (48 if wanted else 0)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (("key", "sounds"), InputError, "searched by writes, peaks, passages; 'sounds' is none of them"),
        ((" ",), InputError, "the text to search for is empty"),
        (("of many tokens",), TargetError, "of many tokens"),
    ],
)
def test_searches_that_are_none(arguments, error, match, references, model):
    with pytest.raises(error, match=match):
        search(references, *arguments, model=model)
    with pytest.raises(InputError, match="not by nonsense; collect them again"):
        search(references, "key", "peaks", model, measure="nonsense")


def test_the_model_is_loaded_as_it_was(tmp_path):
    path = corpus(tmp_path, TEXTS[:2])
    collect(Collection(Spec(dtype="float64").build(), path, k=2), tmp_path / "run")
    references = References.read(tmp_path / "run")
    assert references.model().dtype == "float64"
    assert card(references, 0, 0, passages=1).model == "lrpx bundled model"
