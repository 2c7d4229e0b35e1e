"""Sampling of completions by a server of vLLM, which gets new weights through files.

Routes and fields are those of vLLM 0.28 to 0.32: `/v1/completions` with token ids, `return_token_ids` and `logprobs`;
new weights through `/collective_rpc` (`reload_weights`), `/reset_prefix_cache` and `/update_weight_version`, which
exist if the server runs with `VLLM_SERVER_DEV_MODE=1`. `--logprobs-mode processed_logprobs` makes its
log-probabilities those at the sampling temperature.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import json
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gym_rm.errors import ConfigError, RemoteError, brief
from gym_rm.generation.completions import Completion, TokenIds, require_new, sample_all
from gym_rm.http_client.responses import NoSuchRoute, Refused, parse_body
from gym_rm.training.checkpoints import atomic_folder

Calibrate: TypeAlias = Callable[[Sequence[TokenIds], Sequence[Completion]], Sequence[NDArray[np.float32]]]
_Request: TypeAlias = "concurrent.futures.Future[tuple[TokenIds, NDArray[np.float32], bool]]"
MOST_REQUESTS = 64  # at the same time
COMPARED = 8  # completions of a stream whose log-probabilities are compared with the trainer's
# Largest mean difference, and of one token: float32 on both sides, or rounded on one (SmolLM2 in bfloat16: 0.07, 0.4).
FLOAT32_TOLERANCE, TOLERANCE = (1e-3, 0.05), (0.2, 3.0)


class RemoteSampler:
    """Samples completions with a server; see `Sampler`.

    Before the first and after the last completion of a call or stream the server must tell the version of the weights
    that it was given last, so a restart is noticed. The log-probabilities of some completions must be those of the
    trainer, so old weights, another temperature or another filter of tokens are noticed, unless the difference is as
    small as rounding.

    Args:
        url: address of the server.
        model: name under which the server serves the policy.
        tokenizer: tokenizer of the policy, which writes the texts.
        ends: ids of the tokens that end a completion, see `end_tokens`.
        save: `save(folder, weights)` writes a Hugging Face folder with these weights, tied ones under all their names.
        weights_folder: folder of the weights; the server must see it under the same path.
        max_new_tokens: most tokens in a completion.
        temperature: sampling temperature, above 0.
        calibrate: `calibrate(prompts, completions)` returns the trainer's log-probabilities of the tokens of each
            completion at the sampling temperature, `[T]`; None to trust the server.
        full_precision: whether the trainer computes in float32.
        api_key: sent as a bearer token.
        timeout: seconds for a completion, from when it was begun, and for loading weights.
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
        calibrate: Calibrate | None = None,
        full_precision: bool = False,
        api_key: str | None = None,
        timeout: float = 3600.0,
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
        self._calibrate, self._full_precision = calibrate, full_precision
        self._tolerance: tuple[float, float] | None = None  # not known yet
        self._loaded_again = False  # because log-probabilities differed
        self._timeout = timeout
        self._client = HTTPClient(
            [self.url], key=api_key, attempt_timeout=timeout, max_retries=max_retries, max_connections=MOST_REQUESTS
        )

    def sample(self, prompts: Sequence[TokenIds], *, seeds: Sequence[int]) -> list[Completion]:
        """Sample one completion for each prompt; see `Sampler`.

        Raises:
            ConfigError: the server refuses a request, its reply cannot be used (the message names the row), or it has
                other log-probabilities although it just loaded the weights.
            RemoteError: no answer within the time or the retries, or the server lost the weights or had others, and has
                loaded them again.
        """
        return sample_all(self.stream(), prompts, seeds=seeds)

    def stream(self, *, calibrate: bool = True) -> RemoteStream:
        """Return a stream of completions; see `Sampler`."""
        return RemoteStream(self, calibrate=calibrate and self._calibrate is not None)

    def update_weights(self, weights: Mapping[str, Tensor], *, version: int) -> None:
        """Write the weights to a folder, and make the server load it.

        Raises:
            ConfigError: the server cannot load weights.
            RemoteError: no answer.
        """
        self.expect(version)
        self._remove_files()  # the disk may have room for one
        with atomic_folder(self._current) as unfinished:
            self._save(unfinished, weights)
        self._client.run(self._load())  # even if the server tells this folder: another run may have written it

    def expect(self, version: int) -> None:
        """Take note of weights of a version that another process writes and loads."""
        self.version, self._tolerance, self._loaded_again = version, None, False

    def load_if_lost(self) -> None:
        """Make the server load the last weights if it has others; raises as `update_weights` does."""
        self._client.run(self._load(only_if_lost=True))

    def close(self) -> None:
        """Close all connections and remove the folder of the weights; the server keeps those that it loaded."""
        self._client.close()
        self._remove_files()

    def _remove_files(self) -> None:
        for folder in self._folder.glob("version-*"):
            shutil.rmtree(folder, ignore_errors=True)

    @property
    def _current(self) -> Path:
        """Folder of the last weights; its path is the server's name of their version."""
        return (self._folder / f"version-{self.version:08d}").absolute()

    def _compare(self, prompts: Sequence[TokenIds], completions: Sequence[Completion]) -> None:
        """Compare log-probabilities with the trainer's, and make the server load the weights again if they differ.

        Raises:
            ConfigError: they differ, although it just loaded them.
            RemoteError: they differ.
        """
        assert self._calibrate is not None
        expected = np.concatenate(self._calibrate(prompts, completions), dtype=np.float64)
        differences = np.abs(expected - np.concatenate([each.log_probs for each in completions]))
        mean, most = self._tolerance or TOLERANCE
        if differences.mean() <= mean and differences.max() <= most:
            self._loaded_again = False
            return
        difference = (
            f"{self.url} has other log-probabilities than the trainer for weights of version {self.version}: they "
            f"differ by {differences.mean():.3g} on average and by up to {differences.max():.3g}, where {mean} and "
            f"{most} are allowed"
        )
        if self.version is None or self._loaded_again:
            raise ConfigError(
                f"{difference}. It did not load the new weights, filters tokens or has no --logprobs-mode "
                "processed_logprobs; compare its model and options with the policy's."
            )
        self._client.run(self._load())  # something else changed its weights
        self._loaded_again = True
        raise RemoteError(f"{difference}; it has loaded them again, so sample again.")

    async def _prepare(self, folder: str, *, calibrate: bool) -> None:
        """Require the weights in a folder, and find out how exact the server is, before the first completion."""
        await self._require_weights(folder)
        if calibrate and self._tolerance is None:
            with contextlib.suppress(NoSuchRoute):
                served, _ = await self._client.send("/server_info", read=_parse, deadline=self._deadline())
                exact = self._full_precision and "dtype=torch.float32" in str(served)
                self._tolerance = FLOAT32_TOLERANCE if exact else TOLERANCE

    def _deadline(self) -> float:
        """Return the time of the event loop at which to give up what begins now."""
        return asyncio.get_running_loop().time() + self._timeout

    async def _complete(self, row: int, prompt: TokenIds, seed: int) -> tuple[TokenIds, NDArray[np.float32], bool]:
        """Return the token ids and log-probabilities of one completion, and whether it ended."""
        body = json.dumps(self._request(prompt.tolist(), seed)).encode()
        try:
            reply, _ = await self._client.send("/v1/completions", body, read=_parse, deadline=self._deadline())
        except (Refused, NoSuchRoute) as error:
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
        if reason == "abort":
            raise RemoteError(f"{self.url} aborted a completion: it is being stopped, or was paused.")
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

    async def _require_weights(self, folder: str) -> None:
        """Raise RemoteError if the server tells another version of its weights than this folder; "" for any."""
        if folder and (told := await self._weight_version(self._deadline())) != folder:
            raise RemoteError(
                f"{self.url} has weights of version {told!r} instead of {folder!r}: it was restarted, or another run "
                "uses it too."
            )

    async def _weight_version(self, deadline: float) -> Any:
        try:
            reply, _ = await self._client.send("/weight_info", read=_parse, deadline=deadline)
        except NoSuchRoute as error:
            raise ConfigError(
                f"{self.url} cannot load weights ({error}); start vLLM (0.28 or later) with VLLM_SERVER_DEV_MODE=1."
            ) from error
        return reply.get("weight_version") if isinstance(reply, dict) else None

    async def _load(self, *, only_if_lost: bool = False) -> None:
        deadline, folder = self._deadline(), str(self._current)
        if await self._weight_version(deadline) == folder and only_if_lost:
            return
        served, _ = await self._client.send("/v1/models", read=_parse, deadline=deadline)
        names = [each["id"] for each in served["data"]]
        if self.model not in names:  # weights of another model end vLLM 0.32
            raise ConfigError(f"{self.url} does not serve {self.model!r}, it serves {', '.join(names)}.")
        self._tolerance = None
        bodies: dict[str, dict[str, Any]] = {
            "/collective_rpc": {"method": "reload_weights", "kwargs": {"weights_path": folder}},
            "/reset_prefix_cache": {},
            "/update_weight_version": {"new_version": folder},
        }
        for path, body in bodies.items():
            send = functools.partial(self._client.send, path, json.dumps(body).encode(), deadline=deadline)
            try:
                reply, _ = await send(read=_parse, max_retries=0)
            except (Refused, RemoteError) as error:
                if isinstance(error, Refused | NoSuchRoute) or "collective_rpc method failed" in str(error):
                    raise self._refusal(error) from error
                raise
            if isinstance(reply, dict) and reply.get("success") is False:
                if path == "/reset_prefix_cache":
                    raise RemoteError(f"{self.url} cannot forget old prefixes while it answers another client.")
                raise self._refusal(reply.get("message", reply))

    def _refusal(self, reason: Any) -> ConfigError:
        return ConfigError(
            f"{self.url} did not load the weights in {str(self._current)!r}, which it must see under the same path; "
            f"look whether it still runs: {reason}"
        )


