"""Agreement samples as real tokenizers read them."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from lrpx._data.agreement import Sample, read_agreement
from lrpx._data.tokenised import tokenise
from lrpx._tokens import token_id
from lrpx.errors import InputError, ModelError
from lrpx.model import BUNDLED
from lrpx.tasks import Task


@pytest.fixture(scope="module")
def bundled():
    return AutoTokenizer.from_pretrained(BUNDLED)


@pytest.fixture(scope="module")
def bert(minilm):
    return AutoTokenizer.from_pretrained(minilm)


@pytest.fixture(scope="module")
def stories(shared_data):
    example = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "stories260k.py"))
    return example["tokenizer"](shared_data / "models" / "stories260K" / "hf")


@pytest.fixture(scope="module")
def sentencepiece():
    """A BPE vocabulary with a mark for each space, in a Rust backend."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=40, special_tokens=["<unk>", "<s>"], show_progress=False)
    backend.train_from_iterator(["the doors of the house are red", "the dog of the doors is red"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>")


@pytest.fixture(scope="module")
def treebank(shared_data):
    return read_agreement(shared_data / "agreement" / "en_ewt-ud-test.conllu").samples


def sample(text, other, name="made:1"):
    """A sample from a text with ``[subject]`` and ``*verb*``."""
    plain = text.replace("[", "").replace("]", "").replace("*", "")
    bare = text.replace("*", "")
    start, end = bare.index("["), bare.index("]") - 1
    bare = text.replace("[", "").replace("]", "")
    first, last = bare.index("*"), bare.rindex("*") - 1
    return Sample(name, plain, (first, last), plain[first:last], other, ((start, end),), 0)


DOORS = sample("The [doors] of the house *are* red.", "is")


def test_a_causal_model_reads_what_is_before_the_verb(bundled):
    (only,) = tokenise([DOORS], bundled, Task.CAUSAL).samples
    assert list(only.ids) == bundled("The doors of the house")["input_ids"]
    assert only.tokens == ("<|endoftext|>", "The", " doors", " of", " the", " house")
    assert only.position == 5
    assert (only.right, only.wrong) == (token_id(bundled, " are"), token_id(bundled, " is"))
    assert only.ground_truth == (2,)


def test_a_masked_model_reads_the_sentence_with_a_mask(bert):
    (only,) = tokenise([DOORS], bert, Task.MASKED).samples
    assert list(only.ids) == bert("The doors of the house [MASK] red.")["input_ids"]
    assert only.tokens == ("[CLS]", "the", " doors", " of", " the", " house", "[MASK]", " red", ".", "[SEP]")
    assert only.position == 6
    assert (only.right, only.wrong) == tuple(bert.convert_tokens_to_ids(["are", "is"]))
    assert only.ground_truth == (2,)


def test_a_sentencepiece_vocabulary(sentencepiece):
    (only,) = tokenise([sample("the [dogs] of the house *are* red", "is")], sentencepiece, Task.CAUSAL).samples
    assert list(only.ids) == sentencepiece("the dogs of the house")["input_ids"]
    assert sentencepiece.convert_ids_to_tokens([only.right, only.wrong]) == ["▁are", "▁is"]
    assert "".join(only.tokens[at] for at in only.ground_truth) == " dogs"


def test_a_ground_truth_of_several_tokens(bert):
    (only,) = tokenise([sample("All [morcillas] of Spain *are* black.", "is")], bert, Task.MASKED).samples
    assert [only.tokens[at] for at in only.ground_truth] == [" mor", "ci", "llas"]


def test_forms_are_read_at_their_place(bundled):
    found = tokenise(
        [
            sample("Now the [keys] (*are* they lost?)", "is", "made:1"),
            sample("Now the [boys] *do* know.", "does", "made:2"),
            sample("I know that [he]*'s* tall.", "'re", "made:3"),
        ],
        bundled,
        Task.CAUSAL,
    ).samples
    pieces = [bundled.convert_ids_to_tokens([each.right, each.wrong]) for each in found]
    assert pieces == [["are", "is"], ["Ġdo", "Ġdoes"], ["'s", "'re"]]
    assert found[0].tokens[-1] == " ("


@pytest.mark.parametrize(
    ("text", "other", "reason"),
    [
        ("All the [boys] *sanctify* it", "sanctifies", "a verb form is not one token of the vocabulary"),
        ("All the [boys] *do*n't", "does", "a verb form is not one token of the vocabulary"),
        ("All the [boys] un*do* it", "does", "a verb form is not one token of the vocabulary"),
        ("Where exactly *are* the [keys]", "is", "ground truth after the verb"),
        ("[They] *are* red", "is", "fewer than two tokens besides special ones"),
        ("[Ornithorhynchi] *are* red", "is", "the whole input is ground truth"),
    ],
)
def test_why_a_causal_model_drops_a_sample(bundled, text, other, reason):
    dropped = sample(text, other, "made:7")
    found = tokenise([DOORS, dropped], bundled, Task.CAUSAL)
    assert [each.sample for each in found.samples] == [DOORS]
    (row,) = found.dropped
    assert (row.id, row.line, row.reason, row.text) == ("made:7", 7, reason, dropped.text)


def test_a_masked_model_takes_a_ground_truth_on_either_side(bert):
    (only,) = tokenise([sample("Where exactly *are* the [keys]", "is")], bert, Task.MASKED).samples
    assert [only.tokens[at] for at in only.ground_truth] == [" keys"]
    found = tokenise([DOORS, sample("[They] *are*", "is"), sample("[They] *are*", "ARE")], bert, Task.MASKED)
    assert [row.reason for row in found.dropped] == [
        "fewer than two tokens besides special ones",
        "both verb forms read as the same token",
    ]


def test_a_word_that_is_not_in_the_vocabulary_is_no_form(piece_tokenizer):
    made = sample("[The keys] to the cabinet *中* on the table", "are"), sample("[The key] to the *is* on", "are")
    found = tokenise(made, piece_tokenizer, Task.MASKED)
    assert [row.reason for row in found.dropped] == ["a verb form is not one token of the vocabulary"]


@pytest.mark.parametrize("name", ["bundled", "bert"])
def test_a_real_treebank(treebank, name, request):
    """Ids are what the tokenizer makes of the prefix, or of the sentence with its own mask in it."""
    tokenizer = request.getfixturevalue(name)
    task = Task.MASKED if name == "bert" else Task.CAUSAL
    found = tokenise(treebank, tokenizer, task)
    assert len(found.samples) + len(found.dropped) == len(treebank)
    assert len(found.samples) > 600
    for each in found.samples:
        whole, (start, end) = each.sample.text, each.sample.verb
        if task is Task.MASKED:
            assert list(each.ids) == tokenizer(f"{whole[:start]}[MASK]{whole[end:]}")["input_ids"]
            assert each.ids[each.position] == tokenizer.mask_token_id
        else:
            assert list(each.ids) == tokenizer(whole[:start].rstrip())["input_ids"]
            assert each.position == len(each.ids) - 1
        assert len(each.tokens) == len(each.ids)
        forms = [tokenizer.decode([number]).strip() for number in (each.right, each.wrong)]
        wanted = [each.sample.form, each.sample.other]
        assert forms == ([form.lower() for form in wanted] if name == "bert" else wanted)
        effective = [at for at, number in enumerate(each.ids) if number not in tokenizer.all_special_ids]
        assert set(each.ground_truth) < set(effective)
        ((start, end),) = each.sample.subject
        read = "".join(each.tokens[at] for at in each.ground_truth).strip()
        assert whole[start:end].lower() in read.lower() or "[1/" in read


def test_statistics_are_those_of_the_samples(treebank, bundled):
    found = tokenise(treebank[:300], bundled, Task.CAUSAL)
    lengths = np.array([len(each.ids) for each in found.samples])
    truths = np.array([len(each.ground_truth) for each in found.samples])
    plural = [each.sample.plural for each in found.samples]
    assert found.statistics == pytest.approx(
        {
            "samples": len(lengths),
            "plural verb forms, share": np.mean(plural),
            "tokens, min": lengths.min(),
            "tokens, max": lengths.max(),
            "tokens, mean": lengths.mean(),
            "tokens, standard deviation": lengths.std(),
            "tokens, median": np.median(lengths),
            "ground truth tokens, min": truths.min(),
            "ground truth tokens, max": truths.max(),
            "ground truth tokens, mean": truths.mean(),
            "ground truth of 1 token, share": (truths == 1).mean(),
            "ground truth of 2 tokens, share": (truths == 2).mean(),
            "ground truth in the input, mean share": (truths / lengths).mean(),
        }
    )


def test_what_cannot_be_tokenised_is_named(bundled, stories, treebank):
    with pytest.raises(InputError, match="there are no samples"):
        tokenise([], bundled, Task.CAUSAL)
    with pytest.raises(ModelError, match=r"the tokenizer of .*bundled has no mask token"):
        tokenise([DOORS], bundled, Task.MASKED)
    for task in (Task.CLASSIFICATION, Task.SEQ2SEQ):
        with pytest.raises(ModelError, match=f"{task.named} predicts no verb"):
            tokenise([DOORS], bundled, task)
    stories.name_or_path = "stories260K"
    with pytest.raises(ModelError, match="the tokenizer of stories260K splits a form of every verb"):
        tokenise(treebank, stories, Task.CAUSAL)
    alone = [sample("[They] *are* red", "is"), sample("Where *are* the [keys]", "is")]
    with pytest.raises(
        InputError, match=r"none of 2 samples is left .*(ground truth after the verb: 1|fewer than .*1)"
    ):
        tokenise(alone, bundled, Task.CAUSAL)


def test_a_tokenizer_without_offsets_is_named():
    with pytest.raises(ModelError, match="does not tell which characters a token reads; use a fast tokenizer"):
        tokenise([DOORS], ByT5Tokenizer(), Task.CAUSAL)
