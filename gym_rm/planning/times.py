"""Seconds that a component works in each phase of a step.

Every sort of work is a roofline: operations over the rate that they reach, or bytes over the bandwidth that they reach,
whichever takes longer. The rates that are reached come from the device (published measurements, or this machine's).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gym_rm.planning.hardware import Device
from gym_rm.planning.models import ModelShape
from gym_rm.planning.plan import Phase, Role, TimePart
from gym_rm.planning.quantities import Basis, Quantity, weakest
from gym_rm.planning.request import BYTES, Choice, Component, Workload

ELEMENTWISE = 0.8  # share of the bandwidth that norms and activations reach (AIConfigurator 0.12, systems/*.yaml)
KERNELS_PER_LAYER = 15  # norms, projections, rotary embedding, attention, MLP, residuals
DECODE_OVERHEAD = 1.5e-3  # seconds of scheduling and sampling for one token of a vLLM engine
WAKE_OVERHEAD = 0.3  # seconds for one component to sleep and wake, besides the copies
SEGMENTS = 16  # of the reply lengths, over which decoding is summed up

MATMUL, ATTENTION, BANDWIDTH = "matrix products", "attention", "memory bandwidth"
NETWORK, LAUNCH, HOST = "network", "kernel launches", "host link"


@dataclass(frozen=True, slots=True)
class Site:
    """Where a component runs.

    Attributes:
        device: kind of the GPUs.
        network: bytes/s from a GPU to other nodes.
        spans: whether the GPUs of the pool are in more than one node.
        beside: GPUs of the pool in each node; they send at the same time.
        optimistic: whether every number of GPUs counts as the one with the fastest collectives, for a bound.
    """

    device: Device
    network: Quantity
    spans: bool
    beside: int = 1
    optimistic: bool = False

    def collective(self, size: int, *, tensor_parallel: bool = False) -> Quantity:
        """Return bytes/s of collectives over this many GPUs; tensor-parallel groups never leave a node.

        A ring over nodes passes each link between two nodes once for each GPU that a node has in it.
        """
        inside = self.device.all_reduce_bandwidth(size)
        if self.optimistic and not tensor_parallel:
            inside = max((value for _, value in self.device.all_reduce), key=lambda each: each.value)
        between = self.network.value * (self.beside if self.optimistic else min(self.beside, size))
        if tensor_parallel or not self.spans or inside.value <= between:
            return inside
        return Quantity(between, self.network.basis, self.network.source)


class Clock:
    """Adds up the parts of a phase."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[float, Basis, str]] = {}

    def add(self, name: str, seconds: float, basis: Basis, source: str) -> None:
        """Add seconds of one sort of work."""
        before, known, text = self._parts.get(name, (0.0, basis, source))
        self._parts[name] = (before + seconds, weakest((known, basis)), text)

    def parts(self) -> tuple[TimePart, ...]:
        """Return the parts that take any time."""
        return tuple(TimePart(name, *values) for name, values in self._parts.items() if values[0] > 0)


def component_times(
    component: Component, choice: Choice, workload: Workload, site: Site, *, old_log_probs: bool = True
) -> dict[Phase, tuple[TimePart, ...]]:
    """Return the seconds of each phase, for one step.

    Args:
        component, choice, workload, site: what runs, how, on what work, and where.
        old_log_probs: whether the policy computes the log-probabilities of the replies before it is updated.
    """
    role = component.role
    if role is Role.GENERATION:
        return {Phase.GENERATE: _generate(component, choice, workload, site)}
    if role is Role.REWARD_MODEL:
        return {Phase.SCORE: _score(component, choice, workload, site)}
    if role is Role.REFERENCE:
        return {Phase.SCORE: _log_probs(component, choice, workload, site)}
    phases = {Phase.UPDATE: _update(component, choice, workload, site)}
    if role is Role.CRITIC or (role is Role.POLICY and old_log_probs):
        phases[Phase.SCORE] = _log_probs(component, choice, workload, site)
    return phases


# --- the forward -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Passes:
    """How often the parts of a forward are computed: 1 each in a forward, more in training.

    Attributes:
        matmul: of the products of the layers.
        attention: of attention.
        elementwise: of norms, activations and residuals.
        all_reduces: of the two sums of a tensor-parallel layer.
    """

    matmul: float = 1.0
    attention: float = 1.0
    elementwise: float = 1.0
    all_reduces: float = 1.0


