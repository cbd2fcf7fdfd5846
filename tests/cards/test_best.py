"""The k best, streamed: what a plain sort keeps, whatever the order, the batches and the parts."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lrpx.cards import Kept, from_table, merge, to_table
from lrpx.cards._best import EMPTY, Best, decoded, keys
from lrpx.cards._references import BINS, bins, edges
from lrpx.runs._tables import encoded
from lrpx.units import Place
from tests.reference import references as twin

UNITS = 3
PLACE = Place(4, "layers.4.mlp.down", "input", "neurons", UNITS)
# few different values, so that there are ties; both zeros
VALUES = st.sampled_from([-2.5, -1.0, -0.0, 0.0, 1e-30, 1.0, 1.5, 3e30])
ROWS = st.lists(st.lists(VALUES, min_size=UNITS, max_size=UNITS), min_size=1, max_size=12)


def offered(rows, lines, k, sizes):
    """The best of rows that come in batches of these sizes."""
    best, start = Best.none(UNITS, k, 2), 0
    for size in sizes:
        chosen = lines[start : start + size]
        start += size
        if not chosen:
            break
        values = torch.tensor([rows[line] for line in chosen], dtype=torch.float32)
        numbers = torch.tensor(chosen)

        def facts(at, units, numbers=numbers):
            return torch.stack([numbers[at] + 100, units], 1).int()

        best.offer(keys(values, numbers[:, None]), facts)
    return best


def listed(best):
    there = best.key != EMPTY
    found = []
    for unit in range(UNITS):
        values, lines = decoded(best.key[unit][there[unit]])
        assert best.facts[unit][there[unit]].tolist() == [[line + 100, unit] for line in lines.tolist()]
        found.append([(value, line, 0) for value, line in zip(values.tolist(), lines.tolist(), strict=True)])
    return found


@settings(deadline=None, max_examples=50)
@given(
    ROWS, st.integers(1, 5), st.randoms(use_true_random=False), st.lists(st.integers(1, 4), min_size=12, max_size=12)
)
def test_any_order_in_any_batches_is_a_plain_sort(rows, k, random, sizes):
    lines = list(range(len(rows)))
    wanted = twin.references({line: np.array([rows[line]]) for line in lines}, k)
    random.shuffle(lines)
    assert listed(offered(rows, lines, k, sizes)) == [[(float(v), line, at) for v, line, at in each] for each in wanted]


@settings(deadline=None, max_examples=50)
@given(ROWS, st.integers(1, 4), st.randoms(use_true_random=False), st.integers(1, 5))
def test_parts_merge_in_any_order_and_nesting_to_the_same_bytes(rows, k, random, count):
    def made(lines):
        kept = Kept.none(UNITS, ("activation",), k)
        kept.best["activation"] = offered(rows, lines, k, [2] * 12)
        for line in lines:
            kept.counts[:, int(bins(torch.tensor([rows[line][0]]))[0])] += 1
            kept.peaks[:, line % 3] += 1
        return {PLACE: kept}

    def kept_as_bytes(kept):
        return encoded(to_table(kept, ("activation",)))

    lines = list(range(len(rows)))
    whole = kept_as_bytes(made(lines))
    random.shuffle(lines)
    pieces = [made(lines[i::count]) for i in range(count) if lines[i::count]]
    # through their tables, as parts are read from a folder
    pieces = [from_table(to_table(each, ("activation",)), [PLACE], ("activation",), k) for each in pieces]
    while len(pieces) > 1:
        i = random.randrange(len(pieces) - 1)
        pieces[i : i + 2] = [merge(pieces[i + 1], pieces[i])]
    assert kept_as_bytes(pieces[0]) == whole


def test_mostly_nothing_is_done():
    """What is not better asks for no facts: the threshold comes first."""
    best = Best.none(UNITS, 2, 1)
    best.offer(keys(torch.ones(2, UNITS), torch.tensor([[1], [2]])), lambda at, _: torch.zeros(len(at), 1).int())
    for values, line in ((0.5, 0), (1.0, 3)):
        best.offer(keys(torch.full((1, UNITS), values), torch.tensor([[line]])), lambda *_: 1 / 0)
    taken = []
    best.offer(
        keys(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[0]])),
        lambda at, units: (taken.extend(units.tolist()), torch.zeros(len(at), 1).int())[1],
    )
    assert taken == [1, 2]  # an equal value with a smaller number, and a larger value


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-300, 300, width=32), min_size=1, max_size=30))
def test_a_histogram_counts_by_its_edges(values):
    x = torch.tensor(values, dtype=torch.float32)[:, None]
    wanted = twin.histogram(x.numpy(), edges())
    assert bins(x).flatten().bincount(minlength=BINS).tolist() == wanted[0].tolist()


def test_a_bin_has_the_edge_closer_to_zero():
    assert bins(torch.tensor([-1.0, -0.9999, 1.0, 0.9999])).tolist() == [7, 8, 21, 20]
