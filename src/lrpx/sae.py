"""Features of a sparse autoencoder as places of relevance; what it misses is kept as an entry, so that all still sums.

A sparse autoencoder reads a module's output ``x`` as ``x = Σ_j f_j d_j + b + e``: few features ``f_j ≥ 0`` with their
directions ``d_j``, the decoder's bias ``b``, and the error ``e`` that it misses. In the run that is explained the sum
stands in the place of ``x``, whose value stays bit for bit, so that the relevance at ``x`` splits over the summands:
``R_fj = f_j d_j·∂x``, ``R_b = b·∂x``, ``R_e = e·∂x``. What features have goes on to the tokens through the encoder,
under the recipe's rules; the error and the bias end there, as constants do.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from lrpx._features import Feature, FeatureRelevance
from lrpx._files import write_whole
from lrpx._hooks import hooks
from lrpx._intervening import without_interventions
from lrpx._modules import attending_as_before, named_modules
from lrpx._results import attribution_of
from lrpx.attribution import Explained
from lrpx.errors import MethodError, ModelError
from lrpx.questions import Question, Questions
from lrpx.recipes import ATTNLRP
from lrpx.rules import with_gradient_of
from lrpx.targets import target_of
from lrpx.units import places
from lrpx.units._asked import apart_of, is_turned
from lrpx.units._looking import example
from lrpx.units._place import called, split_name
from lrpx.units._reading import Called

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lrpx._passes import Pass
    from lrpx.engine import Running
    from lrpx.engine._places import Side
    from lrpx.explainer import Explainer
    from lrpx.model import BoundModel
    from lrpx.recipes import Recipe
    from lrpx.targets import Target
    from lrpx.units import Kind, Place

__all__ = ["Feature", "FeatureRelevance", "FeatureTap", "SparseAutoencoder", "explain_features"]

Activation = Literal["relu", "topk", "jumprelu"]
KINDS_OF_HOOKS: Final[Mapping[str, Kind]] = {
    "resid_pre": "residual",
    "resid_post": "residual",
    "mlp_out": "mlp",
    "attn_out": "attention",
}
"""What SAELens' places are."""
LOADED_WITH: Final = "model_from_pretrained_kwargs"
CENTRED: Final = "center_writing_weights"
"""How SAELens says with what its model was loaded, and the one of these that changes what an autoencoder reads."""
SAELENS: Final = "sae_weights.safetensors"
SPARSIFY: Final = "sae.safetensors"
NEARLY: Final = 0.05
"""A change of the outputs by so much of another is rounding, in half precision too."""
PLAIN: Final[Mapping[str, tuple[Any, ...]]] = {
    "normalize_activations": (None, "none", False),
    "reshape_activations": (None, "none"),
    "rescale_acts_by_decoder_norm": (None, False),
    "finetuning_scaling_factor": (None, False),
    "hook_head_index": (None,),
    "hook_point_head_index": (None,),
    "transcode": (None, False),
    "skip_connection": (None, False),
    "signed": (None, False),
    "embed_skip": (None, False),
    "gram_lookup": (None, False),
}
"""Settings of a ``cfg.json`` that change what is computed, and the values that leave it as it is."""


