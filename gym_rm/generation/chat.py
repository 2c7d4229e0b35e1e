"""Chat models: conversations in, the assistant's next replies out, from a model in this process or from a server."""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import pydantic

from gym_rm.config import Config, Finite, Flag, NonNegativeInt, PositiveInt, Schema, divide_settings, parse_settings
from gym_rm.errors import ConfigError
from gym_rm.types import Conversation, Message

LAST_TOKENS = 16  # whose alternatives are told, see ChatReply
TOP_LOGPROBS = 20  # alternatives; the most that vLLM tells
LOCAL = "gym_rm.generation.local_chat", "LocalChatModel"
REMOTE = "gym_rm.generation.remote_chat", "RemoteChatModel"


@dataclass(frozen=True, slots=True)
class ChatReply:
    """What a chat model answered to one conversation.

    Attributes:
        text: the reply without the model's reasoning.
        finished: whether the model ended its reply itself; otherwise it was cut at a limit.
        error: why there is no reply; None if there is one.
        num_tokens: tokens of the conversation and the reply; None if they were not counted.
        top_log_probs: the last tokens, each with the log-probabilities of the most likely ones in its place; empty if
            they were not asked for.
        masses: probability of each choice, where `choose` was called.
        unknown: probability that a server did not tell, and that choices could have.
    """

    text: str = ""
    finished: bool = False
    error: str | None = None
    num_tokens: int | None = None
    top_log_probs: tuple[tuple[str, Mapping[str, float]], ...] = ()
    masses: Mapping[str, float] | None = None
    unknown: float = 0.0


@runtime_checkable
class ChatModel(Protocol):
    """Anything that answers conversations, as judges and simulated users need it.

    The text of a message must not be able to forge turns. `LocalChatModel` and `RemoteChatModel` see to that. A judge
    that decides by probabilities needs their method `choose` too.
    """

    def reply(
        self, conversations: Sequence[Conversation], *, seeds: Sequence[int], deadline: float = math.inf
    ) -> Sequence[ChatReply]:
        """Return a reply to each of N conversations, in order.

        Args:
            conversations: N lists of messages; each ends where the model replies.
            seeds: N seeds below 2**63.
            deadline: time of `time.monotonic` by which to return; rows without a reply then have an error.

        Raises:
            ConfigError: the model cannot be used at all. Failures of single rows are in `ChatReply.error`.
        """
        ...


class ChatOptions(Config):
    """Options of every chat model."""

    temperature: Finite = pydantic.Field(default=0.0, ge=0)
    """Sampling temperature; 0 takes the most likely token."""
    max_new_tokens: PositiveInt = 1024
    """Most tokens in a reply, with its reasoning."""
    top_logprobs: NonNegativeInt = 0
    """Number of most likely tokens whose log-probabilities are told for the last tokens of a reply."""

    @property
    def settings(self) -> dict[str, Any]:
        """Those that change replies, for `Provenance`."""
        told = {"top_logprobs": self.top_logprobs} if self.top_logprobs else {}
        return {"temperature": self.temperature, "max_new_tokens": self.max_new_tokens, **told}


class LocalChatOptions(ChatOptions):
    """Options of a chat model in this process."""

    max_length: PositiveInt | None = None
    """Most tokens of a conversation; None for the model's positions less `max_new_tokens`."""
    max_num_seqs: PositiveInt = 32
    """Number of replies written at a time."""
    dtype: Any = "auto"
    """`"auto"`, `"float32"`, `"bfloat16"` or `"float16"`; `"auto"` is the checkpoint's own on a GPU, else float32."""
    device: Any = "auto"
    """`"auto"` (the GPU if there is one), `"cpu"`, `"cuda"` or `"cuda:1"`."""
    revision: str | None = None
    """Commit, branch or tag of a hub repository."""
    chat_template: str | None = None
    """Jinja source of the chat template, or its file; None for the model's own."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Extra variables for the chat template (`enable_thinking=False`, ...)."""


class RemoteChatOptions(ChatOptions):
    """Options of a chat model behind a server."""

    name: str | None = None
    """Name of the served model; None asks the server, which must serve one."""
    key: str | None = pydantic.Field(default=None, repr=False)
    """Key, sent as a bearer token; `"env:NAME"` reads the environment variable NAME."""
    timeout: Finite = pydantic.Field(default=300.0, gt=0)
    """Seconds after which a call without a deadline of its own gives up, with all its retries."""
    attempt_timeout: Finite | None = pydantic.Field(default=None, gt=0)
    """Seconds after which one request is sent again; None for a quarter of `timeout`."""
    max_retries: NonNegativeInt = 4
    """How often a request is sent again after a failure; the waits between are doubled each time. A server that asks to
    wait (`Retry-After`) is asked again then, until the time is over."""
    max_connections: PositiveInt = 32
    """Most requests at the same time."""
    system_role: Flag = True
    """Whether the model has a system role; otherwise a system message becomes the start of the next one."""
    tokenizer: Any = None
    """Tokenizer of the served model (a folder or a hub id), whose control tokens are then known exactly."""
    extra: dict[str, Any] = pydantic.Field(default={})
    """Other fields of every request, such as `{"top_p": 0.9, "chat_template_kwargs": {"enable_thinking": false}}`."""


