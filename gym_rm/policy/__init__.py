"""Training of policies with GRPO."""
