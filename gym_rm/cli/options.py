"""`--option NAME=VALUE`: the options of scorers, as the help page lists them and as errors name them."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

from gym_rm.config import Setting, settings_of

# Options that have a name of their own on the command line.
OWN_NAMES = ("max_length", "max_num_batched_tokens", "dtype", "device", "turns", "batch_size")


class CommandWithOptions(TyperCommand):
    """Command whose help page ends with the options of scorers, from the classes of their settings."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options of the command, then those of scorers."""
        super().format_options(ctx, formatter)
        for title, settings in scorer_options().items():
            with formatter.section(f"--option NAME=VALUE, {title}"):
                formatter.write_dl(
                    [(each.name, f"{each.text} [{each.type}; default: {each.default}]") for each in settings]
                )


def scorer_options() -> dict[str, list[Setting]]:
    """Return the options of reward models, and of each kind of reward model, by title."""
    from gym_rm.engine.executors.replica import ParallelOptions  # imported here because importing torch is slow
    from gym_rm.engine.kinds import KINDS
    from gym_rm.engine.loading.checkpoint import LoadOptions
    from gym_rm.engine.reward_model_scorer import EngineOptions
    from gym_rm.engine.text.options import TextOptions
    from gym_rm.scorers.remote_options import RemoteOptions

    general = [
        each for schema in (LoadOptions, EngineOptions, ParallelOptions, TextOptions) for each in settings_of(schema)
    ]
    groups = {"for every reward model": [each for each in general if each.name != "path"]}
    groups |= {f"for kind={name}": settings_of(kind.Options) for name, kind in KINDS.items()}
    groups["for a URL"] = settings_of(RemoteOptions)
    return {title: settings for title, settings in groups.items() if settings}


def how_to_write(message: str) -> str | None:
    """Return how to write the options that a message names as Python keywords (`overlong=`), or None."""
    keywords = re.findall(r"(?<![\w.-])([a-z]\w*)=", message)
    if not keywords:
        return None
    known = {each.name for settings in scorer_options().values() for each in settings}
    written = {
        name: f"--{name.replace('_', '-')} VALUE" if name in OWN_NAMES else f"--option {name}=VALUE"
        for name in keywords
        if name in known or name in OWN_NAMES
    }
    return f"On the command line: {', '.join(written.values())}" if written else None
