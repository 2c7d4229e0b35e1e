"""How does a conversation become token ids?"""
