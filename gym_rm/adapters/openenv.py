"""OpenEnv: a single conversation as an `Environment`, and a server for it."""

from __future__ import annotations

import functools
import uuid
from typing import Any

import gymnasium as gym
from gymnasium.error import ResetNeeded
from pydantic import Field

from gym_rm.adapters import require
from gym_rm.data.prompts import load_prompts
from gym_rm.engine.batching import shared_batching_scorer
from gym_rm.errors import ConfigError, GymRMError, nearest
from gym_rm.types import Message

interfaces = require("openenv.core.env_server.interfaces", install="openenv-core")
types = require("openenv.core.env_server.types", install="openenv-core")
Environment: Any = interfaces.Environment
Action: Any = types.Action
Observation: Any = types.Observation


class ReplyAction(Action):  # type: ignore[misc]
    """The action: a reply of the assistant.

    With a `prompt_id`, the step first starts a new episode from this prompt. Steps by plain HTTP need it, because the
    server makes a new environment for each HTTP request. Sessions (WebSockets) call `reset` and leave it out.
    """

    reply: str
    prompt_id: str | None = None


class ConversationObservation(Observation):  # type: ignore[misc]
    """The observation: the conversation so far. OpenEnv defines `done`, `reward` and `metadata`.

    `metadata` has all infos of the environment, but OpenEnv does not send it to clients. `score_ok` is False if the
    reply has no score and got the `fallback_reward`, and None before the first reply.
    """

    messages: list[dict[str, str]] = Field(default_factory=list)
    prompt_id: str = ""
    score_ok: bool | None = None
    truncated: bool = False


class RewardModelOpenEnv(Environment):  # type: ignore[misc]
    """One `RewardModel-v0` conversation as an OpenEnv environment; `create_app` makes a server of such environments.

    All environments of a process with equal settings share one reward model, which merges concurrent calls into one
    batch. It stays loaded until the process ends.

    Args:
        settings: keywords of the single `RewardModel-v0` (`reward_model`, `prompts`, `max_turns`, ...).
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        prompts = load_prompts(settings.pop("prompts", None))
        self._indices = {prompt.prompt_id: index for index, prompt in enumerate(prompts)}
        scorer = shared_batching_scorer(settings.pop("reward_model", None), settings.pop("reward_model_kwargs", {}))
        self._env = gym.make("RewardModel-v0", reward_model=scorer, prompts=prompts, **settings)
        self._state = types.State(episode_id=None, step_count=0)
        self._over = True

    def reset(
        self,
        seed: int | None = None,
        episode_id: str | None = None,
        prompt_id: str | None = None,
        **kwargs: Any,
    ) -> ConversationObservation:
        """Start the next episode, or one from the prompt `prompt_id`, and return its first observation.

        Raises:
            ConfigError: there is no prompt `prompt_id`.
        """
        options = None if prompt_id is None else {"prompt_indices": [self._index(prompt_id)]}
        conversation, info = self._env.reset(seed=seed, options=options)
        self._state = types.State(episode_id=episode_id or uuid.uuid4().hex, step_count=0)
        self._over = False
        return self._observation(conversation, info, reward=None)

    def step(self, action: ReplyAction, timeout_s: float | None = None, **kwargs: Any) -> ConversationObservation:
        """Append a reply and score it; raises the same errors as `RewardModel-v0`."""
        if action.prompt_id is not None:
            self.reset(prompt_id=action.prompt_id)
        if self._over:
            raise ResetNeeded(
                "there is no running episode: call reset first, or pass a prompt_id with the action. Over plain HTTP "
                "every request has a new environment; use a session (WebSocket) for dialogues."
            )
        conversation, reward, terminated, truncated, info = self._env.step(action.reply)
        self._state.step_count += 1
        self._over = terminated or truncated
        return self._observation(conversation, {**info, "truncated": truncated}, reward=float(reward))

    @property
    def state(self) -> Any:
        """Id of the episode and its number of replies so far."""
        return self._state

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _index(self, prompt_id: str) -> int:
        if prompt_id not in self._indices:
            raise ConfigError(f"there is no prompt with prompt_id={prompt_id!r}.{nearest(prompt_id, self._indices)}")
        return self._indices[prompt_id]

    def _observation(
        self, conversation: list[Message], info: dict[str, Any], *, reward: float | None
    ) -> ConversationObservation:
        return ConversationObservation(
            messages=[dict(message) for message in conversation],
            prompt_id=str(info["prompt_id"]),
            score_ok=info.get("score_ok"),
            truncated=info.get("truncated", False),
            reward=reward,
            done=self._over,
            metadata=info,
        )


def create_app(*, max_concurrent_envs: int | None = None, **settings: Any) -> Any:
    """Return OpenEnv's FastAPI app with a `RewardModelOpenEnv` for each session.

    Invalid requests get the status 422 and a reason.

    Args:
        max_concurrent_envs: maximum number of sessions at the same time; None for OpenEnv's default.
        settings: keywords of the single `RewardModel-v0` (`reward_model`, `prompts`, `max_turns`, ...).

    Raises:
        ConfigError: a setting is invalid, or the reward model cannot be loaded.
    """
    server = require("openenv.core.env_server", install="openenv-core")
    responses = require("fastapi.responses", install="openenv-core")
    make = functools.partial(RewardModelOpenEnv, **{**settings, "prompts": load_prompts(settings.get("prompts"))})
    make().close()  # loads the reward model, so that invalid settings raise here

    async def refuse(request: Any, error: Exception) -> Any:
        return responses.JSONResponse({"detail": str(error)}, status_code=422)

    app = server.create_fastapi_app(make, ReplyAction, ConversationObservation, max_concurrent_envs)
    for error in (GymRMError, ResetNeeded):
        app.add_exception_handler(error, refuse)
    return app
