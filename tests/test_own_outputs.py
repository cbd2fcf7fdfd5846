"""What a model returns is read as its task says, or refused by name."""

from __future__ import annotations

import types

import pytest
import torch
import transformers as tf

from lrpx import Explainer, Task
from lrpx.errors import ModelError
from lrpx.units import places
from tests.reference import models
from tests.test_readers import bert


class Own(torch.nn.Module):
    """A language model that gives its logits ``[B, T, V]`` to a function."""

    def __init__(self, returns):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.returns = torch.nn.Embedding(31, 8), torch.nn.Linear(8, 31), returns

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids):
        return self.returns(self.head(self.embedding(input_ids)))


class Named:
    """An output that is no dict and no tuple."""

    def __init__(self, logits):
        self.logits = logits


RIGHT = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, None),
    "list": lambda x: [x],
    "dict": lambda x: {"loss": None, "logits": x},
    "object": Named,
}
WRONG = {
    "None": (lambda x: None, "Own returned NoneType"),
    "rows": (lambda x: x[0], r"Own returned a tensor \[3, 31\] of float32"),
    "last": (lambda x: x[:, -1], r"Own returned a tensor \[\d, 31\] of float32"),
    "more": (lambda x: x[None], r"Own returned a tensor \[1, \d, 3, 31\] of float32"),
    "ids": (lambda x: x.argmax(-1), r"Own returned a tensor \[\d, 3\] of int64"),
    "empty": (lambda x: (), "Own returned tuple"),
    "tuple of None": (lambda x: (None, x), "Own returned NoneType"),
    "dict": (lambda x: {"scores": x}, "Own returned dict of scores"),
    "logits None": (lambda x: {"logits": None}, "Own returned NoneType"),
    "text": (lambda x: "logits", "Own returned str"),
}
IDS = [5, 6, 7]


@pytest.mark.parametrize("name", RIGHT)
def test_logits_in_every_form(name):
    found, wanted = (
        Explainer(Own(form).eval(), task=Task.CAUSAL)([IDS, [8]], 3) for form in (RIGHT[name], RIGHT["tensor"])
    )
    assert [each.explained.value for each in found] == [each.explained.value for each in wanted]


@pytest.mark.parametrize("inner", [tuple, dict], ids=["tuple", "dict"])
def test_logits_inside_another_output_behind_hidden_states_are_not_these(inner):
    """Hidden states have the shape of logits, and were explained as these."""
    model = Own(lambda x: (x[..., :8], inner({"logits": x}.items() if inner is dict else [x])))
    with pytest.raises(ModelError, match="Own returned 8 numbers for each token first, as hidden states are, and 31"):
        Explainer(model.eval(), task=Task.CAUSAL)(IDS, 3)


def test_logits_of_tokens_first_are_refused_where_there_are_as_many_texts_as_tokens():
    """``[T, B, V]`` looks as ``[B, T, V]`` then; the value was that of another text's token."""
    model = Masked("1 is seen").eval()
    forward = model.forward
    model.forward = lambda input_ids, attention_mask: forward(input_ids, attention_mask).transpose(0, 1)
    with pytest.raises(ModelError, match=r"returned a tensor \[3, 1, 20\] of float32"):
        Explainer(model, task=Task.CAUSAL)([[5, 6, 7], [8, 9, 4], [2, 3, 11]], 3)


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("given", [IDS, [IDS, IDS]], ids=["one", "two"])
def test_what_is_no_logits_is_refused(name, given):
    returns, told = WRONG[name]
    message = (
        rf"{told}, and a causal language model returns logits \[B, T, V\], a row for each of \d inputs; return these"
    )
    with pytest.raises(ModelError, match=message):
        Explainer(Own(returns).eval(), task=Task.CAUSAL)(given)


@pytest.mark.parametrize("returns", [lambda x: x[0], lambda x: x], ids=["rows", "all"])
def test_the_logits_of_a_classifier_are_a_row_an_input(returns):
    """Rows of tokens once went for rows of inputs."""
    message = r"a sequence classifier returns logits \[B, V\], a row for each of 1 inputs"
    with pytest.raises(ModelError, match=message):
        Explainer(Own(returns).eval(), task=Task.CLASSIFICATION)([IDS, IDS])
    found = Explainer(Own(lambda x: x.mean(1)).eval(), task=Task.CLASSIFICATION)(IDS, 3)
    assert found.explained.description == "logit of '3'"


