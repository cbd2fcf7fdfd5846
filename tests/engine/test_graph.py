"""What carries relevance is what descends from the run's inputs; what no rule has seen is refused by name."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint
from transformers import AutoModel, AutoTokenizer
from transformers.modeling_outputs import BaseModelOutput

from lrpx.engine import Tap, propagate
from lrpx.errors import MethodError, TraceError, UnknownOperationError
from lrpx.recipes import ATTNLRP, GRADIENT, LRP, Recipe
from lrpx.rules import Gamma, signal_take_all
from lrpx.targets import Similarity
from tests.reference import models

if TYPE_CHECKING:
    from collections.abc import Callable

    from lrpx.engine import Trace

    Spelling = Callable[["Model", Tensor], Tensor]

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated", "ignore:.*weight_norm.*is deprecated")

GAMMA = ATTNLRP.at(linear=Gamma(0.3))
RECIPES = pytest.mark.parametrize("recipe", [LRP, ATTNLRP, GAMMA], ids=["lrp", "attnlrp", "gamma"])
WIDE = torch.float64


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=WIDE)


X, W, A, B = normal(2, 3, 4, seed=3), normal(4, 4), normal(4, 2, seed=1), normal(2, 4, seed=2)
LEAF = W.clone().requires_grad_()
CACHED = A.clone().requires_grad_() @ B.clone().requires_grad_()
IDS = torch.tensor([[5, 9, 3, 12, 7]])


class Model(nn.Module):
    def __init__(self, function: Spelling) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.a, self.b = nn.Linear(4, 4, dtype=WIDE), nn.Linear(4, 4, dtype=WIDE)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def traced(model: nn.Module, recipe: Recipe, **options: Any) -> Trace:
    with propagate(model, recipe, **options) as trace:
        value = model(X)[0].sum()
    trace.explain(value)
    return trace


def relevance(function: Spelling, recipe: Recipe, **options: Any) -> Tensor:
    return traced(Model(function), recipe, **options).relevance("x")


# ------------------------------------------------------------------------------- weights

WEIGHTS: dict[str, tuple[Spelling, Spelling]] = {
    "a leaf": (lambda m, x: m.a(x) @ LEAF, lambda m, x: m.a(x) @ W),
    "a leaf transposed": (lambda m, x: m.a(x) @ LEAF.T, lambda m, x: m.a(x) @ W.T),
    "a cached product": (lambda m, x: F.linear(m.a(x), CACHED), lambda m, x: F.linear(m.a(x), A @ B)),
    "by keyword": (lambda m, x: torch.matmul(m.a(x), other=CACHED.mT), lambda m, x: m.a(x) @ (A @ B).mT),
    "a scale": (lambda m, x: m.a(x) * LEAF[0].exp(), lambda m, x: m.a(x) * W[0].exp()),
    "a denominator": (lambda m, x: m.a(x) / LEAF[0].exp(), lambda m, x: m.a(x) / W[0].exp()),
    "in a list": (lambda m, x: m.a(x) @ torch.cat([LEAF, CACHED]).T, lambda m, x: m.a(x) @ torch.cat([W, A @ B]).T),
    "an addend": (lambda m, x: m.b((m.a(x) + LEAF[0]).tanh()), lambda m, x: m.b((m.a(x) + W[0]).tanh())),
    "a hypernetwork": (lambda m, x: m.a(x) @ m.b(LEAF).tanh(), lambda m, x: m.a(x) @ m.b(W).tanh()),
    "einsum": (
        lambda m, x: torch.einsum("bti,ij->btj", m.a(x), LEAF),
        lambda m, x: torch.einsum("bti,ij->btj", m.a(x), W),
    ),
    "a convolution": (
        lambda m, x: F.conv1d(m.a(x).mT, LEAF[:, :, None]),
        lambda m, x: F.conv1d(m.a(x).mT, W[:, :, None]),
    ),
    "functional_call": (
        lambda m, x: torch.func.functional_call(m.b, {"weight": LEAF, "bias": CACHED[0]}, (m.a(x),)),
        lambda m, x: F.linear(m.a(x), W, (A @ B)[0]),
    ),
}


@RECIPES
@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_is_a_weight_whatever_object_holds_it(name: str, recipe: Recipe) -> None:
    one, other = WEIGHTS[name]
    torch.testing.assert_close(relevance(one, recipe), relevance(other, recipe), rtol=1e-12, atol=1e-12)
    assert LEAF.grad is None
    assert LEAF.requires_grad


PARAMETRISED: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "weight_norm by a hook": nn.utils.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "spectral_norm by a hook": nn.utils.spectral_norm,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", amount=8),
}


@RECIPES
@pytest.mark.parametrize("is_root", [False, True], ids=["part", "root"])
@pytest.mark.parametrize("name", PARAMETRISED)
def test_a_weight_that_is_computed_from_parameters(name: str, is_root: bool, recipe: Recipe) -> None:
    model = nn.Sequential(nn.Linear(4, 4, dtype=WIDE), nn.Linear(4, 4, dtype=WIDE))
    PARAMETRISED[name](model[1])
    model.eval()
    model(X)
    plain = nn.Linear(4, 4, dtype=WIDE)
    plain.load_state_dict({"weight": model[1].weight.detach(), "bias": model[1].bias.detach()})
    one, other = (model[1], plain) if is_root else (model, nn.Sequential(model[0], plain))
    found, wanted = traced(one, recipe), traced(other, recipe)
    torch.testing.assert_close(found.relevance("input"), wanted.relevance("input"), rtol=1e-12, atol=1e-12)


class Hadamard(torch.autograd.Function):
    """A weight that is the product of two, as in peft's LoHa."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, *arrived: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return arrived[0] * b, arrived[0] * a


def test_a_weight_that_a_custom_function_makes_says_how_it_is_one() -> None:
    model = Model(lambda m, x: F.linear(x, Hadamard.apply(m.a.weight, m.b.weight)).tanh())
    with pytest.raises(UnknownOperationError, match=r"Hadamard.* makes a weight, .*model\.requires_grad_\(False\)"):
        traced(model, ATTNLRP)
    found = traced(model.requires_grad_(False), ATTNLRP).relevance("x")
    plain = relevance(lambda m, x: F.linear(x, m.a.weight * m.b.weight).tanh(), ATTNLRP)
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)


