import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import tiny_models
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from transformers import AutoModelForCausalLM

from agents import grpo
from gym_rm.config import Config, load_config
from gym_rm.errors import ConfigError
from gym_rm.reports.runs import RunWriter, read_run

ROOT = Path(__file__).parents[2]
rewards = st.floats(-1e3, 1e3, width=32)


def settings(*overrides: str) -> grpo.GRPOSettings:
    return grpo.fill_in(load_config(grpo.GRPOSettings, overrides=overrides))


def train(folder: Path, *overrides: str):
    """Run a short training and return its results."""
    small = ("env.num_prompts=4", "env.group_size=4", "held_out_prompts=16", f"output={folder}")
    config = settings(*small, *overrides)
    grpo.train(config, RunWriter(config.output, config.model_dump()), Console(quiet=True))
    return read_run(folder)


def save_prompts(path, size):
    path.write_text("".join(json.dumps({"prompt": f"Tell me about {n}."}) + "\n" for n in range(size)))
    return path


@pytest.mark.slow
def test_a_run_with_replicas_of_the_reward_model_has_the_same_rewards(tmp_path):
    few = ("steps=3", "evaluate_every=3")
    plain = train(tmp_path / "one", *few)
    replicated = train(tmp_path / "two", *few, "env.reward_model_kwargs={num_replicas: 2, replicas: processes}")
    assert [row["reward"] for row in replicated.conversations] == [row["reward"] for row in plain.conversations]
    assert len(replicated.training) == 3


# --- advantages ------------------------------------------------------------------------------------------------------


@st.composite
def groups(draw, values=rewards):
    """Draw rewards `[B]` and group ids `[B]`, with groups of any size in any order."""
    rows = draw(st.lists(st.tuples(st.integers(0, 4), values), min_size=1, max_size=24))
    ids, values = zip(*rows, strict=True)
    return np.array(values), np.array(ids)


def advantages(values, ids, std_floor=1e-3):
    return grpo.group_advantages(np.asarray(values, float), np.asarray(ids), std_floor=std_floor)


def test_advantages_equal_values_computed_by_hand():
    assert advantages([1, 0, 0, 0], [7, 7, 7, 7]) == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert advantages([1, 0, 1, 0], [7, 3, 7, 3]) == pytest.approx([0, 0, 0, 0])
    assert advantages([1, 5, 0, 5], [7, 3, 7, 4], std_floor=10) == pytest.approx([0.05, 0, -0.05, 0])


@given(groups(), st.randoms())
def test_permuting_rows_permutes_the_advantages_exactly(batch, random):
    values, ids = batch
    order = np.array(random.sample(range(len(values)), len(values)))
    assert np.array_equal(advantages(values, ids)[order], advantages(values[order], ids[order]))


@given(groups())
def test_the_advantages_of_a_group_sum_to_zero_and_keep_the_order_of_its_rewards(batch):
    values, ids = batch
    result = advantages(values, ids)
    for group in np.unique(ids):
        mine = result[ids == group]
        assert abs(mine.sum()) < 1e-5
        assert (np.diff(mine[np.argsort(values[ids == group], kind="stable")]) >= 0).all()


@given(groups(), st.floats(0.5, 4), st.floats(-100, 100))
def test_scaling_and_shifting_rewards_changes_no_advantage_above_the_floor(batch, scale, shift):
    values, ids = np.round(batch[0]), batch[1]
    assert advantages(values * scale + shift, ids) == pytest.approx(advantages(values, ids), abs=1e-6)


@given(st.lists(st.tuples(rewards, st.integers(1, 9)), min_size=1, max_size=5))
def test_advantages_are_zero_in_groups_of_one_and_in_groups_of_equal_rewards(rows):
    values = np.concatenate([np.full(size, value) for value, size in rows])
    ids = np.concatenate([np.full(size, number) for number, (_, size) in enumerate(rows)])
    assert not advantages(values, ids).any()


@pytest.mark.parametrize(("many", "odd"), [(0.35, 0.95), (-5.28, 3.1)])
def test_advantages_of_seven_equal_rewards_and_a_different_one(many, odd):
    result = advantages(np.float32([many] * 7 + [odd]), [0] * 8)
    assert result == pytest.approx([-0.35355] * 7 + [2.47487], abs=1e-4)


def test_reward_noise_below_the_floor_gives_small_advantages():
    assert np.abs(advantages([1, 1 + 1e-7, 1, 1 - 1e-7], [0] * 4)).max() < 1e-3


@given(groups(), st.data())
def test_a_missing_score_is_left_out_of_its_group(batch, data):
    values, ids = batch
    failed = np.array(data.draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))))
    result = advantages(np.where(failed, np.nan, values), ids)
    assert not result[failed].any()
    assert np.array_equal(result[~failed], advantages(values[~failed], ids[~failed]))


