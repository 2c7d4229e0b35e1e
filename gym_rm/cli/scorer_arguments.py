"""The arguments that name a scorer, the same for all commands, and how they load it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

import typer

import gym_rm
from gym_rm.cli.console import quiet_loading, warn
from gym_rm.config import override_values
from gym_rm.documents import parse_json
from gym_rm.errors import ConfigError
from gym_rm.scorer import Scorer

MODEL_HELP = "Folder, hub id, URL, module:function, file.py:function, or JSON for load_scorer. Default: embedded."
RewardModel: TypeAlias = Annotated[str | None, typer.Option(help=MODEL_HELP)]
Options: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=VALUE", help="An option of the scorer, see gym-rm settings; may be repeated."),
]
Columns: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--column", metavar="NAME=COLUMN", help="Column of a field, as in prompt=Question; may be repeated."),
]
BatchSize: TypeAlias = Annotated[int, typer.Option(min=1, help="Number of conversations that are scored together.")]

# Options that do not change a score: where the model runs, in how many copies, with which budget.
PLACEMENT = ("device", "executor", "max_num_batched_tokens", "batch_timeout", "num_replicas")


@dataclass(frozen=True, kw_only=True)
class ScorerArguments:
    """A scorer as named on the command line.

    Attributes:
        model: as `load_scorer` takes it.
        options: options of the scorer.
    """

    model: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, model: str | None, option: list[str] | None = None) -> ScorerArguments:
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
        return cls(model=named, options=override_values(option or []))

    @property
    def settings(self) -> dict[str, Any]:
        """What affects the scores, without the key of a server."""
        of_scores = {name: value for name, value in self.options.items() if name not in PLACEMENT}
        return {"reward_model": without_key(self.model), **without_key(of_scores)}

    def load(self, *, warn_if_embedded: bool = True) -> Scorer:
        """Load the scorer."""
        if not (isinstance(self.model, str) and ":" in self.model):  # a function may not need transformers
            quiet_loading()
        scorer: Scorer = gym_rm.load_scorer(self.model, **self.options)
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
