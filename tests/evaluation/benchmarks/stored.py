"""A scorer that returns given scores, one after the other, and rows of benchmarks without texts."""

import gym_rm


class StoredScores:
    """Return these scores in the order of the conversations."""

    def __init__(self, scores):
        self.scores = list(scores)

    def score(self, conversations, prompts=None):
        scores, self.scores = self.scores[: len(conversations)], self.scores[len(conversations) :]
        errors = [None if score is not None else "no score" for score in scores]
        rewards = [float("nan") if score is None else score for score in scores]
        return gym_rm.Scores.from_rewards(rewards, errors=errors).raise_for_errors()


class LengthOfReply:
    """Scorer whose reward is the length of the last message; replies that begin with "no" cannot be scored."""

    def score(self, conversations, prompts=None):
        texts = [conversation[-1]["content"] for conversation in conversations]
        errors = ["the reply begins with no" if text.startswith("no") else None for text in texts]
        return gym_rm.Scores.from_rewards([len(text) for text in texts], errors=errors).raise_for_errors()
