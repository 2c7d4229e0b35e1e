"""Seconds that a component works in each phase of a step.

Every sort of work is a roofline: operations over the rate that they reach, or bytes over the bandwidth that they reach,
whichever takes longer. The rates that are reached come from the device (published measurements, or this machine's).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gym_rm.planning.hardware.devices import Device
from gym_rm.planning.model.loading import ModelShape
from gym_rm.planning.plan import Phase, Role, TimePart
from gym_rm.planning.quantities import Basis, Quantity, weakest
from gym_rm.planning.request import BYTES, Choice, Component, Workload

KERNELS_PER_LAYER = 15  # norms, projections, rotary embedding, attention, MLP, residuals
EAGER_KERNELS_PER_LAYER = 160  # the same in transformers: 60 operations, and views and calls of modules between them
EAGER_KERNELS_ON_CPU = 220  # and with caches that the weights have filled in between
EAGER_KERNELS_PER_STEP = 250  # of `generate` for each token: masks, positions, sampling, checks for the end
RENDERING = 5e-6  # seconds of a core for a token: chat template and tokenizer
SAMPLING = 30e-9  # seconds to draw from one logit on a CPU
OPTIMIZER_BYTES = 32.0  # that a fused AdamW reads and writes for each parameter
EAGER_OPTIMIZER_BYTES = 80.0  # the same of one operation of torch after the other
TRAINING_SHARE = 0.8  # of the speed of its operations alone that published training runs reach on GPUs
DECODE_OVERHEAD = 1.5e-3  # seconds of scheduling and sampling for one token of a vLLM engine,
SEAT_OVERHEAD = 20e-6  # and for each conversation that runs (servers in AIConfigurator 0.12, silicon_sample.csv)
WAKE_OVERHEAD = 0.3  # seconds for one component to sleep and wake, besides the copies
SEGMENTS = 16  # of the reply lengths, over which decoding is summed up

EAGER = ("transformers", "training")  # engines that run one operation of torch after the other
MATMUL, ATTENTION, BANDWIDTH = "matrix products", "attention", "memory bandwidth"
NETWORK, LAUNCH, HOST = "network", "kernel launches", "host link"
SAMPLE, TEXT, FRAMEWORK = "sampling", "text", "framework"


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
    """Adds up the parts of a phase.

    Attributes:
        total: seconds of all parts.
    """

    __slots__ = ("_parts", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self._parts: dict[str, tuple[float, Basis, str]] = {}

    def add(self, name: str, seconds: float, basis: Basis, source: str) -> None:
        """Add seconds of one sort of work."""
        self.total += seconds
        if name in self._parts:
            before, known, source = self._parts[name]
            seconds, basis = before + seconds, weakest((known, basis))
        self._parts[name] = (seconds, basis, source)

    def parts(self) -> tuple[TimePart, ...]:
        """Return the parts that take any time."""
        return tuple(TimePart(name, *values) for name, values in self._parts.items() if values[0] > 0)


def component_times(
    component: Component, choice: Choice, workload: Workload, site: Site, *, old_log_probs: bool = True
) -> dict[Phase, Clock]:
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
    length: float,
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
        length: mean length of the texts.
        passes: how often each part is computed.
    """
    shape, device, tp = component.shape, site.device, choice.tensor_parallel_size
    size = min(component.bytes_per_parameter, 4.0)
    peak = device.peak_flops(component.dtype)
    rows = tokens / max(batches, 1)
    reached = device.matmul_share(rows)
    rate, rate_basis = peak.value * reached.value, weakest((peak.basis, reached.basis))
    flops = 2.0 * tokens * shape.active_parameters / tp + 2.0 * head_tokens * shape.hidden * shape.head_width / tp
    seconds = flops * passes.matmul / rate
    read = batches * passes.matmul * _weights_read(shape, rows) * component.bytes_per_parameter / tp
    reading = read / (device.bandwidth.value * device.streaming.value)
    text = "2 operations for each weight and token, at the rate that products of so many tokens reach"
    if reading > seconds:
        basis = weakest((device.bandwidth.basis, device.streaming.basis))
        clock.add(BANDWIDTH, reading, basis, "every batch reads the weights")
    else:
        clock.add(MATMUL, seconds, rate_basis, text)
    share = device.attention_share(length)
    clock.add(
        ATTENTION,
        4.0 * pairs * passes.attention / min(tp, max(shape.heads, 1)) / (peak.value * share.value),
        weakest((peak.basis, share.basis)),
        "4 operations for each query, key and width of a head, at the rate that attention reaches",
    )
    eager = component.engine in EAGER or device.is_cpu
    bandwidth = device.elementwise_bandwidth(rows * shape.hidden * size)
    clock.add(
        BANDWIDTH,
        tokens * passes.elementwise * _elements(shape, tp, eager=eager) * size / bandwidth.value,
        bandwidth.basis,
        "norms, activations and residuals",
    )
    if component.engine == "training" and not device.is_cpu:
        text = "training reaches 80% of what its operations alone would (benchmarks/planner_published.py)"
        clock.add(FRAMEWORK, clock.total * (1.0 / TRAINING_SHARE - 1.0), Basis.ASSUMPTION, text)
    _launches(clock, device, shape, batches * max(passes.matmul, 1.0), eager=eager)
    if tp > 1:
        _all_reduces(clock, shape, site, tp, tokens * passes.all_reduces, batches * passes.all_reduces, size)


