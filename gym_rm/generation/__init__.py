"""Text from language models, in this process or from servers."""
