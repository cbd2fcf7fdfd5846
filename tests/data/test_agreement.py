"""Agreement samples from rows with a parser, from rows with their parses, and from treebanks."""

from __future__ import annotations

import pytest
from agreement_data import held_out_ids, split_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from lrpx._data.agreement import Dropped, Sample, read_agreement
from lrpx._data.inflection import other_form
from lrpx._data.trees import read_trees
from lrpx.errors import DataError, InputError
from tests.data.samples import KEYS, conllu, row

ROWS = [
    row("the keys to the cabinet *open*", "open", "opens"),
    row("the list to the members *lie*", "lie", "lie"),
    row("the list to the members *has*", "has", "have", 2),
    row("the keys of the doors *seem*", "seem", "seems"),
]


@pytest.fixture
def tsv(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text("".join(ROWS), encoding="utf-8")
    return path


@pytest.fixture
def treebank(tmp_path):
    """Five sentences: six verbs in the present tense, two of them dropped."""
    path = tmp_path / "bank.conllu"
    path.write_text(
        KEYS
        + conllu("Go go VB 0 root", "home home RB 1 advmod")
        + conllu(
            "I I PRP 2 nsubj",
            "think think VBP 0 root",
            "he+ he PRP 5 nsubj",
            "'s be VBZ 5 cop",
            "tall tall JJ 2 ccomp",
        )
        + conllu("There there EX 2 expl", "Are be VBP 0 root", "keys key NNS 2 nsubj")
        + conllu("He he PRP 2 nsubj", "recieves receive VBZ 0 root", "it it PRP 2 obj")
        + conllu("HAVE have VBP 3 aux", "lists list NNS 3 nsubj", "changed change VBN 0 root"),
        encoding="utf-8",
    )
    return path


def read(sample):
    """A sample as ``(verb, other form, ground truth words)``, the verb and the words read from the text."""
    assert sample.text[slice(*sample.verb)] == sample.form
    return sample.form, sample.other, [sample.text[slice(*word)] for word in sample.subject]


def test_rows_with_a_parser(tsv, pipeline):
    found = read_agreement(tsv, parser=str(pipeline))
    assert [read(sample) for sample in found.samples[:2]] == [("open", "opens", ["keys"]), ("has", "have", ["list"])]
    assert found.samples[0].id == "rows:1"
    assert found.samples[1] == Sample(
        "rows:3", "the list to the members has", (24, 27), "has", "have", ((4, 8),), attractors=2
    )
    assert found.dropped[0] == Dropped("rows:2", 2, "identical verb forms", "the list to the members lie")
    assert found.source.startswith("rows.tsv, parsed by spaCy 3.")
    assert str(pipeline) in found.source


def test_rows_with_their_parses(tsv, tmp_path):
    parses = tmp_path / "parses.conllu"
    labels = "the _ DT 2 det", "list _ NN 6 nsubj", "to _ IN 5 case", "the _ DT 5 det", "members _ NNS 2 nmod"
    parses.write_text(
        KEYS + conllu(*labels, "has _ VBZ 0 root") + conllu("the _ DT 2 det", "keys _ NNS 0 root"), encoding="utf-8"
    )
    found = read_agreement(tsv, parses=parses)
    assert [read(sample) for sample in found.samples] == [("has", "have", ["list"])]
    assert [(row.line, row.reason) for row in found.dropped] == [
        (1, "no parse of the sentence"),  # the treebank has it with a capital and a full stop
        (2, "identical verb forms"),
        (4, "no parse of the sentence"),
    ]
    assert found.source == "rows.tsv, parsed in parses.conllu"
    assert found.counts() == {
        "read": 4,
        "no parse of the sentence": 2,
        "identical verb forms": 1,
        "kept": 1,
        "kept, plural": 0,
        "kept, singular": 1,
    }


def test_what_the_parses_say_decides_in_the_order_of_the_paper(tsv, tmp_path):
    parses = tmp_path / "parses.conllu"
    start = "the _ DT 2 det", "list _ NN 6 nsubj", "to _ IN 5 case", "the _ DT 5 det"
    for parse, reason in {
        (*start, "members _ NNS 2 nmod", "has _ VB 0 root"): "verb not tagged VBZ or VBP",
        (*start, "members _ NNS 6 nsubj", "has _ VB 0 root"): "several nominal subjects",
        ("the _ DT 2 det", "list _ NN 6 obl", *start[2:], "members _ NNS 2 nmod", "has _ VB 0 root"): (
            "no nominal subject (nsubj)"
        ),
    }.items():
        parses.write_text(conllu(*parse), encoding="utf-8")
        dropped = read_agreement(tsv, parses=parses).dropped
        assert [row.reason for row in dropped if row.line == 3] == [reason]


def test_every_verb_of_a_treebank_is_a_row(treebank):
    found = read_agreement(treebank)
    assert {sample.id: read(sample) for sample in found.samples} == {
        "bank:1.6": ("open", "opens", ["keys"]),
        "bank:3.2": ("think", "thinks", ["I"]),
        "bank:3.4": ("'s", "'re", ["he"]),
        "bank:6.1": ("HAVE", "HAS", ["lists"]),
    }
    assert [sample.attractors for sample in found.samples] == [1, 0, 0, 0]
    assert [sample.line for sample in found.samples] == [1, 3, 3, 6]
    assert [(row.id, row.line, row.reason) for row in found.dropped] == [
        ("bank:4.2", 4, "no nominal subject (nsubj)"),
        ("bank:5.2", 5, "other verb form unknown"),
    ]
    counts = found.counts()
    assert (counts["read"], counts["kept"], counts["kept, plural"], counts["kept, singular"]) == (6, 4, 3, 1)


def test_attractors_are_nouns_of_the_other_number_between_subject_and_verb(tmp_path):
    path = tmp_path / "bank.conllu"
    nouns = "cars car NNS 2 nmod", "Alps Alps NNPS 2 nmod", "Mary Mary NNP 2 nmod", "of of IN 2 case"
    after = "doors door NNS 2 nmod"
    path.write_text(
        conllu("men man NNS 2 nmod", "list list NN 7 nsubj", *nouns, "has have VBZ 0 root", after)
        + conllu("men man NNS 2 nmod", "keys key NNS 7 nsubj", *nouns, "have have VBP 0 root", after)
        + conllu("Have have VBP 0 root", "Mary Mary NNP 3 nmod", "keys key NNS 1 nsubj"),
        encoding="utf-8",
    )
    assert [sample.attractors for sample in read_agreement(path).samples] == [2, 1, 1]


def test_a_fused_verb_is_dropped(tmp_path):
    path = tmp_path / "bank.conllu"
    path.write_text(conllu("1-2 i'z", "I I PRP 2 nsubj", "is be VBZ 0 root"), encoding="utf-8")
    assert [row.reason for row in read_agreement(path).dropped] == ["verb or subject fused with another word"]


def test_only_and_limit(tsv, treebank, pipeline):
    only = read_agreement(tsv, parser=str(pipeline), only={"rows:3", "elsewhere:1"})
    assert [row.id for row in (*only.samples, *only.dropped)] == ["rows:3"]
    assert [sample.id for sample in read_agreement(tsv, parser=str(pipeline), limit=1).samples] == ["rows:1"]
    assert [sample.id for sample in read_agreement(treebank, only=["bank:3.4"]).samples] == ["bank:3.4"]
    two = read_agreement(treebank, limit=2)
    assert (len(two.samples), two.counts()["read"]) == (2, 2)
    for path, parser in ((tsv, str(pipeline)), (treebank, None)):
        with pytest.raises(DataError, match=r"none of the 1 ids asked for is in .*; leave this file out"):
            read_agreement(path, parser=parser, only={"elsewhere:1"})


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("1\tthe keys open\tthe keys ***mask***\topen\n", "4 columns where 5 are due"),
        (ROWS[0].replace("\n", "\tmore\n"), "6 columns where 5 are due"),
        (ROWS[0].replace("***mask***", "mask"), r"0 words are \*\*\*mask\*\*\* where one is due"),
        (ROWS[0].replace("the ***mask***", "***mask*** ***mask***").replace("to the", "to ***mask***"), "words are"),
        (ROWS[0].replace("\topen\t", "\tclose\t"), "with 'close' for .* does not read as the second"),
        (ROWS[0].replace("1\tthe", "one\tthe"), "the attractors are 'one'"),
        (ROWS[0].replace("keys to", "keys  to"), "not single spaces apart"),
        (ROWS[0].replace("\topens\n", "\t\n"), "not single spaces apart"),
        ("n_attr\tsentence\tmasked\tright\twrong\n", "the attractors are 'n_attr'"),
    ],
)
def test_a_broken_row_is_named_by_its_line(tmp_path, pipeline, broken, why):
    path = tmp_path / "broken.tsv"
    path.write_text(f"{ROWS[0]}\n{ROWS[2]}{broken}{ROWS[3]}", encoding="utf-8")
    with pytest.raises(DataError, match=rf"broken\.tsv, line 4: .*{why}.*"):
        read_agreement(path, parser=str(pipeline))


