"""``compile=True``: the numbers of the plain pass, whatever is explained, and nothing of the model changed."""

from __future__ import annotations

import copy
import enum
import itertools
import subprocess
import sys
import threading
from argparse import Namespace
from collections import UserDict, deque
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama
from transformers.pytorch_utils import Conv1D
from transformers.utils.import_utils import is_tracing

from lrpx import ATTNLRP, Contrast, Explainer, LogProb, Margin, Span, Task
from lrpx.engine import _compiled, _roles
from lrpx.engine._settings import Settings
from lrpx.errors import InputError, ModelError, NonFiniteError, TargetError
from tests import tiny
from tests.reference import models

ROWS = [[3, 14, 15, 9, 26, 5, 7], [8, 9], [4, 11, 20]]
slow = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


class Rotary(nn.Module):
    """Llama's rotary angles, which transformers computes in float32 whatever comes in, in float64."""

    def __init__(self, inv_freq):
        super().__init__()
        self.register_buffer("inv_freq", inv_freq.double())

    def forward(self, x, position_ids):
        angles = (position_ids[..., None] * self.inv_freq).repeat(1, 1, 2)
        return angles.cos(), angles.sin()


def llama():
    model = models.tiny_llama()
    model.model.rotary_emb = Rotary(model.model.rotary_emb.inv_freq)
    return model


def float32_gpt2():
    return models.tiny_gpt2().float()


def assert_same(found, expected, tolerance):
    assert found.ids == expected.ids
    assert found.tokens == expected.tokens
    assert found.segments == expected.segments
    assert found.prediction.id == expected.prediction.id
    assert found.explained.description == expected.explained.description
    assert found.explained.position == expected.explained.position
    scale = max(abs(expected.explained.value), 1e-3)
    assert abs(found.explained.value - expected.explained.value) <= tolerance * scale
    scale = float(expected.relevance.abs().max())
    torch.testing.assert_close(found.relevance, expected.relevance, rtol=0, atol=tolerance * scale)


@pytest.fixture(scope="module")
def compiled_llama():
    """One explainer for many tests, so that its code is compiled once."""
    return Explainer(llama(), compile=True)


@pytest.mark.parametrize(
    ("build", "options", "tolerance"),
    [
        pytest.param(llama, {}, 1e-9, marks=slow),
        pytest.param(float32_gpt2, {}, 1e-5, marks=slow),
        (models.tiny_bert, {"position": 0}, 1e-9),
        pytest.param(models.tiny_t5, {"decoder": [0, 8, 6]}, 1e-9, marks=slow),
        pytest.param(tiny.bert_classifier, {}, 1e-9, marks=slow),
        pytest.param(tiny.llama_classifier, {}, 1e-6, marks=slow),  # rotary angles in float32
    ],
)
def test_the_numbers_of_the_plain_pass(build, options, tolerance):
    model = build()
    plain, compiled = Explainer(model), Explainer(model, compile=True)
    assert_same(compiled(ROWS[0], **options), plain(ROWS[0], **options), tolerance)
    for row in ROWS:  # of other lengths, by the same code
        assert_same(compiled(row, 2, 0, **options), plain(row, 2, 0, **options), tolerance)
    assert len(compiled.bound.compiler._passes) == 1


def transposed(size):
    return torch.randn(*reversed(size)).T


def expanded(size):
    return torch.randn(size[0], 1).expand(size)


@pytest.mark.parametrize("sizes", [(1, 5, 3), (16, 300, 200), (7, 1, 1), (0, 5, 3), (4, 0, 3)])
@pytest.mark.parametrize("build_a", [torch.randn, transposed, expanded])
@pytest.mark.parametrize("build_b", [torch.randn, transposed, expanded])
def test_a_product_by_onednn(sizes, build_a, build_b):
    rows, inner, columns = sizes
    torch.manual_seed(0)
    a, b = build_a((rows, inner)), build_b((inner, columns))
    found = torch.ops.lrpx.onednn_matmul(a, b)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), a.double() @ b.double(), rtol=0, atol=1e-6 * inner)


@pytest.mark.parametrize("target", [None, 4, Contrast(3, 5), LogProb(), Margin(7)])
def test_any_target_by_the_same_code(compiled_llama, target):
    assert_same(compiled_llama(ROWS[0], target), Explainer(compiled_llama.model)(ROWS[0], target), 1e-9)
    assert_same(
        compiled_llama(ROWS[0], target, position=2), Explainer(compiled_llama.model)(ROWS[0], target, position=2), 1e-9
    )


@slow
@pytest.mark.parametrize(
    "method",
    [
        "lrp",
        "gradient-l2-squared",
        ATTNLRP.at("*.mlp", use=ATTNLRP, linear=lambda op, *x: op(*x)),
    ],
)
def test_other_methods(compiled_llama, method):
    assert_same(compiled_llama(ROWS[0], method=method), Explainer(compiled_llama.model)(ROWS[0], method=method), 1e-9)


@slow
@pytest.mark.parametrize("side", ["left", "right"])
def test_batches(side):
    model = models.tiny_gpt2()
    compiled, plain = Explainer(model, padding_side=side, compile=True), Explainer(model)
    rows = [*ROWS, [6], [5, 5, 5]]
    for found, row in zip(compiled(rows, batch_size=6), rows, strict=True):
        assert_same(found, plain(row), 1e-9)


