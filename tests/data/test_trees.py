"""Trees from CoNLL-U files and from spaCy, and the subject of a verb."""

from __future__ import annotations

import lzma

import pytest
import spacy

from lrpx._data.trees import Parser, nominal_subjects, read_lines, read_trees, words_apart
from lrpx.errors import DataError, ModelError
from tests.data.samples import KEYS, conllu


@pytest.fixture
def tree(tmp_path):
    """Writes a sentence and reads it back."""

    def read(*words):
        path = tmp_path / "one.conllu"
        path.write_text(conllu(*words), encoding="utf-8")
        (only,) = read_trees(path)
        return only

    return read


def subjects(tree, verb):
    """The nominal subjects of the only word of this form, as words."""
    (at,) = [at for at, word in enumerate(tree.words) if word.form == verb]
    return [tree.words[each].form for each in nominal_subjects(tree.words, at)]


def test_the_subject_is_the_head_word(tmp_path):
    path = tmp_path / "keys.conllu"
    path.write_text(KEYS, encoding="utf-8")
    (keys,) = read_trees(path)
    assert keys.text == "The keys to the cabinet open it."
    assert [keys.text[slice(*word.span)] for word in keys.words] == "The keys to the cabinet open it .".split()
    assert subjects(keys, "open") == ["keys"]


def test_an_auxiliary_has_the_subject_of_its_verb(tree):
    labels = "They they PRP 4 nsubj", "have have VBP 4 aux", "been be VBN 4 aux", "going go VBG 0 root"
    assert subjects(tree(*labels), "have") == ["They"]


def test_a_copula_has_the_subject_of_its_predicate(tree):
    labels = "Keys key NNS 4 nsubj", "are be VBP 4 cop", "a a DT 4 det", "nuisance nuisance NN 0 root"
    assert subjects(tree(*labels), "are") == ["Keys"]


def test_of_a_predicate_that_is_a_clause_the_copula_has_the_outer_subject(tree):
    labels = (
        "Problems problem NNS 5 nsubj:outer",
        "are be VBP 5 cop",
        "he he PRP 5 nsubj",
        "has have VBZ 5 aux",
        "left leave VBN 0 root",
    )
    assert subjects(tree(*labels), "are") == ["Problems"]
    assert subjects(tree(*labels), "has") == ["he"]


def test_a_relative_pronoun_is_the_subject_of_its_clause(tree):
    labels = "keys key NNS 0 root", "that that WDT 3 nsubj", "open open VBP 1 acl:relcl", "it it PRP 3 obj"
    assert subjects(tree(*labels), "open") == ["that"]


def test_of_coordinated_subjects_it_is_the_first(tree):
    labels = "Cats cat NNS 4 nsubj", "and and CC 3 cc", "dogs dog NNS 1 conj", "sleep sleep VBP 0 root"
    assert subjects(tree(*labels), "sleep") == ["Cats"]


@pytest.mark.parametrize("passive", ["nsubj:pass aux:pass", "nsubjpass auxpass"])
def test_the_passive_has_no_nominal_subject(tree, passive):
    subject, auxiliary = passive.split()
    labels = f"Keys key NNS 3 {subject}", f"are be VBP 3 {auxiliary}", "lost lose VBN 0 root"
    assert subjects(tree(*labels), "are") == []


def test_neither_have_expletives_clauses_and_what_follows_there(tree):
    it = "It it PRP 3 expl", "is be VBZ 3 cop", "clear clear JJ 0 root", "who who WP 5 nsubj", "left leave VBD 3 csubj"
    assert subjects(tree(*it), "is") == []
    there = "There there EX 2 expl", "are be VBP 0 root", "keys key NNS 2 nsubj"
    assert subjects(tree(*there), "are") == []


def test_contractions_share_their_characters(tree):
    read = tree(
        "I I PRP 4 nsubj",
        "2-3 don't",
        "do do VBP 4 aux",
        "n't not RB 4 advmod",
        "know+ know VB 0 root",
        ". . . 4 punct",
    )
    assert read.text == "I don't know."
    assert [read.text[slice(*word.span)] for word in read.words] == ["I", "do", "n't", "know", "."]
    assert words_apart(read).text == "I do n't know ."
    fused = tree("1-2 zum+", "zu zu APPR 3 case", "dem der ART 3 det", "Haus Haus NN 0 root")
    assert fused.text == "zumHaus"
    assert [word.span for word in fused.words] == [None, None, (3, 7)]


