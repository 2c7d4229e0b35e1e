"""Convert conversations to token ids."""
