"""`python -m gym_rm` is the command `gym-rm`."""

from gym_rm.cli import main

main()
