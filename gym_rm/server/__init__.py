"""HTTP server that returns rewards to other processes."""
