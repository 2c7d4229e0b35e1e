"""The memory that the planner says the runs in configs/grpo need.

python benchmarks/grpo_plans.py --save grpo_plans
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import results
from gym_rm.config import load_config
from gym_rm.planning.plan import Plan
from gym_rm.planning.planner import plan
from gym_rm.planning.quantities import GIB
from gym_rm.policy.grpo_settings import GRPOSettings

ROOT = Path(__file__).parents[1]
CONFIGS = ROOT / "configs" / "grpo"
CLUSTERS: dict[str, dict[str, Any]] = {
    "qwen3_0.6b_16gb": {"gpu": {"like": "rtx_4090", "memory": "16 GiB"}},
    "gsm8k_1b_1gpu": {"gpu": "h100_sxm"},
    "gsm8k_1b_8gpu": {"gpu": "h100_sxm", "gpus_per_node": 8},
}
PROMPT_TOKENS, REPLY_TOKENS, TOKENS_ON_GPU = 256, 512, 16_384  # the last two: of a run whose settings have null


def request_of(settings: GRPOSettings, cluster: dict[str, Any]) -> dict[str, Any]:
    """Return the request for a plan of this run: every process has all models on its GPU."""
    policy, optimizer, env = settings.policy, settings.optimizer, settings.env
    processes = cluster.get("gpus_per_node", 1)
    request = {
        "cluster": cluster,
        "pools": "together",
        "policy": {
            "model": policy.model,
            "dtype": policy.dtype,
            "num_gpus": processes,
            "tensor_parallel_size": 1,
            "fsdp_size": processes if optimizer.fsdp else 1,
            "gradient_checkpointing": policy.gradient_checkpointing,
            "lora": policy.lora,
            "max_num_batched_tokens": optimizer.max_num_batched_tokens or TOKENS_ON_GPU,
            "shared_prompts": optimizer.tree,
            "sleeps": False,
        },
        "generation": {"engine": "transformers", "max_num_seqs": settings.sampling.max_num_seqs or "auto"},
        "reward_models": {"quality": {"model": env.reward_model, "num_replicas": processes, "sleeps": env.sleep}},
        "workload": {
            "num_prompts": env.num_prompts,
            "group_size": env.group_size,
            "prompt_tokens": PROMPT_TOKENS,
            "reply_tokens": settings.sampling.max_new_tokens or REPLY_TOKENS,
        },
    }
    if policy.lora is None and (settings.loss.kl_coef or settings.loss.measure_kl):
        request["reference"] = {"model": policy.model, "dtype": policy.dtype, "sleeps": False}
    return request


def planned(name: str) -> Plan:
    """Return the plan of a run in configs/grpo."""
    return plan(request_of(load_config(GRPOSettings, CONFIGS / f"{name}.yaml"), CLUSTERS[name]))


def memory(name: str) -> dict[str, float]:
    """Return the peak of a GPU and what it has, in GiB."""
    (pool,) = planned(name).pools
    return {"GPUs": len(pool.gpus), "peak": pool.peak / GIB, "memory": pool.gpu_memory / GIB}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    results.add_argument(parser)
    args = parser.parse_args()
    values = {name: memory(name) for name in CLUSTERS}
    print(values)
    results.save(args.save, values, kind="computed")


if __name__ == "__main__":
    main()
