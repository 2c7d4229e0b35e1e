"""The command `gym-rm`, one file per sub-command."""
