"""With one update per batch, the gradient over trees equals that of TRL's GRPOTrainer for the same samples."""

import numpy as np
import pytest
import tiny_models
import torch

from gym_rm.policy.trained_policy import StartPolicy, TrainedPolicy
from gym_rm.policy.turn_batches import policy_batches
from gym_rm.training.layouts import choose_layout
from tests.policy.turns import difference, gradients, gsm8k_turns

TEMPERATURE, LONGEST = 0.9, 16


def weights(turns, normalisation):
    """Return the weight of each turn's tokens in the sum that is the loss."""
    lengths = np.array([len(each.completion.token_ids) for each in turns])
    return {
        "bnpo": np.full(len(turns), 1 / lengths.sum()),
        "grpo": 1 / (lengths * len(turns)),
        "dr_grpo": np.full(len(turns), 1 / (len(turns) * LONGEST)),
    }[normalisation]


def padded(rows, *, left):
    width = max(map(len, rows))
    ids, mask = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(2))
    for k, row in enumerate(rows):
        part = slice(width - len(row), width) if left else slice(0, len(row))
        ids[k, part], mask[k, part] = torch.from_numpy(row.astype(np.int64)), 1
    return ids, mask


@pytest.fixture(scope="module")
def samples():
    model = tiny_models.policy("qwen3", initializer_range=0.1)
    tokenizer = tiny_models.tokenizer("qwen")
    turns, groups = gsm8k_turns(tokenizer, problems=2, length=LONGEST)
    turns[1].completion.token_ids.resize(5, refcheck=False)  # replies of several lengths
    return model, tokenizer, turns, groups, np.random.default_rng(0).standard_normal(len(turns)).astype(np.float32)


@pytest.mark.parametrize("normalisation", ["bnpo", "grpo", "dr_grpo"])
def test_the_gradient_equals_that_of_trl(normalisation, samples, tmp_path):
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    model, tokenizer, turns, groups, advantages = samples
    config = trl.GRPOConfig(
        output_dir=str(tmp_path),
        loss_type=normalisation,
        beta=0.0,
        temperature=TEMPERATURE,
        max_completion_length=LONGEST,
        per_device_train_batch_size=len(turns),
        num_generations=len(turns),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
    )
    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **rest: [0.0] * len(completions),
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": "1"}]),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    prompts, prompt_mask = padded([each.prompt for each in turns], left=True)
    replies, reply_mask = padded([each.completion.token_ids for each in turns], left=False)
    inputs = {"prompt_ids": prompts, "prompt_mask": prompt_mask, "completion_ids": replies}
    inputs |= {"completion_mask": reply_mask, "advantages": torch.from_numpy(advantages)}
    expected = gradients(trainer._compute_loss(model.train(), inputs), model)

    policy = TrainedPolicy(StartPolicy(model, None, tokenizer, "tiny"), temperature=TEMPERATURE)
    layout = choose_layout(policy, model, tree=True, fuse=True)
    loss = torch.zeros(())
    for batch in policy_batches(turns, groups, layout=layout.layout, max_num_batched_tokens=300):
        log_probs, _ = policy(batch)
        ratio = torch.exp(log_probs - log_probs.detach())
        factors = (weights(turns, normalisation) * advantages)[batch.rows]
        loss = loss - (ratio * torch.from_numpy(factors).float()).sum()
    assert difference(gradients(loss, model), expected) < 1e-4
