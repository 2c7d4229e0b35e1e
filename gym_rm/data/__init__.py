"""Read prompts for episodes, preference pairs, comparisons, and conversations to score."""