def test_functional_call_on_the_model_itself() -> None:
    model = Model(lambda m, x: m.b(m.a(x).tanh()))
    other = {name: (2 * value).requires_grad_() for name, value in model.named_parameters()}
    with propagate(model, LRP) as trace:
        trace.explain(torch.func.functional_call(model, other, (X,))[0].sum())
    model.load_state_dict(other)
    torch.testing.assert_close(trace.relevance("x"), traced(model, LRP).relevance("x"))


def test_a_leaf_of_a_tap_that_enters_the_model_again_keeps_its_gradient() -> None:
    class Added(Tap):
        patterns = ("a", "b")

        def __init__(self) -> None:
            self.leaf = torch.zeros(4, dtype=WIDE).requires_grad_()

        def module(self, path: str, side: str, value: Tensor) -> Tensor | None:
            return value + self.leaf if side == "output" else None

        def leaves(self) -> list[Tensor]:
            return [self.leaf]

    tap = Added()
    trace = traced(Model(lambda m, x: m.b(m.a(x))), LRP, taps=[tap])
    with_two = torch.ones(3, 4, dtype=WIDE) + torch.ones(3, 4, dtype=WIDE) @ Model(lambda m, x: x).b.weight
    torch.testing.assert_close(trace.gradient_of(tap.leaf), with_two.sum(0).detach())


def test_a_table_that_was_computed_before_the_run_is_a_source() -> None:
    table = (2 * normal(9, 4)).requires_grad_() * 1.0

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4, dtype=WIDE)

        def forward(self, ids: Tensor) -> Tensor:
            return self.layer(F.embedding(ids, table))

    model = Looks()
    with propagate(model, LRP) as trace:
        trace.explain(model(torch.tensor([[1, 2]]))[0, 0, 0])
    assert trace.source_relevance(trace.sources[0]).any()


# --------------------------------------------------------------------------- unseen code


@torch.jit.script
def softclamp(x: Tensor) -> Tensor:
    return (x / 5.0).tanh() * 5.0


def in_a_thread(_: Model, x: Tensor, before: int = 0) -> Tensor:
    found: list[Tensor] = []

    def work() -> None:
        for _ in range(before):
            x.exp()
        found.append(x.tanh())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return found[0]


def unseen(function: Callable[[Tensor], Tensor]) -> Spelling:
    def spelling(m: Model, x: Tensor) -> Tensor:
        h = m.a(x)
        with torch._C.DisableTorchFunction():
            h = function(h)
        return m.b(h)

    return spelling


UNSEEN: dict[str, tuple[Spelling, str]] = {
    "a scripted function": (lambda m, x: m.b(softclamp(m.a(x))), r"b computes \w+ where.*torch\.jit.*strict=False"),
    "a scripted module": (lambda m, x: m.scripted(m.a(x)), "Holds computes .* where no rule sees it"),
    "a traced module": (lambda m, x: m.traced(m.a(x)), "Holds computes .* where no rule sees it"),
    "another thread": (lambda m, x: m.b(m.a(x) + in_a_thread(m, m.a(x))), "computes Tanh where no rule sees it"),
    "a busy thread": (
        lambda m, x: m.b(m.a(x) + in_a_thread(m, m.a(x), 100_000)),
        "computes Tanh where no rule sees it",
    ),
    "sigmoid": (unseen(torch.sigmoid), "b computes Sigmoid where"),
    "softmax": (unseen(lambda h: h.softmax(-1)), "b computes Softmax where"),
    "exp": (unseen(torch.exp), "b computes Exp where"),
    "a square": (unseen(lambda h: h * h), "b computes Mul where"),
    "a product": (unseen(lambda h: h @ h.mT @ h), "b computes .*Bmm where"),
    "an own layer": (lambda m, x: unseen(m.b)(m, x), "b computes a sum or product with a weight where"),
    "reentrant": (
        lambda m, x: checkpoint(torch.tanh, m.a(x), use_reentrant=True),
        "gradient checkpointing hides its layers.*use_reentrant=False",
    ),
    "vmap": (lambda m, x: torch.vmap(torch.tanh)(m.a(x)), "'tanh inside a transform of torch.func"),
    "vmap over weights": (
        lambda m, x: torch.vmap(lambda w: m.a(x) @ w)(torch.stack([W, W])).sum(0),
        "inside a transform of torch.func",
    ),
    "vmap of what is closed over": (
        lambda m, x: (h := m.a(x), torch.vmap(lambda i: i + h.tanh())(torch.arange(2.0)).sum(0))[1],
        "'tanh inside a transform of torch.func",
    ),
    "an ensemble": (
        lambda m, x: torch.vmap(lambda p, h: torch.func.functional_call(m.b, p, (h,)), in_dims=(0, None))(
            torch.func.stack_module_state([m.b, m.b])[0], m.a(x)
        ).sum(0),
        "'linear inside a transform of torch.func",
    ),
    "torch.func.grad": (
        lambda m, x: m.b(torch.func.grad(lambda h: h.tanh().sum())(m.a(x))),
        "inside a transform of torch.func",
    ),
    "torch.autograd.grad": (
        lambda m, x: (h := m.a(x), m.b(h + torch.autograd.grad(h.tanh().sum(), h, create_graph=True)[0]))[1],
        r"Holds takes a gradient itself.*lrpx\.GRADIENT",
    ),
}


class Holds(Model):
    def __init__(self, function: Spelling) -> None:
        super().__init__(function)
        inner = nn.Sequential(nn.Linear(4, 4, dtype=WIDE), nn.Tanh())
        self.scripted, self.traced = torch.jit.script(inner), torch.jit.trace(inner, X)


@RECIPES
@pytest.mark.parametrize("name", UNSEEN)
def test_what_no_rule_has_seen_is_refused_by_name(name: str, recipe: Recipe) -> None:
    spelling, said = UNSEEN[name]
    with pytest.raises(UnknownOperationError, match=said):
        traced(Holds(spelling), recipe)


def test_a_model_inside_a_transform_is_refused_by_name() -> None:
    model = nn.Linear(3, 2)
    for transform in (torch.vmap, lambda f: torch.func.jacrev(f), lambda f: torch.func.jacfwd(f)):
        with (
            pytest.raises(
                MethodError, match=r"inside a transform of torch.func, such as vmap, .*; call it with a batch"
            ),
            propagate(model, ATTNLRP),
        ):
            transform(model)(torch.ones(2, 3))
    with propagate(model, ATTNLRP) as trace:
        trace.explain(model(torch.ones(2, 3)).sum())
    assert trace.source_relevance(trace.sources[0]).any()


