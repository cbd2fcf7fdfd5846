"""What a metric is: a function with a caption, a range and a direction, so that tables, captions, rankings and
histograms need to know nothing else about it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lrpx.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

TRUTH = "{truth}"
"""In a caption, what a benchmark calls the tokens that should be found: "the subject"."""
ROUNDING = 1e-9
"""How far beyond its range a value may be, relative to the range's ends."""


def _nothing(*_: Any) -> float:
    raise InputError("this metric was read from a record, which has no function; register the metric to measure")


@dataclass(frozen=True)
class Metric:
    """One number that says how good something is.

    Args:
        name: how tables call it, such as ``"PG2"``.
        caption: what it says, as a sentence that goes on after "PG2: "; ``{truth}`` is what the benchmark looks for.
        low: the least value there is; ``-math.inf`` if there is none.
        high: the largest.
        better: which of two values is the better one.
        measure: the function.

    Raises:
        InputError: a name that can be no column's, an empty range, or no such direction.

    >>> error = Metric("Error", "how far off it is.", 0.0, math.inf, "lower", lambda a, b: abs(a - b))
    >>> error(3.0, 1.0), error.arrow, error.scale, error.beats(1.0, 2.0)
    (2.0, '↓', 'at least 0, lower is better', True)
    """

    name: str
    caption: str
    low: float
    high: float
    better: Literal["higher", "lower"]
    measure: Callable[..., float] = field(default=_nothing, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or not self.name.isprintable():
            raise InputError(f"the metric's name is {self.name!r}; give one that can head a column, without a slash")
        if not self.low < self.high:
            raise InputError(f"the range of {self.name} is {self.low} to {self.high}; give the lower end first")
        if self.better not in ("higher", "lower"):
            raise InputError(f'{self.name} is better {self.better!r}; say "higher" or "lower"')

    def __call__(self, *args: Any) -> float:
        """The function's value, checked.

        Raises:
            InputError: what the function refuses, or a value outside the range.
        """
        found = self.measure(*args)
        try:
            value = float(found)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{self.name} gave {type(found).__name__}, which is no number; mend the function"
            ) from error
        slack = ROUNDING * max(abs(end) for end in (self.low, self.high, 1.0) if math.isfinite(end))
        if not (math.isfinite(value) and self.low - slack <= value <= self.high + slack):
            raise InputError(f"{self.name} gave {value}, which is not {self.within}; mend the function or its range")
        return value

    @property
    def sign(self) -> int:
        """1 where higher is better, −1 where lower is."""
        return 1 if self.better == "higher" else -1

    @property
    def arrow(self) -> str:
        """The direction, for a table's head."""
        return "↑" if self.better == "higher" else "↓"

    def beats(self, a: float, b: float) -> bool:
        """Whether one value is better than another."""
        return self.sign * a > self.sign * b

    @property
    def within(self) -> str:
        """The range in words."""
        if math.isinf(self.high):
            return "any number" if math.isinf(self.low) else f"at least {number(self.low)}"
        return (
            f"at most {number(self.high)}"
            if math.isinf(self.low)
            else f"within [{number(self.low)}, {number(self.high)}]"
        )

    @property
    def scale(self) -> str:
        """Range and direction in words."""
        return f"{self.within}, {self.better} is better"

    def ends(self, values: Iterable[float]) -> tuple[float, float]:
        """Where an axis begins and ends: the range, or the values where it has no end."""
        found = list(values)
        low = min(found, default=0.0) if math.isinf(self.low) else self.low
        high = max(found, default=low) if math.isinf(self.high) else self.high
        return low, high if high > low else low + 1.0

    def describe(self) -> dict[str, Any]:
        """All but the function, as plain JSON values, for :meth:`read`."""
        plain = asdict(self)
        del plain["measure"]
        return {name: None if value in (math.inf, -math.inf) else value for name, value in plain.items()}

    @classmethod
    def read(cls, described: Mapping[str, Any]) -> Metric:
        """The metric of :meth:`describe`; its function is not there.

        Raises:
            InputError: it describes none.
        """
        try:
            low, high = described["low"], described["high"]
            ends = -math.inf if low is None else float(low), math.inf if high is None else float(high)
            return cls(str(described["name"]), str(described["caption"]), *ends, described["better"])
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"this describes no metric ({type(error).__name__}: {error}); run it again") from error


def number(value: float) -> str:
    """A number of a text, with a minus sign.

    >>> number(-1.0), number(0.25)
    ('−1', '0.25')
    """
    return f"{value:g}".replace("-", "−")
