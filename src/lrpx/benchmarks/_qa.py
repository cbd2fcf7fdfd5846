"""Question answering: does the explanation of an answer point at where it stands in the context? (Achtibat et al. 2024)

A generator is asked ``Context: … Question: … Answer:``, and the first token of the right answer is explained; an
extractive model is given question and context, and the right answer's span is explained. Only the context is judged,
and only the context is perturbed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path  # noqa: TC003 - the fields' types are read
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import pyarrow as pa
import torch

from lrpx._data.agreement import Dropped
from lrpx._data.squad import Asked, read_squad
from lrpx._tokens import decoder_ids, is_inside_word
from lrpx.benchmarks._contract import Benchmark, Samples, Source, register
from lrpx.benchmarks._faithfulness import FEWEST, Perturbed, too_few
from lrpx.benchmarks._ground_truth import GroundTruth
from lrpx.benchmarks._words import Words
from lrpx.errors import InputError, ModelError
from lrpx.metrics import ANSWERS
from lrpx.questions import Question, Questions
from lrpx.targets import Logit, Span
from lrpx.tasks import GREEDY, Task

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lrpx.benchmarks._contract import Case
    from lrpx.inputs import Row
    from lrpx.metrics import Metric
    from lrpx.model import BoundModel
    from lrpx.targets import Target

PROMPT: Final = "Context: {context} Question: {question} Answer:"
"""What a generator is asked (Achtibat et al. 2024, App. B.3)."""


@dataclass(frozen=True)
class AnswerSample:
    """A question as a model reads it.

    Args:
        asked: the question.
        row: what the model is given.
        position: where its logits are read, or None.
        target: what is explained: the first token of the right answer, or its span.
        accepted: what is right: the first tokens, or the spans, of all accepted answers.
        context: the half-open range of the context's tokens.
        truth: the places of the tokens of all accepted answers.
        hideable: the places of the context's tokens that may be hidden.
    """

    asked: Asked
    row: Row
    position: int | None
    target: Target
    accepted: frozenset[Any]
    context: tuple[int, int]
    truth: tuple[int, ...]
    hideable: tuple[int, ...] = ()


@dataclass(frozen=True)
class Squad(Benchmark[AnswerSample]):
    """Questions whose answer stands in their context, as a generator or an extractive model is asked.

    Args:
        data: SQuAD's JSON.
        context: leave out questions of more tokens.
        limit: take the first so many questions.
        chat: ask a causal language model in its tokenizer's chat template.
        write: let a causal language model write so many tokens, and explain the first token of the answer where it
            writes it; questions whose answer it does not write are left out. With 0, the very first token is explained.
    """

    data: Annotated[Path, "Questions with their contexts and answers: SQuAD's JSON, version 1.1 or 2.0."]
    context: Annotated[int | None, "Leave out questions of more tokens than this, prompt and all."] = None
    limit: Annotated[int | None, "Take the first so many questions that have an answer."] = None
    chat: Annotated[bool, "Ask a causal language model in its chat template."] = False
    write: Annotated[int, "Let it write so many tokens, and explain where it writes the answer; 0: its first."] = 0

    tasks: ClassVar[frozenset[Task]] = frozenset({Task.CAUSAL, Task.SEQ2SEQ, Task.QUESTION_ANSWERING})
    source: ClassVar[pa.Schema] = pa.schema(
        {
            "id": pa.string(),
            "line": pa.int32(),
            "context": pa.string(),
            "question": pa.string(),
            "answers": pa.list_(pa.list_(pa.int32())),
        }
    )
    """An :class:`~lrpx._data.squad.Asked`."""

    def check(self) -> None:
        """See the class."""
        super().check()
        for name, value in (("context", self.context), ("limit", self.limit)):
            if value is not None and value < 1:
                raise InputError(f"{name} is {value}; give at least 1")
        if self.write < 0:
            raise InputError(f"write is {self.write}; give at least 0")

    def check_model(self, model: BoundModel) -> None:
        """See :meth:`Benchmark.check_model <lrpx.benchmarks.Benchmark.check_model>`."""
        super().check_model(model)
        if (self.chat or self.write) and model.task is not Task.CAUSAL:
            raise ModelError(f"{type(model.module).__name__} writes no text of its own; leave --chat and --write out")
        if self.chat and not getattr(model.reader.text_tokenizer, "chat_template", None):
            raise ModelError("the tokenizer has no chat template; leave --chat out")
        if self.write and not hasattr(model.module, "generate"):
            raise ModelError(f"{type(model.module).__name__} has no generate(); leave --write out")

    def read(self) -> Source:
        """The questions of the file.

        Raises:
            DataError: it cannot be read, or is no such file.
        """
        found, dropped = read_squad(self.data, self.limit)
        rows = [
            {
                "id": each.id,
                "line": each.line,
                "context": each.context,
                "question": each.question,
                "answers": list(map(list, each.answers)),
            }
            for each in found
        ]
        table = pa.Table.from_pylist(rows, self.source)
        return Source(table, tuple(dropped), {"counts": {"questions with an answer": len(rows)}})

    def samples(self, source: Source, model: BoundModel) -> Samples[AnswerSample]:
        """The questions as the model reads them, less those that are too long.

        Raises:
            InputError: none is left.
            ModelError: the tokenizer does not tell which characters a token is of.
        """
        if not getattr(model.reader.text_tokenizer, "is_fast", False):
            raise ModelError(
                f"{type(model.reader.text_tokenizer).__name__} does not tell which characters a token is of; save "
                "a fast tokenizer (PreTrainedTokenizerFast) with the model"
            )
        kept: list[AnswerSample] = []
        dropped: list[Dropped] = []
        for row in source.rows.to_pylist():
            asked = Asked(**row | {"answers": tuple((a, b) for a, b in row["answers"])})
            found = self._sample(asked, model)
            found = self._fit(found, model) if isinstance(found, AnswerSample) else found
            if isinstance(found, AnswerSample):
                kept.append(found)
            else:
                dropped.append(Dropped(asked.id, asked.line, found, asked.question))
        if not kept:
            reason = dropped[0].reason if dropped else "has no answer in its context"
            raise InputError(f"no question of {self.data.name} can be used, the first because it {reason}; pass others")
        lengths = [sum(each.row.lengths) for each in kept]
        return Samples(kept, tuple(dropped), {"kept": len(kept), "mean tokens": sum(lengths) / len(lengths)})

    def _fit(self, sample: AnswerSample, model: BoundModel) -> AnswerSample | str:
        """The sample as this benchmark measures it, or why it cannot."""
        del model
        return sample

    def _sample(self, asked: Asked, model: BoundModel) -> AnswerSample | str:
        """A sample, or why there is none."""
        extracts = model.task is Task.QUESTION_ANSWERING
        tokenizer = model.reader.text_tokenizer
        if extracts:
            given: Any = (asked.question, asked.context)
            encoded = tokenizer(*given, return_offsets_mapping=True)
            of_context, begin = encoded.sequence_ids(), 0
        else:
            prompt = PROMPT.format(context=asked.context, question=asked.question)
            given = self._in_template(prompt, tokenizer) if self.chat else prompt
            if prompt not in given:
                return "is changed by the chat template"
            encoded = tokenizer(given, return_offsets_mapping=True, add_special_tokens=not self.chat)
            begin = given.index(prompt) + PROMPT.index("{context}")
            of_context = None
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        limit = min((each for each in (self.context, model.limit) if each is not None), default=None)
        if limit is not None and len(ids) > limit:
            return f"has more than {limit} tokens"
        room = self.write if model.limit is None else min(self.write, model.limit + 1 - len(ids))
        written = self._written(ids, asked, model, room) if self.write else []
        if written is None:
            return f"has an answer that the model does not write in {room} tokens, or that the question says, too"
        so_far = [*ids, *written[:-1]]
        try:
            whole = {"input_ids": so_far, "attention_mask": [1] * len(so_far)}
            row = model.reader.row(given if extracts or model.task is Task.SEQ2SEQ else whole)
        except InputError as error:
            return str(error).split(";")[0]
        if list(row.segments[0].tokens.ids) != so_far:
            return "is read otherwise than its tokenizer tells its characters"
        end = begin + len(asked.context)
        inside = [
            at
            for at, (start, stop) in enumerate(offsets)
            if start < stop
            and (of_context[at] == 1 if of_context is not None else start < end and stop > begin)
        ]  # fmt: skip
        spans = [_tokens_of(offsets, inside, start + begin, stop + begin) for start, stop in asked.answers]
        if not inside or not all(spans):
            return "has an answer that is no token's"
        truth = sorted({at for span in spans for at in span})
        position = model.reader.position(row)
        if extracts:
            places = [(span[0], span[-1]) for span in spans]
            target: Target = Span(places[0][0], places[0][1])
            accepted: frozenset[Any] = frozenset(places)
        elif written:
            target, accepted = Logit(written[-1]), frozenset(written[-1:])
        else:
            firsts = [_first_token(model, given, asked.context[start:stop]) for start, stop in asked.answers]
            target, accepted = Logit(firsts[0]), frozenset(firsts)
        return AnswerSample(asked, row, position, target, accepted, (inside[0], inside[-1] + 1), tuple(truth))

    @staticmethod
    def _in_template(prompt: str, tokenizer: Any) -> str:
        said = [{"role": "user", "content": prompt}]
        return str(tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True))

    def _written(self, ids: Sequence[int], asked: Asked, model: BoundModel, room: int) -> list[int] | None:
        """What the model writes in so many tokens, which its context has room for, up to the first token of an answer,
        in whole words, and with it; None where it writes none. One that the question says is none: the model may repeat
        the question."""
        given = torch.tensor([ids], device=model.device)
        how: dict[str, Any] = {**GREEDY, "max_new_tokens": room}
        pad = next(
            (each for each in (model.tokenizer.pad_token_id, model.tokenizer.eos_token_id) if each is not None), 0
        )
        with torch.no_grad():
            made = model.module.generate(given, attention_mask=torch.ones_like(given), pad_token_id=pad, **how)  # type: ignore[operator]
        written: list[int] = made[0, len(ids) :].tolist()
        decode = model.reader.text_tokenizer.decode
        text = decode(written)
        answers = [asked.context[start:stop] for start, stop in asked.answers]
        told = [each for each in answers if not _places(each, asked.question)]
        places = [place for answer in told for place in _places(answer, text)]
        at = min(places, default=None)
        if at is None:
            return None
        last = next(n for n in range(len(written)) if len(decode(written[: n + 1])) > at)
        return written[: last + 1]

    def ask(self, sample: AnswerSample, model: BoundModel) -> Questions:
        """The right answer's first token, or its span."""
        return Questions((sample.row,), (Question(0, sample.position, sample.target),))


