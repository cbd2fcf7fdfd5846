"""Layers that are computed again in the backward pass: the same numbers, for the memory of one layer."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, RecurrentGemmaConfig, RecurrentGemmaForCausalLM, StaticCache

from lrpx.engine import Trace, propagate
from lrpx.engine._book import Book
from lrpx.errors import MethodError, TraceError, UnknownOperationError
from lrpx.recipes import ATTNLRP, GRADIENT, LRP
from lrpx.rules import Gamma
from tests.engine.samples import SAMPLES, last_row, output_of
from tests.engine.test_scope import module_of, snapshot, training_step
from tests.reference import models
from tests.work import aborting

if TYPE_CHECKING:
    from collections.abc import Callable

    from lrpx.recipes import Recipe

IDS = torch.tensor([[5, 9, 3, 12, 7]])
BY_LAYER = ATTNLRP.at(layers=range(1, 2), use=LRP).at(layers=0, linear=Gamma(0.1))
RECIPES = [LRP, ATTNLRP, GRADIENT, BY_LAYER]
NAMES = [
    "llama", "gpt2", "bert", "t5", "mixtral", "mamba", "vit", "bloom", "albert", "modernbert", "whisper", "deberta_v2",
]  # fmt: skip


def run(
    model: nn.Module, recipe: Recipe, batch: dict[str, Tensor] | None = None, inside: bool = False, **options: Any
) -> Trace:
    """One logit a row explained, in the block or after it."""
    batch = {"input_ids": IDS} if batch is None else batch
    with propagate(model, recipe, **({"observe": ()} | options)) as trace:
        value = last_row(output_of(model, batch))[:, 1]
        if inside:
            trace.explain(value)
    if not inside:
        trace.explain(value)
    return trace


def assert_same(one: Trace, other: Trace, tolerance: float = 0.0) -> None:
    """Every source and every observed place, to the bit by default, and the ledger (its sums to rounding)."""
    assert [source.paths for source in one.sources] == [source.paths for source in other.sources]
    assert [(place.path, place.side) for place in one.places] == [(place.path, place.side) for place in other.places]
    for a, b in zip((*one.sources, *one.places), (*other.sources, *other.places), strict=True):
        for found in (Trace.gradient_of, Trace.relevance_of):
            torch.testing.assert_close(found(one, a.value), found(other, b.value), rtol=tolerance, atol=tolerance)
    if one.tap(Book) is not None and other.tap(Book) is not None:
        for a, b in zip(one.ledger().entries, other.ledger().entries, strict=True):
            assert (a.kind, a.name) == (b.kind, b.name)
            assert a.value == pytest.approx(b.value, rel=1e-12, abs=1e-12)


def saved_tensors_hooks_are_gone() -> bool:
    """Whether autograd saves tensors in this thread as ever."""
    x = torch.ones(2, requires_grad=True)
    y = x * x
    return y.grad_fn is not None and y.grad_fn._saved_self is x


@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in NAMES if n != "llama")])
def test_the_same_numbers(name: str) -> None:
    sample = SAMPLES[name]
    model = sample.build(**({"experts_implementation": "eager"} if name == "mixtral" else {}))
    before = snapshot(model)
    for recipe in RECIPES:
        if name == "albert" and recipe is BY_LAYER:  # refused: its one layer runs twice
            recipe = ATTNLRP.at(layers=slice(None), use=LRP)
        want = run(model, recipe, sample.batch(), observe=("*",), ledger=True)
        for inside in (True, False):
            assert_same(run(model, recipe, sample.batch(), inside, observe=("*",), ledger=True, recompute=True), want)
    assert_same(run(model, ATTNLRP, sample.batch(), recompute=True), run(model, ATTNLRP, sample.batch()))
    assert snapshot(model) == before


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "mamba"])
def test_the_forward_pass_is_the_models_own(name: str) -> None:
    sample = SAMPLES[name]
    model = sample.build().requires_grad_(False)
    with torch.no_grad():
        want = output_of(model, sample.batch())
    with propagate(model, ATTNLRP, recompute=True):
        assert torch.equal(output_of(model, sample.batch()), want)


def test_a_batch_of_values_and_free_parameters() -> None:
    model = models.tiny_gpt2().requires_grad_(True)
    batch = {"input_ids": torch.cat([IDS, IDS.flip(1)])}
    before = snapshot(model)
    assert_same(run(model, ATTNLRP, batch, ledger=True, recompute=True), run(model, ATTNLRP, batch, ledger=True))
    assert snapshot(model) == before


# ------------------------------------------------------------------------------- memory


class Memory(TorchDispatchMode):
    """The bytes of the tensors that operations make, now and at most; the model's own do not count."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers())}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in self.seen:
                storage = x.untyped_storage()
                self.seen.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self.freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def freed(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def peak_memory(layers: int, **options: Any) -> int:
    """The most bytes alive in one attribution, with Python's garbage collector off."""
    model = models.tiny_llama(num_hidden_layers=layers, hidden_size=32, intermediate_size=96)
    ids = torch.randint(3, 31, (1, 48), generator=torch.Generator().manual_seed(0))
    gc.collect()
    gc.disable()
    try:
        with Memory(model) as memory:
            run(model, ATTNLRP, {"input_ids": ids}, **options)
    finally:
        gc.enable()
    return memory.peak


@pytest.mark.parametrize("inside", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["inside", "after"])
@pytest.mark.parametrize("ledger", [True, False], ids=["ledger", "no ledger"])
def test_the_memory_is_that_of_one_layer(ledger: bool, inside: bool) -> None:
    options = {"ledger": ledger, "inside": inside}
    few, many = peak_memory(2, **options), peak_memory(12, **options)
    few_again, many_again = peak_memory(2, recompute=True, **options), peak_memory(12, recompute=True, **options)
    assert many_again < many / (2 if ledger else 4)
    # what a layer more costs: its input, and what the ledger measures, not its inside
    assert (many_again - few_again) < (many - few) / (2 if ledger else 8)


# ------------------------------------------------------------------ what the user has set


def test_a_cache_by_default_is_not_filled() -> None:
    model = models.tiny_llama()
    with propagate(model, ATTNLRP, recompute=True) as trace:
        output = model(input_ids=IDS)
        trace.explain(output.logits[0, -1, 1])
    assert output.past_key_values is None
    assert model.config.use_cache
    with propagate(model, ATTNLRP, recompute=True) as trace:
        trace.explain(model(IDS, use_cache=True).logits[0, -1, 1])
    assert torch.equal(trace.relevance("model.embed_tokens"), run(model, ATTNLRP).relevance("model.embed_tokens"))


@pytest.mark.parametrize("kind", [DynamicCache, StaticCache])
def test_a_cache_of_the_users_is_refused_and_left_empty(kind: Any) -> None:
    model = models.tiny_llama()
    cache = kind(config=model.config, **({"max_cache_len": 16} if kind is StaticCache else {}))
    with propagate(model, ATTNLRP, recompute=True), pytest.raises(TraceError, match="leave past_key_values out"):
        model(input_ids=IDS, past_key_values=cache)
    assert int(cache.get_seq_length()) == 0


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "after"])
def test_dropout_draws_the_same_numbers_again(inside: bool) -> None:
    model = models.tiny_gpt2(resid_pdrop=0.3, attn_pdrop=0.3, attn_implementation="eager").train()

    def relevance(**options: Any) -> tuple[Trace, Tensor]:
        torch.manual_seed(0)
        return run(model, ATTNLRP, inside=inside, **options), torch.get_rng_state()

    with torch.random.fork_rng():
        (want, state), (found, state_again) = relevance(), relevance(recompute=True)
    assert_same(found, want)
    assert torch.equal(state, state_again)


