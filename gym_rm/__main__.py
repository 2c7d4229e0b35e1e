"""`python -m gym_rm` is the command `gym-rm`."""

from gym_rm.cli.score import main

main()
