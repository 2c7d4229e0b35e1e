"""Play episodes: sample replies, step the environments, and so on until all episodes have ended."""

from __future__ import annotations

import contextlib
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gymnasium as gym
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gym_rm.envs.infos import Infos, infos_of_row
from gym_rm.errors import ConfigError, GymRMError, brief
from gym_rm.generation.completions import Sampler
from gym_rm.scorer import Scorer
from gym_rm.training.learner import Learner
from gym_rm.training.policy_settings import GRPOSettings
from gym_rm.training.rollouts import Episode, Turn
from gym_rm.training.samplers import Source, local_source, make_sampler
from gym_rm.types import Conversation, Prompt

TRAINING, HELD_OUT = 0, 1  # streams of random numbers


def play(
    envs: Any,
    sampler: Sampler,
    tokenizer: Any,
    *,
    prompt_indices: NDArray[Any],
    group_size: int,
    numbers: NDArray[Any],
    seed: tuple[int, ...],
    rows: NDArray[Any],
    clock: Clock,
    attempt: int = 0,
) -> list[Episode]:
    """Play one episode in each environment: sample replies, step, and so on until all have ended.

    Args:
        envs: environments in the autoreset mode `DISABLED`.
        sampler: the policy.
        tokenizer: writes conversations as the policy reads them.
        prompt_indices: prompt of each environment.
        group_size: environments with one prompt.
        numbers: number of each environment's episode among those of all ranks; its random numbers depend on it.
        seed: seed of the random numbers.
        rows: bool `[num_envs]`, environments to play.
        clock: measures both phases; one thread samples at a time, while others score.
        attempt: kept in the episodes.

    Raises:
        GymRMError: the scorer or the user simulator raised an error.
    """
    observations, about = envs.reset(options={"prompt_indices": prompt_indices})
    playing = rows.copy()
    turns: dict[int, list[Turn]] = {row: [] for row in np.flatnonzero(rows).tolist()}
    components: dict[int, dict[str, float]] = {row: {} for row in turns}
    verdicts: dict[int, dict[str, str]] = {row: {} for row in turns}
    conversations = dict(zip(turns, (observations[row] for row in turns), strict=True))
    while playing.any():
        at = np.flatnonzero(playing).tolist()
        prompts = [render(tokenizer, observations[row]) for row in at]
        seeds = np.random.SeedSequence([*seed, len(turns[at[0]])]).generate_state(numbers.max() + 1, np.uint64) >> 1
        with clock.sampling():
            completions = sampler.sample(prompts, seeds=seeds[numbers[at]].tolist())
        replies = [""] * envs.num_envs
        for row, completion in zip(at, completions, strict=True):
            replies[row] = completion.text
        with clock.scoring(), _in_one_line():
            observations, rewards, terminations, truncations, infos = envs.step(replies, rows=playing)
        scored, ok = infos.get("_score_ok", np.zeros(envs.num_envs, bool)), infos.get("score_ok")
        for row, prompt, completion in zip(at, prompts, completions, strict=True):
            missing = scored[row] and not ok[row]
            turns[row].append(Turn(prompt, completion, math.nan if missing else float(rewards[row])))
            conversations[row] = observations[row]
            for name, value in infos_of_row(infos.get("components", {}), row).items():
                components[row][name] = components[row].get(name, 0.0) + value
            verdicts[row] |= _verdicts(infos, row)
        playing &= ~(terminations | truncations)
    answers = about.get("answer", [None] * envs.num_envs)
    return [
        Episode(
            int(numbers[row]),
            int(numbers[row]) // group_size,
            about["prompt_id"][row],
            answers[row],
            conversations[row],
            tuple(turns[row]),
            components[row],
            attempt,
            verdicts[row],
        )
        for row in turns
    ]


def _verdicts(infos: Infos, row: int) -> dict[str, str]:
    """Return the verdicts of verifiers on a reply: the infos `verdict`, or `<scorer>/verdict` of a mixture."""
    named = {name: values for name, values in infos.items() if name.rpartition("/")[2] in ("verdict", "_verdict")}
    return {name: value for name, value in infos_of_row(named, row).items() if isinstance(value, str)}


