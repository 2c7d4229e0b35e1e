"""What a GRPO run says before its first step: what is trained on what, and what its user should know."""

from __future__ import annotations

import time

import torch
from rich.console import Console
from rich.markup import escape

from gym_rm.evaluation.audit import audit_warning
from gym_rm.policy.grpo_settings import GRPOSettings
from gym_rm.policy.learner import Learner
from gym_rm.scorer import Scorer

SUM_WARNING = (
    "advantage.steps=sum pays for more steps: policies then split or pad their replies (PURE, arXiv 2504.15275). Watch "
    "steps_per_reply, or use advantage.steps=min."
)
SLOW_STEP = 60.0  # seconds, from which a step is worth a line before it begins
PASSES = 6  # forwards that a token costs: sampled, measured under the policy and the reference, forward and backward


def describe(
    settings: GRPOSettings, learner: Learner, scorer: Scorer, console: Console, prompts: int, held_out: int, step: int
) -> None:
    """Print what is trained on what, and the warning of the reward model's audit."""
    if (warning := audit_warning(scorer, settings.env.audit)) is not None:
        console.print(f"[yellow]{escape(warning)}[/]", highlight=False)
    if settings.advantage.steps == "sum":
        console.print(f"[yellow]{escape(SUM_WARNING)}[/]", highlight=False)
    console.print(
        f"policy {learner.start.name} ({learner.start.model.num_parameters():,} parameters) on {learner.device}, "
        f"reward model {settings.env.reward_model or 'embedded'}, {prompts} prompts, {held_out} held out, "
        f"seed {settings.seed}" + (f", resuming after step {step}" if step else ""),
        highlight=False,
    )
    if learner.device.type == "cpu" and learner.world == 1 and (seconds := longest_step(settings, learner)) > SLOW_STEP:
        env, longest = settings.env, settings.sampling.max_new_tokens
        console.print(
            f"[yellow]a step takes about {seconds / 60:.0f} minutes on this CPU without the reward model, if its "
            f"{env.num_prompts} x {env.group_size} replies have {longest} tokens; less with a smaller env.num_prompts "
            "or sampling.max_new_tokens[/]",
            highlight=False,
        )


def longest_step(settings: GRPOSettings, learner: Learner) -> float:
    """Return about how many seconds a step takes if all replies are as long as they may be, from a short forward."""
    model, width = learner.start.model, 128
    ids = torch.arange(2 * width).view(2, width) % model.config.vocab_size
    seconds = []
    with torch.no_grad():
        for _ in range(2):
            started = time.perf_counter()
            model(ids)
            seconds.append(time.perf_counter() - started)
    env, turns = settings.env, settings.env.max_turns
    tokens = env.num_prompts * env.group_size * turns * (settings.sampling.max_new_tokens or 0)
    return float(PASSES * tokens * min(seconds) / ids.numel())
