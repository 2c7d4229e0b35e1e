"""Sampled completions: their distribution, their log-probabilities, seeds, ends and limits."""

import copy
import functools
import importlib.resources
import json
from dataclasses import replace

import numpy as np
import pytest
import tiny_models
import torch
from generation import sampled_models
from generation.sampled_models import largest_error, plain_log_probs, prompts
from tiny_models import DEVICE
from transformers import AutoModelForCausalLM, AutoTokenizer

from gym_rm.errors import ConfigError, GymRMError, warn_once
from gym_rm.generation import sampling
from gym_rm.generation.decoding import GraphDecoder, LeanDecoder
from gym_rm.generation.model_decoding import ModelDecoder
from gym_rm.generation.sampling import LocalSampler, draw, end_tokens, random_numbers, trial
from gym_rm.testing import check_sampler
from tests.engine.fake_cuda import DEVICE as FAKE
from tests.engine.fake_cuda import fake_gpu, on_gpu

policy = functools.partial(sampled_models.policy, device=DEVICE)


@pytest.fixture(scope="module")
def embedded():
    assets = importlib.resources.files("gym_rm").joinpath("assets")
    model = AutoModelForCausalLM.from_pretrained(str(assets / "policy"), dtype=torch.float32).to(DEVICE).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(assets / "policy"))
    lines = (assets / "prompts.jsonl").read_text().splitlines()[:6]
    texts = [
        tokenizer.apply_chat_template(json.loads(line)["messages"], add_generation_prompt=True, return_dict=False)
        for line in lines
    ]
    return model, tokenizer, [np.array(text, dtype=np.int32) for text in texts]


def same(first, second):
    return all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(first, second, strict=True))


