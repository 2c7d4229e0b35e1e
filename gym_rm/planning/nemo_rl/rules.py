"""The static placement of NVIDIA NeMo RL (`style="nemo-rl"`): its rules as data, and its errors before the start.

Facts from NeMo RL at commit 7ea279abf: `algorithms/grpo.py` (setup), `distributed/virtual_cluster.py`,
`models/policy/lm_policy.py`, `environments/reward_model_environment.py`. NeMo RL divides a cluster by counting: GPUs on
one node, whole nodes on several. It checks some counts at setup; others fail in an actor or after minutes of waiting.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from gym_rm.errors import ConfigError

ATTEMPTS = 6  # to make placement groups, with pauses of 1, 2, 4, ..., 32 seconds
WAIT_SECONDS = 180  # for placement groups that were requested
_RESOURCES = "policy.generation.colocated.resources"

KEYS = {
    "num_nodes": "cluster.num_nodes",
    "gpus_per_node": "cluster.gpus_per_node",
    "colocated": "policy.generation.colocated.enabled",
    "reward_model_nodes": "env.reward_model.resources.num_nodes",
    "reward_model_gpus_per_node": "env.reward_model.resources.gpus_per_node",
    "generation_nodes": f"{_RESOURCES}.num_nodes",
    "generation_gpus_per_node": f"{_RESOURCES}.gpus_per_node",
    "policy_tensor_parallel_size": "policy.dtensor_cfg.tensor_parallel_size",
    "policy_context_parallel_size": "policy.dtensor_cfg.context_parallel_size",
    "policy_pipeline_parallel_size": "policy.megatron_cfg.pipeline_model_parallel_size",
    "generation_tensor_parallel_size": "policy.generation.vllm_cfg.tensor_parallel_size",
    "generation_pipeline_parallel_size": "policy.generation.vllm_cfg.pipeline_parallel_size",
    "reward_model_tensor_parallel_size": "env.reward_model.dtensor_cfg.tensor_parallel_size",
    "reward_model_context_parallel_size": "env.reward_model.dtensor_cfg.context_parallel_size",
    "num_prompts": "grpo.num_prompts_per_step",
    "group_size": "grpo.num_generations_per_prompt",
    "reward_model_batch_size": "env.reward_model.batch_size",
}
"""The place of each number in a NeMo RL config."""


@dataclass(frozen=True, slots=True)
class NemoRequest:
    """The numbers of a NeMo RL config that decide a placement.

    Attributes:
        num_nodes, gpus_per_node: the cluster.
        colocated: whether generation shares the GPUs of training.
        reward_model_nodes, reward_model_gpus_per_node: resources of the reward model; None without one.
        generation_nodes, generation_gpus_per_node: resources of generation, read only if it is not colocated.
        policy_tensor_parallel_size, policy_context_parallel_size, policy_pipeline_parallel_size: of training.
        generation_tensor_parallel_size, generation_pipeline_parallel_size: of a vLLM engine.
        reward_model_tensor_parallel_size, reward_model_context_parallel_size: of the reward model.
        num_prompts, group_size: prompts of a step and replies to each; None if not known, then rows are not checked.
        reward_model_batch_size: rows in one forward of a reward model's rank; None if not known.
        reward_model_parameters, policy_parameters: parameters; None if not known, then memory is not checked.
        gpu_memory: bytes of a GPU; None if not known.
        algorithm: `grpo` or `ppo`, which differ in one error.
    """

    num_nodes: int
    gpus_per_node: int
    colocated: bool = True
    reward_model_nodes: int | None = None
    reward_model_gpus_per_node: int | None = None
    generation_nodes: int | None = None
    generation_gpus_per_node: int | None = None
    policy_tensor_parallel_size: int = 1
    policy_context_parallel_size: int = 1
    policy_pipeline_parallel_size: int = 1
    generation_tensor_parallel_size: int = 1
    generation_pipeline_parallel_size: int = 1
    reward_model_tensor_parallel_size: int = 1
    reward_model_context_parallel_size: int = 1
    num_prompts: int | None = None
    group_size: int | None = None
    reward_model_batch_size: int | None = None
    reward_model_parameters: int | None = None
    policy_parameters: int | None = None
    gpu_memory: float | None = None
    algorithm: str = "grpo"

    @property
    def has_reward_model(self) -> bool:
        """Whether there is a reward model."""
        return self.reward_model_nodes is not None or self.reward_model_gpus_per_node is not None

    @property
    def reward_model_gpus(self) -> int:
        """GPUs of the reward model."""
        return max(0, self.reward_model_nodes or 0) * max(0, self.reward_model_gpus_per_node or 0)

    @property
    def parallel_sizes(self) -> dict[str, tuple[int, ...]]:
        """Tensor, context and pipeline parallel sizes of each part; their products divide its GPUs."""
        return {
            "reward model": (self.reward_model_tensor_parallel_size, self.reward_model_context_parallel_size),
            "training": (
                self.policy_tensor_parallel_size,
                self.policy_context_parallel_size,
                self.policy_pipeline_parallel_size,
            ),
            "generation": (self.generation_tensor_parallel_size, self.generation_pipeline_parallel_size),
        }

    @property
    def policy_nodes(self) -> int:
        """Nodes that are left for training and generation."""
        return self.num_nodes if self.num_nodes == 1 else self.num_nodes - (self.reward_model_nodes or 0)


class NemoStage(enum.StrEnum):
    """When NeMo RL notices an error."""

    SETUP = "at setup"
    ACTOR = "in the actor of the reward model"
    ATTEMPTS = f"after {ATTEMPTS} attempts in about a minute"
    WAITING = f"after {WAIT_SECONDS} s of waiting for placement groups"
    WORKERS = "when the workers of the policy or of generation are made"
    STEP = "in the first step, when the reward model scores"
    MEMORY = "when weights are loaded or in the first step"


@dataclass(frozen=True, slots=True)
class NemoAnswer:
    """What NeMo RL does with a request that it cannot run.

    Attributes:
        stage: when.
        error: name of the exception.
        text: what it says, paraphrased.
    """

    stage: NemoStage
    error: str
    text: str

    def __str__(self) -> str:
        return f"{self.error} {self.stage}: {self.text}"


class NemoError(ConfigError):
    """A request that NeMo RL cannot run.

    Attributes:
        request: the request.
        says: what NeMo RL itself would do, and when.
        problems: all problems in our words.
        fix: the smallest change of the request with which it runs: values by the names of `NemoRequest`; empty if no
            change of two numbers is enough.
    """

    def __init__(
        self, request: NemoRequest, says: NemoAnswer, problems: tuple[str, ...], fix: dict[str, int | bool]
    ) -> None:
        self.request, self.says, self.problems, self.fix = request, says, problems, fix
        changes = ", ".join(f"{KEYS[name]}={str(value).lower()}" for name, value in fix.items())
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(
            f"NeMo RL cannot run this placement, {count}:"
            + "".join(f"\n  {problem}" for problem in problems)
            + f"\nNeMo RL itself: {says}."
            + f"\nSmallest change: {changes or 'none of one or two numbers; use more or larger GPUs'}."
        )

    def __reduce__(self) -> tuple[type[NemoError], tuple[object, ...]]:
        return NemoError, (self.request, self.says, self.problems, self.fix)


@dataclass(frozen=True, slots=True)
class NemoLayout:
    """Nodes and GPUs of a node for each part.

    Attributes:
        train: nodes, and GPUs on each, of training (and of generation if colocated).
        generation: the same for generation on GPUs of its own; (0, 0) if colocated.
        shared_node: whether training and generation are on one node.
    """

    train: tuple[int, int]
    generation: tuple[int, int] = (0, 0)
    shared_node: bool = False


@dataclass(frozen=True, slots=True)
class NemoRule:
    """A row of NeMo RL's rules.

    Attributes:
        case: when it applies.
        rule: what it does.
        applies: the same as a function.
        layout: the counts of nodes and GPUs.
        answers: the checks at setup, in NeMo RL's order.
    """

    case: str
    rule: str
    applies: Callable[[NemoRequest], bool]
    layout: Callable[[NemoRequest], NemoLayout]
    answers: Callable[[NemoRequest], Iterator[NemoAnswer]]


# --- the rules -------------------------------------------------------------------------------------------------------


def _refused(text: str, error: str = "AssertionError") -> NemoAnswer:
    return NemoAnswer(NemoStage.SETUP, error, text)


def _one_node_colocated(request: NemoRequest) -> Iterator[NemoAnswer]:
    left = request.gpus_per_node - (request.reward_model_gpus_per_node or 0)
    if left <= 0:
        yield _refused(f"{_RESOURCES}.gpus_per_node must be > 0 with one node, but is {left}")


def _one_node_shared(request: NemoRequest) -> Iterator[NemoAnswer]:
    gpus, nodes = request.generation_gpus_per_node, request.generation_nodes
    if gpus is None or gpus <= 0:
        yield _refused(f"{_RESOURCES}.gpus_per_node must be set to a value > 0 with one policy node, got {gpus}")
    if nodes not in (None, 1):
        yield _refused(f"{_RESOURCES}.num_nodes must be 1 or null with one policy node, got {nodes}")
    train = _shared_layout(request).train[1]
    if train <= 0:
        yield _refused(f"not enough GPUs for training, {train} are left on the node")


def _several_nodes_separate(request: NemoRequest) -> Iterator[NemoAnswer]:
    gpus, nodes = request.generation_gpus_per_node, request.generation_nodes
    if nodes is None and request.algorithm == "grpo":
        yield _refused("'>' is not supported between NoneType and int", "TypeError")
    if nodes is None or nodes <= 0:
        yield _refused(f"{_RESOURCES}.num_nodes must be > 0 with several nodes, got {nodes}")
    if gpus != request.gpus_per_node:
        ours = request.gpus_per_node
        yield _refused(f"{_RESOURCES}.gpus_per_node must equal cluster.gpus_per_node, got {gpus} and {ours}")
    train = request.policy_nodes - (nodes or 0)
    if train <= 0:
        yield _refused(f"train nodes and inference nodes must be > 0, got {train} and {nodes}")


def _shared_layout(request: NemoRequest) -> NemoLayout:
    gpus = request.generation_gpus_per_node or 0
    reward = (request.reward_model_gpus_per_node or 0) if request.num_nodes == 1 else 0
    return NemoLayout((1, request.gpus_per_node - gpus - reward), (1, gpus), shared_node=True)


RULES = (
    NemoRule(
        "one node, colocated",
        "policy and generation get the GPUs that the reward model leaves",
        lambda request: request.num_nodes == 1 and request.colocated,
        lambda request: NemoLayout((1, request.gpus_per_node - (request.reward_model_gpus_per_node or 0))),
        _one_node_colocated,
    ),
    NemoRule(
        "one node, separate",
        "generation gets its GPUs; training those that generation and the reward model leave",
        lambda request: request.num_nodes == 1,
        _shared_layout,
        _one_node_shared,
    ),
    NemoRule(
        "several nodes, colocated",
        "the reward model takes whole nodes, also for some of their GPUs; policy and generation get the other nodes",
        lambda request: request.colocated,
        lambda request: NemoLayout((request.policy_nodes, request.gpus_per_node)),
        lambda request: iter(()),
    ),
    NemoRule(
        "several nodes, separate, one left for the policy",
        "training and generation share the node that the reward model leaves",
        lambda request: request.policy_nodes == 1,
        _shared_layout,
        _one_node_shared,
    ),
    NemoRule(
        "several nodes, separate",
        "generation gets whole nodes; training those that generation and the reward model leave",
        lambda request: True,
        lambda request: NemoLayout(
            (request.policy_nodes - (request.generation_nodes or 0), request.gpus_per_node),
            (request.generation_nodes or 0, request.generation_gpus_per_node or 0),
        ),
        _several_nodes_separate,
    ),
)
"""NeMo RL's rules; the first that applies counts."""


