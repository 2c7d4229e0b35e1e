"""Placement in the style of NVIDIA NeMo RL, and what a plan does better on the same GPUs.

`nemo_placement` follows the rules in `nemo_rules`; `surpass` compares it, or its error, with a plan.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from gym_rm import checks
from gym_rm.errors import ConfigError
from gym_rm.planning.nemo_rl.problems import nemo_problems, smallest_change
from gym_rm.planning.nemo_rl.rules import NemoAnswer, NemoError, NemoRequest, NemoStage, nemo_answer, nemo_layout
from gym_rm.planning.plan import Address, Plan, Role

__all__ = [
    "STYLE",
    "NemoAnswer",
    "NemoDifference",
    "NemoError",
    "NemoPlacement",
    "NemoRequest",
    "NemoStage",
    "nemo_placement",
    "surpass",
]

STYLE = "nemo-rl"


@dataclass(frozen=True, slots=True)
class NemoPlacement:
    """A static placement as NeMo RL intends it.

    Its placement groups are packed, not pinned: Ray may choose other nodes than these, which are numbered from policy
    to reward model.

    Attributes:
        request: the request.
        train: GPUs of training.
        generation: GPUs of generation; those of training if colocated.
        reward_model: GPUs of the reward model.
        idle: GPUs that nothing can use.
    """

    request: NemoRequest
    train: tuple[Address, ...]
    generation: tuple[Address, ...]
    reward_model: tuple[Address, ...]
    idle: tuple[Address, ...]

    @property
    def text(self) -> str:
        """The counts in words."""
        if self.request.colocated:
            parts = f"{len(self.train)} GPUs for policy and generation"
        else:
            parts = f"{len(self.train)} GPUs for training, {len(self.generation)} for generation"
        reward = f", {len(self.reward_model)} for the reward model" if self.reward_model else ""
        return f"{parts}{reward}, {len(self.idle)} idle"


def nemo_placement(request: NemoRequest) -> NemoPlacement:
    """Return where NeMo RL intends to place a request.

    Raises:
        NemoError: NeMo RL would not run it. All problems are listed, also those that it finds late.
        ConfigError: a number is not an integer.
    """
    _check_types(request)
    says = nemo_answer(request)
    if problems := nemo_problems(request):
        assert says is not None, "a problem that NeMo RL does not have"
        raise NemoError(request, says, problems, smallest_change(request))
    layout = nemo_layout(request)
    policy_nodes = request.policy_nodes
    reward_first = 0 if request.num_nodes == 1 else policy_nodes
    reward_nodes = request.reward_model_nodes or 0
    reward_gpus = request.reward_model_gpus_per_node or 0
    skip = request.gpus_per_node - reward_gpus if request.num_nodes == 1 else 0
    train = _block(0, layout.train)
    generation = train
    if not request.colocated:
        where = (0, layout.train[1]) if layout.shared_node else (layout.train[0], 0)
        generation = _block(where[0], layout.generation, where[1])
    reward_model = _block(reward_first, (reward_nodes, reward_gpus), skip)
    used = {*train, *generation, *reward_model}
    every = _block(0, (request.num_nodes, request.gpus_per_node))
    return NemoPlacement(request, train, generation, reward_model, tuple(each for each in every if each not in used))


def _block(first: int, counts: tuple[int, int], skip: int = 0) -> tuple[Address, ...]:
    nodes, gpus = counts
    return tuple(Address(first + node, skip + gpu) for node in range(nodes) for gpu in range(gpus))


def _check_types(request: NemoRequest) -> None:
    optional = ("num_prompts", "group_size", "reward_model_batch_size", "reward_model_parameters", "policy_parameters")
    for name, value in asdict(request).items():
        if name == "colocated":
            checks.boolean(name, value)
        elif name == "algorithm":
            checks.one_of(name, value, ["grpo", "ppo"])
        elif name == "gpu_memory":
            if value is not None and checks.finite(name, value) <= 0:
                raise ConfigError(f"gpu_memory must be more than 0 bytes, got {value!r}.")
        elif value is not None or name in ("num_nodes", "gpus_per_node") or "parallel" in name:
            checks.integer(name, value, minimum=1 if name in optional else -(2**31))
    if (request.reward_model_nodes is None) != (request.reward_model_gpus_per_node is None):
        raise ConfigError(
            "reward_model_nodes and reward_model_gpus_per_node go together: NeMo RL reads both from "
            f"env.reward_model.resources; got {request.reward_model_nodes} and {request.reward_model_gpus_per_node}."
        )


# --- the comparison --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NemoDifference:
    """What a plan does on the GPUs of a NeMo RL placement.

    Attributes:
        runs: whether NeMo RL runs there at all.
        idle: GPUs that NeMo RL leaves unused; None if it does not run.
        plan_idle: GPUs that the plan leaves unused.
        shared_gpus: GPUs that a reward model shares with other components of the plan, by turns.
        shared_nodes: nodes on which a reward model and others have GPUs of their own.
        lines: the differences in words.
    """

    runs: bool
    idle: int | None
    plan_idle: int
    shared_gpus: int
    shared_nodes: tuple[int, ...]
    lines: tuple[str, ...]


def surpass(plan: Plan, theirs: NemoPlacement | NemoError) -> NemoDifference:
    """Return what a plan does better or otherwise than NeMo RL on the same hardware.

    Raises:
        ConfigError: the two are for different clusters.
    """
    request = theirs.request
    hardware = (max(0, request.gpus_per_node),) * max(0, request.num_nodes)
    if tuple(plan.nodes) != hardware:
        raise ConfigError(
            f"the plan is for nodes with {list(plan.nodes)} GPUs, the NeMo RL request for {request.num_nodes} x "
            f"{request.gpus_per_node}; compare them on the same cluster."
        )
    with_reward = [pool for pool in plan.pools if any(each.role is Role.REWARD_MODEL for each in pool.components)]
    shared = [pool for pool in with_reward if len(pool.components) > 1]
    own = {address.node for pool in with_reward if pool not in shared for address in pool.gpus}
    others = {address.node for pool in plan.pools if pool not in with_reward for address in pool.gpus}
    plan_idle = plan.num_gpus - plan.used_gpus
    runs = isinstance(theirs, NemoPlacement)
    idle = len(theirs.idle) if isinstance(theirs, NemoPlacement) else None
    lines = [
        f"NeMo RL: {theirs.text}." if isinstance(theirs, NemoPlacement) else f"NeMo RL does not run: {theirs.says}."
    ]
    if isinstance(theirs, NemoError):
        lines += [f"Known before the start: {problem}" for problem in theirs.problems]
    lines.append(f"gym_rm: {_pools(plan)}; {plan_idle} GPUs idle.")
    for pool in shared:
        sleeping = ", ".join(each.name for each in pool.components if each.sleeps)
        turns = f"; {sleeping} sleep{'' if ',' in sleeping else 's'} while others work" if sleeping else ""
        names = ", ".join(each.name for each in pool.components)
        lines.append(f"{names} take turns on {_gpus(len(pool.gpus))}{turns}; NeMo RL's reward model shares no GPU.")
    nodes = tuple(sorted(own & others))
    if nodes and request.num_nodes > 1:
        lines.append(
            f"Nodes {list(nodes)} are divided between a reward model and others; NeMo RL gives it whole nodes."
        )
    if idle is not None and idle != plan_idle:
        lines.append(f"Idle: {_gpus(idle)} with NeMo RL, {plan_idle} with the plan.")
    count = sum(len(pool.gpus) for pool in shared)
    return NemoDifference(runs, idle, plan_idle, count, nodes, tuple(lines))


def _pools(plan: Plan) -> str:
    return ", ".join(
        f"{'+'.join(each.name for each in pool.components)} on {_gpus(len(pool.gpus))}" for pool in plan.pools
    )


def _gpus(count: int) -> str:
    return f"{count} GPU{'' if count == 1 else 's'}"
