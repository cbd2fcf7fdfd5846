"""Where the logits of a task are read: in what a model returns, and which rows its head is given."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lrpx._hooks import hooks
from lrpx.errors import ModelError
from lrpx.tasks._tasks import MASKS, token_table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.nn import Module

    from lrpx._pooling import Pooling
    from lrpx.tasks._tasks import Task

    Read = Callable[[Any], Tensor]

OF_WHOLE = ("pooler_output", "_embeds", "embeddings")
"""How names end of what is an embedding of a whole input."""
OF_QUERIES = ("pred_boxes", "pred_masks", "class_queries_logits")
"""What models return that find objects: of each query, as the classes beside it are, ``[B, Q, C]``."""


@contextmanager
def reading(
    model: Module,
    task: Task,
    inputs: Mapping[str, Any],
    positions: Tensor | None,
    pooling: Pooling,
    alone: bool,
) -> Iterator[Read]:
    """Where the logits of a task are read.

    Args:
        model: the model.
        task: what it predicts.
        inputs: what it is about to be called with.
        positions: ``[B, n]``, for a task that reads at positions.
        pooling: how the embeddings of texts are made, for a task that compares them.
        alone: whether the head may be given the rows at the positions alone (:func:`rows_alone`).

    Yields:
        What reads the logits ``[B, n, V]`` from the model's output.
    """
    mask = inputs.get(MASKS["input_ids"])
    if task.reads == "position":
        assert positions is not None
        wide = _width(inputs.get(task.arguments[-1]))
        with only_rows(model, positions, wide, alone) as read:
            yield lambda output: read(logits_of(output, model, task, positions.shape[0]))
    elif task.reads == "span":
        yield lambda output: _span(output, mask, model, task)
    elif task.reads == "embeddings":
        yield lambda output: _embedded(output, mask, model, task, pooling)
    elif task.reads == "similarity":
        yield lambda output: compared(output, model, task)
    elif task.reads == "map":
        yield lambda output: _map(output, model, task)
    else:
        first = next((value for value in inputs.values() if isinstance(value, Tensor)), None)
        yield lambda output: logits_of(output, model, task, None if first is None else len(first)).unsqueeze(1)


def _width(ids: Any) -> int | None:
    return ids.shape[-1] if isinstance(ids, Tensor) else None


def logits_of(output: Any, model: Module, task: Task, rows: int | None) -> Tensor:
    """``[B, T, V]``, or ``[B, V]`` where they belong to the whole of an input.

    Raises:
        ModelError: the model returned something else.
    """
    _refuse_features(output, model, task)
    found: Any = named(output, "logits")
    shape = ("B", "T", "V") if task.reads == "position" else ("B", "V")
    fits = isinstance(found, Tensor) and found.ndim == len(shape) and found.is_floating_point()
    if fits and rows in (None, found.shape[0]):  # sooner asked than len() under a mode
        logits: Tensor = found
        return logits
    wanted = f"logits [{', '.join(shape)}], a row for each of {rows} inputs"
    raise ModelError(_other_output(found, model, task, wanted))


def _refuse_features(output: Any, model: Module, task: Task) -> None:
    """Refuse what a model without a head returns, which has the shape of logits, or of a map, and stands for no class.

    Raises:
        ModelError: hidden states or embeddings come first, or the logits of an answer's start.
    """
    first = str(next(iter(output), "")) if isinstance(output, Mapping) and "logits" not in output else ""
    if first == "start_logits":
        raise ModelError(
            f"{type(model).__name__} returned {first}, a logit for each place of the text; explain it with "
            "task=Task.QUESTION_ANSWERING"
        )
    is_hidden = first == "last_hidden_state"
    if is_hidden or first.endswith(OF_WHOLE):
        texts = is_hidden and not task.pictures
        mend = "compare texts with task=Task.EMBEDDINGS" if texts else "use lrpx.propagate(model, recipe)"
        raise ModelError(
            f"{type(model).__name__} returned {'hidden states' if is_hidden else first}, whose features are no "
            f"{task.logits}; load the class that has a head on it, or {mend}"
        )
    if task.logits == "tokens" and type(output) in (tuple, list):
        _refuse_hidden_first(output, model)


def _refuse_hidden_first(output: Sequence[Any], model: Module) -> None:
    """Refuse what an own model returns, where something as wide as its vocabulary comes behind something that is not.

    Raises:
        ModelError: it does.
    """
    size = getattr(getattr(token_table(model), "weight", None), "shape", (0,))[0]
    widths = [each.shape[-1] for each in tree_leaves(output) if isinstance(each, Tensor) and each.ndim == 3]
    if size in widths[1:] and size != widths[0]:
        raise ModelError(
            f"{type(model).__name__} returned {widths[0]} numbers for each token first, as hidden states are, and "
            f'{size} behind them, as many as its vocabulary has tokens; return the logits first, or as "logits"'
        )


def named(output: Any, name: str) -> Any:
    """What a model returned by this name, or first."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping) and name in output:
        return output[name]
    if isinstance(getattr(output, name, None), Tensor):
        return getattr(output, name)
    ordered = isinstance(output, (tuple, list)) or hasattr(output, "to_tuple")  # not a dict, whose order says nothing
    return output[0] if ordered and len(output) else output


