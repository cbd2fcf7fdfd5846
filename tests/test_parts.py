"""Parts: numbers with named axes that fit together, and that nothing can overwrite."""

from __future__ import annotations

import copy
import ctypes
import multiprocessing
import pickle
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch
import torch.multiprocessing
from torch import Tensor

from lrpx.errors import LRPxError, ResultError
from lrpx.parts import Part, Parts

NUMBERS = [1.0, -2.0, 3.0]


def part(values=NUMBERS, dtype=torch.float64):
    return Part("tokens", torch.tensor(values, dtype=dtype), ("token",))


HEADS = Part("heads", torch.arange(24.0).reshape(2, 3, 4), ("layer", "head", "token"), {"head": ["a", "b", "c"]})

# ------------------------------------------------------------------------------------ parts


def test_a_part_is_a_frozen_value():
    with pytest.raises(FrozenInstanceError):
        HEADS.name = "others"
    with pytest.raises(TypeError):
        HEADS.labels["head"] = ("d", "e", "f")
    again = Part("heads", torch.arange(24.0).reshape(2, 3, 4), ("layer", "head", "token"), {"head": ["a", "b", "c"]})
    assert again == HEADS
    changed = [
        Part("others", HEADS.values, HEADS.axes, HEADS.labels),
        Part("heads", HEADS.values + 1, HEADS.axes, HEADS.labels),
        Part("heads", HEADS.values.double(), HEADS.axes, HEADS.labels),
        Part("heads", HEADS.values, ("head", "layer", "token"), {}),
        Part("heads", HEADS.values, HEADS.axes, {}),
    ]
    assert HEADS not in changed
    assert HEADS != "heads"
    assert repr(HEADS) == "Part(heads [layer 2 × head 3 × token 4], float32)"


def test_the_numbers_given_are_copied_and_leave_their_graph():
    given = torch.tensor(NUMBERS, requires_grad=True)
    made = Part("tokens", given * 1.0, ("token",))
    assert not made.values.requires_grad
    plain = torch.tensor(NUMBERS)
    made = Part("tokens", plain, ("token",))
    plain.zero_()
    assert made.values.tolist() == NUMBERS


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("", torch.ones(1), ("token",)), r"a part is called ''; pass a name, such as 'heads'"),
        ((7, torch.ones(1), ("token",)), r"a part is called 7; pass a name"),
        (("<b>", torch.ones(1), ("token",)), r"a part is called '<b>'; pass a name"),
        (("__metadata__", torch.ones(1), ("token",)), r"a part is called '__metadata__'; pass a name"),
        (("a\nb", torch.ones(1), ("token",)), r"a part is called 'a\\nb'; pass a name"),
        (("heads", [1.0], ("token",)), r"part 'heads' are no floating-point tensor; pass one"),
        (("heads", torch.ones(1, dtype=torch.int64), ("token",)), r"are no floating-point tensor"),
        (("heads", torch.ones(1, dtype=torch.complex64), ("token",)), r"are no floating-point tensor"),
        (("heads", torch.ones(1).to_sparse(), ("token",)), r"are no floating-point tensor; pass one, not sparse"),
        (("heads", torch.ones(1), "token"), r"the axes of part 'heads' are 'token'; pass a tuple"),
        (("heads", torch.ones(1), (7,)), r"the axes of part 'heads' are \(7,\); pass a tuple"),
        (("heads", torch.ones(1), ("<b>",)), r"the axes of part 'heads' are \('<b>',\); pass a tuple"),
        (("heads", torch.ones(()), ()), r"part 'heads' has 0 dimensions and the axes \(\); name each dimension once"),
        (("heads", torch.ones(1, 1), ("token",)), r"has 2 dimensions and the axes \('token',\); name each"),
        (
            ("heads", torch.ones(1, 1), ("token", "token")),
            r"has 2 dimensions and the axes .*; name each",
        ),
        (("heads", torch.ones(1), ("token",), {"head": ["a"]}), r"has labels along 'head'; its axes are token"),
        (
            ("heads", torch.ones(1), ("token",), {"token": "a"}),
            r"labels of part 'heads' along 'token' are no texts",
        ),
        (
            ("heads", torch.ones(1), ("token",), {"token": [7]}),
            r"labels of part 'heads' along 'token' are no texts",
        ),
        (("heads", torch.ones(2), ("token",), {"token": ["a"]}), r"has 1 labels along 'token' for 2 places; pass one"),
    ],
)
def test_a_part_that_does_not_fit_is_refused(given, message):
    with pytest.raises(ResultError, match=message):
        Part(*given)


