"""What every page needs for a reader without a mouse or without eyes; axe-core finds nothing more in any of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import lrpx
from lrpx._views.tabled import Tabled, fragment, page

TEMPLATES = sorted(Path(lrpx.__file__).parent.rglob("*.html.j2"))
WIDE = re.compile(r'<div class="lrpx-wide"([^>]*)>')
ROWS = Tabled("Units", "of a model", (("layer", True), ("unit", True)), (("1", "2"),), (1.0,))


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.name)
def test_what_scrolls_can_be_scrolled_by_the_keyboard(path):
    """It can have the focus, and says what it is."""
    for attributes in WIDE.findall(path.read_text(encoding="utf-8")):
        assert re.search(r'tabindex="0" role="region" aria-label="[^"]+"', attributes)


def test_a_hyphen_in_a_title_stays_one():
    """It is a token of its own, and no minus sign."""
    table = ROWS._replace(title="logit of ' well-known' = -1.5")
    for shown in (page([table]), fragment([table])):
        assert re.findall(r'class="lrpx-title"[^>]*>([^<]*)<', shown) == ["logit of &#39; well-known&#39; = -1.5"]


def test_a_page_of_tables_has_one_first_heading():
    assert re.findall(r'class="lrpx-title" role="heading" aria-level="(\d)"', page([ROWS, ROWS])) == ["1", "2"]
    assert 'role="heading"' not in fragment([ROWS])  # a notebook has headings of its own