@slow
def test_padding_does_not_exceed_the_context():
    model = models.tiny_gpt2(n_positions=20)
    row = list(range(1, 20))
    assert_same(Explainer(model, compile=True)(row), Explainer(model)(row), 1e-9)


def test_a_ledger_is_kept_by_the_plain_pass(compiled_llama):
    assert compiled_llama(ROWS[0], ledger=True).ledger.closes(1e-9)


@slow
def test_new_weights_are_seen_and_none_is_copied():
    model = llama()
    compiled = Explainer(model, compile=True)
    before = compiled(ROWS[0])
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(1.5)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() * 0.5)
    after = compiled(ROWS[0])
    assert not torch.allclose(before.relevance, after.relevance)
    assert_same(after, Explainer(model)(ROWS[0]), 1e-9)
    assert len(compiled.bound.compiler._passes) == 1


@slow
def test_other_settings_of_the_model_are_seen():
    model = llama()
    compiled = Explainer(model, compile=True)
    compiled(ROWS[0])
    model.model.layers[0].self_attn.scaling *= 2
    assert_same(compiled(ROWS[0]), Explainer(model)(ROWS[0]), 1e-9)
    model.model.layers = model.model.layers[:1]
    assert_same(compiled(ROWS[0]), Explainer(model)(ROWS[0]), 1e-9)


class Numbered(nn.Module):
    """A layer with two parameters, one or none of which is there, and a number that is in no buffer."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.number = layer, torch.tensor(2.0)
        self.scale, self.shift = nn.Parameter(torch.rand(layer.out_features, dtype=layer.weight.dtype)), None

    def forward(self, x):
        found = self.layer(x) * float(self.number)
        found = found if self.scale is None else found * self.scale
        return found if self.shift is None else found + self.shift

    def tie(self, weight):
        self.layer.weight = weight

    def rename(self):
        self.scale, self.shift = None, self.scale


def numbered():
    """A model with such a layer, whose weight is another's, and what moves its tensors without adding any."""
    model = models.tiny_bert()
    layer = model.bert.encoder.layer[1].attention.output
    layer.dense = Numbered(layer.dense)
    inside = model.bert.encoder.layer[0].attention.self
    layer.dense.tie(inside.query.weight)
    changes = (lambda: layer.dense.tie(inside.key.weight), layer.dense.rename, lambda: layer.dense.number.mul_(3))
    return model, changes


def test_which_tensor_is_where_is_of_the_code():
    """As many of the same shapes in another place: a weight tied to another layer's, another name; a number of it."""
    model, changes = numbered()
    keys = []
    for change in (lambda: None, *changes):
        change()
        calls = [_compiled._Call.of(model, None, {}, frozenset(), ATTNLRP) for _ in range(2)]
        with torch.no_grad():
            model.bert.embeddings.word_embeddings.weight.mul_(2)
        keys.append(calls[0].key)
        assert calls[1].key == keys[-1] == _compiled._Call.of(model, None, {}, frozenset(), ATTNLRP).key
    assert all(one != other for one, other in itertools.combinations(keys, 2))


class Packed(nn.Parameter):
    """A weight of another class, which looks from outside as the plain one does."""


def test_a_weight_of_another_class_is_another_input_of_the_code():
    layer = nn.Linear(2, 2)
    before = _compiled._Call.of(layer, None, {}, frozenset(), ATTNLRP).key
    layer.weight = Packed(layer.weight.detach())
    assert _compiled._Call.of(layer, None, {}, frozenset(), ATTNLRP).key != before


class Wrapped(torch.Tensor):
    """A weight without numbers of its own, as a quantised one, whose class answers each operation."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


def test_a_quantised_weight_is_refused():
    """Compiled code reads memory at its address, where there is none: the process died."""
    layer = nn.Linear(2, 2, bias=False)
    layer._parameters["weight"] = torch.Tensor._make_wrapper_subclass(Wrapped, (2, 2))
    with pytest.raises(ModelError, match=r"Linear has a weight of Wrapped, .*compile=False"):
        _compiled._Call.of(layer, None, {}, frozenset(), ATTNLRP)


def test_a_weight_that_is_elsewhere_is_refused():
    """It was torch's own error, of a device without a name."""
    model = models.tiny_llama()
    pytest.importorskip("accelerate").cpu_offload(model)
    with pytest.raises(ModelError, match=r"has a weight without numbers, as accelerate .*compile=False"):
        Explainer(model, compile=True)(ROWS[0])


@slow
def test_which_tensor_is_where_is_seen():
    model, changes = numbered()
    compiled = Explainer(model, compile=True)
    assert_same(compiled(ROWS[0], position=0), before := Explainer(model)(ROWS[0], position=0), 1e-9)
    for change in changes:
        change()
        plain = Explainer(model)(ROWS[0], position=0)
        assert not torch.allclose(plain.relevance, before.relevance)
        assert_same(compiled(ROWS[0], position=0), plain, 1e-9)
        before = plain
    assert len(compiled.bound.compiler._passes) == 4


