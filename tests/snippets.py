"""The Python blocks of a page, and what a reader sees when they run.

Each `print` has a comment with the text that it shows: at its end, or in the lines below it. `...` there stands for
any text, and white space does not count, as in doctest.
"""

import contextlib
import doctest
import io
import re
import sys

SHOWN_AS_IN_DOCTEST = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def same_text(expected, shown):
    return doctest.OutputChecker().check_output(expected + "\n", shown + "\n", SHOWN_AS_IN_DOCTEST)


def expected_text(lines, number):
    """Return the comment of the `print` in this line (the first is 1)."""
    comment = re.search(r"\)  # (.*)$", lines[number - 1])
    if comment:
        return comment[1]
    below = []
    for line in lines[number:]:
        if not line.strip().startswith("#"):
            break
        below.append(line.strip().removeprefix("#").strip())
    return "\n".join(below)


def python_blocks(page):
    """Yield the Python blocks that are not marked `no-run`, each with the number of the line before it."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```python *([^\n]*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        assert found[1] in ("", "no-run"), f"{page.name}: unknown mark {found[1]!r} of a Python block"
        if not found[1]:
            yield text.count("\n", 0, found.start(2)), found[2]


def run_blocks(page, blocks):
    """Run blocks of a page one after the other, compare what they print, and return the names they define."""
    lines = page.read_text(encoding="utf-8").splitlines()
    different = []

    def checked_print(*values, **options):
        number = sys._getframe(1).f_lineno
        with contextlib.redirect_stdout(io.StringIO()) as shown:
            print(*values, **options)
        if not same_text(expected_text(lines, number), shown.getvalue().rstrip("\n")):
            different.append(f"{page.name}, line {number} shows {shown.getvalue()!r}")

    names = {"__name__": page.stem, "print": checked_print}
    for line, block in blocks:
        exec(compile("\n" * line + block, page, "exec"), names)  # tracebacks show the line numbers of the page
    assert not different, "\n".join(different)
    return names
