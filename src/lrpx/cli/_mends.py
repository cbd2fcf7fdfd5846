"""What an error tells the user of Python to do, as the user of the command line can do it."""

from __future__ import annotations

import re
from typing import Final

IN_PYTHON: Final = "the command line cannot explain it; in Python,"

MENDS: Final = (
    (r"pass one of them by its id, such as (\d+) for ([^;]+)", r"pass one of them by its id: --target-id \1 is \2"),
    (r"pass a text that is one token, or a token id", "pass a text that is one token, or its id with --target-id"),
    (r"pass its token id", "pass its token id with --target-id"),
    (r"or the index of a class", "or the index of a class with --target-id"),
    (r"pass the index instead of", "pass the index with --target-id instead of"),
    (r"pass token ids, or a tokenizer", "pass token ids with --ids, or a model folder that holds its tokenizer"),
    (r"pass another text, or token ids", "pass another text, or token ids with --ids"),
    (r"pass decoder ids", "pass --ids, and --decoder ids"),
    (r"pass position, the", "pass --position, the"),
    (r"or pass position", "or pass --position"),
    (r"leave (position|decoder|ledger) out", r"leave --\1 out"),
    (
        r"pass them as a tuple: \(text, other\), or \(text, \[choice, choice\]\) for multiple choice",
        "pass the other text with --pair, or each choice with --choice",
    ),
    (r"pass them as a tuple: \(text, other\)", "pass the other one with --pair"),
    (r"pass \(text, \[choice, choice\]\)", "pass each choice with --choice"),
    (r"pass a list for two inputs, or one text that holds both", "leave --pair out, or write both into one text"),
    (r"pass how many samples to read, at least 1, or None for all", "pass at least 1 with --limit, or leave it out"),
    (r"cut such texts with long='cut'", "cut such texts with --long cut"),
    (r"name a setting and its values: grid=\{.*\}", "name a setting and its values, such as --grid sigma=0.1,0.2"),
    (r"name the corpus with corpus=", "name it with --corpus"),
    (r"leave the choices out", "leave --choice out"),
    (r"take an attention as one reader: whole=True", "take an attention as one reader: --whole"),
    (r"; to explain a whole answer, token by token, .*$", ""),
    (r" \(row \d+ of the batch\)$", ""),
    (r"pass the conversation as one text, or set tokenizer.chat_template", "write the conversation as one text"),
    (r"pass \w+\(…\), or no target", "leave --target out"),
    (r"pass a text, token ids or chat messages", "pass a text, or token ids with --ids"),
    (r"pass pooling=.*, or use (lrpx\.propagate)", rf"{IN_PYTHON} pass pooling='mean', say, or use \1"),
    (r"pass pooling='(\w+)' to explain that", rf"{IN_PYTHON} pooling='\1' explains that"),
    (
        r"load it yourself with the class that the files are of, and pass it to (lrpx.Explainer\(model, tokenizer\))",
        rf"{IN_PYTHON} load the class that the files are of, and use \1",
    ),
    (r"load it yourself and pass it to (lrpx.Explainer\(model, tokenizer\))", rf"{IN_PYTHON} load it and use \1"),
    (r"load the class with the right head, say .* task=, or use (lrpx.propagate)", rf"{IN_PYTHON} use \1"),
    (r"pass an example of what it takes, (places\(.*\))", rf"{IN_PYTHON} lrpx.units.\1 takes an example"),
    (r"; use (lrpx\.propagate)", rf"; {IN_PYTHON} use \1"),
    (r"or try dtype (\w+)", r"or try --dtype \1"),
    (r"use another dtype, such as (\w+)", r"try --dtype \1"),
    (r"use a recipe with strict=False to", 'save a recipe with "strict": false and pass it as --method my.json to'),
    (
        r"import it, and load the file with Recipe\.load\(.*\)",
        "register a method with this rule in a script, and pass it as --method my.py",
    ),
)
"""What messages say, as regular expressions, and what they say here."""


def on_the_command_line(message: str) -> str:
    """The same message, with the mend as an option where there is one.

    >>> on_the_command_line("the logits of a classifier belong to the whole input; leave position out")
    'the logits of a classifier belong to the whole input; leave --position out'
    """
    for said, here in MENDS:
        message = re.sub(said, here, message)
    is_contrast = "the contrast" in message.partition(";")[0]
    return message.replace("--target-id", "--contrast-id") if is_contrast else message
