"""Options of the server: who may call, and how much."""

from __future__ import annotations

import ipaddress
from dataclasses import asdict, dataclass
from typing import Any

from gym_rm.checks import finite, integer
from gym_rm.errors import ConfigError

MEBIBYTE = 2**20


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """Limits of requests. A request over a limit is refused with the reason.

    Attributes:
        max_body_bytes: maximum size of a request body.
        max_conversations: maximum number of conversations (or texts, or pairs) of a request.
        max_queue: maximum number of conversations that are accepted and not yet answered; more get status 429.
        max_memory_bytes: maximum memory of all requests that are read or scored at the same time. A request counts as
            16 bytes for each byte of its body and 200 for each of its JSON values; more get status 503.
        request_timeout: seconds after which an accepted request fails with status 503.
        body_timeout: seconds for the body of a request to arrive; later, it gets status 408.
        header_timeout: seconds for the headers of a request to arrive; later, the connection is closed.
        drain_timeout: seconds after SIGTERM for accepted requests to be answered.
    """

    max_body_bytes: int = 16 * MEBIBYTE
    max_conversations: int = 1024
    max_queue: int = 8192
    max_memory_bytes: int = 512 * MEBIBYTE
    request_timeout: float = 150.0
    body_timeout: float = 30.0
    header_timeout: float = 10.0
    drain_timeout: float = 30.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not name.endswith("timeout"):
                integer(name, value, minimum=1)
            elif finite(name, value) <= 0:
                raise ConfigError(f"{name} must be positive, got {value!r} seconds.")

    def to_dict(self) -> dict[str, Any]:
        """Return the limits by name, for `/info`."""
        return {**asdict(self), "max_conversations": self.most_conversations}

    @property
    def most_conversations(self) -> int:
        """Maximum number of conversations of a request; one that is larger than the queue would never be accepted."""
        return min(self.max_conversations, self.max_queue)


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Options of `make_app`.

    Attributes:
        key: required as `Authorization: Bearer KEY`, or as the password of the URL `http://any:KEY@host:port/...`;
            None for no key.
        limits: limits of requests.
        policy_tokenizer: the policy's tokenizer, or its folder or hub id, for `/get_reward`, `/slime` and
            `/llamafactory`; None if they get no rendered texts.
        apply_chat_template: same as OpenRLHF's `--data.apply_chat_template`, but the default is True.
        fallback_reward: reward of a sample of these routes that cannot be scored; OpenRLHF's log `score_ok` is 0. None
            makes it an error.
        max_batch_size: number of conversations at which a batch is complete, see `MicroBatchingScorer`.
        max_wait: seconds that the first request of a batch waits for others while the scorer is idle.
        allow_weight_updates: whether `POST /v1/weights` may replace the weights; needs a key.
    """

    key: str | None = None
    limits: ServerLimits = ServerLimits()
    policy_tokenizer: Any = None
    apply_chat_template: bool = True
    fallback_reward: float | None = None
    max_batch_size: int = 1024
    max_wait: float = 0.005
    allow_weight_updates: bool = False

    def __post_init__(self) -> None:
        if self.key is not None and (not isinstance(self.key, str) or not self.key.strip()):
            raise ConfigError("key is empty; pass a text that is hard to guess, or no key.")
        if self.fallback_reward is not None:
            finite("fallback_reward", self.fallback_reward)
        if self.allow_weight_updates and self.key is None:
            raise ConfigError("allow_weight_updates needs a key, because a caller could load another model; pass one.")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_host(host: str, key: str | None) -> None:
    """Raise ConfigError if other machines can reach the address and there is no key."""
    if key is None and not is_loopback(host):
        raise ConfigError(
            f"key is missing, but host={host!r} can be reached from other machines; pass a key, or listen on 127.0.0.1."
        )