def test_autocast_is_on_again() -> None:
    model, found = models.tiny_gpt2().float(), []
    for recompute in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16), propagate(model, ATTNLRP, recompute=recompute) as trace:
            value = model(input_ids=IDS).logits[0, -1, 1]
        trace.explain(value)
        found.append(trace.relevance("transformer.wte"))
    assert torch.equal(*found)


class InPlace(nn.Module):
    """A layer that changes its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        x += torch.tanh(self.linear(x))
        return x


class Chain(nn.Module):
    """An embedding and layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(31, 4).double(), nn.ModuleList(layers)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


class Attended(nn.Module):
    """A layer of two inputs, whose keys may be its queries."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True).double()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x * torch.sigmoid(y) + self.attention(x, y, y)[0]


@pytest.mark.parametrize("recipe", [ATTNLRP, LRP, GRADIENT], ids=lambda recipe: recipe.name)
def test_a_tensor_that_a_layer_is_given_twice_is_one_again(recipe: Recipe) -> None:
    class Twice(Chain):
        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embed(input_ids)
            for layer in self.layers:
                x = layer(x, y=x)
            return x

    torch.manual_seed(0)
    model = Twice(Attended(), Attended())
    found = []
    for recompute in (False, True):
        with propagate(model, recipe, observe=(), recompute=recompute) as trace:
            trace.explain(model(IDS)[..., 1].sum())
        found.append(trace.source_relevance(trace.sources[0]))
    assert torch.equal(*found)


class Sigmoids(nn.Module):
    """Attention of sigmoids under a mask."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.query, self.value, self.mask = nn.Linear(4, 4).double(), nn.Linear(4, 4).double(), mask

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.query(x) @ x.mT).sigmoid() * self.mask @ self.value(x)


