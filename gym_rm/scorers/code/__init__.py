"""Verifiers of programs."""
