"""GRPO (arXiv 2402.03300) on `RewardModel-v0`, in one file: a policy learns from a reward model, through Gymnasium.

    python agents/grpo.py                             # embedded policy, reward model and prompts: a laptop will do
    python agents/grpo.py seed=2 steps=50             # any setting below can be changed
    python agents/grpo.py --config run.yaml steps=50  # settings from a file, changed once more
    python agents/grpo.py policy.model=Qwen/Qwen3-0.6B env.reward_model=Skywork/Skywork-Reward-V2-Qwen3-0.6B \\
        env.prompts=prompts.jsonl                     # your own: folders, hub ids, files

Read it from top to bottom: the settings, the algorithm as pure functions, the policy, one update, the loop.
Shapes: B = completions of a step (`num_prompts * group_size`), L = tokens of the longest prompt, T = of the longest
completion, its end mark included.
"""

from __future__ import annotations

import argparse
import copy
import importlib.resources
import inspect
import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from pydantic import Field
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

import gym_rm
from gym_rm.config import Config, NonNegativeInt, PositiveInt, load_config
from gym_rm.data.prompts import load_prompts
from gym_rm.errors import ConfigError
from gym_rm.reports.metrics import reward_metrics
from gym_rm.reports.plots import plot_run
from gym_rm.reports.runs import RunWriter, read_run
from gym_rm.reports.tables import common_opening, conversations_table, results_table, signed

# --- settings --------------------------------------------------------------------------------------------------------


class PolicySettings(Config):
    """The model that learns."""

    model: str | None = None
    """Folder or hub id of a chat model; null for the embedded policy."""
    max_new_tokens: PositiveInt | None = None
    """Longest completion; one that reaches it is scored as it is. null for 24 (embedded policy) or 512."""
    temperature: float = Field(default=1.0, gt=0)
    """Of sampling, in training and in evaluation; the log-probabilities are those of the same distribution."""
    rollout_batch_size: PositiveInt = 512
    """Completions that are generated together."""


class EnvSettings(Config):
    """The environment: keywords of `gym.make_vec("RewardModel-v0", ...)`."""

    reward_model: str | dict[str, Any] | None = None
    """What `gym_rm.load_scorer` takes; null for the embedded reward model."""
    reward_model_kwargs: dict[str, Any] = Field(default={})
    """Options of the reward model: dtype, device, max_num_batched_tokens, ..."""
    prompts: str | None = None
    """What `gym_rm.data.prompts.load_prompts` takes: a file or a data set name; null for the embedded prompts."""
    num_prompts: PositiveInt = 32
    """Prompts of a step."""
    group_size: int = Field(default=8, ge=2)
    """Completions of each prompt, which are compared with each other."""
    fallback_reward: float | None = None
    """None stops at a conversation that cannot be scored; a number lets it pass, out of the group with advantage 0."""


class LossSettings(Config):
    """The objective."""

    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """The probability ratio is clipped below at 1 - clip_low ..."""
    clip_high: float = Field(default=0.2, ge=0)
    """... and above at 1 + clip_high."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the policy as it was at the start; 0 keeps no copy of it."""
    std_floor: float = Field(default=0.1, gt=0)
    """Lower bound on a group's standard deviation when advantages are divided by it; set it to the noise of the
    scores, so that a group whose rewards differ by noise alone gets small advantages."""


class OptimizerSettings(Config):
    """AdamW."""

    learning_rate: float | None = Field(default=None, gt=0)
    """Of every update after the warm-up. null for 5e-4 (embedded policy) or 1e-6."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    warmup_steps: NonNegativeInt = 5
    """Updates over which the learning rate rises."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Longer gradients are scaled down to this."""
    updates_per_step: PositiveInt = 1
    """Optimizer steps that share the completions of one step, each on its part of them."""
    micro_batch_size: PositiveInt = 64
    """Completions in one forward and backward pass; neighbours in length go together, padding is cut off."""
    precision: Literal["auto", "no", "bf16", "fp16"] = "auto"
    """accelerate's mixed precision; auto is bf16 where the GPU has it, else float32 throughout."""


