"""What servers of rewards understand: gym_rm's own `/v1/rewards`, and the `/classify` of vLLM and SGLang.

A protocol turns rows into request bodies (`encode` one row, `body` several) and replies into `Scores` (`read`). It does
not send anything. Numbers in a reply are checked, because a reply is data from another program: a text, NaN or a list
of another length is never a reward, but an InvalidReply.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np

from gym_rm.engine.text.control_tokens import spaced_messages
from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.messages import check_conversation
from gym_rm.engine.text.renderer import Renderer, Turns
from gym_rm.errors import ConfigError, ConversationError, warn_once
from gym_rm.http_client.responses import InvalidReply, first_model
from gym_rm.plain_values import to_plain
from gym_rm.scorer import lock_open_after_fork
from gym_rm.scores import Scores
from gym_rm.types import Conversation, Fidelity, Prompt, Provenance

MAX_REQUEST_BYTES = 8 * 2**20  # of servers that do not tell their limit
_rendering = lock_open_after_fork()  # threads must not use a tokenizer at the same time


@dataclass(frozen=True, slots=True)
class Served:
    """What a server says about itself.

    Attributes:
        protocol: name of its protocol.
        provenance: model and settings.
        max_request_bytes: largest request body.
        max_conversations: most conversations in one request; None for no limit.
        calibration: conversations with the rewards that the server says it gives them.
        root, max_length: what vLLM or SGLang loaded, and most tokens of a text; None if it is not told.
    """

    protocol: str
    provenance: Provenance
    max_request_bytes: int = MAX_REQUEST_BYTES
    max_conversations: int | None = None
    calibration: tuple[tuple[Conversation, float], ...] = ()
    root: str | None = None
    max_length: int | None = None

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

    path = "/v1/rewards"
    renderer = None

    def encode(self, conversation: Conversation, prompt: Prompt | None, turns: Turns) -> Row:
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
        fields = {"scorer": "unknown", "model": model, **_fields(Provenance, made)}
        if isinstance(told := fields.get("fidelity"), Mapping):
            fields["fidelity"] = Fidelity(**_fields(Fidelity, told))
        provenance = Provenance(**fields)
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
class ClassifyProtocol:
    """`POST /classify` of vLLM and SGLang: one value of each text, without activation.

    Attributes:
        served: the server.
        renderer: writes token ids, so that no message forges a turn; None sends messages, with spaced control tokens.
    """

    served: Served
    renderer: Renderer | None
    path: ClassVar[str] = "/classify"

    def encode(self, conversation: Conversation, prompt: Prompt | None, turns: Turns) -> Row:
        """Return the token ids up to each turn, or the whole request body."""
        if self.renderer is None:
            if turns != "last":
                raise ConfigError(f"turns must be 'last' without the tokenizer, got {turns!r}; pass tokenizer=.")
            return (self.question(conversation),)
        with _rendering:
            (row,) = self.renderer.encode_turns([conversation], [prompt.tools if prompt else ()], turns=turns)
        if isinstance(row, ConversationError):
            raise row
        return tuple(to_json(each.input_ids.tolist()) for each in row)

    def question(self, conversation: Conversation) -> bytes:
        """Return a body with messages, which vLLM's `/tokenize` reads too."""
        messages = spaced_messages(check_conversation(conversation))
        asked = {"model": self.served.provenance.model, "messages": messages, "use_activation": False}
        return to_json({**asked, "add_generation_prompt": False, "add_special_tokens": False})

    def body(self, rows: Sequence[Row], turns: Turns) -> bytes:
        """Return the token ids of all rows, or the body of the only row."""
        if self.renderer is None:
            return rows[0][0]
        ids = b",".join(itertools.chain.from_iterable(rows))
        if self.served.protocol == "sglang":
            return b'{"input_ids":[%b]}' % ids
        return b'{"model":%b,"use_activation":false,"input":[%b]}' % (to_json(self.served.provenance.model), ids)

    def read(self, reply: Any, rows: Sequence[Row], turns: Turns) -> Scores:
        """Return the scores; the reward of a row is its last value."""
        data, name = (_mapping(reply).get("data"), "probs") if self.served.protocol == "vllm" else (reply, "embedding")
        entries = [_mapping(each) for each in data] if isinstance(data, list) else []
        places = [each.get("index", place) for place, each in enumerate(entries)]
        ends = np.cumsum([len(row) for row in rows])
        if not all(type(each) is int for each in places) or sorted(places) != [*range(ends[-1])]:
            raise InvalidReply(f"data must have an entry with an index for each of {ends[-1]} texts, got {data!r:.80}")
        values, lengths = np.zeros(len(entries)), [part.count(b",") + 1 for row in rows for part in row]
        values[places] = [self._value(each.get(name)) for each in entries]
        if self.renderer is None:
            lengths = [_limit(_mapping(reply.get("usage") or {}), "prompt_tokens") or 0]
        of_turns = tuple(np.split(values, ends[:-1])) if turns == "all" else None
        scores = Scores.from_rewards(values[ends - 1])
        return dataclasses.replace(scores, num_tokens=np.array(lengths)[ends - 1], turn_rewards=of_turns)

    def _value(self, values: Any) -> float:
        if isinstance(values, list) and len(values) > 1:
            raise ConfigError(f"{self.served.provenance.model!r} has {len(values)} values, not one: use gym-rm serve.")
        return _number(values[0] if isinstance(values, list) and values else None, "the value of a text")


def classify_protocol(served: Served, source: str | None) -> ClassifyProtocol:
    """Return how to ask vLLM or SGLang; raise ConfigError if a tokenizer is given or needed and cannot be opened."""
    missing: object = "tokenizer='server'"
    if source != "server":
        from gym_rm.engine.loading.files import check_tokenizer  # imports transformers, which is slow

        try:
            tokenizer = check_tokenizer(source or served.root)
            encoder = bool(tokenizer.cls_token and tokenizer.chat_template)  # without one, it reads pairs of texts
            made = Renderer(tokenizer, input_format=InputFormat(encoder=encoder), max_length=served.max_length)
            return ClassifyProtocol(served, made)
        except ConfigError as error:
            if source is not None:
                raise
            missing = error
    if served.protocol == "sglang":
        raise ConfigError(f"SGLang needs token ids; pass tokenizer=, a folder or hub id ({missing}).")
    warn_once(
        f"{served.provenance.model!r} gets messages, not token ids ({missing}). Common control tokens in them get "
        "spaces, but others can forge a turn, and tools are left out; pass tokenizer=, a folder or hub id."
    )
    return ClassifyProtocol(dataclasses.replace(served, max_conversations=1), None)


def read_models(reply: Any) -> Served:
    """Return what `GET /v1/models` of vLLM or SGLang says. Raises InvalidReply."""
    model, owner = first_model(reply)
    told, protocol = reply["data"][0], "sglang" if owner == "sglang" else "vllm"
    root, length = str(told.get("root") or model), _limit(told, "max_model_len")
    return Served(protocol, Provenance(owner, model), root=root, max_length=length)


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
        raise InvalidReply(f"{name} must be a positive integer, got {value!r:.80}")
    return value
