"""``lrpx neurons rank`` and ``turn``, as a user of the shell sees them."""

from __future__ import annotations

import io
import json

import pytest
import torch
import transformers as tf
from rich.console import Console

import lrpx
from lrpx import units
from lrpx.cli import _neurons, main
from lrpx.ranking import Ranking
from lrpx.sae import SparseAutoencoder, explain_features


@pytest.fixture
def command(monkeypatch, capsys):
    """The command in this process: ``(exit code, standard output, standard error)``."""

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["lrpx", "neurons", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "120")
        try:
            main()
            code = 0
        except SystemExit as error:
            code = error.code or 0
        return code, *capsys.readouterr()

    return run


def test_rank(command, tmp_path):
    asked = ("--target", " are", "--contrast", " is", "--top", "4")
    code, out, _ = command(
        "rank", "The doors of the house", *asked, "--json", tmp_path / "n.json", "--html", tmp_path / "n.html"
    )
    assert code == 0
    expected = lrpx.Explainer.from_pretrained().neurons("The doors of the house", " are", " is", top=4)
    assert Ranking.load(tmp_path / "n.json").rows == expected.rows
    assert all(str(row.unit) in out for row in expected)
    assert "logit of ' are'" in out
    assert "logit of" in (tmp_path / "n.html").read_text()
    code, out, _ = command("rank", "The doors", "--kind", "heads", "--method", "lrp", "--top", 2)
    assert code == 0
    assert "head" in out


def test_as_many_as_there_are(command, tmp_path, monkeypatch):
    """The terminal shows the first of them; the numbers are those of each unit by itself."""
    monkeypatch.setattr(_neurons, "ROWS", 5)
    code, out, err = command("rank", "The doors", "--kind", "heads", "--top", 99999999, "--json", tmp_path / "n.json")
    found = Ranking.load(tmp_path / "n.json")
    assert (code, len(found)) == (0, found.count)
    assert "the 5 most relevant of" in out
    assert f"and {found.count - 5} more; --json writes all of them" in err
    assert len({(row.path, row.unit, row.position) for row in found}) == len(found)
    assert sorted(found, key=lambda row: -abs(row.relevance)) == list(found)
    few = lrpx.Explainer.from_pretrained().neurons("The doors", kind="heads", top=3)
    assert few.rows == found.rows[:3]


def test_rank_over_files(command, tmp_path):
    (tmp_path / "a.txt").write_text("The doors of the house\n\nThe cats\n")
    (tmp_path / "b.txt").write_text("The door of the houses\n")
    code, out, _ = command(
        "rank", "--texts", tmp_path / "a.txt", "--versus", tmp_path / "b.txt", "--target", " are", "--top", 3
    )
    assert code == 0
    assert "2 texts less 1 text" in out


def test_flow(command, tmp_path):
    asked = ("The doors of the house", "--target", " are", "--contrast", " is")
    files = [tmp_path / f"flow.{kind}" for kind in ("json", "html", "png")]
    code, out, _ = command("flow", *asked, "--json", files[0], "--html", files[1], "--png", files[2])
    assert code == 0
    expected = lrpx.Explainer.from_pretrained().flow("The doors of the house", " are", " is")
    assert str(expected) == out.rstrip()
    assert json.loads(files[0].read_text()) == json.loads(json.dumps(expected.attribution.to_dict()))
    assert files[1].read_text() == expected.to_html()
    assert files[2].read_bytes().startswith(b"\x89PNG")


@pytest.fixture(scope="module")
def autoencoder(tmp_path_factory):
    drawn = torch.Generator().manual_seed(0)
    wide = lrpx.Explainer.from_pretrained().model.config.hidden_size
    encoder, decoder = (torch.randn(*shape, generator=drawn) / 8 for shape in ((wide, 64), (64, wide)))
    folder = tmp_path_factory.mktemp("sae")
    hook = "blocks.3.hook_resid_post"
    SparseAutoencoder(encoder, torch.zeros(64), decoder, torch.full((wide,), 0.01), hook=hook).save(folder)
    return folder