def test_a_mask_is_not_asked_for_where_it_is_forgotten() -> None:
    torch.manual_seed(0)
    ones = torch.ones(5, 5, dtype=torch.float64)
    model = Chain(Sigmoids(ones.tril()), Sigmoids(ones.tril()))
    found = []
    for recompute in (False, True):
        with propagate(model, LRP, observe=(), recompute=recompute) as trace:
            trace.explain(model(IDS)[..., 1].sum())
        found.append(trace.source_relevance(trace.sources[0]))
    assert torch.equal(*found)


def test_a_diagonal_that_a_forgotten_mask_has_made_is_refused() -> None:
    model = Chain(Sigmoids(torch.eye(5, dtype=torch.float64)))
    with (
        pytest.raises(UnknownOperationError, match=r"whether what Mul has made is a diagonal.*leave recompute out"),
        propagate(model, LRP, recompute=True),
    ):
        model(IDS)


def test_a_layer_that_changes_its_input_is_refused() -> None:
    model = Chain(InPlace(), InPlace())
    with propagate(model, ATTNLRP, recompute=True) as trace:
        output = model(IDS)
    with pytest.raises(TraceError, match="without recompute=True"):
        trace.explain(output.sum())


def test_a_layer_whose_cache_grows_is_refused() -> None:
    """As XLM's, which makes one whether it is asked to or not."""

    class Caching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cache: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.cache.append(x)
            return x.tanh() * torch.cat(self.cache, 1)

    model = Chain(Caching(), nn.Tanh())
    with propagate(model, ATTNLRP, recompute=True) as trace:
        output = model(IDS)
    with pytest.raises(TraceError, match="Caching computes something else when it is run again"):
        trace.explain(output.sum())


def test_layers_on_parts_run_again_with_the_strides_there_were() -> None:
    """torch folds a product, or not, by the strides of a dimension of size 1."""

    class OfParts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers = nn.Embedding(31, 4), nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

        def forward(self, input_ids: Tensor) -> Tensor:
            parts = self.embed(input_ids).split(1, 1)
            return torch.cat([layer(part) for layer, part in zip(self.layers, parts, strict=True)], 1)

    model, found = OfParts().double(), []
    for recompute in (False, True):
        with propagate(model, ATTNLRP, recompute=recompute) as trace:
            trace.explain(model(torch.tensor([[1, 2, 3]])).sum())
        found.append(trace.relevance("embed"))
    assert torch.equal(*found)


def test_a_layer_that_takes_its_input_out_of_a_list_is_refused() -> None:
    """As TabPFN's, which saves memory so."""

    class Popping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            given.append(x)
            return self.inside(given)

        def inside(self, container: list[Tensor]) -> Tensor:
            x = container.pop(0) if len(container) == 1 else container[5]
            return x.tanh() * x.roll(1, -1)

    given: list[Tensor] = []
    model = Chain(Popping(), nn.Tanh())
    with propagate(model, ATTNLRP, recompute=True) as trace:
        output = model(IDS)
    given.append(output)
    with pytest.raises(TraceError, match="Popping computes something else when it is run again"):
        trace.explain(output.sum())


