"""How is a stranger's code run?"""

from gym_rm.sandbox.limits import SandboxLimits
from gym_rm.sandbox.sandbox import Sandbox
from gym_rm.sandbox.session import Host, SandboxError, SandboxReply, SandboxSession

__all__ = ["Host", "Sandbox", "SandboxError", "SandboxLimits", "SandboxReply", "SandboxSession"]