@contextlib.contextmanager
def _in_one_line() -> Iterator[None]:
    """Name the place of an error in the code of a user, which has no message of ours."""
    try:
        yield
    except GymRMError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise GymRMError(f"scoring failed at {last.filename}, line {last.lineno}: {brief(error)}") from error


def render(tokenizer: Any, conversation: Conversation) -> NDArray[Any]:
    """Return the tokens of a conversation up to where the policy replies, int32 `[P]`."""
    ids = tokenizer.apply_chat_template(
        [dict(message) for message in conversation], add_generation_prompt=True, return_dict=False
    )
    return np.array(ids, dtype=np.int32)


class Clock:
    """Seconds of sampling and scoring; one thread samples at a time."""

    def __init__(self) -> None:
        self._turn, self._adding = threading.Lock(), threading.Lock()
        self._seconds = {"generate": 0.0, "score": 0.0}

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Measure sampling, when no other thread samples."""
        with self._turn, self._measured("generate"):
            yield

    def scoring(self) -> contextlib.AbstractContextManager[None]:
        """Measure a step of environments."""
        return self._measured("score")

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call."""
        with self._adding:
            seconds, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return seconds

    @contextlib.contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            with self._adding:
                self._seconds[name] += time.perf_counter() - started


class Rollouts:
    """The episodes of each step, from environments that share a reward model.

    A step has the same prompts and random numbers however it is divided among ranks and parts.

    Args:
        settings: settings of the run.
        learner: the policy.
        prompts: prompts to train on.
        scorer: the reward model.
        without_signal: returns the groups of episodes that dynamic sampling replaces.

    Raises:
        ConfigError: the prompts of a step cannot be divided among processes and parts.
    """

    def __init__(
        self,
        settings: GRPOSettings,
        learner: Learner,
        prompts: Sequence[Prompt],
        scorer: Scorer,
        *,
        without_signal: Callable[[Sequence[Episode], GRPOSettings], NDArray[Any]],
    ) -> None:
        self.settings, self.learner, self._num_training = settings, learner, len(prompts)
        self._without_signal = without_signal
        if not prompts:
            raise ConfigError("there is no prompt to train on; env.prompts needs at least one.")
        shares = learner.world * settings.rollout_parts
        if settings.env.num_prompts % shares:
            raise ConfigError(
                f"env.num_prompts={settings.env.num_prompts} must be a multiple of processes times rollout_parts, "
                f"{learner.world} x {settings.rollout_parts}."
            )
        self.source = make_sampler(settings, learner)
        self._clock = Clock()
        self._prompts_of_part = settings.env.num_prompts // shares
        size = self._prompts_of_part * settings.env.group_size
        self._envs = [make_envs(settings, prompts, scorer, size) for _ in range(settings.rollout_parts)]
        self._threads = ThreadPoolExecutor(settings.rollout_parts, "parts") if settings.rollout_parts > 1 else None

    def make(self, step: int, weights: Mapping[str, Tensor] | None, version: int) -> list[Episode]:
        """Return this rank's episodes of a step, by the weights after some number of steps."""
        self.source.take(weights, version=version)
        number = self.settings.env.num_prompts
        places = np.arange((step - 1) * number, step * number)  # in the stream of prompts, shuffled in every epoch
        epochs = places // self._num_training
        order = {
            epoch: np.random.default_rng([self.settings.seed, epoch]).permutation(self._num_training)
            for epoch in set(epochs.tolist())
        }
        pairs = zip(epochs.tolist(), (places % self._num_training).tolist(), strict=True)
        prompts = np.array([order[epoch][place] for epoch, place in pairs])
        if self._threads is None:
            return self._part(0, step, prompts)
        parts = [self._threads.submit(self._part, part, step, prompts) for part in range(len(self._envs))]
        return [episode for part in parts for episode in part.result()]

    def seconds(self) -> dict[str, float]:
        """Return the seconds of sampling and scoring since the last call."""
        return self._clock.take()

    def close(self) -> None:
        """Close sampler and environments."""
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)
        self.source.close()
        for envs in self._envs:
            envs.close()

    def _part(self, part: int, step: int, prompts: NDArray[Any]) -> list[Episode]:
        """Return the episodes of a part; with dynamic sampling, flat groups are replaced by those of other prompts."""
        size, options = self.settings.env.group_size, self.settings.advantage
        first = (self.learner.rank * len(self._envs) + part) * self._prompts_of_part
        slots = np.arange(first, first + self._prompts_of_part)
        indices, replaced = prompts[slots], np.ones(len(slots), bool)
        episodes: dict[int, Episode] = {}
        for attempt in range(1 + (options.max_extra_batches if options.dynamic_sampling else 0)):
            played = play(
                self._envs[part],
                self.source.sampler,
                self.learner.start.tokenizer,
                prompt_indices=np.repeat(indices, size),
                group_size=size,
                numbers=np.arange(first * size, (first + len(slots)) * size),
                seed=(self.settings.seed, TRAINING, step, attempt),
                rows=np.repeat(replaced, size),
                clock=self._clock,
                attempt=attempt,
            )
            episodes |= {episode.row: episode for episode in played}
            replaced = np.isin(slots, self._without_signal(list(episodes.values()), self.settings))
            if not replaced.any():
                break
            fresh = np.random.default_rng([self.settings.seed, step, attempt + 1])
            others = fresh.integers(self._num_training, size=len(prompts))
            indices = np.where(replaced, others[slots], indices)
        return [episodes[row] for row in sorted(episodes)]