def test_line_ends_of_windows_and_a_byte_order_mark_do_no_harm(tmp_path, tsv, pipeline):
    path = tmp_path / "windows" / "rows.tsv"
    path.parent.mkdir()
    path.write_bytes(b"\xef\xbb\xbf" + tsv.read_bytes().replace(b"\n", b"\r\n"))
    assert read_agreement(path, parser=str(pipeline)).samples == read_agreement(tsv, parser=str(pipeline)).samples


def test_what_cannot_be_read_is_named(tmp_path, tsv, treebank, pipeline):
    with pytest.raises(InputError, match=r"rows\.tsv need one parser: pass a spaCy pipeline such as en_core_web_trf"):
        read_agreement(tsv)
    with pytest.raises(InputError, match="need one parser"):
        read_agreement(tsv, parser=str(pipeline), parses=treebank)
    with pytest.raises(InputError, match=r"bank\.conllu has trees of its own; leave the parser"):
        read_agreement(treebank, parser=str(pipeline))
    with pytest.raises(DataError, match=r"bank\.conllu has none of the sentences"):
        read_agreement(tsv, parses=treebank)
    with pytest.raises(InputError, match="the limit is 0"):
        read_agreement(treebank, limit=0)
    with pytest.raises(DataError, match=r"neither a \.tsv nor a \.conllu"):
        read_agreement(tmp_path / "rows.csv")
    with pytest.raises(DataError, match="No such file"):
        read_agreement(tmp_path / "missing.tsv", parser=str(pipeline))
    (tmp_path / "empty.tsv").write_text("\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"empty\.tsv has no row to read"):
        read_agreement(tmp_path / "empty.tsv", parser=str(pipeline))
    (tmp_path / "latin.tsv").write_bytes(tsv.read_bytes() + "1\tcaf\xe9".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin\.tsv, line 5: not UTF-8"):
        read_agreement(tmp_path / "latin.tsv", parser=str(pipeline))
    for name, text in {"empty.conllu": "", "german.conllu": KEYS.replace("VBP", "VVFIN")}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
        with pytest.raises(DataError, match="no verb tagged VBZ or VBP; pass an English treebank"):
            read_agreement(tmp_path / name)


@pytest.mark.parametrize(
    ("form", "lemma", "tag", "other"),
    [
        ("goes", "go", "VBZ", "go"),
        ("go", "go", "VBP", "goes"),
        ("Is", "be", "VBZ", "Are"),
        ("am", "be", "VBP", "is"),
        ("DO", "do", "VBP", "DOES"),
        ("has", "have", "VBZ", "have"),
        ("tries", "try", "VBZ", "try"),
        ("pass", "pass", "VBP", "passes"),
        ("'m", "be", "VBP", "'s"),
        ("’s", "have", "VBZ", "’ve"),
        ("'s", "do", "VBZ", None),
        ("ai", "be", "VBP", None),
        ("recieves", "receive", "VBZ", None),
        ("iS", "be", "VBZ", None),
    ],
)
def test_the_other_form(form, lemma, tag, other):
    assert other_form(form, lemma, tag) == other


@given(form=st.text(max_size=8), lemma=st.text(max_size=8), tag=st.sampled_from(["VBZ", "VBP"]))
def test_any_form_has_another_or_none(form, lemma, tag):
    assert other_form(form, lemma, tag) != ""


def test_the_other_form_of_the_other_form_is_the_form(shared_data):
    trees = read_trees(shared_data / "agreement" / "en_ewt-ud-dev.conllu")
    verbs = {(word.form, word.lemma, word.tag) for tree in trees for word in tree.words if word.tag in {"VBZ", "VBP"}}
    known = [(verb, other) for verb in verbs if (other := other_form(*verb))]
    assert len(known) > 0.9 * len(verbs)
    for (form, lemma, tag), other in known:
        back = other_form(other, lemma, "VBP" if tag == "VBZ" else "VBZ")
        assert back == form or form.lower() in {"am", "'m", "’m"}


@pytest.mark.parametrize("name", ["en_ewt-ud-dev.conllu", "en_ewt-ud-test.conllu"])
def test_a_real_treebank(shared_data, name):
    path = shared_data / "agreement" / name
    trees = list(read_trees(path))
    found = read_agreement(path)
    verbs = sum(word.tag in {"VBZ", "VBP"} for tree in trees for word in tree.words)
    assert found.counts()["read"] == verbs == len({row.id for row in (*found.samples, *found.dropped)})
    for sample in found.samples:
        form, other, (subject,) = read(sample)
        assert form != other
        number, word = map(int, sample.id.split(":")[1].split("."))
        verb = trees[number - 1].words[word - 1]
        assert (verb.form, verb.span) == (form, sample.verb)
        assert sample.plural == (verb.tag == "VBP")
        assert subject.lower() not in {"there", "is", "are", ",", "."}


def test_every_row_of_the_real_rows_can_be_read(shared_data, tmp_path):
    for name, rows in {"lgd_random10001": 10_001, "lgd_extra": 4_041}.items():
        path = shared_data / "agreement" / f"{name}.tsv"
        lines = path.read_text(encoding="utf-8").split("\n")[:rows]
        words = lines[7].split("\t")[1].split(" ")
        parses = tmp_path / "parses.conllu"
        parses.write_text(conllu(*(f"{word} _ NN 1 dep" for word in words)), encoding="utf-8")
        found = read_agreement(path, parses=parses)
        assert found.counts()["read"] == rows
        assert found.counts()["identical verb forms"] == sum(len(set(line.split("\t")[3:])) == 1 for line in lines)
        assert [row.line for row in found.dropped if row.reason.startswith("no nominal")] == [8]


def test_the_held_out_rows_by_their_ids(shared_data):
    agreement = shared_data / "agreement"
    lines = (agreement / "lgd_random10001.tsv").read_text(encoding="utf-8").split("\n")
    training, held_out = split_rows(agreement)
    ids = held_out_ids(agreement)
    assert [lines[int(name.removeprefix("lgd_random10001:")) - 1].split("\t")[1] for name in ids] == [
        each.sentence for each in held_out
    ]
    assert not {each.sentence for each in training} & {each.sentence for each in held_out}


WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Z", "C"]), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), words=st.lists(WORDS, min_size=2, max_size=8))
def test_any_words_keep_their_places(tmp_path_factory, data, words):
    verb, subject = data.draw(st.permutations(range(len(words))))[:2]
    folder = tmp_path_factory.mktemp("any")
    masked = [*words[:verb], "***mask***", *words[verb + 1 :]]
    columns = ["3", " ".join(words), " ".join(masked), words[verb], f"{words[verb]}s"]
    (folder / "any.tsv").write_text("\t".join(columns), encoding="utf-8")
    lines = [
        f"{n}\t{word}\t_\t_\t{'VBP' if at == verb else 'NN'}\t_\t{0 if at == verb else verb + 1}\t"
        f"{'nsubj' if at == subject else 'dep'}\t_\t_\n"
        for at, (n, word) in enumerate(zip(range(1, 9), words, strict=False))
    ]
    (folder / "any.conllu").write_text("".join(lines), encoding="utf-8")
    (sample,) = read_agreement(folder / "any.tsv", parses=folder / "any.conllu").samples
    assert read(sample) == (words[verb], f"{words[verb]}s", [words[subject]])
    assert sample.text.split(" ") == words
    assert sample.text[: sample.verb[0]].split(" ")[:-1] == words[:verb]
    assert (sample.attractors, sample.id) == (3, "any:1")
