"""`RewardModel-v0`: conversations are the observations, replies the actions, scores the rewards.

A step is one walk: check the replies, work out the turn that each would be, score the conversations in one call,
and only then change anything. Whatever is raised on the way leaves the environment as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias
from weakref import WeakValueDictionary

import gymnasium as gym
import numpy as np
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from gym_rm.checks import at_least_one, finite_or_none, load_function, one_of, parse_autoreset_mode, seed_of_each
from gym_rm.data.prompts import Source, load_prompts
from gym_rm.envs.episodes import DialogueRules, Episode, PromptOrders, Responder, Turn
from gym_rm.errors import ActionError, ConfigError, RenderModeError, ScoringError, logger, warn_once
from gym_rm.envs.infos import Infos, Mask, StepScores, add_group, add_values, spread_scores
from gym_rm.reports.metrics import RewardMetrics, RunningMetrics
from gym_rm.scorer import Scorer, ScorerLike, load_scorer
from gym_rm.envs.single import RENDERING, SingleEnv
from gym_rm.envs.spaces import MAX_LENGTH, ConversationSpace, UnicodeText, copy_conversation
from gym_rm.envs.transcripts import print_transcripts, transcript
from gym_rm.types import Message

Observations: TypeAlias = tuple[list[Message], ...]
Step: TypeAlias = tuple[Observations, NDArray[np.float64], Mask, Mask, Infos]


class RewardVectorEnv(VectorEnv[Observations, Sequence[str], NDArray[Any]]):
    """N conversations whose replies are scored together, in one `Scorer.score` call a step.

    Observations are a tuple of N conversations (lists of `{"role", "content"}`), actions N strings, rewards
    float64 `[N]` and always finite. `infos` hold arrays `[N]` with masks, laid out as `SyncVectorEnv` does:

    - `prompt_id`; `answer` where the prompt has one; with `group_size > 1` `group_id` (int64), the same for siblings
      that answer the same prompt and for no others;
    - for rows that were scored: `score_ok` (bool), `num_tokens`, `truncated_tokens` (int64) and `heads`, the parts
      of the reward (float64); for rows that took a turn `metrics`, the `count`, `mean`, `std`, `min` and `max` of the
      episode's rewards so far.

    Args:
        num_envs: N.
        reward_model: what `load_scorer` takes: None for the embedded reward model, a folder, a hub id, a dict,
            a `Scorer`, a function.
        reward_model_kwargs: options for `load_scorer` (`dtype`, `device`, ...).
        prompts: what `load_prompts` takes: None for the embedded prompts, a file, a data set name, a list.
            Each environment draws them without replacement, in an order of its own for every epoch.
        group_size: so many neighbours answer the same prompts.
        max_turns: replies after which an episode is truncated if the user would go on; None for no limit.
        respond: what the user says to a conversation, None to end it: a function or its name `"module:function"`,
            in place of the prompt's `user_turns`. It is called before the scoring, and again if that fails.
        max_reply_length: characters above which a reply truncates its episode; it is scored whole all the same.
        reward_on: score every reply (`"turn"`) or only the one that ends the episode (`"end"`).
        fallback_reward: reward of a conversation that could not be scored, with `score_ok` False. None raises the
            `ScoringError` instead, and the step can be tried again.
        autoreset_mode: `"SameStep"`, `"NextStep"` or `"Disabled"`, or the enum.
        max_text_length: characters that a message may hold, a bound of the spaces; a longer reply is an error.
        render_mode: `"human"` prints the conversations after every reset and step, `"ansi"` has `render()` return them.

    Raises:
        ConfigError: a setting that cannot be.

    Example:
        >>> import gymnasium as gym, gym_rm
        >>> brevity = lambda conversations: [-len(c[-1]["content"]) for c in conversations]
        >>> envs = gym.make_vec("RewardModel-v0", num_envs=2, reward_model=brevity, prompts=["2 + 2?", "3 + 3?"])
        >>> observations, infos = envs.reset(seed=0)
        >>> observations, rewards, terminations, truncations, infos = envs.step(["4", "six"])
        >>> rewards.tolist(), terminations.tolist()
        ([-1.0, -3.0], [True, True])
    """

    metadata = RENDERING
    single_observation_space: ConversationSpace
    single_action_space: UnicodeText
    _owns_scorer = False  # some versions of Gymnasium also close what failed to be made

    def __init__(
        self,
        num_envs: int = 1,
        *,
        reward_model: ScorerLike = None,
        reward_model_kwargs: Mapping[str, Any] | None = None,
        prompts: Source = None,
        group_size: int = 1,
        max_turns: int | None = None,
        respond: Responder | str | None = None,
        max_reply_length: int | None = None,
        reward_on: Literal["turn", "end"] = "turn",
        fallback_reward: float | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.SAME_STEP,
        max_text_length: int = MAX_LENGTH,
        render_mode: str | None = None,
    ) -> None:
        self.num_envs = at_least_one("num_envs", num_envs)
        self.group_size = at_least_one("group_size", group_size)
        if num_envs % group_size:
            raise ConfigError(
                "num_envs must be a multiple of group_size, so that every group is whole; "
                f"got num_envs={num_envs} and group_size={group_size}."
            )
        self.reward_on = one_of("reward_on", reward_on, ("turn", "end"))
        if render_mode not in (None, *RENDERING["render_modes"]):
            known = [None, *RENDERING["render_modes"]]
            raise RenderModeError(f"render_mode must be one of {known}, got {render_mode!r}.")
        self.render_mode = render_mode
        self.fallback_reward = finite_or_none("fallback_reward", fallback_reward)
        self.autoreset_mode = parse_autoreset_mode(autoreset_mode)
        self.metadata = {**self.metadata, "autoreset_mode": self.autoreset_mode}
        self._rules = DialogueRules(
            None if max_turns is None else at_least_one("max_turns", max_turns),
            None if max_reply_length is None else at_least_one("max_reply_length", max_reply_length),
            None if respond is None else load_function("respond", respond),
        )

        self.single_observation_space = ConversationSpace(at_least_one("max_text_length", max_text_length))
        self.single_action_space = UnicodeText(max_text_length)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

        self.prompts = load_prompts(prompts)
        self._check_prompts()
        self.scorer = _load_scorer(reward_model, reward_model_kwargs or {})
        self._owns_scorer = reward_model is not None and self.scorer is not reward_model

        self._orders = PromptOrders(len(self.prompts), self.num_envs, self.group_size)
        self._episodes: list[Episode] = []
        self._over = np.zeros(self.num_envs, dtype=np.bool_)
        self._scores = StepScores.empty(self.num_envs)
        self._running = RunningMetrics(self.num_envs)
        self._transcripts = [""] * self.num_envs

    # --- the contract ------------------------------------------------------------------------------------------

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observations, Infos]:
        """Start new episodes, in all rows or in those of `options["reset_mask"]` (bool `[N]`).

        Args:
            seed: an int (environment i gets `seed + i`), a list with a seed or None for each environment, or None to
                go on with the order of prompts. A group has the seed of its first environment.
            options: only `reset_mask`, as Gymnasium has it.

        Raises:
            ConfigError: an unknown option, or a seed for a part of a group.
            ResetNeeded: a mask before the first whole reset.
        """
        self._require_open()
        rows = self._rows_to_reset(options)
        self._orders.seed(seed_of_each(seed, self.num_envs), rows)
        self._orders.align(rows)
        self._restart(rows)
        self._over[rows] = False
        self._transcribe(rows)
        infos: Infos = {}
        self._add_episodes(infos, rows)
        self._print(rows)
        return self._observe(), infos

    def step(self, actions: Sequence[str]) -> Step:
        """Append N replies to N conversations and score them in one call.

        In `NEXT_STEP` the rows that ended in the last step start anew: their reply is ignored, their reward is 0.0.

        Raises:
            ActionError: a reply that is no text, or a wrong number of them; names the row.
            ScoringError: rows without a score, where there is no `fallback_reward`; names the rows.
            ResetNeeded: before the first reset, or a row that is over in `DISABLED`.
        """
        return self.step_rows(actions, np.ones(self.num_envs, dtype=np.bool_))

    def step_rows(self, actions: Sequence[str], rows: Mask) -> Step:
        """`step` for the rows of a mask (bool `[N]`) alone, still with one call of the scorer.

        The other rows wait: their entry of `actions` is ignored, their reward is 0.0 and `infos` hold nothing
        for them. For whoever composes replies at different speeds, token by token for example.
        """
        self._require_episodes(rows)
        starting, playing = rows & self._over, rows & ~self._over
        indices = np.flatnonzero(playing).tolist()
        turns = self._turns(indices, self._replies(indices, actions))
        scores = self._score(indices, turns)

        # Nothing has changed up to here: after an error or an interrupt, the same step can be tried again.
        terminations, truncations = np.zeros((2, self.num_envs), dtype=np.bool_)
        terminations[indices] = [turn.terminated for turn in turns]
        truncations[indices] = [turn.truncated for turn in turns]
        done = terminations | truncations
        for row, turn in zip(indices, turns, strict=True):
            self._rules.commit(self._episodes[row], turn)
        self._scores = scores
        self._running.add(scores.rewards, scores.ok)
        infos: Infos = {}
        if self.autoreset_mode is AutoresetMode.SAME_STEP:
            self._transcribe(playing, scores, done)
            self._add_final(infos, done)
            self._add_scores(infos, playing & ~done)
            self._restart(done)
        else:
            self._add_scores(infos, playing)
            self._restart(starting)
            self._over = (self._over & ~starting) | done
            self._transcribe(rows, scores, done)
        self._add_episodes(infos, rows)
        self._print(rows)
        return self._observe(), scores.rewards.copy(), terminations, truncations, infos

    def render(self) -> tuple[str, ...] | None:
        """N transcripts, up to the last scored reply, in `"ansi"`; None in `"human"`, which has printed them."""
        if self.render_mode is None:
            gym.logger.warn(
                "render() shows nothing without a render_mode: make the environment with 'ansi' or 'human'."
            )
        return tuple(self._transcripts) if self.render_mode == "ansi" else None

    def close_extras(self, **kwargs: Any) -> None:
        """Close the scorer, if the environment made it and it can be closed."""
        if self._owns_scorer and callable(close := getattr(self.scorer, "close", None)):
            close()

    @property
    def metrics(self) -> RewardMetrics:
        """Statistics of the last step over all environments; a conversation that got the fallback counts as failed."""
        return self._scores.metrics()

    @property  # type: ignore[misc]
    def np_random(self) -> tuple[np.random.Generator, ...]:  # type: ignore[override]
        """The generator that orders each environment's prompts, as `SyncVectorEnv` has it; siblings share one."""
        return self._orders.generators

    @property
    def np_random_seed(self) -> tuple[int, ...]:  # type: ignore[override]
        """The seed of each environment's generator."""
        return self._orders.seeds

    # --- before anything changes -------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"{self} is closed; make a new one.")

    def _require_episodes(self, rows: Mask) -> None:
        self._require_open()
        if not self._episodes:
            raise ResetNeeded("call reset() before step().")
        over = rows & self._over
        if self.autoreset_mode is AutoresetMode.DISABLED and over.any():
            raise ResetNeeded(
                f"the episodes of environments {np.flatnonzero(over).tolist()} are over and autoreset is "
                "disabled; call reset(options={'reset_mask': terminations | truncations}) first."
            )

    def _rows_to_reset(self, options: Mapping[str, Any] | None) -> Mask:
        unknown = sorted(set(options or {}) - {"reset_mask"})
        if unknown:
            raise ConfigError(f"unknown reset options {unknown}; known: 'reset_mask'.")
        if not options:
            return np.ones(self.num_envs, dtype=np.bool_)
        mask = options["reset_mask"]
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
            kind = f"dtype {mask.dtype}" if isinstance(mask, np.ndarray) else type(mask).__name__
            raise TypeError(f"options['reset_mask'] must be a numpy array of dtype bool, got {kind}.")
        if mask.shape != (self.num_envs,) or not mask.any():
            raise ValueError(
                f"options['reset_mask'] must have the shape ({self.num_envs},) and at least one True, got {mask}."
            )
        if not self._episodes and not mask.all():
            raise ResetNeeded("the first reset starts every environment; call it without a reset_mask.")
        return mask

    def _check_prompts(self) -> None:
        conversation, text = self.single_observation_space, self.single_observation_space.content_space
        for prompt in self.prompts:
            if prompt.messages not in conversation or not all(turn in text for turn in prompt.user_turns):
                raise ConfigError(
                    f"prompt {prompt.prompt_id!r}: expected messages of exactly a role and a content, without lone "
                    f"surrogates and at most max_text_length={text.max_length} characters each; got messages "
                    f"{prompt.messages!r:.200} and user_turns {prompt.user_turns!r:.200}."
                )

    def _replies(self, rows: list[int], actions: Sequence[str]) -> list[str]:
        if isinstance(actions, str | bytes) or not isinstance(actions, Sequence | np.ndarray):
            raise ActionError(f"expected {self.num_envs} replies in a list, tuple or array, got {actions!r:.100}.")
        shape = actions.shape if isinstance(actions, np.ndarray) else (len(actions),)
        if shape != (self.num_envs,):
            raise ActionError(f"expected {self.num_envs} replies, one for each environment, got the shape {shape}.")
        for row in rows:
            if actions[row] not in self.single_action_space:
                raise ActionError(f"environment {row}: {self.single_action_space.fault(actions[row])}.")
        return [str(actions[row]) for row in rows]

    def _turns(self, rows: list[int], replies: list[str]) -> list[Turn]:
        turns = [self._rules.turn(self._episodes[row], reply) for row, reply in zip(rows, replies, strict=True)]
        if self._rules.respond is not None:
            space = self.single_observation_space.content_space
            for row, turn in zip(rows, turns, strict=True):
                if turn.user is not None and turn.user not in space:
                    raise ConfigError(f"environment {row}, what respond returned: {space.fault(turn.user)}.")
        return turns

    def _score(self, rows: list[int], turns: list[Turn]) -> StepScores:
        asked = [row for row, turn in zip(rows, turns, strict=True) if turn.ended or self.reward_on == "turn"]
        if not asked:
            return StepScores.empty(self.num_envs)
        error = None
        try:
            # Copies: a scorer that edits messages must not change what was said.
            said = [copy_conversation(turn.messages) for turn in turns if turn.ended or self.reward_on == "turn"]
            scores = self.scorer.score(said)
        except ScoringError as raised:
            scores, error = raised.scores, raised
        if len(scores) != len(asked):
            raise ConfigError(
                f"{type(self.scorer).__name__}.score returned {len(scores)} scores for {len(asked)} conversations; "
                "a scorer returns one for each, in order."
            )
        scores = spread_scores(scores, asked, self.num_envs)
        if scores.failed_rows:
            failure = ScoringError(scores)
            if self.fallback_reward is None:
                raise failure from error
            warn_once("some conversations could not be scored and got the fallback_reward; their score_ok is False.")
            logger.info("fallback_reward=%s: %s", self.fallback_reward, failure)
        return StepScores.from_scores(scores, asked, self.fallback_reward)

    # --- what changes ------------------------------------------------------------------------------------------

    def _restart(self, rows: Mask) -> None:
        self._running.clear(rows)
        # The first reset starts every row, so what is kept is there.
        self._episodes = [
            self._new_episode(row) if starts else self._episodes[row] for row, starts in enumerate(rows.tolist())
        ]

    def _new_episode(self, row: int) -> Episode:
        number, index = self._orders.next(row)
        prompt = self.prompts[index]
        return Episode(prompt, number, list(prompt.messages))

    def _observe(self) -> Observations:
        return tuple([copy_conversation(episode.messages) for episode in self._episodes])

    def _transcribe(self, rows: Mask, scores: StepScores | None = None, done: Mask | None = None) -> None:
        if self.render_mode is None:
            return
        for row in np.flatnonzero(rows).tolist():
            outcome = []
            if scores is not None and scores.scored[row]:
                outcome.append(f"reward {scores.rewards[row]:.6g}" + ("" if scores.ok[row] else " (fallback)"))
            if done is not None and done[row]:
                outcome.append("episode over")
            episode = self._episodes[row]
            title = f"environment {row}, prompt {episode.prompt.prompt_id}"
            self._transcripts[row] = transcript(episode.messages, title=title, outcome=", ".join(outcome))

    def _print(self, rows: Mask) -> None:
        if self.render_mode == "human":
            print_transcripts([self._transcripts[row] for row in np.flatnonzero(rows)])

    # --- infos -------------------------------------------------------------------------------------------------

    def _add_episodes(self, infos: Infos, rows: Mask) -> None:
        prompts = [episode.prompt for episode in self._episodes]
        answers = np.array([prompt.answer for prompt in prompts], dtype=object)
        add_values(infos, "prompt_id", np.array([prompt.prompt_id for prompt in prompts], dtype=object), rows)
        add_values(infos, "answer", answers, rows & [answer is not None for answer in answers])
        if self.group_size > 1:
            group = np.arange(self.num_envs) // self.group_size
            numbers = np.array([episode.number for episode in self._episodes])
            add_values(infos, "group_id", group + numbers * self._orders.num_groups, rows)

    def _add_scores(self, infos: Infos, rows: Mask) -> None:
        self._scores.add_to(infos, rows)
        metrics: Infos = {}
        add_values(metrics, "count", self._running.count, rows)
        for name, values in self._running.statistics().items():
            add_values(metrics, name, values, rows & (self._running.count > 0))
        add_group(infos, "metrics", metrics)

    def _add_final(self, infos: Infos, done: Mask) -> None:
        if done.any():
            observations = np.full(self.num_envs, None, dtype=object)
            for row in np.flatnonzero(done).tolist():
                observations[row] = copy_conversation(self._episodes[row].messages)
            final: Infos = {}
            self._add_episodes(final, done)
            self._add_scores(final, done)
            infos["final_obs"], infos["_final_obs"] = observations, done.copy()
            infos["final_info"], infos["_final_info"] = final, done.copy()


