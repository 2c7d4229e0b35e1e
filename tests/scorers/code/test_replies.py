"""Which code of a reply is graded."""

import contextlib
import io
import textwrap
import time

import pytest

from gym_rm.engine.text.thinking import Thinking
from gym_rm.scorers.code.replies import extract_code, indented, is_python

STUB = 'def double(x):\n    """Return 2 * x."""\n'


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("Text\n```py\nx = 1\n```\nmore", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```python\nx = 1", "x = 1\n"),
        ("```python\nfirst\n```\nthen\n```python\nlast\n```", "last\n"),
        ("```python\nx\n```\nprints\n```text\n3\n```", "x\n"),
        ("~~~~\nx = '''\n```\n'''\n~~~~", "x = '''\n```\n'''\n"),
        ("see <code>x = 1</code> there", "x = 1"),
        ("<code>\n```python\nx = 1\n```\n</code>", "x = 1\n"),
        ("<think>```python\nno\n```</think>```python\nyes\n```", "yes\n"),
        ("<think>\n```python\nprint('</think>')\n```\n</think>\n```python\nyes\n```", "yes\n"),
        ("thoughts\n```python\nno\n</think>\n```python\nyes\n```", "yes\n"),
        ("<think>a ```python\nno\n</think>\n```python\nyes\n```", "yes\n"),
        ("```python\nx = '</think>'\n```\n", "x = '</think>'\n"),
        ("```python\nx = '<think>'\ny = '<code>'\n```\n", "x = '<think>'\ny = '<code>'\n"),
        ("<code>x = '</code><code>'</code> as `<code>`", "x = '</code><code>'"),
        ("1. First:\n\n   ```python\n   if x:\n       y\n   ```\n", "if x:\n    y\n"),
        ("- a\n  - b\n\n        ```python\n        x\n        ```\n", "x\n"),
        ("> ```python\n> x\n> ```\n", "x\n"),
        ("Use `<code>`:\n````{python}\nx = 2\n```\n````", "x = 2\n```\n"),
        ("x = 1", "x = 1"),
        ("    return x\n", "return x"),
        ("```bash\nls\n```", None),
        ("<think>```python\nx\n```", None),
        ("", None),
    ],
)
def test_the_last_block_of_python_is_graded(reply, code):
    _, answer = Thinking().split({"content": reply})
    assert extract_code(reply if answer == reply.strip() else answer or "") == code


DOUBLE = "def double(x):\n    return 2 * x\n"
PROGRAM = "def solve(n):\n    return 2 * n\n\nif __name__ == '__main__':\n    n = int(input())\n    print(solve(n))\n"
USE = {DOUBLE: "print(double(3))\n", PROGRAM: "print(solve(4))\n"}
UNITTEST = "import unittest\nfrom solution import double\nclass T(unittest.TestCase):\n    def test_a(self): pass\n"


def block(code, language="python"):
    return f"```{language}\n{code}```\n"


def shifted(text, by):
    return textwrap.indent(text, by)


LANGUAGES = ["", "python", "python3", "py", "Python", "{.python}", 'Python title="a.py"', "python3.11", "pycon", "code"]
BEHIND = [
    *("Output:\n```\n6\n```\n", "```\nYES\n```\n", "```\n1 2 3\n4\n```\n", "```\nO(n log n)\n```\n"),
    *(
        "```\nTime: O(1)\n```\n",
        "```\nn = 5\nresult = 10\n```\n",
        "```bash\npython a.py < in\n```\n",
        "```js\nf(x)\n```\n",
    ),
    *(block("assert 2 * 2 == 4\n"), block(UNITTEST), "```cpp\nint main() {}\n```\n", '```json\n{"a": 1}\n```\n'),
    *("```python\n```\n", "It uses <code>O(1)</code> memory.", "```\n>>> 2 * 3\n6\n```\n", block("# end\n")),
]
AROUND = {
    "opened by the prompt": lambda code, use: f"{code}```\n\nThis doubles the number.\n",
    "opened by the prompt, with a use": lambda code, use: f"{code}```\nUse:\n{block(use)}",
    "opened by the prompt, one line": lambda code, use: f"{code.rstrip()}```",
    "text behind the end": lambda code, use: f"```python\n{code}``` This doubles.\n\n```\n6\n```\n",
    "text before the fence": lambda code, use: f"The code: ```python\n{code.rstrip()}```\nDone.",
    "begun twice": lambda code, use: f"```python\n{code.replace('2', '3')}\nWrong. Better:\n{block(code)}",
    "without an end": lambda code, use: f"Code:\n```python\n{code}",
    "tildes": lambda code, use: f"~~~\n{code}~~~\n",
    "list": lambda code, use: f"1. Code:\n\n{shifted(block(code), '   ')}\n2. Done.\n",
    "list in a list": lambda code, use: f"- a\n  - b\n\n{shifted(block(code), '        ')}",
    "indented code": lambda code, use: block(shifted(code, "    ")),
    "quotation": lambda code, use: shifted(block(code), "> "),
    "tag": lambda code, use: f"<code>\n{code}</code>",
    "tag in a sentence": lambda code, use: f"For <code>n</code> numbers:\n{block(code)}",
    "answer": lambda code, use: f"<answer>\n{code}</answer>",
    "use": lambda code, use: block(code) + block(use),
    "use in a session": lambda code, use: block(code) + block(f">>> {use}6\n", "pycon"),
    "draft": lambda code, use: f"{block(code.replace('2', '3'))}Wrong. Final:\n{block(code)}",
    "fence in a docstring": lambda code, use: block(f'"""Notes\n\n    ```\n    x\n    ```\n"""\n{code}'),
    "no fence": lambda code, use: f"\n{code}\n",
    **{f"language {each}": lambda code, use, each=each: f"Sure.\n{block(code, each)}Done." for each in LANGUAGES},
    **{f"before {each}": lambda code, use, each=each: block(code) + each for each in BEHIND},
}


