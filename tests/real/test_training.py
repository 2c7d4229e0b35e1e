"""Three steps of training SmolLM2 as a reward model: the losses of TRL, and a folder that transformers reads."""

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.real import plain
from tests.training.runs import losses, trained, trained_rewards


def test_three_steps_have_the_losses_of_trl_and_end_in_a_folder_that_transformers_reads(
    smollm2_reward_model, hh_pairs, tmp_path
):
    pytest.importorskip("trl")
    from benchmarks.reward_trainers import Job, Pair, train_trl

    conversations, tokenizer = plain.short(hh_pairs, 3, most=400), AutoTokenizer.from_pretrained(smollm2_reward_model)
    pairs = []
    for chosen, rejected in zip(conversations[::2], conversations[1::2], strict=True):
        ids = tuple(tokenizer.apply_chat_template(each, return_dict=False) for each in (chosen, rejected))
        pairs.append(Pair(chosen[:-1], chosen[-1:], rejected[-1:], ids))
    job = Job(smollm2_reward_model, pairs, batch_size=1, learning_rate=1e-5)
    rows = [{"prompt": each.prompt, "chosen": each.chosen, "rejected": each.rejected} for each in pairs]
    options = ("batch.shuffle=false", "batch.batch_size=1", "batch.precision=no", "evaluate_every=9")
    optimizer = ("optimizer.learning_rate=1e-5", "optimizer.schedule=linear", "optimizer.warmup_share=0.0")
    run = trained(tmp_path, smollm2_reward_model, rows, *options, *optimizer)
    expected = trained_rewards(run.learner, run.learner.training.examples)
    ours, folder = losses(run.folder), run.folder / "final"
    del run
    assert ours == pytest.approx(train_trl(job).losses, abs=1e-4)
    got = plain.rewards(folder, conversations)
    plain.assert_near(got, expected)
    assert np.abs(got - plain.rewards(smollm2_reward_model, conversations)).max() > 0.01
