"""Who may call from outside?"""
