"""Rollouts with tools: what the policy learns from, and which turn gets the credit of the last answer."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from gym_rm.config import load_config
from gym_rm.errors import ConfigError
from gym_rm.policy.grpo_settings import GRPOSettings
from gym_rm.policy.rollouts import RolloutTable, rollout_metrics
from tests.policy import test_rollouts
from tests.policy.test_rollouts import Run
from tests.policy.turns import gradients, plain

WHOLE = (
    "{% for t in tools or [] %}tool {{ t.function.name }}\n{% endfor %}{% for m in messages %}{{ '<|im_start|>' "
    "+ m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}{{ c.function.arguments.text }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LAST = WHOLE.replace("in messages", "in messages[-1:]")  # a template that forgets
PROMPTS = [replace(prompt, user_turns=(), answer="42") for prompt in test_rollouts.PROMPTS]
OPTIONS = (
    "env.max_turns=3",
    "env.reward_on=end",
    "env.tools_in_system=false",
    "env.tools=[tests.policy.test_tool_rollouts:shout]",
    "env.tool_options={call_format: tests.policy.test_tool_rollouts:some_lengths}",
)


def shout(text: str) -> str:
    """Return the text in capitals."""
    if "7" in text:
        raise ValueError("no sevens")
    return f"SHOUTED {text.upper()}"


def some_lengths(text):
    """Read a reply of 11, 15, 19, ... characters as a call: `That is 42.`, but not `It is 42.`"""
    is_call = len(text.strip()) % 4 == 3
    return ("", [{"name": "shout", "arguments": {"text": text}}], []) if is_call else (text, [], [])


def lengths(conversations):
    """Score the last reply; a call is no answer."""
    return [
        0.0 if messages[-1]["role"] != "assistant" else len(messages[-1]["content"]) % 5 for messages in conversations
    ]


@pytest.mark.parametrize("per_turn", [False, True], ids=["episode", "per turn"])
@pytest.mark.parametrize("template", [WHOLE, LAST], ids=["whole history", "forgetful"])
def test_the_gradient_is_that_of_the_sampled_tokens_and_calls_get_the_credit_of_the_answer(
    template, per_turn, tmp_path
):
    run = Run(tmp_path, *OPTIONS, f"advantage.per_turn={per_turn}", scorer=lengths, prompts=PROMPTS, template=template)
    model, tokenizer = run.learner.start.model, run.learner.start.tokenizer
    rollouts = run.step()
    samples = RolloutTable(rollouts)
    assert {len(rollout.turns) for rollout in rollouts} == {1, 2, 3}
    assert all(turn.reward == 0 for rollout in rollouts for turn in rollout.turns[:-1])
    shown = [tokenizer.decode(turn.prompt) for rollout in rollouts for turn in rollout.turns[1:]]
    assert all("SHOUTED" in text or "no sevens" in text for text in shown)
    assert all(text.startswith("tool shout\n") for text in shown)

    rewards, groups = samples.column("reward"), samples.column("group")
    if per_turn:  # the rewards from each turn on, compared with those of the same turn: here always the last one
        rewards, groups = (
            rewards[samples.owners],
            [(groups[k], n) for k in range(16) for n in range(len(rollouts[k].turns))],
        )
    expected = np.zeros(len(rewards))
    for group in {*groups} if per_turn else {*groups.tolist()}:
        rows = [k for k, each in enumerate(groups) if each == group]
        if len(rows) > 1 and np.ptp(rewards[rows]):
            expected[rows] = (rewards[rows] - rewards[rows].mean()) / max(rewards[rows].std(ddof=1), 0.1)
    advantages = expected if per_turn else expected[samples.owners]
    loss = torch.zeros(())
    for turn, advantage in zip(samples.turns, advantages, strict=True):
        log_probs, _ = plain(model, turn)
        np.testing.assert_allclose(turn.completion.log_probs, log_probs.detach(), atol=1e-5)
        loss = loss - float(advantage) * log_probs.sum() / samples.lengths.sum()
    by_hand = gradients(loss, model)

    learnt = {}
    update = run.learner.optimizer_step
    run.learner.optimizer_step = lambda: (
        learnt.update({n: p.grad.clone() for n, p in model.named_parameters()}) or update()
    )
    run.learn(rollouts)
    largest = max(float(each.abs().max()) for each in by_hand.values())
    assert largest > 1e-3
    for name, gradient in by_hand.items():
        torch.testing.assert_close(learnt[name], gradient, atol=1e-3 * largest, rtol=0)


def test_metrics_of_tool_use(tmp_path):
    rollouts = Run(tmp_path, *OPTIONS, scorer=lengths, prompts=PROMPTS).step()
    calls = sum(turn.tool_calls for rollout in rollouts for turn in rollout.turns)
    failed = sum(m["role"] == "tool" and "no sevens" in m["content"] for each in rollouts for m in each.conversation)
    metrics = rollout_metrics(rollouts)
    assert metrics["tool_calls"] == calls / 16 > 0
    assert metrics["tool_errors"] == failed / calls > 0
    assert "tool_calls" not in rollout_metrics(Run(tmp_path / "plain", scorer=lengths, prompts=PROMPTS).step())


def test_a_call_is_no_answer(tmp_path):
    rollouts = Run(tmp_path, *OPTIONS, "env.max_turns=2", scorer=lengths, prompts=PROMPTS).step()
    told = [(replace(rollout, answer=rollout.reply.strip()), rollout.turns[-1].tool_calls) for rollout in rollouts]
    assert {(rollout.right, calls) for rollout, calls in told if rollout.answer} == {(True, 0), (False, 1)}


def test_tools_need_a_turn_for_the_answer():
    with pytest.raises(ConfigError, match=r"max_turns=1: a call is a reply.*set env.max_turns to 2 or more"):
        load_config(GRPOSettings, None, ["env.tools=[calculator]"])
