"""How is a stranger's code run?"""

from gym_rm.sandbox.limits import SandboxLimits
from gym_rm.sandbox.sandbox import Sandbox
from gym_rm.sandbox.session import Host, SandboxError, SandboxReply, SandboxSession
from gym_rm.sandbox.time_limit import TimeLimit

__all__ = ["Host", "Sandbox", "SandboxError", "SandboxLimits", "SandboxReply", "SandboxSession", "TimeLimit"]
