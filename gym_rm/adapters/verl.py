"""verl: a reward function, its batched form, and a reward manager.

verl decodes the reply for a reward function but does not pass the prompt, so the functions read it from `extra_info`;
the manager reads the messages that verl's dataset keeps (`raw_prompt`). The `ground_truth` reaches verifiers as the
prompt's `answer`. A failure is raised: verl has no missing reward, and would train on any number in its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from gym_rm.data.messages import join_reply
from gym_rm.data.prompts import prompt_of_columns
from gym_rm.errors import ConfigError
from gym_rm.scorers.batching import shared_batching_scorer
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Prompt

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

    The prompt is `extra_info["prompt"]` (a text or messages) or `extra_info["question"]`. Calls that arrive together
    are scored together.

    Args:
        data_source: goes to the scorer in the prompt's `metadata`.
        solution_str: the reply.
        ground_truth: the prompt's `answer`; a value that is neither text nor a number goes to its `metadata`.
        extra_info: the other columns of the dataset's row.
        reward_model: what `load_scorer` takes, `options` with it, as `reward_kwargs` of the configuration.

    Returns:
        `score`, `num_tokens`, `truncated_tokens` and `component_{name}` for each component of the reward.

    Raises:
        ConfigError: `extra_info` has no prompt.
        ScoringError: the reply has no score.
    """
    conversation, prompt = _row(data_source, solution_str, ground_truth, extra_info, 0)
    scorer = shared_batching_scorer(reward_model, options)
    return _results(await asyncio.wrap_future(scorer.submit([conversation], [prompt])))[0]


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
    sizes = [len(each) for each in (data_sources, solution_strs, ground_truths, extra_infos)]
    if len(set(sizes)) > 1:
        raise ConfigError(
            "data_sources, solution_strs, ground_truths and extra_infos must have one entry for each reply, got "
            f"{sizes} entries."
        )
    columns = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    rows = [_row(*row, index) for index, row in enumerate(columns)]
    scorer = shared_batching_scorer(reward_model, options)
    return _results(scorer.score([conversation for conversation, _ in rows], [prompt for _, prompt in rows]))


class RewardModelManager:
    """A reward manager in both of verl's forms: `manager(data, return_dict=True)` and `await manager.run_single(data)`.

    With `reward.reward_manager.source=importlib` verl makes it by itself from
    `module.path=pkg://gym_rm.adapters.verl` and `name=RewardModelManager`; the reward model is then
    `config.reward.reward_kwargs`.

    Args:
        config: verl's configuration.
        tokenizer: the policy's, to decode replies.
        compute_score, num_examine, reward_fn_key, reward_router_address, reward_model_tokenizer: not used; verl passes
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
        self.scorer = shared_batching_scorer(options.pop("reward_model", None), options)

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        """Rewards `[B, response_length]`, each at the last token of its reply, in one score call."""
        rows = [self._row(data[row], row) for row in range(len(data))]
        scores = self.scorer.score([conversation for conversation, _ in rows], [prompt for _, prompt in rows])
        results = _results(scores)
        rewards = self.assemble_rm_scores(data, [result["score"] for result in results])
        if not return_dict:
            return rewards
        info = {name: [result[name] for result in results] for name in results[0]} if results else {}
        return {"reward_tensor": rewards, "reward_extra_info": info}

    async def run_single(self, data: Any) -> dict[str, Any]:
        """The reward of one sample (the last, where there are several); concurrent calls are scored together."""
        loop = asyncio.get_running_loop()
        conversation, prompt = await loop.run_in_executor(None, self._row, data[-1:][0], 0)
        (result,) = _results(await asyncio.wrap_future(self.scorer.submit([conversation], [prompt])))
        return {"reward_score": result["score"], "reward_extra_info": result}

    @classmethod
    def assemble_rm_scores(cls, data: Any, scores: Sequence[float]) -> Any:
        """N rewards as `[N, response_length]`, each at the last token of its reply."""
        import torch

        lengths = data.batch["attention_mask"][:, data.batch["prompts"].shape[-1] :].sum(dim=1)
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        rewards[torch.arange(len(rewards)), lengths - 1] = torch.tensor(list(scores), dtype=torch.float32)
        return rewards

    def _row(self, item: Any, index: int) -> tuple[Conversation, Prompt]:
        columns = item.non_tensor_batch
        if "raw_prompt" not in columns:
            raise ConfigError(
                "the batch has no 'raw_prompt', the messages of the prompt; set data.return_raw_chat=True "
                f"(it has {sorted(columns)})."
            )
        responses = item.batch["responses"]
        length = int(item.batch["attention_mask"][-responses.shape[-1] :].sum())
        reply = self.tokenizer.decode(responses[:length], skip_special_tokens=True)
        conversation = join_reply(columns["raw_prompt"], reply, "raw_prompt")
        ground_truth = (columns.get("reward_model") or {}).get("ground_truth")
        rest = {name: value for name, value in columns.items() if name not in ("raw_prompt", "reward_model")}
        return conversation, _prompt(conversation, {**rest, **(columns.get("extra_info") or {})}, ground_truth, index)


def _row(
    data_source: str, reply: str, ground_truth: Any, extra_info: Mapping[str, Any] | None, index: int
) -> tuple[Conversation, Prompt]:
    info = extra_info or {}
    text = info.get("prompt", info.get("question"))
    if text is None:
        raise ConfigError(
            "a reward model needs the prompt, which verl does not pass to reward functions: put it into the "
            f"dataset's extra_info as 'prompt' (messages or a text) or 'question'; got {sorted(info)}. "
            "RewardModelManager needs no such column."
        )
    conversation = join_reply(text, reply, "extra_info['prompt']")
    return conversation, _prompt(conversation, {"data_source": data_source, **info}, ground_truth, index)


def _prompt(conversation: Conversation, columns: Mapping[str, Any], ground_truth: Any, index: int) -> Prompt:
    columns = {**columns, "ground_truth": ground_truth}
    return prompt_of_columns(conversation[:-1], columns, columns.get("index", index), answer_column="ground_truth")


def _results(scores: Scores) -> list[Result]:
    columns = {
        "score": scores.raise_for_errors().rewards.astype(float).tolist(),
        "num_tokens": scores.num_tokens.astype(float).tolist(),
        "truncated_tokens": scores.truncated_tokens.astype(float).tolist(),
        **{f"component_{name}": values.tolist() for name, values in scores.components.items()},
    }
    return [{name: column[row] for name, column in columns.items()} for row in range(len(scores))]
