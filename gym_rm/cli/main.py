"""The command `gym-rm` and its sub-commands."""

from __future__ import annotations

import logging
import os
import re
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import gym_rm
from gym_rm.cli.agent import PASSED_ON, agent, demo, grpo
from gym_rm.cli.audit import audit
from gym_rm.cli.console import WIDTH, PrintedWarnings, exit_codes
from gym_rm.cli.data import data
from gym_rm.cli.doctor import doctor
from gym_rm.cli.evaluate import evaluate
from gym_rm.cli.plan import plan
from gym_rm.cli.report import report
from gym_rm.cli.score import rescore, score
from gym_rm.cli.serve import serve
from gym_rm.cli.settings import settings
from gym_rm.cli.train import train
from gym_rm.errors import logger

HOME = re.compile(r"^((?:-\w|--[\w-]+=)?)~(?=/)")


class _Commands(TyperGroup):
    def make_context(self, info_name: str | None, args: list[str], *others: Any, **options: Any) -> Any:
        """Read the arguments; `~/` at the start of any of them is the home folder."""
        at_home = [HOME.sub(lambda found: found[1] + os.path.expanduser("~"), each) for each in args]
        with exit_codes():
            return super().make_context(info_name, at_home, *others, **options)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error of files that it does not expect ends it as well, without a traceback."""
        with exit_codes():
            return super().invoke(ctx)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands, with the whole first sentence of each."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.get_short_help_str(200)) for name, each in self.commands.items()])


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH},
)
for command in (score, rescore, serve, train, evaluate, plan, audit, report, doctor, demo, settings):
    app.command()(command)
app.add_typer(data, name="data", cls=_Commands)
app.command(context_settings=PASSED_ON)(agent)
app.command(context_settings=PASSED_ON, add_help_option=False)(grpo)


def main() -> None:
    """Run the command line."""
    logger.addHandler(PrintedWarnings(logging.WARNING))
    app()


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"gym-rm {gym_rm.__version__}")
        raise typer.Exit


@app.callback()
def _command(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Score conversations with a reward model, for any RL library, and plan the hardware that training takes."""
