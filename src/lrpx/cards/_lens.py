"""What a neuron writes: its row of the MLP's second matrix, read as if it stood before the head (Geva et al. 2022).

``logits(w) = U (γ ⊙ w)``, with the scale ``γ`` of the final norm, and ``w − mean(w)`` for ``w`` where that norm takes
the mean off, as LayerNorm does. The norm's deviation, which depends on the text, scales all of them alike and is left
out, as are the biases, which are no neuron's. Where a norm stands between the MLP and the residual stream, as in
Gemma 3, its scale comes first. Constants that a model multiplies by on the way, as Granite and Cohere do, come in; a
soft cap of the logits, as Gemma 2 has, is left out.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from lrpx import tasks
from lrpx._hooks import hooks
from lrpx._modules import attending_as_before, layer_of, layers, named_modules
from lrpx.engine import Tap, propagate
from lrpx.errors import MethodError, ModelError
from lrpx.recipes import GRADIENT
from lrpx.units import places
from lrpx.units._place import is_in

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.nn import Module

    from lrpx.engine._places import Side
    from lrpx.model import BoundModel
    from lrpx.units import Kind, Place

PROBE: Final = 1000.0
"""The size of what norms are tried with, so that their ε is nothing beside it."""


@dataclass(frozen=True)
class Scale:
    """What a norm does to a direction, its deviation aside.

    Args:
        weight: ``[d]``, the scale.
        centred: whether the mean is taken off.
    """

    weight: Tensor
    centred: bool

    def __call__(self, w: Tensor) -> Tensor:
        """``γ ⊙ w`` or ``γ ⊙ (w − mean w)``, over the last dimension."""
        return self.weight * (w - w.mean(-1, keepdim=True) if self.centred else w)


@dataclass(frozen=True)
class Lens:
    """Reads directions of the residual stream as tokens.

    Args:
        unembedding: ``[V, d]``, the head's matrix.
        final: the norm before the head.
        branch: for the path of an MLP's second matrix, the norm between it and the residual stream.
        gains: for such a path, what the model multiplies by before it adds to the stream: one number, or ``[d]``.
        gain: what it multiplies by behind the head.
    """

    unembedding: Tensor
    final: Scale
    branch: dict[str, Scale] = field(default_factory=dict)
    gains: dict[str, Tensor] = field(default_factory=dict)
    gain: float = 1.0

    @classmethod
    def of(cls, model: BoundModel, places: Sequence[Place] = ()) -> Lens:
        """The lens of a model, for units at some places.

        Raises:
            ModelError: it has no head over a vocabulary, or something else than a norm before it.
        """
        name = type(model.module).__name__
        head: Any = getattr(model.module, "get_output_embeddings", lambda: None)()
        if head is None or model.task.logits != "tokens":
            raise ModelError(f"{name} has no head over a vocabulary to read neurons with; use a language model")
        modules = dict(named_modules(model.module))
        path = next((path for path, module in modules.items() if module is head), "")
        seen = _Seen(modules, path, [place.path for place in places])
        weight = tasks.first_weight(model.module)
        ids = torch.arange(3, device=tasks.input_device(model.module))[None] % weight.shape[0]
        with attending_as_before(model.module), propagate(model.module, GRADIENT, (), taps=[seen]), torch.no_grad():
            model.module(input_ids=ids)
        before = next((norm for norm, value in seen.gave.items() if _is_same(value, seen.head)), None)
        if before is None or not any(_is_same(seen.took[before], value) for value in seen.layers.values()):
            raise ModelError(
                f"before the head of {name} stands more than a norm of the residual stream, so nobody knows what a "
                "neuron's row does to a token there; use a model whose head reads the stream"
            )
        norms = {
            place: norm
            for place, made in seen.made.items()
            for norm, value in seen.took.items()
            if _is_same(made, value)
        }
        device = head.weight.device
        branch = {place: _scale(modules[norm], norm, device) for place, norm in norms.items()}
        last = {place: norms.get(place, place) for place in seen.made}
        gains, gain = _gains(model.module, path, last, ids)
        return cls(head.weight.detach().float(), _scale(modules[before], before, device), branch, gains, gain)

    def directions(self, module: Module, path: str) -> Tensor:
        """``[n, d]`` float32: what each of the ``n`` inputs of a linear layer writes, as the head would read it.

        Raises:
            ModelError: the layer keeps its matrix in no way known.
        """
        if isinstance(module, torch.nn.Linear):
            rows = module.weight.detach().T
        elif type(module).__name__ == "Conv1D":  # of transformers
            rows = module.weight.detach()  # type: ignore[operator]
        else:
            raise ModelError(
                f"{path} is {type(module).__name__}, and not a linear layer of one matrix whose rows could be read; "
                "merge an adapter into the weights first"
            )
        found = rows.float()
        if path in self.branch:
            found = self.branch[path](found)
        if path in self.gains:
            found = self.gains[path] * found
        return self.gain * self.final(found)

    def logits(self, directions: Tensor) -> Tensor:
        """``[…, V]``, from ``[…, d]``."""
        return directions @ self.unembedding.T

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        """The mean and the covariance of the tokens' rows of the head."""
        mean = self.unembedding.mean(0)
        centred = self.unembedding - mean
        return mean, centred.T @ centred / len(centred)

    def scores(self, directions: Tensor, token: int) -> Tensor:
        """``[n]``: the logit of one token for each direction ``[n, d]``, standardised over the direction's own logits:
        how many standard deviations it lies above their mean. No more is computed than this token needs."""
        mean, covariance = self._moments
        spread = ((directions @ covariance) * directions).sum(-1).clamp(min=0).sqrt()
        return (directions @ (self.unembedding[token] - mean)) / spread.clamp(min=torch.finfo(spread.dtype).tiny)


