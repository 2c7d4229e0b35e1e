import contextlib
import copy
import gc
import os
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import rows, user
from sandbox.test_sandbox import children as descendants
from sandbox.test_sandbox import gone

import gym_rm
from gym_rm.errors import ConfigError
from gym_rm.sandbox import SandboxError
from gym_rm.scorers.math import formulas
from gym_rm.scorers.math.scorer import VERDICTS, MathScorer
from gym_rm.scores import ScoringError
from gym_rm.testing import check_scorer
from gym_rm.types import Prompt
from tests.scorers.code.test_scorer import killing


def grade(scorer, *pairs, **metadata):
    """Return the scores of (reference, reply) pairs, also if some are missing."""
    conversations = [[user("?"), {"role": "assistant", "content": reply}] for _, reply in pairs]
    prompts = [Prompt((user("?"),), "p", answer=answer, metadata=metadata) for answer, _ in pairs]
    try:
        return scorer.score(conversations, prompts)
    except ScoringError as error:
        return error.scores


def verdicts(scorer, *pairs, **metadata):
    return grade(scorer, *pairs, **metadata).infos["verdict"].tolist()


def box(text):
    return f"It is \\boxed{{{text}}}."


def test_it_keeps_the_contract_of_scorers():
    check_scorer(MathScorer())


def test_verdicts_and_answers_are_in_the_infos():
    scores = grade(MathScorer(), ("4", "It is 4."), ("4", "It is 5."), ("4", "No idea."), ("4", box("\\frac{1}{")))
    assert scores.rewards.tolist() == [1, 0, 0, 0]
    assert scores.infos["verdict"].tolist() == ["right", "wrong", "no_answer", "unparsable"]
    assert scores.infos["extracted_answer"].tolist()[:3] == ["4", "5", None]


def test_thinking_is_not_graded():
    replies = ("<think>5</think>It is 4", "5</think>It is 4", "<think>It is 4", "<think>It is 4</think>", "4 `<think>`")
    pairs = [("4", reply) for reply in replies]
    assert verdicts(MathScorer(), *pairs) == ["right", "right", "no_answer", "no_answer", "right"]
    assert verdicts(MathScorer(judged="all"), *pairs)[2] == "right"
    tags = {"tags": ["<plan>", "</plan>"], "opened": True}
    assert verdicts(MathScorer(thinking=tags), ("4", "5</plan>4"), ("4", "4")) == ["right", "no_answer"]


def test_thinking_in_a_field_is_not_graded():
    fields = [{"content": "4"}, {"content": ""}, {"content": None}]
    turns = [{"role": "assistant", **each, "reasoning_content": "It is 5, no 4"} for each in fields]
    prompt = Prompt((user("?"),), "p", answer="4")
    scores = MathScorer(thinking="opened").score([[user("?"), turn] for turn in turns], [prompt] * 3)
    assert scores.infos["verdict"].tolist() == ["right", "no_answer", "no_answer"]


def test_only_the_last_assistant_turn_is_graded():
    conversation = [
        user("?"),
        {"role": "assistant", "content": "4"},
        user("Sure?"),
        {"role": "assistant", "content": "5"},
    ]
    scores = MathScorer().score([conversation, conversation[:3]], [Prompt((user("?"),), "p", answer="4")] * 2)
    assert scores.rewards.tolist() == [0, 1]


@pytest.mark.parametrize("answer", [None, "", "\\frac{1", "}{", "9" * 5000])
def test_a_reference_that_is_missing_or_cannot_be_parsed_is_a_failed_row(answer):
    scores = grade(MathScorer(), (answer, "4"), ("4", "4"))
    assert "reference answer" in scores.errors[0]
    assert scores.rewards_or_none() == [None, 1.0]


def test_references_may_be_worked_solutions():
    golds = ["2 + 2 = <<2+2=4>>4\n#### 4", "We add.\nSo \\boxed{4}.", "Add both.\nAnswer: 4", "$4$", "4.0"]
    assert verdicts(MathScorer(), *[(gold, "It is 4.") for gold in golds]) == ["right"] * 5


def test_other_right_answers_may_be_in_the_metadata():
    for others in (["5"], np.array(["5"])):
        assert verdicts(MathScorer(), ("4", "5"), ("4", "6"), answers=others) == ["right", "wrong"]


