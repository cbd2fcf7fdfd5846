"""Attributions for the views' tests, with texts as people and attackers write them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from lrpx.attribution import Attribution, Explained, Prediction, Provenance
from lrpx.attributions import Attributions
from lrpx.ledger import Entry, Ledger
from lrpx.parts import Part, Parts

if TYPE_CHECKING:
    from collections.abc import Callable

PROVENANCE = Provenance(
    model="openai-community/gpt2",
    revision="607a30d783dfa663caf39e06633721c8d4cfcd7e",
    method="attnlrp",
    recipe="AttnLRP",
    dtype="float32",
    device="cpu",
    versions={"lrpx": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"},
)

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror="document.title=1">',
    "</style>",
    "</span></div></body>",
    "{{7*7}}",
    "{% raw %}",
    "<!-- ",
    "]]>",
    "&lt;b&gt;&amp;",
    "[bold red]markup[/bold red]",
    "[/]",
    ":smile:",
    "\u202egnp.exe",
    "\u2066\u2069",
    "\x00",
    "\x1b[2J\x1b]8;;http://x\x07",
    "\x9b31m",
    "\r\n",
    "\n\n",
    "\t\tx",
    "\u200b",
    "\ufeff",
    "\ud800",
    "\u0301",
    "",
    "   ",
    "javascript:alert(1)",
    "' onmouseover='alert(1)",
    "\u2028",
    "\U000e0041\U000e0042",
)


def attribution(
    tokens: tuple[str, ...] | list[str],
    relevance: list[float],
    *,
    description: str = 'logit of " are"',
    value: float | None = None,
    segments: tuple[tuple[str, int, int], ...] | None = None,
    special: tuple[bool, ...] | None = None,
    ledger: Ledger | None = None,
    predicted: str = " are",
    parts: tuple[Part, ...] = (),
) -> Attribution:
    count = len(tokens)
    return Attribution(
        tokens=tuple(tokens),
        parts=Parts([Part("tokens", torch.tensor(relevance, dtype=torch.float64), ("token",)), *parts]),
        explained=Explained(description, sum(relevance) if value is None else value, count - 1),
        prediction=Prediction(predicted, 389, 0.4317),
        provenance=PROVENANCE,
        ids=tuple(range(100, 100 + count)),
        word_spans=tuple((i, i + 1) for i in range(count)),
        word_texts=tuple(token.strip() for token in tokens),
        special=(False,) * count if special is None else special,
        segments=(("input", 0, count),) if segments is None else segments,
        ledger=ledger,
    )


def sentence() -> Attribution:
    """A contrast, with some bias left outside the tokens."""
    text = ["The", " keys", " to", " the", " old", " cab", "inet", " in", " the", " hall", "way"]
    numbers = [0.081, 1.427, -0.112, 0.034, -0.093, -0.641, -0.318, 0.022, 0.004, -0.271, 0.146]
    return attribution(
        text,
        numbers,
        description='logit of " are" minus logit of " is"',
        value=0.412,
        ledger=Ledger(
            (
                Entry("tokens", "transformer.wte", 0.279),
                Entry("positions", "transformer.wpe", -0.1713),
                Entry("biases", "transformer.h.0.mlp.c_fc.bias", 0.0417),
                Entry("biases", "transformer.h.1.attn.c_proj.bias", -0.1),
                Entry("biases", "transformer.ln_f.bias", 0.12),
                Entry("softmax residue", "softmax in transformer.h.0.attn", 0.2426),
            ),
            explained=0.412,
        ),
    )


def sink() -> Attribution:
    """A beginning-of-sequence token that swallows the scale."""
    tokens = ["<s>", " The", " capital", " of", " Fr", "ance", " is", "\n", "\n\n", "the", " city", " of"]
    numbers = [14.20, 0.31, 1.92, -0.44, 2.31, 2.87, 0.55, -0.13, 0.06, 0.10, 0.92, -0.21]
    special = tuple(i == 0 for i in range(len(tokens)))
    return attribution(
        tokens, numbers, description='logit of " Paris"', value=23.1, special=special, predicted=" Paris"
    )


def wide() -> Attribution:
    """Chinese, Japanese, Korean, emoji, Arabic, Hebrew and Hindi."""
    tokens = [
        *["我", "喜欢", "看", "电影", "，", "因为", "它们", "很", "有意思", "。", " 日本", "語", "の", "文章"],
        *[" 한국", "어", " 👩‍👩‍👧‍👦", "🎬", "🍿", " مرحبا", " بالع", "الم", " שלום", " עולם", " हिन्", "दी", " 🇯🇵"],
    ]
    numbers = [((7 * i * i + 3 * i) % 23 - 11) / 11 for i in range(len(tokens))]
    return attribution(tokens, numbers, description="logit of “喜欢”", predicted="喜欢")


def translation() -> Attribution:
    """An encoder and a decoder."""
    tokens = [
        *["▁", "The", " house", " is", " wonder", "ful", ".", "</s>"],
        *["<pad>", "Das", " Haus", " ist"],
    ]
    numbers = [0.02, 0.11, 0.35, -0.21, 2.12, 1.35, -0.15, 0.41, -0.33, 0.12, 0.66, 0.48]
    special = tuple(token in ("</s>", "<pad>") for token in tokens)
    segments = (("encoder", 0, 8), ("decoder", 8, 12))
    return attribution(
        tokens,
        numbers,
        description='logit of " wunderbar"',
        value=5.4,
        special=special,
        segments=segments,
        predicted=" wunderbar",
    )


def hostile() -> Attribution:
    """Tokens and labels that try to break out of the view."""
    count = len(HOSTILE)
    numbers = [(-1) ** i * (i + 1) / count for i in range(count)]
    return attribution(
        HOSTILE,
        numbers,
        description='logit of "<script>alert(2)</script>\u202e\x1b[31m\n"',
        predicted="</title><img src=x onerror=alert(3)>",
        segments=(("<b>one</b>", 0, 9), ("[red]two\x1b[0m", 9, count)),
        ledger=Ledger(
            (
                Entry("biases", "<script>alert(4)</script>", 1.0),
                Entry("biases", "\u202e\x1b[31m[red]\n", -0.3),
                *(Entry("rule residue", name, 0.01) for name in HOSTILE),
            ),
            explained=5.0,
        ),
    )


def parts() -> Attribution:
    """Heads, an image, and an answer whose tokens try to break out of the view."""
    made = torch.Generator().manual_seed(0)
    heads = torch.randn(4, 8, len(HOSTILE), generator=made, dtype=torch.float64) ** 3 / 50
    image = torch.randn(70, 150, 3, generator=made)
    answer = torch.randn(len(HOSTILE), len(HOSTILE), generator=made)
    return attribution(
        HOSTILE,
        heads.sum((0, 1)).tolist(),
        value=5.0,
        parts=(
            Part("heads", heads, ("layer", "head", "token")),
            Part("pixels", image, ("row", "column", "channel"), {"channel": ["red", "green", "blue"]}),
            Part("answer", answer, ("answer token", "token"), {"answer token": HOSTILE}),
        ),
    )


def chat() -> Attribution:
    """A conversation: a segment for each message, and what the template puts between them in none."""
    tokens = ["<s>", "system", "\n", "Be", " brief", ".", "\n", "<s>", "user", "\n", "Is", " water", " wet", "?", "\n"]
    tokens += ["<s>", "user", "\n", "Well", "?", "\n", "<s>", "assistant", "\n"]
    numbers = [((5 * i * i + i) % 17 - 8) / 9 for i in range(len(tokens))]
    special = tuple(token == "<s>" for token in tokens)
    segments = (("system", 3, 6), ("user", 10, 14), ("user", 18, 20))
    return attribution(tokens, numbers, description="logit of 'Yes'", special=special, segments=segments)


def methods(sample: Callable[[], Attribution] = sentence) -> Attributions:
    """A text as three methods explain it, and another text that stands between them."""
    a = sample()
    found = Attributions()
    for turn, name in enumerate(("attnlrp", "lrp", "gradient-l1")):
        part = Part("tokens", a.relevance.roll(turn), ("token",))
        made = replace(a.provenance, method=name)
        in_units = name != "gradient-l1"
        found.append(replace(a, parts=Parts([part]), provenance=made, ledger=None, is_decomposition=in_units))
        if turn == 0:
            found.append(sink())
    return found


def long_text(count: int = 2000) -> Attribution:
    """A long text with line breaks."""
    words = " the model reads a long text and every token keeps its own number in the picture".split()
    tokens = ["\n\n" if i % 97 == 96 else " " + words[i * i % len(words)] for i in range(count)]
    numbers = [((i * 7919) % 1000 / 500 - 1) ** 5 for i in range(count)]
    return attribution(tokens, numbers)
