"""What a report needs of a benchmark with a ground truth: its own words, and how it reads a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pyarrow as pa

RANDOM: Final = "random"
"""The random baseline's name where a method's would stand."""


@dataclass(frozen=True)
class Group:
    """A column of whole numbers that the means are also shown by.

    Args:
        column: such as ``"attractors"``.
        title: such as ``"attractors"``: "By number of attractors".
        note: what is counted.
    """

    column: str
    title: str
    note: str


@dataclass(frozen=True)
class Words:
    """What a report says in the benchmark's own words.

    Args:
        title: its headline: "Which method points at the subject?"
        about: what was measured: "Subject-verb agreement".
        truth: what should be found: "the subject".
        right: what a model does whose prediction is right: "prefers the right form of the verb".
        value: the column of the explained value, and its name in words.
        toward: what red speaks for: "the preferred form".
        paper: what it is taken from, if it is.
    """

    title: str
    about: str
    truth: str
    right: str
    value: tuple[str, str]
    toward: str
    paper: str = ""


class Reported(Protocol):
    """What a report needs; a :class:`~lrpx.benchmarks._ground_truth.GroundTruth` has it."""

    @property
    def words(self) -> Words:
        """Its own words."""

    @property
    def group(self) -> Group | None:
        """The numbers that the means are also shown by."""

    @property
    def facts(self) -> pa.Schema:
        """The columns that say what a sample is."""

    @property
    def prediction(self) -> Mapping[str, pa.DataType]:
        """The columns of the prediction, beside ``correct``."""

    def told(self, row: Mapping[str, Any]) -> str:
        """What was explained in a row."""

    def value_of(self, row: Mapping[str, Any]) -> float:
        """Its value."""
