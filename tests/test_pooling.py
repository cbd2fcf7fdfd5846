"""How a text encoder's embedding is made of its hidden states: as its files say, or as results say was assumed."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers as tf
from tokenizers import normalizers

from lrpx import Explainer, Task
from lrpx._pooling import Pooling
from lrpx.errors import InputError, ModelError
from tests.tiny import SIZES, bert_classifier, build

PAIR = ("the keys are on the table", "the key is small")
BY_HAND = {
    "mean": lambda hidden: hidden.mean(0),
    "cls": lambda hidden: hidden[0],
    "lasttoken": lambda hidden: hidden[-1],
    "weightedmean": lambda hidden: sum((i + 1) * each for i, each in enumerate(hidden)),
}
OLDER = {
    "mean": "pooling_mode_mean_tokens",
    "cls": "pooling_mode_cls_token",
    "lasttoken": "pooling_mode_lasttoken",
    "weightedmean": "pooling_mode_weightedmean_tokens",
}
SENTENCE_TRANSFORMERS = "sentence_transformers.models."


@pytest.fixture(scope="module")
def encoder():
    config = tf.BertConfig(**SIZES | {"vocab_size": 160, "initializer_range": 0.5})
    return build(tf.BertModel, config)


def cosine(model, tokenizer, pool):
    with torch.no_grad():
        a, b = (pool(model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]) for text in PAIR)
    return float(a @ b / (a.norm() * b.norm()))


def saved(folder, model, tokenizer, pooling, modules=("Transformer", "Pooling", "Normalize")):
    """A folder as sentence-transformers writes it."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    paths = {kind: "" if kind == "Transformer" else f"{at}_{kind}" for at, kind in enumerate(modules)}
    listed = [{"type": SENTENCE_TRANSFORMERS + kind, "path": path} for kind, path in paths.items()]
    (folder / "modules.json").write_text(json.dumps(listed))
    if "Pooling" in paths:
        (folder / paths["Pooling"]).mkdir()
        (folder / paths["Pooling"] / "config.json").write_text(json.dumps(pooling))
    return folder


@pytest.mark.parametrize("kind", BY_HAND)
def test_each_pooling_by_hand(encoder, piece_tokenizer, kind):
    found = Explainer(encoder, piece_tokenizer, pooling=kind)([PAIR, ("a lovely film", "what a terrible ending of it")])
    assert found[0].explained.value == pytest.approx(cosine(encoder, piece_tokenizer, BY_HAND[kind]), abs=1e-12)
    assert found[0].explained.description == f"similarity of the two texts ({Pooling(kind)})"


