"""Numeric observations and actions instead of text, for RL libraries without support for text.

`CandidateAction` lets an agent choose among given replies. `TokenLevel` lets it write a reply token by token. Both are
`RewardVectorEnv` with the last token ids of the conversation as observations, and the embedded reward model and prompts
by default.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from gymnasium.spaces import Discrete, MultiDiscrete
from numpy.typing import NDArray

from gym_rm.checks import integer, load_function, load_object
from gym_rm.engine.text.renderer import Renderer
from gym_rm.engine.text.tokenizers import load_tokenizer
from gym_rm.envs.flights import Flight
from gym_rm.envs.infos import EnvState, Infos, Mask
from gym_rm.envs.single import SingleEnv
from gym_rm.envs.spaces import plain_text
from gym_rm.envs.vector import RewardVectorEnv, Step
from gym_rm.errors import ActionError, ConfigError, ConversationError
from gym_rm.types import Conversation, copy_conversation

Windows: TypeAlias = NDArray[np.int64]
Candidates: TypeAlias = Sequence[str] | Callable[[Conversation], Sequence[str]] | str

WINDOW = 48
MAX_NEW_TOKENS = 8
MOST_KNOWN = 4096
CANDIDATES = "gym_rm.assets.number_task:candidates"
VOCABULARY = "gym_rm.assets.number_task:VOCABULARY"


class TokenWindow:
    """Observation of the last L tokens of a conversation, in a `MultiDiscrete` space, int64 `[2L]`.

    The first L entries are token ids, the newest last. The other L entries are the mask: 1 for a token, 0 for padding
    at the start of a shorter conversation. RL libraries one-hot encode a `MultiDiscrete` observation.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template, its folder or hub id, or None for the tokenizer of
            the embedded policy.
        length: L, the number of tokens.

    Example:
        >>> window = TokenWindow(length=4)
        >>> window.of([{"role": "user", "content": "2 + 2?"}]) in window.space
        True
    """

    def __init__(self, tokenizer: Any = None, length: int = WINDOW) -> None:
        tokenizer = "embedded:policy" if tokenizer is None else tokenizer
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.length = integer("window", length, minimum=1)
        self.space = MultiDiscrete([len(self.tokenizer)] * self.length + [2] * self.length)
        self._renderer = Renderer(self.tokenizer, dropped_text="warn")  # the policy sees what its template writes
        self._known: dict[tuple[str, ...], Windows] = {}  # a cache, because every epoch repeats the prompts

    def of(self, conversation: Conversation) -> Windows:
        """Return the window `[2L]` of a conversation.

        It ends with the tokens that start the assistant's turn, unless the last message is from the assistant.

        Raises:
            ConversationError: the chat template does not accept the conversation.
        """
        key = tuple(repr(dict(message)) for message in conversation)
        if key not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            ids = self._ids(conversation)[-self.length :]
            window = np.zeros(2 * self.length, dtype=np.int64)
            window[self.length - len(ids) : self.length] = ids
            window[2 * self.length - len(ids) :] = 1
            self._known[key] = window
        return self._known[key].copy()

    def push(self, windows: Windows, tokens: NDArray[np.int64]) -> Windows:
        """Append one token to each of the windows `[M, 2L]`; `tokens` is `[M]`."""
        pushed = np.roll(windows, -1, axis=1)
        pushed[:, self.length - 1], pushed[:, -1] = tokens, 1
        return pushed

    def _ids(self, conversation: Conversation) -> NDArray[np.int32]:
        # Many chat templates do not accept an empty assistant turn after the last reply of an ended episode.
        over = conversation[-1]["role"] == "assistant" if conversation else False
        whole: Conversation = conversation if over else [*conversation, {"role": "assistant", "content": ""}]
        (rendered,) = self._renderer.encode([whole])
        if isinstance(rendered, ConversationError):
            raise rendered
        return rendered.input_ids if over else rendered.input_ids[: self._renderer.prompt_length(whole, rendered)]


class NumericView(RewardVectorEnv):
    """Base class of the two views: token windows as observations, one of `num_actions` as action."""

    window: TokenWindow
    num_actions: int

    def action_masks(self) -> Mask:
        """Return which actions are valid, bool `[N, A]`, in the form of MaskablePPO."""
        return np.ones((self.num_envs, self.num_actions), dtype=np.bool_)

    def _show(self, window: TokenWindow, num_actions: int) -> None:
        self.window, self.num_actions = window, num_actions
        self._set_spaces(window.space, Discrete(num_actions))

    def _choices(self, actions: Any, rows: Mask) -> NDArray[np.int64]:
        """Check the actions of these rows and return them, with 0 for all other rows."""
        chosen = np.asarray(actions)
        if chosen.shape != (self.num_envs,) or chosen.dtype.kind not in "iu":
            raise ActionError(
                f"actions must be {self.num_envs} integers, one for each environment, got {actions!r:.100}."
            )
        for row in np.flatnonzero(rows & ((chosen < 0) | (chosen >= self.num_actions))).tolist():
            raise ActionError(
                f"environment {row}: the action must be from 0 to {self.num_actions - 1}, got {chosen[row]}."
            )
        return np.where(rows, chosen, 0).astype(np.int64)

    def _replace_final(self, infos: Infos, done: Mask, final: Callable[[int], Windows]) -> None:
        """Replace the final observations of the episodes in `done` by windows."""
        if "final_obs" in infos:
            observations = np.full(self.num_envs, None, dtype=object)
            for row in np.flatnonzero(done).tolist():
                observations[row] = final(row)
            infos["final_obs"] = observations


class CandidateAction(NumericView):
    """`RewardModelCandidates-v0`: the action chooses one of K given replies.

    Args:
        num_envs: number of environments.
        candidates: K replies; or a function (or its name, `"module:function"`) from a conversation to K replies, of
            which some may be None: `action_masks()` excludes them. The default fits the embedded prompts.
        tokenizer: tokenizer of the observations; see `TokenWindow`.
        window: number of tokens in an observation.
        **settings: the fields of `EnvSettings`.

    Raises:
        ConfigError: a candidate is not a text, or the number of candidates changes between conversations.

    Example:
        >>> import gymnasium as gym, gym_rm
        >>> envs = gym.make_vec("RewardModelCandidates-v0", num_envs=4)
        >>> observations, infos = envs.reset(seed=0)
        >>> observations, rewards, terminations, truncations, infos = envs.step([0, 1, 2, 3])
        >>> observations.shape, rewards.shape
        ((4, 96), (4,))
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        candidates: Candidates = CANDIDATES,
        tokenizer: Any = None,
        window: int = WINDOW,
        **settings: Any,
    ) -> None:
        super().__init__(num_envs, **settings)
        self._candidates: Any = candidates
        if not isinstance(self._candidates, list | tuple):
            self._candidates = load_function("candidates", self._candidates)
        self._show(TokenWindow(tokenizer, window), len(self._propose(self.prompts[0].messages)))

    def next_reset(self, *, seed: Any = None, options: Any = None) -> tuple[EnvState, tuple[Any, Infos]]:
        """Return the state after a reset, the windows `[N, 2L]`, and infos."""
        state, (conversations, infos) = super().next_reset(seed=seed, options=options)
        return state, (self._windows(conversations), infos)

    def next_send(self, actions: Any, *, rows: Mask | None = None, whole: bool = False) -> EnvState:
        """Return the state with the chosen replies in flight; the actions are integers `[N]`."""
        _, playing = self._rows_of_step(rows)
        choices = self._choices(actions, playing)
        replies = [self._reply(row, choices[row]) if playing[row] else "" for row in range(self.num_envs)]
        return super().next_send(replies, rows=rows, whole=whole)

    def next_recv(self, state: EnvState, flights: Sequence[Flight]) -> tuple[EnvState, Step]:
        """Return the state after these flights, and what a step returns for them."""
        state, (conversations, rewards, terminations, truncations, infos) = super().next_recv(state, flights)
        final = infos.get("final_obs", ())
        self._replace_final(infos, terminations | truncations, lambda row: self.window.of(final[row]))
        return state, (self._windows(conversations), rewards, terminations, truncations, infos)

    def _windows(self, conversations: Sequence[Conversation]) -> Windows:
        return np.stack([self.window.of(conversation) for conversation in conversations])

    def action_masks(self) -> Mask:
        """Return which candidates are not None, bool `[N, K]`."""
        masks = super().action_masks()
        for row in range(len(self.state.episodes)):
            if not self.state.over[row]:
                masks[row] = [reply is not None for reply in self._candidates_of(row)]
        return masks

    def _reply(self, row: int, choice: int) -> str:
        reply = self._candidates_of(row)[choice]
        if reply is None:
            raise ActionError(f"environment {row}: action {choice} has no candidate here; see action_masks().")
        return reply

    def _candidates_of(self, row: int) -> list[str | None]:
        replies = self._propose(copy_conversation(self.state.episodes[row].messages))
        if len(replies) != self.num_actions:
            raise ConfigError(
                f"environment {row}: expected {self.num_actions} candidates, as for the first prompt, got {replies}."
            )
        return replies

    def _propose(self, conversation: Conversation) -> list[str | None]:
        given = self._candidates(conversation) if callable(self._candidates) else self._candidates
        replies = [plain_text(reply) for reply in given]
        texts = [reply for reply in replies if reply is not None]
        if not texts or not all(isinstance(reply, str) for reply in texts):
            raise ConfigError(f"candidates must be one or more texts, got {replies!r:.200}.")
        return replies