def test_choice_needs_a_letter_as_reference():
    assert "not the letter of a choice" in grade(MathScorer(style="choice"), ("7", "C")).errors[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"style": "boxes"}, "style must be one of"),
        ({"timeout": 0}, "timeout must be greater than 0"),
        ({"num_workers": 0}, "num_workers must be an integer of at least 1"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        gym_rm.load_scorer({"kind": "math", **options})


def test_every_gsm8k_reply_gets_the_grade_of_its_authors():
    pytest.importorskip("math_verify")  # one reply ends in a product
    data = rows("gsm8k_graded")
    graded = [(row["answer"], each["text"], each["correct"]) for row in data for each in row["solutions"]]
    given = grade(MathScorer(), *[each[:2] for each in graded]).rewards
    assert [row for row, each in enumerate(graded) if given[row] != each[2]] == []


def test_every_gsm8k_solution_of_the_training_split_is_right():
    data = rows("gsm8k_train")
    scores = grade(MathScorer(), *[(row["answer"], f"{row['worked']}\n#### {row['answer']}") for row in data])
    assert scores.rewards.min() == 1.0
    wrong = grade(MathScorer(), *[(row["answer"], f"{row['worked']}\nAnswer: 0.5") for row in data[:500]])
    assert wrong.rewards.max() == 0.0


@pytest.fixture(scope="module")
def scorer():
    pytest.importorskip("math_verify")
    made = MathScorer(num_workers=2, timeout=5.0)
    yield made
    made.close()


def pairs_of(file):
    """Yield the reference, the reply and the reward of a table. A cell of answers is the content of a box."""
    for line in Path(__file__).with_name(file).read_text(encoding="utf-8").splitlines()[1:]:
        gold, *cells = line.replace("⏎", "\n").split(" ;; ")
        for cell in cells:
            reply = cell.lstrip("~")
            is_whole = file == "reply_pairs.txt" or cell.startswith("~")
            yield gold, reply[1:] if is_whole else f"So it is $\\boxed{{{reply[1:]}}}$.", float(reply[0] == "=")


@pytest.mark.parametrize("file", ["answer_pairs.txt", "reply_pairs.txt"])
def test_answers_and_replies_of_many_kinds_are_graded_as_the_grammar_says(scorer, file):
    """Tables of 2,500 pairs: units, powers, denials, intervals, sets, letters, words, statements, languages, ..."""
    table = [*pairs_of(file)]
    rewards = grade(scorer, *[(gold, reply) for gold, reply, _ in table]).rewards.tolist()
    assert len(table) > 1200
    assert [each for each, reward in zip(table, rewards, strict=True) if reward != each[2]] == []


@pytest.mark.parametrize(("evaluated", "verdict"), [(None, "wrong"), (True, "wrong"), (False, "right")])
def test_an_answer_is_a_value_unless_the_option_says_otherwise(scorer, monkeypatch, evaluated, verdict):
    monkeypatch.setattr(scorer, "evaluated", evaluated)
    pairs = [("31", box("\\min(91,31,49)")), ("31", box("15+16")), ("\\frac{1}{3}", box("\\int_0^1 x^2 dx"))]
    assert verdicts(scorer, *pairs) == [verdict] * 3
    assert verdicts(scorer, ("1024", box("2^{10}")), ("x+1", box("1+x"))) == ["right"] * 2


NASTY = ("1-", "1,", "9^{", "((", "\\[", "\\boxed{", "answer is ", "5 more than ", "１", "1 and ", "42 mil ", " ", "$")


@pytest.mark.parametrize("unit", NASTY)
def test_a_reply_of_2000_characters_costs_this_process_little(unit, monkeypatch):
    pytest.importorskip("math_verify")
    monkeypatch.setattr(formulas.FormulaComparer, "compare", lambda self, pairs: [("wrong", None)] * len(pairs))
    scorer, text = MathScorer(num_workers=1), unit * (2000 // len(unit))
    grade(scorer, ("31", "42 apples"))  # reads the words of CLDR
    began = time.process_time()
    grade(scorer, ("31", text), ("31", box(text)), ("x+1", f"The answer is {text}"))
    assert time.process_time() - began < 0.3


def test_a_reference_that_math_verify_cannot_parse_is_a_failed_row(scorer):
    scores = grade(scorer, ("x+", "4"), ("\\sqrt{4}", "2"))
    assert scores.errors[0] == "the reference answer cannot be parsed"
    assert scores.rewards_or_none() == [None, 1.0]


HOSTILE = [
    "10^{10^{10}}", "10**10**10", "9" * 10**6, "\\sqrt{" * 300 + "2" + "}" * 300, "{" * 100_000 + "}" * 100_000,
    "\\frac{1}{", "1000000!", "(((9!)!)!)!", "\\binom{10^9}{5\\cdot 10^8}", "\\sum_{i=1}^{10^9}\\frac{1}{i}",
    "\\int_0^1 e^{\\sin(x^x)} dx", "\\prod_{i=1}^{10^8} i", "\\lim_{x\\to 0} \\frac{\\sin(x^x)}{x!}", "(" * 900,
    "[1,2]" + "\\cup[3,4]" * 200, "\\begin{pmatrix}" + "1&" * 900 + "\\end{pmatrix}", "x^{x^{x^{x^{x}}}}=0",
    "__import__('os').system('kill 0')", "eval('1')", "\x00\x01\x1b[2J", "٤٤٤٤" * 600, "\ud800", "\\boxed{" * 1000,
    "e^{e^{e^{e^{100}}}}", "\\det\\begin{pmatrix}" + ("x&y&z&w\\\\" * 60) + "\\end{pmatrix}^{1000000}",
    "+".join(f"x^{{{n}}}y^{{{n}}}" for n in range(150)),
]  # fmt: skip


@pytest.mark.slow
def test_hostile_replies_never_stall_a_step(scorer):
    pytest.importorskip("math_verify")
    scorer = MathScorer(num_workers=2, timeout=1.0)
    grade(scorer, ("x", box("\\sqrt{x^2}")))  # starts both processes
    began = time.monotonic()
    scores = grade(scorer, *[("\\sqrt{7}", box(each)) for each in HOSTILE])
    seconds = time.monotonic() - began
    scorer.close()
    assert seconds < len(HOSTILE) / 2 * 1.0 + 5
    assert scores.errors == (None,) * len(HOSTILE)
    assert set(scores.infos["verdict"]) <= {*VERDICTS} - {"right"}
    assert "timeout" in scores.infos["verdict"]


def test_rows_after_a_timeout_are_graded():
    pytest.importorskip("math_verify")
    scorer = MathScorer(num_workers=1, timeout=1.0)
    pairs = [("x+1", box("10^{10^{10}}")), ("x+1", box("1+x")), ("x+1", box("x"))]
    assert verdicts(scorer, *pairs) == ["timeout", "right", "wrong"]
    scorer.close()


def test_a_formula_that_gets_no_processor_time_is_an_error_and_no_verdict(monkeypatch):
    pytest.importorskip("math_verify")
    monkeypatch.setattr(formulas, "WALL_SECONDS", 0.1)
    scorer = MathScorer(num_workers=1, timeout=5.0)
    scores = grade(scorer, ("x+1", box("10^{10^{10}}")), ("4", "4"))
    assert "got no processor time" in scores.errors[0]
    assert scores.rewards_or_none() == [None, 1.0]
    scorer.close()


SLOW = ("x+1", box("+".join(f"\\int_0^{k} e^{{\\sin(x^x)}} dx" for k in range(1, 9))))


@pytest.mark.slow
def test_a_row_whose_process_is_killed_twice_is_named():
    before = descendants()
    scorer = MathScorer(num_workers=1, timeout=30.0, evaluated=False)
    assert verdicts(scorer, ("x+1", box("1+x"))) == ["right"]
    with killing(before), contextlib.suppress(SandboxError):  # no interpreter lives long enough
        assert "killed twice" in grade(scorer, SLOW).errors[0]
    assert verdicts(scorer, ("x+1", box("1+x"))) == ["right"]
    scorer.close()


def test_close_and_garbage_collection_leave_no_process():
    pytest.importorskip("math_verify")
    before = descendants()
    scorer = MathScorer(num_workers=1)
    assert verdicts(scorer, ("x", box("\\sqrt{y}"))) == ["wrong"]
    assert descendants() - before
    scorer.close()
    assert not descendants() - before
    assert verdicts(scorer, ("x+1", box("1+x"))) == ["right"]  # starts new ones
    started = descendants() - before
    del scorer
    gc.collect()
    assert gone(started)


@pytest.mark.slow
def test_a_forked_process_starts_sessions_of_its_own(scorer):
    assert verdicts(scorer, ("x+1", box("1+x"))) == ["right"]
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            same = verdicts(scorer, ("x+1", box("1+x"))) == ["right"]
            scorer.close()
            os._exit(0 if same else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert verdicts(scorer, ("x+1", box("1+x"))) == ["right"]


def test_plain_rows_start_no_process_and_need_no_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    scorer = MathScorer()
    assert verdicts(scorer, ("4", "4"), ("4", "It is 4 km."), ("4", "It is 5 books.")) == ["right", "right", "wrong"]
    with pytest.raises(ConfigError, match=r"pip install 'gym-rm\[math\]'"):
        grade(scorer, ("x+1", box("1+x")))


def test_copies_share_processes_and_pickles_keep_options():
    scorer = MathScorer(style="boxed")
    assert copy.deepcopy(scorer) is scorer
    again = pickle.loads(pickle.dumps(scorer))
    assert verdicts(again, ("4", "It is 4.")) == ["no_answer"]


def test_an_answer_of_another_type_is_named():
    errors = grade(MathScorer(), (None, "It is 6."), answer=[5, 6]).errors
    assert "set `answer` of its prompt, a text or a number (a list goes to `answers`), got [5, 6]" in errors[0]
