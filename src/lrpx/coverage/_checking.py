"""What is checked of one class: does it run as it always does, is relevance finite, does the ledger close."""

from __future__ import annotations

import copy
import re
import time
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from lrpx.coverage import _tiny
from lrpx.coverage._classes import DATA
from lrpx.coverage._inputs import tiny_inputs
from lrpx.coverage._spelled import Spelled
from lrpx.engine import propagate
from lrpx.errors import ModelError
from lrpx.recipes import ATTNLRP, LRP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from lrpx.coverage._classes import ModelClass
    from lrpx.ledger import Ledger
    from lrpx.recipes import Recipe

TOLERANCE = 1e-6
"""What a ledger may miss, relative to the explained value and to its largest entry."""
LOGITS = ("logits", "start_logits", "last_hidden_state")
"""What an output calls what its model predicts, if it is not the first of its fields."""
TEXTS = ("causal-lm", "seq2seq-lm", "masked-lm", "sequence-classification", "token-classification")
"""Mappings whose logits are one row a position."""
LONGEST = 180
"""Characters of a reason."""
CHECKS = ("built", "ran", "identical", "finite", "lrp ledger", "attnlrp ledger")
"""In this order; ``ran``, ``identical`` and ``finite`` under both recipes in float32, the ledgers in float64."""


