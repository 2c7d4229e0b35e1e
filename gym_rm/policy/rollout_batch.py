"""Episodes in play: what the policy sees and samples, and what the environments return for it."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gym_rm.engine.text.policy_renderer import PolicyRenderer
from gym_rm.envs.infos import Infos, infos_of_row
from gym_rm.generation.completions import Completion, TokenIds
from gym_rm.policy.rollouts import THINKING, Rollout, RolloutTable, RolloutTurn
from gym_rm.types import Conversation


class RolloutBatch:
    """Episodes that are played together, one in each environment: what the policy saw and wrote, and its rewards.

    Args:
        renderer: writes conversations as the policy reads them.
        prompt_indices: prompt of each environment, int64 `[num_envs]`.
        numbers: number of each episode among those of all ranks `[num_envs]`; its random numbers depend on it.
        group_size: episodes with one prompt.
        seed: seed of the random numbers.
        rows: environments to play, bool `[num_envs]`.
        attempt: kept in the rollouts.

    Attributes:
        playing: environments whose episode has not ended, bool `[num_envs]`.
    """

    def __init__(
        self,
        renderer: PolicyRenderer,
        prompt_indices: NDArray[Any],
        numbers: NDArray[Any],
        *,
        group_size: int,
        seed: tuple[int, ...],
        rows: NDArray[Any],
        attempt: int = 0,
    ) -> None:
        self.prompt_indices, self.playing = prompt_indices, rows.copy()
        self._renderer, self._tokenizer = renderer, renderer.tokenizer
        self._numbers, self._group_size, self._seed = numbers, group_size, seed
        self._attempt, self._rows = attempt, np.flatnonzero(rows).tolist()
        self._turns: dict[int, list[RolloutTurn]] = {row: [] for row in self._rows}
        self._components: dict[int, dict[str, float]] = {row: {} for row in self._rows}
        self._verdicts: dict[int, dict[str, str]] = {row: {} for row in self._rows}
        self._asked = np.zeros_like(self.playing)
        self._seeds: dict[int, NDArray[Any]] = {}  # of a turn, by number
        self._openings: dict[int, str] = {}
        self._prompts: dict[int, TokenIds] = {}
        self._completions: dict[int, Completion] = {}

    def begin(self, observations: Sequence[Conversation], infos: Infos) -> None:
        """Take what `reset` returned."""
        self._conversations = {row: observations[row] for row in self._rows}
        self._prompt_ids, self._answers = infos["prompt_id"], infos.get("answer", [None] * len(observations))
        self._tools = infos.get("tools", [None] * len(observations))

    def requests(self) -> tuple[list[int], list[TokenIds], list[int]]:
        """Return the rows whose next reply is asked for now, what the policy sees there (int32 `[P]`), and the seeds.

        These are the rows that are played and were not asked for since their last turn.
        """
        rows = np.flatnonzero(self.playing & ~self._asked).tolist()
        if not rows:
            return [], [], []
        prompts = self._renderer.prompts([self._conversations[row] for row in rows], [self._tools[row] for row in rows])
        ends = {prompt[-16:].tobytes(): prompt[-16:] for prompt in prompts}  # the rows of a group have the same
        texts = self._tokenizer.batch_decode([*ends.values()], skip_special_tokens=False)
        openings = dict(zip(ends, map(THINKING.opening, texts), strict=True))
        self._openings |= {row: openings[prompt[-16:].tobytes()] for row, prompt in zip(rows, prompts, strict=True)}
        self._prompts |= zip(rows, prompts, strict=True)
        self._asked[rows] = True
        return rows, prompts, [self._seed_of(row) for row in rows]

    def _seed_of(self, row: int) -> int:
        turn = len(self._turns[row])
        if turn not in self._seeds:
            sequence = np.random.SeedSequence([*self._seed, turn])
            self._seeds[turn] = sequence.generate_state(self._numbers.max() + 1, np.uint64) >> 1
        return int(self._seeds[turn][self._numbers[row]])

    def replies(self, completions: Mapping[int, Completion]) -> tuple[list[str], NDArray[np.bool_]]:
        """Return the replies for all environments, from the completions of some rows, and these rows as a mask.

        A reply begins with the tag of the thinking that the template opened, so that a scorer sees the whole turn. It
        is empty where there is no completion.
        """
        self._completions |= completions
        replies, rows = [""] * len(self.playing), np.zeros(len(self.playing), bool)
        for row, completion in completions.items():
            replies[row], rows[row] = self._openings[row] + completion.text, True
        return replies, rows

    def add(
        self,
        step: tuple[Sequence[Conversation], NDArray[Any], NDArray[Any], NDArray[Any], Infos],
        rows: NDArray[np.bool_],
    ) -> None:
        """Add a turn of some rows, bool `[num_envs]`; `step` is what the environments returned for their replies."""
        observations, rewards, terminations, truncations, infos = step
        scored = infos.get("_score_ok", np.zeros(len(rewards), bool))
        ok = infos.get("score_ok", np.ones(len(rewards), bool))
        for row in np.flatnonzero(rows).tolist():
            completion = self._completions.pop(row)
            reply = self._openings[row] + completion.text
            reward = math.nan if scored[row] and not ok[row] else float(rewards[row])
            thinking = self._thinking_tokens(reply, completion)
            calls, errors = (int(infos[name][row]) if name in infos else None for name in ("tool_calls", "tool_errors"))
            self._conversations[row] = observations[row]
            steps = self._steps(row, reply, completion, infos)
            prompt = self._prompts.pop(row)
            score = float(infos["turn_score"][row]) if "turn_score" in infos and infos["_turn_score"][row] else None
            self._turns[row].append(
                RolloutTurn(prompt, completion, reward, reply, thinking, calls, errors or 0, **steps, score=score)
            )
            if score is not None:
                self._components[row].clear()  # an improvement replaces the score before
            for name, value in infos_of_row(infos.get("components", {}), row).items():
                self._components[row][name] = self._components[row].get(name, 0.0) + value
            self._verdicts[row] |= _verdicts(infos, row)
        self.playing &= ~(terminations | truncations)
        self._asked &= ~rows

    def _thinking_tokens(self, reply: str, completion: Completion) -> int:
        """Return the number of sampled tokens before the answer, or before its last part."""
        thinking, answer = THINKING.split({"content": reply})
        ids, decode = completion.token_ids, self._tokenizer.decode
        if not thinking or not answer:
            return len(ids) if thinking else 0
        backwards = zip(answer[::-1], reply.rstrip()[::-1], strict=False)
        last = next((k for k, (one, other) in enumerate(backwards) if one != other), len(answer))
        length, ids = last + len(reply) - len(reply.rstrip()), ids[: len(ids) - completion.finished]
        return len(ids) - bisect.bisect_left(range(len(ids)), length, key=lambda k: len(decode(ids[len(ids) - k :])))

    def _steps(self, row: int, reply: str, completion: Completion, infos: Infos) -> dict[str, Any]:
        """Return the rewards, ends and numbers of tokens of the steps of a reply; nothing if it has none."""
        said = next(each["content"] for each in reversed(self._conversations[row]) if each["role"] == "assistant")
        if "step_ends" not in infos or not infos["_step_ends"][row] or said not in reply:
            return {}
        rewards, ends = infos["step_rewards"][row].tolist(), infos["step_ends"][row].tolist()
        if not all(map(math.isfinite, rewards)):
            return {}
        before = len(reply) - len(completion.text) - reply.index(said)  # characters of the content that no token has
        starts = [len(said) - len(said[end:].lstrip()) - before for end in ends[:-1]]
        lengths = tokens_between(starts, completion.token_ids, self._tokenizer.decode)
        return {"step_rewards": tuple(rewards), "step_ends": tuple(ends), "step_lengths": lengths}

    def table(self) -> RolloutTable:
        """Return the episodes, which have ended."""
        rollouts = [
            Rollout(
                row=int(self._numbers[row]),
                group=int(self._numbers[row]) // self._group_size,
                prompt_id=self._prompt_ids[row],
                answer=self._answers[row],
                conversation=self._conversations[row],
                turns=tuple(self._turns[row]),
                components=self._components[row],
                attempt=self._attempt,
                verdicts=self._verdicts[row],
            )
            for row in self._rows
        ]
        return RolloutTable(rollouts)


def tokens_between(starts: Sequence[int], token_ids: TokenIds, decode: Callable[[TokenIds], str]) -> tuple[int, ...]:
    """Return the numbers of tokens before, between and after characters of the text of the tokens.

    A token belongs to the part where its last character is, as ` The` after a space that ends a part. A token may have
    only some bytes of a character: what is decoded from the tokens up to it then ends with one replacement character.

    Args:
        starts: first character of each part but the first, rising; before the text if it is negative.
        token_ids, decode: the tokens, and what makes their text.

    Example:
        >>> tokens_between([3], np.array([10, 11, 12, 13], dtype=np.int32), lambda ids: "abcdef"[: 2 * len(ids)])
        (1, 3)
    """
    cuts = [0]
    for start in starts:
        after = range(cuts[-1], len(token_ids))
        cuts.append(cuts[-1] + bisect.bisect_right(after, start, key=lambda k: len(decode(token_ids[: k + 1]))))
    return tuple(np.diff([*cuts, len(token_ids)]).tolist())


def _verdicts(infos: Infos, row: int) -> dict[str, str]:
    """Return the verdicts of verifiers on a reply: the infos `verdict`, or `<scorer>/verdict` of a mixture."""
    named = {name: values for name, values in infos.items() if name.rpartition("/")[2] in ("verdict", "_verdict")}
    return {name: value for name, value in infos_of_row(named, row).items() if isinstance(value, str)}
