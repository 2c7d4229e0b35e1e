"""The arguments that name a scorer, the same for all commands, and how they load it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

import typer

import gym_rm
from gym_rm.checks import MOST_THREADS
from gym_rm.cli.console import quiet_loading, warn
from gym_rm.config import Setting, override_values, settings_of
from gym_rm.documents import parse_json
from gym_rm.errors import ConfigError
from gym_rm.scorer import Scorer

MODEL_HELP = "Folder, hub id, URL, module:function, file.py:function, or JSON for load_scorer. Default: embedded."
RewardModel: TypeAlias = Annotated[str | None, typer.Option(help=MODEL_HELP)]
Options: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="An option of the scorer (--help-all); may be repeated."),
]
Columns: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--column", metavar="NAME=COLUMN", help="Column of a field, as in prompt=Question; may be repeated."),
]
BatchSize: TypeAlias = Annotated[int, typer.Option(min=1, help="Number of conversations that are scored together.")]
Threads: TypeAlias = Annotated[
    int | None,
    typer.Option(
        min=1, max=MOST_THREADS, help="CPU threads. Default: 1 for a small model, else the number that torch chooses."
    ),
]

# Below this hidden size, the threads of a matrix product wait for each other longer than they compute.
HIDDEN_SIZE_FOR_THREADS = 512
# Options that do not change a score: where the model runs, in how many copies, with which budget.
PLACEMENT = ("device", "executor", "max_num_batched_tokens", "batch_timeout", "num_replicas")

# Options of reward models that help pages name; --help-all has all.
USUAL = (
    "kind", "dtype", "device", "max_num_batched_tokens", "quantization", "num_replicas", "tensor_parallel_size",
    "chat_template", "max_length", "overlong",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class ScorerArguments:
    """A scorer as named on the command line.

    Attributes:
        model: as `load_scorer` takes it.
        options: options of the scorer.
        threads: CPU threads of torch; None to choose by the size of the model.
    """

    model: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    threads: int | None = None

    @classmethod
    def parse(
        cls, model: str | None, option: list[str] | None = None, *, threads: int | None = None
    ) -> ScorerArguments:
        """Read the arguments; a model that begins with a brace is JSON.

        Raises:
            ConfigError: the model is a malformed JSON object, or an option is not `NAME=VALUE`.
        """
        named: Any = model
        try:
            if model is not None and model.startswith("{"):
                named = parse_json(model)
        except ValueError as error:
            raise ConfigError(f"the reward model is not valid JSON: {error}: {model!r}.") from error
        return cls(model=named, options=override_values(option or []), threads=threads)

    @property
    def settings(self) -> dict[str, Any]:
        """What affects the scores, without the key of a server."""
        of_scores = {name: value for name, value in self.options.items() if name not in PLACEMENT}
        return {"reward_model": without_key(self.model), **without_key(of_scores)}

    def load(self, *, warn_if_embedded: bool = True) -> Scorer:
        """Load the scorer.

        More threads than a model was loaded with can change the last bits of its scores, so a number is set before.
        """
        if self.threads is not None:
            set_threads(self.threads)
        if not (isinstance(self.model, str) and ":" in self.model):  # a function may not need transformers
            quiet_loading()
        scorer: Scorer = gym_rm.load_scorer(self.model, **self.options)
        if self.threads is None and is_small(scorer):
            set_threads(1)
        if warn_if_embedded:
            warn_of_embedded(scorer)
        return scorer


def warn_of_embedded(scorer: Scorer) -> None:
    """Print a warning if the scorer is the embedded reward model."""
    if getattr(getattr(scorer, "provenance", None), "model", None) == "embedded":
        warn(
            "the scores come from the small reward model that is part of the package. It only rates answers to "
            "questions like 'Which is the largest, 12, 30 or 27?', and its scores of other texts mean nothing. Pass "
            "--reward-model with a folder, a hub id or module:function."
        )


def without_key(settings: Any) -> Any:
    """Return the settings of a scorer without the key of a server."""
    if isinstance(settings, Mapping):
        return {name: without_key(value) for name, value in settings.items() if name != "key"}
    if isinstance(settings, list):
        return [without_key(value) for value in settings]
    return settings


def set_threads(number: int) -> None:
    """Set the number of CPU threads of torch."""
    import torch  # imported here because the import is slow

    torch.set_num_threads(number)


def is_small(scorer: Scorer) -> bool:
    """Return whether the scorer has models in this process, and one thread is fastest for all of them."""
    sizes = [getattr(model.config, "hidden_size", HIDDEN_SIZE_FOR_THREADS) for model in _models_of(scorer)]
    return bool(sizes) and max(sizes) < HIDDEN_SIZE_FOR_THREADS


def _models_of(scorer: Any) -> Iterator[Any]:
    """Yield the models of a scorer and of the scorers that it combines."""
    yield from getattr(getattr(scorer, "executor", None), "models", ())
    for part in (getattr(scorer, "scorer", None), *getattr(scorer, "scorers", {}).values()):
        if part is not None:
            yield from _models_of(part)


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
