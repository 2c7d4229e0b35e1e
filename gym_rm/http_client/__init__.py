"""Requests to other servers, for remote scorers, judges and samplers."""
