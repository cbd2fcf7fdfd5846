"""Several methods on one batch, those that share a recipe in one pass."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from lrpx.methods import METHODS
from lrpx.methods.backward import Options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.nn import Module

    from lrpx.methods.backward import Batch, Found
    from lrpx.targets import Target
    from lrpx.tasks import Task


def attribute_all(
    methods: Sequence[str],
    model: Module,
    task: Task,
    batch: Batch,
    targets: Callable[[Tensor], Sequence[Target]],
) -> dict[str, Found]:
    """What each of some methods finds for a batch, by its name.

    Args:
        methods: names from :data:`lrpx.methods.METHODS`.
        model, task, batch, targets: as :meth:`lrpx.methods.backward.Backward.attribute` takes them.

    Raises:
        MethodError, NonFiniteError, ModelError: as the methods themselves do.
    """
    chosen = sorted((METHODS[name] for name in methods), key=lambda method: method.recipe.name)
    found: dict[str, Found] = {}
    for _, group in groupby(chosen, key=lambda method: method.recipe):
        same: list[Any] = list(group)
        scores = same[0].together(same, model, task, batch, targets, Options())
        found |= {method.name: each for method, each in zip(same, scores, strict=True)}
    return {name: found[name] for name in methods}
