"""Parts of several axes laid out as grids: what is summed, what is folded, and how the places are called."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from view_samples import attribution

from lrpx._views.grid import LARGEST, grids
from lrpx.parts import Part


def laid_out(part, tokens=("a", " b", "\n"), **options):
    (grid,) = grids(attribution(tokens, [0.0] * len(tokens), parts=(part,)), **options)
    return grid


def test_the_tokens_are_summed_wherever_they_are():
    for axes in (("layer", "head", "token"), ("token", "layer", "head"), ("layer", "token", "head")):
        values = torch.randn([{"layer": 2, "head": 4, "token": 3}[axis] for axis in axes], dtype=torch.float64)
        grid = laid_out(Part("heads", values, axes))
        assert (grid.row_axis, grid.column_axis, grid.note) == ("layer", "head", "summed over token")
        expected = values.movedim([axes.index(axis) for axis in ("layer", "head", "token")], [0, 1, 2]).sum(-1)
        assert [[cell.value for cell in row] for row in grid.rows] == expected.tolist()


def test_of_other_axes_the_last_are_summed():
    values = torch.arange(72, dtype=torch.float64).reshape(2, 3, 4, 3)
    grid = laid_out(Part("edges", values, ("layer", "head", "to", "token")))
    assert grid.note == "summed over token and to"
    assert [[cell.value for cell in row] for row in grid.rows] == values.sum(-1).sum(-1).tolist()
    image = laid_out(Part("pixels", torch.ones(2, 2, 3), ("row", "column", "channel")))
    assert (image.row_axis, image.column_axis, image.note) == ("row", "column", "summed over channel")


def test_places_are_called_by_their_labels_and_tokens():
    grid = laid_out(Part("answers", torch.ones(2, 3), ("answer token", "token"), {"answer token": [" yes", "\x1b[2J"]}))
    assert grid.row_labels == ("yes", "⟨001B⟩[2J")
    assert grid.column_labels == ("a", "b", "⏎")
    assert grid.rows[0][2].place == "answer token yes, token ⏎"
    assert grid.note == ""


def test_a_token_of_blanks_has_a_name():
    grid = laid_out(Part("paths", torch.ones(2, 4), ("unit", "token")), tokens=(" ", "   ", "", "a\nb"))
    assert grid.column_labels == ("␣", "␣␣␣", "∅", "a⏎b")


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 150), st.integers(1, 150), st.integers(1, 70))
def test_a_grid_holds_everything_and_is_never_too_large(rows, columns, largest):
    values = torch.ones(rows, columns, 2, dtype=torch.float64)
    grid = laid_out(Part("pixels", values, ("row", "column", "channel")), largest=largest)
    assert sum(cell.value for cell in grid.cells) == 2 * rows * columns
    assert len(grid.rows) == len(grid.row_labels) <= largest
    assert len(grid.rows[0]) == len(grid.column_labels) <= largest
    assert ("row in blocks" in grid.note) == (rows > largest)
    assert ("column in blocks" in grid.note) == (columns > largest)


def test_blocks_say_their_places():
    grid = laid_out(Part("neurons", torch.arange(130.0).reshape(1, 130), ("layer", "neuron")))
    assert LARGEST < 130
    assert grid.column_labels[:2] == ("0–2", "3–5")
    assert grid.column_labels[-1] == "129"
    assert [cell.value for cell in grid.rows[0][:2]] == [3.0, 12.0]
    assert grid.note == "neuron in blocks of 3"


def test_the_colours_are_scaled_by_all_but_a_sink():
    values = torch.tensor([[100.0, 1.0], [-0.5, 0.0]])
    grid = laid_out(Part("heads", values, ("layer", "head")))
    assert grid.limit == 1.0
    assert [cell.ratio for cell in grid.cells] == [1.0, 1.0, -0.5, 0.0]
    assert [cell.value for cell in grid.strongest(9)] == [100.0, 1.0, -0.5]
    assert grid.note == "layer 0, head 0 alone has +100, beyond the colours"


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_parts_of_one_axis_or_without_numbers_are_not_laid_out(shape):
    a = attribution(
        ["a"], [1.0], parts=(Part("one", torch.ones(2), ("x",)), Part("none", torch.ones(shape), ("x", "y")))
    )
    assert grids(a) == ()
