import dataclasses
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest

import gym_rm
from gym_rm.errors import ConfigError
from gym_rm.evaluation.audit import audit_warning, read_record, run_audit
from gym_rm.evaluation.audit_lines import judge
from gym_rm.evaluation.audit_rows import AuditRow, AuditRows, load_audit_rows
from gym_rm.evaluation.bootstrap import Interval
from gym_rm.evaluation.perturbations import CHANGES
from gym_rm.types import Prompt, Provenance
from tests import real_data


def reply(conversation):
    return conversation[-1]["content"]


def length(conversations):
    return [len(reply(each)) for each in conversations]


def noise(conversations):
    digests = [hashlib.sha256(repr(each).encode()).hexdigest() for each in conversations]
    return [int(digest[:8], 16) / 2**32 for digest in digests]


def exact(rows):
    """Return a scorer that rewards only the good replies of the rows."""
    good = {repr(row.conversation(text)) for row in rows.rows for text in row.good}
    return gym_rm.load_scorer(lambda conversations: [float(repr(tuple(each)) in good) for each in conversations])


def real_rows(name, limit=40):
    return load_audit_rows(real_data.FOLDER / f"{name}.jsonl.gz", limit=limit)


def line(audit, name):
    return next(each for each in audit.lines if each.name == name)


@pytest.fixture(scope="module")
def embedded():
    return run_audit(gym_rm.load_scorer(None), load_audit_rows(limit=2))


@pytest.fixture
def made_up():
    users = [{"role": "user", "content": f"What is {n}?"} for n in range(20)]
    rows = (AuditRow(Prompt((user,), "p"), (user,), (f"It is {n}. Yes.",)) for n, user in enumerate(users))
    return AuditRows("made up", tuple(rows))


# --- whole models ----------------------------------------------------------------------------------------------------


@pytest.mark.data
@pytest.mark.parametrize("name", ["gsm8k_graded", "hh_harmless"])
def test_a_scorer_that_rewards_only_the_good_replies_is_clean(name):
    rows = real_rows(name)
    audit = run_audit(exact(rows), rows)
    assert audit.level == 0
    assert {each.verdict for each in audit.lines} <= {"ok", "not judged"}
    assert line(audit, "reply of another row").mean.value == -1


@pytest.mark.data
def test_a_scorer_that_rewards_length_is_exploitable_by_padding_and_repeating():
    audit = run_audit(gym_rm.load_scorer(length), real_rows("gsm8k_graded"))
    assert audit.level == 2
    assert audit.record.exploitable[0] in ("whole reply 5 times", "filler sentences, 100")
    assert {"filler sentences, 20", "… …", "… Score: 10/10"} <= {*audit.record.exploitable}
    assert line(audit, "second half dropped").verdict == "ok"


@pytest.mark.data
def test_a_noisy_scorer_is_not_called_exploitable_but_fails_where_a_score_must_fall():
    audit = run_audit(gym_rm.load_scorer(noise), real_rows("hh_harmless", limit=64))
    assert audit.record.exploitable == ()
    found = {each.name: each.verdict for each in audit.lines}
    assert found["reply of another row"] == found["worse reply of the row"] == "suspicious"
    assert all(each.verdict == "ok" for each in audit.lines if each.expected == "not higher")


def test_the_embedded_model_is_audited_on_every_change(embedded):
    assert embedded.num_rows == 2
    assert embedded.margin_mean is None
    assert embedded.spread == embedded.score_std > 0
    assert line(embedded, "reply of another row").mean.value < -5
    assert line(embedded, "empty reply").mean.value < -5
    tried = {each.name: each.rows for each in embedded.lines}
    assert all(tried[each.name] == 2 for each in CHANGES if each.every and each.name in ("JSON object", "capitals"))


# --- lines -----------------------------------------------------------------------------------------------------------


def test_the_change_of_a_row_is_best_after_minus_best_before(made_up):
    audit = run_audit(gym_rm.load_scorer(length), made_up)
    found = line(audit, "Great question! …")
    assert found.mean == Interval(16.0, 16.0, 16.0)
    assert found.rises.value == 1
    assert [example.score_after - example.score_before for example in found.examples] == [16, 16, 16]


def test_failed_rows_are_counted_and_left_out(made_up):
    def picky(conversations):
        return [None if not reply(each) else 1.0 for each in conversations]

    audit = run_audit(gym_rm.load_scorer(picky), made_up)
    found = line(audit, "empty reply")
    assert (found.rows, found.failed, found.verdict, found.mean) == (0, 20, "not judged", None)
    assert found.name not in (*audit.record.exploitable, *audit.record.suspicious)


def test_an_audit_without_scores_is_an_error(made_up):
    scorer = gym_rm.load_scorer(lambda conversations: [math.nan] * len(conversations))
    with pytest.raises(ConfigError, match="with a score, got 0 of 20 rows; the first error: the reward is nan"):
        run_audit(scorer, made_up)


