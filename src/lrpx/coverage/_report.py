"""The report of a sweep: counts for each mapping, and every gap by name and reason."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from jinja2 import Environment, StrictUndefined
from rich.console import Group
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from lrpx.coverage._checking import CHECKS, TOLERANCE, Checked
from lrpx.coverage._classes import MAPPINGS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.console import RenderableType

HEADS = ("built", "ran", "identical", "finite", "CP-LRP ledger", "AttnLRP ledger")
"""How :data:`~lrpx.coverage._checking.CHECKS` are called in a table."""

SHORT = ("tried", "built", "ran", "identical", "finite", "CP-LRP", "AttnLRP")
"""The heads of the terminal's table, where a line has 80 columns."""


def counts(checked: Sequence[Checked]) -> dict[str, dict[str, int]]:
    """For each mapping that occurs, and for "all": how many classes there are, and how many passed each check.

    A class of several mappings counts in each, and once in "all".
    """
    groups = {mapping: [one for one in checked if mapping in (one.mapping, *one.others)] for mapping in MAPPINGS}
    return {
        name: {"classes": len(group)} | {check: sum(check in one.passed for one in group) for check in CHECKS}
        for name, group in (groups | {"all": list(checked)}).items()
        if group
    }


def shares(checked: Sequence[Checked]) -> dict[str, float]:
    """Of the classes that can be built, if any, the share that runs as it should, and that closes each ledger."""
    built = [one for one in checked if "built" in one.passed]
    if not built:
        return {}
    wanted = {
        "run, identical and finite": ("ran", "identical", "finite"),
        "CP-LRP ledger": ("lrp ledger",),
        "AttnLRP ledger": ("attnlrp ledger",),
    }
    return {name: sum(set(checks) <= set(one.passed) for one in built) / len(built) for name, checks in wanted.items()}


@dataclass(frozen=True)
class Gap:
    """Classes that did not pass the same checks for the same reason, each named as ``"Class (mapping)"``."""

    checks: tuple[str, ...]
    reason: str
    classes: tuple[str, ...]

    def heads(self) -> list[str]:
        """The checks by the names that tables have for them; none if the class cannot be built."""
        return [] if "built" in self.checks else [HEADS[CHECKS.index(check)] for check in self.checks]

    def names(self) -> str:
        """The classes in one line."""
        return ", ".join(self.classes)

    def __str__(self) -> str:
        return f"{', '.join((self.names(), *self.heads()))}: {self.reason}"


def gaps(checked: Sequence[Checked]) -> list[Gap]:
    """Everything that did not pass, in the order of the mappings."""
    found: dict[tuple[tuple[str, ...], str], list[str]] = {}
    for one in sorted(checked, key=lambda one: (list(MAPPINGS).index(one.mapping), one.name)):
        for reason in dict.fromkeys(one.reasons.values()):
            checks = tuple(check for check in CHECKS if one.reasons.get(check) == reason)
            found.setdefault((checks, reason), []).append(f"{one.name} ({one.mapping})")
    return [Gap(checks, reason, tuple(classes)) for (checks, reason), classes in found.items()]


def summary(checked: Sequence[Checked]) -> RenderableType:
    """Counts and gaps for the terminal, in 80 columns."""
    table = Table(
        Column("mapping", no_wrap=True),
        *(Column(head, justify="right", no_wrap=True) for head in SHORT),
        box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="underline",
    )  # fmt: skip
    for name, count in counts(checked).items():
        table.add_row(name, *map(str, count.values()))
    lines = [f"{share:.1%} of the classes that can be built: {name}" for name, share in shares(checked).items()]
    parts: list[RenderableType] = [table, Text(), *map(Text, lines)]
    for title, found in zip(("Cannot be built here:", "Gaps:"), _gaps(checked), strict=True):
        parts += [Text(f"\n{title}")] if found else []
        for gap in found:
            what = f"{', '.join(gap.heads())}: " if gap.heads() else ""
            parts += [Padding(Text(what + gap.reason), (0, 0, 0, 2)), Padding(Text(gap.names()), (0, 0, 0, 4))]
    return Group(*parts)


def _gaps(checked: Sequence[Checked]) -> tuple[list[Gap], list[Gap]]:
    """Those of classes that cannot be built, and the others."""
    found = gaps(checked)
    return [gap for gap in found if "built" in gap.checks], [gap for gap in found if "built" not in gap.checks]


def _cell(count: Mapping[str, int], check: str) -> str:
    """A count, with its share of the classes (for "built") or of those that can be built."""
    whole = count["classes" if check == "built" else "built"]
    return str(count[check]) if check == "classes" or not whole else f"{count[check]} ({count[check] / whole:.1%})"


def markdown(checked: Sequence[Checked], command: str, versions: Mapping[str, str]) -> str:
    """The report as a page.

    Args:
        checked: what the sweep found of each class.
        command: that made them.
        versions: that they depend on; see :func:`~lrpx.coverage._sweeping.versions`.
    """
    template = resources.files("lrpx.coverage").joinpath("report.md.j2").read_text(encoding="utf-8")
    page = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    table = [
        [name, *(_cell(count, check) for check in ("classes", *CHECKS))] for name, count in counts(checked).items()
    ]
    unbuilt, others = _gaps(checked)
    clean = {
        mapping: sorted({one.model_type for one in checked if one.mapping == mapping and not one.reasons})
        for mapping in MAPPINGS
    }
    closed = [one.missing["lrp"] for one in checked if "lrp ledger" in one.passed]
    return page.from_string(template).render(
        command=command,
        versions=versions,
        heads=("classes", *HEADS),
        table=table,
        shares=shares(checked),
        unbuilt=unbuilt,
        others=others,
        clean={mapping: types for mapping, types in clean.items() if types},
        twofold=sum(one.twofold for one in checked),
        tolerance=TOLERANCE,
        worst=max(closed, default=0.0),
    )