def chat_options(model: Any) -> type[Config] | None:
    """Return the options that `load_chat_model` accepts for a model; None for one that is loaded.

    Raises:
        ConfigError: the value is no chat model.
    """
    if isinstance(model, ChatModel) and not isinstance(model, type):
        return None
    path = model.get("path") if isinstance(model, Mapping) else model
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(
            "model must be a folder, a hub id, a URL, a dict {'path': ..., **options} or an object with the method "
            f"reply, got {type(model).__name__}: {model!r:.100}."
        )
    return RemoteChatOptions if os.fspath(path).lower().startswith(("http://", "https://")) else LocalChatOptions


def load_chat_model(model: Any, **options: Any) -> ChatModel:
    """Return a chat model.

    Args:
        model: folder or hub id of a chat model, which runs in this process; the URL of an OpenAI-compatible server; a
            dict `{"path": ..., **options}` of them; or a `ChatModel`, which is returned unchanged.
        **options: fields of `LocalChatOptions` or `RemoteChatOptions`; those in a dict come first.

    Raises:
        ConfigError: an option is unknown or invalid, or the value is no chat model.

    Example:
        >>> model = load_chat_model("http://127.0.0.1:8000", name="judge")  # doctest: +SKIP
    """
    schema = chat_options(model)
    if schema is None:
        if options:
            raise ConfigError(f"options {sorted(options)} cannot be applied to {model!r:.80}; pass them to it instead.")
        loaded: ChatModel = model
        return loaded
    given = {**options, **model} if isinstance(model, Mapping) else {**options, "path": model}
    path = os.fspath(given.pop("path"))
    module, name = REMOTE if schema is RemoteChatOptions else LOCAL
    loaded = getattr(importlib.import_module(module), name)(path, **given)
    return loaded


def open_chat_model_of(
    model: Any,
    options: Mapping[str, Any],
    own: type[Schema],
    *,
    owner: str,
    defaults: Callable[[Any], Mapping[str, Any]],
) -> tuple[Schema, ChatModel, bool]:
    """Return the options of the owner of a chat model, the model, and whether it was loaded here.

    Args:
        model: argument of `load_chat_model`.
        options: options of both. Those of the owner include `timeout` and `max_retries`, which a server gets too.
        own: schema of the owner's options.
        owner: name of the owner, for error messages.
        defaults: returns other defaults of the chat model from the owner's options, and may refuse these; defaults
            that its kind does not have are left out.

    Raises:
        ConfigError: an option is unknown or invalid, or there is no such model.
    """
    schema = chat_options(model)
    rest = {name: value for name, value in options.items() if name not in own.model_fields}
    divide_settings(rest, *([] if schema is None else [schema]), owner=owner, others=[own])
    chosen: Any = parse_settings(own, {name: options[name] for name in options if name not in rest})
    others = dict(defaults(chosen))
    if schema is RemoteChatOptions:
        others |= {"timeout": chosen.timeout, "max_retries": chosen.max_retries}
    known = {} if schema is None else {name: others[name] for name in others if name in schema.model_fields}
    given = {**known, **rest}
    if "extra" in known and isinstance(given["extra"], Mapping):
        given["extra"] = {**known["extra"], **given["extra"]}
    return chosen, load_chat_model(model, **given), schema is not None


def seed_of(*parts: Any) -> int:
    """Return a seed that depends only on these plain values; 2**62 further ones can be added to it."""
    digest = hashlib.sha256(json.dumps(parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 2


def check_replies(model: Any, replies: Any, size: int) -> list[ChatReply]:
    """Return what a chat model gave for `size` conversations; anything but a `ChatReply` is an error of its row.

    Raises:
        ConfigError: it is not one reply for each conversation.
    """
    if not isinstance(replies, Sequence) or isinstance(replies, str | bytes) or len(replies) != size:
        given = f"{len(replies)} replies" if isinstance(replies, list | tuple) else f"{replies!r:.80}"
        raise ConfigError(f"{model!r:.100} gave {given} to {size} conversations; expected one ChatReply for each.")
    return [
        reply
        if isinstance(reply, ChatReply) and isinstance(reply.text, str)
        else ChatReply(error=f"the chat model gave {reply!r:.80}, expected a ChatReply with a text")
        for reply in replies
    ]


def merge_system(conversation: Conversation) -> list[Message]:
    """Return the conversation with its system message at the start of the next one, for models without that role."""
    if len(conversation) < 2 or conversation[0]["role"] != "system":
        return list(conversation)
    first = conversation[1]
    content = f"{conversation[0]['content']}\n\n{first['content']}"
    return [Message(role=first["role"], content=content), *conversation[2:]]
