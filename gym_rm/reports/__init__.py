"""What happened in a run?"""