@pytest.mark.parametrize("name", ["a scripted function", "another thread", "exp", "vmap"])
def test_what_no_rule_has_seen_runs_when_not_strict(name: str) -> None:
    trace = traced(Holds(UNSEEN[name][0]), replace(LRP, strict=False))
    assert any(ran.rule == "unknown" for ran in trace.operations)
    assert trace.relevance("x").any()
    assert traced(Holds(UNSEEN[name][0]), GRADIENT).relevance("x").any()


SEEN: dict[str, tuple[Spelling, Spelling]] = {
    "sums and shapes": (
        unseen(lambda h: (h * 2.0).flatten(0, 1).sum(0) - h[0, 0]),
        lambda m, x: (h := m.a(x), m.b((h * 2.0).flatten(0, 1).sum(0) - h[0, 0]))[1],
    ),
    "vmap of constants": (
        lambda m, x: m.a(x) * torch.vmap(torch.tanh)(W)[0],
        lambda m, x: m.a(x) * W.tanh()[0],
    ),
    "unknown beside the value": (lambda m, x: (torch.polygamma(1, m.a(x)), m.b(m.a(x)))[1], lambda m, x: m.b(m.a(x))),
    "unseen beside the value": (lambda m, x: (softclamp(m.a(x)), m.b(m.a(x)))[1], lambda m, x: m.b(m.a(x))),
}


@pytest.mark.parametrize("name", SEEN)
def test_what_needs_no_rule_or_is_not_in_the_value_is_no_matter(name: str) -> None:
    one, other = SEEN[name]
    torch.testing.assert_close(relevance(one, LRP), relevance(other, LRP))


def test_a_run_of_known_operations_needs_no_walk_of_its_graph() -> None:
    """Else the walk asks each node; ``tests/conftest.py`` holds that it finds nothing more."""
    assert traced(Model(lambda m, x: F.silu(m.a(x)) * m.b(x) + torch.cat([x, x]).chunk(2)[0]), ATTNLRP).nodes.is_sure
    own = replace(ATTNLRP, linear=lambda op, x, weight, bias=None: op(x, weight, bias))
    assert not traced(Model(lambda m, x: m.a(x)), own).nodes.is_sure
    assert not traced(Model(lambda m, x: m.a(x) @ LEAF), ATTNLRP).nodes.is_sure
    assert not traced(Model(lambda m, x: checkpoint(m.a, x, use_reentrant=False)), ATTNLRP).nodes.is_sure


def test_the_first_unknown_operation_is_named_with_its_module() -> None:
    with pytest.raises(UnknownOperationError, match=r"^Model calls torch's 'polygamma'"):
        relevance(lambda m, x: torch.linalg.det(m.b(torch.polygamma(1, m.a(x))).mT @ m.a(x))[:, None], LRP)


# --------------------------------------------------------------------------- checkpoints


def keeping(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return checkpoint(function, *inputs, use_reentrant=False)


CHECKPOINTED: dict[str, tuple[Spelling, Spelling]] = {
    "with a layer": (
        lambda m, x: keeping(lambda h: m.b(h.tanh()), m.a(x)),
        lambda m, x: m.b(m.a(x).tanh()),
    ),
    "an activation alone": (lambda m, x: keeping(torch.tanh, m.a(x)), lambda m, x: m.a(x).tanh()),
    "a product": (
        lambda m, x: m.b(keeping(lambda h: h * h.sigmoid(), m.a(x))),
        lambda m, x: (h := m.a(x), m.b(h * h.sigmoid()))[1],
    ),
    "nested": (
        lambda m, x: keeping(lambda h: m.b(keeping(torch.tanh, h)), m.a(x)),
        lambda m, x: m.b(m.a(x).tanh()),
    ),
    "weights of any kind": (
        lambda m, x: keeping(lambda h: (h @ LEAF).tanh() * CACHED[0], m.a(x)),
        lambda m, x: (m.a(x) @ W).tanh() * (A @ B)[0],
    ),
}


@RECIPES
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "after"])
@pytest.mark.parametrize("name", CHECKPOINTED)
def test_the_users_own_checkpoints(name: str, inside: bool, recipe: Recipe) -> None:
    one, other = CHECKPOINTED[name]
    model = Model(one)
    with propagate(model, recipe) as trace:
        value = model(X)[0].sum()
        if inside:
            trace.explain(value)
    if not inside:
        trace.explain(value)
    torch.testing.assert_close(trace.relevance("x"), relevance(other, recipe))
    assert not model._forward_hooks


def test_flex_attention_is_refused_with_the_mend_that_there_is() -> None:
    model = Model(lambda m, x: flex_attention(*[m.a(x)[:, None]] * 3))
    with (
        pytest.raises(UnknownOperationError, match=r"^Model calls flex_attention.*attn_implementation=\"sdpa\""),
        propagate(model, LRP),
    ):
        model(X)


@pytest.mark.filterwarnings("ignore")  # of torch.compile's own
def test_flex_attention_that_transformers_compiles_is_refused_with_the_same_mend() -> None:
    """It was told to pass the model before it is compiled, which its user had not done."""
    model = models.tiny_llama()
    model.set_attn_implementation("flex_attention")
    with (
        pytest.raises(UnknownOperationError, match=r"^model calls flex_attention.*attn_implementation=\"sdpa\""),
        propagate(model, ATTNLRP),
    ):
        model(torch.tensor([[5, 9, 3]]))


def test_a_higher_order_operator_is_refused_by_name() -> None:
    model = Model(lambda m, x: m.b(torch.cond(x.sum() > 0, m.a, lambda x: m.a(x).tanh(), (x,))))
    with (
        pytest.raises(UnknownOperationError, match=r"^Model calls a higher-order operator.*torch\.cond.*plain Python"),
        propagate(model, LRP),
    ):
        model(X)
    assert not model._forward_hooks


@pytest.mark.slow  # torch.compile
def test_a_compiled_function_is_refused_by_name() -> None:
    """And is run as it is written where torch is told so."""
    function = lambda x: F.gelu(x @ W) * x.sigmoid()  # noqa: E731
    same = torch.compile(function)
    compiled, plain = Model(lambda m, x: m.b(same(m.a(x)))), Model(lambda m, x: m.b(function(m.a(x))))
    for _ in range(3):  # the compiler follows the engine's own code, each time from another place
        with (
            pytest.raises(UnknownOperationError, match=r"compiled.*torch\.compiler\.set_stance\(\"force_eager\"\)"),
            propagate(compiled, LRP) as trace,
        ):
            trace.explain(compiled(X)[0].sum())
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(relevance(compiled.function, LRP), relevance(plain.function, LRP))


