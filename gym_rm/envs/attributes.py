"""Attributes of each environment of a vector environment that is one object: `call`, `get_attr` and `set_attr`."""

from __future__ import annotations

from typing import Any

from gymnasium.vector import VectorWrapper

from gym_rm.envs.settings import EnvSettings
from gym_rm.errors import ConfigError

SINGLE = {"observation_space": "single_observation_space", "action_space": "single_action_space"}
"""Names of the attributes that a single environment has under another name."""
OF_EACH = frozenset({"np_random", "np_random_seed", "render"})
"""Attributes that already have one value for each environment."""
OF_ALL = frozenset({"reset", "step", "close", "close_extras", "commit"})
"""Methods that change all environments."""
CONSTRUCTED = frozenset({"settings", "scorer", "state", "env", "window", "num_actions", "max_new_tokens"})
"""Attributes that the constructors set, besides those that are settings or belong to Gymnasium's interface."""


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
        """Set an attribute that a subclass or its user has added, for all environments.

        Args:
            name: name of the attribute.
            values: the value, or a list or tuple with an equal value for each environment.

        Raises:
            ConfigError: the attribute is unknown, read-only, or part of the environment (a setting, a space, the
                scorer, ...); or the values differ.
        """
        if self._is_part(name) or not hasattr(self, name):
            kind = "part" if hasattr(self, name) or name in EnvSettings.model_fields else "not an attribute"
            raise ConfigError(f"{name} is {kind} of {self}, so it cannot be set; make a new environment.")
        listed = list(values) if isinstance(values, list | tuple) else [values] * self.num_envs
        if len(listed) != self.num_envs or any(value is not listed[0] and value != listed[0] for value in listed):
            raise ConfigError(
                f"{name} must have one value, equal for all {self.num_envs} environments, because they are one object; "
                f"got {values!r:.100}."
            )
        try:
            setattr(self, name, listed[0])
        except AttributeError as error:
            raise ConfigError(f"{name} of {self} cannot be set, because it is read-only: {error}.") from error

    def _is_part(self, name: str) -> bool:
        """Return whether an attribute belongs to this package or to Gymnasium, and not to a subclass or its user."""
        if (
            name.startswith("_")
            or name in CONSTRUCTED | EnvSettings.model_fields.keys()
            or hasattr(VectorWrapper, name)
        ):
            return True
        return any(hasattr(base, name) for base in type(self).__mro__ if base.__module__.startswith("gym_rm."))