@dataclass(frozen=True, eq=False)
class SparseAutoencoder:
    """A sparse autoencoder of ``F`` features of ``d`` numbers.

    ``f = g((x − c) W_enc + b_enc)`` with ``c`` the decoder's bias or nothing, ``x ≈ f W_dec + b_dec``.

    Args:
        encoder: ``[d, F]``.
        encoder_bias: ``[F]``.
        decoder: ``[F, d]``.
        decoder_bias: ``[d]``.
        activation: ``g``: ``"relu"``; ``"topk"``, the k largest of a ReLU; ``"jumprelu"``, what is above the threshold.
        k: of ``"topk"``.
        threshold: ``[F]``, of ``"jumprelu"``.
        centred: whether the decoder's bias is taken off first.
        hook: where it was trained, as its files say.
        mean_free: whether ``x`` is read less the mean of its numbers, as TransformerLens has the stream of a model with
            LayerNorms where it centres what writes to it; the mean is then a part of ``e``.

    Raises:
        ModelError: the shapes do not fit each other, there is no such activation, or it does not use the ``k`` or the
            threshold that is given.
    """

    encoder: Tensor
    encoder_bias: Tensor
    decoder: Tensor
    decoder_bias: Tensor
    activation: Activation = "relu"
    k: int | None = None
    threshold: Tensor | None = None
    centred: bool = False
    hook: str = ""
    mean_free: bool = False

    def __post_init__(self) -> None:
        wide, count = self.encoder.shape if self.encoder.ndim == 2 else (0, 0)
        wanted = {"encoder_bias": (count,), "decoder": (count, wide), "decoder_bias": (wide,)}
        if self.activation == "jumprelu":
            wanted["threshold"] = (count,)
        for name, shape in wanted.items():
            found = getattr(self, name)
            if not isinstance(found, Tensor) or tuple(found.shape) != shape:
                told = list(found.shape) if isinstance(found, Tensor) else found
                raise ModelError(
                    f"the autoencoder's {name.replace('_', ' ')} is {told}, and its encoder [{wide}, {count}]; it "
                    f"must be {list(shape)}"
                )
        if self.activation not in ("relu", "topk", "jumprelu"):
            raise ModelError(f"there is no activation {self.activation!r}; an autoencoder has relu, topk or jumprelu")
        for name, only in (("k", "topk"), ("threshold", "jumprelu")):
            if getattr(self, name) is not None and self.activation != only:
                raise ModelError(
                    f"the autoencoder has a {name}, which its activation, {self.activation}, does not use; pass "
                    f"activation={only!r}, or no {name}"
                )
        if self.activation == "topk" and not (isinstance(self.k, int) and 0 < self.k <= count):
            raise ModelError(f"k is {self.k!r} for {count} features; pass how many of them may be active at once")

    @property
    def width(self) -> int:
        """``d``."""
        return self.encoder.shape[0]

    @property
    def features(self) -> int:
        """``F``."""
        return self.encoder.shape[1]

    def encode(self, x: Tensor) -> Tensor:
        """``[…, F]`` from ``[…, d]``."""
        if self.mean_free:
            x = x - x.mean(-1, keepdim=True)
        if self.centred:
            x = x - self.decoder_bias
        before = torch.nn.functional.linear(x, self.encoder.T, self.encoder_bias)
        active = torch.relu(before)
        if self.activation == "relu":
            return active
        # which features are active is chosen, and no function of how much
        seen = before.detach()
        if self.threshold is not None:
            return active * (seen > self.threshold).to(active.dtype)
        assert self.k is not None
        chosen = torch.zeros_like(seen).scatter_(-1, seen.topk(self.k).indices, 1.0)
        return active * chosen

    def decode(self, features: Tensor) -> Tensor:
        """``[…, d]`` from ``[…, F]``."""
        return features @ self.decoder + self.decoder_bias

    def to(self, *, device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> SparseAutoencoder:
        """The same on a device, in a precision."""
        names = ("encoder", "encoder_bias", "decoder", "decoder_bias", "threshold")
        moved = {name: getattr(self, name) for name in names}
        moved = {name: None if each is None else each.to(device, dtype) for name, each in moved.items()}
        kept = {name: getattr(self, name) for name in ("activation", "k", "centred", "hook", "mean_free")}
        return SparseAutoencoder(**moved, **kept)

    # --------------------------------------------------------------------------- files

    @classmethod
    def load(cls, folder: str | Path) -> SparseAutoencoder:
        """Read a folder of SAELens (``sae_weights.safetensors``) or of sparsify (``sae.safetensors``), each with its
        ``cfg.json``.

        Raises:
            ModelError: there is none, it cannot be read, or it computes something else; names what.
        """
        folder = Path(folder)
        try:
            config = json.loads((folder / "cfg.json").read_text(encoding="utf-8"))
            name = next((name for name in (SAELENS, SPARSIFY) if (folder / name).is_file()), None)
            if name is None:
                raise ModelError(
                    f"there is neither {SAELENS} nor {SPARSIFY} in {folder}; name the folder that holds it"
                )
            weights = load_file(folder / name)
        except OSError as error:
            raise ModelError(
                f"cannot read {folder / 'cfg.json'}: {error.strerror}; name the folder that holds it"
            ) from error
        except (ValueError, RecursionError, SafetensorError) as error:
            if isinstance(error, ModelError):
                raise
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelError(f"cannot read the autoencoder in {folder}: {first}; copy it anew") from error
        if not isinstance(config, dict):
            raise ModelError(f"{folder / 'cfg.json'} holds {type(config).__name__}; an autoencoder's is an object")
        for key, plain in PLAIN.items():
            if config.get(key) not in plain:
                raise ModelError(
                    f"the autoencoder in {folder} has {key} = {config[key]!r}, which is not computed here; fold it "
                    "into the weights, or use one without"
                )
        read = _of_saelens if name == SAELENS else _of_sparsify
        return read(folder, config, {key: each.float() for key, each in weights.items()})

    def save(self, folder: str | Path) -> None:
        """Write a folder in SAELens' layout.

        Raises:
            ResultFileError: it cannot be written.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        weights = {
            "W_enc": self.encoder, "b_enc": self.encoder_bias, "W_dec": self.decoder, "b_dec": self.decoder_bias
        }  # fmt: skip
        config: dict[str, Any] = {
            "architecture": "standard" if self.activation == "relu" else self.activation,
            "d_in": self.width,
            "d_sae": self.features,
            "apply_b_dec_to_input": self.centred,
            "normalize_activations": "none",
            "metadata": {"hook_name": self.hook},
        }
        if self.mean_free:
            config["metadata"][LOADED_WITH] = {CENTRED: True}
        if self.activation == "topk":
            config["k"] = self.k
        if self.threshold is not None:
            weights["threshold"] = self.threshold
        write_whole(folder / SAELENS, save({key: each.contiguous() for key, each in weights.items()}))
        write_whole(folder / "cfg.json", json.dumps(config, indent=1).encode())

    # --------------------------------------------------------------------------- place

    def path(self, model: BoundModel, given: str | None = None) -> str:
        """The module of a model whose output it reads.

        Args:
            model: the model.
            given: the module's path, with ``#2`` in its third call where it is called several times; where the
                autoencoder was trained when None: a module's path, or the end of one, or a name as SAELens has it,
                ``blocks.7.hook_resid_post`` (behind layer 7), ``hook_resid_pre``, ``hook_mlp_out`` or
                ``hook_attn_out``.

        Raises:
            ModelError: no module of the model is meant, or several are; or the autoencoder reads the stream without its
                mean, and the model reads that.
        """
        found = self._path(model, given)
        if self.mean_free and not _ignores_mean(found, model):
            raise ModelError(
                f"the autoencoder's files say {CENTRED}, so it read a stream without its mean, and "
                f"{type(model.module).__name__} reads the mean at {found}; use one that was trained on this model"
            )
        return found

    def _path(self, model: BoundModel, given: str | None) -> str:
        wanted = self.hook if given is None else given
        paths = model.paths
        if wanted in paths or split_name(wanted)[0] in paths:
            return wanted
        found = [path for path in paths if given is None and wanted and path.endswith(f".{wanted}")]
        hook = re.fullmatch(r"blocks\.(\d+)\.hook_(resid_post|resid_pre|mlp_out|attn_out)", wanted)
        if hook is not None and given is None:
            number, kind = int(hook[1]) - (hook[2] == "resid_pre"), KINDS_OF_HOOKS[hook[2]]
            found = [_behind(place, model) for place in places(model.module, kind) if place.layer == number]
        if len(found) != 1 and given is None and "hook_" in wanted and hook is None:
            raise ModelError(
                f"the autoencoder reads {wanted} of TransformerLens, which is known here as no module's output, as "
                "hook_resid_pre, hook_resid_post, hook_mlp_out and hook_attn_out are; use one that reads one of these"
            )
        if len(found) != 1:
            what = f"{wanted!r} names {len(found) or 'no'} modules" if wanted else "its files name no module"
            raise ModelError(
                f"where the autoencoder belongs in {type(model.module).__name__} is not known: {what}; pass path=, one "
                "of model.named_modules()"
            )
        return found[0]


def _behind(place: Place, model: BoundModel) -> str:
    """The module whose output goes into the stream: the place's own, or a norm that it alone is given to, as Gemma has
    behind its branches. There SAELens reads what a branch puts out."""
    if place.kind == "residual" or place.call:
        return place.name
    found, last = place.name, torch.empty(0)

    def follow(path: str, args: tuple[Any, ...], output: Any) -> None:
        nonlocal found, last
        if path == place.path and isinstance(output, Tensor):
            last = output
        elif args and args[0] is last and isinstance(output, Tensor) and output.shape == last.shape:
            found, last = (found if torch.equal(output, last) else path), output  # a dropout changes nothing

    def hook(path: str) -> Any:
        return lambda _, args, output: follow(path, args, output)

    with hooks() as on, torch.no_grad(), attending_as_before(model.module), without_interventions():
        for path, each in named_modules(model.module):
            on.after(each, hook(path))
        model.module(**example(model.module))
    return found


def _ignores_mean(path: str, model: BoundModel) -> bool:
    """Whether the same number can be added to all that a module puts out, and the model's outputs stay as they are, as
    where LayerNorms are all that reads it."""
    module = dict(named_modules(model.module)).get(split_name(path)[0])
    assert module is not None

    def outputs(one: float, other: float) -> Tensor:
        """With a number added to every second one, and another to those between."""

        def hook(_: object, args: object, given: Any) -> Any:
            value = given if isinstance(given, Tensor) else given[0]
            value = value + one
            value[..., ::2] += other - one
            return value if isinstance(given, Tensor) else (value, *given[1:])

        with hooks() as on, torch.no_grad(), attending_as_before(model.module), without_interventions():
            on.after(module, hook)
            made = model.module(**example(model.module))
        found: Tensor = made if isinstance(made, Tensor) else made[0]
        return found.float()

    plain = outputs(0.0, 0.0)
    alike, unlike = (float((outputs(1.0, other) - plain).abs().max()) for other in (1.0, -1.0))
    return alike <= NEARLY * unlike


def _of_saelens(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> SparseAutoencoder:
    about = config.get("metadata") if isinstance(config.get("metadata"), dict) else {}
    assert isinstance(about, dict)
    more = config.get("activation_fn_kwargs") if isinstance(config.get("activation_fn_kwargs"), dict) else {}
    assert isinstance(more, dict)
    named = config.get("architecture", "standard")
    if named == "standard":  # older ones have the activation apart
        named = config.get("activation_fn_str") or config.get("activation_fn") or "relu"
    if named not in ("relu", "topk", "jumprelu"):
        raise ModelError(
            f"the autoencoder in {folder} is {named!r}, which is not computed here; use one with relu, topk or jumprelu"
        )
    hook = config.get("hook_name") or config.get("hook_point") or about.get("hook_name") or ""
    out = config.get("hook_name_out") or about.get("hook_name_out")
    if out not in (None, hook):
        raise ModelError(f"{folder} holds a transcoder, from {hook} to {out}, and no autoencoder; use an autoencoder")
    need = ["W_enc", "b_enc", "W_dec", "b_dec", *(["threshold"] if named == "jumprelu" else [])]
    if bool((weights.get("scaling_factor", torch.zeros(1)) == 1).all()):  # older ones keep it, and it scales nothing
        weights = {key: each for key, each in weights.items() if key != "scaling_factor"}
    _refuse_other_weights(folder, weights, need)
    return SparseAutoencoder(
        encoder=weights["W_enc"],
        encoder_bias=weights["b_enc"],
        decoder=weights["W_dec"],
        decoder_bias=weights["b_dec"],
        activation=named,
        k=config.get("k", more.get("k")) if named == "topk" else None,
        threshold=weights.get("threshold"),
        centred=bool(config.get("apply_b_dec_to_input", True)),  # so SAELens takes files that do not say
        hook=str(hook),
        mean_free=bool((config.get(LOADED_WITH) or about.get(LOADED_WITH) or {}).get(CENTRED)),
    )


def _of_sparsify(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> SparseAutoencoder:
    named = config.get("activation", "topk")
    if named != "topk":
        raise ModelError(f"the autoencoder in {folder} is {named!r}, which is not computed here; use one with topk")
    _refuse_other_weights(folder, weights, ["encoder.weight", "encoder.bias", "W_dec", "b_dec"])
    return SparseAutoencoder(
        weights["encoder.weight"].T,
        weights["encoder.bias"],
        weights["W_dec"],
        weights["b_dec"],
        activation="topk",
        k=config.get("k"),
        centred=True,
        hook=str(config.get("hookpoint") or folder.resolve().name),
    )


def _refuse_other_weights(folder: Path, weights: Mapping[str, Tensor], need: Sequence[str]) -> None:
    missing, more = sorted(set(need) - set(weights)), sorted(set(weights) - set(need))
    if missing or more:
        raise ModelError(
            f"the autoencoder in {folder} has the weights {', '.join(weights) or 'of none'}, and not just "
            f"{', '.join(need)}; use one of this kind"
        )


class FeatureTap(Called):
    """Puts ``decode(features) + error`` in the place of a module's output, whose value stays bit for bit.

    After ``trace.explain(value)``, ``trace.relevance_of(tap.features)`` is ``[B, T, F]``, and so for ``tap.bias`` and
    ``tap.error`` ``[B, T, d]``.

    Args:
        sae: the autoencoder.
        path: the module; with ``#2`` in its third call.

    Raises:
        ModelError: while the model runs: the module's output is of another width, or it is called several times.
    """

    features: Tensor
    bias: Tensor
    error: Tensor

    writes = True

    def __init__(self, sae: SparseAutoencoder, path: str) -> None:
        self.sae = sae
        self.name = path
        path, self._call = split_name(path)
        super().__init__([path])
        self._leaves: list[Tensor] = []

    def begin(self, run: Running) -> None:
        """A new run."""
        super().begin(run)
        self._leaves = []

    def at(self, path: str, side: Side, call: int, value: Tensor) -> Tensor | None:
        """The same value, with a graph through the features."""
        if side != "output" or self._call not in (None, call):
            return None
        if value.shape[-1] != self.sae.width:
            raise ModelError(
                f"the autoencoder reads {self.sae.width} numbers, and the output of {path} has {value.shape[-1]}; use "
                "one that was trained there, or pass another path"
            )
        if self._leaves:
            raise ModelError(
                f"{path} is called several times in one run, and an autoencoder reads one place; pass "
                f"path={called(path, 0)!r}, or a later call"
            )
        wide = torch.promote_types(value.dtype, torch.float32)
        sae = self.sae.to(device=value.device, dtype=wide)
        x = value.to(wide)
        self.features = sae.encode(x)
        written = self.features @ sae.decoder
        bias = sae.decoder_bias.detach()
        self.bias = bias.expand(x.shape).clone().requires_grad_()
        self.error = (x.detach() - (written.detach() + bias)).requires_grad_()
        self._leaves = [self.features, self.bias, self.error]
        return with_gradient_of(value, (written + self.bias + self.error).to(value.dtype))

    def check(self) -> None:
        """Refuse a run in which the autoencoder read nothing.

        Raises:
            ModelError: the model did not come to its place.
        """
        if not self._leaves:
            raise ModelError(f"the model did not come to {self.name}, where the autoencoder reads; pass another path")

    def leaves(self) -> list[Tensor]:
        """The features, the decoder's bias and the error."""
        return self._leaves


def explain_features(
    explainer: Explainer,
    texts: Any,
    sae: SparseAutoencoder,
    target: Target | str | int | None = None,
    contrast: str | int | None = None,
    *,
    path: str | None = None,
    position: int | None = None,
    recipe: Recipe = ATTNLRP,
) -> Any:
    """Which features of a sparse autoencoder a prediction comes from.

    Args:
        explainer: the model's.
        texts: an input, or a list of them, which runs as one padded batch.
        sae: the autoencoder.
        target, contrast, position: as :class:`~lrpx.Explainer` takes them, one for all.
        path: the module whose output it reads; where it was trained when None.
        recipe: the rules.

    Returns:
        A :class:`FeatureRelevance`, or a list of them.

    Raises:
        ModelError: the autoencoder does not fit the model.
        MethodError: the recipe needs something that this cannot give.
        InputError, TargetError, NonFiniteError: as :class:`~lrpx.Explainer` has them.
    """
    model = explainer.bound
    where = sae.path(model, path)
    several = model.reader.is_many(texts)
    rows = model.reader.rows(texts) if several else [model.reader.row(texts)]
    if not rows[0].segments or model.task.together is not None:
        raise MethodError(f"features are explained of one text, and a {model.task.title} takes other inputs")
    if several and len(groups := model.groups(rows, len(rows))) > 1:
        how: dict[str, Any] = {"path": path, "position": position, "recipe": recipe}
        found: dict[int, FeatureRelevance] = {}
        for group in groups:
            some = explain_features(explainer, [texts[i] for i in group], sae, target, contrast, **how)
            found.update(zip(group, some, strict=True))
        return [found[i] for i in range(len(rows))]
    wanted = target_of(target, contrast, model.default_target())
    asked = [Question(i, model.reader.position(row, position), wanted) for i, row in enumerate(rows)]
    tap, turned = FeatureTap(sae, where), bool(is_turned(model.module, split_name(where)[0], "output"))
    with model.traced(Questions(tuple(rows), tuple(asked)), recipe, taps=lambda _: [tap]) as ran:
        for _ in ran.explained():  # one round: one question a row
            made = [_found(model, ran, i, tap, where, recipe, turned=turned) for i in range(len(rows))]
    return made if several else made[0]


def _found(
    model: BoundModel, ran: Pass, i: int, tap: FeatureTap, path: str, recipe: Recipe, *, turned: bool
) -> FeatureRelevance:
    """Those of row ``i``; ``turned``: whether the tokens come before the rows, as XLNet has them."""
    batch, trace, row = ran.batch, ran.trace, ran.batch.rows[i]
    length = row.lengths[0]
    begin = int(batch.starts[0][i])
    found, wanted = list(tap.features.shape[:2]), [len(batch.rows), batch.wide]
    is_apart = apart_of(model.module, split_name(path)[0], "output") == batch.wide  # latents, which are as many
    if is_apart or found != (wanted[::-1] if turned else wanted):
        shape = [*tap.features.shape[:-1], tap.sae.width]
        raise ModelError(
            f"the output of {path} is {shape} for {wanted} tokens, which has no vector for each of them; pass another "
            "path, as that of a layer"
        )

    def own(x: Tensor) -> Tensor:
        return (x.transpose(0, 1) if turned else x)[i, begin : begin + length].cpu()

    def of(x: Tensor) -> Tensor:
        return own(trace.relevance_of(x))

    values = own(tap.features.detach())
    indices = values.nonzero()
    scores = [sum(trace.source_relevance(each).sum(-1) for each in parts) for parts in ran.sources]
    tokens = batch.of_row(i, [each.cpu() for each in ran.by_token(scores)]).clone()  # type: ignore[arg-type]
    value = float(ran.answers.values[i].detach())
    explained = Explained(model.describe(ran.answers.targets[i]), value, ran.questions.asked[i].position)
    return FeatureRelevance(
        attribution=attribution_of(model, row, tokens, explained, f"features at {path}", recipe.describe()),
        path=path,
        features=tap.sae.features,
        indices=indices,
        activations=values[indices[:, 0], indices[:, 1]],
        relevance=of(tap.features)[indices[:, 0], indices[:, 1]],
        bias=of(tap.bias).sum(-1),
        error=of(tap.error).sum(-1),
    )
