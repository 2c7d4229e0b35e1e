"""`gym-rm plan`: where every model goes, whether it fits, and how long a step takes."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from gym_rm.checks import keep_inputs
from gym_rm.cli.console import exit_codes, fail, report_console, stderr
from gym_rm.cli.plan_requests import (
    divide_arguments,
    divide_change,
    divide_simulation,
    is_example,
    read_request,
)
from gym_rm.documents import read_mapping
from gym_rm.errors import ConfigError, GymRMError
from gym_rm.planning.plan import Plan
from gym_rm.planning.request_settings import PlanSettings
from gym_rm.planning.simulation import simulate as run_simulation

if TYPE_CHECKING:
    from gym_rm.planning.refusals import Infeasible

PICTURES, FILES = (".svg",), (".json", ".yaml", ".yml")
HINT = """\
This is an example: GRPO of an 8B policy with an 8B reward model on 8 GPUs. Change it by settings:
  gym-rm plan gpus=16 gpu=h200_sxm
Or write down what you have and train, and plan that with gym-rm plan request.yaml:
  cluster: {gpu: h100_sxm, nodes: 1, gpus_per_node: 8}
  policy: {model: Qwen/Qwen3-8B}
  reward_models: {helpful: {model: Skywork/Skywork-Reward-V2-Llama-3.1-8B}}
  workload: {num_prompts: 64, group_size: 8, prompt_tokens: 512, reply_tokens: {p50: 400, p95: 1500, max: 2048}}
