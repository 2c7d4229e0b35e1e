"""A user simulated by a chat model."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any

import pydantic

from gym_rm.config import Config, Finite, NonNegativeInt, PositiveInt
from gym_rm.data.tools import UNREADABLE
from gym_rm.envs.episodes import num_user_turns
from gym_rm.errors import ConfigError, GymRMError
from gym_rm.generation.chat import check_replies, open_chat_model_of, seed_of
from gym_rm.plain_values import to_plain
from gym_rm.scorer import NeverCopied, max_concurrent_calls
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Message, Prompt

INSTRUCTIONS = (
    "You are a person who talks with an assistant. Write only your next message, in the first person, short and "
    "natural. Stay with what you asked for: follow up, correct the assistant, or ask for what is missing. Never write "
    "the assistant's part. When you have what you wanted, or see that you will not get it, write {end_marker}."
)
OPENING = "Begin the conversation."  # many chat templates need a first message of the other side
FIELD = re.compile(r"\{(end_marker|answer|metadata\.[\w.-]+)\}")


class SimulatedUserOptions(Config):
    """Options of `SimulatedUser`, besides those of the chat model."""

    instructions: str = INSTRUCTIONS
    """System message of the chat model. `{end_marker}`, `{answer}` and `{metadata.NAME}` (of the data row, for example
    a persona or a goal) are filled in."""
    max_turns: PositiveInt | None = None
    """Number of messages of the user after the first, after which the episode ends; None for no limit."""
    end_marker: str = pydantic.Field(default="[END]", min_length=1)
    """What the chat model writes to end the episode. What it writes beside it is left out."""
    seed: NonNegativeInt = 0
    """Seed of the messages; with a temperature, another one gives other users."""
    timeout: Finite = pydantic.Field(default=120.0, gt=0)
    """Seconds for the messages of a step."""
    max_retries: NonNegativeInt = 2
    """How often an empty message is asked for again, and a failed request to a server sent again."""


class SimulatedUser(NeverCopied):
    """A responder for `respond=`: a chat model writes the user's next message for all rows of a step in one call.

    The chat model sees the conversation with the roles changed: the user's messages are its own. It does not see the
    system message of the conversation. The same conversation gets the same message.

    Args:
        model: folder or hub id of a chat model in this process, URL of an OpenAI-compatible server, a dict
            `{"path": ..., **options}`, or a `ChatModel`.
        **options: the fields of `SimulatedUserOptions`, and those of `LocalChatOptions` or `RemoteChatOptions`.

    Raises:
        ConfigError: an option is unknown or invalid, or there is no such model.

    Example:
        >>> import gymnasium as gym, gym_rm
        >>> user = SimulatedUser("embedded:policy", temperature=3.0, max_new_tokens=8, max_turns=2)
        >>> length = lambda conversations: [len(c) for c in conversations]
        >>> envs = gym.make_vec("RewardModel-v0", num_envs=2, reward_model=length, prompts=["Hi"], respond=user)
        >>> observations, infos = envs.reset(seed=0)
        >>> observations, rewards, *_ = envs.step(["Hello.", "What?"])
        >>> [message["role"] for message in observations[0]]
        ['user', 'assistant', 'user']
    """

    def __init__(self, model: Any, **options: Any) -> None:
        defaults = {"max_new_tokens": 256, "temperature": 1.0}
        self.options, self.model, self._owned = open_chat_model_of(
            model, options, SimulatedUserOptions, owner="a simulated user", defaults=lambda _: defaults
        )

    def __repr__(self) -> str:
        return f"SimulatedUser({self.model!r})"

    @property
    def max_concurrent_calls(self) -> int:
        """Those of its chat model; see `gym_rm.scorer.max_concurrent_calls`."""
        return max_concurrent_calls(self.model)

    def __call__(
        self, conversations: Sequence[Conversation], prompts: Sequence[Prompt], scores: Scores | None
    ) -> list[str | None]:
        """Return the user's next message to each of M conversations, or None to end the episode.

        Raises:
            GymRMError: the chat model wrote no message for a conversation; the environment does not change.
        """
        deadline = time.monotonic() + self.options.timeout
        turns: list[str | None] = [None] * len(conversations)
        asked = {
            row: self._flipped(conversation, prompt)
            for row, (conversation, prompt) in enumerate(zip(conversations, prompts, strict=True))
            if not self._is_over(conversation, prompt)
        }
        reason = ""
        for attempt in range(1 + self.options.max_retries):
            rows = list(asked)
            if not rows or (attempt and time.monotonic() >= deadline):
                break
            seeds = [seed_of(self.options.seed, asked[row]) + attempt for row in rows]
            replies = self.model.reply([asked[row] for row in rows], seeds=seeds, deadline=deadline)
            for row, reply in zip(rows, check_replies(self.model, replies, len(rows)), strict=True):
                if reply.error is not None:
                    raise self._failed(row, len(conversations), reply.error)
                ends = self.options.end_marker in reply.text
                if ends or reply.text.strip():
                    turns[row] = None if ends else reply.text.strip()
                    del asked[row]
                else:
                    cut = "" if reply.finished else ", or cut before the end of its reasoning"
                    reason = f"its message was empty{cut}"
        for row in asked:
            raise self._failed(row, len(conversations), reason)
        return turns

    def close(self) -> None:
        """Release the model, unless it was passed in loaded."""
        if self._owned and callable(close := getattr(self.model, "close", None)):
            close()

    def _is_over(self, conversation: Conversation, prompt: Prompt) -> bool:
        """Return whether the user has written all messages that `max_turns` allows."""
        most = self.options.max_turns
        return most is not None and num_user_turns(conversation, prompt) >= most

    def _flipped(self, conversation: Conversation, prompt: Prompt) -> list[Message]:
        """Return the conversation as the user's model sees it."""
        messages = [Message(role="system", content=self._instructions(prompt)), Message(role="user", content=OPENING)]
        for message in conversation:
            if message["role"] not in ("user", "assistant") or message["content"].startswith(UNREADABLE):
                continue
            if message.get("tool_calls") and not message["content"]:
                continue
            role = "assistant" if message["role"] == "user" else "user"
            if messages[-1]["role"] == role:  # many chat templates need alternating roles
                messages[-1] = Message(role=role, content=f"{messages[-1]['content']}\n\n{message['content']}")
            else:
                messages.append(Message(role=role, content=message["content"]))
        return messages

    def _instructions(self, prompt: Prompt) -> str:
        def fill(match: re.Match[str]) -> str:
            name = match[1]
            if name == "end_marker":
                return self.options.end_marker
            value = prompt.answer if name == "answer" else prompt.metadata.get(name.removeprefix("metadata."))
            if value is None:
                raise ConfigError(f"instructions have {{{name}}}, which the prompt {prompt.prompt_id!r} does not have.")
            return value if isinstance(value, str) else json.dumps(to_plain(value), ensure_ascii=False)

        return FIELD.sub(fill, self.options.instructions)

    def _failed(self, row: int, count: int, reason: str) -> GymRMError:
        return GymRMError(f"{self!r} wrote no message for conversation {row} of {count}: {reason}.")
