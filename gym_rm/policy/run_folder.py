"""The folder of a GRPO run: metrics, conversations, checkpoints and the best policy, and what a run resumes from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from accelerate.utils import broadcast_object_list
from torch import Tensor

from gym_rm.checks import load_function
from gym_rm.engine.loading.revision import revision_of_model
from gym_rm.errors import ConfigError
from gym_rm.plain_values import to_plain
from gym_rm.policy.grpo_settings import GRPOSettings
from gym_rm.policy.learner import Learner
from gym_rm.policy.rollouts import Rollout, position_consistent, rollout_metrics
from gym_rm.policy.rollouts_ahead import KeptCompletions, completion_tensors, completions_of
from gym_rm.policy.trained_policy import EMBEDDED
from gym_rm.reports.runs import Phase, Run, RunWriter, read_run
from gym_rm.scorer import Scorer, provenance_of
from gym_rm.scorers.function import revision_of_function
from gym_rm.training.run_folder import RunFolder
from gym_rm.types import Prompt

LOGGED_GROUPS = 4  # groups of a step whose conversations are written


class GRPORunFolder(RunFolder):
    """The folder of a GRPO run; see `RunFolder`.

    Args:
        settings: settings of the run, without `null` where there is a default.
        learner: the policy, which gets the state of the last checkpoint.
        scorer: the reward model; a run is resumed only with the same, and with the same prompts.
        prompts: training and held-out prompts.
        kept: completions of the step that is played ahead; it gets those of the last checkpoint.

    Attributes:
        measured: step after which the held-out prompts were answered last.

    Raises:
        ConfigError: the folder is used by another process, or has a run with other settings.
    """

    learner: Learner

    def __init__(
        self,
        settings: GRPOSettings,
        learner: Learner,
        scorer: Scorer,
        prompts: tuple[Sequence[Prompt], Sequence[Prompt]],
        kept: KeptCompletions,
    ) -> None:
        answers = any(prompt.answer is not None for prompt in prompts[1])
        self.settings, self.metric = settings, settings.checkpoint.metric or ("accuracy" if answers else "reward_mean")
        if self.metric == "accuracy" and not answers:
            raise ConfigError("checkpoint.metric='accuracy': the held-out prompts have no answers; use reward_mean.")
        made, plain = provenance_of(scorer), settings.model_dump(mode="json")
        identity = {
            **curve_settings(settings),
            "contents of prompts": _digest(prompts),
            "reward model": None if made is None else to_plain(made.identity),
            **broadcast_object_list([_revisions(settings) if learner.is_main else {}])[0],
        }
        super().__init__(plain, learner, name="grpo", identity=identity, num_steps=settings.steps)
        self.measured: int = self.restored.get("measured", self.step)
        self._kept = kept
        kept.by_key |= completions_of(self.restored_tensors, learner.start.tokenizer)
        self.writer: RunWriter | None = None
        if learner.is_main:
            changed = settings.model_dump(mode="json", exclude_defaults=True)
            replace = not self.restored
            self.writer = RunWriter(self.folder, plain, changed=changed, resume_after=self.step, replace=replace)

    def history(self) -> Run | None:
        """Return what a run that is resumed has written so far; None for a new run, and on other ranks."""
        return read_run(self.folder) if self.step and self.learner.is_main else None

    def log_step(
        self, rollouts: Sequence[Rollout], advantages: Sequence[float], metrics: Mapping[str, Any], *, seconds: float
    ) -> dict[str, Any]:
        """Write and return the metrics of a step, and now and then its first conversations.

        The rollouts are those of all ranks, with the advantage of each, and the metrics those of the updates.
        """
        values: dict[str, Any] = {**rollout_metrics(rollouts), **metrics}
        if self.settings.advantage.dynamic_sampling:
            values["extra_batches"] = max(rollout.attempt for rollout in rollouts)
        if self.settings.sampling.steps_ahead:
            values["lag"] = sum(rollout.lag for rollout in rollouts) / len(rollouts)
        values["tokens_per_second"] = sum(rollout.num_tokens for rollout in rollouts) / seconds
        self._log("train", values)
        if self.is_due(self.settings.eval.every):
            count = LOGGED_GROUPS * self.settings.env.group_size
            for rollout, advantage in zip(rollouts[:count], advantages[:count], strict=True):
                self._add_conversation("train", rollout, advantage)
        return values

    def log_held_out(self, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        """Write and return the metrics of the rollouts of a measurement, and keep the policy if it is the best."""
        metrics, self.measured = rollout_metrics(rollouts), self.step
        if (consistent := position_consistent(rollouts)) is not None:
            metrics["position_consistent"] = consistent
        self._log("held_out", metrics)
        for rollout in rollouts:
            self._add_conversation("held_out", rollout, None)
        value = metrics.get(self.metric)
        if self.step and value is not None and self.settings.checkpoint.keep_best:
            self.keep_if_best(value, self.learner.export)
        return metrics

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: also when the policy was measured last."""
        return {**super().state(), "measured": self.measured}

    def tensors(self) -> dict[str, Tensor]:
        """Return the completions that are kept, of all ranks; all ranks must call this."""
        every = self.learner.gathered([self._kept.by_key])
        return completion_tensors({key: each for of_rank in every for key, each in of_rank.items()})

    def finish(self) -> None:
        """Write the last policy."""
        self.learner.export(self.folder / "final")

    def _log(self, phase: Phase, metrics: Mapping[str, Any]) -> None:
        """Write a line, and send its numbers to the trackers."""
        if self.writer is not None:
            self.writer.add_metrics(phase, self.step, metrics)
        self.track(phase, metrics)

    def _add_conversation(self, phase: Phase, rollout: Rollout, advantage: float | None) -> None:
        if self.writer is not None:
            self.writer.add_conversation(
                self.step,
                rollout.conversation,
                prompt_id=rollout.prompt_id,
                reward=rollout.reward,
                right=rollout.right,
                phase=phase,
                group=rollout.group if phase == "train" else None,
                advantage=advantage,
                tokens=rollout.num_tokens,
                lag=rollout.lag if phase == "train" and self.settings.sampling.steps_ahead else None,
                finished=rollout.finished,
                components=dict(rollout.components) or None,
                verdicts=dict(rollout.verdicts) or None,
                step_rewards=[[*turn.step_rewards] for turn in rollout.turns] if len(rollout.step_rewards) else None,
                step_ends=[[*turn.step_ends] for turn in rollout.turns] if len(rollout.step_rewards) else None,
            )