class GRPOSettings(Config):
    """All settings."""

    seed: int = 1
    """Of the order of prompts and of sampling: the same seed on the same machine gives the same run."""
    steps: PositiveInt = 60
    """Rounds of generate, step, advantages, update, log."""
    held_out_prompts: NonNegativeInt = 256
    """Prompts (a quarter of all at most) kept out of training, to measure accuracy and reward before and after."""
    evaluate_every: PositiveInt = 10
    """Steps between measurements on the held-out prompts; the first step and the last are always measured."""
    output: str | None = None
    """Folder for the results; null for outputs/grpo-<date>-<time>."""
    threads: PositiveInt | None = None
    """CPU threads. null for 1 (embedded policy: too small to share out, and on busy cores threads wait for each other)
    or torch's own choice."""
    policy: PolicySettings = PolicySettings()
    env: EnvSettings = EnvSettings()
    loss: LossSettings = LossSettings()
    optimizer: OptimizerSettings = OptimizerSettings()


def fill_in(settings: GRPOSettings) -> GRPOSettings:
    """The settings with what `null` stands for."""
    embedded = settings.policy.model is None
    policy, optimizer = settings.policy, settings.optimizer
    return settings.model_copy(
        update={
            "output": settings.output or f"outputs/grpo-{time.strftime('%Y%m%d-%H%M%S')}",
            "threads": settings.threads or (1 if embedded else torch.get_num_threads()),
            "policy": policy.model_copy(update={"max_new_tokens": policy.max_new_tokens or (24 if embedded else 512)}),
            "optimizer": optimizer.model_copy(
                update={"learning_rate": optimizer.learning_rate or (5e-4 if embedded else 1e-6)}
            ),
        }
    )


# --- the algorithm ---------------------------------------------------------------------------------------------------