def test_features(command, autoencoder, tmp_path):
    asked = ("The doors of the house", "--target", " are", "--contrast", " is", "--method", "lrp")
    files = [tmp_path / f"features.{kind}" for kind in ("json", "html")]
    code, out, _ = command("features", *asked, "--sae", autoencoder, "--json", files[0], "--html", files[1], "--top", 3)
    assert code == 0
    sae = SparseAutoencoder.load(autoencoder)
    explainer = lrpx.Explainer.from_pretrained()
    expected = explain_features(explainer, "The doors of the house", sae, " are", " is", recipe=lrpx.LRP)
    assert json.loads(files[0].read_text()) == json.loads(json.dumps(expected.to_dict()))
    assert files[1].read_text() == expected.to_html(top=3)
    assert all(f" {each.feature} " in out for each in expected.top(3))
    assert "the 3 most relevant of" in out
    assert "through model.layers.3" in out
    code, _, err = command("features", "The doors", "--sae", autoencoder, "--path", "model.layers.9")
    assert (code, "where the autoencoder belongs" in err) == (2, True)


def test_turn(command):
    code, out, _ = command("turn", "The doors of the house", "--set", "3:5=9", "--scale", "2:7=-4", "--at", 2)
    assert code == 0
    assert "before" in out
    assert "%" in out
    code, out, err = command("turn", "The doors of the house", "--scale", "1:3=1", "--generate", 4)
    assert (code, "makes no difference" in err) == (0, True)
    several = ("--set", "0:0=0", "--clamp", "model.layers.1:1=-1,2", "--add", "0:2=3.5", "--kind", "heads")
    code, out, _ = command("turn", "The doors", *several, "--generate", 3)
    assert code == 0