def curve_settings(settings: GRPOSettings) -> dict[str, Any]:
    """Return the settings that must be the same to resume a run: all that change its curve."""
    others: dict[str, Any] = dict.fromkeys(("output", "report_to", "threads", "checkpoint"), True)
    others["sampling"] = {"server", "server_key", "timeout", "max_retries", "weights_folder"}
    others["optimizer"] = {"max_num_batched_tokens", "fsdp"}
    values = settings.model_dump(mode="json", exclude={**others, "policy": {"gradient_checkpointing"}})
    if settings.optimizer.schedule == "constant":
        values.pop("steps")  # a finished run can be resumed with more steps
    return values


def _digest(prompts: tuple[Sequence[Prompt], Sequence[Prompt]]) -> str:
    contents = [[[getattr(prompt, each.name) for each in fields(Prompt)] for prompt in part] for part in prompts]
    return hashlib.sha256(json.dumps(to_plain(contents), sort_keys=True).encode()).hexdigest()


def _revisions(settings: GRPOSettings) -> dict[str, str | None]:
    """Return the revisions of what the settings name: files can change under the same name.

    The first weights of the policy are those of the reference.
    """
    env = settings.env
    revisions = {"files of policy.model": revision_of_model(settings.policy.model or EMBEDDED)}
    model = env.respond.get("model") if isinstance(env.respond, Mapping) else None
    model = model.get("path") if isinstance(model, Mapping) else model
    if isinstance(model, str) and not model.startswith(("http://", "https://")):
        revisions["files of env.respond"] = revision_of_model(model)
    for name in [env.respond, *(env.tools or [])]:
        if isinstance(name, str) and ":" in name:
            revisions[f"source of {name}"] = revision_of_function(load_function("env", name))
    return revisions
