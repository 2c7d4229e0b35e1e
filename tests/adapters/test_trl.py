import json

import gymnasium as gym
import numpy as np
import pytest
from recording import RecordingScorer, chat

from gym_rm import ConfigError, Prompt
from gym_rm.adapters.trl import EnvironmentRollout, RewardModelReward
from gym_rm.data.prompts import load_prompts

trl = pytest.importorskip("trl", reason="TRL is not installed")
datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")


def assistant(text):
    return [{"role": "assistant", "content": text}]


# --- the reward function without a trainer -------------------------------------------------------------------------


def test_completions_that_begin_inside_of_the_thinking_are_read():
    reward = RewardModelReward(kind="math", thinking="opened")
    texts = ["It is 5.</think>It is 4.", "It is 4, so"]
    fields = [{"content": "It is 4.", "reasoning_content": "5?"}, {"content": "", "reasoning_content": "It is 4."}]
    messages = [[{"role": "assistant", **each}] for each in fields]
    rewards = reward(prompts=["2 + 2?"] * 4, completions=[*texts, *messages], answer=["4"] * 4)
    assert rewards == [1.0, 0.0, 1.0, 0.0]


def test_a_rendered_prompt_is_refused(recorder):
    with pytest.raises(ConfigError, match="chat template has been applied"):
        RewardModelReward(recorder)(prompts=["<|im_start|>user\nHi<|im_end|>\n"], completions=["Hello"])


def test_the_reward_equals_that_of_the_environment(embedded_scorer):
    envs = gym.make_vec("RewardModel-v0", num_envs=4, reward_model=embedded_scorer)
    observations, _ = envs.reset(seed=0)
    replies = ["It is 40.", "The answer is 12.", "", "<|im_end|> or not"]
    rewards = RewardModelReward(embedded_scorer)(
        prompts=list(observations), completions=[assistant(reply) for reply in replies]
    )
    assert rewards == envs.step(replies)[1].tolist()


def test_metrics_have_stable_names(recorder):
    logged = {}
    RewardModelReward(recorder, name="helpfulness")(
        prompts=["q", "q"], completions=["four", "FAIL"], log_metric=logged.__setitem__
    )
    assert logged == {"helpfulness/unscored": 1.0, "helpfulness/truncated_tokens": 0.0, "helpfulness/length": 4.0}
    assert trl.trainer.utils.get_callable_name(RewardModelReward(recorder)) == "reward_model"


# --- columns of the data set ---------------------------------------------------------------------------------------


def test_the_columns_of_the_data_set_reach_the_scorer_as_prompts(verifier):
    reward = RewardModelReward(verifier)
    columns = {"answer": ["4", "6"], "prompt_id": ["a", "b"], "level": ["easy", "hard"]}
    not_columns = {"completion_ids": [[1], [2]], "trainer_state": object(), "log_extra": print, "environments": [1, 2]}
    rewards = reward(prompts=[chat("2 + 2?"), "3 + 3?"], completions=[assistant("4"), "7"], **columns, **not_columns)
    assert rewards == [1.0, 0.0]
    assert verifier.prompts == [
        Prompt(tuple(chat("2 + 2?")), "a", answer="4", metadata={"level": "easy"}),
        Prompt(tuple(chat("3 + 3?")), "b", answer="6", metadata={"level": "hard"}),
    ]


# --- TRL's trainers ------------------------------------------------------------------------------------------------


@pytest.fixture
def make_trainer(policy_path, tmp_path):
    """Function that makes a trainer of the embedded policy on the embedded prompts or on `rows`."""

    def make(kind, reward_funcs, *, rows=None, max_steps=2, batch_size=8, rollout_func=None, **options):
        classes = {"grpo": (trl.GRPOTrainer, trl.GRPOConfig), "rloo": (trl.RLOOTrainer, trl.RLOOConfig)}
        sampling = {"num_generations": 4, "max_completion_length": 16}
        if kind == "online dpo":
            from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

            classes[kind], sampling = (OnlineDPOTrainer, OnlineDPOConfig), {"max_new_tokens": 16, "max_length": 96}
        trainer_class, config_class = classes[kind]
        rows = rows or [{"prompt": [dict(m) for m in prompt.messages]} for prompt in load_prompts()]
        config = config_class(
            output_dir=str(tmp_path),
            per_device_train_batch_size=batch_size,
            max_steps=max_steps,
            seed=0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            report_to=[],
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            **{**sampling, **options},
        )
        return trainer_class(
            transformers.AutoModelForCausalLM.from_pretrained(policy_path),
            reward_funcs=reward_funcs,
            args=config,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=transformers.AutoTokenizer.from_pretrained(policy_path),
            **({"rollout_func": rollout_func} if rollout_func else {}),
        )

    return make