_embedded: WeakValueDictionary[str, Scorer] = WeakValueDictionary()


def _load_scorer(reward_model: ScorerLike, options: Mapping[str, Any]) -> Scorer:
    """`load_scorer`, but the embedded reward model is loaded once for all environments that use it at a time.

    `SyncVectorEnv` makes one environment a row. A folder is loaded anew for each: it may have changed in between.
    """
    if reward_model is not None:
        return load_scorer(reward_model, **options)
    key = repr(sorted(options.items()))
    scorer = _embedded.get(key)
    if scorer is None:
        scorer = _embedded[key] = load_scorer(None, **options)
    return scorer


class RewardEnv(SingleEnv[list[Message], str]):
    """One conversation: the single-environment face of `RewardVectorEnv`, which its arguments are described at.

    What only takes one environment uses it (`check_env`, `SyncVectorEnv`, `AsyncVectorEnv`); to score many
    conversations together, use the vector environment.

    Example:
        >>> import gymnasium as gym, gym_rm
        >>> env = gym.make("RewardModel-v0", reward_model=lambda conversations: [1.0] * len(conversations))
        >>> observation, info = env.reset(seed=0)
        >>> observation, reward, terminated, truncated, info = env.step("four")
        >>> reward, terminated
        (1.0, True)
    """

    def __init__(
        self,
        *,
        reward_model: ScorerLike = None,
        reward_model_kwargs: Mapping[str, Any] | None = None,
        prompts: Source = None,
        group_size: int = 1,
        max_turns: int | None = None,
        respond: Responder | str | None = None,
        max_reply_length: int | None = None,
        reward_on: Literal["turn", "end"] = "turn",
        fallback_reward: float | None = None,
        max_text_length: int = MAX_LENGTH,
        render_mode: str | None = None,
    ) -> None:
        if group_size != 1:
            raise ConfigError(
                f"a group needs neighbours, got group_size={group_size} for a single environment; "
                "use gym.make_vec(..., num_envs=..., group_size=...) without a vectorization_mode."
            )
        super().__init__(
            RewardVectorEnv(
                num_envs=1,
                reward_model=reward_model,
                reward_model_kwargs=reward_model_kwargs,
                prompts=prompts,
                max_turns=max_turns,
                respond=respond,
                max_reply_length=max_reply_length,
                reward_on=reward_on,
                fallback_reward=fallback_reward,
                autoreset_mode=AutoresetMode.DISABLED,
                max_text_length=max_text_length,
                render_mode=render_mode,
            )
        )