@dataclass(frozen=True)
class Checked:
    """What became of one class.

    Args:
        mapping: of the class.
        name: of the class.
        model_type: what its configuration is of.
        others: the other mappings that have it.
        passed: which of :data:`CHECKS` it passed.
        reasons: for each that it did not pass, why; a check that could not be made has the reason of the one before.
        parameters: how many numbers the tiny model has.
        difference: the largest difference of its outputs inside ``propagate`` to those outside, with gradients,
            without, or with frozen weights, in units of float32's epsilon times the largest output.
        twofold: whether the model's own outputs with gradients and without differ, for torch chooses kernels by that.
        missing: for each recipe, the part of the explained value that its ledger misses or leaves to rules that do
            not conserve, in float64.
        seconds: that it took.
    """

    mapping: str
    name: str
    model_type: str
    others: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)
    parameters: int = 0
    difference: float = 0.0
    twofold: bool = False
    missing: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        return asdict(self) | {"others": list(self.others), "passed": list(self.passed)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Checked:
        """The value that :meth:`to_dict` wrote."""
        return Checked(**values | {"others": tuple(values["others"]), "passed": tuple(values["passed"])})


def failed(model_class: ModelClass, reason: str, checks: tuple[str, ...] = CHECKS) -> Checked:
    """What became of a class of which nothing is known but that it failed."""
    return replace(_named(model_class), reasons=dict.fromkeys(checks, first_line(reason)))


def _named(model_class: ModelClass) -> Checked:
    return Checked(model_class.mapping, model_class.name, model_class.model_type, model_class.others)


def check(model_class: ModelClass) -> Checked:
    """Build a tiny random model of the class and make every check of it."""
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = _check(model_class)
    return replace(found, seconds=round(time.perf_counter() - start, 2))


def _check(model_class: ModelClass) -> Checked:
    try:
        model = _tiny.tiny_model(model_class)
        inputs = tiny_inputs(model_class, model)
        _tiny.let_batch_norms_learn(model, inputs)
        stock = _stock(model_class, model, inputs)
    except Exception as error:
        return failed(model_class, _reason(error))
    reasons: dict[str, str] = {}
    difference = 0.0
    for recipe in (ATTNLRP, LRP):
        try:
            run = _run(model_class, model, inputs, recipe)
        except Exception as error:
            reasons |= dict.fromkeys(CHECKS[1:4], _reason(error))
            break
        difference = max(difference, min(_difference(run.logits, expected) for expected in stock))
        if not all(bool(torch.isfinite(relevance).all()) for relevance in run.relevance):
            reasons["finite"] = f"{recipe.name}: relevance is not finite"
    if difference > 0:
        reasons["identical"] = f"differs by {difference:.1f} eps"
    missing = {}
    for recipe in (LRP, ATTNLRP):
        try:
            missing[recipe.name], reason = _ledger(model_class, model, inputs, recipe)
        except Exception as error:
            reason = _reason(error)
        if reason:
            reasons[f"{recipe.name} ledger"] = reason
    return replace(
        _named(model_class),
        passed=tuple(name for name in CHECKS if name not in reasons),
        reasons=reasons,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        difference=difference,
        twofold=not torch.equal(*stock[:2]),
        missing=missing,
    )


# ------------------------------------------------------------------------- runs


def _stock(model_class: ModelClass, model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """The model's own outputs, with gradients, without, and with frozen weights: torch chooses some kernels by that."""
    found = []
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients), _tiny.seeded():
            found.append(_logits(model_class, copy.deepcopy(model)(**inputs)).detach())
    wanted = {
        name: value.clone().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    with _tiny.seeded():
        frozen = copy.deepcopy(model).requires_grad_(False)
        found.append(_logits(model_class, frozen(**wanted)).detach())
    return found


def _logits(model_class: ModelClass, output: Any) -> Tensor:
    """The logits of an output, or the first real numbers in it."""
    named = output if hasattr(output, "keys") else {}
    names = (DATA["outputs"].get(model_class.model_type), *LOGITS)
    name = next((name for name in names if isinstance(named.get(name), Tensor)), None)
    found = named[name] if name else next(_floats(output), None)
    if found is None:
        raise ModelError(f"the model's output, of type {type(output).__name__}, holds no real number")
    logits: Tensor = found
    return logits


def _floats(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor) and output.is_floating_point():
        yield output
    elif hasattr(output, "values") and not isinstance(output, Tensor):
        output = list(output.values())
    if isinstance(output, (list, tuple)):
        for part in output:
            yield from _floats(part)


def _value(model_class: ModelClass, logits: Tensor) -> Tensor:
    """One entry of the first sample: the top logit at the last position of a text, at the middle of a masked one.

    Of what is neither, such as a picture or hidden states, the largest entry.
    """
    row = logits[0]
    if model_class.mapping == "question-answering":
        return row[len(row) // 2]
    if model_class.mapping in TEXTS and row.ndim == 2:
        row = row[len(row) // 2] if model_class.mapping in ("masked-lm", "token-classification") else row[-1]
    row = row.flatten()
    return row[row.argmax()]


@dataclass(frozen=True)
class _Run:
    """The logits of a run, the relevance of its sources, and its ledger if there was one."""

    logits: Tensor
    relevance: list[Tensor]
    ledger: Ledger | None


def _run(
    model_class: ModelClass,
    model: nn.Module,
    inputs: dict[str, Any],
    recipe: Recipe,
    ledger: bool = False,
    spelled: bool = False,
) -> _Run:
    """One explanation, by a copy of the model, for some models keep what they computed for the next time."""
    model = copy.deepcopy(model)
    with _tiny.seeded(), propagate(model, recipe, observe=(), ledger=ledger) as trace:
        with Spelled() if spelled else nullcontext():
            logits = _logits(model_class, model(**inputs))
        trace.explain(_value(model_class, logits))
    return _Run(
        logits.detach(),
        [trace.source_relevance(source) for source in trace.sources],
        trace.ledger() if ledger else None,
    )


def _ledger(model_class: ModelClass, model: nn.Module, inputs: dict[str, Any], recipe: Recipe) -> tuple[float, str]:
    """What the ledger misses in float64, and why it fails or ""."""
    precise = in_float64(model)
    wide = {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    with _everything_wide():
        plain = _run(model_class, precise, wide, recipe)
        run = _run(model_class, precise, wide, recipe, ledger=True)
        written_out = _run(model_class, precise, wide, recipe, spelled=True)
    assert run.ledger is not None
    missing, reason = judged(run.ledger, conserves=recipe is LRP)
    change = max(_change(a, b) for a, b in zip(run.relevance, plain.relevance, strict=True))
    reason = reason or ("" if change <= TOLERANCE else f"changes the relevance by {change:.1e}")
    change = max(_change(a, b) for a, b in zip(written_out.relevance, plain.relevance, strict=True))
    return missing, reason or ("" if change <= TOLERANCE else f"activations written out change it by {change:.1e}")


def in_float64(model: nn.Module) -> Any:
    """A copy in float64. Mixtures of experts run in their eager implementation, for the others' kernels have none."""
    precise: Any = copy.deepcopy(model).double()
    for held in _in_lists(precise):
        held.double()
    if hasattr(precise, "set_experts_implementation"):
        precise.set_experts_implementation("eager")
    return precise


def _in_lists(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that others hold in plain lists, so that ``double()`` does not reach them (OneFormer has some)."""
    lists = (value for module in model.modules() for value in vars(module).values() if isinstance(value, (list, tuple)))
    yield from (held for values in lists for held in values if isinstance(held, Module))


@contextmanager
def _everything_wide() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Wide():
            yield
    finally:
        torch.set_default_dtype(before)


class _Wide(TorchFunctionMode):
    """What a model casts to float32 (its norms, its softmax) stays in float64: a ledger shall show no rounding."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            return args[0].double()
        widened = {name: _widened(value) for name, value in (kwargs or {}).items()}
        return func(*map(_widened, args), **widened)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


# --------------------------------------------------------------------- judgements


def _difference(a: Tensor, b: Tensor) -> float:
    """0 where two outputs are the same bit for bit."""
    if torch.equal(a, b):
        return 0.0
    scale = float(b.abs().max()) * torch.finfo(b.dtype).eps
    return max(float((a - b).abs().max()) / scale, torch.finfo(b.dtype).tiny)


def _change(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    scale = float(b.abs().max()) if b.numel() else 0.0
    return float((a - b).abs().max()) / scale if scale else float((a - b).abs().sum())


def judged(ledger: Ledger, conserves: bool) -> tuple[float, str]:
    """What a ledger misses, relative to its scale, and why it fails or "".

    Args:
        ledger: of a run in float64.
        conserves: whether the recipe's rules should leave no residue.
    """
    missing = abs(ledger.difference) / ledger.scale
    if not missing <= TOLERANCE:
        return missing, f"misses {missing:.1e} of the explained value"
    residues = [entry for entry in ledger.entries if entry.kind.endswith("residue")]
    residue = sum(abs(entry.value) for entry in residues) / ledger.scale
    if conserves and not residue <= TOLERANCE:
        worst = max(residues, key=lambda entry: abs(entry.value))
        return max(missing, residue), f"leaves {residue:.1e} as residue, most in {worst.name}"
    return missing, ""


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(str(error))}"


def first_line(text: str) -> str:
    """The first sentence of the first line that says anything, and of the next if that ends with a colon."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    sentence = re.split(r"(?<=\w{2})[.;] ", line)[0]  # "e.g." does not end so
    return sentence if len(sentence) <= LONGEST else sentence[: LONGEST - 1] + "…"
