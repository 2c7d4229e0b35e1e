"""Items of OpenAI's Responses API, in which NeMo Gym writes its data rows and replies, as messages and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from gym_rm.engine.text.tool_calls import decode_arguments, encode_arguments, renumber
from gym_rm.errors import ConfigError
from gym_rm.types import Message, Prompt

TEXT_PARTS = ("input_text", "output_text", "summary_text", "reasoning_text", "text")
ANSWERS = ("expected_answer", "answer", "ground_truth")
"""Fields with the reference answer in the rows of NeMo Gym's servers; the first one that a row has counts."""


def messages_of_items(items: Any, where: str) -> list[Message]:
    """Return the messages of `input` or `output`: a text, or a list of items.

    Reasoning, text and function calls between two other items are one message of the assistant. Arguments of calls that
    are a JSON object become a mapping, others stay the text that came.

    Raises:
        ConfigError: an item has another type, or content other than text; the message names the item.
    """
    if isinstance(items, str):
        return [Message(role="user", content=items)]
    if not isinstance(items, list):
        raise ConfigError(f"{where} must be a text or a list of items, got {items!r:.100}.")
    messages: list[dict[str, Any]] = []
    functions: dict[str, str] = {}  # names by the id of the call
    for index, item in enumerate(items):
        place = f"{where}[{index}]"
        if not isinstance(item, Mapping):
            raise ConfigError(f"{place} must be an item of the Responses API, got {item!r:.100}.")
        kind, role, call_id = item.get("type", "message"), item.get("role"), str(item.get("call_id"))
        if kind == "message" and role in ("user", "system", "developer"):
            # Chat templates know no developer, which is OpenAI's later name for the system.
            role = "user" if role == "user" else "system"
            messages.append({"role": role, "content": _text(item.get("content"), place)})
            continue
        if kind == "function_call_output":
            name = {"name": functions[call_id]} if call_id in functions else {}
            content = _text(item.get("output"), place)
            messages.append({"role": "tool", "tool_call_id": call_id, **name, "content": content})
            continue
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        reply = messages[-1]
        if kind == "reasoning":
            thought = _text(item.get("summary") or item.get("content"), place)
            reply["reasoning_content"] = reply.get("reasoning_content", "") + thought
        elif kind == "function_call":
            functions[call_id] = str(item.get("name"))
            function = {"name": functions[call_id], "arguments": item.get("arguments")}
            reply.setdefault("tool_calls", []).append({"type": "function", "id": call_id, "function": function})
        elif (kind, role) == ("message", "assistant"):
            reply["content"] += _text(item.get("content"), place)
        else:
            raise ConfigError(f"{place} is {kind!r:.40} of the role {role!r:.40}, which is not supported.")
    return [cast(Message, decode_arguments(message)) for message in messages]


def items_of_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages as items of `input` or `output`, each with its `type`."""
    items: list[dict[str, Any]] = []
    for index, message in enumerate(map(encode_arguments, renumber(messages))):
        role, content = message["role"], message["content"]
        if role == "tool":
            items.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": content})
        elif role != "assistant":
            items.append({"type": "message", "role": role, "content": content})
        else:
            if thought := message.get("reasoning_content"):
                summary = [{"type": "summary_text", "text": thought}]
                items.append({"type": "reasoning", "id": f"rs_{index}", "summary": summary})
            if content or not message.get("tool_calls"):
                parts = [{"type": "output_text", "text": content, "annotations": []}]
                said = {"type": "message", "role": role, "status": "completed", "content": parts}
                items.append({**said, "id": f"msg_{index}"})
            for call in message.get("tool_calls") or ():
                items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return items


def chat_row(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a data row of NeMo Gym with the fields that `load_prompts` reads; all fields of the row are kept.

    Raises:
        ConfigError: `responses_create_params` has no input that can be read.
    """
    params = row.get("responses_create_params")
    if not isinstance(params, Mapping) or "input" not in params:
        raise ConfigError(f"{where}: responses_create_params must have an input, got {params!r:.100}.")
    messages = messages_of_items(params["input"], f"{where}: responses_create_params.input")
    if instructions := params.get("instructions"):
        messages.insert(0, Message(role="system", content=str(instructions)))
    answers = [row[field] for field in ANSWERS if row.get(field) is not None]
    named = {"prompt_id": str(row["_ng_task_index"])} if row.get("_ng_task_index") is not None else {}
    return {**row, **named, "messages": messages, "tools": params.get("tools") or [], "answer": (answers or [None])[0]}


def create_params(prompt: Prompt) -> dict[str, Any]:
    """Return the `responses_create_params` of a prompt: those of its data row, or the messages and tools."""
    given = prompt.metadata.get("responses_create_params")
    if isinstance(given, Mapping):
        return {name: value for name, value in given.items() if value is not None}
    empty = {"type": "object", "properties": {}}
    tools = [{"type": "function", "strict": False, "parameters": empty, **tool["function"]} for tool in prompt.tools]
    return {"input": items_of_messages(prompt.messages), "tools": tools}


def _text(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content if isinstance(content, list) else [content]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text" if kind in TEXT_PARTS else "refusal") if kind in (*TEXT_PARTS, "refusal") else None
        if not isinstance(text, str):
            raise ConfigError(f"{where} has content that is no text: {part!r:.100}.")
        texts.append(text)
    return "".join(texts)
