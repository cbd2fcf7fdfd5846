"""The page in a real browser: what runs, what shows, how readable it is."""

from __future__ import annotations

import base64
import re
import shutil
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
from view_samples import chat, hostile, long_text, methods, parts, sentence, sink, translation, wide

from lrpx._views.colour import contrast
from lrpx._views.html import fragment, gallery_fragment, gallery_page, page
from lrpx._views.picture import picture, visible
from lrpx._views.tabled import Tabled
from lrpx._views.tabled import page as table_page
from lrpx.attributions import Attributions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from selenium.webdriver import Chrome

    Opened = Callable[..., Chrome]

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (CHROMIUM and CHROMEDRIVER),
        reason="needs chromium and chromedriver on the PATH (Debian: apt-get install chromium chromium-driver)",
    ),
]

SAMPLES = [sentence, sink, wide, translation, chat, hostile, parts]
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
COLOURS = """
return [...document.querySelectorAll('.lrpx-t,.lrpx-head *,.lrpx-foot p,.lrpx-note,.lrpx-label *,th,td')]
  .filter(e => e.textContent.trim()).map(e => {
    let under = e;
    while (getComputedStyle(under).backgroundColor === 'rgba(0, 0, 0, 0)') under = under.parentElement;
    return [e.textContent, getComputedStyle(e).color, getComputedStyle(under).backgroundColor];
  })
"""
TIP = "return getComputedStyle(arguments[0], '::after').content"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install selenium")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser: Chrome, tmp_path: Path) -> Opened:
    """Opens HTML from a file, at a width, in a colour scheme, and keeps a picture of it."""

    def open_html(html: str, scheme: str = "light", width: int = 860, media: str = "") -> Chrome:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        file = tmp_path / f"{scheme}-{width}{media}.html"
        file.write_text(html, encoding="utf-8")
        browser.get_log("browser")
        browser.get(file.as_uri())
        browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")  # it is drawn
        whole = browser.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
        file.with_suffix(".png").write_bytes(base64.b64decode(whole["data"]))
        return browser

    return open_html


def rgb(text: str) -> tuple[int, int, int]:
    red, green, blue = re.fullmatch(r"rgb\((\d+), (\d+), (\d+)\)", text).groups()
    return int(red), int(green), int(blue)


def tokens(driver: Chrome) -> list:
    return driver.find_elements("css selector", ".lrpx-t")


def tip(driver: Chrome, element) -> str:
    return driver.execute_script(TIP, element).replace("\xa0", " ")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_every_text_is_readable_in_both_schemes(opened, sample, scheme):
    driver = opened(page(sample()), scheme)
    found = [(text, rgb(ink), rgb(paper)) for text, ink, paper in driver.execute_script(COLOURS)]
    assert len(found) > len(sample())
    assert not [(text, ink, paper) for text, ink, paper in found if contrast(ink, paper) < 4.5]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_red_is_for_and_blue_against(opened, scheme):
    driver = opened(page(sentence()), scheme)
    grounds = [
        rgb(e.value_of_css_property("background-color").replace("rgba", "rgb").replace(", 1)", ")"))
        for e in tokens(driver)
    ]
    for (red, _, blue), value in zip(grounds, sentence().relevance.tolist(), strict=True):
        assert red >= blue if value > 0.1 else True
        assert blue > red if value < -0.1 else True


@pytest.mark.parametrize("view", [page, fragment])
@pytest.mark.parametrize("sample", SAMPLES)
def test_nothing_runs_nothing_loads_nothing_is_complained_about(opened, sample, view):
    html = view(sample())
    driver = opened(html if view is page else f"<!doctype html><meta charset=utf-8><title></title>{html}")
    assert driver.get_log("browser") == []
    assert driver.execute_script("return document.scripts.length") == 0
    assert driver.execute_script("return document.querySelectorAll('img,link,iframe,object').length") == 0
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0
    shown = driver.execute_script("return arguments[0].map(e => e.textContent)", tokens(driver))
    assert shown == [visible(token)[1] for token in sample().tokens]


def test_the_policy_stops_what_would_slip_through(opened):
    evil = "<script>document.title='ran'</script><img src=x onerror=\"document.title='ran'\"><b style='color:red'>"
    driver = opened(page(sentence()).replace("</main>", evil + "</b></main>"))
    assert driver.title != "ran"
    assert len([entry for entry in driver.get_log("browser") if "Content Security Policy" in entry["message"]]) >= 3


