"""Transformers compiled from programs: patching, scores and circuits find the parts that do the work, and no others."""

from __future__ import annotations

import pytest
import torch

from lrpx import Task, circuits, patching
from lrpx.model import BoundModel
from lrpx.recipes import ATTNLRP, GIM, GRADIENT, LRP, RELP
from tests.reference.compiled import Compiled

EXACT, HALVED = (GRADIENT, RELP, LRP), (ATTNLRP, GIM)


@pytest.fixture(scope="module")
def reverse():
    return Compiled("reverse")


@pytest.fixture(scope="module")
def swapped(reverse):
    """``abbc`` and ``cbbc``; asked at the last letter, which is the first one."""
    model = BoundModel(reverse, task=Task.CAUSAL)
    a, c = (reverse.labels.index(f"out_1:{letter}") for letter in "ac")
    return model, patching.pair_of(model, reverse.ids("abbc"), reverse.ids("cbbc"), a, c, position=4)


def test_the_programs_do_what_they_should(reverse):
    for letters in ("abbc", "cab", "b", "ccca"):
        found = reverse(torch.tensor([reverse.ids(letters)]))[0, 1:].argmax(-1)
        assert "".join(reverse.labels[i][-1] for i in found) == letters[::-1]
    count = Compiled("count")
    for letters in ("abbc", "aaaa", "b"):
        found = count(torch.tensor([count.ids(letters)]))[0, 1:].argmax(-1)
        assert [int(count.labels[i][-1]) for i in found] == [letters.count(each) for each in letters]


def test_one_attention_carries_the_letter(swapped):
    """Three layers count, whatever the letters are; the fourth's attention fetches the letter to the last position."""
    model, pair = swapped
    places = {"attention": [[3, 4]], "heads": [[3, 0]]}
    places["residual"] = [[0, 1], [1, 1], [2, 1], [3, 4]]  # at the letter until it is fetched
    for kind in patching.KINDS:
        truth = patching.exact(model, pair, kind)
        assert truth.nonzero().tolist() == places.get(kind, [])
        for recipe in (*EXACT, *HALVED):
            found = patching.attributed(model, pair, recipe, [kind])[kind]
            halved = torch.ones_like(truth)
            if recipe in HALVED and kind == "residual":
                halved[:3] = 0.5  # the weights of the attention have the other half
            torch.testing.assert_close(found, truth * halved, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("recipe", [*EXACT, *HALVED])
def test_two_edges_are_the_circuit(swapped, recipe):
    model, pair = swapped
    graph = circuits.graph_of(model, pair)
    circuits.check_closes(model, pair, graph)
    found = circuits.scores(model, pair, graph, recipe)
    best = circuits.chosen(graph, found, 2)
    edges = {(graph.readers[reader], graph.writers[writer]) for reader, writer in best.nonzero().tolist()}
    assert edges == {("value 3.0", "embeddings"), ("head", "head 3.0")}
    values = circuits.run(model, pair, graph, torch.stack([best, graph.edges]))
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=1e-9)
    if recipe is EXACT[0]:
        assert graph.count == 3 * (1 + 3 + 5 + 7) + (2 + 4 + 6 + 8) + 9  # of heads, MLPs and the output
        assert torch.equal(circuits.exact_edges(model, pair, graph) != 0, best)


def test_a_saturated_step_hides_what_is_before_it_from_gradients():
    """How often a letter comes is a step function of an attention's output: at the letter, it has no slope."""
    count = Compiled("count")
    model = BoundModel(count, task=Task.CAUSAL)
    two, one = (count.labels.index(f"out_7:{each}") for each in (2, 1))
    pair = patching.pair_of(model, count.ids("abba"), count.ids("abbc"), two, one, position=1)
    truth = {kind: patching.exact(model, pair, kind) for kind in ("attention", "mlp", "neurons")}
    assert truth["attention"].nonzero().tolist() == truth["mlp"].nonzero().tolist() == [[0, 1]]
    for recipe in (*EXACT, *HALVED):
        found = patching.attributed(model, pair, recipe, ["attention", "mlp", "neurons"])
        torch.testing.assert_close(found["mlp"], truth["mlp"], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(found["neurons"], truth["neurons"], rtol=1e-9, atol=1e-6)
        assert found["attention"].abs().max() < 1e-6
