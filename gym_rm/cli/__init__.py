"""The command `gym-rm`, with one file per sub-command."""
