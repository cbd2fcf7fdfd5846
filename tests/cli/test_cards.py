"""``lrpx neurons collect``, ``card`` and ``search``."""

from __future__ import annotations

import re

import pytest

from lrpx.cards import References
from lrpx.cards._references import FACTS
from lrpx.cards._search import WAYS
from lrpx.cli import _cards
from tests.cards.samples import TEXTS, corpus


def test_the_names_known_beforehand_are_those_that_there_are():
    assert tuple(FACTS) == _cards.MEASURES
    assert WAYS == _cards.WAYS


def test_from_a_corpus_to_a_card(run, tmp_path):
    path, out = corpus(tmp_path), tmp_path / "run"
    measures = ["--measure", "activation", "--measure", "relevance"]
    code, said, err = run("neurons", "collect", "--data", path, "--out", out, "--k", 3, *measures)
    assert (code, err) == (0, "")
    references = References.read(out)
    assert f"{references.table.num_rows:,} neurons of {len(references.layers)} layers, {len(TEXTS)} texts" in said
    html = tmp_path / "card.html"
    code, said, err = run("neurons", "card", out, "3:100", "--html", html, "--passages", 1)
    assert (code, err) == (0, "")
    for each in ("Neuron 100 of layer 3", "raises", "highest relevance", str(html)):
        assert each in said
    assert "Neuron 100 of layer 3" in html.read_text()
    code, said, err = run("neurons", "search", out, " are", "--top", 2)
    assert (code, err) == (0, "")
    assert len(re.findall(r"\d+:\d+", said)) == 2
    code, said, err = run("neurons", "search", out, "rug", "--by", "passages", "--top", 1)
    assert (code, err) == (0, "")
    assert "2 of 3" in said
    code, said, _ = run("neurons", "search", out, "zebra", "--by", "passages")
    assert (code, said) == (0, "no neuron was found\n")


@pytest.mark.slow
def test_an_index(run, tmp_path):
    path, out, index = corpus(tmp_path), tmp_path / "run", tmp_path / "index.html"
    assert run("neurons", "collect", "--data", path, "--out", out)[0] == 0
    code, said, err = run("neurons", "card", out, "--index", index)
    assert (code, said, err) == (0, f"{index}\n", "")
    assert 'id="units"' in index.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["collect", "--data", "missing.txt", "--out", "run"], "cannot read missing.txt: No such file"),
        (
            ["collect", "--data", "corpus.txt", "--out", "run", "--measure", "loudness"],
            "--measure is 'loudness'; pass one of activation, ",
        ),
        (["collect", "--data", "corpus.txt", "--out", "run", "--context", "3"], "corpus.txt:1 has"),
        (
            ["collect", "--data", "corpus.txt", "--out", "run", "--long", "leave"],
            "--long is 'leave'; pass one of refuse, cut",
        ),
        (
            ["collect", "--data", "corpus.txt", "--out", "run", "--at", "noon"],
            "--at is 'noon'; pass one of drawn, last",
        ),
        (["search", "nothing", "key", "--by", "smell"], "--by is 'smell'; pass one of writes, peaks, passages"),
        (["search", "nothing", "key", "--measure", "loudness"], "--measure is 'loudness'; pass one of activation, "),
        (["card", "nothing", "3:100"], "cannot read nothing/run.json"),
        (["card", "run", "layer3"], "'layer3' names no neuron; write its layer and its number, such as 17:3948"),
        (["card", "run"], "no neuron was named; write its layer and number"),
        (["card", "run", "--html", "a.html"], "no neuron was named"),
        (["card", "run", "3:1", "--html", "no/such/a.html"], "cannot write no/such/a.html"),
        (["search", "nothing", "key"], "cannot read nothing/run.json"),
        (["search", "run"], "missing argument"),
    ],
)
def test_mistakes_are_one_line(arguments, said, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    corpus(tmp_path)
    code, out, err = run("neurons", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_the_mends_are_options(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = corpus(tmp_path)
    _, _, err = run("neurons", "collect", "--data", path, "--out", "run", "--context", 3)
    assert "cut such texts with --long cut, or leave them out" in err
    run("neurons", "collect", "--data", path, "--out", "run", "--k", 2)
    code, _, err = run("neurons", "card", "run", "99:0")
    assert code == 2
    assert "there is no layer 99; the layers with neurons are 0 to" in err
    code, _, err = run("neurons", "card", "run", "0:99999")
    assert code == 2
    assert re.search(r"layer 0 has \d+ neurons, 0 to \d+; 99999 is none of them", err)
    code, _, err = run("neurons", "search", "run", "of many tokens")
    assert code == 2
    assert "search for one token, or for any text with --by passages" in err
    assert "--target" not in err
    path.unlink()
    code, _, err = run("neurons", "card", "run", "0:0")
    assert code == 2
    assert "cannot read" in err
    assert "name it with --corpus" in err
