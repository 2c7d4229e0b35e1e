"""Bytes that a component takes of one GPU (or of a CPU's process): what stays, and what comes at each instant."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from gym_rm.planning import activations
from gym_rm.planning.hardware.devices import MIB, Device
from gym_rm.planning.model.shape import ModelShape
from gym_rm.planning.plan import Instant, MemoryItem, Phase, Role
from gym_rm.planning.plan_request import Choice, Component, StepWorkload
from gym_rm.planning.quantities import Basis

KV_PAGE = 16  # tokens, of vLLM
STAYS = ("weights", "packed weights", "adapters", "optimizer", "libraries", "files")  # while other components work
STATES = {"adamw": 8.0, "adamw_8bit": 2.0, "sgd": 0.0}  # bytes for a parameter with float32 states
NCCL = 392 * MIB  # AIConfigurator 0.12, nccl_mem over 4 GPUs or more
# AIConfigurator 0.12, _get_memory_usage: bytes of activations / (2 * tokens * heads * head_dim), over 1, 2, 4, 8 GPUs
VLLM_ACTIVATIONS, VLLM_EXPERTS = (11.0, 6.5, 5.0, 5.0), (22.0, 13.0, 10.0, 10.0)
LOGITS_NO_GRAD, LOGITS_KEPT, LOGITS_BACKWARD = 3.1, 1.05, 3.0  # copies; torch.profiler over Policy.log_probs
PACKED_AT_MOST = 2.0**32  # bytes of a model's weights; of gym_rm.engine.backbones.packed_weights
SAMPLING = 6.3  # copies of the last logits; torch.profiler over transformers' generate
BRANCH_PLACES = 48  # places in pages that a branch of a tree leaves empty or copies, 1.5 pages
CUDA_FRAGMENTATION = 0.05  # share of the tensors; nobody has published one
# The margin of a CPU's process. glibc keeps freed blocks below 32 MiB in its heap, where blocks of other sizes often do
# not fit: activations count in every instant, and again by these factors (highest of `benchmarks/planner_memory.py`).
CPU_LIBRARIES = 160 * MIB  # code and kernels that the work loads, and what stays of the load
CPU_HEAP, CPU_HEAP_16_BITS, CPU_HEAP_RECOMPUTED = 1.0, 2.2, 4.5
CPU_HEAP_OTHERS = 0.3  # of gradients and logits


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
        """Peak in bytes, if nothing else is on the GPU."""
        largest = max(instant.bytes for _, instants in self.phases for instant in instants)
        return sum(item.bytes for item in self.working) + largest


def component_memory(component: Component, choice: Choice, workload: StepWorkload, device: Device) -> ComponentMemory:
    """Return what a component takes of each GPU. `device.reserved` is not in it, because components share it."""
    estimate = _Estimate(component, choice, workload, device.is_cpu)
    if component.role is Role.GENERATION:
        return estimate.generation() if component.engine == "vllm" else estimate.generation_by_transformers()
    return estimate.training() if component.role.trains else estimate.inference()


def rows_of_update(choice: Choice, workload: StepWorkload) -> int:
    """Return the conversations that the rank with the most trains on in one update."""
    return math.ceil(workload.conversations / workload.updates_per_step / (choice.fsdp_size * choice.num_replicas))


@functools.lru_cache(maxsize=4096)
def _parameters(shape: ModelShape, tp: int) -> float:
    """Return the parameters on one GPU of a tensor-parallel group: norms and a reward model's head are on all."""
    layers = sum((layer.norms + (layer.attention + layer.mlp) / tp) * n for layer, n in shape.layers)
    return layers + shape.embedding / tp + shape.head / (tp if shape.is_language_model else 1) + shape.other


@functools.lru_cache(maxsize=4096)
def _sharded_parts(shape: ModelShape, tp: int) -> tuple[float, float]:
    """Return the parameters of the largest layer, and of embedding and head, on one GPU of a tensor-parallel group."""
    layer = max(layer.norms + (layer.attention + layer.mlp) / tp for layer, _ in shape.layers)
    return layer, (shape.embedding + shape.head) / tp + shape.other


def _widths(shape: ModelShape) -> tuple[int, int]:
    """Return the widths of queries and of keys in the widest layer, over all heads."""
    return max((layer.heads * layer.head_dim, layer.kv_heads * layer.head_dim) for layer, _ in shape.layers)


