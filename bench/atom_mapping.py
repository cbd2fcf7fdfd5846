"""Do the heads with relevance map atoms? An ALBERT whose one layer runs twelve times, each run's heads ranked.

    python bench/atom_mapping.py --model path/to/rxnmapper

rxnmapper (Schwaller et al. 2021) is a masked language model of chemical reactions; head 5 of layer 10 (from 0) attends
from each atom of a product to the atom of a reactant that it was, and the package reads its atom maps there. Here each
atom of the products of sixteen reactions is masked in turn, and the logit of the right token is explained. The
reactions, and which atom becomes which, are written out below, by their mechanisms and not by the package; where two
atoms are alike, either is right.

The heads are ranked in five ways, each a mean over the masked atoms: *attention* of the unmasked reaction, as the
package reads it (how often the right atom of a reactant has the most of all of them); *paths*, how often the right atom
has the largest relevance of them through this head, by AttnLRP; *relevance* of a head at the masked atom, its absolute
mean, under three recipes; and *deleted*, the fall of the logit when the head is set to 0 at all positions. Printed are
the place of head 10.5 among the 96 in each ranking, its first five heads, and Spearman's correlation of each with the
first and the last; in brackets bootstrap 95 % intervals over the reactions, which are few.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor
from transformers import AlbertForMaskedLM

import lrpx
from lrpx.metrics._statistics import RESAMPLES
from lrpx.patching import patched
from lrpx.questions import Question, Questions
from lrpx.targets import Logit
from lrpx.units import places

KNOWN = (10, 5)
REACTIONS = """
CN(C)C=O.F[c:5]1[n:6][cH:7][cH:8][cH:9][c:10]1[F:11].[CH3:1][CH:2]([CH3:1])[SH:4].[K+]>>[CH3:1][CH:2]([CH3:1])[S:4][c:5]1[n:6][cH:7][cH:8][cH:9][c:10]1[F:11]
CC(C)(C)[O:3][C:2](=[O:1])[CH2:4][c:5]1[cH:6][cH:7][cH:8][c:9]([Br:10])[cH:11]1.Cl>>[O:1]=[C:2]([OH:3])[CH2:4][c:5]1[cH:6][cH:7][cH:8][c:9]([Br:10])[cH:11]1
[CH3:1][CH2:2][C:3](=[O:4])O.[OH:5][CH2:6][CH2:7][Cl:8]>>[CH3:1][CH2:2][C:3](=[O:4])[O:5][CH2:6][CH2:7][Cl:8]
[CH3:1][C:2](=[O:3])Cl.[NH2:4][c:5]1[cH:6][cH:7][cH:8][c:9]([Br:10])[cH:11]1>>[CH3:1][C:2](=[O:3])[NH:4][c:5]1[cH:6][cH:7][cH:8][c:9]([Br:10])[cH:11]1
[CH3:1][O:2][c:3]1[cH:4][cH:5][cH:6][c:7](B(O)O)[cH:8]1.Br[c:9]1[cH:10][n:11][cH:12][cH:13][c:14]1[CH3:15].O=C([O-])[O-].[Na+].[Na+]>>[CH3:1][O:2][c:3]1[cH:4][cH:5][cH:6][c:7](-[c:9]2[cH:10][n:11][cH:12][cH:13][c:14]2[CH3:15])[cH:8]1
[CH3:1][S:2](=[O:3])(=[O:3])Cl.[NH2:4][CH2:5][c:6]1[cH:7][cH:8][cH:9][c:10]([F:11])[cH:12]1>>[CH3:1][S:2](=[O:3])(=[O:3])[NH:4][CH2:5][c:6]1[cH:7][cH:8][cH:9][c:10]([F:11])[cH:12]1
Br[CH2:1][C:2]#[N:3].[CH3:4][c:5]1[cH:6][cH:7][cH:8][c:9]([OH:10])[cH:11]1>>[CH3:4][c:5]1[cH:6][cH:7][cH:8][c:9]([O:10][CH2:1][C:2]#[N:3])[cH:11]1
[BH4-].[CH3:1][C:2](=[O:3])[c:4]1[cH:5][cH:6][cH:7][c:8]([Cl:9])[cH:10]1.[Na+]>>[CH3:1][CH:2]([OH:3])[c:4]1[cH:5][cH:6][cH:7][c:8]([Cl:9])[cH:10]1
O=[N+:1]([O-])[c:2]1[cH:3][cH:4][c:5]([F:6])[c:7]([Cl:8])[cH:9]1.[Fe]>>[NH2:1][c:2]1[cH:3][cH:4][c:5]([F:6])[c:7]([Cl:8])[cH:9]1
[CH3:5][C:4]([CH3:5])([CH3:5])[O:3][C:1](=[O:2])O[C:1](=[O:2])[O:3][C:4]([CH3:5])([CH3:5])[CH3:5].[NH2:6][CH2:7][CH2:8][OH:9]>>[CH3:5][C:4]([CH3:5])([CH3:5])[O:3][C:1](=[O:2])[NH:6][CH2:7][CH2:8][OH:9]
O=[CH:1][c:2]1[cH:3][cH:4][cH:5][n:6][cH:7]1.[CH3:8][CH2:9][NH2:10]>>[CH3:8][CH2:9][NH:10][CH2:1][c:2]1[cH:3][cH:4][cH:5][n:6][cH:7]1
Br[c:1]1[cH:2][cH:3][cH:4][c:5]([O:6][CH3:7])[cH:8]1.[CH2:9]1[CH2:10][O:11][CH2:10][CH2:9][NH:12]1>>[CH3:7][O:6][c:5]1[cH:4][cH:3][cH:2][c:1]([N:12]2[CH2:9][CH2:10][O:11][CH2:10][CH2:9]2)[cH:8]1
Br[Mg][CH3:1].[O:2]=[CH:3][c:4]1[cH:5][cH:6][cH:7][c:8]([CH3:9])[cH:10]1>>[CH3:1][CH:3]([OH:2])[c:4]1[cH:5][cH:6][cH:7][c:8]([CH3:9])[cH:10]1
[NH2:11][CH2:12][CH2:13][OH:14].[O:1]=[C:2]=[N:3][c:4]1[cH:5][cH:6][cH:7][c:8]([Cl:9])[cH:10]1>>[O:1]=[C:2]([NH:11][CH2:12][CH2:13][OH:14])[NH:3][c:4]1[cH:5][cH:6][cH:7][c:8]([Cl:9])[cH:10]1
O=[Mn]=O.[OH:1][CH2:2][c:3]1[cH:4][n:5][cH:6][c:7]([Br:8])[cH:9]1>>[O:1]=[CH:2][c:3]1[cH:4][n:5][cH:6][c:7]([Br:8])[cH:9]1
Cl[CH2:1][c:2]1[cH:3][cH:4][n:5][cH:6][cH:7]1.[SH:8][c:9]1[n:10][cH:11][cH:12][s:13]1>>[n:10]1[cH:11][cH:12][s:13][c:9]1[S:8][CH2:1][c:2]1[cH:3][cH:4][n:5][cH:6][cH:7]1
""".split()
TOKENS = re.compile(
    r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])"
)
"""SMILES as tokens (Schwaller et al. 2018)."""
PLAIN = re.compile(r"\[(B|C|N|O|P|S|F|Cl|Br|I|c|n|o|s)(H\d?)?\]")


@dataclass(frozen=True)
class Reaction:
    """A reaction as tokens.

    Args:
        tokens: with ``[CLS]`` and ``[SEP]``.
        was: for each atom of the product that came from a reactant, its place: the places of the atoms that it was.
        reactants: the places of all their atoms.
    """

    tokens: tuple[str, ...]
    was: dict[int, frozenset[int]]
    reactants: tuple[int, ...]


def reaction(text: str) -> Reaction:
    """Read a reaction whose atoms have numbers; those of one number are alike."""
    pieces = ["[CLS]", *TOKENS.findall(text), "[SEP]"]
    numbers = [re.search(r":(\d+)]", piece) for piece in pieces]
    tokens = [re.sub(r":\d+]", "]", piece) for piece in pieces]
    tokens = [PLAIN.sub(r"\1", token) if token != "[nH]" else token for token in tokens]
    arrow = tokens.index(">>")
    found: dict[str, set[int]] = {}
    for at in range(arrow):
        if numbers[at] is not None:
            found.setdefault(numbers[at][1], set()).add(at)
    was = {at: frozenset(found[numbers[at][1]]) for at in range(arrow, len(tokens)) if numbers[at] is not None}
    atoms = tuple(at for at in range(1, arrow) if re.match(r"[A-Za-z\[]", tokens[at]))
    return Reaction(tuple(tokens), was, atoms)


def attention(model: AlbertForMaskedLM, ids: list[int], each: Reaction) -> Tensor:
    """``[12, 8]``: how many of the product's atoms attend most, of all atoms of reactants, to the one they were."""
    with torch.no_grad():
        weights = torch.stack(model(input_ids=torch.tensor([ids]), output_attentions=True).attentions)[:, 0]
    found = torch.zeros(weights.shape[:2])
    for at, right in each.was.items():
        best = weights[:, :, at, list(each.reactants)].argmax(-1)
        found += torch.isin(best, torch.tensor([i for i, there in enumerate(each.reactants) if there in right]))
    return found


