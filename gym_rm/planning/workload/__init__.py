"""How long are the texts of a step, and what do they share?"""