class _Estimate:
    """Items of one component on one kind of device.

    Attributes:
        size: bytes of a number of its forward.
        split: share of heads, columns and vocabulary on one GPU.
        cpu: whether the device is a CPU, whose attention keeps masks, and whose allocator is that of the C library.
    """

    def __init__(self, component: Component, choice: Choice, workload: StepWorkload, cpu: bool) -> None:
        self.component, self.choice, self.workload, self.cpu = component, choice, workload, cpu
        self.shape = component.shape
        self.size = max(component.bytes_per_parameter, 2.0)
        self.tp, self.fsdp = choice.tensor_parallel_size, choice.fsdp_size
        self.split = 1.0 / self.tp
        self.experts = max(layer.experts for layer, _ in self.shape.layers)
        self.length = float(max(workload.longest, 1))

    def item(self, name: str, size: float, source: str, basis: Basis = Basis.FORMULA) -> MemoryItem:
        return MemoryItem(name, self.component.name, size, basis, source)

    def instant(self, name: str, *items: MemoryItem, most: float = 0.0) -> Instant:
        """Return an instant with its fragmentation; `most` are the largest activations of all instants."""
        by_name = {name: sum(item.bytes for item in items if item.name == name) for name in {i.name for i in items}}
        if not self.cpu:
            source = "share of the tensors that the caching allocator cannot use"
            size, basis = CUDA_FRAGMENTATION * sum(by_name.values()), Basis.ASSUMPTION
        else:
            source = "margin for the heap of the C library, which keeps freed blocks below 32 MiB"
            there, basis = by_name.get("activations", 0.0), Basis.MEASURED
            most = max(most, there)
            factor = CPU_HEAP_RECOMPUTED if self.choice.gradient_checkpointing else CPU_HEAP
            factor = max(factor, CPU_HEAP_16_BITS) if self.size < 4 else factor
            size = most - there + factor * most + 0.02 * self.weights().bytes
            size += CPU_HEAP_OTHERS * (by_name.get("gradients", 0.0) + by_name.get("logits", 0.0))
        return Instant(name, (*items, self.item("fragmentation", size, source, basis)))

    # --- parts that stay ----------------------------------------------------------------------------------------

    def weights(self) -> MemoryItem:
        each = self.component.bytes_per_parameter
        size = _parameters(self.shape, self.tp) * each / self.fsdp - self.spared()
        return self.item("weights", size, f"parameters x {each:g} bytes / parts, and of quantized matrices 1 byte")

    def spared(self) -> float:
        """Return the bytes that quantized matrices are smaller; experts are not quantized."""
        if self.component.quantization is None:
            return 0.0
        matrices = sum((layer.attention + (0 if layer.experts else layer.mlp)) * n for layer, n in self.shape.layers)
        return matrices * (self.component.bytes_per_parameter - 1.0) / self.tp

    def mapped_files(self) -> list[MemoryItem]:
        """Return files of weights on a CPU that stay mapped, because the weights are copies: converted, or stacked."""
        if not self.cpu or (self.size >= 4 and not self.experts and self.component.quantization is None):
            return []
        size = max(self.size, 4.0 if not self.experts else self.size) / self.component.bytes_per_parameter
        whole = self.weights().bytes + self.spared()
        return [self.item("files", size * whole, "files of weights that were converted or stacked")]

    def packed_weights(self) -> list[MemoryItem]:
        """Return copies of the matrices in the format of oneDNN, with which products in float32 run on a CPU."""
        matrices = sum((layer.attention + (0 if layer.experts else layer.mlp)) * n for layer, n in self.shape.layers)
        if not self.cpu or self.size < 4 or self.component.quantization or self.weights().bytes > PACKED_AT_MOST:
            return []
        return [self.item("packed weights", 4.0 * matrices / self.tp, "matrices x 4 bytes")]

    def shared(self) -> list[MemoryItem]:
        """Return what comes with the work: code on a CPU, buffers of NCCL and gathered layers on several GPUs."""
        items = []
        if self.cpu:
            source = "code and kernels that torch and transformers load; highest of the measured"
            items.append(self.item("libraries", CPU_LIBRARIES, source, Basis.MEASURED))
        elif max(self.tp, self.fsdp) > 1:
            items.append(self.item("communication", NCCL, "AIConfigurator 0.12, nccl_mem", Basis.TABLE))
        if self.fsdp > 1:
            layer, outside = _sharded_parts(self.shape, self.tp)
            text = "FSDP2: the layer that runs and the next; embedding and head, which stay gathered"
            items.append(self.item("gathered layers", (2 * layer + outside) * self.size, text))
        return items

    # --- scoring and log-probabilities --------------------------------------------------------------------------

    def inference(self) -> ComponentMemory:
        packed = self.packed_weights() if self.component.role is Role.REWARD_MODEL else []
        working = (self.weights(), *packed, *self.mapped_files(), *self.shared())
        instants = [self.no_grad()]
        if self.component.quantization is not None:
            text = "weights as they are read, before they are quantized"
            instants.append(self.instant("load", self.item("weights", self.spared(), text)))
        if self.cpu and self.component.role is Role.REWARD_MODEL:
            tested = activations.tested_products(self.shape)
            items = self.item("activations", tested, "products that the load tries for batch invariance")
            instants.append(self.instant("load", items))
        resident = tuple(item for item in working if item.name in STAYS)
        return ComponentMemory(resident, working, ((Phase.SCORE, tuple(instants)),))

    def no_grad(self) -> Instant:
        """Return a forward without gradients, over the largest batch: the budget, or all tokens if they are fewer."""
        shape, work, scores = self.shape, self.workload, self.component.role is Role.REWARD_MODEL
        step = work.unique_tokens if scores else work.conversations * self.length
        tokens = max(min(float(self.choice.max_num_batched_tokens), step), min(self.length, step))
        if scores:
            branches = min(work.conversations, 1 + tokens / max(work.growth, 1.0))
            places = tokens + BRANCH_PLACES * branches if self.cpu else 2 * tokens
            size = activations.tree_forward(shape, self.size, self.split, tokens=tokens, places=places, pages=self.cpu)
            source = "layers and attention of gym_rm over a token tree, tensor by tensor"
        else:
            size = activations.forward(shape, self.size, self.split, self.cpu).of(tokens, self.length)
            source = "forward of transformers over padded rows, tensor by tensor"
        items = [self.item("activations", size, source)]
        if shape.is_language_model:
            items.append(self.logits(LOGITS_NO_GRAD, tokens, "logits, their scaled copy, and the log-sum-exp"))
        return self.instant("forward" if scores else "no-grad log-probabilities", *items)

    def logits(self, copies: float, tokens: float, source: str) -> MemoryItem:
        """Return logits of the tokens of the replies, in a batch of the shortest prompts and the longest replies."""
        work = self.workload
        replies = work.turns * (work.replies.maximum + 1.0)  # the token before a reply has logits too
        others = work.prompts.values[0] + (work.turns - 1) * work.turn_tokens - work.turns
        rows = tokens * replies / (replies + max(others, 0.0))
        copies += 1.0 if self.shape.model_type in activations.SOFT_CAPPED and copies != LOGITS_NO_GRAD else 0.0
        return self.item("logits", rows * self.shape.vocabulary * self.split * max(self.size, 4.0) * copies, source)

    # --- training -----------------------------------------------------------------------------------------------

    @property
    def wide(self) -> bool:
        """Whether gradients and the optimizer's states are in float32."""
        return self.component.master_weights or self.component.dtype == "float32"

    def trained(self) -> float:
        """Return the parameters on one GPU that have gradients."""
        if lora := self.component.lora:
            head = 0 if self.shape.is_language_model else self.shape.head
            return (self.shape.lora_parameters(lora.rank) + head) / self.tp / self.fsdp
        return _parameters(self.shape, self.tp) / self.fsdp

    def training(self) -> ComponentMemory:
        component, trained = self.component, self.trained()
        resident = [self.weights()]
        if component.lora:
            size = trained * (4.0 if self.wide else component.bytes_per_parameter)
            resident.append(self.item("adapters", size, f"LoRA of rank {component.lora.rank}"))
        states = STATES[component.optimizer] * (1.0 if self.wide or component.optimizer != "adamw" else 0.5)
        copy = 4.0 if component.master_weights and component.dtype != "float32" and not component.lora else 0.0
        source = f"{component.optimizer}: {states:g} bytes for a parameter" + (", float32 copy: 4" if copy else "")
        resident.append(self.item("optimizer", trained * (states + copy), source))
        working = (*resident, *self.mapped_files(), *self.shared())
        phases: list[tuple[Phase, tuple[Instant, ...]]] = [(Phase.UPDATE, self.update())]
        if component.role is not Role.REWARD_TRAINING:
            phases.insert(0, (Phase.SCORE, (self.no_grad(),)))
        stays = tuple(item for item in working if item.name in STAYS)
        return ComponentMemory(stays, working, tuple(phases))

    def update(self) -> tuple[Instant, ...]:
        """Return the instants of an update: the end of the forward, both ends of the backward, the optimizer step."""
        shape, component = self.shape, self.component
        rows = rows_of_update(self.choice, self.workload)
        of_update = rows * self.length
        if component.shared_prompts:
            of_update -= (rows - math.ceil(rows / self.workload.group_size)) * self.workload.prompts.maximum
        tokens = min(float(self.choice.max_num_batched_tokens), of_update)
        layers = activations.kept(shape, self.size, self.split, self.cpu, component.lora is not None)
        steps, text = layers.backward.of(tokens, self.length), "gradients inside a layer"
        if self.choice.gradient_checkpointing:
            kept, source = layers.inputs, "hidden states between layers"
            steps, text = steps + layers.layer.of(tokens, self.length), f"{text}, computed again"
        else:
            kept, source = layers.layers, "saved for the backward by every layer"
        saved_bytes = kept.of(tokens, self.length) + layers.outside.of(tokens, self.length)
        saved, inside = self.item("activations", saved_bytes, source), self.item("activations", steps, text)
        forward, backward, last = [saved], [saved, inside], [inside]
        if shape.is_language_model:
            text = "logits, their scaled copy, and the log-sum-exp"
            forward.append(self.logits(LOGITS_NO_GRAD, tokens, text))
            text = "scaled logits that are kept, and their gradients"
            backward.append(self.logits(LOGITS_KEPT + LOGITS_BACKWARD, tokens, text))
        size = self.trained() * (4.0 if self.wide else self.size)
        gradients = self.item("gradients", size, "one for each trained parameter")
        if self.cpu or of_update > self.choice.max_num_batched_tokens:  # of the batches before
            forward.append(gradients)
            backward.append(gradients)
        if self.fsdp > 1:
            largest = max(_sharded_parts(shape, self.tp)) * self.size
            last.append(self.item("gradients", largest, "FSDP2: gradients of a layer before they are sharded"))
        temporary = self.item("optimizer", self.optimizer_step(), "temporary tensors of the step")
        most = saved.bytes + inside.bytes
        return (
            self.instant("forward", *forward, most=most),
            self.instant("backward", *backward, most=most),
            self.instant("backward, first layer", gradients, *last, most=most),
            self.instant("optimizer step", gradients, temporary, most=most),
        )

    def optimizer_step(self) -> float:
        """Return the bytes of temporary tensors: two copies of the parameter that is updated, the largest in turn.

        A fused kernel has none; without it, libraries go from one sharded parameter to the next.
        """
        if lora := self.component.lora:
            return 8.0 * lora.rank * self.shape.hidden / self.tp / self.fsdp
        tied = self.cpu and self.shape.is_language_model and not self.shape.head  # the sum of two gradients
        table = tied * float(self.shape.vocabulary * self.shape.hidden)
        return 8.0 * (activations.largest_parameter(self.shape) + table) / self.tp / self.fsdp

    # --- generation ---------------------------------------------------------------------------------------------

    def cache(self, length: float, seqs: int, source: str) -> MemoryItem:
        """Return the KV cache of so many conversations of a length."""
        divided = min(self.tp, max(self.shape.kv_heads, 1))
        cached = self.shape.cached_numbers(int(length)) * self.size * seqs / divided
        return self.item("kv_cache", cached, source)

    @property
    def num_seqs(self) -> int:
        return min(self.choice.max_num_seqs or self.workload.conversations, self.workload.conversations)

    def generation(self) -> ComponentMemory:
        """Return the memory of an engine like vLLM; one that is awake keeps its cache."""
        mean = self.workload.prompts.mean + self.workload.growth
        caches = (
            self.cache(-(-mean // KV_PAGE) * KV_PAGE, self.num_seqs, "pages of conversations of mean length"),
            self.cache(-(-self.length // KV_PAGE) * KV_PAGE, 1, "pages of one conversation of the largest length"),
        )
        cache = max(caches, key=lambda item: item.bytes)
        table = VLLM_EXPERTS if self.shape.layers[0][0].experts else VLLM_ACTIVATIONS
        factor = table[min(self.tp, 8).bit_length() - 1]
        size = max(70.0 * MIB, 2.0 * self.choice.max_num_batched_tokens * _widths(self.shape)[0] * factor)
        step = self.item("activations", size, "AIConfigurator 0.12, _get_memory_usage of vLLM", Basis.TABLE)
        stays = (self.weights(), cache, *self.shared())
        return ComponentMemory(stays, stays, ((Phase.GENERATE, (Instant("forward", (step,)),)),))

    def generation_by_transformers(self) -> ComponentMemory:
        """Return the memory of transformers' `generate` on the policy's weights."""
        shape, seqs = self.shape, self.num_seqs
        prompt = float(self.workload.prompts.maximum)
        size = activations.forward(shape, self.size, self.split, self.cpu).of(seqs * prompt, prompt)
        prefill = self.item("activations", size, "forward of transformers over the prompts")
        size = 2 * seqs * self.length * sum(_widths(shape)) * self.split * self.size
        decode = self.item("activations", size, "a layer's keys and values, joined, and repeated for every head")
        text = "logits of the last tokens, and what sampling makes of them"
        logits = self.item("logits", SAMPLING * seqs * shape.vocabulary * 4.0, text)
        instants = (self.instant("prefill", prefill, logits), self.instant("decode", decode, logits))
        stays = (*self.packed_weights(), *self.shared())
        cache = self.cache(self.length, seqs, "keys and values of every conversation at its longest")
        return ComponentMemory(stays, (cache, *stays), ((Phase.GENERATE, instants),))