def group_advantages(rewards: np.ndarray, group_ids: np.ndarray, *, std_floor: float) -> np.ndarray:
    """Each reward against those of its group: `(reward - mean) / max(std, std_floor)`, float64 `[B]`.

    Groups are told by their ids, never by position. The deviation is centred first and has the divisor n - 1; sums are
    exactly rounded, so the order of the rows changes no bit. Zero for a group whose rewards are all equal (there a
    rounding residue divided by another would be noise of full size), for a group of one, and for a NaN reward, which
    stands for a failed score and takes no part in its group.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    advantages = np.zeros_like(rewards)
    for group_id in np.unique(group_ids):
        members = np.flatnonzero((group_ids == group_id) & ~np.isnan(rewards))
        group = rewards[members]
        if len(group) < 2 or (group == group[0]).all():
            continue
        centred = group - math.fsum(group) / len(group)
        std = math.sqrt(math.fsum(centred**2) / (len(group) - 1))
        advantages[members] = centred / max(std, std_floor)
    return advantages


@dataclass(frozen=True)
class LossTerms:
    """Scalars, each a mean over the tokens of `mask`."""

    loss: Tensor
    kl: Tensor
    clipped: Tensor


def grpo_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    reference_log_probs: Tensor | None = None,
    kl_coef: float = 0.0,
    num_tokens: int | Tensor | None = None,
) -> LossTerms:
    """The clipped objective of PPO (1707.06347), every token of a completion with the completion's advantage.

    Args:
        log_probs: of the tokens under the policy `[B, T]`.
        old_log_probs: under the policy that sampled them `[B, T]`.
        advantages: `[B]`.
        mask: True on the completion's tokens `[B, T]`.
        clip_low, clip_high: the ratio counts only within `[1 - clip_low, 1 + clip_high]`.
        reference_log_probs: under the reference policy `[B, T]`, for the k3 estimate of the divergence from it,
            `exp(d) - d - 1` with `d = reference - policy` (Schulman, "Approximating KL divergence").
        kl_coef: weight of that divergence.
        num_tokens: what the sums are divided by, if not by the tokens of this mask: a batch that goes through in
            parts gives its own token count with each part, and the parts add up to the whole.
    """
    count = mask.sum() if num_tokens is None else num_tokens

    def mean(values: Tensor) -> Tensor:
        return values.masked_fill(~mask, 0.0).sum() / count

    # The padding holds log-probabilities of nothing: it must not overflow before it is masked.
    ratio = (log_probs - old_log_probs).masked_fill(~mask, 0.0).exp()
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    gain = torch.minimum(ratio * advantages[:, None], clipped_ratio * advantages[:, None])
    kl = torch.zeros_like(log_probs)
    if reference_log_probs is not None:
        # Past 20 the estimate is astronomically large either way; the bound keeps it and its gradient finite.
        difference = (reference_log_probs - log_probs).masked_fill(~mask, 0.0).clamp(-20.0, 20.0)
        kl = difference.expm1() - difference
    was_clipped = (ratio * advantages[:, None] != gain).float()
    return LossTerms(mean(kl_coef * kl - gain), mean(kl).detach(), mean(was_clipped).detach())


def is_right(completion: str, answer: str) -> bool:
    """Whether a completion says the answer, told without any model.

    A numeric answer must be the last number of the completion; any other must stand in it as whole words.
    """
    numbers = re.findall(r"-?\d[\d,]*(?:\.\d+)?", completion)
    try:
        truth = float(answer.replace(",", ""))
    except ValueError:
        return re.search(rf"(?<!\w){re.escape(answer.strip())}(?!\w)", completion, re.IGNORECASE) is not None
    return bool(numbers) and float(numbers[-1].replace(",", "")) == truth


# --- the policy ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Completions:
    """What a policy said to B conversations.

    Attributes:
        texts: the completions without their end mark, B strings.
        input_ids: prompts, padded on the left, then completions, padded on the right, `[B, L + T]`.
        attention_mask: 1 on both, 0 on the padding `[B, L + T]`.
        mask: True on the tokens of the completions `[B, T]`.
        finished: whether the end mark came before `max_new_tokens` ran out `[B]`.
    """

    texts: list[str]
    input_ids: Tensor
    attention_mask: Tensor
    mask: Tensor
    finished: Tensor

    def select(self, rows: Tensor) -> Completions:
        """These rows, without the columns that are padding in all of them."""
        used = self.attention_mask[rows].any(0)
        mask = self.mask[rows]
        return Completions(
            [self.texts[row] for row in rows.tolist()],
            self.input_ids[rows][:, used],
            self.attention_mask[rows][:, used],
            mask[:, mask.any(0)],
            self.finished[rows],
        )


class Policy:
    """A chat model with the two forward passes of policy gradients: sampling, and log-probabilities of the samples.

    Weights are float32 and stay so (mixed precision is a matter of the forward pass); dropout is off.
    """

    def __init__(self, settings: PolicySettings) -> None:
        embedded = importlib.resources.files("gym_rm").joinpath("assets", "policy")
        path = settings.model or str(embedded)
        self.tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
        if self.tokenizer.chat_template is None:
            raise ConfigError(f"policy.model={path!r} has no chat template; a policy for conversations needs one.")
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.settings = settings

        ends = self.model.generation_config.eos_token_id
        ends = {*(ends if isinstance(ends, list) else [ends]), self.tokenizer.eos_token_id}
        # All of it is said here: what a checkpoint brings along (top_k, top_p, a repetition penalty) would sample
        # from one distribution and train another.
        self.sampling = GenerationConfig(
            do_sample=True,
            temperature=settings.temperature,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repetition_penalty=1.0,
            max_new_tokens=settings.max_new_tokens,
            eos_token_id=sorted(ends - {None}),
            pad_token_id=self.tokenizer.pad_token_id,
        )

    @torch.no_grad()
    def generate(self, conversations: Sequence[gym_rm.Conversation]) -> Completions:
        """Sample one completion for each of B conversations."""
        prompts = self.tokenizer.apply_chat_template(
            list(map(list, conversations)),
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        ).to(self.model.device)
        ids, attended = prompts["input_ids"], prompts["attention_mask"]
        sampled = []
        for rows in torch.arange(len(ids), device=ids.device).split(self.settings.rollout_batch_size):
            whole = self.model.generate(
                input_ids=ids[rows], attention_mask=attended[rows], generation_config=self.sampling
            )
            sampled += list(whole[:, ids.shape[1] :])
        tokens = torch.nn.utils.rnn.pad_sequence(sampled, batch_first=True, padding_value=self.sampling.pad_token_id)
        is_end = torch.isin(tokens, torch.tensor(self.sampling.eos_token_id, device=tokens.device))
        mask = is_end.cumsum(1) - is_end.long() == 0
        # Other special tokens stay in the text: the reward model shall see all that was said.
        said = [row[keep].tolist() for row, keep in zip(tokens, mask & ~is_end, strict=True)]
        return Completions(
            self.tokenizer.batch_decode(said, skip_special_tokens=False),
            torch.cat([ids, tokens], dim=1),
            torch.cat([attended, mask.long()], dim=1),
            mask,
            is_end.any(1),
        )

    def log_probs(self, completions: Completions) -> Tensor:
        """Of the completions' tokens, at the temperature of sampling, float32 `[B, T]`; padding holds anything."""
        length = completions.mask.shape[1]
        options = {
            "position_ids": (completions.attention_mask.cumsum(1) - 1).clamp(min=0),
            "logits_to_keep": length + 1,
        }
        accepted = inspect.signature(type(self.model).forward).parameters
        output = self.model(
            input_ids=completions.input_ids,
            attention_mask=completions.attention_mask,
            use_cache=False,
            **{name: value for name, value in options.items() if name in accepted},
        )
        logits = output.logits[:, -length - 1 : -1].float() / self.settings.temperature
        chosen = logits.gather(-1, completions.input_ids[:, -length:, None])[..., 0]
        return chosen - logits.logsumexp(-1)


