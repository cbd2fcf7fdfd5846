"""How the factors of a product share: each input-dependent factor of it alike, however the product is bracketed.

The uniform rule is one for ``N`` factors, ``R_i = R / N`` (Achtibat et al. 2024, Prop. 3.3). A model multiplies two at
a time, and ``(a · b) · c`` is not to differ from ``a · (b · c)``: a state-space model computes ``C_t (B_s x_s)`` across
the borders of its chunks and ``(C_t B_s) x_s`` inside them. So a factor that is itself a product of ``m`` gets ``m``
shares. What a tensor is a product of, the graph tells, when two are multiplied: selections, shapes, scalings (an RMS
norm is one) and sums over dimensions lead on to what they are made of, and so does what is added to a state that
decays; everything else (a linear layer, an activation, a sum of two, and so what a mean is taken off) is one factor. So
an LSTM's state is one, however long it has run.

An exponential is no factor that shares. It scales what it is multiplied with, by nothing at all where its argument is
0, where the identity rule would be steepest; so the other factor takes all (Jafari et al. 2024 hold the decays of a
state-space model constant so).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from lrpx import _kernels, rules
from lrpx.engine._gates import EXPONENTIAL, GATE, gate_strength, put_gate, takes_all, weakest_gate
from lrpx.engine._nodes import COPY, LINEAR, NORM, OWN, SCALES, SUMS, kind
from lrpx.engine._tensors import CONSTANT, is_tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from lrpx.recipes import Recipe
    from lrpx.rules import Rule

ADDS = SUMS | {"Addcmul"}
"""Nodes of sums; one with a product that both factors of carry is taken apart."""
LEADS_ON = LINEAR | SCALES | ADDS | {OWN, NORM} | frozenset("ScatterReduce IndexReduce EmbeddingBag VarMean".split())
"""Nodes whose result is a product of as many factors as what it is made of."""

DECAYED = "lrpx decayed"
"""What the node of the graph is marked with that made a product with an exponential."""

CHUNKS = "product of attention and a softmax of sums of exponentials (run attention at once, not in chunks)"
"""What is refused where attention is put together of chunks."""
MERGING = "lrpx merging"
"""What the node of the graph is marked with that made weights of sums of exponentials, or of logarithms of such, as
those are by which attention is put together that was computed in chunks."""

LEAF = "AccumulateGrad"
"""The node of a leaf."""

UNEVEN = 2**40
"""Of how many factors a tensor is a product whose elements are of different numbers: as many, or more."""

FARTHEST = 1024
"""Nodes that are looked at for one tensor; the parts that a loop over the tokens has made are many."""
DEEPEST = 32
"""Sums in sums, and nodes after one another, that are looked through for one tensor."""


def product(run: Any, op: Callable[..., Any], a: Tensor, b: Tensor, rule: Rule | None = None) -> Any:
    """``op(a, b)``, the element-wise product of two that depend on the input; under the recipe's rule, or another."""
    return _shared(run, "product", op, a, b, run.recipe.product if rule is None else rule)


def matmul(run: Any, op: Callable[..., Any], a: Tensor, b: Tensor) -> Any:
    """``op(a, b)``, a matrix product of two that depend on the input."""
    return _shared(run, "matmul", op, a, b, run.recipe.matmul)


def _shared(run: Any, what: str, op: Callable[..., Any], a: Tensor, b: Tensor, rule: Rule) -> Any:
    if rule is not rules.uniform:
        if rule is rules.unmodified and run.has_scales and run.recipe.product is rules.uniform:  # LRP-0, as Ding's
            first_scales = gate_strength(a) == EXPONENTIAL
            if first_scales != (gate_strength(b) == EXPONENTIAL):
                return scaled(run, what, op, a, b, first_scales=first_scales)
        return run.apply(what, op, a, b, rule=rule)
    if run.is_merging:
        _refuse_merging(run, (a, b))
    are_scales = False
    if run.asks_for_gates:
        are_scales = gate_strength(a) == EXPONENTIAL
        if are_scales != (gate_strength(b) == EXPONENTIAL):
            return scaled(run, what, op, a, b, first_scales=are_scales)
    count = scales if are_scales else factors
    m, n = count(run, a), count(run, b)
    if m == n:
        out = run.apply(what, op, a, b, rule=rule, called="uniform")
    else:
        out = run.apply(what, op, a, b, rule=partial(_by_factors, m / (m + n)), called="uniform", conserves=True)
    out = made_of(run, out, -(m + n) if are_scales else m + n)
    if run.has_scales and (_is_decayed(a.grad_fn) or _is_decayed(b.grad_fn)) and out.grad_fn is not None:
        out.grad_fn.metadata[DECAYED] = True
    return put_gate(run.recipe, out, weakest_gate((a, b))) if run.asks_for_gates else out


