"""Bytes that a component takes of one GPU (or of a CPU's process): what stays, and what comes at each instant."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from gym_rm.planning import activations, heap
from gym_rm.planning.hardware.devices import MIB, Device
from gym_rm.planning.model.loading import ModelShape
from gym_rm.planning.plan import Instant, MemoryItem, Phase, Role
from gym_rm.planning.quantities import Basis
from gym_rm.planning.request import BYTES, Choice, Component, Workload

PAGE_TOKENS = 16  # of vLLM's KV cache
STAYS = ("weights", "adapters", "optimizer", "libraries", "files")  # while other components work
STATES = {"adamw": 8.0, "adamw_8bit": 2.0, "sgd": 0.0}  # bytes for a parameter with float32 states
NCCL = ((1, 0.0), (2, 342.0), (4, 392.0), (10**9, 392.0))  # MiB; AIConfigurator 0.12, nccl_mem
# AIConfigurator 0.12, _get_memory_usage: bytes of activations / (2 * tokens * heads * head_dim), by GPUs
VLLM_ACTIVATIONS = {"llama": (11.0, 6.5, 5.0, 5.0), "dense": (10.0, 6.0, 5.0, 5.0), "moe": (22.0, 13.0, 10.0, 10.0)}
LOGITS_NO_GRAD, LOGITS_KEPT, LOGITS_BACKWARD = 3.1, 1.05, 3.0  # copies; torch.profiler over Policy.log_probs
SAMPLING = 6.3  # copies of the last logits; torch.profiler over transformers' generate
BRANCH_PLACES = 48  # places in pages that a branch of a tree leaves empty or copies, 1.5 pages
CUDA_FRAGMENTATION = 0.05  # share of the tensors; nobody has published one


@dataclass(frozen=True, slots=True)
class ComponentMemory:
    """Memory of one component on each of its GPUs.

    Attributes:
        resident: while it is awake and others work: weights, and what training keeps between steps.
        working: persistent memory while it works itself, in place of `resident`; the KV cache is here. Gradients come
            and go: they are in the instants.
        phases: instants of each phase in which it works.
    """

    resident: tuple[MemoryItem, ...]
    working: tuple[MemoryItem, ...]
    phases: tuple[tuple[Phase, tuple[Instant, ...]], ...]

    @property
    def peak(self) -> float:
        """Most bytes at any instant, if nothing else is on the GPU."""
        instants = [instant.bytes for _, found in self.phases for instant in found]
        return sum(item.bytes for item in self.working) + max(instants, default=0.0)


def component_memory(component: Component, choice: Choice, workload: Workload, device: Device) -> ComponentMemory:
    """Return what a component takes of each GPU. `device.reserved` is not in it, because components share it."""
    view = _View(component, choice, workload, device.is_cpu)
    if component.role is Role.GENERATION:
        return view.generation()
    if component.role.trains:
        return view.training()
    return view.inference()


@functools.lru_cache(maxsize=4096)
def _weights(shape: ModelShape, tp: int) -> float:
    """Return the parameters on one GPU of a tensor-parallel group: norms and a reward model's head are on all."""
    if tp == 1:
        return float(shape.parameters)
    layers = sum((layer.norms + (layer.attention + layer.mlp) / tp) * n for layer, n in shape.layers)
    head = shape.head / tp if shape.is_language_model else shape.head
    other = shape.parameters - shape.computed_parameters  # counted in the weights, and in no part
    return layers + shape.embedding / tp + head + shape.other + max(other, 0)


@functools.lru_cache(maxsize=4096)
def _largest_layer(shape: ModelShape, tp: int) -> float:
    return max(layer.norms + (layer.attention + layer.mlp) / tp for layer, _ in shape.layers)


@functools.lru_cache(maxsize=4096)
def _columns(shape: ModelShape) -> float:
    return max(layer.intermediate for layer, _ in shape.layers) / 2


@functools.lru_cache(maxsize=4096)
def _outside_layers(shape: ModelShape, tp: int) -> float:
    return (shape.embedding + shape.head) / tp + shape.other


