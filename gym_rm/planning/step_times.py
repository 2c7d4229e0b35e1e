"""Seconds that a component works in each phase of a step.

Every sort of work is a roofline: operations over the rate that they reach, or bytes over the bandwidth that they reach,
whichever takes longer. The rates that are reached come from the device (published measurements, or this machine's).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gym_rm.planning.hardware.devices import Device
from gym_rm.planning.plan import Phase, Role, TimePart
from gym_rm.planning.plan_request import Choice, Component, StepWorkload
from gym_rm.planning.quantities import Basis, Quantity, weakest

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
SLOT_OVERHEAD = 20e-6  # and for each conversation that runs (servers in AIConfigurator 0.12, silicon_sample.csv)
WAKE_OVERHEAD = 0.3  # seconds for one component to sleep and wake, besides the copies
SEGMENTS = 16  # of the reply lengths, over which decoding is summed up

EAGER = ("transformers", "training")  # engines that run one operation of torch after the other
MATMUL, ATTENTION, BANDWIDTH = "matrix products", "attention", "memory bandwidth"
NETWORK, LAUNCH, STARTS, HOST = "network", "kernel launches", "starts of operations", "host link"
SAMPLE, TEXT, FRAMEWORK = "sampling", "text", "framework"


@dataclass(frozen=True, slots=True)
class Site:
    """GPUs of a pool, at least `per_node` of them in the same node; `network`: bytes/s from a GPU to other nodes."""

    device: Device
    network: Quantity
    num_gpus: int
    per_node: int

    def collective(self, size: int, *, stride: int = 1) -> Quantity:
        """Return bytes/s of collectives over this many GPUs, of which every `stride`-th of the pool is one.

        A ring over nodes passes the network once for each GPU that a node has in it: the groups between them, of which
        there are `stride`, run at the same time, have the network of their own GPUs and share the links of the node.
        """
        inside = self.device.all_reduce_bandwidth(size * stride)
        between = self.network.value * max(min(self.per_node // stride, size), 1)
        in_a_node = self.per_node == self.num_gpus or self.per_node % (size * stride) == 0
        if in_a_node or inside.value <= between:
            return inside
        return Quantity(between, self.network.basis, self.network.source)


class PhaseClock:
    """Adds up the parts of a phase; `total` has the seconds of all."""

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
    component: Component, choice: Choice, workload: StepWorkload, site: Site, *, old_log_probs: bool = True
) -> dict[Phase, PhaseClock]:
    """Return the seconds of each phase, for one step.

    `old_log_probs` is whether the policy computes the log-probabilities of the replies before it is updated.
    """
    role, what = component.role, (component, choice, workload, site)
    if role is Role.GENERATION:
        return {Phase.GENERATE: _Work(*what).generate()}
    if role is Role.REWARD_MODEL:
        return {Phase.SCORE: _Work(*what).score()}
    phases = {Phase.UPDATE: _Work(*what).update()} if role.trains else {}
    if role in (Role.REFERENCE, Role.CRITIC) or (role is Role.POLICY and old_log_probs):
        phases[Phase.SCORE] = _Work(*what).log_probs()
    return phases


def largest_share(work: StepWorkload, replicas: int) -> tuple[int, int]:
    """Return the prompts and conversations of the replica with the most; groups stay whole if there are enough."""
    if work.num_prompts >= replicas:
        prompts = math.ceil(work.num_prompts / replicas)
        return prompts, prompts * work.group_size
    conversations = math.ceil(work.conversations / replicas)
    return math.ceil(conversations / work.group_size), conversations


def batched_tokens(component: Component, choice: Choice, workload: StepWorkload, site: Site) -> list[float]:
    """Return the tokens that a replica, or a rank of training, divides into batches, in each phase in which it does."""
    work = _Work(component, choice, workload, site)
    if component.role is Role.REWARD_MODEL:
        return [work.scored_rows()[1]]
    updates = (1, workload.updates_per_step) if component.role.trains else (1,)
    return [work.training_rows(updates=each)[1] for each in updates]


class _Work:
    """What one replica does in a phase; each method that is named after a phase returns its seconds."""

    def __init__(self, component: Component, choice: Choice, workload: StepWorkload, site: Site) -> None:
        self.component, self.choice, self.workload, self.site = component, choice, workload, site
        self.shape, self.device, self.tp = component.shape, site.device, choice.tensor_parallel_size
        self.clock = PhaseClock()

    @property
    def is_eager(self) -> bool:
        """Whether one operation of torch runs after the other."""
        return self.component.engine in EAGER or self.device.is_cpu

    @property
    def kernels(self) -> int:
        """Operations of a layer."""
        eager = EAGER_KERNELS_ON_CPU if self.device.is_cpu else EAGER_KERNELS_PER_LAYER
        return eager if self.is_eager else KERNELS_PER_LAYER

    def batches(self, tokens: float) -> float:
        """Return the forwards that so many tokens take."""
        return math.ceil(tokens / self.choice.max_num_batched_tokens)

    # --- the forward -------------------------------------------------------------------------------------------

    def forward(
        self,
        *,
        tokens: float,
        pairs: float,
        batches: float,
        head_tokens: float,
        length: float,
        matmul: float = 1.0,
        attention: float = 1.0,
        elementwise: float = 1.0,
        all_reduces: float = 1.0,
    ) -> None:
        """Add the work on so many tokens.

        Args:
            tokens: tokens in all batches.
            pairs: multiplications of queries with keys, summed over heads and layers, times their width.
            batches: number of batches.
            head_tokens: tokens that the head is computed for.
            length: mean length of the texts.
            matmul, attention, elementwise, all_reduces: how often these parts are computed; training computes more.
        """
        component, shape, device, tp = self.component, self.shape, self.device, self.tp
        size = min(component.bytes_per_parameter, 4.0)
        peak, rows = device.peak_flops(component.dtype), tokens / max(batches, 1)
        flops = 2.0 * tokens * shape.active_parameters / tp + 2.0 * head_tokens * shape.hidden * shape.head_width / tp
        read = batches * matmul * shape.weights_read(rows) * component.bytes_per_parameter / tp
        self.products(flops * matmul, read, rows, "every batch reads the weights")
        share = device.attention_share(length)
        self.clock.add(
            ATTENTION,
            4.0 * pairs * attention / min(tp, max(shape.heads, 1)) / (peak.value * share.value),
            weakest((peak.basis, share.basis)),
            "4 operations for each query, key and width of a head, at the rate that attention reaches",
        )
        bandwidth = device.elementwise
        moved = tokens * elementwise * shape.elementwise_numbers(tp, eager=self.is_eager) * size
        self.clock.add(BANDWIDTH, moved / bandwidth.value, bandwidth.basis, "norms, activations and residuals")
        if component.engine == "training" and not device.is_cpu:
            text = "training reaches 80% of what its operations alone would (benchmarks/planner_published.py)"
            self.clock.add(FRAMEWORK, self.clock.total * (1.0 / TRAINING_SHARE - 1.0), Basis.ASSUMPTION, text)
        self.launches(batches * max(matmul, 1.0))
        if tp > 1:
            self.all_reduces(tokens * all_reduces, batches * all_reduces, size)

    def products(self, flops: float, read: float, rows: float, reads: str) -> None:
        """Add products of so many rows, which compute and read bytes of weights at the same time."""
        device = self.device
        peak, reached = device.peak_flops(self.component.dtype), device.matmul_share(rows)
        computing = flops / (peak.value * reached.value)
        reading = read / (device.bandwidth.value * device.streaming.value)
        if reading > computing:
            self.clock.add(BANDWIDTH, reading, weakest((device.bandwidth.basis, device.streaming.basis)), reads)
        else:
            text = "2 operations for each weight and token, at the rate that products of so many tokens reach"
            self.clock.add(MATMUL, computing, weakest((peak.basis, reached.basis)), text)

    def launches(self, forwards: float) -> None:
        """Raise the time to what the host needs to start all kernels; they run while it starts the next ones.

        A CPU starts and computes in turn: there it adds up.
        """
        needed = forwards * self.shape.num_layers * self.kernels * self.device.launch.value
        waiting = needed - (0.0 if self.device.is_cpu else self.clock.total)
        if waiting > 0:
            basis = weakest((self.device.launch.basis, Basis.ASSUMPTION))
            self.clock.add(
                STARTS if self.device.is_cpu else LAUNCH, waiting, basis, f"{self.kernels} operations for each layer"
            )

    def all_reduces(self, tokens: float, forwards: float, size: float) -> None:
        """Add two sums of the hidden states over tensor-parallel GPUs for each layer."""
        bandwidth = self.device.all_reduce_bandwidth(self.tp)
        latency = self.device.all_reduce_latency(self.tp)
        moved = 2.0 * self.shape.num_layers * tokens * self.shape.hidden * size * 2.0 * (self.tp - 1) / self.tp
        seconds = moved / bandwidth.value + 2.0 * self.shape.num_layers * forwards * latency.value
        self.clock.add(NETWORK, seconds, weakest((bandwidth.basis, latency.basis)), "two all-reduces of each layer")

    def gathers(self, forwards: float) -> None:
        """Add what gathering weights takes longer than the work beside it: a forward gathers every layer once."""
        ranks = self.choice.fsdp_size
        if ranks == 1:
            return
        bandwidth = self.site.collective(ranks, stride=self.tp)
        size = self.shape.parameters * self.component.bytes_per_parameter / self.tp
        waiting = forwards * size * (ranks - 1) / ranks / bandwidth.value - self.clock.total
        if waiting > 0:
            basis = weakest((bandwidth.basis, Basis.ASSUMPTION))
            self.clock.add(NETWORK, waiting, basis, "gathers of weights, beside work")

    # --- scoring and log-probabilities --------------------------------------------------------------------------

    def scored_rows(self) -> tuple[float, float, float]:
        """Return conversations, tokens and pairs that one replica scores."""
        work, prompt = self.workload, self.workload.prompts.mean
        prompts, conversations = largest_share(self.workload, self.choice.num_replicas)
        tokens = pairs = 0.0
        for turn in range(1, work.turns + 1):
            growth = turn * work.replies.mean + (turn - 1) * work.turn_tokens
            tokens += prompts * prompt + conversations * growth
            pairs += prompts * self.shape.pairs_between(0, prompt)
            pairs += conversations * self.shape.pairs_between(prompt, prompt + growth)
        return conversations, tokens, pairs

    def score(self) -> PhaseClock:
        """Add the unique tokens of every turn: prompts once, replies once each."""
        work, prompt = self.workload, self.workload.prompts.mean
        conversations, tokens, pairs = self.scored_rows()
        if self.device.is_cpu:
            rendered = conversations * work.turns * (prompt + work.growth)
            text = "chat template and tokenizer, 5 us for each token"
            self.clock.add(TEXT, rendered * RENDERING, Basis.ASSUMPTION, text)
        return self.one_forward(tokens, pairs, head_tokens=conversations * work.turns)

    def log_probs(self) -> PhaseClock:
        """Add one forward over all conversations, each with its prompt, and the head on the tokens after the prompt."""
        conversations, tokens, pairs = self.training_rows(updates=1)
        return self.one_forward(tokens, pairs, head_tokens=conversations * self.workload.growth)

    def one_forward(self, tokens: float, pairs: float, *, head_tokens: float) -> PhaseClock:
        """Add one forward over whole conversations in as many batches as they make."""
        length, batches = self.workload.prompts.mean + self.workload.growth, self.batches(tokens)
        self.forward(tokens=tokens, pairs=pairs, batches=batches, head_tokens=head_tokens, length=length)
        self.gathers(batches)
        return self.clock

    # --- training -----------------------------------------------------------------------------------------------

    def training_rows(self, *, updates: int) -> tuple[float, float, float]:
        """Return conversations, tokens and pairs of one rank in one update."""
        work, shape = self.workload, self.shape
        prompt, whole = work.prompts.mean, work.prompts.mean + work.growth
        conversations = math.ceil(work.conversations / updates / (self.choice.fsdp_size * self.choice.num_replicas))
        if not self.component.shared_prompts:
            return conversations, conversations * whole, conversations * shape.pairs_between(0, whole)
        prompts = math.ceil(conversations / work.group_size)
        pairs = prompts * shape.pairs_between(0, prompt) + conversations * shape.pairs_between(prompt, whole)
        return conversations, prompts * prompt + conversations * work.growth, pairs

    def update(self) -> PhaseClock:
        """Add forwards, backwards and optimizer steps."""
        component, choice, work, device = self.component, self.choice, self.workload, self.device
        repeats = work.updates_per_step * work.epochs
        conversations, tokens, pairs = self.training_rows(updates=work.updates_per_step)
        again = 1.0 if choice.gradient_checkpointing else 0.0
        backward = 1.0 if component.lora else 2.0  # adapters need the gradients of activations only
        batches = self.batches(tokens) * repeats
        self.forward(
            tokens=tokens * repeats,
            pairs=pairs * repeats,
            batches=batches,
            head_tokens=conversations * repeats * (work.growth if self.shape.is_language_model else 1.0),
            length=work.prompts.mean + work.growth,
            matmul=1.0 + backward + again,
            attention=3.5 + again,
            # Eager: a product of two tensors has a gradient for each, an operation of its own.
            elementwise=(5.0 if device.is_cpu else 3.0) + again,
            all_reduces=2.0 + again,
        )
        self.gathers(batches * 3.0)  # forward, backward, gradients
        shape, replicas = self.shape, choice.num_replicas
        parameters = shape.lora_parameters(component.lora.rank) if component.lora else shape.parameters
        trained = parameters / (self.tp * choice.fsdp_size)
        if replicas > 1:
            bandwidth = self.site.collective(replicas, stride=self.tp * choice.fsdp_size)
            moved = 2.0 * trained * 4.0 * (replicas - 1) / replicas
            self.clock.add(NETWORK, repeats * moved / bandwidth.value, bandwidth.basis, "all-reduce of gradients")
        touched = EAGER_OPTIMIZER_BYTES if device.is_cpu else OPTIMIZER_BYTES
        bandwidth = device.elementwise
        text = f"the optimizer reads and writes about {touched:.0f} bytes for each parameter"
        self.clock.add(BANDWIDTH, repeats * trained * touched / bandwidth.value, bandwidth.basis, text)
        return self.clock

    # --- generation ---------------------------------------------------------------------------------------------

    def generate(self) -> PhaseClock:
        """Add the prefill of each prompt, then one forward for each token of the longest replies."""
        work, prompt = self.workload, self.workload.prompts.mean
        prompts, conversations = largest_share(self.workload, self.choice.num_replicas)
        read = conversations if self.component.engine == "transformers" else prompts
        tokens = read * prompt + conversations * (work.turns - 1) * work.turn_tokens
        self.forward(
            tokens=tokens,
            pairs=read * self.shape.pairs_between(0, prompt),
            batches=self.batches(tokens),
            head_tokens=conversations,
            length=prompt,
        )
        for turn in range(work.turns):
            context = prompt + turn * (work.replies.mean + work.turn_tokens)
            for running, steps, length in self.segments(conversations):
                self.decode(running=running, steps=steps, context=context + length)
        return self.clock

    def segments(self, conversations: float) -> Iterator[tuple[float, float, float]]:
        """Yield conversations that run at a time, for how many tokens, at which mean length of their replies.

        An engine with fewer slots than conversations is full until the last ones have a slot; then they end one by
        one. A padded batch of transformers runs until its longest reply ends.
        """
        lengths = self.workload.replies
        slots = min(max(self.choice.max_num_seqs, 1), conversations)
        if self.component.engine == "transformers":
            longest = min(lengths.longest_of(slots) + 1.0, lengths.maximum)
            rounds = math.ceil(conversations / slots)
            yield float(slots), rounds * max(longest - 1.0, 0.0), longest / 2  # the prefill gives the first token
            return
        ends = [lengths.quantile((step + 1) / SEGMENTS) for step in range(SEGMENTS - 1)]
        ends.append(lengths.longest_of(conversations))
        parts, before = [], 0.0
        for step, end in enumerate(ends):
            if end > before:
                parts.append((1.0 - (step + 0.5) / SEGMENTS, end - before, (before + end) / 2))
                before = end
        if waiting := conversations - slots:
            mean = sum(share * steps for share, steps, _ in parts)
            yield float(slots), waiting * mean / slots, sum(share * steps * at for share, steps, at in parts) / mean
        for share, steps, at in parts:
            yield max(slots * share, 1.0), steps, at

    def decode(self, *, running: float, steps: float, context: float) -> None:
        """Add so many steps of one token for each running conversation."""
        component, shape, device, tp = self.component, self.shape, self.device, self.tp
        size, head = component.bytes_per_parameter, shape.hidden * shape.vocabulary
        read = (shape.weights_read(running) + head) * size / tp
        flops = 2.0 * running * (shape.active_parameters + head) / tp
        reads = "every token of a reply reads the weights and the KV cache"
        self.products(steps * flops, steps * read, running, reads)
        width = max(size, 2.0)
        cached = running * shape.cached_numbers(int(context)) * width / min(tp, max(shape.kv_heads, 1))
        read = running * shape.numbers_of_heads(context) * width if device.is_cpu else cached
        seconds = steps * read / (device.bandwidth.value * device.decoding.value)
        self.clock.add(BANDWIDTH, seconds, weakest((device.bandwidth.basis, device.decoding.basis)), reads)
        if tp > 1:
            self.all_reduces(steps * running, steps, min(size, 4.0))
        if component.engine == "transformers":
            self.decode_by_transformers(running=running, steps=steps, cached=cached)
        else:
            overhead = steps * (DECODE_OVERHEAD + running * SLOT_OVERHEAD)
            self.clock.add(LAUNCH, overhead, Basis.ASSUMPTION, "scheduling and sampling of an engine, per token")

    def decode_by_transformers(self, *, running: float, steps: float, cached: float) -> None:
        """Add what `generate` does besides: operations one by one, and a copy of the cache each time."""
        shape, device, clock = self.shape, self.device, self.clock
        operations = self.kernels * shape.num_layers + EAGER_KERNELS_PER_STEP
        basis = weakest((device.launch.basis, Basis.ASSUMPTION))
        name, seconds = STARTS if device.is_cpu else LAUNCH, steps * operations * device.launch.value
        clock.add(name, seconds, basis, f"{operations} operations for each token")
        bandwidth = device.elementwise
        moved = 2.0 * cached + running * shape.elementwise_numbers(1, eager=True) * self.component.bytes_per_parameter
        text = "copies of the cache, norms and activations"
        clock.add(BANDWIDTH, steps * moved / bandwidth.value, bandwidth.basis, text)
        if device.is_cpu:
            text = "a random number for each token of the vocabulary, 30 ns each"
            clock.add(SAMPLE, steps * running * shape.vocabulary * SAMPLING, Basis.ASSUMPTION, text)


# --- between phases --------------------------------------------------------------------------------------------------


def sync_times(policy: Component, choice: Choice, site: Site, *, together: bool, crosses: bool) -> PhaseClock:
    """Return the seconds in which new weights of the policy reach generation.

    On the same GPUs every rank gathers the whole weights; on others one GPU sends them, over the network too if they
    are in different nodes.
    """
    clock = PhaseClock()
    size = policy.shape.parameters * policy.bytes_per_parameter
    ranks = choice.fsdp_size * choice.tensor_parallel_size
    if together:
        bandwidth = site.device.bandwidth if ranks == 1 else site.collective(ranks)
        text = "weights gathered for the policy"
    else:
        links = (site.device.link, site.network) if crosses else (site.device.link,)
        bandwidth = min(links, key=lambda link: link.value)
        text = "weights broadcast to generation"
    clock.add(NETWORK, size / bandwidth.value, weakest((bandwidth.basis, Basis.ASSUMPTION)), text)
    return clock


def wake_times(component: Component, size: float, device: Device) -> PhaseClock:
    """Return the seconds in which the weights and state of a component, so many bytes on each GPU, come and go.

    A model that is not trained has a copy on the host: it only comes. Generation gets its weights from the policy.
    """
    ways = 2.0 if component.role.trains else 0.0 if component.role is Role.GENERATION else 1.0
    link = device.host_link
    clock = PhaseClock()
    clock.add(HOST, ways * size / link.value, link.basis, "weights and state from and to the host's memory")
    clock.add(HOST, WAKE_OVERHEAD, Basis.ASSUMPTION, "memory is mapped again, and caches are empty")
    return clock
