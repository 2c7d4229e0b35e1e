"""Scores that are kept in files, so that a stopped run resumes."""
