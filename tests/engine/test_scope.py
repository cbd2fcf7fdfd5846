"""Nothing the user owns is changed by a block: not in it, not after it, not in another thread."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function
from transformers.activations import ACT2FN
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lrpx.engine import _mode, propagate
from lrpx.engine._running import _Seams
from lrpx.errors import TraceError
from lrpx.recipes import ATTNLRP, GRADIENT, LRP
from lrpx.rules import Gamma
from tests.engine.samples import SAMPLES, last_row, output_of
from tests.reference import models
from tests.work import Interrupt, aborting

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS = torch.tensor([[5, 9, 3, 12, 7]])
OVERRIDDEN = ATTNLRP.at(layers=1, use=LRP).at("*.mlp", linear=Gamma(0.1))
BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "llama": models.tiny_llama,
    "gpt2": models.tiny_gpt2,
    "bloom": lambda: SAMPLES["bloom"].build(),
}
every_model = pytest.mark.parametrize("name", BUILDERS)


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Everything that could be changed, values copied, objects by identity."""
    state: dict[str, Any] = {}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            state[f"{path}.{key}"] = list(value.items()) if "hooks" in key else id(value)
        state[f"{path} training"] = module.training
        state[f"{path} class"] = [(key, id(value)) for key, value in vars(type(module)).items()]
    for path, parameter in model.named_parameters():
        state[f"{path} bits"] = parameter.detach().numpy().tobytes()
        state[f"{path} flags"] = (id(parameter), parameter.requires_grad, parameter._version, vars(parameter))
        state[f"{path} grad"] = None if parameter.grad is None else parameter.grad.numpy().tobytes()
        state[f"{path} hooks"] = parameter._backward_hooks
    for owner in (F, torch, torch.Tensor, nn.Module):
        state[f"{owner}"] = [(key, id(value)) for key, value in vars(owner).items()]
    state["tables"] = [list(ALL_ATTENTION_FUNCTIONS.items()), [(k, id(v)) for k, v in ACT2FN.items()]]
    state["global hooks"] = [list(hooks) for hooks in (
        nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks)]  # fmt: skip
    state["random"] = (torch.get_rng_state().numpy().tobytes(), str(np.random.get_state()), random.getstate())
    state["modes"] = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch._C._len_torch_function_stack(),
        torch._C._autograd._top_saved_tensors_default_hooks(True),
        torch.get_default_dtype(),
        torch.is_anomaly_enabled(),
        threading.active_count(),
    )
    return state


def module_of(model: nn.Module, *endings: str) -> nn.Module:
    return next(module for path, module in model.named_modules() if path.endswith(endings))


def explained(model: nn.Module, recipe: Any, tokens: Tensor = TOKENS) -> list[Tensor]:
    with propagate(model, recipe, observe=()) as trace:
        logits = model(input_ids=tokens).logits
        trace.explain(logits[0, -1, 4])
    return [trace.source_relevance(source) for source in trace.sources]


@every_model
@pytest.mark.parametrize("needed", [True, False], ids=["free", "frozen"])
@pytest.mark.parametrize("recipe", [LRP, ATTNLRP, GRADIENT, OVERRIDDEN], ids=lambda recipe: recipe.name)
def test_everything_is_as_before_on_success(name: str, needed: bool, recipe: Any) -> None:
    model = BUILDERS[name]().requires_grad_(needed)
    before = snapshot(model)
    assert explained(model, recipe)[0].abs().sum() > 0
    assert snapshot(model) == before


@every_model
def test_train_mode_and_gradients_are_left_alone(name: str) -> None:
    model = BUILDERS[name]().requires_grad_(True).train()
    model(input_ids=TOKENS).logits.sum().backward()
    # dropout draws what it always draws, and nothing else does
    state = torch.get_rng_state()
    with torch.no_grad():
        want = model(input_ids=TOKENS).logits
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    before = snapshot(model)
    with propagate(model, ATTNLRP) as trace:
        found = model(input_ids=TOKENS).logits
        trace.explain(found[0, -1, 4])
    assert torch.equal(torch.get_rng_state(), after)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    torch.set_rng_state(state)
    assert snapshot(model) == before


