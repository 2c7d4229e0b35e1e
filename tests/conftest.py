"""Fixtures that several test files share: real conversations, and tiny reward models saved once a session."""

import gzip
import json
import sys
from pathlib import Path

import pytest
from hypothesis import settings

DATA = Path(__file__).parents[1].parent / "shared" / "data"

settings.register_profile("gym_rm", deadline=None)
settings.load_profile("gym_rm")


def rows(name):
    if not DATA.is_dir():
        pytest.skip("no ../shared/data beside the checkout")
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Models this small take longer on several threads than on one."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def gsm8k_groups():
    """658 groups: one question and the graded replies of four models."""
    return [
        [[user(row["question"]), assistant(solution["text"])] for solution in row["solutions"]]
        for row in rows("gsm8k_graded")
    ]


@pytest.fixture(scope="session")
def hh_pairs():
    """1,150 pairs: a dialogue of up to 35 messages with the better and the worse last reply."""
    return [[row["context"] + one["completion"] for one in row["completions"]] for row in rows("hh_harmless")]


@pytest.fixture(scope="session")
def real_conversations(gsm8k_groups, hh_pairs):
    """A group and two short dialogues that every chat template takes: 8 conversations of 60 to 400 tokens."""
    short = [pair for pair in hh_pairs if len(pair[0]) >= 4 and sum(len(m["content"]) for m in pair[0]) < 500]
    return [conversation for group in [gsm8k_groups[0], *short[:2]] for conversation in group]


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory):
    """A function: folder of a tiny reward model of an architecture, with overrides of its configuration."""
    import tiny_models  # loads torch

    folders = {}

    def save(architecture="qwen3", **overrides):
        key = (architecture, repr(sorted(overrides.items())))
        if key not in folders:
            folder = tmp_path_factory.mktemp(architecture)
            folders[key] = str(tiny_models.save_reward_model(folder, architecture, **overrides))
        return folders[key]

    return save


@pytest.fixture(scope="session")
def scorer_of(saved_model):
    """A function: a scorer of `saved_model(...)`, loaded once with its defaults."""
    import gym_rm

    scorers = {}

    def load(architecture="qwen3"):
        if architecture not in scorers:
            scorers[architecture] = gym_rm.load_scorer(saved_model(architecture))
        return scorers[architecture]

    return load
