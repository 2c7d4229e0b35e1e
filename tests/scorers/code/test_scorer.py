"""`CodeScorer` on every layer that this machine has: verdicts, rewards, limits, and rows without a score."""

import contextlib
import os
import pickle
import signal
import threading
import time

import pytest
from conftest import assistant, require_data, solutions, user
from sandbox.test_sandbox import children as descendants
from scorers.code.mutants import mutants

from gym_rm.data.prompts import load_prompts
from gym_rm.errors import ConfigError
from gym_rm.scorer import try_score
from gym_rm.scorers.code.row_tests import read_tests
from gym_rm.scorers.code.scorer import CodeScorer
from gym_rm.testing import check_scorer
from gym_rm.types import Prompt
from tests import real_data

DOUBLE = {"test_list": ["assert double(1) == 2", "assert double(0) == 0", "assert double(-3) == -6"]}
LIMITS = {"memory_bytes": 2**28}


def open_scorer(layer, **options):
    options = {"timeout": 5.0, "num_workers": 2, "limits": LIMITS, **options}
    try:
        return CodeScorer(layer=layer, allow_unsafe=layer in ("auto", "unsafe"), **options)
    except ConfigError as error:
        pytest.skip(str(error))


LAYERS = ["auto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("bubblewrap", "landlock", "unsafe"))]


@pytest.fixture(scope="module", params=LAYERS)
def scorer(request):
    with open_scorer(request.param) as opened:
        yield opened


@pytest.fixture(scope="module")
def fast():
    """The layer that this machine has, or a plain process."""
    with open_scorer("auto", timeout=1.5) as opened:
        yield opened


def grade(scorer, code, prompt=None, **metadata):
    """Return the row of `Scores` for one program."""
    prompt = prompt or Prompt((user("?"),), "p", metadata=metadata or DOUBLE)
    return try_score(scorer, [[*prompt.messages, assistant(f"```python\n{code}\n```")]], [prompt])[0]


def send(number, before):
    """Send a signal to the processes that were started since."""
    for pid in descendants() - before:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def killing(before):
    """Kill the processes that were started since, and those that take their place."""
    stop = threading.Event()

    def kill():
        while not stop.wait(0.3):
            send(signal.SIGKILL, before)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield
    finally:
        stop.set()
        killer.join()


def verdict(scorer, code, prompt=None, **metadata):
    score = grade(scorer, code, prompt, **metadata)
    return score.error or score.infos["verdict"]


def humaneval():
    require_data()
    return load_prompts(str(real_data.FOLDER / "humaneval.jsonl.gz"))


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_all_canonical_solutions_pass_and_bodies_that_return_none_fail(scorer, step):
    prompts = humaneval()[::step]
    right = [[*each.messages, assistant(each.metadata["canonical_solution"])] for each in prompts]
    scores = scorer.score(right, prompts)
    assert scores.rewards.tolist() == [1.0] * len(prompts)
    assert (scores.infos["tests_passed"] == scores.infos["tests_total"]).all()
    some = prompts[::8]  # all of them fail in the test of mutants
    wrong = try_score(scorer, [[*each.messages, assistant("    return None")] for each in some], some)
    assert 1.0 not in wrong.rewards.tolist()


def test_code_in_thinking_does_not_count():
    right, prompt = "```python\ndef double(x):\n    return 2 * x\n```", Prompt((user("?"),), "p", metadata=DOUBLE)
    replies = [
        f"<think>\n{right}",
        f"<think>\n{right}\n</think>1",
        f"```python\nno\n```\n</think>{right}",
        f"So\n{right}",
    ]
    rows = [[user("?"), assistant(reply)] for reply in replies]
    found = {}
    for options in ({}, {"thinking": "opened"}, {"judged": "all"}):
        with open_scorer("auto", **options) as scorer:
            found[str(options)] = scorer.score(rows, [prompt] * 4).infos["verdict"].tolist()
    assert list(found.values()) == [
        ["no_code", "exception", "passed", "passed"],
        ["no_code", "exception", "passed", "no_code"],
        ["passed", "passed", "passed", "passed"],
    ]


@pytest.mark.slow
def test_mutants_pass_only_if_the_plain_tests_pass():
    prompts = humaneval()
    cases = [
        (prompt, source)
        for prompt in prompts
        for _, source in mutants(read_tests(prompt).stub + prompt.metadata["canonical_solution"])
    ][::4]
    with open_scorer("auto", timeout=3.0) as scorer:
        found = scorer.score(
            [[*p.messages, assistant(f"```python\n{code}\n```")] for p, code in cases], [p for p, _ in cases]
        )
    plain = [passes_plainly(code, prompt) for prompt, code in cases]
    assert len(cases) > 120
    assert [reward == 1.0 for reward in found.rewards] == plain


def passes_plainly(code, prompt):
    def stop(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 2)
    names = {}
    try:
        exec(code, names)
        exec(prompt.metadata["test"], names)
        names["check"](names[prompt.metadata["entry_point"]])
    except BaseException:
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return True


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def double(x):\n    return 2 * x", "passed"),
        ("def double(x):\n    return 2.0 * x", "passed"),
        ("def double(x):\n    return x + 1", "wrong_answer"),
        ("def double(x):\n    return 1 // 0", "exception"),
        ("def double(x):\n    return x +", "syntax_error"),
        ("def double(x):\n    raise ValueError('no')", "exception"),
        ("1 // 0", "exception"),
    ],
)
def test_verdicts(scorer, code, expected):
    assert verdict(scorer, code) == expected


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def double(x):\n    return [0] * 10**10", ("memory", "exception")),
        ("def double(x):\n    while True: print('x' * 10**4)", ("output",)),
        ("import socket\ndef double(x):\n    socket.create_connection(('127.0.0.1', 9))", ("forbidden", "exception")),
        ("import sys\nsys.exit(0)", ("exception",)),
        ("import os\ndef double(x):\n    os._exit(0)", ("exception",)),
        ("def double(x):\n    return double(x)", ("exception",)),
        ("def other(x):\n    return 2 * x", ("exception",)),
    ],
)
def test_a_real_interpreter_names_what_ended_the_code(fast, code, expected):
    score = grade(fast, code)
    assert score.reward == 0.0
    assert score.infos["verdict"] in expected


