"""Folder of the real conversations: `pytest --data FOLDER`, or ../shared/data beside the checkout. Not a test.

Tests skip if there is no such folder, and fail if it lacks their file: those with the mark `data` or `conftest.rows`.
"""

from pathlib import Path

FOLDER = Path(__file__).parents[2] / "shared" / "data"  # `conftest` replaces it before tests are imported
