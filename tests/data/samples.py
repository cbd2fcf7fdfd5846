"""Small treebanks and agreement rows that the data tests share."""

from __future__ import annotations


def conllu(*words, text=None):
    """A sentence of CoNLL-U: words ``"form lemma XPOS head relation"``, or a range and its form ``"1-2 don't"``.

    A ``+`` after a form leaves out the space after it.
    """
    lines = [f"# text = {text}"] if text else []
    number = 0
    for word in words:
        columns = word.split(" ")
        number_of, *columns = columns if len(columns) == 2 else [str(number + 1), *columns]
        number += "-" not in number_of
        form, *rest = columns
        lemma, tag, head, relation = rest or ["_"] * 4
        misc = "SpaceAfter=No" if form.endswith("+") else "_"
        lines.append("\t".join([number_of, form.rstrip("+"), lemma, "_", tag, "_", head, relation, "_", misc]))
    return "\n".join(lines) + "\n\n"


KEYS = conllu(
    "The the DT 2 det",
    "keys key NNS 6 nsubj",
    "to to IN 5 case",
    "the the DT 5 det",
    "cabinet cabinet NN 2 nmod",
    "open open VBP 0 root",
    "it+ it PRP 6 obj",
    ". . . 6 punct",
)
"""The keys to the cabinet open it."""


def row(sentence, verb, wrong, attractors=1):
    """A row of the Goldberg/Linzen set; the verb is marked by stars in the sentence."""
    assert f"*{verb}*" in sentence
    plain, masked = sentence.replace(f"*{verb}*", verb), sentence.replace(f"*{verb}*", "***mask***")
    return f"{attractors}\t{plain}\t{masked}\t{verb}\t{wrong}\n"