def test_no_assert_reached_is_not_a_pass(scorer):
    test = "def check(candidate):\n    for x in candidate():\n        assert x == 1"
    assert verdict(scorer, "def f(): return []", test=test, entry_point="f") == "wrong_answer"
    assert verdict(scorer, "def f(): return [1, 1]", test=test, entry_point="f") == "passed"
    test = "def check(candidate):\n    if candidate():\n        assert candidate() == 1"
    assert verdict(scorer, "def f(): return 0", test=test, entry_point="f") == "wrong_answer"


def test_a_reply_without_code_has_its_own_verdict(fast):
    prompt = Prompt((user("?"),), "p", metadata=DOUBLE)
    scores = fast.score([[user("?"), assistant("```bash\nls\n```")], [user("?"), assistant("")]], [prompt, prompt])
    assert scores.infos["verdict"].tolist() == ["no_code", "no_code"]
    assert scores.rewards.tolist() == [0.0, 0.0]


def test_programs_read_the_input_and_print(scorer):
    cases = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5\n", "output": "10"}]
    assert verdict(scorer, "a, b = map(int, input().split())\nprint(a + b, ' ')\nprint()", cases=cases) == "passed"
    assert verdict(scorer, "print(3)", cases=cases) == "wrong_answer"
    main = "def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()"
    assert verdict(scorer, main, cases=cases) == "passed"


def test_programs_may_end_themselves_after_their_output(fast):
    cases = [{"input": "1 2\n", "output": "3\n"}]
    assert (
        verdict(fast, "import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit(0)", cases=cases)
        == "passed"
    )
    assert verdict(fast, "import sys\nprint(3)\nsys.exit('failed')", cases=cases) == "exception"


