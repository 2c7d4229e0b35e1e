"""Sampling of completions from a policy in this process.

A completion depends on its prompt, its seed and the weights: row i takes the number u of its token t from the counter
t of a Philox generator (Salmon et al., SC 2011) with its seed as key, and the first token whose cumulative probability
exceeds u. Sums are float32 within blocks of about sqrt(V) tokens and float64 between them, so a token's probability
is off by less than 1e-6 of itself.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from gym_rm.engine.backbones.llama import forward_fingerprint
from gym_rm.engine.loading.trial import FAILURES, tolerance_of, trial_sequences
from gym_rm.errors import ConfigError, GymRMError, brief, logger, warn_once
from gym_rm.generation.completions import NOTHING, Completion, TokenIds, require_new, sample_all
from gym_rm.generation.decoding import GraphDecoder, LeanDecoder, lean_obstacle
from gym_rm.generation.model_decoding import ModelDecoder

STEPS_BETWEEN_CHECKS = 8  # of which rows ended, on a GPU, where each check waits for the device
ENDED = 0.125  # share of the rows that must have ended before the others move together
FEW_ROWS = 256  # on a GPU, which fewer leave mostly idle: then half of them must have ended


class LocalSampler:
    """Samples completions from a causal language model; see `Sampler`.

    Args:
        model: causal language model of transformers, also with peft adapters.
        tokenizer: its tokenizer, which writes the texts.
        max_new_tokens: most tokens in a completion; fewer if the model has fewer positions left.
        temperature: sampling temperature; 0 takes the most likely token, with log-probabilities at temperature 1.
        max_num_seqs: number of completions sampled at a time; None for all.
        copy_to: device of a copy of the model to sample from, which only `update_weights` changes; None to read the
            model itself, also after an optimizer changed it.

    Raises:
        ConfigError: the model cannot sample, or not in this way.

    Example:
        >>> sampler = LocalSampler(model, tokenizer, max_new_tokens=64)  # doctest: +SKIP
        >>> completions = sampler.sample([prompt] * 8, seeds=range(8))  # doctest: +SKIP
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        max_num_seqs: int | None = None,
        copy_to: torch.device | None = None,
    ) -> None:
        if getattr(model.config, "is_encoder_decoder", False):
            raise ConfigError(f"{type(model).__name__} is an encoder with a decoder; pass a causal language model.")
        self.model = model
        if copy_to is not None:
            self.model = copy.deepcopy(model).eval().requires_grad_(False).to(copy_to)
        self.tokenizer = tokenizer
        self.max_new_tokens = max_new_tokens
        self.temperature = temperature
        self.max_num_seqs = max_num_seqs
        self.ends = end_tokens(model, tokenizer)
        self.version = 0
        self._own_copy = copy_to is not None
        self._decoder: LeanDecoder | ModelDecoder | None = None

    def sample(
        self, prompts: Sequence[TokenIds], *, seeds: Sequence[int], deadline: float = math.inf
    ) -> list[Completion]:
        """Sample one completion for each prompt; see `Sampler`.

        Args:
            prompts: B prompts.
            seeds: B seeds.
            deadline: time of `time.monotonic` after which completions end where they are, unfinished; those that had
                not begun have no tokens.

        Raises:
            ConfigError: a prompt is empty or leaves no position for a token, or the model cannot be sampled.
            GymRMError: the model's logits are not finite.
        """
        return sample_all(LocalStream(self, deadline), prompts, seeds=seeds)

    def stream(self, *, calibrate: bool = True) -> LocalStream:
        """Return a stream of completions, which are always those of the model itself; see `Sampler`."""
        return LocalStream(self)

    def update_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Take new weights by their names in the model; without a copy, only read the model again.

        Raises:
            ConfigError: a name is unknown, or a shape is another one.
        """
        self.version = version
        if not self._own_copy:
            return
        own = dict(self.model.state_dict(keep_vars=True))
        wrong = [name for name, value in weights.items() if name not in own or own[name].shape != value.shape]
        if wrong:
            raise ConfigError(f"the sampler's model has no weights of these names and shapes: {', '.join(wrong[:3])}.")
        with torch.no_grad():
            for name, value in weights.items():
                own[name].copy_(value)

    def close(self) -> None:
        """Free the cache, and the copy of the model."""
        self._decoder = None
        if self._own_copy:
            self.model = None

    def _rooms(self, keys: Sequence[int], prompts: Sequence[TokenIds]) -> NDArray[np.int64]:
        """Return the most tokens that each completion can have, int64 `[B]`."""
        config = self.model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        if len(lengths) and lengths.min() == 0:
            raise ConfigError(f"prompt {keys[int(lengths.argmin())]} has no tokens; the policy needs at least one.")
        if limit is not None and len(lengths) and lengths.max() >= limit:
            raise ConfigError(
                f"prompt {keys[int(lengths.argmax())]} has {lengths.max()} tokens, and the policy has {limit} "
                "positions, so there is none left for a completion; remove long prompts."
            )
        return np.minimum(self.max_new_tokens, (limit or 2**31) - lengths)

    def _sample(
        self,
        decoder: LeanDecoder | ModelDecoder,
        prompts: Sequence[TokenIds],
        seeds: Sequence[int],
        rooms: NDArray[np.int64],
        deadline: float,
    ) -> Iterator[dict[int, Completion]]:
        """Sample one wave, and yield by row what ended since the last look, if anything did."""
        ids: dict[bytes, int] = {}
        first: list[TokenIds] = []
        for prompt in prompts:
            if ids.setdefault(prompt.tobytes(), len(ids)) == len(first):
                first.append(prompt)
        prompt_of_row = np.array([ids[prompt.tobytes()] for prompt in prompts])
        longest = int(rooms.max())
        logits = decoder.start(first, prompt_of_row, longest)
        device = logits.device
        uniforms = torch.as_tensor(random_numbers(seeds, longest), device=device)
        ends, limits = torch.as_tensor(self.ends, device=device), torch.as_tensor(rooms, device=device)
        tokens = torch.full((len(prompts), longest), -1, dtype=torch.int64, device=device)
        log_probs = torch.zeros(len(prompts), longest, device=device)
        rows = torch.arange(len(prompts), device=device)
        logits = logits[torch.as_tensor(prompt_of_row, device=device)]
        ended = torch.zeros(len(rows), dtype=torch.bool, device=device)
        is_open = torch.ones_like(ended)
        uneven = bool((rooms < longest).any())
        every = 1 if device.type == "cpu" else STEPS_BETWEEN_CHECKS
        share = 0.5 if device.type != "cpu" and len(prompts) < FEW_ROWS else ENDED
        for step in range(longest):
            token, log_prob = draw(logits, uniforms[rows, step], self.temperature)
            tokens[rows, step], log_probs[rows, step] = token, log_prob
            ended |= torch.isin(token, ends)
            if uneven:
                ended |= limits[rows] <= step + 1
            if step + 1 == longest:
                break
            if time.monotonic() > deadline:
                rooms = np.minimum(rooms, step + 1)
                break
            if (step + 1) % every == 0:
                count = int(ended.sum())
                if count == len(rows):
                    break
                over = rows[ended & is_open[rows]]
                is_open[over] = False
                yield self._completions(over, tokens, log_probs, rooms)
                if count >= share * len(rows):
                    kept = (~ended).nonzero()[:, 0]
                    rows, token, ended = rows[kept], token[kept], ended[kept]
                    decoder.keep(kept)
            logits = decoder.step(token)
        yield self._completions(is_open.nonzero()[:, 0], tokens, log_probs, rooms)

    def _completions(
        self, rows: Tensor, of_tokens: Tensor, of_log_probs: Tensor, rooms: NDArray[np.int64]
    ) -> dict[int, Completion]:
        """Return the completions of these rows, up to their end tokens."""
        if not len(rows):
            return {}
        tokens, log_probs, numbers = of_tokens[rows].cpu().numpy(), of_log_probs[rows].cpu().numpy(), rows.tolist()
        rooms = rooms[numbers]
        at_end = (tokens[:, :, None] == self.ends).any(-1)  # np.isin is slow for few tokens
        at_end &= np.arange(tokens.shape[1]) < rooms[:, None]
        finished: NDArray[np.bool_] = np.asarray(at_end.any(1))
        lengths = np.where(finished, at_end.argmax(1) + 1, rooms)
        if not np.isfinite(log_probs).all():
            raise GymRMError(
                f"the policy's logits are not finite (weights of version {self.version}); training has diverged: use "
                "a smaller learning rate, or go on from an earlier checkpoint."
            )
        kept = [row[: length - end].tolist() for row, length, end in zip(tokens, lengths, finished, strict=True)]
        texts = self.tokenizer.batch_decode(kept, skip_special_tokens=False)
        return {
            number: Completion(
                tokens[row, :length].astype(np.int32),
                log_probs[row, :length].copy(),
                bool(finished[row]),
                texts[row],
                self.version,
            )
            for row, (number, length) in enumerate(zip(numbers, lengths, strict=True))
        }

    def _choose_decoder(self) -> LeanDecoder | ModelDecoder:
        """Return the fastest decoder whose log-probabilities equal those of the plain forward; it is kept."""
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        if isinstance(self._decoder, LeanDecoder) and forward_fingerprint(base.model) != self._decoder.code:
            self._decoder = None  # a module was added or replaced
        if self._decoder is not None:
            return self._decoder
        name, kinds = type(self.model).__name__, (GraphDecoder, LeanDecoder, ModelDecoder)
        first = 0 if self.model.get_input_embeddings().weight.device.type == "cuda" else 1
        if (obstacle := lean_obstacle(base)) is not None:
            warn_once(f"{name} samples with its own forward, not with the package's faster one: {obstacle}.")
            first = 2
        for kind in kinds[first:]:
            decoder = kind(self.model if kind is ModelDecoder else base)
            difference = trial(self.model, decoder)
            if difference <= tolerance_of(str(self.model.dtype).removeprefix("torch.")):
                self._decoder = kind(decoder.model)
                return self._decoder
            logger.warning("%s differs from the forward of %s by %.1e", kind.__name__, name, difference)
        raise ConfigError(
            f"{name} cannot sample in this process: with its cache and padding, log-probabilities differ from its "
            f"forward's by {difference:.1e}; use a server (sampling.server)."
        )


class LocalStream:
    """Completions of a `LocalSampler`; see `CompletionStream`.

    They are decoded in `take`, and a step of the decoder is not interrupted. Completions that are added while others
    are decoded wait until those have ended. While some are open, the model may be in evaluation mode.

    Args:
        sampler: the sampler.
        deadline: see `LocalSampler.sample`.
    """

    in_waves = True  # products of other sizes round differently

    def __init__(self, sampler: LocalSampler, deadline: float = math.inf) -> None:
        self._sampler, self._deadline = sampler, deadline
        self._open: dict[int, tuple[TokenIds, int]] = {}
        self._decoding: Generator[dict[int, Completion], None, None] | None = None

    @property
    def num_open(self) -> int:
        """Number of completions that were begun and not returned."""
        return len(self._open)

    def add(self, keys: Sequence[int], prompts: Sequence[TokenIds], *, seeds: Sequence[int]) -> None:
        """Begin a completion for each prompt; see `CompletionStream`.

        Raises:
            ConfigError: a key is open, or a prompt is empty or leaves no position for a token.
        """
        require_new(keys, self._open)
        self._sampler._rooms(keys, prompts)
        self._open |= zip(keys, zip(prompts, seeds, strict=True), strict=True)

    @torch.no_grad()
    def take(self, timeout: float | None = None) -> dict[int, Completion]:
        """Return the completions that ended since the last call; see `CompletionStream`.

        Raises:
            ConfigError: the model cannot be sampled.
            GymRMError: the model's logits are not finite.
        """
        until = math.inf if timeout is None else time.monotonic() + timeout
        ended: dict[int, Completion] = {}
        try:
            while self._open and not ended:
                self._decoding = self._decoding or self._decode()
                ended = next(self._decoding)
                for key in ended:
                    del self._open[key]
                if time.monotonic() > until:
                    break
        except BaseException:
            self.close()
            raise
        if not self._open:
            self.close()
        return ended

    def close(self) -> None:
        """Cancel the open completions, and free the cache of the decoder."""
        self._open.clear()
        if self._decoding is not None:
            self._decoding.close()
            self._decoding = None
            if isinstance(self._sampler._decoder, GraphDecoder):
                torch.cuda.empty_cache()  # nothing else could take the memory of its graphs

    def _decode(self) -> Generator[dict[int, Completion], None, None]:
        """Yield completions as they end, wave after wave. Those that were yielded must not be open any more."""
        sampler = self._sampler
        training = sampler.model.training
        sampler.model.eval()
        try:
            decoder = copy.copy(sampler._choose_decoder())  # whose caches and packed weights end here
            while time.monotonic() <= self._deadline:
                # Prompts of similar length at a time, rows of one prompt together.
                order = sorted(self._open, key=lambda key: (-len(self._open[key][0]), self._open[key][0].tobytes()))
                wave = order[: sampler.max_num_seqs]
                prompts, seeds = zip(*(self._open[key] for key in wave), strict=True)
                for ended in sampler._sample(decoder, prompts, seeds, sampler._rooms(wave, prompts), self._deadline):
                    yield {wave[row]: completion for row, completion in ended.items()}
            yield dict.fromkeys(self._open, NOTHING)
        finally:
            sampler.model.train(training)


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the ids of the tokens that end a completion: those of the generation settings and of the tokenizer."""
    config = getattr(model, "generation_config", None) or model.config
    named = getattr(config, "eos_token_id", None)
    ends = {int(token) for token in np.atleast_1d(named)} if named is not None else set()
    if tokenizer.eos_token_id is not None:
        ends.add(int(tokenizer.eos_token_id))
    return sorted(ends)


