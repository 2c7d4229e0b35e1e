"""What scores without our forward? One file per answer."""
