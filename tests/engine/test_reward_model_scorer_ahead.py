"""Text that is rendered while the device computes the batches before it, with a CPU that says it is a GPU."""

import itertools
import random
from dataclasses import replace

import pytest
import tiny_models

import gym_rm
from gym_rm.engine.executors.local import LocalExecutor
from gym_rm.engine.score_call import in_chunks
from gym_rm.engine.text.renderer import Renderer
from gym_rm.scores import ScoringError
from gym_rm.types import Prompt
from tests.engine.watching import WatchedExecutor, dialogue, size_of

BUDGET = 1000


def as_on_a_gpu(executor):
    """Return a class of executors that runs as this one, and says that its device is a GPU."""

    class AsOnAGpu(executor):
        def load(self, spec):
            return replace(super().load(spec), device="cuda:0", max_num_batched_tokens=BUDGET)

    return AsOnAGpu


def ahead(parts, *executor, **options):
    return gym_rm.RewardModelScorer(*parts, executor=as_on_a_gpu(LocalExecutor)(*executor), **options)


@pytest.fixture(scope="module")
def many(gsm8k_groups, hh_pairs):
    """120 conversations in any order: groups of 4 and pairs; the pairs have up to 20 messages."""
    rows = [each for group in [*gsm8k_groups[:20], *hh_pairs[5:25]] for each in group]
    random.Random(0).shuffle(rows)
    return rows


def scores_of(scorer, *arguments, **options):
    """Return the scores, also if some are missing."""
    try:
        return scorer.score(*arguments, **options)
    except ScoringError as error:
        return error.scores


def assert_same_scores(scores, expected):
    assert scores.rewards.tobytes() == expected.rewards.tobytes()
    assert scores.num_tokens.tolist() == expected.num_tokens.tolist()
    assert scores.truncated_tokens.tolist() == expected.truncated_tokens.tolist()
    assert scores.errors == expected.errors
    assert {name: column.tolist() for name, column in scores.infos.items()} == {
        name: column.tolist() for name, column in expected.infos.items()
    }
    if expected.turn_rewards is not None:
        assert [each.tolist() for each in scores.turn_rewards] == [each.tolist() for each in expected.turn_rewards]
    assert scores.workload.num_tokens == expected.workload.num_tokens


@pytest.mark.parametrize("turns", ["last", "all"])
def test_scores_have_the_bits_of_one_plan_of_all_rows(parts, many, turns):
    scorer = ahead(parts)
    scores = scorer.score(many, turns=turns)
    scorer._scheduler.ahead = False
    expected = scorer.score(many, turns=turns)
    assert_same_scores(scores, expected)
    assert scores.workload.num_batches > 10
    assert scores.workload.unique_tokens <= 1.01 * expected.workload.unique_tokens
    assert min(scores.workload.render_seconds, scores.workload.plan_seconds, scores.workload.run_seconds) > 0


def test_rows_without_a_score_keep_their_places(parts, many):
    rows = [*many[:40], [], *many[40:], dialogue("Tell me", "very long " * 900), {"role": "user"}, dialogue("q", 3)]
    options = {"max_length": 1000, "judged": "answer", "unfinished": -1.0}
    rows[7] = dialogue("q", "<think>and so on")
    rows[9] = dialogue("q", "<think>so</think>yes")
    prompts = [None] * len(rows)
    prompts[3] = Prompt(({"role": "user", "content": "q"},), "3", tools=({"type": "function"},))
    expected = scores_of(gym_rm.RewardModelScorer(*parts, **options), rows, prompts)
    assert expected.failed_rows == (40, 121, 122, 123)
    assert_same_scores(scores_of(ahead(parts, **options), rows, prompts), expected)


def test_steps_of_a_process_reward_keep_their_places(many):
    model, tokenizer = tiny_models.reward_model("qwen3"), tiny_models.tokenizer("chatml")
    options = {"kind": "process", "step_token": "<|endoftext|>", "step_separator": "\n"}
    expected = gym_rm.RewardModelScorer(model, tokenizer, **options).score(many)
    scores = ahead((model, tokenizer), **options).score(many)
    assert_same_scores(scores, expected)
    for name in ("step_rewards", "step_ends"):
        assert [each.tolist() for each in getattr(scores, name)] == [each.tolist() for each in getattr(expected, name)]