class _Seen(Tap):
    """Keeps what norms, layers, the head and the second matrices take and give, in one short run."""

    patterns = ("*",)

    def __init__(self, modules: dict[str, Module], head: str, made: Sequence[str]) -> None:
        self._norms = {path for path, module in modules.items() if _is_norm(module)}
        self._head, self._made, self._layers = head, set(made), set(layers(modules))
        self.gave: dict[str, Tensor] = {}
        self.took: dict[str, Tensor] = {}
        self.made: dict[str, Tensor] = {}
        self.layers: dict[str, Tensor] = {}
        self.head = torch.empty(0)

    def module(self, path: str, side: Side, value: Tensor) -> None:
        if path in self._norms:
            (self.took if side == "input" else self.gave)[path] = value
        elif path == self._head and side == "input":
            self.head = value
        elif side == "output" and path in self._made:
            self.made[path] = value
        elif side == "output" and path in self._layers:
            self.layers[path] = value


def _gains(module: Module, head: str, last: Mapping[str, str], ids: Tensor) -> tuple[dict[str, Tensor], float]:
    """What a model multiplies by, for each of some second matrices between it and the output of its layer, and behind
    the head: the gradients there, as far as they are the same at all tokens; of the head at logits of 0, where a soft
    cap changes nothing.

    Args:
        module: the model.
        head: its head's path.
        last: for each second matrix, itself or the norm behind it.
        ids: a text.
    """
    modules = dict(named_modules(module))
    given: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}

    def leaf(path: str, of: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
        def hook(_: Module, args: object, value: Tensor) -> Tensor:
            given[path] = of(value.detach()).requires_grad_()
            return given[path].clone()  # which the model may write to

        return hook

    def layer(of: Sequence[str]) -> Callable[..., Any]:
        def hook(_: Module, args: object, output: Any) -> Any:
            value = output if isinstance(output, Tensor) else output[0]
            for place in of:
                if last[place] in given and value.requires_grad:
                    gradient = _gradient(value, given[last[place]])
                    if gradient is not None and gradient.isclose(gradient[:, :1], rtol=1e-3).all():
                        found[place] = gradient[0, 0].float()
            value = value.detach()
            return value if isinstance(output, Tensor) else (value, *output[1:])

        return hook

    inside: dict[str, list[str]] = {}
    for place in last:
        if (around := layer_of(place)) is not None:
            inside.setdefault(around.path, []).append(place)
    known = _branches(module) if last else []
    others = [path for path in known if not any(is_in(each, path) for each in last)]
    with hooks() as on, attending_as_before(module), torch.inference_mode(mode=False), torch.enable_grad():
        for path in dict.fromkeys([*last.values(), *others]):
            on.after(modules[path], leaf(path, torch.clone))
        for path, of in inside.items():
            on.after(modules[path], layer(of))
        on.after(modules[head], leaf(head, torch.zeros_like))
        made = module(input_ids=ids)
        gradient = _gradient(made if isinstance(made, Tensor) else made[0], given[head])
    return found, 1.0 if gradient is None else float(gradient.float().median())


def _branches(module: Module) -> list[str]:
    """What a layer adds to its stream: were it no leaf, what it makes of a branch before it would be in its gain."""
    found: list[str] = []
    kinds: tuple[Kind, ...] = ("neurons", "attention")
    for kind in kinds:
        with suppress(MethodError):
            found += [place.path for place in places(module, kind)]
    return found


def _gradient(value: Tensor, leaf: Tensor) -> Tensor | None:
    """Of a tensor's sum."""
    return torch.autograd.grad(value.sum(), leaf, allow_unused=True)[0] if value.requires_grad else None


def _is_norm(module: Module) -> bool:
    """Of one scale, or of none, as OLMo's, which says what it normalises all the same."""
    weight = getattr(module, "weight", None)
    if weight is None:
        return not module._modules and len(getattr(module, "normalized_shape", ())) == 1
    return not module._modules and isinstance(weight, Tensor) and weight.ndim == 1


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.numel() > 0 and one.shape == other.shape and one.data_ptr() == other.data_ptr()


def _scale(norm: Module, path: str, device: torch.device) -> Scale:
    """The scale of a norm, of ones where it has none, and whether it takes the mean off, as trying it out shows.

    Raises:
        ModelError: it does something else.
    """
    known: Any = getattr(norm, "weight", None)
    shape: Any = getattr(norm, "normalized_shape", ())
    weight: Tensor = torch.ones(shape, device=device) if known is None else known.detach()
    size = len(weight)
    probe = torch.tensor([1.0, -1.0]).repeat(size // 2 + 1)[:size]
    if size % 2 and size > 2:
        probe[-3:] = torch.tensor([1.0, 1.0, -2.0])  # the mean is zero
    x = (PROBE * probe).to(weight)
    with torch.no_grad():
        plus, minus, moved = (norm(each).float() for each in (x, -x, x + PROBE))
    wide, x = weight.float(), x.float()
    gain = (plus - minus) / (2 * x) * x.square().mean().sqrt()
    lost = 16 * max(torch.finfo(weight.dtype).eps, torch.finfo(torch.float32).eps) ** 0.75
    tiny = torch.finfo(torch.float32).tiny  # each feature by its own size: bfloat16 cannot tell 400 from 401
    near = min((wide, 1 + wide), key=lambda each: float(((gain - each).abs() / gain.abs().clamp(min=tiny)).median()))
    if bool(((gain - near).abs() <= lost * near.abs().max()).all()):
        turned = (moved - plus).abs() / (plus - minus).abs().clamp(min=tiny)  # without a mean 0.2 or 0.5, else 0
        return Scale(near, bool(turned.median() < 0.1))
    raise ModelError(
        f"{path} is {type(norm).__name__}, and scales by neither w nor 1 + w; a neuron's row cannot be read"
    )
