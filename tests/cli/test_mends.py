"""What an error tells to do can be done on the command line."""

from __future__ import annotations

import re

import pytest
import torch
import transformers
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForMultipleChoice,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)

from lrpx.cli._mends import on_the_command_line

OF_PYTHON = re.compile(r"\w+=|lrpx\.(?!Explainer)|tuple|\bpass (position|decoder|ledger)\b|None|\(text,|load\(")
SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, piece_backend, byte_backend):
    """A folder of a tiny model of each task, with a tokenizer, or without."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    pieces = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(piece_backend),
        pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
    )  # fmt: skip
    texts = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_backend), pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
    torch.manual_seed(0)
    bert = BertConfig(vocab_size=len(pieces), **SMALL, id2label={0: "no", 1: "yes"}, label2id={"no": 0, "yes": 1})
    t5 = T5Config(
        vocab_size=len(texts), d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    llama = LlamaConfig(vocab_size=len(texts), **SMALL, num_key_value_heads=2)
    vit = ViTConfig(**SMALL, image_size=16, patch_size=8)
    made = {
        "classes": (BertForSequenceClassification(bert), pieces),
        "tags": (BertForTokenClassification(bert), pieces),
        "mask": (BertForMaskedLM(bert), pieces),
        "answers": (BertForQuestionAnswering(bert), pieces),
        "choices": (BertForMultipleChoice(bert), pieces),
        "seq2seq": (T5ForConditionalGeneration(t5), texts),
        "causal": (LlamaForCausalLM(llama), texts),
        "no tokenizer": (LlamaForCausalLM(llama), None),
        "images": (ViTForImageClassification(vit), None),
        "encoder": (transformers.BertModel(bert), pieces),
    }
    root = tmp_path_factory.mktemp("models")
    for name, (model, tokenizer) in made.items():
        model.save_pretrained(root / name)
        if tokenizer is not None:
            tokenizer.save_pretrained(root / name)
    return root


MISTAKES = [
    ("classes", ["--target", "maybe"], "or the index of a class with --target-id", ["--target-id", "1"]),
    ("classes", ["--position", "1"], "leave --position out", []),
    ("classes", ["--decoder", "The"], "leave --decoder out", []),
    ("tags", [], "pass --position, the token that is meant", ["--position", "1"]),
    ("mask", [], "or pass --position", ["--position", "1"]),
    ("answers", ["--target", "yes", "--pair", "the tree"], "leave --target out", ["--pair", "the tree"]),
    ("choices", [], "pass each choice with --choice", ["--choice", "the key", "--choice", "the tree"]),
    ("seq2seq", ["--target", "zebra"], "--target-id", ["--target-id", "7", "--decoder", "The"]),
    ("causal", ["--target", "zebra"], "--target-id", ["--target-id", "7", "--contrast-id", "8"]),
    ("causal", ["--choice", "a", "--choice", "b"], "leave --choice out", ["--target-id", "7"]),
    ("causal", ["--pair", "the tree"], "leave --pair out, or write both into one text", ["--target-id", "7"]),
    (
        "causal",
        ["--target-id", "7", "--contrast", "zebra"],
        "--contrast-id",
        ["--target-id", "7", "--contrast-id", "8"],
    ),
    (
        "classes",
        ["--target", "no", "--contrast", "maybe"],
        "index of a class with --contrast-id",
        ["--target", "no", "--contrast-id", "1"],
    ),
    ("no tokenizer", [], "pass token ids with --ids, or a model folder", None),
    ("images", [], "pass an image with --image", None),
    ("encoder", [], "pass the other one with --pair", ["--pair", "the tree"]),
    ("encoder", ["--choice", "a", "--choice", "b"], "leave --choice out", ["--pair", "the tree"]),
    ("encoder", ["--pair", "the tree", "--target", "yes"], "", ["--pair", "the tree"]),
]


@pytest.mark.parametrize(("model", "wrong", "said", "right"), MISTAKES)
def test_a_mend_can_be_done(run, folders, model, wrong, said, right):
    """The mistake names an option, and with that option the command runs."""
    text = "The key to the cabinet"
    code, out, err = run("explain", text, "--model", folders / model, *wrong)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert said in err
    assert not OF_PYTHON.search(err), err
    if right is not None:
        code, out, err = run("explain", text, "--model", folders / model, *right)
        assert (code, err) == (0, "")
        assert "key" in out or "k" in out


@pytest.mark.parametrize(
    ("model", "command", "said"),
    [
        ("tags", ["neurons", "turn", "The key", "--set", "0:1=1"], "; lrpx neurons turn has no --position"),
        ("tags", ["neurons", "rank", "The key"], ""),
        ("encoder", ["neurons", "rank", "The key"], "; lrpx neurons rank has no --pair"),
        ("choices", ["check"], "; lrpx check has no --choice"),
        ("choices", ["neurons", "turn", "The key", "--set", "0:1=1"], ""),
    ],
)
def test_a_mend_that_another_command_has(run, folders, model, command, said):
    """What only ``lrpx explain`` can be told is not told of others as if they could."""
    code, _, err = run(*command, "--model", folders / model)
    assert code == 2
    assert err.endswith(f"{said}, lrpx explain has\n" if said else "\n")
    assert ("lrpx explain has" in err) == bool(said)
    assert "inputs=" not in err or "in Python" in err


def test_token_ids_for_a_model_without_a_tokenizer(run, folders):
    code, out, err = run("explain", "7 12 9", "--ids", "--model", folders / "no tokenizer", "--target-id", 5)
    assert (code, err) == (0, "")
    assert "logit of '#5'" in out
    assert "#12" in out


def test_pairs_and_questions(run, folders):
    for model in ("classes", "answers"):
        code, out, err = run("explain", "the key", "--pair", "the tree", "--model", folders / model)
        assert (code, err) == (0, ""), model
        assert "tree" in out


def test_no_message_of_the_library_tells_of_python_after_the_mends():
    """Every message that a text can lead to, as the files raise them."""
    for message in (
        "this model has no tokenizer; pass token ids, or a tokenizer",
        "a text encoder has no Logit to explain; pass Similarity(…), or no target",
        "it takes several texts; pass them as a tuple: (text, other), or (text, [choice, choice]) for multiple choice",
        "a multiple choice model takes a text and at least two choices; pass (text, [choice, choice])",
        "Odd is none of these: classifier; load the class with the right head, say which of them it is with task=, or "
        "use lrpx.propagate(model, recipe), which takes any module",
        "odd has no rule; use a recipe with strict=False to take its plain gradient",
        "the rule is 'odd:rule'; import it, and load the file with Recipe.load(path, own=[rule])",
    ):
        told = on_the_command_line(message)
        assert told != message
        assert "--" in told or "in Python" in told


def test_two_ids_are_no_two_texts(run, folders):
    code, _, err = run("explain", "5 6", "--ids", "--model", folders / "encoder")
    assert code == 2
    assert "pass the other one with --pair" in err


def test_of_a_token_that_is_several_no_list_of_positions_is_told(run):
    code, _, err = run("explain", "The doors", "--target", "zzzqq")
    assert code == 2
    assert err.rstrip().endswith("--target-id 970 is 'zz'")
