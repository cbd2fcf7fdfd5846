"""What the benchmarks measure: models of well-known shapes with random weights, and ways to explain them.

A *subject* takes token ids and gives the relevance of every token. Run as a script, by the Python of any environment,
this file serves subjects over its pipes, one JSON line a request (``servers.py`` is the other end). It imports only
what the subject asked for needs, so that it runs beside the old versions of transformers that peers want.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.nn import Module

MIB = 2**20


class Shape(NamedTuple):
    """A model class of transformers, and the sizes of its config where they differ from the default."""

    family: str
    config: str
    model: str
    sizes: dict[str, Any]


def llama(vocabulary: int, hidden: int, inner: int, layers: int, heads: int, groups: int, **more: Any) -> Shape:
    sizes = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": 2**24,  # rotary: no table is kept, so this costs nothing
    }
    return Shape("llama", "LlamaConfig", "LlamaForCausalLM", sizes | more)


SHAPES = {
    "toy": llama(97, 32, 48, 2, 4, 2),
    "bundled": llama(11264, 256, 704, 6, 8, 4, tie_word_embeddings=True),
    "bert-base": Shape("bert", "BertConfig", "BertForMaskedLM", {"max_position_embeddings": 1024}),
    "gpt2-small": Shape("gpt2", "GPT2Config", "GPT2LMHeadModel", {}),
    "llama-512x8": llama(32000, 512, 1408, 8, 8, 4),
    "llama-3.2-1b": llama(128256, 2048, 8192, 16, 32, 8, tie_word_embeddings=True),
}


@dataclass
class Case:
    """One shape on one device: what a subject explains, and where.

    What is explained is the highest logit, after the last token, or in the middle for a masked language model.
    """

    shape: Shape
    device: torch.device
    weights: Path | None = None
    _models: dict[type, Module] = field(default_factory=dict)

    def model(self, model_class: type | None = None, **options: Any) -> Any:
        """The model, the same one at every call; with the weights of the file, which is written if it is missing."""
        import transformers

        model_class = model_class or getattr(transformers, self.shape.model)
        if model_class not in self._models:
            torch.manual_seed(0)
            config = getattr(transformers, self.shape.config)(**self.shape.sizes, **options)
            model = model_class(config).eval()
            if self.weights is not None:
                if not self.weights.exists():
                    torch.save(model.state_dict(), self.weights.with_suffix(".part"))
                    self.weights.with_suffix(".part").rename(self.weights)
                # mapped, so that the processes of all peers share one copy in memory; old models have more buffers
                own = {name: value for name, value in model.state_dict().items() if "position_ids" in name}
                model.load_state_dict(own | torch.load(self.weights, mmap=True), assign=True)
                model.tie_weights()
            self._models[model_class] = model.to(self.device)
        return self._models[model_class]

    @property
    def is_masked(self) -> bool:
        return self.shape.family == "bert"

    def position(self, ids: list[int]) -> int:
        return len(ids) // 2 if self.is_masked else len(ids) - 1

    def embed(self, model: Any, ids: list[int]) -> Tensor:
        """The embeddings ``[1, T, d]`` of the tokens, as a leaf."""
        found = model.get_input_embeddings()(torch.tensor([ids], device=self.device))
        return found.detach().requires_grad_()

    def logits(self, model: Any, embeddings: Tensor, **options: Any) -> Tensor:
        """The logits ``[1, T, V]``, or fewer rows if the options say so."""
        cache = {} if self.is_masked else {"use_cache": False}
        return model(inputs_embeds=embeddings, **cache, **options).logits

    def needed_row(self, model: Any, embeddings: Tensor, position: int) -> Tensor:
        """The logits ``[V]`` at one position, with only that row through the language-model head."""
        if self.is_masked:
            hidden = model.bert(inputs_embeds=embeddings)[0]
            return model.cls(hidden[:, position : position + 1])[0, 0]
        return self.logits(model, embeddings, logits_to_keep=1)[0, -1]


class Subject(NamedTuple):
    """``run`` is measured; ``prepare`` brings the model into the state that it needs, and is not."""

    run: Callable[[list[int]], Tensor]
    prepare: Callable[[], object]


def times_gradient(embeddings: Tensor, gradient: Tensor) -> Tensor:
    return (embeddings * gradient).detach().float().sum(-1)[0]


# ------------------------------------------------------------------------------ floors


def floor_a(case: Case) -> Subject:
    """Gradient×Input with frozen parameters."""
    model = case.model()

    def run(ids: list[int]) -> Tensor:
        embeddings = case.embed(model, ids)
        logits = case.logits(model, embeddings)[0, case.position(ids)]
        return times_gradient(embeddings, torch.autograd.grad(logits.max(), embeddings)[0])

    return Subject(run, lambda: model.requires_grad_(False))


def floor_b(case: Case) -> Subject:
    """The same with only the needed row through the head."""
    model = case.model()

    def run(ids: list[int]) -> Tensor:
        embeddings = case.embed(model, ids)
        logits = case.needed_row(model, embeddings, case.position(ids))
        return times_gradient(embeddings, torch.autograd.grad(logits.max(), embeddings)[0])

    return Subject(run, lambda: model.requires_grad_(False))


# -------------------------------------------------------------------------------- lrpx


def lrpx_explainer(method: str, call: dict[str, Any] | None = None, **options: Any) -> Callable[[Case], Subject]:
    def make(case: Case) -> Subject:
        import lrpx

        model = case.model()
        explainer = lrpx.Explainer(model, **options)

        def run(ids: list[int]) -> Tensor:
            return explainer(ids, method=method, position=case.position(ids), **call or {}).relevance

        return Subject(run, lambda: model.requires_grad_(True))

    return make


# --------------------------------------------------------------------------------- LXT


def lxt_efficient(frozen: bool = False, checkpointing: bool = False) -> Callable[[Case], Subject]:
    """LXT's efficient path, by the code of its README; frozen and checkpointing by its ``quantized_llama.py``."""

    def make(case: Case) -> Subject:
        import_torchvision_anyhow()
        modeling = importlib.import_module(f"transformers.models.{case.shape.family}.modeling_{case.shape.family}")
        core = importlib.import_module("lxt.efficient")
        if not hasattr(modeling, "_bench_patched"):
            core.monkey_patch(modeling)
            modeling._bench_patched = True
        model = case.model(getattr(modeling, case.shape.model))

        def run(ids: list[int]) -> Tensor:
            embeddings = case.embed(model, ids)
            case.logits(model, embeddings)[0, case.position(ids)].max().backward()
            return times_gradient(embeddings, embeddings.grad)

        def prepare() -> None:
            model.zero_grad(set_to_none=True)
            model.requires_grad_(not frozen)
            model.train(checkpointing)
            (model.gradient_checkpointing_enable if checkpointing else model.gradient_checkpointing_disable)()

        return Subject(run, prepare)

    return make


