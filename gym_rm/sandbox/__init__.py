"""How is a stranger's code run?"""

from gym_rm.sandbox.limits import Limits
from gym_rm.sandbox.sandbox import Sandbox
from gym_rm.sandbox.session import STATUSES, Host, Reply, SandboxError, Session
from gym_rm.sandbox.values import Remote

__all__ = ["STATUSES", "Host", "Limits", "Remote", "Reply", "Sandbox", "SandboxError", "Session"]
