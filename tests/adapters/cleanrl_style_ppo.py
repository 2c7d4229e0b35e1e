"""PPO in the style of CleanRL, without code for reward models: it makes any id with `gym.make_vec`.

    python cleanrl_style_ppo.py RewardModelCandidates-v0 --import-module gym_rm

Like many such scripts, it ignores the autoreset mode: in `NEXT_STEP` it also trains on the steps that only reset. It
adds up the returns itself, because `RecordEpisodeStatistics` is wrong in `SAME_STEP` before Gymnasium 1.4.
"""

import argparse
import importlib
import json

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions.categorical import Categorical


def layer_init(layer, std=2**0.5):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, 0.0)
    return layer


class Agent(nn.Module):
    def __init__(self, envs):
        super().__init__()
        size = int(np.prod(envs.single_observation_space.shape))
        self.critic = nn.Sequential(
            nn.LayerNorm(size), layer_init(nn.Linear(size, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh(),
            layer_init(nn.Linear(64, 1), std=1.0),
        )  # fmt: skip
        self.actor = nn.Sequential(
            nn.LayerNorm(size), layer_init(nn.Linear(size, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh(),
            layer_init(nn.Linear(64, envs.single_action_space.n), std=0.01),
        )  # fmt: skip

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(x).flatten()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("env_id")
    parser.add_argument("--import-module", default="gymnasium", help="module that registers the id")
    parser.add_argument("--env-kwargs", type=json.loads, default={})
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--total-timesteps", type=int, default=16384)
    parser.add_argument("--num-envs", type=int, default=32)
    parser.add_argument("--num-steps", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--gamma", type=float, default=0.99)
    parser.add_argument("--gae-lambda", type=float, default=0.95)
    parser.add_argument("--ent-coef", type=float, default=0.01)
    args = parser.parse_args()
    importlib.import_module(args.import_module)
    torch.set_num_threads(1)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)

    envs = gym.make_vec(args.env_id, num_envs=args.num_envs, **args.env_kwargs)
    assert isinstance(envs.single_action_space, gym.spaces.Discrete), "only discrete action space is supported"
    agent = Agent(envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    obs = torch.zeros((args.num_steps, args.num_envs, *envs.single_observation_space.shape))
    actions, logprobs, rewards, dones, values = torch.zeros((5, args.num_steps, args.num_envs))
    next_obs = torch.Tensor(envs.reset(seed=args.seed)[0])
    next_done = torch.zeros(args.num_envs)
    episodic_returns, finished = np.zeros(args.num_envs), []
    batch_size = args.num_steps * args.num_envs
    num_iterations = args.total_timesteps // batch_size
    for iteration in range(num_iterations):
        optimizer.param_groups[0]["lr"] = (1 - iteration / num_iterations) * args.learning_rate
        for step in range(args.num_steps):
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                action, logprobs[step], _, values[step] = agent.get_action_and_value(next_obs)
            actions[step] = action
            observation, reward, terminations, truncations, _ = envs.step(action.numpy())
            rewards[step] = torch.tensor(reward)
            next_obs, next_done = torch.Tensor(observation), torch.Tensor(terminations | truncations)
            episodic_returns += reward
            finished += episodic_returns[terminations | truncations].tolist()
            episodic_returns[terminations | truncations] = 0.0

        with torch.no_grad():
            next_value = agent.get_action_and_value(next_obs)[3]
            advantages, last = torch.zeros_like(rewards), 0
            for t in reversed(range(args.num_steps)):
                not_done = 1.0 - (next_done if t == args.num_steps - 1 else dones[t + 1])
                following = next_value if t == args.num_steps - 1 else values[t + 1]
                delta = rewards[t] + args.gamma * following * not_done - values[t]
                advantages[t] = last = delta + args.gamma * args.gae_lambda * not_done * last
        b_obs, b_actions, b_logprobs = obs.flatten(0, 1), actions.flatten(), logprobs.flatten()
        b_advantages, b_returns = advantages.flatten(), (advantages + values).flatten()
        for _ in range(4):
            for mb in torch.randperm(batch_size).chunk(4):
                _, logprob, entropy, value = agent.get_action_and_value(b_obs[mb], b_actions[mb])
                ratio = (logprob - b_logprobs[mb]).exp()
                advantage = (b_advantages[mb] - b_advantages[mb].mean()) / (b_advantages[mb].std() + 1e-8)
                pg_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
                v_loss = 0.5 * ((value - b_returns[mb]) ** 2).mean()
                loss = pg_loss - args.ent_coef * entropy.mean() + 0.5 * v_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
        if iteration % 4 == 3:
            print(f"global_step={(iteration + 1) * batch_size}, episodic_return={np.mean(finished[-100:]):.3f}")
    envs.close()


if __name__ == "__main__":
    main()