def test_hovering_shows_the_number(opened):
    from selenium.webdriver import ActionChains

    driver = opened(page(sentence()))
    keys = tokens(driver)[1]
    assert tip(driver, keys) == "none"
    ActionChains(driver).move_to_element(keys).perform()
    assert tip(driver, keys).startswith('"+1.427 · 346.4% of the value · token 1 · id 101"')


@pytest.mark.parametrize("view", [page, fragment])
def test_the_keyboard_reaches_the_numbers(opened, view):
    from selenium.webdriver import ActionChains, Keys

    driver = opened(f"<!doctype html><meta charset=utf-8>{view(sentence())}" if view is fragment else page(sentence()))
    ActionChains(driver).send_keys(Keys.TAB, Keys.TAB).perform()
    focused = driver.switch_to.active_element
    assert focused.text == "keys"
    assert tip(driver, focused).startswith('"+1.427 ')


def test_pointing_at_a_cell_shows_its_place_and_number(opened):
    from selenium.webdriver import ActionChains

    driver = opened(page(parts()))
    cell = driver.find_elements("css selector", ".lrpx-c")[5]
    said = cell.find_element("css selector", "span")
    assert said.size["width"] <= 1
    ActionChains(driver).move_to_element(cell).perform()
    assert said.text == "layer 0, head 5: −0.850"
    assert said.size["width"] > 100
    red, _, blue = rgb(cell.value_of_css_property("background-color").replace("rgba", "rgb").replace(", 1)", ")"))
    assert blue > red


@pytest.mark.parametrize("width", [320, 860])
def test_the_cells_of_a_grid_are_seen(opened, width):
    driver = opened(page(parts()), width=width)
    boxes = driver.execute_script(
        "return [...document.querySelectorAll('.lrpx-c')].map(e => [e.offsetWidth, e.offsetHeight])"
    )
    assert min(across for across, _ in boxes) >= 3
    assert min(down for _, down in boxes) >= 8


@pytest.mark.parametrize("width", [320, *(pytest.param(width, marks=pytest.mark.slow) for width in (860, 1600))])
@pytest.mark.parametrize("sample", SAMPLES)
def test_nothing_is_wider_than_the_screen(opened, sample, width):
    from selenium.webdriver import ActionChains

    driver = opened(page(sample()), width=width)
    spill = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    for element in tokens(driver)[:3] + tokens(driver)[-2:]:
        ActionChains(driver).move_to_element(element).perform()
        assert driver.execute_script(spill) == 0
    driver.execute_script("document.querySelectorAll('details').forEach(e => e.open = true)")
    assert driver.execute_script(spill) == 0


def test_a_wide_table_is_moved_inside_the_page(opened):
    columns = (("layer", True), ("neuron", True), ("token", False), ("relevance", True), ("module", False))
    row = ("10", "1044", " the", "+0.7717", "model.layers.10.mlp.down_proj")
    driver = opened(
        table_page([Tabled("logit of 'a'", "facts", columns * 2, (row * 2,) * 3, (1.0, 0.5, -0.5))]), width=320
    )
    spill = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert driver.execute_script(spill) == 0
    assert driver.find_element("css selector", ".lrpx-wide").get_attribute("tabindex") == "0"


@pytest.mark.parametrize("width", [320, 860])
def test_the_waterfall_is_seen_and_its_rows_join(opened, width):
    driver = opened(page(sentence()), width=width)
    boxes = [box.rect for box in driver.find_elements("css selector", ".lrpx-fall svg")]
    assert len(boxes) == 5
    assert {round(box["x"]) for box in boxes} == {round(boxes[0]["x"])}
    assert {round(box["width"]) for box in boxes} == {round(boxes[0]["width"])}
    assert boxes[0]["width"] > 60
    for above, below in pairwise(boxes):
        assert 0 <= below["y"] - above["y"] - above["height"] < 3


@pytest.mark.parametrize("width", [320, 360, 860])
@pytest.mark.parametrize("sample", [sentence, sink, hostile, translation])
def test_the_bars_are_seen_beside_their_numbers(opened, sample, width):
    driver = opened(page(sample()), width=width)
    driver.execute_script("document.querySelectorAll('details').forEach(e => e.open = true)")
    rows = driver.execute_script("""
      const rows = [...document.querySelectorAll('tbody tr')].filter(row => row.querySelector('td.lrpx-bar rect'));
      return rows.map(row => {
        const [bar, number] = ['td.lrpx-bar svg', '.lrpx-num'].map(e => row.querySelector(e).getBoundingClientRect());
        return [bar.width, bar.height, bar.right, number.left, number.right];
      })
    """)
    assert len(rows) >= 10
    for across, down, end, start, last in rows:
        assert across >= 40
        assert down >= 8
        assert end <= start
        assert last <= width


