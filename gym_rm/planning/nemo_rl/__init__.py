"""NVIDIA NeMo RL's placement rules: what they give, what they refuse, and the smallest change that mends it."""
