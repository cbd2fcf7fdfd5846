"""Why is a unit active? Its activation at a token as the value that is explained (Achtibat et al. 2024, §3.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from lrpx._results import attribution_of
from lrpx.attribution import Explained
from lrpx.errors import InputError
from lrpx.questions import Question, Questions
from lrpx.recipes import ATTNLRP
from lrpx.targets import Logit
from lrpx.units import Place, Reading

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lrpx.attribution import Attribution
    from lrpx.inputs import Row
    from lrpx.model import BoundModel


def explain_units(
    model: BoundModel, rows: Sequence[Row], place: Place, units: Sequence[int], positions: Sequence[int]
) -> list[Attribution]:
    """Which tokens make a unit active, by AttnLRP: one padded batch, one backward pass from inside the model.

    Args:
        model: the model.
        rows: one text each.
        place: where the units are.
        units: one for each row.
        positions: at which token of its row each is explained, from 0.

    Returns:
        For each row the relevance of its tokens for ``a[position, unit]``, which is the explained value.

    Raises:
        InputError: a position that its row does not have.
        NonFiniteError: NaN or infinity in the logits or the relevance.
    """
    for row, position in zip(rows, positions, strict=True):
        if not 0 <= position < row.lengths[0]:
            raise InputError(f"position {position} of a text of {row.lengths[0]} tokens; pass one of them")
    reading = Reading([place])
    last = [row.lengths[0] - 1 if model.task.reads == "position" else None for row in rows]
    questions = Questions(tuple(rows), tuple(Question(i, each, Logit(0)) for i, each in enumerate(last)))
    with model.traced(questions, ATTNLRP, taps=lambda _: [reading]) as ran:
        value = place.of(reading.value(place))
        at = ran.batch.starts[0] + torch.tensor(positions)
        asked = value[torch.arange(len(rows)), at.to(value.device), torch.tensor(units, device=value.device)]
        values = ran.trace.explain(asked).tolist()
        per_source = [
            torch.stack([ran.trace.source_relevance(each).sum(-1) for each in parts]).sum(0) for parts in ran.sources
        ]
        scores = [each.cpu() for each in ran.by_token(per_source)]
        found = [ran.batch.of_row(i, scores).clone() for i in range(len(rows))]
    return [
        attribution_of(
            model,
            row,
            found[i],
            Explained(f"activation of neuron {units[i]} of layer {place.layer}", values[i], positions[i]),
            "attnlrp",
            ATTNLRP.describe(),
        )
        for i, row in enumerate(rows)
    ]