def test_text_is_rendered_after_batches_before_it_were_started(parts, many, monkeypatch):
    scorer, events = ahead(parts), []
    render, values = scorer.renderer.encode_turns, scorer.executor._model.reward_model.values
    monkeypatch.setattr(scorer.renderer, "encode_turns", lambda *a, **k: events.append("render") or render(*a, **k))
    monkeypatch.setattr(
        scorer.executor._model.reward_model, "values", lambda batch: events.append("forward") or values(batch)
    )
    scorer.score(many)
    assert events[:2] == ["render", "forward"]
    renders = [k for k, event in enumerate(events) if event == "render"]
    assert len(renders) > 5
    assert all(events[k - 1] == "forward" for k in renders[1:]), "one chunk ahead"


def test_a_small_call_is_rendered_at_once_in_its_order(parts, many, monkeypatch):
    scorer, rendered = ahead(parts), []
    render = scorer.renderer.encode_turns
    monkeypatch.setattr(
        scorer.renderer, "encode_turns", lambda rows, *a, **k: rendered.append(rows) or render(rows, *a, **k)
    )
    rows = sorted(many, key=lambda row: sum(len(each["content"]) for each in row))[:4]
    scorer.score(rows)
    assert rendered == [rows]


def test_nothing_is_rendered_ahead_where_the_device_would_wait_for_it(parts):
    assert not gym_rm.RewardModelScorer(*parts)._scheduler.ahead
    assert not ahead(parts, tree=False)._scheduler.ahead


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("where", ["text", "forward"])
def test_an_exception_ends_the_call_and_the_next_one_works(parts, many, monkeypatch, error, where):
    scorer = ahead(parts)
    expected, state = scorer.score(many).rewards, [part.training for part in parts[0].modules()]
    renderer, model, calls = scorer.renderer, scorer.executor._model.reward_model, []
    owner, name = (renderer, "encode_turns") if where == "text" else (model, "values")
    function = getattr(owner, name)

    def fail(*arguments, **options):
        calls.append(name)
        if len(calls) == 3:
            raise error("stop")
        return function(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fail)
        if where == "forward" and error is RuntimeError:  # of one batch, whose rows run again
            assert scorer.score(many).rewards.tobytes() == expected.tobytes()
        else:
            with pytest.raises(error, match="stop"):
                scorer.score(many)
            assert len(calls) == 3
    assert [part.training for part in parts[0].modules()] == state
    assert scorer.score(many).rewards.tobytes() == expected.tobytes()


def test_out_of_memory_halves_the_budget_once(parts, many):
    limit = BUDGET // 2
    many = [row for row in many if len(Renderer(parts[1]).encode([row])[0].input_ids) <= limit]
    expected = gym_rm.RewardModelScorer(*parts).score(many).rewards
    large = MemoryError("out of memory")
    executor = as_on_a_gpu(WatchedExecutor)(lambda batch, call: large if size_of(batch) > limit else None)
    scorer = gym_rm.RewardModelScorer(*parts, executor=executor)
    scores = scorer.score(many)
    assert scores.rewards.tobytes() == expected.tobytes()
    assert scorer.max_num_batched_tokens == limit
    assert any(batch.num_reads > 1 for batch in executor.batches if size_of(batch) <= limit)


# --- chunks


def test_every_row_is_in_one_chunk_beside_the_replies_to_its_prompt(many):
    chunks = in_chunks(many, [()] * len(many), 3000)
    assert sorted(itertools.chain(*chunks)) == list(range(len(many)))
    assert len(chunks) > 5
    chunk_of = {row: number for number, chunk in enumerate(chunks) for row in chunk}
    for row, conversation in enumerate(many):
        same = [other for other in range(len(many)) if many[other][:-1] == conversation[:-1]]
        assert {chunk_of[other] for other in same} == {chunk_of[row]}


def test_the_replies_to_a_prompt_are_divided_if_they_are_many():
    rows = [dialogue("q", f"{number} " * 50) for number in range(100)]
    chunks = in_chunks(rows, [()] * 100, 1000)
    assert len(chunks) > 5
    assert max(map(len, chunks)) < 30


def test_rows_that_are_no_conversations_are_in_chunks_too():
    rows = [None, {"role": "user"}, [], [None], "text", [[1]], dialogue("q", "a")]
    assert sorted(itertools.chain(*in_chunks(rows, [()] * len(rows), 10))) == list(range(len(rows)))
