"""verl: a reward function and a reward manager.

verl does not pass the prompt to reward functions, so these functions read it from `extra_info`. The manager reads the
messages that verl's data set stores in `raw_prompt`. The `ground_truth` becomes the prompt's `answer`, for verifiers.
A reply without a score raises an error: verl has no missing reward and would train on any number returned instead.

The rewards of the steps of a reply are only columns. verl's group estimators add up the rewards of a reply's tokens, so
to lay them on the tokens of the steps would pay for more steps.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from gym_rm.data.messages import join_reply
from gym_rm.data.policy_texts import decode_reply
from gym_rm.data.prompts import prompt_of_columns
from gym_rm.data.rows import without_filled
from gym_rm.errors import ConfigError
from gym_rm.scorers.batching import MicroBatchingScorer, shared_batching_scorer
from gym_rm.types import Conversation, Prompt

Result = dict[str, Any]


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    reward_model: Any = None,
    **options: Any,
) -> Result:
    """Score one reply; use it as verl's `custom_reward_function`: `path=pkg://gym_rm.adapters.verl name=compute_score`.

    The prompt is `extra_info["prompt"]` (a text or messages) or `extra_info["question"]`. Concurrent calls are scored
    in one batch.

    Args:
        data_source: name of the data set; stored in the prompt's `metadata`.
        solution_str: the reply.
        ground_truth: the prompt's `answer`. A value that is neither a text nor a number is stored in `metadata`.
        extra_info: other columns of the data set's row.
        reward_model, options: arguments of `load_scorer`; verl takes them from `reward_kwargs` of its configuration.

    Returns:
        `score`, `num_tokens`, `truncated_tokens`, `component_{name}` for each component of the reward, `num_steps`
        (0 if the scorer does not rate steps), and `step_rewards` and `step_ends` as JSON texts: every row needs all
        columns, and verl puts those of a batch into one array, which lists of different lengths do not fit into.

    Raises:
        ConfigError: `extra_info` has no prompt.
        ScoringError: the reply has no score.
    """
    conversation, prompt = _row(data_source, solution_str, ground_truth, extra_info)
    return await _score(shared_batching_scorer(reward_model, options), conversation, prompt)


class RewardModelManager:
    """A reward manager of verl: `await manager.run_single(data)`.

    verl makes the manager if its configuration has `reward.reward_manager.source=importlib`, with
    `module.path=pkg://gym_rm.adapters.verl` and `name=RewardModelManager`.

    Args:
        config: verl's configuration; `config.reward.reward_kwargs` holds arguments of `load_scorer`.
        tokenizer: the policy's tokenizer, to decode replies.
        compute_score, num_examine, reward_fn_key, reward_router_address, reward_model_tokenizer: ignored; verl passes
            them to every manager.
        reward_kwargs: arguments of `load_scorer`; they override those of the configuration.
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
        self.scorer = shared_batching_scorer(options.pop("reward_model", None), options)

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Return the reward of one sample, the last one in `data`; concurrent calls are scored in one batch."""
        loop = asyncio.get_running_loop()
        conversation, prompt = await loop.run_in_executor(None, self._row, data[-1:][0])
        result = await _score(self.scorer, conversation, prompt)
        return {"reward_score": result["score"], "reward_extra_info": result}

    @classmethod
    def assemble_rm_scores(cls, data: Any, scores: Sequence[float]) -> Any:
        """Return N rewards as `[N, response_length]`, each at the last token of its reply."""
        import torch

        lengths = data.batch["attention_mask"][:, data.batch["prompts"].shape[-1] :].sum(dim=1)
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        rewards[torch.arange(len(rewards)), lengths - 1] = torch.tensor(list(scores), dtype=torch.float32)
        return rewards

    def _row(self, item: Any) -> tuple[Conversation, Prompt]:
        columns = item.non_tensor_batch
        if "raw_prompt" not in columns:
            raise ConfigError(
                "the batch has no column 'raw_prompt' with the messages of the prompt, only the columns "
                f"{sorted(columns)}; set data.return_raw_chat=True."
            )
        responses = item.batch["responses"]
        length = int(item.batch["attention_mask"][-responses.shape[-1] :].sum())
        reply = decode_reply(self.tokenizer, responses[:length])
        conversation = join_reply(columns["raw_prompt"], reply, "raw_prompt")
        ground_truth = (columns.get("reward_model") or {}).get("ground_truth")
        rest = {name: value for name, value in columns.items() if name not in ("raw_prompt", "reward_model")}
        return conversation, _prompt(conversation, {**rest, **(columns.get("extra_info") or {})}, ground_truth)


def _row(
    data_source: str, reply: str, ground_truth: Any, extra_info: Mapping[str, Any] | None
) -> tuple[Conversation, Prompt]:
    info = extra_info or {}
    text = info.get("question") if info.get("prompt") is None else info["prompt"]
    if text is None:
        raise ConfigError(
            f"extra_info has no prompt, only the keys {sorted(info)}. verl does not pass the prompt to reward "
            "functions: put it into extra_info as 'prompt' (messages or a text) or 'question', or use "
            "RewardModelManager, which reads 'raw_prompt'."
        )
    conversation = join_reply(text, reply, "extra_info['prompt']")
    return conversation, _prompt(conversation, {"data_source": data_source, **info}, ground_truth)


def _prompt(conversation: Conversation, columns: Mapping[str, Any], ground_truth: Any) -> Prompt:
    columns = {**without_filled(columns), "ground_truth": ground_truth}
    return prompt_of_columns(conversation[:-1], columns, columns.get("index"), answer_column="ground_truth")


async def _score(scorer: MicroBatchingScorer, conversation: Conversation, prompt: Prompt) -> Result:
    (score,) = (await asyncio.wrap_future(scorer.submit([conversation], [prompt]))).raise_for_errors()
    steps = [[] if each is None else each.tolist() for each in (score.step_rewards, score.step_ends)]
    return {
        "score": score.reward,
        "num_tokens": float(score.num_tokens),
        "truncated_tokens": float(score.truncated_tokens),
        **{f"component_{name}": value for name, value in score.components.items()},
        "num_steps": float(len(steps[0])),
        "step_rewards": json.dumps(steps[0]),
        "step_ends": json.dumps(steps[1]),
    }
