"""Attributes of each environment of a vector environment that is one object: `call`, `get_attr` and `set_attr`."""

from __future__ import annotations

from typing import Any

from gym_rm.errors import ConfigError

SINGLE = {"observation_space": "single_observation_space", "action_space": "single_action_space"}
"""Names of the attributes that a single environment has under another name."""
OF_EACH = frozenset({"np_random", "np_random_seed", "render"})
"""Attributes that already have one value for each environment."""
OF_ALL = frozenset({"reset", "step", "close", "close_extras", "commit"})
"""Methods that change all environments."""


class EachAttribute:
    """The methods `call`, `get_attr` and `set_attr` of `SyncVectorEnv`, which return one value for each environment."""

    num_envs: int

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return an attribute of each environment, or the result of a method, which is called once for all.

        Raises:
            ConfigError: the method is one that steps, resets or closes all environments.
        """
        if name in OF_ALL:
            raise ConfigError(f"{name} must be called directly, envs.{name}(...): it applies to all environments.")
        value = getattr(self, SINGLE.get(name, name))
        if callable(value):
            value = value(*args, **kwargs)
        return tuple(value) if name in OF_EACH and value is not None else (value,) * self.num_envs

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Return an attribute of each environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Raise ConfigError: the environments are one object, whose settings are fixed."""
        raise ConfigError(
            f"{name} cannot be set for the environments of {self}, which are one object; make a new environment, or "
            "set an attribute of your own subclass on it directly."
        )