# --- loss ------------------------------------------------------------------------------------------------------------


def batch(seed=0, rows=3, length=5):
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(rows, length, generator=generator)
    old = log_probs + 0.6 * torch.randn(rows, length, generator=generator)
    mask = torch.arange(length) < torch.randint(1, length + 1, (rows, 1), generator=generator)
    return log_probs.requires_grad_(), old, torch.randn(rows, generator=generator), mask


CLIP = {"clip_low": 0.2, "clip_high": 0.3}


def test_loss_equals_the_formula_token_by_token():
    log_probs, old, adv, mask = batch()
    total, kl, clipped = 0.0, 0.0, 0
    reference = old + 0.1
    for i, j in mask.nonzero().tolist():
        ratio = (log_probs[i, j] - old[i, j]).exp().item()
        gain = min(ratio * adv[i].item(), min(max(ratio, 0.8), 1.3) * adv[i].item())
        d = (reference[i, j] - log_probs[i, j]).item()
        total, kl = total - gain, kl + np.exp(d) - d - 1
        clipped += gain != pytest.approx(ratio * adv[i].item())
    terms = grpo.grpo_loss(log_probs, old, adv, mask, **CLIP, reference_log_probs=reference, kl_coef=0.5)
    count = mask.sum().item()
    assert terms.loss.item() == pytest.approx((total + 0.5 * kl) / count, rel=1e-5)
    assert terms.kl.item() == pytest.approx(kl / count, rel=1e-5)
    assert terms.clipped.item() == pytest.approx(clipped / count)


@given(st.integers(0, 50))
def test_the_on_policy_gradient_is_the_advantage(seed):
    log_probs, _, adv, mask = batch(seed)
    grpo.grpo_loss(log_probs, log_probs.detach(), adv, mask, **CLIP).loss.backward()
    assert torch.allclose(log_probs.grad, -adv[:, None] * mask / mask.sum())


@given(st.integers(0, 50))
def test_losses_of_micro_batches_add_up_to_the_loss_of_the_batch(seed):
    log_probs, old, adv, mask = batch(seed)
    whole = grpo.grpo_loss(log_probs, old, adv, mask, **CLIP).loss
    parts = [
        grpo.grpo_loss(log_probs[rows], old[rows], adv[rows], mask[rows], **CLIP, num_tokens=mask.sum()).loss
        for rows in ([0], [1, 2])
    ]
    assert sum(parts).item() == pytest.approx(whole.item(), abs=1e-6)


@pytest.mark.parametrize("junk", [float("inf"), float("-inf"), 1e30])
def test_values_at_padding_do_not_change_the_loss(junk):
    log_probs, old, adv, mask = batch()
    clean = grpo.grpo_loss(log_probs, old, adv, mask, **CLIP, reference_log_probs=old, kl_coef=0.1)
    spoilt = log_probs.detach().masked_fill(~mask, junk).requires_grad_()
    terms = grpo.grpo_loss(spoilt, old, adv, mask, **CLIP, reference_log_probs=old, kl_coef=0.1)
    terms.loss.backward()
    assert terms.loss.item() == clean.loss.item()
    assert spoilt.grad.isfinite().all()


@given(st.floats(-200, 200, width=32))
def test_the_kl_divergence_is_never_negative_and_always_finite(difference):
    zero = torch.zeros(1, 1, requires_grad=True)
    options = {**CLIP, "reference_log_probs": torch.full((1, 1), difference), "kl_coef": 1.0}
    terms = grpo.grpo_loss(zero, zero.detach(), torch.zeros(1), torch.ones(1, 1, dtype=torch.bool), **options)
    terms.loss.backward()
    assert terms.kl.item() >= 0
    assert zero.grad.isfinite().all()


# --- answers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("That makes 72.", "72", True),
        ("27 plus 45 is 72", "72", True),
        ("It is 72 or 71.", "72", False),
        ("172", "72", False),
        ("727272", "72", False),
        ("", "72", False),
        ("No idea.", "72", False),
        ("So she pays $1,250.00.", "1250", True),
        ("It is -3.", "-3", True),
        ("It is 3.", "-3", False),
        ("The capital is Paris!", "paris", True),
        ("Parisian life", "paris", False),
    ],
)
def test_answers_are_checked_without_a_model(completion, answer, right):
    assert grpo.is_right(completion, answer) is right


# --- policy ----------------------------------------------------------------------------------------------------------

QUESTIONS = [
    [{"role": "user", "content": "What is 2 plus 3?"}],
    [{"role": "user", "content": "I have 41 marbles and give 8 of them to my brother. How many are left?"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "What is 7 plus 7?"},
    ],
]