def doubles(code, names):
    """Return whether code doubles 4: as a function if names are given, else as a program."""
    space = {"__name__": "solution" if names else "__main__"}
    output, space["input"] = io.StringIO(), lambda: "4"
    with contextlib.redirect_stdout(output):
        exec(code, space)
    return space["double"](4) == 8 if names else output.getvalue() == "8\n"


@pytest.mark.parametrize("code", [DOUBLE, PROGRAM], ids=["function", "program"])
@pytest.mark.parametrize("around", AROUND.values(), ids=[*AROUND])
def test_a_right_solution_is_found_in_whatever_is_around_it(code, around):
    names = ["double"] if code == DOUBLE else []
    assert doubles(extract_code(around(code, USE[code]), names=names), names)


@pytest.mark.parametrize("code", [DOUBLE, PROGRAM], ids=["function", "program"])
@pytest.mark.parametrize("behind", ["", "Output:\n```\n9\n```\n", "use"])
@pytest.mark.parametrize("language", ["python", ""])
def test_a_wrong_version_after_a_right_one_is_graded(code, behind, language):
    names, wrong = ["double"] if code == DOUBLE else [], code.replace("2", "3")
    reply = block(code) + "Simpler:\n" + block(wrong, language) + (block(USE[code]) if behind == "use" else behind)
    assert not doubles(extract_code(reply, names=names), names)
    broken = block(code) + "Final:\n" + block(code.replace("2 *", "2 * *"))
    assert not is_python(extract_code(broken, names=names))


@pytest.mark.parametrize(
    ("blocks", "names"),
    [
        (["def times(a, b):\n    return a * b\n", "def double(x):\n    return times(2, x)\n"], ["double"]),
        (["def double(x):\n    return times(2, x)\n", "def times(a, b):\n    return a * b\n"], ["double"]),
        (["import operator\n", "def double(x):\n    return operator.mul(2, x)\n", "print(double(3))\n"], ["double"]),
        ([">>> def double(x):\n...     return 2 * x\n...\n>>> double(3)\n6\n"], ["double"]),
        ([DOUBLE, "class Other:\n    pass\n"], ["double", "Other"]),
        (["def solve(n):\n    return 2 * n\n", "print(solve(int(input())))\n"], []),
        (["def main():\n    print(2 * int(input()))\n", "main()\n"], []),
        (["n = int(input())\n", "print(2 * n)\n"], []),
        (["n = int(input())\nprint(3 * n)\n", "def f(n):\n    return 2 * n\n", "print(f(int(input())))\n"], []),
    ],
)
def test_blocks_that_define_what_the_last_one_uses_belong_to_it(blocks, names):
    code = extract_code("Then:\n".join(map(block, blocks)), names=names)
    assert doubles(code, names)
    assert all(name in code for name in names)


def test_the_body_of_a_function_is_found_beside_its_use():
    for reply in ("    return 2 * x\n```\nIt doubles.", block("return 2 * x\n") + block("print(double(3))\n")):
        assert extract_code(reply, names=["double"]).strip() == "return 2 * x"


def test_replies_of_any_size_are_read_in_linear_time():
    for text in ("<code>", "```\n", "```python\nx = y\n", "<answer>", "> "):
        started = time.process_time()
        extract_code(text * 20_000, names=["f"])
        assert time.process_time() - started < 5


@pytest.mark.parametrize(
    "body",
    [
        "    y = x\n    if y:\n        y += x\n    return y",
        "y = x\nif y:\n    y += x\nreturn y",
        "y = x\n    if y:\n        y += x\n    return y",
        "if x:\n        x += x\n    return x",
        "for y in [x]:\n    x += y\nreturn x",
        "return x + x",
    ],
)
def test_a_body_is_indented_whatever_it_lost(body):
    names = {}
    exec(f"{STUB}{indented(body)}", names)
    assert names["double"](4) == 8
