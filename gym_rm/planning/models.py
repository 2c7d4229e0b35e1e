"""Sizes of a model from its name, its folder or inline sizes."""

from gym_rm.planning.model_configs import read_config, shape_from_config
from gym_rm.planning.model_shape import Layer, ModelShape

__all__ = ["Layer", "ModelShape", "read_config", "shape_from_config"]