def several(run: Any, op: Callable[..., Any], given: Sequence[Tensor]) -> Any:
    """``op(*given)``, a product of more than two that depend on the input, under the uniform rule; as products of two
    after one another are."""
    if run.is_merging:
        _refuse_merging(run, given)
    is_scale = [run.asks_for_gates and gate_strength(each) == EXPONENTIAL for each in given]
    if all(is_scale):
        of_scales = [scales(run, each) for each in given]
        total = sum(of_scales)
        shared = (_kernels.scale_gradient(x, n / total) for x, n in zip(given, of_scales, strict=True))
        return put_gate(run.recipe, made_of(run, op(*shared), -total), EXPONENTIAL)
    counts = [0 if is_one else factors(run, each) for each, is_one in zip(given, is_scale, strict=True)]
    total = sum(counts)
    shared = (_kernels.scale_gradient(x, n / total) if n else x.detach() for x, n in zip(given, counts, strict=True))
    out = made_of(run, op(*shared), total)
    node = out.grad_fn
    if any(is_scale) and node is not None:
        node.metadata[DECAYED] = True
    return out


def scaled(run: Any, what: str, op: Callable[..., Any], a: Tensor, b: Tensor, *, first_scales: bool) -> Any:
    """``op(a, b)``, one of which is a gate: the other takes all."""
    if first_scales:
        out = run.apply(what, op, a, b, rule=rules.signal_take_all, called="signal_take_all")
    else:
        out = run.apply(what, lambda b, a: op(a, b), b, a, rule=rules.signal_take_all, called="signal_take_all")
    gate, signal = (a, b) if first_scales else (b, a)
    node = out.grad_fn
    if node is not None:
        if gate_strength(gate) == EXPONENTIAL or (run.has_scales and _is_decayed(signal.grad_fn)):
            node.metadata[DECAYED] = True
        # a scaling leads on to the signal, and is told when it is asked for; a matrix product may end in another shape
        if run.has_scales or kind(node) not in SCALES:
            run.counts[node._sequence_nr()] = _counted(run, signal)
    return out


def _by_factors(share: float, op: Callable[..., Any], a: Tensor, b: Tensor) -> Any:
    """``op(a, b)``, of which the first gets a share and the second the rest."""
    return op(_kernels.scale_gradient(a, share), _kernels.scale_gradient(b, 1 - share))


def made_of(run: Any, out: Any, count: int) -> Any:
    """``out``, noted as a product of so many factors; of so many exponentials and nothing else, if it is negative."""
    if is_tensor(out) and (node := out.grad_fn) is not None:
        run.counts[node._sequence_nr()] = count
    return out


def written(run: Any, x: Tensor, value: Tensor) -> None:
    """``value`` was written into the place of all of ``x``: a view is as many factors then, whatever else its base is
    made of."""
    node: Any = x.grad_fn
    made: Any = value.grad_fn
    if x._is_view() and node is not None and made is not None:
        run.counts[node._sequence_nr()] = _factors(run.counts, made, [FARTHEST])
        if _is_decayed(made):
            node.metadata[DECAYED] = True


def has_scales(recipe: Recipe) -> bool:
    """Whether an exponential scales what it is multiplied with."""
    return takes_all(recipe) or rules.uniform in (recipe.product, recipe.matmul)


def asks_for_softmax(recipe: Recipe) -> bool:
    """Whether a softmax that is written out must be known: some rule would take its pieces for something else."""
    return not (recipe.activation is recipe.product is recipe.softmax is recipe.norm is rules.unmodified)


def exponential(run: Any, value: Tensor) -> Tensor:
    """Mark ``value``, an exponential: it scales what it is multiplied with, where the recipe has a rule of ours, and
    over a sum it is a softmax, under any rule."""
    if not value.requires_grad:
        return value
    if has_scales(run.recipe):
        setattr(value, GATE, EXPONENTIAL)
        made_of(run, value, -1)
        run.meet_scale()
    elif asks_for_softmax(run.recipe):
        run.meet_scale()
    return value


def factors(run: Any, x: Tensor) -> int:
    """How many factors that depend on the input a tensor is a product of; the fewest, where it is a sum. One whose
    elements are of different numbers is refused: it meets another."""
    return _even(run, _counted(run, x))


def _even(run: Any, count: int) -> int:
    if count < UNEVEN:
        return count
    run.refuse("cumprod beside another factor (products of different numbers of factors; multiply them one by one)")
    return 1


def _counted(run: Any, x: Tensor) -> int:
    return of_node(run, x.grad_fn)