@pytest.mark.parametrize("config", [types.SimpleNamespace(block_size=8, vocab_size=31), {"block_size": 8}, None, 7])
def test_a_config_of_ones_own_is_no_config_of_transformers(config):
    """As nanoGPT and minGPT have it."""
    model = Own(lambda x: x).eval()
    model.config = config
    assert Explainer(model, task=Task.CAUSAL)([IDS, [8]], 3)[0].ids == tuple(IDS)


def test_logits_of_the_last_token_alone_are_no_other_tokens():
    explain = Explainer(Own(lambda x: x[:, -1:]).eval(), task=Task.CAUSAL)
    with pytest.raises(ModelError, match="returned logits of 1 places for 3 tokens; return those of every token"):
        explain(IDS, position=0)


def test_logits_of_more_places_than_tokens_are_refused():
    """Which of them are the text's is not known; the last token's was once read among the first."""
    explain = Explainer(Own(lambda x: torch.cat([x[:, :2], x], 1)).eval(), task=Task.CAUSAL)
    with pytest.raises(ModelError, match="returned logits of 5 places for 3 tokens: it puts others among them"):
        explain(IDS)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("task", "kind", "told"),
    [
        ("CAUSAL_LM", tf.BertLMHeadModel, "returned logits of 7 places for 5 tokens"),
        ("TOKEN_CLS", tf.BertForTokenClassification, "returned logits of 7 places for 5 tokens"),
        ("QUESTION_ANS", tf.BertForQuestionAnswering, r"returns start_logits and end_logits \[B, T\]"),
    ],
)
def test_soft_prompts_before_the_text_are_refused(task, kind, told):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    config = peft.PromptTuningConfig(task_type=task, num_virtual_tokens=2)
    model = bert(kind, **({"is_decoder": True} if task == "CAUSAL_LM" else {}))
    explain = Explainer(peft.get_peft_model(model, config).eval())
    with pytest.raises(ModelError, match=told):
        explain([2, 14, 15, 9, 3], position=4) if task != "QUESTION_ANS" else explain([2, 14, 15, 9, 3])


@pytest.mark.parametrize(
    "kind", [tf.BertForQuestionAnswering, tf.BertForSequenceClassification, tf.BertForMaskedLM,
             tf.BertForTokenClassification, tf.BertModel, tf.BertForMultipleChoice],
    ids=lambda kind: kind.__name__,
)  # fmt: skip
def test_a_config_that_wants_tuples_changes_nothing(kind, piece_tokenizer):
    given = {"BertModel": ("the key", "is small"), "BertForMultipleChoice": ("the key", ["is small", "are tall"])}
    position = {"BertForMaskedLM": 1, "BertForTokenClassification": 1}.get(kind.__name__)
    asked = given.get(kind.__name__, "the key is small")
    model = bert(kind)
    wanted = Explainer(model, piece_tokenizer)(asked, position=position)
    model.config.return_dict = False
    assert isinstance(model(torch.tensor([IDS]) if "Choice" not in kind.__name__ else torch.tensor([[IDS]])), tuple)
    found = Explainer(model, piece_tokenizer)(asked, position=position)
    assert found.explained == wanted.explained
    assert torch.equal(found.relevance, wanted.relevance)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (tf.XLNetForQuestionAnswering, tf.XLNetConfig(vocab_size=31, d_model=16, n_layer=1, n_head=2, d_inner=24)),
        (tf.XLMForQuestionAnswering, tf.XLMConfig(vocab_size=31, emb_dim=16, n_layers=1, n_heads=2)),
    ],
)
def test_answers_by_beams_are_refused_by_name(kind, config):
    with pytest.raises(ModelError, match=f"{kind.__name__} searches for answers by beams.* load {kind.__name__}Simple"):
        Explainer(kind(config).eval())
    simple = getattr(tf, f"{kind.__name__}Simple")(config).eval()
    assert Explainer(simple)([8, 6, 7]).explained.description.startswith("answer from token")


def test_texts_of_unequal_length_need_a_mask(piece_tokenizer):
    torch.manual_seed(0)
    config = tf.FNetConfig(vocab_size=200, hidden_size=16, num_hidden_layers=1, intermediate_size=24)
    explain = Explainer(tf.FNetModel(config).eval(), piece_tokenizer, task=Task.EMBEDDINGS)
    with pytest.raises(ModelError, match="FNetModel would read the padding of the shorter"):
        explain(("the key", "the key is small"))


