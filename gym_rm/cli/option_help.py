"""Help pages that end with the settings that a command takes as NAME=VALUE."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from typer.core import TyperCommand

from gym_rm.config import Setting, settings_of

Sections: TypeAlias = Callable[[], Mapping[str, Sequence[Setting]]]


USUAL = ["kind", "dtype", "device", "max_num_batched_tokens", "quantization", "num_replicas", "tensor_parallel_size"]
USUAL += ["chat_template", "max_length", "overlong"]


def command_with_settings(sections: Sections, usual: Sequence[str] = ()) -> type[TyperCommand]:
    """Return the class of a command whose help page lists settings, by the title of their section.

    If there are `usual` ones, `--help` has only these, with a sentence for each, and `--help-all` has all of them.
    """

    class CommandWithSettings(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            """Read the arguments; `--help-all` is `--help` with all settings."""
            ctx.meta["short"] = usual and "--help-all" not in args
            return super().parse_args(ctx, ["--help" if usual and each == "--help-all" else each for each in args])

        def format_options(self, ctx: Any, formatter: Any) -> None:
            """Write the options of the command, then the settings."""
            super().format_options(ctx, formatter)
            groups = sections()
            if ctx.meta.get("short"):
                every = [setting for settings in groups.values() for setting in settings]
                rows = [(name, next(each.text for each in every if each.name == name)) for name in usual]
                with formatter.section("Usual options of a scorer, as --option NAME=VALUE"):
                    formatter.write_dl([(name, text.split(". ")[0].rstrip(".")) for name, text in rows])
                formatter.write_paragraph()
                formatter.write_text(f"All options, by kind of scorer: {ctx.command_path} --help-all")
                return
            for title, settings in groups.items():
                rows = [(each.name, f"{each.text} [{each.type}; default: {each.default}]") for each in settings]
                with formatter.section(title):
                    formatter.write_dl(rows)

    return CommandWithSettings


def scorer_options() -> dict[str, list[Setting]]:
    """Return the options of reward models, and of each kind of reward model, by title."""
    # Imported here because importing torch is slow.
    from gym_rm.engine.executors.parallel_options import ParallelOptions
    from gym_rm.engine.kinds import KINDS
    from gym_rm.engine.loading.checkpoint import LoadOptions
    from gym_rm.engine.reward_model_scorer import EngineOptions
    from gym_rm.engine.text.judged import JudgedOptions
    from gym_rm.engine.text.text_options import TextOptions
    from gym_rm.scorers.remote.options import RemoteOptions

    schemas = (LoadOptions, EngineOptions, ParallelOptions, TextOptions, JudgedOptions)
    general = [setting for schema in schemas for setting in settings_of(schema) if setting.name != "path"]
    groups = {"for every reward model": general}
    groups |= {f"for kind={name}": settings_of(kind.Options) for name, kind in KINDS.items()}
    groups["for a URL"] = [*settings_of(RemoteOptions), *settings_of(JudgedOptions)]
    return {f"--option NAME=VALUE, {title}": settings for title, settings in groups.items() if settings}