class Counts(nn.Module):
    """A layer that has a state, so that it computes something else the second time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.a, self.b = 0, nn.Linear(4, 6, dtype=WIDE), nn.Linear(6, 2, dtype=WIDE)

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            self.calls += 1
            return self.b(self.a(x).tanh().sigmoid()) if self.calls > 1 else self.b(self.a(x))

        return keeping(inner, x)


def test_a_checkpoint_with_a_state_is_refused_by_name() -> None:
    model = Counts()
    with propagate(model, ATTNLRP) as trace:
        value = model(X).sum()
    with pytest.raises(TraceError, match=r"computes something else when it is run again.*switch the checkpoints off"):
        trace.explain(value)


@RECIPES
def test_a_checkpoint_of_a_loops_variable_is_refused_by_name(recipe: Recipe) -> None:
    """By then it is the last layer, whose shapes are those of the others."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.GELU()).to(WIDE) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = keeping(lambda x: x + layer(x), x)  # noqa: B023
            return x

    model = Layers()
    with propagate(model, recipe) as trace:
        value = model(X)[0].sum()
    with pytest.raises(TraceError, match="computes something else when it is run again"):
        trace.explain(value)


class Stack(nn.Module):
    """Layers in a list, of which the last is known as such, called in a checkpoint or in part."""

    def __init__(self, whole: bool, keep: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(2))
        self.whole, self.keep = whole, keep

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.keep(layer, x) if self.whole else layer[2](self.keep(layer[1], self.keep(layer[0], x)))  # type: ignore[index]
        return x


@RECIPES
@pytest.mark.parametrize("whole", [True, False], ids=["layers", "parts"])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "after"])
def test_a_last_layer_in_a_checkpoint(inside: bool, whole: bool, recipe: Recipe) -> None:
    found = []
    for keep in (keeping, lambda function, x: function(x)):
        with propagate(model := Stack(whole, keep), recipe) as trace:
            value = model(torch.arange(12.0).view(4, 3) / 7)[0].sum()
            if inside:
                trace.explain(value)
        if not inside:
            trace.explain(value)
        found.append(trace.relevance("x"))
    torch.testing.assert_close(*found)


def test_checkpoints_under_different_rules_are_refused() -> None:
    class Part(Model):
        pass

    model = nn.Sequential(Model(CHECKPOINTED["a product"][0]), Model(CHECKPOINTED["a product"][0]))
    with pytest.raises(MethodError, match=r"^1 is in a checkpoint.*other rules.*recompute=True"):
        traced(model, LRP.at("1", product=signal_take_all, linear=Gamma(0.1)))


# ------------------------------------------------------------- what is computed from outputs


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.layer = nn.Embedding(20, 8, dtype=WIDE), nn.Linear(8, 8, bias=False, dtype=WIDE)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(torch.relu(self.table(ids))).mean(1)


ONE, OTHER = torch.tensor([[1, 2, 3]]), torch.tensor([[4, 5]])
COMPUTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cosine_similarity": lambda a, b: F.cosine_similarity(a, b)[0],
    "of one and a constant": lambda a, b: F.cosine_similarity(a, b.detach())[0],
    "spelled out": lambda a, b: (a * b).sum() / (a.norm() * b.norm()),
    "normalize": lambda a, b: (F.normalize(a) @ F.normalize(b).T)[0, 0],
    "product": lambda a, b: (a * b).sum(),
    "dot": lambda a, b: torch.dot(a[0], b[0]),
    "transposed": lambda a, b: (a @ b.T)[0, 0],
    "pairwise_distance": lambda a, b: F.pairwise_distance(a, b, eps=0.0)[0],
    "cdist": lambda a, b: torch.cdist(a, b)[0, 0],
    "dist": lambda a, b: torch.dist(a, b),
    "distance spelled out": lambda a, b: (a - b).square().sum().sqrt(),
    "tanh": lambda a, b: a.tanh()[0, 0] + b[0, 1],
}


@pytest.mark.parametrize("recipe", [LRP, ATTNLRP], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("name", COMPUTED)
def test_values_computed_from_outputs_inside_the_block_have_rules(name: str, recipe: Recipe) -> None:
    model = Tower()
    with propagate(model, recipe, ledger=True) as trace:
        value = COMPUTED[name](model(ONE), model(OTHER))
    trace.explain(value)
    torch.testing.assert_close(sum(trace.source_relevance(each).sum() for each in trace.sources), value.detach())
    assert trace.ledger().closes(1e-9)


def test_a_cosine_is_half_of_each_over_its_length() -> None:
    model = Tower()
    with propagate(model, LRP) as trace:
        a, b = model(ONE), model(OTHER)
        value = F.cosine_similarity(a, b)[0]
    with propagate(model, LRP) as other:
        c, d = model(ONE), model(OTHER)
        lengths = c.detach().norm() * d.detach().norm()
        spelled = ((c * d.detach()).sum() + (c.detach() * d).sum()) / 2 / lengths
    trace.explain(value)
    other.explain(spelled)
    for one, two in zip(trace.sources, other.sources, strict=True):
        torch.testing.assert_close(trace.source_relevance(one), other.source_relevance(two))


def test_real_minilm_the_cosine_is_the_librarys_similarity(minilm: str) -> None:
    """Its relevance summed to 0.011 of 0.523 when the cosine had its plain gradient."""
    tokenizer, model = AutoTokenizer.from_pretrained(minilm), AutoModel.from_pretrained(minilm, dtype=WIDE).eval()
    texts = ("A man is playing a guitar.", "Someone plays an instrument.")
    sides = [tokenizer(text, return_tensors="pt") for text in texts]
    found = []
    for cosine in (
        lambda a, b: F.cosine_similarity(a, b)[0],
        lambda a, b: (F.normalize(a) @ F.normalize(b).T)[0, 0],
        lambda a, b: Similarity().value(torch.cat([a[0], b[0]])),
    ):
        with propagate(model, LRP, (), ledger=True) as trace:
            value = cosine(*(model(**side).last_hidden_state.mean(1) for side in sides))
        trace.explain(value)
        assert trace.ledger().closes(1e-9)
        found.append(trace.source_relevance(trace.sources[0]))
    assert found[0].sum() > 0.1
    torch.testing.assert_close(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])


