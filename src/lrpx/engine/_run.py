"""The state of one run under a recipe, with one owner: which rules hold now, and what is done with a call."""

from __future__ import annotations

import sys
from collections import deque
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, is_grad_enabled
from torch._C._functorch import peek_interpreter_stack
from torch.nn import Module
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from lrpx import _kinds, rules
from lrpx._kinds import rule_name
from lrpx._modules import layer_of
from lrpx.engine import _divisors, _roles
from lrpx.engine._graph import OUTSIDE, descends, newest
from lrpx.engine._nodes import hooks_of_saved
from lrpx.engine._observer import Observer
from lrpx.engine._places import Source, is_among, place_of_tokens
from lrpx.engine._positions import Positions
from lrpx.engine._recompute import compare_numbers
from lrpx.engine._taps import Call, Tap
from lrpx.engine._tensors import (
    FROM_INPUT,
    LIKE_ANOTHER,
    TRANSPOSES,
    any_carries,
    carries,
    constants,
    has_foreign,
    is_in_place,
    is_tensor,
    transformed_constants,
    unwrapped,
    whole_of,
)
from lrpx.errors import MethodError, UnknownOperationError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from lrpx._modules import Layer
    from lrpx.engine._graph import Nodes
    from lrpx.engine._operation import Operation
    from lrpx.engine._trace import Trace
    from lrpx.recipes import Recipe
    from lrpx.rules import Rule


