"""`gym-rm plan`: where every model goes, whether it fits, and how long a step takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer
from rich.console import Console

from gym_rm.cli.console import fail, stderr
from gym_rm.cli.plan_requests import (
    divide_arguments,
    divide_change,
    divide_simulation,
    holds_plan,
    is_example,
    read_request,
)
from gym_rm.config import Config, Setting, settings_of
from gym_rm.errors import ConfigError, GymRMError
from gym_rm.planning import request_settings as schemas
from gym_rm.planning.plan import Plan, Role
from gym_rm.planning.request_settings import PlanSettings

PICTURES, FILES = (".svg", ".png"), (".json", ".yaml", ".yml")
WIDTH = 120  # of tables in a file or pipe
HINT = """\
This is an example: GRPO of an 8B policy with an 8B reward model on 8 GPUs. Change it by settings:
  gym-rm plan gpus=16 gpu=h200_sxm
Or write down what you have and train, and plan that with gym-rm plan request.yaml:
  cluster: {gpu: h100_sxm, nodes: 1, gpus_per_node: 8}
  policy: {model: Qwen/Qwen3-8B}
  reward_models: {helpful: {model: Skywork/Skywork-Reward-V2-Llama-3.1-8B}}
  workload: {num_prompts: 64, group_size: 8, prompt_tokens: 512, reply_tokens: {p50: 400, p95: 1500, max: 2048}}
gym-rm plan --help lists the settings; --gpus and --models list what is known; -o plan.png draws a picture."""

Reasons: TypeAlias = list[tuple[str, str]]  # what does not fit, each with its fix


def plan_sections() -> Mapping[str, Sequence[Setting]]:
    """Return the settings of a request and of a simulation, for the help page."""
    from gym_rm.planning.simulation import SimulationSettings

    groups: dict[str, type[Config]] = {
        "cluster.": schemas.ClusterSettings,
        "policy., critic., reward_training.": schemas.TrainingSettings,
        "generation.": schemas.GenerationSettings,
        "reward_models.YOUR_NAME., reference.": schemas.InferenceSettings,
        "workload.": schemas.WorkloadSettings,
        "simulation.": SimulationSettings,
    }
    prefixes = [name.strip(" .").partition(".")[0] for title in groups for name in title.split(",")]
    own = [setting for setting in settings_of(PlanSettings) if setting.name not in prefixes]
    short = Setting("gpus, nodes, gpus_per_node, gpu, memory", "gpus=16", "none", "Short names for the cluster's")
    return {"NAME=VALUE": [short, *own], **{f"{name}NAME=VALUE": settings_of(each) for name, each in groups.items()}}


def plan(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="REQUEST.yaml NAME=VALUE",
            help="File with the cluster, the models and the work of a step, and settings that change it.",
        ),
    ] = None,
    output: Annotated[
        list[Path] | None,
        typer.Option(
            "--output", "-o", help="Write the plan (.json, .yaml) or its picture (.svg, .png). May be repeated."
        ),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Show two or more requests or plans (A.yaml B.yaml ...) side by side.")
    ] = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Also plan with this change, such as gpus=16. May be repeated."),
    ] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Simulate many steps, with failures; simulation.NAME=VALUE sets how.")
    ] = False,
    library: Annotated[
        Literal["verl", "openrlhf", "nemo-rl", "areal", "trl", "ray"] | None,
        typer.Option("--for", help="Print the plan as settings of this library, or as placement groups of Ray."),
    ] = None,
    sources: Annotated[bool, typer.Option("--sources", help="List where every number is from.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    gpus: Annotated[bool, typer.Option("--gpus", help="List the known kinds of GPUs.")] = False,
    models: Annotated[bool, typer.Option("--models", help="List the known models.")] = False,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine, for plans with cluster.gpu=here.")
    ] = False,
) -> None:
    """Plan where every model goes, whether it fits, how long a step takes and what limits it.

    Nothing is loaded: sizes come from configurations. REQUEST.yaml has the cluster, the models and the work of a step;
    configs/plan has examples, and docs/planning.md explains them.

    \b
    gym-rm plan                                      an example
    gym-rm plan request.yaml -o plan.json -o plan.png
    gym-rm plan request.yaml --what-if gpus=16 --what-if gpu=h200_sxm
    gym-rm plan --compare a.yaml b.yaml
    gym-rm plan request.yaml --simulate simulation.gpu_hours=5000

    Exit codes: 0 a plan was made; 1 nothing fits, or a file cannot be written; 2 a mistake in the request; 130
    interrupted.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    try:
        files, overrides = divide_arguments(arguments or [])
        if gpus or models or calibrate:
            _lists(console, gpus=gpus, models=models, calibrate=calibrate)
            if not arguments:
                return
        written = _outputs(output or [], files, several=compare)
        if compare:
            _compare(console, files, overrides, as_json=as_json)
            return
        if len(files) > 1:
            raise ConfigError(
                f"one request at a time, got {', '.join(map(str, files))}; pass --compare to see them side by side."
            )
        file = files[0] if files else None
        if what_if:
            _what_if(console, file, overrides, what_if, written, as_json=as_json)
        elif simulate:
            _simulate(console, file, overrides, written, as_json=as_json)
        else:
            request = read_request(file, overrides)
            found = request if isinstance(request, Plan) else make_plan(request)
            _write(found, written)
            if as_json:
                typer.echo(json.dumps(found.to_dict(), indent=1))
            elif library is not None:
                _print_flags(found, library, request)
            else:
                _print_plan(console, found, sources=sources)
                if is_example(file, overrides):
                    stderr.print(HINT, style="dim", markup=False)
        for path in written:
            stderr.print(f"wrote {path}", markup=False)
    except KeyboardInterrupt:
        stderr.print("interrupted.")
        raise typer.Exit(130) from None
    except (GymRMError, OSError) as error:
        _stop(error)


