"""An OpenAI-compatible chat server around a real chat model, with the faults of `ChatApp`."""

import asyncio

import numpy as np
import torch
from generation.chat_servers import ChatApp

from gym_rm.engine.text.input_format import InputFormat
from gym_rm.engine.text.renderer import Renderer
from gym_rm.errors import ConversationError
from gym_rm.generation.models import open_chat_model
from gym_rm.generation.sampling import LocalSampler


class ModelApp(ChatApp):
    """ASGI application with `/v1/models` and `/v1/chat/completions`, whose answers are a model's.

    It reads `temperature`, `max_tokens`, `seed`, `logprobs`, `top_logprobs` and `continue_final_message`, and answers
    one request after another, so that an answer depends only on its request. `usage` counts tokens; `cached_tokens` is
    the longest start that a prompt has in common with an earlier prompt and its answer, as if a cache kept all of
    them; `cached` lists it.

    Args:
        folder: the chat model.
        name: its name on the wire.
        max_tokens: most tokens of an answer, if a request names no number.
    """

    def __init__(self, folder, *, name="model", max_tokens=64, **options):
        super().__init__(models=(name,), **options)
        self.model, self.tokenizer = open_chat_model(str(folder), option="model")
        self.renderer = Renderer(self.tokenizer, input_format=InputFormat(generation_prompt=True))
        self.sampler = LocalSampler(self.model, self.tokenizer, max_new_tokens=max_tokens)
        self.max_tokens = max_tokens
        self.seen, self.cached, self.turn = [], [], asyncio.Lock()

    async def answer_to(self, request):
        async with self.turn:
            return await asyncio.to_thread(self.generate, request)

    def generate(self, request):
        """Return the status and the body of the answer to a request."""
        messages, begin = request["messages"], ""
        if request.get("continue_final_message"):
            *messages, last = messages
            begin = last["content"]
        (prompt,) = self.renderer.encode([messages])
        if isinstance(prompt, ConversationError):
            return 400, {"error": {"message": str(prompt), "type": "BadRequestError"}}
        begun = self.tokenizer(begin, add_special_tokens=False)["input_ids"]
        prompt = np.array([*prompt.input_ids, *begun], dtype=np.int32)
        self.sampler.max_new_tokens = request.get("max_tokens", self.max_tokens)
        self.sampler.temperature = request.get("temperature", 1.0)
        (completion,) = self.sampler.sample([prompt], seeds=[request.get("seed", 0)])
        read, written = prompt.tolist(), completion.token_ids.tolist()
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": completion.text},
            "logprobs": None,
            "finish_reason": "stop" if completion.finished else "length",
        }
        if request.get("logprobs"):
            shown = written[: len(written) - completion.finished]
            choice["logprobs"] = {"content": self.log_probs(read, shown, request.get("top_logprobs", 0))}
        self.cached.append(max((common(read, each) for each in self.seen), default=0))
        usage = {
            "prompt_tokens": len(read),
            "completion_tokens": len(written),
            "total_tokens": len(read) + len(written),
            "prompt_tokens_details": {"cached_tokens": self.cached[-1]},
        }
        self.seen.append(read + written)
        return 200, {"object": "chat.completion", "model": self.models[0], "choices": [choice], "usage": usage}

    @torch.no_grad()
    def log_probs(self, read, written, top):
        """Return the log-probability of each token at temperature 1, and those of the `top` likeliest in its place."""
        ids = torch.tensor([read + written])
        scores = self.model(input_ids=ids).logits[0, len(read) - 1 : -1].float().log_softmax(-1)
        return [
            self.entry(token, row)
            | {"top_logprobs": [self.entry(each, row) for each in row.topk(top).indices.tolist()]}
            for token, row in zip(written, scores, strict=True)
        ]

    def entry(self, token, scores):
        text = self.tokenizer.decode([token])
        return {"token": text, "logprob": scores[token].item(), "bytes": list(text.encode())}


def common(left, right):
    """Return the number of equal tokens at the start of two lists."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(left), len(right)))
