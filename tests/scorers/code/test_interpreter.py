"""`CodeInterpreter`: code blocks of replies are executed, and episodes keep their variables."""

import json
import os
import signal

import gymnasium as gym
import pytest
from conftest import assistant, user
from sandbox.test_sandbox import children as descendants

from gym_rm.errors import ConfigError
from gym_rm.scorers.code.interpreter import CodeInterpreter
from gym_rm.types import Prompt

PROMPT = Prompt((user("?"),), "p")


@pytest.fixture
def interpreter():
    run = CodeInterpreter(allow_unsafe=True, timeout=1.0, num_workers=2)
    yield run
    run.close()


def chat(run, *replies, prompt=PROMPT):
    """Return the results of one episode, and its conversation."""
    conversation, results = [*prompt.messages], []
    for reply in replies:
        conversation = [*conversation, assistant(reply)]
        results += run([conversation], [prompt], None)
        conversation = [*conversation, user(results[-1] or "")]
    return results


@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("1 + 1", "<result>2</result>"),
        ("x = 1", "<result></result>"),
        ("print('a')", "<result>a</result>"),
        ("print('a')\n5", "\n\n<result>\na\n5\n</result>"),
        ("'text'", "<result>text</result>"),
        ("class A:\n    def __str__(self): return 'an a'\nA()", "<result>an a</result>"),
        ("1 / 0", "<result>ZeroDivisionError: division by zero</result>"),
        ("1 1", "<result>SyntaxError: invalid syntax (<code>, line 1)</result>"),
        ("import sys\nprint('e', file=sys.stderr)", "<result>e</result>"),
    ],
)
def test_results_have_the_form_of_nemo(interpreter, code, result):
    assert chat(interpreter, f"I run <code>{code}</code>") == [result]


def test_every_value_is_a_result_that_an_environment_accepts(interpreter):
    assert chat(interpreter, "<code>10 ** 5000</code>")[0].startswith("<result>1000")
    assert chat(interpreter, "<code>'\\ud800'</code>") == ["<result>?</result>"]
    assert "characters are left out" in chat(interpreter, "<code>'x' * 10 ** 6</code>")[0]


def test_code_in_thinking_is_not_executed(interpreter):
    assert chat(interpreter, "<think><code>1 / 0</code></think><code>2</code>") == ["<result>2</result>"]
    assert interpreter.blocks_of("<think><code>1 / 0</code>") == []


def test_math_with_tools_needs_only_the_responder(interpreter):
    def right(conversations, prompts):
        return [float(p.answer in c[-1]["content"]) for c, p in zip(conversations, prompts, strict=True)]

    envs = gym.make_vec(
        "RewardModel-v0",
        num_envs=2,
        reward_model=right,
        prompts=[{"prompt": "17 * 23?", "answer": 391}],
        respond=interpreter,
        reward_on="end",
    )
    envs.reset(seed=0)
    observations, _, terminations, _, _ = envs.step(["<code>17 * 23</code>", "<code>17 * 24</code>"])
    assert [each[-1]["content"] for each in observations] == ["<result>391</result>", "<result>408</result>"]
    _, rewards, terminations, _, _ = envs.step(["It is 391.", "It is 408."])
    assert rewards.tolist() == [1, 0]
    assert terminations.all()
    envs.close()


def test_a_reply_without_code_ends_the_episode(interpreter):
    assert chat(interpreter, "<code>x = 2</code> then <code>x + 1</code>", "```python\nx\n```") == [
        "<result>3</result>",
        None,
    ]


def test_variables_persist_in_each_of_many_episodes(interpreter):
    prompts = [Prompt((user(f"question {k}"),), str(k)) for k in range(5)]
    first = [[*p.messages, assistant(f"<code>x = {k}</code>")] for k, p in enumerate(prompts)]
    results = interpreter(first, prompts, None)
    second = [[*c, user(r), assistant("<code>x * 10</code>")] for c, r in zip(first, results, strict=True)]
    assert interpreter(second[::-1], prompts[::-1], None) == [f"<result>{10 * k}</result>" for k in range(5)][::-1]


def test_a_branch_of_an_episode_starts_from_the_state_before_it(interpreter):
    first = [*PROMPT.messages, assistant("<code>x = 1</code>")]
    interpreter([first], [PROMPT], None)
    change = [*first, user("<result></result>"), assistant("<code>x += 1\nx</code>")]
    assert [interpreter([change], [PROMPT], None) for _ in range(3)] == [["<result>2</result>"]] * 3


def test_sessions_that_were_evicted_are_rebuilt_from_the_conversation(monkeypatch):
    monkeypatch.setattr("gym_rm.scorers.code.interpreter.MOST_SESSIONS", 0)
    before = descendants()
    run = CodeInterpreter(allow_unsafe=True, num_workers=1)
    assert chat(run, "<code>x = 20</code>", "<code>x += 1</code>", "<code>x * 2</code>")[-1] == "<result>42</result>"
    run.close()
    assert not descendants() - before


