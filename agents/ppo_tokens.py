"""PPO (arXiv 1707.06347) that writes replies token by token, in one file, with Gymnasium and no other RL library.

    gym-rm agent ppo_tokens                                   # eight embedded prompts; half a minute, no GPU
    gym-rm agent ppo_tokens --autoreset-mode NextStep --seed 2
    gym-rm agent ppo_tokens --num-prompts 32 --total-timesteps 400000

The environment is `RewardModelTokens-v0`. An observation is the last L token ids and their mask; an action is the next
token. The reward model scores a reply once, when it ends. The file is written in the style of CleanRL.
Shapes: T = steps in a rollout, N = environments, L = tokens in an observation.
"""

import argparse
import time
from dataclasses import dataclass, fields
from itertools import product

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import gym_rm
from gym_rm.data.prompts import load_prompts


@dataclass
class Args:
    env_id: str = "RewardModelTokens-v0"  # observations must be token ids and their mask, actions discrete
    num_prompts: int = 8  # number of embedded prompts; the agent memorises them
    window: int = 20  # L
    prefill: str = "It is"  # beginning of every reply; the agent continues with numbers or full stops
    max_new_tokens: int = 2
    autoreset_mode: str = "SameStep"  # or NextStep
    seed: int = 1
    total_timesteps: int = 80_000
    num_envs: int = 64  # N
    num_steps: int = 16  # T
    learning_rate: float = 1e-3
    gamma: float = 1.0  # no discount: a reply is short and its reward comes at the end
    gae_lambda: float = 0.95
    num_minibatches: int = 4
    update_epochs: int = 4
    clip_coef: float = 0.2
    ent_coef: float = 0.2  # initial value; decays to zero like the learning rate
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    threads: int = 1


VOCABULARY = (".", *(f" {number}" for number in range(10, 100)))


class Agent(nn.Module):
    """Policy and value of a window of tokens: two small networks on one embedding."""

    def __init__(self, vocabulary: int, length: int, num_actions: int) -> None:
        super().__init__()
        self.length = length
        self.embed = nn.Embedding(vocabulary, 16)
        self.actor = self.network(length * 16, num_actions, std=0.01)
        self.critic = self.network(length * 16, 1, std=1.0)

    @staticmethod
    def network(inputs: int, outputs: int, std: float) -> nn.Sequential:
        layers = [nn.Linear(inputs, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, outputs)]
        for layer, gain in zip(layers[::2], (2**0.5, 2**0.5, std), strict=True):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
        return nn.Sequential(*layers)

    def features(self, observations: Tensor) -> Tensor:
        ids, mask = observations[:, : self.length], observations[:, self.length :]
        return (self.embed(ids) * mask[..., None]).flatten(1)

    def value(self, observations: Tensor) -> Tensor:
        return self.critic(self.features(observations))[:, 0]

    def distribution(self, observations: Tensor) -> Categorical:
        return Categorical(logits=self.actor(self.features(observations)))