def nemo_rule(request: NemoRequest) -> NemoRule:
    """Return the rule that decides this placement."""
    return next(rule for rule in RULES if rule.applies(request))


def nemo_layout(request: NemoRequest) -> NemoLayout:
    """Return the counts of nodes and GPUs; they can be 0 or negative if NeMo RL would refuse them."""
    return nemo_rule(request).layout(request)


def nemo_answer(request: NemoRequest) -> NemoAnswer | None:
    """Return what NeMo RL does if it cannot run this request; None if it runs. Only the first error is seen."""
    if request.num_nodes != 1 and request.policy_nodes <= 0:
        left, rm = request.policy_nodes, request.reward_model_nodes or 0
        return _refused(f"policy_nodes must be > 0, got {left} + {rm} for the reward model = {request.num_nodes}")
    refused = next(nemo_rule(request).answers(request), None)
    return refused or next(_later(request), None)


def _later(request: NemoRequest) -> Iterator[NemoAnswer]:
    """Yield what passes setup and fails after it, in the order in which it is seen."""
    total = request.num_nodes * request.gpus_per_node
    layout, sizes = nemo_layout(request), request.parallel_sizes
    train, generation = (nodes * gpus for nodes, gpus in (layout.train, layout.generation))
    reward = request.reward_model_gpus
    if request.has_reward_model:
        if reward > total:
            text = f"not enough GPUs: {reward} requested, {total} in the cluster"
            yield NemoAnswer(NemoStage.ATTEMPTS, "ResourceInsufficientError", text)
        if text := world_problem(reward, sizes["reward model"]):
            yield NemoAnswer(NemoStage.ACTOR, "ValueError", text)
    if train + generation > total:
        text = f"not enough GPUs: {train + generation} requested, {total} in the cluster"
        yield NemoAnswer(NemoStage.ATTEMPTS, "ResourceInsufficientError", text)
    if train + generation + reward > total:
        yield NemoAnswer(NemoStage.WAITING, "TimeoutError", "timed out waiting for placement groups to be ready")
    if text := world_problem(train, sizes["training"]):
        yield NemoAnswer(NemoStage.WORKERS, "ValueError", text)
    engines = train if request.colocated else generation
    if text := world_problem(engines, sizes["generation"]):
        yield NemoAnswer(NemoStage.WORKERS, "AssertionError", text)
    if text := reward_rows(request):
        yield NemoAnswer(NemoStage.STEP, "AssertionError", text)
    if short := short_of_memory(request):
        yield NemoAnswer(NemoStage.MEMORY, "torch.OutOfMemoryError", f"CUDA out of memory ({short[0][:-1]})")