def test_a_layer_that_is_another_the_second_time_is_refused() -> None:
    class Fickle(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * x if self.calls > 1 else x.tanh() * x.roll(1, -1)

    model = Chain(Fickle(), nn.Tanh())
    with propagate(model, ATTNLRP, recompute=True) as trace:
        output = model(IDS)
    with pytest.raises(TraceError, match="Fickle computes something else when it is run again"):
        trace.explain(output.sum())


class Counting(nn.Module):
    """Another scale at each call, in as many tensors of the same shapes."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.tanh() * x.roll(1, -1) * (1 + 0.1 * self.calls)


class Averaging(nn.Module):
    """Adds an average of what it has seen, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.9 * self.average + 0.1 * x.detach().abs().mean()
        return x.tanh() * x.roll(1, -1) + self.average


class Passing(nn.Module):
    """Takes what the layer before has left in a dictionary, as values are handed on to later layers."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.state = state

    def forward(self, x: Tensor) -> Tensor:
        before, self.state["x"] = self.state.get("x", torch.zeros_like(x)), x
        return (x + before).tanh() * x.roll(1, -1)


@pytest.mark.parametrize("kind", [Counting, Averaging, Passing])
def test_a_layer_with_a_state_that_saves_as_much_the_second_time_is_refused(kind: Any) -> None:
    state: tuple[dict[str, Tensor], ...] = ({},) if kind is Passing else ()
    model = Chain(kind(*state), kind(*state), nn.Tanh())
    with propagate(model, ATTNLRP, recompute=True) as trace:
        output = model(IDS)
    with pytest.raises(TraceError, match=f"{kind.__name__} computes something else when it is run again"):
        trace.explain(output.sum())


def test_a_model_without_layers() -> None:
    with (
        pytest.raises(MethodError, match="Linear has no list of layers to recompute"),
        propagate(nn.Linear(2, 2), ATTNLRP, recompute=True),
    ):
        pass


def test_the_users_hooks_may_change_what_a_module_gives() -> None:
    model = models.tiny_llama()
    with model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: 1.5 * output):
        want, found = run(model, ATTNLRP), run(model, ATTNLRP, recompute=True)
    assert_same(found, want)
    plain = run(model, ATTNLRP)
    assert not torch.allclose(found.source_relevance(found.sources[0]), plain.source_relevance(plain.sources[0]))


# ------------------------------------------------------------- the model's own checkpoints


TRAINED: dict[str, Callable[[], nn.Module]] = {
    "llama": models.tiny_llama,
    "gpt2": lambda: models.tiny_gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    "bert": lambda: models.tiny_bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    "t5": lambda: models.tiny_t5(dropout_rate=0.0),
    "recurrent gemma": lambda: RecurrentGemmaForCausalLM(
        RecurrentGemmaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            lru_width=16,
            block_types=["recurrent", "attention"],
            use_cache=False,
        )
    ).double(),
}


def checkpointing(model: Any, reentrant: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # another name from transformers 5.23 on
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_a_custom_function_that_is_known_by_its_input_is_refused_in_a_checkpoint(recompute: bool, own: bool) -> None:
    model = TRAINED["recurrent gemma"]().train()
    if own:
        checkpointing(model, False)
    if own or recompute:
        with pytest.raises(
            UnknownOperationError, match=r"SqrtBoundDerivative.*whose input is not kept in a checkpoint"
        ):
            run(model, ATTNLRP, recompute=recompute)
    else:
        run(model, ATTNLRP)


@pytest.mark.parametrize("name", sorted(TRAINED.keys() - {"recurrent gemma"}))
@pytest.mark.parametrize("inside", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["inside", "after"])
def test_the_models_own_checkpoints(name: str, inside: bool) -> None:
    model = TRAINED[name]().train()
    batch = {"input_ids": IDS} | ({"decoder_input_ids": IDS} if name == "t5" else {})
    recipes = [LRP, ATTNLRP] + ([ATTNLRP.at("*.mlp", linear=Gamma(0.1))] if name in ("llama", "gpt2") else [])
    want = [run(model, recipe, batch, observe=("*",), ledger=True) for recipe in recipes]
    checkpointing(model, False)
    training = [module.training for module in model.modules()]
    for recipe, expected in zip(recipes, want, strict=True):
        for recompute in (False, True):
            options = {"observe": ("*",), "ledger": True, "recompute": recompute}
            assert_same(run(model, recipe, batch, inside, **options), expected, 1e-12)
    assert [module.training for module in model.modules()] == training


class AroundLayers(nn.Module):
    """A model that calls each of its layers in a checkpoint, as transformers before 5.23 does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 6, dtype=torch.float64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6, dtype=torch.float64), nn.SiLU(), nn.Linear(6, 6, dtype=torch.float64))
            for _ in range(3)
        )
        self.around = True

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + (torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False) if self.around else layer(x))
        return x


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "after"])
def test_checkpoints_around_the_layers(inside: bool) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AroundLayers()
    found = []
    for model.around in (False, True):
        with propagate(model, ATTNLRP, recompute=True) as trace:
            value = model(IDS)[0, -1, 2]
            if inside:
                trace.explain(value)
        if not inside:
            trace.explain(value)
        found.append(trace)
    assert_same(*found, 1e-12)


@pytest.mark.parametrize(
    "recipe",
    [BY_LAYER, ATTNLRP.at("bert.encoder", use=LRP), ATTNLRP.at(layers=0, activation=GRADIENT.activation)],
    ids=["layers", "around the layers", "only an activation"],
)
def test_overrides_that_the_models_own_checkpoints_would_lose(recipe: Recipe) -> None:
    """What is computed again begins inside the layer, so rules that begin at it or around it would not come back."""
    model = TRAINED["bert"]().train()
    want = run(model, recipe)
    assert_same(run(model, recipe, recompute=True), want)
    checkpointing(model, False)
    with pytest.raises(MethodError, match="recompute=True"):
        run(model, recipe)


