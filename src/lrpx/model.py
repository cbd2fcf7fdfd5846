"""A bound model: the user's module, and all that LRPx knows about it and does with it.

What is above this floor asks questions; how a model is fed, padded, named and run is said here and below.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from enum import Enum
from functools import cached_property
from importlib import resources
from itertools import chain, count
from os import PathLike, fsdecode
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lrpx import tasks
from lrpx._batching import Batch, batch_of, batches, widths
from lrpx._dropping import can_drop, can_tell, proven, told_apart, with_another_end, without_hidden, worth
from lrpx._files import checksum
from lrpx._holding import PLACES, holding
from lrpx._loading import (
    cut_by_whole,
    is_cross_encoder,
    is_sentence_transformer,
    load_pretrained,
    refuse_other_reading,
    short_name,
    taken_apart,
)
from lrpx._modules import adapters_in, argument_names, as_it_was, attending_as_before, named_modules, unpacked
from lrpx._naming import Named
from lrpx._padding import hiding
from lrpx._passes import Pass
from lrpx._patches import entering, patches_of, places_of
from lrpx._pooling import Pooling, pooling_in, pooling_of
from lrpx.engine import _nodes, propagate
from lrpx.engine._compiled import Compiler
from lrpx.engine._learned import Learned
from lrpx.engine._positions import Positions
from lrpx.engine._running import changes_in, intervened
from lrpx.engine._trace import is_finite
from lrpx.errors import InputError, ModelError, NonFiniteError, TargetError
from lrpx.inputs import Reader
from lrpx.questions import Answers, Question, Questions
from lrpx.recipes import GRADIENT
from lrpx.targets import Span, value_of, whole_number
from lrpx.tasks import Task
from lrpx.units._looking import has_turned, with_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray
    from torch.nn import Module

    from lrpx._images import Patches
    from lrpx._patches import Places
    from lrpx.engine import Tap, Trace
    from lrpx.inputs import Row
    from lrpx.recipes import Recipe
    from lrpx.targets import Target
    from lrpx.tasks._logits import Read

__all__ = ["BoundModel", "Spec"]

BUNDLED = resources.files("lrpx") / "bundled"
"""The small language model that comes with the package."""

LOOKED_AT = 1024
"""How many numbers of each weight the fingerprint of a model looks at."""

NO_CONTENT = frozenset(
    {"_name_or_path", "_commit_hash", "transformers_version", "architectures", "auto_map", "torch_dtype", "dtype"}
    | {"use_cache", "output_hidden_states", "output_attentions", "return_dict"}
    | {"attn_implementation", "_attn_implementation", "_attn_implementation_internal", "_attn_implementation_autoset"}
)
"""What of a configuration the fingerprint leaves out: where it is from, and how it runs."""

BEGINNINGS = ("decoder_start_token_id", "bos_token_id", "forced_bos_token_id")
"""What of a generation config stands before a decoder's text."""

OF_READERS = ("chat_template", "special_tokens_map", "model_input_names", "split_special_tokens")
"""What changes the tokens of a text or a chat, beside a fast tokenizer's own description."""

HELD = ("tokenizer", "image_processor", "feature_extractor")
"""What a processor reads with."""

NO_READING = ("_file", "_path", "_side", "_length", "verbose", "total_vocab_size", "init_kwargs")
"""How the fields of a tokenizer end that say where it is from, how it pads and cuts, what it tells and has counted."""
SETTINGS = ("_kwargs", "never_split", "_added_tokens_decoder")
"""How the fields of a tokenizer end that hold several settings; others may be caches."""

AT_A_TIME = 32
"""The most rows that run together where nobody says how many."""
TRIED = 13
"""Of so many tokens is a text that tells what a model does with its mask."""
SAME = 8
"""So many times the precision, at the largest logit, values may differ where nothing is changed that is seen."""


