"""Draw docs/images/tree.svg: one group of eight replies as a padded batch, as the token tree, and its pages.

    python scripts/make_tree_picture.py                # the problem whose group saves the median share of tokens
    python scripts/make_tree_picture.py --problem 42   # another one

The group, the tokenizer, the tree and the pages are those of benchmarks/scoring.py; every token is drawn to scale.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import workloads  # noqa: E402

from gym_rm.engine.backbones.tree_attention import PAGE_SIZE  # noqa: E402
from gym_rm.engine.batch_planning import plan_trees  # noqa: E402
from gym_rm.engine.pages import make_pages  # noqa: E402
from gym_rm.engine.token_tree import TokenSequence, TokenTree  # noqa: E402
from scripts.drawing import MARGIN, WIDTH, keyframes, line, picture, rect, text  # noqa: E402

PICTURE = ROOT / "docs" / "images" / "tree.svg"
SIZE = 8  # replies of a group
SECONDS = 10
PITCH, BAR = 22, 17  # of a row, in units
ABOVE, BELOW = 62, 314  # tops of the two drawings

HIDDEN, SHOWN = "opacity: 0", "opacity: 1; transform: none"
STYLE = """
.cell { stroke: var(--card); stroke-width: 0.7; } .hatch { stroke: var(--third); stroke-width: 1.1; }
.prompt { fill: url(#prompt); } .reply { fill: url(#reply); } .copy { fill: url(#copy); }
.padding { fill: url(#padding); stroke: var(--third); stroke-width: 0.6; }
.page { fill: none; stroke: var(--ink); stroke-width: 1; } .trunk { stroke: var(--strong); stroke-width: 2.5; }
.gone { opacity: 0; } g { animation: SECONDSs ease-in-out 3 both; }
"""


def tree_of(rows: list[list[int]]) -> TokenTree:
    """Return the token tree of rows of token ids."""
    sequences = [TokenSequence(np.array(row, dtype=np.int32), np.array([len(row) - 1])) for row in rows]
    (tree,) = plan_trees(sequences, max_num_batched_tokens=sum(map(len, rows))).batches
    assert isinstance(tree, TokenTree)
    return tree


def draw(rows: list[list[int]], source: str) -> str:
    """Return the picture of rows of token ids, which come from `source`."""
    tree, width = tree_of(rows), max(map(len, rows))
    pages = make_pages(tree, PAGE_SIZE)
    padded, share = width * len(rows), len(tree) / (width * len(rows))
    # A row of the drawing is a branch of the tree: the tokens of one sequence that no sequence above has.
    first = np.flatnonzero(np.append(True, tree.parents[1:] != np.arange(len(tree) - 1)))
    starts, stops = tree.depths[first].tolist(), (tree.depths[np.append(first[1:], len(tree)) - 1] + 1).tolist()
    above = (np.searchsorted(first, tree.parents[first], side="right") - 1).tolist()
    prompt = min(starts[1:])
    unit = (WIDTH - 2 * MARGIN) / (-(-width // PAGE_SIZE) * PAGE_SIZE)
    gaps = [(row, stop) for row, stop in enumerate(stops) if stop < width]

    def bar(kind: str, start: int, stop: int, top: float, more: str = "") -> str:
        return rect(MARGIN + start * unit, top, (stop - start) * unit, BAR, kind, more)

    frames = [
        keyframes("scene", SECONDS, {0: SHOWN, 0.4: HIDDEN, 0.6: HIDDEN, 0.7: SHOWN}),
        *(appear(name, when) for name, when in (("pad", 2.3), ("below", 3.1), ("count", 5.8), ("paging", 6.5))),
        appear("leave", 5.2, first=SHOWN, last=HIDDEN),
    ]
    upper, lower, trunk = [], [], []
    for row, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        y, parent = BELOW + PITCH * row, above[row]
        frames.append(appear(f"row{row}", 0.7 + 0.15 * row, first=f"{HIDDEN}; transform: translateX(-40px)"))
        upper.append(f'<g style="animation-name: row{row}">{bar("prompt", 0, prompt, ABOVE + PITCH * row)}')
        upper.append(f"{bar('reply', prompt, stop, ABOVE + PITCH * row)}</g>")
        lower.append(bar("reply", max(start, prompt), stop, y))
        if row == 0:
            lower.append(bar("prompt", 0, prompt, y))
            continue
        # The tokens that a sequence above has: they move up to it, one after the other.
        when, up = 4.1 + 0.1 * row, f"transform: translateY({PITCH * (parent - row)}px)"
        steps = {0: HIDDEN, 0.46: SHOWN, when: SHOWN, when + 0.4: f"opacity: 1; {up}", when + 0.41: f"opacity: 0; {up}"}
        frames.append(keyframes(f"merge{row}", SECONDS, steps | {SECONDS: HIDDEN}))
        shared = bar("prompt", 0, prompt, y) + (bar("reply", prompt, start, y) if start > prompt else "")
        lower.append(f'<g class="gone" style="animation-name: merge{row}">{shared}</g>')
        x = MARGIN + start * unit
        trunk.append(line(x, BELOW + PITCH * parent + BAR, x, y + BAR, "trunk"))
    paging = []
    for query, number in zip(pages.first.tolist(), pages.numbers.tolist(), strict=True):
        y = BELOW + PITCH * (int(np.searchsorted(first, query, side="right")) - 1)
        begin, depth = number * PAGE_SIZE, int(tree.depths[query])
        if depth > begin:  # a branch starts inside this page
            paging.append(bar("copy", begin, depth, y))
        paging.append(bar("page", begin, begin + PAGE_SIZE, y, ' rx="2.5"'))
    saved = f"{len(tree):,} tokens, {100 * share:.0f} % of the padded batch"
    bottom, end = BELOW + PITCH * len(starts), WIDTH - MARGIN
    body = [
        patterns(unit),
        text(MARGIN, ABOVE - 20, "Padded batch", "title"),
        text(MARGIN, BELOW - 20, "Token tree", "title"),
        '<g style="animation-name: scene">',
        '<g style="animation-name: pad">',
        text(end, ABOVE - 20, f"{len(rows)} × {width} = {padded:,} tokens", "bold", "end"),
        *(bar("padding", stop, width, ABOVE + PITCH * row) for row, stop in gaps),
        "</g>",
        *upper,
        '<g style="animation-name: below">',
        '<g class="gone" style="animation-name: leave">',
        *(bar("padding", stop, width, BELOW + PITCH * row) for row, stop in gaps),
        "</g>",
        *lower,
        "</g>",
        '<g style="animation-name: paging">',
        *paging,
        "</g>",
        '<g style="animation-name: count">',
        text(end, BELOW - 20, saved, "bold", "end"),
        text(MARGIN, BELOW + 4 * PITCH, "prompt", "soft"),
        text(MARGIN, BELOW + 5 * PITCH, "only once", "soft"),
        *trunk,
        "</g></g>",
        *legend(bottom + 30, len(pages.first)),
    ]
    words = (
        f"{source}. Above, a padded batch: {len(rows)} rows of {width} tokens, each with the prompt of {prompt} "
        f"tokens, a reply and padding, {padded:,} tokens in all. Below, the token tree: the prompt once and "
        f"{len(rows)} replies, {saved}, in {len(pages.first)} pages of {PAGE_SIZE} positions."
    )
    return picture(
        bottom + 50,
        "Eight replies as a padded batch and as a token tree",
        words,
        body,
        STYLE.replace("SECONDS", str(SECONDS)) + "".join(frames),
    )


def appear(name: str, when: float, *, first: str = HIDDEN, last: str = SHOWN) -> str:
    """Return an animation from one style to another at `when` seconds; it begins with the end of the one before."""
    return keyframes(name, SECONDS, {0: last, 0.45: last, 0.46: first, when: first, when + 0.5: last, SECONDS: last})


def patterns(unit: float) -> str:
    """Return the fills: one cell for each token, and hatching for padding."""
    cells = "".join(
        f'<pattern id="{name}" width="{unit:.6g}" height="{WIDTH}" x="{MARGIN}" patternUnits="userSpaceOnUse">'
        f'<rect class="{kind}" width="{unit:.6g}" height="{WIDTH}"/><path class="cell" d="M0 0V{WIDTH}"/></pattern>'
        for name, kind in (("prompt", "strong"), ("reply", "second"), ("copy", "pale"))
    )
    hatch = '<pattern id="padding" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    return f'<defs>{cells}{hatch}<path class="hatch" d="M0 0V6"/></pattern></defs>'


def legend(y: float, pages: int) -> list[str]:
    """Return what the fills mean."""
    parts, x = [], float(MARGIN)
    for kind, words, room in (
        ("prompt", "prompt", 112), ("reply", "replies", 112), ("padding", "padding", 124),
        ("page", f"{pages} pages of {PAGE_SIZE}", 192), ("copy", "copied keys", 0),
    ):  # fmt: skip
        parts += [rect(x, y - 14, 22, BAR, kind), text(x + 29, y, words, "soft")]
        x += room
    return parts


def groups() -> list[list[list[int]]]:
    """Return the token ids of all groups."""
    tokenizer = workloads.tokenizer()
    conversations = workloads.gsm8k_groups(len(workloads.rows("gsm8k_graded")), SIZE)
    texts = tokenizer.apply_chat_template(conversations, tokenize=False)
    rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return [rows[start : start + SIZE] for start in range(0, len(rows), SIZE)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", type=int, help="index of the problem; default: that with the median saving")
    parser.add_argument("--picture", type=Path, default=PICTURE)
    args = workloads.parse_args(parser)
    found = groups()
    problem = args.problem
    if problem is None:
        shares = [len(tree_of(rows)) / (SIZE * max(map(len, rows))) for rows in found]
        problem = int(np.argsort(shares, kind="stable")[(len(shares) - 1) // 2])
    args.picture.write_text(draw(found[problem], f"Problem {problem} of GSM8K's graded rows"), encoding="utf-8")


if __name__ == "__main__":
    main()