def _other_output(found: Any, model: Module, task: Task, wanted: str) -> str:
    told = type(found).__name__
    if isinstance(found, Tensor):
        told = f"a tensor {list(found.shape)} of {str(found.dtype).removeprefix('torch.')}"
    elif isinstance(found, Mapping):
        told = f"{told} of {', '.join(map(str, found)) or 'nothing'}"
    return (
        f"{type(model).__name__} returned {told}, and {task.named} returns {wanted}; return these, as a tensor, as "
        'the first of a tuple or as "logits", or say with task= what it predicts'
    )


def _span(output: Any, mask: Tensor | None, model: Module, task: Task) -> Tensor:
    """``[B, 1, 2T]``: the logits of a span's start, then those of its end; none at padding.

    Raises:
        ModelError: the model returned something else.
    """
    named = isinstance(output, Mapping) and {"start_logits", "end_logits"} <= set(output)
    found = [output["start_logits"], output["end_logits"]] if named else []
    if isinstance(output, (tuple, list)):
        found = list(output[:2])
    fits = len(found) == 2 and all(isinstance(each, Tensor) and each.ndim == 2 for each in found)
    if not fits or (mask is not None and any(each.shape != mask.shape for each in found)):
        raise ModelError(_other_output(output, model, task, "start_logits and end_logits [B, T]"))
    if mask is not None:
        found = [each.masked_fill(mask == 0, -torch.inf) for each in found]
    return torch.cat(found, -1).unsqueeze(1)


