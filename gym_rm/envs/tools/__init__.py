"""Tools: Python functions that the policy may call in its replies."""

from gym_rm.envs.tools.tool import Tool, ToolOptions

__all__ = ["Tool", "ToolOptions"]
