"""What short runs of a model tell that its class does not: whether rows meet, what a mask hides, what padding changes.

They are made where nothing else tells, and again where something else of the user's is in the model
(:func:`~lrpx.tasks.changes`).
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from lrpx._hooks import hooks
from lrpx._intervening import without_interventions
from lrpx._kept import as_it_was
from lrpx.errors import InputError
from lrpx.tasks._changes import WRAPPERS, around_head, home_of, is_believed, is_theirs
from lrpx.tasks._logits import at, compared, logits_of, named, only_rows
from lrpx.tasks._tasks import (
    MASKS,
    Task,
    accepts,
    end_read,
    first_weight,
    input_device,
    pad_id,
    position_ids,
    told_position,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.nn import Module

WIDE = 16
"""As wide a short text is padded to find out whether that changes what a model says: no pooling divides it."""


@contextmanager
def _trying(model: Module) -> Iterator[None]:
    """In the block a model runs as it does without interventions; behind it, all that it keeps is as it was."""
    with torch.no_grad(), as_it_was(model), without_interventions():
        yield


def _is_changed_by_few(model: Module) -> bool:
    """Whether a short input changes the model for good: BigBird takes another attention then."""
    return any(getattr(each, "attention_type", None) == "block_sparse" for each in model.modules())


def rows_meet(model: Module, task: Task) -> bool:
    """Whether what a model says of a text or an image hangs on what else is in the batch. No short input tells of
    experts that take a number of all tokens there are (NLLB-MoE, a Switch layer of one's own), which is known by the
    name of that number, and of batch norms that keep no statistics; of a module of one's own that takes texts, and of a
    model that its user has put something into, three short runs tell the rest (experts that choose their tokens)."""
    return seem_to_meet(model, task) or any(
        any("capacity" in name and isinstance(value, (int, float)) for name, value in vars(each).items())
        or (isinstance(each, _BatchNorm) and each.running_mean is None)
        for each in model.modules()
    )


def seem_to_meet(model: Module, task: Task, count: int = 4, wide: int = 6) -> bool:
    """Whether a text of so many tokens is another beside others of its length, ``count`` of them in all, before them or
    behind them: experts that take a number of all tokens, first come, first served, turn away those of the last rows. A
    token of the last is hidden."""
    if not task.segments or task.together == "choices" or is_believed(model):
        return False
    weight = first_weight(model)
    steps = (2 * torch.arange(count) + 1)[:, None]
    ids = (torch.arange(wide) * steps + steps).to(input_device(model)) % weight.shape[0]
    given = _whole(model, task, ids)
    for name in MASKS.values():
        if name in given:
            given[name][-1, wide // 3] = 0  # as leave-one-out has it: a model may read the first row's mask for all
    found = []
    try:
        with _trying(model):
            for rows in (slice(1), slice(-1, None), slice(None)):
                some = {name: value[rows] for name, value in given.items()}
                found.append(_first_of(model(**some | _needed(model, ids[rows]))))
    except Exception:  # of the model's own: it takes something else, or fewer tokens, and nothing is known
        return not is_theirs(model)
    first, last, beside = found
    if beside.shape != (len(ids), *first.shape[1:]) or len(first) != 1 or last.shape != first.shape:
        return False
    return not (_is_close(first, beside[:1], weight.dtype) and _is_close(last, beside[-1:], weight.dtype))


def signals_meet(model: Module, given: Mapping[str, Any]) -> bool:
    """Whether an image or a sound, given as a batch of one, is another beside itself turned round, in a module of one's
    own, and in a model that its user has put something into: it may take the mean of a batch."""
    if is_believed(model):
        return False
    weight = first_weight(model)
    signals = {name: each for name, each in given.items() if isinstance(each, Tensor)}
    turned = {name: each.flip(-1) if each.is_floating_point() else each for name, each in signals.items()}
    beside = {name: torch.cat([each, turned[name]]) for name, each in signals.items()}
    try:
        with _trying(model):
            one, other, both = (_first_of(model(**{**given, **each})) for each in (signals, turned, beside))
    except Exception:  # of the model's own: it takes one alone, say
        return True
    return not (both.shape[0] == 2 and _is_close(torch.cat([one, other]), both, weight.dtype))


def looks_back(model: Module) -> bool:
    """Whether the logits of a token are the same whatever stands behind it and beside it, as far as short inputs tell:
    what takes no attention mask would read padding there, and of a module of one's own nothing else is known. One input
    does not tell: who chooses among all tokens (mixture of depths, experts' own choice) may choose the same again."""
    if _is_changed_by_few(model):
        return False
    weight = first_weight(model)
    steps = torch.tensor([1, 3, 5, 7, 11, 13])[:, None]  # six texts of other tokens, in other orders
    ids = (torch.arange(8) * steps + torch.arange(len(steps))[:, None]).to(input_device(model)) % weight.shape[0]

    def masked(ids: Tensor) -> dict[str, Tensor]:
        return {"attention_mask": torch.ones_like(ids)} if accepts(model, MASKS["input_ids"]) else {}

    try:
        with _trying(model):
            followed, *alone = (
                _first_of(model(input_ids=each, **masked(each) | _needed(model, each)))
                for each in (ids, *(each[None, :4] for each in ids))
            )
    except Exception:  # its own, or eight tokens are too many, or it takes something else
        return False
    if followed.shape[:2] != ids.shape:
        return False
    return all(
        one.shape[1] == 4 and _is_close(one, row[None, :4], weight.dtype)
        for one, row in zip(alone, followed, strict=True)
    )


def _whole(model: Module, task: Task, ids: Tensor) -> dict[str, Tensor]:
    """The same ids for all that a model reads, none of them hidden."""
    given = dict.fromkeys(task.arguments, ids)
    return given | {MASKS[name]: torch.ones_like(ids) for name in given if accepts(model, MASKS[name])}


def _needed(model: Module, ids: Tensor) -> dict[str, Tensor]:
    """What a module of one's own cannot run without, beside ids and their mask: what tokenizers tell of each token."""
    kinds = inspect.signature(model.forward).parameters.get("token_type_ids")
    return {} if kinds is None or kinds.default is not kinds.empty else {"token_type_ids": torch.zeros_like(ids)}


def _first_of(output: Any) -> Tensor:
    """What a model says in a short run: its logits, those of a span's start, or its hidden states.

    Raises:
        ValueError: none of these.
    """
    for name in ("logits", "start_logits", "last_hidden_state"):
        found = named(output, name)
        if isinstance(found, Tensor) and found.ndim > 1:
            return found
    raise ValueError("no logits and no hidden states")


def _is_close(alone: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Whether outputs are the same, but for rounding beside the largest finite number of them: that of weights of this
    dtype, or of float32, in which many a norm and a softmax of float64 are computed."""
    largest = alone.nan_to_num(0, 0, 0).abs().max().item()
    lost = max(torch.finfo(each).eps for each in (dtype, torch.float32)) ** 0.5
    return torch.allclose(alone, other, rtol=0, atol=lost * largest, equal_nan=True)


def hides_ones(model: Module, task: Task, pad_id: int) -> bool:
    """Whether a module of one's own hides the tokens at which its attention mask is 1, as torch's ``key_padding_mask``
    does, as far as a short input tells: a mask of ones changes what it says without one; or, where it cannot do without
    a mask, the one token at which that is 0 makes a difference, and another makes none. transformers' are believed."""
    if is_theirs(model) or not accepts(model, MASKS["input_ids"]):
        return False
    weight = first_weight(model)
    plain = [i for i in range(2, weight.shape[0]) if i not in (pad_id, end_read(model, task))][:6]  # most pad with 0
    if len(plain) < 3:
        return False
    ids = torch.tensor([plain], device=input_device(model))
    given = _whole(model, task, ids) | _needed(model, ids)
    unmasked = {name: each for name, each in given.items() if name not in MASKS.values()}

    def said(given: Mapping[str, Tensor]) -> Tensor | None:
        try:
            return _first_of(model(**given))[..., -1, :]  # of the last token, or of the whole text
        except Exception:  # of the model's own: it takes something else, and a run will say so
            return None

    def differ(one: Tensor | None, other: Tensor | None) -> bool:
        if one is None or other is None or one.shape != other.shape:
            return False
        return not _is_close(one, other, weight.dtype)

    with _trying(model):
        without = said(unmasked)
        if without is not None:  # and says the same again, as what keeps an average does not
            return differ(without, said(given)) and not differ(without, said(unmasked))
        masks = {name: (ids != plain[0]).to(torch.int64) for name in given if name in MASKS.values()}
        whole, first, second = (
            said(given | masks | dict.fromkeys(task.arguments, torch.where(ids == token, plain[-1], ids)))
            for token in (plain[-1], plain[0], plain[1])
        )
        return differ(whole, first) and second is not None and not differ(whole, second)


def first_position(model: Module, task: Task) -> int | None:
    """The position of a text's first token: what modules' names tell (:func:`~lrpx.tasks._tasks.told_position`), if the
    model says the same of a short text with positions counted from there as without any, or one of a few others with
    which it does, for a module of one's own may count from 1, or from behind its padding's; None if it never does."""
    told = told_position(model)
    if _is_changed_by_few(model):
        return told
    weight = first_weight(model)
    plain = [i for i in range(2, weight.shape[0]) if i not in (pad_id(model), end_read(model, task))][:6]
    ids = torch.tensor([plain], device=input_device(model))
    given: dict[str, Any] = _whole(model, task, ids) | _needed(model, ids)
    if accepts(model, "use_cache"):
        given["use_cache"] = False
    paddings = (getattr(each, "padding_idx", None) for each in model.modules())
    after = sorted({each + 1 for each in paddings if isinstance(each, int)})

    def said(**places: Tensor) -> Tensor | None:
        try:
            return _first_of(model(**given, **places))
        except Exception:  # of the model's own: it takes something else, and a run will say so
            return None

    def same(one: Tensor, other: Tensor | None) -> bool:
        lost = 64 * torch.finfo(weight.dtype).eps * one.nan_to_num(0, 0, 0).abs().max().item()
        return other is not None and torch.allclose(one, other, rtol=0, atol=lost, equal_nan=True)

    with _trying(model):
        without, runs = said(), False
        if without is None:
            return told
        for first in dict.fromkeys((told, 0, 1, 2, *after)):
            found = said(position_ids=torch.arange(first, first + len(plain), device=ids.device)[None])
            if same(without, found):
                return first
            runs = runs or found is not None
        return None if runs and same(without, said()) else told  # what draws at random never says the same


def hides(model: Module, task: Task) -> bool:
    """Whether a token that the attention mask hides makes any difference, as far as a short input tells: RWKV takes a
    mask and does not look at it."""
    if _is_changed_by_few(model):
        return True
    weight = first_weight(model)
    ids = torch.arange(6, device=input_device(model))[None] % weight.shape[0]
    found = []
    try:
        with _trying(model):
            for hidden in (torch.zeros_like(ids), ids == 1):
                given = {"input_ids": ids, "attention_mask": (~hidden.bool()).to(torch.int64)}
                if "decoder_input_ids" in task.arguments:
                    given["decoder_input_ids"] = ids[:, :3]
                found.append(named(model(**given | _needed(model, ids)), "logits"))
        return not torch.equal(*found)
    except Exception:  # of the model's own: it takes something else
        return True


def heeds_mask(model: Module, task: Task, pad_id: int, side: str, wide: int = WIDE) -> bool:
    """Whether the model says the same of a text with padding, up to so many tokens, that its mask hides, if it takes
    one, as far as a short input tells: a convolution over tokens, as ConvBERT's, reads what is there, and so do
    MobileBERT's embeddings. With padding on the right, a model of transformers that gives one token after another is
    believed (:func:`is_believed`), if it has none, and torch's own attention can take the place of its; padding on the
    left moves the patches that BLT makes of bytes. A classifier that reads one token may not look at the last, beside
    the padding, in a short input: so what transformers' models hand their heads is compared token by token, too. What
    draws at random, as Reformer's hashes are, says the same by chance alone. A decoder whose attention was told to look
    ahead does so only where no mask is needed. Behind an encoder's text the decoder's is padded, too, always on the
    right: ProphetNet's says something else then."""
    convolves = any(isinstance(each, _ConvNd) and max(each.kernel_size) > 1 for each in model.modules())
    is_plain = getattr(model, "_supports_sdpa", False) and is_believed(model)
    is_told = task is Task.CAUSAL and any(getattr(each, "is_causal", None) is False for each in model.modules())
    if side == "right" and is_plain and not (convolves or is_told) and task in (Task.CAUSAL, Task.SEQ2SEQ):
        return True
    if _is_changed_by_few(model):  # and its random blocks hang on how wide a batch is
        return False
    weight, count = first_weight(model), 7  # which no pooling divides, and no padding of theirs
    end = end_read(model, task)
    plain = [i for i in range(weight.shape[0]) if i not in (pad_id, end)][:count]
    text = torch.tensor([plain if end is None else [*plain[:-1], end]], device=input_device(model))
    space = (wide - text.shape[1], 0) if side == "left" else (0, wide - text.shape[1])
    writes = "decoder_input_ids" in task.arguments
    found, states = [], []

    def keep(_: Module, __: Any, output: Any) -> None:
        state = named(output, "last_hidden_state")
        if isinstance(state, Tensor):
            states.append(state)

    try:
        with _trying(model), hooks() as on:
            body = getattr(model, "base_model", model) if is_theirs(model) else model
            if isinstance(body, torch.nn.Module) and body is not model:
                on.after(body, keep)
            before = torch.get_rng_state()
            for ids, mask in (
                (text, torch.ones_like(text)),
                (torch.nn.functional.pad(text, space, value=pad_id), torch.nn.functional.pad(text * 0 + 1, space)),
            ):
                given: dict[str, Any] = {"input_ids": ids} | _needed(model, ids)
                if accepts(model, MASKS["input_ids"]):
                    given["attention_mask"] = mask
                if side == "left" and not mask.all():
                    given["position_ids"] = position_ids(model, task, mask)
                if task.together == "choices":
                    given = {name: value[None] for name, value in given.items()}
                if accepts(model, "use_cache"):
                    given["use_cache"] = False
                if writes:
                    beside = (0, 0 if mask.all() else count)
                    given["decoder_input_ids"] = torch.nn.functional.pad(text[:, :3], beside, value=pad_id)
                found.append(_first_of(model(**given)))
            draws = not torch.equal(before, torch.get_rng_state())
    except InputError:  # no padding on the left, and a run will say so; but a decoder's is on the right
        return not writes or heeds_mask(model, task, pad_id, "right", wide)
    except Exception:  # it takes something else, and a run will say so; or no positions (Reformer)
        return is_theirs(model) and (side == "right" or not found)  # one's own may take fewer tokens: nothing is known
    if not is_theirs(model) and len(found[0]) != 1:  # it gives them in another order, and a run will say so
        return False
    for alone, padded in (found, states) if len(states) == len(found) else (found,):
        real = padded[:, -alone.shape[1] :] if side == "left" and not writes else padded[:, : alone.shape[1]]
        if alone.shape == real.shape and (draws or not _is_close(alone, real, weight.dtype)):
            return False
    return True


def is_moved_by_padding(model: Module, ids: Sequence[int], arguments: Mapping[str, Tensor], pad_id: int) -> bool:
    """Whether a text beside an image has another embedding with padding behind it that its mask hides, as where it is
    read at its last place."""
    weight, text = first_weight(model), torch.tensor([[*ids]], device=input_device(model))
    others = {
        name: each.to(text.device, weight.dtype if each.is_floating_point() else None)
        for name, each in arguments.items()
    }
    found = []
    try:
        with _trying(model):
            for space in ((0, 0), (0, 1)):
                mask = torch.nn.functional.pad(torch.ones_like(text), space)
                padded = torch.nn.functional.pad(text, space, value=pad_id)
                output = model(input_ids=padded, attention_mask=mask, **others)
                found.append(compared(output, model, Task.IMAGE_TEXT))
    except Exception:  # it takes something else, and a run will say so
        return False
    alone, padded = found
    return not _is_close(alone, padded, weight.dtype)


def is_moved_by_ones(model: Module, task: Task, ids: Sequence[int], arguments: Mapping[str, Tensor]) -> bool:
    """Whether what a model says of a text and what stands beside it is another with a mask that hides none of its
    tokens: UDOP puts places of its own behind them, and hides those if it is given a mask."""
    weight, text = first_weight(model), torch.tensor([[*ids]], device=input_device(model))
    given: dict[str, Tensor] = {"input_ids": text} | _needed(model, text)
    if "decoder_input_ids" in task.arguments:
        given["decoder_input_ids"] = text[:, :1]
    given |= {
        name: each.to(text.device, weight.dtype if each.is_floating_point() else None)
        for name, each in arguments.items()
    }
    try:
        with _trying(model):
            before = torch.get_rng_state()
            without, masked = (
                _first_of(model(**{name: each.clone() for name, each in (given | more).items()}))
                for more in ({}, {MASKS["input_ids"]: torch.ones_like(text)})
            )
            draws = not torch.equal(before, torch.get_rng_state())
    except Exception:  # it takes something else, and a run will say so
        return False
    return without.shape == masked.shape and not (draws or _is_close(without, masked, weight.dtype))


def is_moved_by_field(model: Module, task: Task, argument: str, values: Tensor) -> bool | None:
    """Whether a field of whole numbers, one for each token of a text, changes what a model says of a text as long; None
    where it does not run on such a text alone."""
    weight = first_weight(model)
    text = torch.arange(values.numel(), device=input_device(model))[None] % len(weight)
    given: dict[str, Tensor] = {"input_ids": text} | _needed(model, text)
    if "decoder_input_ids" in task.arguments:
        given["decoder_input_ids"] = text[:, :1]
    field = values.reshape(1, -1).to(text.device)
    try:
        with _trying(model):
            without, told = (
                _first_of(model(**{name: each.clone() for name, each in (given | more).items()}))
                for more in ({}, {argument: field})
            )
    except Exception:  # it takes something else
        return None
    return without.shape != told.shape or not _is_close(without, told, weight.dtype)


def rows_alone(model: Module, task: Task, pad_id: int) -> bool:
    """Whether a model's head may be given a few rows alone, as far as a short input tells: a module of one's own may
    add others of each token to its logits, a second table's, say, or use them again. transformers' are believed, but
    for what has a forward of the user's: the head, or what it is in."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if not isinstance(head, torch.nn.Module):
        return True
    homes = [home for each in around_head(model) for home in (type(each).__module__, home_of(each.forward))]
    if type(model).__module__.startswith("transformers.") and all(home.startswith(WRAPPERS) for home in homes):
        return True
    weight, positions, calls = first_weight(model), torch.tensor([[4, 1]]), 0
    plain = [i for i in range(weight.shape[0]) if i not in (pad_id, end_read(model, task))][:6]
    given = _whole(model, task, torch.tensor([plain], device=input_device(model)))

    def count(_: Module, __: tuple[Any, ...]) -> None:
        nonlocal calls
        calls += 1

    try:
        with _trying(model):
            with hooks() as on:
                on.before(head, count)
                whole = at(logits_of(model(**given), model, task, 1), positions)
            with only_rows(model, positions) as read:
                alone = read(logits_of(model(**given), model, task, 1))
    except Exception:  # of the model's own: it takes something else, or more
        return False
    if calls != 1 or alone.shape != whole.shape:
        return False
    lost = 16 * torch.finfo(weight.dtype).eps * whole.nan_to_num(0, 0, 0).abs().max().item()
    return torch.allclose(alone, whole, rtol=0, atol=lost, equal_nan=True)