def test_the_sink_has_an_outline(opened):
    driver = opened(page(sink()))
    styles = [element.value_of_css_property("outline-style") for element in tokens(driver)]
    assert styles == ["dashed"] + ["none"] * (len(sink()) - 1)


def test_new_lines_break_the_line_and_leading_spaces_keep_their_room(opened):
    driver = opened(page(sink()))
    boxes = [element.rect for element in tokens(driver)]
    assert boxes[9]["y"] > boxes[6]["y"] + 60
    assert boxes[3]["x"] > boxes[2]["x"] + boxes[2]["width"] + 2
    assert boxes[5]["x"] < boxes[4]["x"] + boxes[4]["width"] + 1


def test_a_long_text_keeps_the_scale_in_sight(opened):
    driver = opened(page(long_text()))
    top = driver.execute_script("return document.querySelector('.lrpx-legend').getBoundingClientRect().top")
    assert 0 < top < 800


def test_fragments_side_by_side_leave_each_other_and_the_notebook_alone(opened):
    around = '<p class="lrpx-t lrpx-p7" id="outside">outside</p>'
    alone = opened(f"<!doctype html><meta charset=utf-8>{around}{fragment(sentence())}")
    look = (
        "return ['color','backgroundColor','font','padding','outline'].map("
        "p => getComputedStyle(document.getElementById('outside'))[p])"
    )
    colours = "return [...document.querySelectorAll('.lrpx-t')].map(e => getComputedStyle(e).backgroundColor)"
    before, first = alone.execute_script(look), alone.execute_script(colours)
    both = opened(f"<!doctype html><meta charset=utf-8>{around}{fragment(sentence())}{fragment(sink())}")
    assert both.execute_script(look) == before
    assert both.execute_script(colours)[: len(first)] == first
    assert before[1] == "rgba(0, 0, 0, 0)"


@pytest.mark.parametrize(("theme", "scheme"), [("true", "dark"), ("false", "light")])
def test_a_fragment_follows_the_theme_of_the_notebook(opened, theme, scheme):
    body = f'<body data-jp-theme-light="{theme}">{fragment(sentence())}'
    driver = opened(f"<!doctype html><meta charset=utf-8>{body}", scheme)
    ground = driver.execute_script("return getComputedStyle(document.querySelector('div')).backgroundColor")
    assert (sum(rgb(ground)) > 600) == (theme == "true")


def test_print_is_on_white_paper(opened):
    driver = opened(page(sentence()), "dark", media="print")
    ground = driver.execute_script("return getComputedStyle(document.documentElement).backgroundColor")
    assert rgb(ground) == (255, 255, 255)


def test_arabic_stays_joined_and_in_reading_order(opened):
    driver = opened(page(wide()))
    shown = [piece.text for piece in picture(wide()).pieces]
    boxes = dict(zip(shown, (element.rect for element in tokens(driver)), strict=True))
    head, tail = boxes["بالع"], boxes["الم"]
    assert abs(tail["x"] + tail["width"] - head["x"]) < 1


GALLERIES = [
    methods,
    lambda: Attributions(sample() for sample in SAMPLES),
    lambda: methods(hostile),
    lambda: methods(wide),
]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("sample", GALLERIES)
def test_several_are_readable_in_both_schemes(opened, sample, scheme):
    driver = opened(gallery_page(sample()), scheme)
    driver.execute_script("document.querySelectorAll('details').forEach(e => e.open = true)")
    found = [(text, rgb(ink), rgb(paper)) for text, ink, paper in driver.execute_script(COLOURS)]
    assert len(found) > sum(map(len, sample()))
    assert not [(text, ink, paper) for text, ink, paper in found if contrast(ink, paper) < 4.5]


@pytest.mark.parametrize("view", [gallery_page, gallery_fragment])
@pytest.mark.parametrize("sample", GALLERIES)
def test_several_run_nothing_and_load_nothing(opened, sample, view):
    html = view(sample())
    driver = opened(html if view is gallery_page else f"<!doctype html><meta charset=utf-8><title></title>{html}")
    assert driver.get_log("browser") == []
    assert driver.execute_script("return document.scripts.length") == 0
    assert driver.execute_script("return document.querySelectorAll('img,link,iframe,object').length") == 0
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.parametrize("width", [320, 360, 860])
@pytest.mark.parametrize("sample", GALLERIES)
def test_several_are_no_wider_than_the_screen(opened, sample, width):
    driver = opened(gallery_page(sample()), width=width)
    driver.execute_script("document.querySelectorAll('details').forEach(e => e.open = true)")
    spill = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert driver.execute_script(spill) == 0
    assert min(box.rect["width"] for box in driver.find_elements("css selector", ".lrpx-each .lrpx-scale")) >= 30