FORWARD = Passes()


def _forward(
    clock: Clock,
    component: Component,
    choice: Choice,
    site: Site,
    *,
    tokens: float,
    pairs: float,
    batches: float,
    head_tokens: float,
    passes: Passes = FORWARD,
) -> None:
    """Add the work of one replica on so many tokens.

    Args:
        clock: where to add it.
        component, choice, site: what runs, how, and where.
        tokens: tokens in all batches.
        pairs: multiplications of queries with keys, summed over heads and layers, times their width.
        batches: number of batches.
        head_tokens: tokens that the head is computed for.
        passes: how often each part is computed.
    """
    shape, device, tp = component.shape, site.device, choice.tensor_parallel_size
    size = min(component.bytes_per_parameter, 4.0)
    peak = device.peak_flops(component.dtype)
    rate, rate_basis = peak.value * device.matmul.value, weakest((peak.basis, device.matmul.basis))
    flops = 2.0 * tokens * shape.active_parameters / tp + 2.0 * head_tokens * shape.hidden * shape.head_width / tp
    seconds = flops * passes.matmul / rate
    read = batches * passes.matmul * _weights_read(shape, tokens / max(batches, 1)) * component.bytes_per_parameter / tp
    reading = read / (device.bandwidth.value * device.streaming.value)
    text = "2 operations for each weight and token, at the rate that large products reach"
    if reading > seconds:
        basis = weakest((device.bandwidth.basis, device.streaming.basis))
        clock.add(BANDWIDTH, reading, basis, "every batch reads the weights")
    else:
        clock.add(MATMUL, seconds, rate_basis, text)
    share = device.attention
    clock.add(
        ATTENTION,
        4.0 * pairs * passes.attention / min(tp, max(shape.heads, 1)) / (peak.value * share.value),
        weakest((peak.basis, share.basis)),
        "4 operations for each query, key and width of a head, at the rate that attention reaches",
    )
    moved = tokens * passes.elementwise * _elements(shape, tp) * size
    clock.add(
        BANDWIDTH,
        moved / (device.bandwidth.value * ELEMENTWISE),
        weakest((device.bandwidth.basis, Basis.TABLE)),
        "norms, activations and residuals at 80% of the bandwidth",
    )
    _launches(clock, device, shape, batches * max(passes.matmul, 1.0))
    if tp > 1:
        _all_reduces(clock, shape, site, tp, tokens * passes.all_reduces, batches * passes.all_reduces, size)


def _launches(clock: Clock, device: Device, shape: ModelShape, forwards: float) -> None:
    """Raise the time to what the host needs to start all kernels; they run while it starts the next ones."""
    needed = forwards * shape.num_layers * KERNELS_PER_LAYER * device.launch.value
    busy = sum(part.seconds for part in clock.parts())
    if needed > busy:
        clock.add(LAUNCH, needed - busy, weakest((device.launch.basis, Basis.ASSUMPTION)), "15 kernels for each layer")


def _all_reduces(
    clock: Clock, shape: ModelShape, site: Site, tp: int, tokens: float, forwards: float, size: float
) -> None:
    """Add two sums of the hidden states over tensor-parallel GPUs for each layer."""
    bandwidth, latency = site.collective(tp, tensor_parallel=True), site.device.all_reduce_latency(tp)
    moved = 2.0 * shape.num_layers * tokens * shape.hidden * size * 2.0 * (tp - 1) / tp
    seconds = moved / bandwidth.value + 2.0 * shape.num_layers * forwards * latency.value
    clock.add(NETWORK, seconds, weakest((bandwidth.basis, latency.basis)), "two all-reduces of each layer")


def _weights_read(shape: ModelShape, tokens: float) -> float:
    """Return the parameters of the layers that so many tokens meet; experts that none of them chose are not read."""
    total = 0.0
    for layer, count in shape.layers:
        used = float(layer.mlp)
        if layer.experts:
            chosen = layer.active_mlp / layer.mlp
            used = layer.mlp * (1.0 - (1.0 - chosen) ** max(tokens, 1.0))
        total += count * (layer.attention + used)
    return total