class Measurements:
    """Episodes of the held-out prompts, one for each, always with the same random numbers.

    Args:
        settings: settings of the run.
        learner: the policy.
        prompts: held-out prompts.
        scorer: the reward model.
        source: the sampler of the run, which is used here too unless it samples ahead of the updates.
    """

    def __init__(
        self, settings: GRPOSettings, learner: Learner, prompts: Sequence[Prompt], scorer: Scorer, source: Source
    ) -> None:
        self.settings, self.learner, self._num_prompts = settings, learner, len(prompts)
        self._ahead = settings.max_staleness > 0
        self.source = local_source(settings, learner, own_copy=settings.optimizer.fsdp) if self._ahead else source
        size = min(settings.eval.batch_size, len(prompts))
        self._envs = make_envs(settings, prompts, scorer, size, grouped=False) if prompts else None

    def make(self) -> list[Episode]:
        """Return the episodes of all ranks, in the order of prompts."""
        learner, envs = self.learner, self._envs
        if envs is None:
            return []
        self.source.take(self.source.current_weights(), version=learner.version)
        ours = np.arange(learner.rank, self._num_prompts, learner.world)
        episodes = []
        for start in range(0, len(ours), envs.num_envs):
            batch = ours[start : start + envs.num_envs]
            episodes += play(
                envs,
                self.source.sampler,
                learner.start.tokenizer,
                prompt_indices=np.pad(batch, (0, envs.num_envs - len(batch))),
                group_size=1,
                numbers=np.pad(batch, (0, envs.num_envs - len(batch))),
                seed=(self.settings.seed, HELD_OUT),
                rows=np.arange(envs.num_envs) < len(batch),
                clock=Clock(),
            )
        return sorted(learner.gathered_objects(episodes), key=lambda episode: episode.row)

    def close(self) -> None:
        """Close the environments, and the sampler if it is not that of the run."""
        if self._ahead:
            self.source.close()
        if self._envs is not None:
            self._envs.close()


def make_envs(
    settings: GRPOSettings, prompts: Sequence[Prompt], scorer: Scorer, num_envs: int, *, grouped: bool = True
) -> Any:
    """Return the environments, which end episodes without starting new ones."""
    env = settings.env
    return gym.make_vec(
        "RewardModel-v0",
        num_envs,
        reward_model=scorer,
        prompts=prompts,
        group_size=env.group_size if grouped else 1,
        max_turns=env.max_turns,
        respond=env.respond,
        reward_on=env.reward_on,
        fallback_reward=env.fallback_reward,
        autoreset_mode="Disabled",
    )
