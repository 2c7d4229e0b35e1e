import json
import logging
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
from recording import RecordingScorer, chat

from gym_rm import ConfigError, Prompt, ScoringError
from gym_rm.adapters.trl import EnvironmentRollout, RewardModelReward, environment_factory
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


def test_the_reference_answer_can_have_another_column(verifier):
    reward = RewardModelReward(verifier, answer_column="solution")
    assert reward(prompts=["2 + 2?", "3 + 3?"], completions=["4", "7"], solution=["4", "6"]) == [1.0, 0.0]
    assert [(prompt.answer, prompt.metadata) for prompt in verifier.prompts] == [("4", {}), ("6", {})]


def test_completions_of_a_rollout_function_that_gives_no_dialogue_are_refused(recorder):
    with pytest.raises(ConfigError, match="without `env_dialogue`"):
        RewardModelReward(recorder)(prompts=["q"], completions=["a, and later turns"], env_reward=[1.0])


# --- TRL's trainers ------------------------------------------------------------------------------------------------


@pytest.fixture
def make_trainer(policy_path, tmp_path):
    """Function that makes a trainer of the embedded policy on the embedded prompts or on `rows`."""

    def make(kind, reward_funcs, *, rows=None, max_steps=2, batch_size=8, policy=None, functions=None, **options):
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
        model, tokenizer = policy or load_policy(policy_path)
        return trainer_class(
            model,
            reward_funcs=reward_funcs,
            args=config,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            **(functions or {}),
        )

    return make


def load_policy(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path), transformers.AutoTokenizer.from_pretrained(path)


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


class EveryThird(RecordingScorer):
    """Has no score for every third conversation of a call."""

    def score(self, conversations, prompts=None):
        return super().score([fail(c) if row % 3 == 0 else c for row, c in enumerate(conversations)], prompts)


def fail(conversation):
    return [*conversation[:-1], {**conversation[-1], "content": "FAIL"}]


def advantages_without(rewards, kind):
    """Return the advantages of groups of four without the members that have no reward, which get 0."""
    groups = np.array([np.nan if reward is None else reward for reward in rewards]).reshape(-1, 4)
    means = np.nanmean(groups, axis=1, keepdims=True)
    if kind == "grpo":
        advantages = (groups - means) / (np.nanstd(groups, axis=1, ddof=1, keepdims=True) + 1e-4)
    else:  # the mean of the others
        number = np.isfinite(groups).sum(axis=1, keepdims=True)
        advantages = groups - (means * number - groups) / (number - 1)
    return np.nan_to_num(advantages.ravel())


@pytest.mark.parametrize("kind", ["grpo", "rloo"])
def test_advantages_are_those_of_the_group_without_a_completion_that_has_no_score(make_trainer, kind):
    scorer = EveryThird()
    trainer = make_trainer(kind, RewardModelReward(scorer), max_steps=1, beta=0.0)
    trainer.train()
    rewards = [None if c[-1]["content"] == "FAIL" else len(c[-1]["content"]) / 4 for c in scorer.calls[0]]
    assert list(trainer._logs["advantages"]) == pytest.approx(advantages_without(rewards, kind), abs=1e-3)
    assert logged(trainer, "reward") == pytest.approx(
        [np.mean([each for each in rewards if each is not None])], abs=1e-3
    )
    assert logged(trainer, "reward_model/unscored") == [3.0]


def test_the_table_of_completions_says_why_a_completion_has_no_reward(make_trainer, tmp_path):
    class FailsOnce(EveryThird):
        def score(self, conversations, prompts=None):
            return (super() if not self.calls else super(EveryThird, self)).score(conversations, prompts)

    make_trainer("grpo", RewardModelReward(FailsOnce()), log_completions=True).train()
    tables = [datasets.Dataset.from_parquet(str(file)) for file in sorted(tmp_path.glob("completions/*.parquet"))]
    errors = [table["reward_model/error"][:] for table in tables]
    assert errors == [["the reply contains FAIL" if row % 3 == 0 else "" for row in range(8)], [""] * 8]


def test_online_dpo_stops_because_it_would_count_a_missing_reward_as_zero(make_trainer):
    trainer = make_trainer("online dpo", RewardModelReward(EveryThird()))
    with pytest.raises(ScoringError, match="the reply contains FAIL"):
        trainer.train()


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
        "grpo",
        rollout.env_reward,
        rows=rollout.dataset_rows,
        functions={"rollout_func": record_and_return},
        max_steps=1,
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
    trainer = make_trainer("grpo", rollout.env_reward, rows=rollout.dataset_rows, functions={"rollout_func": rollout})
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


def test_advantages_are_those_of_the_group_without_a_dialogue_that_has_no_score(make_trainer, caplog):
    scorer = EveryThird()
    rollout = EnvironmentRollout(["How much is 2 + 2?", "And 3 + 3?"], reward_model=scorer)
    functions = {"rollout_func": rollout}
    trainer = make_trainer("grpo", rollout.env_reward, rows=rollout.dataset_rows, functions=functions, max_steps=1)
    with caplog.at_level(logging.WARNING, logger="gym_rm"):
        trainer.train()
    rewards = [None if c[-1]["content"] == "FAIL" else len(c[-1]["content"]) / 4 for c in scorer.calls[0]]
    assert list(trainer._logs["advantages"]) == pytest.approx(advantages_without(rewards, "grpo"), abs=1e-3)
    assert "completion 3 has no reward: the reply contains FAIL" in caplog.text