def make_plan(settings: PlanSettings) -> Plan:
    """Return the best plan of a request. The import is here because `--help` needs none of it."""
    from gym_rm.planning.planner import plan as search

    found: Plan = search(settings)
    return found


def _stop(error: Exception) -> None:
    reasons = _reasons_of(error)
    if reasons is not None:
        from gym_rm.reports.plan_tables import violations_text

        fail(ConfigError(violations_text(reasons)), code=1)
    fail(error, code=2 if isinstance(error, ConfigError) else 1)


def _reasons_of(error: Exception) -> Reasons | None:
    """Return what does not fit, each with its fix; None for another error."""
    violations = getattr(error, "violations", None)
    return None if violations is None else [(each.text, each.fix) for each in violations]


# --- one plan --------------------------------------------------------------------------------------------------------


def _outputs(paths: Sequence[Path], files: Sequence[Path], *, several: bool) -> list[Path]:
    """Check the outputs before the plan is made."""
    for path in paths:
        if path.suffix not in (*PICTURES, *FILES):
            raise ConfigError(f"-o must end in {', '.join((*FILES, *PICTURES))}, got {str(path)!r}.")
        if any(path.resolve() == file.resolve() for file in files):
            raise ConfigError(f"-o {path} would replace the request; choose another name.")
    if paths and several:
        raise ConfigError("-o writes one plan, and --compare has several; plan each request by itself to write it.")
    return list(paths)


def _write(found: Plan, paths: Sequence[Path]) -> None:
    for path in paths:
        if path.suffix in PICTURES:
            from gym_rm.reports.plan_pictures import plot_plan

            plot_plan(found, path)
        else:
            found.save(path)


def _print_plan(console: Console, found: Plan, *, sources: bool) -> None:
    from gym_rm.reports.plan_tables import plan_report

    console.print(plan_report(found, sources=sources))


def _print_flags(found: Plan, library: str, request: PlanSettings | Plan) -> None:
    from gym_rm.planning.exports import flags, ray_bundles

    if library == "ray":
        typer.echo(json.dumps(ray_bundles(found), indent=1))
        return
    try:
        shown = flags(found, library, workload=request.workload if isinstance(request, PlanSettings) else None)
    except ConfigError as error:
        if separate := _separate_pools(found):
            error.add_note(f"A plan whose reward models have GPUs of their own: add {separate!r} to the command.")
        raise
    typer.echo(shown.text)


