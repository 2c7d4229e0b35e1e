"""How is a reward model made?"""
