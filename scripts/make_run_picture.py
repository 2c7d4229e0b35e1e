"""Take the picture of the page of a run for the README: the top of the page, and its first conversations.

gym-rm demo output=outputs/demo
python scripts/make_run_picture.py outputs/demo   # needs playwright and chromium
"""

import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))

from gym_rm.reports.run_page import write_run_page
from gym_rm.reports.runs import read_run

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "run-report.png"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        page = write_run_page(read_run(sys.argv[1]), Path(folder) / "report.html")
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 960, "height": 800})
        tab.goto(page.as_uri())
        # The first conversations follow the first four charts.
        tab.add_style_tag(content=".charts figure:nth-child(n+5) { display: none } .filters { position: static }")
        tab.select_option("#order", "spread")
        last = tab.locator("article").nth(1).bounding_box()
        tab.screenshot(
            path=sys.argv[2] if len(sys.argv) > 2 else PICTURE,
            clip={"x": 0, "y": 0, "width": 960, "height": last["y"] + last["height"] + 6},
            full_page=True,
        )
        browser.close()


if __name__ == "__main__":
    main()
