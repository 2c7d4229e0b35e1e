"""A chat model in this process."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from gym_rm.checks import model_source
from gym_rm.config import parse_settings
from gym_rm.engine.executors.executor import LoadSpec
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.kinds.readouts import TokenLogProbabilities
from gym_rm.engine.loading.revision import revision_of_model
from gym_rm.engine.schedule import Scheduler
from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.renderer import Renderer
from gym_rm.engine.text.thinking import Thinking
from gym_rm.engine.token_tree import TokenSequence
from gym_rm.errors import ConfigError, ConversationError
from gym_rm.generation.chat import LAST_TOKENS, ChatReply, LocalChatOptions, merge_system
from gym_rm.generation.choices import ids_after, masses_of, spellings
from gym_rm.generation.completions import Completion, TokenIds
from gym_rm.generation.models import open_chat_model
from gym_rm.generation.sampling import LocalSampler
from gym_rm.scorer import NeverCopied, lock_open_after_fork
from gym_rm.types import Conversation, Provenance

NO_TIME = "no reply before the time was over"


class LocalChatModel(NeverCopied):
    """Answers conversations with a model in this process; see `ChatModel`.

    Control tokens in messages are read as plain text, so a message cannot forge a turn. Calls from several threads wait
    for each other.

    Args:
        path: folder or hub id of a chat model; `"embedded:policy"`; or `"embedded:judge"`, which compares replies to
            the embedded prompts in the form of `style="genrm"`.
        **options: the fields of `LocalChatOptions`.

    Raises:
        ConfigError: there is no such model, it has no chat template, or an option is invalid.

    Example:
        >>> model = LocalChatModel("embedded:policy", max_new_tokens=4)
        >>> (reply,) = model.reply([[{"role": "user", "content": "Which is larger, 3 or 5?"}]], seeds=[0])
        >>> reply.error is None
        True
    """

    def __init__(self, path: str | os.PathLike[str], **options: Any) -> None:
        self.options = parse_settings(LocalChatOptions, options)
        self.name = os.fspath(path)
        self._source = model_source("model", self.name)
        model, tokenizer = open_chat_model(
            self._source,
            option="model",
            dtype=self.options.dtype,
            device=self.options.device,
            revision=self.options.revision,
        )
        self.model: Any = model.requires_grad_(False)
        self._device = model.device
        self.max_concurrent_calls = int(self._device.type != "cpu")  # of a judge, see gym_rm.scorer
        self._renderer = Renderer(
            tokenizer,
            input_format=InputFormat(generation_prompt=True),
            chat_template=self.options.chat_template,
            chat_template_kwargs=self.options.chat_template_kwargs,
            max_length=self.options.max_length or self._longest_prompt(),
        )
        # Some templates refuse system messages, others do not write them.
        system = [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]
        self._merges_system = isinstance(self._renderer.encode([system])[0], ConversationError)  # type: ignore[list-item]
        self._sampler: LocalSampler | None = LocalSampler(
            model,
            tokenizer,
            max_new_tokens=self.options.max_new_tokens,
            temperature=self.options.temperature,
            max_num_seqs=self.options.max_num_seqs,
        )
        self._forward: tuple[Scheduler, LocalExecutor] | None = None  # of `choose`
        self._lock = lock_open_after_fork()
        self._revision = revision_of_model(self._source, self.options.revision)

    def __repr__(self) -> str:
        return f"LocalChatModel({self.name!r})"

    @property
    def provenance(self) -> Provenance:
        """How replies are made."""
        return Provenance(
            type(self).__name__,
            self.name,
            revision=self._revision,
            template_hash=self._renderer.template_hash,
            dtype=str(self.model.dtype).removeprefix("torch."),
            device=str(self._device),
            settings=self.options.settings,
        )

    def reply(
        self, conversations: Sequence[Conversation], *, seeds: Sequence[int], deadline: float = math.inf
    ) -> list[ChatReply]:
        """Return a reply to each of N conversations; see `ChatModel.reply`.

        A forward pass is not interrupted, so a call can end one pass after the deadline.
        """
        replies, rows = self._encode(conversations)
        if not self._lock.acquire(timeout=max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX))):
            return replies
        try:
            self._wake()
            assert self._sampler is not None
            completions = self._sampler.sample(
                list(rows.values()), seeds=[seeds[row] for row in rows], deadline=deadline
            )
            late = time.monotonic() > deadline
            for (row, prompt), completion in zip(rows.items(), completions, strict=True):
                reply = self._read(completion, started=self._starts_reasoning(prompt), late=late)
                counted = len(prompt) + len(completion.token_ids)
                replies[row] = replace(reply, num_tokens=counted, top_log_probs=self._top(prompt, completion))
        finally:
            self._lock.release()
        return replies

    def choose(
        self, conversations: Sequence[Conversation], choices: Sequence[Sequence[str]], *, begin: str, deadline: float
    ) -> list[ChatReply]:
        """Return the most likely of its choices for each of N conversations, after the beginning of the reply.

        Nothing is generated: one forward over token trees, which starts before the deadline, reads all choices.
        """
        replies, rows = self._encode(conversations)
        sequences, read = list[TokenSequence](), list[tuple[int, tuple[int, ...], str]]()
        for row, prompt in rows.items():
            if self._starts_reasoning(prompt):
                replies[row] = ChatReply(error="the chat template begins every reply with reasoning; switch it off")
                continue
            start = [*prompt.tolist(), *ids_after(self._renderer.tokenizer, begin, "\n")]
            for ids, text in spellings(self._renderer.tokenizer, choices[row], begin).items():
                whole = np.array([*start, *ids], dtype=np.int32)
                sequences.append(TokenSequence(whole, np.arange(len(start), len(whole))))
                read.append((row, ids, text))
        with self._lock:
            if time.monotonic() > deadline:
                return replies
            self._wake()
            if self._forward is None:
                executor = LocalExecutor()
                info = executor.load(LoadSpec(self.model, TokenLogProbabilities()))
                self._forward = Scheduler(info, layout=info.layout), executor
            result = self._forward[0].run([sequences], self._forward[1])
        found: dict[int, dict[tuple[int, ...], tuple[str, float]]] = {row: {} for row, _, _ in read}
        for (row, ids, text), values in zip(read, result.values, strict=True):
            found[row][ids] = text, math.exp(values.sum(dtype=np.float64))
        for row, masses in ((row, masses_of(each)) for row, each in found.items()):
            best = max(masses, key=masses.__getitem__)
            replies[row] = ChatReply(best, finished=True, num_tokens=len(rows[row]), masses=masses)
        for number, reason in result.failures.items():
            replies[read[number][0]] = ChatReply(error=reason)
        return replies

    def _encode(self, conversations: Sequence[Conversation]) -> tuple[list[ChatReply], dict[int, TokenIds]]:
        """Return replies that wait for their time, or have an error, and the tokens of the others by row."""
        if self._merges_system:
            conversations = [merge_system(conversation) for conversation in conversations]
        replies = [ChatReply(error=NO_TIME) for _ in conversations]
        rows: dict[int, TokenIds] = {}
        for row, rendered in enumerate(self._renderer.encode(conversations)):
            if isinstance(rendered, ConversationError):
                replies[row] = ChatReply(error=str(rendered))
            else:
                rows[row] = rendered.input_ids
        return replies, rows

    def sleep(self) -> None:
        """Move the weights to the CPU; the next `reply` moves them back."""
        with self._lock:
            if self._sampler is not None and self.model.device.type != "cpu":
                self.model.to("cpu")

    def wake(self) -> None:
        """Undo `sleep`."""
        with self._lock:
            self._wake()

    def close(self) -> None:
        """Release the model; closing twice is allowed."""
        with self._lock:
            self.model = self._sampler = self._forward = None

    def _wake(self) -> None:
        if self._sampler is None:
            raise RuntimeError(f"{self!r} is closed; load it again.")
        self.model.to(self._device)

    def _longest_prompt(self) -> int | None:
        limit = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if limit is None or limit > self.options.max_new_tokens:
            return None if limit is None else limit - self.options.max_new_tokens
        raise ConfigError(f"max_new_tokens={self.options.max_new_tokens} must be below the model's {limit} positions.")

    def _starts_reasoning(self, prompt: TokenIds) -> bool:
        """Return whether the chat template opened the reasoning at the end of a prompt."""
        end = self._renderer.tokenizer.decode(prompt[-16:].tolist(), skip_special_tokens=False)
        return bool(Thinking().opening(end))

    @torch.no_grad()
    def _top(self, prompt: TokenIds, completion: Completion) -> tuple[tuple[str, dict[str, float]], ...]:
        """Return the last tokens of a completion with the most likely ones in their places, from another forward."""
        if not (count := self.options.top_logprobs) or not len(completion.token_ids):
            return ()
        last = completion.token_ids[-LAST_TOKENS:].tolist()
        ids = torch.tensor([[*prompt.tolist(), *completion.token_ids.tolist()]], device=self.model.device)
        logits = self.model(input_ids=ids, logits_to_keep=len(last) + 1).logits[0, :-1]
        found = torch.log_softmax(logits.float(), dim=-1).topk(min(count, logits.shape[-1]))
        decode = self._renderer.tokenizer.decode
        return tuple(
            (decode([token]), {decode([each]): value for each, value in zip(ids_of, values, strict=True)})
            for token, ids_of, values in zip(last, found.indices.tolist(), found.values.tolist(), strict=True)
        )

    def _read(self, completion: Completion, *, started: bool, late: bool) -> ChatReply:
        if late and not completion.finished:
            return ChatReply(error=NO_TIME)
        _, text = Thinking(opened=started).split({"content": completion.text})
        return ChatReply(text or "", completion.finished and text is not None)