class _Replies(NamedTuple):
    """State of `TokenLevel`: the observations `[N, 2L]`, and the tokens of the replies in progress."""

    windows: Windows
    tokens: tuple[tuple[int, ...], ...]


class TokenLevel(NumericView):
    """`RewardModelTokens-v0`: the action is one token of the reply.

    A reply ends with the tokenizer's end-of-sequence token, which is not part of the reply, or after `max_new_tokens`.
    A complete reply is scored, together with all replies that end in the same step. The reward of every other token is
    0.0. A dialogue continues with the user's next turn.

    Args:
        num_envs: number of environments.
        tokenizer: tokenizer of the actions and the observations; see `TokenWindow`.
        window: number of tokens in an observation.
        max_new_tokens: maximum number of tokens in a reply, including the end-of-sequence token.
        vocabulary: texts of the tokens to choose from, or their name `"module:name"`; the end-of-sequence token is
            added as the last action. None for every token of the tokenizer. The default fits the embedded prompts.
        prefill: text at the start of every reply. It is observed and scored, but does not count towards
            `max_new_tokens`.
        **settings: the fields of `EnvSettings`.

    Raises:
        ConfigError: a text of `vocabulary` is not a single token, or the tokenizer has no end-of-sequence token.

    Example:
        >>> import gymnasium as gym, gym_rm
        >>> envs = gym.make_vec("RewardModelTokens-v0", num_envs=2, max_new_tokens=4)
        >>> observations, infos = envs.reset(seed=0)
        >>> [envs.step([0, 93])[2].tolist() for _ in range(4)]
        [[False, True], [False, True], [False, True], [True, True]]
    """

    def __init__(
        self,
        num_envs: int = 1,
        *,
        tokenizer: Any = None,
        window: int = WINDOW,
        max_new_tokens: int = MAX_NEW_TOKENS,
        vocabulary: Sequence[str] | str | None = VOCABULARY,
        prefill: str = "",
        **settings: Any,
    ) -> None:
        super().__init__(num_envs, **settings)
        shown = TokenWindow(tokenizer, window)
        self.max_new_tokens = integer("max_new_tokens", max_new_tokens, minimum=1)
        if not isinstance(prefill, str):
            raise ConfigError(f"prefill must be a text, got {prefill!r:.100}.")
        encoded = shown.tokenizer(prefill, add_special_tokens=False, split_special_tokens=True)
        self._prefill: list[int] = encoded["input_ids"]
        self._stop = shown.tokenizer.eos_token_id
        if self._stop is None:
            raise ConfigError("tokenizer must have an end-of-sequence token, which ends a reply; set its eos_token.")
        self._token_of_action = _token_ids(shown.tokenizer, vocabulary, self._stop)
        self._show(shown, len(self._token_of_action))

    def send(self, actions: Any, *, rows: Mask | None = None) -> None:
        """Raise ActionError: most tokens are not scored, so there is nothing to wait for."""
        raise ActionError("a token is stepped, not sent; use step(actions, rows=...).")

    def next_reset(self, *, seed: Any = None, options: Any = None) -> tuple[EnvState, tuple[Any, Infos]]:
        """Return the state after a reset, the windows `[N, 2L]`, and infos."""
        # A row that is not reset keeps the reply in progress.
        old = self.state.view
        if old is None:
            old = _Replies(np.zeros((self.num_envs, 2 * self.window.length), dtype=np.int64), ((),) * self.num_envs)
        state, (conversations, infos) = super().next_reset(seed=seed, options=options)
        view = self._begun(old, infos["_prompt_id"], conversations)
        return replace(state, view=view), (view.windows.copy(), infos)

    def next_step(self, actions: Any, *, rows: Mask | None = None) -> tuple[EnvState, Step]:
        """Return the state after a step with one token for every reply, integers `[N]`, and its result."""
        starting, playing = self._rows_of_step(rows)
        old: _Replies = self.state.view
        tokens = self._token_of_action[self._choices(actions, playing)]
        replies = [(*said, token) for said, token in zip(old.tokens, tokens.tolist(), strict=True)]
        lengths = np.array([len(reply) for reply in replies])
        ended = playing & ((tokens == self._stop) | (lengths >= self.max_new_tokens))
        texts = [self._text(replies[row]) if ended[row] else "" for row in range(self.num_envs)]
        state, result = super().next_step(texts, rows=ended | starting)
        conversations, rewards, terminations, truncations, infos = result

        windows = np.where(playing[:, None], self.window.push(old.windows, tokens), old.windows)
        self._replace_final(infos, terminations | truncations, lambda row: windows[row].copy())
        kept = [new if goes_on else before for new, before, goes_on in zip(replies, old.tokens, playing, strict=True)]
        view = self._begun(_Replies(windows, tuple(kept)), (ended | starting) & ~state.over, conversations)
        return replace(state, view=view), (view.windows.copy(), rewards, terminations, truncations, infos)

    def _begun(self, view: _Replies, rows: Mask, conversations: Sequence[Conversation]) -> _Replies:
        """Return the view with new replies in `rows`."""
        windows, tokens = view.windows.copy(), list(view.tokens)
        for row in np.flatnonzero(rows).tolist():
            window = self.window.of(conversations[row])[None]
            for token in self._prefill:
                window = self.window.push(window, np.array([token]))
            windows[row], tokens[row] = window[0], ()
        return _Replies(windows, tuple(tokens))

    def _text(self, reply: Sequence[int]) -> str:
        ids = [*self._prefill, *(reply[:-1] if reply[-1] == self._stop else reply)]
        text = self.window.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)