def test_empty_nodes_and_comments_are_passed_over(tmp_path):
    path = tmp_path / "nodes.conllu"
    lines = KEYS.splitlines()
    lines.insert(3, "3.1\tempty\tempty\t_\t_\t_\t_\t_\t6:nsubj\t_")
    path.write_text("\n\n# newdoc\n# a remark\n" + "\n".join(lines), encoding="utf-8")
    (only,) = read_trees(path)
    assert only.text == "The keys to the cabinet open it."


@pytest.mark.parametrize("name", ["en_ewt-ud-dev.conllu", "en_ewt-ud-test.conllu"])
def test_a_real_treebank_reads_as_its_own_text(shared_data, name):
    path = shared_data / "agreement" / name
    texts = [line.removeprefix("# text = ") for _, line in read_lines(path) if line.startswith("# text = ")]
    trees = list(read_trees(path))
    assert [tree.text for tree in trees] == [text.replace("\xa0", " ") for text in texts]
    for tree in trees:
        assert all(tree.text[slice(*word.span)] == word.form for word in tree.words if word.span)
        assert [word.form for word in tree.words] == [word.form for word in words_apart(tree).words]


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        ("1\tkeys\tkey\n", "no column"),
        ("1 keys key\n", "tabs"),
        (KEYS.replace("\t2\tdet", "\t9\tdet"), "word 1 has the head 9"),
        (KEYS.replace("\t2\tdet", "\t_\tdet"), "head None"),
        (KEYS.replace("\t2\tdet", "\ttwo\tdet"), "two"),
        (KEYS.replace("3\tto", "4\tto"), "word 3 is due"),
        (KEYS.replace("3\tto", "x\tto"), "id"),
        (KEYS.replace("3\tto", "_\tto"), "a word without its number"),
        (KEYS.replace("\n3\tto", "\n3-2" + "\t_" * 9 + "\n3\tto"), "3-2"),
        (KEYS.replace("\n3\tto", "\n3-9" + "\t_" * 9 + "\n3\tto"), "the contraction 3-9"),
    ],
)
def test_a_broken_sentence_is_named_by_its_line(tmp_path, broken, why):
    path = tmp_path / "broken.conllu"
    path.write_text(f"# first\n{KEYS}\n\n# second\n{broken}\n{KEYS}", encoding="utf-8")
    with pytest.raises(DataError, match=rf"broken\.conllu, sentence at line 13: not CoNLL-U .*{why}.*; mend"):
        list(read_trees(path))


def test_files_that_cannot_be_read_are_named(tmp_path):
    packed = lzma.compress(KEYS.encode() * 100)
    (tmp_path / "no.conllu.xz").write_bytes(b"not packed at all")
    (tmp_path / "cut.conllu.xz").write_bytes(packed[: len(packed) // 2])
    (tmp_path / "latin.conllu").write_bytes(b"# one\n# caf\xe9\n")
    for name, why in {
        "no.conllu.xz": "no whole .xz file",
        "cut.conllu.xz": "no whole .xz file",
        "latin.conllu": "line 2: not UTF-8",
        "missing.conllu": "No such file",
        "": "Is a directory",
    }.items():
        with pytest.raises(DataError, match=why):
            list(read_trees(tmp_path / name))
    (tmp_path / "whole.conllu.xz").write_bytes(packed)
    assert len(list(read_trees(tmp_path / "whole.conllu.xz"))) == 100


def test_a_parser_that_is_missing_or_no_parser_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"no pipeline 'en_core_web_trf'.*python -m spacy download en_core_web_trf"):
        Parser("en_core_web_trf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="cannot load the pipeline"):
        Parser(str(tmp_path / "empty"))
    spacy.blank("en").to_disk(tmp_path / "blank")
    with pytest.raises(ModelError, match="no parser and no tagger"):
        Parser(str(tmp_path / "blank"))