@register
@dataclass(frozen=True)
class Answers(Squad, GroundTruth[AnswerSample]):
    """Question answering: does the explanation of an answer point at it in the context? (Achtibat et al. 2024)"""

    name: ClassVar[str] = "qa"
    methods: ClassVar[tuple[str, ...]] = ("attnlrp", "lrp", "gradient-x-input", "gradient-l1", "gradient-l2-squared")
    metrics: ClassVar[Mapping[str, Metric]] = ANSWERS
    words: ClassVar[Words] = Words(
        title="Which method points at the answer?",
        about="Question answering",
        truth="the answer",
        right="gives the right answer",
        value=("explained", "explained value"),
        toward="the right answer",
        paper="Achtibat et al. 2024",
    )
    more: ClassVar[Mapping[str, pa.DataType]] = {
        "question": pa.string(), "answer": pa.string(), "context_start": pa.int32(), "context_end": pa.int32(),
    }  # fmt: skip
    prediction: ClassVar[Mapping[str, pa.DataType]] = {"explained": pa.float64()}

    def facts_of(self, sample: AnswerSample) -> dict[str, Any]:
        """Its tokens, the answers' places, where its logits are read, the question, the answer and the context."""
        return {
            "id": sample.asked.id,
            "tokens": list(sample.row.tokens.pieces),
            "ground_truth": list(sample.truth),
            "position": sample.position,
            "question": sample.asked.question,
            "answer": sample.asked.answer,
            "context_start": sample.context[0],
            "context_end": sample.context[1],
        }

    def predicted(self, case: Case[AnswerSample]) -> dict[str, Any]:
        """The explained value, and whether the model's own answer is an accepted one: its first token, or its span."""
        return {"explained": float(case.answers.values[0]), "correct": _is_right(case)}

    def told(self, row: Mapping[str, Any]) -> str:
        """The answer that was explained."""
        return f"the answer “{row['answer']}” to “{row['question']}”"

    def judged(self, sample: AnswerSample) -> slice:
        """The context's tokens alone."""
        return slice(*sample.context)