def test_groups_are_summed_along_any_axis():
    grouped = HEADS.grouped("head", [(0, 2), (2, 3)])
    assert torch.equal(grouped.values, torch.stack([HEADS.values[:, :2].sum(1), HEADS.values[:, 2]], 1))
    assert grouped.labels == {"head": ("ab", "c")}
    assert HEADS.grouped("neuron", [(0, 1)]) is HEADS
    assert HEADS.grouped("token", []).values.shape == (2, 3, 0)


def test_an_axis_is_summed_away():
    summed = HEADS.summed("token")
    assert (summed.axes, summed.labels) == (("layer", "head"), {"head": ("a", "b", "c")})
    assert torch.equal(summed.values, HEADS.values.sum(-1))
    assert HEADS.summed("head").labels == {}
    for of, axis in ((HEADS, "neuron"), (part(), "token")):
        with pytest.raises(ResultError, match=r"has the axes .*token; pass one of several"):
            of.summed(axis)


def test_parts_are_found_by_name_and_in_order():
    parts = Parts([part(), HEADS])
    assert list(parts) == ["tokens", "heads"]
    assert parts["heads"] is HEADS
    assert "neurons" not in parts
    assert parts.get("neurons") is None
    assert parts == Parts([part(), HEADS]) != Parts([part()])
    for error in (KeyError, LRPxError):
        with pytest.raises(error, match=r"^there is no part 'neurons'; this result has tokens, heads$"):
            parts["neurons"]
    with pytest.raises(ResultError, match="two parts have one name in tokens, tokens; rename one"):
        Parts([part(), part()])
    with pytest.raises(ResultError, match=r"no list of parts; pass Part\(name, values, axes\) objects"):
        Parts([torch.ones(2)])


# -------------------------------------------------------------------- numbers nobody overwrites


def in_place():
    """Every method and function of torch that changes its first argument, as calls on it."""
    names = {name for name in dir(Tensor) if name.endswith("_") and not name.endswith("__") and name[0] != "_"}
    return sorted(names)


@pytest.mark.parametrize("inference", [False, True])
def test_no_method_that_changes_a_tensor_in_place_changes_a_part(inference):
    refused = 0
    with torch.inference_mode(inference):
        for name in in_place():
            for arguments in ((), (2.0,), (torch.ones(3, dtype=torch.float64),), (0, 0), (0, torch.tensor([0]), 5.0)):
                kept = part()
                error = None
                try:
                    getattr(kept.values, name)(*arguments)
                except Exception as raised:  # refused, or not called so
                    error = raised
                assert error is not None, f"{name}{arguments} ran"
                refused += isinstance(error, ResultError)
                assert kept.values.tolist() == NUMBERS
                assert not kept.values.requires_grad
    assert refused > len(in_place())


def assign(x):
    x[0] = 5.0


def assign_slice(x):
    x[1:] = torch.zeros(2, dtype=torch.float64)


def augment(x):
    x += 1.0


def multiply(x):
    x *= 2.0


def power(x):
    x **= 2


def data(x):
    x.data = torch.zeros(3, dtype=torch.float64)


def requires_grad(x):
    x.requires_grad = True


def plain():
    return torch.ones(3, dtype=torch.float64)