def chi_square(counts, probabilities, total):
    """Return the statistic in standard deviations; rare tokens are one class."""
    expected = probabilities * total
    common = expected >= 5
    seen = np.r_[counts[common], counts[~common].sum()]
    wanted = np.r_[expected[common], expected[~common].sum()]
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    freedom = len(seen) - 1
    return (((seen - wanted) ** 2 / wanted).sum() - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("vocabulary", [3, 64, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_draws_have_the_distribution_of_the_logits(vocabulary, temperature):
    logits = 2 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(0))
    uniforms = torch.as_tensor(random_numbers(range(40), 500)).flatten().to(DEVICE)
    drawn = draw(logits.to(DEVICE).expand(len(uniforms), -1), uniforms, temperature)
    tokens, log_probs = (each.cpu() for each in drawn)
    expected = (logits.double() / temperature).softmax(-1).numpy()
    assert abs(chi_square(np.bincount(tokens, minlength=vocabulary), expected, len(uniforms))) < 4
    np.testing.assert_allclose(log_probs, np.log(expected)[tokens], atol=1e-5)


def test_a_draw_is_the_first_token_whose_cumulative_probability_exceeds_the_number():
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(1)) * 3
    upper = logits.double().softmax(-1).cumsum(-1)
    for number in (0.0, 0.1, 0.5, 0.9, 1 - 2**-53):
        uniforms = torch.full((5,), number, dtype=torch.float64)
        tokens, _ = draw(logits, uniforms, 1.0)
        expected = (upper > number).int().argmax(-1) if number < 0.99 else tokens
        assert torch.equal(tokens, expected)


def test_impossible_tokens_are_never_drawn():
    logits = torch.full((1, 100), -torch.inf)
    logits[0, [17, 63]] = 0.0
    numbers = torch.linspace(0, 1, 1001, dtype=torch.float64).clamp(max=1 - 2**-53)
    tokens, log_probs = draw(logits.expand(1001, -1), numbers, 1.0)
    assert set(tokens.tolist()) == {17, 63}
    np.testing.assert_allclose(log_probs, np.log(0.5), atol=1e-6)


def test_random_numbers_belong_to_their_seed():
    together = random_numbers([5, 2**63 - 1, 0], 7)
    assert np.array_equal(random_numbers([2**63 - 1], 9)[0, :7], together[1])
    assert len(np.unique(together)) == 21
    assert (together >= 0).all()
    assert (together < 1).all()


def test_log_probs_are_those_of_the_plain_forward(embedded):
    model, tokenizer, texts = embedded
    rows = [text for text in texts for _ in range(4)]
    sampler = LocalSampler(model, tokenizer, max_new_tokens=24, temperature=0.9)
    completions = sampler.sample(rows, seeds=range(len(rows)))
    assert largest_error(model, rows, completions, 0.9) < 1e-4
    assert completions[0].log_probs.dtype == np.float32
    assert len({completion.text for completion in completions[:4]}) > 1


def test_auto_takes_lean_decoding_where_it_is_right():
    model, tokenizer = policy("llama")
    sampler = LocalSampler(model, tokenizer, max_new_tokens=3)
    sampler.sample(prompts(tokenizer, (4,)), seeds=[0])
    assert type(sampler._decoder) is LeanDecoder
    model.model.layers[0].mlp.register_forward_hook(lambda *_: None)
    sampler.sample(prompts(tokenizer, (4,)), seeds=[0])
    assert type(sampler._decoder) is ModelDecoder, "the decoder is chosen again after a change of the modules"


@pytest.mark.parametrize("architecture", ["gemma3", "gpt2", "jamba"])
def test_other_architectures_run_their_own_forward(architecture):
    model, tokenizer = policy(architecture)
    rows = [text for text in prompts(tokenizer, (4, 9)) for _ in range(2)]
    sampler = LocalSampler(model, tokenizer, max_new_tokens=6)
    assert largest_error(model, rows, sampler.sample(rows, seeds=range(4))) < 1e-4
    assert type(sampler._decoder) is ModelDecoder


def test_other_architectures_say_so_at_the_first_completion(caplog):
    model, tokenizer = policy("gpt2")
    warn_once.cache_clear()
    sampler = LocalSampler(model, tokenizer, max_new_tokens=2)
    sampler.sample(prompts(tokenizer, (4,)), seeds=[0])
    sampler.sample(prompts(tokenizer, (4,)), seeds=[0])
    (message,) = caplog.messages
    assert message.startswith("GPT2LMHeadModel samples with its own forward")
    assert "is not a decoder of transformers" in message


@pytest.mark.parametrize(
    ("wrong", "chosen"),
    [((), GraphDecoder), ((GraphDecoder,), LeanDecoder), ((GraphDecoder, LeanDecoder), ModelDecoder)],
)
def test_a_gpu_repeats_graphs_where_they_are_right(monkeypatch, wrong, chosen):
    monkeypatch.setattr(sampling, "trial", lambda model, decoder: float(type(decoder) in wrong))
    _, tokenizer = policy()
    with fake_gpu():
        sampler = LocalSampler(on_gpu(tiny_models.policy, "qwen3"), tokenizer, max_new_tokens=2)
        assert type(sampler._choose_decoder()) is chosen


def test_the_trial_replays_graphs(cpu_graphs):
    model, _ = policy()
    assert trial(model, GraphDecoder(model)) < 1e-5
    assert [graph.replays for graph in cpu_graphs] == [2, 1]


def test_the_trial_notices_a_wrong_graph(cpu_graphs, monkeypatch):
    model, _ = policy()
    step = LeanDecoder._step
    monkeypatch.setattr(GraphDecoder, "_step", lambda self: setattr(self, "_now", self._now.clone()) or step(self))
    assert trial(model, GraphDecoder(model)) > 1e-3


def test_a_decoder_that_fails_says_why(caplog, monkeypatch):
    model, _ = policy()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", None)
    assert trial(model, GraphDecoder(model)) == np.inf
    assert caplog.messages == ["GraphDecoder failed: TypeError: 'NoneType' object is not callable"]


def test_completions_by_graphs_are_those_of_single_operations(cpu_graphs):
    model, tokenizer = policy()
    rows = [text for text in prompts(tokenizer, (4, 9, 11)) for _ in range(4)]
    sampler = LocalSampler(model, tokenizer, max_new_tokens=80, max_num_seqs=8)
    expected = sampler.sample(rows, seeds=range(12))
    sampler._decoder = GraphDecoder(model)
    found = sampler.sample(rows, seeds=range(12))
    assert len(cpu_graphs) > 2
    for mine, other in zip(found, expected, strict=True):
        assert mine.token_ids.tolist() == other.token_ids.tolist()
        np.testing.assert_allclose(mine.log_probs, other.log_probs, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("architecture", ["qwen3", "mistral"])
def test_a_gpu_samples_by_graphs(architecture):
    model, tokenizer = policy(architecture)
    rows = [text for text in prompts(tokenizer, (4, 9, 11)) for _ in range(4)]
    sampler = LocalSampler(copy.deepcopy(model).cuda(), tokenizer, max_new_tokens=150)
    assert largest_error(model, rows, sampler.sample(rows, seeds=range(12))) < 1e-3
    assert type(sampler._decoder) is GraphDecoder


@pytest.mark.parametrize(("few", "moves"), [(5, 0), (4, 1)])
def test_few_rows_on_a_gpu_move_when_half_have_ended(monkeypatch, few, moves):
    """One of four ended: the number that the host reads of a fake tensor is 1."""
    monkeypatch.setattr(sampling, "FEW_ROWS", few)
    monkeypatch.setattr(LocalSampler, "_completions", lambda *args: {})
    model, tokenizer = policy()
    kept = []

    class Decoder:
        def start(self, prompts, prompt_of_row, max_new_tokens):
            return torch.zeros(len(prompts), 300, device=FAKE)

        def step(self, tokens):
            return torch.zeros(len(tokens), 300, device=FAKE)

        def keep(self, rows):
            kept.append(rows)

    sampler = LocalSampler(model, tokenizer, max_new_tokens=10)
    with fake_gpu():
        work = prompts(tokenizer, (4,)) * 4, range(4), np.full(4, 10), np.inf
        list(sampler._sample(Decoder(), *work))
    assert len(kept) == moves


@pytest.mark.parametrize("architecture", ["qwen3", "gpt2"])
@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 2}, {"copy_to": torch.device("cpu")}])
def test_the_contract_of_samplers(architecture, options):
    model, tokenizer = policy(architecture)
    sampler = LocalSampler(model, tokenizer, max_new_tokens=12, **options)
    weights = {name: each.detach() for name, each in model.named_parameters()}
    check_sampler(sampler, prompts(tokenizer, (5, 12, 12)), max_new_tokens=12, end_tokens=sampler.ends, weights=weights)


