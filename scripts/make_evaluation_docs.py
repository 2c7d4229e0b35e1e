"""Run the commands on docs/evaluation.md again, and write their output and the pictures anew.

python scripts/make_evaluation_docs.py            # the outputs; needs ../shared/data
python scripts/make_evaluation_docs.py --pictures  # also the pictures; needs playwright and chromium
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "evaluation.md"
DATA = ROOT.parent / "shared" / "data"
BLOCK = re.compile(r"^```console\n\$ (gym-rm evaluate .*?)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def prepare(root: Path, data: Path = DATA) -> Path:
    """Return a folder with `../shared/data`, `rewards.py` from the first block of the page, and `gym-rm`."""
    here = root / "checkout"
    (here / "bin").mkdir(parents=True)
    (root / "shared").mkdir()
    (root / "shared" / "data").symlink_to(data)
    code, *_ = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (here / "rewards.py").write_text(code)
    program = here / "bin" / "gym-rm"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m gym_rm "$@"\n')
    program.chmod(0o755)
    return here


def output_of(command: str, folder: Path) -> str:
    """Run a command of the page and return what it prints, without spaces at the ends of lines."""
    changed = {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    environment = {**os.environ, **changed, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        ["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    if ran.returncode:
        raise RuntimeError(f"{command}\n{ran.stderr}")
    return "".join(f"{line.rstrip()}\n" for line in ran.stdout.rstrip().split("\n"))


def take_pictures(report: Path) -> None:
    """Write the top of a page, and the first of its most wrong rows, to docs/images."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1180, "height": 990})
        tab.goto(report.as_uri())
        tab.screenshot(path=ROOT / "docs" / "images" / "evaluation.png")
        title, row = (
            tab.locator("h2", has_text="Most wrong").bounding_box(),
            tab.locator("article").first.bounding_box(),
        )
        clip = {"x": 0, "y": title["y"] - 16, "width": 1180, "height": row["y"] + row["height"] - title["y"] + 32}
        tab.screenshot(path=ROOT / "docs" / "images" / "evaluation_row.png", clip=clip, full_page=True)
        browser.close()


def main() -> None:
    """Rewrite the page."""
    with tempfile.TemporaryDirectory() as root:
        folder = prepare(Path(root))
        text = BLOCK.sub(
            lambda block: f"```console\n$ {block[1]}\n{output_of(block[1], folder)}```",
            PAGE.read_text(encoding="utf-8"),
        )
        PAGE.write_text(text, encoding="utf-8")
        if "--pictures" in sys.argv[1:]:
            take_pictures(folder / "outputs" / "two" / "report.html")


if __name__ == "__main__":
    main()
