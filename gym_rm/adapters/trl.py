"""TRL: a scorer as one of `reward_funcs`, a rollout function that steps the environment, and its tools for TRL's loop.

The reward function does not import TRL. It works with `GRPOTrainer`, `RLOOTrainer` and online DPO.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray

from gym_rm.checks import one_of
from gym_rm.data.messages import join_reply, prompt_messages
from gym_rm.data.policy_texts import PolicyTexts
from gym_rm.data.prompts import load_prompts, prompt_of_columns
from gym_rm.data.rows import Source, without_filled
from gym_rm.engine.text.policy_renderer import PolicyRenderer
from gym_rm.engine.text.thinking import Thinking
from gym_rm.envs.infos import Infos, Observations
from gym_rm.envs.spaces import MAX_LENGTH
from gym_rm.envs.tools.tool import Tool, ToolOptions
from gym_rm.envs.tools.toolbox import Reply, Toolbox
from gym_rm.envs.vector import RewardVectorEnv
from gym_rm.errors import ConfigError, RowError, logger
from gym_rm.scorer import ScorerLike, try_score
from gym_rm.scorers.load import load_scorer
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Message, Prompt

Rewards = list[float | None]

# Keywords that TRL and rollout functions pass to reward functions besides the columns of the data set.
NOT_COLUMNS = frozenset({"completion_ids", "trainer_state", "environments", "log_extra"})
NOT_COLUMNS |= {"env_reward", "env_error", "env_dialogue"}


class RewardModelReward:
    """A scorer as one of TRL's `reward_funcs`: one score call per batch, None for a completion without a score.

    Prompts and completions may be messages or plain texts; a text prompt becomes one user message. The columns of the
    data set reach the scorer as `Prompt`s, so verifiers work as well as reward models. TRL logs `rewards/{name}/mean`.
    This class also logs `{name}/unscored`, `{name}/truncated_tokens` and `{name}/{component}` for each component of the
    reward, and `{name}/error` in the table of completions. After a rollout function it scores `env_dialogue`.

    Args:
        reward_model, options: arguments of `load_scorer`.
        name: name of the reward in TRL's metrics.
        answer_column: column of the data set with the reference answer.
        on_unscored: result for a completion without a score. `"none"` returns None, which GRPO and RLOO leave out of
            the group; `"raise"` raises ScoringError. None is `"raise"` in a trainer that would count None as zero, such
            as online DPO, and else `"none"`.

    Example:
        >>> reward = RewardModelReward(lambda conversations: [len(c[-1]["content"]) for c in conversations])
        >>> reward(prompts=["2 + 2?"], completions=["four"])
        [4.0]
    """

    def __init__(
        self,
        reward_model: ScorerLike = None,
        *,
        name: str = "reward_model",
        answer_column: str = "answer",
        on_unscored: str | None = None,
        **options: Any,
    ) -> None:
        self.on_unscored = one_of("on_unscored", on_unscored, (None, "none", "raise"))
        self.answer_column = answer_column
        self.scorer = load_scorer(reward_model, **options)
        self.__name__ = name

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        *,
        log_metric: Callable[[str, float], None] | None = None,
        **columns: Any,
    ) -> Rewards:
        """Return the rewards of N completions.

        Raises:
            ConfigError: a text prompt is already rendered by a chat template, or a rollout function gives no dialogues.
            ScoringError: a completion has no score, and `on_unscored` is `"raise"`.
        """
        scores = self._score(prompts, completions, columns)
        # Those of TRL's trainers that leave a missing reward out of the group pass `log_metric`, the others do not.
        counts_as_zero = "trainer_state" in columns and log_metric is None
        if self.on_unscored == "raise" or (self.on_unscored is None and counts_as_zero):
            scores.raise_for_errors()
        _report_errors(f"{self.__name__}/error", scores.errors, columns.get("log_extra"))
        if log_metric is not None:
            log_metric(f"{self.__name__}/unscored", float(len(scores.failed_rows)))
            log_metric(f"{self.__name__}/truncated_tokens", float(scores.truncated_tokens.sum()))
            for name, values in scores.components.items():
                if np.isfinite(values).any():
                    log_metric(f"{self.__name__}/{name}", float(np.nanmean(values)))
        return scores.rewards_or_none()

    def _score(self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Any]) -> Scores:
        size, dialogues = len(prompts), []
        if "env_dialogue" in columns:
            dialogues = [prompt_messages(dialogue, "env_dialogue") for dialogue in columns["env_dialogue"]]
        elif "env_reward" in columns:
            raise ConfigError(
                "the rollout function returns `env_reward` without `env_dialogue`: its completions may hold results of "
                "tools and later turns, which are no reply. Let it return the messages of each dialogue up to its last "
                "reply as `env_dialogue`, or train on `env_reward` alone."
            )
        listed = {
            name: values.tolist() if hasattr(values, "tolist") else values
            for name, values in columns.items()
            if name not in NOT_COLUMNS
        }
        columns = {
            name: values for name, values in listed.items() if isinstance(values, list | tuple) and len(values) == size
        }
        conversations, rows = [], []
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            conversations.append(dialogues[row] if dialogues else join_reply(prompt, completion))
            row_columns = without_filled({name: values[row] for name, values in columns.items()})
            rows.append(prompt_of_columns(prompt_messages(prompt), row_columns, None, answer_column=self.answer_column))
        return try_score(self.scorer, conversations, rows)


def _report_errors(column: str, errors: Sequence[RowError | None], log_extra: Callable[..., None] | None) -> None:
    """Log why completions have no reward. TRL's table of completions needs the column in every batch."""
    for row, error in enumerate(errors):
        if error is not None:
            logger.warning("completion %d has no reward: %s", row, error)
    if log_extra is not None:
        log_extra(column, [str(error or "") for error in errors])