def test_distances_spelled_out_are_the_same() -> None:
    found = []
    for name in ("pairwise_distance", "cdist", "dist", "distance spelled out"):
        model = Tower()
        with propagate(model, LRP) as trace:
            value = COMPUTED[name](model(ONE), model(OTHER))
        trace.explain(value)
        found.append(trace.source_relevance(trace.sources[0]))
    for each in found:
        torch.testing.assert_close(each, found[-1])


@pytest.mark.parametrize("name", COMPUTED)
def test_values_computed_outside_the_block_are_refused_or_told_what_from(name: str) -> None:
    model = Tower()
    with propagate(model, LRP, ledger=True) as trace:
        both = torch.stack([model(ONE), model(OTHER)])
    value = COMPUTED[name](*both)
    with pytest.raises(UnknownOperationError, match=r"computed by .* outside of the block.*outputs=logits"):
        trace.explain(value)
    trace.explain(value, outputs=both)
    leaf = both.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(COMPUTED[name](*leaf), leaf)
    kept = float(value.detach() - (leaf * gradient).sum().detach())
    found = {entry.name: entry.value for entry in trace.ledger().entries}.get("target", 0.0)
    assert found == pytest.approx(kept, abs=1e-12)
    assert trace.ledger().closes(1e-9)


def test_sums_of_outputs_are_explained_outside_the_block() -> None:
    model = Tower()
    with propagate(model, LRP) as trace:
        logits = model(ONE)
    value = trace.explain(logits[0, 2] - 2 * logits[0, 3:5].mean() + 1.0)
    torch.testing.assert_close(trace.source_relevance(trace.sources[0]).sum() + 1.0, value)


def test_other_work_in_the_block_is_plain() -> None:
    model, other = Tower(), Tower()
    with propagate(model, LRP):
        model(ONE)
        x = X.clone().requires_grad_()
        (found,) = torch.autograd.grad((x.tanh() * x).sum(), x)
        value = F.cosine_similarity(other(ONE), other(OTHER))[0]
    (expected,) = torch.autograd.grad((x.tanh() * x).sum(), x)
    assert torch.equal(found, expected)
    (gradient,) = torch.autograd.grad(value, other.layer.weight)
    again = F.cosine_similarity(other(ONE), other(OTHER))[0]
    assert torch.equal(gradient, torch.autograd.grad(again, other.layer.weight)[0])


def test_a_probability_says_what_to_pass() -> None:
    model = Tower()
    with propagate(model, LRP) as trace:
        value = model(ONE).softmax(-1)[0, 1]
    with pytest.raises(TraceError, match="softmax that the recipe holds constant; pass a logit"):
        trace.explain(value)


def test_a_loss_beside_the_logits_is_no_matter() -> None:
    model = models.tiny_llama()
    with propagate(model, LRP) as trace:
        outputs = model(input_ids=IDS, labels=IDS)
    trace.explain(outputs.logits[0, -1, 3], keep=True)
    with pytest.raises(UnknownOperationError, match="'cross_entropy_loss'"):
        trace.explain(outputs.loss)


# ------------------------------------------------------------------- the true cause of errors


@pytest.mark.parametrize("turned", [False, True], ids=["part first", "model first"])
def test_nested_blocks_on_a_part_of_the_model_are_refused(turned: bool) -> None:
    model = Model(lambda m, x: m.b(m.a(x)))
    outer, inner = (model, model.a) if turned else (model.a, model)
    with (
        pytest.raises(TraceError, match=r"a part of this one.*recipe\.at"),
        propagate(outer, LRP),
        propagate(inner, ATTNLRP),
    ):
        pass
    traced(model, LRP)


class LooksUp(nn.Module):
    def __init__(self, at: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.at = at
        self.W_E, self.W_pos = nn.Parameter(normal(20, 8)), nn.Parameter(normal(9, 8, seed=1))
        self.head = nn.Linear(8, 4, bias=False, dtype=WIDE)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.W_E[self.at(tokens)] + self.W_pos[: tokens.shape[-1]])


@pytest.mark.parametrize(
    "at", [lambda ids: ids, lambda ids: ids.long(), lambda ids: (ids, slice(None))], ids=["ids", "cast", "with a slice"]
)
def test_a_parameter_that_is_indexed_by_the_input_is_a_source(at: Any) -> None:
    model = LooksUp(at)
    with propagate(model, LRP, ledger=True) as trace:
        value = trace.explain(model(ONE)[0, 0, 1])
    (source,) = trace.sources
    assert source.paths == ("W_E",)
    assert source.ids is not None
    assert torch.equal(source.ids, ONE)
    assert trace.ledger().closes(1e-9)
    positions = {entry.name: entry.value for entry in trace.ledger().entries}["W_pos"]
    torch.testing.assert_close(trace.relevance("W_E").sum() + positions, value)


ONE_HOT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "matmul": lambda ids, w: F.one_hot(ids, len(w)).to(w.dtype) @ w,
    "linear": lambda ids, w: F.linear(F.one_hot(ids, len(w)).double(), w.T),
    "einsum": lambda ids, w: torch.einsum("btv,vd->btd", F.one_hot(ids, len(w)).type_as(w), w),
    "twice cast": lambda ids, w: F.one_hot(ids, len(w)).to(torch.int32).double() @ w,
    "of the identity": lambda ids, w: torch.eye(len(w), dtype=w.dtype)[ids] @ w,
    "in another shape": lambda ids, w: (F.one_hot(ids, len(w)).view(-1, len(w)).double() @ w).view(*ids.shape, -1),
    "turned round": lambda ids, w: (w.T @ F.one_hot(ids, len(w)).mT.to(w)).mT,
    "by comparison": lambda ids, w: (ids[..., None] == torch.arange(len(w))).double() @ w,
    "by comparison, and times 1": lambda ids, w: (torch.arange(len(w)) == ids.unsqueeze(-1)) * 1.0 @ w.float(),
    "chosen": lambda ids, w: torch.where(ids[..., None] == torch.arange(len(w)), 1.0, 0.0).double() @ w,
    "scattered": lambda ids, w: w.new_zeros(*ids.shape, len(w)).scatter(-1, ids[..., None], 1.0) @ w,
    "scattered in place": lambda ids, w: w.new_zeros(*ids.shape, len(w)).scatter_(-1, ids.unsqueeze(-1), 1) @ w,
    "scattered whole numbers": lambda ids, w: (
        ids.new_zeros(*ids.shape, len(w)).scatter(-1, ids[..., None], 1).to(w) @ w
    ),
    "written": lambda ids, w: written(ids, w) @ w,
    "of copied ids": lambda ids, w: F.one_hot(ids.int().long().clone(), len(w)).double() @ w,
}