class Adapted(nn.Module):
    """A layer with what adapters of peft keep of themselves: a list and a dictionary, changed in place."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.scaling, self.merged_adapters = {"default": 2.0}, []

    def forward(self, x):
        found = self.layer(x)
        return found if self.merged_adapters else found * self.scaling["default"]


def compiled_around(kind):
    """A model with one of its layers in a ``kind``, which layer that is, and its compiled passes, made once."""
    model = models.tiny_bert()
    output = model.bert.encoder.layer[1].output
    output.dense = kind(output.dense)
    compiled = Explainer(model, compile=True)
    compiled(ROWS[0], position=0)
    return model, output.dense, compiled


def test_settings_in_lists_and_dictionaries_are_seen():
    model, layer, compiled = compiled_around(Adapted)
    layer.scaling["default"] = 3.0
    assert_same(compiled(ROWS[0], position=0), Explainer(model)(ROWS[0], position=0), 1e-9)
    layer.merged_adapters.append("default")
    assert_same(compiled(ROWS[0], position=0), Explainer(model)(ROWS[0], position=0), 1e-9)
    compiled(ROWS[1], position=0)
    assert len(compiled.bound.compiler._passes) == 3


class Activated(nn.Module):
    """A layer that keeps its activation as a function, as torch's own encoder layers do."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.activation, self.precision = layer, torch.nn.functional.relu, torch.float64

    def forward(self, x):
        return self.activation(self.layer(x)).to(self.precision).to(x.dtype)


def test_another_function_that_a_module_keeps_is_seen():
    model, layer, compiled = compiled_around(Activated)
    layer.activation = torch.tanh
    assert_same(compiled(ROWS[0], position=0), Explainer(model)(ROWS[0], position=0), 1e-9)
    layer.precision = torch.float32
    assert_same(compiled(ROWS[0], position=0), Explainer(model)(ROWS[0], position=0), 1e-6)
    compiled(ROWS[1], position=0)
    assert len(compiled.bound.compiler._passes) == 3


@dataclass(frozen=True)
class Scale:
    """Settings of a user's own, with settings in it."""

    factor: float = 1.0
    kind: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(power=1))


class Sign(enum.Enum):
    PLUS, MINUS = 1, -1


class Slotted:
    __slots__ = ("gain",)

    def __init__(self, gain):
        self.gain = gain


class Shifted:
    """An object that is called, with a setting and a method of its class."""

    shift = 0.5

    def __call__(self, x):
        return x + self.shift * x**2


class Constants:
    """A class that is kept itself, as a place for settings."""

    power = 1


class Configured(nn.Module):
    """A layer that reads objects of a user's own."""

    times = 1.0

    def __init__(self, layer):
        super().__init__()
        self.layer, self.scale, self.sign = layer, Scale(), Sign.PLUS
        self.number, self.slotted = np.float64(1.0), Slotted(1.0)
        self.shifted, self.constants = Shifted(), Constants
        self.unregistered, self.steps = [nn.Softplus(1.0)], {"sin": 1.0, "exp": 0.5}

    def forward(self, x):
        for name, by in self.steps.items():
            x = getattr(torch, name)(x) * by
        x = self.unregistered[0](x)
        found = torch.tanh(self.layer(x)) * self.scale.factor * self.sign.value * float(self.number) * self.times
        return self.shifted(found ** (self.scale.kind.power * self.constants.power) * self.slotted.gain)


def set_class(layer, value):
    type(layer).times = value


def exchange(kept):
    kept.update({name: kept.pop(name) for name in reversed(list(kept))})


CHANGES = {
    "a module in a list": lambda layer: setattr(layer.unregistered[0], "beta", 3.0),
    "the order of a dictionary": lambda layer: exchange(layer.steps),
    "another object": lambda layer: setattr(layer, "scale", Scale(2.0)),
    "inside an object": lambda layer: setattr(layer.scale.kind, "power", 3),
    "a member of an enum": lambda layer: setattr(layer, "sign", Sign.MINUS),
    "a number of numpy": lambda layer: setattr(layer, "number", np.float64(3.0)),
    "in slots": lambda layer: setattr(layer.slotted, "gain", 0.5),
    "of the class": lambda layer: set_class(layer, 2.0),
    "of an object's class": lambda layer: setattr(type(layer.shifted), "shift", 2.0),
    "a method of an object's class": lambda layer: setattr(type(layer.shifted), "__call__", lambda self, x: x**3),
    "in a class that is kept": lambda layer: setattr(layer.constants, "power", 3),
    "another forward": lambda layer: setattr(type(layer), "forward", lambda self, x: self.layer(x)),
}


@pytest.fixture
def unpatched():
    changed = [(Configured, "times"), (Configured, "forward"), (Shifted, "shift"), (Shifted, "__call__")]
    own = [(cls, name, vars(cls)[name]) for cls, name in [*changed, (Constants, "power")]]
    yield
    for cls, name, value in own:
        setattr(cls, name, value)


@slow
@pytest.mark.usefixtures("unpatched")
def test_objects_that_a_module_keeps_are_seen():
    model, layer, compiled = compiled_around(Configured)
    for change in CHANGES.values():
        before = Explainer(model)(ROWS[0], position=0).relevance
        change(layer)
        plain = Explainer(model)(ROWS[0], position=0)
        assert not torch.allclose(plain.relevance, before)
        assert_same(compiled(ROWS[0], position=0), plain, 1e-9)
    compiled(ROWS[1], position=0)
    assert len(compiled.bound.compiler._passes) == 1 + len(CHANGES)