WRITES = {
    **{f.__name__: f for f in (assign, assign_slice, augment, multiply, power, data, requires_grad)},
    "out": lambda x: torch.add(plain(), 1.0, out=x),
    "out of itself": lambda x: torch.mul(x, 2.0, out=x),
    "one of two outs": lambda x: torch.max(plain()[None], 0, out=(x, torch.zeros(3, dtype=torch.int64))),
    "torch.relu_": torch.relu_,
    "inplace=True": lambda x: torch.nn.functional.relu(x, inplace=True),
    "torch.ops": lambda x: torch.ops.aten.mul_(x, 2.0),
    "init": torch.nn.init.zeros_,
    "foreach": lambda x: torch._foreach_add_([x], 1.0),
    "a parameter": torch.nn.Parameter,
    "data[0]": lambda x: assign(x.data),
    "detach": lambda x: x.detach().mul_(2.0),
    "a view": lambda x: x[1:].mul_(2.0),
    "another view": lambda x: x.view(3, 1).T.zero_(),
    "an item": lambda x: x[0].zero_(),
    "a piece": lambda x: x.split(1)[0].zero_(),
    "in a loop": lambda x: [number.zero_() for number in x],
    "the same dtype": lambda x: x.double().zero_(),
    "as_tensor": lambda x: torch.as_tensor(x).zero_(),
    "asarray": lambda x: torch.asarray(x).zero_(),
    "compiled": lambda x: torch.compile(lambda y: y.mul_(2.0), backend="eager")(x),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writing_is_refused(write):
    kept = part()
    with pytest.raises(ResultError, match=r"a result cannot be written into; work on a copy.*a\.relevance\.clone\(\)"):
        write(kept.values)
    assert kept.values.tolist() == NUMBERS
    assert not kept.values.requires_grad


@pytest.mark.parametrize("name", [name for name in WRITES if name not in ("inplace=True", "compiled")])
def test_writing_is_refused_in_inference_mode(name):
    kept = part()
    with torch.inference_mode(), pytest.raises(ResultError, match="cannot be written into"):
        WRITES[name](kept.values)
    assert kept.values.tolist() == NUMBERS


@pytest.mark.parametrize(
    "array", [lambda x: x.numpy(), np.asarray, lambda x: x.detach().numpy(), lambda x: x[1:].numpy()]
)
def test_arrays_are_read_only(array):
    kept = part()
    with pytest.raises(ValueError, match="read-only"):
        array(kept.values)[0] = 5.0
    assert kept.values.tolist() == NUMBERS


def test_other_ways_to_the_memory_end_at_a_copy():
    kept = part()
    for write in (
        lambda x: x.untyped_storage().fill_(0),
        lambda x: torch.from_dlpack(x).zero_(),
        lambda x: torch.from_dlpack(torch.utils.dlpack.to_dlpack(x)).zero_(),
        np.from_dlpack,
        lambda x: torch.func.vmap(lambda y: y.zero_())(x),
        lambda x: torch.func.functionalize(lambda y: y.mul_(2))(x),
        lambda x: torch.DoubleTensor(x).zero_(),
        lambda x: x.as_subclass(Tensor).zero_(),
        lambda x: torch.utils.swap_tensors(x, torch.zeros(3)),
        lambda x: ctypes.memset(x.data_ptr(), 0, 8),
    ):
        write(kept.values)
        assert kept.values.tolist() == NUMBERS


def test_a_part_made_of_anothers_numbers_has_its_own():
    first = part()
    held = first.values
    second = Part("other", held, ("token",))
    torch.func.vmap(lambda y: y.zero_())(held)
    assert first.values.tolist() == second.values.tolist() == NUMBERS


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_numbers_that_nothing_can_add_are_refused(dtype):
    with pytest.raises(ResultError, match=r"the values of part 'tokens' are float8_.*; pass float16 or wider"):
        Part("tokens", torch.ones(3).to(dtype), ("token",))


def test_reading_gives_plain_tensors_of_ones_own():
    x = part().values
    assert isinstance(x, Tensor)
    for made in (
        x + 1,
        1 - x,
        x.sum(),
        x.abs(),
        x.float(),
        torch.stack([x, x]),
        x.clone(),
        x.argmax(),
        x[[0, 1]],
        x > 0,
    ):
        assert type(made) is Tensor
        made.zero_()
    assert x.tolist() == NUMBERS
    assert (x.shape, x.dtype, len(x), x.device.type, x.ndim) == ((3,), torch.float64, 3, "cpu", 1)
    assert torch.equal(x, torch.tensor(NUMBERS, dtype=torch.float64))
    assert float(x[1]) == x[1].item() == -2.0
    assert [float(number) for number in x] == NUMBERS
    assert repr(x) == repr(torch.tensor(NUMBERS, dtype=torch.float64))
    assert f"{x.sum():.1f} {x[0]:.1f}" == "2.0 1.0"
    values, indices = x.max(0)
    assert (float(values), int(indices)) == (3.0, 2)
    torch.testing.assert_close(x, x.clone(), rtol=0, atol=0)
    assert np.asarray(x).tolist() == x.numpy().tolist() == NUMBERS
    y = plain()
    y.add_(x)
    y[1:] = x[1:]
    assert y.tolist() == [2.0, -2.0, 3.0]
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (x * weight).sum().backward()
    assert weight.grad.tolist() == NUMBERS


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_copies_and_pickles_are_as_frozen_as_the_part(again):
    for made in (part(), HEADS, Parts([part(), HEADS])):
        assert again(made) == made
    with pytest.raises(ResultError, match="cannot be written into"):
        again(part()).values.zero_()


def test_the_numbers_alone_pickle_as_a_plain_tensor(tmp_path):
    assert type(pickle.loads(pickle.dumps(part().values))) is Tensor
    torch.save(part().values, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt").tolist() == NUMBERS


def _doubled(made):
    try:
        made.values.zero_()
    except ResultError:
        return Part(made.name, made.values * 2, made.axes)


@pytest.mark.parametrize("processes", [multiprocessing, pytest.param(torch.multiprocessing, marks=pytest.mark.slow)])
def test_parts_travel_between_processes(processes):
    with processes.get_context("spawn").Pool(1) as pool:
        assert pool.map(_doubled, [part()]) == [part([2.0, -4.0, 6.0])]
