"""What does a neuron stand for? Reference passages of all neurons of a model from one pass over a corpus, and cards."""

from lrpx.errors import MissingExtraError

try:
    import pyarrow  # noqa: F401
except ImportError as error:
    raise MissingExtraError(f"to collect references needs {error.name}: pip install 'lrpx[benchmarks]'") from error

from lrpx.cards._card import Card, Shown, Written, card
from lrpx.cards._collect import Collection, collect, merge
from lrpx.cards._explaining import explain_units
from lrpx.cards._lens import Lens, Scale
from lrpx.cards._page import index_page, page
from lrpx.cards._reading import Passage, References
from lrpx.cards._references import Kept, from_table, to_table
from lrpx.cards._search import Hit, search

__all__ = [
    "Card",
    "Collection",
    "Hit",
    "Kept",
    "Lens",
    "Passage",
    "References",
    "Scale",
    "Shown",
    "Written",
    "card",
    "collect",
    "explain_units",
    "from_table",
    "index_page",
    "merge",
    "page",
    "search",
    "to_table",
]
