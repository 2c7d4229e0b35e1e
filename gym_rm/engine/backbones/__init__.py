"""How are hidden states made?"""