class Trap(nn.Module):
    """Raises when it is called."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def forward(self, *_: Any) -> Any:
        raise self.error("sprung")


@every_model
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("where", ["in the forward pass", "in an activation", "after it", "before it"])
def test_everything_is_as_before_after_an_exception(name: str, error: type[BaseException], where: str) -> None:
    model = BUILDERS[name]()
    want = explained(model, OVERRIDDEN)
    module = module_of(model, ".mlp")
    if where == "in an activation":
        module = module_of(model, ".act", ".act_fn", ".gelu_impl")
        module.forward = Trap(error).forward
    elif where == "in the forward pass":
        module.register_forward_hook(lambda *_: Trap(error)())
    before = snapshot(model)

    def block() -> None:
        with propagate(model, OVERRIDDEN) as trace:
            if where != "before it":
                trace.explain(model(input_ids=TOKENS).logits[0, -1, 4])
            raise error("sprung")

    with pytest.raises(error, match="sprung"):
        block()
    assert snapshot(model) == before
    vars(module).pop("forward", None)
    module._forward_hooks.clear()
    for found, expected in zip(explained(model, OVERRIDDEN), want, strict=True):
        assert torch.equal(found, expected)


class Small(nn.Module):
    """A layer to recompute, which has an activation that is one function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), ACT2FN["gelu_new"])])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


def interrupted(moments: Callable[..., Any], functions: list[Any], model: nn.Module) -> int:
    """How many moments inside calls of some functions there are; an interrupt fell on each, and all is as before."""
    moments()  # what is made but once is there
    before = snapshot(model)
    for at in range(10**5):
        with suppress(KeyboardInterrupt), Interrupt((each.__code__ for each in functions), at) as interrupt:
            moments()
        assert snapshot(model) == before, f"moment {at}"
        if not interrupt.fell:
            moments()
            return at
    raise AssertionError("it does not end")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # one fell where a generator is closed
@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=pytest.mark.slow) for how in ({}, {"observe": ()}, {"recompute": True})], ids=str
)
def test_an_interrupt_among_what_is_put_on_and_taken_off(how: dict[str, Any]) -> None:
    model = Small()
    x = torch.ones(3)

    def block() -> None:
        with propagate(model, ATTNLRP, **how) as trace:
            trace.explain(model(x)[0])

    assert interrupted(block, [_Seams.install, _Seams.remove, _Seams.again], model) > 50


def test_an_interrupt_in_a_layer_that_forgets() -> None:
    model = Small()

    def block() -> None:
        with propagate(model, ATTNLRP, recompute=True):
            model(torch.ones(3))

    enter, leave = torch.autograd.graph.saved_tensors_hooks.__enter__, torch.autograd.graph.saved_tensors_hooks.__exit__
    assert interrupted(block, [enter, leave], model) > 2


def test_an_interrupt_while_torch_itself_has_taken_the_mode_off() -> None:
    model = Small()

    def block() -> None:
        with propagate(model, ATTNLRP):
            F.softmax(model(torch.ones(3)), -1)

    assert interrupted(block, [handle_torch_function], model) > 50


@every_model
def test_a_caught_exception_does_not_spoil_the_rest_of_the_block(name: str) -> None:
    model = BUILDERS[name]()
    want = explained(model, OVERRIDDEN)
    with propagate(model, OVERRIDDEN, observe=()) as trace:
        with pytest.raises((IndexError, TypeError, ValueError)):
            model(input_ids=torch.tensor([[10**6]]))
        trace.sources.clear()
        trace.explain(model(input_ids=TOKENS).logits[0, -1, 4])
    for source, expected in zip(trace.sources, want, strict=True):
        assert torch.equal(trace.source_relevance(source), expected)