def _elements(shape: ModelShape, tp: int) -> float:
    """Return the numbers that one token reads and writes outside of products: about 10 hidden states a layer, the
    inside of the MLP and the queries and keys."""
    inner = sum(
        count * (1.5 * layer.intermediate + 2.0 * (layer.heads + layer.kv_heads) * layer.head_dim)
        for layer, count in shape.layers
    )
    return 10.0 * shape.hidden * shape.num_layers + inner / tp


def _pairs(shape: ModelShape, prefix: float, end: float) -> float:
    """Return the products of queries and keys of the tokens from `prefix` to `end` of a text, times their width."""
    return shape.pairs_attended(int(end)) - (shape.pairs_attended(int(prefix)) if prefix >= 1 else 0.0)


# --- scoring ---------------------------------------------------------------------------------------------------------


def _score(component: Component, choice: Choice, workload: Workload, site: Site) -> tuple[TimePart, ...]:
    """Add the unique tokens of every turn: prompts once, replies once each."""
    clock = Clock()
    tokens, pairs = 0.0, 0.0
    prompts, conversations = _share_of(workload, choice.num_replicas)
    for turn in range(1, workload.turns + 1):
        growth = turn * workload.replies.mean + (turn - 1) * workload.turn_tokens
        prompt = workload.prompts.mean
        shared = prompt * (1.0 - workload.shared)
        tokens += prompts * shared + conversations * growth
        pairs += prompts * _pairs(component.shape, prompt - shared, prompt)
        pairs += conversations * _pairs(component.shape, prompt, prompt + growth)
    per_rank = choice.fsdp_size
    batches = _whole(tokens / per_rank / choice.max_num_batched_tokens, choice.num_replicas)
    _forward(
        clock,
        component,
        choice,
        site,
        tokens=tokens / per_rank,
        pairs=pairs / per_rank,
        batches=batches,
        head_tokens=conversations * workload.turns / per_rank,
    )
    if choice.fsdp_size > 1:
        _gathers(clock, component, choice, site, forwards=batches)
    return clock.parts()


def _share_of(workload: Workload, replicas: float) -> tuple[float, float]:
    """Return the prompts and conversations of the replica with the most work.

    Groups are not divided as long as there are enough of them. A fraction of replicas stands for a bound on all numbers
    up to it, so shares are not rounded.
    """
    if workload.num_prompts >= replicas:
        prompts = _whole(workload.num_prompts / replicas, replicas)
        return prompts, prompts * workload.group_size
    conversations = _whole(workload.conversations / replicas, replicas)
    return _whole(conversations / workload.group_size, replicas), conversations


def _whole(share: float, replicas: float) -> float:
    return share if isinstance(replicas, float) else math.ceil(share)


def _log_probs(component: Component, choice: Choice, workload: Workload, site: Site) -> tuple[TimePart, ...]:
    """Add one forward over all conversations, each with its prompt, and the head on the tokens after the prompt."""
    clock = Clock()
    conversations, tokens, pairs = _training_rows(component, workload, choice, updates=1)
    batches = _whole(tokens / choice.max_num_batched_tokens, choice.num_replicas)
    _forward(
        clock,
        component,
        choice,
        site,
        tokens=tokens,
        pairs=pairs,
        batches=batches,
        head_tokens=conversations * workload.growth,
    )
    if choice.fsdp_size > 1:
        _gathers(clock, component, choice, site, forwards=batches)
    return clock.parts()


def _gathers(clock: Clock, component: Component, choice: Choice, site: Site, *, forwards: float) -> None:
    """Add what gathering weights takes longer than the work beside it: every forward gathers every layer once."""
    ranks = choice.fsdp_size
    bandwidth = site.collective(ranks * choice.tensor_parallel_size)
    size = component.shape.parameters * component.bytes_per_parameter / choice.tensor_parallel_size
    needed = forwards * size * (ranks - 1) / ranks / bandwidth.value
    busy = sum(part.seconds for part in clock.parts())
    if needed > busy:
        clock.add(
            NETWORK, needed - busy, weakest((bandwidth.basis, Basis.ASSUMPTION)), "gathers of weights, beside work"
        )


# --- training --------------------------------------------------------------------------------------------------------