def world_problem(gpus: int, sizes: tuple[int, ...]) -> str:
    """Return why so many GPUs cannot be divided into groups of these parallel sizes; empty if they can."""
    ranks = math.prod(sizes)
    if ranks > 0 and gpus >= ranks and gpus % ranks == 0:
        return ""
    if gpus < ranks:
        return f"the world size {gpus} is insufficient for the parallel sizes, whose product is {ranks}"
    return f"the world size {gpus} must be divisible by the product of the parallel sizes, {ranks}"


def reward_rows(request: NemoRequest) -> str:
    """Return why the rows of a step cannot be divided over the reward model's ranks; empty if they can."""
    if request.num_prompts is None or request.group_size is None or not request.has_reward_model:
        return ""
    ranks = request.reward_model_tensor_parallel_size * request.reward_model_context_parallel_size
    rows, groups = request.num_prompts * request.group_size, max(1, request.reward_model_gpus // max(1, ranks))
    if rows % groups:
        return f"{rows} rows of a step are not divisible by the {groups} data-parallel ranks of the reward model"
    batch = min(request.reward_model_batch_size or 1, rows // groups)
    if (rows // groups) % max(1, batch):
        key = KEYS["reward_model_batch_size"]
        return f"{rows // groups} rows of a rank of the reward model are not divisible by {key} = {batch}"
    return ""


def short_of_memory(request: NemoRequest) -> tuple[str, ...]:
    """Return which weights are larger than the GPUs for them. A lower bound: activations are not counted.

    The reward model stays in float32 (4 bytes a parameter, divided by FSDP and tensor parallelism over all its GPUs);
    a policy in full training has weights, gradients and two Adam states in float32 (16 bytes).
    """
    if request.gpu_memory is None:
        return ()
    found = []
    have = f"they have {request.gpu_memory / 2**30:.1f} GiB."
    nodes, gpus = nemo_layout(request).train
    for name, parameters, size, count, what in (
        ("the reward model", request.reward_model_parameters, 4, request.reward_model_gpus, "weights in float32"),
        ("the policy", request.policy_parameters, 16, nodes * gpus, "weights, gradients and optimizer in float32"),
    ):
        if parameters is not None and count > 0 and parameters * size / count > request.gpu_memory:
            each = f"{parameters * size / count / 2**30:.1f} GiB"
            plural = "" if count == 1 else "s"
            found.append(f"{name} needs {each} on each of its {count} GPU{plural} for {what}, {have}")
    return tuple(found)