def test_relevance_of_the_first_token_is_by_its_own_embedding(encoder, piece_tokenizer):
    """The linear map from hidden states to the product, by hand, under no rules."""
    found = Explainer(encoder, piece_tokenizer, pooling="cls")(PAIR, method="gradient-x-input")
    ids = [piece_tokenizer(text, return_tensors="pt")["input_ids"] for text in PAIR]
    embedded = [encoder.embeddings.word_embeddings(each).detach().requires_grad_() for each in ids]
    a, b = (encoder(inputs_embeds=each).last_hidden_state[0, 0] for each in embedded)
    (a @ b / (a.norm() * b.norm())).backward()
    expected = torch.cat([(each * each.grad).sum(-1)[0] for each in embedded])
    torch.testing.assert_close(found.relevance.clone(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_in_no_embedding(side):
    mask = torch.tensor([[1, 1, 1], [1, 1, 0] if side == "right" else [0, 1, 1]])
    for kind in BY_HAND:
        whole, padded = Pooling(kind).weights(mask)
        assert float(padded[2 if side == "right" else 0]) == 0.0
        alone = Pooling(kind).weights(torch.ones(1, 2, dtype=torch.int64))[0]
        assert padded[mask[1].bool()].tolist() == alone.tolist()
        assert float(whole.sum()) == pytest.approx(1)


@pytest.mark.parametrize("is_old", [True, False])
@pytest.mark.parametrize("kind", BY_HAND)
def test_the_files_of_a_model_say_it(encoder, piece_tokenizer, tmp_path, kind, is_old):
    config = {OLDER[each]: each == kind for each in BY_HAND} if is_old else {"pooling_mode": kind}
    folder = saved(tmp_path, encoder, piece_tokenizer, config)
    wanted = cosine(encoder, piece_tokenizer, BY_HAND[kind])
    loaded = Explainer.from_pretrained(folder)
    own = Explainer(tf.AutoModel.from_pretrained(folder).eval(), tf.AutoTokenizer.from_pretrained(folder))
    for explain in (loaded, own):
        found = explain(PAIR)
        assert found.explained.value == pytest.approx(wanted, abs=1e-6)
        assert found.explained.description == f"similarity of the two texts ({Pooling(kind)})"
    said = Explainer.from_pretrained(folder, pooling="mean")(PAIR).explained
    assert said.value == pytest.approx(cosine(encoder, piece_tokenizer, BY_HAND["mean"]), abs=1e-6)


@pytest.mark.parametrize("kind", ["cls", "mean", "lasttoken", "weightedmean", "mean_sqrt_len_tokens"])
def test_sentence_transformers_gives_the_same_similarity(minilm, tmp_path, kind):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    shutil.copytree(minilm, tmp_path / "model")
    (config,) = (tmp_path / "model").glob("*_Pooling/config.json")
    config.write_text(json.dumps({"embedding_dimension": 384, "pooling_mode": kind}))
    theirs = sentence_transformers.SentenceTransformer(str(tmp_path / "model"), device="cpu")
    a, b = theirs.encode(list(PAIR), convert_to_tensor=True)
    found = Explainer.from_pretrained(tmp_path / "model")(PAIR)
    assert found.explained.value == pytest.approx(float(a @ b / (a.norm() * b.norm())), abs=1e-5)


@pytest.mark.parametrize("kind", ["cls", "mean"])
def test_a_model_of_sentence_transformers_is_taken_apart(encoder, piece_tokenizer, tmp_path, kind):
    package = pytest.importorskip("sentence_transformers")
    models = pytest.importorskip("sentence_transformers.models")
    folder = saved(tmp_path, encoder, piece_tokenizer, {"pooling_mode": "lasttoken"})  # which it does not ask
    transformer = models.Transformer(str(folder), model_kwargs={"dtype": torch.float64})
    model = package.SentenceTransformer(
        modules=[transformer, models.Pooling(encoder.config.hidden_size, kind), models.Normalize()],
        device="cpu",
    )
    a, b = model.encode(list(PAIR), convert_to_tensor=True)
    found = Explainer(model)(PAIR)
    assert found.explained.value == pytest.approx(float(a @ b), abs=1e-6)
    assert found.explained.description == f"similarity of the two texts ({Pooling(kind)})"
    assert found == Explainer(transformer.auto_model, model.tokenizer, pooling=kind)(PAIR)
    model.max_seq_length = 2
    with pytest.raises(InputError, match="context is 2, where sentence-transformers cuts it"):
        Explainer(model)(PAIR)
    transformer.processing_kwargs = {"common": {"max_length": 4}, "text": {"max_length": 3}}  # as it is told itself
    with pytest.raises(InputError, match="context is 3, where sentence-transformers cuts it"):
        Explainer(model)(PAIR)
    transformer.processing_kwargs = {"text": {"add_special_tokens": False}}
    with pytest.raises(ModelError, match="SentenceTransformer tells its tokenizer add_special_tokens=False with each"):
        Explainer(model)
    transformer.processing_kwargs = {"text": {"truncation": False, "padding": True}}
    assert Explainer(model)(PAIR) == found
    model.max_seq_length = None
    model.prompts, model.default_prompt_name = {"query": "query: "}, "query"
    with pytest.raises(ModelError, match="puts a prompt before each text, 'query'"):
        Explainer(model)
    dense = models.Dense(encoder.config.hidden_size, 3)
    with pytest.raises(ModelError, match="makes its embeddings by a Dense too; pass pooling='mean'"):
        Explainer(package.SentenceTransformer(modules=[*list(model)[:2], dense], device="cpu"))


def test_a_decoder_in_a_model_of_sentence_transformers_gives_embeddings(piece_tokenizer, tmp_path):
    """Its class says nothing of what it is for, and there is no head."""
    package = pytest.importorskip("sentence_transformers")
    models = pytest.importorskip("sentence_transformers.models")
    config = tf.LlamaConfig(**SIZES | {"vocab_size": 160, "num_key_value_heads": 2, "initializer_range": 0.5})
    build(tf.LlamaForCausalLM, config).save_pretrained(tmp_path)
    piece_tokenizer.save_pretrained(tmp_path)
    transformer = models.Transformer(str(tmp_path), model_kwargs={"dtype": torch.float64})
    model = package.SentenceTransformer(modules=[transformer, models.Pooling(16, "lasttoken")], device="cpu")
    explain = Explainer(model)
    found = explain(PAIR, method="gradient-x-input")
    assert explain.task is Task.EMBEDDINGS
    assert found.explained.description == "similarity of the two texts (last token)"

    decoder, made = transformer.auto_model, []
    for text in PAIR:
        ids = model.tokenizer(text, return_tensors="pt")["input_ids"]
        embedded = decoder.embed_tokens(ids).detach().requires_grad_()
        made.append((embedded, decoder(inputs_embeds=embedded).last_hidden_state[0, -1]))
    cosine = torch.cosine_similarity(made[0][1], made[1][1], 0)
    gradients = torch.autograd.grad(cosine, [embedded for embedded, _ in made])
    pairs = zip(made, gradients, strict=True)
    wanted = torch.cat([(embedded * gradient)[0].sum(-1) for (embedded, _), gradient in pairs])
    assert found.explained.value == pytest.approx(float(cosine.detach()), abs=1e-12)
    assert (found.relevance - wanted).abs().max() < 1e-9 * wanted.abs().max()


def test_a_part_of_ones_own_that_is_called_as_one_of_sentence_transformers(encoder, piece_tokenizer, tmp_path):
    package = pytest.importorskip("sentence_transformers")
    models = pytest.importorskip("sentence_transformers.models")
    folder = saved(tmp_path, encoder, piece_tokenizer, {"pooling_mode": "cls"})
    own = type("Pooling", (models.Pooling,), {"__module__": "own"})
    parts = models.Transformer(str(folder)), own(encoder.config.hidden_size, "cls")
    with pytest.raises(ModelError, match=r"SentenceTransformer makes its embeddings by a own\.Pooling too"):
        Explainer(package.SentenceTransformer(modules=parts, device="cpu"))
    asking = type("Asking", (package.SentenceTransformer,), {"preprocess": lambda *_: None})
    parts = parts[0], models.Pooling(encoder.config.hidden_size, "cls")
    with pytest.raises(ModelError, match="the Asking reads texts by code of its own; pass pooling='mean'"):
        Explainer(asking(modules=parts, device="cpu"))
    listed = json.loads((folder / "modules.json").read_text())
    listed[0]["type"] = "own.Transformer"
    (folder / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(ModelError, match=r"makes its embeddings by a own\.Transformer too, says its modules\.json"):
        Explainer.from_pretrained(folder)


def test_a_cross_encoder_is_taken_apart(piece_tokenizer, tmp_path):
    package = pytest.importorskip("sentence_transformers")
    torch.manual_seed(0)
    config = tf.BertConfig(**SIZES | {"vocab_size": len(piece_tokenizer), "num_labels": 1, "initializer_range": 0.4})
    tf.BertForSequenceClassification(config).save_pretrained(tmp_path / "model")
    piece_tokenizer.save_pretrained(tmp_path / "model")
    model = package.CrossEncoder(str(tmp_path / "model"), device="cpu")
    (score,) = model.predict([PAIR], activation_fn=torch.nn.Identity())
    found = Explainer(model)(PAIR)
    assert found.explained.value == pytest.approx(float(score), abs=1e-6)
    assert found == Explainer(model[0].auto_model, model.tokenizer)(PAIR)
    model.max_seq_length = 4
    with pytest.raises(InputError, match="context is 4, where sentence-transformers cuts it"):
        Explainer(model)(PAIR)
    model[0].processing_kwargs = {"text": {"max_length": 5}}
    with pytest.raises(InputError, match="context is 5, where sentence-transformers cuts it"):
        Explainer(model)(PAIR)
    model[0].processing_kwargs = {"text": {"add_special_tokens": False}}
    with pytest.raises(ModelError, match="the CrossEncoder tells its tokenizer add_special_tokens=False with each"):
        Explainer(model)
    model[0].processing_kwargs = {}
    model.prompts, model.default_prompt_name = {"query": "query: "}, "query"
    with pytest.raises(ModelError, match="puts a prompt before each text, 'query'"):
        Explainer(model)


def test_the_first_numbers_of_an_embedding_are_compared_where_the_rest_is_cut_off(encoder, piece_tokenizer, tmp_path):
    package = pytest.importorskip("sentence_transformers")
    models = pytest.importorskip("sentence_transformers.models")
    folder = saved(tmp_path, encoder, piece_tokenizer, {"pooling_mode": "cls"})
    transformer = models.Transformer(str(folder), model_kwargs={"dtype": torch.float64})
    modules = [transformer, models.Pooling(encoder.config.hidden_size, "cls"), models.Normalize()]
    model = package.SentenceTransformer(modules=modules, device="cpu", truncate_dim=5)
    a, b = model.encode(list(PAIR), convert_to_tensor=True)
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"truncate_dim": 5}))
    for explain in (Explainer(model), Explainer.from_pretrained(folder)):
        found = explain(PAIR)
        assert found.explained.value == pytest.approx(float(a @ b / (a.norm() * b.norm())), abs=1e-6)
        assert found.explained.description == "similarity of the two texts (first token, its first 5 numbers)"
    many = Explainer.from_pretrained(folder)([PAIR, PAIR])[1]
    torch.testing.assert_close(found.relevance.clone(), many.relevance.clone(), rtol=0, atol=1e-12)
    assert Explainer(model, pooling="cls")(PAIR).explained.value != pytest.approx(found.explained.value, abs=1e-6)


