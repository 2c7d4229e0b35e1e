"""How do conversations become numbers, exactly and fast?"""
