"""Recurrent layers and cells, written out as the layers, gates and products that they are.

The value is the kernel's own; each part has the rule of its kind, so that under CP-LRP the signal takes all of what a
gate multiplies (Arras et al. 2017, Explaining recurrent neural network predictions in sentiment analysis).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lrpx import rules
from lrpx.engine import _roles
from lrpx.engine._elementwise import activation, homogeneous, product
from lrpx.engine._gates import keep_gate, move_gate
from lrpx.engine._layers import linear
from lrpx.engine._operation import Operation
from lrpx.engine._tensors import any_carries, carries, constants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lrpx.engine._run import Run

    State = tuple[Tensor, ...]
    Cell = Callable[[Run, Tensor, State, Sequence[Tensor | None]], State]

# ------------------------------------------------------------------------------- one step
#
# A cell makes the next state of ``inputs``, what the layer makes of the input, the state and the weights
# ``(input, hidden, bias of the input, bias of the hidden state, projection)``. The first of a state is what is put out.


def _lstm_cell(run: Run, inputs: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
    """``c' = f c + i g``, ``h' = o tanh(c')``."""
    h, c = state
    into, forget, signal, out = _sum(run, inputs, _hidden(run, h, weights)).chunk(4, -1)
    new, kept = _multiplied(run, _gate(run, into), _tanh(run, signal)), _multiplied(run, _gate(run, forget), c)
    c = _roles.mixes(_sum(run, kept, new))
    h = _roles.mixes(_multiplied(run, _gate(run, out), _tanh(run, c)))
    return h if weights[4] is None else linear(run, F.linear, (h, weights[4], None), {}), c


def _gru_cell(run: Run, inputs: Tensor, state: State, weights: Sequence[Tensor | None]) -> State:
    """``n = tanh(x + r h)``, ``h' = (1 − z) n + z h``."""
    (h,) = state
    (r, z, n), (hidden_r, hidden_z, hidden_n) = inputs.chunk(3, -1), _hidden(run, h, weights).chunk(3, -1)
    reset, update = _gate(run, _sum(run, r, hidden_r)), _gate(run, _sum(run, z, hidden_z))
    new = _tanh(run, _sum(run, n, _multiplied(run, reset, hidden_n)))
    rest = keep_gate(run.recipe, run.added(1.0, "gru", update) - update, update)
    return (_roles.mixes(_sum(run, _multiplied(run, rest, new), _multiplied(run, update, h))),)


def _simple_cell(
    run: Run, inputs: Tensor, state: State, weights: Sequence[Tensor | None], function: Callable[..., Tensor]
) -> State:
    """``h' = g(x + h)``."""
    return (_roles.mixes(function(run, _sum(run, inputs, _hidden(run, state[0], weights)))),)


def _hidden(run: Run, h: Tensor, weights: Sequence[Tensor | None]) -> Tensor:
    made: Tensor = linear(run, F.linear, (h, weights[1], weights[3]), {})
    return made


def _sum(run: Run, a: Tensor, b: Tensor) -> Tensor:
    total = run.added(a, "a recurrent layer", b) + run.added(b, "a recurrent layer", a)
    return _joined(run, total, a, b)


def _joined(run: Run, out: Tensor, *parts: Tensor) -> Tensor:
    """``out``, put together of parts, chosen of one or their sum: as much a gate as they are."""
    kept: Tensor = keep_gate(run.recipe, out, *parts)
    return kept


def _multiplied(run: Run, gate: Tensor, signal: Tensor) -> Tensor:
    made: Tensor = product(run, torch.mul, (gate, signal), {})
    return made


def _gate(run: Run, x: Tensor) -> Tensor:
    made: Tensor = activation(run, torch.sigmoid, (x,), {})
    return made


def _tanh(run: Run, x: Tensor) -> Tensor:
    made: Tensor = activation(run, torch.tanh, (x,), {})
    return made


def _relu(run: Run, x: Tensor) -> Tensor:
    made: Tensor = homogeneous(run, torch.relu, (x,), {})
    return made


# ------------------------------------------------------------------------- layers of steps


def _layers(run: Run, func: Any, args: Any, kwargs: Any, cell: Cell, states: int) -> Any:
    """A stack of layers, perhaps in both directions, over a padded or a packed batch; torch calls it by place."""
    args = constants(args)
    if kwargs or not any_carries(args):
        return func(*args, **constants(kwargs))
    packed = isinstance(args[3], (list, tuple))
    x, sizes, given, params, has_biases, number, dropout, training, both, *first = (
        args if packed else (args[0], None, *args[1:])
    )
    if training and dropout and number > 1:
        run.refuse(f"{func.__name__} with dropout (put the model into eval(), or")
        return func(*args)
    value = func(*_still(args))
    batch_first = bool(first and first[0])
    lengths = None if sizes is None else sizes.tolist()
    steps = x.transpose(0, 1) if batch_first else x
    initial = given if states > 1 else (given,)
    of_each, directions = len(params) // (number * (1 + both)), 1 + both
    finals: list[State] = []
    for layer in range(number):
        made = []
        for direction in range(directions):
            place = layer * directions + direction
            weights = _weights(params[place * of_each : (place + 1) * of_each], has_biases)
            inputs = linear(run, F.linear, (steps, weights[0], weights[2]), {})
            state = tuple(_joined(run, each[place], each) for each in initial)
            outputs, state = _steps(run, cell, inputs, state, weights, lengths, direction)
            made.append(outputs)
            finals.append(state)
        steps = _joined(run, torch.cat(made, -1), *made) if both else made[0]
    outputs = _joined(run, steps.transpose(0, 1), steps) if batch_first else steps
    last = (_joined(run, torch.stack(of), *of) for of in zip(*finals, strict=True))
    return tuple(_with_gradient(own, each) for own, each in zip(value, (outputs, *last), strict=True))


def _steps(
    run: Run,
    cell: Cell,
    inputs: Tensor,
    state: State,
    weights: Sequence[Tensor | None],
    sizes: Sequence[int] | None,
    backwards: bool | int,
) -> tuple[Tensor, State]:
    """One layer in one direction: what it puts out, as its inputs stand, and its last state."""
    pieces = inputs.unbind(0) if sizes is None else torch.split(inputs, list(sizes))
    initial, begun = state, 0
    made: list[Tensor] = []
    for piece in reversed(pieces) if backwards else pieces:
        # the sequences of a packed batch end one after another, and from the back they begin so
        now = len(piece)
        parts = [(slice(0, min(begun, now)), state), (slice(begun, now), initial)]
        new = [
            cell(run, piece[rows], tuple(_joined(run, each[rows], each) for each in of), weights)
            for rows, of in parts
            if _any(rows)
        ]
        running = tuple(_together(run, each) for each in zip(*new, strict=True))
        made.append(running[0])
        ended = [_joined(run, each[now:begun], each) for each in state] if begun > now else []
        state = tuple(_together(run, each) for each in zip(running, ended, strict=True)) if ended else running
        begun = max(begun, now)
    if backwards:
        made.reverse()
    return _joined(run, torch.stack(made) if sizes is None else torch.cat(made), *made), state


def _together(run: Run, parts: Sequence[Tensor]) -> Tensor:
    return _joined(run, torch.cat(list(parts)), *parts) if len(parts) > 1 else parts[0]


def _any(rows: slice) -> bool:
    return bool(rows.start < rows.stop)


def _weights(params: Sequence[Tensor], has_biases: bool) -> list[Tensor | None]:
    """``(input, hidden, bias of the input, bias of the hidden state, projection)``, None for what there is not."""
    weights: list[Tensor | None] = [*params[:2], *(params[2:4] if has_biases else (None, None))]
    rest = params[4:] if has_biases else params[2:]
    return [*weights, rest[0] if rest else None]


def _one_step(run: Run, func: Any, args: Any, kwargs: Any, cell: Cell, states: int) -> Any:
    """A cell: ``func(x, state, weight of the input, weight of the hidden state, their biases)``."""
    args = constants(args)
    if kwargs or not any_carries(args):
        return func(*args, **constants(kwargs))
    x, given, *params = args
    value = func(*_still(args))
    weights = [*params, *(None,) * (5 - len(params))]
    inputs = linear(run, F.linear, (x, weights[0], weights[2]), {})
    made = cell(run, inputs, tuple(given) if states > 1 else (given,), weights)
    if states == 1:
        return _with_gradient(value, made[0])
    return tuple(_with_gradient(own, each) for own, each in zip(value, made, strict=True))


def _still(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_still(each) for each in value]
    return value.detach() if isinstance(value, Tensor) else value


def _with_gradient(value: Tensor, made: Tensor) -> Tensor:
    return move_gate(rules.with_gradient_of(value, made), made) if carries(made) else value


def _rows() -> Iterator[Operation]:
    cells: dict[str, tuple[Cell, int]] = {
        "lstm": (_lstm_cell, 2),
        "gru": (_gru_cell, 1),
        "rnn_tanh": (partial(_simple_cell, function=_tanh), 1),
        "rnn_relu": (partial(_simple_cell, function=_relu), 1),
    }
    for name, (cell, states) in cells.items():
        yield Operation(name, (name,), partial(_layers, cell=cell, states=states), "product")
        yield Operation(f"{name}_cell", (f"{name}_cell",), partial(_one_step, cell=cell, states=states), "product")


ROWS = [*_rows()]