class Wrong(LocalSampler):
    """Breaks one promise: a function changes its completions."""

    change = staticmethod(lambda completions: completions)

    def sample(self, rows, *, seeds):
        return self.change(super().sample(rows, seeds=seeds))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[1:], "3 completions of 4 prompts"),
        (lambda rows: [replace(each, log_probs=each.log_probs[1:]) for each in rows], "log_probs and"),
        (lambda rows: [replace(each, log_probs=-each.log_probs) for each in rows], "above 0"),
        (lambda rows: [replace(each, finished=not each.finished) for each in rows], "has finished="),
        (
            lambda rows: [replace(each, token_ids=each.token_ids + k) for k, each in enumerate(rows)],
            "other rows|end token",
        ),
    ],
)
def test_a_broken_sampler_is_noticed(change, message):
    model, tokenizer = policy("qwen3")
    sampler = Wrong(model, tokenizer, max_new_tokens=6)
    sampler.change = change
    with pytest.raises(AssertionError, match=message):
        check_sampler(sampler, prompts(tokenizer, (5, 12)), max_new_tokens=6, end_tokens=sampler.ends)


def test_equal_prompts_are_computed_once(monkeypatch):
    model, tokenizer = policy()
    seen = []
    start = LeanDecoder.start
    sampler = LocalSampler(model, tokenizer, max_new_tokens=2)
    sampler.sample(prompts(tokenizer, (4,)), seeds=[0])
    monkeypatch.setattr(
        LeanDecoder, "start", lambda self, texts, *rest: seen.append(len(texts)) or start(self, texts, *rest)
    )
    first, second = prompts(tokenizer, (4, 6))
    sampler.sample([first, second, first.copy(), first], seeds=range(4))
    assert seen == [2]


def test_every_end_token_ends_a_completion(embedded):
    model, tokenizer, texts = copy.deepcopy(embedded[0]), *embedded[1:]
    plain = LocalSampler(model, tokenizer, max_new_tokens=24)
    completion = plain.sample(texts[:1], seeds=[3])[0]
    assert completion.finished
    assert completion.token_ids[-1] == tokenizer.eos_token_id
    assert completion.text == tokenizer.decode(completion.token_ids[:-1])
    model.generation_config.eos_token_id = [2, int(completion.token_ids[1])]
    shorter = LocalSampler(model, tokenizer, max_new_tokens=24).sample(texts[:1], seeds=[3])[0]
    assert shorter.finished
    assert shorter.token_ids.tolist() == completion.token_ids[:2].tolist()
    assert end_tokens(model, tokenizer) == sorted({2, int(completion.token_ids[1]), tokenizer.eos_token_id})


def test_completions_that_are_cut_are_not_finished(embedded):
    model, tokenizer, texts = embedded
    completion = LocalSampler(model, tokenizer, max_new_tokens=2).sample(texts[:1], seeds=[0])[0]
    assert (len(completion.token_ids), completion.finished) == (2, False)


@pytest.mark.parametrize("architecture", ["qwen3", "mistral", "gpt2"])
def test_greedy_decoding_equals_generate(architecture):
    model, tokenizer = policy(architecture)
    rows = prompts(tokenizer, (5, 9, 14))
    completions = LocalSampler(model, tokenizer, max_new_tokens=12, temperature=0).sample(rows, seeds=range(3))
    for row, completion in zip(rows, completions, strict=True):
        ids = torch.as_tensor(row.astype(np.int64), device=DEVICE)[None]
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": end_tokens(model, tokenizer)}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        assert completion.token_ids.tolist() == expected[0, len(row) :].tolist()


