"""Answer requests with vLLM, in vLLM's own environment: a line of JSON for each on the standard input and output.

vllm_peer.py starts this file with `python -P vllm_worker.py OPTIONS`, the JSON of the options of `vllm.LLM`. The answer
has the seconds of the request by the clock and by the processors, with those of all processes of vLLM.
"""

import json
import os
import sys
import time
from typing import Any


def processor_seconds() -> float:
    """Return the processor time of this process and of its children."""
    import psutil

    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def classify(llm: Any, ids: list[list[int]]) -> list[float]:
    """Return the reward of each row of token ids, without a sigmoid."""
    from vllm import PoolingParams

    prompts = [{"prompt_token_ids": row} for row in ids]
    outputs = llm.classify(prompts, pooling_params=PoolingParams(use_activation=False), use_tqdm=False)
    return [output.outputs.probs[0] for output in outputs]


def generate(llm: Any, ids: list[list[int]], replies: int, new_tokens: int, ends: bool) -> int:
    """Return the number of sampled tokens; the log-probability of each is computed."""
    from vllm import SamplingParams

    options = SamplingParams(n=replies, max_tokens=new_tokens, ignore_eos=not ends, logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": row} for row in ids], options, use_tqdm=False)
    completions = [completion for output in outputs for completion in output.outputs]
    assert all(len(completion.logprobs) == len(completion.token_ids) for completion in completions)
    return sum(len(completion.token_ids) for completion in completions)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM writes its log to the standard output
    from vllm import LLM, __version__

    llm = LLM(**json.loads(sys.argv[1]))
    answers.write(json.dumps({"version": __version__}) + "\n")
    for line in sys.stdin:
        request = json.loads(line)
        if request.pop("reset"):
            llm.reset_prefix_cache()
        work = {"classify": classify, "generate": generate}[request.pop("task")]
        processor, clock = processor_seconds(), time.perf_counter()
        found = work(llm, **request)
        clock, processor = time.perf_counter() - clock, processor_seconds() - processor
        answers.write(json.dumps({"found": found, "processor": processor, "clock": clock}) + "\n")


if __name__ == "__main__":
    main()
