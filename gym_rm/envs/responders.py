"""Responders produce the user's next turn: from a script, a function, or a model that simulates the user."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from gym_rm.checks import in_order, load_function
from gym_rm.envs.episodes import Episode, num_user_turns
from gym_rm.envs.spaces import ConversationSpace, plain_text
from gym_rm.errors import ConfigError
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Message, Prompt, copy_conversation, copy_nested, copy_prompt

if TYPE_CHECKING:
    from gym_rm.envs.simulated_user import SimulatedUser

UserTurns: TypeAlias = Sequence[str | Message | Sequence[Message] | None]
Responder: TypeAlias = "Callable[[Sequence[Conversation], Sequence[Prompt], Scores | None], UserTurns]"
"""Function that returns the user's next turn for each of M conversations that end with a reply; None ends an episode.

A turn is a text, a message, or a list of messages of the roles `"tool"` and `"user"`: results of calls that the
environment has no tools for, what the user says, or both.

`scores` has the score of each reply. It is None with `reward_on="end"`, because there the responder decides which
replies end an episode and are scored.
"""


def scripted_user(
    conversations: Sequence[Conversation], prompts: Sequence[Prompt], scores: Scores | None
) -> list[str | None]:
    """Responder that returns the `user_turns` of each prompt, one after every reply."""
    turns = [num_user_turns(said, prompt) for said, prompt in zip(conversations, prompts, strict=True)]
    return [
        prompt.user_turns[turn] if turn < len(prompt.user_turns) else None
        for turn, prompt in zip(turns, prompts, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class UserTurn:
    """The messages after one reply (none if the episode ends or tools answer), and whether the episode ends.

    It is terminated by the responder or the scorer, truncated if it reached `max_turns`.
    """

    messages: tuple[Message, ...]
    terminated: bool
    truncated: bool

    @property
    def ended(self) -> bool:
        """Whether the episode has ended."""
        return self.terminated or self.truncated


class UserSimulator:
    """User simulator: calls a responder after every reply, and applies the limit of an episode.

    Args:
        respond: responder, or its name `"module:function"`; a dict with the arguments of
            `SimulatedUser`; None for `scripted_user`.
        space: space that must contain every message of the user.
        max_turns: number of replies after which an episode is truncated; None for no limit.

    Raises:
        ConfigError: `respond` is not a function, or does not take three arguments.
    """

    def __init__(
        self,
        respond: Responder | str | Mapping[str, Any] | None,
        *,
        space: ConversationSpace,
        max_turns: int | None = None,
    ) -> None:
        self._owned: SimulatedUser | None = None
        if isinstance(respond, Mapping):
            from gym_rm.envs.simulated_user import SimulatedUser  # the only user that needs a chat model

            if "model" not in respond:
                raise ConfigError(
                    f"respond has no model: {dict(respond)!r:.200}; write {{'model': ..., 'instructions': ...}}."
                )
            respond = self._owned = SimulatedUser(**respond)
        self.respond: Responder = scripted_user if respond is None else load_function("respond", respond)
        self._space = space
        self._max_turns = max_turns
        try:
            inspect.signature(self.respond).bind([], [], None)
        except TypeError as error:
            raise ConfigError(f"respond must take (conversations, prompts, scores): {error}.") from error
        except ValueError:  # a builtin has no signature to check
            pass

    def next_turns(
        self,
        rows: Sequence[int],
        episodes: Sequence[Episode],
        said: Sequence[Conversation],
        scores: Scores | None,
        calling: Sequence[bool] | None = None,
    ) -> list[UserTurn]:
        """Return the turns after the replies of M episodes, with one call of the responder for all that continue.

        Args:
            rows: `[M]`, indices of the environments, for error messages.
            episodes: `[M]`, the episodes before the reply.
            said: `[M]`, their conversations, which end with the reply.
            scores: scores of these conversations; None if they are scored afterwards.
            calling: `[M]`, replies that tools answer, for which the responder is not asked; None if there are none.

        Raises:
            ConfigError: the responder did not return a turn or None for each conversation.
        """
        answers: dict[int, Any] = {}
        calling = [False] * len(rows) if calling is None else calling
        at_limit = [self._max_turns is not None and each.num_replies + 1 >= self._max_turns for each in episodes]
        ends = None if scores is None else scores.terminations
        ended = [ends is not None and bool(ends[m]) for m in range(len(rows))]
        # The script is read at the limit too: if it has no turn left, the episode is terminated, not truncated.
        scripted = self.respond is scripted_user
        asked = [m for m in range(len(rows)) if not ended[m] and not calling[m] and (scripted or not at_limit[m])]
        if asked:
            conversations, prompts = [said[m] for m in asked], [episodes[m].prompt for m in asked]
            if not scripted:  # copies, so that a responder that edits messages does not change the episode
                conversations = [copy_conversation(conversation) for conversation in conversations]
                prompts = [copy_prompt(prompt) for prompt in prompts]
            own = None if scores is None or scripted else scores.take(asked)
            given: Any = self.respond(conversations, prompts, own)
            listed = in_order(given)
            if listed is None or len(listed) != len(asked):
                length = "" if listed is None else f" of length {len(listed)}"
                raise ConfigError(
                    "respond must return a list with the user's next turn, or None to end the episode, for each of the "
                    f"{len(asked)} conversations; got {type(given).__name__}{length}: {given!r:.80}."
                )
            answers = dict(zip(asked, listed, strict=True))
        turns = []
        for m, last in enumerate(at_limit):
            messages = () if answers.get(m) is None else self._messages(answers[m], rows[m])
            terminated = ended[m] or (m in answers and not messages)
            truncated = last and not terminated
            turns.append(UserTurn(() if truncated else messages, terminated, truncated))
        return turns

    def _messages(self, answer: Any, row: int) -> tuple[Message, ...]:
        if isinstance(answer, str | Mapping):
            answer = [answer]
        if not isinstance(answer, list | tuple) or not answer:
            reason = f"expected a text, a message, a list of messages, or None to end the episode, got {answer!r:.100}"
            raise ConfigError(f"environment {row}: respond returned an invalid turn: {reason}.")
        messages = []
        for part in answer:
            message = Message(role="user", content=plain_text(part)) if isinstance(part, str) else part
            reason = self._space.fault(message)
            if not reason and message["role"] not in ("tool", "user"):
                reason = f"expected the role 'tool' or 'user', got {message['role']!r}"
            if reason:
                raise ConfigError(f"environment {row}: respond returned an invalid turn: {reason}.")
            messages.append(copy_nested(message))
        return tuple(messages)

    def close(self) -> None:
        """Release the chat model of a user that was given as a dict."""
        if self._owned:
            self._owned.close()