@every_model
def test_threads_with_different_recipes_on_one_model(name: str) -> None:
    model = BUILDERS[name]()
    recipes = [LRP, ATTNLRP, GRADIENT, OVERRIDDEN]
    want = [explained(model, recipe) for recipe in recipes]
    before = snapshot(model)
    barrier = threading.Barrier(len(recipes))

    def work(recipe: Any) -> list[list[Tensor]]:
        found = []
        for _ in range(5):
            with aborting(barrier), propagate(model, recipe, observe=()) as trace:
                barrier.wait()
                logits = model(input_ids=TOKENS).logits
                barrier.wait()
                trace.explain(logits[0, -1, 4])
            found.append([trace.source_relevance(source) for source in trace.sources])
        return found

    with ThreadPoolExecutor(len(recipes)) as pool:
        results = list(pool.map(work, recipes))
    for repeats, expected in zip(results, want, strict=True):
        for found in repeats:
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other)
    after = snapshot(model)
    after["modes"] = before["modes"]
    assert after == before


def training_step() -> list[Tensor]:
    """The gradients and the weights after one optimiser step of another model, itself Llama."""
    model = models.tiny_llama(seed=5).requires_grad_(True)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    logits = model(input_ids=TOKENS).logits
    F.cross_entropy(logits[0], TOKENS[0]).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    optimiser.step()
    return gradients + [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("recipe", [LRP, OVERRIDDEN], ids=lambda recipe: recipe.name)
def test_another_model_trains_inside_the_block(recipe: Any) -> None:
    want, model = training_step(), models.tiny_llama()
    with propagate(model, recipe) as trace:
        first = training_step()
        logits = model(input_ids=TOKENS).logits
        second = training_step()
        trace.explain(logits[0, -1, 4])
        third = training_step()
    for found in (first, second, third, training_step()):
        assert all(map(torch.equal, found, want))


def test_another_model_trains_in_another_thread() -> None:
    want, model = training_step(), SAMPLES["llama"].build()
    relevance, started, done = explained(model, ATTNLRP), threading.Event(), threading.Event()
    results: list[list[Tensor]] = []

    def train() -> None:
        started.set()
        while not done.is_set():
            results.append(training_step())

    thread = threading.Thread(target=train)
    thread.start()
    started.wait(20)
    found = [explained(model, ATTNLRP) for _ in range(20)]
    done.set()
    thread.join(20)
    assert results
    assert all(all(map(torch.equal, result, want)) for result in results)
    assert all(all(map(torch.equal, one, relevance)) for one in found)


@every_model
def test_parts_called_directly_in_the_block_are_plain(name: str) -> None:
    model = BUILDERS[name]()
    part = module_of(model, ".mlp")
    width = model.config.hidden_size

    def gradient() -> Tensor:
        x = torch.linspace(-1, 1, 3 * width, dtype=torch.float64).view(1, 3, width).requires_grad_()
        arguments = (x, torch.zeros_like(x)) if name == "bloom" else (x,)
        return torch.autograd.grad(part(*arguments).sum(), x)[0]

    want, plain = gradient(), training_step()
    with propagate(model, OVERRIDDEN):
        assert torch.equal(gradient(), want)
        assert all(map(torch.equal, training_step(), plain))
        model(input_ids=TOKENS)
        assert torch.equal(gradient(), want)
        assert all(map(torch.equal, training_step(), plain))


def test_the_same_model_twice_in_one_thread_is_refused() -> None:
    model = models.tiny_gpt2()
    before = snapshot(model)
    with (
        pytest.raises(TraceError, match="leave the first block before the second"),
        propagate(model, LRP),
        propagate(model, ATTNLRP),
    ):
        pass
    assert snapshot(model) == before
    explained(model, LRP)


def test_two_models_in_nested_blocks() -> None:
    one, other = models.tiny_gpt2(), models.tiny_llama()
    want = explained(one, LRP), explained(other, ATTNLRP)
    with propagate(one, LRP) as outer, propagate(other, ATTNLRP) as inner:
        outer.explain(one(input_ids=TOKENS).logits[0, -1, 4])
        inner.explain(other(input_ids=TOKENS).logits[0, -1, 4])
    for trace, expected in zip((outer, inner), want, strict=True):
        for source, relevance in zip(trace.sources, expected, strict=True):
            assert torch.equal(trace.source_relevance(source), relevance)


@pytest.mark.parametrize("is_same", [True, False])
def test_a_block_in_a_hook_of_another_run_is_refused(is_same: bool) -> None:
    model = models.tiny_llama()
    other = model if is_same else models.tiny_gpt2()

    def hook(*_: object) -> None:
        with pytest.raises(TraceError, match=r"in the middle of a run under a recipe.* when that run is over"):
            explained(other, LRP)

    want = explained(model, LRP)
    handle = model.model.layers[0].register_forward_hook(hook)
    try:
        found = explained(model, LRP)
    finally:
        handle.remove()
    assert all(map(torch.equal, found, want))


@every_model
@pytest.mark.parametrize("outside", [torch.no_grad, torch.inference_mode])
def test_runs_where_gradients_are_off(name: str, outside: Callable[[], Any]) -> None:
    model = BUILDERS[name]()
    want = explained(model, ATTNLRP)
    with outside():
        tokens = TOKENS.clone()
        found = explained(model, ATTNLRP, tokens)
        assert not torch.is_grad_enabled()
    assert all(map(torch.equal, found, want))


def test_inputs_made_in_inference_mode() -> None:
    sample = SAMPLES["vit"]
    model = sample.build()
    with propagate(model, ATTNLRP) as trace:
        trace.explain(last_row(output_of(model, sample.batch()))[:, 1])
    with torch.inference_mode():
        batch = {name: value + 0.0 for name, value in sample.batch().items()}
        with propagate(model, ATTNLRP) as other:
            other.explain(last_row(output_of(model, batch))[:, 1])
    assert torch.equal(trace.relevance("pixel_values"), other.relevance("pixel_values"))


def test_a_call_from_another_thread_is_not_recorded() -> None:
    model = models.tiny_gpt2()
    with propagate(model, LRP) as trace, ThreadPoolExecutor(1) as pool:
        logits = pool.submit(lambda: model(input_ids=TOKENS).logits).result()
        with pytest.raises(TraceError, match="nothing was recorded"):
            trace.explain(logits[0, -1, 4])


def test_the_users_hooks_run_as_ever() -> None:
    model, seen = models.tiny_gpt2(), []
    with ExitStack() as stack:
        for module in model.modules():
            handle = module.register_forward_hook(lambda module, args, output: seen.append(type(module).__name__))
            stack.callback(handle.remove)
        model(input_ids=TOKENS)
        plain, seen[:] = list(seen), []
        explained(model, OVERRIDDEN)
        assert seen == plain


class InPython(nn.Module):
    """What torch writes in Python hides what it calls, unless it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(31, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        some, back = torch.unique(tokens, return_inverse=True)
        x = self.rows(some)[back]
        torch._assert(x[0, 0, 0].abs() >= 0, "a number")
        x = x + nn.init.zeros_(torch.empty_like(x))
        return self.head(x + self.attention(x, x, x)[0])


@pytest.mark.parametrize("recipe", [LRP, ATTNLRP], ids=lambda recipe: recipe.name)
def test_functions_in_python_are_opened_where_torch_cannot_skip_its_own_question(recipe: Any, monkeypatch: Any) -> None:
    """As under torch 2.11."""
    torch.manual_seed(0)
    model = InPython().double().eval()

    def relevance() -> list[Tensor]:
        with propagate(model, recipe) as trace:
            trace.explain(model(TOKENS)[0, -1, 4])
        return [trace.source_relevance(source) for source in trace.sources]

    expected = relevance()
    assert len(expected) == 1
    assert expected[0].abs().sum() > 0
    monkeypatch.setattr(_mode, "HOP", None)
    found = relevance()
    assert len(found) == 1
    assert torch.equal(found[0], expected[0])