def written(ids: Tensor, w: Tensor) -> Tensor:
    rows = w.new_zeros(*ids.shape, len(w))
    rows[torch.arange(len(ids))[:, None], torch.arange(ids.shape[-1]), ids] = 1
    return rows


TABLES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "gather": (lambda ids, w: w.gather(0, ids.view(-1, 1).expand(-1, 8)).view(*ids.shape, 8), "W_E"),
    "gather of many": (lambda ids, w: w.expand(len(ids), -1, -1).gather(1, ids[..., None].expand(-1, -1, 8)), "W_E"),
    "take along a dimension": (lambda ids, w: w.take_along_dim(ids.view(-1, 1), 0).view(*ids.shape, 8), "W_E"),
    "transposed": (lambda ids, w: w.T[:, ids].permute(1, 2, 0), "W_E"),
    "dots": (lambda ids, w: w.T[..., ids].permute(1, 2, 0), "W_E"),
    "dots after": (lambda ids, w: w[ids, ...], "W_E"),
    "selected": (lambda ids, w: w.T.index_select(1, ids.flatten()).T.reshape(*ids.shape, 8), "W_E"),
    "scaled": (lambda ids, w: (w * 4)[ids] / 4, "an embedding"),
    "made of two": (lambda ids, w: (w @ torch.eye(8, dtype=w.dtype))[ids], "an embedding"),
    "copied ids": (lambda ids, w: w[ids.clone()], "W_E"),
    "scaled, in an embedding": (lambda ids, w: F.embedding(ids, w * 4) / 4, "an embedding"),
}


class Told(nn.Module):
    """A constant of the model's own that is told to require a gradient, right before it is multiplied with."""

    def __init__(self, tell: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tell, self.layer = tell, nn.Linear(3, 3, dtype=WIDE)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.layer(x)
        return h * self.tell(torch.zeros_like(h) + 2)


def told_by_attribute(x: Tensor) -> Tensor:
    x.requires_grad = True
    return x


TELLING: dict[str, Callable[[Tensor], Tensor]] = {
    "method": lambda x: x.requires_grad_(),
    "attribute": told_by_attribute,
    "function": lambda x: torch.ones_like(x, requires_grad=True) * 2,
}


@pytest.mark.parametrize("recipe", [LRP, ATTNLRP], ids=["lrp", "attnlrp"])
@pytest.mark.parametrize("how", TELLING)
def test_a_constant_that_is_told_to_require_a_gradient_is_one(how: str, recipe: Recipe) -> None:
    x = torch.randn(2, 3, dtype=WIDE)
    found = []
    for tell in (lambda x: x, TELLING[how]):
        model = Told(tell)
        with propagate(model, recipe) as trace:
            out = model(x)
        trace.explain(out.sum())
        found.append(trace.relevance("x"))
    torch.testing.assert_close(*found, rtol=0, atol=0)


DEGREES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "scatter_add": lambda to, ones: (torch.zeros(4, dtype=WIDE).scatter_add_(0, to, ones) + 1).rsqrt(),
    "index_add": lambda to, ones: 1 / (torch.zeros(4, dtype=WIDE).index_add(0, to, ones) + 1).sqrt(),
    "scatter_reduce": lambda to, ones: (torch.zeros(4, dtype=WIDE).scatter_reduce(0, to, ones, "sum") + 1) ** -0.5,
    "bincount": lambda to, ones: torch.where(ones[:4] > 0, (torch.bincount(to) + 1).to(WIDE).rsqrt(), 0.0),
}
"""One over the root of how many edges a node of a graph has, and one."""


