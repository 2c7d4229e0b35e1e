"""`gym-rm agent`, `gym-rm grpo` and `gym-rm demo`: run the agents, single files that come with the package."""

from __future__ import annotations

import ast
import runpy
import sys
from typing import Annotated, Any

import typer

from gym_rm.cli.console import fail
from gym_rm.config import shipped_folder
from gym_rm.errors import ConfigError, nearest

# Arguments, also --help, go to the agent as they are.
PASSED_ON: dict[str, Any] = {"ignore_unknown_options": True, "allow_interspersed_args": False}
Arguments = Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="Arguments of the agent.")]


def agent(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="The agent; without it, they are listed.")] = None,
    arguments: Arguments = None,
) -> None:
    """Run an agent that comes with the package, a single Python file: gym-rm agent NAME --help has its page.

    \b
    gym-rm agent                                      list the agents
    gym-rm agent best_of_n n=64
    gym-rm agent arithmetic outputs/arithmetic
    """
    texts = {file.stem: file.read_text(encoding="utf-8") for file in sorted(shipped_folder("agents").glob("*.py"))}
    agents = {name: ast.get_docstring(ast.parse(text)) or "" for name, text in texts.items() if "__main__" in text}
    if name is None:
        typer.echo("\n".join(f"{name:<20}{text.splitlines()[0]}" for name, text in agents.items()))
    elif name in agents and "argparse" not in texts[name] and {"-h", "--help"} & {*(arguments or ["--help"])}:
        typer.echo(agents[name])
    elif name in agents:
        run_agent(name, arguments or [])
    else:
        fail(ConfigError(f"there is no agent {name!r}.{nearest(name, agents)} The agents: {', '.join(agents)}."), 2)


def grpo(arguments: Arguments = None) -> None:
    """Train a policy against a reward model with GRPO; gym-rm grpo --help lists the settings."""
    run_agent("grpo", arguments or [])


def demo(
    arguments: Arguments = None,
    real: Annotated[bool, typer.Option("--real", help="With real weights and English texts instead.")] = False,
) -> None:
    """Train the embedded policy against the embedded reward model, in a quarter of a minute, and write a page about it.

    It is gym-rm grpo --config demo; settings may follow, such as seed=2 output=outputs/demo. With --real it is
    gym-rm agent first_real_run, which has its own settings: pairs=my-pairs.jsonl steps=40.
    """
    if real:
        return run_agent("first_real_run", arguments or [])
    typer.echo("gym-rm grpo --config demo (imports take a few seconds)")
    run_agent("grpo", ["--config", "demo", *(arguments or [])])


def run_agent(name: str, arguments: list[str]) -> None:
    """Run the file of an agent as `python agents/NAME.py ARGUMENTS` does; its folder is the first on `sys.path`."""
    file = shipped_folder("agents") / f"{name}.py"
    sys.argv = [str(file), *arguments]
    sys.path.insert(0, str(file.parent))
    runpy.run_path(str(file), run_name="__main__")
