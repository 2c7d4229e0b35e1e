"""verl: a reward function, its batched form, and a reward manager.

verl decodes the reply for a reward function but keeps the prompt to itself, so the functions read the prompt from
`extra_info`; the manager reads the messages that verl's dataset keeps (`raw_prompt`). A failure is raised: verl has no
missing reward, and a number in its place would train on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from gym_rm.data.messages import conversation, rewards_or_none
from gym_rm.scorers.batching import shared_scorer
from gym_rm.errors import ConfigError
from gym_rm.types import Conversation, Scores

Result = dict[str, float]


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    reward_model: Any = None,
    **options: Any,
) -> Result:
    """verl's `custom_reward_function`: `path=pkg://gym_rm.adapters.verl name=compute_score`.

    The prompt is `extra_info["prompt"]` (a text or messages) or `extra_info["question"]`. What verl asks for at the
    same time is scored together.

    Args:
        data_source, ground_truth: not looked at.
        solution_str: the reply.
        extra_info: what the dataset's row holds beside the prompt.
        reward_model: what `load_scorer` takes, `options` with it, as `reward_kwargs` of the configuration.

    Returns:
        `score`, `num_tokens`, `truncated_tokens` and `head_{name}` for each part of the reward.

    Raises:
        ConfigError: no prompt in `extra_info`.
        ScoringError: the reply has no score.
    """
    scorer = shared_scorer(reward_model, options)
    scores = await asyncio.wrap_future(scorer.submit([_conversation(solution_str, extra_info)]))
    return _results(scores)[0]


def compute_scores(
    data_sources: Sequence[str],
    solution_strs: Sequence[str],
    ground_truths: Sequence[Any],
    extra_infos: Sequence[Mapping[str, Any] | None],
    *,
    reward_model: Any = None,
    **options: Any,
) -> list[Result]:
    """The same for verl's reward manager `batch`: N replies in one score call."""
    rows = zip(solution_strs, extra_infos, strict=True)
    return _results(shared_scorer(reward_model, options).score([_conversation(reply, info) for reply, info in rows]))


class RewardModelManager:
    """A reward manager in both of verl's forms: `manager(data, return_dict=True)` and `await manager.run_single(data)`.

    With `reward.reward_manager.source=importlib` verl makes it by itself from
    `module.path=pkg://gym_rm.adapters.verl` and `name=RewardModelManager`; the reward model is then
    `config.reward.reward_kwargs`.

    Args:
        config: verl's configuration.
        tokenizer: the policy's, to decode replies.
        compute_score, num_examine, reward_fn_key, reward_router_address, reward_model_tokenizer: not used; verl gives
            them to every manager.
        reward_model: what `load_scorer` takes, `options` with it.
    """

    def __init__(
        self,
        config: Any = None,
        tokenizer: Any = None,
        compute_score: Any = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
        *,
        num_examine: int = 0,
        reward_fn_key: str = "data_source",
        **reward_kwargs: Any,
    ) -> None:
        configured = {} if config is None else dict(config.reward.get("reward_kwargs") or {})
        options = {**configured, **reward_kwargs}
        self.tokenizer = tokenizer
        self.scorer = shared_scorer(options.pop("reward_model", None), options)

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        """Rewards `[B, response_length]`, each at the last token of its reply, in one score call."""
        results = _results(self.scorer.score([self._conversation(data[row]) for row in range(len(data))]))
        rewards = self.assemble_rm_scores(data, [result["score"] for result in results])
        if not return_dict:
            return rewards
        info = {name: [result[name] for result in results] for name in results[0]} if results else {}
        return {"reward_tensor": rewards, "reward_extra_info": info}

    async def run_single(self, data: Any) -> dict[str, Any]:
        """The reward of one sample (the last, where there are several); concurrent calls are scored together."""
        loop = asyncio.get_running_loop()
        scored = await loop.run_in_executor(None, self._conversation, data[-1:][0])
        (result,) = _results(await asyncio.wrap_future(self.scorer.submit([scored])))
        return {"reward_score": result["score"], "reward_extra_info": result}

    @classmethod
    def assemble_rm_scores(cls, data: Any, scores: Sequence[float]) -> Any:
        """N rewards as `[N, response_length]`, each at the last token of its reply."""
        import torch

        lengths = data.batch["attention_mask"][:, data.batch["prompts"].shape[-1] :].sum(dim=1)
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        rewards[torch.arange(len(rewards)), lengths - 1] = torch.tensor(list(scores), dtype=torch.float32)
        return rewards

    def _conversation(self, item: Any) -> Conversation:
        if "raw_prompt" not in item.non_tensor_batch:
            raise ConfigError(
                "the batch has no 'raw_prompt', the messages of the prompt; set data.return_raw_chat=True "
                f"(it has {sorted(item.non_tensor_batch)})."
            )
        responses = item.batch["responses"]
        length = int(item.batch["attention_mask"][-responses.shape[-1] :].sum())
        reply = self.tokenizer.decode(responses[:length], skip_special_tokens=True)
        return conversation(item.non_tensor_batch["raw_prompt"], reply, "raw_prompt")


def _conversation(reply: str, extra_info: Mapping[str, Any] | None) -> Conversation:
    info = extra_info or {}
    prompt = info.get("prompt", info.get("question"))
    if prompt is None:
        raise ConfigError(
            "a reward model needs the prompt, which verl does not pass to reward functions: put it into the "
            f"dataset's extra_info as 'prompt' (messages or a text) or 'question'; got {sorted(info)}. "
            "RewardModelManager needs no such column."
        )
    return conversation(prompt, reply, "extra_info['prompt']")


def _results(scores: Scores) -> list[Result]:
    rewards = rewards_or_none(scores)
    assert None not in rewards, "score raises ScoringError for rows without a score"
    columns = {
        "score": rewards,
        "num_tokens": scores.num_tokens.astype(float).tolist(),
        "truncated_tokens": scores.truncated_tokens.astype(float).tolist(),
        **{f"head_{name}": values.tolist() for name, values in scores.heads.items()},
    }
    return [{name: column[row] for name, column in columns.items()} for row in range(len(scores))]