def _separate_pools(found: Plan) -> str | None:
    """Return the setting with which reward models share no GPU with others; None if they share none."""
    pools = [pool.components for pool in found.pools]
    rewards = [each.name for pool in pools for each in pool if each.role is Role.REWARD_MODEL]
    others = [[each.name for each in pool if each.role is not Role.REWARD_MODEL] for pool in pools]
    if not any(len(pool) > 1 and any(each.name in rewards for each in pool) for pool in pools):
        return None
    lists = [f"[{', '.join(names)}]" for names in (*others, *([name] for name in rewards)) if names]
    return f"pools=[{', '.join(lists)}]"


def _simulate(
    console: Console, file: Path | None, overrides: Sequence[str], written: Sequence[Path], *, as_json: bool
) -> None:
    from gym_rm.planning.simulation import simulate
    from gym_rm.reports.plan_tables import simulation_table

    settings, others = divide_simulation(overrides)
    request = read_request(file, others)
    found = request if isinstance(request, Plan) else make_plan(request)
    _write(found, written)
    result = simulate(found, settings)
    if as_json:
        typer.echo(json.dumps({"plan": found.to_dict(), "simulation": asdict(result)}, indent=1))
    else:
        console.print(simulation_table(found, result))


# --- several plans ---------------------------------------------------------------------------------------------------


def _compare(console: Console, files: Sequence[Path], overrides: Sequence[str], *, as_json: bool) -> None:
    if len(files) < 2:
        raise ConfigError(f"--compare needs two or more requests or plans, got {len(files)}.")
    stems = [file.stem for file in files]
    names = stems if len(set(stems)) == len(stems) else [str(file) for file in files]
    found = {name: _try(file, [] if holds_plan(file) else overrides) for name, file in zip(names, files, strict=True)}
    _print_several(console, found, as_json=as_json, side_by_side=True)
    if not any(isinstance(each, Plan) for each in found.values()):
        raise typer.Exit(1)


def _what_if(
    console: Console,
    file: Path | None,
    overrides: Sequence[str],
    changes: Sequence[str],
    written: Sequence[Path],
    *,
    as_json: bool,
) -> None:
    found = {"as it is": _try(file, overrides)}
    for change in changes:
        found[change] = _try(file, [*overrides, *divide_change(change)])
    base = found["as it is"]
    if isinstance(base, Plan):
        _write(base, written)
    _print_several(console, found, as_json=as_json, side_by_side=False)
    if not isinstance(base, Plan):
        raise typer.Exit(1)


def _try(file: Path | None, overrides: Sequence[str]) -> Plan | Reasons:
    """Return a plan, or the reasons why nothing fits."""
    request = read_request(file, overrides)
    try:
        return request if isinstance(request, Plan) else make_plan(request)
    except GymRMError as error:
        reasons = _reasons_of(error)
        if reasons is None:
            raise
        return reasons


def _print_several(console: Console, found: dict[str, Plan | Reasons], *, as_json: bool, side_by_side: bool) -> None:
    from gym_rm.reports.plan_comparison import compare_table, placements

    if as_json:
        values: dict[str, Any] = {}
        for name, each in found.items():
            reasons = [] if isinstance(each, Plan) else [{"text": text, "fix": fix} for text, fix in each]
            values[name] = each.to_dict() if isinstance(each, Plan) else {"violations": reasons}
        typer.echo(json.dumps(values, indent=1))
        return
    shown = {name: each if isinstance(each, Plan) else _short(each) for name, each in found.items()}
    console.print(compare_table(shown, "Plans side by side" if side_by_side else "What if"))
    if side_by_side:
        console.print(placements(shown))


def _short(reasons: Reasons) -> str:
    others = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    text, fix = reasons[0]
    return f"does not fit: {text}{others}{f' Fix: {fix}' if fix else ''}"


# --- lists -----------------------------------------------------------------------------------------------------------


def _lists(console: Console, *, gpus: bool, models: bool, calibrate: bool) -> None:
    from gym_rm.reports.hardware_tables import devices_table, measured_table, models_table

    if gpus:
        console.print(devices_table())
    if models:
        console.print(models_table())
    if calibrate:
        from gym_rm.planning.hardware import calibration

        stderr.print("measuring for about ten seconds ...")
        device = calibration.calibrate()
        console.print(measured_table(calibration.calibration_rows(device), f"Measured on this machine: {device.name}"))
        stderr.print("stored; plans with cluster.gpu=here use these numbers.", markup=False)
