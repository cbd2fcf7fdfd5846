"""What several methods refuse: fields that are none, and models that they cannot serve."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from lrpx.errors import MethodError
from lrpx.tasks import Task

if TYPE_CHECKING:
    from lrpx._images import Patches
    from lrpx._patches import Places
    from lrpx.inputs import Row
    from lrpx.methods._contract import Method
    from lrpx.model import BoundModel

SERVED = frozenset(
    {Task.CAUSAL, Task.MASKED, Task.CLASSIFICATION, Task.TOKEN_CLASSIFICATION, Task.QUESTION_ANSWERING, Task.SEQ2SEQ}
)
"""The tasks of one text, or of an encoder's and a decoder's."""


IMAGES = frozenset({Task.IMAGE_CLASSIFICATION, Task.IMAGE_MAP})
"""The tasks of one image."""


def refuse_no_places(method: Method, model: BoundModel, row: Row) -> tuple[Patches, Places]:
    """The patches of an image, and where they are among the model's tokens.

    Raises:
        MethodError: its attention does not go over all of them.
    """
    patches, places = model.patches(row), model.places(row)
    if patches is None or places is None:
        kind = type(model.module).__name__
        raise MethodError(
            f"{method.name} needs attention over all patches of an image, and {kind} has none, or only within windows; "
            "use attnlrp or lrp"
        )
    return patches, places


def refuse_twice_given(method: Method, model: BoundModel) -> None:
    """Refuse an encoder-decoder that is given one text twice, as its classifiers are.

    Raises:
        MethodError: says so.
    """
    if model.task is not Task.SEQ2SEQ and getattr(model.config, "is_encoder_decoder", False):
        kind = type(model.module).__name__
        raise MethodError(f"{method.name} takes one text, and {kind} gives it to an encoder and to a decoder; use lrp")


def refuse_half_default(method: Method) -> None:
    """Refuse half precision as torch's default dtype, to which Captum rounds its steps, its noise and its weights.

    Raises:
        MethodError: it is.
    """
    dtype = torch.get_default_dtype()
    if dtype.itemsize < torch.float32.itemsize:
        raise MethodError(
            f"{method.name} would be rounded to torch's default dtype, which is {str(dtype).removeprefix('torch.')}; "
            "call torch.set_default_dtype(torch.float32), which leaves the model as it is"
        )


def refuse_ledger(method: Method, ledger: bool) -> None:
    """Refuse to keep a ledger of what need not sum to the value.

    Raises:
        MethodError: one is asked for.
    """
    if ledger:
        raise MethodError(f"{method.name} has no ledger, for its scores need not sum to the value; use attnlrp")


def refuse_seed(name: str, seed: int) -> None:
    """Refuse a seed that is none.

    Raises:
        MethodError: it is no whole number from 0 to 2³² − 1.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise MethodError(f"the seed of {name} is {seed!r}; pass a whole number from 0 to 4294967295")


def refuse_count(name: str, field: str, value: int, least: int = 1) -> None:
    """Refuse a number of steps, samples or rows that is none, or too small.

    Raises:
        MethodError: it is no whole number from ``least``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise MethodError(f"the {field} of {name} is {value!r}; pass a whole number, at least {least}")


def refuse_number(name: str, field: str, value: float, low: float, high: float = math.inf) -> None:
    """Refuse a number outside of a range, both ends of which belong to it, unless the upper is infinity.

    Raises:
        MethodError: it is none.
    """
    right = isinstance(value, int | float) and not isinstance(value, bool)
    if not right or not low <= value <= high or math.isinf(value):
        upto = "" if math.isinf(high) else f" to {high}"
        raise MethodError(f"the {field} of {name} is {value!r}; pass a number from {low}{upto}")


def refuse_other(name: str, field: str, value: str, known: tuple[str, ...]) -> None:
    """Refuse a choice that there is not.

    Raises:
        MethodError: names those that there are.
    """
    if value not in known:
        raise MethodError(f"the {field} of {name} is {value!r}; pass one of {', '.join(map(repr, known))}")