def test_calls_compare_values_and_a_class_solution_is_called(fast):
    calls = {"input_output": {"inputs": [[[3, 1, 2]], [[]]], "outputs": [[[1, 2, 3]], [[]]], "fn_name": "order"}}
    assert verdict(fast, "class Solution:\n    def order(self, x): return tuple(sorted(x))", **calls) == "passed"
    assert verdict(fast, "def order(x): return x", **calls) == "wrong_answer"


def test_a_name_that_the_tests_import_and_the_solution_lacks_is_its_fault(fast):
    for tests in ("from solution import f\nassert f(1) == 1", "from solution import f\ndef test_f(): assert f(1) == 1"):
        assert verdict(fast, "def g(x): return x", unit_tests=tests) == "exception"


def test_calls_have_the_imports_of_the_sites_that_they_come_from(fast):
    code = """class Solution:
    def f(self, xs: List[int]) -> Optional[int]:
        place = bisect.bisect_left(sorted(xs), 2)
        return Counter(xs).most_common(1)[0][0] + place + math.gcd(4, 6)"""
    cases = {"fn_name": "f", "inputs": [[[1, 1, 2]]], "outputs": [5]}
    assert verdict(fast, code, input_output=cases) == "passed"
    assert verdict(fast, code, test_list=["assert f([1, 1, 2]) == 5"]) == "exception"


def test_tests_with_numpy_need_it_by_name(fast):
    tests = "import numpy as np\ndef check(candidate):\n    assert np.allclose(candidate([1.0, 2.0]), 1.5)"
    row = {"test": tests, "entry_point": "mean"}
    code = "import numpy as np\ndef mean(xs): return np.mean(xs)"
    assert "packages=" in verdict(fast, "def mean(xs): return sum(xs) / len(xs)", **row)
    with open_scorer("auto", packages=["numpy"]) as scorer:  # skips where no readable interpreter has it
        assert verdict(scorer, code, **row) == "passed"
        assert verdict(scorer, code.replace("np.mean", "np.sum"), **row) == "wrong_answer"


@pytest.mark.slow
def test_unit_tests_may_use_pytest_if_it_is_named(fast):
    tests = """import pytest
from solution import half

class TestHalf:
    def test_even(self): assert half(4) == 2

def test_odd():
    with pytest.raises(ValueError, match="odd"): half(3)
"""
    right = "def half(x):\n    if x % 2: raise ValueError('odd')\n    return x // 2"
    with open_scorer("auto", packages=["pytest"]) as scorer:
        assert verdict(scorer, right, unit_tests=tests) == "passed"
        assert verdict(scorer, right.replace("2: raise ValueError", "2: print"), unit_tests=tests) == "wrong_answer"
        assert verdict(scorer, right.replace("x // 2", "3"), unit_tests=tests) == "wrong_answer"
    fixture = "from solution import half\ndef test_file(tmp_path): assert half(4) == 2"
    assert "test_file has 'tmp_path', which pytest runs" in verdict(fast, right, unit_tests=fixture)
    fixture = "import pytest\nfrom solution import half\n@pytest.fixture\ndef four(): return 4\n"
    fixture += "class TestHalf:\n    def setup_method(self): self.two = 2\n"
    fixture += "    @pytest.mark.parametrize('k', [2, 4])\n"
    fixture += "    def test_a(self, four, k): assert half(four * k) == self.two * k"
    with open_scorer("auto", packages=["pytest"], reward="fraction") as scorer:
        assert verdict(scorer, right, unit_tests=fixture) == "passed"
        assert grade(scorer, "def half(x): return 4", unit_tests=fixture).reward == 0.5
        for call in ("xfail", "skip", "exit"):
            code = f"import pytest\ndef half(x): pytest.{call}('no')"
            assert grade(scorer, code, unit_tests=fixture).reward == 0.0


def test_an_import_of_all_names_cannot_replace_those_of_the_tests(fast):
    tests = "from solution import *\ndef test_a(): assert len(f()) == 2"
    code = "def f(): return []\ndef len(x): return 2\ndef test_a(): pass"
    assert verdict(fast, code, unit_tests=tests) == "wrong_answer"