def test_turn_writes_the_largest_logit_each_time(command, tmp_path):
    """Whatever penalties the generation config of the model's files has."""
    explainer, text = lrpx.Explainer.from_pretrained(), "The dog and the dog and the dog"
    model, tokenizer = explainer.model, explainer.tokenizer
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    count = ids.shape[1]
    for _ in range(8):
        with torch.no_grad():
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
    written = tokenizer.decode(ids[0, count:], skip_special_tokens=True)
    given = {"repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "suppress_tokens": ids[0, count:].tolist()}
    model.generation_config.update(**given, num_return_sequences=2, do_sample=True, temperature=3.0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    code, out, err = command("turn", text, "--scale", "1:3=1", "--generate", 8, "--model", tmp_path)
    assert (code, "makes no difference" in err) == (0, True)
    assert " ".join(written.split()) in " ".join(out.split())


@pytest.mark.parametrize("name", ["gpt2", "llama", "bart"])
def test_turn_writes_no_further_than_the_models_context(command, tmp_path, piece_tokenizer, name):
    """The last token that is written is read by none; a table of positions has an end, angles have none."""
    torch.manual_seed(0)
    sizes = {"vocab_size": len(piece_tokenizer), "max_position_embeddings": 16, "eos_token_id": None}
    if name == "gpt2":
        model = tf.GPT2LMHeadModel(tf.GPT2Config(n_embd=16, n_layer=1, n_head=2, **sizes))
    elif name == "bart":
        layers = {f"{part}_{what}": 1 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
        wide = {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "forced_eos_token_id": None}
        model = tf.BartForConditionalGeneration(tf.BartConfig(d_model=16, **layers, **wide, **sizes))
    else:
        small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        model = tf.LlamaForCausalLM(tf.LlamaConfig(**small, **sizes))
    model.save_pretrained(tmp_path)
    piece_tokenizer.save_pretrained(tmp_path)
    count = 1 if name == "bart" else len(piece_tokenizer("the film")["input_ids"])
    place = "model.decoder.layers.0.fc2" if name == "bart" else "0"
    turn = ("turn", "the film", "--set", f"{place}:1=9", "--model", tmp_path, "--generate")
    code, _, err = command(*turn, 17 - count)
    assert code == 0, err
    code, out, err = command(*turn, 18 - count)
    assert (code, out) == (2, "")
    assert f"the model's context of 16 tokens, {count} of which are taken; pass --generate {17 - count} at most" in err


def test_what_a_classifier_says_is_told_as_everywhere(command, tmp_path, piece_backend):
    """The sigmoid of each class where several may hold, and a score as a number."""
    from tokenizers import Tokenizer
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    pieces = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(piece_backend),
        pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", mask_token="[MASK]",
    )  # fmt: skip
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    pieces.save_pretrained(tmp_path)
    for more in ({"num_labels": 3, "problem_type": "multi_label_classification"}, {"num_labels": 1}):
        torch.manual_seed(0)
        BertForSequenceClassification(BertConfig(vocab_size=len(pieces), **small, **more)).save_pretrained(tmp_path)
        code, out, _ = command("turn", "the film", "--set", "0:1=9", "--model", tmp_path)
        assert code == 0
        a = lrpx.Explainer.from_pretrained(tmp_path)("the film")
        told = a.explained.value if a.prediction is None else a.prediction.probability
        assert (f"{told:+.4g}  " if a.prediction is None else f"{told:6.1%}  ") in out


WRONG = {
    "no text": (["rank"], "there is no text"),
    "both": (["rank", "a", "--texts", "x"], "there is no text, or one beside"),
    "flow of many": (["flow", "The doors", "--method", "ifr"], "tells nothing of neurons"),
    "no folder": (["flow", "The doors", "--png", "no/such/a.png"], "cannot write no/such/a.png"),
    "no autoencoder": (["features", "The doors", "--sae", "nowhere"], "cannot read nowhere/cfg.json"),
    "no recipe": (["features", "The doors", "--sae", "nowhere", "--method", "ifr"], "tells nothing of neurons"),
    "versus alone": (["rank", "a", "--versus", "x"], "--versus compares two files"),
    "no file": (["rank", "--texts", "nowhere.txt"], "cannot read nowhere.txt"),
    "kind": (["rank", "The doors", "--kind", "cells"], "no units called 'cells'"),
    "method": (["rank", "The doors", "--method", "alti"], "tells nothing of neurons"),
    "nothing": (["turn", "The doors"], "nothing is changed"),
    "form": (["turn", "The doors", "--set", "3948=0"], "write it as LAYER:UNIT=NUMBER, such as --set 17:3948=0"),
    "bounds": (["turn", "The doors", "--clamp", "1:2=0"], "LAYER:UNIT=LOW,HIGH"),
    "order": (["turn", "The doors", "--clamp", "1:2=3,0"], "lets nothing through"),
    "layer": (["turn", "The doors", "--set", "17:3=0"], "no neurons in layer 17; there are in 0 to 5"),
    "unit": (["turn", "The doors", "--set", "1:704=0"], "has 704 neurons; 704 is none of them"),
    "twice": (["turn", "The doors", "--set", "1:7=0", "--scale", "1:7=2"], "changed twice"),
    "position": (["turn", "The doors", "--set", "1:7=0", "--at", "9"], "no text in this block had position 9"),
    "infinite": (["turn", "The doors", "--set", "1:7=inf"], "pass a finite number"),
}


def test_what_needs_no_model_is_refused_before_one_is_loaded(command, monkeypatch):
    monkeypatch.setattr(lrpx.Explainer, "from_pretrained", lambda *_, **__: pytest.fail("a model was loaded"))
    cases = [
        (("rank", "The doors", "--kind", "cells"), "no units called 'cells'"),
        *(((each, "The doors", "--method", "alti"), "tells nothing of neurons") for each in ("rank", "flow")),
        *(((each, "The doors", "--method", "magic"), "no method 'magic'") for each in ("rank", "flow")),
        *(((each, " "), "the text is empty") for each in ("rank", "flow")),
        (("turn", "", "--set", "0:1=0"), "the text is empty"),
        (("rank", "The doors", "--target", "a", "--target-id", 1), "--target and --target-id exclude each other"),
        (("rank", "The doors", "--html", "a.x", "--json", "a.x"), "one file is named twice"),
        (("rank", "--texts", "a.x", "--html", "a.x"), "one file is named twice"),
        (("flow", "The doors", "--html", "a.x", "--png", "./a.x"), "one file is named twice"),
        (("card", "run", "0:0", "--html", "a.x", "--index", "a.x"), "one file is named twice"),
        (("flow", "The doors", "--contrast", "a", "--contrast-id", 1), "--contrast and --contrast-id exclude"),
    ]
    for arguments, told in cases:
        code, _, err = command(*arguments)
        assert (code, told in err) == (2, True), (arguments, err)


def test_a_target_by_its_id(command, tmp_path):
    index = lrpx.Explainer.from_pretrained().bound.index
    files = [tmp_path / name for name in ("a.json", "b.json")]
    names = ("--target", " are", "--contrast", " is")
    ids = ("--target-id", index(" are"), "--contrast-id", index(" is"))
    for each in ("rank", "flow"):
        for asked, file in zip((names, ids), files, strict=True):
            assert command(each, "The doors of the house", *asked, "--json", file)[0] == 0
        assert files[0].read_text() == files[1].read_text()
    _, _, err = command("rank", "The doors", "--target", "of many tokens")
    assert "--target-id" in err


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_no_number_is_cut_off_where_the_terminal_is_narrow(width):
    explainer = lrpx.Explainer.from_pretrained()
    ranking, flow = explainer.neurons("The doors of the house", top=3), explainer.flow("The doors of the house")
    for found in (ranking, flow):
        console = Console(width=width, force_jupyter=False, no_color=True)
        with console.capture() as captured:
            console.print(found)
        lines = captured.get().splitlines()
        assert max(map(len, lines)) <= width
        words = " ".join(lines).split()
        if found is ranking:
            assert all(f"{each.unit}" in words and f"{each.relevance:+.4g}" in words for each in ranking)
        else:
            assert {"0", "5", f"{float(flow.attribution.explained.value):+.4g}"} <= set(words)


def test_a_dash_is_standard_input(command, monkeypatch, tmp_path):
    for name in ("a.json", "b.json"):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"The doors of the house\n")))
        given = "-" if name == "a.json" else "The doors of the house"
        assert command("rank", given, "--top", 2, "--json", tmp_path / name)[0] == 0
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()