class Run:
    """One run of a model under a recipe.

    Args:
        recipe: the recipe outside every override.
        trace: where sources are recorded.
        embeddings: the embeddings, with their paths.
        paths: for each module (by ``id``), its path; to name the culprit in errors.
        taps: what listens to the run, or writes into it.
        parameters: the model's parameters, with their names.
        has_outputs: whether what is computed from the model's outputs has rules.

    Attributes:
        recipe: the recipe that holds now.
        nodes: what the run has made of the graph.
        replays: to be called when a checkpoint of the model's own is met, which will run a part again in the backward
            pass.
        is_after: whether the model's forward pass has ended, so that its outputs may be computed with.
        active: whether the model's forward pass is running, and not a part of it that counts as one function.
        replaying: whether it runs again in the backward pass, so that nothing is recorded.
        in_last_layer: whether the last layer is running.
        asks_for_gates: whether some rule must know which factor of a product is the gate.
        has_scales: whether an exponential was met that scales what it is multiplied with.
        has_logarithms: whether a logarithm was met.
        is_merging: whether weights were made of logarithms of sums of exponentials.
        has_divided: whether something else than exponentials was divided by a sum of them.
        has_systems: whether rows of a triangular matrix's inverse were written.
        asks_for_places: whether some rule is by what a layer is to the model.
        asks_for_weights: whether some rule must know which constants are weights.
        has_own_rules: whether some rule is a user's own.
        is_tapped: whether a tap wants to be called around torch functions.
        is_quick: whether nothing is to be done with a call but to answer it.
        is_usual: whether nothing else than gates need be known of its result.
        has_taps_on_rules: whether a tap wants to be called where rules are applied.
        has_taps_on_constants: whether a tap wants to know the constants that are added.
        has_unseen: whether something in the model was made unseen.
        has_hooks: whether some of what the graph saves was given to hooks.
        roots: the newest tensors that functions were made of.
        scaled: the newest that constants have scaled: apart, so that they take no other's place.
        scores: what the newest softmax is of.
        has_constants: whether something was changed in place into a constant.
        by_ids: what was added up in the places that ids tell, by its ``id``.
        counts: of the nodes that made products, by their numbers: of how many factors (``engine/_factors.py``).
        positions: what makes positions leaves, where the recipe gives them relevance.
    """

    # at each call some of these are asked for, and a dict of more than thirty would be slower to ask
    __slots__ = tuple(
        """__weakref__ _embeddings _given _has_outputs _marked _on_calls _on_constants _on_rules _outer _parameters
        _paths _renamed _replayed _rule _whole active asks_for_gates asks_for_places asks_for_weights by_ids counts
        has_constants has_divided has_hooks has_logarithms has_own_rules has_scales has_systems has_taps_on_constants
        has_taps_on_rules has_unseen in_last_layer is_after is_merging is_quick is_tapped is_usual nodes positions
        recipe replaying replays roots scaled scores taps trace""".split()
    )

    def __init__(
        self,
        recipe: Recipe,
        trace: Trace,
        embeddings: Sequence[tuple[str, Module]],
        paths: Callable[[], Mapping[int, str]],
        taps: Sequence[Tap] = (),
        has_outputs: bool = True,
        parameters: Callable[[], Iterable[tuple[str, Tensor]]] = tuple,
    ) -> None:
        self.recipe = recipe
        self.trace = trace
        self.nodes = trace.nodes
        self.nodes.is_sure = recipe.is_ours() and all(isinstance(tap, (Observer, Positions)) for tap in taps)
        self.replays: Callable[[Recipe], None] | None = None
        self._replayed: Recipe | None = None
        self.active = self.is_after = False
        self._has_outputs = has_outputs
        self._parameters = parameters
        self._given: dict[int, tuple[Tensor, bool]] = {}
        self.by_ids: dict[int, Tensor] = {}
        self.replaying = False
        self.in_last_layer = False
        self.asks_for_gates = recipe.has_gates()
        self.has_scales = self.has_logarithms = self.has_divided = self.has_systems = self.is_merging = False
        self.asks_for_weights = recipe.has_rules_for_linear()
        self.asks_for_places = recipe.has_places_anywhere()
        self.has_own_rules = not recipe.is_ours()
        self._whole = recipe
        self._outer: list[tuple[Recipe, bool]] = []
        self._embeddings = embeddings
        self._paths = paths
        self._rule = ""
        self._marked: list[Tensor] = []
        self._renamed: list[tuple[Any, str]] = []
        self.counts: dict[int, int] = {}
        self.positions: Positions | None = None
        self.taps = taps
        self._on_calls, self._on_rules, self._on_constants = (
            [tap for tap in taps if getattr(type(tap), part) is not getattr(Tap, part)]
            for part in ("around", "rule", "added")
        )
        self.is_tapped = bool(self._on_calls)
        self.is_quick = not self.is_tapped and trace.ran is None
        self.is_usual = self.is_quick and not (self.asks_for_weights or self._on_rules)
        self.has_constants = self.has_unseen = self.has_hooks = False
        self.roots: deque[Tensor] = deque(maxlen=ROOTS)
        self.scaled: deque[Tensor] = deque(maxlen=ROOTS)
        self.scores: Tensor | None = None
        self.has_taps_on_rules = bool(self._on_rules)
        self.has_taps_on_constants = bool(self._on_constants)

    # ------------------------------------------------------------------------------ state

    def begin(self) -> None:
        """The model's forward pass begins; its inputs have been made leaves."""
        self.recipe = self._whole
        self.nodes.last = newest()
        self._outer.clear()
        self.active, self.is_after = True, False

    def end(self) -> None:
        """The model's forward pass ends."""
        self.recipe = self._whole
        self.roots.clear()
        self.scaled.clear()
        self.scores = None
        if newest() != self.nodes.last:
            self.meet_unseen()
        self.active = self.in_last_layer = False
        self.is_after = self._has_outputs

    def enter(self, recipe: Recipe) -> None:
        """A module begins where other rules hold."""
        self._outer.append((self.recipe, self._in_checkpoint()))
        self.recipe = recipe

    def leave(self) -> None:
        """A module ends where other rules hold."""
        if self._outer:
            self.recipe, _ = self._outer.pop()

    def enter_last_layer(self) -> None:
        """The last layer begins; in a checkpoint of the user's own it would be none when it runs again."""
        self.in_last_layer = self._replayed is None

    def leave_last_layer(self) -> None:
        """The last layer ends."""
        self.in_last_layer = False

    def keep_root(self, root: Tensor) -> None:
        """Keep what a function was made of, for a function of that which may follow."""
        roots = self.roots
        if not roots or roots[-1] is not root:
            roots.append(root)

    def meet_scale(self) -> None:
        """There is an exponential, which scales what it is multiplied with: from here on some rule must know which
        factor of a product is the gate."""
        self.asks_for_gates = self.has_scales = True

    def pause(self) -> None:
        """What runs now counts as one function: its inner calls are not seen."""
        if newest() != self.nodes.last:
            self.meet_unseen()
        self.active = False

    def resume(self) -> None:
        """What counts as one function has ended."""
        self.active = True
        self.nodes.last = newest()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, no call is seen."""
        before, self.active = self.active, False
        try:
            yield
        finally:
            self.active = before
            self.nodes.last = newest()

    @contextmanager
    def again(self, recipe: Recipe, is_other_thread: bool) -> Iterator[None]:
        """Inside, a part of the model runs as it did under ``recipe``, and nothing is recorded."""
        nodes = self.nodes
        before = self.active, self.replaying, self.recipe, self.is_after, self.counts, nodes.first, nodes.last
        self.active, self.replaying, self.recipe, self.is_after, nodes.last = True, True, recipe, False, newest()
        if is_other_thread:  # where nodes have other numbers
            self.counts, nodes.first = {}, 0
        try:
            yield
        finally:
            self.active, self.replaying, self.recipe, self.is_after, self.counts, nodes.first, nodes.last = before
            self.roots.clear()
            self.scaled.clear()

    def forget_marks(self) -> None:
        """Take the run's marks off the tensors that are there after it."""
        for value in self._marked:
            vars(value).pop(FROM_INPUT, None)
        self._marked.clear()

    # ------------------------------------------------------------------------------ calls

    def apply(
        self,
        kind: str,
        op: Callable[..., Any],
        *inputs: Any,
        rule: Rule | None = None,
        called: str | None = None,
        conserves: bool = False,
    ) -> Any:
        """``op(*inputs)`` under the recipe's rule for a kind of operation, or under another rule.

        Args:
            kind: the kind of operation.
            op: the operation.
            inputs: its inputs, at least one of which depends on the model's input.
            rule: what applies the recipe's rule, where that takes more than calling it.
            called: the rule's name in the report, if it is not the recipe's.
            conserves: whether this rule hands on exactly what it is given; if not, the ledger measures it.
        """
        if self.trace.ran is not None:
            self._rule = called or rule_name(getattr(self.recipe, kind, rules.unmodified))
        if rule is None:
            if self.asks_for_places and kind in ("linear", "convolution"):
                return _roles.layer(self, kind, op, inputs)
            rule = getattr(self.recipe, kind)
        if isinstance(rule, rules.BY_SIGNS) and any(is_tensor(x) and x.is_complex() for x in inputs):
            raise self.refuse_rule(kind, kind, "of complex numbers, which have no signs")
        if self.has_own_rules and _is_own(rule) and _has_numbers():
            rule = partial(self._checked, kind, rule)
        if conserves or not self._on_rules:
            return rule(op, *inputs)
        proceed: Callable[..., Any] = partial(rule, op)
        for tap in reversed(self._on_rules):
            proceed = _around_rule(tap, kind, rule, op, proceed)
        return proceed(*inputs)

    def _checked(self, kind: str, rule: Rule, op: Callable[..., Any], *inputs: Any) -> Any:
        """``rule(op, *inputs)``, of a user's own rule.

        Raises:
            MethodError: its value is not the operation's, or it has changed an input: another model would be explained.
        """
        drawn = {x.get_device() for x in inputs if is_tensor(x) and x.is_cuda}
        # before the rule, which might write into its inputs, and draws the same numbers
        with torch.no_grad(), torch.random.fork_rng(drawn):
            given = [x.detach().clone() if carries(x) else x for x in inputs]
            new = _versions(given)
            value = op(*given)
        own = _versions(given) != new  # an operation in place
        before = _versions(inputs)
        out = rule(op, *inputs)
        if is_tensor(value) and not _is_nearly(out, value):
            raise MethodError(
                f"the rule {rule_name(rule)} gives {_told(out)}, and not the value of the {kind} in {self.where()}, "
                f"{_told(value)}, so another model would be explained; compute the value by op(…), and give it another "
                "gradient by lrpx.rules.with_gradient_of(value, other)"
            )
        if not own and _versions(inputs) != before:
            raise MethodError(
                f"the rule {rule_name(rule)} changes an input of the {kind} in {self.where()} in place, so another "
                "model would be explained; write x.abs() in the place of x.abs_(), or change a clone(); a weight stays "
                "changed, so load the model anew if it was one"
            )
        return out

    def tapped(self, call: Call, proceed: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> Any:
        """The result of a call, ``proceed(args, kwargs)``, with the taps around it."""
        for tap in reversed(self._on_calls):
            proceed = _around_call(tap, call, proceed)
        return proceed(call.args, call.kwargs)

    def under(self, kind: str) -> None:
        """Note for the report that the call runs under the rule for a kind of operation, as it is."""
        if self.trace.ran is not None:
            self._rule = rule_name(getattr(self.recipe, kind))

    def call_it(self, rule: str) -> None:
        """What the report says of the call, unless a rule is applied in it."""
        self._rule = rule

    def counted(self, name: str, out: Any) -> Any:
        """``out``, with the operation called ``name`` that made it in the coverage report, if there is one."""
        if self.trace.ran is not None and not self.replaying and any_carries(out):
            before = name, self._rule, self.where()
            self.trace.ran[before] += 1
            for node, rule in self._renamed:
                if not node.choice.is_second:  # else the call's own row says what it did
                    node.choice.when_second(partial(self._rename, before, (name, rule, before[2])))
            self._renamed.clear()
        return out

    def may_be_renamed(self, node: Any, rule: str) -> None:
        """The call that made a node may turn out to have run under another rule: attention tells
        (:func:`_kernels.either`)."""
        if not self.replaying:
            self._renamed.append((node, rule))

    def _rename(self, before: tuple[str, str, str], after: tuple[str, str, str]) -> None:
        ran = self.trace.ran
        assert ran is not None
        ran[after] += 1
        ran[before] -= 1
        if not ran[before]:
            del ran[before]

    def added(self, constant: Any, operation: str, *beside: Any) -> Any:
        """A constant that is added to what ``beside`` gives: with a ledger open, one of its entries."""
        if self._on_constants and any(map(carries, beside)):
            for tap in self._on_constants:
                constant = tap.added(constant, operation)
            return constant
        return constants(constant)

    def meet_unseen(self) -> None:
        """Nodes of the graph were made that no handler has made."""
        if self.replaying:
            self.nodes.last = newest()
            return
        if self.active:  # from here on, what is given to a torch function may be made by one of ELEMENT_WISE
            self.has_unseen, self.is_usual = True, False
        self.nodes.skip(self.where() if self.active else OUTSIDE)

    def meet_hooks(self) -> None:
        """What the graph saves is given to hooks: perhaps a part of the model runs in a checkpoint of its own, and will
        again in the backward pass.

        Raises:
            MethodError: another part does so under other rules.
        """
        self.has_hooks = True
        if self.replaying or not self._in_checkpoint():
            return
        compare_numbers(hooks_of_saved(False)[0])
        recipe = next((around for around, began_inside in self._outer if began_inside), self.recipe)
        if self._replayed is not None and recipe is not self._replayed:
            raise MethodError(
                f"{self.where()} is in a checkpoint of torch.utils.checkpoint under other rules than an earlier one, "
                "and nothing tells them apart when they run again; switch the checkpoints off, and use "
                "lrpx.propagate(model, recipe, recompute=True)"
            )
        self._replayed = recipe
        self.in_last_layer = False  # nothing tells that it is when the part runs again
        if self.replays is not None:
            self.replays(recipe)

    @staticmethod
    def _in_checkpoint() -> bool:
        hooks = hooks_of_saved(False)
        return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"

    def is_ours(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether a torch function is called on what was computed from the model's outputs."""
        if not is_grad_enabled() or func.__name__ in ("grad", "backward"):
            return False
        if func.__name__ == "__get__" and func.__self__.__name__ not in TRANSPOSES:
            return False
        return _any_own(args, self.nodes) or _any_own(kwargs.values(), self.nodes)

    def without_foreign(
        self, name: str, row: Operation | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call; detached, as parameters are, what requires a gradient and does not come from this
        run, and what is a constant since it was changed in place. Not so the leaves of taps, a table that is looked up
        in, and what is changed in place."""
        if row is not None and row.kind == "source":
            return args, kwargs
        own = {id(source.value) for source in self.trace.sources}
        own.update(id(leaf) for tap in self.taps if not isinstance(tap, Observer) for leaf in tap.leaves())
        given = tuple(self._own(value, own) for value in args)
        if is_in_place(name) or name == "__set__":
            given = (*args[:1], *given[1:])
        return given, {key: self._own(value, own) for key, value in kwargs.items()}

    def _own(self, value: Any, own: set[int]) -> Any:
        """A value without what is foreign or a constant; ``own``: the leaves, by their ``id``."""
        if type(value) is tuple or type(value) is list:
            return type(value)(self._own(each, own) for each in value)
        if self.is_constant(value):
            constant = value.detach()
            setattr(constant, FROM_INPUT, vars(value).get(FROM_INPUT, True))
            return constant
        if type(value) is not Tensor or not has_foreign((value,), self.nodes.first) or id(value) in own:
            return value
        return value if descends(value.grad_fn, own) else value.detach()

    def note_constant(self, x: Tensor, value: Tensor) -> None:
        """Note that ``x``, which autograd takes for a result, was changed in place into a constant, ``value``."""
        setattr(x, CONSTANT, x._version)
        setattr(x, FROM_INPUT, vars(value).get(FROM_INPUT, True))
        self.has_constants, self.is_usual = True, False

    def is_constant(self, x: Any) -> bool:
        """Whether ``x`` is such a constant still."""
        return self.has_constants and type(x) is Tensor and vars(x).get(CONSTANT) == x._version

    def written_out(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """A call that writes its result into a tensor it is given, ``out=``, which must be made of constants.

        Raises:
            UnknownOperationError: it is made of what depends on the input, which autograd does not follow.
        """
        if any_carries((*args, *kwargs.values())):
            raise UnknownOperationError(
                f"{self.where()} calls torch's {name!r} with out=, which autograd cannot follow where something "
                "depends on the input; give the result a name instead"
            )
        return func(*constants(args), **constants(kwargs))

    def refuse(self, name: str) -> None:
        """Under a strict recipe, refuse the operation called ``name``, if the explained value depends on it: the walk
        of the graph before the backward pass raises UnknownOperationError, which names the operation, the module that
        calls it, and the mend."""
        self._rule = "unknown"
        if self.recipe.strict and not self.replaying:
            is_loss = name.endswith("loss") or "cross_entropy" in name or name == "kl_div"
            mend = "compute it after the block, trace.explain(loss, outputs=logits), or " * is_loss
            self.nodes.refuse(
                f"{self.where()} calls torch's {name!r}, which is neither known to be linear nor has a rule; "
                f"{mend}use a recipe with strict=False to take its plain gradient"
            )

    def refused_constant(self, name: str, value: Tensor) -> Tensor:
        """``value``, which a rule has made a constant though it should be none: refused by a strict recipe, if the
        explained value is made of it. That it is nothing would tell; so it is as if it were made of a source."""
        if not self.recipe.strict or not self.sources:
            return value
        self.refuse(name)
        of = self.sources[0].value.flatten()[:1].sum().to(value.dtype)
        return rules.with_gradient_of(value, of.expand(value.shape))

    def refuse_gradients(self, name: str, given: Any) -> None:
        """Refuse a gradient that the model itself takes of what depends on its input: it would be the rules'.

        Raises:
            UnknownOperationError: the recipe has rules.
        """
        if not self.replaying and any_carries(given) and self.recipe.has_rules():
            raise UnknownOperationError(
                f"{self.where()} takes a gradient itself, with torch's {name!r}, which under rules would be another "
                "number; use a recipe without rules, lrpx.GRADIENT"
            )

    @staticmethod
    def refuse_transform() -> None:
        """Refuse a call of the model inside a transform of ``torch.func``.

        Raises:
            MethodError: it is inside one.
        """
        if peek_interpreter_stack() is not None:
            raise MethodError(
                "the model is called inside a transform of torch.func, such as vmap, where nothing tells what depends "
                "on the input; call it with a batch"
            )

    def transformed(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """A call inside a transform of ``torch.func``, where no tensor tells that it depends on the model's input, and
        so no rule can be applied; refused, if its result does."""
        out = func(*transformed_constants(constants(args)), **transformed_constants(constants(kwargs)))
        if _hides_what_carries(out) or any_carries(out):
            called = f"{name} inside a transform of torch.func, such as vmap"
            self.refuse(called)
            if self.trace.ran is not None and not self.replaying:
                self.trace.ran[called, self._rule, self.where()] += 1
        return out

    def refuse_rule(self, kind: str, name: str, why: str, mend: str = "") -> MethodError:
        """The error of a rule that cannot be applied to the operation called ``name``.

        Args:
            kind: the kind of operation that the rule is for.
            name: the torch function.
            why: what is in the way.
            mend: what else than another rule would help.
        """
        rule = rule_name(getattr(self.recipe, kind))
        return MethodError(
            f"{self.where()} calls torch's {name!r}, {why}, so the rule {kind}={rule} cannot be applied to it; "
            f"{mend}give this module another with recipe.at(path, {kind}=lrpx.rules.unmodified)"
        )

    def refuse_part_of_norm(self, name: str, kind: Literal["product", "activation"] = "product") -> None:
        """Refuse a part of a norm that is written out, where norms shall have their plain gradient and this one would
        not: an inverse, whose product with another is shared, or a variance, whose squares have half their gradient.

        Args:
            name: the torch function.
            kind: the kind of operation whose rule it would meet.

        Raises:
            MethodError: says so.
        """
        rule = getattr(self.recipe, kind)
        if self.recipe.norm is rules.unmodified and rule is not rules.unmodified:
            raise MethodError(
                f"{self.where()} calls torch's {name!r}, a part of a norm that is written out, which meets the rule "
                f"{kind}={rule_name(rule)}, so norm=unmodified would be no plain gradient there; take norm=constant, "
                f"or recipe.at(path, {kind}=lrpx.rules.unmodified) for this module"
            )

    # ------------------------------------------------------------- constants, and what they are

    def is_weight(self, constant: Any) -> bool:
        """Whether a constant is a weight: it was not made of the model's input, as attention weights are under a rule
        that makes them constants."""
        return isinstance(constant, Tensor) and not hasattr(constant, FROM_INPUT)

    def mark_from_input(self, out: Any, made_of: Any, name: str) -> None:
        """Mark the constants among the results of a call that were made of what depends on the input; not what was
        chosen of a weight, as the weights of an expert are by a router."""
        if name in LIKE_ANOTHER:
            made_of = made_of[:1]
        made = (made_of[0],) if name == "__setitem__" else out if isinstance(out, (tuple, list)) else (out,)
        if name == "broadcast_tensors":  # each is made of its own
            made_of = made_of[0] if isinstance(made_of[0], (tuple, list)) else made_of
            made = [one for one, of in zip(made, made_of, strict=True) if _is_from_input(of)]
        found = [value for value in made if isinstance(value, Tensor) and not value.requires_grad]
        if found and _is_from_input(made_of) and not (name in CHOOSING and self._is_chosen_of_weight(out, made_of[0])):
            mark = self.asks_for_places and _roles.mark_among(made_of)
            for value in found:
                if any(value is each for each in made_of):  # changed in place: it may be there after the run
                    self._marked.append(value)
                setattr(value, FROM_INPUT, mark or getattr(value, FROM_INPUT, True))

    def _is_chosen_of_weight(self, out: Tensor, table: Any) -> bool:
        """Whether numbers were chosen of a weight; vectors that are one-hot, or rows of a mask, are none."""
        is_mask = out.ndim < 3 and bool(((out == 0) | (out == 1)).all())
        return self.is_weight(table) and table.is_floating_point() and not is_mask

    def mark_input(self, value: Any, name: str) -> None:
        """Mark an argument of the model that carries no relevance, such as a mask, or the ids of tokens."""
        if isinstance(value, Tensor) and not value.is_floating_point():
            self._give(value, not any(word in name for word in NO_TOKENS))
        if isinstance(value, Tensor) and self.positions is not None:
            self.positions.given(name, value)
        if self.asks_for_weights and isinstance(value, Tensor) and not value.requires_grad:
            self._marked.append(value)  # before it is, for an interrupt may fall between
            setattr(value, FROM_INPUT, True)

    def is_all_of_parameter(self, value: Tensor) -> bool:
        """Whether a tensor has all the numbers of a parameter of the model, perhaps in another shape, and repeated."""
        count = prod(size for size, step in zip(value.shape, value.stride(), strict=True) if step)
        return any(each.data_ptr() == value.data_ptr() and each.numel() == count for _, each in self._parameters())

    def is_foreign(self, value: Tensor) -> bool:
        """Whether a tensor was there before the run."""
        return has_foreign((value,), self.nodes.first)

    @property
    def sources(self) -> Sequence[Source]:
        """Where relevance ends, as far as the model has come."""
        return self.trace.sources

    def is_lookup(self, ids: Any) -> bool:
        """Whether what is indexed with these is looked up for the model's input: an integer argument of the model, or
        the first indices there are in a model without another source."""
        if not is_tensor(ids) or ids.is_floating_point() or ids.dtype is torch.bool:
            return False
        return not self.trace.sources or id(whole_of(ids)) in self._given

    def is_given(self, ids: Any) -> bool:
        """Whether these are ids of tokens that the model was given, in whatever shape."""
        if not is_tensor(ids):
            return False
        known = self._given.get(id(whole_of(ids)))
        return known is not None and known[1]

    def copied_ids(self, copy: Tensor, ids: Tensor) -> None:
        """A copy of ids that the model was given is as good as they are."""
        known = self._given.get(id(whole_of(ids)))
        if known is not None and copy is not ids:
            self._give(copy, known[1])

    def computed(self, out: Any, *made_of: Any) -> Any:
        """``out``, a constant; whole numbers that were computed from ids of tokens are such ids too, and what was
        computed from a normaliser is one."""
        if not is_tensor(out):
            return out
        if out.is_floating_point():
            if not out._version and any(map(_divisors.is_normaliser, made_of)):  # new, and no buffer of the model's
                _divisors.normaliser(out, like=made_of)
        elif not (out.is_complex() or out.dtype is torch.bool):
            given = [each for value in made_of for each in (value if isinstance(value, (tuple, list)) else (value,))]
            if any(map(self.is_given, given)):
                self._give(out, is_tokens=True)
        return out

    def added_by_ids(self, out: Any, *given: Any) -> Any:
        """``out``; a constant that was added up in the places that ids tell, as how many edges the nodes of a graph
        have, is no table that tokens are looked up in, and nor is what is computed from it."""
        if is_tensor(out) and not out.requires_grad and any(map(self.is_given, given)):
            self._add_by_ids(out)
        return out

    def keep_by_ids(self, out: Any, given: Any) -> None:
        """Note that ``out`` was made of ``given``, if that was added up by ids."""
        if is_tensor(out) and not out.requires_grad and self.is_by_ids(given):
            self._add_by_ids(out)

    def _add_by_ids(self, value: Tensor) -> None:
        base = whole_of(value)
        self.by_ids[id(base)] = base  # held, so that its number is no other's
        self.is_usual = False  # from here on, what is made of it must be known

    def is_by_ids(self, value: Any) -> bool:
        """Whether a constant, or one in a list, was added up in the places that ids tell, or was computed from such."""
        if isinstance(value, (tuple, list)):
            return any(map(self.is_by_ids, value))
        return is_tensor(value) and id(whole_of(value)) in self.by_ids

    def leaving_ids(self, how: str, *values: Any) -> None:
        """Note a call that takes ids of tokens to where nothing follows them: to Python, to numpy, to other numbers."""
        notes = self.trace.notes
        given = None if notes.left else next(filter(self.is_given, values), None)
        if given is not None:
            said = f"{self.where()} takes ids of tokens by {how!r} to numbers"
            notes.left = said, whole_of(given)

    def listed_ids(self, numbers: list[int], *, is_first: bool) -> Tensor | None:
        """A list of whole numbers, as a tensor, if what is indexed with them is looked up for the model's input: they
        are the ids of tokens that it was given, or ``is_first``, the first indices there are."""
        ids = torch.tensor(numbers)
        if any(is_tokens and is_among(numbers, each) for each, is_tokens in self._given.values()):
            self._give(ids, is_tokens=True)
            return ids
        return ids if is_first else None

    def _give(self, ids: Tensor, is_tokens: bool) -> None:
        base = whole_of(ids)
        self._given[id(base)] = base, is_tokens  # held, so that its number is no other's

    def source(self, weight: Tensor, ids: Tensor, out: Tensor, name: str = "an embedding") -> Tensor:
        """Make the output of an embedding a leaf of the graph, and record it; by a name if no module or parameter of
        the model holds the weight."""
        leaf = out.detach().requires_grad_()
        if not self.replaying:
            # looked for now, not when the block begins: an offloaded weight is another object in each call
            holders = tuple(
                path for path, e in self._embeddings if any(weight is p for p in e.parameters(recurse=False))
            )
            if not holders:
                holders = tuple(name for name, parameter in self._parameters() if _is_same(weight, parameter))
            paths, is_given = holders or (name,), self.is_given(ids)
            is_of_tokens = is_given and place_of_tokens(paths[0], "tokens") == "tokens"
            self.trace.sources.append(Source(paths, leaf, ids, is_of_tokens))
            self.trace.notes.has_tokens |= is_given
        return leaf.clone()

    def where(self) -> str:
        """The path of the module whose forward pass is running, found on the call stack."""
        return next(self._running(), NOWHERE)

    def layer(self) -> Layer | None:
        """The layer whose forward pass is running, that of the outermost module: one inside may be shared by layers, as
        rotary embeddings are that each of them is given, and has one path alone, in a list of their own too. A layer
        may call the next, in the same list: then it is the innermost of these."""
        found = [(path, layer) for path in self._running() if (layer := layer_of(path)) is not None]
        if not found:
            return None
        outermost = found[-1][1]
        of_list = outermost.path.removesuffix(str(outermost.number))
        own = (layer for path, layer in found if path == layer.path == f"{of_list}{layer.number}")
        return next(own, outermost)

    def _running(self) -> Iterator[str]:
        """The paths of the modules whose forward passes are running, the innermost first."""
        paths = self._paths()
        frame = sys._getframe(1)  # reading the variables of its own frame would keep the whole stack alive
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, Module) and id(owner) in paths:
                yield paths[id(owner)] or type(owner).__name__
            frame = frame.f_back  # type: ignore[assignment]

    def is_in_module(self) -> bool:
        """Whether a module's forward pass is running."""
        return self.where() != NOWHERE


NOWHERE = "the model"
"""Where the run is when no module's forward pass is running."""
NO_TOKENS = ("position", "mask", "grid", "size", "length", "index", "indices")
"""What is in the name of an argument of whole numbers that are no tokens."""


def _is_same(weight: Tensor, parameter: Tensor) -> bool:
    """Whether a table is a parameter, or a view of one."""
    if weight is parameter:
        return True
    base = weight._base
    return base is not None and base.data_ptr() == parameter.data_ptr() and base.numel() == parameter.numel()


def _is_own(rule: Rule) -> bool:
    """Whether a rule is a user's own."""
    return getattr(_kinds.unwrapped(rule), "__module__", "").partition(".")[0] != "lrpx"


def _has_numbers() -> bool:
    """Whether the numbers of tensors can be looked at here: not in what is compiled, or in a transform of functions."""
    return not is_in_torch_dispatch_mode() and peek_interpreter_stack() is None


def _versions(inputs: Sequence[Any]) -> list[int]:
    """How often each tensor was changed in place."""
    return [x._version for x in inputs if is_tensor(x) and not x.is_inference()]


def _told(value: Any) -> str:
    """A value as an error tells of it."""
    kind = str(value.dtype).removeprefix("torch.") if is_tensor(value) else type(value).__name__
    return f"{kind} {list(value.shape)}" if is_tensor(value) else kind


def _is_nearly(out: Any, value: Tensor) -> bool:
    """Whether two values are the same but for rounding: half the digits, of what is largest; so are NaN and infinity
    where both have them."""
    if not is_tensor(out) or (out.shape, out.dtype) != (value.shape, value.dtype):
        return False
    if value.layout is not torch.strided or not value.numel() or not (value.is_floating_point() or value.is_complex()):
        return True
    out, sizes = out.detach(), value.abs().nan_to_num(0.0, 0.0)
    return torch.allclose(
        out, value, rtol=0.0, atol=float(sizes.max()) * torch.finfo(value.dtype).eps ** 0.5, equal_nan=True
    )


def _around_call(tap: Tap, call: Call, proceed: Callable[..., Any]) -> Callable[..., Any]:
    return lambda args, kwargs: tap.around(Call(call.name, call.operation, args, kwargs), proceed)


def _around_rule(
    tap: Tap, kind: str, rule: Rule, op: Callable[..., Any], proceed: Callable[..., Any]
) -> Callable[..., Any]:
    return lambda *inputs: tap.rule(kind, rule, op, inputs, proceed)


ROOTS = 2
"""How many tensors that functions were made of are kept: those of one line of a model, ``sigmoid(relu(layer(x)))``, and
of another beside it."""

CONSTANT = "_lrpx_written_constant"
"""The attribute of a tensor that was changed in place into a constant: its version then."""

CHOOSING = frozenset("__getitem__ index_select gather take_along_dim".split())
"""Functions whose result has nothing but numbers of their first argument."""


def _is_from_input(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_is_from_input, value))
    return is_tensor(value) and (any_carries(value) or hasattr(value, FROM_INPUT))


def _any_own(values: Any, nodes: Nodes) -> bool:
    """Whether one of these arguments was computed by the run."""
    for value in values:
        if isinstance(value, (tuple, list)):
            if _any_own(value, nodes):
                return True
        elif is_tensor(value) and value.grad_fn is not None and nodes.is_own(value.grad_fn):
            return True
    return False


def _hides_what_carries(value: Any) -> bool:
    """Whether a value, or one in a list or tuple of values, is a wrapped tensor and depends on the input."""
    if isinstance(value, (tuple, list)):
        return any(map(_hides_what_carries, value))
    inner = unwrapped(value)
    return inner is not value and any_carries(inner)