def _launches(clock: Clock, device: Device, shape: ModelShape, forwards: float, *, eager: bool) -> None:
    """Raise the time to what the host needs to start all kernels; they run while it starts the next ones.

    A CPU starts and computes in turn: there it adds up.
    """
    kernels = _eager_kernels(device) if eager else KERNELS_PER_LAYER
    needed = forwards * shape.num_layers * kernels * device.launch.value
    busy = 0.0 if device.is_cpu else clock.total
    if needed > busy:
        basis = weakest((device.launch.basis, Basis.ASSUMPTION))
        clock.add(LAUNCH, needed - busy, basis, f"{kernels} kernels for each layer")


def _eager_kernels(device: Device) -> int:
    return EAGER_KERNELS_ON_CPU if device.is_cpu else EAGER_KERNELS_PER_LAYER


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


def _elements(shape: ModelShape, tp: int, *, eager: bool) -> float:
    """Return the numbers that one token reads and writes outside of products.

    Fused: about 10 hidden states a layer, the inside of the MLP, the queries and the keys. Eager, as in transformers:
    a norm has 7 hidden states and a residual 3, the same for queries and keys and 10 for their rotation, and 5
    of the gate and the product inside the MLP.
    """
    hidden, wide, inside = (20.0, 17.0, 2.5) if eager else (10.0, 2.0, 1.5)
    inner = sum(
        count * (inside * layer.intermediate + wide * (layer.heads + layer.kv_heads) * layer.head_dim)
        for layer, count in shape.layers
    )
    return hidden * shape.hidden * shape.num_layers + inner / tp


def _pairs(shape: ModelShape, prefix: float, end: float) -> float:
    """Return the products of queries and keys of the tokens from `prefix` to `end` of a text, times their width."""
    return shape.pairs_attended(int(end)) - (shape.pairs_attended(int(prefix)) if prefix >= 1 else 0.0)


# --- scoring ---------------------------------------------------------------------------------------------------------


def _score(component: Component, choice: Choice, workload: Workload, site: Site) -> Clock:
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
        length=workload.prompts.mean + workload.growth,
    )
    if site.device.is_cpu:
        rendered = conversations * workload.turns * (workload.prompts.mean + workload.growth)
        clock.add(TEXT, rendered * RENDERING, Basis.ASSUMPTION, "chat template and tokenizer, 5 us for each token")
    if choice.fsdp_size > 1:
        _gathers(clock, component, choice, site, forwards=batches)
    return clock


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


def _log_probs(component: Component, choice: Choice, workload: Workload, site: Site) -> Clock:
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
        length=workload.prompts.mean + workload.growth,
    )
    if choice.fsdp_size > 1:
        _gathers(clock, component, choice, site, forwards=batches)
    return clock


def _gathers(clock: Clock, component: Component, choice: Choice, site: Site, *, forwards: float) -> None:
    """Add what gathering weights takes longer than the work beside it: every forward gathers every layer once."""
    if site.optimistic:
        return
    ranks = choice.fsdp_size
    bandwidth = site.collective(ranks * choice.tensor_parallel_size)
    size = component.shape.parameters * component.bytes_per_parameter / choice.tensor_parallel_size
    needed = forwards * size * (ranks - 1) / ranks / bandwidth.value
    busy = clock.total
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


def _update(component: Component, choice: Choice, workload: Workload, site: Site) -> Clock:
    """Add forwards, backwards and optimizer steps."""
    clock = Clock()
    shape, tp, updates = component.shape, choice.tensor_parallel_size, workload.updates_per_step
    repeats = updates * workload.epochs
    conversations, tokens, pairs = _training_rows(component, workload, choice, updates=updates)
    again = 1.0 if choice.gradient_checkpointing else 0.0
    backward = 1.0 if component.lora_rank else 2.0  # adapters need the gradients of activations only
    # Eager: a product of two tensors has a gradient for each, an operation of its own.
    elementwise = (5.0 if site.device.is_cpu else 3.0) + again
    passes = Passes(1.0 + backward + again, 3.5 + again, elementwise, 2.0 + again)
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
        length=workload.prompts.mean + workload.growth,
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
    each = EAGER_OPTIMIZER_BYTES if device.is_cpu else OPTIMIZER_BYTES
    bandwidth = device.elementwise_bandwidth(4.0 * shape.hidden * shape.hidden)
    touched = trained * each / (tp * choice.fsdp_size)
    clock.add(
        BANDWIDTH,
        repeats * touched / bandwidth.value,
        bandwidth.basis,
        f"the optimizer reads and writes about {each:.0f} bytes for each parameter",
    )
    return clock


def trainable_parameters(component: Component) -> float:
    """Return how many parameters a component trains."""
    return component.shape.lora_parameters(component.lora_rank) if component.lora_rank else component.shape.parameters