@dataclass(slots=True)
class Rollout:
    """Tokens and reward of one dialogue.

    Attributes:
        prompt_ids: token ids of the prompt.
        completion_ids: token ids after the prompt, of replies, tool results and user messages.
        mask: for each completion token, 1 if the policy generated it, else 0.
        logprobs: log-probability of each completion token, 0.0 where the mask is 0.
        reward: sum of the rewards of all replies, None if a reply has no score.
        error: why the first reply without a score has none.
        dialogue: the messages up to the last reply.
    """

    prompt_ids: list[int]
    completion_ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reward: float | None = 0.0
    error: RowError | None = None
    dialogue: Conversation = field(default_factory=list)

    def add(self, ids: Sequence[int], *, by_policy: bool, logprobs: Sequence[float] | None = None) -> None:
        """Append tokens to the completion."""
        self.completion_ids += ids
        self.mask += [int(by_policy)] * len(ids)
        self.logprobs += logprobs if logprobs is not None else [0.0] * len(ids)


class EnvironmentRollout:
    """A `rollout_func` for `GRPOTrainer` that steps `RewardModel-v0`; the environment answers calls and plays the user.

    The completion of a dialogue holds everything after the prompt; results of tools and the user's turns in it are
    masked out of the loss. Sampled tokens stay as they are, also where the template would strip earlier thinking.
    Reward functions get more columns: `env_reward` (sum of the rewards of all replies, None if a reply has no score),
    `env_error` (why it has none), `env_dialogue` (the messages up to the last reply), `prompt_id` and `answer`. Pass
    `reward_funcs=rollout.env_reward` to train on `env_reward`; `RewardModelReward` scores `env_dialogue`.

    Args:
        prompts: argument of `load_prompts`. The trainer's data set has the same prompts, as in `dataset_rows` or texts.
        reward_model: argument of `load_scorer`.
        settings: keywords of `RewardModel-v0` (`max_turns`, `respond`, `tools`, ...).

    Example:
        >>> rollout = EnvironmentRollout(["2 + 2?"], reward_model=lambda conversations: [1.0] * len(conversations))
        >>> rollout.dataset_rows
        [{'prompt': [{'role': 'user', 'content': '2 + 2?'}]}]
    """

    def __init__(self, prompts: Source = None, *, reward_model: ScorerLike = None, **settings: Any) -> None:
        refused = sorted({"num_envs", "group_size", "autoreset_mode", "fallback_reward"} & settings.keys())
        if refused:
            raise ConfigError(f"settings {refused} are determined by the trainer's batch; leave them out.")
        loaded = load_prompts(prompts)
        self._prompts = {_key(prompt.messages): prompt for prompt in loaded}
        if len(self._prompts) < len(loaded):
            raise ConfigError(
                "prompts must have different messages, because the trainer identifies a prompt by its messages; "
                f"{len(loaded) - len(self._prompts)} of {len(loaded)} prompts have the same messages as another."
            )
        self._scorer = load_scorer(reward_model)
        self._settings = settings

    @property
    def dataset_rows(self) -> list[dict[str, Any]]:
        """Rows with the messages of a prompt in `prompt`, for `datasets.Dataset.from_list`."""
        return [{"prompt": [dict(message) for message in prompt.messages]} for prompt in self._prompts.values()]

    @staticmethod
    def env_reward(env_reward: Sequence[float | None], **columns: Any) -> Rewards:
        """Reward function that returns the column `env_reward`."""
        _report_errors("env_reward/error", columns.get("env_error", ()), columns.get("log_extra"))
        return list(env_reward)

    def __call__(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """Generate replies and step until every dialogue has ended; each step makes one score call."""
        chosen = [self._find(prompt) for prompt in prompts]
        tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
        options = {**trainer.chat_template_kwargs, "chat_template": trainer.chat_template}
        renderer = PolicyRenderer(tokenizer, tools_in_system=False, **options)  # TRL writes the tools
        texts = PolicyTexts(tokenizer, apply_chat_template=False, end_token_ids=getattr(trainer, "eos_token_ids", ()))
        envs, observations, infos = self._start(chosen)
        rollouts = [Rollout(prompt.tolist()) for prompt in renderer.prompts(observations, infos.get("tools"))]
        active = np.ones(len(rollouts), dtype=np.bool_)
        with contextlib.closing(envs):
            while active.any():
                replies = _generate(rollouts, active, trainer, texts)
                said = [len(observation) + 1 for observation in observations]
                observations, rewards, terminations, truncations, _ = envs.step(replies, rows=active)
                errors = dict(zip(envs.state.scores.rows.tolist(), envs.state.scores.scores.errors, strict=True))
                for row in np.flatnonzero(active).tolist():
                    rollout = rollouts[row]
                    rollout.dialogue = observations[row][: said[row]]
                    rollout.error = rollout.error or errors.get(row)
                    rollout.reward = None if rollout.error else (rollout.reward or 0.0) + float(rewards[row])
                active &= ~(terminations | truncations)
                for row in np.flatnonzero(active).tolist():
                    ids = renderer.next_turn(rollouts[row].completion_ids, observations[row][said[row] :])
                    rollouts[row].add(ids.tolist(), by_policy=False)
        return {
            "prompt_ids": [rollout.prompt_ids for rollout in rollouts],
            "completion_ids": [rollout.completion_ids for rollout in rollouts],
            "logprobs": [rollout.logprobs for rollout in rollouts] if trainer.use_vllm else None,
            "env_mask": [rollout.mask for rollout in rollouts],
            "env_reward": [rollout.reward for rollout in rollouts],
            "env_error": [rollout.error for rollout in rollouts],
            "env_dialogue": [rollout.dialogue for rollout in rollouts],
            "prompt_id": [prompt.prompt_id for prompt in chosen],
            "answer": [prompt.answer for prompt in chosen],
        }

    def _find(self, prompt: Any) -> Prompt:
        key = _key(prompt_messages(prompt))
        if key not in self._prompts:
            raise ConfigError(
                f"the data set has a prompt that is not in `prompts`: {prompt!r:.300}; make the data set from "
                "rollout.dataset_rows."
            )
        return self._prompts[key]

    def _start(self, chosen: Sequence[Prompt]) -> tuple[RewardVectorEnv, Observations, Infos]:
        """Make and reset an environment whose row i starts from prompt i."""
        envs = gym.make_vec(
            "RewardModel-v0",
            num_envs=len(chosen),
            prompts=chosen,
            reward_model=self._scorer,
            autoreset_mode="Disabled",
            fallback_reward=0.0,  # not used: the trainer gets None for these rows
            **self._settings,
        ).unwrapped
        assert isinstance(envs, RewardVectorEnv)
        observations, infos = envs.reset(options={"prompt_indices": list(range(len(chosen)))})
        return envs, observations, infos


def _generate(rollouts: Sequence[Rollout], rows: NDArray[np.bool_], trainer: Any, texts: PolicyTexts) -> list[str]:
    """Generate the replies of these rows, append them to the rollouts and return their texts."""
    indices = np.flatnonzero(rows).tolist()
    contexts = [[*rollouts[row].prompt_ids, *rollouts[row].completion_ids] for row in indices]
    # The method that GRPOTrainer's tool loop calls for later turns; it works with every generation backend.
    completion_ids, logprobs = trainer._generate_single_turn(contexts, None, {}, num_generations=1)
    replies = [""] * len(rollouts)
    for k, row in enumerate(indices):
        rollouts[row].add(completion_ids[k], by_policy=True, logprobs=None if logprobs is None else logprobs[k])
        opening = Thinking().opening(texts.decode(contexts[k][-16:]))  # the template's part of the reply
        replies[row] = opening + texts.reply(texts.decode(completion_ids[k]))
    return replies


def _key(messages: Conversation) -> str:
    return json.dumps([[message["role"], message["content"]] for message in messages])


class ToolEnvironment:
    """The tools of an episode as methods, see `environment_factory`."""

    _toolbox: Toolbox

    def reset(self, prompt: Any, **columns: Any) -> None:
        """Start an episode with a row of the data set."""
        row = prompt_of_columns(prompt_messages(prompt), without_filled(columns), None)
        self._prompt, self._said = replace(row, tools=self._toolbox.schemas), list(row.messages)

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        reply = Reply(Message(role="assistant", content="", tool_calls=[call])).numbered(self._said)
        self._said.append(reply.message)
        (answer,) = self._toolbox.answer([reply], [self._said], [self._prompt])
        self._said += answer.messages
        return answer.messages[0]["content"]


def environment_factory(tools: Any, **tool_options: Any) -> type[ToolEnvironment]:
    """Return an `environment_factory` for `GRPOTrainer`, with the `tools` and `tool_options` of `RewardModel-v0`.

    The trainer reads the calls, executes them and generates further replies; `RewardModelReward` scores the dialogue.

    Raises:
        ConfigError: a tool cannot be loaded, or has a name with another meaning for the trainer.
    """
    toolbox = Toolbox(tools, ToolOptions(**tool_options), MAX_LENGTH)
    if taken := [name for name in toolbox.tools if name in ("reset", "get_reward") or name.startswith("_")]:
        raise ConfigError(f"tools: a method {taken[0]!r} is no tool for TRL; write Tool(function, name='...').")
    methods = {name: _method(tool) for name, tool in toolbox.tools.items()}
    return type("ToolEnvironment", (ToolEnvironment,), {**methods, "_toolbox": toolbox})


def _method(tool: Tool) -> Callable[..., str]:
    """Return a method with the parameters that the policy sees; TRL makes its schema from them and the docstring."""

    def method(self: ToolEnvironment, /, **arguments: Any) -> str:
        return self._call(tool.name, arguments)

    hints = typing.get_type_hints(tool.function)
    shown = [each for name, each in inspect.signature(tool.function).parameters.items() if name not in tool.hidden]
    schema = tool.schema["function"]
    lines = [
        f"    {name}: {each.get('description') or name}" for name, each in schema["parameters"]["properties"].items()
    ]
    method.__name__ = tool.name
    method.__doc__ = "\n".join([schema["description"], *(["", "Args:", *lines] if lines else [])])
    method.__annotations__ = {name: hint for name, hint in hints.items() if name not in tool.hidden}
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = inspect.Signature([itself, *shown])  # type: ignore[attr-defined]
    return method
