"""Advantages, losses and gradients over trees equal those of TRL for the same samples."""

import math

import numpy as np
import pytest
import tiny_models
import torch

from gym_rm.policy.advantages import estimate_advantages
from gym_rm.policy.grpo_settings import PolicyLossSettings
from gym_rm.policy.losses import LossInputs, policy_loss, token_weights
from gym_rm.policy.trained_policy import StartPolicy, TrainedPolicy
from gym_rm.policy.turn_batches import policy_batches
from gym_rm.training.layouts import choose_layout
from tests.policy.turns import difference, gradients, gsm8k_turns

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
TEMPERATURE, LONGEST = 0.9, 16


def padded(rows, *, left=False):
    width = max(map(len, rows))
    values = torch.zeros(len(rows), width, dtype=torch.from_numpy(rows[0]).dtype)
    for k, row in enumerate(rows):
        values[k, slice(width - len(row), width) if left else slice(0, len(row))] = torch.from_numpy(row)
    return values


@pytest.fixture(scope="module")
def samples():
    model = tiny_models.policy("qwen3", initializer_range=0.1)
    tokenizer = tiny_models.tokenizer("qwen")
    turns, groups = gsm8k_turns(tokenizer, problems=2, length=LONGEST)
    turns[1].completion.token_ids.resize(5, refcheck=False)  # replies of several lengths
    return model, tokenizer, turns, groups


def loss_of_trl(loss_type, samples, advantages, log_probs, folder, *, beta):
    """Return TRL's loss; `log_probs` are those of the old policy, the reference and the sampler, by turn."""
    model, tokenizer, turns, _ = samples
    config = trl.GRPOConfig(
        output_dir=str(folder),
        loss_type=loss_type,
        temperature=TEMPERATURE,
        epsilon=0.2,
        epsilon_high=0.3,
        max_completion_length=LONGEST,
        per_device_train_batch_size=len(turns),
        num_generations=len(turns),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        beta=0.0,
        use_bias_correction_kl=False,
    )
    trainer = trl.GRPOTrainer(
        model,
        reward_funcs=lambda completions, **rest: [0.0] * len(completions),
        args=config,
        train_dataset=datasets.Dataset.from_list([{"prompt": "1"}]),
        processing_class=tokenizer,
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.beta = beta  # the configuration would load a reference
    trainer.use_vllm = trainer.vllm_importance_sampling_correction = beta > 0
    old, reference, sampler = log_probs
    completions = [each.completion.token_ids.astype(np.int64) for each in turns]
    prompts = [each.prompt.astype(np.int64) for each in turns]
    mask = padded([np.ones_like(each) for each in completions])
    inputs = {
        "prompt_ids": padded(prompts, left=True),
        "prompt_mask": padded([np.ones_like(each) for each in prompts], left=True),
        "completion_ids": padded(completions),
        "completion_mask": mask,
        "advantages": torch.from_numpy(advantages),
        "old_per_token_logps": padded(old),
        "ref_per_token_logps": padded(reference),
        "importance_sampling_ratio": (padded(old) - padded(sampler)).exp().clamp(max=1.2),
        "num_items_in_batch": mask.sum(),
    }
    return trainer._compute_loss(model.train(), inputs)


@pytest.mark.parametrize(
    ("loss_type", "normalisation", "beta", "ours"),
    [
        ("bnpo", "token_mean", 0.0, {"importance_cap": None}),
        ("grpo", "sequence_mean", 0.0, {"importance_cap": None}),
        ("dr_grpo", "constant_length", 0.0, {"importance_cap": None}),
        ("dapo", "token_mean", 0.1, {"kl_coef": 0.1, "importance_cap": 1.2}),
    ],
)
def test_losses_and_gradients_equal_those_of_trl(loss_type, normalisation, beta, ours, samples, tmp_path):
    model, tokenizer, turns, groups = samples
    policy = TrainedPolicy(StartPolicy(model, None, tokenizer, "tiny"), temperature=TEMPERATURE)
    layout = choose_layout(policy, model, tree=True, fuse=True)
    batches = policy_batches(turns, groups, layout=layout.layout, max_num_batched_tokens=300)
    random = np.random.default_rng(0)
    lengths = np.array([len(each.completion.token_ids) for each in turns])
    now = {}
    for batch in batches:
        now |= dict(
            zip(
                batch.turns,
                np.split(policy(batch)[0].detach().numpy(), np.cumsum(lengths[[*batch.turns]])),
                strict=False,
            )
        )
    old, reference, sampler = (
        [(now[k] + 0.4 * random.standard_normal(len(now[k]))).astype(np.float32) for k in range(len(turns))]
        for _ in range(3)
    )
    advantages = random.standard_normal(len(turns)).astype(np.float32)
    expected = loss_of_trl(loss_type, samples, advantages, (old, reference, sampler), tmp_path, beta=beta)
    slopes = gradients(expected, model)
    weights = token_weights(lengths, np.ones(len(turns), bool), normalisation=normalisation, max_new_tokens=LONGEST)
    total = torch.zeros(())
    for batch in batches:
        log_probs, entropy = policy(batch)
        of_batch = [
            torch.from_numpy(np.concatenate([each[k] for k in batch.turns])) for each in (old, sampler, reference)
        ]
        inputs = LossInputs(*of_batch, *(torch.from_numpy(each[batch.rows]).float() for each in (advantages, weights)))
        total = total + policy_loss(log_probs, entropy, inputs, PolicyLossSettings(clip_high=0.3, **ours)).loss
    assert total.item() == pytest.approx(expected.item(), abs=1e-6)
    assert difference(gradients(total, model), slopes) < 1e-4


def test_advantages_of_grpo_and_gdpo_equal_those_of_trl():
    nanstd = trl.trainer.utils.nanstd
    rewards = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rewards[2, 3] = rewards[4, 0] = math.nan

    def normalised(values):
        return ((values - values.nanmean(1, keepdim=True)) / nanstd(values, dim=1, keepdim=True)).flatten()

    def ours(estimator, **options):
        groups, flat = np.repeat(np.arange(6), 8), rewards.flatten().numpy()
        return estimate_advantages(flat, groups, estimator=estimator, std_floor=1e-9, **options)

    assert ours("grpo") == pytest.approx(normalised(rewards).nan_to_num(0).numpy(), abs=1e-6)
    second = rewards.flip(0).roll(1, 1) ** 2 + 0 * rewards
    second[torch.isnan(second)] = 0.5
    summed = normalised(rewards) + 0.3 * normalised(torch.where(rewards.isnan(), torch.nan, second))
    whitened = (summed - summed.nanmean()) / nanstd(summed)
    parts = {"a": rewards.flatten().numpy(), "b": second.flatten().numpy()}
    found = ours("gdpo", components=parts, component_weights={"b": 0.3})
    assert found == pytest.approx(whitened.nan_to_num(0).numpy(), abs=1e-6)
