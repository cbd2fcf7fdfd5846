"""Collecting: what a plain sort over everything keeps, in batches, in parts, stopped and started again."""

from __future__ import annotations

import csv
import time
from copy import deepcopy

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from lrpx.cards import Collection, References, collect
from lrpx.cards._collect import EVERY, REFERENCES, _first
from lrpx.cards._references import BINS, edges, octave
from lrpx.errors import DataError, InputError, MethodError, ModelError, NonFiniteError, ResultFileError, TraceError
from lrpx.model import BoundModel
from lrpx.runs import Store, digest
from lrpx.tasks import Task
from tests import tiny
from tests.cards import samples
from tests.cards.samples import TEXTS, activations, corpus, ids_of, same
from tests.cli.commands import finish, start
from tests.reference import llama as llama_twin
from tests.reference import models
from tests.reference import references as twin
from tests.test_shared_layers import Sent
from tests.test_units import OfManyStreams

LINES = range(1, 2 * len(TEXTS), 2)
ALL = ("activation", "negative activation", "relevance")


@pytest.fixture
def model(byte_tokenizer):
    return samples.llama(byte_tokenizer)


def paths(collection):
    return [place.path for place in collection.places]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_activations_are_those_of_a_plain_sort(name, batch_size, byte_tokenizer, tmp_path):
    model = getattr(samples, name)(byte_tokenizer)
    collection = Collection(model, corpus(tmp_path), ALL[:2], k=3, part=4, batch_size=batch_size)
    found = collect(collection, tmp_path / "run")
    plain = {line: activations(model, paths(collection), text) for line, text in zip(LINES, TEXTS, strict=True)}
    for i, place in enumerate(collection.places):
        for measure, sign in (("activation", 1), ("negative activation", -1)):
            values = {line: sign * each[i] for line, each in plain.items()}
            for unit, wanted in enumerate(twin.references(values, 3)):
                passages = found.passages(place.layer, unit, measure)
                same(passages, [(sign * value, *rest) for value, *rest in wanted], 1e-6)
                assert all(ids_of(model, TEXTS[(each.line - 1) // 2])[each.position] == each.token for each in passages)


def test_histograms_and_peaks_are_counted(model, tmp_path):
    collection = Collection(model, corpus(tmp_path), part=3)
    found = collect(collection, tmp_path / "run")
    sampled = [[] for _ in collection.places]
    peaks = np.zeros((2, 24, 16), dtype=int)
    for line, text in zip(LINES, TEXTS, strict=True):
        for i, values in enumerate(activations(model, paths(collection), text)):
            sampled[i] += [row for at, row in enumerate(values) if (at + line) % EVERY == 0]
            for unit, at in enumerate(values.argmax(0)):
                peaks[i, unit, octave(int(at))] += 1
    for i, layer in enumerate(found.layers):
        counts = twin.histogram(np.float32(sampled[i]), edges())
        assert [found.counts(layer, unit) for unit in range(24)] == counts.tolist()
        assert [found.peaks(layer, unit) for unit in range(24)] == peaks[i].tolist()
        assert len(counts[0]) == BINS


@pytest.mark.parametrize("at", ["drawn", "last"])
@pytest.mark.parametrize("batch_size", [1, 32])
def test_relevance_is_that_of_the_twin(at, batch_size, model, tmp_path):
    collection = Collection(model, corpus(tmp_path), ("relevance",), k=4, at=at, batch_size=batch_size)
    found = collect(collection, tmp_path / "run")
    values = [{}, {}]
    said, places = {}, set()
    for line, text in zip(LINES, TEXTS, strict=True):
        row = model.reader.row(text)
        position = collection.position(row)
        assert position == len(row.tokens.ids) - 1 if at == "last" else position >= len(row.tokens.ids) // 2
        places.add(position - len(row.tokens.ids))
        with torch.no_grad():
            logits = model.module(input_ids=torch.tensor([row.tokens.ids])).logits[0, position]
        said[line] = int(logits.argmax())
        made = llama_twin.explain(model.module, row.tokens.ids, position, np.eye(340)[said[line]], "attnlrp")
        for i, neurons in enumerate(made.neurons):
            values[i][line] = neurons[: position + 1]
    assert len(places) > (at == "drawn")
    for i, place in enumerate(collection.places):
        for unit, wanted in enumerate(twin.references(values[i], 4)):
            passages = found.passages(place.layer, unit, "relevance")
            same(passages, wanted, 1e-6)
            assert [each.predicted for each in passages] == [said[each.line] for each in passages]


def test_a_classifier_is_ranked_by_its_own_class(byte_tokenizer, tmp_path):
    module = tiny.bert_classifier(vocab_size=340, pad_token_id=0)
    model = BoundModel(module, byte_tokenizer)
    found = collect(Collection(model, corpus(tmp_path), ("relevance",), k=2), tmp_path / "run")
    for each in found.passages(0, 5, "relevance"):
        with torch.no_grad():
            ids = torch.tensor([ids_of(model, TEXTS[(each.line - 1) // 2])])
            assert each.predicted == int(module(input_ids=ids).logits[0].argmax())


def test_skipped_tokens_have_no_part(model, tmp_path):
    collection = Collection(model, corpus(tmp_path), ALL, k=9, skip=2)
    found = collect(collection, tmp_path / "run")
    short = [line for line, text in zip(LINES, TEXTS, strict=True) if len(ids_of(model, text)) <= 2]
    assert short
    for measure in ALL:
        passages = found.passages(1, 7, measure)
        assert all(each.position >= 2 for each in passages)
        assert not {each.line for each in passages} & set(short)
    assert sum(found.peaks(1, 7)) == len(TEXTS) - len(short)


# ------------------------------------------------------------------------------ parts and folders


def content(folder):
    return (folder / REFERENCES).read_bytes()


def test_a_part_is_the_same_in_any_order(model, tmp_path):
    collection = Collection(model, corpus(tmp_path), ALL, k=2, part=2)
    collect(collection, tmp_path / "run")
    texts = list(collection.texts())
    for i in reversed(range(4)):
        kept = pq.read_table(tmp_path / "run" / "rows" / f"part-{i:06}.parquet").replace_schema_metadata(None)
        assert collection.of(texts[2 * i : 2 * i + 2]).equals(kept)


def test_it_goes_on_after_a_kill(model, tmp_path, monkeypatch):
    collection = Collection(model, corpus(tmp_path), k=2, part=2)
    collect(collection, tmp_path / "whole")
    made = []
    of = Collection.of

    def dies(self, texts, done=lambda _: None):
        made.append([each.line for each in texts])
        if len(made) == 3:
            raise KeyboardInterrupt
        return of(self, texts, done)

    monkeypatch.setattr(Collection, "of", dies)
    with pytest.raises(KeyboardInterrupt):
        collect(collection, tmp_path / "run")
    assert not (tmp_path / "run" / REFERENCES).exists()
    with pytest.raises(ResultFileError, match=r"references.parquet is missing or broken; run lrpx neurons collect"):
        References.read(tmp_path / "run")
    broken = tmp_path / "run" / "rows" / "part-000000.parquet"
    broken.write_bytes(broken.read_bytes()[:-100])
    made.append(None)
    collect(collection, tmp_path / "run")
    assert made[4:] == [[1, 3], [9, 11], [13]]  # the broken one, the one that was stopped, and the rest
    assert content(tmp_path / "run") == content(tmp_path / "whole")


def test_another_run_is_refused(model, tmp_path):
    path = corpus(tmp_path)
    collect(Collection(model, path, k=2), tmp_path / "run")
    with pytest.raises(ResultFileError, match="another setting: k was 2 and is 3 now"):
        collect(Collection(model, path, k=3), tmp_path / "run")
    handle = model.module.model.layers[0].mlp.register_forward_hook(lambda *given: given[-1] * 2)
    with pytest.raises(ResultFileError, match="another setting: code of the model"):
        collect(Collection(model, path, k=2), tmp_path / "run")
    with pytest.raises(ModelError, match="with other code, functions or numbers in its modules than"):
        References.read(tmp_path / "run").check(model)
    handle.remove()
    assert References.read(tmp_path / "run").check(model) is model
    path.write_text("other\n")
    with pytest.raises(ResultFileError, match="another setting: corpus sha256"):
        collect(Collection(model, path, k=2), tmp_path / "run")


@pytest.mark.parametrize("name", ["every", "corpus"])
def test_references_of_an_older_version_are_refused_by_name(model, tmp_path, name):
    collect(Collection(model, corpus(tmp_path), k=2), tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    record = Store.read(path.parent).record
    del record["settings"][name]
    Store(path.parent, record).note(digest=digest(record["kind"], record["settings"]))
    with pytest.raises(ResultFileError, match=f"say nothing of {name}; collect them again"):
        References.read(tmp_path / "run")


def test_nothing_of_the_model_changes(model, tmp_path):
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    state = torch.random.get_rng_state()
    model.module.requires_grad_(True)
    collect(Collection(model, corpus(tmp_path), ALL, k=2), tmp_path / "run")
    assert all(torch.equal(value, before[name]) for name, value in model.module.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), state)
    for module in model.module.modules():
        assert not {**module._forward_hooks, **module._forward_pre_hooks}
    assert all(each.requires_grad and each.grad is None for each in model.module.parameters())


def test_memory_is_that_of_a_part(model, tmp_path):
    """Of the corpus no more than a part is held: texts are read as the run reaches them."""
    collection = Collection(model, corpus(tmp_path, TEXTS * 3), part=2)
    reached, asked = 0, []
    stream = Collection.texts

    def counted(self):
        nonlocal reached
        for each in stream(self):
            reached += 1
            yield each

    of = Collection.of

    def watched(self, texts, done=lambda _: None):
        asked.append(reached)
        return of(self, texts, done)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Collection, "check", lambda _: 0)
        patch.setattr(Collection, "texts", counted)
        patch.setattr(Collection, "of", watched)
        collect(collection, tmp_path / "run")
    assert asked == [*range(2, 22, 2), 21]


# ------------------------------------------------------------------------------ corpora and bad input


def test_every_format_gives_the_same(model, tmp_path):
    lines = corpus(tmp_path)
    table = tmp_path / "corpus.parquet"
    pq.write_table(pa.table({"said": TEXTS}), table)
    comma = tmp_path / "corpus.csv"
    with comma.open("w", newline="") as file:
        csv.writer(file).writerows([["said"], *([text] for text in TEXTS)])
    one = collect(Collection(model, lines, k=2), tmp_path / "a").passages(1, 3)
    for i, path in enumerate((table, comma)):
        other = collect(Collection(model, path, k=2, text="said"), tmp_path / f"{i}").passages(1, 3)
        assert [(each.value, each.position) for each in other] == [(each.value, each.position) for each in one]


def test_a_long_text_is_refused_before_anything_runs_or_cut(model, tmp_path):
    path = corpus(tmp_path, [*TEXTS, "the key " * 40])
    with pytest.raises(
        DataError, match=r"corpus.txt:15 has \d+ tokens, more than 64; cut such texts with long='cut', or"
    ):
        collect(Collection(model, path), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    found = collect(Collection(model, path, long="cut", context=30, k=50), tmp_path / "run")
    assert {each.line for each in found.passages(0, 0)} == {*LINES, 15}
    assert max(each.position for unit in range(24) for each in found.passages(0, unit)) < 30
    assert model.tokenizer.backend_tokenizer.truncation is None  # or it would be saved as one that cuts


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"measures": ("nonsense",)}, InputError, r"ranked by activation, .*'nonsense'"),
        ({"measures": ()}, InputError, "nothing was asked for"),
        ({"k": 0}, InputError, "k is 0; pass a whole number, at least 1"),
        ({"skip": -1}, InputError, "skip is -1"),
        ({"context": 1.5}, InputError, "context is 1.5"),
        ({"long": "split"}, InputError, "long is 'split'; pass 'refuse' or 'cut'"),
        ({"at": "first"}, InputError, "at is 'first'; pass 'drawn' or 'last'"),
    ],
)
def test_options_that_are_none(options, error, match, model, tmp_path):
    with pytest.raises(error, match=match):
        Collection(model, corpus(tmp_path), **options)


@pytest.mark.parametrize("how", [{}, {"context": 6, "long": "cut"}], ids=["whole", "cut"])
def test_to_skip_every_token_is_refused_before_anything_runs(how, model, tmp_path):
    path = corpus(tmp_path)
    longest = min(how.get("context", 64), max(len(ids_of(model, text)) for text in TEXTS))
    with pytest.raises(InputError, match=f"skip is {longest}, and no text of .*corpus.txt has more than {longest} "):
        collect(Collection(model, path, skip=longest, **how), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    found = collect(Collection(model, path, skip=longest - 1, **how), tmp_path / "run")
    assert found.passages(0, 0)


def test_models_that_do_not_fit(byte_tokenizer, tmp_path):
    path = corpus(tmp_path)
    module = models.tiny_t5(vocab_size=340)
    with pytest.raises(ModelError, match="does not take one text"):
        Collection(BoundModel(module, byte_tokenizer), path)
    bert = BoundModel(models.tiny_bert(vocab_size=340), byte_tokenizer)
    with pytest.raises(ModelError, match=r"predicts nothing of a text without a place .*; rank by activation"):
        Collection(bert, path, ("relevance",))
    collect(Collection(bert, path), tmp_path / "run")
    left = BoundModel(models.tiny_llama(vocab_size=340), byte_tokenizer, padding_side="left")
    with pytest.raises(ModelError, match='padding_side="right"'):
        Collection(left, path)
    left.module.train()
    with pytest.raises(ModelError, match="training mode"):
        Collection(left, path)
    flat = BoundModel(tiny.build(type(models.tiny_llama()), models.tiny_llama(vocab_size=340).config), byte_tokenizer)
    flat.module.model.layers = torch.nn.ModuleList()
    with pytest.raises(MethodError, match="no neurons were found"):
        Collection(flat, path)


def test_numbers_that_are_none_are_refused(model, tmp_path):
    with torch.no_grad():
        model.module.model.layers[0].mlp.gate_proj.bias[3] = torch.nan
    with pytest.raises(NonFiniteError):
        collect(Collection(model, corpus(tmp_path)), tmp_path / "run")


def test_a_corpus_without_texts(model, tmp_path):
    path = corpus(tmp_path, ["", "  "])
    with pytest.raises(DataError, match="there is no text in"):
        collect(Collection(model, path), tmp_path / "run")
    with pytest.raises(DataError, match="cannot read"):
        collect(Collection(model, tmp_path / "missing.txt"), tmp_path / "run")


@pytest.mark.slow
def test_a_real_kill(tmp_path):
    """Killed in the middle of its work, the command goes on and ends with the same bytes."""
    path = corpus(tmp_path, TEXTS * 8)
    command = ["neurons", "collect", "--data", path, "--k", "2", "--part", "4"]
    assert finish(start(*command, "--out", tmp_path / "whole"))[0] == 0
    killed = start(*command, "--out", tmp_path / "run")
    while killed.poll() is None and len(list(tmp_path.glob("run/rows/part-*.parquet"))) < 3:
        time.sleep(0.01)
    killed.kill()
    killed.communicate()
    assert finish(start(*command, "--out", tmp_path / "run"))[0] == 0
    assert content(tmp_path / "run") == content(tmp_path / "whole")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_first_place_is_argmaxs(dtype):
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(5, 9, 40, generator=drawn).mul(2).round().to(dtype)  # with ties
    seen = torch.rand(5, 9, generator=drawn) < 0.6
    seen[:, 4] = True
    plain = x.float().masked_fill(~seen[..., None], -torch.inf)
    assert torch.equal(_first(x, plain.amax(1), seen).long(), plain.argmax(1))


def test_a_layer_that_runs_twice_has_references_for_each_run(byte_tokenizer, tmp_path):
    (once, twice) = (samples.llama(byte_tokenizer) for _ in range(2))
    twice.module.model.layers[1] = twice.module.model.layers[0]
    once.module.model.layers[1] = deepcopy(once.module.model.layers[0])
    tables = [
        collect(Collection(each, corpus(tmp_path), ("activation", "relevance"), k=3), tmp_path / name).table
        for name, each in (("once", once), ("twice", twice))
    ]
    names = tables[1]["place"].unique().to_pylist()
    assert names == [f"model.layers.0.mlp.down_proj#{i}" for i in range(2)]
    for column in tables[0].column_names:
        if column not in ("place", "relevance value"):
            assert tables[0][column].to_pylist() == tables[1][column].to_pylist()


@pytest.mark.parametrize("measures", [ALL[:2], ("relevance",)])
def test_units_of_an_expert_that_nothing_was_sent_to_are_refused(measures, model, tmp_path):
    """Where a text comes to it: the references had those of the other expert alone."""
    layers = model.module.model.layers
    layers[1].mlp = Sent(layers[1].mlp, deepcopy(layers[1].mlp))
    short = Collection(model, corpus(tmp_path, ["key"]), measures)
    collect(short, tmp_path / "short")
    with pytest.raises(TraceError, match=r"layers\.1\.mlp\.experts\.1\..* was called, and was not when"):
        collect(Collection(model, corpus(tmp_path), measures), tmp_path / "run")


def test_latents_are_not_collected_as_tokens_where_a_text_has_as_many(byte_tokenizer, tmp_path):
    module = OfManyStreams("latents").eval()
    module.table = torch.nn.Embedding(340, 16)
    model = BoundModel(module, byte_tokenizer, task=Task.CLASSIFICATION)
    collection = Collection(model, corpus(tmp_path, TEXTS[:1]), k=2, context=7, long="cut")
    with pytest.raises(ModelError, match="units are collected where each token has one"):
        collect(collection, tmp_path / "run")
