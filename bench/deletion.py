"""Do the neurons that are found matter? They are deleted, and so are as many others.

    python bench/deletion.py --data agreement
    python bench/deletion.py --model path/to/SmolLM2 --data capitals
    python bench/deletion.py --model path/to/SmolLM2 --data ioi

Neurons are ranked by their mean relevance ``a ⊙ ∂`` (summed over positions) for the right answer on one half of the
prompts. On the other half the first ``k`` of all layers are set to 0 at all positions, together, and the probability of
the right answer is read (for agreement that of the right form of the verb against the other, and its logit less the
other's is explained); beside it that without as many random neurons of the same layers (mean of some draws), and that
without the most active ones of the whole model. Printed is the mean fall of the probability, with its bootstrap 95 %
interval over the prompts.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import torch

from lrpx._data.ioi import ioi_pairs
from lrpx._data.minimal_pairs import agreement_pairs
from lrpx.errors import LRPxError
from lrpx.metrics._statistics import interval
from lrpx.model import BoundModel, Spec
from lrpx.patching import Pair, coefficients, parts_of, patched, recorded
from lrpx.questions import Question, Questions
from lrpx.recipes import ATTNLRP, GRADIENT, LRP, RELP
from lrpx.targets import Contrast, Logit, LogProb, Target

if TYPE_CHECKING:
    from torch import Tensor

    from lrpx.units import Place

CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "England": "London", "Japan": "Tokyo", "Russia": "Moscow",
    "Austria": "Vienna", "Ireland": "Dublin", "Greece": "Athens", "Egypt": "Cairo", "Germany": "Berlin",
    "Portugal": "Lisbon", "Poland": "Warsaw", "Cuba": "Havana", "China": "Beijing", "Turkey": "Ankara",
    "Belgium": "Brussels", "Norway": "Oslo", "Sweden": "Stockholm", "Iran": "Tehran",
}  # fmt: skip
COUNTS = (1, 5, 20, 100)
RECIPES = {"attnlrp": ATTNLRP, "relp": RELP, "lrp": LRP, "gradient-x-input": GRADIENT}


def prompts(data: str, count: int) -> list[tuple[str, str, str]]:
    """Texts, what goes on, and what does not."""
    if data == "capitals":
        return [(f"The capital of {country} is", f" {capital}", "") for country, capital in CAPITALS.items()]
    made = ioi_pairs(2 * count) if data == "ioi" else agreement_pairs(2 * count)
    return [(each.clean, each.right, each.wrong) for each in made]


def asked(model: BoundModel, data: str, count: int) -> list[Questions]:
    """Those whose answer is one token that the model predicts, or for agreement prefers to the other form."""
    found: list[Questions] = []
    for text, answer, other in prompts(data, count):
        try:
            row, token = model.reader.row(text), model.index(answer)
        except LRPxError:
            continue
        target = Contrast(token, model.index(other)) if data == "agreement" else Logit(token)
        question = Questions((row,), (Question(0, model.reader.position(row), target),))
        answers = model.ask(question)
        right = float(answers.values[0]) > 0 if data == "agreement" else int(answers.logits[0].argmax()) == token
        if right and len(found) < count:
            found.append(question)
    return found


def probability(_: int, target: Target, logits: Tensor) -> Tensor:
    """Of the right answer; of a contrast, against the other one."""
    return target.value(logits).sigmoid() if isinstance(target, Contrast) else LogProb(target.token).value(logits).exp()


def relevance(model: BoundModel, question: Questions, name: str) -> Tensor:
    """``[L, neurons]``: of each neuron, summed over positions; ``"active"``: how large it is."""
    places = parts_of(model, "neurons")
    row, (one,) = question.rows[0], question.asked
    pair = Pair(row, row, one.position, one.target)
    values = recorded(model, pair, places)
    if name == "active":
        return torch.stack([values[each][0].abs().sum(0) for each in places])
    gradients = coefficients(model, pair, RECIPES[name], places)
    return torch.stack([(values[each][0] * gradients[each]).sum(0) for each in places])


def without(model: BoundModel, neurons: list[tuple[int, int]]) -> dict[Place, dict[int, float]]:
    """What deletes some neurons."""
    places = parts_of(model, "neurons")
    changes: dict[Place, dict[int, float]] = {}
    for layer, neuron in neurons:
        changes.setdefault(places[layer], {})[neuron] = 0.0
    return changes


def first(scores: Tensor, count: int) -> list[tuple[int, int]]:
    """The neurons with the largest scores."""
    width = scores.shape[1]
    return [divmod(int(each), width) for each in scores.flatten().topk(count).indices]


def main() -> None:
    """Rank, delete, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder; the bundled model by default")
    parser.add_argument("--data", choices=["agreement", "capitals", "ioi"], default="agreement")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--draws", type=int, default=5)
    given = parser.parse_args()
    model = Spec(given.model, "float32").build()
    questions = asked(model, given.data, given.prompts)
    ranked, measured = questions[::2], questions[1::2]
    scores = {
        name: torch.stack([relevance(model, each, name) for each in ranked]).mean(0) for name in [*RECIPES, "active"]
    }
    width = next(iter(scores.values())).shape[1]
    leaders = {
        name: ", ".join(f"{layer}.{neuron}" for layer, neuron in first(each, 3)) for name, each in scores.items()
    }
    generator = torch.Generator().manual_seed(0)
    print(f"{model.name}, {given.data}: ranked on {len(ranked)} prompts, measured on {len(measured)}\n")
    print("First neurons, layer.neuron: " + "; ".join(f"{name} {each}" for name, each in leaders.items()) + "\n")
    print("| neurons deleted | " + " | ".join(map(str, COUNTS)) + " |")
    print("|---|" + "---:|" * len(COUNTS))
    lines: dict[str, list[dict[Place, dict[int, float]]]] = {}
    for name, each in scores.items():
        lines[name] = [without(model, first(each, count)) for count in COUNTS]
    for draw in range(given.draws):
        lines[f"random {draw}"] = [
            without(model, [(layer, int(torch.randint(width, (), generator=generator)))
                            for layer, _ in first(scores["attnlrp"], count)])
            for count in COUNTS
        ]  # fmt: skip
    runs = [{}, *(run for line in lines.values() for run in line)]
    falls: dict[str, list[list[float]]] = {name: [] for name in lines}
    before = []
    for question in measured:
        values = patched(model, question, runs, batch_size=16, read=probability)
        before.append(float(values[0]))
        for name, each in zip(lines, values[1:].reshape(len(lines), -1), strict=True):
            falls[name].append((values[0] - each).tolist())
    chance = [falls.pop(f"random {draw}") for draw in range(given.draws)]
    falls["random, same layers"] = torch.tensor(chance).mean(0).tolist()
    for name, table in falls.items():
        cells = []
        for column in zip(*table, strict=True):
            low, high = interval(column)
            cells.append(f"{sum(column) / len(column):.3f} [{low:.3f}, {high:.3f}]")
        print(f"| {name} | " + " | ".join(cells) + " |")
    print(f"\nMean probability of the right answer before: {sum(before) / len(before):.3f}.")


if __name__ == "__main__":
    main()