class Learner:
    """A policy, its optimizer, and the copy it must not stray from, where the loss asks for one."""

    def __init__(self, policy: Policy, settings: GRPOSettings) -> None:
        precision = settings.optimizer.precision
        if precision == "auto":
            precision = "bf16" if torch.cuda.is_available() and torch.cuda.is_bf16_supported() else "no"
        self.accelerator = Accelerator(mixed_precision=precision)
        if self.accelerator.num_processes > 1:
            raise ConfigError(f"this agent trains in one process, got {self.accelerator.num_processes}.")
        self.settings = settings
        self.policy = policy
        self.reference = copy.copy(policy) if settings.loss.kl_coef else None
        if self.reference is not None:
            self.reference.model = copy.deepcopy(policy.model).requires_grad_(False).to(self.accelerator.device)
        options = settings.optimizer
        optimizer = torch.optim.AdamW(
            policy.model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=options.weight_decay
        )
        policy.model, self.optimizer = self.accelerator.prepare(policy.model, optimizer)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda update: min(1.0, (update + 1) / (options.warmup_steps + 1))
        )

    def update(self, completions: Completions, advantages: np.ndarray) -> dict[str, float]:
        """Take `updates_per_step` optimizer steps on these completions; means over them of what happened."""
        options, loss = self.settings.optimizer, self.settings.loss
        advantages = torch.as_tensor(advantages, dtype=torch.float32, device=completions.mask.device)
        # With one update, the policy that is trained is still the one that sampled: its own are the old ones.
        old = self._all_log_probs(self.policy, completions) if options.updates_per_step > 1 else None
        anchor = self._all_log_probs(self.reference, completions) if self.reference is not None else None

        totals = dict.fromkeys(("loss", "kl", "clipped", "entropy", "grad_norm"), 0.0)
        shares = torch.randperm(len(completions.texts)).chunk(options.updates_per_step)
        for share in shares:
            num_tokens = completions.mask[share].sum()
            for rows in self._micro_batches(completions, share):
                batch = completions.select(rows)
                width = batch.mask.shape[1]
                log_probs = self.policy.log_probs(batch)
                terms = grpo_loss(
                    log_probs,
                    log_probs.detach() if old is None else old[rows, :width],
                    advantages[rows],
                    batch.mask,
                    clip_low=loss.clip_low,
                    clip_high=loss.clip_high,
                    reference_log_probs=None if anchor is None else anchor[rows, :width],
                    kl_coef=loss.kl_coef,
                    num_tokens=num_tokens,
                )
                self.accelerator.backward(terms.loss)
                surprise = -log_probs.masked_fill(~batch.mask, 0.0).sum() / num_tokens
                for name, value in (*vars(terms).items(), ("entropy", surprise)):
                    totals[name] += value.item()
            norm = self.accelerator.clip_grad_norm_(self.policy.model.parameters(), options.max_grad_norm)
            totals["grad_norm"] += norm.item()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
        return {name: total / len(shares) for name, total in totals.items()}

    def _micro_batches(self, completions: Completions, rows: Tensor) -> tuple[Tensor, ...]:
        """The rows in parts of `micro_batch_size`, neighbours in length together."""
        lengths = completions.attention_mask.sum(1).cpu()
        return rows[lengths[rows].argsort()].split(self.settings.optimizer.micro_batch_size)

    @torch.no_grad()
    def _all_log_probs(self, policy: Policy, completions: Completions) -> Tensor:
        result = torch.zeros(completions.mask.shape, device=completions.mask.device)
        for rows in self._micro_batches(completions, torch.arange(len(completions.texts))):
            batch = completions.select(rows)
            result[rows, : batch.mask.shape[1]] = policy.log_probs(batch)
        return result


