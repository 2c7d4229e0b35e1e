"""The same application as a deployment of Ray Serve."""

from __future__ import annotations

from typing import Any

from ray import serve

from gym_rm.scorer import ScorerLike, load_scorer
from gym_rm.server.options import ServerOptions


def deployment(
    reward_model: ScorerLike = None,
    server: ServerOptions | None = None,
    *,
    deploy: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return an application for `ray.serve.run`; each replica loads its own scorer.

    Args:
        reward_model, options: arguments of `gym_rm.load_scorer`, loaded in the replica.
        server: options of the server.
        deploy: options of `serve.deployment` (`num_replicas`, `ray_actor_options`, `max_ongoing_requests`, ...).
    """

    def build() -> Any:
        from gym_rm.server.app import make_app  # imported in the replica

        return make_app(load_scorer(reward_model, **options), server)

    settings = {"name": "gym_rm", "max_ongoing_requests": 1024, **(deploy or {})}
    return serve.deployment(**settings)(serve.ingress(build)()).bind()