@register
@dataclass(frozen=True)
class AnswersPerturbed(Squad, Perturbed[AnswerSample]):
    """Question answering: which explanation is true to the model, when only the context is perturbed?

    Args:
        perturbation, read_out, steps, specials: as ``faithfulness`` has them.
    """

    perturbation: Annotated[
        str, "Some of: attention-mask, zero-embedding, mask-token, unk, pad, delete; with commas between."
    ] = "attention-mask"
    read_out: Annotated[
        str, "What metrics read that do not say: some of logit, probability, log-probability; with commas between."
    ] = "logit"
    steps: Annotated[int, "The most steps of a curve."] = 100
    specials: Annotated[bool, "Hide special tokens, too."] = False

    name: ClassVar[str] = "qa-perturbed"
    title: ClassVar[str] = "Which explanation of an answer is true to the model?"
    methods: ClassVar[tuple[str, ...]] = Answers.methods
    more: ClassVar[Mapping[str, pa.DataType]] = {"question": pa.string(), "answer": pa.string()}

    def _fit(self, sample: AnswerSample, model: BoundModel) -> AnswerSample | str:
        """With the tokens of its context that may be hidden, where they have an order."""
        may = self.hideable(self.ask(sample, model), model)
        places = [at for at in range(*sample.context) if may[at]]
        return too_few(len(places)) if len(places) < FEWEST else replace(sample, hideable=tuple(places))

    def facts_of(self, sample: AnswerSample) -> dict[str, Any]:
        """Its tokens, those that may be hidden, where its logits are read, the question and the answer."""
        return {
            "id": sample.asked.id,
            "tokens": list(sample.row.tokens.pieces),
            "hideable": list(sample.hideable),
            "position": sample.position,
            "question": sample.asked.question,
            "answer": sample.asked.answer,
        }

    def correct(self, case: Case[AnswerSample]) -> bool | None:
        """Whether the model's own answer is an accepted one."""
        return _is_right(case)