def test_a_session_that_was_killed_is_rebuilt():
    before = descendants()
    run = CodeInterpreter(allow_unsafe=True, num_workers=1)
    first = [*PROMPT.messages, assistant("<code>x = 20</code>")]
    assert run([first], [PROMPT], None) == ["<result></result>"]
    for pid in descendants() - before:
        os.kill(pid, signal.SIGKILL)
    assert run([[*first, user("<result></result>"), assistant("<code>x + 1</code>")]], [PROMPT], None) == [
        "<result>21</result>"
    ]
    run.close()


def test_an_endless_loop_costs_its_limit_and_loses_only_its_block(interpreter):
    results = chat(interpreter, "<code>x = 5</code>", "<code>x = 6\nwhile True: pass</code>", "<code>x</code>")
    assert "TimeoutError" in results[1]
    assert results[2] == "<result>5</result>"
    rows = [[*PROMPT.messages, assistant(f"<code>{code}</code>")] for code in ("while True: pass", "1", "2", "3")]
    assert interpreter(rows, [PROMPT] * 4, None)[1:] == [f"<result>{k}</result>" for k in (1, 2, 3)]


def python(code):
    return f'<tool_call>{{"name": "python", "arguments": {json.dumps({"code": code})}}}</tool_call>'


def test_as_a_tool_it_keeps_the_variables_of_each_episode(interpreter, monkeypatch):
    opened = []
    session = interpreter._sandbox.session
    monkeypatch.setattr(interpreter._sandbox, "session", lambda limits: opened.append(1) or session(limits))
    envs = gym.make_vec(
        "RewardModel-v0",
        num_envs=2,
        reward_model=lambda conversations: [0.0] * len(conversations),
        prompts=[{"prompt": "?", "user_turns": ["And?"]}],
        tools=[interpreter.python, "calculator"],
        tool_options={"max_calls": 5},
    )
    envs.reset(seed=0)
    other = '<tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>'
    envs.step([f"{python('x = 1')}{other}{python('x += 1')}", python("x = 10\nprint('Error: no')\n1 / 0")])
    envs.step(["Well.", python("while True: x = 11")])
    results = envs.step([python("x") + python("x = 5") + other, python("x")])[0]
    assert results[0][-2:] == [
        {"role": "tool", "tool_call_id": "call00005", "name": "python", "content": ""},
        {"role": "tool", "tool_call_id": "call00006", "name": "calculator", "content": results[0][-1]["content"]},
    ]
    assert "used up" in results[0][-1]["content"]
    assert results[0][-3]["content"] == "2"
    assert "TimeoutError" in results[1][-3]["content"]
    assert results[1][-1]["content"] == "10"
    assert len(opened) == 3  # the second episode lost its process once
    envs.close()


def test_a_result_of_the_tool_has_at_most_the_given_length():
    run = CodeInterpreter(allow_unsafe=True, num_workers=1, max_result_length=200)
    text = run.python("print('a' * 1000)", conversation=PROMPT.messages, prompt=PROMPT)
    assert len(text) <= 200
    assert "characters are left out" in text
    run.close()


def test_the_tool_by_name_is_closed_with_the_environment():
    before = descendants()
    settings = {"reward_model": lambda conversations: [0.0] * len(conversations), "prompts": ["?"]}
    try:
        envs = gym.make_vec("RewardModel-v0", num_envs=1, tools=["python"], **settings)
    except ConfigError as error:
        pytest.skip(str(error))
    envs.reset(seed=0)
    (observation,), *_ = envs.step([python("6 * 7")])
    assert observation[-1]["content"] == "42"
    envs.close()
    assert not descendants() - before


def test_episodes_of_an_environment_run_code_and_are_graded_at_their_end():
    row = {"prompt": "Write double(x).", "test_list": ["assert double(2) == 4"]}
    envs = gym.make_vec(
        "Code-v0", num_envs=2, prompts=[row], execute=True, reward_on="end", allow_unsafe=True, num_workers=2
    )
    envs.reset(seed=0)
    observations, rewards, terminations, _, _ = envs.step(["I try <code>2 * 4</code>", "<code>print(1 / 0)</code>"])
    assert [each[-1]["content"] for each in observations] == [
        "<result>8</result>",
        "<result>ZeroDivisionError: division by zero</result>",
    ]
    assert not terminations.any()
    answer = "```python\ndef double(x):\n    return {} * x\n```"
    _, rewards, terminations, _, _ = envs.step([answer.format(2), answer.format(3)])
    assert rewards.tolist() == [1, 0]
    assert terminations.all()
    envs.close()


@pytest.mark.parametrize("options", [{"timeout": 0}, {"limits": {"no": 1}}])
def test_invalid_options_are_refused(options):
    with pytest.raises(ConfigError):
        CodeInterpreter(allow_unsafe=True, **options)
