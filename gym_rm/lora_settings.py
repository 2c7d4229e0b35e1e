"""Settings of low-rank adapters, which the agent, the trainer and the planner share."""

from __future__ import annotations

from pydantic import Field

from gym_rm.config import Config, Finite, PositiveInt


class LoRASettings(Config):
    """Low-rank adapters (arXiv 2106.09685), through peft. The head is trained in full and saved with the adapter."""

    rank: PositiveInt = 16
    """Rank of the adapters."""
    alpha: Finite = Field(default=32.0, gt=0)
    """Factor of the adapters, divided by their rank."""
    dropout: Finite = Field(default=0.0, ge=0, lt=1)
    """Dropout before the adapters."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Modules that get adapters, as in peft."""
