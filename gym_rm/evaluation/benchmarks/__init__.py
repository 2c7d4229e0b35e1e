"""Published benchmarks of reward models: their rows, and the rules that make one number of them."""