class Masked(torch.nn.Module):
    """An encoder of torch's, whose attention mask is what its user makes of it."""

    def __init__(self, says: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.says = says
        self.table, self.head = torch.nn.Embedding(20, 16), torch.nn.Linear(16, 20)
        self.block = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.table

    def seen(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        hidden = None if mask is None else mask.bool() if self.says == "1 is hidden" else mask == 0
        return self.head(self.block(x, src_key_padding_mask=hidden))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        if attention_mask is None and self.says == "what is no 0":
            attention_mask = input_ids != 0
        return self.seen(self.table(input_ids), attention_mask)


class Needing(Masked):
    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids, attention_mask)


@pytest.mark.parametrize("kind", [Masked, Needing])
def test_a_mask_in_which_ones_hide_is_refused(kind: type[Masked]) -> None:
    explainer = Explainer(kind("1 is hidden").eval(), task=Task.MASKED)
    with pytest.raises(ModelError, match=f"a mask of ones changes what {kind.__name__} says, as where 1 hides"):
        explainer([3, 4, 5, 6], 7, position=2)


@pytest.mark.parametrize("kind", [Masked, Needing])
@pytest.mark.parametrize("says", ["1 is seen", "what is no 0"])
def test_a_mask_in_which_ones_are_seen_is_taken(kind: type[Masked], says: str) -> None:
    model = kind(says).eval()
    found = Explainer(model, task=Task.MASKED)([[3, 4, 5, 6], [9, 8]], 7, position=1)
    for ids, each in zip(([3, 4, 5, 6], [9, 8]), found, strict=True):
        with torch.no_grad():
            want = model.seen(model.table(torch.tensor([ids])), None)[0, 1, 7]
        assert each.explained.value == pytest.approx(float(want), rel=1e-5)


def test_a_model_that_says_another_thing_each_time_hides_no_ones() -> None:
    class Counting(Masked):
        calls = 0

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
            self.calls += 1
            return super().forward(input_ids, attention_mask) + self.calls

    assert not Explainer(Counting("1 is seen").eval(), task=Task.MASKED).bound._trials.hides_ones
    assert Explainer(Masked("1 is hidden").eval(), task=Task.MASKED).bound._trials.hides_ones


class Translating(torch.nn.Module):
    """An encoder and a decoder of torch's, in one module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = torch.nn.Embedding(12, 8), torch.nn.Linear(8, 12)
        self.both = torch.nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.table

    def forward(self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:
        x, y = self.table(input_ids), self.table(decoder_input_ids)
        ahead = torch.ones(2 * y.shape[1:2], dtype=torch.bool).triu(1)
        return self.head(self.both(x, y, tgt_mask=ahead))


class Told(Translating):
    def get_encoder(self) -> torch.nn.Module:
        return self.both.encoder

    def get_decoder(self) -> torch.nn.Module:
        return self.both.decoder


def test_an_encoder_and_decoder_of_ones_own_says_which_is_which() -> None:
    given = {"input_ids": torch.tensor([[3, 5, 7, 2]]), "decoder_input_ids": torch.tensor([[1, 4]])}
    for method in ("attnlrp", "integrated-gradients"):
        with pytest.raises(ModelError, match=r"Translating does not say .* give it a get_encoder\(\)"):
            Explainer(Translating().eval(), task=Task.SEQ2SEQ)(given, 5, method=method)
    model = Told().double().eval()
    found = Explainer(model, task=Task.SEQ2SEQ)(given, 5, method="gradient-x-input")
    tables = [model.table(given[name]).detach().requires_grad_() for name in given]
    ahead = torch.ones(2, 2, dtype=torch.bool).triu(1)
    value = model.head(model.both(*tables, tgt_mask=ahead))[0, -1, 5]
    expected = [(x * g)[0].sum(-1) for x, g in zip(tables, torch.autograd.grad(value, tables), strict=True)]
    assert found.explained.value == pytest.approx(float(value.detach()), rel=1e-9)
    assert torch.allclose(found.relevance.double(), torch.cat(expected).detach(), rtol=0, atol=1e-6)


def test_neurons_of_an_encoder_and_decoder_of_ones_own() -> None:
    """The model was looked at without anything that its decoder had written."""
    model = Told().double().eval()
    given = {"input_ids": torch.tensor([[3, 5, 7, 2]]), "decoder_input_ids": torch.tensor([[1, 4]])}
    found = Explainer(model, task=Task.SEQ2SEQ).neurons(given, 5, top=1000, method="gradient-x-input")
    kept: list[torch.Tensor] = []
    paths = [f"both.{side}.layers.0.linear2" for side in ("encoder", "decoder")]
    hooks = [model.get_submodule(path).register_forward_pre_hook(lambda _, x: kept.append(x[0])) for path in paths]
    gradients = torch.autograd.grad(model(**given)[0, -1, 5], kept)
    for hook in hooks:
        hook.remove()
    units = {(unit.path, unit.position, unit.unit): unit.relevance for unit in found}
    assert len(units) == 16 * (4 + 2)
    for path, x, gradient in zip(paths, kept, gradients, strict=True):
        for position, row in enumerate((x * gradient)[0].tolist(), 4 if "decoder" in path else 0):
            assert [units[path, position, unit] for unit in range(16)] == pytest.approx(row, rel=0, abs=1e-9)


class OfHiddenStates(torch.nn.Module):
    """A head of one's own on what several layers of a model of transformers give."""

    def __init__(self, body):
        super().__init__()
        self.body, self.config = body.model, body.config
        self.head = torch.nn.Linear(2 * self.config.hidden_size, 31)

    def get_input_embeddings(self):
        return self.body.get_input_embeddings()

    def forward(self, input_ids, attention_mask=None, inputs_embeds=None):
        given = {"input_ids": input_ids, "attention_mask": attention_mask, "inputs_embeds": inputs_embeds}
        states = self.body(**given, output_hidden_states=True).hidden_states
        return self.head(torch.cat([states[1], states[2]], -1))


def of_hidden_states(is_known):
    """Such a model, which was called before, or was not."""
    torch.manual_seed(0)
    model = OfHiddenStates(models.tiny_llama(num_hidden_layers=3)).double().eval()
    if is_known:
        model(torch.tensor([[3, 4]]))
    return model


@pytest.mark.parametrize("is_known", [False, True])
def test_hidden_states_are_there_once_whatever_was_tried_before(is_known):
    """transformers puts hooks on at the first call that asks for them, and notes that it did."""
    ids = [3, 5, 7, 9]
    expected = of_hidden_states(True)(torch.tensor([ids]))[0, -1, 5].detach()
    model = of_hidden_states(is_known)
    explainer = Explainer(model, task=Task.CAUSAL)
    for method in ("gradient-x-input", "leave-one-out"):
        assert explainer(ids, target=5, method=method).explained.value == pytest.approx(float(expected), abs=1e-12)
    places(model, "neurons")
    assert torch.allclose(model(torch.tensor([ids]))[0, -1, 5], expected, rtol=0, atol=1e-12)


class HooksItself(torch.nn.Module):
    """Adds to what its layer gives by a hook, which it puts there in its first call."""

    def __init__(self, noted):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer = torch.nn.Embedding(31, 8), torch.nn.Linear(8, 31)
        self.noted, self.known = noted, [] if noted == "handles" else False

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids, attention_mask=None):
        if not self.known:
            handle = self.layer.register_forward_hook(lambda _, __, output: output + 1)
            self.known = {"flag": True, "number": 1, "name": "on", "handles": [handle], "tuple": (handle,)}[self.noted]
        return self.layer(self.embedding(input_ids))


class HooksAnew(HooksItself):
    """In each call, in the place of the one of the last."""

    def forward(self, input_ids, attention_mask=None):
        if self.known:
            self.known[0].remove()
        self.known = ()
        return super().forward(input_ids, attention_mask)


@pytest.mark.parametrize("is_called", [False, True])
@pytest.mark.parametrize(
    ("kind", "noted"),
    [*((HooksItself, noted) for noted in ("flag", "number", "name", "handles", "tuple")), (HooksAnew, "tuple")],
)
def test_a_hook_that_a_module_puts_on_itself_is_there_once(kind, noted, is_called):
    model, ids = kind(noted).eval(), [3, 5, 7]
    expected = (model.layer(model.embedding(torch.tensor(ids)))[-1, 5] + 1).item()
    if is_called:
        model(torch.tensor([ids]))
    explainer = Explainer(model, task=Task.CAUSAL)
    for method in ("gradient-x-input", "occlusion"):
        assert explainer(ids, target=5, method=method).explained.value == pytest.approx(expected, abs=1e-6)
    assert model(torch.tensor([ids]))[0, -1, 5].item() == pytest.approx(expected, abs=1e-6)
    assert len(model.layer._forward_hooks) == 1