@functools.lru_cache(maxsize=4096)
def _experts(shape: ModelShape) -> float:
    return float(sum(layer.mlp * n for layer, n in shape.layers if layer.experts))


@functools.lru_cache(maxsize=4096)
def _widths(shape: ModelShape) -> tuple[int, int]:
    """Return the widths of queries and of keys in the widest layer, over all heads."""
    layer = max((layer for layer, _ in shape.layers), key=lambda layer: layer.heads * layer.head_dim)
    return layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim


class _View:
    """One component on one kind of device.

    Attributes:
        size: bytes of a number of its forward.
        split: share of heads, columns and vocabulary on one GPU.
        cpu: whether the device is a CPU, whose attention keeps masks, and whose allocator is that of the C library.
    """

    def __init__(self, component: Component, choice: Choice, workload: Workload, cpu: bool) -> None:
        self.component, self.choice, self.workload, self.cpu = component, choice, workload, cpu
        self.shape = component.shape
        self.size = max(component.bytes_per_parameter, 2.0)
        self.tp, self.fsdp = choice.tensor_parallel_size, choice.fsdp_size
        self.split = 1.0 / self.tp
        self.length = float(max(workload.longest, 1))

    def item(self, name: str, size: float, source: str, basis: Basis = Basis.FORMULA) -> MemoryItem:
        return MemoryItem(name, self.component.name, size, basis, source)

    # --- parts that stay ----------------------------------------------------------------------------------------

    def weights(self) -> MemoryItem:
        size = _weights(self.shape, self.tp) * self.component.bytes_per_parameter / self.fsdp
        return self.item("weights", size, f"parameters x {self.component.bytes_per_parameter:g} bytes / GPUs")

    def shared(self, work: str) -> list[MemoryItem]:
        """Return what comes with the work: code on a CPU, buffers of NCCL and gathered layers on several GPUs."""
        items = []
        if self.cpu:
            source = f"code and kernels that torch and transformers load for {work}; measured"
            items.append(self.item("libraries", heap.LIBRARIES[work], source, Basis.MEASURED))
            if (experts := _experts(self.shape)) and work != "generation":
                size = 1.05 * experts * BYTES.get(self.shape.stored or "", self.component.bytes_per_parameter)
                items.append(self.item("files", size, "experts, whose files stay mapped when they are stacked"))
        elif (group := max(self.tp, self.fsdp)) > 1:
            buffers = next(size for most, size in NCCL if group <= most) * MIB
            items.append(self.item("communication", buffers, "AIConfigurator 0.12, nccl_mem", Basis.TABLE))
        if self.fsdp > 1:
            gathered = (2 * _largest_layer(self.shape, self.tp) + _outside_layers(self.shape, self.tp)) * self.size
            text = "FSDP2: the layer that runs and the next; embedding and head, which stay gathered"
            items.append(self.item("gathered layers", gathered, text))
        return items

    # --- scoring and log-probabilities --------------------------------------------------------------------------

    def inference(self) -> ComponentMemory:
        weights = self.weights()
        low = self.cpu and self.size < 4
        scores = self.component.role is Role.REWARD_MODEL
        working = (weights, *self.shared("low precision" if low else "scoring" if scores else "generation"))
        name = "forward" if self.component.role is Role.REWARD_MODEL else "no-grad log-probabilities"
        instants = [self.no_grad(name)]
        if self.cpu and self.component.role is Role.REWARD_MODEL:
            instants.append(self.load())
        resident = [item for item in working if item.name in STAYS]
        if self.cpu and scores:
            left = heap.beside_scoring(weights.bytes)
            resident.append(self.item("fragmentation", left, "heap of glibc after the load; measured", Basis.MEASURED))
        return ComponentMemory(tuple(resident), working, ((Phase.SCORE, tuple(instants)),))

    def batch_tokens(self, *, tree: bool) -> float:
        """Return the tokens of the largest batch: the budget, or all tokens if they are fewer."""
        work = self.workload
        every = work.unique_tokens if tree else work.conversations * self.length
        return max(min(float(self.choice.max_num_batched_tokens), every), min(self.length, every))

    def no_grad(self, name: str) -> Instant:
        shape, role = self.shape, self.component.role
        tree = not shape.bidirectional and role is Role.REWARD_MODEL
        tokens = self.batch_tokens(tree=tree)
        if tree:
            layer = activations.tree_forward(shape, self.size, self.split, self.cpu)
            branches = min(self.workload.conversations, 1 + tokens / max(self.workload.growth, 1.0))
            places = tokens + BRANCH_PLACES * branches if self.cpu else 2 * tokens
            largest = layer.of(tokens, places)
            source = "fused forward and attention of gym_rm over a token tree, tensor by tensor"
        else:
            largest = activations.forward(shape, self.size, self.split, self.cpu).of(tokens, self.length)
            source = "forward of transformers over padded rows, tensor by tensor"
        items = [self.item("activations", largest, source)]
        if shape.is_language_model:
            items.append(self.logits(LOGITS_NO_GRAD, tokens, "logits, their scaled copy, and the log-sum-exp"))
        return self.with_fragmentation(name, items)

    def load(self) -> Instant:
        """Return the load of a scorer on a CPU: weights in their files, and the products that it tries."""
        items = []
        if files := self.converted():
            rest = max(0.0, files - heap.LIBRARIES["low precision"] + heap.CONVERTED_LOAD)
            text = f"weights in {self.shape.stored}, mapped while they are converted, before most libraries are loaded"
            return Instant("load", (self.item("files", rest, text),))
        tried = activations.largest_products(self.shape)
        items.append(self.item("activations", tried, "products that the load tries for batch invariance"))
        return self.with_fragmentation("load", items)

    def converted(self) -> float:
        """Return the bytes of weights in another dtype that are converted at load."""
        stored = self.shape.stored or self.component.dtype
        return self.shape.parameters * BYTES[stored] if stored in BYTES and stored != self.component.dtype else 0.0

    def logits(self, copies: float, tokens: float, source: str) -> MemoryItem:
        """Return logits of the tokens of the replies."""
        work = self.workload
        share = min(1.0, work.turns * work.replies.maximum / self.length)
        rows = tokens * share + tokens / self.length
        capped = 1.0 if self.shape.model_type in activations.SOFT_CAPPED and copies != LOGITS_NO_GRAD else 0.0
        wide = max(self.size, 4.0)
        return self.item("logits", rows * self.shape.vocabulary * self.split * wide * (copies + capped), source)

    def with_fragmentation(self, name: str, items: Sequence[MemoryItem]) -> Instant:
        """Return an instant of a forward without gradients, with what the allocator has beside its tensors."""
        tensors = sum(item.bytes for item in items)
        if self.cpu:
            weights, low = self.shape.parameters * self.component.bytes_per_parameter, self.size < 4
            if name == "load":
                size = heap.after_load(weights, low=low)
            else:
                hidden, widest = self.blocks()
                encoder = self.shape.bidirectional
                size = heap.in_forward(weights, tensors, low=low, encoder=encoder, widest=widest, hidden=hidden)
            source = "heap of glibc: freed blocks below 32 MiB stay in the process; measured"
            return Instant(name, (*items, self.item("fragmentation", size, source, Basis.MEASURED)))
        source = "share of the tensors that the caching allocator cannot use"
        return Instant(
            name, (*items, self.item("fragmentation", CUDA_FRAGMENTATION * tensors, source, Basis.ASSUMPTION))
        )

    def blocks(self) -> tuple[float, float]:
        """Return the bytes of the hidden states of a batch, and of the largest tensor in an MLP."""
        size = self.choice.max_num_batched_tokens * self.size
        return size * self.shape.hidden, size * _columns(self.shape)

    # --- training -----------------------------------------------------------------------------------------------

    def trained(self) -> float:
        """Return the parameters on one GPU that have gradients."""
        if self.component.lora_rank:
            found = self.shape.lora_parameters(self.component.lora_rank) + self.shape.head * (
                not self.shape.is_language_model
            )
            return found / self.tp / self.fsdp
        return _weights(self.shape, self.tp) / self.fsdp

    def training(self) -> ComponentMemory:
        component, trained = self.component, self.trained()
        master = component.master_weights and component.dtype != "float32"
        wide = master or component.dtype == "float32"
        states = STATES[component.optimizer] * (1.0 if wide or component.optimizer != "adamw" else 0.5)
        resident = [self.weights()]
        if component.lora_rank:
            adapters = trained * (4.0 if wide else component.bytes_per_parameter)
            resident.append(self.item("adapters", adapters, f"LoRA of rank {component.lora_rank}"))
        size = trained * (states + 4.0 * (master and not component.lora_rank))
        source = f"{component.optimizer}: {states:g} bytes for a parameter" + (", float32 copy: 4" if master else "")
        resident.append(self.item("optimizer", size, source))
        gradients = self.item("gradients", trained * (4.0 if wide else self.size), "one for each trained parameter")
        working = (*resident, *self.shared("training"))
        phases: list[tuple[Phase, tuple[Instant, ...]]] = []
        if component.role is not Role.REWARD_TRAINING:
            phases.append((Phase.SCORE, (self.no_grad("no-grad log-probabilities"),)))
        phases.append((Phase.UPDATE, self.update(gradients)))
        stays = tuple(item for item in working if item.name in STAYS)
        return ComponentMemory(stays, working, tuple(phases))

    def update(self, gradients: MemoryItem) -> tuple[Instant, ...]:
        """Return the instants of an update: the end of the forward, both ends of the backward, the optimizer step."""
        shape, component = self.shape, self.component
        tokens = float(self.choice.max_num_batched_tokens)
        mode = "lora" if component.lora_rank else "eval" if component.role is Role.POLICY else "train"
        found = activations.kept(shape, self.size, self.split, self.cpu, mode)
        layer = found.layer.of(tokens, self.length)
        if self.choice.gradient_checkpointing:
            kept, text = found.inputs.of(tokens, self.length), "hidden states between layers"
            inside = layer
        else:
            kept, text = found.layers.of(tokens, self.length), "saved for the backward by every layer"
            inside = 0.0
        kept += found.outside.of(tokens, self.length)
        steps = inside + found.backward.of(tokens, self.length)
        saved = self.item("activations", kept, text)
        first = [self.item("activations", steps, "gradients inside a layer" + (", computed again" if inside else ""))]
        logits = (0.0, 0.0)
        if shape.is_language_model:
            forward = self.logits(LOGITS_NO_GRAD, tokens, "logits, their scaled copy, and the log-sum-exp")
            backward = self.logits(
                LOGITS_KEPT + LOGITS_BACKWARD, tokens, "scaled logits that are kept, and their gradients"
            )
            logits = (forward.bytes, backward.bytes)
        unsharded = 0.0
        if self.fsdp > 1:
            unsharded = max(_largest_layer(shape, self.tp), _outside_layers(shape, self.tp)) * self.size
        temporary = self.item("optimizer", self.optimizer_step(), "temporary tensors of the step")
        forward_end = [saved]
        backward_start = [saved, *first]
        if logits[1]:
            forward_end.append(forward)
            backward_start.append(backward)
        backward_end = [gradients, *first]
        if unsharded:
            backward_end.append(
                self.item("gradients", unsharded, "FSDP2: gradients of a layer before they are divided")
            )
        step = [gradients, temporary]
        if self.accumulates or self.cpu:
            forward_end.append(gradients)
            backward_start.append(gradients)
        names = ("forward", "backward", "backward, first layer", "optimizer step")
        instants = []
        peak = (kept + steps) * heap.in_heap(*self.blocks())
        for name, items in zip(names, (forward_end, backward_start, backward_end, step), strict=True):
            instants.append(self.with_holes(name, items, peak, inside))
        return tuple(instants)

    @property
    def accumulates(self) -> bool:
        """Whether an update has several forwards and backwards, so that gradients lie beside activations."""
        work, ranks = self.workload, self.fsdp * self.choice.num_replicas
        padded = work.conversations * self.length / max(work.updates_per_step, 1) / ranks
        return padded > self.choice.max_num_batched_tokens

    def optimizer_step(self) -> float:
        """Return the bytes of temporary tensors: of the largest parameter on a CPU, of all parameters on a GPU."""
        if self.cpu:
            if self.component.lora_rank:
                return 8.0 * self.component.lora_rank * self.shape.hidden
            tied = self.shape.is_language_model and not self.shape.head  # the sum of two gradients
            embedding = 8.0 * self.shape.vocabulary * self.shape.hidden
            return 8.0 * activations.largest_parameter(self.shape) + embedding * tied
        return 4.0 * self.trained()

    def with_holes(self, name: str, items: Sequence[MemoryItem], peak: float, inside: float) -> Instant:
        """Return an instant of training, with what the allocator has beside its tensors.

        `peak` are the bytes of the largest activations in the heap, `inside` of those that are computed again.
        """
        if not self.cpu:
            size = CUDA_FRAGMENTATION * sum(item.bytes for item in items)
            source = "share of the tensors that the caching allocator cannot use"
            return Instant(name, (*items, self.item("fragmentation", size, source, Basis.ASSUMPTION)))
        size = heap.in_training(
            peak,
            sum(item.bytes for item in items if item.name == "activations"),
            4.0 * self.trained(),
            sum(item.bytes for item in items if item.name == "logits"),
            recomputed=inside > 0,
            frozen=self.component.lora_rank > 0,
            policy=self.component.role is Role.POLICY,
            encoder=self.shape.bidirectional,
        )
        source = "heap of glibc: holes of freed blocks below 32 MiB stay in the process; measured"
        return Instant(name, (*items, self.item("fragmentation", size, source, Basis.MEASURED)))

    # --- generation ---------------------------------------------------------------------------------------------

    def generation(self) -> ComponentMemory:
        work = self.workload
        seqs = min(self.choice.max_num_seqs or work.conversations, work.conversations)
        whole = self.component.engine == "transformers"
        length = self.length if whole else work.prompts.mean + work.growth
        length = -(-length // PAGE_TOKENS) * PAGE_TOKENS if not whole else length
        heads = min(self.tp, max(self.shape.kv_heads, 1))
        cached = self.shape.cached_numbers(int(length)) * self.size * seqs / heads
        text = (
            "keys and values of every conversation at its longest" if whole else "pages of conversations of mean length"
        )
        cache = self.item("kv_cache", cached, text)
        if whole:
            stays = tuple(self.shared("generation"))
            return ComponentMemory(stays, (cache, *stays), ((Phase.GENERATE, self.decode(seqs)),))
        weights = self.weights()
        tokens, place = self.choice.max_num_batched_tokens, min(self.tp, 8).bit_length() - 1
        kind = "moe" if _experts(self.shape) else "llama" if self.shape.model_type == "llama" else "dense"
        queries, _ = _widths(self.shape)
        size = max(70.0 * MIB, 2.0 * tokens * queries * VLLM_ACTIVATIONS[kind][place])
        step = self.item("activations", size, "AIConfigurator 0.12, _get_memory_usage of vLLM", Basis.TABLE)
        instants = (Instant("prefill", (step,)), Instant("decode", (step,)))
        stays = (weights, cache, *self.shared("generation"))  # an engine that is awake keeps its cache
        return ComponentMemory(stays, stays, ((Phase.GENERATE, instants),))

    def decode(self, seqs: int) -> tuple[Instant, ...]:
        """Return the instants of transformers' `generate`, on the policy's weights."""
        shape = self.shape
        queries, keys = _widths(shape)
        prompt = float(self.workload.prompts.maximum)
        forward = activations.forward(shape, self.size, self.split, self.cpu).of(seqs * prompt, prompt)
        repeated = 2 * seqs * self.length * (queries + keys) * self.split * self.size
        sampled = SAMPLING * seqs * shape.vocabulary * 4.0
        logits = self.item("logits", sampled, "logits of the last tokens, and what sampling makes of them")
        again = self.item("activations", repeated, "a layer's keys and values, joined, and repeated for every head")
        prefill = self.item("activations", forward, "forward of transformers over the prompts")
        return (
            self.with_fragmentation("prefill", (prefill, logits)),
            self.with_fragmentation("decode", (again, logits)),
        )