def _is_right(case: Case[AnswerSample]) -> bool:
    """Whether the model's own answer is an accepted one: its first token, or its span.

    An extractive model's is the best of the places of the context: before it, and at [CLS], it has other things to say.
    """
    logits = case.answers.logits[0]
    if not isinstance(case.sample.target, Span):
        return int(logits.argmax()) in case.sample.accepted
    best = Span().resolved(int, case.sample.row.within_context(logits))
    assert isinstance(best, Span)
    return (best.token, best.end) in case.sample.accepted


def _places(answer: str, text: str) -> list[int]:
    """Where an answer stands in a text in whole words."""
    found = (match.start() for match in re.finditer(f"(?={re.escape(answer)})", text))
    return [at for at in found if not (is_inside_word(text, at) or is_inside_word(text, at + len(answer)))]


def _tokens_of(offsets: Sequence[tuple[int, int]], inside: Sequence[int], start: int, end: int) -> list[int]:
    """The context's tokens that hold characters of a range."""
    return [at for at in inside if offsets[at][0] < end and offsets[at][1] > start]


def _first_token(model: BoundModel, prompt: str, answer: str) -> int:
    """The first token of an answer behind the prompt: of a decoder's own text, on a new line, or after a space."""
    tokenizer = model.reader.text_tokenizer
    if model.task is Task.SEQ2SEQ:
        return decoder_ids(tokenizer, answer)[0]
    last = prompt.split()[-1] + prompt[len(prompt.rstrip()) :]
    before = tokenizer(last, add_special_tokens=False)["input_ids"]
    both = tokenizer(f"{last}{'' if last[-1].isspace() else ' '}{answer}", add_special_tokens=False)["input_ids"]
    same = next((i for i, pair in enumerate(zip(before, both, strict=False)) if pair[0] != pair[1]), len(before))
    return int(both[same])