@pytest.mark.parametrize("compares", ["dot", "euclidean", "manhattan"])
def test_embeddings_that_are_compared_by_no_cosine_are_refused(encoder, piece_tokenizer, tmp_path, compares):
    package = pytest.importorskip("sentence_transformers")
    models = pytest.importorskip("sentence_transformers.models")
    folder = saved(tmp_path, encoder, piece_tokenizer, {"pooling_mode": "cls"}, ("Transformer", "Pooling"))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"similarity_fn_name": compares}))
    with pytest.raises(ModelError, match=rf"compares embeddings by '{compares}', says its .*; pass pooling='cls' to"):
        Explainer.from_pretrained(folder)
    cosine_of = Explainer.from_pretrained(folder, pooling="cls")(PAIR).explained.value
    modules = [models.Transformer(str(folder)), models.Pooling(encoder.config.hidden_size, "cls")]
    model = package.SentenceTransformer(modules=modules, device="cpu", similarity_fn_name=compares)
    with pytest.raises(ModelError, match=rf"compares embeddings by '{compares}', .*; set its similarity_fn_name to 'c"):
        Explainer(model)
    modules.append(models.Normalize())
    model = package.SentenceTransformer(modules=modules, device="cpu", similarity_fn_name=compares)
    if compares == "dot":  # of embeddings of length 1 it is the cosine
        assert Explainer(model)(PAIR).explained.value == pytest.approx(cosine_of, abs=1e-6)
        model.truncate_dim = 5
    with pytest.raises(ModelError, match="compares embeddings by"):
        Explainer(model)
    model.similarity_fn_name = "cosine"
    assert Explainer(model)(PAIR).explained.value