def test_the_heatmaps_of_a_text_stand_below_each_other(opened):
    driver = opened(gallery_page(methods()))
    first = driver.find_elements("css selector", ".lrpx-block")[0]
    places = [box.rect for box in first.find_elements("css selector", ".lrpx-text")]
    assert len(places) == 3
    assert len({(round(box["x"]), round(box["width"])) for box in places}) == 1
    assert places[0]["y"] < places[1]["y"] < places[2]["y"]


@pytest.mark.parametrize("sample", [hostile, wide, chat])
def test_a_drawing_is_shown_and_runs_nothing(opened, sample, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    drawing = sample().to_svg()
    driver = opened(f"<!doctype html><meta charset=utf-8><title></title>{drawing[drawing.index('<svg') :]}")
    assert driver.get_log("browser") == []
    assert driver.execute_script("return document.scripts.length") == 0
    assert driver.execute_script("return document.querySelectorAll('img,image,foreignObject').length") == 0
    assert driver.execute_script("return document.querySelector('svg').getBoundingClientRect().width") > 400
    assert driver.execute_script("return document.querySelectorAll('svg path').length") > len(sample())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_image_is_drawn_and_its_layers_can_be_switched(opened, scheme):
    from selenium.webdriver import ActionChains, Keys

    from lrpx import Explainer
    from tests.pictures import build, image

    found = Explainer(build("vit"))(image(), 1, method="attnlrp-vit", ledger=True)
    stops = (
        "return Math.min(...[...document.querySelectorAll('.lrpx-slider input')].map("
        "e => Math.min(e.offsetWidth, e.offsetHeight)))"
    )
    for width in (900, 390):
        driver = opened(page(found), scheme, width)
        assert not driver.get_log("browser")  # the page's policy admits its images
        assert driver.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
        assert len(driver.find_elements("css selector", "svg.lrpx-pic image")) == 5
        texts = [(text, rgb(ink), rgb(paper)) for text, ink, paper in driver.execute_script(COLOURS)]
        assert not [each for each in texts if contrast(each[1], each[2]) < 4.5]
        opacity = "return getComputedStyle(document.querySelector('.{}')).opacity"
        assert driver.execute_script(opacity.format("lrpx-base")) == "1"
        driver.find_element("css selector", ".lrpx-show-base").click()
        assert driver.execute_script(opacity.format("lrpx-base")) == "0"
        assert driver.execute_script(opacity.format("lrpx-heat")) == "1"
        driver.find_element("css selector", ".lrpx-o3").click()
        assert driver.execute_script(opacity.format("lrpx-heat")) == "0.3"
        ActionChains(driver).send_keys(Keys.ARROW_RIGHT).perform()  # as a slider
        assert driver.execute_script(opacity.format("lrpx-heat")) == "0.4"
        assert driver.execute_script(stops) >= 20  # each can be hit with a finger
        cell = driver.find_elements("css selector", ".lrpx-patched .lrpx-cellbox")[5]
        strokes = "return [...document.querySelectorAll('.lrpx-patched .lrpx-cellbox')].map(e => [" + (
            "getComputedStyle(e).stroke, getComputedStyle(e).strokeOpacity])"
        )
        assert {stroke for stroke, _ in driver.execute_script(strokes)} == {"none"}
        ActionChains(driver).move_to_element(cell).perform()
        seen = driver.execute_script(strokes)
        assert seen[5][1] == "1"
        assert {opacity for i, (_, opacity) in enumerate(seen) if i != 5} == {"0.3"}  # the grid of patches


def test_two_images_have_sliders_of_their_own(opened):
    from lrpx import Explainer
    from tests.pictures import build, image

    explain = Explainer(build("vit"))
    found = Attributions([explain(image(i), 1, method=method) for i in (0, 1) for method in ("lrp", "attnlrp")])
    for html in (gallery_page(found), f"<!doctype html><meta charset=utf-8>{gallery_fragment(found)}"):
        driver = opened(html)
        driver.find_elements("css selector", ".lrpx-o2")[1].click()
        each = "return [...document.querySelectorAll('.lrpx-heat')].map(e => getComputedStyle(e).opacity)"
        assert driver.execute_script(each) == ["1", "1", "0.2", "0.2"]