class Graph(nn.Module):
    """A graph convolution by hand (Kipf and Welling 2017), whose edges are called by no word for them."""

    def __init__(self, degree: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.degree, self.project = degree, nn.Linear(5, 3, bias=False, dtype=WIDE)

    def forward(self, x: Tensor, ei: Tensor) -> Tensor:
        of, to = ei
        scale = self.degree(to, torch.ones(ei.shape[1], dtype=WIDE))
        h: Tensor = self.project(x)
        return torch.zeros_like(h).index_add(0, to, h[of] * (scale[of] * scale[to])[:, None])


@pytest.mark.parametrize("name", DEGREES)
def test_how_many_edges_a_node_has_is_no_table_of_tokens(name: str) -> None:
    model = Graph(DEGREES[name])
    x, edges = torch.randn(4, 5, dtype=WIDE), torch.tensor([[0, 1, 2, 3, 1, 0], [1, 2, 3, 0, 0, 2]])
    with propagate(model, ATTNLRP) as trace:
        out = model(x, edges)
    value = trace.explain(out[0, 1])
    assert [source.paths for source in trace.sources] == [("x",)]
    torch.testing.assert_close(trace.relevance("x").sum(), value, rtol=1e-12, atol=0)


class OneHot(LooksUp):
    """Positions come from an embedding, so that there is a source without the tokens."""

    def __init__(self, rows: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(lambda ids: ids)
        self.rows, self.positions = rows, nn.Embedding(9, 8, dtype=WIDE)

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.positions(torch.arange(tokens.shape[-1]))
        return self.head((places + self.rows(tokens, self.W_E)).tanh())


@pytest.mark.parametrize("recipe", [LRP, GRADIENT])
@pytest.mark.parametrize("name", ONE_HOT)
def test_one_hot_ids_are_a_source(name: str, recipe: Recipe) -> None:
    found = []
    for rows, path in (ONE_HOT[name], "one_hot"), (lambda ids, w: w[ids], "W_E"):
        model = OneHot(rows)
        with propagate(model, recipe, ledger=True) as trace:
            trace.explain(model(ONE)[0, 0, 1])
        assert [source.paths for source in trace.sources] == [("positions",), (path,)]
        assert trace.sources[1].ids is not None
        assert torch.equal(trace.sources[1].ids, ONE)
        is_narrow = trace.sources[1].value.dtype is torch.float32  # as numbers of no dtype make it
        assert trace.ledger().closes(1e-6 if is_narrow else 1e-9)
        found.append(trace.relevance(path).sum(-1))
    torch.testing.assert_close(*found, check_dtype=False, rtol=1e-6, atol=1e-6 if found[0].dtype != WIDE else 1e-12)


@pytest.mark.parametrize("recipe", [LRP, GRADIENT])
@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_looked_up_in_beside_another_source(name: str, recipe: Recipe) -> None:
    found = []
    for rows, path in TABLES[name], (lambda ids, w: w[ids], "W_E"):
        model = OneHot(rows)
        with propagate(model, recipe, ledger=True) as trace:
            logits = model(ONE)
            trace.explain(logits[0, 0, 1])
        assert torch.equal(logits, model(ONE))
        assert [source.paths for source in trace.sources] == [("positions",), (path,)]
        assert trace.sources[1].ids is not None
        assert torch.equal(trace.sources[1].ids.flatten(), ONE.flatten())
        assert trace.ledger().closes(1e-9)
        found.append(trace.source_relevance(trace.sources[1]).reshape(*ONE.shape, -1).sum(-1))
    torch.testing.assert_close(*found)


COMPUTED_IDS: dict[str, Callable[[Tensor], Any]] = {
    "clamp": lambda ids: ids.clamp(min=0),
    "clamp_max": lambda ids: ids.clamp_max(18),
    "added": lambda ids: ids + 1,
    "added from the left": lambda ids: 1 + ids,
    "added a tensor": lambda ids: torch.arange(ids.shape[-1]) + ids - torch.arange(ids.shape[-1]),
    "taken off": lambda ids: 19 - ids,
    "multiplied": lambda ids: ids * (ids != 3),
    "modulo": lambda ids: ids % 7,
    "floor": lambda ids: ids // 2,
    "divided": lambda ids: torch.div(ids, 2, rounding_mode="floor"),
    "absolute": lambda ids: (-ids).abs(),
    "where": lambda ids: ids.where(ids > 3, 0),
    "where of torch": lambda ids: torch.where(ids > 3, ids, torch.zeros_like(ids)),
    "masked": lambda ids: ids.masked_fill(ids < 3, 0),
    "chosen": lambda ids: ids[:, torch.arange(ids.shape[-1])],
    "mapped": lambda ids: torch.arange(20).flip(0)[ids],
    "selected": lambda ids: ids.index_select(1, torch.arange(ids.shape[-1])),
    "gathered": lambda ids: ids.gather(1, torch.zeros_like(ids)),
    "rolled": lambda ids: ids.roll(1, -1),
    "flipped": lambda ids: ids.flip(-1),
    "padded": lambda ids: F.pad(ids, (1, 0))[:, :-1],
    "put together": lambda ids: torch.cat([ids.new_zeros(len(ids), 1), ids[:, :-1]], 1),
    "shifted": lambda ids: shifted(ids),
    "larger": lambda ids: torch.maximum(ids, torch.full_like(ids, 4)),
    "sorted": lambda ids: ids.sort(-1)[0],
    "sorted by torch": lambda ids: torch.sort(input=ids).values,
    "the largest": lambda ids: ids.topk(ids.shape[-1], -1)[0],
    "found": lambda ids: torch.searchsorted(torch.arange(20), ids),
    "in buckets": lambda ids: torch.bucketize(ids, torch.arange(0, 20, 2)),
    "of one-hot": lambda ids: F.one_hot(ids, 20).argmax(-1),
    "no id twice": lambda ids: (lambda found: found[0][found[1]])(torch.unique(ids, return_inverse=True)),
    "a list": lambda ids: ids[0].tolist(),
}


def shifted(ids: Tensor) -> Tensor:
    out = torch.zeros_like(ids)
    out[:, 1:] = ids[:, :-1]
    return out


@pytest.mark.parametrize("is_constant", [False, True], ids=["parameter", "table"])
@pytest.mark.parametrize("name", COMPUTED_IDS)
def test_ids_that_are_computed_with_are_looked_up_beside_another_source(name: str, is_constant: bool) -> None:
    """As in an embedding, which needs not know what its ids are."""
    at, found = COMPUTED_IDS[name], []
    for look in (lambda ids, w: w[at(ids)], lambda ids, w: F.embedding(torch.as_tensor(at(ids)), w)):
        model = OneHot(lambda ids, w, look=look: look(ids, w * 1 if is_constant else w))
        with propagate(model, LRP, ledger=True) as trace:
            trace.explain(model(ONE)[..., 0, 1].sum())
        assert trace.ledger().closes(1e-9)
        assert [source.paths[0] for source in trace.sources] == ["positions", "an embedding" if is_constant else "W_E"]
        assert torch.equal(trace.sources[1].ids, torch.as_tensor(at(ONE)))
        found.append(trace.source_relevance(trace.sources[1]))
    torch.testing.assert_close(*found)


def test_a_list_of_ids_is_looked_up_in_a_constant_though_it_is_the_first() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("rows", normal(20, 8))
            self.head = nn.Linear(8, 4, dtype=WIDE)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.rows[tokens[0].tolist()] + self.rows[list(range(tokens.shape[-1]))])

    model = Rows()
    with propagate(model, LRP) as trace:
        trace.explain(model(ONE)[0, 1])
    assert [source.ids.tolist() for source in trace.sources if source.ids is not None] == [ONE[0].tolist()]


LOST_IDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "item": lambda ids, w: torch.stack([w[each.item()] for each in ids[0]]),
    "int": lambda ids, w: torch.stack([w[int(each)] for each in ids[0]]),
    "numpy": lambda ids, w: w[ids[0].numpy()],
    "a list that is computed with": lambda ids, w: (w * 1)[[each + 1 for each in ids[0].tolist()]],
    "counted": lambda ids, w: (torch.bincount(ids[0], minlength=20).to(w) @ w).expand(ids.shape[-1], -1),
    "a cast": lambda ids, w: ids[0].to(w)[:, None] * w.mean(0),
    "rows by number": lambda ids, w: torch.cat([w.narrow(0, int(each), 1) for each in ids[0]]),
}


@pytest.mark.parametrize("name", LOST_IDS)
def test_ids_that_are_lost_are_no_explanation_of_positions(name: str) -> None:
    model = OneHot(LOST_IDS[name])
    with (
        propagate(model, LRP) as trace,
        pytest.raises(TraceError, match=r"OneHot takes ids of tokens by .* nothing was seen that tokens are"),
    ):
        trace.explain(model(ONE)[0, 1])