# --- the run ---------------------------------------------------------------------------------------------------------


def check_answers(texts: Sequence[str], infos: dict[str, Any]) -> list[bool | None]:
    """For each completion whether it is right; None where the prompt has no answer."""
    answers = infos.get("answer", [None] * len(texts))
    return [None if answer is None else is_right(text, answer) for text, answer in zip(texts, answers, strict=True)]


def describe(completions: Completions, rewards: np.ndarray, right: list[bool | None]) -> dict[str, Any]:
    """What a batch of completions was like, as a row of metrics."""
    known = [value for value in right if value is not None]
    statistics = reward_metrics(rewards)
    return {
        "reward_mean": statistics.mean,
        "reward_std": statistics.std,
        "accuracy": sum(known) / len(known) if known else None,
        "completion_tokens": completions.mask.sum(1).float().mean().item(),
        "finished": completions.finished.float().mean().item(),
    }


def evaluate(envs: gym.vector.VectorEnv, policy: Policy, run: RunWriter, step: int) -> dict[str, Any]:
    """Answer every held-out prompt once; record replies, rewards and which answers are right."""
    observations, _ = envs.reset(options={"prompt_indices": np.arange(envs.num_envs)})
    completions = policy.generate(observations)
    _, rewards, _, _, infos = envs.step(completions.texts)
    prompt_ids, right = infos["final_info"]["prompt_id"], check_answers(completions.texts, infos["final_info"])
    for row, conversation in enumerate(infos["final_obs"]):
        run.add_conversation(step, conversation, prompt_id=prompt_ids[row], reward=rewards[row], right=right[row])
    values = describe(completions, rewards, right)
    run.add_metrics("held_out", step, values)
    return values