def test_programs_may_print_and_read_as_much_as_their_case_has(fast):
    lines = "\n".join(map(str, range(20_000)))
    code = "print(input())\nfor k in range(1, 20_000): print(k)\nexit()"
    assert verdict(fast, code, cases=[{"input": "0", "output": lines}]) == "passed"
    assert verdict(fast, "print(len(input()))", cases=[{"input": "x" * 2**22, "output": str(2**22)}]) == "passed"


def test_a_fraction_of_the_tests_is_a_reward(fast):
    with CodeScorer(reward="fraction", allow_unsafe=True, num_workers=1) as scorer:
        score = grade(scorer, "def double(x):\n    return abs(2 * x)")
        assert score.reward == pytest.approx(2 / 3)
        cases = [{"input": "1", "output": "1"}, {"input": "2", "output": "2"}]
        assert grade(scorer, "print(1)", cases=cases).reward == 0.5


def test_rows_without_readable_tests_are_named_and_not_zero(fast):
    conversation = [user("?"), assistant("x = 1")]
    good = Prompt((user("?"),), "p", metadata=DOUBLE)
    bad = Prompt((user("?"),), "q", metadata={"test_list": ["assert ("]})
    unknown = Prompt(
        (user("?"),), "r", metadata={"test": "def check(c):\n    assert c(1) == missing(2)", "entry_point": "x"}
    )
    scores = try_score(fast, [conversation] * 4, [good, bad, None, unknown])
    assert scores.failed_rows == (1, 2, 3) or scores.failed_rows == (1, 2)
    assert "test_list" in scores.errors[1]


def test_a_reply_cannot_make_its_tests_look_broken(fast):
    forged = """
import threading, time
def forge():
    while True:
        globals()["_gym_rm_serve"] = lambda *request: [True, ["v", 2]]
        time.sleep(0.0001)
threading.Thread(target=forge, daemon=True).start()
def double(x): return 1
"""
    tests = "from solution import double\ndef test_double():\n    assert double(1) == 2"
    score = grade(fast, forged, unit_tests=tests)
    assert (score.error, score.reward) == (None, 0.0)


def test_an_error_of_the_tests_is_no_reward_of_the_reply(scorer):
    test = "def check(candidate):\n    assert candidate(1) == missing(1)"
    assert "missing" in grade(scorer, "def f(x): return x", test=test, entry_point="f").error


def test_endless_loops_cost_their_limit_and_rows_keep_their_order(fast):
    right, endless = "def double(x):\n    return 2 * x", "def double(x):\n    while True: pass"
    codes = [right, endless, f"# 2\n{endless}", f"# 3\n{right}", f"# 4\n{endless}", f"# 5\n{right}"]
    prompt = Prompt((user("?"),), "p", metadata=DOUBLE)
    started = time.monotonic()
    scores = fast.score([[user("?"), assistant(code)] for code in codes], [prompt] * len(codes))
    assert time.monotonic() - started < 60  # of a busy machine
    assert scores.rewards.tolist() == [1, 0, 0, 1, 0, 1]


def test_a_row_whose_process_is_killed_is_run_again():
    before = descendants()
    with CodeScorer(allow_unsafe=True, timeout=20, num_workers=1) as scorer:
        grade(scorer, "def double(x): return 2 * x")
        code = "import time\ntime.sleep(1.5)\ndef double(x): return 2 * x"
        killer = threading.Timer(0.7, send, [signal.SIGKILL, before])
        killer.start()
        score = grade(scorer, code)
        killer.join()
        assert score.error is None
        assert score.reward == 1.0
    assert not descendants() - before


def test_a_machine_that_stops_costs_no_time_and_sleep_does():
    before = descendants()
    with CodeScorer(allow_unsafe=True, timeout=1.0, num_workers=1) as scorer:
        code = "for _ in range(4 * 10**6): pass\ndef double(x): return 2 * x"

        grade(scorer, code)
        times = ((0.03, signal.SIGSTOP), (1.8, signal.SIGCONT))
        timers = [threading.Timer(seconds, send, [number, before]) for seconds, number in times]
        for timer in timers:
            timer.start()
        started = time.monotonic()
        assert grade(scorer, f"# stopped\n{code}").reward == 1.0
        for timer in timers:
            timer.join()
        assert time.monotonic() - started > 1.2
        score = grade(scorer, "import time\ndef double(x): time.sleep(99)")
        assert (score.reward, score.infos["verdict"]) == (0.0, "time")