# --- generation ------------------------------------------------------------------------------------------------------


def _generate(component: Component, choice: Choice, workload: Workload, site: Site) -> Clock:
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
        length=prompt,
    )
    for turn in range(workload.turns):
        context = prompt + turn * (workload.replies.mean + workload.turn_tokens)
        for running, steps, length in _segments(workload, conversations, choice.max_num_seqs, padded=padded):
            _decode(clock, component, choice, site, running=running, steps=steps, context=context + length)
    return clock


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
        yield float(seats), rounds * max(longest - 1.0, 0.0), longest / 2  # the prefill gives the first token
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
    reached = device.matmul_share(running)
    computing = 2.0 * running * (shape.active_parameters + head) / tp / (peak.value * reached.value)
    if reading >= computing:
        basis = weakest((device.bandwidth.basis, device.streaming.basis))
        clock.add(BANDWIDTH, steps * reading, basis, "every token of a reply reads the weights")
    else:
        basis = weakest((peak.basis, reached.basis))
        clock.add(MATMUL, steps * computing, basis, "products of many conversations at a time")
    divided = min(tp, max(shape.kv_heads, 1))
    width = max(BYTES[component.dtype], 2.0)
    cached = running * shape.cached_numbers(int(context)) * width / divided
    read = running * _numbers_of_heads(shape, context) * width if device.is_cpu else cached
    clock.add(
        BANDWIDTH,
        steps * read / (device.bandwidth.value * device.decoding.value),
        weakest((device.bandwidth.basis, device.decoding.basis)),
        "every token of a reply reads the weights and the KV cache",
    )
    if tp > 1:
        _all_reduces(clock, shape, site, tp, steps * running, steps, min(size, 4.0))
    if component.engine == "transformers":
        _eager_steps(clock, shape, device, running=running, steps=steps, cached=cached, size=size)
    else:
        overhead = steps * (DECODE_OVERHEAD + running * SEAT_OVERHEAD)
        clock.add(LAUNCH, overhead, Basis.ASSUMPTION, "scheduling and sampling of an engine, per token")


def _numbers_of_heads(shape: ModelShape, context: float) -> float:
    """Return the numbers of keys and values that the query heads read one after the other."""
    return sum(
        count * layer.heads * (layer.head_dim + layer.value_dim) * min(context, layer.window or context)
        for layer, count in shape.layers
    )


def _eager_steps(
    clock: Clock, shape: ModelShape, device: Device, *, running: float, steps: float, cached: float, size: float
) -> None:
    """Add what `generate` of transformers does besides: operations one by one, and a copy of the cache each time."""
    operations = _eager_kernels(device) * shape.num_layers + EAGER_KERNELS_PER_STEP
    basis = weakest((device.launch.basis, Basis.ASSUMPTION))
    clock.add(LAUNCH, steps * operations * device.launch.value, basis, f"{operations} operations for each token")
    bandwidth = device.elementwise_bandwidth(cached / (2.0 * shape.num_layers))
    moved = 2.0 * cached + running * _elements(shape, 1, eager=True) * size
    clock.add(BANDWIDTH, steps * moved / bandwidth.value, bandwidth.basis, "copies of the cache, norms and activations")
    if device.is_cpu:
        drawn = steps * running * shape.vocabulary * SAMPLING
        clock.add(SAMPLE, drawn, Basis.ASSUMPTION, "a random number for each token of the vocabulary, 30 ns each")


# --- between phases --------------------------------------------------------------------------------------------------


def sync_times(policy: Component, choice: Choice, site: Site, *, together: bool, nodes: int) -> Clock:
    """Return the seconds in which new weights of the policy reach generation.

    On the same GPUs every rank gathers the whole weights; on others they are broadcast, over the network if the cluster
    has more than one node.
    """
    clock = Clock()
    size = policy.shape.parameters * policy.bytes_per_parameter
    ranks = choice.fsdp_size * choice.tensor_parallel_size
    if together:
        whole = ranks == 1 or site.optimistic
        bandwidth = site.device.bandwidth if whole else site.collective(ranks)
        text = "weights gathered on the GPUs of the policy"
    else:
        bandwidth = site.network if nodes > 1 else site.device.link
        text = "weights broadcast to the GPUs of generation"
    clock.add(NETWORK, size / bandwidth.value, weakest((bandwidth.basis, Basis.ASSUMPTION)), text)
    return clock


def wake_times(component: Component, size: float, device: Device) -> Clock:
    """Return the seconds in which the weights and state of a component, so many bytes on each GPU, come and go.

    A model that is not trained has a copy on the host: it only comes. Generation gets its weights from the policy.
    """
    ways = 2.0 if component.role.trains else 0.0 if component.role is Role.GENERATION else 1.0
    link = device.host_link
    clock = Clock()
    clock.add(HOST, ways * size / link.value, link.basis, "weights and state from and to the host's memory")
    clock.add(HOST, WAKE_OVERHEAD, Basis.ASSUMPTION, "memory is mapped again, and caches are empty")
    return clock