def train(settings: GRPOSettings, run: RunWriter, console: Console) -> None:
    """The loop. Whatever ends it, the policy is saved as it then is."""
    torch.set_num_threads(settings.threads)
    set_seed(settings.seed)
    prompts = load_prompts(settings.env.prompts)
    num_held_out = min(settings.held_out_prompts, len(prompts) // 4)
    training_prompts, held_out_prompts = prompts[: len(prompts) - num_held_out], prompts[len(prompts) - num_held_out :]
    group_size = settings.env.group_size
    shared = {
        "reward_model": gym_rm.load_scorer(settings.env.reward_model, **settings.env.reward_model_kwargs),
        "fallback_reward": settings.env.fallback_reward,
        "max_turns": 1,
    }
    num_envs = settings.env.num_prompts * group_size
    envs = gym.make_vec("RewardModel-v0", num_envs, prompts=training_prompts, group_size=group_size, **shared)
    held_out_envs = gym.make_vec("RewardModel-v0", max(1, num_held_out), prompts=held_out_prompts or prompts, **shared)
    policy = Policy(settings.policy)
    learner = Learner(policy, settings)
    console.print(
        f"policy {settings.policy.model or 'embedded'} ({policy.model.num_parameters():,} parameters) on "
        f"{learner.accelerator.device}, reward model {settings.env.reward_model or 'embedded'}, "
        f"{len(training_prompts)} prompts, {num_held_out} held out, seed {settings.seed}",
        highlight=False,
    )

    def measure(step: int) -> None:
        if num_held_out:
            values = evaluate(held_out_envs, policy, run, step)
            console.print(f"step {step:4d}   held-out prompts   {summary(values)}", highlight=False)

    try:
        measure(0)
        observations, _ = envs.reset(seed=settings.seed)
        with progress_bar(console) as bar:
            task = bar.add_task("", total=settings.steps)
            for step in range(1, settings.steps + 1):
                clock = [time.perf_counter()]
                completions = policy.generate(observations)
                clock.append(time.perf_counter())
                observations, rewards, _, _, infos = envs.step(completions.texts)
                clock.append(time.perf_counter())
                episodes = infos["final_info"]
                rewards = np.where(episodes["score_ok"], rewards, np.nan)
                advantages = group_advantages(rewards, episodes["group_id"], std_floor=settings.loss.std_floor)
                updated = learner.update(completions, advantages)
                clock.append(time.perf_counter())

                values = describe(completions, rewards, check_answers(completions.texts, episodes))
                seconds = dict(zip(("generate", "score", "update"), np.diff(clock).tolist(), strict=True))
                run.add_metrics("train", step, {**values, **updated, "phase_seconds": seconds})
                bar.update(task, advance=1, description=summary(values))
                if step % settings.evaluate_every == 0 or step == settings.steps:
                    measure(step)
    finally:
        learner.accelerator.unwrap_model(policy.model).save_pretrained(run.folder / "policy")
        policy.tokenizer.save_pretrained(run.folder / "policy")
        envs.close()
        held_out_envs.close()


def summary(values: dict[str, Any]) -> str:
    reward = "no reward" if values["reward_mean"] is None else f"reward {signed(values['reward_mean'])}"
    return reward if values["accuracy"] is None else f"{reward}, {values['accuracy']:4.0%} right"


def progress_bar(console: Console) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, TextColumn("left:"), TimeRemainingColumn(), console=console)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="name=value", help="settings, as in policy.model=folder seed=2")
    parser.add_argument("--config", type=Path, help="YAML file of settings")
    arguments = parser.parse_args()
    console = Console()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    interrupted = False
    try:
        settings = fill_in(load_config(GRPOSettings, arguments.config, arguments.overrides))
        run = RunWriter(settings.output, settings.model_dump())
        train(settings, run, console)
    except gym_rm.GymRMError as error:
        console.print(f"[red]error:[/] {escape(str(error))}")
        raise SystemExit(2) from error
    except KeyboardInterrupt:
        interrupted = True
        console.print("interrupted: what there is is kept")
    results = read_run(run.folder)
    if results.before_and_after():
        console.print(conversations_table(results))
    if results.training:
        console.print(results_table(results))
        opening = common_opening(results)
        if opening is not None and opening.warning is not None:
            console.print(f"[yellow]{escape(opening.warning)}[/]", highlight=False)
        console.print(f"picture: {plot_run(results, run.folder / 'curve.png')}", highlight=False)
    console.print(
        f"policy:  {run.folder / 'policy'}  (to go on from it: policy.model={run.folder / 'policy'})", highlight=False
    )
    raise SystemExit(130 if interrupted else 0)


if __name__ == "__main__":
    main()
