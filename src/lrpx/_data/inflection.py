"""The other present-tense form of an English verb: *goes* for *go*, *are* for *is*.

The forms come from lemminflect, which inflects a lemma to a Penn tag. Of the 11,606 VBZ and VBP forms of UD English
EWT that are no clitics (*'s*, *'re*) it reproduces 97.9 % from their lemmas and tags; the rest is misspelt or clipped
("r", "ai" of *ain't*). The inflect library has no VBZ of a VBP, and takes no lemma; its plurals of the 5,325 VBZ forms
are the lemma for 97.2 %, lemminflect's VBP for all but two.
"""

from __future__ import annotations

from functools import cache

from lrpx._data.trees import EXTRA
from lrpx.errors import MissingExtraError

# The clitics and their lemmas; lemminflect has full forms only.
_CLITICS = {
    ("be", "'s"): ("'re",),
    ("be", "'re"): ("'s",),
    ("be", "'m"): ("'s",),
    ("have", "'s"): ("'ve",),
    ("have", "'ve"): ("'s",),
}
_OTHER_TAG = {"VBZ": "VBP", "VBP": "VBZ"}


@cache
def other_form(form: str, lemma: str, tag: str) -> str | None:
    """The VBP of a VBZ, and the VBZ of a VBP, in the same case; None where that is not certain.

    It is certain where the form itself is what the lemma and the tag give. The VBP of *be* is *are*, and the
    VBZ of *am* is *is*. A clitic's other form is a clitic, with the same apostrophe.

    Raises:
        MissingExtraError: lemminflect is not installed.

    >>> other_form("Goes", "go", "VBZ"), other_form("have", "have", "VBP"), other_form("’m", "be", "VBP")
    ('Go', 'has', '’s')
    """
    try:
        from lemminflect import getInflection
    except ImportError as error:
        raise MissingExtraError(f"the verb forms of a treebank need lemminflect; {EXTRA}") from error

    plain = form.lower().replace("’", "'")
    others: tuple[str, ...] = ()
    if plain.startswith("'"):
        others = _CLITICS.get((lemma, plain), ())
    elif lemma and plain in getInflection(lemma, tag):
        others = getInflection(lemma, _OTHER_TAG[tag])
    if not others:
        return None
    other = others[-1 if lemma == "be" else 0]
    if "’" in form:
        other = other.replace("'", "’")
    if form.islower():
        return other
    if form.isupper():
        return other.upper()
    return other.capitalize() if form.istitle() else None
