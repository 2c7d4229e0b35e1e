"""How is a stranger's code run?"""

from gym_rm.sandbox.limits import SandboxLimits
from gym_rm.sandbox.sandbox import Sandbox
from gym_rm.sandbox.session import STATUSES, Host, SandboxError, SandboxReply, SandboxSession

__all__ = ["STATUSES", "Host", "Sandbox", "SandboxError", "SandboxLimits", "SandboxReply", "SandboxSession"]
