"""Write the numbers and pictures of docs/planning.md again, from the requests in configs/plan.

python scripts/make_plan_docs.py
"""

from __future__ import annotations

import re
from pathlib import Path

from typer.testing import CliRunner

from gym_rm.cli.main import app
from gym_rm.planning.plan import Plan
from gym_rm.planning.planner import plan
from gym_rm.planning.quantities import show_bytes
from gym_rm.reports.plan_pictures import plot_plan
from gym_rm.reports.plan_tables import parallelism, summary, tightest_of

ROOT = Path(__file__).parents[1]
CONFIGS, PAGE, IMAGES = ROOT / "configs" / "plan", ROOT / "docs" / "planning.md", ROOT / "docs" / "images"
ORDER = (
    "laptop",
    "one_16gb_gpu",
    "h100_1x8",
    "h100_1x8_70b",
    "h200_2x8",
    "h200_2x8_70b",
    "h200_4x8",
    "h200_4x8_70b",
)
PICTURES = ("laptop", "h100_1x8", "h200_2x8_70b")
CHANGES = ("gpus=4", "gpus=16", "gpu=h200_sxm", "gpu=l40s", "workload.group_size=16", "pools=apart")


def table(plans: dict[str, Plan]) -> str:
    """Return the table of all requests."""
    lines = ["| request | a step | conversations | slowest | least free memory | divided |", "| --- " * 6 + "|"]
    for name, found in plans.items():
        pool, tightest = tightest_of(found)
        parts = "; ".join(f"{each.name}: {parallelism(each)}" for pool in found.pools for each in pool.components)
        free = f"{show_bytes(pool.gpu_memory - tightest.peak)} of {show_bytes(pool.gpu_memory)}"
        lines.append(
            f"| [`{name}`](../configs/plan/{name}.yaml) | {found.step_seconds:.3g} s | "
            f"{found.conversations_per_second:.3g} conv./s | {found.bottleneck.phase}: {found.bottleneck.bottleneck} | "
            f"{free} | {parts} |"
        )
    return "\n".join(lines)


def what_if(file: Path) -> str:
    """Return what `--what-if` prints."""
    arguments = ["plan", str(file), *(part for change in CHANGES for part in ("--what-if", change))]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return "```\n" + "\n".join(line.rstrip() for line in result.stdout.splitlines() if line.strip()) + "\n```"


def main() -> None:
    """Replace each part of the page between its marks."""
    plans = {name: plan(CONFIGS / f"{name}.yaml") for name in ORDER}
    for name in PICTURES:
        plot_plan(plans[name], IMAGES / f"plan-{name.replace('_', '-')}.svg")
    parts = {
        "table": table(plans),
        "summary": f"```\n{summary(plans['h100_1x8']).plain}\n```",
        "what-if": what_if(CONFIGS / "h100_1x8.yaml"),
    }
    text = PAGE.read_text(encoding="utf-8")
    for name, part in parts.items():
        pattern = rf"(<!-- {name}: [^>]*-->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda found, part=part: f"{found[1]}{part}\n{found[2]}", text, flags=re.DOTALL)
        assert count == 1, name
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