def test_a_table_is_no_list_of_lines(command, tmp_path):
    texts = ["The doors of the house", "The cats\u2028sleep"]
    (tmp_path / "a.txt").write_text("\n".join(texts))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in texts))
    (tmp_path / "a.tsv").write_text("label\ttext\n" + "".join(f"1\t{each}\n" for each in texts))
    found = []
    for kind in ("txt", "jsonl", "tsv"):
        file = tmp_path / f"{kind}.json"
        assert command("rank", "--texts", tmp_path / f"a.{kind}", "--top", 2, "--json", file)[0] == 0
        found.append(Ranking.load(file).rows)
    assert found[0] == found[1] == found[2] == lrpx.Explainer.from_pretrained().neurons(texts, top=2).rows
    (tmp_path / "b.csv").write_text("words\nThe doors\n")
    code, _, err = command("rank", "--texts", tmp_path / "b.csv")
    assert (code, "call the column of the texts 'text'" in err) == (2, True)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(command, name):
    arguments, told = WRONG[name]
    code, out, err = command(*arguments)
    assert code == 2
    assert told in err
    assert len([line for line in err.splitlines() if not line.endswith("…")]) == 1  # a slow machine's progress
    assert "Traceback" not in err + out


@pytest.mark.parametrize("option", ["--json", "--html"])
@pytest.mark.parametrize("name", ["rank", "flow"])
def test_no_file_is_called_dash(name, option, command, tmp_path, monkeypatch):
    """A file of that name was written, where ``explain`` writes to standard output."""
    monkeypatch.chdir(tmp_path)
    code, _, said = command(name, "The doors of the house", option, "-")
    assert code == 2
    assert "nothing to standard output by -; name a file" in " ".join(said.split())
    assert not list(tmp_path.iterdir())


def test_json_is_json(command, tmp_path):
    command("rank", "The doors", "--top", 2, "--json", tmp_path / "n.json")
    assert len(json.loads((tmp_path / "n.json").read_text())["rows"]) == 2


def test_the_kinds_are_those_there_are():
    assert _neurons.KINDS == units.KINDS


def test_white_space_at_the_end_of_a_prompt_is_read(command, tmp_path):
    """As in a text that is given alone: what comes next is another after it."""
    texts = ["The keys to the cabinet\n", "\tThe doors of the house "]
    with (tmp_path / "a.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    assert command("rank", "--texts", tmp_path / "a.jsonl", "--top", 3, "--json", tmp_path / "found.json")[0] == 0
    expected = lrpx.Explainer.from_pretrained().neurons(texts, top=3)
    assert [row.mean for row in Ranking.load(tmp_path / "found.json").rows] == pytest.approx(
        [row.mean for row in expected.rows], rel=1e-4
    )


def test_turn_tells_every_score_of_a_model_of_several(command, tmp_path):
    """Six numbers of an essay, say, are no chances, of which the likeliest would do."""
    names = ["cohesion", "syntax", "vocabulary", "phraseology", "grammar", "conventions"]
    explainer = lrpx.Explainer.from_pretrained()
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    config = tf.LlamaConfig(
        vocab_size=len(explainer.tokenizer), num_labels=6, problem_type="regression", pad_token_id=0,
        id2label=dict(enumerate(names)), **sizes,
    )  # fmt: skip
    tf.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    explainer.tokenizer.save_pretrained(tmp_path)
    code, out, _ = command("turn", "The doors of the house", "--set", "1:3=5", "--model", tmp_path)
    assert code == 0
    assert [out.count(repr(name)) for name in names] == [2] * 6