def _training_rows(
    component: Component, workload: Workload, choice: Choice, *, updates: int
) -> tuple[float, float, float]:
    """Return conversations, tokens and pairs of one rank in one update."""
    ranks = choice.fsdp_size * choice.num_replicas
    shape = component.shape
    prompt, whole = workload.prompts.mean, workload.prompts.mean + workload.growth
    per_update = workload.conversations / updates
    conversations = _whole(per_update / ranks, choice.num_replicas)
    if not component.shared_prompts:
        return conversations, conversations * whole, conversations * _pairs(shape, 0, whole)
    prompts = _whole(conversations / workload.group_size, choice.num_replicas)
    tokens = prompts * prompt + conversations * workload.growth
    pairs = prompts * _pairs(shape, 0, prompt) + conversations * _pairs(shape, prompt, whole)
    return conversations, tokens, pairs


def _update(component: Component, choice: Choice, workload: Workload, site: Site) -> tuple[TimePart, ...]:
    """Add forwards, backwards and optimizer steps."""
    clock = Clock()
    shape, tp, updates = component.shape, choice.tensor_parallel_size, workload.updates_per_step
    repeats = updates * workload.epochs
    conversations, tokens, pairs = _training_rows(component, workload, choice, updates=updates)
    again = 1.0 if choice.gradient_checkpointing else 0.0
    backward = 1.0 if component.lora_rank else 2.0  # adapters need the gradients of activations only
    passes = Passes(1.0 + backward + again, 3.5 + again, 3.0 + again, 2.0 + again)
    batches = _whole(tokens / choice.max_num_batched_tokens, choice.num_replicas)
    head = conversations * (workload.growth if shape.is_language_model else 1.0)
    _forward(
        clock,
        component,
        choice,
        site,
        tokens=tokens * repeats,
        pairs=pairs * repeats,
        batches=batches * repeats,
        head_tokens=head * repeats,
        passes=passes,
    )
    if choice.fsdp_size > 1:
        _gathers(clock, component, choice, site, forwards=batches * repeats * 3.0)  # forward, backward, gradients
    trained = trainable_parameters(component)
    if choice.num_replicas > 1 and not site.optimistic:
        bandwidth = site.collective(round(choice.num_replicas) * tp)
        moved = 2.0 * trained * 4.0 / (tp * choice.fsdp_size) * (choice.num_replicas - 1) / choice.num_replicas
        clock.add(NETWORK, repeats * moved / bandwidth.value, bandwidth.basis, "all-reduce of gradients")
    device = site.device
    touched = trained * 32.0 / (tp * choice.fsdp_size)
    clock.add(
        BANDWIDTH,
        repeats * touched / (device.bandwidth.value * ELEMENTWISE),
        weakest((device.bandwidth.basis, Basis.TABLE)),
        "the optimizer reads and writes about 32 bytes for each parameter",
    )
    return clock.parts()


def trainable_parameters(component: Component) -> float:
    """Return how many parameters a component trains."""
    return component.shape.lora_parameters(component.lora_rank) if component.lora_rank else component.shape.parameters


# --- generation ------------------------------------------------------------------------------------------------------


def _generate(component: Component, choice: Choice, workload: Workload, site: Site) -> tuple[TimePart, ...]:
    """Add the prefill of each prompt, then one forward for each token of the longest replies."""
    clock = Clock()
    prompts, conversations = _share_of(workload, choice.num_replicas)
    prompt = workload.prompts.mean
    padded = component.engine == "transformers"
    read = conversations if padded else prompts
    tokens = read * prompt + conversations * (workload.turns - 1) * workload.turn_tokens
    pairs = read * _pairs(component.shape, 0, prompt)
    batches = _whole(tokens / choice.max_num_batched_tokens, choice.num_replicas)
    _forward(
        clock,
        component,
        choice,
        site,
        tokens=tokens,
        pairs=pairs,
        batches=batches,
        head_tokens=conversations,
    )
    for turn in range(workload.turns):
        context = prompt + turn * (workload.replies.mean + workload.turn_tokens)
        for running, steps, length in _segments(workload, conversations, choice.max_num_seqs, padded=padded):
            _decode(clock, component, choice, site, running=running, steps=steps, context=context + length)
    return clock.parts()


