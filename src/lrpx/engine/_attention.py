"""Softmax, its logarithm, and the attention that is one torch function."""

from __future__ import annotations

from functools import partial
from math import log
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor
from torch.nn import functional as F

from lrpx import _kernels, rules
from lrpx._kinds import rule_name
from lrpx.engine import (
    _activations,
    _exponentials,
    _factors,
    _functions,
    _logarithms,
    _notes,
    _roles,
    _selections,
    _softmaxes,
)
from lrpx.engine._elementwise import activation
from lrpx.engine._gates import EXPONENTIAL, gate_strength, mark_gate, move_gate
from lrpx.engine._layers import product_of_two
from lrpx.engine._notes import Note
from lrpx.engine._operation import Operation, as_it_is, changes_in_place, copied, write
from lrpx.engine._softmaxes import SCORES
from lrpx.engine._tensors import any_carries, arguments, carries, constants, first, is_tensor, pair

if TYPE_CHECKING:
    from collections.abc import Callable

    from lrpx.engine._run import Run
    from lrpx.rules import Rule


def _softmax(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    x, rest, settings = first(args, kwargs)
    if not carries(x):
        return _roles.constant_weights(run, func(x, *rest, **settings))
    _refuse_block(run, func)
    dim = rest[0] if rest else settings.get("dim")
    _softmaxes.refuse_scores(run, func.__name__, x, dim)
    out = run.apply("softmax", lambda x: func(x, *rest, **settings), x)
    if run.has_logarithms:
        _logarithms.mark_merging(run, out, x)
    if func.__name__ != "_softmax" and _softmaxes.asks_for_scores(run.recipe):
        run.scores = x
        _softmaxes.note_softmax(out, Note((out._version, ref(x), x._version, dim)))
    weights = _roles.mark_weights(run, out, x, dim) if isinstance(dim, int) else _roles.mark_weights(run, out)
    return mark_gate(run.recipe, "softmax", weights)


LOST = "log of a softmax (log_softmax is the same)"
PART = "log of a part of a softmax, or a sum (take log_softmax, that part of it, and logsumexp for a sum)"
MIXED = "log of exponentials times weights (of which a rule that holds softmaxes constant would hand nothing on)"
ODDS = "logit of a part of a softmax (take the scores, and logsumexp of the others from one)"
UNITS = {"log": 1.0, "log2": 1 / log(2), "log10": 1 / log(10)}


def _logarithm(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """``log x``, to whatever base; of a softmax or what was selected of it, the log-softmax that it is; with a guard,
    that and a constant, or a constant alone where the guard is larger than what it guards."""
    x = first(args, kwargs)[0]
    guarded = _guarded(x)
    softmax = x if guarded is None else guarded.root
    base = softmax if hasattr(softmax, SCORES) else getattr(softmax, "_base", None)
    found = getattr(base, SCORES, None)
    if base is None or not found or base._version != found[0]:
        if is_tensor(softmax) and _is_of_softmax(softmax):
            return as_it_is(run, PART, func, args, kwargs)
        if kwargs or not _notes.is_sum(x):
            return activation(run, func, args, kwargs)
        if run.recipe.softmax is rules.constant and _exponentials.is_weighed(x):
            return as_it_is(run, MIXED, func, args, kwargs)
        _refuse_logarithm(run, func)
        whole = _softmaxes.logarithm_of_sum(run, func, x)
        return activation(run, func, args, kwargs) if whole is None else whole
    value, scores = func(x.detach()), found[1] and found[1]()
    if scores is None or scores._version != found[2] or not base.is_contiguous() or base.storage_offset():
        return as_it_is(run, LOST, func, args, kwargs) if carries(x) else run.refused_constant(LOST, value)
    log_softmax = partial(torch.log_softmax, dim=found[3])
    whole = _log_softmax(run, torch.log_softmax, (scores, found[3]), {})
    if softmax is not base:
        whole = whole.contiguous().as_strided(softmax.shape, softmax.stride(), softmax.storage_offset())
    made = (UNITS[func.__name__] * whole).to(value.dtype)
    if guarded is not None:
        made = torch.where((value - made).abs() <= UNITS[func.__name__] * log(2), made, 0.0)
        made = made + run.added((value - made).detach(), func.__name__, made)
    out: Tensor = rules.with_gradient_of(value, made)
    if x is base and func.__name__ == "log":
        _logarithms.normalised(run, out, scores, log_softmax)
    return out


def _guarded(x: Any) -> Any:
    """What ``x`` is a function of that changes no number by more than a guard does."""
    f = _functions.function_of(x) if is_tensor(x) else None
    return f if f is not None and f.op is not None and _softmaxes.is_guarded(x, f.root) else None


def _is_of_softmax(x: Tensor) -> bool:
    """Whether ``x`` is made of a softmax, or a function of what is, as odds are, ``p / (1 - p)``."""
    f = _functions.function_of(x)
    return _softmaxes.is_of_softmax(x) or (f is not None and _softmaxes.is_of_softmax(f.root))


def _logit(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """The logarithm of odds; of a sigmoid a function of what that is of."""
    x = first(args, kwargs)[0]
    if is_tensor(x) and carries(x) and _is_of_softmax(x):
        return as_it_is(run, ODDS, func, args, kwargs)
    return activation(run, func, args, kwargs)


def _logarithm_in_place(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """The same in the place of ``x``; of a softmax that a rule has made a constant."""
    x = args[0]
    if carries(x) or not hasattr(x, SCORES):
        return changes_in_place(_logarithm, torch.log)(run, func, args, kwargs)
    return write(run, x, _logarithm(run, torch.log, (copied(run, x),), {}))


def _logsumexp(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """The logarithm of a softmax's normaliser."""
    x, rest, settings = first(args, kwargs)
    if not carries(x):
        return func(x, *rest, **settings)
    _refuse_logarithm(run, func)
    dim = rest[0] if rest else settings.get("dim")
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        (dim,) = dim
    if isinstance(dim, int) and (place := _selections.zero_beside(x, dim)) is not None and "cum" not in func.__name__:
        return _softplus(run, func(x.detach(), *rest, **settings), x.select(dim, place), dim)

    def op(x: Tensor) -> Any:
        return func(x, *rest, **settings)

    _refuse_again(run, x)
    out = run.apply("softmax", op, x)
    _logarithms.logarithm(run, out, x, op)
    return out


def _refuse_again(run: Run, x: Tensor) -> None:
    """Refuse the logarithm of a sum of exponentials of such logarithms, under a rule for softmax that would be met more
    than once by what is one sum."""
    softmax = run.recipe.softmax
    if softmax not in _softmaxes.PLAIN and run.has_logarithms and _logarithms.has_logarithm_of_sum(x):
        run.refuse("logsumexp of a logsumexp (take that of all at once)")


def _softplus(run: Run, value: Tensor, x: Tensor, dim: int) -> Tensor:
    """``value``, the logarithm of ``exp x + exp 0``, along a dimension that may be kept: a softplus of ``x``."""
    y = mark_gate(run.recipe, "softplus", _activations.activation(run, F.softplus, x))
    out: Tensor = move_gate(rules.with_gradient_of(value, y if y.ndim == value.ndim else y.unsqueeze(dim)), y)
    return out


def _logaddexp(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """The same of two tensors, element by element; of one and 0 it is a softplus."""
    a, b, _, _ = pair(args, kwargs)
    if not any_carries((a, b)):
        return func(a, b)
    x, other = (a, b) if carries(a) else (b, a)
    if not carries(other) and not other.any() and func(a.detach(), b.detach()).shape == x.shape:
        return mark_gate(run.recipe, "softplus", _activations.activation(run, lambda x: func(x, other), x))
    _refuse_logarithm(run, func)
    given = (run.added(x, func.__name__, a, b) for x in (a, b))
    both = torch.stack(torch.broadcast_tensors(*given))  # type: ignore[no-untyped-call]

    def op(both: Tensor) -> Any:
        return func(*both.unbind())

    _refuse_again(run, both)
    out = run.apply("softmax", op, both)
    _logarithms.logarithm(run, out, both, op)
    return out


def _log_softmax(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """``x − log Σ exp x``, with the rule on what is taken off."""
    x, rest, settings = first(args, kwargs)
    if not carries(x):
        return func(x, *rest, **settings)
    _refuse_logarithm(run, func)
    softmax, dim = run.recipe.softmax, rest[0] if rest else settings.get("dim", settings.get("axis"))
    if dim is None:  # what torch takes it for
        dim = 0 if x.ndim in (0, 1, 3) else 1

    def plain(x: Tensor) -> Any:
        return func(x, *rest, **settings)

    def spelled_out(op: Callable[..., Any], x: Tensor) -> Any:
        value = op(x.detach())
        wide = x.to(value.dtype)
        normaliser = softmax(lambda x: x.logsumexp(dim, keepdim=True), wide)
        return rules.with_gradient_of(value, wide - normaliser)

    y = run.apply("softmax", plain, x, rule=None if softmax is rules.unmodified else spelled_out)
    _logarithms.normalised(run, y, x, plain)
    return y


def _refuse_logarithm(run: Run, func: Any) -> None:
    """Refuse the logarithm of a softmax's normaliser under a rule for what gives one element for each, by the name of
    its module."""
    _refuse_block(run, func)
    if run.recipe.softmax in (rules.identity, rules.uniform_bias):
        why = "which gives one number for all scores of a softmax, or takes it off them"
        raise run.refuse_rule("softmax", func.__name__, why)


def _refuse_block(run: Run, func: Any) -> None:
    """Refuse a softmax by itself under a rule for the whole of attention, by the name of its module."""
    if isinstance(run.recipe.softmax, rules.AumannShapley):
        why, mend = "and not attention as one function", 'load the model with attn_implementation="sdpa", or '
        raise run.refuse_rule("softmax", func.__name__, why, mend)


# --------------------------------------------------------------------- fused attention

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


def _attention(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    args, kwargs = constants(args), constants(kwargs)
    out = _ruled(run, func, args, kwargs)
    if run.has_scales and gate_strength(arguments(args, kwargs, *NAMES[:3])[2]) == EXPONENTIAL and carries(out):
        _softmaxes.mark_softmax(out)  # whose logarithm is none of a value
    return _roles.attend(run, out, *arguments(args, kwargs, *NAMES[:3]), summed=(None, None, -2))


def _ruled(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    q, k, v, mask = arguments(args, kwargs, *NAMES[:4])
    rest = {name: value for name, value in kwargs.items() if name not in NAMES[:4]}
    softmax, matmul, linear = run.recipe.softmax, run.recipe.matmul, run.recipe.linear
    if run.has_taps_on_constants and softmax is not rules.constant and _has_summands(mask):
        mask = run.added(mask, "attn_mask", q, k)

    def op(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Any:
        return func(q, k, v, mask, *args[4:], **rest)

    if not any(map(carries, (q, k, v, mask))):
        return op(q, k, v, mask)
    called = "" if run.trace.ran is None else f"softmax={rule_name(softmax)}, matmul={rule_name(matmul)}"
    is_linear = linear is not rules.unmodified and _has_layer(run, q, k, v, mask)
    is_uniform = matmul is rules.uniform and softmax is rules.unmodified
    has_scale = is_uniform and run.has_scales and EXPONENTIAL in map(gate_strength, (q, k, v))  # which takes nothing
    is_spelled = is_linear or has_scale or not is_fused(softmax, matmul)
    if is_spelled or isinstance(softmax, rules.AumannShapley):
        _, _, _, _, dropout, causal, scale, _ = arguments(args, kwargs, *NAMES)
        called = f"linear={rule_name(linear)}, {called}" if is_linear else called
        if dropout:
            own = softmax not in (rules.unmodified, rules.constant)
            kind = "linear" if is_linear else "softmax" if own else "matmul"
            raise run.refuse_rule(kind, func.__name__, "with dropout", "put the model into eval(), or ")
        if not isinstance(softmax, rules.AumannShapley):
            return _spelled_out(run, op, (q, k, v, mask), bool(causal), scale, called)
        if is_linear:
            raise run.refuse_rule("softmax", func.__name__, "of learned queries, keys or values", "")
        if is_spelled:
            mend = "take matmul=lrpx.rules.uniform, or "
            raise run.refuse_rule("softmax", func.__name__, "under another rule for matmul", mend)
    counts = (_factors.factors(run, q), _factors.factors(run, k), _factors.factors(run, v)) if is_uniform else (1, 1, 1)
    out = run.apply(
        "softmax", op, q, k, v, mask,
        rule=partial(fused, softmax=softmax, matmul=matmul, counts=counts), called=called,
        conserves=softmax is rules.constant,
    )  # fmt: skip
    # the attention weights are one factor, as where the two products are written out
    return _factors.made_of(run, out, counts[2] + 1) if is_uniform and carries(v) and any_carries((q, k, mask)) else out


def _has_layer(run: Run, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether one of the two products is of what depends on the input and a weight, such as learned queries."""
    constant = [not carries(x) for x in (q, k, v)]
    weight = [is_constant and run.is_weight(x) for is_constant, x in zip(constant, (q, k, v), strict=True)]
    if all(weight[:2]) and (mask is None or (not carries(mask) and run.is_weight(mask))):
        return not constant[2]
    if run.recipe.softmax is rules.constant:
        return False
    scored = not (constant[0] and constant[1])
    return (scored and any(weight[:2])) or ((scored or carries(mask)) and weight[2])


def is_fused(softmax: Rule, matmul: Rule) -> bool:
    """Whether :func:`fused` has a kernel for the rules."""
    is_block = softmax is rules.unmodified or isinstance(softmax, rules.AumannShapley)
    return softmax is rules.constant or (is_block and matmul in (rules.unmodified, rules.uniform))


def fused(
    op: Callable[..., Any],
    /,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    softmax: Rule,
    matmul: Rule,
    counts: tuple[int, int, int] = (1, 1, 1),
) -> Any:
    """Attention as one kernel, ``op(q, k, v, mask)``, under rules for softmax and for matrix products; ``counts``: how
    many factors the queries, keys and values are products of.

    Where the softmax is constant, so are the attention weights: the values alone are left in the graph, and their
    product with a constant gets no rule.
    """
    if softmax is rules.constant:
        return op(q.detach(), k.detach(), v, None if mask is None else mask.detach())
    if isinstance(softmax, rules.AumannShapley):
        return softmax.attention(op, q, k, v, mask, halves=matmul is rules.uniform)
    return op(q, k, v, mask) if matmul is rules.unmodified else _kernels.attention(op, q, k, v, mask, counts)


def _spelled_out(run: Run, op: Callable[..., Any], inputs: Any, causal: bool, scale: float | None, called: str) -> Any:
    """The value of ``op(q, k, v, mask)`` with the gradient of the two products and the softmax that it is made of;
    each gets the rule of its kind."""
    q, k, v, mask = inputs
    if k.shape[-3:-2] != q.shape[-3:-2]:  # groups of heads with one key and value
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)

    def widened(x: Tensor, made_of: Any) -> Tensor:
        x = move_gate(x.to(wide), x)
        if not carries(x):  # a weight, unless it was made of the input
            run.mark_from_input(x, made_of, "scaled_dot_product_attention")
        return x

    wide_q, wide_k, wide_v = widened(q, inputs[:1]), widened(move_gate(k.mT, k), inputs[1:2]), widened(v, inputs[2:3])
    scores = product_of_two(run, torch.matmul, wide_q, wide_k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    admitted = None if mask is None or mask.dtype is not torch.bool else mask
    if causal:
        admitted = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    elif mask is not None and admitted is None:
        scores = scores + mask
        admitted = mask.detach() > torch.finfo(mask.dtype).min / 2
    if admitted is not None:  # by a finite number: a row that admits nothing must not be NaN
        scores = scores.masked_fill(~admitted, torch.finfo(scores.dtype).min)  # narrow under autocast
    softmax = partial(torch.softmax, dim=-1)
    weights = run.apply("softmax", softmax, scores) if carries(scores) else softmax(scores)
    if carries(scores):  # which a learned query makes of its keys as a layer
        weights = _roles.mark_weights(run, weights)
    if admitted is not None:
        weights = weights.masked_fill(~admitted, 0.0)
    product = product_of_two(run, torch.matmul, widened(weights, (q, k, mask)), wide_v, summed=(-1, -2))
    run.call_it(called)
    value = op(*(None if x is None else x.detach() for x in inputs))
    return rules.with_gradient_of(value, product.to(value.dtype)) if carries(product) else value


def _has_summands(mask: Tensor | None) -> bool:
    """Whether an attention mask adds to the scores (ALiBi), rather than only admits and forbids."""
    if mask is None or not mask.is_floating_point():
        return False
    return bool(((mask != 0) & (mask > torch.finfo(mask.dtype).min / 2)).any())


ROWS = [
    Operation("softmax", ("softmax", "_softmax", "special_softmax"), _softmax, "softmax"),
    Operation("log", tuple(UNITS), _logarithm, "activation"),
    Operation("log", ("log_",), _logarithm_in_place, "activation"),
    Operation("logit", ("logit", "special_logit"), _logit, "activation"),
    Operation("logsumexp", ("logsumexp", "special_logsumexp", "logcumsumexp"), _logsumexp, "softmax"),
    Operation("logaddexp", ("logaddexp", "logaddexp2"), _logaddexp, "softmax"),
    Operation("log_softmax", ("log_softmax", "_log_softmax", "special_log_softmax"), _log_softmax, "softmax"),
    Operation("attention", ("scaled_dot_product_attention",), _attention, "softmax"),
]
