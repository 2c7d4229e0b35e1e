"""Small random policies for the tests of sampling, and log-probabilities of the plain forward to compare with."""

import numpy as np
import tiny_models
import torch
from transformers import AutoModelForCausalLM


def policy(architecture="qwen3", *, dtype=torch.float32, device="cpu", seed=0, **overrides):
    """Return a random model with clear preferences, and its tokenizer."""
    tokenizer = tiny_models.tokenizer(tiny_models.ARCHITECTURES[architecture][1])
    config = tiny_models._config(architecture, tokenizer, **({"initializer_range": 0.3} | overrides))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=tiny_models.attention(config)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.unique().numel() == 1:  # initial biases and norms, which could hide errors
                parameter += 0.1 * torch.randn_like(parameter)
    return model.to(device, dtype), tokenizer


def prompts(tokenizer, lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(5, len(tokenizer) - 5, size=length).astype(np.int32) for length in lengths]


def plain_log_probs(model, prompt, token_ids, temperature=1.0):
    """Return log-probabilities of the tokens in one forward without padding or cache."""
    ids = torch.as_tensor(np.r_[prompt, token_ids].astype(np.int64), device=model.device)[None]
    with torch.no_grad():
        scores = (model(input_ids=ids, use_cache=False).logits[0].float() / temperature).log_softmax(-1)
    return scores[len(prompt) - 1 : -1].gather(1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy()


def largest_error(model, rows, completions, temperature=1.0):
    return max(
        np.abs(plain_log_probs(model, prompt, completion.token_ids, temperature) - completion.log_probs).max()
        for prompt, completion in zip(rows, completions, strict=True)
    )
