"""A plan for runs: settings of this package, verl and TRL.

Names are those of verl 0.9.1 and TRL 1.16 (August 2026). A plan that a library cannot follow is refused; what it does
otherwise is a note.
"""

from __future__ import annotations

from gym_rm import checks
from gym_rm.planning.exports.gym_rm import own_settings
from gym_rm.planning.exports.mapping import Flags
from gym_rm.planning.exports.trl import TRL
from gym_rm.planning.exports.verl import VERL
from gym_rm.planning.plan import Plan

__all__ = ["LIBRARIES", "Flags", "flags"]

LIBRARIES = {"verl": VERL, "trl": TRL}


def flags(plan: Plan, library: str) -> Flags:
    """Return the settings with which a library (`gym-rm`, `verl` or `trl`) follows a plan.

    Raises:
        ConfigError: the library is unknown, or it cannot do what the plan says. The message lists all reasons.
    """
    checks.one_of("library", library, ["gym-rm", *LIBRARIES])
    return own_settings(plan) if library == "gym-rm" else LIBRARIES[library].write(plan, library)