def lxt_explicit(case: Case) -> Subject:
    """LXT's explicit path, by its ``examples/paper/llama.py``; its forks of model classes are in old releases only."""
    import_torchvision_anyhow()
    fork = importlib.import_module(f"lxt.models.{case.shape.family}")
    model = case.model(getattr(fork, case.shape.model), attn_implementation="eager")
    fork.attnlrp.register(model)

    def run(ids: list[int]) -> Tensor:
        embeddings = case.embed(model, ids)
        highest = case.logits(model, embeddings)[0, case.position(ids)].max()
        highest.backward(highest)
        return embeddings.grad.float().sum(-1)[0]

    return Subject(run, lambda: None)


def import_torchvision_anyhow() -> None:
    """LXT imports torchvision, whose build for CUDA refuses to be imported beside a CPU build of torch: for want of
    two operations that nobody here calls, so a declaration is enough."""
    if torch.version.cuda is None and "torchvision" not in sys.modules:
        global _declared
        _declared = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            with contextlib.suppress(RuntimeError):  # this build does declare it
                _declared.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


# ------------------------------------------------------------------------------- Captum


def captum_gradients(case: Case) -> Subject:
    """Integrated Gradients with 50 steps from zero, ten at a time."""
    from captum.attr import IntegratedGradients

    model = case.model()

    def run(ids: list[int]) -> Tensor:
        embeddings = case.embed(model, ids)
        position = case.position(ids)
        target = int(case.logits(model, embeddings)[0, position].argmax())
        method = IntegratedGradients(lambda x: case.logits(model, x)[:, position])
        found = method.attribute(embeddings, target=target, n_steps=50, internal_batch_size=10)
        return found.detach().sum(-1)[0]

    return Subject(run, lambda: model.requires_grad_(False))


def captum_leave_one_out(case: Case) -> Subject:
    """The fall of the logit when one token's embedding is zero, 16 tokens at a time."""
    from captum.attr import FeatureAblation

    model = case.model()

    @torch.no_grad()
    def run(ids: list[int]) -> Tensor:
        embeddings = case.embed(model, ids).detach()
        position = case.position(ids)
        target = int(case.logits(model, embeddings)[0, position].argmax())
        method = FeatureAblation(lambda x: case.logits(model, x)[:, position])
        mask = torch.arange(len(ids), device=case.device)[None, :, None].expand_as(embeddings)
        found = method.attribute(embeddings, target=target, feature_mask=mask, perturbations_per_eval=16)
        return found[0, :, 0]

    return Subject(run, lambda: model.requires_grad_(False))


# ---------------------------------------------------------------------------- the table

