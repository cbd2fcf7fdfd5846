"""Train the benchmark's dependency parser on UD English EWT, and measure it on the treebank's test part.

The spaCy project's own pipelines are not on the Python package index; this one takes their place where they
cannot be fetched. It is made with `spacy convert` and `spacy train` alone: config.cfg is what

    spacy init config training/parser/config.cfg --lang en --pipeline tagger,parser --optimize efficiency

writes, with gold tokens (gold_preproc), 4,000 steps at most, and an evaluation every 500. Trained on are the
sentences of the whole treebank that are in neither its dev nor its test part, each one twice: as it is, and as the
Goldberg/Linzen sentences are written, in lower case with `` and '' as quotation marks.
"""

from __future__ import annotations

import argparse
import lzma
import subprocess
import sys
import time
from pathlib import Path

from lrpx._data.trees import Parser, nominal_subjects, read_trees, words_apart

HERE = Path(__file__).resolve().parent
TAGS = {"VBZ", "VBP"}


def blocks(path: Path) -> list[str]:
    """The sentences of a CoNLL-U file, as they stand in it."""
    opener = lzma.open if path.suffix == ".xz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        return [block for block in file.read().split("\n\n") if block.strip()]


def sentence_id(block: str) -> str:
    return next(line for line in block.splitlines() if line.startswith("# sent_id"))


def as_goldberg(block: str) -> str:
    """The sentence in lower case, with Penn quotation marks."""
    lines, opened = [], False
    for line in block.splitlines():
        columns = line.split("\t")
        if len(columns) == 10:
            columns[1] = columns[1].lower()
            if columns[1] == '"':
                opened = not opened
                columns[1] = "``" if opened else "''"
        lines.append("\t".join(columns))
    return "\n".join(lines)


def convert(name: str, sentences: list[str], out: Path) -> Path:
    """Write the sentences as a .conllu file, and let `spacy convert` make a .spacy file of it."""
    (out / f"{name}.conllu").write_text("\n\n".join(sentences) + "\n\n", encoding="utf-8")
    run_spacy("convert", out / f"{name}.conllu", out, "--converter", "conllu", "--n-sents", "1")
    return out / f"{name}.spacy"


def run_spacy(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "spacy", *map(str, arguments)], check=True)


def evaluate(pipeline: Path, corpus: Path) -> dict[str, float]:
    """Tag accuracy, UAS, LAS, and nsubj precision, recall and F1, in percent, on gold tokens."""
    import spacy
    from spacy.training import Corpus

    nlp = spacy.load(pipeline)
    scores = nlp.evaluate(list(Corpus(corpus, gold_preproc=True)(nlp)))
    found = scores["dep_las_per_type"]["nsubj"]
    shares = {"tag accuracy": scores["tag_acc"], "UAS": scores["dep_uas"], "LAS": scores["dep_las"]}
    shares |= {"nsubj precision": found["p"], "nsubj recall": found["r"], "nsubj F1": found["f"]}
    return {name: 100 * share for name, share in shares.items()}


def subjects(pipeline: Path, treebank: Path) -> dict[str, float]:
    """Of the treebank's agreement samples, how many the pipeline keeps, and for how many it has the same subject."""
    trees = list(read_trees(treebank))
    parses = Parser(str(pipeline))(words_apart(tree).text for tree in trees)
    kept = right = samples = 0
    for tree, parsed in zip(trees, parses, strict=True):
        for verb, word in enumerate(tree.words):
            gold = nominal_subjects(tree.words, verb)
            if word.tag in TAGS and len(gold) == 1:
                found = nominal_subjects(parsed.words, verb)
                keeps = parsed.words[verb].tag in TAGS and len(found) == 1
                samples, kept, right = samples + 1, kept + keeps, right + (keeps and found == gold)
    return {"agreement samples kept": 100 * kept / samples, "their subjects right": 100 * right / kept}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("out", type=Path, help="where the pipeline goes: OUT/model-best is what to pass as parser")
    options.add_argument("--data", type=Path, default=HERE.parents[2] / "shared" / "data" / "agreement")
    options.add_argument("--only-evaluate", action="store_true", help="measure the pipeline that is in OUT already")
    args = options.parse_args()

    parts = {name: blocks(args.data / f"en_ewt-ud-{name}.conllu") for name in ("dev", "test")}
    barred = {sentence_id(block) for part in parts.values() for block in part}
    train = [block for block in blocks(args.data / "en_ewt-all.conllu.xz") if sentence_id(block) not in barred]
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.only_evaluate:
        print(f"{len(train):,} sentences to train on", flush=True)
        start = time.perf_counter()
        corpora = {
            name: convert(name, [*part, *map(as_goldberg, part)], args.out)
            for name, part in {"train": train, "dev": parts["dev"]}.items()
        }
        overrides = [f"--paths.{name}={path}" for name, path in corpora.items()]
        run_spacy("train", HERE / "config.cfg", "--output", args.out, *overrides)
        print(f"trained in {(time.perf_counter() - start) / 60:.0f} minutes")
    for name, part in {"test": parts["test"], "test in lower case": [*map(as_goldberg, parts["test"])]}.items():
        corpus = convert(name.replace(" ", "_"), part, args.out)
        scores = evaluate(args.out / "model-best", corpus)
        scores |= subjects(args.out / "model-best", corpus.with_suffix(".conllu"))
        print(f"{name}: " + ", ".join(f"{key} {value:.1f}" for key, value in scores.items()))


if __name__ == "__main__":
    main()