def one_by_one(policy, completions, row):
    """Return the log-probabilities of one completion from an unpadded forward, `[tokens]`."""
    ids = completions.input_ids[row][completions.attention_mask[row].bool()]
    length = int(completions.mask[row].sum())
    logits = policy.model(ids[None]).logits[0, -length - 1 : -1] / policy.settings.temperature
    return logits.log_softmax(-1).gather(1, ids[-length:, None])[:, 0]


@pytest.fixture(params=["embedded", "qwen3", "llama", "opt"])
def policy(request, tmp_path):
    model = None if request.param == "embedded" else tiny_models.save_policy(tmp_path, request.param)
    torch.manual_seed(0)
    return grpo.Policy(settings(f"policy.model={model or 'null'}", "policy.max_new_tokens=9").policy)


def test_log_probs_equal_those_of_an_unpadded_forward(policy):
    completions = policy.generate(QUESTIONS)
    log_probs = policy.log_probs(completions)
    for row in range(3):
        length = int(completions.mask[row].sum())
        assert torch.allclose(log_probs[row, :length], one_by_one(policy, completions, row), atol=1e-5)


def test_removing_padding_changes_no_log_prob(policy):
    completions = policy.generate(QUESTIONS)
    whole = policy.log_probs(completions)
    for row in range(3):
        part = completions.select(torch.tensor([row]))
        length = part.mask.shape[1]
        assert part.mask.all()
        assert part.attention_mask.all()
        assert torch.allclose(policy.log_probs(part)[0], whole[row, :length], atol=1e-5)


def test_texts_are_the_decoded_tokens_before_the_end_token(policy):
    completions = policy.generate(QUESTIONS * 4)
    width = completions.mask.shape[1]
    for row, text in enumerate(completions.texts):
        tokens = completions.input_ids[row, -width:][completions.mask[row]]
        ends = torch.isin(tokens, torch.tensor(policy.sampling.eos_token_id))
        assert not ends[:-1].any()
        assert ends[-1] == completions.finished[row]
        assert text == policy.tokenizer.decode(tokens[~ends])


def test_generation_settings_of_the_checkpoint_are_ignored(tmp_path):
    tiny_models.save_policy(tmp_path)
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({**json.loads(generation.read_text()), "top_k": 1, "repetition_penalty": 2.0}))
    torch.manual_seed(0)
    policy = grpo.Policy(settings(f"policy.model={tmp_path}", "policy.max_new_tokens=1").policy)
    completions = policy.generate(QUESTIONS[:1] * 512)
    assert len(set(completions.texts)) > 20


def test_a_policy_without_a_chat_template_is_refused(tmp_path):
    tiny_models.save_policy(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="has no chat template"):
        grpo.Policy(settings(f"policy.model={tmp_path}").policy)


# --- runs ------------------------------------------------------------------------------------------------------------


def test_training_improves_reward_and_accuracy(tmp_path):
    run = train(tmp_path, "steps=12", "env.num_prompts=16", "env.group_size=8", "held_out_prompts=128")
    assert run.held_out[-1]["reward_mean"] > run.held_out[0]["reward_mean"] + 0.5
    assert run.held_out[-1]["accuracy"] > run.held_out[0]["accuracy"]


def test_the_same_seed_repeats_a_run(tmp_path):
    def curve(name, seed):
        run = train(tmp_path / name, "steps=2", f"seed={seed}")
        return [(row["reward_mean"], row["loss"]) for row in run.training]

    first, again, other = curve("a", 3), curve("b", 3), curve("c", 4)
    assert first == again
    assert first != other


def test_training_with_several_updates_per_step_and_a_reference_policy(tmp_path):
    run = train(tmp_path, "steps=2", "optimizer.updates_per_step=2", "optimizer.micro_batch_size=3", "loss.kl_coef=0.1")
    assert run.training[0]["kl"] >= 0
    assert run.training[1]["kl"] > 0


def test_the_micro_batch_size_changes_the_loss_only_by_rounding(tmp_path):
    one = train(tmp_path / "a", "steps=1", "optimizer.micro_batch_size=3").training[0]
    other = train(tmp_path / "b", "steps=1", "optimizer.micro_batch_size=16").training[0]
    assert one["loss"] == pytest.approx(other["loss"], abs=1e-6)
    assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_each_measurement_answers_every_held_out_prompt_once(tmp_path):
    run = train(tmp_path, "steps=1")
    for step in (0, 1):
        prompt_ids = [row["prompt_id"] for row in run.conversations if row["step"] == step]
        assert len(prompt_ids) == len(set(prompt_ids)) == 16


def test_training_prompts_and_held_out_prompts_are_disjoint(tmp_path, monkeypatch):
    generate, calls = grpo.Policy.generate, []

    def record(policy, conversations):
        calls.append({conversation[-1]["content"] for conversation in conversations})
        return generate(policy, conversations)

    monkeypatch.setattr(grpo.Policy, "generate", record)
    train(tmp_path, "steps=6", f"env.prompts={save_prompts(tmp_path / 'prompts.jsonl', 8)}")
    held_out, *training, held_out_again = calls  # six steps visit all six training prompts
    assert held_out == held_out_again
    assert len(held_out) == 2
    assert set.union(*training) == {f"Tell me about {n}." for n in range(8)} - held_out