def test_after_the_deadline_nothing_begins():
    model, tokenizer = policy()
    (completion,) = LocalSampler(model, tokenizer, max_new_tokens=4).sample(
        prompts(tokenizer, (5,)), seeds=[0], deadline=0.0
    )
    assert (len(completion.token_ids), completion.finished, completion.text) == (0, False, "")


def test_positions_limit_completions_and_prompts():
    model, tokenizer = policy("qwen3", max_position_embeddings=16)
    sampler = LocalSampler(model, tokenizer, max_new_tokens=10)
    completions = sampler.sample(prompts(tokenizer, (4, 13)), seeds=[0, 1])
    assert [len(each.token_ids) for each in completions] == [10, 3]
    with pytest.raises(ConfigError, match="prompt 1 has 16 tokens, and the policy has 16 positions"):
        sampler.sample(prompts(tokenizer, (4, 16)), seeds=[0, 1])
    with pytest.raises(ConfigError, match="no tokens"):
        sampler.sample(prompts(tokenizer, (4, 0)), seeds=[0, 1])


def test_changes_of_the_live_model_are_seen():
    model, tokenizer = policy()
    rows = prompts(tokenizer, (5,))
    sampler = LocalSampler(model, tokenizer, max_new_tokens=4)
    sampler.sample(rows, seeds=[0])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    assert largest_error(model, rows, sampler.sample(rows, seeds=[0])) < 1e-4


def test_an_own_copy_changes_only_by_new_weights():
    model, tokenizer = policy()
    rows = prompts(tokenizer, (5,))
    sampler = LocalSampler(model, tokenizer, max_new_tokens=4, copy_to=torch.device("cpu"))
    before = sampler.sample(rows, seeds=[0])
    other, _ = policy(seed=1)
    model.load_state_dict(other.state_dict())
    assert np.array_equal(sampler.sample(rows, seeds=[0])[0].log_probs, before[0].log_probs)
    sampler.update_weights(dict(model.named_parameters()), version=1)
    assert largest_error(model, rows, sampler.sample(rows, seeds=[0])) < 1e-4
    with pytest.raises(ConfigError, match="nothing"):
        sampler.update_weights({"nothing.weight": torch.zeros(1)}, version=2)


def test_the_model_is_sampled_without_dropout_and_trains_on():
    model, tokenizer = policy("gpt2")
    rows = prompts(tokenizer, (5,))
    expected = LocalSampler(model, tokenizer, max_new_tokens=4).sample(rows, seeds=[0])
    model.train()
    assert same(LocalSampler(model, tokenizer, max_new_tokens=4).sample(rows, seeds=[0]), expected)
    assert model.training


def test_diverged_weights_are_an_error():
    model, tokenizer = policy()
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    with pytest.raises(GymRMError, match="not finite"):
        LocalSampler(model, tokenizer, max_new_tokens=2).sample(prompts(tokenizer, (3,)), seeds=[0])


def test_bfloat16_models_are_sampled():
    model, tokenizer = policy("qwen3", dtype=torch.bfloat16, initializer_range=0.1)
    rows = [text for text in prompts(tokenizer, (5, 9)) for _ in range(3)]
    sampler = LocalSampler(model, tokenizer, max_new_tokens=8)
    completions = sampler.sample(rows, seeds=range(6))
    assert type(sampler._decoder) is LeanDecoder
    assert largest_error(model, rows, completions) < 0.1


def test_adapters_are_sampled_as_they_are_now():
    peft = pytest.importorskip("peft")
    model, tokenizer = policy()
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.5))
    rows = [text for text in prompts(tokenizer, (5, 9)) for _ in range(3)]
    sampler = LocalSampler(adapted, tokenizer, max_new_tokens=6)
    sampler.sample(rows, seeds=range(6))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    completions = sampler.sample(rows, seeds=range(6))
    assert type(sampler._decoder) is LeanDecoder
    adapted.eval()
    assert largest_error(adapted, rows, completions) < 1e-4
    with adapted.disable_adapter():
        assert (
            np.abs(plain_log_probs(adapted, rows[0], completions[0].token_ids) - completions[0].log_probs).max() > 0.01
        )


def test_what_cannot_be_sampled_is_refused():
    model, tokenizer = policy("minimax")  # its cache cannot be copied by row
    with pytest.raises(ConfigError, match="MiniMaxForCausalLM cannot sample in this process"):
        LocalSampler(model, tokenizer, max_new_tokens=2).sample(prompts(tokenizer, (3,)), seeds=[0])