def test_a_text_that_sentence_transformers_would_cut_is_refused(encoder, piece_tokenizer, tmp_path):
    folder = saved(tmp_path, encoder, piece_tokenizer, {"pooling_mode": "cls"})
    whole = Explainer.from_pretrained(folder)
    longest = max(len(whole.bound.reader.row(PAIR).segments[i]) for i in (0, 1))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": longest}))
    assert Explainer.from_pretrained(folder)(PAIR) == whole(PAIR)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": longest - 1}))
    with pytest.raises(InputError, match=f"context is {longest - 1}, where sentence-transformers cuts it; shorten it"):
        Explainer.from_pretrained(folder)(PAIR)
    assert Explainer.from_pretrained(folder, pooling="cls")(PAIR).relevance.equal(whole(PAIR).relevance)
    (folder / "sentence_bert_config.json").rename(folder / "sentence_xlm-roberta_config.json")  # as older versions do
    with pytest.raises(InputError, match=f"context is {longest - 1}, where sentence-transformers cuts it; shorten it"):
        Explainer.from_pretrained(folder)(PAIR)


def test_a_text_that_sentence_transformers_would_cut_where_its_tokenizer_says(encoder, piece_tokenizer, tmp_path):
    folder = saved(tmp_path, encoder, piece_tokenizer, {"pooling_mode": "cls"})
    whole = Explainer.from_pretrained(folder)
    longest = max(len(whole.bound.reader.row(PAIR).segments[i]) for i in (0, 1))
    about = folder / "sentence_bert_config.json"
    piece_tokenizer.model_max_length = longest - 1
    piece_tokenizer.save_pretrained(folder)
    for said in ({"transformer_task": "feature-extraction"}, {"max_seq_length": None}):  # from release 6 on, and before
        about.write_text(json.dumps(said))
        with pytest.raises(InputError, match=f"context is {longest - 1}, where sentence-transformers cuts it"):
            Explainer.from_pretrained(folder)(PAIR)
    about.write_text(json.dumps({"max_seq_length": longest}))
    assert Explainer.from_pretrained(folder)(PAIR) == whole(PAIR)
    about.write_text(json.dumps({"processing_kwargs": {"text": {"max_length": longest - 2}}}))
    with pytest.raises(InputError, match=f"context is {longest - 2}, where sentence-transformers cuts it"):
        Explainer.from_pretrained(folder)(PAIR)
    about.write_text(json.dumps({"processing_kwargs": {"text": {"add_special_tokens": False}}}))
    with pytest.raises(ModelError, match="tells its tokenizer add_special_tokens=False with each text"):
        Explainer.from_pretrained(folder)
    assert Explainer.from_pretrained(folder, pooling="cls")(PAIR).relevance.equal(whole(PAIR).relevance)