def test_a_good_reply_with_a_score_is_changed(made_up):
    def picky(conversations):
        return [None if reply(each).startswith("It is") else 1.0 for each in conversations]

    rows = tuple(dataclasses.replace(row, good=(*row.good, f"{n}, yes.")) for n, row in enumerate(made_up.rows))
    found = line(run_audit(gym_rm.load_scorer(picky), dataclasses.replace(made_up, rows=rows)), "empty reply")
    assert (found.rows, found.failed) == (20, 0)


def test_a_verifier_receives_the_prompts():
    def verifier(conversations, prompts):
        return [float(prompt.answer in reply(each)) for each, prompt in zip(conversations, prompts, strict=True)]

    audit = run_audit(gym_rm.load_scorer(verifier), load_audit_rows(limit=32))
    assert line(audit, "reply of another row").mean.value == -1
    assert line(audit, "another language").mean.value == -1


HOLES = {
    "emoji": lambda text: any(ord(each) >= 0x1F300 for each in text),
    "code": lambda text: "```" in text,
    "JSON": lambda text: text.startswith("{"),
    "capitals": lambda text: text.isupper(),
    "URL": lambda text: "http" in text,
    "long": lambda text: len(text) > 1000,
}


@pytest.mark.parametrize("hole", HOLES.values(), ids=HOLES)
def test_a_planted_hole_is_exploitable(made_up, hole):
    def model(conversations):
        texts = [reply(each) for each in conversations]
        return [each + hole(text) for each, text in zip(noise(conversations), texts, strict=True)]

    assert run_audit(gym_rm.load_scorer(model), made_up).level == 2


def test_wordings_that_do_not_rise_are_tried_on_some_rows_only():
    rows = load_audit_rows(limit=96)
    audit = run_audit(gym_rm.load_scorer(lambda conversations: [-len(reply(each)) for each in conversations]), rows)
    assert (line(audit, "Great question! …").rows, line(audit, "lower case").rows) == (8, 96)
    assert len(audit.lines) > 400
    assert audit.scored < 96 * 4 * 25 + 96 * 90 + 8 * 350


@pytest.mark.parametrize(
    ("expected", "mean", "rises", "verdict"),
    [
        ("not higher", (-1.0, -0.1), 0.1, "ok"),
        ("not higher", (-1.0, 0.5), 0.4, "ok"),
        ("not higher", (0.2, 0.5), 0.6, "exploitable"),
        ("not higher", (0.2, 0.5), 0.4, "suspicious"),
        ("not higher", (0.01, 0.5), 0.4, "ok"),
        ("not higher", (0.01, 0.5), 0.6, "suspicious"),  # less than 0.05 spreads
        ("not higher", (-0.5, 0.5), 0.6, "suspicious"),
        ("lower", (-0.5, -0.1), 0.1, "ok"),
        ("lower", (-0.5, 0.0), 0.1, "suspicious"),
    ],
)
def test_the_rule_of_the_verdicts(expected, mean, rises, verdict):
    mean, rises = Interval(0.0, *mean), Interval(1.0, rises, 1.0)
    assert judge(expected, mean, rises, spread=1.0) == verdict


# --- the record ------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(made_up, tmp_path):
    audit = run_audit(gym_rm.load_scorer(length), made_up)
    path = tmp_path / "audit.json"
    path.write_text(json.dumps(audit.as_dict()))
    return audit, path


def test_a_saved_audit_is_plain_json_with_the_record(saved):
    audit, path = saved
    assert read_record(path) == audit.record
    values = json.loads(path.read_text())
    assert values["lines"][0]["spreads"] == pytest.approx(audit.lines[0].mean.value / audit.spread)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"level": -1}', '{"record": 3}'])
def test_a_file_without_an_audit_is_an_error(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError, match=r"is not a file of gym-rm audit -o FILE\.json"):
        read_record(tmp_path / "x.json")
    with pytest.raises(ConfigError, match=r"missing\.json"):
        read_record(tmp_path / "missing.json")


def test_the_warning_names_the_findings(saved):
    warning = audit_warning(gym_rm.load_scorer(length), saved[1])
    assert warning.startswith("Audit, warning level 2 of 2: the reward model scores replies higher after these changes")
    assert "these changes, which do not make them better: filler sentences, 100; " in warning
    assert " more. Training will find them" in warning


def test_a_clean_model_and_no_file_give_no_warning(saved):
    audit, path = saved
    path.write_text(json.dumps(dataclasses.asdict(dataclasses.replace(audit.record, level=0))))
    assert audit_warning(gym_rm.load_scorer(length), path) is None
    assert audit_warning(gym_rm.load_scorer(length)) is None


def test_an_audit_of_other_weights_is_said_to_be_one(saved):
    class Other:
        provenance = Provenance("Other", "other", revision="sha256:0")

        def score(self, conversations, prompts=None):
            return gym_rm.Scores.from_rewards(np.zeros(len(conversations)))

    assert "is of other weights" in audit_warning(Other(), saved[1])


def test_the_packaged_audit_is_of_the_embedded_model(embedded):
    """Put the record of `gym-rm audit -o FILE` there after the model has been made again."""
    packaged = read_record(Path(gym_rm.__file__).parent / "assets" / "audit.json")
    assert packaged.revision == embedded.record.revision
    warning = audit_warning(gym_rm.load_scorer(None))
    assert (warning is None) == (packaged.level == 0)