def advantages_and_returns(
    rewards: Tensor, values: Tensor, dones: Tensor, next_value: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Return generalised advantage estimates (arXiv 1506.02438) and returns, both `[T, N]`.

    `dones[t]` is 1 where step t ended an episode.
    """
    advantages = torch.zeros_like(rewards)
    following, carried = next_value, torch.zeros_like(next_value)
    for t in reversed(range(len(rewards))):
        not_done = 1.0 - dones[t]
        delta = rewards[t] + gamma * following * not_done - values[t]
        carried = delta + gamma * gae_lambda * not_done * carried
        advantages[t], following = carried, values[t]
    return advantages, advantages + values


@torch.no_grad()
def evaluate(agent: Agent, envs: gym.vector.VectorEnv, num_episodes: int) -> float:
    """Return the mean return of `num_episodes` greedy episodes in each environment."""
    observations, _ = envs.reset(seed=0)
    returns, total = np.zeros(envs.num_envs), 0.0
    left = np.full(envs.num_envs, num_episodes)
    while left.any():
        actions = agent.distribution(torch.as_tensor(observations)).probs.argmax(1).numpy()
        observations, rewards, terminations, truncations, _ = envs.step(actions)
        done = (terminations | truncations) & (left > 0)
        returns += rewards
        total += returns[done].sum()
        left -= done
        returns[terminations | truncations] = 0.0
    return total / (num_episodes * envs.num_envs)


def best_return(args: Args, scorer: gym_rm.Scorer) -> float:
    """Return the mean over the prompts of the highest reward among all replies that the agent can write."""
    lengths = range(args.max_new_tokens + 1)
    texts = [args.prefill + "".join(tokens) for length in lengths for tokens in product(VOCABULARY, repeat=length)]
    best = []
    for prompt in load_prompts(limit=args.num_prompts):
        chats = [[*prompt.messages, {"role": "assistant", "content": text}] for text in texts]
        best.append(scorer.score(chats).rewards.max())
    return float(np.mean(best))


def train(args: Args, scorer: gym_rm.Scorer) -> float:
    """Train an agent and return the mean return of its greedy replies to the prompts."""
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    prompts = load_prompts(limit=args.num_prompts)

    def make(num_envs: int, autoreset_mode: str) -> gym.vector.VectorEnv:
        return gym.make_vec(
            args.env_id,
            num_envs=num_envs,
            reward_model=scorer,
            prompts=prompts,
            window=args.window,
            vocabulary=VOCABULARY,
            prefill=args.prefill,
            max_new_tokens=args.max_new_tokens,
            autoreset_mode=autoreset_mode,
        )

    envs = make(args.num_envs, args.autoreset_mode)
    next_step = envs.metadata["autoreset_mode"] is gym.vector.AutoresetMode.NEXT_STEP
    vocabulary = int(envs.single_observation_space.nvec[0])
    agent = Agent(vocabulary, args.window, int(envs.single_action_space.n))
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    shape = (args.num_steps, args.num_envs)
    observations = torch.zeros((*shape, *envs.single_observation_space.shape), dtype=torch.int64)
    actions = torch.zeros(shape, dtype=torch.int64)
    logprobs, rewards, dones, values = torch.zeros((4, *shape))
    valid = torch.ones(shape, dtype=torch.bool)  # False for steps that only reset an environment

    started = time.time()
    num_updates = args.total_timesteps // (args.num_steps * args.num_envs)
    next_observation = torch.as_tensor(envs.reset(seed=args.seed)[0])
    resetting = np.zeros(args.num_envs, dtype=bool)
    returns, finished = np.zeros(args.num_envs), []
    for update in range(1, num_updates + 1):
        remaining = 1.0 - (update - 1) / num_updates
        optimizer.param_groups[0]["lr"] = remaining * args.learning_rate

        for t in range(args.num_steps):
            with torch.no_grad():
                distribution = agent.distribution(next_observation)
                action = distribution.sample()
                values[t] = agent.value(next_observation)
            observations[t], actions[t], logprobs[t] = next_observation, action, distribution.log_prob(action)
            # In NEXT_STEP, the step after the end of an episode only resets the environment and ignores the action.
            valid[t] = torch.as_tensor(~resetting)
            following, reward, terminations, truncations, infos = envs.step(action.numpy())
            done = terminations | truncations
            resetting = done & next_step
            rewards[t], dones[t] = torch.as_tensor(reward), torch.as_tensor(done)
            # After a truncation, add the value of the last observation as the estimate of the missing rewards.
            for row in np.flatnonzero(truncations & ~terminations):
                last = following[row] if next_step else infos["final_obs"][row]
                with torch.no_grad():
                    rewards[t, row] += args.gamma * agent.value(torch.as_tensor(last)[None])[0]
            next_observation = torch.as_tensor(following)
            returns += reward
            finished += returns[done].tolist()
            returns[done] = 0.0

        with torch.no_grad():
            next_value = agent.value(next_observation)
        advantages, targets = advantages_and_returns(
            rewards, values, dones, next_value, gamma=args.gamma, gae_lambda=args.gae_lambda
        )
        b_obs, b_actions, b_logprobs = observations[valid], actions[valid], logprobs[valid]
        b_advantages, b_targets = advantages[valid], targets[valid]
        for _ in range(args.update_epochs):
            for mb in torch.randperm(len(b_obs)).chunk(args.num_minibatches):
                distribution = agent.distribution(b_obs[mb])
                ratio = (distribution.log_prob(b_actions[mb]) - b_logprobs[mb]).exp()
                advantage = b_advantages[mb]
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
                policy_loss = -torch.min(ratio * advantage, clipped * advantage).mean()
                value_loss = 0.5 * (agent.value(b_obs[mb]) - b_targets[mb]).square().mean()
                entropy = distribution.entropy().mean()
                loss = policy_loss + args.vf_coef * value_loss - remaining * args.ent_coef * entropy
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()

        if update % max(1, num_updates // 20) == 0:
            steps, seconds = update * args.num_steps * args.num_envs, time.time() - started
            recent = np.mean(finished[-256:])
            print(f"step {steps:7d}  return {recent:6.3f}  entropy {entropy:.2f}  {steps / seconds:5.0f} steps/s")
    envs.close()
    return evaluate(agent, make(1, "SameStep"), len(prompts))


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="gym-rm agent ppo_tokens", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for field in fields(Args):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=field.type, default=field.default)
    args = Args(**vars(parser.parse_args()))
    scorer = gym_rm.load_scorer()
    score = train(args, scorer)
    print(f"mean return of greedy replies: {score:.3f}, of the best possible replies: {best_return(args, scorer):.3f}")


if __name__ == "__main__":
    main()
