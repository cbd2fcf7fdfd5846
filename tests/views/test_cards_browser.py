"""The page of all neurons in a real browser: its search finds, and no token is markup."""

from __future__ import annotations

from test_browser import browser, pytestmark  # noqa: F401 - the fixture, and where it is skipped

from lrpx.cards import Collection, collect, index_page, page
from lrpx.cards import card as made
from tests.cards import samples
from tests.cards.samples import corpus
from tests.cards.test_cards import HOSTILE

ROWS = "return [...document.querySelectorAll('#found tr')].map(row => [...row.children].map(cell => cell.textContent))"
TYPE = "const field = document.getElementById('wanted'); field.value = arguments[0];"


def test_the_search_finds(browser, byte_tokenizer, tmp_path):  # noqa: F811
    model = samples.llama(byte_tokenizer)
    references = collect(Collection(model, corpus(tmp_path, HOSTILE), k=4), tmp_path / "run")
    index = tmp_path / "index.html"
    index.write_text(index_page(references, model), encoding="utf-8")
    browser.get(index.as_uri())
    assert len(browser.execute_script(ROWS)) == 48

    def found(text):
        browser.execute_script(f"{TYPE} field.dispatchEvent(new Event('input'))", text)
        return browser.execute_script(ROWS)

    assert [row[0] for row in found("1:7")] == ["1:7"]
    assert {row[0].partition(":")[0] for row in found("1")} == {"1"}
    word = model.label(references.passages(0, 3)[0].token).strip()
    assert "0:3" in [row[0] for row in found(f"peaks:{word}")]
    top = made(references, 0, 5, model, words=1).top[0].text.strip()
    assert "0:5" in [row[0] for row in found(f"raises:{top}")]
    assert "0:5" in [row[0] for row in found(top.upper())]
    assert found("no such token at all") == []
    assert browser.execute_script("return document.querySelectorAll('img, #found script').length") == 0
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    card = tmp_path / "card.html"
    card.write_text(page(made(references, 0, 5, model)), encoding="utf-8")
    browser.get(card.as_uri())
    assert browser.execute_script("return document.scripts.length + document.images.length") == 0
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