MEAN_REWARD = {"grpo": "reward", "rloo": "reward", "online dpo": "objective/scores"}


def logged(trainer, name):
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def test_each_training_step_makes_one_score_call(make_trainer, recorder):
    trainer = make_trainer("grpo", RewardModelReward(recorder))
    trainer.train()
    assert [len(call) for call in recorder.calls] == [8, 8]
    means = [np.mean([len(c[-1]["content"]) / 4 for c in call]) for call in recorder.calls]
    assert logged(trainer, "rewards/reward_model/mean") == pytest.approx(means, abs=1e-3)
    assert logged(trainer, "reward_model/unscored") == [0.0, 0.0]


def test_trl_leaves_a_missing_reward_out_of_the_group(make_trainer):
    class EveryOther(RecordingScorer):
        def score(self, conversations, prompts=None):
            for index, conversation in enumerate(conversations):
                if index % 2:
                    conversation[-1]["content"] = "FAIL"
            return super().score(conversations, prompts)

    scorer = EveryOther()
    trainer = make_trainer("grpo", RewardModelReward(scorer), max_steps=1)
    trainer.train()
    scored = [len(c[-1]["content"]) / 4 for c in scorer.calls[0][::2]]
    assert logged(trainer, "reward") == pytest.approx([np.mean(scored)], abs=1e-3)
    assert logged(trainer, "reward_model/unscored") == [4.0]
    advantages = list(trainer._logs["advantages"])
    assert advantages[1::2] == [0.0] * 4


@pytest.mark.parametrize("kind", ["grpo", "rloo", "online dpo"])
def test_a_verifier_compares_each_completion_with_the_answer_of_its_prompt(make_trainer, verifier, kind):
    prompts = {prompt.messages[0]["content"]: prompt for prompt in load_prompts()}
    rows = [
        {"prompt": list(prompt.messages), "answer": prompt.answer, "prompt_id": prompt.prompt_id, "level": "easy"}
        for prompt in prompts.values()
    ]
    trainer = make_trainer(kind, RewardModelReward(verifier, on_unscored="raise"), rows=rows, batch_size=16)
    trainer.train()
    assert len({prompt.answer for prompt in verifier.prompts}) > 4
    for conversation, prompt in verifier.rows:
        row = prompts[conversation[0]["content"]]
        assert (prompt.messages, prompt.prompt_id, prompt.answer) == (row.messages, row.prompt_id, row.answer)
        assert prompt.metadata["level"] == "easy"
    rewards = [float(prompt.answer in conversation[-1]["content"]) for conversation, prompt in verifier.rows]
    steps = np.array(rewards).reshape(2, -1)
    assert logged(trainer, MEAN_REWARD[kind]) == pytest.approx(steps.mean(axis=1).tolist(), abs=1e-6)
    assert 0 < np.mean(rewards) < 1  # with only right or only wrong replies, swapped answers would go unnoticed


# --- rollouts through the environment ------------------------------------------------------------------------------


def dialogues():
    return [
        Prompt(tuple(chat(f"How much is {n} + 11?")), f"sum {n}", ("Are you sure?",) * (n % 3), str(n + 11))
        for n in range(20, 26)
    ]


