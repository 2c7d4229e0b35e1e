"""Write the table of docs/grpo.md again: the memory of the runs in configs/grpo.

python scripts/make_grpo_docs.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gym_rm.config import load_config
from gym_rm.planning.plan import Plan
from gym_rm.planning.planner import plan
from gym_rm.planning.quantities import GIB
from gym_rm.policy.grpo_settings import GRPOSettings
from gym_rm.reports.plan_tables import tightest_of

ROOT = Path(__file__).parents[1]
CONFIGS, PAGE = ROOT / "configs" / "grpo", ROOT / "docs" / "grpo.md"
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


def memory_table() -> str:
    """Return the table of the planned memory."""
    lines = ["| config | GPUs | planned peak of a GPU | of | at the peak |", "| --- " * 5 + "|"]
    for name, cluster in CLUSTERS.items():
        found = planned(name)
        pool, tightest = tightest_of(found)
        lines.append(
            f"| [`{name}`](../configs/grpo/{name}.yaml) | {cluster.get('gpus_per_node', 1)} | "
            f"{pool.peak / GIB:.1f} GiB | {pool.gpu_memory / GIB:.0f} GiB | {tightest.phase} |"
        )
    return "\n".join(lines)


def section(text: str, name: str) -> re.Match[str]:
    """Return the part of the page between the marks of a table, as group 1."""
    found = re.search(rf"<!-- {name} -->\n\n(.*?)\n\n<!-- end of {name} -->", text, re.DOTALL)
    assert found is not None, f"{PAGE} has no marks of the table {name}"
    return found


def main() -> None:
    """Write the table."""
    text = PAGE.read_text(encoding="utf-8")
    start, end = section(text, "memory").span(1)
    PAGE.write_text(text[:start] + memory_table() + text[end:], encoding="utf-8")


if __name__ == "__main__":
    main()
