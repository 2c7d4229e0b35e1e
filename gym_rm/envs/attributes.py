"""Attributes of each environment of a vector environment that is one object: `call`, `get_attr` and `set_attr`."""

from __future__ import annotations

from typing import Any

from gym_rm.envs.settings import EnvSettings
from gym_rm.errors import ConfigError

SINGLE = {"observation_space": "single_observation_space", "action_space": "single_action_space"}
"""Names of the attributes that a single environment has under another name."""
OF_EACH = frozenset({"np_random", "np_random_seed", "render"})
"""Attributes that already have one value for each environment."""


class EachAttribute:
    """The methods `call`, `get_attr` and `set_attr` of `SyncVectorEnv`, which return one value for each environment."""

    num_envs: int

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return an attribute of each environment, or the result of a method, which is called once for all.

        Raises:
            ConfigError: the method is one that steps, resets or closes all environments.
        """
        if name in ("reset", "step", "close"):
            raise ConfigError(f"{name} must be called directly, envs.{name}(...): it applies to all environments.")
        value = getattr(self, SINGLE.get(name, name))
        if callable(value):
            value = value(*args, **kwargs)
        return tuple(value) if name in OF_EACH and value is not None else (value,) * self.num_envs

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of each environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute that exists, for all environments.

        Args:
            name: name of the attribute.
            values: the value, or a list or tuple with an equal value for each environment.

        Raises:
            ConfigError: the name is a setting, or unknown, so that the new value would have no effect; or the values
                differ.
        """
        if name in EnvSettings.model_fields or not hasattr(self, name):
            kind = "a setting" if name in EnvSettings.model_fields else "not an attribute"
            raise ConfigError(f"{name} is {kind} of {self}, so a new value has no effect; make a new environment.")
        listed = list(values) if isinstance(values, list | tuple) else [values] * self.num_envs
        if len(listed) != self.num_envs or any(value is not listed[0] and value != listed[0] for value in listed):
            raise ConfigError(
                f"{name} must have one value, equal for all {self.num_envs} environments, because they are one object; "
                f"got {values!r:.100}."
            )
        setattr(self, name, listed[0])
