"""Verifiers of mathematical answers."""
