"""Take the picture of an HTML heatmap with a headless Chromium.

python docs/screenshot.py demo.html docs/images/keys.png [--dark] [--width 900] [--height 460]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from selenium import webdriver

SWITCHES = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip


def main() -> None:
    """Open the page, emulate the colour scheme, write the PNG."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("page", type=Path)
    parser.add_argument("image", type=Path)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--width", type=int, default=900)
    parser.add_argument("--height", type=int, default=460)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as profile:
        settings = webdriver.ChromeOptions()
        for switch in (*SWITCHES, f"--user-data-dir={profile}", f"--window-size={options.width},{options.height}"):
            settings.add_argument(switch)
        driver = webdriver.Chrome(settings, webdriver.ChromeService("/usr/bin/chromedriver"))
        try:
            scheme = {"name": "prefers-color-scheme", "value": "dark" if options.dark else "light"}
            driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
            driver.get(options.page.resolve().as_uri())
            driver.save_screenshot(str(options.image))
        finally:
            driver.quit()


if __name__ == "__main__":
    main()