def standing(means: Tensor, unit: int) -> int:
    """Which place a head has by its mean, from 1; of equal ones the first."""
    return means.argsort(descending=True, stable=True).tolist().index(unit) + 1


def shown(value: float, drawn: list[float], form: str) -> str:
    """A number and its interval."""
    low, high = np.quantile(drawn, (0.025, 0.975))
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


def main() -> None:
    """Explain, rank, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="rxnmapper's ALBERT, a folder with its vocab.txt")
    parser.add_argument("--reactions", type=int, default=len(REACTIONS))
    given = parser.parse_args()
    model = AlbertForMaskedLM.from_pretrained(given.model).eval()
    attending = AlbertForMaskedLM.from_pretrained(given.model, attn_implementation="eager").eval()
    names = {token: i for i, token in enumerate((given.model / "vocab.txt").read_text().split("\n"))}
    explainer = lrpx.Explainer(model)
    heads = places(model, "heads")
    shape = len(heads), heads[0].width
    methods = ("attnlrp", "lrp", "gradient-x-input")
    every: dict[str, list[Tensor]] = {name: [] for name in ("attention", "paths", *methods, "deleted")}
    counts: list[int] = []
    right = 0
    for text in REACTIONS[: given.reactions]:
        each = reaction(text)
        ids = [names[token] for token in each.tokens]
        sums = {name: torch.zeros(shape) for name in every}
        sums["attention"] += attention(attending, ids, each)
        for at, was in each.was.items():
            masked = [*ids[:at], names["[MASK]"], *ids[at + 1 :]]
            row = explainer.bound.reader.row(masked)
            asked = Questions((row,), (Question(0, at, Logit(ids[at])),))
            runs = [{}, *({place: {head: 0.0}} for place in heads for head in range(place.width))]
            values = patched(explainer.bound, asked, runs)
            sums["deleted"] += (values[0] - values[1:]).reshape(shape)
            right += int(explainer.bound.ask(asked).logits[0].argmax()) == ids[at]
            for name in methods:
                ranked = explainer.neurons(masked, ids[at], position=at, at=at, kind="heads", top=96, method=name)
                for unit in ranked:
                    sums[name][unit.layer, unit.unit] += abs(unit.relevance)
            for place in heads:
                paths = explainer.paths(masked, ids[at], position=at, layer=place.layer, units=range(place.width))
                values = paths.parts["paths"].values[: place.width, list(each.reactants)]
                best = values.argmax(-1).tolist()
                sums["paths"][place.layer] += torch.tensor([float(each.reactants[i] in was) for i in best])
        for name, total in sums.items():
            every[name].append(total.flatten())
        counts.append(len(each.was))
        print(f"{sum(counts)} atoms", file=sys.stderr, flush=True)
    print(f"{sum(counts)} atoms of {min(given.reactions, len(REACTIONS))} reactions, masked; {right} predicted right\n")
    print("| ranked by | place of 10.5 | its value | first heads (layer.head) | ρ with attention | ρ with deleted |")
    print("|---|---:|---:|---|---:|---:|")
    totals = {name: torch.stack(found) for name, found in every.items()}
    atoms = torch.tensor(counts)
    draws = torch.from_numpy(np.random.default_rng(0).integers(len(counts), size=(RESAMPLES, len(counts))))
    known = KNOWN[0] * shape[1] + KNOWN[1]
    for name, total in totals.items():
        mean = total.sum(0) / atoms.sum()
        drawn = [total[draw].sum(0) / atoms[draw].sum() for draw in draws]
        leaders = ", ".join("{}.{}".format(*divmod(i, shape[1])) for i in mean.topk(5).indices.tolist())
        rho = [float(spearmanr(mean, totals[other].sum(0)).statistic) for other in ("attention", "deleted")]
        cells = (
            name,
            shown(standing(mean, known), [standing(each, known) for each in drawn], ".0f"),
            shown(float(mean[known]), [float(each[known]) for each in drawn], ".3f"),
            leaders,
            *(f"{each:.2f}" for each in rho),
        )
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