class NumericEnv(SingleEnv[Windows, int]):
    """Base class of the two views as single environments."""

    def action_masks(self) -> Mask:
        """Return which actions are valid, bool `[A]`."""
        mask: Mask = self._envs.action_masks()[0]
        return mask


class CandidateEnv(NumericEnv):
    """`RewardModelCandidates-v0` as a single environment, with the arguments of `CandidateAction`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(CandidateAction, **settings)


class TokenEnv(NumericEnv):
    """`RewardModelTokens-v0` as a single environment, with the arguments of `TokenLevel`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(TokenLevel, **settings)


def _token_ids(tokenizer: Any, vocabulary: Sequence[str] | str | None, stop: int) -> NDArray[np.int64]:
    if vocabulary is None:
        return np.arange(len(tokenizer))
    vocabulary = load_object("vocabulary", vocabulary) if isinstance(vocabulary, str) else vocabulary
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in vocabulary]
    for text, found in zip(vocabulary, ids, strict=True):
        if len(found) != 1 or tokenizer.decode(found) != text:
            raise ConfigError(
                f"vocabulary: every text must be a single token, but the tokenizer encodes {text!r} as {found}; "
                "use texts of single tokens, or vocabulary=None for all tokens."
            )
    return np.array([*(found[0] for found in ids), stop], dtype=np.int64)
