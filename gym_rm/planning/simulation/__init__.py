"""The parts of a simulated job; `gym_rm.planning.simulate` runs it."""
