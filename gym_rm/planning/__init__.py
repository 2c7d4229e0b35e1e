"""What hardware does it take? Arithmetic on configurations: no weights, no GPU, no torch."""
