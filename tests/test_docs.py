"""Tests of the pages in docs: their Python code runs and their links are valid.

The Python blocks of a page run one after the other in an empty folder, with small checkpoints under the names that the
page uses, and show what the comments beside them say. A block marked ```` ```python no-run ```` is skipped.
tests/adapters/test_pages.py runs docs/adapters.
"""

import functools
import os
import re
from pathlib import Path

import numpy as np
import pytest
from markdown_it import MarkdownIt

from gym_rm.engine.executors.parallel_options import ParallelOptions
from gym_rm.engine.kinds import KINDS
from gym_rm.engine.loading.checkpoint import LoadOptions
from gym_rm.engine.loading.families import FAMILIES
from gym_rm.engine.reward_model_scorer import EngineOptions
from gym_rm.engine.text.renderer import TextOptions
from gym_rm.envs.simulated_user import SimulatedUserOptions
from gym_rm.generation.chat import LocalChatOptions
from gym_rm.scorers.judge.options import JudgeOptions
from gym_rm.scorers.judge.styles import style_names
from gym_rm.scorers.load import SCORER_KINDS
from tests import chain_models, tiny_models
from tests.checkpoints import HIDDEN, save_with_heads, tensor
from tests.snippets import python_blocks, run_blocks

try:
    import peft
except ImportError:  # blocks with LoRA adapters are skipped
    peft = None

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md"])
RANDOM = {"initializer_range": 0.3}

# --- small checkpoints under large names -------------------------------------------------------------------------


def process(folder):
    tokenizer = tiny_models.tokenizer("qwen")
    tokenizer.add_tokens(["<extra_0>"])
    heads = {"score.0.weight": tensor(HIDDEN, HIDDEN, seed=1), "score.2.weight": tensor(2, HIDDEN, seed=2)}
    save_with_heads(
        Path(folder), heads, architecture="qwen2", class_name="Qwen2ForProcessRewardModel", tokenizer=tokenizer
    )


def judge(folder):
    tokenizer = tiny_models.tokenizer("qwen")
    tokenizer.add_tokens(["Yes", "No"])
    tiny_models.save_policy(folder, "qwen3", vocab_size=len(tokenizer), **RANDOM)
    tokenizer.save_pretrained(folder)


def helpsteer(folder):
    tiny_models.save_reward_model(folder, num_labels=2, id2label={0: "helpfulness", 1: "verbosity"})


def adapter(folder):
    if peft is not None:
        config = peft.LoraConfig(task_type="SEQ_CLS", target_modules=["q_proj"])
        peft.get_peft_model(tiny_models.reward_model(), config).save_pretrained(folder)


CHECKPOINTS = {
    "Skywork/Skywork-Reward-V2-Qwen3-0.6B": tiny_models.save_reward_model,
    "my/helpsteer-rm": helpsteer,
    "Qwen/Qwen2.5-Math-PRM-7B": process,
    "Qwen/Qwen3-4B": judge,
    "my/dpo-policy": functools.partial(tiny_models.save_policy, seed=1, **RANDOM),
    "my/sft-policy": functools.partial(tiny_models.save_policy, seed=2, **RANDOM),
    "my/rm-seed-1": functools.partial(tiny_models.save_reward_model, seed=1),
    "my/rm-seed-2": functools.partial(tiny_models.save_reward_model, seed=2),
    "my/base": tiny_models.save_reward_model,
    "my/adapter": adapter,
    "my/judge": chain_models.save_judge,
    "my/comparing-judge": chain_models.save_comparing_judge,
    "my/user": functools.partial(chain_models.save_chain, chain={"\n": ["How?"], "How?": [chain_models.END]}),
}

# --- every page --------------------------------------------------------------------------------------------------


def text_of(page):
    return page.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def names_after(tmp_path_factory):
    """Function that runs the Python blocks of a page and returns the names they define and the folder."""

    @functools.cache
    def run(page):
        folder = tmp_path_factory.mktemp(page.stem)
        before = Path.cwd()
        os.chdir(folder)
        try:
            for name, save in CHECKPOINTS.items():
                if f'"{name}"' in text_of(page):
                    save(name)
            blocks = [each for each in python_blocks(page) if peft is not None or "my/adapter" not in each[1]]
            names = run_blocks(page, blocks)
        finally:
            os.chdir(before)
        return names, folder

    return run