@dataclass(frozen=True)
class Spec:
    """What a bound model is built from, as plain values, so that another process can build the same.

    Args:
        name: a name on the Hub or a folder; None for the bundled model.
        dtype: ``"float32"``, …; ``"auto"`` is the checkpoint's own.
        device: ``"cuda"``, ``"cpu"``, …; None for where transformers puts it.
        padding_side, recompute, compile, pooling: as :class:`BoundModel` takes them.
        options: what else transformers takes, such as ``{"attn_implementation": "eager"}``.

    >>> Spec().build().name
    'lrpx bundled model'
    """

    name: str | None = None
    dtype: str = "auto"
    device: str | None = None
    padding_side: Literal["left", "right"] = "right"
    recompute: bool = False
    compile: bool = False
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)  # a dict has no hash
    pooling: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.options, Mapping) or not all(isinstance(key, str) for key in self.options):
            raise ModelError(f"options is {self.options!r}; pass a dict of what transformers takes, or leave it out")

    @property
    def called(self) -> str:
        """How results call the model, as :attr:`BoundModel.name` of what is built."""
        return "lrpx bundled model" if self.name is None else short_name(str(self.name))

    def build(self) -> BoundModel:
        """Load the model and its tokenizer, with the class its config names, in eval mode.

        Raises:
            ModelError: the model cannot be found or loaded, or its class has no head to explain.
            InputError: there is no such dtype.
        """
        name = str(BUNDLED if self.name is None else self.name)
        try:
            if self.device is not None:
                place = torch.empty(0, device=self.device)  # before a model is loaded for it
                if place.is_meta:
                    raise RuntimeError("it holds no numbers")
            module, tokenizer = load_pretrained(name, self.dtype, dict(self.options))
            module = module if self.device is None else module.to(self.device)
        except (RuntimeError, AssertionError) as error:
            first = str(error).splitlines()[0].split(". ")[0]
            raise ModelError(
                f"cannot move the model to device {self.device!r}: {first}; pass another device"
            ) from error
        how: dict[str, Any] = {"recompute": self.recompute, "compile": self.compile, "pooling": self.pooling}
        return BoundModel(module.eval(), tokenizer, padding_side=self.padding_side, spec=self, **how)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, for :meth:`from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Spec:
        """What :meth:`to_dict` gave.

        Raises:
            ModelError: it is no such thing.
        """
        try:
            return cls(**values)
        except TypeError as error:
            raise ModelError(f"this is no description of a model ({error}); pass what Spec.to_dict gave") from None


class BoundModel(Named):
    """A user's module with its tokenizer, its task, and the ways to run it. The module is left as it is.

    Args:
        module: a model of transformers, or one of your own that takes ``input_ids`` and returns logits, in eval mode;
            or a pipeline of transformers, a SentenceTransformer or a CrossEncoder, which are taken apart.
        tokenizer: its tokenizer or processor; None when inputs and targets come as ids.
        task: what it predicts; by its class when None.
        padding_side: where shorter rows of a batch are padded; ``"right"`` works for every model.
        recompute: compute each layer a second time in the backward pass, to need the memory of one layer only.
        compile: run passes as compiled code.
        pooling: how a text encoder's hidden states become one embedding: ``"mean"``, ``"cls"`` (the first token),
            ``"lasttoken"`` or ``"weightedmean"``; None for what the model's files say, and else the mean; or that of
            another model, whole.
        spec: what it was built from, if it was.

    Raises:
        ModelError: the module is of a kind that has no task, or has no input embeddings; or a pipeline that reads texts
            otherwise than its tokenizer.
        InputError: an option of the wrong kind, or two that exclude each other.
    """

    def __init__(
        self,
        module: Module,
        tokenizer: Any = None,
        *,
        task: Task | None = None,
        padding_side: Literal["left", "right"] = "right",
        recompute: bool = False,
        compile: bool = False,
        pooling: str | Pooling | None = None,
        spec: Spec | None = None,
    ) -> None:
        is_encoder = is_sentence_transformer(module)
        pooled = pooling_in(module) if is_encoder and pooling is None else None
        refuse_other_reading(module)
        cut, whole = cut_by_whole(module), "sentence-transformers" if is_cross_encoder(module) else "the pipeline"
        module, tokenizer = taken_apart(module, tokenizer)
        if not isinstance(module, torch.nn.Module):
            raise ModelError(
                f"the model is {type(module).__name__}; pass a model, or use Explainer.from_pretrained(name_or_folder)"
            )
        for name, value in (("recompute", recompute), ("compile", compile)):
            if not isinstance(value, bool):
                raise InputError(f"{name} is {value!r}; pass True or False")
        if not (task is None or isinstance(task, Task)):
            raise InputError(f"task is {task!r}; pass one such as lrpx.Task.CAUSAL")
        _refuse_no_tokenizer(tokenizer)
        _refuse_no_numbers(module)
        self.module = module
        self.tokenizer = tokenizer
        if task is None and is_encoder and not getattr(self.config, "is_encoder_decoder", False):
            task = Task.EMBEDDINGS  # also of a decoder without its head, whose class does not tell
        self.task = tasks.task_of(module) if task is None else task
        self.pooling = pooled or self._pooling(pooling, spec)
        cuts = ((self.pooling.most, "sentence-transformers"), (cut, whole))
        most, cutter = min(((most, cutter) for most, cutter in cuts if most is not None), default=(None, ""))
        self.reader = Reader(module, tokenizer, self.task, most, cutter)
        if self.task.segments:
            _refuse_no_tokenizer(self.reader.text_tokenizer, "convert_ids_to_tokens")
        if self.task.segments:
            tasks.input_embedding(module)
            tasks.refuse_unnamed(module, self.task)
        if padding_side not in ("left", "right"):
            raise InputError(f'padding_side is {padding_side!r}; pass "left" or "right"')
        if compile and recompute:
            raise InputError("compile and recompute exclude each other; pass one of them")
        self.padding_side: Literal["left", "right"] = padding_side
        self.recompute = recompute
        self.spec = spec
        self.compiler = Compiler() if compile else None
        self._patches: dict[torch.Size, Patches | None] = {}
        self._places: dict[torch.Size, Places | None] = {}
        self._known = _Tried(())

    def _pooling(self, given: Any, spec: Spec | None) -> Pooling:
        if isinstance(given, Pooling):
            return given
        compares = self.task.reads == "embeddings"
        if given is not None and not compares:
            raise InputError(f"{self.task.named} pools nothing; leave pooling out")
        name = getattr(self.config, "name_or_path", None) if compares else None
        local = {"revision": self.revision, "local_files_only": True}
        options = local if spec is None else dict(spec.options)
        found = pooling_of(given, name, options, self.tokenizer)
        if found.lowers and self.tokenizer is not None and _has_cases(self.tokenizer):
            raise ModelError(
                f"{name} puts texts into lower case, says its sentence_bert_config.json, and its tokenizer does not; "
                f"write them so, and pass pooling={found.kind!r}; or pass the SentenceTransformer itself"
            )
        return found

    # ---------------------------------------------------------------------------- facts

    @property
    def config(self) -> Any:
        """The model's configuration, or None."""
        return getattr(self.module, "config", None)

    @property
    def name(self) -> str:
        """How results call the model: its name on the Hub, that of its folder without the way there, or its class."""
        name = str(getattr(self.config, "name_or_path", None) or type(self.module).__name__)
        return "lrpx bundled model" if name == str(BUNDLED) else short_name(name)

    @property
    def as_it_is(self) -> str:
        """The name, with what makes it another model for now: the adapters of peft that are switched on, and what
        interventions change."""
        adapters = adapters_in(self.module)
        with_adapters = [f"adapter {', '.join(adapters)}"] if adapters else []
        changed = [f"changed: {told}" for told in changes_in(self.module)]
        return "; ".join([self.name, *with_adapters, *changed])

    @property
    def revision(self) -> str | None:
        """The commit of its files on the Hub, if they come from there."""
        return getattr(self.config, "_commit_hash", None)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of its modules, as recipes and taps name them."""
        return tuple(path for path, _ in named_modules(self.module) if path)

    @property
    def dtype(self) -> str:
        """In which precision it runs: ``"float32"``."""
        return str(tasks.first_weight(self.module).dtype).removeprefix("torch.")

    @property
    def precision(self) -> str:
        """The same as results have it: with what its operations are cast to, in a block of ``torch.autocast``."""
        kind = tasks.input_device(self.module).type
        if not torch.is_autocast_enabled(kind):
            return self.dtype
        return f"{self.dtype}, autocast to {str(torch.get_autocast_dtype(kind)).removeprefix('torch.')}"

    @property
    def device(self) -> str:
        """Where its inputs go: ``"cpu"``."""
        return str(tasks.input_device(self.module))

    @property
    def limit(self) -> int | None:
        """The most tokens that it takes, or None for any number."""
        return self.reader.limit

    @property
    def random_part(self) -> str | None:
        """What is in training mode, where dropout makes outputs random: the model, or a dropout by its path."""
        return "the model" if self.module.training else tasks.active_dropout(self.module)

    def refuse_random(self) -> None:
        """Refuse to run while outputs are random.

        Raises:
            ModelError: something is in training mode.
        """
        if self.random_part:
            raise ModelError(
                f"{self.random_part} is in training mode, where dropout makes outputs random; call model.eval()"
            )

    def accepts(self, argument: str) -> bool:
        """Whether its forward pass takes an argument of this name."""
        return tasks.accepts(self.module, argument)

    def fingerprint(self) -> str:
        """A digest of its configuration, of what a decoder's text begins with, and of each of its weights and of each
        buffer that is saved with them: of ``LOOKED_AT`` numbers, evenly spread, and of the sum of all as whole numbers,
        so that a model trained further, configured otherwise, or changed in one neuron or one row, is not taken for the
        same one."""
        digest = hashlib.sha256(json.dumps(_plain(self.config), sort_keys=True).encode())
        if "decoder" in self.task.segments:
            writes = getattr(self.module, "generation_config", None)
            digest.update(repr([getattr(writes, name, None) for name in BEGINNINGS]).encode())
        buffers = (
            (f"{path}.{name}", each)
            for path, module in named_modules(self.module)
            for name, each in module._buffers.items()
            if each is not None and name not in module._non_persistent_buffers_set
        )
        for name, weight in chain(self.module.named_parameters(), buffers):
            digest.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
            values: Tensor = weight.detach()
            if type(values) is not torch.Tensor or values.is_meta:
                continue  # quantised or offloaded: its numbers are not to be had in the plain way
            some = values.flatten()[:: max(1, values.numel() // LOOKED_AT)].cpu().contiguous()
            digest.update(some.view(torch.uint8).numpy().tobytes())
            digest.update(str(_sum_of_bits(values)).encode())
        return digest.hexdigest()

    def tokenizer_fingerprint(self) -> str:
        """A digest of what its tokenizer makes of texts and chats, or its processor of images, wherever it was loaded
        from; how it pads and cuts is left out, for nothing here does so with it."""
        return checksum(_reading(self.tokenizer))

    # -------------------------------------------------------------------------- batches

    @property
    def can_batch(self) -> bool:
        """Padding needs an attention mask, or on the right a model whose tokens look back alone; a decoder's classifier
        also needs to know the padding token to find each row's last one, XLNet's takes the last of all, and an
        encoder's and decoder's the last end of a text, which padding must not be. And the model must heed the mask.
        Nothing can run beside another where rows of a batch see each other."""
        if self.rows_meet:
            return False
        if not self.task.segments:
            return True
        takes_masks = all(tasks.takes_mask(self.module, argument) for argument in self.task.arguments)
        if not (takes_masks and self.accepts("attention_mask")):
            return self.task is Task.CAUSAL and self.padding_side == "right" and self._looks_back
        takes_last = getattr(self.config, "summary_type", None) == "last"
        end = tasks.end_read(self.module, self.task)
        pads_end = end is not None and end == self.pad_id
        known = self.task.reads != "whole" or (self.pad_id is not None and not takes_last and not pads_end)
        return known and self._heeds_mask

    @property
    def _tried(self) -> _Tried:
        """What runs have told of the model; nothing, where something else of its user's is in it since."""
        changes = tasks.changes(self.module)
        if changes != self._known.changes:
            self._known = _Tried(changes)
        return self._known

    @property
    def rows_meet(self) -> bool:
        """Whether rows that run together see each other, so that each must run alone. Tried once; a hook of the user's
        may mix them, or count them, and is given one at a time."""
        tried = self._tried
        return tried.is_hooked or tried.once("rows meet", lambda: tasks.rows_meet(self.module, self.task))

    def groups(self, rows: Sequence[Row], batch_size: int) -> list[list[int]]:
        """Which rows run together, as :func:`~lrpx._batching.batches` has it; one by one where several cannot."""
        together = batch_size > 1 and len(rows) > 1 and self.can_batch  # what is asked last, for the model runs to tell
        if together and len({row.lengths for row in rows}) > 1:
            together = self._pads_to(max(max(row.lengths, default=0) for row in rows))
        if together:
            together = not self._meet_in(rows, batch_size)
        return batches(rows, batch_size if together else 1, tasks.border(self.module))

    def _meet_in(self, rows: Sequence[Row], batch_size: int) -> bool:
        """Whether rows see each other that did not where fewer ran together: experts of a module of one's own may take
        a number of tokens that no attribute tells. Tried where there are more of them than twice what was; and whether
        images do, on the first."""
        tried = self._tried
        if not self.task.segments:
            return tried.once("images meet", lambda: self._images_meet(rows[0]))
        wide, count = max(max(row.lengths) for row in rows), min(len(rows), batch_size)
        if wide * count > tried.apart and not (tried.meet or tasks.is_theirs(self.module)):
            count = min(2 * count, batch_size)
            tried.meet = tasks.seem_to_meet(self.module, self.task, count, wide)
            tried.apart = wide * count
        return tried.meet

    def _images_meet(self, row: Row) -> bool:
        batch = self.batch(Questions((row,), (Question(0, None, self.default_target()),)))
        return tasks.signals_meet(self.module, batch.handed)

    @property
    def _hides(self) -> bool:
        """Tried once, where nothing that is hidden makes a difference."""
        return self._tried.once("hides", lambda: tasks.hides(self.module, self.task))

    @property
    def _heeds_mask(self) -> bool:
        """Tried once."""
        how = self.module, self.task, self.pad_id or 0, self.padding_side
        return self._tried.once("heeds its mask", lambda: tasks.heeds_mask(*how))

    @cached_property
    def _hides_ones(self) -> bool:
        """Tried once, before a run."""
        return bool(self.task.segments) and tasks.hides_ones(self.module, self.task, self.pad_id or 0)

    def _pads_to(self, wide: int) -> bool:
        """Whether a module of one's own says the same of a text that is padded to so many tokens: its angles may hang
        on how many there are. Tried where there are more than ever before; transformers' says so (``tasks.border``)."""
        tried = self._tried
        held, failed = tried.padded
        if wide > held and wide < failed and self.task.segments and not tasks.is_theirs(self.module):
            how = self.module, self.task, self.pad_id or 0, self.padding_side
            tried.padded = (wide, failed) if tasks.heeds_mask(*how, wide) else (held, wide)
        return wide < tried.padded[1]

    @property
    def _looks_back(self) -> bool:
        """Tried once, not for each call: it takes two runs of the model, or of what a classifier of texts reads."""
        body = getattr(self.module, "base_model", None) if self.task.reads == "whole" else None
        module = body if isinstance(body, torch.nn.Module) else self.module
        return self._tried.once("looks back", lambda: tasks.looks_back(module))

    def end_of(self, row: Row) -> int:
        """Where the last token of a text is that is no padding, which may be what ends texts, too."""
        return next((at for at, each in reversed([*enumerate(row.tokens.ids)]) if each != self.pad_id), 0)

    def sees_nothing(self, position: int, seen: NDArray[np.bool_]) -> bool:
        """Whether there is a layer in which one place of ``[T]`` sees none of those that are seen. A classifier may
        look back alone, which is asked where the place and the one before it are hidden; one of whole texts that looks
        to both sides reads nobody knows which place."""
        if seen[position]:
            return False
        looks_back = self.task is Task.CAUSAL or (not seen[max(position - 1, 0)] and self._looks_back)
        if self.task.reads == "whole" and not looks_back:
            return False
        return not seen[tasks.seen_from(self.module, position, looks_back)].any()

    @property
    def _rows_alone(self) -> bool:
        """Tried once, before a run."""
        return self.task.reads != "position" or (not tasks.head_is_hooked(self.module) and self._head_is_alone)

    @property
    def _head_is_alone(self) -> bool:
        return self._tried.once("head", lambda: tasks.rows_alone(self.module, self.task, self.pad_id or 0))

    @property
    def pads_up(self) -> bool:
        """Whether rows are padded up to the sizes that code is compiled for."""
        return self.compiler is not None and self.can_batch and self.task.together is None

    @property
    def pad_id(self) -> int | None:
        """What it takes for padding, or None."""
        found = getattr(tasks.text_config(self.module), "pad_token_id", None)
        return found if isinstance(found, int) and found >= 0 else None

    def batch(self, questions: Questions, *, exactly: bool = False, apart: bool = False) -> Batch:
        """The rows of some questions as the model takes them.

        Args:
            questions: what is asked.
            exactly: not padded up to a size that code is compiled for.
            apart: padded further, if need be, so that the tokens of an encoder, those of a decoder and, in a model that
                computes with the tokens before the rows, the rows are unequal in number: what stands inside of the
                model is known by its shape.

        Raises:
            ModelError: choices of unequal length for a model that reads the last token of each; texts of unequal length
                for one that takes no attention mask, or reads what it hides; a model that hides the tokens at which
                its mask is 1.
            InputError: they are to be unequal in number, and fill the model's context.
        """
        takes_last = getattr(self.config, "summary_type", None) == "last"
        uneven = self.task.together is not None and any(len(set(row.lengths)) > 1 for row in questions.rows)
        if self.task.together == "choices" and takes_last and uneven:
            raise ModelError(
                f"{type(self.module).__name__} reads the last token of each choice, which padding would be; pass "
                "choices of equal length"
            )
        if uneven and not (self.accepts("attention_mask") and self._heeds_mask):
            raise ModelError(
                f"{type(self.module).__name__} would read the padding of the shorter text, as it takes no "
                "attention_mask or does not heed it; pass texts of equal length, in tokens"
            )
        if self._hides_ones:
            raise ModelError(
                f"a mask of ones changes what {type(self.module).__name__} says, as where 1 hides a token "
                "(key_padding_mask); let its attention_mask be 1 where a token is seen and 0 where it is padding, as "
                "transformers' is, or give it another name"
            )
        with torch.inference_mode(False):  # else the ids could not be saved for the backward pass
            width = widths(questions.rows, self.limit) if self.pads_up and not exactly else ()
            width = width if width and self._pads_to(max(width)) else ()
            how: dict[str, Any] = {"pad_id": self.pad_id or 0, "side": self.padding_side}
            batch = batch_of(questions.rows, self.module, self.task, width=width, **how)
            if self._turns_unseen(batch):
                batch = batch_of(questions.rows, self.module, self.task, width=(batch.wide + 1,), **how)
            if apart and batch.arguments:
                wider = self._apart(batch)
                if wider != batch.widths:
                    batch = batch_of(questions.rows, self.module, self.task, width=wider, **how)
            return batch

    def _apart(self, batch: Batch) -> tuple[int, ...]:
        """How wide each of its arguments is to be so that none is as wide as another is, or as there are rows.

        Raises:
            InputError: the model has no places for more padding.
        """
        rows = batch.tokens // sum(batch.widths)
        taken = {rows} if rows > 1 and has_turned(self.module) and self.can_batch else set()
        found: list[int] = []
        for wide in reversed(batch.widths):  # a decoder's first
            free = next(each for each in count(wide) if each not in taken)
            if self.limit is not None and wide <= self.limit < free:
                raise InputError(
                    f"an encoder's tokens, a decoder's or the rows of a batch are {self.limit} alike, as many as the "
                    "model's context, and inside of the model nothing tells them apart; shorten one text, or pass "
                    "fewer rows"
                )
            taken.add(free)
            found.append(free)
        return tuple(reversed(found))

    def _turns_unseen(self, batch: Batch) -> bool:
        """Whether nobody could tell if the model turns these ids round, as XLNet does: they are the same turned."""
        ids = batch.inputs.get("input_ids")
        if not isinstance(ids, Tensor) or ids.ndim != 2 or not len(ids) == ids.shape[1] > 1 or not self.can_batch:
            return False
        return torch.equal(ids, ids.T)

    def _groups(self, rows: Sequence[Row], batch_size: int, exactly: bool) -> Iterator[list[int]]:
        """The batches of rows; ``exactly``: only rows of equal length together, without padding."""
        kinds: dict[object, list[int]] = {}
        for i, row in enumerate(rows):
            kinds.setdefault(row.lengths if exactly else None, []).append(i)
        for kind in kinds.values():
            yield from ([kind[i] for i in group] for group in self.groups([rows[i] for i in kind], batch_size))

    def patches(self, row: Row) -> Patches | None:
        """Into which patches the model cuts the image of a row; None where it does not, where they overlap, where it
        reads pixels beside them, and where there is no image. Found once for each size."""
        name = tasks.pixel_argument(self.module, self.task)
        pixels = None if name is None else row.arguments.get(name)
        if name is None or pixels is None or pixels.ndim != 4 or len(pixels) != 1:
            return None
        if pixels.shape not in self._patches:
            batch = self.batch(Questions((row,), (Question(0, 0, self.default_target()),)))
            found = patches_of(self.module, batch.handed, name)
            is_all = found is None or not self._reads_beside(found, row, name)
            self._patches[pixels.shape] = found if is_all else None
        return self._patches[pixels.shape]

    def _reads_beside(self, patches: Patches, row: Row, name: str) -> bool:
        """Whether what the model says of an image changes with pixels that are in none of its patches, as where it cuts
        it into strips first, or once more into smaller patches."""
        pixels = row.arguments[name]
        beside = (patches.places(*pixels.shape[-2:]) < 0).to(pixels.device)
        if not bool(beside.any()):
            return False
        change = torch.linspace(1, 2, pixels.numel(), device=pixels.device).to(pixels.dtype).reshape(pixels.shape)
        changed = torch.where(beside, pixels + change, pixels)
        rows = (row, replace(row, arguments={**row.arguments, name: changed}))
        asked = (Question(0, len(row.segments[-1]) - 1 if row.segments else 0, self.default_target()),)
        said, other = (self.ask(Questions((each,), asked)).logits for each in rows)
        return not torch.equal(said, other)

    def places(self, row: Row) -> Places | None:
        """The tokens that the model makes of the image of a row, where its attention goes over all of them; found once
        for each size."""
        patches, name = self.patches(row), tasks.pixel_argument(self.module, self.task)
        if patches is None or name is None:
            return None
        shape = row.arguments[name].shape
        if shape not in self._places:
            batch = self.batch(Questions((row,), (Question(0, 0, self.default_target()),)))
            self._places[shape] = places_of(self.module, batch.handed, name, patches)
        return self._places[shape]

    def entering(self, row: Row) -> Tensor | None:
        """``[T, d]``: what enters the model's first attention of the image of a row; None where that is no row for each
        token."""
        batch = self.batch(Questions((row,), (Question(0, 0, self.default_target()),)))
        found = entering(self.module, batch.handed)
        return None if found is None else found[0].cpu()

    # -------------------------------------------------------------------------- running

    def ask(self, questions: Questions) -> Answers:
        """What the model says, without a graph.

        Raises:
            TargetError: a target is no token or class.
            NonFiniteError: NaN or infinity in the logits.
        """
        batch = self.batch(questions)
        reading = self._reading(batch, batch.positions(questions), self._rows_alone)
        with torch.no_grad(), attending_as_before(self.module), unpacked(self.module), reading as read:
            answers = self._answers(questions, read(self.module(**batch.handed)))
        _refuse_non_finite(answers.logits)
        return answers.detached()

    def values(
        self,
        questions: Questions,
        *,
        attention_mask: Sequence[Tensor] | None = None,
        embeddings: Sequence[Tensor] | None = None,
        taps: Callable[[Batch, Sequence[int]], Sequence[Tap]] | None = None,
        batch_size: int = AT_A_TIME,
        read: Callable[[int, Target, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """``[K]``: the values of questions whose targets are resolved, without a graph, perhaps of changed inputs.

        Rows run together as :func:`~lrpx._batching.batches` has it, so there may be as many as you like. Where an
        attention mask hides much, and this model is found to say the same then, rows run without their hidden tokens
        (:mod:`lrpx._dropping`).

        Args:
            questions: each about a row of its own (:meth:`~lrpx.questions.Questions.alone`).
            attention_mask: for each row ``[T]`` of its first segment, 0 at tokens that no other shall see.
            embeddings: for each row ``[T, d]``, what stands in the place of its first segment's embeddings.
            taps: from a batch and the numbers of its rows to what writes into its run, or listens to it.
            batch_size: the most rows run together.
            read: what else is read at the output: of a question (by its number), its target and its logits ``[V]``, a
                tensor of one shape for all, and ``[K, …]`` is returned.

        Raises:
            ModelError: the model does not take what is to be changed, or does not look at it, or draws random numbers.
            NonFiniteError: NaN or infinity in a value.
        """
        for name, given in (("attention_mask", attention_mask), ("inputs_embeds", embeddings)):
            if given is not None and not self.accepts(name):
                raise ModelError(f"{type(self.module).__name__} takes no {name}; use a method that does not need it")
        # of embeddings no model can tell the padding, and some look for it in the ids
        exactly = attention_mask is not None or embeddings is not None
        masks = None if attention_mask is None or embeddings is not None or taps is not None else attention_mask
        asked = questions
        if masks is not None and worth(masks) and self._says_the_same(questions):
            questions, attention_mask = without_hidden(questions, masks, self._first_position)
            exactly = False
        state = torch.get_rng_state()
        found = self._values(questions, attention_mask, embeddings, taps, batch_size, read, exactly)
        if not torch.equal(state, torch.get_rng_state()) and self._draws(asked):
            raise ModelError(
                f"{type(self.module).__name__} draws random numbers as it runs, and says something else of the same "
                "input each time, so differences between runs tell nothing of what was changed; let it draw the same "
                "(Reformer's hash_seed)"
            )
        if attention_mask is not None and len({tuple(mask.tolist()) for mask in attention_mask}) > 1:
            moved = (found - found[:1]).abs().max()
            if moved <= 16 * torch.finfo(found.dtype).eps * found.abs().max() and not self._hides:
                is_half = self.dtype in ("bfloat16", "float16")
                told = f", as far as {self.dtype} tells," if is_half else ""
                mend = "try dtype float32, or " if is_half else ""
                raise ModelError(
                    f"{type(self.module).__name__} takes an attention_mask and{told} does not look at it, so no token "
                    f"can be hidden from it; {mend}use a method or a perturbation that changes the tokens or their "
                    "embeddings"
                )
        if masks is not None and self._counts_places(asked):
            raise ModelError(
                f"{type(self.module).__name__} counts tokens' places by its attention_mask, or which one it reads, so "
                "others move where a token is hidden, and none can be hidden in its place; let it take position_ids, "
                "or use a method or a perturbation that changes the tokens or their embeddings"
            )
        if masks is not None and self._sees_hidden(asked):
            raise ModelError(
                f"in {type(self.module).__name__} other tokens see what its attention_mask hides, as by a convolution, "
                "a recurrence or a pooling over tokens, so no token can be hidden so; use a method or a perturbation "
                "that changes the tokens or their embeddings"
            )
        if masks is not None and self._reads_another(asked):
            raise ModelError(
                f"{type(self.module).__name__} counts by its attention_mask which token it reads, and reads one before "
                "it where a token is hidden, so no token can be hidden so; use a method or a perturbation that changes "
                "the tokens or their embeddings"
            )
        if masks is not None and self._reads_hidden(asked, masks):
            raise ModelError(
                f"in {type(self.module).__name__} a hidden token that is read looks at others that are hidden, as "
                "where they fill its window of attention, of which nothing tells; use a method or a perturbation that "
                "changes the tokens or their embeddings"
            )
        return found

    def _values(
        self,
        questions: Questions,
        attention_mask: Sequence[Tensor] | None,
        embeddings: Sequence[Tensor] | None,
        taps: Callable[[Batch, Sequence[int]], Sequence[Tap]] | None,
        batch_size: int,
        read: Callable[[int, Target, Tensor], Tensor] | None,
        exactly: bool,
    ) -> Tensor:
        """:meth:`values` of these rows as they are; ``exactly``: without padding."""
        found: dict[int, Tensor] = {}
        asked: dict[int, list[int]] = {row: [] for row in range(len(questions.rows))}
        for i, question in enumerate(questions.asked):
            asked[question.row].append(i)
        alone = self._rows_alone
        changed_in_place = attention_mask is not None or embeddings is not None
        for group in self._groups(questions.rows, batch_size, exactly):
            some = questions.about(group)
            batch = self.batch(some, exactly=changed_in_place, apart=taps is not None)
            whole = batch
            if attention_mask is not None:
                batch = batch.changed(self.module, "attention_mask", [attention_mask[i] for i in group])
            if embeddings is not None:
                batch = batch.changed(self.module, "inputs_embeds", [embeddings[i] for i in group])
            self._know_tokens(batch)
            mine = sorted(i for row in group for i in asked[row])
            with ExitStack() as stack:
                stack.enter_context(attending_as_before(self.module))
                stack.enter_context(unpacked(self.module))
                if attention_mask is not None:
                    stack.enter_context(self._places_held(whole))
                if taps is not None:
                    stack.enter_context(propagate(self.module, GRADIENT, (), taps=taps(batch, group)))
                if attention_mask is not None:
                    stack.enter_context(hiding(batch.inputs["attention_mask"], batch.real))
                stack.enter_context(torch.no_grad())
                logits_of = stack.enter_context(self._reading(batch, batch.positions(some), alone))
                answers = self._answers(some, logits_of(self.module(**batch.handed)))
                if read is None:
                    values = answers.values
                else:
                    trios = zip(mine, answers.targets, answers.logits, strict=True)
                    values = torch.stack([read(i, target, logits) for i, target, logits in trios])
            found.update(zip(mine, values.cpu(), strict=True))
        every = torch.stack([found[i] for i in range(len(questions))])
        if not every.isfinite().all():
            changed = "" if attention_mask is None else ", as where a token that sees only itself is hidden"
            raise NonFiniteError(
                f"{type(self.module).__name__} answers NaN or infinity to a changed input{changed}; use another "
                "method, or try dtype float32"
            )
        return every

    @property
    def _spare(self) -> list[int]:
        """Two tokens to try the model with, out of the middle of its vocabulary."""
        count = tasks.first_weight(self.module).shape[0]
        return [i for i in range(count // 2, count) if i != self.pad_id][:2]

    def _sees_hidden(self, questions: Questions) -> bool:
        """Whether what the model says hangs on what stands in hidden places that are not read. Tried once, on the first
        text that can tell."""
        tried = self._tried
        if tried.is_seen is not None:
            return tried.is_seen
        some = told_apart(questions, self.task is Task.CAUSAL, self._spare, self.pad_id)
        if some:
            third, every = some
            tried.is_seen = self._tells_apart(*third, SAME)
            with suppress(RuntimeError, ValueError, IndexError, NonFiniteError):  # with next to nothing left
                # which is small beside what is lost
                tried.is_seen = tried.is_seen or self._tells_apart(*every, 4 * SAME)
        return bool(tried.is_seen)

    def _draws(self, questions: Questions) -> bool:
        """Whether the model says something else of the same input in another run. Tried once."""

        def differ() -> bool:
            asked = questions.alone([0])
            one, other = (
                self._values(
                    asked, None, None, None, 1, lambda _, __, logits: logits.double().nan_to_num(), exactly=True
                )
                for _ in range(2)
            )
            lost = SAME * torch.finfo(tasks.first_weight(self.module).dtype).eps * one.abs().max()
            return bool((one - other).abs().max() > lost)

        return self._tried.once("draws", differ)

    def _reads_hidden(self, questions: Questions, masks: Sequence[Tensor]) -> bool:
        """Whether what is read at a hidden place hangs on hidden places beside it: a softmax over nothing but numbers
        far below 0 is a mean of all. Tried where most are hidden before it, or on either side, until there are more."""
        tried = self._tried.read_alone
        most: dict[object, tuple[float, int, list[int]]] = {}
        for i, (asked, mask) in enumerate(zip(questions.asked, masks, strict=True)):
            row, target = questions.rows[asked.row], asked.target
            if row.arguments or len(row.segments) > 1:
                continue
            read: list[Any] = [target.token, target.end] if isinstance(target, Span) else [asked.position]
            if self.task.reads == "whole":
                read = [0, self.end_of(row), len(mask) - 1]
            places = [place for place in read if isinstance(place, int)]
            for place in places:
                before, after = _hidden_beside(mask.tolist(), place)
                for side, wide in (("before", before), ("either", min(before, after))):
                    kind = side, place == 0
                    if wide > max(tried.get(kind, 0), most.get(kind, (0,))[0]):
                        most[kind] = wide, i, places
        if not can_tell(tasks.first_weight(self.module).dtype):
            return False
        for which, (wide, i, places) in most.items():
            asked, mask = questions.asked[i], masks[i]
            row, spare = questions.rows[asked.row], self._spare
            (first,) = row.segments
            ids = list(first.tokens.ids)
            for place in (mask == 0).nonzero().flatten().tolist():
                if place not in places and ids[place] != self.pad_id:
                    ids[place] = next(each for each in spare if each != ids[place])
            other = replace(row, segments=(replace(first, tokens=replace(first.tokens, ids=tuple(ids))),))
            pair = replace(questions, rows=(row, other), asked=(replace(asked, row=0), replace(asked, row=1)))
            if self._tells_apart(pair, [mask] * 2, [at for at in range(len(ids)) if at not in places], SAME):
                return True
            tried[which] = wide
        return False

    def _tells_apart(self, pair: Questions, masks: Sequence[Tensor], places: Sequence[int], same: int) -> bool:
        """Whether what the model says elsewhere than in these places is another of the second text, by more than so
        many times the precision."""

        def elsewhere(_: int, __: Target, logits: Tensor) -> Tensor:
            kept = logits.double().masked_fill(logits == -torch.inf, 0.0)
            if self.task.reads == "span":  # each place has its own, those too
                kept[[*places, *(place + len(kept) // 2 for place in places)]] = 0.0
            return kept

        alone, beside = (self._values(pair, masks, None, None, size, elsewhere, exactly=True) for size in (1, 2))
        lost = same * torch.finfo(tasks.first_weight(self.module).dtype).eps * alone.abs().max()
        lost = lost.maximum(4 * (alone - beside).abs().max())
        return bool((alone[0] - alone[1]).abs().max() > lost)

    def _reads_another(self, questions: Questions) -> bool:
        """Whether a model that reads a text as a whole looks at its last token, and no longer where one before that is
        hidden, as one that pools at ``attention_mask.sum() - 1``. Tried once, on the first text that can tell."""
        tried = self._tried
        if tried.reads_on is None and self.task.reads == "whole":
            found = with_another_end(questions, self._spare)
            if found is None:
                return False
            try:
                logits = self._values(*found, None, None, 1, lambda _, __, logits: logits.double(), exactly=True)
            except (RuntimeError, ValueError, IndexError):  # it reads where a certain token is
                tried.reads_on = True
                return False
            lost = SAME * torch.finfo(tasks.first_weight(self.module).dtype).eps * logits.abs().max()
            whole, hidden = ((one - other).abs().max() for one, other in (logits[:2], logits[2:]))
            tried.reads_on = not bool(whole > lost >= hidden)
        return tried.reads_on is False

    def _counts_places(self, questions: Questions) -> bool:
        """Whether a module of one's own does more with its mask than to hide tokens (:class:`~lrpx.tasks.Counting`):
        what it says of a text without one is then of other places, too. Tried once, on a text of :data:`TRIED` tokens
        out of the first; transformers' are known (BLOOM's distances are the method's own words)."""
        if tasks.is_theirs(self.module):
            return False
        return self._tried.once("counts places", lambda: self._tries_another_mask(questions))

    def _tries_another_mask(self, questions: Questions) -> bool:
        row, wide = questions.rows[0], TRIED
        first, *others = row.segments
        if row.arguments:
            wide = len(first)
        elif self.limit is not None:
            wide = min(wide, self.limit)
        some = [place * len(first) // wide for place in range(wide)]
        segments = (first if row.arguments else first.only(some), *others)
        read = len(segments[-1]) - 1 if self.task.reads == "position" else None
        asked = Questions((replace(row, segments=segments),), (Question(0, read, questions.asked[0].target),))
        if wide < 2:
            return False
        middle = (wide - 1) // 2
        without = torch.ones(wide, wide, dtype=torch.int64).fill_diagonal_(0)  # each of its rows hides another token
        without[:, middle] = 0
        apart = [place for place in (0, wide * 3 // 16, wide * 3 // 4) if place != middle]
        without[middle] = 1
        without[middle, apart] = 0  # no place but the first has as many before it
        hidden = [[*apart, middle] if place == middle else [place] for place in range(wide - 1)]
        batch = self.batch(asked, exactly=True)
        seen = torch.ones(wide, dtype=torch.int64)
        seen[middle] = 0  # and the last token is hidden in none, where a classifier may read
        every = [batch.changed(self.module, "attention_mask", [each]).inputs for each in (seen, *without[:-1])]

        def run(inputs: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> tasks.Counting:
            masks = [each["attention_mask"] for each in others]
            counting = tasks.Counting(self.module, tasks.first_weight(self.module), inputs, masks, hidden[: len(masks)])
            with (
                suppress(RuntimeError, ValueError, IndexError),  # it reads where a certain token is, or takes fewer
                torch.no_grad(), as_it_was(self.module), unpacked(self.module), self._places_held(batch), counting,
            ):  # fmt: skip
                counting.end(self.module(**inputs))
            return counting

        found = run(every[0], every[1:])
        return found.counts or (bool(found.unseen) and found.saw_other(run(every[1 + middle], [])))

    def _places_held(self, batch: Batch) -> AbstractContextManager[None]:
        """Where a mask hides tokens, they keep their places: beside an image they are counted otherwise, and a module
        around another may count them by the mask."""
        around = not tasks.is_theirs(self.module) and PLACES not in argument_names(self.module.forward)
        held = (batch.rows[0].arguments or around) and "input_ids" in batch.inputs
        return holding(self.module, batch.handed) if held else nullcontext()

    def _says_the_same(self, questions: Questions) -> bool:
        """Whether the model says the same of rows without their hidden tokens. Tried on the longest of them, and known
        from then on of rows that are not longer, in this precision, place and attention. (Interventions may be at
        places of the text.)"""
        if not can_drop(questions, self.task, self.pad_id) or not self.accepts("position_ids"):
            return False
        if intervened(self.module):
            return False
        row = max(questions.rows, key=lambda each: each.lengths)
        (length,) = row.lengths
        dtype = tasks.first_weight(self.module).dtype
        if not can_tell(dtype):
            return False
        kind = dtype, self.device, getattr(self.config, "_attn_implementation", None)
        dropping = self._tried.dropping
        holds, fails = dropping.get(kind, (0, torch.inf))
        if holds < length < fails:

            def logits(_: int, __: Target, found: Tensor) -> Tensor:
                return found.double().masked_fill(found == -torch.inf, 0.0)

            def run(some: Questions, masks: Sequence[Tensor], exactly: bool, batch_size: int) -> Tensor:
                return self._values(some, masks, None, None, batch_size, logits, exactly)

            read_at = length - 1 if self.task.reads == "position" else None  # as far from the others as there is any
            asked = Question(0, read_at, questions.asked[0].target)
            tried = Questions((row,), (asked,))
            same = proven(run, tried, self._first_position, torch.finfo(dtype).eps)
            holds, fails = (length, fails) if same else (holds, length)
            dropping[kind] = holds, fails
        return length <= holds

    @cached_property
    def _first_position(self) -> int:
        return int(tasks.count_positions(self.module, torch.ones(1, 1, dtype=torch.int64)))

    @contextmanager
    def traced(
        self,
        questions: Questions,
        recipe: Recipe,
        *,
        observe: Sequence[str] = (),
        ledger: bool = False,
        heads: bool = False,
        plain: bool = False,
        learned: bool = False,
        by_head: bool = False,
        taps: Callable[[Batch], Sequence[Tap]] | None = None,
    ) -> Iterator[Pass]:
        """One forward pass under a recipe, ready to be explained: ``for round in ran.explained(): …``.

        Args:
            questions: what is asked.
            recipe: the rules.
            observe, ledger, heads: as :func:`~lrpx.propagate` takes them.
            plain: whether to run without compiled code, whatever the model was bound with.
            learned: whether an image's learned tokens and positions are leaves (:class:`~lrpx.engine._learned.Learned`,
                :class:`~lrpx.engine._positions.Positions`); compiled code has none.
            by_head: whether the relevance of positions is kept head by head.
            taps: from the batch to what else listens to the run, or writes into it; it is then neither compiled nor
                are its layers recomputed.

        Raises:
            TargetError: a target is no token or class.
            NonFiniteError: NaN or infinity in the logits; names the first observed module.
            ModelError: the model cannot be compiled.
        """
        batch = self.batch(questions, apart=taps is not None)
        self._know_tokens(batch)
        recompute, alone = self.recompute and taps is None, self._rows_alone
        how: dict[str, Any] = {"ledger": ledger, "recompute": recompute, "heads": heads}
        compiled = not (self.compiler is None or plain or ledger or heads or taps is not None or recipe.has_positions())
        own: list[Tap] = [Learned(len(batch.rows))] if learned and not compiled else []
        own += [Positions(self.module, by_head=by_head)] if by_head or own else []
        how |= {"taps": [*([] if taps is None else taps(batch)), *own]}

        @contextmanager
        def forward(given: Mapping[str, Any]) -> Iterator[tuple[Trace, Tensor]]:
            changed = replace(batch, inputs={name: given[name] for name in batch.inputs})
            with (
                propagate(self.module, recipe, observe, **how) as trace,
                self._reading(changed, given["positions"], alone) as read,
            ):
                yield trace, read(self.module(**changed.inputs))

        with torch.inference_mode(False):
            given = batch.handed | {"positions": batch.positions(questions)}
        paths = frozenset(tasks.source_paths(self.module, self.task))
        run: AbstractContextManager[tuple[Trace, Tensor]]
        packs = not (compiled or ledger or recompute) and bool(batch.arguments) and recipe.is_ours()
        if compiled and intervened(self.module):
            raise ModelError(
                "compiled code knows nothing of the intervention in this block; make an Explainer without compile"
            )
        if self.compiler is None or not compiled:
            run = forward(given)
        else:
            recorded = paths | questions.rows[0].arguments.keys()
            changes = tasks.changes(self.module)
            run = self.compiler.run(self.module, forward, given, recorded, recipe, changes)
        with attending_as_before(self.module), run as (trace, logits):
            with torch._C.DisableTorchFunction():  # no part of the model
                seen = logits.detach()
                if not is_finite(seen):
                    trace.refuse_non_finite(seen.masked_fill(seen == -torch.inf, 0.0), "logits")
                self._refuse_probabilities(seen, -3 if self.task.reads == "map" else -1)
            self._refuse_sigmoids(logits, batch, given["positions"])
            answers = self._answers(questions, logits, plain=not recipe.has_rules())
            yield Pass(questions, batch, trace, answers, paths, packs, self.pad_id)

    def _know_tokens(self, batch: Batch) -> None:
        """Look for the tokens' modules beside an image before a run in which an intervention may ask for them."""
        if batch.arguments and batch.rows[0].arguments and intervened(self.module):
            with_tokens(self.module, batch.handed)

    def _reading(self, batch: Batch, positions: Tensor | None, alone: bool) -> AbstractContextManager[Read]:
        inputs: Mapping[str, Any] = batch.inputs
        if self.task.reads == "span":  # where there is text, whatever the mask hides
            inputs = {tasks.MASKS["input_ids"]: batch.real.to(tasks.input_device(self.module))}
        return tasks.reading(self.module, self.task, inputs, positions, self.pooling, alone)

    def _refuse_probabilities(self, logits: Tensor, dim: int) -> None:
        """Refuse a model that ends in a softmax, of which rules give other relevance than of the logits before it.

        Raises:
            ModelError: no logit is negative, and those along a dimension, of the tokens or classes, sum to one.
        """
        if logits.shape[dim] > 1 and logits.numel() and float(logits.min()) >= 0:
            sums = logits.double().sum(dim)
            # no more than a softmax may lose, for two or three logits sum to about 1 by chance too
            if bool(((sums - 1).abs() <= max(torch.finfo(logits.dtype).eps, 1e-6, 1e-8 * logits.shape[dim])).all()):
                raise ModelError(
                    f"{type(self.module).__name__} gives probabilities, not logits: none is negative, they sum to 1, "
                    "as after a softmax; pass the model without the softmax at its end, and ask for the target LogProb "
                    "where you want to explain a probability"
                )

    def _refuse_sigmoids(self, logits: Tensor, batch: Batch, positions: Tensor | None) -> None:
        """Refuse a model that ends in a sigmoid, or the logarithm of one, whose relevance has the other sign than that
        of the logits before it: where these are negative, or positive. It runs once more to tell, where all that it
        gives is between 0 and 1, or not above 0: in another thread, where no recipe holds.

        Raises:
            ModelError: its output is that of a sigmoid, or its logarithm.
        """
        with torch._C.DisableTorchFunction():
            seen = logits.detach()
            is_log = bool((seen <= 0).all()) and _are_of_function(logits)
            if self.task.reads in ("embeddings", "similarity") or not (is_log or _are_probabilities(seen)):
                return

        def ends_in_one() -> bool:
            with torch.no_grad(), _Sigmoids() as sigmoids, self._reading(batch, positions, self._rows_alone) as read:
                found = read(self.module(**batch.handed))
            return any(bool(torch.isin(found, each).all()) for each in sigmoids.given)

        with ThreadPoolExecutor(1) as thread:
            if thread.submit(ends_in_one).result():
                given, what = (
                    ("log-probabilities", "logarithm of a sigmoid") if is_log else ("probabilities", "sigmoid")
                )
                raise ModelError(
                    f"{type(self.module).__name__} gives {given}, not logits: it ends in a {what}; pass the model "
                    f"without the {what} at its end"
                )

    def _answers(self, questions: Questions, slots: Tensor, *, plain: bool = False) -> Answers:
        """The answers, from the logits ``[B, n, V]``; ``plain``: with the plain gradient of the targets.

        Raises:
            InputError: there are logits of other inputs, too, as of two images in one row.
        """
        if slots.shape[0] != len(questions.rows):
            raise InputError(
                f"{type(self.module).__name__} answers {slots.shape[0]} inputs where {len(questions.rows)} can be told "
                "apart; pass a list, each input as a batch of one"
            )
        with torch._C.DisableTorchFunction():  # a target is no part of the model, and has no rules
            logits = slots.flatten(0, 1)
            places = questions.slots(slots.shape[1])
            if places != list(range(len(logits))):
                logits = logits[torch.tensor(places, device=logits.device)]
            seen = logits.detach()
            targets = tuple(self._resolved(questions, i, seen[i]) for i in range(len(questions)))
            pairs = zip(targets, logits, strict=True)
            values = torch.stack([value_of(target, row, plain=plain) for target, row in pairs])
        return Answers(logits, targets, values)

    def _resolved(self, questions: Questions, question: int, logits: Tensor) -> Target:
        target = questions.asked[question].target
        if isinstance(target, Span) and target.token is None and target.end is None:
            logits = questions.row_of(question).within_context(logits)
        try:
            self.refuse_other(target)
            if isinstance(target, Span):
                (segment, *_) = questions.row_of(question).segments
                for place in (target.token, target.end):
                    segment.refuse_counted(whole_number(place), "the answer's place", TargetError)
            found = target.resolved(self.index, logits)
            self.refuse_unnamed(target, found)
            return found
        except TargetError as error:
            where = questions.row_of(question).where
            raise TargetError(f"{error}{where}") if where else error from None


@dataclass
class _Tried:
    """What runs have told of a model as long as its user has put the same into it (:func:`lrpx.tasks.changes`).

    Attributes:
        changes: what that is.
        is_seen: whether it says what stands in hidden places.
        reads_on: whether it reads the same token where one before that is hidden.
        read_alone: how many hidden places may be before one that is read, or on either side, without a trace in it.
        dropping: in which precision, place and attention it says the same without hidden tokens, up to how many tokens,
            and from how many it does not.
        padded: how far padding changed nothing, and from where it does.
        apart: how many tokens ran together of which none saw others of another row.
        meet: whether more of them did.
        found: the rest, by name.
    """

    changes: tuple[object, ...]
    is_seen: bool | None = None
    reads_on: bool | None = None
    read_alone: dict[object, float] = field(default_factory=dict)
    dropping: dict[object, tuple[int, float]] = field(default_factory=dict)
    padded: tuple[float, float] = (7.0, math.inf)
    apart: int = 24
    meet: bool = False
    found: dict[str, bool] = field(default_factory=dict)

    @property
    def is_hooked(self) -> bool:
        return any(isinstance(each, tuple) and each[0] == "hook" for each in self.changes)

    def once(self, name: str, trial: Callable[[], bool]) -> bool:
        """What a trial tells, which is made the first time."""
        if name not in self.found:
            self.found[name] = trial()
        return self.found[name]


def _hidden_beside(seen: Sequence[int], place: int) -> tuple[float, float]:
    """How many places in a row are hidden before a hidden one, and behind it; up to an end, any number.

    >>> _hidden_beside([1, 0, 0, 0], 2), _hidden_beside([1, 0, 0, 1], 2), _hidden_beside([1, 1, 1, 0], 2)
    ((1, inf), (1, 0), (0, 0))
    """
    if seen[place]:
        return 0, 0
    before, after = (
        next((n for n, each in enumerate(side) if each), math.inf) for side in (seen[:place][::-1], seen[place + 1 :])
    )
    return before, after


FUNCTIONS = frozenset(("Log", "LogSigmoid", "Softplus", "_Identity", _nodes.OWN))
"""Nodes of the graph that may have made the logarithm of a sigmoid, by themselves or under a rule."""


def _are_of_function(logits: Tensor) -> bool:
    """Whether it was no layer but a function that gave the logits, in whatever shape or selection."""
    node: Any = logits.grad_fn
    while node is not None and _nodes.kind(node) in _nodes.SHAPES | {"Index", "IndexSelect", "Select", "Slice"}:
        node = node.next_functions[0][0]
    return node is not None and _nodes.kind(node) in FUNCTIONS


def _are_probabilities(values: Tensor) -> bool:
    return bool(((values >= 0) & (values <= 1)).all())


class _Sigmoids(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what the sigmoids in a block give, and the logarithms of sigmoids."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.given: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called, aten = func.overloadpacket, torch.ops.aten
        is_log = called in (aten.log, aten.log_) and any(bool(torch.isin(args[0], each).all()) for each in self.given)
        found = func(*args, **(kwargs or {}))
        if is_log or called in (aten.sigmoid, aten.sigmoid_):
            self.given.append(found.detach().clone())
        elif called == aten.softplus:  # of the negative
            self.given.append(-found.detach())
        elif called == aten.log_sigmoid_forward:
            self.given.append(found[0].detach().clone())
        return found


def _refuse_no_numbers(module: Module) -> None:
    """Refuse weights on the device "meta", which nothing brings when they are needed, as accelerate's hooks do: torch
    multiplies with them on the CPU, and gives whatever is in memory.

    Raises:
        ModelError: there are some.
    """
    if any(hasattr(each, "_hf_hook") or each._forward_pre_hooks for each in module.modules()):
        return
    empty = next((name for name, weight in module.named_parameters() if weight.is_meta), None)
    if empty is not None:
        raise ModelError(
            f'{empty} of {type(module).__name__} is on the device "meta", which holds no numbers; load its weights'
        )


def _plain(config: Any) -> Any:
    """A configuration as plain JSON values, without what says where it is from, and how it runs, up to rounding."""
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    elif is_dataclass(config) or isinstance(config, SimpleNamespace):
        config = vars(config)
    if isinstance(config, Mapping):
        return {str(name): _plain(value) for name, value in config.items() if name not in NO_CONTENT}
    if isinstance(config, (list, tuple)):
        return [_plain(each) for each in config]
    if isinstance(config, Enum):
        return _plain(config.value)
    if not isinstance(config, Tensor) and hasattr(config, "tolist"):  # numpy's
        return config.tolist()
    return config if config is None or isinstance(config, (str, int, float)) else type(config).__name__


def _sum_of_bits(values: Tensor) -> int:
    """The sum of all numbers, each read as a whole one: exact, and so the same in any order, on any device."""
    if values.is_complex():
        values = torch.view_as_real(values)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    return int(values.contiguous().view(whole).sum(dtype=torch.int64))


def _reading(reader: Any) -> dict[str, Any]:
    """A tokenizer, processor or None as plain JSON values, without where it is from, how it pads and how it cuts."""
    found: dict[str, Any] = {name: _plain(getattr(reader, name, None)) for name in OF_READERS}
    found["held"] = [_reading(getattr(reader, name)) for name in HELD if getattr(reader, name, None) is not None]
    backend = getattr(reader, "backend_tokenizer", None)
    if backend is not None:
        described: dict[str, Any] = json.loads(backend.to_str())
        return found | described | {"padding": None, "truncation": None}
    if hasattr(reader, "to_dict"):
        found["config"] = _plain(reader.to_dict())
    elif reader is not None:  # a tokenizer in Python: its class, its fields, its vocabulary, its files, as of merges
        found["class"] = type(reader).__name__
        fields = {name: each for name, each in vars(reader).items() if not name.endswith(NO_READING)}
        found["fields"] = {name: each for name, each in fields.items() if isinstance(each, (int, float, str))}
        found["settings"] = {name: _setting(each) for name, each in fields.items() if name.endswith(SETTINGS)}
        found["vocabulary"] = reader.get_vocab() if hasattr(reader, "get_vocab") else None
        if hasattr(reader, "save_vocabulary"):
            with TemporaryDirectory() as folder, suppress(NotImplementedError):
                reader.save_vocabulary(folder, filename_prefix=None)
                files = sorted(Path(folder).iterdir())
                found["files"] = [hashlib.sha256(path.read_bytes()).hexdigest() for path in files]
    return found


def _setting(value: Any) -> Any:
    """A tokenizer's setting as plain JSON values; of an added token all that it says of itself."""
    if isinstance(value, dict):
        return {str(name): _setting(each) for name, each in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_setting(each) for each in (sorted(value) if isinstance(value, set) else value)]
    if value is None or isinstance(value, (str, int, float)):
        return value
    return repr(value) if type(value).__name__ == "AddedToken" else type(value).__name__


def _has_cases(tokenizer: Any) -> bool:
    """Whether a text in capitals is another one to a tokenizer."""
    small = "the quick brown fox jumps over a lazy dog"
    return bool(tokenizer(small)["input_ids"] != tokenizer(small.upper())["input_ids"])


def _refuse_no_tokenizer(given: Any, needed: str = "__call__") -> None:
    """Refuse what cannot read texts: a name, a class, a tokenizer of another library, one without a method needed."""
    if isinstance(given, (str, bytes, PathLike)):
        name = fsdecode(given)
        raise InputError(
            f"the tokenizer is {name!r}, a name; pass AutoTokenizer.from_pretrained({name!r}), or load it with the "
            "model by Explainer.from_pretrained(name_or_folder)"
        )
    if given is not None and (isinstance(given, type) or not hasattr(given, needed)):
        kind = f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__
        raise InputError(
            f"the tokenizer is {kind}; pass a tokenizer or processor of transformers, such as "
            "PreTrainedTokenizerFast(tokenizer_object=…), or None and token ids"
        )


def _refuse_non_finite(logits: Tensor) -> None:
    if not logits.masked_fill(logits == -torch.inf, 0.0).isfinite().all():
        raise NonFiniteError("NaN or infinity in the logits; check the model's weights, or try dtype float32")