@pytest.mark.usefixtures("unpatched")
@pytest.mark.parametrize("change", CHANGES)
def test_settings_are_the_same_until_one_changes(change):
    layer = Configured(nn.Linear(2, 2))

    def settings():
        found = Settings()
        return found.of_class(type(layer)), found.of(vars(layer))

    before = settings()
    assert settings() == before
    CHANGES[change](layer)
    assert settings() != before


class Silent(torch.Tensor):
    """A tensor whose class answers nothing."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return NotImplemented


MADE, ONE = {"gain": 1.0}, torch.ones(1)


@pytest.mark.parametrize(
    ("kept", "change"),
    [
        ({"a": 1}, lambda kept: kept.update(a=True)),
        ({"a": 1}, lambda kept: kept.update(a=1.0)),
        ({"a": 0.0}, lambda kept: kept.update(a=-0.0)),
        ([torch.ones(2)], lambda kept: kept[0].data.mul_(2)),
        ([torch.ones(2)], lambda kept: setattr(kept[0], "data", torch.zeros(2))),
        ([torch.ones(2, 3)], lambda kept: setattr(kept[0], "data", torch.ones(3, 2))),
        ([torch.ones(2, 2)], lambda kept: setattr(kept[0], "data", torch.ones(2, 2, dtype=torch.int32))),
        ([ONE.expand(10**10)], lambda kept: ONE.data.mul_(2)),
        ([torch.ones(6)[::2]], lambda kept: kept[0].data[1:].mul_(2)),
        ([ONE.as_subclass(Silent)], lambda kept: ONE.data.mul_(2)),
        ({SimpleNamespace: 1, Slotted(1.0): 2}, lambda kept: setattr(list(kept)[1], "gain", 2.0)),
        ({Slotted(1.0)}, lambda kept: setattr(next(iter(kept)), "gain", 2.0)),
        ([Shifted().__call__], lambda kept: setattr(kept[0].__self__, "shift", 2.0)),
        ([partial(max, Slotted(1.0))], lambda kept: setattr(kept[0].args[0], "gain", 2.0)),
        ([partial(max, key=1.0)], lambda kept: kept[0].keywords.update(key=2.0)),
        ([lambda x, by=Constants: x], lambda kept: setattr(kept[0], "__defaults__", (Scale,))),
        ([lambda x, *, by=1.0: x], lambda kept: kept[0].__kwdefaults__.update(by=2.0)),
        ([lambda x: x], lambda kept: setattr(kept[0], "by", 2.0)),
        ([Namespace(gain=1.0)], lambda kept: setattr(kept[0], "gain", 2.0)),
        ([UserDict(gain=1.0)], lambda kept: kept[0].update(gain=2.0)),
        ([MappingProxyType(MADE)], lambda kept: MADE.update(gain=2.0)),
    ],
)
def test_what_is_equal_by_name_alone_is_another_setting(kept, change):
    """Code for 1 was run for True, and for what a set's element, ``.data`` or a method's object held before."""
    before = Settings().of(kept)
    assert Settings().of(kept) == before
    change(kept)
    assert Settings().of(kept) != before


@slow
def test_nothing_of_the_model_changes():
    model = llama().requires_grad_(True)
    tensors = {name: (tensor, tensor._version) for name, tensor in model.state_dict(keep_vars=True).items()}
    spaces = {path: dict(vars(module)) for path, module in model.named_modules()}
    Explainer(model, compile=True)(ROWS[0])
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is tensors[name][0]
        assert tensor._version == tensors[name][1]
        assert tensor.grad is None
    for path, module in model.named_modules():
        assert vars(module) == spaces[path]
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_threads_share_the_code(compiled_llama):
    compiled_llama(ROWS[0])
    found = {}

    def work(i):
        found[i] = compiled_llama(ROWS[i % 3])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    plain = Explainer(compiled_llama.model)
    for i in range(6):
        assert_same(found[i], plain(ROWS[i % 3]), 1e-9)


def test_inside_inference_mode_and_no_grad(compiled_llama):
    expected = Explainer(compiled_llama.model)(ROWS[1])
    with torch.inference_mode():
        assert_same(compiled_llama(ROWS[1]), expected, 1e-9)
    with torch.no_grad():
        assert_same(compiled_llama(ROWS[1]), expected, 1e-9)


# ------------------------------------------------------------------------------- refusals


def with_mlp(change):
    """A Llama whose first MLP has another forward pass."""
    model = llama()
    original = type(model.model.layers[0].mlp)
    model.model.layers[0].mlp.__class__ = type("Changed", (original,), {"forward": change(original.forward)})
    return model


def looks_at_values(forward):
    return lambda self, x: forward(self, x) if x.abs().sum() > 0 else x


def keeps_something(forward):
    def changed(self, x):
        self.last = x
        return forward(self, x)

    return changed


def counts_calls(forward):
    def changed(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return forward(self, x) * self.calls

    return changed


@pytest.mark.parametrize("change", [looks_at_values, keeps_something, counts_calls])
def test_a_model_that_cannot_be_compiled_says_so(change):
    model = with_mlp(change)
    with pytest.raises(ModelError, match=r"LlamaForCausalLM cannot be compiled \(.*\); use .*compile=False"):
        Explainer(model, compile=True)(ROWS[0])
    Explainer(model)(ROWS[0])


KEPT = (
    ("a dictionary", dict, lambda kept, x: kept.update(x=x.detach()), lambda kept: kept.values()),
    ("a list", list, lambda kept, x: kept.append(x), lambda kept: kept),
    ("a queue", deque, lambda kept, x: kept.append(x), lambda kept: kept),
    ("one in another", lambda: {"all": [[]]}, lambda kept, x: kept["all"][0].append(x), lambda kept: kept["all"][0]),
    ("a set", set, lambda kept, x: kept.add(x), lambda kept: kept),
    ("an object", SimpleNamespace, lambda kept, x: setattr(kept, "x", x), lambda kept: vars(kept).values()),
    ("slots", lambda: Slotted(None), lambda kept, x: setattr(kept, "gain", x), lambda kept: [kept.gain]),
    ("a class", lambda: type("Kept", (), {}), lambda kept, x: setattr(kept, "x", x), lambda kept: [kept.x]),
)


@pytest.mark.parametrize(("build", "keep", "read"), [case[1:] for case in KEPT], ids=[case[0] for case in KEPT])
def test_what_a_model_keeps_at_each_call_is_refused(build, keep, read):
    """In whatever it holds: the tensors of a trace stayed there, and each call was compiled anew."""

    def keeps(forward):
        def changed(self, x):
            keep(self.kept, x)
            return forward(self, x)

        return changed

    model = with_mlp(keeps)
    kept = model.model.layers[0].mlp.kept = build()
    with pytest.raises(ModelError, match=r"\(TypeError: its forward pass keeps something in .*\); use .*compile=False"):
        Explainer(model, compile=True)(ROWS[0])
    assert {type(each) for each in read(kept)} == {torch.Tensor}
    Explainer(model)(ROWS[0])


def test_a_hook_of_the_users_is_refused(compiled_llama):
    layer = compiled_llama.model.model.layers[0]
    handle = layer.register_forward_hook(lambda module, args, output: output)
    with pytest.raises(ModelError, match=r"LlamaDecoderLayer has a hook, .*compile=False"):
        compiled_llama(ROWS[0])
    handle.remove()
    compiled_llama(ROWS[0])


def test_a_hook_of_a_module_in_a_list_is_refused():
    layer = nn.Linear(2, 2)
    layer.unregistered = [nn.Tanh()]
    _compiled._Call.of(layer, None, {}, frozenset(), ATTNLRP)
    layer.unregistered[0].register_forward_hook(lambda module, args, output: output)
    with pytest.raises(ModelError, match=r"Tanh has a hook, .*compile=False"):
        _compiled._Call.of(layer, None, {}, frozenset(), ATTNLRP)


@slow
def test_other_numbers_are_refused():
    """As of a model that does another thing when it is traced."""
    model = with_mlp(lambda forward: lambda self, x: forward(self, x) * (1.01 if is_tracing(x) else 1.0))
    with pytest.raises(ModelError, match=r"compiled, LlamaForCausalLM gives other numbers \(off by .*compile=False"):
        Explainer(model, compile=True)(ROWS[0])


@slow
def test_several_questions_of_a_row(compiled_llama):
    plain = Explainer(llama())
    for position, found in zip([6, 2, 0], compiled_llama(ROWS[0], 7, position=[6, 2, 0]), strict=True):
        assert_same(found, plain(ROWS[0], 7, position=position), 1e-9)


def test_recomputing_is_refused():
    with pytest.raises(InputError, match="compile and recompute exclude each other"):
        Explainer(llama(), compile=True, recompute=True)


@slow
def test_errors_are_those_of_the_plain_pass(compiled_llama):
    with pytest.raises(TargetError, match="index 99"):
        compiled_llama(ROWS[0], 99)
    broken = copy.deepcopy(compiled_llama.model)
    compiled = Explainer(broken, compile=True)
    compiled(ROWS[0])
    with torch.no_grad():
        broken.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"first in the output of model.layers.1.mlp.down_proj"):
        compiled(ROWS[0])


class Seeing(nn.Module):
    """Words beside features that are looked up nowhere."""

    def __init__(self):
        super().__init__()
        self.words, self.features, self.head = nn.Embedding(20, 8), nn.Linear(4, 8), nn.Linear(8, 20)

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids, features, attention_mask=None):
        return self.head(nn.functional.silu(self.words(input_ids).cumsum(1) + self.features(features)[:, None]))


def test_what_is_looked_up_nowhere_has_its_part():
    torch.manual_seed(0)
    images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)).eval()
    words = {"input_ids": torch.tensor([[1, 5, 6, 7, 2]]), "features": torch.rand(1, 4)}
    cases = (
        (images, Task.IMAGE_CLASSIFICATION, torch.rand(3, 8, 8), "pixels"),
        (Seeing().eval(), Task.CAUSAL, words, "features"),
    )
    for model, task, given, part in cases:
        plain, compiled = (Explainer(model, task=task, compile=each)(given, 1) for each in (False, True))
        assert list(compiled.parts) == list(plain.parts)
        expected = plain.parts[part].values
        assert expected.abs().max() > 0
        torch.testing.assert_close(compiled.parts[part].values, expected, rtol=0, atol=1e-6)
        torch.testing.assert_close(compiled.relevance, plain.relevance, rtol=0, atol=1e-6)


class Routed(nn.Module):
    """Experts, two of which share a token by their sigmoids over the sum of these, as DeepSeek-V3's."""

    def __init__(self):
        super().__init__()
        self.words, self.router, self.head = nn.Embedding(20, 8), nn.Linear(8, 4), nn.Linear(8, 20)
        self.experts = nn.Parameter(torch.randn(4, 8, 8))

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids, attention_mask=None):
        x = self.words(input_ids).cumsum(1)
        weights, chosen = self.router(x).sigmoid().topk(2)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return self.head((weights[..., None, None] * (x[..., None, None, :] @ self.experts[chosen])).sum((-2, -3)))


