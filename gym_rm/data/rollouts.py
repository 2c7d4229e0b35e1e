"""Saved rollouts of gym_rm, TRL, verl, NeMo Gym and verifiers: conversations with the rewards that they had."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gym_rm.data.formats.fields import number
from gym_rm.data.messages import refuse_rendered
from gym_rm.data.prompts import PROMPT_FIELDS, name_of
from gym_rm.data.responses_api import chat_row, messages_of_items
from gym_rm.data.rows import filled_fields, parse_line
from gym_rm.data.scored_rows import REPLY_LISTS, RowToScore, row_to_score
from gym_rm.errors import ConfigError

Row = Mapping[str, Any]
REPLIES = (*REPLY_LISTS, "chosen", "rejected", "response")
GROUPS, GRADES = ("group", "group_id", "prompt_id", "example_id"), ("right", "correct", "is_correct", "acc")
RIGHT = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}  # also the texts of csv files
FAILURES = ("error", "mask_sample", "_ng_failure_class")
TURN = re.compile(r"(?:^|\n)(system|user|assistant)\n")  # what ChatML writes before a turn, without control tokens


@dataclass(frozen=True, slots=True)
class Rollout:
    """A saved conversation, as `row` to score, and its reward, NaN if it had none or failed.

    `group` is equal for the replies to a prompt that were compared with each other. `name`, if there is one, differs in
    a group. `right` is 1.0 or 0.0 by the row's own check, and NaN without one.
    """

    row: RowToScore
    reward: float
    group: str
    name: str | None
    right: float


def read_rollout(row: Row, where: str, index: int = 0, *, weights: Mapping[str, float] | None = None) -> Rollout:
    """Read a row of a library, told by its columns (see `FORMATS`), or one of `row_to_score` with a reward.

    Args:
        row, where, index: see `row_to_score`.
        weights: of columns whose sum is the reward; one without a value is left out, as in TRL.

    Raises:
        ConfigError: the row is of none or of two of these, has several replies, or its reward is ambiguous.
    """
    found = [name for name, (columns, _) in FORMATS.items() if row.keys() >= {*columns}]
    if len(found) != 1 and (found or all(row.get(each) is None for each in (*REPLIES, "messages", "completion"))):
        known = "; ".join(f"{', '.join(columns)} ({name})" for name, (columns, _) in FORMATS.items())
        raise ConfigError(
            f"{where}: expected 'messages', or 'prompt' and 'response', or the columns of one library: {known}; got "
            f"{filled_fields(row)}. Name others as in --column response=Reply."
        )
    plain = {**row, "response": row.get("completion") if row.get("response") is None else row["response"]}
    plain["tools"] = row.get("tool_defs") if row.get("tools") is None else row["tools"]
    rewards: Row = {name: row[name] for name in ("reward", "score") if name in row}
    try:
        if found:
            fields, rewards = FORMATS[found[0]][1](row, where)
            plain = {**{key: row[key] for key in row if key not in (*PROMPT_FIELDS, *REPLIES)}, **fields}
        plain |= {name: _with_calls(plain[name]) for name in ("messages", "prompt", "response") if name in plain}
    except (LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where}: not as {', '.join(found) or 'a plain row'} has it: {error!r}.") from error
    if isinstance(plain.get("prompt"), str):
        refuse_rendered(plain["prompt"], f"{where}: the prompt")
    scored = row_to_score(plain, where, index)
    if scored.labels is not None:
        raise ConfigError(f"{where}: expected one reply; write a row for each, with 'group', 'reward' and 'right'.")
    group, right = (next((plain[n] for n in each if plain.get(n) is not None), None) for each in (GROUPS, GRADES))
    start = scored.prompt.messages
    if group is not None:  # of a dialogue, what a group has in common
        start = tuple(itertools.takewhile(lambda message: message["role"] != "assistant", start))
    return Rollout(
        row=scored,
        reward=_reward(row, rewards, weights, where),
        group=name_of([row.get("step"), row.get("phase"), group, start]),
        name=None if plain.get("rollout") is None else str(plain["rollout"]),
        right=RIGHT.get(str(right).lower(), math.nan),
    )


def _reward(row: Row, rewards: Row, weights: Mapping[str, float] | None, where: str) -> float:
    columns, named = {**row, **rewards}, weights or dict.fromkeys(rewards, 1.0)
    if (len(rewards) > 1 and not weights) or not columns.keys() >= named.keys():
        one = f"one of {[*rewards]}" if len(rewards) > 1 and not weights else f"{[*named]}, which is not a column"
        raise ConfigError(f"{where}: the reward is {one}; name a column, or several, with --reward COLUMN=WEIGHT.")
    given = {name: columns[name] for name in named if columns[name] is not None}
    terms = [named[name] * number(int(x) if isinstance(x, bool) else x, where, name) for name, x in given.items()]
    return math.fsum(terms) if terms and not any(map(row.get, FAILURES)) else math.nan


def _trl(row: Row, where: str) -> tuple[Row, Row]:
    """`GRPOTrainer.log`: a column for each reward function, then those that the functions log, then `advantage`."""
    columns = [*row][[*row].index("completion") + 1 : [*row].index("advantage")]
    rewards = {name: row[name] for name in columns if row[name] is None or type(row[name]) in (int, float)}
    return {"prompt": row["prompt"], "response": row["completion"]}, rewards


def _verl(row: Row, where: str) -> tuple[Row, Row]:
    """`RayPPOTrainer._dump_generations`: texts without control tokens; of templates, only ChatML leaves its turns."""
    prompt, said, (first, *pieces) = row["input"], row["output"], TURN.split(row["input"])
    if not first and re.fullmatch("s?(ua)+", "".join(role[0] for role in pieces[::2])):
        if "user" in TURN.findall(said):
            raise ConfigError(f"{where}: 'output' is one text of several turns; write them as 'messages'.")
        said = pieces.pop() + said  # the template may open the thinking
        prompt = [{"role": role, "content": text} for role, text in zip(pieces[::2], pieces[1::2], strict=False)]
    elif re.search(r"(assistant|model)\s*$", prompt):
        raise ConfigError(f"{where}: 'input' lacks the control tokens that separate its turns; write 'messages'.")
    return {"prompt": prompt, "response": said, "answer": row.get("gts")}, {"score": row["score"]}


def _nemo_gym(row: Row, where: str) -> tuple[Row, Row]:
    """A data row, the response of the Responses API, and what `/verify` added."""
    chat, said = chat_row(row, where), messages_of_items(row["response"]["output"], f"{where}: response.output")
    while said and said[-1]["role"] != "assistant":
        said.pop()  # results that the policy never saw
    group = [row.get(f"_ng_{name}") for name in ("task_index", "group_id", "group_attempt")]
    said = said or [{"role": "assistant", "content": ""}]
    read = {"prompt": chat["messages"], "response": said, "tools": chat["tools"], "answer": chat["answer"]}
    return {**read, "group": group, "rollout": row.get("_ng_rollout_index")}, {"reward": row.get("reward")}


def _episode(row: Row, where: str) -> tuple[Row, Row]:
    """`Episode.to_record` of verifiers 1, in `traces.jsonl`: a graph of messages, whose last branch is read."""
    traces, task = [each for each in row["traces"] if each["agent"].get("trainable", True)], row["task"]
    if len(traces) != 1:
        raise ConfigError(f"{where}: expected one trace of a trained agent, got {len(traces)}; write 'messages'.")
    (trace,), messages, at = traces, list[Any](), len(traces[0]["nodes"]) - 1
    for place, node in reversed([*enumerate(trace["nodes"])]):
        if place == at:
            messages, at = [node["message"], *messages], node.get("parent")
    parts = [each and each["score"] * each.get("weight", 1.0) for each in trace["rewards"].values()]
    reward = math.fsum(parts) if parts and None not in parts and trace["ok"] else None
    read = {"messages": messages, "tools": trace.get("tools"), "answer": task["data"].get("answer")}
    group = (row.get("group") or {}).get("id") or task.get("key") or task.get("hash")
    return {**read, "group": group, "rollout": trace["id"]}, {"reward": reward}


def _with_calls(messages: Any) -> Any:
    """Return messages with calls of tools in OpenAI's form; those of verifiers are flat, or JSON texts."""

    def call(given: Any) -> Any:
        given = parse_line(given.encode(), "tool_calls") if isinstance(given, str) else given
        function = {name: given.get(name) for name in ("name", "arguments")}
        return given if "function" in given else {"type": "function", "id": given.get("id"), "function": function}

    if not isinstance(messages, list):
        return messages
    return [{**m, "tool_calls": [*map(call, m["tool_calls"])]} if m.get("tool_calls") else m for m in messages]


FORMATS: Mapping[str, tuple[tuple[str, ...], Callable[[Row, str], tuple[Row, Row]]]] = {
    "TRL": (("step", "prompt", "completion", "advantage"), _trl),
    "verl": (("input", "output", "score"), _verl),
    "NeMo Gym": (("responses_create_params", "response"), _nemo_gym),
    "verifiers": (("task", "traces"), _episode),
}
"""Columns that a library writes, and what reads its rows: fields of a plain row, and what may be its reward."""
