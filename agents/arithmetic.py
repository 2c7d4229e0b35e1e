"""A task for `gym-rm grpo` with a tool: arithmetic that the policy cannot do, and a calculator that it may call.

    gym-rm agent arithmetic outputs/arithmetic   # writes the prompts and a policy; two minutes
    gym-rm grpo --config tool                    # learns to call the calculator
    gym-rm grpo --config tool env.tools=null     # without it

One question in five asks for the largest or smallest of three numbers, which the embedded policy can answer; the others
are sums of three numbers. The policy is the embedded one after it has read the dialogues of a careless user of a
calculator, who often answers without it (and wrong), mistypes numbers, or writes calls that cannot be read. The result
is usually copied into the answer. Only the last answer is rewarded; nothing rewards a call. (Expressions begin with a
space, because the vocabulary has the numbers with one.)
"""

from __future__ import annotations

import functools
import json
import random
import sys
from pathlib import Path
from typing import Any

import torch
from short_programs import imitate

from gym_rm.data.prompts import load_prompts
from gym_rm.data.tools import UNREADABLE
from gym_rm.envs.tools.formats import hermes

# Calls and results in the format of Hermes and Qwen; only the names and arguments of the tools, for a small vocabulary.
TEMPLATE = """\
{%- if tools -%}
  {{- '<|im_start|>system\\n<tools>' -}}
  {%- for tool in tools -%}
    {{- ' ' + tool.function.name + '(' + tool.function.parameters.properties | join(', ') + ')' -}}
  {%- endfor -%}
  {{- '</tools><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'tool' -%}
    {{- '<|im_start|>user\\n<tool_response> ' + message.content + ' </tool_response>' -}}
  {%- else -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content -}}
    {%- for call in message.tool_calls or [] -%}
      {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
      {{- call.function.arguments | tojson + '}\\n</tool_call>' -}}
    {%- endfor -%}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
CALCULATOR = {"name": "calculator", "parameters": {"properties": {"expression": {"type": "string"}}}}
TOOLS = [{"type": "function", "function": CALCULATOR}]
COMPARISONS = load_prompts(None)
NUM_PROMPTS, EASY = 512, 0.2
RIGHT, MISTYPED, BROKEN = 0.2, 0.2, 0.15  # calls of the careless user; otherwise it answers without one
COPIED, KNOWN, REPEATED = 0.9, 0.8, 0.5
STEPS, CAREFUL_STEPS, BATCH_SIZE, LEARNING_RATE = 550, 400, 16, 4e-3


def question(rng: random.Random, *, easy: float = EASY) -> tuple[str, str | None, int]:
    """Return a question, the expression that it asks for (None: it asks to compare three numbers), and its answer."""
    if rng.random() < easy:
        prompt = rng.choice(COMPARISONS)
        return prompt.messages[-1]["content"], None, int(prompt.answer or 0)
    while True:
        numbers = [rng.randint(10, 79) for _ in range(3)]
        if sum(numbers) <= 99:
            text = " + ".join(map(str, numbers))
            return f"What is {text}?", text, sum(numbers)


def call_of(text: str) -> str:
    """Return a call of the calculator as the policy writes it."""
    arguments = json.dumps({"expression": f" {text}"})
    return f'<tool_call>\n{{"name": "calculator", "arguments": {arguments}}}\n</tool_call>'


def mistyped(text: str, rng: random.Random) -> str:
    """Return a sum in which one of the numbers is another one."""
    numbers = [int(number) for number in text.split(" + ")]
    numbers[rng.randrange(3)] += rng.choice((-10, -1, 1, 10))
    return " + ".join(map(str, numbers))


def broken(call: str, rng: random.Random) -> str:
    """Return a call that cannot be read."""
    return rng.choice([call.replace('"}}', '"}'), call.replace('"}}', "}}"), call.replace('"arg', "arg")])


def answer(value: int, rng: random.Random, *, right: float) -> dict[str, Any]:
    """Return an answer, which is right with this probability."""
    return {"role": "assistant", "content": f"It is {value if rng.random() < right else rng.randint(10, 99)}."}


def dialogue(rng: random.Random, *, careful: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return a dialogue of a user of a calculator, and its tools: in one of five there are none."""
    tools = TOOLS if rng.random() < 0.8 else None
    text, used, value = question(rng, easy=EASY if tools else 0.5)
    asked = {"role": "user", "content": text}
    luck = rng.random() * (RIGHT if careful else 1.0)
    if used is None or tools is None or luck > RIGHT + MISTYPED + BROKEN:
        return [asked, answer(value, rng, right=KNOWN if used is None else 0.0)], tools
    said = [asked]
    if luck > RIGHT + MISTYPED:
        call = broken(call_of(used), rng)
        said += [{"role": "assistant", "content": call}]
        if rng.random() > REPEATED:
            return said, tools
        said += [{"role": "user", "content": UNREADABLE + hermes(call).problems[0]}]
    elif luck > RIGHT:
        used = mistyped(used, rng)
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": f" {used}"}}}
    return [
        *said,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str(eval(used))},
        answer(eval(used), rng, right=1.0 if careful else COPIED),
    ], tools


def tokens_of(
    tokenizer: Any, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> tuple[list[int], list[int]]:
    """Return the tokens of a dialogue and its labels: what the assistant wrote, -100 elsewhere."""
    write = functools.partial(tokenizer.apply_chat_template, tools=tools, return_dict=False)
    tokens, labels = write(messages), []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(write(messages[:number], add_generation_prompt=True))
            end = len(write(messages[: number + 1])) - 1  # without the line break after its end token
            labels += [-100] * (start - len(labels)) + tokens[start:end]
    return tokens, labels + [-100] * (len(tokens) - len(labels))


def write_prompts(path: Path, rng: random.Random) -> None:
    asked = [question(rng) for _ in range(NUM_PROMPTS)]
    rows = [{"prompt": text, "answer": value} for text, _, value in asked]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    write_prompts(folder / "prompts.jsonl", random.Random(1))
    rng = random.Random(2)

    def example(tokenizer: Any, step: int) -> tuple[list[int], list[int]]:
        return tokens_of(tokenizer, *dialogue(rng, careful=step < CAREFUL_STEPS))

    imitate(
        folder / "policy", example, steps=STEPS, batch_size=BATCH_SIZE, learning_rate=LEARNING_RATE, template=TEMPLATE
    )
    print(f"wrote {folder}; train with: gym-rm grpo --config tool")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
