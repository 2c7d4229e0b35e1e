"""Sampling of completions by a server of vLLM, which gets new weights through files.

Routes and fields are those of vLLM 0.33: `/v1/completions` with token ids, `return_token_ids` and `logprobs`; new
weights through `/collective_rpc` (`reload_weights`) and `/reset_prefix_cache`, which exist if the server runs with
`VLLM_SERVER_DEV_MODE=1`. `--logprobs-mode processed_logprobs` makes its log-probabilities those at the sampling
temperature.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gym_rm.errors import ConfigError, RemoteError, brief
from gym_rm.generation.completions import Completion, TokenIds
from gym_rm.http_client.responses import NoSuchRoute, Refused, parse_body
from gym_rm.training.checkpoints import atomic_folder

CALIBRATION_SEED = 0
MOST_REQUESTS = 64  # at the same time
TOLERANCE = 0.05  # mean difference of log-probabilities; servers compute in bfloat16, with other kernels


class RemoteSampler:
    """Samples completions with a server; see `Sampler`.

    After new weights, and before the first completions, the server completes a known prompt. Its log-probabilities
    must be those of the trainer, so old weights, another temperature or another filter of tokens are noticed. Weights
    that changed less than the tolerance cannot be told apart.

    Args:
        url: address of the server.
        model: name under which the server serves the policy.
        tokenizer: tokenizer of the policy, which writes the texts.
        ends: ids of the tokens that end a completion, see `end_tokens`.
        save: `save(folder, weights)` writes a Hugging Face folder with these weights.
        weights_folder: folder of the weights; the server must see it under the same path.
        max_new_tokens: most tokens in a completion.
        temperature: sampling temperature, above 0.
        calibrate: `calibrate(prompt, completion)` returns the trainer's log-probabilities of the tokens of a completion
            at the sampling temperature, `[T]`; None to trust the server.
        api_key: sent as a bearer token.
        timeout: seconds for all completions of a call, and for loading weights.
        max_retries: how often a request is sent again after a failed connection or a status of 500 and more; a server
            that answers 429 or 503 with `Retry-After` is asked again then.

    Raises:
        ConfigError: an option is invalid, or httpx is missing.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        tokenizer: Any,
        ends: Sequence[int],
        save: Callable[[Path, Mapping[str, Tensor]], None],
        weights_folder: Path,
        max_new_tokens: int,
        temperature: float = 1.0,
        calibrate: Callable[[TokenIds, TokenIds], Sequence[float]] | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
        max_retries: int = 5,
    ) -> None:
        if temperature <= 0:
            raise ConfigError(f"temperature must be above 0, got {temperature}.")
        from gym_rm.http_client.client import HTTPClient  # which needs httpx

        self.url, self.model = url.rstrip("/"), model
        self.tokenizer, self.max_new_tokens, self.temperature = tokenizer, max_new_tokens, temperature
        self.version: int | None = None
        self._ends = sorted(ends)
        self._save, self._folder = save, Path(weights_folder)
        self._calibrate = calibrate
        self._timeout = timeout
        self._client = HTTPClient(
            [self.url], key=api_key, attempt_timeout=timeout, max_retries=max_retries, max_connections=MOST_REQUESTS
        )
        self._trusted = calibrate is None

    def sample(self, prompts: Sequence[TokenIds], *, seeds: Sequence[int]) -> list[Completion]:
        """Sample one completion for each prompt; see `Sampler`.

        Raises:
            ConfigError: the server refuses a request, or its reply cannot be used; the message names the row.
            RemoteError: no answer within the time or the retries.
        """
        if not self._trusted:
            self._check()
        if not len(prompts):
            return []
        return self._client.run(self._sample(prompts, seeds))

    def update_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Write the weights to a folder, make the server load it, and compare its log-probabilities.

        Raises:
            ConfigError: the server cannot load weights, or has others afterwards.
            RemoteError: no answer.
        """
        folder = (self._folder / f"version-{version:08d}").absolute()
        with atomic_folder(folder) as unfinished:
            self._save(unfinished, weights)
        self._trusted = False
        self._client.run(self._load(folder))
        self.version = version
        for old in self._folder.glob("version-*"):
            if old != folder and old.absolute() != folder:
                shutil.rmtree(old, ignore_errors=True)
        self._check()

    def close(self) -> None:
        """Close all connections and remove the folder of the weights; the server keeps those that it loaded."""
        self._client.close()
        for old in self._folder.glob("version-*"):
            shutil.rmtree(old, ignore_errors=True)

    def _check(self) -> None:
        """Compare the server's log-probabilities of a completion with the trainer's."""
        if self._calibrate is not None:
            prompt = np.array(self.tokenizer.encode("What is 2 + 2?", add_special_tokens=False), dtype=np.int32)
            (completion,) = self._client.run(self._sample([prompt], [CALIBRATION_SEED]))
            expected = np.asarray(self._calibrate(prompt, completion.token_ids), dtype=np.float64)
            difference = float(np.abs(expected - completion.log_probs).mean())
            if not difference <= TOLERANCE:
                raise ConfigError(
                    f"{self.url} has other log-probabilities than the trainer for weights of version {self.version}: "
                    f"they differ by {difference:.3g} on average, more than {TOLERANCE}. It did not load the new "
                    "weights, filters tokens or has no --logprobs-mode processed_logprobs; compare its model and "
                    "options with the policy's."
                )
        self._trusted = True

    async def _sample(self, prompts: Sequence[TokenIds], seeds: Sequence[int]) -> list[Completion]:
        deadline = asyncio.get_running_loop().time() + self._timeout
        rows = enumerate(zip(prompts, seeds, strict=True))
        sampled = await self._client.all_of(
            self._complete(row, prompt, int(seed), deadline) for row, (prompt, seed) in rows
        )
        texts = self.tokenizer.batch_decode(
            [ids[: len(ids) - finished].tolist() for ids, _, finished in sampled], skip_special_tokens=False
        )
        return [
            Completion(ids, log_probs, finished, text)
            for (ids, log_probs, finished), text in zip(sampled, texts, strict=True)
        ]

    async def _complete(
        self, row: int, prompt: TokenIds, seed: int, deadline: float
    ) -> tuple[TokenIds, NDArray[np.float32], bool]:
        """Return the token ids and log-probabilities of one completion, and whether it ended."""
        body = json.dumps(self._request(prompt.tolist(), seed)).encode()
        try:
            reply, _ = await self._client.send("/v1/completions", body, read=_parse, deadline=deadline)
        except Refused as error:
            raise ConfigError(f"row {row} ({len(prompt)} tokens): {self.url} refused it: {error}.") from error
        except RemoteError as error:
            raise RemoteError(f"row {row}: no completion: {error}") from error
        try:
            return self._read(reply, prompt)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(
                f"row {row}: the reply of {self.url} cannot be used: {brief(error)}; the server may be too old, or not "
                "vLLM."
            ) from error

    def _request(self, prompt: list[int], seed: int) -> dict[str, Any]:
        """Return the body; every option is set, because the server reads others from the checkpoint."""
        filters: dict[str, Any] = {"temperature": self.temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
        filters |= {"repetition_penalty": 1.0, "stop_token_ids": self._ends, "skip_special_tokens": False}
        options = {"max_tokens": self.max_new_tokens, "seed": seed, "logprobs": 0, "return_token_ids": True}
        return {"model": self.model, "prompt": prompt} | filters | options

    def _read(self, reply: Any, prompt: TokenIds) -> tuple[TokenIds, NDArray[np.float32], bool]:
        """Return the completion of a reply. Raises an error of several types if something is missing or wrong."""
        (choice,) = reply["choices"]
        ids, log_probs, reason = choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["finish_reason"]
        seen = choice.get("prompt_token_ids") or prompt.tolist()
        if seen != prompt.tolist():
            raise ValueError(f"the server completed another prompt, of {len(seen)} instead of {len(prompt)} tokens")
        if not ids or not all(type(token) is int and 0 <= token < len(self.tokenizer) for token in ids):
            raise ValueError(f"its token ids {ids[:5]} are not ids of the policy's {len(self.tokenizer)} tokens")
        if len(log_probs) != len(ids) or not all(type(each) in (int, float) and each <= 1e-3 for each in log_probs):
            raise ValueError(f"its {len(ids)} tokens have the log-probabilities {log_probs[:5]}")
        finished, room = ids[-1] in self._ends, self.max_new_tokens - len(ids)
        if reason not in ("stop", "length") or room < 0 or (room and finished != (reason == "stop")):
            raise ValueError(
                f"it has {len(ids)} of at most {self.max_new_tokens} tokens, the last of them {ids[-1]} ({self._ends} "
                f"end a reply), and finish_reason={reason!r}"
            )
        return np.array(ids, dtype=np.int32), np.array(log_probs, dtype=np.float32), finished

    async def _load(self, folder: Path) -> None:
        deadline = asyncio.get_running_loop().time() + self._timeout
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        try:
            for path, each in (("/collective_rpc", body), ("/reset_prefix_cache", {})):
                reply, _ = await self._client.send(path, json.dumps(each).encode(), read=_parse, deadline=deadline)
                if isinstance(reply, dict) and reply.get("success") is False:
                    raise ConfigError(f"{self.url}{path} failed for {str(folder)!r}: {reply.get('message', reply)}")
        except NoSuchRoute as error:
            raise ConfigError(
                f"{self.url} cannot load weights from files ({error}); start it with VLLM_SERVER_DEV_MODE=1."
            ) from error
        except Refused as error:
            raise ConfigError(f"{self.url} did not load the weights in {str(folder)!r}: {error}.") from error


def _parse(body: bytes) -> Any:
    return parse_body(body) if body else {}