def test_training_with_another_policy_reward_model_and_prompts(tmp_path):
    policy = tiny_models.save_policy(tmp_path / "policy", "llama")
    reward_model = tiny_models.save_reward_model(tmp_path / "rm", "bert")
    prompts = save_prompts(tmp_path / "prompts.jsonl", 9)
    own = (f"policy.model={policy}", f"env.reward_model={reward_model}", f"env.prompts={prompts}")
    run = train(tmp_path / "run", "steps=2", "policy.max_new_tokens=8", *own)
    assert run.training[-1]["step"] == 2
    assert run.training[-1]["accuracy"] is None
    assert len(run.conversations) == 2 * 2  # a quarter of nine prompts is held out


def test_the_saved_policy_can_be_loaded_and_has_changed(tmp_path):
    train(tmp_path, "steps=1")
    before = grpo.Policy(settings().policy).model
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    assert any(not torch.equal(p, q) for p, q in zip(before.parameters(), after.parameters(), strict=True))
    assert grpo.Policy(settings(f"policy.model={tmp_path / 'policy'}").policy).generate(QUESTIONS).texts


def test_policy_and_metrics_are_saved_after_an_error(tmp_path, monkeypatch):
    steps = iter(range(100))
    whole = grpo.Learner.update

    def update(*arguments):
        if next(steps) == 2:
            raise RuntimeError("out of memory")
        return whole(*arguments)

    monkeypatch.setattr(grpo.Learner, "update", update)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(tmp_path, "steps=9")
    assert [row["step"] for row in read_run(tmp_path).training] == [1, 2]
    assert grpo.Policy(settings(f"policy.model={tmp_path / 'policy'}").policy)


def run_script(*arguments, **options):
    command = [sys.executable, str(ROOT / "agents" / "grpo.py"), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)


SMALL = ("env.num_prompts=4", "env.group_size=4", "held_out_prompts=16")


def test_the_script_prints_a_table_and_saves_a_picture(tmp_path):
    process = run_script(*SMALL, "steps=2", cwd=tmp_path)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "checked without the reward model" in output
    (folder,) = (tmp_path / "outputs").iterdir()
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert yaml.safe_load((folder / "settings.yaml").read_text())["steps"] == 2


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT")
def test_an_interrupt_saves_policy_metrics_and_picture(tmp_path, children_hear_sigint):
    process = run_script(*SMALL, "steps=100000", f"output={tmp_path}")
    while not (tmp_path / "metrics.jsonl").exists() or '"train"' not in (tmp_path / "metrics.jsonl").read_text():
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 130, output
    assert "interrupted" in output
    assert (tmp_path / "curve.png").exists()
    assert (tmp_path / "policy" / "model.safetensors").exists()


def test_overrides_change_the_settings_of_a_file(tmp_path):
    (tmp_path / "run.yaml").write_text(f"seed: 5\nsteps: 7\noutput: {tmp_path / 'run'}\nheld_out_prompts: 0\n")
    process = run_script("--config", str(tmp_path / "run.yaml"), "steps=1", *SMALL[:2])
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert read_run(tmp_path / "run").settings["seed"] == 5
    assert len(read_run(tmp_path / "run").training) == 1


def test_the_error_names_a_misspelt_setting():
    process = run_script("policy.modle=x")
    output, _ = process.communicate()
    assert process.returncode == 2
    assert "Did you mean 'model'" in output.replace("\n", " ")


def test_a_folder_with_a_run_is_not_overwritten(tmp_path):
    train(tmp_path, "steps=1")
    with pytest.raises(ConfigError, match="already contains a run"):
        train(tmp_path, "steps=1")


def test_every_setting_has_a_description():
    def check(schema):
        for name, field in schema.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Config):
                check(field.annotation)
            else:
                assert field.description, name

    check(grpo.GRPOSettings)


def test_group_ids_identify_the_prompts_of_the_scored_episodes():
    """Rows of the ended episodes have equal group ids exactly if they had the same prompt."""
    envs = gym.make_vec(
        "RewardModel-v0", 8, group_size=4, reward_model=lambda conversations: [0.0] * len(conversations)
    )
    observations, _ = envs.reset(seed=0)
    for _ in range(3):
        questions = [observation[0]["content"] for observation in observations]
        observations, _, _, _, infos = envs.step(["?"] * 8)
        ids = infos["final_info"]["group_id"]
        assert [[questions[i] == questions[j] for i in range(8)] for j in range(8)] == (ids[:, None] == ids).tolist()