def test_a_router_of_sigmoids():
    """Whether they are a guard was asked of the tensors of the trace, which have no numbers: "cannot be compiled"."""
    torch.manual_seed(0)
    model = Routed().double().eval()
    plain, compiled = (Explainer(model, task=Task.CAUSAL, compile=each)([3, 14, 15]) for each in (False, True))
    assert_same(compiled, plain, 1e-9)


@pytest.fixture
def recorded(monkeypatch):
    """The graph as it was recorded, in the place of TorchInductor's code."""
    monkeypatch.setattr(_compiled, "_code", lambda graph: graph)


@pytest.mark.parametrize(
    ("build", "kind"), [(llama, nn.Linear), (models.tiny_gpt2, Conv1D), (models.tiny_gpt2, nn.LayerNorm)]
)
def test_weights_in_buffers_are_inputs_of_the_code(recorded, build, kind):
    """Such are a frozen layer's once torch's ``remove_parametrizations`` has given it a plain weight again: "Please
    convert all Tensors to FakeTensors first"."""
    model = build()
    for module in model.modules():
        if isinstance(module, kind):
            weight = module.weight.detach().clone()
            del module.weight
            module.register_buffer("weight", weight)
    compiled = Explainer(model, compile=True)
    for factor in (1.0, 1.5):
        for module in model.modules():
            if isinstance(module, kind):
                module.weight.mul_(factor)
        assert_same(compiled(ROWS[0]), Explainer(model)(ROWS[0]), 1e-9)
    assert len(compiled.bound.compiler._passes) == 1


