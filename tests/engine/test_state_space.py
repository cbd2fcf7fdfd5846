"""State-space models: their recurrence term by term; neither chunks nor padding change a number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from transformers.models.kimi_linear.modeling_kimi_linear import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from lrpx.coverage._checking import _everything_wide
from lrpx.engine import propagate
from lrpx.recipes import ATTNLRP, LRP, LRP_DING, LRP_VOITA
from tests.reference import state_space

if TYPE_CHECKING:
    from collections.abc import Callable

    from lrpx.recipes import Recipe

every_recipe = pytest.mark.parametrize("recipe", [ATTNLRP, LRP], ids=["attnlrp", "lrp"])
RNG = np.random.default_rng(0)
LENGTH, HEADS, WIDTH, STATES = 11, 4, 3, 2


# ------------------------------------------------------------------------ the scan, and its twin


class Chunked(nn.Module):
    """Mamba-2's scan; two heads read one group of ``B`` and ``C``."""

    def __init__(self, chunk: int, a: Tensor, d: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.chunk, self.a, self.d, self.bias = chunk, a, d, nn.Parameter(bias)

    def forward(self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Any:
        return mamba2_chunk_scan(x, dt, self.a, b, c, self.chunk, self.d, self.bias, dt_softplus=True)


class Sequential(nn.Module):
    """Mamba's scan, a head a channel."""

    def __init__(self, a: Tensor, d: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.a, self.d, self.bias = a, d, nn.Parameter(bias)

    def forward(self, x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Any:
        x, dt, b, c = (each.transpose(1, 2) for each in (x, dt, b, c))
        y = mamba_selective_scan(x, dt, self.a, b, c, self.d, delta_bias=self.bias, delta_softplus=True)
        return (y[0] if isinstance(y, tuple) else y).transpose(1, 2)


def relevance(
    model: nn.Module, recipe: Recipe, weights: Tensor, **inputs: Tensor
) -> tuple[Tensor, dict[str, np.ndarray]]:
    """The output, and the relevance of each input and of the bias; the ledger must close."""
    with _everything_wide(), propagate(model, recipe, observe=(), ledger=True) as trace:
        y = model(**{name: value[None] for name, value in inputs.items()})
        trace.explain((y[0] * weights).sum())
    assert trace.ledger().closes(1e-9)
    found = {source.paths[0]: trace.source_relevance(source)[0].numpy() for source in trace.sources}
    found["bias"] = np.array(sum(entry.value for entry in trace.ledger().entries if entry.kind == "biases"))
    with _everything_wide(), propagate(model, recipe, observe=()) as trace:
        y = model(**{name: value[None] for name, value in inputs.items()})
        trace.explain((y[0] * weights).sum())
    for source in trace.sources:
        np.testing.assert_allclose(trace.source_relevance(source)[0].numpy(), found[source.paths[0]], rtol=1e-9)
    return y[0].detach(), found


def near(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9 * max(1.0, np.abs(wanted).max()))


@every_recipe
@pytest.mark.parametrize("padding", [0, 1, 3])
@pytest.mark.parametrize("chunk", [2, 3, 4, 16])
def test_a_chunked_scan_is_the_recurrence_term_by_term(chunk: int, padding: int, recipe: Recipe) -> None:
    x, dt = RNG.normal(size=(LENGTH, HEADS, WIDTH)), RNG.normal(size=(LENGTH, HEADS))
    b, c = RNG.normal(size=(2, LENGTH, HEADS // 2, STATES))
    a, d, bias = -RNG.uniform(0.1, 2, HEADS), RNG.normal(size=HEADS), RNG.normal(size=HEADS)
    weights = RNG.normal(size=x.shape)
    heads = [each.repeat(2, axis=1) for each in (b, c)]
    whole = (x, dt, a[:, None].repeat(STATES, 1), *heads, d, bias)
    wanted = state_space.explain(*whole, weights, recipe is LRP)
    pad = [(padding, 0), (0, 0), (0, 0)]  # what a mask leaves of padding: no x, B and C, but some Δ
    inputs = {
        "x": np.pad(x, pad), "b": np.pad(b, pad), "c": np.pad(c, pad),
        "dt": np.concatenate([RNG.normal(size=(padding, HEADS)), dt]),
    }  # fmt: skip
    y, found = relevance(
        Chunked(chunk, *map(torch.tensor, (a, d, bias))), recipe, torch.tensor(np.pad(weights, pad)),
        **{name: torch.tensor(value) for name, value in inputs.items()},
    )  # fmt: skip
    near(y[padding:].numpy(), state_space.scan(*whole))
    near(found["x"][padding:], wanted["x"])
    near(found["dt"][padding:], wanted["dt"])
    near(found["b"][padding:], wanted["b"].reshape(LENGTH, HEADS // 2, 2, STATES).sum(2))
    near(found["c"][padding:], wanted["c"].reshape(LENGTH, HEADS // 2, 2, STATES).sum(2))
    near(found["bias"], wanted["bias"].sum())
    assert (np.abs(wanted["dt"]).max() > 0.1) == (recipe is ATTNLRP)


@every_recipe
def test_a_sequential_scan_is_the_same(recipe: Recipe) -> None:
    x, dt = RNG.normal(size=(2, LENGTH, HEADS))
    b, c = RNG.normal(size=(2, LENGTH, STATES))
    a, d, bias = -RNG.uniform(0.1, 2, (HEADS, STATES)), RNG.normal(size=HEADS), RNG.normal(size=HEADS)
    weights = RNG.normal(size=x.shape)
    heads = [each[:, None].repeat(HEADS, 1) for each in (b, c)]
    wanted = state_space.explain(x[..., None], dt, a, *heads, d, bias, weights[..., None], recipe is LRP)
    y, found = relevance(
        Sequential(*map(torch.tensor, (a, d, bias))), recipe, torch.tensor(weights),
        x=torch.tensor(x), dt=torch.tensor(dt), b=torch.tensor(b), c=torch.tensor(c),
    )  # fmt: skip
    near(y.numpy(), state_space.scan(x[..., None], dt, a, *heads, d, bias)[..., 0])
    near(found["x"], wanted["x"][..., 0])
    near(found["dt"], wanted["dt"])
    near(found["b"], wanted["b"].sum(1))
    near(found["c"], wanted["c"].sum(1))
    near(found["bias"], wanted["bias"].sum())


class Delta(nn.Module):
    """Qwen3-Next's gated delta rule, in chunks."""

    def __init__(self, chunk: int) -> None:
        super().__init__()
        self.chunk = chunk

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        y: Tensor = torch_chunk_gated_delta_rule(q, k, v, -g.exp(), beta.sigmoid(), chunk_size=self.chunk)[0]
        return y


@every_recipe
def test_where_a_gated_delta_rule_reads_once_its_chunks_are_no_matter(recipe: Recipe) -> None:
    """A state that was written once and read once: ``β_i k_i k_j u_j`` are four factors, on either side of a border."""
    q, k, v = RNG.normal(size=(3, 2, HEADS, STATES))
    g, beta = RNG.normal(size=(2, 2, HEADS))
    weights = torch.tensor(RNG.normal(size=v.shape))
    inputs = {
        name: torch.tensor(each) for name, each in zip(("q", "k", "v", "g", "beta"), (q, k, v, g, beta), strict=True)
    }
    (y, apart), (z, together) = (relevance(Delta(chunk), recipe, weights, **inputs) for chunk in (1, 2))
    near(y.numpy(), z.numpy())
    for name, found in apart.items():
        near(np.asarray(found), np.asarray(together[name]))
    assert np.abs(together["k"]).max() > 0.01


class Kimi(nn.Module):
    """Kimi's delta rule, in chunks or a token after another; the softplus of its decays is written out."""

    def __init__(self, chunk: int | None) -> None:
        super().__init__()
        self.chunk = chunk

    def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        decays = -torch.where(g > 20.0, g, torch.log(1.0 + torch.exp(g)))
        given = q, k, v, decays, beta.sigmoid()
        if self.chunk is None:
            y: Tensor = recurrent_kimi_delta_attention(*given, None, False)[0]
        else:
            y = chunk_kimi_delta_attention(*given, chunk_size=self.chunk)[0]
        return y


def test_a_delta_rule_in_a_chunk_is_its_recurrence() -> None:
    """Under CP-LRP, whose gates say how ``v − k S`` and the writing of it share."""
    q, k, v, g = RNG.normal(size=(4, LENGTH, HEADS, STATES))
    beta = RNG.normal(size=(LENGTH, HEADS))
    weights = torch.tensor(RNG.normal(size=v.shape))
    inputs = {
        name: torch.tensor(each) for name, each in zip(("q", "k", "v", "g", "beta"), (q, k, v, g, beta), strict=True)
    }
    found = {chunk: relevance(Kimi(chunk), LRP, weights, **inputs) for chunk in (None, LENGTH, 2 * LENGTH)}
    (y, wanted) = found.pop(None)
    for z, relevances in found.values():
        near(z.numpy(), y.numpy())
        for name, each in relevances.items():
            near(np.asarray(each), np.asarray(wanted[name]))
    assert np.abs(wanted["k"]).max() > 0.01


@every_recipe
def test_chunks_of_a_delta_rule_without_a_solver_are_those_of_one_with_a_solver(recipe: Recipe) -> None:
    q, k, v = RNG.normal(size=(3, LENGTH, HEADS, STATES))
    g, beta = RNG.normal(size=(2, LENGTH, HEADS))
    weights = torch.tensor(RNG.normal(size=v.shape))
    inputs = {
        name: torch.tensor(each) for name, each in zip(("q", "k", "v", "g", "beta"), (q, k, v, g, beta), strict=True)
    }

    class OfKimi(Delta):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            decays = (-g.exp())[..., None].expand_as(k)
            y: Tensor = chunk_kimi_delta_attention(q, k, v, decays, beta.sigmoid(), chunk_size=self.chunk)[0]
            return y

    for chunk in (LENGTH, LENGTH - 1, 3):
        (y, wanted), (z, found) = (relevance(rule(chunk), recipe, weights, **inputs) for rule in (Delta, OfKimi))
        near(z.numpy(), y.numpy())
        for name, each in found.items():
            near(np.asarray(each), np.asarray(wanted[name]))


# -------------------------------------------------------------------------------- whole models

SIZES: dict[str, Any] = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip
HEADED: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 4, "mamba_expand": 2,
}  # fmt: skip
MODELS: dict[str, Callable[[int], Any]] = {
    "mamba2": lambda chunk: tf.Mamba2ForCausalLM(
        tf.Mamba2Config(
            vocab_size=31,
            hidden_size=16,
            num_hidden_layers=2,
            state_size=4,
            num_heads=4,
            head_dim=8,
            expand=2,
            n_groups=2,
            chunk_size=chunk,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    ),
    "mamba": lambda chunk: tf.MambaForCausalLM(tf.MambaConfig(**SIZES, state_size=4, use_mambapy=False)),
    "bamba": lambda chunk: tf.BambaForCausalLM(
        tf.BambaConfig(**SIZES, **HEADED, attn_layer_indices=[1], mamba_chunk_size=chunk)
    ),
    "falcon_h1": lambda chunk: tf.FalconH1ForCausalLM(
        tf.FalconH1Config(**SIZES, **HEADED, mamba_d_ssm=32, mamba_chunk_size=chunk)
    ),
    "granitemoehybrid": lambda chunk: tf.GraniteMoeHybridForCausalLM(
        tf.GraniteMoeHybridConfig(
            **SIZES,
            **HEADED,
            layer_types=["mamba", "attention"],
            num_local_experts=0,
            shared_intermediate_size=24,
            mamba_chunk_size=chunk,
        )
    ),
    "zamba2": lambda chunk: tf.Zamba2ForCausalLM(
        tf.Zamba2Config(
            **SIZES,
            mamba_d_state=4,
            n_mamba_heads=4,
            mamba_ngroups=2,
            mamba_expand=2,
            chunk_size=chunk,
            hybrid_layer_ids=[1],
            layers_block_type=["mamba", "hybrid"],
        )
    ),
}
TOKENS = torch.randint(3, 31, (1, 13), generator=torch.Generator().manual_seed(1))


def build(name: str, chunk: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS[name](chunk).double().eval()
        with torch.no_grad():
            for path, parameter in sorted(model.named_parameters()):
                if parameter.ndim > 1 and "A_log" not in path:
                    parameter.normal_(0, 0.4)
                elif "dt" in path:
                    parameter.normal_(0, 0.3)
    return model


@pytest.mark.parametrize("recipe", [ATTNLRP, LRP, LRP_DING], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("name", MODELS)
def test_neither_chunks_nor_padding_change_the_relevance(name: str, recipe: Recipe) -> None:
    found = {}
    for chunk, padding in ((16, 0), (4, 0), (5, 0), (4, 1), (4, 3), (4, 4)):
        model = build(name, chunk)
        ids = torch.cat([torch.zeros(1, padding, dtype=torch.long), TOKENS], 1)
        mask = (torch.arange(ids.shape[1]) >= padding)[None].long()
        inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
        if name not in ("mamba", "mamba2"):
            inputs["position_ids"] = (torch.arange(ids.shape[1]) - padding).clamp(min=0)[None]
        with _everything_wide(), propagate(model, recipe, observe=()) as trace:
            trace.explain(model(**inputs).logits[0, -1, 5])
        found[chunk, padding] = trace.source_relevance(trace.sources[0])[0, padding:]
    wanted = found.pop((16, 0))
    assert float(wanted.abs().max()) > 0
    for case, relevance in found.items():
        assert float((relevance - wanted).abs().max()) <= 1e-9 * float(wanted.abs().max()), case


@pytest.mark.parametrize("recipe", [ATTNLRP, LRP_DING, LRP_VOITA], ids=lambda recipe: recipe.name)
def test_a_decay_scales_in_a_matrix_product_as_in_a_product(recipe: Recipe) -> None:
    """Also where the rule for matrix products is LRP-0 for both of their factors."""
    x = torch.randn(1, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    layer = nn.utils.skip_init(nn.Linear, 6, 5, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))

    class Decays(nn.Module):
        def __init__(self, spelled: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
            super().__init__()
            self.layer = layer
            self.spelled = spelled

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.spelled(torch.exp(-nn.functional.softplus(self.layer(x))), x)

    found = []
    for spelled in (
        lambda decay, x: (decay[..., None] * x[:, None]).sum(2),
        lambda decay, x: decay @ x,
        lambda decay, x: torch.einsum("bij,bjd->bid", decay, x),
        lambda decay, x: (x.mT @ decay.mT).mT,
    ):
        model = Decays(spelled)
        with propagate(model, recipe, observe=()) as trace:
            trace.explain(model(x)[0, 1, 2])
        found.append(trace.source_relevance(trace.sources[0]))
    for relevance in found[1:]:
        torch.testing.assert_close(relevance, found[0])