class RemoteStream:
    """Completions of a `RemoteSampler`; see `CompletionStream`.

    The first `add` while nothing is open waits until the server has told the version of its weights. The `take` that
    returns the last open completions first asks for it again, and compares log-probabilities of those that ended first,
    which may take longer than its timeout.

    Args:
        sampler: the sampler.
        calibrate: whether to compare log-probabilities.
    """

    in_waves = False  # what the server computes together is not known anyway

    def __init__(self, sampler: RemoteSampler, *, calibrate: bool) -> None:
        self._sampler, self._calibrate = sampler, calibrate
        self._open: dict[int, tuple[TokenIds, _Request]] = {}
        self._ended: dict[int, _Request] = {}  # of the open ones; the event loop adds to it
        self._changed = threading.Condition()
        self._compared: list[tuple[TokenIds, Completion]] = []  # those that ended first
        self._version, self._folder = 0, ""  # of the weights; no folder for those that the server began with

    @property
    def num_open(self) -> int:
        """Number of completions that were begun and not returned."""
        return len(self._open)

    def add(self, keys: Sequence[int], prompts: Sequence[TokenIds], *, seeds: Sequence[int]) -> None:
        """Begin a completion for each prompt; see `CompletionStream`.

        Raises:
            ConfigError: a key is open.
            RemoteError: the server does not answer, or lost the weights.
        """
        require_new(keys, self._open)
        sampler, rows = self._sampler, list(zip(keys, prompts, seeds, strict=True))
        if rows and not self._open:
            self._compared, self._version = [], sampler.version or 0
            self._folder = "" if sampler.version is None else str(sampler._current)
            sampler._client.run(sampler._prepare(self._folder, calibrate=self._calibrate))
        for key, prompt, seed in rows:
            request = sampler._client.submit(sampler._complete(key, prompt, int(seed)))
            self._open[key] = prompt, request
            request.add_done_callback(functools.partial(self._end, key))

    def take(self, timeout: float | None = None) -> dict[int, Completion]:
        """Return the completions that ended since the last call; see `CompletionStream`.

        If it is interrupted (Ctrl-C), it may be called again.

        Raises:
            ConfigError: see `RemoteSampler.sample`.
            RemoteError: see there.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not self._open, timeout)
            ended = dict(self._ended)
        if not ended:
            return {}
        sampler = self._sampler
        try:
            sampled = [request.result() for request in ended.values()]
            texts = sampler.tokenizer.batch_decode(
                [ids[: len(ids) - finished].tolist() for ids, _, finished in sampled], skip_special_tokens=False
            )
            completions = {
                key: Completion(*values, text, self._version)
                for key, values, text in zip(ended, sampled, texts, strict=True)
            }
            of_prompts = [(self._open[key][0], completion) for key, completion in completions.items()]
            compared = [*self._compared, *of_prompts][:COMPARED]
            if len(ended) == len(self._open):
                sampler._client.run(sampler._require_weights(self._folder))
                if self._calibrate:
                    sampler._compare([prompt for prompt, _ in compared], [completion for _, completion in compared])
        except Exception:
            self.close()
            raise
        self._compared = compared
        for key in ended:
            del self._ended[key], self._open[key]
        return completions

    def close(self) -> None:
        """Cancel the open completions, and close their connections, so that the server stops too."""
        with self._changed:
            requests, self._open, self._ended = list(self._open.values()), {}, {}
        for _, request in requests:
            request.cancel()

    def _end(self, key: int, request: _Request) -> None:
        with self._changed:
            if key in self._open and self._open[key][1] is request:
                self._ended[key] = request
                self._changed.notify()


def _parse(body: bytes) -> Any:
    return parse_body(body) if body else {}