POOLED = """
import torch
from lrpx import Explainer, Task
from lrpx.engine import _compiled
_compiled._code = lambda graph: graph
layers = torch.nn.Conv2d(3, 4, 3), torch.nn.MaxPool2d(3, 2, 1), torch.nn.Flatten(), torch.nn.Linear(36, 5)
class Net(torch.nn.Sequential):
    def forward(self, pixel_values):
        return super().forward(pixel_values)
explainer = Explainer(Net(*layers).eval(), task=Task.IMAGE_CLASSIFICATION, compile=True)
explainer({"pixel_values": torch.randn(1, 3, 8, 8)}, 1)
"""


def test_a_max_pooling_in_the_first_code_of_a_process():
    """Torch reads a module of its own for it that only the first code imports: "cannot be compiled"."""
    done = subprocess.run([sys.executable, "-c", POOLED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Mixed(nn.Module):
    """Tokens, mixed by a function of the scores of a layer."""

    def __init__(self, mix):
        super().__init__()
        self.words, self.scores, self.head = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 20)
        self.mix = mix

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids, attention_mask=None):
        x = self.words(input_ids)
        return self.head(self.mix(x, self.scores(x)))


def test_where_an_answer_may_be_is_an_input_of_the_code(recorded):
    """Every model of question answering was refused: "Please convert all Tensors to FakeTensors first"."""
    model = tiny.bert_answers()
    plain, compiled = Explainer(model), Explainer(model, compile=True)
    for row in ROWS:  # of other lengths, by the same code
        for target in (Span(0, 1), None):
            assert_same(compiled(row, target), plain(row, target), 1e-9)
    assert len(compiled.bound.compiler._passes) == 1


def test_what_a_model_reads_from_transformers_is_seen(recorded):
    """An attention function, told anew by its name, a function in the place of theirs, and a hook of all modules."""

    def attention(factor):
        def weighed(module, query, key, value, mask, scaling, **options):
            scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * scaling * factor
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            return (
                scores.masked_fill(hidden, -1e9).softmax(-1)
                @ value.repeat_interleave(query.shape[1] // key.shape[1], 1)
            ).transpose(1, 2), None

        return weighed

    model = models.tiny_llama()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "told", attention(1.0))
        model.set_attn_implementation("told")
        compiled = Explainer(model, compile=True)
        first = compiled(ROWS[0])
        patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "told", attention(3.0))
        second = Explainer(model)(ROWS[0])
        assert not torch.allclose(first.relevance, second.relevance)
        assert_same(compiled(ROWS[0]), second, 1e-6)
        for own in (lambda q, k, *angles: (q, k), partial(lambda q, k, *angles: (q, k / 2))):
            theirs = modeling_llama.apply_rotary_pos_emb
            patch.setattr(modeling_llama, "apply_rotary_pos_emb", update_wrapper(own, theirs))
            third = Explainer(model)(ROWS[0])
            assert not torch.allclose(second.relevance, third.relevance)
            assert_same(compiled(ROWS[0]), third, 1e-6)
            second = third
        handle = register_module_forward_hook(lambda module, args, output: None)
        try:
            with pytest.raises(ModelError, match=r"every module has a hook, .*compile=False"):
                compiled(ROWS[0])
        finally:
            handle.remove()