@pytest.mark.parametrize(
    ("code", "test"),
    [
        ("raise SystemExit(10**5000)", "assert f(1) == 2"),
        ("def f(x): raise SystemExit(10**5000)", "assert f(1) == 2"),
        ("class A:\n    def sort(self): pass\ndef f(x): return A()", "assert f(f(1).sort) == 2"),
        ("import time\ntime.sleep(1.49)\ndef f(x): return 1", "assert f(1) == 2"),
        ("def f(x): return 'x' * (2**22 - 60)", "assert f(f(1)) == 2"),
        ("def f(x): return 'x' * 2**21", "assert f(f(1) * 3) == 2"),
        ("def f(x):\n    if x: raise ValueError", "try:\n    r = f(2)\nexcept ValueError:\n    pass\nassert r == 4"),
        ("def f(x): return 'missing'", "assert eval(f(1)) == 2"),
        ("def f(x): return '1 +'", "assert eval(f(1)) == 2"),
        ("def f(x): return 'missing'", "assert __import__(f(1)) == 2"),
        ("class NameError(Exception): pass\ndef f(x): raise NameError('name')", "assert f(1) == 2"),
    ],
)
def test_what_the_code_does_is_its_verdict_and_no_error_of_the_row(fast, code, test):
    score = grade(fast, code, unit_tests=f"from solution import f\n{test}")
    assert (score.error, score.reward) == (None, 0.0)


def test_rewards_do_not_depend_on_other_replies_of_the_call(fast):
    tests = "import math\nfrom solution import f\nif f(1) == 9: math.pi = 9\nassert f(2) == 4 and math.pi < 4"
    prompt = Prompt((user("?"),), "p", metadata={"unit_tests": tests})
    codes = ["def f(x): return 9 if x == 1 else 4", "def f(x): return 2 * x", "def f(x): return x + 2"]
    for order in ([0, 1, 2], [2, 1, 0], [1], [0, 0, 2]):
        conversations = [[user("?"), assistant(f"{codes[k]}  # {place}")] for place, k in enumerate(order)]
        assert fast.score(conversations, [prompt] * len(order)).rewards.tolist() == [float(k > 0) for k in order]


def test_code_that_kills_itself_where_it_can_earns_nothing():
    with open_scorer("unsafe") as scorer:
        score = grade(scorer, "import os\ndef double(x): os.kill(os.getpid(), 9)")
    assert (score.error, score.reward, score.infos["verdict"]) == (None, 0.0, "forbidden")


def test_a_row_whose_process_is_killed_twice_is_named():
    before = descendants()
    with open_scorer("auto", timeout=20, num_workers=1) as scorer, killing(before):
        if scorer._sandbox.layer == "unsafe":
            pytest.skip("code can kill itself")
        score = grade(scorer, "import time\ntime.sleep(3)\ndef double(x): return 2 * x")
    assert "from outside" in score.error


def test_a_pickled_scorer_has_the_same_options():
    with open_scorer("auto", reward="fraction") as scorer, pickle.loads(pickle.dumps(scorer)) as again:
        assert grade(again, "def double(x): return 2").reward == pytest.approx(1 / 3)
        assert repr(again) == repr(scorer)


def test_conformance(fast):
    prompts = [Prompt((user("?"),), str(k), metadata=DOUBLE) for k in range(4)]
    codes = ["def double(x): return 2 * x", "def double(x): return x", "", "def double(x): return"]
    check_scorer(fast, [[user("?"), assistant(code)] for code in codes], prompts, atol=0.0)


def test_all_embedded_solutions_pass(scorer):
    prompts, right = load_prompts("embedded:code"), solutions()
    scores = try_score(scorer, [[*p.messages, assistant(right[p.prompt_id])] for p in prompts], prompts)
    assert [p.prompt_id for p, reward in zip(prompts, scores.rewards, strict=True) if reward != 1.0] == []