def random_numbers(seeds: Sequence[int], count: int) -> NDArray[np.float64]:
    """Return `count` numbers in [0, 1) for each seed below 2**63, float64 `[B, count]`; a seed has always the same."""
    bits = np.random.Philox(key=0)
    generator, state = np.random.Generator(bits), bits.state
    numbers = np.empty((len(seeds), count))
    for row, seed in enumerate(seeds):
        state["state"]["key"][:] = (int(seed), 0)
        bits.state = state
        generator.random(out=numbers[row])
    return numbers


def draw(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return one token of each row, int64 `[R]`, and its log-probability, float32 `[R]`.

    Args:
        logits: `[R, V]`.
        uniforms: float64 `[R]` in [0, 1).
        temperature: divisor of the logits; 0 for the most likely token and its log-probability at temperature 1.
    """
    if temperature == 0:
        scores = logits.float().log_softmax(-1)
        best = scores.argmax(-1)
        return best, scores.gather(1, best[:, None])[:, 0]
    rows, vocabulary = logits.shape
    block = 2 ** round(math.log2(max(vocabulary, 2)) / 2)
    blocks = -(-vocabulary // block)
    weights = pad((logits.float() / temperature).softmax(-1), (0, blocks * block - vocabulary))
    weights = weights.view(rows, blocks, block)
    sums = weights.sum(-1).double()
    upper = sums.cumsum(-1)
    total = upper[:, -1:]
    target = uniforms[:, None] * total
    at = torch.searchsorted(upper, target, right=True).clamp_(max=blocks - 1)
    chosen = sums.gather(1, at)
    share = ((target - (upper.gather(1, at) - chosen)) / chosen).clamp_(0, 1 - 1e-12)
    inner = weights[torch.arange(rows, device=logits.device), at[:, 0]].double().cumsum(-1)
    within = torch.searchsorted(inner, share * inner[:, -1:], right=True)
    token = (at * block + within).clamp_(max=vocabulary - 1)
    log_prob = weights.view(rows, -1).gather(1, token).double().log() - total.log()
    return token[:, 0], log_prob[:, 0].float()


@torch.no_grad()
def trial(model: Any, decoder: LeanDecoder | ModelDecoder) -> float:
    """Return the largest difference of a decoder's log-probabilities from those of the plain forward.

    Three prompts of different lengths have two rows each, and rows end early, after steps that a graph repeats. The
    difference is relative to the largest log-probability; it is infinite if the decoder fails.
    """
    sequences = [each.input_ids.astype(np.int64) for each in trial_sequences(model.config)[1:4]]
    prompts = [each[: 4 + 2 * number] for number, each in enumerate(sequences)]
    prompt_of_row = np.repeat(np.arange(3), 2)
    added = np.stack([np.roll(each[-6:], shift) for each in sequences for shift in (0, 1)])
    device = model.get_input_embeddings().weight.device
    rows = np.arange(6)
    try:
        logits = decoder.start([each.astype(np.int32) for each in prompts], prompt_of_row, 6)
        got = [(rows, logits[torch.as_tensor(prompt_of_row, device=device)].float().log_softmax(-1))]
        for step, kept in enumerate((rows, rows, rows, np.delete(rows, 1), np.delete(rows, 1), rows[4:5])):
            if len(kept) < len(rows):
                decoder.keep(torch.as_tensor(np.searchsorted(rows, kept), device=device))
                rows = kept
            got.append((rows, decoder.step(torch.as_tensor(added[rows, step], device=device)).float().log_softmax(-1)))
    except FAILURES as error:
        logger.warning("%s failed: %s", type(decoder).__name__, brief(error))
        return math.inf
    worst, largest = 0.0, 1e-6
    for row, prompt in enumerate(prompt_of_row):
        ids = torch.as_tensor(np.r_[prompts[prompt], added[row]], device=device)
        plain = model(input_ids=ids[None], use_cache=False).logits[0, -7:].float().log_softmax(-1)
        largest = max(largest, float(plain.abs().max()))
        for expected, (alive, log_probs) in zip(plain, got, strict=True):
            for mine in log_probs[torch.as_tensor(alive == row, device=device)]:
                worst = max(worst, float((mine - expected).abs().max()))
    return worst / largest