def test_a_dialogue_is_one_completion_with_masked_user_turns(make_trainer, recorder):
    rollout = EnvironmentRollout(dialogues(), reward_model=recorder)
    seen = {}

    def record_and_return(prompts, trainer):
        seen.update(rollout(prompts, trainer), prompts=prompts, tokenizer=trainer.processing_class)
        return {name: values for name, values in seen.items() if name not in ("prompts", "tokenizer")}

    trainer = make_trainer(
        "grpo", rollout.env_reward, rows=rollout.dataset_rows, rollout_func=record_and_return, max_steps=1
    )
    trainer.train()
    turns = {json.dumps(p.messages[0]): len(p.user_turns) + 1 for p in dialogues()}
    for row, prompt in enumerate(seen["prompts"]):
        ids, mask = np.array(seen["completion_ids"][row]), np.array(seen["env_mask"][row], dtype=bool)
        num_turns = turns[json.dumps(prompt[0])]
        masked_text = seen["tokenizer"].decode(ids[~mask])
        assert masked_text.count("Are you sure?") == masked_text.count("<|im_start|>assistant\n") == num_turns - 1
        assert "Are you sure?" not in seen["tokenizer"].decode(ids[mask])
        whole = seen["tokenizer"].decode([*seen["prompt_ids"][row], *ids])
        assert whole.startswith(f"<|im_start|>user\n{prompt[0]['content']}<|im_end|>\n<|im_start|>assistant\n")
    assert recorder.num_conversations == sum(turns[json.dumps(prompt[0])] for prompt in seen["prompts"])
    assert len(recorder.calls) == max(turns[json.dumps(prompt[0])] for prompt in seen["prompts"])
    assert seen["answer"] == [str(int(prompt[0]["content"].split()[3]) + 11) for prompt in seen["prompts"]]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def call_twice(text):
    """Read the same two calls from every reply, because the embedded policy writes none."""
    return text, [{"name": "add", "arguments": {"a": len(text), "b": 7000}}, {"name": "sub", "arguments": {}}], []


def test_tool_results_are_masked_and_text_of_others_forges_no_turn(make_trainer, recorder):
    options = {"tools": [add], "tool_options": {"call_format": call_twice}, "max_turns": 2}
    rollout = EnvironmentRollout(["2 + 2?<|im_end|>"], reward_model=recorder, **options)
    trainer = make_trainer("grpo", rollout.env_reward, rows=rollout.dataset_rows, rollout_func=rollout)
    (row,) = rollout.dataset_rows
    seen = rollout([row["prompt"]] * 2, trainer)
    decode, end = trainer.processing_class.decode, trainer.processing_class.eos_token_id
    assert decode(seen["prompt_ids"][0]) == "<|im_start|>user\n2 + 2?<|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert seen["prompt_ids"][0].count(end) == 1
    for ids, mask in zip(map(np.array, seen["completion_ids"]), map(np.array, seen["env_mask"]), strict=True):
        masked, sampled = decode(ids[mask == 0]), decode(ids[mask == 1])
        assert "<|im_start|>tool\n70" in masked
        assert masked.endswith("<|im_start|>assistant\n")
        assert "Error: " in masked
        assert "Error: " not in sampled


def test_a_rollout_without_a_score_has_the_reward_none(make_trainer):
    class Fails(RecordingScorer):
        def score(self, conversations, prompts=None):
            return super().score([[*c[:-1], {**c[-1], "content": "FAIL"}] for c in conversations])

    rollout = EnvironmentRollout(reward_model=Fails())
    trainer = make_trainer("grpo", rollout.env_reward, rows=rollout.dataset_rows, rollout_func=rollout)
    prompts = [row["prompt"] for row in rollout.dataset_rows[:3]]
    assert rollout(prompts, trainer)["env_reward"] == [None] * 3


def test_what_a_rollout_cannot_do_is_refused(recorder):
    with pytest.raises(ConfigError, match=r"rollout\.dataset_rows"):
        EnvironmentRollout(["known"], reward_model=recorder)([chat("unknown")], None)
    with pytest.raises(ConfigError, match="'num_envs'"):
        EnvironmentRollout(["q"], num_envs=4)
    with pytest.raises(ConfigError, match="same messages"):
        EnvironmentRollout(["q", "q"], reward_model=recorder)
