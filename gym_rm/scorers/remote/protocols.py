"""What servers of rewards understand: gym_rm's own `/v1/rewards`, and vLLM's `/classify`.

A protocol turns rows into request bodies (`encode` one row, `body` several) and replies into `Scores` (`read`). It does
not send anything. Numbers in a reply are checked, because a reply is data from another program: a text, NaN or a list
of another length is never a reward, but an InvalidReply.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from gym_rm.engine.text.messages import check_conversation
from gym_rm.engine.text.tool_calls import encode_arguments
from gym_rm.errors import ConfigError, ConversationError
from gym_rm.http_client.responses import InvalidReply, first_model
from gym_rm.plain_values import to_plain
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Prompt, Provenance

Turns: TypeAlias = Literal["last", "all"]
MAX_REQUEST_BYTES = 8 * 2**20  # of servers that do not tell their limit


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says about itself.

    Attributes:
        protocol: name of its protocol.
        provenance: model and settings.
        max_request_bytes: largest request body.
        max_conversations: most conversations in one request; None for no limit.
        calibration: conversations with the rewards that the server says it gives them.
    """

    protocol: str
    provenance: Provenance
    max_request_bytes: int = MAX_REQUEST_BYTES
    max_conversations: int | None = None
    calibration: tuple[tuple[Conversation, float], ...] = ()

    @property
    def identity(self) -> tuple[str | None, ...]:
        """What servers that share the work must have in common."""
        made = self.provenance
        return (self.protocol, made.model, made.revision, made.template_hash)


Row: TypeAlias = tuple[bytes, ...]
"""Parts of one conversation in a request body."""


def pack(sizes: Sequence[int], *, max_bytes: int, max_rows: int) -> Iterator[list[int]]:
    """Yield lists of consecutive rows of these sizes in bytes, as long as both limits allow; a larger row is alone."""
    chunk: list[int] = []
    total = 0
    for row, size in enumerate(sizes):
        if chunk and (len(chunk) >= max_rows or total + size > max_bytes):
            yield chunk
            chunk, total = [], 0
        chunk.append(row)
        total += size
    if chunk:
        yield chunk


class GymRMProtocol:
    """`POST /v1/rewards` of `gym-rm serve`."""

    name = "gym_rm"
    path = "/v1/rewards"
    max_rows: int | None = None

    def encode(self, conversation: Conversation, prompt: Prompt | None) -> Row:
        """Return the conversation and its prompt as JSON."""
        row = None
        if prompt is not None:
            row = {"id": prompt.prompt_id, "answer": prompt.answer, "metadata": to_plain(prompt.metadata)}
            row |= {"tools": to_plain(list(prompt.tools))} if prompt.tools else {}
        return to_json(check_conversation(conversation)), to_json(row)

    def body(self, rows: Sequence[Row], turns: Turns) -> bytes:
        """Return the conversations and, if one of them has a prompt, the prompts."""
        conversations, prompts = (b"[" + b",".join(parts) + b"]" for parts in zip(*rows, strict=True))
        prompts = prompts if any(row[1] != b"null" for row in rows) else b"null"
        return b'{"conversations":%b,"prompts":%b,"turns":"%b"}' % (conversations, prompts, turns.encode())

    def read(self, reply: Any, rows: Sequence[Row], turns: Turns) -> Scores:
        """Return the scores; other fields than those of `Scores` are ignored."""
        plain = _fields(Scores, _mapping(reply))
        if isinstance(made := plain.get("provenance"), Mapping):
            plain["provenance"] = _fields(Provenance, made)
        try:
            scores = Scores.from_dict(plain)
        except (ConfigError, TypeError) as invalid:
            raise InvalidReply(str(invalid)) from invalid
        if len(scores) != len(rows):
            raise InvalidReply(f"expected one reward for each of the {len(rows)} conversations, got {len(scores)}")
        for row, (reward, error) in enumerate(zip(scores.rewards.tolist(), scores.errors, strict=True)):
            if error is None and not math.isfinite(reward):
                raise InvalidReply(f"row {row} has neither a reward nor an error")
            found = () if scores.turn_rewards is None else scores.turn_rewards[row]
            if error is None and turns == "all" and not (len(found) and np.isfinite(found).all()):
                raise InvalidReply(f"row {row} lacks the rewards of its turns")
        return scores.mark_failures()