gym-rm settings plan lists the settings, --gpus the known GPUs; -o plan.svg draws a picture."""


def plan(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="REQUEST.yaml NAME=VALUE",
            help="File with the cluster, the models and the work of a step, or the name of one of the package's "
            "(h100_1x8), and settings that change it.",
        ),
    ] = None,
    output: Annotated[
        list[Path] | None,
        typer.Option("--output", "-o", help="Write the plan (.json, .yaml) or its picture (.svg). May be repeated."),
    ] = None,
    what_if: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Also plan with this change, such as gpus=16. May be repeated."),
    ] = None,
    library: Annotated[
        Literal["gym-rm", "verl", "trl"] | None,
        typer.Option("--for", help="Print the plan as settings of this library."),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Simulate many steps, with failures; simulation.NAME=VALUE sets how.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine, for plans with gpu=here.")
    ] = False,
    gpus: Annotated[bool, typer.Option("--gpus", help="List the known kinds of GPUs.")] = False,
) -> None:
    """Plan where every model goes, whether it fits, how long a step takes and what limits it.

    Nothing is loaded: sizes come from configurations. REQUEST.yaml has the cluster, the models and the work of a step,
    see docs/planning.md; the name of one that comes with the package, such as h100_1x8, may stand for it.

    \b
    gym-rm plan                                      an example
    gym-rm plan request.yaml -o plan.json -o plan.svg
    gym-rm plan request.yaml --what-if gpus=16 --what-if gpu=h200_sxm
    gym-rm plan request.yaml --simulate simulation.gpu_hours=5000

    Exit codes: 0 a plan was made; 1 nothing fits, or a file cannot be written; 2 a mistake in the request; 130
    interrupted.
    """
    # Imported here, as in other functions of this file, because `--help` and the other commands need none of it.
    from gym_rm.planning.exports import flags
    from gym_rm.planning.refusals import Infeasible
    from gym_rm.reports.plan_tables import plan_report, simulation_table

    console = report_console()
    written = output or []
    with exit_codes():
        try:
            file, overrides = divide_arguments(arguments or [])
            if gpus or calibrate:
                _print_hardware(console, calibrate=calibrate)
                if not arguments:
                    return
            _check_outputs(written, file, overrides)
            if what_if:
                _with_changes(console, file, overrides, what_if, written, as_json=as_json)
            else:
                settings, others = divide_simulation(overrides) if simulate else (None, overrides)
                found = _planned(file, others)
                _write(found, written)
                result = None if settings is None else run_simulation(found, settings)
                if as_json:
                    plain = found.to_dict()
                    values = plain if result is None else {"plan": plain, "simulation": asdict(result)}
                    typer.echo(json.dumps(values, indent=1))
                elif result is not None:
                    console.print(simulation_table(found, result))
                elif library is not None:
                    typer.echo(flags(found, library).text)
                else:
                    console.print(plan_report(found))
                    if is_example(file, others):
                        stderr.print(HINT, style="dim", markup=False)
        except ConfigError as error:
            fail(error, code=1 if isinstance(error, Infeasible) else 2)
        for path in written:
            stderr.print(f"wrote {path}", markup=False)


def _check_outputs(paths: Sequence[Path], file: Path | None, overrides: Sequence[str]) -> None:
    """Check the outputs before the plan is made."""
    for path in paths:
        if path.suffix not in (*PICTURES, *FILES):
            raise ConfigError(f"-o must end in {', '.join((*FILES, *PICTURES))}, got {str(path)!r}.")
    request = read_mapping(file, "a request") if paths and file is not None else {}
    keep_inputs([file, request, [override.partition("=")[2] for override in overrides]], paths)


def make_plan(settings: PlanSettings) -> Plan:
    """Return the best plan of a request."""
    from gym_rm.planning.planner import plan as search

    return search(settings)


def _planned(file: Path | None, overrides: Sequence[str]) -> Plan:
    """Return the plan of a request, or the plan that a file holds."""
    request = read_request(file, overrides)
    return request if isinstance(request, Plan) else make_plan(request)


def _write(found: Plan, paths: Sequence[Path]) -> None:
    for path in paths:
        if path.suffix in PICTURES:
            from gym_rm.reports.plan_pictures import plot_plan

            plot_plan(found, path)
        else:
            found.save(path)


def _print_hardware(console: Console, *, calibrate: bool) -> None:
    from gym_rm.planning.hardware import calibration
    from gym_rm.reports.plan_tables import devices_table

    measured = []
    if calibrate:
        stderr.print("measuring for about ten seconds ...")
        measured = [calibration.calibrate()]
        stderr.print("stored; plans with gpu=here use these numbers.", markup=False)
    console.print(devices_table(measured))


def _with_changes(
    console: Console,
    file: Path | None,
    overrides: Sequence[str],
    changes: Sequence[str],
    written: Sequence[Path],
    *,
    as_json: bool,
) -> None:
    """Show the plan of a request beside those with each of the changes, and then what is wrong with the others.

    Exits with 1 if the request itself has no plan.
    """
    from gym_rm.planning.refusals import Infeasible
    from gym_rm.reports.plan_tables import compare_table

    wanted = {"as it is": overrides} | {change: [*overrides, *divide_change(change)] for change in changes}
    found: dict[str, Plan | Infeasible] = {}
    mistakes = []
    for name, settings in wanted.items():
        try:
            found[name] = _planned(file, settings)
        except Infeasible as error:
            found[name] = error
        except GymRMError as error:
            if not found:  # the request itself is wrong
                raise
            mistakes.append(f"{name}: {error}")
    first = found["as it is"]
    if isinstance(first, Plan):
        _write(first, written)
    if as_json:
        values = {
            name: each.to_dict() if isinstance(each, Plan) else {"reasons": each.reasons, "fixes": each.fixes}
            for name, each in found.items()
        }
        typer.echo(json.dumps(values, indent=1))
    else:
        rows = {name: each if isinstance(each, Plan) else _short(each) for name, each in found.items()}
        console.print(compare_table(rows))
    if mistakes:
        raise ConfigError("\n".join(mistakes))
    if not isinstance(first, Plan):
        raise typer.Exit(1)


def _short(error: Infeasible) -> str:
    others = f" (and {len(error.reasons) - 1} more)" if len(error.reasons) > 1 else ""
    fix = f" It fits with {shlex.join(error.fixes[0])}" if error.fixes else ""
    return f"does not fit: {error.reasons[0]}{others}{fix}"