def of_node(run: Any, node: Any) -> int:
    """How many factors what a node of the graph has made is a product of."""
    if not run.has_scales and node is not None and kind(node) in ADDS and _is_of_two(node):
        return 1
    return _factors(run.counts, node, [FARTHEST]) or 1


def scales(run: Any, x: Tensor) -> int:
    """How many exponentials a tensor is a product of that is a product of nothing else."""
    node: Any = x.grad_fn
    for _ in range(DEEPEST):
        if (count := run.counts.get(node._sequence_nr(), 0)) < 0:
            return _even(run, -int(count))
        made_of = [child for child, _ in node.next_functions if child is not None]
        if len(made_of) != 1 or kind(node) not in LEADS_ON:
            break
        node = made_of[0]
    return 1


def _factors(counts: dict[int, int], node: Any, left: list[int], depth: int = 0) -> int:
    """The same of a node of the graph; 0 of a scale, and of what does not depend on the input."""
    fewest, waiting = 0, list[Any]()
    while True:
        if node is not None:
            count = counts.get(node._sequence_nr())
            if count is not None:
                count = max(count, 0)
            else:
                left[0] -= 1
                name = kind(node)
                if left[0] < 0 or name not in LEADS_ON:
                    count = 0 if is_entry(node) else 1
                elif name in ADDS:
                    count = _of_sum(counts, node, left, depth)
                else:
                    children, node = node.next_functions, None
                    for child, _ in children[1:] if name == COPY else children:
                        if node is None:
                            node = child
                        elif child is not None:
                            waiting.append(child)
                    continue
            if count == 1:
                return 1
            is_uneven = max(fewest, count) >= UNEVEN
            fewest = UNEVEN if is_uneven else min(fewest, count) if fewest and count else fewest or count
        if not waiting:
            return fewest
        node = waiting.pop()


def is_entry(node: Any) -> bool:
    """Whether a node is the leaf that a ledger makes of a constant."""
    return kind(node) == LEAF and CONSTANT in vars(node.variable)


def _is_of_two(node: Any) -> bool:
    """Whether a sum is of two that depend on the input, and neither is the constant of a ledger."""
    made_of = _summands(node)
    return len(made_of) == 2 and LEAF not in map(kind, made_of)


def _summands(node: Any) -> list[Any]:
    """What a sum is made of that depends on the input; ``x + x`` is a scaling of one."""
    return [child for child, _ in dict.fromkeys(node.next_functions) if child is not None]


def _of_sum(counts: dict[int, int], node: Any, left: list[int], depth: int) -> int:
    if depth == DEEPEST:
        return 1
    made_of = _summands(node)
    found = [count for child in made_of if (count := _factors(counts, child, left, depth + 1))]
    if len(found) > 1 and not any(map(_is_decayed, made_of)):
        if left[0] >= 0:
            counts[node._sequence_nr()] = 1
        return 1
    return UNEVEN if UNEVEN in found else min(found, default=0)


def _is_decayed(node: Any) -> bool:
    """Whether a node of the graph is a product with an exponential, in whatever shape."""
    for _ in range(DEEPEST):
        if DECAYED in node.metadata:
            return True
        made_of = [child for child, _ in node.next_functions if child is not None]
        if len(made_of) != 1 or kind(node) not in LEADS_ON:
            return False
        node = made_of[0]
    return False


def mark_merging(run: Any, weights: Tensor) -> None:
    """Mark ``weights`` as such."""
    node: Any = weights.grad_fn
    if node is not None:
        node.metadata[MERGING] = run.is_merging = True


def _refuse_merging(run: Any, given: Sequence[Tensor]) -> None:
    """Refuse a product of merging weights and a product: attention in chunks would be a product of three, where it is
    one of two at once."""
    nodes = [x.grad_fn for x in given]
    merging = [reaches(node, lambda each: MERGING in each.metadata) for node in nodes]
    if not any(merging):
        return
    are_products = [reaches(node, lambda each: run.counts.get(each._sequence_nr(), 1) > 1) for node in nodes]
    if any(i != j for i, one in enumerate(merging) if one for j, other in enumerate(are_products) if other):
        run.refuse(CHUNKS)


def reaches(node: Any, fits: Callable[[Any], bool], leads_on: frozenset[str] = LEADS_ON) -> bool:
    """Whether a node of the graph is made of one that fits, by sums, scalings, selections and in whatever shape."""
    seen, waiting = {node}, [node]
    while waiting and len(seen) < FARTHEST:
        each = waiting.pop()
        if each is None:
            continue
        if fits(each):
            return True
        if kind(each) in leads_on:
            new = [child for child, _ in each.next_functions if child not in seen]
            seen.update(new)
            waiting += new
    return False
