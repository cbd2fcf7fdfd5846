"""How near two things are: the cosine of two tensors, and distances.

A cosine is a product of the two over their lengths, each with the rule of its kind. A distance is homogeneous of degree
1 (Euler), so its plain gradient already is that of its powers and sums under the identity rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lrpx import rules
from lrpx.engine._elementwise import ROWS as ELEMENT_WISE
from lrpx.engine._elementwise import product
from lrpx.engine._norms import ROWS as NORMS
from lrpx.engine._operation import Operation
from lrpx.engine._tensors import any_carries, arguments, carries, constants, detached

if TYPE_CHECKING:
    from lrpx.engine._run import Run

HANDLERS = {row.name: row.handler for row in (*ELEMENT_WISE, *NORMS)}


def _cosine(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """``a · b / (max(‖a‖, ε) max(‖b‖, ε))``."""
    a, b, dim, eps = arguments(constants(args), constants(kwargs), "x1", "x2", "dim", "eps")
    dim, eps = 1 if dim is None else dim, 1e-8 if eps is None else eps
    value = func(*detached(a, b), dim, eps)
    if not any_carries((a, b)):
        return value
    given, (a, b) = (a, b), torch.broadcast_tensors(a, b)  # type: ignore[no-untyped-call]
    if dim >= 0:
        dim -= a.ndim
    found = product(run, torch.mul, (a, b if a is not b else b.view_as(b)), {}).sum(dim, keepdim=True)
    for own, x in zip(given, (a, b), strict=True):
        if own.ndim >= -dim and own.shape[dim] == x.shape[dim]:
            x = own  # a number that was added to it belongs to its length
        length = HANDLERS["deviation"](run, torch.linalg.vector_norm, (x,), {"dim": dim, "keepdim": True})
        length = torch.where(length < eps, eps, length)
        found = HANDLERS["div"](run, torch.div, (found, length), {})
    return rules.with_gradient_of(value, found.squeeze(dim))


def _pairwise(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """``‖a − b + ε‖``."""
    a, b, p, eps, keepdim = arguments(constants(args), constants(kwargs), "x1", "x2", "p", "eps", "keepdim")
    p, eps, keepdim = 2.0 if p is None else p, 1e-6 if eps is None else eps, bool(keepdim)
    value = func(*detached(a, b), p, eps, keepdim)
    if not any_carries((a, b)):
        return value
    offset = run.added(torch.full((), eps, dtype=value.dtype, device=value.device), "pairwise_distance", a, b)
    return _distance(run, value, run.added(a, func.__name__, b) - run.added(b, func.__name__, a) + offset, p, keepdim)


def _cdist(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """``‖a_i − b_j‖``, each with each."""
    a, b, p = arguments(constants(args[:3]), constants(kwargs), "x1", "x2", "p")
    p = 2.0 if p is None else p
    value = torch.cdist(a.detach(), b.detach(), p)
    if not any_carries((a, b)):
        return value
    a, b = run.added(a, "cdist", b), run.added(b, "cdist", a)
    return _distance(run, value, a[..., :, None, :] - b[..., None, :, :], p, False)


def _dist(run: Run, func: Any, args: Any, kwargs: Any) -> Any:
    """``‖a − b‖``, of all elements."""
    a, b, p = arguments(constants(args), constants(kwargs), "input", "other", "p")
    p = 2.0 if p is None else p
    value = func(*detached(a, b), p)
    if not any_carries((a, b)):
        return value
    return _distance(run, value, (run.added(a, "dist", b) - run.added(b, "dist", a)).flatten(), p, False)


def _distance(run: Run, value: Tensor, between: Tensor, p: float, keepdim: bool) -> Tensor:
    """``value`` with the gradient of the norm of what is between two points, over the last dimension."""
    if p == 0:  # how many differ: a step
        return value
    if run.recipe.activation in (rules.identity, rules.unmodified):
        run.under("activation")
        length = torch.linalg.vector_norm(between, p, -1, keepdim)
    elif p not in (1, 2):
        raise run.refuse_rule("activation", "distance", f"a norm with p = {p}, which is no function of one number")
    elif p == 1:
        length = HANDLERS["abs"](run, torch.abs, (between,), {}).sum(-1, keepdim)
    else:
        squares = HANDLERS["square"](run, torch.square, (between,), {}).sum(-1, keepdim)
        length = HANDLERS["sqrt"](run, torch.sqrt, (squares,), {})
    return rules.with_gradient_of(value, length.reshape(value.shape)) if carries(length) else value


ROWS = [
    Operation("cosine similarity", ("cosine_similarity",), _cosine, "product"),
    Operation("pairwise distance", ("pairwise_distance",), _pairwise, "activation"),
    Operation("distances", ("cdist",), _cdist, "activation"),
    Operation("distance", ("dist",), _dist, "activation"),
]