def _embedded(output: Any, mask: Tensor | None, model: Module, task: Task, pooling: Pooling) -> Tensor:
    """``[B, 1, 2d]``: each text's hidden states as one, of the two texts of a row one after the other.

    Raises:
        ModelError: the model returned something else.
    """
    hidden = named(output, "last_hidden_state")
    fits = isinstance(hidden, Tensor) and hidden.ndim == 3 and len(hidden) % 2 == 0
    if not fits or (mask is not None and hidden.shape[:2] != mask.shape):
        raise ModelError(_other_output(hidden, model, task, "hidden states [B, T, d]"))
    kept = torch.ones(hidden.shape[:2], device=hidden.device) if mask is None else mask
    weights = pooling.weights(kept, hidden.dtype)
    pooled = torch.einsum("bt,btd->bd", weights, hidden)[:, : pooling.dims]
    return pooled.reshape(len(hidden) // 2, 1, -1)


def _map(output: Any, model: Module, task: Task) -> Tensor:
    """``[B, 1, K, R, C]``: the logits of each class at each place; of one class where there is no dimension of them.

    Raises:
        ModelError: the model returned something else.
    """
    queries = next((name for name in OF_QUERIES if isinstance(output, Mapping) and name in output), None)
    if queries is not None:
        raise ModelError(
            f"{type(model).__name__} gives {queries}, a row for each query and none for the places of a map; use "
            "lrpx.propagate(model, recipe), and explain the number of a query"
        )
    _refuse_features(output, model, task)
    found = named(output, "logits")
    if not (isinstance(found, Tensor) and found.ndim in (3, 4) and found.is_floating_point()):
        raise ModelError(_other_output(found, model, task, "a map [B, K, R, C] or [B, R, C]"))
    entries = getattr(getattr(model, "config", None), "vocab_size", None)
    is_masked = isinstance(output, Mapping) and "ids_restore" in output  # of masked autoencoders
    if found.ndim == 3 and (is_masked or found.shape[-1] == entries):
        raise ModelError(
            f"{type(model).__name__} gives {list(found.shape[1:])} numbers, a row for each patch and none for those of "
            "a map; use lrpx.propagate(model, recipe), and explain a number of a patch"
        )
    return found.unsqueeze(1) if found.ndim == 4 else found[:, None, None]


def compared(output: Any, model: Module, task: Task) -> Tensor:
    """``[1, 1, 2d]``: the embedding of an image, then that of a text.

    Raises:
        ModelError: the model returned something else.
    """
    names = ("image_embeds", "text_embeds")
    found = [output[name] if isinstance(output, Mapping) and name in output else None for name in names]
    if not all(isinstance(each, Tensor) and each.ndim == 2 for each in found):
        raise ModelError(_other_output(output, model, task, "image_embeds and text_embeds [B, d]"))
    return torch.cat([each for each in found if each is not None], -1).unsqueeze(1)


@contextmanager
def only_rows(
    model: Module, positions: Tensor, wide: int | None = None, alone: bool = True
) -> Iterator[Callable[[Tensor], Tensor]]:
    """Send only the rows at ``positions`` ``[B, n]`` of each sequence through the language-model head.

    The head's hidden states ``[B, T, d]`` become ``[B, n, d]``.

    Args:
        model: the model.
        positions: ``[B, n]``.
        wide: how many tokens it is given, where that is known.
        alone: False for a head that must see all positions.

    Yields:
        What reads the logits ``[B, n, V]`` at the positions from those that the model gives, whether its head saw all
        positions or only these.
    """
    thread = threading.get_ident()
    places = 0  # those that the head would have seen

    def select(_: Module, args: tuple[Any, ...]) -> Any:
        nonlocal places
        if threading.get_ident() != thread:
            return None
        hidden = args[0]
        if hidden.ndim != 3 or hidden.shape[0] != positions.shape[0] or hidden.shape[1] == 1:
            return None
        places = hidden.shape[1]
        return (at(hidden, positions), *args[1:])

    def read(logits: Tensor) -> Tensor:
        count = places or logits.shape[1]
        if wide is not None and count != wide:
            told = f"{type(model).__name__} returned logits of {count} places for {wide} tokens"
            if count > wide:
                raise ModelError(
                    f"{told}: it puts others among them, as soft prompts do, and which are the text's is not known; "
                    "give it the embeddings of all under lrpx.propagate"
                )
            raise ModelError(f"{told}; return those of every token, or say with task= what it predicts")
        return logits if places or logits.shape[1] == positions.shape[1] == 1 else at(logits, positions)

    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None or not alone:
        yield read
        return
    with hooks() as on:
        on.before(head, select)
        yield read


def at(values: Tensor, positions: Tensor) -> Tensor:
    """``[B, n, …]``: what stands at ``positions`` ``[B, n]`` of ``[B, T, …]``."""
    positions = positions.to(values.device)
    if positions.shape[0] == 1:
        return values.index_select(1, positions[0])
    return values[torch.arange(len(positions), device=values.device)[:, None], positions]