@pytest.mark.parametrize("recompute", [True, False])
def test_the_models_own_checkpoints_of_the_old_kind_are_refused(recompute: bool) -> None:
    model = TRAINED["gpt2"]().train().requires_grad_(True)
    checkpointing(model, True)
    with pytest.raises(UnknownOperationError, match="use_reentrant=False"):
        run(model, ATTNLRP, recompute=recompute)


# ------------------------------------------------------------------ exceptions and threads


class Sprung:
    """A hook that raises when it is called for the nth time."""

    def __init__(self, error: type[BaseException], call: int) -> None:
        self.error, self.left = error, call

    def __call__(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise self.error("sprung")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [1, 2], ids=["forward", "backward"])
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "after"])
@pytest.mark.parametrize(
    "ending", [".h.1.mlp", *(pytest.param(each, marks=pytest.mark.slow) for each in (".h.1", ".h.1.mlp.act"))]
)
@pytest.mark.parametrize("ours_first", [True, False], ids=["ours first", "theirs first"])
def test_everything_is_as_before_after_an_exception(
    error: type[BaseException], call: int, inside: bool, ending: str, ours_first: bool
) -> None:
    model = models.tiny_gpt2()
    recipe = ATTNLRP.at(layers=1, use=LRP).at("*.mlp", linear=Gamma(0.1))
    options: dict[str, Any] = {"observe": ("*",), "ledger": True, "recompute": True, "inside": inside}
    want, plain = run(model, recipe, **options), training_step()
    handle = module_of(model, ending).register_forward_hook(Sprung(error, call), prepend=not ours_first)
    before = snapshot(model)
    with pytest.raises(error, match="sprung"):
        run(model, recipe, **options)
    assert snapshot(model) == before
    assert saved_tensors_hooks_are_gone()
    assert all(map(torch.equal, training_step(), plain))
    handle.remove()
    assert_same(run(model, recipe, **options), want)


def in_a_thread(work: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "after"])
def test_a_backward_pass_in_another_thread(inside: bool) -> None:
    """As autograd's own threads run it for another device."""
    model, other = models.tiny_gpt2(), models.tiny_llama()
    want, plain = run(model, BY_LAYER, ledger=True), run(other, ATTNLRP)
    before = snapshot(model)
    with propagate(model, BY_LAYER, observe=(), ledger=True, recompute=True) as trace:
        value = model(input_ids=IDS).logits[:, -1, 1]
        if inside:
            in_a_thread(lambda: trace.explain(value))
            assert_same(run(other, ATTNLRP), plain)
            assert torch._C._len_torch_function_stack() == 1
    if not inside:
        in_a_thread(lambda: trace.explain(value))
    assert_same(trace, want)
    after = snapshot(model)
    after["modes"] = before["modes"]
    assert after == before
    assert saved_tensors_hooks_are_gone()


def test_threads_with_different_recipes_on_one_model() -> None:
    model = models.tiny_gpt2()
    want = [run(model, recipe, ledger=True) for recipe in RECIPES]
    before, barrier = snapshot(model), threading.Barrier(len(RECIPES))

    def work(recipe: Recipe) -> list[Trace]:
        traces = []
        with aborting(barrier):
            for _ in range(5):
                barrier.wait()
                traces.append(run(model, recipe, ledger=True, recompute=True))
        return traces

    with ThreadPoolExecutor(len(RECIPES)) as pool:
        for traces, expected in zip(pool.map(work, RECIPES), want, strict=True):
            for trace in traces:
                assert_same(trace, expected)
    after = snapshot(model)
    after["modes"] = before["modes"]
    assert after == before


def test_another_model_trains_between_the_passes() -> None:
    plain, model = training_step(), models.tiny_llama()
    want = run(model, ATTNLRP)
    with propagate(model, ATTNLRP, observe=(), recompute=True) as trace:
        value = model(input_ids=IDS).logits[:, -1, 1]
        assert all(map(torch.equal, training_step(), plain))
    assert all(map(torch.equal, training_step(), plain))
    trace.explain(value)
    assert all(map(torch.equal, training_step(), plain))
    assert_same(trace, want)


@pytest.mark.parametrize("outside", [torch.no_grad, torch.inference_mode])
def test_runs_where_gradients_are_off(outside: Callable[[], Any]) -> None:
    model = models.tiny_gpt2()
    want = run(model, ATTNLRP, ledger=True)
    with outside():
        found = run(model, ATTNLRP, {"input_ids": IDS.clone()}, inside=True, ledger=True, recompute=True)
    assert_same(found, want)