SUBJECTS: dict[str, tuple[str, Callable[[Case], Subject]]] = {
    "floor A": ("lrpx", floor_a),
    "floor B": ("lrpx", floor_b),
    "lrpx attnlrp": ("lrpx", lrpx_explainer("attnlrp")),
    "lrpx lrp": ("lrpx", lrpx_explainer("lrp")),
    "lrpx alti-logit": ("lrpx", lrpx_explainer("alti-logit")),
    "lrpx pa-lrp": ("lrpx", lrpx_explainer("pa-lrp")),
    "lrpx attnlrp compiled": ("lrpx", lrpx_explainer("attnlrp", compile=True)),
    "lrpx lrp compiled": ("lrpx", lrpx_explainer("lrp", compile=True)),
    "lrpx attnlrp recomputed": ("lrpx", lrpx_explainer("attnlrp", recompute=True)),
    "lrpx attnlrp with ledger": ("lrpx", lrpx_explainer("attnlrp", {"ledger": True})),
    "lrpx lrp with ledger": ("lrpx", lrpx_explainer("lrp", {"ledger": True})),
    "LXT efficient": ("lxt", lxt_efficient()),
    "LXT efficient, frozen": ("lxt", lxt_efficient(frozen=True)),
    "LXT efficient, checkpointed": ("lxt", lxt_efficient(frozen=True, checkpointing=True)),
    "LXT explicit": ("lxt-explicit", lxt_explicit),
    "Captum IG 50": ("captum", captum_gradients),
    "Captum leave-one-out": ("captum", captum_leave_one_out),
}
"""Each subject by name: the environment it runs in (see ``servers.py``), and how it is made."""


# ---------------------------------------------------------------------------- measuring

_replaced: list[torch.library.Library] = []


def leave_out_attention() -> None:
    """Fused attention on the CPU computes nothing from now on: zeros stand where its results go, forward and backward.

    The tensors are those of the real kernel, so the memory is; numbers and time are not.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        batch, heads, length, size = q.shape
        out = q.new_zeros(batch, length, heads, size).transpose(1, 2)
        return out, q.new_zeros(batch, length, heads).transpose(1, 2)

    def backward(_: Tensor, q: Tensor, k: Tensor, v: Tensor, *__: Any, **___: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_zeros(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v))

    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention_for_cpu", forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", backward, "CPU")
    _replaced.append(library)


@dataclass
class Peak:
    """The memory that was held before a block, and the most inside it above that, in MiB."""

    held: float = float("nan")
    mib: float = float("nan")


@contextlib.contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure the memory of a block: of the GPU, or the resident memory of this process."""
    gc.collect()
    peak = Peak()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        peak.held = torch.cuda.memory_allocated(device) / MIB
        yield peak
        peak.mib = torch.cuda.max_memory_allocated(device) / MIB - peak.held
    else:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        peak.held = resident("VmRSS")
        yield peak
        peak.mib = resident("VmHWM") - peak.held


def resident(name: str) -> float:
    """A line of ``/proc/self/status`` in MiB: ``VmRSS`` is held now, ``VmHWM`` was the most."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) / 1024


def measure(subject: Subject, ids: list[int], device: torch.device, memory: bool) -> dict[str, Any]:
    """Seconds, relevance and, when asked for (it disturbs the time), memory of one attribution."""
    subject.prepare()
    with peak_memory(device) if memory else contextlib.nullcontext(Peak()) as peak:
        wait(device)
        began = time.perf_counter()
        relevance = subject.run(ids)
        wait(device)
        seconds = time.perf_counter() - began
    return {"seconds": seconds, "held": peak.held, "mib": peak.mib, "relevance": relevance.tolist()}


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ------------------------------------------------------------------------------ serving


def serve(case: Case, answers: Any) -> None:
    """Answer the requests ``{"subject": …, "ids": […], "memory": …}`` of the standard input, each in one line."""
    subjects: dict[str, Subject] = {}
    for line in sys.stdin:
        request = json.loads(line)
        name = request["subject"]
        try:
            if name not in subjects:
                subjects[name] = SUBJECTS[name][1](case)
            answer = measure(subjects[name], request["ids"], case.device, request["memory"])
        except Exception as error:
            out_of_memory = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)
            text = textwrap.shorten(f"{type(error).__name__}: {error}", 200)
            answer = {"error": text, "out_of_memory": out_of_memory}
            error.__traceback__ = None  # which holds the tensors of the attempt
        print(json.dumps(answer), file=answers, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--limit-gib", type=float, help="an allocation beyond this fails")
    parser.add_argument("--without-attention", action="store_true", help="see leave_out_attention")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    # what libraries print goes to the standard error, so that answers alone are on the pipe
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if options.without_attention:
        leave_out_attention()
    if options.limit_gib is not None:
        Path("/proc/self/oom_score_adj").write_text("1000")  # should the machine run out, it ends this, nothing else
        limit = int(options.limit_gib * 2**30)
        if options.device.type == "cuda":
            total = torch.cuda.get_device_properties(options.device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), options.device)
        else:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    serve(Case(SHAPES[options.shape], options.device, options.weights), answers)


if __name__ == "__main__":
    main()