def _segments(
    workload: Workload, conversations: float, seats: float, *, padded: bool
) -> Iterable[tuple[float, float, float]]:
    """Yield conversations that run at a time, for how many tokens, at which mean length of their replies.

    An engine with fewer seats than conversations is full until the last ones have a seat; then they end one by one. A
    padded batch runs until its longest reply ends.
    """
    lengths = workload.replies
    seats = min(max(seats, 1), conversations)
    if padded:
        rounds = math.ceil(conversations / seats)
        longest = min(lengths.longest_of(seats) + 1.0, lengths.maximum)
        yield float(seats), rounds * longest, longest / 2
        return
    waiting = conversations - seats
    if waiting:
        second = sum(value * value for value in lengths.values) / len(lengths.values)
        yield float(seats), waiting * lengths.mean / seats, second / (2.0 * lengths.mean)
    before = 0.0
    for step in range(SEGMENTS):
        share = step / SEGMENTS
        end = lengths.quantile((step + 1) / SEGMENTS) if step + 1 < SEGMENTS else lengths.longest_of(seats)
        if end > before:
            yield max(seats * (1.0 - share - 0.5 / SEGMENTS), 1.0), end - before, (before + end) / 2
            before = end


def _decode(
    clock: Clock,
    component: Component,
    choice: Choice,
    site: Site,
    *,
    running: float,
    steps: float,
    context: float,
) -> None:
    """Add so many steps of one token for each running conversation."""
    shape, device, tp = component.shape, site.device, choice.tensor_parallel_size
    peak, size = device.peak_flops(component.dtype), component.bytes_per_parameter
    head = shape.hidden * shape.vocabulary
    reading = (_weights_read(shape, running) + head) * size / tp / (device.bandwidth.value * device.streaming.value)
    computing = 2.0 * running * (shape.active_parameters + head) / tp / (peak.value * device.matmul.value)
    if reading >= computing:
        basis = weakest((device.bandwidth.basis, device.streaming.basis))
        clock.add(BANDWIDTH, steps * reading, basis, "every token of a reply reads the weights")
    else:
        basis = weakest((peak.basis, device.matmul.basis))
        clock.add(MATMUL, steps * computing, basis, "products of many conversations at a time")
    divided = min(tp, max(shape.kv_heads, 1))
    cached = running * shape.cached_numbers(int(context)) * max(BYTES[component.dtype], 2.0) / divided
    clock.add(
        BANDWIDTH,
        steps * cached / (device.bandwidth.value * device.decoding.value),
        weakest((device.bandwidth.basis, device.decoding.basis)),
        "every token of a reply reads the weights and the KV cache",
    )
    if tp > 1:
        _all_reduces(clock, shape, site, tp, steps * running, steps, min(size, 4.0))
    if component.engine == "transformers":
        overhead = steps * shape.num_layers * KERNELS_PER_LAYER * device.launch.value
        clock.add(LAUNCH, overhead, weakest((device.launch.basis, Basis.ASSUMPTION)), "15 kernels for each layer")
    else:
        clock.add(LAUNCH, steps * DECODE_OVERHEAD, Basis.ASSUMPTION, "scheduling and sampling of an engine, per token")


# --- between phases --------------------------------------------------------------------------------------------------


def sync_times(policy: Component, choice: Choice, site: Site, *, together: bool, nodes: int) -> tuple[TimePart, ...]:
    """Return the seconds in which new weights of the policy reach generation.

    On the same GPUs every rank gathers the whole weights; on others they are broadcast, over the network if the cluster
    has more than one node.
    """
    clock = Clock()
    size = policy.shape.parameters * policy.bytes_per_parameter
    ranks = choice.fsdp_size * choice.tensor_parallel_size
    if together:
        bandwidth = site.collective(ranks) if ranks > 1 else site.device.bandwidth
        text = "weights gathered on the GPUs of the policy"
    else:
        bandwidth = site.network if nodes > 1 else site.device.link
        text = "weights broadcast to the GPUs of generation"
    clock.add(NETWORK, size / bandwidth.value, weakest((bandwidth.basis, Basis.ASSUMPTION)), text)
    return clock.parts()


def wake_times(component: Component, size: float, device: Device) -> tuple[TimePart, ...]:
    """Return the seconds in which the weights and state of a component, so many bytes on each GPU, come and go.

    A model that is not trained has a copy on the host: it only comes. Generation gets its weights from the policy.
    """
    ways = 2.0 if component.role.trains else 0.0 if component.role is Role.GENERATION else 1.0
    link = device.host_link
    clock = Clock()
    clock.add(HOST, ways * size / link.value, link.basis, "weights and state from and to the host's memory")
    clock.add(HOST, WAKE_OVERHEAD, Basis.ASSUMPTION, "memory is mapped again, and caches are empty")
    return clock.parts()
