"""A bound model: the user's module, and all that LRPx knows about it and does with it.

What is above this floor asks questions; how a model is fed, padded, named and run is said here and below.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lrpx import tasks
from lrpx._batching import Batch, batch_of, batches, widened, widths
from lrpx._dropping import without_hidden, worth
from lrpx._fingerprints import fingerprint_of, fingerprint_of_reader
from lrpx._intervening import changes_in, intervened, without_interventions
from lrpx._loading import (
    cut_by_whole,
    has_cases,
    is_cross_encoder,
    is_sentence_transformer,
    load_pretrained,
    refuse_no_numbers,
    refuse_no_tokenizer,
    refuse_other_reading,
    short_name,
    taken_apart,
)
from lrpx._modules import adapters_in, attending_as_before, named_modules, unpacked
from lrpx._naming import Named
from lrpx._padding import end_of, hiding
from lrpx._passes import Pass
from lrpx._patches import entering, patches_of, places_of
from lrpx._pooling import Pooling, pooling_in, pooling_of
from lrpx._probabilities import refuse_probabilities, refuse_sigmoids
from lrpx._tried import Trials
from lrpx.engine import propagate
from lrpx.engine._compiled import Compiler
from lrpx.engine._learned import Learned
from lrpx.engine._positions import Positions
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

AT_A_TIME = 32
"""The most rows that run together where nobody says how many."""


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
        refuse_no_tokenizer(tokenizer)
        refuse_no_numbers(module)
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
            refuse_no_tokenizer(self.reader.text_tokenizer, "convert_ids_to_tokens")
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
        self._patches_of: object = None
        self._trials = Trials(self.reader, self.padding_side)

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
        if found.lowers and self.tokenizer is not None and has_cases(self.tokenizer):
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
        return fingerprint_of(self.module, self.task)

    def tokenizer_fingerprint(self) -> str:
        """A digest of what its tokenizer makes of texts and chats, or its processor of images, wherever it was loaded
        from; how it pads and cuts is left out, for nothing here does so with it."""
        return fingerprint_of_reader(self.tokenizer)

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
            return self.task is Task.CAUSAL and self.padding_side == "right" and self._trials.looks_back
        takes_last = getattr(self.config, "summary_type", None) == "last"
        end = tasks.end_read(self.module, self.task)
        pads_end = end is not None and end == self.pad_id
        known = self.task.reads != "whole" or (self.pad_id is not None and not takes_last and not pads_end)
        return known and self._trials.heeds_mask

    @property
    def rows_meet(self) -> bool:
        """Whether rows that run together see each other, so that each must run alone. Tried once; a hook of the user's
        may mix them, or count them, and is given one at a time."""
        return self._trials.rows_meet

    def groups(self, rows: Sequence[Row], batch_size: int) -> list[list[int]]:
        """Which rows run together, as :func:`~lrpx._batching.batches` has it; one by one where several cannot."""
        together = batch_size > 1 and len(rows) > 1 and self.can_batch  # what is asked last, for the model runs to tell
        if together and len({row.lengths for row in rows}) > 1:
            together = self._trials.pads_to(max(max(row.lengths, default=0) for row in rows))
            together = together and not self._may_move(rows)
        if together:
            together = not self._trials.meet_in(rows, batch_size, lambda: self._images_meet(rows[0]))
        return batches(rows, batch_size if together else 1, tasks.border(self.module))

    def _may_move(self, rows: Sequence[Row]) -> bool:
        """Whether padding on the left, behind which places are told one after another, may move tokens: a module of
        one's own may count otherwise, as one that begins anew behind the end of a text, and RoBERTa counts no padding
        in a text."""
        if self.padding_side == "right" or self.task.reads != "position" or not self.accepts("position_ids"):
            return False
        pads = (self.pad_id in row.segments[0].tokens.ids for row in rows)
        return not tasks.is_theirs(self.module) or any(pads)

    def _images_meet(self, row: Row) -> bool:
        batch = self.batch(Questions((row,), (Question(0, None, self.default_target()),)))
        return tasks.signals_meet(self.module, batch.handed)

    def end_of(self, row: Row) -> int:
        """Where the last token of a text is that is no padding, which may be what ends texts, too."""
        return end_of(row.tokens.ids, self.pad_id)

    def sees_nothing(self, position: int, seen: NDArray[np.bool_]) -> bool:
        """Whether there is a layer in which one place of ``[T]`` sees none of those that are seen. A classifier may
        look back alone, which is asked where the place and the one before it are hidden; one of whole texts that looks
        to both sides reads nobody knows which place."""
        if seen[position]:
            return False
        looks_back = self.task is Task.CAUSAL or (not seen[max(position - 1, 0)] and self._trials.looks_back)
        if self.task.reads == "whole" and not looks_back:
            return False
        return not seen[tasks.seen_from(self.module, position, looks_back)].any()

    @property
    def pads_up(self) -> bool:
        """Whether rows are padded up to the sizes that code is compiled for."""
        return self.compiler is not None and self.can_batch and self.task.together is None

    @property
    def pad_id(self) -> int | None:
        """What it takes for padding, or None."""
        return tasks.pad_id(self.module)

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
        if uneven and not (self.accepts("attention_mask") and self._trials.heeds_mask):
            raise ModelError(
                f"{type(self.module).__name__} would read the padding of the shorter text, as it takes no "
                "attention_mask or does not heed it; pass texts of equal length, in tokens"
            )
        if self._trials.hides_ones:
            raise ModelError(
                f"a mask of ones changes what {type(self.module).__name__} says, as where 1 hides a token "
                "(key_padding_mask); let its attention_mask be 1 where a token is seen and 0 where it is padding, as "
                "transformers' is, or give it another name"
            )
        with torch.inference_mode(False):  # else the ids could not be saved for the backward pass
            width = widths(questions.rows, self.limit) if self.pads_up and not exactly else ()
            is_padded = width and self._trials.pads_to(max(width)) and not self._may_move(questions.rows)
            width = width if is_padded else ()
            how: dict[str, Any] = {"pad_id": self.pad_id or 0, "side": self.padding_side}
            batch = batch_of(questions.rows, self.module, self.task, width=width, **how)
            if self._turns_unseen(batch):
                batch = batch_of(questions.rows, self.module, self.task, width=(batch.wide + 1,), **how)
            if apart and batch.arguments:
                rows = batch.tokens // sum(batch.widths)
                is_taken = rows > 1 and has_turned(self.module) and self.can_batch
                wider = widened(batch.widths, {rows} if is_taken else set(), self.limit)
                if wider != batch.widths:
                    batch = batch_of(questions.rows, self.module, self.task, width=wider, **how)
            return batch

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
        reads pixels beside them, and where there is no image. Found once for each size, as long as the model is the
        same."""
        name = tasks.pixel_argument(self.module, self.task)
        pixels = None if name is None else row.arguments.get(name)
        if name is None or pixels is None or pixels.ndim != 4 or len(pixels) != 1:
            return None
        now = tasks.changes(self.module), tasks.state(self.module), tasks.flags(self.module, numbers=True)
        if now != self._patches_of:
            self._patches_of, self._patches, self._places = now, {}, {}
        if pixels.shape not in self._patches:
            batch = self.batch(Questions((row,), (Question(0, 0, self.default_target()),)))
            with without_interventions():  # it is so behind their block, too
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
            with without_interventions():
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
        reading = self._reading(batch, batch.positions(questions), self._trials.rows_alone)
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
        if masks is not None and worth(masks) and self._trials.says_the_same(self._run, questions):
            questions, attention_mask = without_hidden(questions, masks, self._trials.first_position())
            exactly = False
        state = torch.get_rng_state()
        found = self._values(questions, attention_mask, embeddings, taps, batch_size, read, exactly)
        if not torch.equal(state, torch.get_rng_state()):
            self._trials.refuse_drawing(self._run, asked)
        if attention_mask is not None and len({tuple(mask.tolist()) for mask in attention_mask}) > 1:
            self._trials.refuse_unmoved(found)
        if masks is not None:
            self._trials.refuse_hiding(self._run, partial(self.batch, exactly=True), asked, masks)
        return found

    def _run(
        self,
        questions: Questions,
        attention_mask: Sequence[Tensor] | None,
        batch_size: int,
        read: Callable[[int, Target, Tensor], Tensor],
        exactly: bool,
    ) -> Tensor:
        """A run of questions, as trials make it."""
        return self._values(questions, attention_mask, None, None, batch_size, read, exactly)

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
        alone = self._trials.rows_alone
        changed_in_place = attention_mask is not None or embeddings is not None
        for group in self._groups(questions.rows, batch_size, exactly):
            some = questions.about(group)
            batch = self.batch(some, exactly=changed_in_place, apart=taps is not None)
            whole = batch
            if attention_mask is not None:
                masks, first = [attention_mask[i] for i in group], self._trials.first_position
                batch = batch.changed(self.module, "attention_mask", masks, first)
            if embeddings is not None:
                batch = batch.changed(self.module, "inputs_embeds", [embeddings[i] for i in group])
            self._know_tokens(batch)
            mine = sorted(i for row in group for i in asked[row])
            with ExitStack() as stack:
                stack.enter_context(attending_as_before(self.module))
                stack.enter_context(unpacked(self.module))
                if attention_mask is not None:
                    stack.enter_context(whole.places_held(self.module))
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
        recompute, alone = self.recompute and taps is None, self._trials.rows_alone
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
                self._reading(changed, given["positions"], alone, given.get("text")) as read,
            ):
                yield trace, read(self.module(**changed.inputs))

        with torch.inference_mode(False):
            given = batch.handed | {"positions": batch.positions(questions)}
            if self.task.reads == "span":
                given |= {"text": self._text(batch)}
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
                refuse_probabilities(self.module, seen, -3 if self.task.reads == "map" else -1)
            if self.task.reads not in ("embeddings", "similarity"):
                refuse_sigmoids(self.module, logits, lambda: self._again(batch, given["positions"]))
            answers = self._answers(questions, logits, plain=not recipe.has_rules())
            yield Pass(questions, batch, trace, answers, paths, packs, self.pad_id)

    def _again(self, batch: Batch, positions: Tensor | None) -> Tensor:
        """The logits of another run."""
        with self._reading(batch, positions, self._trials.rows_alone) as read:
            return read(self.module(**batch.handed))

    def _know_tokens(self, batch: Batch) -> None:
        """Look for the tokens' modules beside an image before a run in which an intervention may ask for them."""
        if batch.arguments and batch.rows[0].arguments and intervened(self.module):
            with_tokens(self.module, batch.handed)

    def _text(self, batch: Batch) -> Tensor:
        """``[B, T]``: where there is text, whatever the mask hides."""
        return batch.real.to(tasks.input_device(self.module))

    def _reading(
        self, batch: Batch, positions: Tensor | None, alone: bool, text: Tensor | None = None
    ) -> AbstractContextManager[Read]:
        inputs: Mapping[str, Any] = batch.inputs
        if self.task.reads == "span":
            inputs = {tasks.MASKS["input_ids"]: self._text(batch) if text is None else text}
        return tasks.reading(self.module, self.task, inputs, positions, self.pooling, alone)

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


def _refuse_non_finite(logits: Tensor) -> None:
    if not logits.masked_fill(logits == -torch.inf, 0.0).isfinite().all():
        raise NonFiniteError("NaN or infinity in the logits; check the model's weights, or try dtype float32")