def test_ids_may_be_looked_at() -> None:
    """A model may also print its ids, or ask for their number."""

    def look(ids: Tensor, w: Tensor) -> Tensor:
        assert len(ids[0].tolist()) == int(ids.float().isfinite().sum())
        return F.embedding(torch.tensor([each % 20 for each in ids[0].tolist()]), w)

    model = OneHot(look)
    with propagate(model, LRP) as trace:
        trace.explain(model(ONE)[0, 1])
    assert [source.paths for source in trace.sources] == [("positions",), ("W_E",)]


@pytest.mark.parametrize("at", [lambda n: torch.arange(n) + 1, lambda n: list(range(n))], ids=["tensor", "list"])
def test_positions_are_no_ids(at: Callable[[int], Any]) -> None:
    model = OneHot(lambda ids, w: w[at(ids.shape[-1])])
    with propagate(model, LRP) as trace:
        trace.explain(model(ONE)[0, 1])
    assert [source.paths for source in trace.sources] == [("positions",)]


@pytest.mark.parametrize("name", ["position_ids", "attention_mask"])
def test_a_table_that_is_chosen_from_by_positions_is_a_constant(name: str) -> None:
    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(20, 8, dtype=WIDE)
            self.register_buffer("cos", normal(9, 8))

        def forward(self, tokens: Tensor, **places: Tensor) -> Tensor:
            return self.table(tokens) * self.cos[places[name]]

    model = Turns()
    with propagate(model, LRP) as trace:
        trace.explain(model(ONE, **{name: torch.arange(ONE.shape[-1])[None]})[0, 0, 1])
    assert [source.paths for source in trace.sources] == [("table",)]


class Selects(LooksUp):
    def forward(self, tokens: Tensor) -> Tensor:
        rows = torch.index_select(self.W_E, 0, tokens.flatten()).view(*tokens.shape, -1)
        return self.head(rows + self.W_pos[: tokens.shape[-1]])


def test_rows_that_are_selected_by_the_input_are_a_source() -> None:
    found = []
    for model in Selects(lambda ids: ids), LooksUp(lambda ids: ids):
        with propagate(model, LRP) as trace:
            trace.explain(model(ONE)[0, 0, 1])
        found.append(trace.relevance("W_E").view(-1, 8))
    torch.testing.assert_close(*found)


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4, dtype=WIDE)

    def forward(self, batch: Any) -> Tensor:
        return self.head(batch["x"] if isinstance(batch, dict) and "x" in batch else batch[0])


class Pair(NamedTuple):
    x: Tensor
    y: int = 1


@pytest.mark.parametrize(
    ("batch", "path"),
    [
        ({"x": X}, "batch.x"),
        ([X], "batch.0"),
        ((X, 1), "batch.0"),
        (OrderedDict(x=X), "batch.x"),
        (BaseModelOutput(last_hidden_state=X), "batch.last_hidden_state"),
        (Pair(X), "batch.0"),
    ],
)
def test_inputs_in_lists_and_dictionaries_are_found(batch: Any, path: str) -> None:
    model = Takes()
    with propagate(model, LRP) as trace:
        trace.explain(model(batch)[0, 0, 0])
    assert trace.relevance(path).any()
    assert not X.requires_grad


def test_where_gradients_are_off_it_says_so() -> None:
    model = models.tiny_llama()
    with propagate(model, LRP) as trace:
        found = model.generate(IDS, max_new_tokens=2, return_dict_in_generate=True, output_logits=True)
    with pytest.raises(TraceError, match=r"gradients are off.*generate"):
        trace.explain(found.logits[0][0, 3])


def test_a_method_of_the_model_is_not_the_model() -> None:
    model = Takes()
    with propagate(model, LRP) as trace:
        value = model.head(X.clone().requires_grad_()).sum()
    with pytest.raises(TraceError, match=r"methods, as model\.encode\(\), nor a part"):
        trace.explain(value)


def test_an_input_is_no_mask_for_its_name() -> None:
    class Masked(Takes):
        def forward(self, masked_image: Tensor, attention_mask: Tensor, mask_of_ones: Tensor) -> Tensor:
            return self.head(masked_image * attention_mask * mask_of_ones)

    model, ones = Masked(), torch.ones(4, dtype=WIDE)
    with propagate(model, LRP) as trace:
        trace.explain(model(X, 0.5 * ones, mask_of_ones=ones).sum())
    assert [source.paths for source in trace.sources] == [("masked_image",)]


def test_compiled_models_name_what_to_pass() -> None:
    compiled = torch.compile(Takes())
    with pytest.raises(TraceError, match=r"torch\.compile.*model\._orig_mod"), propagate(compiled, LRP):
        pass
    with pytest.raises(TraceError, match=r"^0 is compiled.*0\._orig_mod"), propagate(nn.Sequential(compiled), LRP):
        pass
    model = Takes()
    model.compile()
    with pytest.raises(TraceError, match=r"compiled by its compile\(\)"), propagate(model, LRP):
        pass
    scripted = torch.jit.script(nn.Linear(4, 4))
    with (
        pytest.raises(TraceError, match=r"compiled by torch\.jit.*the module it was made of"),
        propagate(scripted, LRP),
    ):
        pass


def test_a_model_that_switches_gradients_off_is_told_so() -> None:
    class Frozen(nn.Module):
        def __init__(self, looks_up: bool) -> None:
            super().__init__()
            self.tower, self.head = nn.Linear(4, 4, dtype=WIDE), nn.Linear(4, 4, dtype=WIDE)
            self.table = nn.Embedding(4, 4, dtype=WIDE) if looks_up else nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                seen = self.tower(self.table(x))
            return self.head(seen)

    for model, x, told in (
        (Frozen(looks_up=False), X, r"or where gradients are off, as table computes"),
        (Frozen(looks_up=True), torch.tensor([[1, 2]]), r"not inside of the model's own torch\.no_grad\(\)"),
    ):
        with propagate(model, LRP) as trace:
            value = model(x).sum()
        with pytest.raises(TraceError, match=told):
            trace.explain(value)


def test_a_part_without_gradients_warns() -> None:
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tower, self.head = nn.Linear(4, 4, dtype=WIDE), nn.Linear(4, 4, dtype=WIDE)

        def forward(self, x: Tensor, pixels: Tensor) -> Tensor:
            with torch.no_grad():
                seen = self.tower(pixels).tanh()
            return self.head(x + seen)

    model = Frozen()
    with propagate(model, LRP) as trace:
        value = model(X, X).sum()
    with pytest.warns(UserWarning, match=r"nothing arrives at pixels: tower computes where gradients are off"):
        trace.explain(value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        traced(Model(lambda m, x: m.a(x)), LRP)
