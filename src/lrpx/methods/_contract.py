"""What a method is, what it finds, and how it is known by a name.

A method is one file: a frozen dataclass that says what it needs and answers ``attribute(model, questions)``, registered
by the decorator :func:`register`. The explainer, the command line, the benchmarks and their reports then know it.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import Tensor

from lrpx._registry import Registry
from lrpx.errors import MethodError, NonFiniteError
from lrpx.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from lrpx.ledger import Ledger
    from lrpx.model import BoundModel
    from lrpx.parts import Part
    from lrpx.questions import Answers, Questions


@dataclass(frozen=True)
class Found:
    """What a method found for ``K`` questions.

    Args:
        answers: what the model says to them (:meth:`BoundModel.ask <lrpx.model.BoundModel.ask>`, or a pass's own).
        relevance: for each question ``[T]``: that of the tokens of its row, the segments one after another.
        parts: by name, for each question, other parts of the same value, such as heads ``[L, H, T]``.
        ledgers: for each question, where every unit of its value went, if that was asked for.

    Raises:
        MethodError: not one of each for every question.
    """

    answers: Answers
    relevance: tuple[Tensor, ...]
    parts: Mapping[str, tuple[Part, ...]] = field(default_factory=dict)
    ledgers: tuple[Ledger, ...] | None = None

    def __post_init__(self) -> None:
        count = len(self.answers.values)
        lists = {"relevance": self.relevance, **self.parts}
        lists |= {} if self.ledgers is None else {"ledgers": self.ledgers}
        for name, values in lists.items():
            if len(values) != count:
                raise MethodError(f"a method found {name} for {len(values)} of {count} questions; give one for each")


class Method(ABC):
    """From a model and questions to the relevance of every token.

    Write a frozen dataclass with these, and :func:`register` it. Of methods with the same :meth:`pass_key` one
    is asked for all (:meth:`together`), so that they can share what they compute.
    """

    name: str
    """How it is asked for, and how results call it."""
    label: str = ""
    """How tables spell it; the name, if it is empty."""
    tasks: ClassVar[frozenset[Task]] = frozenset(task for task in Task if task.segments and not task.pictures)
    """The tasks that it serves."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """The arguments that the model's forward pass must take, such as ``"attention_mask"``."""

    @abstractmethod
    def attribute(self, model: BoundModel, questions: Questions, *, ledger: bool = False) -> Found:
        """Explain each question.

        Args:
            model: the model.
            questions: what is asked.
            ledger: also tell where every unit of the explained values went. A bias has one relevance for all rows, so
                there is one row then.

        Raises:
            MethodError: it does not apply to the model, or has no ledger.
            NonFiniteError: NaN or infinity in the logits or the relevance.
        """

    @property
    def has_ledger(self) -> bool:
        """Whether it can tell where every unit of the value went."""
        return True

    def describe(self) -> str:
        """What it does, exactly: all that the numbers depend on beside the model and the question. Results keep it,
        and a benchmark goes on only with methods that describe themselves as they did."""
        return repr(self)

    def pass_key(self) -> Hashable:
        """Methods with equal keys can be asked together; by default a method is asked alone."""
        return id(self)

    def together(
        self, methods: Sequence[Any], model: BoundModel, questions: Questions, *, ledger: bool = False
    ) -> list[Found]:
        """What methods of one :meth:`pass_key` find, of which this is the first."""
        return [method.attribute(model, questions, ledger=ledger) for method in methods]

    def check(self, model: BoundModel) -> None:
        """Refuse a model that the method cannot serve, before anything runs.

        Raises:
            MethodError: says why.
        """
        kind = type(model.module).__name__
        if model.task not in self.tasks:
            served = ", ".join(task.title for task in Task if task in self.tasks)
            raise MethodError(
                f"{self.name} does not serve {kind}, {model.task.named}; it serves: {served}. Use attnlrp or lrp"
            )
        missing = sorted(each for each in self.needs if not model.accepts(each))
        if missing:
            raise MethodError(f"{self.name} needs a model that takes {missing[0]}, and {kind} does not; use attnlrp")


METHODS: Registry[Method] = Registry("method", MethodError, "lrpx.methods")
"""Every method by its name: ours, those of other packages (entry points ``lrpx.methods``), and yours."""

ALIASES = {"cp-lrp": "lrp"}
"""Other names of methods: LRP with attention weights as constants is called CP-LRP too."""

M = TypeVar("M")


def register(method: M) -> M:
    """Make a method known by its name: a decorator for its class, whose fields all have defaults; or call it with a
    method, for others of the same class. It gives back what it was given.

    Raises:
        MethodError: it is no method, or another one has its name.
    """
    made = method() if isinstance(method, type) else method
    if not isinstance(made, Method):
        raise MethodError(f"{method!r} is no method; derive it from lrpx.Method")
    if made.name in ALIASES:
        raise MethodError(
            f"{made.name!r} is another name of the method {ALIASES[made.name]!r}; give yours another name"
        )
    METHODS.add(made.name, made, sys._getframe(1).f_globals.get("__name__", ""))
    return method


def check_each_once(methods: Sequence[Method]) -> None:
    """Refuse no methods, and two of one name.

    Raises:
        MethodError: names them.
    """
    names = [method.name for method in methods]
    if not names or len(set(names)) < len(names):
        raise MethodError(f"the methods are {', '.join(names) or 'none'}; name one or more, each once")


def attribute_all(
    methods: Sequence[Method], model: BoundModel, questions: Questions, *, ledger: bool = False
) -> dict[str, Found]:
    """What each of some methods finds, by its name; those that can share a pass do.

    The first pass resolves the targets, so that all methods explain the same values even where two passes round a tie
    differently.

    Raises:
        MethodError: two methods have one name, or one finds another number of tokens than there are; or as the methods
            themselves do.
        NonFiniteError: NaN or infinity in the logits or the relevance.
        ModelError: as the methods themselves do.
    """
    if not methods:
        raise MethodError("there are no methods; pass at least one")
    if ledger and len(questions.rows) > 1:
        raise MethodError(f"a bias has one relevance for all {len(questions.rows)} rows; ask for a ledger row by row")
    name, times = Counter(method.name for method in methods).most_common(1)[0]
    if times > 1:
        raise MethodError(f"{times} methods are called {name!r}; give each a name of its own")
    groups: list[tuple[Hashable, list[Method]]] = []
    for method in methods:
        method.check(model)
        key = (type(method), method.pass_key())
        same = next((group for known, group in groups if known == key), None)
        if same is None:
            groups.append((key, [method]))
        else:
            same.append(method)
    found: dict[str, Found] = {}
    for _, group in groups:
        each = group[0].together(group, model, questions, ledger=ledger)
        for method, one in zip(group, each, strict=True):
            _check_relevance(method, one, questions)
            if ledger and one.ledgers is None:
                raise MethodError(
                    f"{method.name} found no ledgers, and says that it has them; set has_ledger = False in its class, "
                    "or leave ledger out"
                )
            found[method.name] = replace(one, relevance=tuple(of.detach() for of in one.relevance))
        questions = questions.with_targets(each[0].answers.targets)
    return {method.name: found[method.name] for method in methods}


def _check_relevance(method: Method, found: Found, questions: Questions) -> None:
    """Refuse relevance that is none: no floating-point tensor, of another length than the row, or not finite."""
    for i, relevance in enumerate(found.relevance):
        row = questions.row_of(i)
        count = sum(row.lengths)
        if not isinstance(relevance, Tensor) or not relevance.is_floating_point():
            told = str(relevance.dtype) if isinstance(relevance, Tensor) else type(relevance).__name__
            raise MethodError(
                f"{method.name} found relevance that is {told.removeprefix('torch.')}; give a floating-point tensor, a "
                f"number for each token of the row{row.where}"
            )
        if relevance.shape != (count,):
            raise MethodError(
                f"{method.name} found relevance of shape {list(relevance.shape)} for {count} tokens; give one number "
                f"for each token of the row{row.where}"
            )
        if not bool(relevance.isfinite().all()):
            raise NonFiniteError(
                f"the relevance of {method.name} is not finite; use another dtype, such as float32{row.where}"
            )
