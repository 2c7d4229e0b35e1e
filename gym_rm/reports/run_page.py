"""A page about a training run: one HTML file that loads nothing, with the monitor, curves and the conversations."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import gym_rm
from gym_rm.errors import ConfigError
from gym_rm.reports.monitor import signs
from gym_rm.reports.pages import message_texts, render, write_page
from gym_rm.reports.run_charts import run_charts
from gym_rm.reports.runs import Row, Run, flat
from gym_rm.reports.tables import signed
from gym_rm.reports.transcripts import call_lines, cut, visible


def write_run_page(run: Run, path: str | Path) -> Path:
    """Write the page of a run, see `run_page`; return the path."""
    return write_page(run_page(run), path)


def run_page(run: Run) -> str:
    """Return the HTML of the page. All texts of the run are escaped.

    Raises:
        ConfigError: the run has no line yet.
    """
    if not run.training and not run.held_out:
        raise ConfigError(f"run {str(run.folder)!r} has no step yet; nothing to report.")
    script = (files("gym_rm.reports") / "run_page.js").read_text(encoding="utf-8")
    return render(
        "run_page.html",
        title=f"Run {visible(run.folder.resolve().name)}",
        about=f"gym_rm {gym_rm.__version__} · {visible(run.caption)}",
        numbers=_numbers(run),
        watched=not run.trains_reward_model,
        signs=() if run.trains_reward_model else signs(run),
        settings=[visible(f"{name}={value}") for name, value in changed_settings(run)],
        charts=run_charts(run),
        conversations=len(run.conversations),
        # `</script>` cannot end the block, since `<` is written as its escape.
        data=json.dumps(_conversations(run)).replace("<", "\\u003c") if run.conversations else "",
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def changed_settings(run: Run) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a run that differ from their defaults, such as `("loss.kl_coef", 0.05)`."""
    return (each for each in flat(run.changed_settings, ".") if each[0] != "output")


# --- helpers -----------------------------------------------------------------------------------------------------


def _numbers(run: Run) -> list[tuple[str, str, str]]:
    """Return words, value and a remark for each number at the top."""
    rows = run.held_out if len(run.held_out) > 1 else run.training
    where = "held out" if rows is run.held_out else "training"
    found: list[tuple[str, str, str]] = []
    for name, words in (("accuracy", "right answers"), ("reward_mean", "reward"), ("loss", "loss")):
        values = [row[name] for row in rows if row.get(name) is not None]
        if values and (name != "loss" or not found):
            first, last = (
                f"{value:.1%}" if name == "accuracy" else signed(value, like=[values[0], values[-1]])
                for value in (values[0], values[-1])
            )
            found.append((words, f"{first} → {last}" if len(values) > 1 else last, where))
    lengths, divergences = (
        [row[name] for row in run.training if row.get(name) is not None] for name in ("completion_tokens", "kl")
    )
    if lengths:
        found.append(("tokens per reply", f"{lengths[0]:.1f} → {lengths[-1]:.1f}", "training"))
    if divergences:
        found.append(("KL per token", f"{divergences[-1]:.3g}", "training"))
    if run.training:
        end = run.training[-1]
        found.append(("steps", f"{end['step']:,}", f"{end['seconds']:,.0f} s" if end.get("seconds") else ""))
    return found


def _conversations(run: Run) -> dict[str, Any]:
    places: dict[str, int] = {}
    prompts: list[Sequence[Mapping[str, Any]]] = []
    for row in run.conversations:
        place = places.setdefault(str(row["prompt_id"]), len(prompts))
        messages = row["messages"][:-1]
        if place == len(prompts):
            prompts.append(messages)
        else:  # the user's later turns may differ between replies
            pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompts[place], messages, strict=False))
            prompts[place] = [first for first, _ in pairs]
    held_out = run.measured()
    return {
        "prompts": [
            {"id": visible(name), "messages": [*map(message_texts, prompts[place])]} for name, place in places.items()
        ],
        "rows": [_row(row, places, prompts) for row in run.conversations],
        "start": held_out[0]["step"] if held_out else None,
    }


def _row(row: Row, places: Mapping[str, int], prompts: Sequence[Sequence[Any]]) -> dict[str, Any]:
    place = places[str(row["prompt_id"])]
    kept = ("step", "phase", "group", "reward", "advantage", "right", "tokens", "finished", "components", "verdicts")
    messages = row["messages"][len(prompts[place]) :]
    rest = [*map(message_texts, messages)]
    replies = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
    steps = list(zip(row.get("step_rewards") or (), row.get("step_ends") or (), strict=True))
    for k, (rewards, ends) in zip(reversed(replies), reversed(steps), strict=False):
        if ends:
            rest[k]["steps"] = _step_texts(messages[k], rewards, ends)
    return {name: row.get(name) for name in kept} | {"prompt": place, "messages": rest}


def _step_texts(
    message: Mapping[str, Any], rewards: Sequence[float | None], ends: Sequence[int]
) -> list[tuple[str, float | None]]:
    """Return the text and the reward of each step of a reply, and what follows the last one, with its tool calls."""
    text = "\n".join([message["content"], *call_lines(message)])
    texts = [cut(text[start:end]) for start, end in itertools.pairwise([0, *ends, len(text)])]
    return list(zip(texts, [*rewards, None], strict=True))
