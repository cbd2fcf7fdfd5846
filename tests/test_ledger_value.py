"""The ledger as a value: sums, kinds and whether it closes."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lrpx.ledger import KINDS, Entry, Ledger

NUMBERS = st.floats(-1e6, 1e6)
ENTRIES = st.lists(st.builds(Entry, st.sampled_from(KINDS), st.text(max_size=3), NUMBERS), max_size=12)


@given(ENTRIES, NUMBERS)
def test_the_kinds_sum_to_the_total_in_their_order(entries, explained):
    ledger = Ledger(tuple(entries), explained)
    sums = ledger.by_kind()
    assert sum(sums.values()) == pytest.approx(ledger.total, rel=1e-9, abs=1e-6)
    assert list(sums) == [kind for kind in KINDS if kind in {entry.kind for entry in entries}]
    assert ledger.total + ledger.difference == pytest.approx(explained, rel=1e-9, abs=1e-6)


@given(ENTRIES)
def test_a_ledger_of_its_own_total_closes(entries):
    total = sum(entry.value for entry in entries)
    assert Ledger(tuple(entries), total).closes(0.0)


def test_whether_it_closes_is_relative_to_the_largest_number_in_it():
    entries = (Entry("tokens", "wte", 1000.0), Entry("biases", "b", -999.0))
    assert Ledger(entries, 1.0005).closes(1e-6)
    assert not Ledger(entries, 1.0005).closes(1e-7)
    assert not Ledger(entries, 1.5).closes()
    assert not Ledger((), 1.0).closes()
    assert Ledger((), 0.0).closes()


def test_a_number_that_is_none_never_closes():
    assert not Ledger((Entry("tokens", "wte", math.nan),), 1.0).closes()
    assert not Ledger((Entry("tokens", "wte", 1.0),), math.nan).closes()


def test_it_is_frozen_and_compares_by_value():
    ledger = Ledger((Entry("tokens", "wte", 1.0),), 1.0)
    assert ledger == Ledger((Entry("tokens", "wte", 1.0),), 1.0) != Ledger((), 1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        ledger.explained = 2.0