class Gained:
    """An object in the place of a function of a modelling file, and whose method is a layer's forward."""

    gain = 1.0

    def __call__(self, q, k, *angles):
        return q, k * self.gain

    def forward(self, x):
        return torch.tanh(x) * self.gain


def test_what_an_object_in_the_place_of_a_function_holds_is_seen(recorded, monkeypatch):
    model = models.tiny_llama()
    layer, there = Gained(), Gained()
    model.model.layers[0].mlp.act_fn.forward = layer.forward
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", there)
    compiled = Explainer(model, compile=True)
    first = compiled(ROWS[0])
    for changed in (layer, there):
        changed.gain = 3.0
        second = Explainer(model)(ROWS[0])
        assert not torch.allclose(first.relevance, second.relevance)
        assert_same(compiled(ROWS[0]), second, 1e-6)
        first = second
    assert len(compiled.bound.compiler._passes) == 3


class Talking(Mixed):
    """Attention whose weights are scaled by a learned number and then mixed, from head to head."""

    def __init__(self):
        super().__init__(None)
        self.keys, self.heads, self.scale = nn.Linear(8, 8), nn.Linear(2, 2, bias=False), nn.Parameter(torch.ones(1))

    def forward(self, input_ids, attention_mask=None):
        x = self.words(input_ids)
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in (self.scores(x), self.keys(x), x))
        hidden = torch.full((x.shape[1],) * 2, -1e9, dtype=x.dtype).triu(1)
        weights = (q @ k.mT + hidden).softmax(-1) * self.scale
        weights = self.heads(weights.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.head(torch.tanh((weights @ v).transpose(1, 2).flatten(2)))


def test_what_the_engine_finds_in_numbers_is_asked_at_each_call(recorded):
    """Whether weights sum to 1 was written into the code for the first input and weights."""
    torch.manual_seed(0)
    model = Talking().double().eval()
    compiled = Explainer(model, task=Task.CAUSAL, compile=True)
    for scale in (1.0, 2.0, 1.0):
        model.scale.data.fill_(scale)
        plain = Explainer(model, task=Task.CAUSAL)([4, 11, 7, 1], method="attnlrp-vit")
        assert_same(compiled([4, 11, 7, 1], method="attnlrp-vit"), plain, 1e-9)
    assert len(compiled.bound.compiler._passes) == 2


def test_a_pass_that_was_not_compared_is_not_kept(recorded, monkeypatch):
    """Where the code found another thing in its first numbers than the plain pass, it was kept, and used later."""
    model = Talking().double().eval()
    compiled = Explainer(model, task=Task.CAUSAL, compile=True)
    answer = _roles.Asked.answer
    with monkeypatch.context() as patch:
        patch.setattr(_roles.Asked, "answer", lambda self, what, found: answer(self, what, found ^ self._is_trace))
        with pytest.raises(ModelError, match=r"told by rounding; use Explainer\(..., compile=False\)"):
            compiled([4, 11, 7, 1], method="attnlrp-vit")
    assert not compiled.bound.compiler._passes


def test_no_more_code_is_kept_than_its_most(recorded, monkeypatch):
    """What was used last is kept: a setting that changes at each call would fill the memory."""
    monkeypatch.setattr(_compiled, "MOST_PASSES", 2)
    made = []
    monkeypatch.setattr(_compiled, "_code", lambda graph: made.append(graph) or graph)
    model = Mixed(lambda x, scores: torch.tanh(scores) * model.scale).double().eval()
    compiled = Explainer(model, task=Task.CAUSAL, compile=True)
    for model.scale in (1.0, 2.0, 1.0, 3.0, 1.0, 2.0):  # 2.0 is forgotten
        assert_same(compiled([4, 11]), Explainer(model, task=Task.CAUSAL)([4, 11]), 1e-9)
        assert len(compiled.bound.compiler._passes) <= 2
    assert len(made) == 2 * 4


def states(x, scores):
    """As Mamba has it: a state that begins with zeros, and decays by an exponential."""
    decay, state, found = torch.exp(-nn.functional.softplus(scores)), torch.zeros_like(x[:, 0]), []
    for i in range(x.shape[1]):
        state = decay[:, i] * state + x[:, i]
        found.append(state)
    return torch.stack(found, 1)


def rates(x, scores):
    """As Doge and RecurrentGemma have it: an exponential of a function with a rate for each dimension."""
    rate = torch.arange(1, 9, dtype=x.dtype) / 8
    return (torch.exp(-rate * nn.functional.softplus(scores)) * x).cumsum(1)


def a_branch_on_a_mask(x, scores):
    mask = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
    return (mask if mask.any() and mask[0, 0].item() == 1 else mask.T) @ (x * scores.sigmoid())


@pytest.mark.parametrize("method", ["attnlrp", "lrp"])
@pytest.mark.parametrize("mix", [states, rates, a_branch_on_a_mask])
def test_what_is_made_of_shapes_has_numbers_in_a_trace(recorded, mix, method):
    """The engine asked the trace whether a state begins with zeros, and of which sign a function is."""
    torch.manual_seed(0)
    model = Mixed(mix).double().eval()
    plain, compiled = (Explainer(model, task=Task.CAUSAL, compile=each) for each in (False, True))
    for row in ([3, 14, 15], [4, 9]):
        assert_same(compiled(row, method=method), plain(row, method=method), 1e-9)


@pytest.mark.parametrize("method", ["attnlrp", "lrp"])
def test_a_mask_on_scores_is_no_diagonal_in_a_trace(recorded, method):
    """Mamba 2's einsum asked the trace whether its scores are a diagonal matrix; that the mask is none suffices."""

    def mix(x, scores):
        causal = torch.ones(x.shape[1], x.shape[1], dtype=x.dtype).tril()
        return torch.einsum("bts,bsd->btd", (scores @ x.mT).sigmoid() * causal, x)

    torch.manual_seed(0)
    model = Mixed(mix).double().eval()
    plain, compiled = (
        Explainer(model, task=Task.CAUSAL, compile=each)([3, 14, 15], method=method) for each in (False, True)
    )
    assert_same(compiled, plain, 1e-9)


def test_what_changes_has_no_numbers_in_a_trace():
    """A random number, a weight, and what was written over by one."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    weight = nn.Parameter(torch.ones(3))
    mode = FakeTensorMode()
    with mode, _compiled._Swapped({id(weight): mode.from_tensor(weight)}):
        known = torch.arange(6).view(2, 3).flip(1)
        assert known.tolist() == [[2, 1, 0], [5, 4, 3]]
        assert known.new_zeros(2)[:1].item() == 0
        assert torch.equal(torch.full_like(weight, 2.0), torch.ones(3) * 2)
        written, part = torch.zeros(3), torch.zeros(3)
        view = part[:2]
        written.copy_(weight)
        part.add_(weight)
        for unknown in (weight, torch.rand(3), torch.zeros(3) + weight, torch.empty(3), written, part, view):
            with pytest.raises(DataDependentOutputException):
                bool(unknown.sum() > 1)


def test_experts_by_grouped_products_have_another_way(recorded, capfd):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=32, num_local_experts=2, pad_token_id=None)
    model = MixtralForCausalLM(config).eval()
    model.set_experts_implementation("grouped_mm")
    with pytest.raises(ModelError, match="set_experts_implementation"):
        Explainer(model, compile=True)([3, 14, 15])
    assert not capfd.readouterr().err
    model.set_experts_implementation("batched_mm")
    plain, compiled = (Explainer(model, compile=each)([3, 14, 15]) for each in (False, True))
    assert_same(compiled, plain, 1e-4)


class Weighing(nn.Module):
    """Attention over 16 places whose weights are no products."""

    def __init__(self, kind):
        super().__init__()
        self.words, self.head, self.kind = nn.Embedding(20, 8), nn.Linear(8, 20), kind
        self.w, self.v, self.o = nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8)
        self.table, self.heads = nn.Parameter(torch.randn(16, 16)), nn.Linear(2, 2)

    def get_input_embeddings(self):
        return self.words

    def forward(self, input_ids, attention_mask=None):
        x = self.words(input_ids)
        v, made = self.v(x), self.w(x)
        if self.kind == "by a layer":
            out = made.softmax(-1) @ v
        elif self.kind == "by a layer, summed":
            out = (made.softmax(-1)[..., None] * v[:, None]).sum(2)
        elif self.kind == "constants":
            out = self.table.softmax(-1) @ v
        else:
            q, k = made.unflatten(-1, (2, 2, 4)).unbind(2)
            weights = torch.einsum("bqhd,bkhd->bqkh", q, k).softmax(2)
            out = torch.einsum("bqkh,bkhd->bqhd", self.heads(weights), v.unflatten(-1, (2, 4))).flatten(2)
        return self.head(x + self.o(out))


@pytest.mark.parametrize("method", ["attnlrp-vit", "lrp-vit"])
@pytest.mark.parametrize("kind", ["by a layer", "by a layer, summed", "constants", "heads that a layer mixes"])
def test_weights_without_a_gradient_are_attention_in_a_trace(recorded, kind, method):
    """Along what they sum to one was asked of tensors of the trace: "gives other numbers", "cannot be compiled"."""
    torch.manual_seed(0)
    model, ids = Weighing(kind).double().eval(), list(range(2, 18))
    plain, compiled = (Explainer(model, task=Task.CAUSAL, compile=each)(ids, method=method) for each in (False, True))
    assert_same(compiled, plain, 1e-9)


def test_a_mixture_of_experts_with_rules_by_place(recorded):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = MixtralConfig(**sizes, num_key_value_heads=2, vocab_size=32, num_local_experts=4, pad_token_id=None)
    model = MixtralForCausalLM(config).eval()
    model.set_experts_implementation("batched_mm")
    for ids in ([3, 14, 15], [9, 3, 2, 7]):
        plain, compiled = (Explainer(model, compile=each)(ids, method="lrp-vit") for each in (False, True))
        assert_same(compiled, plain, 1e-4)
