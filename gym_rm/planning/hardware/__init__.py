"""What does the hardware reach? Tables of GPUs, clusters, and this machine's own measurements."""