@pytest.mark.parametrize("reward_on", ["end", "improvement"])
def test_a_reward_model_beside_a_rollout_scores_the_messages_of_the_dialogue(make_trainer, embedded_scorer, reward_on):
    prompts = [{"prompt": "What is the highest of 33, 71 and 12?", "user_turns": ["Are you sure?"]}]
    rollout = EnvironmentRollout(prompts, reward_model=embedded_scorer, reward_on=reward_on)
    rewards = [rollout.env_reward, RewardModelReward(embedded_scorer)]
    functions = {"rollout_func": rollout}
    trainer = make_trainer("grpo", rewards, rows=rollout.dataset_rows * 2, functions=functions, max_steps=1)
    trainer.train()
    beside = pytest.approx(list(trainer._logs["rewards"]["env_reward"]), abs=1e-6)
    assert list(trainer._logs["rewards"]["reward_model"]) == beside
    assert len(set(trainer._logs["rewards"]["reward_model"])) > 2


@pytest.mark.parametrize("as_text", [True, False])
def test_a_rollout_of_a_policy_with_another_end_token_has_the_reward_of_its_text(
    make_trainer, embedded_scorer, policy_path, as_text
):
    model, tokenizer = load_policy(policy_path)
    other = len(tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end_of_turn>"]})
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    for weights in (model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data):
        weights[other] = weights[tokenizer.eos_token_id]  # sampled as often as the end token of the tokenizer
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, other]
    score, seen = RewardModelReward(embedded_scorer), []

    def reward_of_text(prompts, completions, completion_ids, **columns):
        seen.extend(ids[-1] for ids in completion_ids)
        return score(prompts, completions)

    rollout = EnvironmentRollout(reward_model=embedded_scorer)
    rows = (
        [{"prompt": row["prompt"][0]["content"]} for row in rollout.dataset_rows] if as_text else rollout.dataset_rows
    )
    options = {"functions": {"rollout_func": rollout}, "policy": (model, tokenizer), "max_steps": 1}
    trainer = make_trainer("grpo", [rollout.env_reward, reward_of_text], rows=rows, batch_size=32, **options)
    trainer.train()
    assert {other, tokenizer.eos_token_id} <= set(seen)
    assert list(trainer._logs["rewards"]["env_reward"]) == list(trainer._logs["rewards"]["reward_of_text"])


def test_what_a_rollout_cannot_do_is_refused(recorder):
    with pytest.raises(ConfigError, match=r"rollout\.dataset_rows"):
        EnvironmentRollout(["known"], reward_model=recorder)([chat("unknown")], None)
    with pytest.raises(ConfigError, match="'num_envs'"):
        EnvironmentRollout(["q"], num_envs=4)
    with pytest.raises(ConfigError, match="same messages"):
        EnvironmentRollout(["q", "q"], reward_model=recorder)


# --- tools in TRL's own loop ---------------------------------------------------------------------------------------


def price(fruit: str, kilos: float = 1.0, *, prompt: Prompt) -> str:
    """Look up what fruit costs.

    Args:
        fruit: name of the fruit.
        kilos: how much of it.
    """
    return f"{prompt.answer}, with {kilos} kilos of {fruit}"


def test_the_trainer_calls_the_tools_and_the_dialogue_is_scored(make_trainer, policy_path, verifier):
    model, tokenizer = load_policy(policy_path)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    call = '<tool_call>\n{"name": "price", "arguments": {"fruit": "pears", "kilos": 2}}\n</tool_call>'
    rounds = [[call, call, "It costs 9.", call.replace('"kilos"', '"stones"')], [call, "It costs 9.", "8."], ["So 9."]]
    trainer = make_trainer(
        "grpo",
        RewardModelReward(verifier),
        rows=[{"prompt": chat("What do 2 kilos of pears cost?"), "answer": "9"}],
        functions={"environment_factory": environment_factory([price, "calculator"], max_calls=1)},
        policy=(model, tokenizer),
        max_steps=1,
        batch_size=4,
        max_completion_length=300,
    )
    trainer._generate_single_turn = lambda *args, **options: (
        [tokenizer(f"{text}<|im_end|>").input_ids for text in rounds.pop(0)],
        None,
    )
    trainer.train()
    dialogues = [conversation[1:] for conversation, _ in verifier.rows]
    results = [[message["content"] for message in said if message["role"] == "tool"] for said in dialogues]
    assert results[0][0] == results[1][0] == "9, with 2.0 kilos of pears"
    assert results[0][1].startswith("Error: not executed: the 1 calls of this conversation are used up")
    assert results[2] == []
    assert results[3][0].startswith("Error: not executed: invalid arguments of price")
    assert [said[-1]["content"] for said in dialogues] == ["So 9.", "It costs 9.", "It costs 9.", "8."]
    assert list(trainer._logs["rewards"]["reward_model"]) == [1.0, 1.0, 1.0, 0.0]


def test_a_tool_with_the_name_of_a_method_of_environments_is_refused():
    def reset(state: str) -> str:
        """Reset."""

    with pytest.raises(ConfigError, match="method 'reset' is no tool"):
        environment_factory([reset])
