"""The report in a real browser: what runs, what shows, how readable it is."""

from __future__ import annotations

import re
import shutil

import pytest

from lrpx._views.colour import contrast
from tests.benchmarks.report_samples import explained, reports, write
from tests.benchmarks.test_report import hostile_run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
CHROMEDRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (CHROMIUM and CHROMEDRIVER),
        reason="needs chromium and chromedriver on the PATH (Debian: apt-get install chromium chromium-driver)",
    ),
]
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
COLOURS = """
return [...document.querySelectorAll('.lrpx-t,.lrpx-head *,.lrpx-lead *,.lrpx-facts,.lrpx-label *,th,td,td *,summary')]
  .filter(e => e.textContent.trim() && e.checkVisibility()).map(e => {
    let under = e;
    while (getComputedStyle(under).backgroundColor === 'rgba(0, 0, 0, 0)') under = under.parentElement;
    return [e.textContent, getComputedStyle(e).color, getComputedStyle(under).backgroundColor];
  })
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    real = write(tmp_path_factory.mktemp("real"), explained())
    hostile = hostile_run(tmp_path_factory.mktemp("hostile"))
    reports(real, show=["dev:12"])
    reports(hostile)
    return {"real": real / "report.html", "hostile": hostile / "report.html"}


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="needs selenium: pip install selenium")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def opened(browser, pages):
    """Opens a page at a width, in a colour scheme, with everything folded out."""

    def open_page(name, scheme="light", width=1100):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        browser.get_log("browser")
        browser.get(pages[name].as_uri())
        browser.execute_script("document.querySelectorAll('details').forEach(e => e.open = true)")
        return browser

    return open_page


def rgb(text):
    return tuple(int(part) for part in re.fullmatch(r"rgb\((\d+), (\d+), (\d+)\)", text).groups())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_is_readable_in_both_schemes(opened, scheme):
    found = [(text, rgb(ink), rgb(paper)) for text, ink, paper in opened("real", scheme).execute_script(COLOURS)]
    assert len(found) > 500
    assert not [(text, ink, paper) for text, ink, paper in found if contrast(ink, paper) < 4.5]


@pytest.mark.parametrize("name", ["real", "hostile"])
def test_nothing_runs_nothing_loads_nothing_is_complained_about(opened, name):
    driver = opened(name)
    assert driver.get_log("browser") == []
    assert driver.execute_script("return document.scripts.length") == 0
    assert driver.execute_script("return document.querySelectorAll('img,link,iframe,object').length") == 0
    assert driver.execute_script("return performance.getEntriesByType('resource').length") == 0


@pytest.mark.parametrize("width", [320, 700, 1600])
@pytest.mark.parametrize("name", ["real", "hostile"])
def test_nothing_is_wider_than_the_screen(opened, name, width):
    driver = opened(name, width=width)
    assert driver.execute_script("return document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("width", [320, 1100])
def test_the_bars_of_a_metric_are_as_long_as_its_means(opened, width):
    cells = opened("real", width=width).execute_script("""
      return [...document.querySelectorAll('.lrpx-scores tbody td:nth-child(2)')].map(cell => [
        Number(cell.querySelector('.lrpx-mean').textContent),
        cell.querySelectorAll('rect')[1].getBoundingClientRect().width,
        cell.querySelector('svg').getBoundingClientRect().width])
    """)
    assert len(cells) == 5
    for mean, bar, whole in cells:
        assert whole > 40
        assert bar == pytest.approx(mean * whole, abs=1)


def test_the_heatmaps_of_a_sample_stand_below_each_other(opened):
    xs = opened("real").execute_script("""
      return [...document.querySelectorAll('.lrpx-sample')].map(sample =>
        [...sample.querySelectorAll('.lrpx-text')].map(text => Math.round(text.getBoundingClientRect().x)))
    """)
    assert len(xs) == 11
    assert all(len(row) == 5 and len(set(row)) == 1 for row in xs)


def test_the_subject_is_underlined(opened):
    marked = opened("real").execute_script("""
      return [...document.querySelectorAll('.lrpx-t')].filter(e =>
        getComputedStyle(e).textDecorationLine === 'underline').map(e => e.textContent)
    """)
    tokens = {sentence["tokens"][at].strip() for sentence in explained() for at in sentence["ground_truth"]}
    assert len(marked) >= 11 * 5
    assert set(marked) <= tokens