RUN = [
    pytest.param(page, marks=pytest.mark.slow) if page.name == "scaling.md" else page  # starts processes
    for page in sorted([*DOCS.glob("*.md"), *DOCS.glob("environments/*.md")])
]


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(DOCS)))
def test_the_python_blocks_of_a_page_run_and_show_what_the_page_says(page, names_after):
    names_after(page)


def anchors(page):
    """Return the anchors that GitHub makes from the headings of a page."""
    headings = re.findall(r"^#+ +(.+?) *$", re.sub(r"^```.*?^```", "", text_of(page), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_the_links_of_a_page_are_valid(page):
    text = re.sub(r"^```.*?^```|<!--.*?-->", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_table_of_a_page_is_one_with_the_same_cells_in_every_row(page):
    lines, inside = text_of(page).splitlines(), set()
    for token in MarkdownIt("commonmark").enable("table").parse(text_of(page)):
        if token.type in ("table_open", "fence"):
            rows = range(*token.map)
            inside |= {*rows}
            cells = [len(re.findall(r"(?<!\\)\|", lines[row])) for row in rows if token.type == "table_open"]
            assert len(set(cells)) <= 1, f"{page.name}, line {rows[0] + 1}: cells of the rows: {cells}"
    assert [f"line {row + 1}" for row, line in enumerate(lines) if line.startswith("|") and row not in inside] == []


# --- docs/reward-models.md ---------------------------------------------------------------------------------------


def test_the_examples_of_reward_models_return_finite_rewards(names_after):
    names, _ = names_after(DOCS / "reward-models.md")
    for name in ("rewards", "helpfulness", "log_odds"):
        assert np.isfinite(names[name]).all(), name
        assert names[name].shape == (2,)


def test_the_page_of_reward_models_lists_every_kind_and_family():
    page = text_of(DOCS / "reward-models.md")
    kinds = {*KINDS, *SCORER_KINDS}
    assert {"decoder", "process", "implicit", "weighted"} <= kinds
    assert [kind for kind in kinds if f"`{kind}`" not in page] == []
    assert [each.name for each in FAMILIES if each.name.split()[0].split("-")[0] not in page] == []


# --- docs/judges.md ----------------------------------------------------------------------------------------------


def test_the_examples_of_judges_have_the_described_results(names_after):
    names, _ = names_after(DOCS / "judges.md")
    assert names["scores"].rewards.tolist() == [0.5]
    assert names["scores"].infos["position_consistent"].tolist() == [0.0]
    assert names["compared"].rewards.tolist() == [5.25, 2.0, 1.0, 4.75]
    assert names["observations"][0][-1] == {"role": "user", "content": "How?"}


def test_the_page_of_judges_names_real_options():
    names = {*JudgeOptions.model_fields, *SimulatedUserOptions.model_fields, *LocalChatOptions.model_fields, "model"}
    listed = re.findall(r"^\| (`.*?) \|", text_of(DOCS / "judges.md"), re.MULTILINE)
    assert {name for row in listed for name in re.findall(r"`([\w-]+)`", row)} <= {*names, *style_names()}
    assert [name for name in style_names() if f"`{name}`" not in text_of(DOCS / "judges.md")] == ["fenced"]


# --- docs/scoring.md ---------------------------------------------------------------------------------------------


def test_the_examples_of_scoring_have_the_described_results(names_after):
    names, _ = names_after(DOCS / "scoring.md")
    assert names["scores"].rewards.argmax() == 0
    assert names["second"].workload.reused_tokens > 0
    assert names["scorer"].provenance.layout == "tree"


def test_the_options_on_the_page_of_scoring_exist():
    schemas = (LoadOptions, EngineOptions, ParallelOptions, TextOptions, *(kind.Options for kind in KINDS.values()))
    known = {name for schema in schemas for name in schema.model_fields}
    rows = re.findall(r"^\| (`.*?) \|", text_of(DOCS / "scoring.md"), re.MULTILINE)
    assert len(rows) > 8
    assert [name for name in re.findall(r"`(\w+)`", " ".join(rows)) if name not in known] == []