def test_texts_that_sentence_transformers_changes_first(encoder, piece_tokenizer, tmp_path):
    folder = saved(tmp_path, encoder, piece_tokenizer, {"pooling_mode": "cls"})
    whole = Explainer.from_pretrained(folder)(PAIR)
    about = folder / "config_sentence_transformers.json"
    about.write_text(json.dumps({"prompts": {"query": "query: "}, "default_prompt_name": None}))
    assert Explainer.from_pretrained(folder)(PAIR) == whole
    about.write_text(json.dumps({"prompts": {"query": "query: "}, "default_prompt_name": "query"}))
    with pytest.raises(ModelError, match="puts a prompt before each text, 'query', says its config_sentence_transf"):
        Explainer.from_pretrained(folder)
    about.unlink()
    (folder / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    assert Explainer.from_pretrained(folder)(PAIR) == whole  # its tokenizer does so itself
    piece_tokenizer.backend_tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
    piece_tokenizer.save_pretrained(folder)
    with pytest.raises(ModelError, match=r"puts texts into lower case, .*; write them so, and pass pooling='cls'"):
        Explainer.from_pretrained(folder)
    assert Explainer.from_pretrained(folder, pooling="cls")(PAIR).relevance.equal(whole.relevance)


def test_texts_that_sentence_transformers_reads_by_a_chat_template(encoder, piece_tokenizer, tmp_path):
    package = pytest.importorskip("sentence_transformers")
    models = pytest.importorskip("sentence_transformers.models")
    kinds = "text", "message"
    piece_tokenizer.chat_template = "{% for each in messages %}key {{ each['content'] }} key {% endfor %}"
    folder = saved(tmp_path, encoder, piece_tokenizer, {"pooling_mode": "cls"})
    transformer = models.Transformer(str(folder), model_kwargs={"dtype": torch.float64})
    if "message" not in getattr(transformer, "modality_config", ()):
        pytest.skip("this sentence-transformers knows no chat templates")
    model = package.SentenceTransformer(
        modules=[transformer, models.Pooling(encoder.config.hidden_size, "cls"), models.Normalize()], device="cpu"
    )
    a, b = model.encode(list(PAIR), convert_to_tensor=True)
    plain = Explainer.from_pretrained(folder)(PAIR)
    assert plain.explained.value != pytest.approx(float(a @ b), abs=1e-3)
    with pytest.raises(
        ModelError, match=r"reads each text as a chat's message, by a chat template; pass pooling='mean'"
    ):
        Explainer(model)
    # near, not equal: it holds its own copy of the weights, and a product's last bits hang on where they lie in memory
    torch.testing.assert_close(Explainer(model, pooling="cls")(PAIR).relevance, plain.relevance, rtol=0, atol=1e-12)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"modality_config": {kind: {} for kind in kinds}}))
    with pytest.raises(ModelError, match=r"a chat's message, by a chat template, says its sentence_bert_config.json; "):
        Explainer.from_pretrained(folder)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"modality_config": {"text": {}}}))
    assert Explainer.from_pretrained(folder)(PAIR) == plain
    del transformer.modality_config["message"]
    a, b = model.encode(list(PAIR), convert_to_tensor=True)
    assert Explainer(model)(PAIR).explained.value == pytest.approx(float(a @ b), abs=1e-6)


