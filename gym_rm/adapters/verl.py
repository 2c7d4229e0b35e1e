"""verl: a reward manager.

verl passes no prompt to reward functions. The manager reads the messages that verl's data set stores in `raw_prompt`,
and the `ground_truth` becomes the prompt's `answer`, for verifiers. A reply without a score raises an error: verl then
leaves the sample out of its group, and would train on any number returned instead.

Of a process reward model, verl gets the reward alone: its group estimators add up the rewards of a reply's tokens, so
to lay the rewards of steps on their tokens would pay for more steps.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Sequence
from typing import Any

from gym_rm.data.messages import join_reply
from gym_rm.data.policy_texts import PolicyTexts
from gym_rm.data.prompts import prompt_of_columns
from gym_rm.data.rows import without_filled
from gym_rm.errors import ConfigError, ConversationError
from gym_rm.scorers.batching import shared_batching_scorer
from gym_rm.scores import Score
from gym_rm.types import Conversation, Message, Prompt


class RewardModelManager:
    """A reward manager of verl: `await manager.run_single(data)`.

    verl makes the manager if its configuration has `reward.reward_manager.source=importlib`, with
    `module.path=pkg://gym_rm.adapters.verl` and `name=RewardModelManager`.

    Args:
        config: verl's configuration; `config.reward.reward_kwargs` holds arguments of `load_scorer`.
        tokenizer: the policy's tokenizer, to decode replies and find the turns of agent loops.
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
        self._texts = PolicyTexts(tokenizer, apply_chat_template=False)
        self.scorer = shared_batching_scorer(options.pop("reward_model", None), options)

    async def run_single(self, data: Any) -> dict[str, Any]:
        """Return the reward of one sample, the last one in `data`; concurrent calls are scored in one batch."""
        loop = asyncio.get_running_loop()
        conversation, prompt = await loop.run_in_executor(None, self._row, data[-1:][0])
        scores = await asyncio.wrap_future(self.scorer.submit([conversation], [prompt]))
        (score,) = scores.raise_for_errors()
        return {"reward_score": score.reward, "reward_extra_info": _columns_of(score)}

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
        length = columns.get("response_len")
        if length is None:
            length = item.batch["attention_mask"][-responses.shape[-1] :].sum()
        said = self._messages(responses[: int(length)], int(columns.get("__num_turns__") or 0))
        conversation = join_reply(columns["raw_prompt"], said, "raw_prompt")
        rest = {name: value for name, value in columns.items() if name not in ("raw_prompt", "reward_model")}
        named = without_filled({**rest, **(columns.get("extra_info") or {})})
        named["ground_truth"] = (columns.get("reward_model") or {}).get("ground_truth")
        return conversation, prompt_of_columns(
            conversation[:-1], named, named.get("index"), answer_column="ground_truth"
        )

    def _messages(self, token_ids: Any, num_turns: int) -> Conversation:
        """Return the messages of a response. verl counts the prompt, each reply, and each turn between two of them."""
        text = self._texts.decode(token_ids)
        if num_turns == 2:
            return [Message(role="assistant", content=self._texts.reply(text))]
        if num_turns < 2:  # an agent loop that does not count
            return [Message(role="assistant", content=self._texts.only_reply(text))]
        messages = self._texts.turns(text)
        speakers = [role for role, _ in itertools.groupby(message["role"] == "assistant" for message in messages)]
        if len(speakers) != num_turns - 1 or not speakers[-1]:
            raise ConversationError(
                f"the response has {len(speakers)} turns, but the agent loop counted {num_turns - 1}: the policy wrote "
                f"the markup of a turn, or the loop does not write turns in the chat template. It is {text!r:.500}."
            )
        return messages


def _columns_of(score: Score) -> dict[str, float | None]:
    """Return the numbers that verl logs of a reply; every row of a batch needs the same ones.

    Of a component that the reply does not have it is None, which verl leaves out of its means.
    """
    return {
        "score": score.reward,
        "num_tokens": float(score.num_tokens),
        "truncated_tokens": float(score.truncated_tokens),
        **{f"component_{name}": value if math.isfinite(value) else None for name, value in score.components.items()},
    }
