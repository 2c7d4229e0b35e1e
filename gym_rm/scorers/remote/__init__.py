"""Scorers on other servers."""