def test_hidden_states_of_another_layer_are_refused(encoder, piece_tokenizer, tmp_path):
    """sentence-transformers pools what its modality_config says, and the last layer's are explained here."""
    package = pytest.importorskip("sentence_transformers")
    models = pytest.importorskip("sentence_transformers.models")
    folder = saved(tmp_path, encoder, piece_tokenizer, {"pooling_mode": "mean"}, ("Transformer", "Pooling"))
    plain = Explainer.from_pretrained(folder)(PAIR)
    told = {"text": {"method": "forward", "method_output_name": ["hidden_states", 1]}}
    about = {"modality_config": told, "module_output_name": "token_embeddings"}
    try:
        transformer = models.Transformer(str(folder), model_kwargs={"dtype": torch.float64}, **about)
    except TypeError:
        pytest.skip("this sentence-transformers pools the last hidden states alone")
    model = package.SentenceTransformer(
        modules=[transformer, models.Pooling(encoder.config.hidden_size, "mean")], device="cpu"
    )
    a, b = model.encode(list(PAIR), convert_to_tensor=True)
    assert float(torch.cosine_similarity(a, b, dim=0)) != pytest.approx(plain.explained.value, abs=1e-2)
    with pytest.raises(ModelError, match=r"its embeddings of its model's hidden_states\.1; pass pooling='mean', say"):
        Explainer(model)
    torch.testing.assert_close(Explainer(model, pooling="mean")(PAIR).relevance, plain.relevance, rtol=0, atol=1e-12)
    (folder / "sentence_bert_config.json").write_text(json.dumps(about))
    with pytest.raises(ModelError, match=r"its model's hidden_states\.1, says its sentence_bert_config\.json; pass"):
        Explainer.from_pretrained(folder)
    told["text"] = {"method": "forward", "method_output_name": "last_hidden_state"}
    (folder / "sentence_bert_config.json").write_text(json.dumps(about))
    assert Explainer.from_pretrained(folder)(PAIR) == plain
    assert Explainer(model)(PAIR).explained.value == pytest.approx(plain.explained.value, abs=1e-6)


@pytest.mark.parametrize(
    ("pooling", "modules", "said"),
    [
        ({"pooling_mode": "max"}, ("Transformer", "Pooling"), "makes its embeddings by max pooling"),
        ({"pooling_mode": ["cls", "mean"]}, ("Transformer", "Pooling"), "by cls and mean pooling"),
        ({}, ("Transformer", "Pooling"), "by no pooling"),
        ({"pooling_mode": "mean"}, ("Transformer", "Pooling", "Dense"), "by a Dense too"),
        (None, ("Transformer",), "names no Pooling"),
        ([], ("Transformer", "Pooling"), "none of sentence-transformers"),
    ],
)
def test_what_is_made_otherwise_is_refused(encoder, piece_tokenizer, tmp_path, pooling, modules, said):
    folder = saved(tmp_path, encoder, piece_tokenizer, pooling, modules)
    with pytest.raises(ModelError, match=rf"{said}.*; pass pooling='mean', say, .*lrpx\.propagate"):
        Explainer.from_pretrained(folder)
    assert Explainer.from_pretrained(folder, pooling="cls")(PAIR).explained.value


@pytest.mark.parametrize("content", [b"{", b"7", b'[{"type": 5}]', b'[[""]]', b"null", b"\xff"])
def test_a_broken_file_is_named(encoder, piece_tokenizer, tmp_path, content):
    folder = saved(tmp_path, encoder, piece_tokenizer, {"pooling_mode": "cls"})
    (folder / "modules.json").write_bytes(content)
    with pytest.raises(ModelError, match=r"modules\.json"):
        Explainer.from_pretrained(folder)


def test_what_pools_nothing_takes_no_pooling(encoder, piece_tokenizer):
    with pytest.raises(InputError, match="a sequence classifier pools nothing; leave pooling out"):
        Explainer(bert_classifier(), piece_tokenizer, pooling="cls")
    with pytest.raises(InputError, match="pooling is 'first'; pass one of 'mean', 'cls'"):
        Explainer(encoder, piece_tokenizer, pooling="first")
    assert Explainer(encoder, piece_tokenizer, task=Task.EMBEDDINGS).bound.pooling == Pooling(is_assumed=True)