def read_info(info: Any) -> Served:
    """Return what `GET /info` says. Raises InvalidReply."""
    info = _mapping(info)
    made, limits, known_scores = (_mapping(info.get(name) or {}) for name in ("provenance", "limits", "calibration"))
    model = info.get("model")
    if not isinstance(model, str):
        raise InvalidReply(f"model of /info must be a text, got {model!r:.80}")
    try:
        provenance = Provenance(**{"scorer": "unknown", "model": model, **_fields(Provenance, made)})
    except TypeError as error:
        raise InvalidReply(f"provenance of /info: {error}") from error
    conversations, rewards = known_scores.get("conversations") or [], known_scores.get("rewards") or []
    if not isinstance(conversations, list) or not isinstance(rewards, list) or len(conversations) != len(rewards):
        raise InvalidReply("calibration of /info must have one reward for each conversation")
    return Served(
        "gym_rm",
        provenance,
        max_request_bytes=_limit(limits, "max_body_bytes") or MAX_REQUEST_BYTES,
        max_conversations=_limit(limits, "max_conversations"),
        calibration=tuple(
            (one, _number(reward, "a calibration reward"))
            for one, reward in zip(conversations, rewards, strict=True)
            if reward is not None  # a verifier has none without a prompt
        ),
    )


@dataclass(frozen=True)
class VLLMProtocol:
    """`POST /classify` of `vllm serve --runner pooling`: one conversation in a request, one value without activation.

    Attributes:
        model: name of the served model.
    """

    model: str
    name = "vllm"
    path = "/classify"
    max_rows: ClassVar[int | None] = 1

    def encode(self, conversation: Conversation, prompt: Prompt | None) -> Row:
        """Return the whole request body."""
        flags = {"add_generation_prompt": False, "continue_final_message": False, "add_special_tokens": False}
        messages = [encode_arguments(message) for message in check_conversation(conversation)]
        body = {"model": self.model, "messages": messages, "use_activation": False, **flags}
        return (to_json(body),)

    def body(self, rows: Sequence[Row], turns: Turns) -> bytes:
        """Return the body of the only row."""
        return rows[0][0]

    def read(self, reply: Any, rows: Sequence[Row], turns: Turns) -> Scores:
        """Return the only value as the reward."""
        data = _mapping(reply).get("data")
        if not isinstance(data, list) or len(data) != 1:
            raise InvalidReply(f"data must have one entry, got {data!r:.80}")
        probs, index = _mapping(data[0]).get("probs"), data[0].get("index", 0)
        if type(index) is not int or index != 0:
            raise InvalidReply(f"the index of the only entry must be 0, got {index!r:.80}")
        if not isinstance(probs, list) or not probs:
            raise InvalidReply(f"probs must be a list of numbers, got {probs!r:.80}")
        if len(probs) > 1:
            raise ConfigError(
                f"the model {self.model!r} returns {len(probs)} values, and which is the reward is not known; serve it "
                "with gym-rm serve, or score it in this process."
            )
        return Scores.from_rewards([_number(probs[0], "the value of probs")])


def read_models(reply: Any) -> Served:
    """Return what vLLM's `GET /v1/models` says. Raises InvalidReply."""
    model, owner = first_model(reply)
    return Served("vllm", Provenance(owner, model))


def failed_row(error: str) -> Scores:
    """Return the scores of one row that has an error instead of a reward."""
    return Scores.from_rewards([np.nan], errors=[error])


def to_json(value: Any) -> bytes:
    """Return a value as JSON in UTF-8.

    Raises:
        ConversationError: it has other types than those of JSON, NaN, or a lone surrogate.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise ConversationError(
            f"the conversation has the lone surrogate {error.object[error.start]!r}, which is not valid UTF-8."
        ) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ConversationError(f"the conversation cannot be written as JSON: {error}.") from error


def _mapping(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidReply(f"expected a JSON object, got {value!r:.80}")
    return value


def _fields(kind: Any, told: Mapping[str, Any]) -> dict[str, Any]:
    """Return those values that are fields of a dataclass; a newer server may tell more."""
    return {each.name: told[each.name] for each in dataclasses.fields(kind) if each.name in told}


def _number(value: Any, name: str) -> float:
    try:
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an integer above the largest float
        pass
    raise InvalidReply(f"{name} must be a finite number, got {value!r:.80}")


def _limit(limits: Mapping[str, Any], name: str) -> int | None:
    value = limits.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise InvalidReply(f"{name} of /info must be a positive integer, got {value!r:.80}")
    return value
