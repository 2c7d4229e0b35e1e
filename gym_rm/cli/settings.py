"""`gym-rm settings`: the options of scorers, and the settings of training runs and of plans."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer
from click import HelpFormatter

from gym_rm.cli.console import WIDTH
from gym_rm.config import Config, Setting, settings_of


def settings(
    of: Annotated[
        Literal["scorer", "train", "plan"],
        typer.Argument(metavar="scorer|train|plan", help="Options of a scorer, or settings of gym-rm train or plan."),
    ] = "scorer",
) -> None:
    """List the options of scorers, or the settings of gym-rm train or gym-rm plan, with their types and defaults."""
    sections = {"scorer": scorer_options, "train": training_settings, "plan": plan_settings}
    formatter = HelpFormatter(width=WIDTH)
    for title, listed in sections[of]().items():
        with formatter.section(title):
            formatter.write_dl([(each.name, f"{each.text} [{each.type}; default: {each.default}]") for each in listed])
    typer.echo(formatter.getvalue().strip())


def scorer_options() -> dict[str, list[Setting]]:
    """Return the options of reward models, and of each kind of reward model, by title."""
    # Imported here, as below, because importing torch is slow.
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


def training_settings() -> dict[str, list[Setting]]:
    """Return the settings of a training run, by title."""
    from gym_rm.training.reward_model_settings import RewardModelTraining

    fields = RewardModelTraining.model_fields
    groups: dict[str, Any] = {name: field.annotation for name, field in fields.items()}
    groups = {name: schema for name, schema in groups.items() if hasattr(schema, "model_fields")}
    own = [setting for setting in settings_of(RewardModelTraining) if setting.name not in groups]
    return {"NAME=VALUE": own, **{f"{name}.NAME=VALUE": settings_of(schema) for name, schema in groups.items()}}


def plan_settings() -> dict[str, list[Setting]]:
    """Return the settings of a request for a plan, and of a simulation, by title."""
    from gym_rm.planning import request_settings as schemas
    from gym_rm.planning.simulation import SimulationSettings

    groups: dict[str, type[Config]] = {
        "cluster.": schemas.ClusterSettings,
        "policy., critic., reward_training.": schemas.TrainingSettings,
        "generation.": schemas.GenerationSettings,
        "reward_models.YOUR_NAME., reference.": schemas.RewardModelSettings,
        "workload.": schemas.WorkloadSettings,
        "simulation.": SimulationSettings,
    }
    prefixes = [name.strip(" .").partition(".")[0] for title in groups for name in title.split(",")]
    own = [setting for setting in settings_of(schemas.PlanSettings) if setting.name not in prefixes]
    short = Setting("gpus, nodes, gpus_per_node, gpu, memory", "gpus=16", "none", "Short names for the cluster's")
    return {"NAME=VALUE": [short, *own], **{f"{name}NAME=VALUE": settings_of(each) for name, each in groups.items()}}
