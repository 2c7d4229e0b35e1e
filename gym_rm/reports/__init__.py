"""Metrics of rewards; tables and plots of training runs."""
