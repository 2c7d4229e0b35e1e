"""`gym-rm report`: one HTML page about a training run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gym_rm.checks import keep_inputs
from gym_rm.cli.console import fail, stderr
from gym_rm.errors import ConfigError


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, finished or not.", show_default=False)],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.html", help="The page. Default: RUN/report.html.")
    ] = None,
) -> None:
    """Write one HTML page about a run of gym-rm grpo or gym-rm train; it needs no network.

    The page begins with signs of reward hacking and what to turn against them, then shows curves, and the
    conversations of training steps and held-out prompts, before and after training. docs/grpo.md explains them.

    \b
    gym-rm report outputs/grpo-20260101-120000
    gym-rm report outputs/with-kl -o page.html

    Exit codes: 0 finished; 1 error, also a damaged run; 2 invalid arguments.
    """
    # Imported here because `--help` needs none of them.
    from gym_rm.reports.run_page import write_run_page
    from gym_rm.reports.runs import read_run

    path = output or run / "report.html"
    if path.suffix != ".html":
        fail(ConfigError(f"-o must end in .html, got {str(path)!r}."), 2)
    keep_inputs([each for each in run.glob("*") if each.suffix != ".html"], [path])
    page = write_run_page(read_run(run), path)
    stderr.print(f"wrote {page}", markup=False)
