"""Values of vLLM for token ids, without a server; run in its environment, one model after the other. Not a test.

    python offline_values.py REQUESTS VALUES

REQUESTS is a JSON file of `{name: {"folder", "ids", "seconds", "step"}}`: N lists of token ids, where the second text
of each begins (or null), and the id of the token whose logits are wanted (or null). VALUES gets, by name, N lists of
logits, or of those of each step, or the text of an error.
"""

import contextlib
import gc
import json
import sys
import traceback
from pathlib import Path

from vllm import LLM, PoolingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.models import registry

SIZES = {"max_model_len": 1024, "max_num_batched_tokens": 1024, "max_num_seqs": 16, "num_gpu_blocks_override": 64}


def values_of(folder, ids, seconds, step):
    """Return the logits of each text: `[labels]`, or `[steps, labels]`."""
    llm = LLM(folder, runner="pooling", dtype="float32", enforce_eager=True, **SIZES)
    task = "classify" if step is None else "token_classify"
    types = [None if start is None else {"compressed_token_type_ids": start} for start in seconds]
    params = [PoolingParams(task=task, use_activation=False, step_tag_id=step, extra_kwargs=each) for each in types]
    prompts = [{"prompt_token_ids": each} for each in ids]
    outputs = llm.encode(prompts, pooling_params=params, pooling_task=task, use_tqdm=False)
    return [each.outputs.data.float().tolist() for each in outputs]


if __name__ == "__main__":
    registry._run_in_subprocess = lambda function: function()  # another process for each class takes ten seconds
    gc.collect = lambda *generation: 0  # vLLM calls it eight times a model, for half a second each
    values = {}
    for name, request in json.loads(Path(sys.argv[1]).read_text()).items():
        try:
            values[name] = values_of(**request)
        except Exception as error:  # the test of this model fails with it
            traceback.print_exc()
            values[name] = repr(error)
        with contextlib.suppress(Exception):
            cleanup_dist_env_and_memory()
    Path(sys.argv[2]).write_text(json.dumps(values))
